"""Turns ranks that have finished their rollout into trainers of the drafter.

The first rank to finish leads. It forms a group of the ranks that are idle, hands them its drafter,
and they train together, each on the features that it recorded, gradients added up. Before every
micro-step the leader looks whether a rank more is idle (then the group is formed anew) or the last
one has finished (then it ends), and says so with the gradients of that step, so that nobody waits
longer than one. What was trained goes to every rank under one version number.
"""

from __future__ import annotations

import datetime
import json
import time

import torch
import torch.distributed as dist

from ..common.world import World, share_state, sum_over
from .trainer import SpotTrainer

POLL_S = 0.002
KEPT_GROUPS = 16  # for another step: a card's memory holds their channels
WAITS, TRAINS = "the wait for the last rank", "drafter training"  # phases
BUSY, IDLE, TRAINING, UPDATE = "busy", "idle", "training", "update"


class Coordinator:
    """One rank's part in the bubble of each step.

    Args:
        world: the ranks, more than one.
        spot: this rank's trainer; trains only when told to.
        min_ranks: idle ranks that make a group.

    Example:
        >>> coordinator.start(step, 0)       # every rank, before its rollout
        >>> coordinator.finished()           # and behind it: returns when all are
    """

    def __init__(self, world: World, spot: SpotTrainer, min_ranks: int = 1) -> None:
        assert world.store is not None
        self.world, self.spot, self.min_ranks = world, spot, min_ranks
        self.changes: list[tuple[float, str]] = []  # (wall clock, state from then on), of the step
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._round, self._idle_since = "", 0.0
        self._handed_out = 0  # micro-steps that every rank has the result of

    def start(self, step: int, refill: int) -> None:
        """A rollout begins."""
        self._round = f"{step}.{refill}"
        self._idle_since = 0.0
        if refill == 0:
            self.changes = []
        self._drop_groups()
        self._become(BUSY)

    @property
    def trained_s(self) -> float:
        """Seconds that this rank trained in the step."""
        spans = zip(self.changes, self.changes[1:], strict=False)
        return sum(end - begin for (begin, state), (end, _) in spans if state == TRAINING)

    def finished(self) -> None:
        """This rank's rollout is over: trains with the others until everybody's is.

        Raises:
            UserError: a rank is lost.
        """
        self._become(IDLE)
        self.world.enter(WAITS)
        self._idle_since = time.monotonic()
        store = self.world.store
        first = store.add(self._key("finished"), 1) == 1
        store.set(self._key(f"idle/{self.world.rank}"), "1")
        with self.world.meeting():
            leader = self._lead() if first else self._follow()
        self._become(IDLE)
        if self.world.share(self.spot.steps, leader) != self._handed_out:
            if self.world.rank == leader:
                self.spot.renew()  # one vocabulary and one version for all
            with self.world.meeting():
                self._hand_out(leader, None)
        self._handed_out = self.spot.steps
        self._become(UPDATE)

    # ---- the two parts --------------------------------------------------------------------------

    def _lead(self) -> int:
        rank, store = self.world.rank, self.world.store
        store.set(self._key("leader"), str(rank))
        group = 0
        while not self._all_finished():
            ranks = [rank, *(r for r in self._idle() if r != rank)]
            few = len(ranks) < self.min_ranks or not self.spot.buffer.num_tokens
            if few or self.spot.error is not None:
                time.sleep(POLL_S)
                continue
            self.spot.first_vocabulary()
            store.set(self._key(f"group/{group}"), json.dumps(ranks))
            self._train(ranks)
            group += 1
        store.set(self._key(f"group/{group}"), "[]")
        return rank

    def _follow(self) -> int:
        store, group = self.world.store, 0
        while True:
            key = self._key(f"group/{group}")
            store.wait([key])  # up to the time-out of the process group
            ranks = json.loads(store.get(key))
            if not ranks:
                return int(store.get(self._key("leader")))
            if self.world.rank in ranks:
                self._train(ranks)
            else:
                self._group(ranks)
            group += 1

    def _train(self, ranks: list[int]) -> None:
        """Micro-steps of a group until its leader, the first of them, ends it."""
        self._become(TRAINING)
        self.world.enter(TRAINS)
        self.world.beat()
        group = self._group(ranks)
        if len(ranks) > 1:
            self._hand_out(ranks[0], group)
        leads = self.world.rank == ranks[0]
        while True:
            stop = leads and (self._all_finished() or len(self._idle()) > len(ranks))
            if self._micro_step(stop, group):
                break
        self._become(IDLE)
        self.world.enter(WAITS)

    def _micro_step(self, stop: bool, group: dist.ProcessGroup | None) -> bool:
        """One step of the group, if any; whether the group ends."""
        if group is None:  # as a single rank trains: captured, and a failure is a warning
            self.world.beat()
            return stop or not self.spot.attempt()
        told = torch.zeros(3, dtype=torch.int64)  # ranks with data, tokens, leader's stop
        reduced = False

        def reduce(gradients: list[torch.Tensor], tokens: int) -> int:
            nonlocal reduced
            reduced = True
            self.world.beat()
            told.copy_(torch.tensor([tokens > 0, tokens, stop]))
            dist.all_reduce(told, group=group)  # on the host: there a lost rank can be named
            sum_over(gradients, group)
            for gradient in gradients:
                gradient /= max(1, int(told[0]))
            return int(told[1])

        try:
            self.spot.micro_step(reduce)
        except Exception as error:
            if reduced:  # by now the others may be gone
                raise
            self.spot.error = error  # a warning later; the others wait for this rank's share
            reduce([torch.zeros_like(weight) for weight in self.spot.drafter.trainable()], 0)
        return bool(told[2])

    # ---- shared ---------------------------------------------------------------------------------

    def _hand_out(self, source: int, group: dist.ProcessGroup | None) -> None:
        """The drafter and its optimizer of rank `source`, to the group; None = to all."""
        mine = self.spot.state_dict() if self.world.rank == source else None
        state = share_state(mine, source, self.world.device, group)
        if self.world.rank != source:
            self.spot.load_state_dict(state)

    def _group(self, ranks: list[int]) -> dist.ProcessGroup | None:
        """The group of these ranks; None = there is but one.

        Every rank asks for every group in one order, a busy one when it comes to it: torch numbers
        them, and only members wait for each other.
        """
        if len(ranks) == 1:
            return None
        key = tuple(sorted(ranks))
        group = self._groups.pop(key, None)
        if group is None:
            backend = "cpu:gloo,cuda:nccl" if self.world.device.startswith("cuda") else "gloo"
            wait = datetime.timedelta(seconds=self.world.timeout_s)
            group = dist.new_group(list(key), timeout=wait, backend=backend)
        self._groups[key] = group  # behind all others
        return group

    def _drop_groups(self) -> None:
        """Those that were asked for longest ago; every rank is here and has asked for the same."""
        for key in list(self._groups)[:-KEPT_GROUPS]:
            group = self._groups.pop(key)
            if self.world.rank in key:
                dist.destroy_process_group(group)

    def _idle(self) -> list[int]:
        store = self.world.store
        return [r for r in range(self.world.size) if store.check([self._key(f"idle/{r}")])]

    def _all_finished(self) -> bool:
        if time.monotonic() - self._idle_since > self.world.timeout_s:
            raise RuntimeError("a rank's rollout does not end")  # `meeting` says which
        return self.world.store.add(self._key("finished"), 0) == self.world.size

    def _key(self, name: str) -> str:
        return f"{self._round}/{name}"

    def _become(self, state: str) -> None:
        self.changes.append((time.time(), state))
