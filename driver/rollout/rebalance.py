"""Moves the requests of nearly idle ranks to one rank, so that the others are free to train.

The first rank with few requests left writes a wish. The first other rank with room that sees the
wish becomes the receiver, the only one of the rollout, and ranks with few requests left hand them
to it. Each sender has a slot in the process group's store that is written once: by the sender with
the number of its requests, or by the receiver with 0 when it accepts no more. So no rank waits, and
a request belongs to one rank at any time. KV is not moved: the receiver recomputes it from the
tokens, which gives the same bits.
"""

import pickle
import time
from dataclasses import replace
from typing import Any

from ..common.world import World
from .request import RunningRequest
from .scheduler import Scheduler
from .source import RequestSource

LOOK_S = 0.1  # between two reads of the store
CLOSED = "0"  # number of requests in a slot that the receiver closed


class Rebalancer(RequestSource):
    """One rank's part in merging the tails of a rollout; it hands over `most` requests at most."""

    def __init__(self, world: World, most: int, max_batch: int, rollout: str) -> None:
        assert world.store is not None
        self.world, self.store = world, world.store
        self.most, self.max_batch, self.rollout = most, max_batch, rollout
        self._me = str(world.rank)
        self._over = False  # nothing more to hand over or to take
        self._receives = False
        # Ranks whose slot the receiver has not read yet.
        self._senders = [rank for rank in range(world.size) if rank != world.rank]
        self._next_look = 0.0

    def due(self, scheduler: Scheduler) -> bool:
        """Whether `exchange` may have something to do; reads nothing from the store."""
        if self._over or time.monotonic() < self._next_look:
            return False
        return self._receives or not scheduler.waiting

    def exchange(self, scheduler: Scheduler) -> list[RunningRequest]:
        """Adopts requests from other ranks, or hands over those of this rank, which it returns."""
        if not scheduler.active:
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
                for rank in list(self._senders):
                    if self.store.check([self._key(f"from/{rank}")]):
                        self._take_from(rank, scheduler)
                if not self._has_room(scheduler.active):
                    self._close(scheduler)
        return []

    def _receiver(self, running: int) -> str:
        """The receiving rank, or ""; this rank becomes it if another one has a wish."""
        receiver = self._write_once("receiver", "")
        if receiver:
            return receiver
        wish = self._write_once("wish", self._me if running <= self.most else "")
        wanted = wish not in ("", self._me)
        return self._write_once("receiver", self._me) if wanted and self._has_room(running) else ""

    def _has_room(self, requests: int) -> bool:
        return requests + self.most <= self.max_batch

    # ---- sender and receiver --------------------------------------------------------------------

    def _offer(self, scheduler: Scheduler) -> list[RunningRequest]:
        self._over = True
        for i, state in enumerate(scheduler.running):
            moved = replace(state, pages=[], context_len=0, draft_len=0)
            parcel: Any = pickle.dumps(moved)  # torch's annotation lacks bytes
            self.store.set(_parcel(self.world.rank, i), parcel)
        written = self._write_once(f"from/{self._me}", str(len(scheduler.running)))
        return [] if written == CLOSED else scheduler.hand_over()

    def _take_from(self, rank: int, scheduler: Scheduler) -> None:
        """Adopts what a rank handed over; closes its slot if it handed nothing over yet."""
        self._senders.remove(rank)
        count = int(self._write_once(f"from/{rank}", CLOSED))
        parcels = [self.store.get(_parcel(rank, i)) for i in range(count)]
        scheduler.adopt(pickle.loads(parcel) for parcel in parcels)  # written by our own ranks

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
        """Writes a key that is empty; returns the value it has afterwards."""
        return self.store.compare_set(self._key(name), "", value).decode()

    def _key(self, name: str) -> str:
        return f"rebalance/{self.rollout}/{name}"


def _parcel(rank: int, number: int) -> str:
    """Key of a request that is handed over; later rollouts overwrite it."""
    return f"rebalance/{rank}/{number}"
