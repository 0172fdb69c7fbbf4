"""Makes the parts of a session from a model, with defaults for the device and its memory."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from ..common.errors import UserError
from ..common.numbers import shown
from ..common.storage import user_path
from ..config.load import Config, load_config
from ..config.strategy import parse_strategies
from ..model.prompts import PromptEncoder
from ..model.spec import ModelSpec
from ..rollout.request import SamplingParams
from .load import end_ids, find_model, load_policy, load_tokenizer, spec_of, use_device
from .parts import (
    Rollout,
    adopt_drafter,
    auto_pages,
    build_rollout,
    drafter_state,
    recorded_features,
)

FREE_SHARE = 0.8  # of the device's free memory, for the engine's weights and KV cache
SHARED_FREE_SHARE = 0.3  # the same beside a live model, which is trained on the device
BATCH = {"cpu": 16, "cuda": 256}  # default of `max_batch`


def configure(
    model: str | PreTrainedModel,
    *,
    drafter: str | None,
    train_drafter: bool,
    device: str | None,
    seed: int,
    max_batch: int | None,
    max_len: int | None,
    settings: Sequence[str],
) -> tuple[Config, dict[str, Any] | None]:
    """The configuration of a session, and the state of its drafter.

    Args:
        model, drafter, train_drafter, device, seed, max_batch, max_len, settings: see
            `Session.from_pretrained`.
    """
    if not (max_len is None or (isinstance(max_len, Integral) and max_len >= 2)):
        raise UserError(f"max_len: must be at least 2, prompt and response, got {shown(max_len)}")
    live = model if isinstance(model, PreTrainedModel) else None
    if live is None and not isinstance(model, (str, Path)):
        raise UserError(
            "model: must be a folder, a name or a transformers model, got"
            f" {type(model).__name__}; unwrap it"
        )
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        device = device if live is None else str(live.device)
    device = str(device)  # of a `torch.device`
    kind = device.partition(":")[0]
    dtype = {"cpu": "float32"}.get(kind, "bfloat16")
    words = [
        f"preset={'tiny' if kind == 'cpu' else 'h100'}",
        f"model.path={model if live is None else 'tiny'}",
        f"model.dtype={dtype if live is None else str(live.dtype).removeprefix('torch.')}",
        f"run.device={device}",
        f"run.seed={seed}",
        f"engine.max_batch={BATCH.get(kind, 1) if max_batch is None else max_batch}",
        f"engine.max_len={max_len or 0}",
        "engine.num_pages=0",
        f"spot.mode={'serial' if train_drafter else 'off'}",
    ]
    if drafter is None and not train_drafter:
        words.append("engine.strategies=off ngram:4,1,5")
    state = None
    if drafter is not None:
        if not isinstance(drafter, (str, Path)):
            raise UserError(f"drafter: must be a folder, got {shown(drafter)}")
        state = drafter_state(user_path(drafter))
        if state is None:
            raise UserError(
                f"drafter={drafter}: has no drafter (state/spot.pt); name a checkpoint of tlt train"
            )
        words.append(f"drafter.draft_vocab={len(state['drafter']['d2t'])}")
    config = load_config([*words, *settings])
    if config.engine.tensor_parallel > 1:
        raise UserError(
            f"engine.tensor_parallel={config.engine.tensor_parallel}: a session of one process has"
            " the whole model; set it to 1, or use tlt train"
        )
    return config, state


def load(
    model: str | PreTrainedModel, tokenizer: Tokenizer | str | None, config: Config
) -> tuple[PreTrainedModel, Tokenizer | None]:
    """The policy and its tokenizer, if there is one."""
    use_device(config.run.device)
    if isinstance(tokenizer, (str, Path)):
        tokenizer = load_tokenizer(user_path(tokenizer), "tokenizer")
    if not (tokenizer is None or isinstance(tokenizer, Tokenizer)):
        raise UserError(f"tokenizer: must be a tokenizer or its folder, got {shown(tokenizer)}")
    if isinstance(model, PreTrainedModel):
        return model, tokenizer
    policy, own = load_policy(config, find_model(config))
    return policy, tokenizer or own


def build(
    policy: PreTrainedModel,
    tokenizer: Tokenizer | None,
    config: Config,
    drafter: dict[str, Any] | None,
    shared: bool,
) -> tuple[Rollout, PromptEncoder | None, SamplingParams]:
    """The arguments of a session.

    Args:
        policy, tokenizer: the model.
        config: of the session; 0 pages = what the memory holds, at most what a full batch needs;
            `engine.max_len` of 0 = the context of the model.
        drafter: the state of a trained one.
        shared: the policy stays on the device.
    """
    spec = spec_of(policy)
    longest = min(config.engine.max_len or spec.max_position, spec.max_position)
    if not config.engine.num_pages:
        share = SHARED_FREE_SHARE if shared else FREE_SHARE
        pages = _pages(config, spec, longest, share * _free_bytes(config.run.device))
        config = replace(config, engine=replace(config.engine, num_pages=pages))
    rollout = build_rollout(config, spec, policy.state_dict(), longest)
    adopt_drafter(rollout.spot, drafter, _refuse_drafter)
    limit = min(config.sampling.max_new_tokens, longest // 2)
    if tokenizer is None:
        return rollout, None, SamplingParams(max_new_tokens=limit, stop_ids=spec.eos_ids)
    encode = PromptEncoder(tokenizer, config.task.chat_template)
    params = SamplingParams(max_new_tokens=limit, stop_ids=end_ids(spec, tokenizer))
    return rollout, encode, params


def _refuse_drafter(line: str) -> None:
    raise UserError("drafter: its shape is not that of the model's drafter; see drafter.*")


def _free_bytes(device: str) -> int:
    """Free memory of a card, or all memory of the machine, which is used when it is written."""
    if device == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return torch.cuda.mem_get_info(torch.device(device))[0]


def _pages(config: Config, spec: ModelSpec, longest: int, free_bytes: float) -> int:
    """Pages for `engine.max_batch` of the longest requests, or as many as the memory holds.

    Args:
        config: of the session.
        spec: of the model.
        longest: tokens of a request.
        free_bytes: for the engine's copy of the weights and the KV cache.
    """
    engine, arms = config.engine, parse_strategies(config.engine.strategies)
    numbers = 2 * (spec.num_layers + engine.needs_drafter) * spec.num_kv_heads * spec.head_dim
    numbers += recorded_features(config, spec.hidden_size)
    each = getattr(torch, config.model.dtype).itemsize
    weights = sum(math.prod(shape) for shape in spec.shapes().values())
    fit = int((free_bytes / each - weights) // (numbers * engine.page_size))
    return max(1, min(auto_pages(engine, arms, longest), fit))
