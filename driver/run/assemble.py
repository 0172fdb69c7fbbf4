"""Builds the parts of a run: policy, target, cache, drafter, bandit, engine."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils.logging import disable_progress_bar

import tlt_ext

from ..common.errors import UserError
from ..common.spans import Sink
from ..config.load import Config
from ..config.sections import EngineConfig
from ..config.strategy import OFF, Strategy, parse_strategies
from ..drafter.overlap import OverlapTuner
from ..drafter.trainer import SpotTrainer
from ..model import tiny
from ..model.checkpoint import load_model
from ..model.drafter import Drafter, DraftSpec
from ..model.fetch import resolve_model
from ..model.kv_cache import KvCache
from ..model.prompts import PromptEncoder
from ..model.spec import ModelSpec, read_json
from ..model.target import TargetModel
from ..rollout.bandit import Bandit
from ..rollout.draft_runner import DraftRunner
from ..rollout.engine import RolloutEngine
from ..rollout.pages import pages_for
from ..rollout.proposers import make_proposers
from ..tasks import Split, Task

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
PROMPT_SAMPLE = 64  # prompts of a generated task whose lengths are checked
CHUNK = 512  # prompts tokenized at once


@dataclass
class Rollout:
    """The rollout side of a run."""

    target: TargetModel
    engine: RolloutEngine
    bandit: Bandit
    spot: SpotTrainer | None
    tuner: OverlapTuner | None = None  # of `spot`

    def watch(self, sink: Sink) -> None:
        """Sends the spans of the engine and of the spot trainer to `sink`."""
        self.engine.spans.sink = sink
        if self.spot is not None:
            self.spot.spans.sink = sink

    def fix(self, strategy: Strategy) -> None:
        """Makes the engine use one strategy wherever it can run, and `off` elsewhere."""
        engine = self.engine
        config = replace(engine.bandit.config, policy=str(strategy))
        engine.bandit = Bandit([OFF, strategy], config, engine.config.spec_max_batch)

    def update_weights(self, state: dict[str, torch.Tensor], version: int) -> None:
        """Copies the weights of a new policy into the engine, in place."""
        self.target.load_weights(state)
        self.engine.target_version = version
        if self.spot is not None:
            self.spot.start_step(version)


def find_model(config: Config, report: Callable[[str], None] = lambda line: None) -> Path | None:
    """The folder of `model.path`, downloaded if necessary; None for the tiny model.

    Raises:
        UserError: it cannot be found, or the engine cannot run it.
    """
    model = config.model
    if model.path == "tiny":
        return None
    return resolve_model(model.path, model.cache, report)


def load_policy(config: Config, folder: Path | None) -> tuple[PreTrainedModel, Tokenizer]:
    """The trainable policy and its tokenizer.

    Args:
        config: `model.*` and the seed.
        folder: in Hugging Face layout; None = the tiny model, random.

    Raises:
        UserError: the checkpoint is damaged or not supported, there is no usable tokenizer, or the
            device does not exist.
    """
    use_device(config.run.device)
    disable_progress_bar()  # a run shows its own progress
    policy: Any  # the annotation of `PreTrainedModel.to` takes no device
    if folder is None:
        policy = tiny.build_policy(config.model, config.run.seed)
        return policy.to(config.run.device), load_tokenizer(None)
    policy = load_model(folder, getattr(torch, config.model.dtype))
    policy = policy.to(config.run.device)
    tokenizer = load_tokenizer(folder)
    check_vocabulary(folder, tokenizer, spec_of(policy))
    return policy, tokenizer


def check_vocabulary(folder: Path, tokenizer: Tokenizer, spec: ModelSpec) -> None:
    """Rejects a tokenizer with tokens that the embedding does not have."""
    token, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if largest >= spec.vocab_size:
        raise UserError(
            f"model.path={folder}: the tokenizer has token {token!r} with id {largest}, but the"
            f" embedding has {spec.vocab_size} rows; enlarge it or use the model's own tokenizer"
        )


def load_tokenizer(folder: Path | None) -> Tokenizer:
    """The tokenizer of a folder; None = the tiny model's.

    Raises:
        UserError: the folder has no usable tokenizer.
    """
    if folder is None:
        return tiny.build_tokenizer()
    where = f"model.path={folder}: no usable tokenizer"
    # Without its files a family's class makes an empty tokenizer.
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        raise UserError(f"{where}; copy tokenizer.json there")
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # libraries raise many types here, which differ by version
        reason = f"{type(error).__name__}: {error}"[:200]
        settings = folder / "tokenizer_config.json"
        if settings.exists() and "auto_map" in read_json(settings):
            reason = "it needs code from the model folder, which is not executed"
        raise UserError(f"{where} ({reason}); copy tokenizer.json there again") from None


def prompt_encoder(config: Config, task: Task, tokenizer: Tokenizer) -> PromptEncoder:
    """The encoder of a task's prompts, in the form set by `task.chat_template`."""
    return PromptEncoder(tokenizer, config.task.chat_template, task.is_message)


