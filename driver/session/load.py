"""Loads a policy and its tokenizer, and describes them to the engine."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils.logging import disable_progress_bar

from ..common.errors import SharedWarning, UserError
from ..config.load import Config
from ..model import tiny
from ..model.checkpoint import load_model
from ..model.fetch import resolve_model
from ..model.spec import ModelSpec, read_json

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def find_model(config: Config, report: Callable[[str], None] = lambda line: None) -> Path | None:
    """The folder of `model.path`, downloaded if necessary; None for the tiny model."""
    path, cache = config.model.path, config.model.cache
    return None if path == "tiny" else resolve_model(path, cache, report)


def load_policy(
    config: Config, folder: Path | None, mapped: bool = False
) -> tuple[PreTrainedModel, Tokenizer]:
    """The trainable policy and its tokenizer, from a folder or, without one, the random tiny model.

    With `mapped` the policy stays in host memory, where the file may be mapped. Raises UserError if
    the checkpoint is damaged or not supported, the tokenizer unusable, or the device missing.
    """
    use_device(config.run.device)
    disable_progress_bar()  # a run shows its own progress
    policy: Any  # the annotation of `PreTrainedModel.to` takes no device
    if folder is None:
        policy = tiny.build_policy(config.model, config.run.seed)
        return policy.to(config.run.device), load_tokenizer(None)
    # A card copies the parameters.
    on_card = config.run.device != "cpu"
    policy = load_model(folder, getattr(torch, config.model.dtype), mapped or on_card)
    if not mapped:
        policy = policy.to(config.run.device)
    tokenizer = load_tokenizer(folder)
    token, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    rows = len(policy.get_input_embeddings().weight)
    if largest >= rows:
        raise UserError(
            f"model.path={folder}: the tokenizer has token {token!r} with id {largest}, but the"
            f" embedding has {rows} rows; enlarge it or use the model's own tokenizer"
        )
    return policy, tokenizer


def load_tokenizer(folder: Path | None, key: str = "model.path") -> Tokenizer:
    """The tokenizer of a folder, or UserError, which names `key`; None = the tiny model's."""
    if folder is None:
        return tiny.build_tokenizer()
    where = f"{key}={folder}: no usable tokenizer"
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


def use_device(device: str) -> None:
    """Makes a card the current one, that of streams and events; UserError if torch finds none."""
    kind, _, index = device.partition(":")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"run.device={device}: torch sees {torch.cuda.device_count()} CUDA devices; use cpu"
        )
    if kind == "cuda":
        torch.cuda.set_device(int(index or 0))


def end_ids(spec: ModelSpec, tokenizer: Tokenizer) -> tuple[int, ...]:
    """End tokens of the model's configuration and of its tokenizer, which a warm-up trains."""
    own, ends = tokenizer.eos_token_id, spec.eos_ids
    if own is None and not ends:
        warnings.warn(
            "neither the model nor its tokenizer has an end token: only sampling.max_new_tokens"
            " ends a response",
            SharedWarning,
            stacklevel=2,
        )
    if own is None or own in ends:
        return ends
    warnings.warn(
        f"the end token of the tokenizer is {own}, those of the model's configuration are"
        f" {list(ends)}: each of them ends a response",
        SharedWarning,
        stacklevel=2,
    )
    return (*ends, own)


def spec_of(policy: PreTrainedModel) -> ModelSpec:
    """The engine's description of a transformers model."""
    head, embedding = policy.get_output_embeddings(), policy.get_input_embeddings()
    if head is None:
        raise UserError(
            f"model: a {type(policy).__name__} has no head; give a model for causal language"
            " modelling, such as LlamaForCausalLM"
        )
    eos = policy.generation_config.eos_token_id
    stated = {
        "architectures": [type(policy).__name__],
        "eos_token_id": policy.config.eos_token_id if eos is None else eos,
        "tie_word_embeddings": head.weight is embedding.weight,
    }
    return ModelSpec.from_config({**policy.config.to_dict(), **stated})
