"""The state of one training run: its parts, its step counter, what each phase of a step does."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from driver.assemble import (
    PROMPT_SAMPLE,
    Rollout,
    build_rollout,
    check_context,
    check_device,
    find_model,
    load_policy,
    spec_of,
    stop_ids,
)
from driver.bandit import OFF
from driver.capture import capture_op, check_capture
from driver.config import Config
from driver.errors import UserError
from driver.grpo import check_rewards, dynamic_sampling
from driver.memory import memory_metrics
from driver.phases import Phases
from driver.policy_trainer import PolicyTrainer
from driver.reward_workers import RewardWorkers
from driver.rollout.request import Request, Response, SamplingParams, request_id
from driver.rollout.scheduler import Sequence as Running
from driver.rollout.stats import RolloutStats
from driver.run_folder import RunFolder, Sample
from driver.tasks import Prompt, Task, make_task
from driver.warm import adopt_drafter, drafter_state, warm_start
from driver.warmup import warm_up


@dataclass(frozen=True)
class Experience:
    """What a step learns from: prompts, the responses to each side by side, their rewards."""

    prompts: list[Prompt] = field(default_factory=list)
    responses: list[Response] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    keep: list[bool] = field(default_factory=list)  # which responses enter the loss
    refills: int = 0


@dataclass
class Run:
    """Everything a training loop touches; `driver/train.py` gives the order."""

    config: Config
    folder: RunFolder
    phases: Phases
    task: Task
    tokenizer: Tokenizer
    policy: PreTrainedModel
    trainer: PolicyTrainer
    rollout: Rollout
    params: SamplingParams
    workers: RewardWorkers | None  # None: rewards are computed here, after the rollout
    step: int = 0  # finished steps
    prompts_drawn: int = 0  # from the training split
    version: int = 0  # of the policy in the engine
    evaluations: dict[int, float] = field(default_factory=dict)  # step -> held-out accuracy
    tokens: int = 0  # emitted in training rollouts
    target_passes: int = 0
    stats: RolloutStats = field(default_factory=RolloutStats)  # of the last training rollout
    trace: list[tuple[float, int, str]] = field(default_factory=list)  # of the last rollout
    lengths: list[int] = field(default_factory=list)  # responses of the last rollout
    correct: list[int] = field(default_factory=list)  # lengths of all correct responses
    last_metrics: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def start(config: Config, note: Callable[[str], None]) -> Run:
        """Opens the run folder, makes or loads the policy, warms it up, builds the rest.

        A start that fails leaves no folder behind, so that the next try may use its name.
        """
        phases = Phases()
        if config.run.threads:
            torch.set_num_threads(config.run.threads)
        with phases("load"):
            # What shows as mistyped by now fails before the run folder is made.
            check_device(config.run.device)
            if config.sampling.top_k or config.sampling.top_p < 1:
                raise UserError(
                    "sampling.top_k and sampling.top_p: training samples the policy's own law;"
                    " leave them at 0 and 1"
                )
            check_capture(config.capture, config.run.steps)
            task = make_task(**asdict(config.task))
            source = find_model(config, note)
            folder = RunFolder(config)
        try:
            return Run._build(config, note, phases, task, source, folder)
        except BaseException:
            folder.discard()
            raise

    @staticmethod
    def _build(
        config: Config,
        note: Callable[[str], None],
        phases: Phases,
        task: Task,
        source: Path | None,
        folder: RunFolder,
    ) -> Run:
        saved = folder.resumed
        if config.warmup.keep and (saved is None or config.grpo.kl_coef):
            with phases("warmup"):
                source = warm_start(config, note).path
        with phases("load"):
            if config.run.resume and saved is None:
                note(f"{folder.path} holds no whole checkpoint: starting over")
            policy, tokenizer = load_policy(config, saved.path if saved else source)
            spec, prompt_len = spec_of(policy), longest_prompt(task, tokenizer)
            check_context(prompt_len, config.sampling.max_new_tokens, spec.max_position)
        if saved is None and config.warmup.steps and not config.warmup.keep:
            note(f"supervised warm-up: {config.warmup.steps} steps")
            with phases("warmup"):
                losses = warm_up(policy, tokenizer, task, config.warmup, config.run.seed)
            note(f"warm-up loss {losses[0]:.3f} -> {losses[-1]:.3f}")
        with phases("load"):
            sampling = config.sampling
            params = SamplingParams(
                sampling.temperature,
                sampling.top_k,
                sampling.top_p,
                sampling.max_new_tokens,
                stop_ids(spec, task, tokenizer),
            )
            longest = params.max_new_tokens + 2 * prompt_len  # later prompts may be longer
            rollout = build_rollout(
                config, spec, policy.state_dict(), min(longest, spec.max_position)
            )
            rollout.watch(phases.timeline)
            trainer = PolicyTrainer(policy, config.grpo, lambda: load_policy(config, source)[0])
            workers = RewardWorkers(task, config.reward) if config.reward.workers else None
            run = Run(
                config, folder, phases, task, tokenizer, policy, trainer, rollout, params, workers
            )
            if saved is not None:
                run._restore(saved.step, saved.state)
            else:
                adopt_drafter(rollout.spot, drafter_state(source), note)
        return run

    # ---- the phases of a step -------------------------------------------------------------------

    def gather(self) -> Experience:
        """The step's rollouts and rewards.

        With `grpo.max_refills` groups of equal rewards are replaced by groups of further prompts,
        at most that many times (DAPO's dynamic sampling); all that was drawn is in the metrics.
        """
        grpo = self.config.grpo
        self.stats = RolloutStats()
        rounds: list[Experience] = []

        def draw(refill: int, missing: int) -> list[tuple[int, list[float]]]:
            rounds.append(self._draw(refill, missing))
            rewards, each = rounds[-1].rewards, grpo.samples_per_prompt
            first = sum(len(r.prompts) for r in rounds[:-1])
            return [(first + g, rewards[g * each : (g + 1) * each]) for g in range(missing)]

        if grpo.max_refills:
            groups = dynamic_sampling(draw, grpo.prompts_per_step, grpo.max_refills)
        else:
            groups = [group for group, _ in draw(0, grpo.prompts_per_step)]
        responses = [response for r in rounds for response in r.responses]
        masked = grpo.truncated == "mask"
        return Experience(
            [prompt for r in rounds for prompt in r.prompts],
            responses,
            [reward for r in rounds for reward in r.rewards],
            [
                i // grpo.samples_per_prompt in groups and not (masked and r.finish == "length")
                for i, r in enumerate(responses)
            ],
            len(rounds) - 1,
        )

    def _draw(self, refill: int, count: int) -> Experience:
        """Responses to the next `count` prompts: siblings side by side."""
        first = self.prompts_drawn
        self.prompts_drawn += count
        prompts = [self.task.prompt("train", first + i) for i in range(count)]
        each = self.config.grpo.samples_per_prompt
        requests = [
            Request(
                request_id("train", self.step, p.id, s, refill), group, self.encode(p), self.params
            )
            for group, p in enumerate(prompts, start=first)
            for s in range(each)
        ]
        captures = self.folder.path / "captures"
        with self.phases("gen"), capture_op(self.config.capture, self.step + 1, captures):
            responses = self.roll_out(prompts, requests)
        with self.phases("reward"):
            rewards = self.rewards(prompts, responses, submitted=True)
        return Experience(prompts, responses, rewards)

    def roll_out(self, prompts: Sequence[Prompt], requests: Sequence[Request]) -> list[Response]:
        """One response a request, in order; spot trainer and reward workers use the tail."""
        engine = self.rollout.engine
        on_finish = engine.on_finish
        each = len(requests) // len(prompts)
        index = {request.id: i for i, request in enumerate(requests)}

        def score(sequence: Running) -> None:
            if on_finish is not None:
                on_finish(sequence)
            at = index[sequence.request.id]
            ids = sequence.tokens[len(sequence.request.prompt_ids) :]
            self.workers.submit(at, prompts[at // each], self._decode(ids, sequence.finish))

        if self.workers is not None:
            engine.on_finish = score
        try:
            responses = engine.generate(requests)
        except BaseException:
            if self.rollout.spot is not None:
                self.rollout.spot.stop()  # its thread must not outlive the rollout
            raise
        finally:
            engine.on_finish = on_finish
        self.stats.add(engine.stats)
        return responses

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        ids = self.tokenizer.encode(prompt.text, add_special_tokens=False)
        if not ids:
            raise UserError(f"prompt {prompt.id} of task {self.task.name} has no tokens")
        return tuple(ids)

    def text(self, response: Response) -> str:
        """The response as the task sees it, without its end token."""
        return self._decode(response.token_ids, response.finish)

    def _decode(self, ids: Sequence[int], finish: str) -> str:
        ids = ids[:-1] if finish == "stop" else ids
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def rewards(
        self, prompts: Sequence[Prompt], responses: Sequence[Response], submitted: bool = False
    ) -> list[float]:
        """One reward a response, in order.

        Args:
            prompts: of the responses.
            responses: siblings side by side.
            submitted: whether the reward workers have them already.
        """
        if submitted and self.workers is not None:
            return check_rewards(self.workers.collect(len(responses)), len(responses))
        each = len(responses) // len(prompts)
        values = [
            self.task.reward(prompts[i // each], self.text(r)) for i, r in enumerate(responses)
        ]
        return check_rewards(values, len(responses))

    def finish_bubble(self) -> None:
        """What the spot trainer does with the end of the bubble."""
        if self.rollout.spot is not None:
            self.rollout.spot.finish()

    def update_policy(self, step: Experience) -> dict[str, float]:
        metrics = self.trainer.update(step.responses, step.rewards, step.keep)
        if self.config.grpo.max_refills:
            metrics["dynamic_sampling/refills"] = step.refills
            metrics["dynamic_sampling/kept"] = sum(step.keep) / len(step.keep)
        parts = ("old_log_prob", "update_actor")
        self.phases.add_ended({part: metrics.pop(f"timing_s/{part}") for part in parts})
        return metrics

    def sync_weights(self) -> None:
        """The new policy into the engine, in place: the step is done."""
        self.step += 1
        self.version += 1
        self.rollout.update_weights(self.policy.state_dict(), self.version)

    def evaluate(self) -> None:
        """Held-out accuracy: mean reward of one response to each of the first eval prompts.

        Sampled as in training, with the same noise each time, so two evaluations differ by the
        policy alone.
        """
        count = self.config.run.eval_prompts
        if count == 0 or self.step in self.evaluations:
            return
        with self.phases("eval"):
            prompts = [self.task.prompt("eval", i) for i in range(count)]
            requests = [
                Request(request_id("eval", 0, p.id, 0), i, self.encode(p), self.params)
                for i, p in enumerate(prompts)
            ]
            responses = self.rollout.engine.generate(requests, record=False)
            rewards = self.rewards(prompts, responses)
        self.evaluations[self.step] = sum(rewards) / count
        if self.step == 0:  # later ones are in the record of their step
            self.folder.log_step(0, {"eval/accuracy": self.evaluations[0]})

    def close(self) -> None:
        """Ends what works beside the run."""
        if self.workers is not None:
            self.workers.close()

    # ---- records --------------------------------------------------------------------------------

    def log(self, metrics: dict[str, float], step: Experience) -> None:
        """Books the step that just ended; `self.step` counts it already."""
        begin = time.perf_counter()
        stats = self.stats
        self.tokens += stats.emitted
        self.target_passes += stats.target_passes
        self.trace = [*stats.trace, (stats.elapsed_s, 0, str(OFF))]
        self.lengths = [len(r.token_ids) for r in step.responses]
        self.correct += [n for n, r in zip(self.lengths, step.rewards, strict=True) if r >= 1.0]
        metrics = {**metrics, **stats.metrics(), **self.rollout.bandit.metrics()}
        metrics |= self.rollout.engine.metrics()
        metrics["perf/throughput"] = stats.emitted / max(stats.elapsed_s, 1e-9)
        if self.rollout.spot is not None:
            metrics |= self.rollout.spot.metrics()
        metrics |= memory_metrics()
        if self.step in self.evaluations:
            metrics["eval/accuracy"] = self.evaluations[self.step]
        self.folder.log_rollout(self.step, self.lengths, self.trace)
        self.folder.log_samples(self.step, self._samples(step))
        self.last_metrics = metrics | self.phases.end_step(self.step)
        self.folder.log_step(self.step, self.last_metrics)
        self.phases.add("log", time.perf_counter() - begin)

    def _samples(self, step: Experience) -> list[Sample]:
        """The first response to each of the first prompts."""
        each = self.config.grpo.samples_per_prompt
        count = min(self.config.run.samples_logged, len(step.prompts))
        firsts = zip(
            step.prompts[:count], step.responses[::each], step.rewards[::each], strict=False
        )
        return [
            Sample(p.id, p.text, self.text(r), reward, len(r.token_ids), r.finish)
            for p, r, reward in firsts
        ]

    def is_due(self, every: int) -> bool:
        """At every `every`-th step and at the last; with 0 at the last only."""
        return self.step == self.config.run.steps or (every > 0 and self.step % every == 0)

    def checkpoint(self) -> None:
        """Saves everything a resumed run needs; whole or absent."""

        def write_policy(path: Any) -> None:
            self.policy.save_pretrained(path)
            self.tokenizer.save_pretrained(path)

        spot = self.rollout.spot
        states = {
            "trainer": self.trainer.state_dict(),
            "bandit": self.rollout.bandit.state_dict(),
            "spot": spot.state_dict() if spot else None,
            "counters": {
                "version": self.version,
                "prompts_drawn": self.prompts_drawn,
                "tokens": self.tokens,
                "target_passes": self.target_passes,
                "evaluations": self.evaluations,
            },
        }
        with self.phases("checkpoint"):
            self.folder.save_checkpoint(self.step, write_policy, states)
            self.phases.timeline.write(self.folder.timeline)

    def _restore(self, step: int, state: Any) -> None:
        self.step = step
        self.phases.timeline.resume(self.folder.timeline, step)
        self.trainer.load_state_dict(state("trainer"))
        self.rollout.bandit.load_state_dict(state("bandit"))
        counters = state("counters")
        self.version, self.tokens = counters["version"], counters["tokens"]
        self.target_passes = counters["target_passes"]
        self.prompts_drawn = counters["prompts_drawn"]
        self.evaluations = {int(k): v for k, v in counters["evaluations"].items()}
        self.rollout.engine.target_version = self.version
        spot = self.rollout.spot
        if spot is not None:
            spot.load_state_dict(state("spot"))
            spot.target_version = self.version


def longest_prompt(task: Task, tokenizer: Tokenizer) -> int:
    """Tokens of the longest of the first training prompts."""
    texts = [task.prompt("train", i).text for i in range(PROMPT_SAMPLE)]
    return max(len(tokenizer.encode(t, add_special_tokens=False)) for t in texts)
