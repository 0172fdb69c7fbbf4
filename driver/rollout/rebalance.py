"""Merges the requests of ranks that are nearly idle onto one, so that the others are free to train.

The first rank with few requests left wishes to hand them over; the first other one with room that
sees the wish is the receiver, the only one of the rollout, and whoever has few left from then on
hands them to it. Each sender has a slot in the process group's store that is written once: by the
sender with the number of its requests, or by the receiver with 0 when it takes no more. So nobody
waits, and a request has one owner at any time. KV is not moved: the receiver computes it again from
the tokens, which gives the same bits.
"""

from __future__ import annotations

import pickle
import time
from dataclasses import replace

from ..common.world import World
from .scheduler import Scheduler, Sequence

LOOK_S = 0.1  # between two looks at the store
NO_MORE = "0"  # requests in a slot that the receiver closed


class Rebalancer:
    """One rank's part in merging the tails of each rollout.

    Args:
        world: the ranks, more than one.
        most: requests that a rank hands over at most.
        max_batch: requests of a batch.

    Example:
        >>> rebalancer.start(step, 0)         # every rank, before its rollout
        >>> rebalancer.exchange(scheduler)    # and between its passes, up to the end
        []
    """

    def __init__(self, world: World, most: int, max_batch: int) -> None:
        assert world.store is not None
        self.world, self.store = world, world.store
        self.most, self.max_batch = most, max_batch
        self._me = str(world.rank)
        self._round = ""
        self._over = True  # nothing more to hand over or to take
        self._receives = False
        self._senders: list[int] = []  # whose slot the receiver has not seen written
        self._next_look = 0.0

    def start(self, step: int, refill: int) -> None:
        """A rollout begins."""
        self._round = f"rebalance/{step}.{refill}"
        self._over = self._receives = False
        self._senders = [rank for rank in range(self.world.size) if rank != self.world.rank]
        self._next_look = 0.0

    def due(self, scheduler: Scheduler) -> bool:
        """Whether `exchange` may have something to do while requests run; asks nobody."""
        if self._over or time.monotonic() < self._next_look:
            return False
        return self._receives or not scheduler.waiting

    def exchange(self, scheduler: Scheduler) -> list[Sequence]:
        """Takes in what others handed over, or hands over what this rank has left.

        Call between passes, and once more when no request is left: a receiver may get the last
        ones then.

        Returns:
            The sequences handed over, which run no more.
        """
        if not scheduler.unfinished:
            self._leave(scheduler)
        elif self.due(scheduler):
            self._next_look = time.monotonic() + LOOK_S
            if not self._receives:
                receiver = self._receiver(len(scheduler.running))
                if receiver == self._me:
                    self._receives = True
                elif receiver and len(scheduler.running) <= self.most:
                    return self._offer(scheduler)
            if self._receives:
                self._take_in(scheduler)
        return []

    def _receiver(self, running: int) -> str:
        """The rank that receives, or else nothing; this one where another wishes it and it can."""
        receiver = self._write_once("receiver", "")
        if receiver:
            return receiver
        wish = self._write_once("wish", self._me if running <= self.most else "")
        wanted = wish not in ("", self._me)
        return self._write_once("receiver", self._me) if wanted and self._has_room(running) else ""

    def _has_room(self, requests: int) -> bool:
        return requests + self.most <= self.max_batch

    # ---- the two parts --------------------------------------------------------------------------

    def _offer(self, scheduler: Scheduler) -> list[Sequence]:
        self._over = True
        for i, s in enumerate(scheduler.running):
            moved = replace(s, pages=[], context_len=0, draft_len=0, slot=-1)
            self.store.set(_parcel(self.world.rank, i), pickle.dumps(moved))
        written = self._write_once(f"from/{self._me}", str(len(scheduler.running)))
        return [] if written == NO_MORE else scheduler.hand_over()

    def _take_in(self, scheduler: Scheduler) -> None:
        for rank in list(self._senders):
            if self.store.check([self._key(f"from/{rank}")]):
                self._take_from(rank, scheduler)
        if not self._has_room(len(scheduler.running) + len(scheduler.waiting)):
            self._close(scheduler)

    def _take_from(self, rank: int, scheduler: Scheduler) -> None:
        """What a rank handed over; if nothing yet, it shall not."""
        self._senders.remove(rank)
        count = int(self._write_once(f"from/{rank}", NO_MORE))
        parcels = [self.store.get(_parcel(rank, i)) for i in range(count)]
        scheduler.adopt(pickle.loads(parcel) for parcel in parcels)  # a rank's own

    def _close(self, scheduler: Scheduler) -> None:
        self._over = True
        for rank in list(self._senders):
            self._take_from(rank, scheduler)

    def _leave(self, scheduler: Scheduler) -> None:
        if self._over:
            return
        self._over = True
        if self._receives:
            self._close(scheduler)
        else:
            self.store.compare_set(self._key("wish"), self._me, "")  # if it was this rank's

    # ---- the store ------------------------------------------------------------------------------

    def _write_once(self, name: str, value: str) -> str:
        """Writes a key where nothing is written yet; what is there by then."""
        return self.store.compare_set(self._key(name), "", value).decode()

    def _key(self, name: str) -> str:
        return f"{self._round}/{name}"


def _parcel(rank: int, number: int) -> str:
    """Key of a sequence on its way; written over in a later rollout."""
    return f"rebalance/{rank}/{number}"
