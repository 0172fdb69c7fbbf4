"""Copies of a state in host memory, for a thread that writes them while the state changes."""

from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .memory import pin_with_threads

PLAIN = {int, float, str}

Place = tuple[str | int, ...]  # path of a tensor in a state: keys and indices, outermost first


class HostCopies:
    """Host buffers for the tensors of a state, reused by each copy; pinned for tensors of a GPU.

    Tensors that share memory, such as tied weights, are copied once.
    """

    def __init__(self) -> None:
        self.room: dict[Place, Tensor] = {}
        if torch.cuda.is_available():
            pin_with_threads()

    def prepare(self, state: Any) -> None:
        """Allocates the buffers that a state lacks, which is slow for pinned memory."""
        self._each(state, self._room, {})

    def take(self, state: Any) -> tuple[Any, Callable[[], None]]:
        """A copy of a state, valid until the next call, and a function that waits for it."""

        def copied(path: Place, value: Tensor) -> Tensor:
            return self._room(path, value).copy_(value.detach(), non_blocking=True)

        copy = self._each(state, copied, {})
        if not torch.cuda.is_available():
            return copy, lambda: None
        event = torch.cuda.Event()
        event.record()
        return copy, event.synchronize

    def _each(
        self,
        value: Any,
        change: Callable[[Place, Tensor], Tensor],
        seen: dict[tuple[Any, ...], Tensor],
        path: Place = (),
    ) -> Any:
        """The state with changed tensors; large dicts of plain values are copied as a whole."""
        if isinstance(value, Tensor):
            place = (value.data_ptr(), value.dtype, value.shape, value.stride())
            if place not in seen or not value.numel():
                seen[place] = change(path, value)
            return seen[place]
        if isinstance(value, Mapping):
            if PLAIN.issuperset(map(type, value.values())):
                return dict(value)
            return {k: self._each(item, change, seen, (*path, k)) for k, item in value.items()}
        if isinstance(value, list):
            return [self._each(item, change, seen, (*path, i)) for i, item in enumerate(value)]
        return value

    def _room(self, path: Place, value: Tensor) -> Tensor:
        room = self.room.get(path)
        if room is None or room.shape != value.shape or room.dtype != value.dtype:
            room = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
            self.room[path] = room
        return room


def held_bytes(*things: Any) -> int:
    """Bytes of the tensors that objects hold, each storage once."""
    storages: dict[int, int] = {}
    todo = list(things)
    while todo:
        thing = todo.pop()
        if isinstance(thing, Tensor):
            storage = thing.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
        elif isinstance(thing, nn.Module):
            todo += [*thing.parameters(), *thing.buffers()]
        elif isinstance(thing, Mapping):
            if not PLAIN.issuperset(map(type, thing.values())):
                todo += thing.values()
        elif isinstance(thing, list | tuple):
            todo += thing
        elif is_dataclass(thing) and not isinstance(thing, type):
            todo += vars(thing).values()
    return sum(storages.values())
