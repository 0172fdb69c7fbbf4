"""`python -m profiling.peers.trl key=value ...`: the same training by TRL's GRPO trainer.

The words are a run's. Model, prompts and their order, rewards, stop ids, lengths, group size and
learning rate are those of `driver.train`; generation is that of transformers, and weights of half
precision are trained as they are, without float32 masters. It leaves
`metrics.jsonl`, `rollouts.jsonl` and `summary.json` in the run's folder, as far as the benchmark
reads them, after every step; where it is stopped, `summary.json` says what it was at. Needs trl and
datasets, and what these import: pyarrow, pandas, dill, multiprocess, xxhash.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from driver.common.storage import write_text
from driver.config.command import run_command
from driver.config.estimators import ESTIMATORS
from driver.config.load import Config, load_config
from driver.run.assemble import find_model, load_policy, spec_of, stop_ids
from driver.tasks import Prompt, Task, make_task

MICRO_BATCH = 8  # most responses of a forward pass of the update
GENERATION, REWARDS = "generation", "rewards"
TOLD_PASSES = 256  # of a generation, between two lines


@dataclass
class Recorded:
    """What the trainer's hooks see, a list item a step."""

    seconds: list[float] = field(default_factory=list)
    gen_s: list[float] = field(default_factory=list)
    reward_s: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    lengths: list[list[int]] = field(default_factory=list)

    def lines(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Of `metrics.jsonl` and of `rollouts.jsonl`."""
        metrics, rollouts = [], []
        for i, seconds in enumerate(self.seconds):
            times = {"step": seconds, "gen": self.gen_s[i], "reward": self.reward_s[i]}
            # Log-probs and update are one in that trainer.
            times["update_actor"] = seconds - self.gen_s[i] - self.reward_s[i]
            line = {"step": i + 1, "critic/rewards/mean": self.rewards[i]}
            metrics.append(line | {f"timing_s/{name}": value for name, value in times.items()})
            rollouts.append({"step": i + 1, "lengths": self.lengths[i]})
        return metrics, rollouts

    def write(self, folder: Path, stopped: str = "") -> None:
        """The records so far: a run that its time limit ends leaves whole steps.

        Args:
            folder: of the run.
            stopped: what it was at, where it came to no end.
        """
        for name, lines in zip(("metrics", "rollouts"), self.lines(), strict=True):
            write_text(folder / f"{name}.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
        summary: dict[str, Any] = {"steps": len(self.seconds)}
        write_text(
            folder / "summary.json", json.dumps(summary | ({"stopped": stopped} if stopped else {}))
        )


class Watch:
    """Says how far a step is.

    Args:
        recorded: of the steps.
        say: takes a line.
    """

    def __init__(self, recorded: Recorded, say: Callable[[str], None]) -> None:
        self.recorded, self.say = recorded, say
        self.phase, self.passes, self.begin = "start", 0, now()

    def enter(self, phase: str) -> None:
        self.phase, self.passes, self.begin = phase, 0, now()

    def on_pass(self, *_: Any) -> None:
        """A forward pass of the policy begins; in a generation, a token of every response."""
        self.passes += 1
        if self.phase == GENERATION and self.passes % TOLD_PASSES == 0:
            self.say(self.where())

    def where(self) -> str:
        """What the step is at, as of the host's clock."""
        step, seconds = len(self.recorded.seconds) + 1, time.perf_counter() - self.begin
        return f"step {step}: {self.phase}, {self.passes} passes in {seconds:.1f} s"

    def generated(self) -> str:
        """What the step's generation came to."""
        seen = self.recorded
        lengths, seconds = seen.lengths[-1], seen.gen_s[-1]
        return (
            f"step {len(seen.gen_s)}: generation ended, {sum(lengths)} tokens in {seconds:.1f} s,"
            f" longest {max(lengths)}, reward {seen.rewards[-1]:.3f}"
        )

    def around(self, phase: str, call: Callable[..., Any], into: list[float]) -> Callable[..., Any]:
        """`call` as a phase of the step, its seconds appended to `into`; the update follows it."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.enter(phase)
            out = call(*args, **kwargs)
            into.append(now() - self.begin)
            if phase == REWARDS:
                self.say(self.generated())
            self.enter("update")
            return out

        return wrapped


class StepClock(TrainerCallback):
    """Notes the seconds of each optimizer step, generation included, and has them written."""

    def __init__(self, recorded: Recorded, folder: Path, say: Callable[[str], None]) -> None:
        self.recorded, self.folder, self.say, self.begin = recorded, folder, say, 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.begin = now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        seen = self.recorded
        seen.seconds.append(now() - self.begin)
        seen.write(self.folder)
        seconds, rest = seen.seconds[-1], seen.seconds[-1] - seen.gen_s[len(seen.seconds) - 1]
        self.say(f"step {len(seen.seconds)}: ended after {seconds:.1f} s, update {rest:.1f} s")


def now() -> float:
    """The clock, once the device has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def reward_function(
    task: Task, prompts: dict[str, Prompt], tokenizer: Any, stops: Sequence[int], seen: Recorded
) -> Callable[..., list[float]]:
    """The task's reward with TRL's signature; also notes lengths and means."""

    def task_reward(completion_ids: list[list[int]], prompt_id: list[str], **_: Any) -> list[float]:
        values = []
        for ids, name in zip(completion_ids, prompt_id, strict=True):
            ids = ids[:-1] if ids and ids[-1] in stops else ids
            text = tokenizer.decode(ids, skip_special_tokens=False)
            values.append(float(task.reward(prompts[name], text)))
        seen.rewards.append(sum(values) / len(values))
        seen.lengths.append([len(ids) for ids in completion_ids])
        return values

    return task_reward


def trainer_config(config: Config, output: Path) -> Any:
    """`trl.GRPOConfig` with the settings of a run."""
    from trl import GRPOConfig

    grpo, sampling = config.grpo, config.sampling
    responses = grpo.prompts_per_step * grpo.samples_per_prompt
    micro = max(n for n in range(1, MICRO_BATCH + 1) if responses % n == 0)
    return GRPOConfig(
        output_dir=str(output / "trl"),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=responses // micro,
        num_generations=grpo.samples_per_prompt,
        max_completion_length=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=1.0,
        top_k=0,
        learning_rate=grpo.lr,
        lr_scheduler_type="constant",
        beta=grpo.kl_coef,
        epsilon=grpo.clip_low,
        epsilon_high=grpo.clip_high or ESTIMATORS[grpo.advantage].clip_high,
        num_iterations=grpo.epochs,
        loss_type="dapo",  # the mean over all tokens of the step
        max_grad_norm=grpo.max_grad_norm,
        max_steps=config.run.steps,
        shuffle_dataset=False,
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        seed=config.run.seed % 2**32,
        bf16=config.model.dtype == "bfloat16",
        use_cpu=config.run.device == "cpu",
        gradient_checkpointing=grpo.checkpointing,
    )


def train(config: Config, folder: Path, say: Callable[[str], None]) -> None:
    """Runs the steps; their records go to `folder`, lines of progress to `say`."""
    import pyarrow
    from datasets import Dataset
    from trl import GRPOTrainer

    policy, tokenizer = load_policy(config, find_model(config))
    task = make_task(**asdict(config.task))
    count = config.run.steps * config.grpo.prompts_per_step
    prompts = {p.id: p for p in (task.prompt("train", i) for i in range(count))}
    stops = stop_ids(spec_of(policy), task, tokenizer)
    policy.generation_config.eos_token_id = list(stops)
    # Nothing is put before a prompt, as in our rollouts.
    with suppress(AttributeError):
        tokenizer.add_bos_token = False
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.eos_token_id not in stops:  # it would end a response as well
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(stops[0])
    rows = [{"prompt": p.text, "prompt_id": p.id} for p in prompts.values()]
    seen = Recorded()
    watch = Watch(seen, say)
    policy.register_forward_pre_hook(watch.on_pass)
    trainer = GRPOTrainer(
        model=policy,
        reward_funcs=reward_function(task, prompts, tokenizer, stops, seen),
        args=trainer_config(config, folder),
        # A fingerprint of our own: to hash the table some versions pickle what cannot be.
        train_dataset=Dataset(pyarrow.Table.from_pylist(rows), fingerprint="prompts"),
        processing_class=tokenizer,
        callbacks=[StepClock(seen, folder, say)],
    )
    trainer._generate = watch.around(GENERATION, trainer._generate, seen.gen_s)
    rewards = watch.around(REWARDS, trainer._calculate_rewards, seen.reward_s)
    trainer._calculate_rewards = rewards
    try:
        trainer.train()
    except KeyboardInterrupt:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `timeout` may send a second one
        seen.write(folder, watch.where())
        say(f"stopped in {watch.where()}")
        raise


def main(argv: Sequence[str]) -> None:
    config = load_config(argv)
    folder = Path(config.run.root) / config.run.name
    folder.mkdir(parents=True, exist_ok=True)
    train(config, folder, lambda line: (sys.stdout.write(line + "\n"), sys.stdout.flush()))


if __name__ == "__main__":
    run_command(main)
