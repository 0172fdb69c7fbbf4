"""`python -m profiling.peers.trl key=value ...`: the same training by TRL's GRPO trainer.

The words are those of a run of `driver.train`. Model, prompts and their order, rewards, stop ids,
lengths, group size and learning rate are the same. Generation is that of transformers, or with
`--vllm` that of vLLM in the same process. Weights of half precision are trained without float32
masters. After every step the run's folder has the parts of `metrics.jsonl`, `rollouts.jsonl` and
`summary.json` that the benchmark reads. Needs trl, datasets, dill and multiprocess.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from driver.common.storage import write_text
from driver.config.command import run_command
from driver.config.estimators import ESTIMATORS
from driver.config.load import Config, load_config
from driver.run.assemble import prompt_encoder, stop_ids
from driver.session.load import find_model, load_policy, spec_of
from driver.tasks import Prompt, Task, make_task
from profiling.peers.vllm import VLLM
from profiling.rig.bench import say

MICRO_BATCH = 8  # limit of the responses in a forward pass of the update
GENERATION, REWARDS = "generation", "rewards"


class Recorder(TrainerCallback):
    """Times the phases of each step and writes the records of the run."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.folder, self.say, self.begin = folder, say, now()
        self.seconds: list[float] = []  # one item a step, as in the other lists
        self.phase_s: dict[str, list[float]] = {GENERATION: [], REWARDS: []}
        self.rewards: list[float] = []
        self.lengths: list[list[int]] = []

    def timed(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            begin = now()
            out = call(*args, **kwargs)
            self.phase_s[phase].append(now() - begin)
            if phase == REWARDS:
                lengths, seconds = self.lengths[-1], self.phase_s[GENERATION][-1]
                self.say(
                    f"step {len(self.lengths)}: generation ended, {sum(lengths)} tokens in"
                    f" {seconds:.1f} s, longest {max(lengths)}, reward {self.rewards[-1]:.3f}"
                )
            return out

        return wrapped

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.begin = now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(now() - self.begin)
        self.write()
        count, seconds = len(self.seconds), self.seconds[-1]
        rest = seconds - self.phase_s[GENERATION][count - 1]
        self.say(f"step {count}: ended after {seconds:.1f} s, update {rest:.1f} s")

    def lines(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        metrics, rollouts = [], []
        columns = self.seconds, *self.phase_s.values(), self.rewards, self.lengths
        steps = enumerate(zip(*columns, strict=False), 1)  # a stopped step is left out
        for step, (seconds, gen, scoring, reward, lengths) in steps:
            # Log-probs and update are one in this trainer.
            times = {"step": seconds, "gen": gen, "reward": scoring}
            times["update_actor"] = seconds - gen - scoring
            line = {"step": step, "critic/rewards/mean": reward}
            metrics.append(line | {f"timing_s/{name}": value for name, value in times.items()})
            rollouts.append({"step": step, "lengths": lengths})
        return metrics, rollouts

    def write(self) -> None:
        for name, lines in zip(("metrics", "rollouts"), self.lines(), strict=True):
            text = "".join(json.dumps(line) + "\n" for line in lines)
            write_text(self.folder / f"{name}.jsonl", text)
        write_text(self.folder / "summary.json", json.dumps({"steps": len(self.seconds)}))


def now() -> float:
    """The clock after all work of the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def reward_function(
    task: Task, prompts: dict[str, Prompt], tokenizer: Any, stops: Sequence[int], seen: Recorder
) -> Callable[..., list[float]]:
    """The task's reward with TRL's signature; records lengths and means as well."""

    def task_reward(completion_ids: list[list[int]], prompt_id: list[str], **_: Any) -> list[float]:
        values = []
        for ids, name in zip(completion_ids, prompt_id, strict=True):
            finished = bool(ids) and ids[-1] in stops
            text = tokenizer.decode(ids[:-1] if finished else ids, skip_special_tokens=False)
            values.append(float(task.reward(prompts[name], text, finished)))
        seen.rewards.append(sum(values) / len(values))
        seen.lengths.append([len(ids) for ids in completion_ids])
        return values

    return task_reward


def trainer_config(config: Config, output: Path, stops: Sequence[int], vllm: bool) -> Any:
    """`trl.GRPOConfig` with the settings of a run, and with vLLM in this process if `vllm`."""
    from trl import GRPOConfig

    more: dict[str, Any] = {}
    if vllm:
        more = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3}
        more["generation_kwargs"] = {"stop_token_ids": list(stops)}
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
        **more,
    )


def train(config: Config, folder: Path, say: Callable[[str], None], vllm: bool = False) -> None:
    """Trains; records go to `folder`, lines of progress to `say`."""
    import pyarrow
    from datasets import Dataset
    from trl import GRPOTrainer

    path = find_model(config)
    policy, tokenizer = load_policy(config, path)
    if vllm and path is not None:
        policy.name_or_path = str(path.resolve())  # from where vLLM loads it
    task = make_task(**asdict(config.task))
    count = config.run.steps * config.grpo.prompts_per_step
    prompts = {p.id: p for p in (task.prompt("train", i) for i in range(count))}
    encode = prompt_encoder(config, task, tokenizer)
    stops = stop_ids(spec_of(policy), task, encode)
    policy.generation_config.eos_token_id = list(stops)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    # TRL applies the chat template to conversations; texts get the tokenizer's special tokens.
    rows = [
        {"prompt": encode.message(p.text) if encode.uses_template else p.text, "prompt_id": p.id}
        for p in prompts.values()
    ]
    seen = Recorder(folder, say)
    reward: Any = reward_function(task, prompts, tokenizer, stops, seen)
    trainer: Any = GRPOTrainer(  # two of its methods are replaced
        model=policy,
        reward_funcs=reward,
        args=trainer_config(config, folder, stops, vllm),
        # With a given fingerprint no version tries to pickle the table.
        train_dataset=Dataset(pyarrow.Table.from_pylist(rows), fingerprint="prompts"),
        processing_class=tokenizer,
        callbacks=[seen],
    )
    trainer._generate = seen.timed(GENERATION, trainer._generate)
    trainer._calculate_rewards = seen.timed(REWARDS, trainer._calculate_rewards)
    trainer.train()


def main(argv: Sequence[str]) -> None:
    config = load_config([word for word in argv if word != VLLM])
    folder = Path(config.run.root) / config.run.name
    folder.mkdir(parents=True, exist_ok=True)
    train(config, folder, say, vllm=VLLM in argv)


if __name__ == "__main__":
    run_command(main)
