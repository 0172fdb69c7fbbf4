"""The supported model families: one entry each.

All are dense decoders of one shape: RMS norm, attention with RoPE, RMS norm, SwiGLU; some layers
may lack RoPE. An entry states what differs. `ModelSpec` applies it to one config; the engine
(`target.py`), the training pass (`policy/packed_forward.py`), checkpoints, the memory model and the
launch counts read the spec. CONTRIBUTING.md says how a family is added.
"""

from dataclasses import dataclass

from ..common.errors import UserError

# Tensor names in a checkpoint. The engine stores the projections of a tuple as the consecutive rows
# of one tensor.
EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
LAYER = "model.layers.{}."
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
JOINED_QKV, JOINED_GATE_UP = "self_attn.qkv_proj", "mlp.gate_up_proj"  # of a joined family


@dataclass(frozen=True)
class Family:
    """What distinguishes a family from a Llama without biases."""

    name: str  # the model class in transformers, as `architectures` in `config.json` names it
    qkv_bias: bool = False  # the q, k and v projections always have a bias
    config_bias: bool = False  # `attention_bias` adds one to q, k, v and output projections
    qk_norm: bool = False  # queries and keys pass an RMS norm over `head_dim` before RoPE
    head_dim: int = 0  # default; 0 = hidden_size / num_attention_heads
    joined: bool = False  # the checkpoint has q, k and v in one tensor, and gate and up
    window_switch: bool = True  # `sliding_window` counts only if `use_sliding_window` is true
    window: int | None = 4096  # default of `sliding_window`; null is none
    # `no_rope_layers` lists 0 for a layer without RoPE and 1 for one with it; null: every
    # `no_rope_layer_interval`-th layer has none. Sliding windows are those of such layers.
    rope_by_layer: bool = False
    tied: bool = False  # default of `tie_word_embeddings`
    rope_theta: float = 10000.0  # default
    rope_scaling: bool = True  # RoPE may be scaled for long contexts
    rms_norm_eps: float = 1e-6  # default


FAMILIES = {
    family.name: family
    for family in (
        Family("LlamaForCausalLM", config_bias=True),
        Family("MistralForCausalLM", window_switch=False),
        Family(  # transformers reads the RoPE type "yarn" of a Phi-3 as "longrope"
            "Phi3ForCausalLM",
            joined=True,
            window_switch=False,
            window=None,
            rope_scaling=False,
            rms_norm_eps=1e-5,
        ),
        Family("Qwen2ForCausalLM", qkv_bias=True),
        Family("Qwen3ForCausalLM", config_bias=True, qk_norm=True, head_dim=128),
        Family(
            "SmolLM3ForCausalLM", config_bias=True, rope_by_layer=True, tied=True, rope_theta=2e6
        ),
    )
}


# What other well-known families need and the engine does not have.
NEEDS = {
    "DeepseekV3ForCausalLM": "routed experts and latent attention",
    "Exaone4ForCausalLM": "norms after each part, and sliding windows",
    "GemmaForCausalLM": "GeGLU, scaled embeddings and norms that add 1 to their weight",
    "Gemma2ForCausalLM": "soft caps, sliding windows and norms after each part",
    "Gemma3ForCausalLM": "sliding windows, RoPE that differs by layer and norms after each part",
    "Glm4ForCausalLM": "partial RoPE and norms after each part",
    "GptOssForCausalLM": "routed experts, sliding windows and attention sinks",
    "GraniteForCausalLM": "multipliers of embeddings, scores, residuals and logits",
    "Ministral3ForCausalLM": "queries that are scaled by their position",
    "Llama4ForCausalLM": "routed experts and chunked attention",
    "MixtralForCausalLM": "routed experts",
    "Olmo2ForCausalLM": "norms after each part, and of queries and keys over all heads",
    "Olmo3ForCausalLM": "sliding windows, and the norms of Olmo2ForCausalLM",
    "Qwen3MoeForCausalLM": "routed experts",
    "Qwen3NextForCausalLM": "linear attention and routed experts",
    "Qwen3_5ForCausalLM": "linear attention",
    "SeedOssForCausalLM": "more than 8 query heads for a key-value head on a GPU",
}


def family_of(name: str) -> Family:
    """The family of a class in transformers; UserError if it is not supported."""
    if name not in FAMILIES:
        raise UserError(unsupported(name))
    return FAMILIES[name]


def unsupported(name: str) -> str:
    """One line that refuses a class in transformers, with what it would need."""
    text = name.replace("ForConditionalGeneration", "ForCausalLM")  # with images, for instance
    needs = f": it needs {NEEDS[text]}" if text in NEEDS else ""
    return f"architecture {name} is not supported{needs}; there are {', '.join(FAMILIES)}"
