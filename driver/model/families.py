"""The supported model families: one entry each.

All are dense decoders of one shape: RMS norm, attention with RoPE, RMS norm, SwiGLU; some layers
may lack RoPE. An entry states what differs. `ModelSpec` applies it to one config; the engine
(`target.py`), the training pass (`policy/packed_forward.py`), checkpoints, the memory model and the
launch counts read the spec. CONTRIBUTING.md says how a family is added.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..common.errors import UserError

# Tensor names in a checkpoint. The engine stores the projections of a tuple as the consecutive rows
# of one tensor.
EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
LAYER = "model.layers.{}."
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")


@dataclass(frozen=True)
class Family:
    """What distinguishes a family from a Llama without biases.

    Attributes:
        name: the model class in transformers, as `architectures` in `config.json` names it.
        qkv_bias: the q, k and v projections always have a bias.
        config_bias: `attention_bias` in the config adds a bias to the q, k, v and output
            projections.
        qk_norm: queries and keys pass an RMS norm over `head_dim` before RoPE.
        head_dim: default where the config has none; 0 = hidden_size / num_attention_heads.
        window_switch: `sliding_window` counts only if `use_sliding_window` is true; otherwise any
            value but null counts.
        rope_by_layer: `no_rope_layers` in the config lists 0 for a layer without RoPE and 1 for one
            with it; null means that every `no_rope_layer_interval`-th layer has none. Sliding
            windows, if in use, are those of the layers without RoPE.
        tied: default of `tie_word_embeddings`.
        rope_theta: default of the base of RoPE.
    """

    name: str
    qkv_bias: bool = False
    config_bias: bool = False
    qk_norm: bool = False
    head_dim: int = 0
    window_switch: bool = True
    rope_by_layer: bool = False
    tied: bool = False
    rope_theta: float = 10000.0


FAMILIES = {
    family.name: family
    for family in (
        Family("LlamaForCausalLM", config_bias=True),
        Family("MistralForCausalLM", window_switch=False),
        Family("Qwen2ForCausalLM", qkv_bias=True),
        Family("Qwen3ForCausalLM", config_bias=True, qk_norm=True, head_dim=128),
        Family(
            "SmolLM3ForCausalLM", config_bias=True, rope_by_layer=True, tied=True, rope_theta=2e6
        ),
    )
}


# What other well-known families need and the engine does not have.
NEEDS = {
    "GemmaForCausalLM": "GeGLU, scaled embeddings and norms that add 1 to their weight",
    "Gemma2ForCausalLM": "soft caps, sliding windows and norms after each part",
    "Gemma3ForCausalLM": "sliding windows, RoPE that differs by layer and norms after each part",
    "GraniteForCausalLM": "multipliers of embeddings, scores, residuals and logits",
    "MixtralForCausalLM": "routed experts",
    "Phi3ForCausalLM": "projections that are stored as one tensor (qkv_proj, gate_up_proj)",
    "Qwen3MoeForCausalLM": "routed experts",
}


def family_of(name: str) -> Family:
    """The family of a class in transformers.

    Raises:
        UserError: the family is not supported.
    """
    if name not in FAMILIES:
        raise UserError(unsupported(name))
    return FAMILIES[name]


def unsupported(name: str) -> str:
    """One line that refuses a class in transformers, with what it would need."""
    needs = f": it needs {NEEDS[name]}" if name in NEEDS else ""
    return f"architecture {name} is not supported{needs}; there are {', '.join(FAMILIES)}"
