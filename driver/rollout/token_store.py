"""Tokens of running and finished requests on the device, written by passes and read by drafts."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ..common.uploads import uploaded
from .request import RunningRequest

# Rows of a request that runs at once: responses of the previous epoch are found if an epoch fits.
HISTORY = 4
GROUP_SLOTS = 32  # rows of one prompt that a request's drafts read


@dataclass
class Group:
    prompt: tuple[int, ...]
    slots: list[int] = field(default_factory=list)  # newest last
    version: int = 0


class TokenStore:
    """A row of tokens for each request, kept after it finished until the row is needed.

    Drafts of a request read the rows of its prompt: siblings, and responses of earlier steps.
    There are at least as many rows as requests run at once. `tokens` is int32 [slots, max_len],
    `changes` the number of changes so far.
    """

    def __init__(self, num_slots: int, max_len: int, device: torch.device) -> None:
        # Rows of a multiple of four tokens are read faster. One more length, for inert rows.
        shape = num_slots, -(-max_len // 4) * 4
        self.tokens = torch.zeros(shape, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: dict[RunningRequest, int] = {}
        # Slots of finished requests, oldest first, and the number of changes when they finished.
        self._past: OrderedDict[int, int] = OrderedDict()
        self._groups: dict[tuple[int, ...], Group] = {}
        self._group_of: dict[int, Group] = {}  # by slot
        self.changes = 0

    @property
    def spare(self) -> int:
        """The length entry of inert rows."""
        return len(self.tokens)

    @property
    def length(self) -> Tensor:
        """int32 [slots], known tokens of each row."""
        return self._lengths[:-1]

    def slot(self, request: RunningRequest) -> int:
        return self._slots[request]

    def holds(self, requests: Iterable[RunningRequest]) -> bool:
        return all(request in self._slots for request in requests)

    def take(self, requests: Iterable[RunningRequest]) -> list[RunningRequest]:
        """Gives a row, with the tokens so far, to each request without one; returns those."""
        new = [request for request in requests if request not in self._slots]
        if not new:
            return new
        for request in new:
            self._assign(request)
        lengths, device = [len(request.tokens) for request in new], self.tokens.device
        ids = np.zeros((len(new), max(lengths)), np.int32)
        for row, request in zip(ids, new, strict=True):
            row[: len(request.tokens)] = request.tokens  # what follows is never read
        slots = uploaded([self._slots[request] for request in new], device, np.int64)
        self.tokens[:, : ids.shape[1]].index_copy_(0, slots, uploaded(ids, device))
        self._lengths.index_copy_(0, slots, uploaded(lengths, device))
        return new

    def _assign(self, request: RunningRequest) -> None:
        if not self._free:
            self._drop(next(iter(self._past)))
        slot = self._slots[request] = self._free.pop()
        prompt = request.request.prompt_ids
        group = self._groups.setdefault(prompt, Group(prompt))
        group.slots.append(slot)
        self._group_of[slot] = group
        self._change(group)

    def release(self, request: RunningRequest, keep: bool) -> None:
        """Frees the row of a request that runs no more; `keep`: only when the row is needed."""
        slot = self._slots.pop(request, None)
        if slot is None:
            return  # it never ran
        self.changes += 1
        self._past[slot] = self.changes
        if not keep:
            self._drop(slot)

    def advance(self, rows: Tensor, context_len: Tensor) -> None:
        """Updates the known tokens of `rows` (int64 [B], `spare` for inert ones), on the device."""
        self._lengths.index_copy_(0, rows, context_len + 1)

    def group_slots(self, request: RunningRequest) -> list[int]:
        """Rows that drafts of a request read: its own, then those of its prompt, newest first."""
        own = self._slots[request]
        others = [slot for slot in self._group_of[own].slots if slot != own]
        return [own, *others[:-GROUP_SLOTS:-1]]

    def group_version(self, request: RunningRequest) -> int:
        """A positive number that changes whenever the rows of the request's prompt do."""
        return self._group_of[self._slots[request]].version

    def clear(self, since: int = -1) -> None:
        """Drops finished requests, or only those since `changes` had this value."""
        for slot in [slot for slot, at in self._past.items() if at > since]:
            self._drop(slot)

    def _drop(self, slot: int) -> None:
        del self._past[slot]
        group = self._group_of.pop(slot)
        group.slots.remove(slot)
        self._change(group)
        if not group.slots:
            del self._groups[group.prompt]
        self._free.append(slot)

    def _change(self, group: Group) -> None:
        self.changes += 1
        group.version = self.changes
