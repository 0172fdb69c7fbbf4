"""What a model is: `ModelSpec`, read from a Hugging Face `config.json`.

A model with the wrong attention or the wrong RoPE generates fluent, wrong text. Whatever is not
supported is therefore refused by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tlt_ext.limits import MAX_DEPTH, MAX_HEAD_DIM

from ..common.errors import UserError
from . import families
from .families import FAMILIES, Family

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LARGEST = 2**31  # no number of a config comes near it
# The numbers that each supported type of RoPE scaling needs.
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding: its base, and how its frequencies are scaled for long contexts.

    Type "linear" uses `factor`, "llama3" the fields from there to
    `original_max_position_embeddings`, "yarn" `factor` and the fields from the latter on.
    """

    type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: float = 0.0
    beta_fast: float = 32.0  # dimensions with more turns over the original context are kept
    beta_slow: float = 1.0  # those with fewer are slowed by the factor
    attention_factor: float = 1.0  # of cosines and sines


@dataclass(frozen=True)
class ModelSpec:
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
    no_rope: frozenset[int]  # indices of the layers without RoPE
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    eos_ids: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def from_folder(folder: str | Path) -> ModelSpec:
        """Reads `config.json` and, if there is one, `generation_config.json`.

        Raises UserError if a file is missing or malformed, or names something unsupported.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise UserError(f"model folder {folder}: does not exist")
        config, generation = read_json(folder / CONFIG), folder / GENERATION_CONFIG
        ends = generation.exists() and _Reader(read_json(generation), str(generation)).eos_ids()
        if ends:
            config["eos_token_id"] = list(ends)
        return ModelSpec.from_config(config, str(folder / CONFIG))

    @staticmethod
    def from_config(config: Mapping[str, Any], where: str = CONFIG) -> ModelSpec:
        """Builds the spec from a `config.json` of transformers 5 (`rope_parameters`) or older.

        Raises UserError if a key is missing, malformed, or names something unsupported.
        """
        return _Reader(config, where).spec()

    @property
    def q_dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.num_kv_heads * self.head_dim

    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors of one layer: name within the layer -> shape."""
        hidden = self.hidden_size
        rows = dict(zip(families.QKV, (self.q_dim, self.kv_dim, self.kv_dim), strict=True))
        gate_up = dict.fromkeys(families.GATE_UP, self.intermediate_size)
        if FAMILIES[self.family].joined:
            rows = {families.JOINED_QKV: sum(rows.values())}
            gate_up = {families.JOINED_GATE_UP: sum(gate_up.values())}
        shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
        shapes |= {f"{name}.weight": (size, hidden) for name, size in rows.items()}
        if self.qkv_bias:
            shapes |= {f"{name}.bias": (size,) for name, size in rows.items()}
        if self.qk_norm:
            shapes |= {f"self_attn.{x}_norm.weight": (self.head_dim,) for x in "qk"}
        shapes["self_attn.o_proj.weight"] = (hidden, self.q_dim)
        if self.output_bias:
            shapes["self_attn.o_proj.bias"] = (hidden,)
        shapes["post_attention_layernorm.weight"] = (hidden,)
        shapes |= {f"{name}.weight": (size, hidden) for name, size in gate_up.items()}
        shapes["mlp.down_proj.weight"] = (hidden, self.intermediate_size)
        return shapes

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """All tensors of a checkpoint: name -> shape."""
        outer, layer = (self.vocab_size, self.hidden_size), self.layer_shapes()
        shapes: dict[str, tuple[int, ...]] = {families.EMBEDDING: outer}
        for index in range(self.num_layers):
            shapes |= {families.LAYER.format(index) + name: shape for name, shape in layer.items()}
        shapes[families.FINAL_NORM] = (self.hidden_size,)
        if not self.tie_word_embeddings:
            shapes[families.HEAD] = outer
        return shapes

    @property
    def num_parameters(self) -> int:
        """Numbers in all tensors; a tied head counts once."""
        return sum(math.prod(shape) for shape in self.shapes().values())


