"""The update of the policy begins in the tail of the rollout, with the groups that are final."""

from __future__ import annotations

import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from typing import Any

import torch

from ..common.world import World
from ..config.load import Config
from ..drafter.partition import Partition, partition_of
from ..drafter.thread import StepThread
from ..drafter.trainer import SpotTrainer
from ..policy.early import Ahead, EarlyGradients, why_not_early
from ..policy.trainer import PolicyTrainer
from ..rollout.request import Response

# Switch interval of Python's threads while both run. With the default, 5 ms, each launch of the
# rollout could wait so long for the thread of the update.
SWITCH_S = 5e-5

SMS = 64  # multiprocessors of the partition

Keeps = Callable[[Sequence[Response], Sequence[float]], Sequence[bool]]
Groups = tuple[list[Response], list[float], list[bool]]
NONE: Groups = ([], [], [])


class TailUpdate:
    """Adds up gradients of groups that no other group of the rollout can precede.

    On a GPU a thread launches them on some multiprocessors of their own, beside the passes of the
    rollout; on a CPU they are computed between two passes. Whenever they are computed, their
    micro-batches are the first ones of the update, so its result does not depend on it. A failure
    is a warning: the update then begins after the rollout. The spot trainer is paused while
    gradients are computed, since it uses the same multiprocessors.
    """

    def __init__(
        self,
        trainer: PolicyTrainer,
        sms: int,
        samples: int,
        keeps: Keeps,
        spot: SpotTrainer | None,
        note: Callable[[str], None],
    ) -> None:
        self.samples, self.keeps, self.spot, self.note = samples, keeps, spot, note
        self.early = EarlyGradients(trainer)
        self.partition: Partition | None = None
        if trainer.weights.device.type == "cuda":
            self.partition = partition_of(sms, trainer.weights.device)
        self.threaded = self.partition is not None
        self.thread = StepThread(self._step, self.early.wait, self._fail)
        # Whether gradients on the partition have the bits of those on the card; None: unknown.
        self.exact: bool | None = True if self.partition is None else None
        self._open = False  # between begin and end of a rollout
        self._groups: dict[int, list[tuple[int, Response]]] = {}
        self._work: Groups = NONE
        self._ended_with = NONE  # the last work that is complete
        self._interval = sys.getswitchinterval()

    @staticmethod
    def of(
        config: Config,
        world: World,
        trainer: PolicyTrainer,
        keeps: Keeps,
        spot: SpotTrainer | None,
        note: Callable[[str], None],
        sms: int = SMS,
    ) -> TailUpdate | None:
        """The tail update of a run; None if it is off. The reason is noted."""
        if not config.grpo.tail_tokens:
            return None
        reason = why_not_early(config.grpo, world.size)
        if config.engine.free_in_update == "true":
            reason = "memory holds either the KV cache or the update (engine.free_in_update)"
        if not reason:
            try:
                return TailUpdate(trainer, sms, config.grpo.samples_per_prompt, keeps, spot, note)
            except RuntimeError as error:
                reason = f"no partition of the GPU ({error})"
        note(f"grpo.tail_tokens: the update begins after the rollout; {reason}")
        return None

    # ---- during the rollout ---------------------------------------------------------------------

    def begin(self, first: bool) -> None:
        """Discards earlier sums; groups of a rollout that is not the `first` change the order."""
        self.discard()
        self._open, self._groups = first and bool(self.exact), defaultdict(list)
        if self.partition is not None:
            self.partition.stream.wait_stream(torch.cuda.current_stream())

    def add(self, place: int, response: Response) -> None:
        """Adds a finished response; `place` is the key of its reward."""
        if self._open:
            self._groups[response.request.group].append((place, response))

    def advance(self, least: int, rewards: Mapping[int, float]) -> None:
        """Adds up the groups that are final; unfinished responses have `least` tokens or more."""
        if self._open:
            final = self._final(least, rewards)
            if len(final) * self.samples > len(self._work[0]):
                self._work = self._listed(final, rewards)
            if self._ended_with is not self._work and not self.thread.running:
                self._start()
        if self.spot is not None:
            self.spot.paused = self.thread.running

    def _start(self) -> None:
        if not self.threaded:
            try:
                while self._step():
                    pass
            except Exception as error:
                self._fail(error)
            return
        if self.spot is not None:
            self.spot.stop()
        sys.setswitchinterval(SWITCH_S)
        self.thread.start(None if self.partition is None else self.partition.stream)

    def _final(self, least: int, rewards: Mapping[int, float]) -> list[int]:
        """The groups that come first in the update, whatever the unfinished responses will be."""
        ended = sorted(
            (max(len(response.token_ids) for _, response in members), group)
            for group, members in self._groups.items()
            if len(members) == self.samples
        )

        def is_final(each: tuple[int, int]) -> bool:
            longest, group = each
            return longest < least and all(place in rewards for place, _ in self._groups[group])

        return [group for _, group in takewhile(is_final, ended)]

    def _listed(self, groups: Sequence[int], rewards: Mapping[int, float]) -> Groups:
        responses, values, keep = ([], [], [])  # type: Groups
        for group in groups:
            members = [response for _, response in self._groups[group]]
            scored = [rewards[place] for place, _ in self._groups[group]]
            responses += members
            values += scored
            keep += self.keeps(members, scored)
        return responses, values, keep

    def _step(self) -> bool:
        work = self._work
        if work[0] and self.early.advance(*work):
            return True
        self._ended_with = work
        return False

    def _fail(self, error: BaseException) -> None:
        self._open = False
        warnings.warn(
            f"update in the tail: {type(error).__name__}: {error}; it begins after the rollout",
            stacklevel=2,
        )

    # ---- after the rollout ----------------------------------------------------------------------

    def end(self) -> None:
        """Call when the rollout has ended; waits for the running micro-batch."""
        self.early.mark_hidden()
        self._join()
        if not self._open:  # a micro-batch has failed
            self.early.discard()
        self._open = False

    def take(
        self, responses: Sequence[Response], rewards: Sequence[float], keep: Sequence[bool]
    ) -> list[Ahead]:
        """The micro-batches so far, for the update of the step's responses."""
        if self.exact is None:
            self._check(responses, rewards, keep)
        return self.early.take()

    def discard(self) -> None:
        """Discards the sums of a rollout that failed or is repeated."""
        self._open = False
        self._join()
        self.early.discard()

    def _join(self) -> None:
        self._work = self._ended_with = NONE
        self.thread.stop()
        sys.setswitchinterval(self._interval)
        if self.partition is not None:
            torch.cuda.current_stream().wait_stream(self.partition.stream)
        if self.spot is not None:
            self.spot.paused = False

    def _check(self, *step: Any) -> None:
        """Compares the gradient of a micro-batch on the partition with that on the card, once.

        Libraries may choose other kernels for fewer multiprocessors, with another order of sums.
        """
        assert self.partition is not None
        card, part = torch.cuda.current_stream(), self.partition.stream
        torch.cuda.synchronize()
        with ThreadPoolExecutor(1) as thread:  # as in a rollout
            compiled, alone, beside = (
                thread.submit(self._trial, stream, step).result() for stream in (card, card, part)
            )
        self.early.discard()
        if compiled is None or alone is None or beside is None:
            return  # the step has one micro-batch
        self.exact = alone[0] == beside[0]
        if self.exact:
            self.note(
                f"update in the tail: a micro-batch takes {1e3 * beside[1]:.0f} ms on"
                f" {self.partition.sms} multiprocessors, {1e3 * alone[1]:.0f} on the card, with"
                " equal gradients"
            )
        else:
            warnings.warn(
                "update in the tail: gradients on a partition of the GPU differ from those on the"
                " card in their last bits; the update begins after the rollout",
                stacklevel=2,
            )

    def _trial(self, stream: torch.cuda.Stream, step: Any) -> tuple[list[int], float] | None:
        """The bits of a micro-batch's gradient, and its seconds; None: there is no micro-batch."""
        self.early.discard()
        begin = time.perf_counter()
        with torch.cuda.stream(stream):
            if not self.early.advance(*step):
                return None
            return self.early.trainer.weights.gradient_bits(), time.perf_counter() - begin
