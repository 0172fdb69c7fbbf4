"""`python -m profiling.trl_arm key=value ...`: the same training by TRL's GRPO trainer.

The words are a run's. Model, prompts and their order, rewards, stop ids, lengths, group size and
learning rate are those of `driver.train`; generation is that of transformers, and weights of half
precision are trained as they are, without float32 masters. It leaves
`metrics.jsonl`, `rollouts.jsonl` and `summary.json` in the run's folder, as far as the benchmark
reads them, after every step. Needs trl and datasets, and what these import: pyarrow, pandas, dill,
multiprocess, xxhash.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from driver.assemble import find_model, load_policy, spec_of, stop_ids
from driver.command import run_command
from driver.config import Config, load_config
from driver.storage import write_text
from driver.tasks import Prompt, Task, make_task

MICRO_BATCH = 8  # most responses of a forward pass of the update


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

    def write(self, folder: Path) -> None:
        """The records so far: a run that its time limit ends leaves whole steps."""
        for name, lines in zip(("metrics", "rollouts"), self.lines(), strict=True):
            write_text(folder / f"{name}.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
        write_text(folder / "summary.json", json.dumps({"steps": len(self.seconds)}))


class StepClock(TrainerCallback):
    """Notes the seconds of each optimizer step, generation included, and has them written."""

    def __init__(self, recorded: Recorded, folder: Path) -> None:
        self.recorded, self.folder, self.begin = recorded, folder, 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.begin = now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.recorded.seconds.append(now() - self.begin)
        self.recorded.write(self.folder)


def now() -> float:
    """The clock, once the device has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(call: Callable[..., Any], into: list[float]) -> Callable[..., Any]:
    """`call`, its seconds appended to `into`."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        begin = now()
        try:
            return call(*args, **kwargs)
        finally:
            into.append(now() - begin)

    return wrapped


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
        epsilon_high=grpo.clip_high,
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


def train(config: Config, folder: Path) -> None:
    """Runs the steps; their records go to `folder`."""
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
    rows = [{"prompt": p.text, "prompt_id": p.id} for p in prompts.values()]
    seen = Recorded()
    trainer = GRPOTrainer(
        model=policy,
        reward_funcs=reward_function(task, prompts, tokenizer, stops, seen),
        args=trainer_config(config, folder),
        # A fingerprint of our own: to hash the table some versions pickle what cannot be.
        train_dataset=Dataset(pyarrow.Table.from_pylist(rows), fingerprint="prompts"),
        processing_class=tokenizer,
        callbacks=[StepClock(seen, folder)],
    )
    trainer._generate = timed(trainer._generate, seen.gen_s)
    trainer._calculate_rewards = timed(trainer._calculate_rewards, seen.reward_s)
    trainer.train()


def main(argv: Sequence[str]) -> None:
    config = load_config(argv)
    folder = Path(config.run.root) / config.run.name
    folder.mkdir(parents=True, exist_ok=True)
    train(config, folder)


if __name__ == "__main__":
    run_command(main)