@dataclass(frozen=True)
class _Reader:
    """Reads one config; every refusal names the file, the key and the value."""

    config: Mapping[str, Any]
    where: str

    def refuse(self, reason: str) -> UserError:
        return UserError(f"{self.where}: {reason}")

    def value(self, key: str, default: Any = None) -> Any:
        """The value of a key; null counts as absent."""
        found = self.config.get(key)
        return default if found is None else found

    def count(self, key: str, default: int | None = None) -> int:
        found = self.value(key, default)
        if type(found) is not int or not 1 <= found < LARGEST:
            raise self.refuse(f"{key}: wanted a positive integer, got {found!r}")
        return found

    def flag(self, key: str, default: bool = False) -> bool:
        found = self.value(key, default)
        if type(found) is not bool:
            raise self.refuse(f"{key}: wanted true or false, got {found!r}")
        return found

    def number(self, found: Any, what: str) -> float:
        """`found`, if it is a positive finite number."""
        if type(found) not in (int, float) or not 0 < found < LARGEST:
            raise self.refuse(f"{what} > 0, got {found!r}")
        return found

    def spec(self) -> ModelSpec:
        family = self.family()
        self.refuse_variants(family)
        hidden_size, num_heads = self.count("hidden_size"), self.count("num_attention_heads")
        num_kv_heads = self.count("num_key_value_heads", num_heads)
        head_dim = self.count("head_dim", family.head_dim or hidden_size // num_heads)
        if num_heads % num_kv_heads:
            wanted = f"a divisor of {num_heads} heads"
            raise self.refuse(f"num_key_value_heads: wanted {wanted}, got {num_kv_heads}")
        if head_dim % 8 or head_dim > MAX_HEAD_DIM:
            wanted = f"wanted a multiple of 8 up to {MAX_HEAD_DIM}"
            raise self.refuse(f"head_dim: {wanted}, got {head_dim}")
        bias = family.config_bias and self.flag("attention_bias")
        epsilon = self.value("rms_norm_eps", family.rms_norm_eps)
        return ModelSpec(
            family=family.name,
            vocab_size=self.count("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=self.count("intermediate_size"),
            num_layers=self.count("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position=self.count("max_position_embeddings"),
            rms_norm_eps=self.number(epsilon, "wanted rms_norm_eps"),
            rope=self.rope(family),
            no_rope=self.no_rope() if family.rope_by_layer else frozenset(),
            tie_word_embeddings=self.flag("tie_word_embeddings", family.tied),
            qkv_bias=bias or family.qkv_bias,
            output_bias=bias,
            qk_norm=family.qk_norm,
            eos_ids=self.eos_ids(),
            dtype=self.dtype(),
        )

    def family(self) -> Family:
        names = self.value("architectures", [])
        name = ", ".join(map(str, names)) if isinstance(names, list) else str(names)
        if not name:
            raise self.refuse(f"architectures: empty; name one of {', '.join(FAMILIES)}")
        if name not in FAMILIES:
            raise self.refuse(families.unsupported(name))
        return FAMILIES[name]

    def refuse_variants(self, family: Family) -> None:
        if self.value("quantization_config"):
            raise self.refuse("quantization_config: quantized weights are not supported")
        if self.flag("mlp_bias"):
            raise self.refuse("mlp_bias=true is not supported")
        if self.value("hidden_act", "silu") != "silu":
            raise self.refuse(f"hidden_act {self.value('hidden_act')!r} is not supported; silu is")
        window = self.config.get("sliding_window", family.window)  # null means none
        if not family.window_switch:
            if window is not None:
                raise self.refuse(
                    f"sliding_window={window}: sliding-window attention is not supported;"
                    f" {family.name} needs sliding_window=null"
                )
            return
        layer_types = self.value("layer_types", [])
        if not isinstance(layer_types, list):
            raise self.refuse(f"layer_types: wanted a list, got {layer_types!r}")
        for name in sorted({str(name) for name in layer_types} - {"full_attention"}):
            raise self.refuse(f"layer_types: {name!r} is not supported; full_attention is")
        first = self.value("max_window_layers", 28)
        beyond = type(first) is int and first >= self.count("num_hidden_layers")
        unused = window is None or layer_types or (beyond and not family.rope_by_layer)
        if self.flag("use_sliding_window") and not unused:
            raise self.refuse("use_sliding_window=true: sliding-window attention is not supported")

    def no_rope(self) -> frozenset[int]:
        """The layers without RoPE, of a config that names them."""
        layers, rotated = self.count("num_hidden_layers"), self.value("no_rope_layers")
        if rotated is None:
            interval = self.count("no_rope_layer_interval", 4)
            return frozenset(range(interval - 1, layers, interval))
        known = isinstance(rotated, list) and len(rotated) >= layers
        if not known or any(flag not in (0, 1) for flag in rotated):
            raise self.refuse(
                f"no_rope_layers: wanted 0 (no RoPE) or 1 for each of {layers} layers,"
                f" got {rotated!r}"
            )
        return frozenset(i for i, flag in enumerate(rotated[:layers]) if not flag)

    def rope(self, family: Family) -> RopeSpec:
        # transformers 5 writes rope_parameters; older files have rope_theta and rope_scaling.
        rope: dict[str, Any] = {}
        for key in ("rope_scaling", "rope_parameters"):
            part = self.value(key, {})
            if not isinstance(part, dict):
                raise self.refuse(f"{key}: wanted an object, got {part!r}")
            rope |= part
        if any(isinstance(part, dict) for part in rope.values()):
            raise self.refuse("rope_parameters: RoPE that differs by layer is not supported")
        name = rope.get("rope_type") or rope.get("type") or "default"
        known = tuple(ROPE_TYPES) if family.rope_scaling else ("default",)
        if name not in known:  # it may be of any type
            there = ", ".join(known)
            raise self.refuse(f"RoPE type {name!r} is not supported; there are {there}")
        for part in (rope, self.config):
            if part.get("partial_rotary_factor") not in (None, 1, 1.0):
                raise self.refuse("partial_rotary_factor: partial RoPE is not supported")
        # The order of transformers: a key outside of the object wins, the context is the default.
        original = "original_max_position_embeddings"
        context = self.value(original, rope.get(original))
        rope[original] = self.value("max_position_embeddings") if context is None else context
        numbers = {
            key: self.number(rope.get(key), f"RoPE type {name!r} needs {key}")
            for key in ROPE_TYPES[name]
        }
        if name == "llama3" and numbers["high_freq_factor"] <= numbers["low_freq_factor"]:
            raise self.refuse("RoPE type 'llama3' needs high_freq_factor > low_freq_factor")
        if name == "yarn":
            numbers |= self.yarn(rope)
        theta = rope.get("rope_theta") or self.value("rope_theta", family.rope_theta)
        return RopeSpec(name, float(self.number(theta, "wanted rope_theta")), **numbers)

    def yarn(self, rope: Mapping[str, Any]) -> dict[str, float]:
        """The optional numbers of type "yarn", with the defaults of transformers."""
        if rope.get("truncate") is False:
            raise self.refuse("RoPE type 'yarn': truncate=false is not supported")
        names = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
        needs = "RoPE type 'yarn' needs"
        given = {n: float(self.number(rope[n], f"{needs} {n}")) for n in names if rope.get(n)}
        scales = given.pop("mscale", 0.0), given.pop("mscale_all_dim", 0.0)
        over, under = scales if all(scales) else (1.0, 0.0)
        logarithm = 0.1 * math.log(max(1.0, rope["factor"]))
        return {"attention_factor": (over * logarithm + 1) / (under * logarithm + 1), **given}

    def eos_ids(self) -> tuple[int, ...]:
        eos = self.value("eos_token_id", [])
        ids = eos if isinstance(eos, list | tuple) else [eos]
        if any(type(token) is not int or token < 0 for token in ids):
            raise self.refuse(f"eos_token_id: wanted token ids from 0 on, got {eos!r}")
        return tuple(ids)

    def dtype(self) -> torch.dtype:
        name = str(self.value("dtype", self.value("torch_dtype", "float32"))).removeprefix("torch.")
        if name not in DTYPES:
            raise self.refuse(f"dtype {name!r} is not supported; there are {', '.join(DTYPES)}")
        return DTYPES[name]


def rope_table(spec: ModelSpec) -> Tensor:
    """Cosines and sines of every position: float32 [max_position + MAX_DEPTH, head_dim].

    A row has (cos | sin) of half a head's angles, as `append_kv` reads them. Frequencies and angles
    are float32, as in the checkpoints' own training.

    Source: Su et al., "RoFormer" (2021); the "llama3" bands from the Llama 3.1 release; Peng et
    al., "YaRN" (arXiv 2309.00071).
    """
    # Drafted rows may lie past the last position; they are computed and never followed there.
    positions = spec.max_position + MAX_DEPTH
    angle = torch.arange(positions, dtype=torch.float32)[:, None] * rope_frequencies(spec)
    return torch.cat((angle.cos(), angle.sin()), dim=1) * spec.rope.attention_factor


def rope_frequencies(spec: ModelSpec) -> Tensor:
    """The angle between two positions in each pair of dimensions, float32 [head_dim / 2]."""
    rope = spec.rope
    exponent = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
    frequency = 1.0 / rope.theta**exponent  # [head_dim / 2]
    if rope.type == "linear":
        frequency = frequency / rope.factor
    if rope.type == "llama3":
        # Turns over the original context: many are kept, few are slowed, a ramp joins the two.
        turns = rope.original_max_position_embeddings * frequency / (2 * torch.pi)
        width = rope.high_freq_factor - rope.low_freq_factor
        keep = ((turns - rope.low_freq_factor) / width).clamp(0, 1)
        frequency = keep * frequency + (1 - keep) * frequency / rope.factor
    if rope.type == "yarn":
        # The dimensions with so many turns over the original context, between which a ramp slows.
        fast, slow = (
            spec.head_dim
            * math.log(rope.original_max_position_embeddings / (turns * 2 * math.pi))
            / (2 * math.log(rope.theta))
            for turns in (rope.beta_fast, rope.beta_slow)
        )
        low, high = max(math.floor(fast), 0), min(math.ceil(slow), spec.head_dim - 1)
        index = torch.arange(spec.head_dim // 2, dtype=torch.float32)
        keep = 1 - ((index - low) / (high - low or 0.001)).clamp(0, 1)
        slowed = 1.0 / (rope.factor * rope.theta**exponent)
        frequency = slowed * (1 - keep) + frequency * keep
    return frequency


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object; UserError if the file is unreadable or holds something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{path}: cannot be read ({why})") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: wanted a JSON object, got {type(content).__name__}")
    return content
