"""Writes drafters in the EAGLE-3 layout that serving engines load."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..common.errors import UserError
from ..common.storage import share_files, storage_errors
from ..model.drafter import DraftSpec
from ..model.spec import ModelSpec, read_json
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
LAYERS = "eagle_aux_hidden_state_layer_ids"


def drafter_config(
    shape: DraftSpec, target: Mapping[str, Any], layers: Sequence[int], dtype: torch.dtype
) -> dict[str, Any]:
    """The `config.json` of a drafter; UserError if a server cannot represent its layers.

    The policy's `config.json`, `target`, gives the RoPE settings and the context length. `layers`
    of the target, counted from 0, are those whose outputs feed the drafter.
    """
    if list(layers) != sorted(set(layers)):
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


def write_drafter(folder: Path, state: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Writes weights and the configuration of `drafter_config`.

    Raises UserError if the folder has another model, such as a policy, or cannot be written.
    """
    before = folder / CONFIG
    if before.exists() and read_json(before).get("architectures") != FIXED["architectures"]:
        raise UserError(f"{folder}: holds another model; choose an empty or a new folder")
    dtype = getattr(torch, config["torch_dtype"])
    tensors = {
        name: (value.to(dtype) if value.is_floating_point() else value).contiguous()
        for name, value in state.items()
    }
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        share_files(folder, folder / CONFIG)