def prompt_lengths(task: Task, encode: PromptEncoder) -> Iterator[tuple[int, str]]:
    """Tokens and location of each prompt of a finite data set, or of the first generated ones.

    Raises:
        UserError: a prompt has no tokens.
    """
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
    """Tokens of the longest prompt, before a warm-up has taken its minutes.

    Raises:
        UserError: a prompt has no tokens, or a prompt and a response of full length exceed the
            context. The line says where the longest prompt is.
    """
    found = list(prompt_lengths(task, encode))
    length, place = max(found)
    too_long = sum(each + max_new_tokens > max_position for each, _ in found)
    check_context(length, max_new_tokens, max_position, f"{place}: ", too_long)
    return length


def check_context(
    prompt_len: int, max_new_tokens: int, max_position: int, place: str = "", count: int = 1
) -> None:
    """Rejects a prompt whose response may exceed the context.

    Args:
        prompt_len, max_new_tokens, max_position: tokens.
        place: location of the prompt, for the message.
        count: number of prompts that are too long.

    Raises:
        UserError: prompt and response may exceed the context.
    """
    if prompt_len + max_new_tokens > max_position:
        others = f" (one of {count} prompts that do)" if count > 1 else ""
        raise UserError(
            f"{place}prompt of {prompt_len} tokens and sampling.max_new_tokens={max_new_tokens}"
            f" exceed the context of {max_position}{others}; shorten or remove them, lower"
            " sampling.max_new_tokens, or use a model with a longer context"
        )


def check_pages(prompt_len: int, max_new_tokens: int, config: EngineConfig) -> None:
    """Rejects a page pool that is too small for one request, before the warm-up starts.

    Raises:
        UserError: `engine.num_pages` is too small.
    """
    needed = pages_for(prompt_len + max_new_tokens, config.page_size) + 1  # a shared partial page
    if 0 < config.num_pages < needed:
        raise UserError(
            f"engine.num_pages={config.num_pages}: one request of {prompt_len + max_new_tokens}"
            f" tokens needs {needed} pages of {config.page_size}; raise it, or set"
            " 0 for the default size"
        )


def use_device(device: str) -> None:
    """Makes a card the current device, which determines the device of streams and events.

    Raises:
        UserError: torch does not find this device.
    """
    kind, _, index = device.partition(":")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"run.device={device}: torch sees {torch.cuda.device_count()} CUDA devices; use cpu"
        )
    if kind == "cuda":
        torch.cuda.set_device(int(index or 0))


def end_ids(spec: ModelSpec, tokenizer: Tokenizer) -> tuple[int, ...]:
    """End tokens of the model: those of its configuration, and that of its tokenizer.

    A warm-up trains with the tokenizer's end token, so both must end a response. Warns if they
    differ or if there is none.
    """
    own = tokenizer.eos_token_id
    if own is None or own in spec.eos_ids:
        if not spec.eos_ids:
            warnings.warn(
                "neither the model nor its tokenizer has an end token: only"
                " sampling.max_new_tokens ends a response",
                stacklevel=2,
            )
        return spec.eos_ids
    warnings.warn(
        f"the end token of the tokenizer is {own}, those of the model's configuration are"
        f" {list(spec.eos_ids)}: each of them ends a response",
        stacklevel=2,
    )
    return (*spec.eos_ids, own)


def stop_ids(spec: ModelSpec, task: Task, encode: PromptEncoder) -> tuple[int, ...]:
    """Ids that end a response: the end tokens, and stop texts of the task that are one token.

    With a chat template a response ends with an end token, so stop texts are not used.
    """
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
                stacklevel=2,
            )
    return ends


def spec_of(policy: PreTrainedModel) -> ModelSpec:
    """The engine's description of a transformers model."""
    head, embedding = policy.get_output_embeddings(), policy.get_input_embeddings()
    stated = {
        "architectures": [type(policy).__name__],
        "eos_token_id": eos_ids(policy),
        "tie_word_embeddings": head.weight is embedding.weight,
    }
    return ModelSpec.from_config({**policy.config.to_dict(), **stated})


def eos_ids(policy: PreTrainedModel) -> list[int]:
    """Every id that ends a response, from the generation settings first."""
    eos = policy.generation_config.eos_token_id
    if eos is None:
        eos = policy.config.eos_token_id
    return [eos] if isinstance(eos, int) else list(eos or [])


