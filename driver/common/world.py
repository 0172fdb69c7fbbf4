"""The processes of a run: one, or as many as torchrun started, with `torch.distributed`.

Every rank has all data of a step; only the work is divided. Each rank records its phase in the
store of torchrun, so that an error message can name a lost rank.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from .errors import UserError

T = TypeVar("T")


def _from_environment(name: str, default: int) -> int:
    """A count that torchrun sets."""
    text = os.environ.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdecimal():
        raise UserError(
            f"{name}={text!r}: expected a whole number; unset it or start with torchrun"
        )
    return int(text)


def backend_of(device: str) -> str:
    """The backend of a process group for tensors of the host and of a device."""
    return "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"


class World:
    """This process and its peers; a single process unless `join` found others."""

    def __init__(
        self, rank: int = 0, size: int = 1, device: str = "cpu", timeout_s: float = 600.0
    ) -> None:
        self.rank, self.size, self.device, self.timeout_s = rank, size, device, timeout_s
        self.store: dist.Store | None = None
        self.background: dist.ProcessGroup | None = None  # for collective calls of a thread
        self._collectives = self._beats = 0
        self._phase = "load"

    @staticmethod
    def join(device: str, timeout_s: float) -> World:
        """Joins the ranks that torchrun started; without torchrun there is a single rank.

        `device` is `cpu`, or `cuda` for the card with this rank's local number; `timeout_s` is how
        long a rank waits for the others. Raises UserError if there are too few cards, or the others
        did not join.
        """
        size = _from_environment("WORLD_SIZE", 1)
        if size == 1:
            return World(device=device)
        if not {"RANK", "LOCAL_RANK"} <= os.environ.keys():  # a job manager may set the size alone
            raise UserError(f"WORLD_SIZE={size}, but no RANK and LOCAL_RANK: start with torchrun")
        rank, local = _from_environment("RANK", 0), _from_environment("LOCAL_RANK", 0)
        if rank >= size:
            raise UserError(
                f"RANK={rank}: expected less than WORLD_SIZE={size}; start with torchrun"
            )
        if device.startswith("cuda"):
            if local >= torch.cuda.device_count():
                raise UserError(
                    f"rank {rank}: needs card {local}, but there are {torch.cuda.device_count()}"
                    " cards; lower --nproc-per-node"
                )
            device = f"cuda:{local}"
            torch.cuda.set_device(local)
        world = World(rank, size, device, timeout_s)
        wait = datetime.timedelta(seconds=timeout_s)
        try:
            store, *_ = next(dist.rendezvous("env://", rank, size, timeout=wait))
            # The store outlives a restart; the entries of earlier attempts must not be read.
            attempt = dist.PrefixStore(f"attempt/{World.restarts()}", store)
            dist.init_process_group(
                backend_of(device), timeout=wait, store=attempt, rank=rank, world_size=size
            )
            world.background = dist.new_group(timeout=wait, backend="gloo")
        except (RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            if "EADDRINUSE" in str(error) or "address already in use" in str(error):
                port = os.environ.get("MASTER_PORT")
                raise UserError(
                    f"MASTER_PORT={port}: another program uses this port ({reason}); choose another"
                ) from error
            raise UserError(
                f"rank {rank} of {size}: the other ranks did not join ({reason})"
            ) from error
        world.store = dist.PrefixStore("tlt", attempt)
        world.store.set_timeout(2 * wait)  # collectives time out first and name the lost rank
        world.enter("load")
        return world

    @staticmethod
    def is_first() -> bool:
        """Whether this process reports for the run; valid before `join`."""
        alone = _from_environment("WORLD_SIZE", 1) == 1  # then RANK is ignored
        return alone or _from_environment("RANK", 0) == 0

    @staticmethod
    def local_size() -> int:
        """Ranks on this machine, if torchrun started them; else 1."""
        return _from_environment("LOCAL_WORLD_SIZE", 1)

    @staticmethod
    def restarts() -> int:
        """How often torchrun has restarted the ranks after one was lost."""
        return _from_environment("TORCHELASTIC_RESTART_COUNT", 0)

    def leave(self) -> None:
        """Leaves the process group; not called after an error, when other ranks may be lost."""
        if dist.is_initialized():
            dist.destroy_process_group()

    # ---- progress of the ranks ------------------------------------------------------------------

    def enter(self, phase: str) -> None:
        """Records the phase of this rank, for error messages."""
        self._phase, self._beats = phase, 0
        self._report()

    def beat(self) -> None:
        """Records progress of this rank within a phase in which others wait for it."""
        self._beats += 1
        self._report()

    def _report(self) -> None:
        if self.store is not None:
            self.store.set(f"at/{self.rank}", f"{self._collectives} {self._beats} {self._phase}")

    @contextlib.contextmanager
    def collective(self) -> Iterator[None]:
        """A collective call of all ranks; a UserError names the ranks that did not reach it."""
        self._collectives += 1
        self.enter(self._phase)
        with self.waiting():
            yield

    @contextlib.contextmanager
    def waiting(self, ranks: Sequence[int] = ()) -> Iterator[None]:
        """A wait for `ranks`; a UserError names those that are lost or late.

        () = those that have not reached the last collective call.
        """
        phase = self._phase
        try:
            yield
        except (torch.OutOfMemoryError, torch.AcceleratorError):  # this rank's own
            raise
        except (RuntimeError, ValueError) as error:
            who = ", ".join(self._lost(ranks)) or "a rank that had reached the call"
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise UserError(
                f"{who} was lost or did not answer in run.timeout_s={self.timeout_s:g}, rank"
                f" {self.rank} waited for it after {phase} ({reason}): the run stops here;"
                " run.resume=true continues from its last checkpoint"
            ) from error

    def where(self) -> str:
        """The last phase of each rank, for the message of a run that a signal stopped."""
        places = ", ".join(place for *_, place in self._places())
        return f"stopped: {places}; torchrun reports which rank failed, if one did"

    def _lost(self, ranks: Sequence[int]) -> list[str]:
        """Phases of the ranks to name in an error.

        These are the other `ranks` of a call, or, if none are given, those that have not reached
        the last collective call, or else those with the least progress.
        """
        places = self._places()
        if ranks:
            return [places[rank][2] for rank in ranks if rank != self.rank]
        late = [place for calls, _, place in places if calls < self._collectives]
        working = [(beats, place) for _, beats, place in places if beats]
        least = min(working, default=(0, ""))[0]
        return late or [place for beats, place in working if beats == least]

    def _places(self) -> list[tuple[int, int, str]]:
        """(collective calls, beats, rank and phase) of each rank."""
        places = []
        for rank in range(self.size):
            key, found = f"at/{rank}", "0 0 load"
            with contextlib.suppress(RuntimeError):  # the store may be lost too
                if self.store is not None and self.store.check([key]):
                    found = self.store.get(key).decode()
            calls, beats, phase = found.split(" ", 2)
            places.append((int(calls), int(beats), f"rank {rank} (in {phase})"))
        return places

    # ---- exchange -------------------------------------------------------------------------------

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in the order of the ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self.collective():
            dist.all_gather_object(values, value)  # through the host, whatever the device
        return values

    def share(self, value: T) -> T:
        """The value of rank 0."""
        if self.size == 1:
            return value
        box = [value]
        with self.collective():
            dist.broadcast_object_list(box)
        return box[0]

    def add_up(self, values: Tensor) -> Tensor:
        """The sum of every rank's values (float64 on the CPU), in the order of the ranks."""
        return torch.stack(self.gather(values)).sum(0)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """A collective call in which cards exchange data."""
        with self.collective():
            # On the host: NCCL ends processes whose cards wait for a lost rank without naming it.
            dist.all_reduce(torch.zeros(1))
            yield


