"""Prompts and limits of a run: their encoding, their lengths, what ends a response."""

import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict

from transformers import PreTrainedTokenizerBase as Tokenizer

from ..common.errors import SharedWarning, UserError
from ..common.tensor_parallel import check_group
from ..config.load import Config
from ..config.strategy import parse_strategies
from ..model.prompts import PromptEncoder
from ..model.spec import ModelSpec
from ..rollout.request import Request, SamplingParams
from ..session.load import end_ids
from ..tasks import Split, Task, make_task

PROMPT_SAMPLE = 512  # prompts of a generated task whose lengths are checked
CHUNK = 512  # prompts tokenized at once


def prompt_encoder(config: Config, task: Task, tokenizer: Tokenizer) -> PromptEncoder:
    """The encoder of a task's prompts, in the form set by `task.chat_template`."""
    return PromptEncoder(tokenizer, config.task.chat_template, task.is_message)


def prompt_lengths(task: Task, encode: PromptEncoder) -> Iterator[tuple[int, str]]:
    """Tokens and location of each prompt of a finite data set, or of the first generated ones."""
    samples: dict[Split, int] = {"train": PROMPT_SAMPLE, "eval": 0}
    for split, sample in samples.items():
        count = task.size(split) or sample
        for first in range(0, count, CHUNK):
            indices = range(first, min(first + CHUNK, count))
            rows = encode.batch([task.prompt(split, i).text for i in indices])
            for index, row in zip(indices, rows, strict=True):
                place = task.place(split, index) or f"task {task.name}, {split} prompt {index}"
                if not row:
                    raise UserError(f"{place}: the prompt has no tokens")
                yield len(row), place


def check_prompts(task: Task, encode: PromptEncoder, max_new_tokens: int, max_position: int) -> int:
    """Tokens of the longest prompt; UserError if one is empty or may exceed the context."""
    found = list(prompt_lengths(task, encode))
    length, place = max(found)
    too_long = sum(each + max_new_tokens > max_position for each, _ in found)
    check_context(length, max_new_tokens, max_position, f"{place}: ", too_long)
    return length


def check_context(
    prompt_len: int, max_new_tokens: int, max_position: int, place: str = "", count: int = 1
) -> None:
    """Rejects a prompt, the longest of `count`, whose response may exceed the context."""
    if prompt_len + max_new_tokens > max_position:
        others = f" (one of {count} prompts that do)" if count > 1 else ""
        raise UserError(
            f"{place}prompt of {prompt_len} tokens and sampling.max_new_tokens={max_new_tokens}"
            f" exceed the context of {max_position}{others}; shorten or remove them, lower"
            " sampling.max_new_tokens, or use a model with a longer context"
        )


def check_engine(config: Config, spec: ModelSpec, prompt_len: int) -> None:
    """Rejects an engine that cannot run the longest prompt, before the warm-up starts."""
    engine, params = config.engine, SamplingParams(max_new_tokens=config.sampling.max_new_tokens)
    longest = Request(0, 0, (0,) * prompt_len, params)
    longest.check(
        engine.max_len or spec.max_position, engine.page_size, engine.num_pages or sys.maxsize
    )


def check_ranks(config: Config, ranks: int) -> None:
    """Raises UserError if so many ranks cannot share the prompts and the model of a run."""
    shared, prompts = config.engine.tensor_parallel, config.grpo.prompts_per_step
    check_group(ranks, shared)
    if ranks == 1 and config.spot.mode == "coordinated":
        raise UserError(
            "spot.mode=coordinated: expected several ranks, got one; start with torchrun, or choose"
            " serial, overlapped or auto"
        )
    if shared > 1 and (task := make_task(**asdict(config.task))).has_turns:
        raise UserError(
            f"engine.tensor_parallel={shared}: task {task.name} has turns, whose answers come at"
            " any time; set it to 1"
        )
    if ranks > shared * prompts:
        raise UserError(
            f"{ranks} ranks for grpo.prompts_per_step={prompts}: each"
            f"{f' group of {shared}' if shared > 1 else ''} needs one prompt; raise it or use fewer"
        )


def warn_of_deep_drafts(config: Config) -> None:
    """Warns of strategies that draft far more levels than the training of the drafter unrolls."""
    unroll, arms = config.drafter.unroll, parse_strategies(config.engine.strategies)
    deep = [str(arm) for arm in arms if arm.needs_drafter and arm.depth > 2 * (unroll + 1)]
    if deep and (config.spot.mode != "off" or config.warmup.drafter_steps):
        warnings.warn(
            f"drafter.unroll={unroll}: too few for {', '.join(deep)}, whose deepest drafts will"
            " rarely be right; raise it or draft fewer levels",
            SharedWarning,
            stacklevel=2,
        )


def stop_ids(spec: ModelSpec, task: Task, encode: PromptEncoder) -> tuple[int, ...]:
    """End tokens and, without a chat template, stop texts of the task that are one token."""
    ends = end_ids(spec, encode.tokenizer)
    if encode.uses_template:
        return ends
    for text in task.stop:
        ids = encode.tokenizer.encode(text, add_special_tokens=False)
        if len(ids) == 1:
            ends = (*ends, ids[0])
        else:
            warnings.warn(
                f"task {task.name}: its stop text {text!r} is {len(ids)} tokens of this model;"
                " only the model's own end token will end a response",
                SharedWarning,
                stacklevel=2,
            )
    return ends


def longest_request(config: Config, spec: ModelSpec, prompt_len: int) -> int:
    """Tokens of the longest request: later prompts may be longer than the first ones."""
    longest = config.engine.max_len or config.sampling.max_new_tokens + 2 * prompt_len
    return min(longest, spec.max_position)
