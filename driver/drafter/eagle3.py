"""Writes, reads and checks drafters in the EAGLE-3 layout that serving engines load."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..common.errors import UserError
from ..common.storage import storage_errors
from ..model.drafter import Drafter, DraftSpec
from ..model.spec import ModelSpec, read_json, read_rope
from ..model.target import default_feature_layers

WEIGHTS, CONFIG = "model.safetensors", "config.json"
KIND = "LlamaForCausalLMEagle3"
FIXED: dict[str, Any] = {  # keys of `config.json` with the only value that a loader accepts
    "architectures": [KIND],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
SIZES = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
)  # fmt: skip
LAYERS = "eagle_aux_hidden_state_layer_ids"
KEYS = (  # all that a loader reads
    *FIXED, *SIZES, "vocab_size", "draft_vocab_size", "max_position_embeddings", "rms_norm_eps",
    "rope_theta", "eagle_config", LAYERS,
)  # fmt: skip


def expected_tensors(config: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Name -> (shape, dtype) of the tensors of a drafter with this `config.json`.

    Weights are listed as float32 and may have any float dtype.
    """
    hidden, middle, heads, kv_heads, head_dim = (config[key] for key in SIZES)
    sizes = config["vocab_size"], middle, config["draft_vocab_size"]
    spec = DraftSpec(hidden, heads, kv_heads, head_dim, config["rms_norm_eps"], *sizes)
    with torch.device("meta"):
        state = Drafter(spec).state_dict()
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}


def drafter_config(
    shape: DraftSpec, target: Mapping[str, Any], layers: Sequence[int], dtype: torch.dtype
) -> dict[str, Any]:
    """The `config.json` of a drafter.

    Args:
        target: the policy's `config.json`, which gives the RoPE settings and the context length.
        layers: of the target whose outputs feed the drafter, counted from 0.

    Raises:
        UserError: a server cannot represent the layers.
    """
    if not _in_order(layers):
        raise UserError(
            f"feature layers {list(layers)}: a server reads each layer once, in rising order;"
            " export the drafter of a target with three layers or more"
        )
    rope = {k: target[k] for k in ("rope_parameters", "rope_theta", "rope_scaling") if k in target}
    parameters = rope.get("rope_parameters") or {}
    if "rope_theta" in parameters:  # older loaders read it from the top level
        rope.setdefault("rope_theta", parameters["rope_theta"])
    if parameters.get("rope_type", "default") != "default":
        rope.setdefault("rope_scaling", parameters)
    ends = {k: target[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if k in target}
    return {
        **FIXED,
        "draft_vocab_size": shape.draft_vocab,
        # SGLang reads the nested key and takes the outputs of these layers. vLLM reads the upper
        # one first, and takes the inputs of its layers.
        "eagle_config": {LAYERS: list(layers), "use_aux_hidden_state": True},
        LAYERS: [layer + 1 for layer in layers],
        "head_dim": shape.head_dim,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": target["max_position_embeddings"],
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "rms_norm_eps": shape.rms_eps,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "vocab_size": shape.vocab_size,
        **rope,
        **ends,
    }


def config_of_state(
    state: Mapping[str, Tensor], spec: ModelSpec, target: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, Any]:
    """The `config.json` of a drafter whose state is that of our engine; see `drafter_config`."""
    shape = DraftSpec.of(spec, len(state["midlayer.mlp.gate_proj.weight"]), len(state["d2t"]))
    return drafter_config(shape, target, default_feature_layers(spec.num_layers), dtype)


def _in_order(layers: Sequence[int]) -> bool:
    return list(layers) == sorted(set(layers))


def write_drafter(folder: Path, state: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Writes weights and configuration.

    Args:
        config: from `drafter_config`.

    Raises:
        UserError: the files could not be written.
    """
    dtype = getattr(torch, config["torch_dtype"])
    tensors = {
        name: (value.to(dtype) if value.is_floating_point() else value).contiguous()
        for name, value in state.items()
    }
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_drafter(folder: Path, target: ModelSpec | None = None) -> dict[str, Tensor]:
    """Reads and checks an exported drafter.

    Args:
        folder: written by `write_drafter`, or another EAGLE-3 drafter.
        target: the model to draft for; None = not checked against one.

    Returns:
        A state for `driver.model.drafter.Drafter` and `DraftRunner.load`.

    Raises:
        UserError: names what is unreadable, missing, unknown, misshapen or of another model.
    """
    config = read_json(folder / CONFIG)
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder / WEIGHTS}: cannot be read ({error})") from error
    if problems := _config_problems(config, target) or _tensor_problems(config, tensors):
        raise UserError(f"{folder}: {'; '.join(problems)}")
    return tensors


def _tensor_problems(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[str]:
    expected = expected_tensors(config)
    problems = [f"tensor {name} is missing" for name in expected.keys() - tensors.keys()]
    problems += [f"tensor {name} is unknown" for name in tensors.keys() - expected.keys()]
    for name in expected.keys() & tensors.keys():
        shape, dtype = expected[name]
        value = tensors[name]
        same_kind = value.is_floating_point() if dtype.is_floating_point else value.dtype == dtype
        if tuple(value.shape) != shape or not same_kind:
            problems.append(f"tensor {name}: wanted {list(shape)}, got {list(value.shape)}")
    if not problems:
        ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
        if not torch.equal(tensors["t2d"].nonzero()[:, 0], ids.sort().values):
            problems.append("t2d does not mark the tokens that d2t names")
    return sorted(problems)


def _config_problems(config: Mapping[str, Any], target: ModelSpec | None) -> list[str]:
    problems = [f"config.json: {key} is missing" for key in KEYS if key not in config]
    problems += [
        f"config.json: {key} is {config[key]!r}, wanted {value!r}"
        for key, value in FIXED.items()
        if key in config and config[key] != value
    ]
    eagle = config.get("eagle_config") or {}
    layers = eagle.get(LAYERS, [])
    if len(layers) != 3:
        problems.append("config.json: eagle_config does not name three layers")
    if not _in_order(layers):
        problems.append(f"config.json: layers {layers} repeat or do not rise")
    inputs = [layer + 1 for layer in layers]
    if config.get(LAYERS, inputs) != inputs:
        problems.append(f"config.json: {LAYERS} is {config[LAYERS]}, wanted {inputs}")
    if not eagle.get("use_aux_hidden_state", True):
        problems.append("config.json: eagle_config turns use_aux_hidden_state off")
    if target is None or problems:
        return problems
    wanted = {
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "head_dim": target.head_dim,
        "rms_norm_eps": target.rms_norm_eps,
    }
    problems += [
        f"config.json: {key} is {config[key]}, the target's {value}"
        for key, value in wanted.items()
        if config[key] != value
    ]
    if read_rope(config) != target.rope:
        problems.append(f"config.json: RoPE is {read_rope(config)}, the target's {target.rope}")
    if config["max_position_embeddings"] < target.max_position:  # its RoPE would be clamped
        problems.append(
            f"config.json: max_position_embeddings is {config['max_position_embeddings']},"
            f" fewer than the target's {target.max_position}"
        )
    if not all(layer in range(target.num_layers) for layer in layers):
        problems.append(f"config.json: layers {layers} of a target that has {target.num_layers}")
    return problems