@dataclass
class Parts:
    """The parts that hold the memory of rollouts."""

    target: TargetModel
    cache: KvCache
    drafter: Drafter | None
    runner: DraftRunner | None  # the drafter's twin at inference


def build_parts(
    config: Config, spec: ModelSpec, weights: dict[str, torch.Tensor], longest: int, device: str
) -> Parts:
    """Target, cache and drafter, for a run or, on the meta device, for a memory estimate.

    Args:
        config, spec, weights, longest: see `build_rollout`.
        device: device of the parts; `run.device` determines which parts are built.
    """
    engine, arms = config.engine, parse_strategies(config.engine.strategies)
    dtype = getattr(torch, config.model.dtype)
    target = TargetModel(
        spec,
        weights,
        device=device,
        dtype=dtype,
        max_rows=max_rows(engine, arms),
    )
    num_pages = engine.num_pages or auto_pages(engine, arms, longest)
    try:
        cache = KvCache.allocate(
            spec,
            num_pages=num_pages,
            page_size=engine.page_size,
            feature_size=target.feature_size if engine.needs_drafter else 0,
            dtype=dtype,
            device=device,
        )
    except RuntimeError as error:  # the CPU's allocator has no type of its own for it
        raise UserError(
            f"engine.num_pages={num_pages}: the KV cache does not fit ({error}); lower it or"
            " engine.max_batch, or see the memory of each part with driver.train --dry-run"
        ) from error
    if not engine.needs_drafter:
        return Parts(target, cache, None, None)
    shape = DraftSpec.of(spec, draft_vocab=config.drafter.draft_vocab)
    drafter = build_drafter(shape, target, config.run.seed, on_card=config.run.device != "cpu")
    runner = DraftRunner(shape, target, cache, config.run.seed)
    return Parts(target, cache, drafter, runner)


def build_rollout(
    config: Config, spec: ModelSpec, weights: dict[str, torch.Tensor], longest: int
) -> Rollout:
    """The engine of a run with its proposers and spot trainer.

    Args:
        config: `engine.*`, `bandit.*`, `drafter.*`, `spot.*`.
        spec: of the policy.
        weights: its tensors; the engine keeps its own fused copy.
        longest: tokens of the longest request, for the automatic size of the page pool.
    """
    seed, arms = config.run.seed, parse_strategies(config.engine.strategies)
    parts = build_parts(config, spec, weights, longest, config.run.device)
    target, cache, runner = parts.target, parts.cache, parts.runner
    spot = None
    if runner is not None and parts.drafter is not None:
        spot = SpotTrainer(parts.drafter, runner, target, cache, config.spot, config.drafter, seed)
    bandit = Bandit(arms, config.bandit, config.engine.spec_max_batch, seed)
    engine = RolloutEngine(
        target,
        cache,
        config.engine,
        bandit,
        make_proposers(seed, runner, config.engine.verify),
        seed,
        observer=spot,
    )
    tlt_ext.set_num_threads(config.run.threads)
    tuner = OverlapTuner(spot, engine.runner.decode_s) if spot else None
    return Rollout(target, engine, bandit, spot, tuner)


def build_drafter(
    shape: DraftSpec, target: TargetModel, seed: int, on_card: bool = False
) -> Drafter:
    """A drafter with random weights, on the device of its target.

    Args:
        shape, target, seed: of the drafter.
        on_card: whether a target on the meta device represents one on a card.
    """
    drafter = Drafter(shape, seed).to(target.device)
    if on_card or target.device.type == "cuda":
        drafter.lm_head.to(target.head.dtype)  # a copy of the target's head, never trained
    drafter.refresh_head(target.head)
    return drafter


def longest_request(config: Config, spec: ModelSpec, prompt_len: int) -> int:
    """Tokens of the longest request: later prompts may be longer than the first ones."""
    return min(config.sampling.max_new_tokens + 2 * prompt_len, spec.max_position)


def max_rows(config: EngineConfig, arms: tuple[Strategy, ...]) -> int:
    """Rows of the largest pass: plain, speculative or prefill."""
    speculative = max((arm.num_verify for arm in arms), default=1)
    rows = min(config.max_batch, config.spec_max_batch) * speculative
    if config.spec_max_rows:
        rows = min(rows, config.spec_max_rows)
    return max(config.max_batch, rows, config.prefill_chunk)


def auto_pages(config: EngineConfig, arms: tuple[Strategy, ...], longest: int) -> int:
    """Pages that hold `max_batch` of the longest requests and the rows in flight of the tail."""
    flight = max((max(arm.num_verify, arm.depth * arm.top_k) for arm in arms), default=1)
    batch = min(config.max_batch, config.spec_max_batch)
    size = config.page_size
    return config.max_batch * (pages_for(longest, size) + 1) + batch * (pages_for(flight, size) + 1)
