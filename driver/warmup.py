"""Supervised warm-up: the policy imitates a task's worked responses for a few hundred steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from driver.errors import UserError
from driver.sections import WarmupConfig
from driver.tasks import Task

RAMP_STEPS = 20
FINAL_LR_SHARE = 0.1
CHUNK_TOKENS = 2048  # padded tokens in one forward pass
IGNORE = -100  # label of tokens that are not learned
# Warm-up reads the train split from here on, far from the prompts that RL starts with.
FIRST_INDEX = 1 << 40


def warm_up(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    config: WarmupConfig,
    seed: int,
    progress: Callable[[int, float], None] = lambda step, loss: None,
) -> list[float]:
    """Trains the model in place on demonstrations of the train split.

    The loss is the mean cross-entropy over response tokens, the end token included; prompts are not
    learned. AdamW, a short linear ramp, then a cosine down to a tenth of `lr`.

    Args:
        model: trained in place.
        tokenizer: with an end token.
        task: its `demonstration` must not be None.
        config: steps, batch and lr.
        seed: decides which prompts are shown; the same seed gives the same weights.
        progress: called after each step with the steps done and the step's loss.

    Returns:
        The loss of each step.

    Raises:
        UserError: the task has no demonstrations.

    Example:
        >>> losses = warm_up(model, tokenizer, task, WarmupConfig(steps=200), 0)  # doctest: +SKIP
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.98))
    index = FIRST_INDEX * (seed + 1)
    losses = []
    model.train()
    for step in range(config.steps):
        for group in optimizer.param_groups:
            group["lr"] = config.lr * _lr_share(step, config.steps)
        batch = [_example(tokenizer, task, index + i) for i in range(config.batch)]
        index += config.batch
        losses.append(_accumulate(model, batch))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        progress(step + 1, losses[-1])
    model.eval()
    return losses


def _lr_share(step: int, steps: int) -> float:
    cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
    return min(1.0, (step + 1) / RAMP_STEPS) * max(FINAL_LR_SHARE, cosine)


def _example(
    tokenizer: PreTrainedTokenizerBase, task: Task, index: int
) -> tuple[list[int], list[int]]:
    """Prompt and response ids."""
    prompt = task.prompt("train", index)
    worked = task.demonstration(prompt)
    if worked is None:
        raise UserError(f"task.name={task.name}: has no demonstrations; set warmup.steps=0")
    ids = tokenizer.encode(prompt.text, add_special_tokens=False)
    return ids, [*tokenizer.encode(worked, add_special_tokens=False), tokenizer.eos_token_id]


def _accumulate(model: PreTrainedModel, batch: Sequence[tuple[list[int], list[int]]]) -> float:
    """Adds the gradient of the batch's mean loss; returns that loss."""
    response_tokens = sum(len(response) for _, response in batch)
    total = 0.0
    for chunk in _chunks(batch):
        tokens, labels = _pad(chunk, model.device)
        # Right padding under a causal mask: no real token sees a pad, so no mask is passed.
        logits = model(input_ids=tokens, use_cache=False).logits  # [B, T, V]
        loss = F.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(),
            labels[:, 1:].flatten(),
            ignore_index=IGNORE,
            reduction="sum",
        )
        loss = loss / response_tokens
        loss.backward()
        total += loss.item()
    return total


def _chunks(
    batch: Sequence[tuple[list[int], list[int]]],
) -> Iterator[list[tuple[list[int], list[int]]]]:
    """Cuts the batch by length: with a heavy tail, one padded batch would be mostly padding."""
    chunk: list[tuple[list[int], list[int]]] = []
    for example in sorted(batch, key=lambda pair: len(pair[0]) + len(pair[1])):
        length = len(example[0]) + len(example[1])
        if chunk and (len(chunk) + 1) * length > CHUNK_TOKENS:
            yield chunk
            chunk = []
        chunk.append(example)
    yield chunk


def _pad(
    chunk: Sequence[tuple[list[int], list[int]]], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Token ids and labels, int64 [B, T], right-padded."""
    length = max(len(prompt) + len(response) for prompt, response in chunk)
    tokens = torch.zeros(len(chunk), length, dtype=torch.long)
    labels = torch.full_like(tokens, IGNORE)
    for row, (prompt, response) in enumerate(chunk):
        end = len(prompt) + len(response)
        tokens[row, :end] = torch.tensor([*prompt, *response])
        labels[row, len(prompt) : end] = torch.tensor(response)
    return tokens.to(device), labels.to(device)
