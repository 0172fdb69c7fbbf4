"""The experience of a step: prompts, their rollouts on every rank, rewards."""

import contextlib
import gc
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..common.errors import SharedWarning, UserError
from ..common.stop import Stopped, StopRequest
from ..common.world import World
from ..config.load import Config
from ..drafter.coordinator import Coordinator
from ..model.prompts import PromptEncoder
from ..records.phases import Phases
from ..rollout.observer import RolloutObserver
from ..rollout.request import Request, Response, RunningRequest, request_id
from ..rollout.stats import RolloutStats
from ..session.session import Session
from ..tasks import Prompt, Task
from ..tasks.workers import RewardWorkers
from .ranks import RankTimes
from .tail_update import TailUpdate
from .tools import Tools, ToolStats, answering


@dataclass(frozen=True)
class Experience:
    """The training data of a step: prompts, responses grouped by prompt, and their rewards."""

    prompts: list[Prompt] = field(default_factory=list)
    responses: list[Response] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    keep: list[bool] = field(default_factory=list)  # which responses enter the loss
    refills: int = 0


@dataclass(frozen=True)
class _Part:
    responses: list[Response]
    rewards: list[float]
    stats: RolloutStats
    tools: ToolStats
    seconds: float
    signal: str  # that ends the run; empty = none


