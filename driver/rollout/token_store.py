"""Tokens of running and finished requests on the device, where passes write and drafts look."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .scheduler import Sequence

GROUP_SLOTS = 32  # sequences of one prompt that a request looks at

Prompt = tuple[int, ...]


@dataclass
class Group:
    """Rows of one prompt."""

    prompt: Prompt
    slots: list[int] = field(default_factory=list)  # newest last
    stamp: int = 0


class TokenStore:
    """A row of tokens for each request, kept after it finished until the room is needed.

    Requests of one prompt see each other's rows: siblings, and responses of earlier steps.

    Args:
        num_slots: rows; at least as many as requests run at once.
        max_len: most tokens of a request, prompt included.
        device: where the passes run.
    """

    def __init__(self, num_slots: int, max_len: int, device: torch.device) -> None:
        # Rows of a multiple of four tokens are read faster. One length more, for inert rows.
        shape = num_slots, -(-max_len // 4) * 4
        self.tokens = torch.zeros(shape, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)
        self._free = list(range(num_slots - 1, -1, -1))
        # Slots of finished requests, oldest first, and how many changes there had been.
        self._past: OrderedDict[int, int] = OrderedDict()
        self._groups: dict[Prompt, Group] = {}
        self._group_of: list[Group | None] = [None] * num_slots  # by slot
        self.changes = 0  # so far

    @property
    def spare(self) -> int:
        """The length entry of inert rows."""
        return len(self.tokens)

    @property
    def length(self) -> Tensor:
        """int32 [slots], known tokens of each row."""
        return self._lengths[:-1]

    def take(self, sequences: list[Sequence]) -> None:
        """Gives requests rows, with the tokens they have."""
        if not sequences:
            return
        for sequence in sequences:
            self._seat(sequence)
        lengths = [len(sequence.tokens) for sequence in sequences]
        ids = torch.zeros(len(sequences), max(lengths), dtype=torch.int32)
        for row, sequence in zip(ids.numpy(), sequences, strict=True):
            row[: len(sequence.tokens)] = sequence.tokens  # what follows is nobody's
        slots = torch.tensor([s.slot for s in sequences], device=self.tokens.device)
        self.tokens[:, : ids.shape[1]].index_copy_(0, slots, ids.to(self.tokens.device))
        known = torch.tensor(lengths, dtype=torch.int32, device=self.tokens.device)
        self._lengths.index_copy_(0, slots, known)

    def _seat(self, sequence: Sequence) -> None:
        if not self._free:
            self._drop(next(iter(self._past)))
        sequence.slot = self._free.pop()
        prompt = sequence.request.prompt_ids
        group = self._groups.setdefault(prompt, Group(prompt))
        group.slots.append(sequence.slot)
        self._group_of[sequence.slot] = group
        self._touch(group)

    def give_back(self, sequence: Sequence, keep: bool) -> None:
        """A request runs no more; `keep` its row for those of its prompt that come later."""
        if sequence.slot < 0:
            return  # it never ran
        self.changes += 1
        self._past[sequence.slot] = self.changes
        if not keep:
            self._drop(sequence.slot)
        sequence.slot = -1

    def advance(self, rows: Tensor, context_len: Tensor) -> None:
        """Notes the tokens known by now, on the device.

        Args:
            rows: int64 [B], slots; `spare` for inert rows.
            context_len: int32 [B].
        """
        self._lengths.index_copy_(0, rows, context_len + 1)

    def group_of(self, sequence: Sequence) -> list[int]:
        """Rows that a request looks at: its own, then those of its prompt, the newest first."""
        others = [s for s in self._group_of[sequence.slot].slots if s != sequence.slot]
        return [sequence.slot, *others[:-GROUP_SLOTS:-1]]

    def stamp(self, sequence: Sequence) -> int:
        """A number, not 0, that changes whenever the rows of the request's prompt do."""
        return self._group_of[sequence.slot].stamp

    def clear(self, since: int = -1) -> None:
        """Forgets the requests that finished, or only those since `changes` was this."""
        for slot in [slot for slot, at in self._past.items() if at > since]:
            self._drop(slot)

    def _drop(self, slot: int) -> None:
        del self._past[slot]
        group, self._group_of[slot] = self._group_of[slot], None
        group.slots.remove(slot)
        self._touch(group)
        if not group.slots:
            del self._groups[group.prompt]
        self._free.append(slot)

    def _touch(self, group: Group) -> None:
        self.changes += 1
        group.stamp = self.changes
