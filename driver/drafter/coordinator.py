"""Trains the drafter on ranks that have finished their rollout.

The first rank to finish leads. It forms a group of the idle ranks and sends them its drafter. They
train together, each on the features that it recorded, with averaged gradients. Before every
micro-step the leader checks whether another rank is idle (then it forms a new group) or the last
one has finished (then it ends training). It sends this decision with the gradients of that step, so
no rank waits longer than one step. Every rank gets the result under one version number.
"""

import datetime
import json
import time

import torch
import torch.distributed as dist

from ..common.world import World, backend_of, share_state
from .trainer import SpotTrainer

POLL_S = 0.002
KEPT_GROUPS = 16  # across steps; their channels take GPU memory
WAITS, TRAINS = "the wait for the last rank", "drafter training"  # phases


class Coordinator:
    def __init__(self, world: World, spot: SpotTrainer) -> None:
        assert world.store is not None
        self.world, self.store, self.spot = world, world.store, spot
        self.trained_s = 0.0  # seconds of training of this rank in the step
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._round, self._idle_since = "", 0.0
        self._shared_steps = 0  # micro-steps whose result every rank has

    def start(self, step: int, refill: int) -> None:
        self._round = f"{step}.{refill}"
        self._idle_since = 0.0
        if refill == 0:
            self.trained_s = 0.0
        self._drop_groups()

    def finished(self) -> None:
        """Trains until every rank has rolled out; all ranks call it. UserError if one was lost."""
        self.world.enter(WAITS)
        self._idle_since = time.monotonic()
        first = self.store.add(self._key("finished"), 1) == 1
        self.store.set(self._key(f"idle/{self.world.rank}"), "1")
        with self.world.collective():
            leader = self._lead() if first else self._follow()
        steps = self.world.gather(self.spot.steps)
        if max(steps) != self._shared_steps:
            # A leader whose own steps failed is behind the ranks that it led.
            source = leader if steps[leader] == max(steps) else steps.index(max(steps))
            if self.world.rank == source:
                self.spot.renew()  # one vocabulary and one version for all ranks
            with self.world.collective():
                self._share_drafter(source, None)
        self._shared_steps = self.spot.steps

    # ---- leader and followers -------------------------------------------------------------------

    def _lead(self) -> int:
        rank = self.world.rank
        self.store.set(self._key("leader"), str(rank))
        group = 0
        while not self._all_finished():
            ranks = [rank, *(r for r in self._idle() if r != rank)]
            if not self.spot.buffer.num_tokens or self.spot.error is not None:
                time.sleep(POLL_S)
                continue
            self.spot.first_vocabulary()
            self.store.set(self._key(f"group/{group}"), json.dumps(ranks))
            self._train(ranks)
            group += 1
        self.store.set(self._key(f"group/{group}"), "[]")
        return rank

    def _follow(self) -> int:
        group = 0
        while True:
            key = self._key(f"group/{group}")
            self.store.wait([key])  # until the time-out of the process group
            ranks = json.loads(self.store.get(key))
            if not ranks:
                return int(self.store.get(self._key("leader")))
            if self.world.rank in ranks:
                self._train(ranks)
            else:
                self._group(ranks)
            group += 1

    def _train(self, ranks: list[int]) -> None:
        """Makes micro-steps until the leader, the first rank of the group, ends it."""
        self.world.enter(TRAINS)
        self.world.beat()
        group = self._group(ranks)
        with self.spot.spans("train", ranks=len(ranks)) as span:
            if len(ranks) > 1:
                self._share_drafter(ranks[0], group)
            leads, ended = self.world.rank == ranks[0], False
            while not ended:
                stop = leads and (self._all_finished() or len(self._idle()) > len(ranks))
                ended = self._micro_step(stop, group)
        self.trained_s += span.seconds
        self.world.enter(WAITS)

    def _micro_step(self, stop: bool, group: dist.ProcessGroup | None) -> bool:
        """Makes one step; returns whether the group ends."""
        if group is None:  # one rank: steps are captured, and a failure is a warning
            self.world.beat()
            return stop or not self.spot.attempt()
        sums = torch.zeros(3, dtype=torch.int64)  # ranks with data, tokens, leader's stop
        reduced = False

        def reduce(gradients: list[torch.Tensor], tokens: int) -> int:
            nonlocal reduced
            reduced = True
            self.world.beat()
            sums.copy_(torch.tensor([tokens > 0, tokens, stop]))
            dist.all_reduce(sums, group=group)  # on the host, where a lost rank can be named
            for gradient in gradients:  # a dozen
                dist.all_reduce(gradient, group=group)
                gradient /= max(1, int(sums[0]))
            return int(sums[1])

        try:
            self.spot.micro_step(reduce)
        except Exception as error:
            if reduced:  # the other ranks may have left the step
                raise
            self.spot.error = error  # a warning later; the others wait for this rank's gradients
            reduce([torch.zeros_like(weight) for weight in self.spot.drafter.trainable()], 0)
        return bool(sums[2])

    # ---- groups and state -----------------------------------------------------------------------

    def _share_drafter(self, source: int, group: dist.ProcessGroup | None) -> None:
        """Sends drafter and optimizer of rank `source` to the group; None = to all ranks."""
        mine = self.spot.state_dict() if self.world.rank == source else None
        state = share_state(mine, source, self.world.device, group)
        if self.world.rank != source:
            self.spot.load_state_dict(state)

    def _group(self, ranks: list[int]) -> dist.ProcessGroup | None:
        """The process group of these ranks; None for a single rank.

        torch numbers groups, so every rank creates every group in the same order, busy ranks later
        than idle ones. Only members wait for each other.
        """
        if len(ranks) == 1:
            return None
        key = tuple(sorted(ranks))
        group = self._groups.pop(key, None)
        if group is None:
            wait = datetime.timedelta(seconds=self.world.timeout_s)
            group = dist.new_group(list(key), timeout=wait, backend=backend_of(self.world.device))
        self._groups[key] = group  # most recently used
        return group

    def _drop_groups(self) -> None:
        """Destroys the least recently used groups, the same ones on every rank."""
        for key in list(self._groups)[:-KEPT_GROUPS]:
            group = self._groups.pop(key)
            if self.world.rank in key:
                dist.destroy_process_group(group)

    def _idle(self) -> list[int]:
        return [r for r in range(self.world.size) if self.store.check([self._key(f"idle/{r}")])]

    def _all_finished(self) -> bool:
        if time.monotonic() - self._idle_since > self.world.timeout_s:
            raise RuntimeError("a rank's rollout does not end")  # `collective` names it
        return self.store.add(self._key("finished"), 0) == self.world.size

    def _key(self, name: str) -> str:
        return f"{self._round}/{name}"
