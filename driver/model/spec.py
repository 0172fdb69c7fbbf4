"""Checkpoints in Hugging Face layout: what a model is (`ModelSpec`) and its tensors.

Whatever this code does not know is refused by name: a model that runs with the wrong attention or
the wrong RoPE gives fluent, wrong text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..common.errors import UserError
from ..config.strategy import MAX_DEPTH

FAMILIES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# The numbers that each supported type of RoPE scaling needs.
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding: its base and how its frequencies are stretched for long contexts.

    The last three fields count for type "llama3" only, `factor` also for "linear".
    """

    type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position: int = 0


@dataclass(frozen=True)
class ModelSpec:
    """The shape of a target model.

    `vocab_size` counts the ids that a token can have. The tensors may hold more rows (a padded
    vocabulary): those logits are computed and never win, because samplers are given `vocab_size`.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope: RopeSpec
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    eos_ids: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def from_folder(folder: str | Path) -> ModelSpec:
        """Reads `config.json` and, where there is one, `generation_config.json`.

        Args:
            folder: a Hugging Face model folder.

        Returns:
            The spec; `eos_ids` are those of the generation config where it names any.

        Raises:
            UserError: a file is missing or broken, or asks for something unsupported.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise UserError(f"model folder {folder}: does not exist")
        config = read_json(folder / "config.json")
        eos = config.get("eos_token_id")
        if (folder / "generation_config.json").exists():
            generation_eos = read_json(folder / "generation_config.json").get("eos_token_id")
            eos = eos if generation_eos is None else generation_eos
        return ModelSpec.from_config(
            {**config, "eos_token_id": eos}, where=str(folder / "config.json")
        )

    @staticmethod
    def from_config(config: Mapping[str, Any], where: str = "config.json") -> ModelSpec:
        """Builds the spec from the content of a `config.json`.

        Args:
            config: the parsed file, in the layout of transformers 5 (`rope_parameters`) or of
                older versions (`rope_theta`, `rope_scaling`).
            where: named in messages.

        Returns:
            The spec.

        Raises:
            UserError: a key is missing, malformed, or asks for something unsupported.
        """
        try:
            return _Reader(config, where).spec()
        except (TypeError, ValueError, AttributeError) as error:
            raise UserError(f"{where}: a value has the wrong type ({error})") from error


def read_rope(config: Mapping[str, Any]) -> RopeSpec:
    """The rotary embedding that the content of a `config.json` asks for.

    Raises:
        UserError: a key is malformed, or asks for something unsupported.
    """
    return _Reader(config, "config.json").rope()


