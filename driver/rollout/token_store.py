"""Tokens of running and finished requests on the device, where passes write and drafts look."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

from driver.rollout.scheduler import Sequence

GROUP_SLOTS = 32  # sequences of one prompt that a request looks at

Prompt = tuple[int, ...]


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
        self._past: OrderedDict[int, Prompt] = OrderedDict()  # slots of finished ones, oldest first
        self._groups: dict[Prompt, list[int]] = {}  # newest last
        self._stamps: dict[Prompt, int] = {}
        self._changes = 0

    @property
    def spare(self) -> int:
        """The length entry of inert rows."""
        return len(self.tokens)

    @property
    def length(self) -> Tensor:
        """int32 [slots], known tokens of each row."""
        return self._lengths[:-1]

    def take(self, sequence: Sequence) -> None:
        """Gives a request a row, with the tokens it has."""
        if not self._free:
            self._drop(next(iter(self._past)))
        sequence.slot = self._free.pop()
        self._groups.setdefault(sequence.request.prompt_ids, []).append(sequence.slot)
        self._touch(sequence.request.prompt_ids)
        ids = torch.tensor(sequence.tokens, dtype=torch.int32)
        self.tokens[sequence.slot, : len(ids)].copy_(ids)
        self._lengths[sequence.slot] = len(ids)

    def give_back(self, sequence: Sequence, keep: bool) -> None:
        """A request runs no more; `keep` its row for those of its prompt that come later."""
        if sequence.slot < 0:
            return  # it never ran
        self._past[sequence.slot] = sequence.request.prompt_ids
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
        others = [s for s in self._groups[sequence.request.prompt_ids] if s != sequence.slot]
        return [sequence.slot, *others[:-GROUP_SLOTS:-1]]

    def stamp(self, sequence: Sequence) -> int:
        """A number, not 0, that changes whenever the rows of the request's prompt do."""
        return self._stamps[sequence.request.prompt_ids]

    def clear(self) -> None:
        """Forgets the finished requests."""
        for slot in list(self._past):
            self._drop(slot)

    def _drop(self, slot: int) -> None:
        prompt = self._past.pop(slot)
        self._groups[prompt].remove(slot)
        self._touch(prompt)
        if not self._groups[prompt]:
            del self._groups[prompt], self._stamps[prompt]
        self._free.append(slot)

    def _touch(self, prompt: Prompt) -> None:
        self._changes += 1
        self._stamps[prompt] = self._changes