def share_state(
    state: Any, source: int, device: str, group: dist.ProcessGroup | None = None
) -> Any:
    """Broadcasts a state of rank `source`, device to device, one message for each dtype.

    Pickled tensors of a card would be restored on the card of the source.

    Args:
        state: tensors, numbers, strings, None, lists and dicts of these; ignored on other ranks.
        source: global rank.
        device: of the returned tensors on this rank.
        group: None = all ranks.
    """
    box = [None]
    if dist.get_rank() == source:
        state = tree_map_only(Tensor, lambda x: x.detach().to(device).contiguous(), state)
        box = [tree_map_only(Tensor, lambda x: x.to("meta"), state)]
    dist.broadcast_object_list(box, src=source, group=group)
    if dist.get_rank() != source:
        state = tree_map_only(Tensor, lambda x: torch.empty_like(x, device=device), box[0])
    tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        same = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.reshape(-1) for tensor in same])
        dist.broadcast(flat, source, group=group)
        if dist.get_rank() != source:
            for tensor, part in zip(same, flat.split([t.numel() for t in same]), strict=True):
                tensor.copy_(part.view_as(tensor))
    return state


def split_by_length(expected: Sequence[float], parts: int) -> list[list[int]]:
    """Rising indices of parts of equal size (up to one) and nearly equal total length.

    Items are assigned longest first, each to the shortest part that has room. Sizes are balanced
    before lengths, because the batch size determines a rank's memory.

    Example:
        >>> split_by_length([9, 1, 5, 4, 2], 2)
        [[0, 1, 4], [2, 3]]
    """
    count, extra = divmod(len(expected), parts)
    room = [count + (part < extra) for part in range(parts)]
    load = [0.0] * parts
    chosen: list[list[int]] = [[] for _ in range(parts)]
    for item in sorted(range(len(expected)), key=lambda i: (-expected[i], i)):
        free = [part for part in range(parts) if len(chosen[part]) < room[part]]
        part = min(free, key=lambda p: (load[p], p))
        chosen[part].append(item)
        load[part] += expected[item]
    return [sorted(part) for part in chosen]
