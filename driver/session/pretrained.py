"""Makes the parts of a session from a model, with defaults for the device and its memory."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from ..common.errors import UserError
from ..common.memory import host_bytes
from ..common.numbers import shown
from ..common.storage import user_path
from ..config.load import Config, load_config
from ..config.strategy import parse_strategies
from ..model.checkpoint import check_finite
from ..model.prompts import PromptEncoder
from ..model.spec import ModelSpec
from ..rollout.request import SamplingParams
from . import parts
from .load import end_ids, find_model, load_policy, load_tokenizer, spec_of, use_device

FREE_SHARE = 0.8  # of the device's free memory, for the engine's weights and KV cache
SHARED_FREE_SHARE = 0.3  # the same beside a live model, which is trained on the device
BATCH = {"cpu": 16, "cuda": 256}  # default of `max_batch`


@contextmanager
def torch_defaults() -> Iterator[None]:
    """torch's defaults inside the block; a program may have set others for its own tensors."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"), torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.set_default_dtype(before)


@torch_defaults()
def build(
    model: str | PreTrainedModel,
    tokenizer: Tokenizer | str | None,
    drafter: str | None,
    train_drafter: bool,
    device: str | None,
    seed: int,
    max_batch: int | None,
    max_len: int | None,
    settings: Sequence[str],
) -> tuple[parts.Rollout, PromptEncoder | None, SamplingParams, dict[str, Any]]:
    """The arguments of a session, from those of `Session.from_pretrained`."""
    if not (max_len is None or (isinstance(max_len, Integral) and max_len >= 2)):
        raise UserError(f"max_len: must be at least 2, prompt and response, got {shown(max_len)}")
    check_words(settings)
    if not isinstance(model, (str, Path, PreTrainedModel)):
        raise UserError(
            "model: must be a folder, a name or a transformers model, got"
            f" {type(model).__name__}; unwrap it"
        )
    if isinstance(model, PreTrainedModel):
        check_finite(model.state_dict(), model.dtype, "model")
    words = _defaults(model, device)
    words += [
        f"run.seed={seed}",
        f"engine.max_len={max_len or 0}",
        "engine.num_pages=0",
        f"spot.mode={'serial' if train_drafter else 'off'}",
    ]
    if max_batch is not None:
        words.append(f"engine.max_batch={max_batch}")
    state = None
    if drafter is not None:
        state = _read_drafter(drafter)
        words.append(f"drafter.draft_vocab={len(state['drafter']['d2t'])}")
    elif not train_drafter:
        words.append("engine.strategies=off ngram:4,1,5")
    config = load_config([*words, *settings])
    if config.engine.tensor_parallel > 1:
        raise UserError(
            f"engine.tensor_parallel={config.engine.tensor_parallel}: a session of one process has"
            " the whole model; set it to 1, or use tlt train"
        )
    needs_drafter, arms = config.engine.needs_drafter, " ".join(config.engine.strategies)
    if (train_drafter or state is not None) and not needs_drafter:
        raise UserError(
            f"engine.strategies={arms}: none uses the drafter; add a learned or hybrid one, or"
            " leave out drafter and train_drafter"
        )
    if needs_drafter and state is None and config.spot.mode == "off":
        raise UserError(
            f"engine.strategies={arms}: a learned or hybrid one needs a drafter; give drafter or"
            " train_drafter=True"
        )
    policy, encoder = _load(model, tokenizer, config)
    spec = spec_of(policy)
    longest = min(config.engine.max_len or spec.max_position, spec.max_position)
    if not config.engine.num_pages:
        share = SHARED_FREE_SHARE if policy is model else FREE_SHARE
        pages = _pages(config, spec, longest, share * _free_bytes(config.run.device))
        config = replace(config, engine=replace(config.engine, num_pages=pages))
    rollout = parts.build_rollout(config, spec, policy.state_dict(), longest)
    parts.adopt_drafter(rollout.spot, state, _refuse_drafter)
    ends = spec.eos_ids if encoder is None else end_ids(spec, encoder.tokenizer)
    limit = min(config.sampling.max_new_tokens, longest // 2)
    params = SamplingParams(config.sampling.temperature, max_new_tokens=limit, stop_ids=ends)
    return rollout, encoder, params, policy.config.to_dict()


def check_words(settings: Sequence[str]) -> None:
    wrong = isinstance(settings, (str, Mapping))
    if wrong or not all(isinstance(word, str) for word in settings):
        raise UserError(f"settings: must be a list of key=value words, got {shown(settings)}")


def _defaults(model: str | PreTrainedModel, device: str | None) -> list[str]:
    live = model if isinstance(model, PreTrainedModel) else None
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        device = device if live is None else str(live.device)
    kind = str(device).partition(":")[0]
    dtype = "float32" if kind == "cpu" else "bfloat16"
    return [
        f"preset={'tiny' if kind == 'cpu' else 'h100'}",
        f"model.path={model if live is None else 'tiny'}",
        f"model.dtype={dtype if live is None else str(live.dtype).removeprefix('torch.')}",
        f"run.device={device}",
        f"engine.max_batch={BATCH.get(kind, 1)}",
    ]


def _read_drafter(folder: str) -> dict[str, Any]:
    if not isinstance(folder, (str, Path)):
        raise UserError(f"drafter: must be a folder, got {shown(folder)}")
    state = parts.drafter_state(user_path(folder))
    if state is None:
        raise UserError(
            f"drafter={folder}: has no drafter (state/spot.pt); name a checkpoint of tlt train or a"
            " folder of Session.save_drafter"
        )
    return state


def _load(
    model: str | PreTrainedModel, tokenizer: Tokenizer | str | None, config: Config
) -> tuple[PreTrainedModel, PromptEncoder | None]:
    """The policy, and the encoder of its prompts if there is a tokenizer."""
    use_device(config.run.device)
    if isinstance(tokenizer, (str, Path)):
        tokenizer = load_tokenizer(user_path(tokenizer), "tokenizer")
    if not (tokenizer is None or isinstance(tokenizer, Tokenizer)):
        raise UserError(f"tokenizer: must be a tokenizer or its folder, got {shown(tokenizer)}")
    if not isinstance(model, PreTrainedModel):
        model, own = load_policy(config, find_model(config))
        tokenizer = tokenizer or own
    encoder = None if tokenizer is None else PromptEncoder(tokenizer, config.task.chat_template)
    return model, encoder


def _refuse_drafter(line: str) -> None:
    raise UserError("drafter: its shape is not that of the model's drafter; see drafter.*")


def _free_bytes(device: str) -> int:
    """Free memory of a card, or all memory of the machine, which is used when it is written."""
    if device == "cpu":
        return host_bytes()
    return torch.cuda.mem_get_info(torch.device(device))[0]


def _pages(config: Config, spec: ModelSpec, longest: int, free_bytes: float) -> int:
    """Pages of a full batch, or as many as `free_bytes` hold beside the engine's weights."""
    engine, arms = config.engine, parse_strategies(config.engine.strategies)
    numbers = 2 * (spec.num_layers + engine.needs_drafter) * spec.num_kv_heads * spec.head_dim
    numbers += parts.recorded_features(config, spec.hidden_size)
    each = getattr(torch, config.model.dtype).itemsize
    weights = sum(math.prod(shape) for shape in spec.shapes().values())
    fit = int((free_bytes / each - weights) // (numbers * engine.page_size))
    return max(1, min(parts.auto_pages(engine, arms, longest), fit))