class _Reader:
    """Reads one config with every refusal naming the file and the key."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config = config
        self.where = where

    def refuse(self, reason: str) -> UserError:
        return UserError(f"{self.where}: {reason}")

    def value(self, key: str, default: Any = None) -> Any:
        """The value of a key; a null counts as absent."""
        found = self.config.get(key)
        return default if found is None else found

    def count(self, key: str, default: int | None = None) -> int:
        found = self.value(key, default)
        if type(found) is not int or found < 1:
            raise self.refuse(f"{key}: wanted a positive integer, got {found!r}")
        return found

    def spec(self) -> ModelSpec:
        family = self.family()
        self.refuse_variants()
        hidden_size, num_heads = self.count("hidden_size"), self.count("num_attention_heads")
        num_kv_heads = self.count("num_key_value_heads", num_heads)
        default_head_dim = 128 if family == "Qwen3ForCausalLM" else hidden_size // num_heads
        head_dim = self.count("head_dim", default_head_dim)
        if num_heads % num_kv_heads:
            raise self.refuse(
                f"num_key_value_heads: wanted a divisor of {num_heads} heads, got {num_kv_heads}"
            )
        if head_dim % 8 or head_dim > 256:
            raise self.refuse(f"head_dim: wanted a multiple of 8 up to 256, got {head_dim}")
        bias = bool(self.value("attention_bias", False))
        return ModelSpec(
            family=family,
            vocab_size=self.count("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=self.count("intermediate_size"),
            num_layers=self.count("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position=self.count("max_position_embeddings"),
            rms_norm_eps=float(self.value("rms_norm_eps", 1e-6)),
            rope=self.rope(),
            tie_word_embeddings=bool(self.value("tie_word_embeddings", False)),
            # Qwen2 has the bias without saying so, and never on the output projection.
            qkv_bias=bias or family == "Qwen2ForCausalLM",
            output_bias=bias and family != "Qwen2ForCausalLM",
            qk_norm=family == "Qwen3ForCausalLM",
            eos_ids=self.eos_ids(),
            dtype=self.dtype(),
        )

    def family(self) -> str:
        names = self.value("architectures", [])
        names = [str(n) for n in names] if isinstance(names, list) else [str(names)]
        if len(names) != 1 or names[0] not in FAMILIES:
            raise self.refuse(
                f"architecture {', '.join(names) or 'not named'} is not supported;"
                f" there are {', '.join(FAMILIES)}"
            )
        return names[0]

    def refuse_variants(self) -> None:
        if self.value("quantization_config"):
            raise self.refuse("quantization_config: quantized weights are not supported")
        if self.value("mlp_bias", False):
            raise self.refuse("mlp_bias=true is not supported")
        if self.value("hidden_act", "silu") != "silu":
            raise self.refuse(f"hidden_act {self.value('hidden_act')!r} is not supported; silu is")
        layer_types = self.value("layer_types", [])
        for name in sorted(set(layer_types) - {"full_attention"}):
            raise self.refuse(f"layer_types: {name!r} is not supported; full_attention is")
        # Here an absent key and a null differ: null means no window.
        window = self.config.get("sliding_window", 4096)
        windowed = self.value("use_sliding_window", False) and window is not None
        first = self.value("max_window_layers", 28)
        if windowed and not layer_types and first < self.count("num_hidden_layers"):
            raise self.refuse("use_sliding_window=true: sliding-window attention is not supported")

    def rope(self) -> RopeSpec:
        # transformers 5 keeps all in rope_parameters; older files have a theta and a scaling.
        rope: dict[str, Any] = {}
        for key in ("rope_scaling", "rope_parameters"):
            part = self.value(key, {})
            if not isinstance(part, dict):
                raise self.refuse(f"{key}: wanted an object, got {part!r}")
            rope |= part
        if any(isinstance(part, dict) for part in rope.values()):
            raise self.refuse("rope_parameters: RoPE that differs by layer is not supported")
        name = rope.get("rope_type") or rope.get("type") or "default"
        if name not in ROPE_TYPES:
            raise self.refuse(
                f"RoPE type {name!r} is not supported; there are {', '.join(ROPE_TYPES)}"
            )
        for part in (rope, self.config):
            if part.get("partial_rotary_factor") not in (None, 1, 1.0):
                raise self.refuse("partial_rotary_factor: partial RoPE is not supported")
        for key in ("original_max_position_embeddings", "max_position_embeddings"):
            rope.setdefault("original_max_position_embeddings", self.config.get(key))
        for key in ROPE_TYPES[name]:
            number = rope.get(key)
            if not isinstance(number, int | float) or number <= 0:
                raise self.refuse(f"RoPE type {name!r} wants {key} > 0, got {number!r}")
        numbers = {key: rope[key] for key in ROPE_TYPES[name]}
        if name == "llama3" and numbers["high_freq_factor"] <= numbers["low_freq_factor"]:
            raise self.refuse("RoPE type 'llama3' wants high_freq_factor > low_freq_factor")
        original = numbers.pop("original_max_position_embeddings", 0)
        theta = float(rope.get("rope_theta") or self.value("rope_theta", 10000.0))
        return RopeSpec(type=name, theta=theta, original_max_position=original, **numbers)

    def eos_ids(self) -> tuple[int, ...]:
        eos = self.value("eos_token_id", [])
        return tuple(eos) if isinstance(eos, list) else (eos,)

    def dtype(self) -> torch.dtype:
        name = str(self.value("dtype", self.value("torch_dtype", "float32")))
        name = name.removeprefix("torch.")
        if name not in DTYPES:
            raise self.refuse(f"dtype {name!r} is not supported; there are {', '.join(DTYPES)}")
        return DTYPES[name]


def rope_table(spec: ModelSpec) -> Tensor:
    """Cosines and sines of every position, as `append_kv` reads them.

    Frequencies and angles are float32, as in the checkpoints' own training.

    Args:
        spec: the model; `rope`, `head_dim` and `max_position` count.

    Returns:
        float32 [max_position + MAX_DEPTH, head_dim]: (cos | sin) of half a head's angles.

    Example:
        >>> rope_table(spec)[0]     # position 0 turns nothing: ones, then zeros

    Source: Su et al., "RoFormer" (2021); the "llama3" bands from the Llama 3.1 release.
    """
    rope = spec.rope
    exponent = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
    frequency = 1.0 / rope.theta**exponent  # [head_dim / 2]
    if rope.type == "linear":
        frequency = frequency / rope.factor
    if rope.type == "llama3":
        # Turns over the original context: many are kept, few are slowed, a ramp joins the two.
        turns = rope.original_max_position * frequency / (2 * torch.pi)
        width = rope.high_freq_factor - rope.low_freq_factor
        keep = ((turns - rope.low_freq_factor) / width).clamp(0, 1)
        frequency = keep * frequency + (1 - keep) * frequency / rope.factor
    # Drafted rows may lie past the last position; they are never followed there, only computed.
    positions = spec.max_position + MAX_DEPTH
    angle = torch.arange(positions, dtype=torch.float32)[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), dim=1)


def read_weights(folder: str | Path) -> dict[str, Tensor]:
    """Reads a checkpoint's tensors, from one safetensors file or from indexed shards.

    Args:
        folder: a Hugging Face model folder.

    Returns:
        Tensors by name, on the CPU, in the dtype of the file.

    Raises:
        UserError: a file is missing, truncated or not safetensors, or lacks an indexed tensor.
    """
    folder = Path(folder)
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return _read_file(single)
    if not index.exists():
        raise UserError(f"model folder {folder}: has neither {single.name} nor {index.name}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise UserError(f"{index}: has no weight_map")
    shards = {name: _read_file(folder / name) for name in sorted(set(weight_map.values()))}
    for tensor, shard in weight_map.items():
        if tensor not in shards[shard]:
            raise UserError(f"{folder / shard}: lacks {tensor}, which {index.name} promises")
    return {tensor: shards[shard][tensor] for tensor, shard in weight_map.items()}


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        UserError: the file is missing, unreadable, or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: wanted a JSON object, got {type(content).__name__}")
    return content


def _read_file(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # it is no mapping
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{path}: cannot be read as safetensors ({error}); copy the file again"
        ) from None
