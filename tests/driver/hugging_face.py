"""Small random checkpoints of each family, made and saved by transformers."""

from functools import partial
from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from driver.policy import packed_forward

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,  # logits of order one
    "eos_token_id": [3, 5],
}
# Qwen2.5-7B by its published configuration.
QWEN2_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
# Qwen2.5-1.5B by its published configuration.
QWEN2_1_5B = {
    **QWEN2_7B,
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
# Qwen2.5-32B by its published configuration.
QWEN2_32B = {
    **QWEN2_7B,
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
}
# Llama-3-70B by its published configuration.
LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
# Phi-4 by its published configuration.
PHI4 = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "vocab_size": 100352,
    "hidden_size": 5120,
    "intermediate_size": 17920,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 10,
    "max_position_embeddings": 16384,
    "original_max_position_embeddings": 16384,
    "rope_theta": 250000,
    "rope_scaling": None,
    "sliding_window": None,
    "tie_word_embeddings": False,
}
# SmolLM3-3B by its published configuration.
SMOLLM3_3B = {
    "architectures": ["SmolLM3ForCausalLM"],
    "model_type": "smollm3",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 65536,
    "rope_theta": 5000000.0,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "layer_types": ["full_attention"] * 36,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 28,
    "dtype": "bfloat16",
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,  # all three bands of frequencies occur within a small head
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0}

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (partial(MistralConfig, sliding_window=None), MistralForCausalLM),
    # The default padding id is past small vocabularies.
    "phi3": (partial(Phi3Config, pad_token_id=None), Phi3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    # Every second layer has no RoPE; the default end and padding ids are past small vocabularies.
    "smollm3": (
        partial(
            SmolLM3Config,
            no_rope_layer_interval=2,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        ),
        SmolLM3ForCausalLM,
    ),
}
# For tests of training: small, with weights large enough to matter.
TRAINED = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
# Variant -> family and what differs from SHAPE.
VARIANTS = {
    "llama-tied-llama3": ("llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}),
    "llama-bias-linear": (
        "llama",
        {"num_key_value_heads": 6, "attention_bias": True, "rope_parameters": LINEAR_ROPE},
    ),
    "mistral": ("mistral", {"head_dim": 16}),
    "phi3": ("phi3", {}),
    "qwen2": ("qwen2", {"num_key_value_heads": 1, "rope_parameters": YARN_ROPE}),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "smollm3": ("smollm3", {"no_rope_layers": [0, 1, 1, 0]}),
}


def random_model(variant: str, seed: int = 0, **overrides) -> PreTrainedModel:
    """A model of a variant in float32 with every parameter random, norms and biases too."""
    family, changes = VARIANTS[variant]
    config_class, model_class = FAMILIES[family]
    torch.manual_seed(seed)
    model = model_class(config_class(**{**SHAPE, **changes, **overrides})).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return model.requires_grad_(False)


def save_model(folder: Path, variant: str, seed: int = 0, **overrides) -> PreTrainedModel:
    """Saves a random model and returns it; the biased Llama is saved in shards."""
    model = random_model(variant, seed, **overrides)
    model.save_pretrained(
        folder, max_shard_size="60KB" if variant == "llama-bias-linear" else "1GB"
    )
    return model


def logits_of(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """Logits [len(ids), V] of one sequence."""
    return model(torch.tensor([ids])).logits[0]


def packed_hidden(model, ids, documents, checkpointing=False):
    """Final hidden states of the training pass, in the dtype of the parameters."""
    outer = packed_forward._outer_weights(model, None)
    return packed_forward._hidden(model, outer, ids, documents, checkpointing)