@contextlib.contextmanager
def collections_paused() -> Iterator[None]:
    """Inside the block Python collects cyclic garbage only when `gc.collect` is called.

    A collection between two bursts would read every new list of tokens and log-probs.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(eq=False)
class Collector(RolloutObserver):
    """Draws prompts, rolls them out, scores them; each rank does its share and gets all results."""

    config: Config
    world: World
    phases: Phases
    task: Task
    encoder: PromptEncoder
    session: Session  # this rank's engine
    workers: RewardWorkers  # score during the rollout if there are worker processes
    coordinator: Coordinator | None  # trains the drafter while ranks are idle
    stop: StopRequest  # ends a rollout after a signal
    tools: Tools | None = None  # answer turns
    tail: TailUpdate | None = None  # begins the update during the rollout

    def __post_init__(self) -> None:
        world, config = self.world, self.config
        # Ranks with parts of one model make the same rollout; the first of them reports it.
        shared = config.engine.tensor_parallel
        self.group, self.groups = world.rank // shared, world.size // shared
        self.reports = world.rank % shared == 0
        self.prompts_drawn = 0  # from the training split
        self.stats, self.tool_stats = RolloutStats(), ToolStats()  # of the step, all ranks together
        self.ranks = RankTimes(world, self.coordinator)
        # Work for `on_wait`: finished responses to score (place, prompt, request), and prompts of
        # the next step to draw.
        self._ended: deque[tuple[int, Prompt, RunningRequest]] = deque()
        self._asked: dict[int, tuple[int, Prompt]] = {}  # request id -> place, prompt
        self._submitted: set[int] = set()  # places of those that the reward workers have
        self._ahead: dict[int, Prompt] = {}
        self._most_ahead = 0

    def gather(self, step: int) -> Experience:
        """The rollouts and rewards of a step.

        With `grpo.max_refills`, groups of equal rewards are replaced by groups of further prompts,
        at most that many times (DAPO's dynamic sampling). The metrics count all responses. Cut
        responses that `grpo.truncated=mask` leaves out are ignored in the comparison. Raises
        Stopped if a rank got a signal; the next call draws the same prompts.
        """
        first_prompt = self.prompts_drawn
        try:
            return self._gather(step)
        except BaseException:
            self.prompts_drawn = first_prompt
            if self.tail is not None:
                self.tail.discard()
            raise

    def _gather(self, step: int) -> Experience:
        grpo, each = self.config.grpo, self.config.grpo.samples_per_prompt
        self.stats, self.tool_stats = RolloutStats(), ToolStats()
        self.ranks.start()
        self._most_ahead = grpo.prompts_per_step if step + 1 < self.config.run.steps else 0
        whole, kept = Experience(), 0
        for refill in range(grpo.max_refills + 1):
            drawn = self._draw(step, refill, grpo.prompts_per_step - kept)
            for begin in range(0, len(drawn.responses), each):
                group = slice(begin, begin + each)
                keep = self.keeps(drawn.responses[group], drawn.rewards[group])
                drawn.keep.extend(keep)
                kept += any(keep)
            whole = Experience(
                whole.prompts + drawn.prompts,
                whole.responses + drawn.responses,
                whole.rewards + drawn.rewards,
                whole.keep + drawn.keep,
                refill,
            )
            if kept == grpo.prompts_per_step:
                return whole
        if grpo.max_refills:
            warnings.warn(
                f"dynamic sampling: only {kept} of {grpo.prompts_per_step} groups have mixed"
                f" rewards after {grpo.max_refills} refills; the task is too easy or too hard for"
                " this policy",
                SharedWarning,
                stacklevel=2,
            )
        return whole

    def _is_learned_from(self, response: Response) -> bool:
        cut = response.finish == "length" and self.config.grpo.truncated == "mask"
        failures = self.tool_stats.failures
        if self.tools is not None:  # tools of the running rollout
            failures = failures | self.tools.stats.failures
        failed = response.request.id in failures
        return not (cut or (failed and self.config.tool.on_error == "mask"))

    def keeps(self, responses: Sequence[Response], rewards: Sequence[float]) -> list[bool]:
        """Which responses of a group enter the loss."""
        learned = [self._is_learned_from(response) for response in responses]
        mixed = len({r for r, kept in zip(rewards, learned, strict=True) if kept}) > 1
        return [kept and (mixed or not self.config.grpo.max_refills) for kept in learned]

    def _draw(self, step: int, refill: int, count: int) -> Experience:
        """Responses to the next `count` prompts, grouped by prompt."""
        first = self.prompts_drawn
        self.prompts_drawn += count
        prompts = [
            self._ahead.pop(index) if index in self._ahead else self.task.prompt("train", index)
            for index in range(first, first + count)
        ]
        samples = range(self.config.grpo.samples_per_prompt)
        ids = [[request_id("train", step, p.id, s, refill) for s in samples] for p in prompts]
        requests = []
        for i in range(self.group, count, self.groups):
            prompt_ids = self.encode(prompts[i])
            requests += [Request(id, first + i, prompt_ids, self.session.params) for id in ids[i]]
        self.world.enter("gen")
        began = time.perf_counter()
        if self.coordinator is not None:
            self.coordinator.start(step, refill)
        if self.tail is not None:
            self.tail.begin(first=refill == 0)
        groups = dict(enumerate(prompts, first))
        responses: list[Response] = []
        with self.phases("gen"), contextlib.suppress(Stopped):
            responses = self.roll_out(groups, requests)
        if self.tail is not None:
            with self.phases("update_actor"):
                self.tail.end()
        stats = self.session.engine.stats if requests and self.reports else RolloutStats()
        tools = self.tools.stats if self.tools and requests else ToolStats()
        self.world.enter("reward")
        with self.phases("reward"):
            own = [groups[response.request.group] for response in responses]
            rewards = [] if self.stop.name else self.rewards(own, responses)
        seconds = time.perf_counter() - began
        if self.coordinator is not None:
            with self.phases("update_drafter"):
                self.coordinator.finished()
        part = _Part(responses, rewards, stats, tools, seconds, self.stop.name)
        return self._together(prompts, ids, part)

    def _together(self, prompts: list[Prompt], ids: list[list[int]], own: _Part) -> Experience:
        """The responses of all ranks, in the order of the prompts."""
        self.world.enter("gather")
        with self.phases("gather"):
            parts = self.world.gather(own)
        if signals := [part.signal for part in parts if part.signal]:
            raise Stopped(signals[0])
        self.stats.add(RolloutStats.side_by_side([part.stats for part in parts], self.world.rank))
        for part in parts:
            self.tool_stats.add(part.tools)
        self.ranks.add([part.seconds for part in parts])
        found = {
            response.request.id: (response, reward)
            for part in parts
            for response, reward in zip(part.responses, part.rewards, strict=True)
        }
        drawn = [found[id] for siblings in ids for id in siblings]
        return Experience(prompts, [response for response, _ in drawn], [r for _, r in drawn])

    def roll_out(
        self, prompts: Mapping[int, Prompt], requests: Sequence[Request]
    ) -> list[Response]:
        """This rank's responses in the order of its requests."""
        self._ended.clear()
        self._submitted.clear()
        if not requests:
            return []
        self._asked = {
            request.id: (i, prompts[request.group]) for i, request in enumerate(requests)
        }
        with answering(self.tools, prompts) as on_end, collections_paused():
            observer = self if self.reports else RolloutObserver()
            responses = self.session.roll_out(requests, observer=observer, on_end=on_end)
        return responses if self.reports else []

    # ---- called by the engine -------------------------------------------------------------------

    def on_pass(self, active: int, passes: int = 1) -> None:
        if self.groups == self.world.size:  # else other ranks may wait for passes of this one
            self.stop.check()
        if self.tail is not None:
            engine = self.session.engine
            while self._ended and engine.runner.graphs is None:  # nothing calls `on_wait`
                self.on_wait()
            self.tail.advance(engine.scheduler.least_emitted, self.workers.scored())

    def on_finish(self, request: RunningRequest) -> None:
        at, prompt = self._asked[request.request.id]
        self._ended.append((at, prompt, request))
        if self.tail is not None:
            self.tail.add(at, request.response(self.session.engine.target_version))
        if self.config.reward.workers:
            self.on_wait()  # the workers start at once

    def on_wait(self) -> bool:
        """Scores a response, or draws a prompt of the next step; False if there is no work."""
        if self._ended:
            at, prompt, request = self._ended.popleft()
            finished = request.finish == "stop"
            text = self._decode(request.new_tokens, finished)
            self.workers.submit(at, prompt, text, finished)
            self._submitted.add(at)
            self.workers.score()
            return True
        if len(self._ahead) >= self._most_ahead:
            gc.collect(1)
            return False
        index = self.prompts_drawn + len(self._ahead)
        self._ahead[index] = self.task.prompt("train", index)
        return True

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        ids = self.encoder(prompt.text)
        if not ids:
            raise UserError(f"prompt {prompt.id} of task {self.task.name} has no tokens")
        return ids

    def text(self, response: Response) -> str:
        """The response as the task sees it, without its end token."""
        return self._decode(response.token_ids, response.finish == "stop")

    def parts(self, response: Response) -> tuple[str, ...]:
        """The texts of turns and answers in order; () without answers."""
        bounds = [0, *(place for span in response.tools for place in span)]
        ends = [*bounds[1:], len(response.token_ids) - (response.finish == "stop")]
        pairs = zip(bounds, ends, strict=True)
        texts = tuple(self._decode(response.token_ids[a:b], False) for a, b in pairs)
        return texts if response.tools else ()

    def _decode(self, ids: Sequence[int], finished: bool) -> str:
        decode: Any = self.encoder.tokenizer.decode
        return decode(ids[:-1] if finished else ids, skip_special_tokens=False)

    def rewards(self, prompts: Sequence[Prompt], responses: Sequence[Response]) -> list[float]:
        """One reward for each response, in order; the workers may have some responses already."""
        for place, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            if place not in self._submitted:
                finished = response.finish == "stop"
                self.workers.submit(place, prompt, self.text(response), finished)
        return self.workers.collect(len(responses))

    def evaluate(self, count: int) -> float:
        """Mean reward of the first prompts of the eval split, with the same noise each time."""
        self.world.enter("eval")
        count = min(count, self.task.size("eval") or count)
        mine = range(self.group, count, self.groups)
        prompts = [self.task.prompt("eval", i) for i in mine]
        requests = [
            Request(request_id("eval", 0, p.id, 0), i, self.encode(p), self.session.params)
            for i, p in zip(mine, prompts, strict=True)
        ]
        self._submitted.clear()  # of the rollout before
        responses: list[Response] = []
        if requests:
            with answering(self.tools, dict(zip(mine, prompts, strict=True))) as on_end:
                responses = self.session.roll_out(requests, record=False, on_end=on_end)
        rewards = self.rewards(prompts, responses) if self.reports else []
        return sum(sum(part) for part in self.world.gather(rewards)) / count
