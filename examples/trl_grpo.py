"""Trains with TRL's GRPO trainer, once with its own generation and once with this engine.

Run from the root of the checkout: `python -m examples.trl_grpo`, after `pip install -e '.[trl]'`.
The model is the tiny one with random weights. On a GPU:

    python -m examples.trl_grpo model.path=smollm2 model.dtype=bfloat16 run.device=cuda \
        run.steps=5 grpo.prompts_per_step=16 grpo.samples_per_prompt=8 sampling.max_new_tokens=1024

Both arms start from the same policy, with the same prompts, sampling and length limit.
"""

import random
import re
import statistics
import sys

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from driver.adapters.trl import TltRollout
from driver.config.load import load_config
from driver.session.load import find_model, load_policy

SETTINGS = ["run.steps=4", "grpo.prompts_per_step=2", "grpo.samples_per_prompt=4"]
SETTINGS += ["sampling.max_new_tokens=24", "engine.strategies=[off,ngram:4,1,5]"]


def problems(count, chat):
    """Products, as messages to a chat model or as texts."""
    draw, rows = random.Random(0), []
    for _ in range(count):
        a, b = draw.randint(11, 99), draw.randint(3, 9)
        text = f"What is {a} * {b}? Think step by step." if chat else f"{a}*{b}="
        prompt = [{"role": "user", "content": text}] if chat else text
        rows.append({"prompt": prompt, "answer": str(a * b)})
    return Dataset.from_list(rows)


def reward(completions, answer, **_):
    """1 if the last number of a completion is the answer, .1 for each right digit if not."""
    rewards = []
    for completion, right in zip(completions, answer, strict=True):
        text = completion if isinstance(completion, str) else completion[0]["content"]
        last = ["", *re.findall(r"\d+", text.replace(",", ""))][-1]
        digits = sum(map(str.__eq__, last, right))
        rewards.append(1.0 if last == right else 0.1 * digits)
    return rewards


def train(config, rollout):
    """The lines that TRL logs, one for each step."""
    policy, tokenizer = load_policy(config, find_model(config))
    grpo, sampling, run = config.grpo, config.sampling, config.run
    responses = grpo.prompts_per_step * grpo.samples_per_prompt
    micro = next(n for n in (16, 8, 4, 2, 1) if responses % n == 0)
    args = GRPOConfig(
        output_dir=f"{run.root}/trl",
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=responses // micro,
        num_generations=grpo.samples_per_prompt,
        max_completion_length=sampling.max_new_tokens,
        temperature=sampling.temperature,
        learning_rate=grpo.lr,
        lr_scheduler_type="constant",
        max_steps=run.steps,
        seed=run.seed,
        bf16=config.model.dtype == "bfloat16",
        use_cpu=run.device == "cpu",
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        policy,
        reward,
        args=args,
        train_dataset=problems(run.steps * grpo.prompts_per_step, tokenizer.chat_template),
        processing_class=tokenizer,
        rollout_func=rollout,
    )
    trainer.train()
    return [line for line in trainer.state.log_history if "step_time" in line]


def comparison(trl, tlt):
    """Median and range of both arms' steps, in seconds; a ratio if the ranges do not overlap."""
    shown = [
        f"{name} {statistics.median(own):.2f} s ({min(own):.2f} to {max(own):.2f})"
        for name, own in (("trl", trl), ("tlt", tlt))
    ]
    outcome = "the ranges overlap: no clear difference"
    if max(trl) < min(tlt) or max(tlt) < min(trl):
        ratio = statistics.median(trl) / statistics.median(tlt)
        outcome = f"a step with this engine is {ratio:.2f} times as fast"
    return f"steps after the first, median (range): {', '.join(shown)}; {outcome}"


words = [*SETTINGS, *sys.argv[1:]]  # a later word wins
config = load_config(words)
seconds = {}
for name in ("trl", "tlt"):
    engine = [word for word in words if word.startswith(("engine.", "bandit."))]
    longest = 128 + config.sampling.max_new_tokens
    rollout = TltRollout(max_len=longest, settings=engine) if name == "tlt" else None
    lines = train(config, rollout)
    for step, line in enumerate(lines, 1):
        print(
            f"{name} step {step}: {line['step_time']:.2f} s  reward {line['reward']:.3f}"
            f"  length {line['completions/mean_length']:.0f}"
            f"  accept length {line.get('tlt/accept_length', 1.0):.2f}"
        )
    # The first step builds the engine and captures its graphs.
    seconds[name] = [line["step_time"] for line in lines[1:]]
    if rollout:
        rollout.close()
if config.run.steps > 1:
    print(comparison(**seconds))
