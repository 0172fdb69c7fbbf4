"""Predicts the memory of a run, by part.

The code of the run builds its permanent allocations on torch's meta device, and their tensors are
counted. The memory that an update saves for its backward pass is computed from the shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..common.host_copies import held_bytes
from ..common.memory import FLOAT_BYTES
from ..common.tensor_parallel import TensorParallel
from ..config.load import Config
from ..config.strategy import MAX_DRAFTED, REJECTION
from ..model import tiny
from ..model.families import FAMILIES
from ..model.fetch import SMOLLM2_CONFIG, is_smollm2
from ..model.spec import DTYPES, ModelSpec
from ..policy import logprobs
from ..policy.host_moments import BLOCK_NUMBERS, MOMENTS, RING
from ..policy.host_weights import LAYERS_AHEAD
from ..policy.weights import SUM_BYTES, is_sharded
from ..rollout.pages import pages_for
from ..rollout.plan import BucketPlan, GraphCost, draft_bytes
from ..rollout.state import WORDS_PER_REQUEST
from ..rollout.token_store import HISTORY, TokenStore
from ..session.parts import Parts, build_parts
from .assemble import longest_request

# Float arrays of a chunk of logits that are alive at once: compiled on a GPU, and op by op.
CHUNK_ARRAYS, CHUNK_ARRAYS_OP_BY_OP = 2, 5
# Hidden widths that an entry of an unroll step of the drafter saves for its backward pass: queries,
# results, norms, sums. Counted in the code, not measured on a GPU.
STEP_WIDTHS = 20
CONTEXT, GRAPHS, STEP = "CUDA context", "graphs", "captured drafter step"
PAGES = ("KV pages", "feature pages", "drafter KV pages")  # `engine.free_in_update`
CONTEXT_BYTES = 600 << 20  # a CUDA context with the workspaces of its libraries


def policy_spec(config: Config, folder: Path | None) -> ModelSpec:
    """The shape of a run's policy.

    Args:
        folder: of its `config.json`; None = the tiny model. That of smollm2 may not exist yet.
    """
    if folder is None:
        spec = tiny.spec(config.model)
    elif is_smollm2(config.model.path) and not folder.exists():
        spec = ModelSpec.from_config(SMOLLM2_CONFIG)
    else:
        spec = ModelSpec.from_folder(folder)
    return replace(spec, dtype=DTYPES[config.model.dtype])


@dataclass(frozen=True)
class Footprint:
    """Bytes by part."""

    always: dict[str, int]  # for the whole run
    phases: dict[str, dict[str, int]]  # phase -> part -> bytes on top, one phase at a time
    host: int = 0  # in host memory beside a card, with `grpo.offload`

    @property
    def peak(self) -> int:
        """Most bytes at once."""
        return sum(self.always.values()) + sum(self.phases[self.largest].values())

    @property
    def torch_peak(self) -> int:
        """The peak as torch counts it: without the CUDA context and memory of graphs."""
        return self.peak - sum(self.always.get(part, 0) for part in (CONTEXT, GRAPHS, STEP))

    @property
    def largest(self) -> str:
        """The phase with the peak."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))


@dataclass(frozen=True)
class RunShape:
    """The inputs of the memory estimate besides the configuration."""

    spec: ModelSpec  # in the dtype of the run, from `policy_spec`
    prompt_len: int  # tokens of the longest prompt
    ranks: int = 1  # processes, which may share the policy's weights and the optimizer

    def footprint(self, config: Config) -> Footprint:
        """Bytes of one rank of a run on `run.device`."""
        spec, ranks, offload = self.spec, self.ranks, config.grpo.offload
        on_card = config.run.device != "cpu"
        sharded = is_sharded(ranks, config.grpo)
        parts = ranks if sharded else 1  # FSDP2 divides the rows of each tensor
        numbers = [-(-rows // parts) * math.prod(cols) for rows, *cols in spec.shapes().values()]
        policy = FLOAT_BYTES * sum(numbers)
        trained = {"policy": policy, "Adam": len(MOMENTS) * policy}
        gradients = {"gradients": policy}
        moments = {"Adam": trained["Adam"]}
        moved = {"none": {}, "moments": moments, "all": trained | gradients}[offload]
        if offload == "all" and ranks > 1:
            moved = {**moved, "gradients of a micro-batch": policy}
        always = {part: size for part, size in trained.items() if not on_card or part not in moved}
        if config.grpo.kl_coef:
            always["reference"] = spec.num_parameters * spec.dtype.itemsize
        always |= _engine_parts(config, spec, self.prompt_len)
        if on_card:
            always[CONTEXT] = CONTEXT_BYTES
        tokens = row_tokens(config, self.prompt_len)
        longest = self.prompt_len + config.sampling.max_new_tokens
        row = Row(
            tokens,
            spec.dtype,
            checkpointing=config.grpo.checkpointing,
            on_card=on_card,
            sharded=sharded,
            from_host=on_card and offload == "all" and not sharded,
        )
        if row.from_host:
            always["ring of weights"] = FLOAT_BYTES * (layer_numbers(spec) + BLOCK_NUMBERS)
        phases = update_bytes(spec, row)
        kept = {} if on_card and offload == "all" else gradients
        if longest * _responses(config) > tokens * config.grpo.minibatches:
            # The sums of earlier micro-batches.
            phases = {phase: kept | needs for phase, needs in phases.items()}
        phases |= {"update, its end": kept | phases["update, its end"], "optimizer": dict(kept)}
        if ranks > 1 and not sharded:
            phases["optimizer"]["sums of ranks"] = min(SUM_BYTES, policy)
        if on_card and offload != "none":
            arrays = len(MOMENTS) if offload == "moments" else len(MOMENTS) + 2
            block = min(BLOCK_NUMBERS, max(numbers))
            phases["optimizer"]["blocks on the card"] = RING * arrays * FLOAT_BYTES * block
        if config.engine.free_in_update == "true":
            phases["rollout"] = {part: always.pop(part) for part in PAGES if part in always}
        return Footprint(always, phases, sum(moved.values()) if on_card else 0)


@dataclass(frozen=True)
class Row:
    """A packed row of the update."""

    tokens: int
    dtype: torch.dtype  # of forward and backward passes
    # Only the inputs of the layers are kept, and one layer while it is recomputed.
    checkpointing: bool = False
    # Heads share keys and values, the result has one copy less, and the compiled backward pass
    # computes elementwise results again.
    on_card: bool = True
    sharded: bool = False  # FSDP2 gathers the weights of a layer and scatters its gradients
    from_host: bool = False  # weights arrive from host memory, and gradients leave

    @property
    def copies(self) -> bool:
        """Whether float32 weights are copied for the pass."""
        return is_half(self.dtype) and not self.sharded


def is_half(dtype: torch.dtype) -> bool:
    return dtype in (torch.bfloat16, torch.float16)


def row_tokens(config: Config, prompt_len: int) -> int:
    """Tokens of the longest packed row of an update."""
    longest = prompt_len + config.sampling.max_new_tokens
    return min(max(config.grpo.micro_batch_tokens, longest), _responses(config) * longest)


def _responses(config: Config) -> int:
    return config.grpo.prompts_per_step * config.grpo.samples_per_prompt


def layer_numbers(spec: ModelSpec) -> int:
    """Parameters of a layer."""
    return sum(map(math.prod, spec.layer_shapes().values()))


def layer_bytes(spec: ModelSpec, row: Row) -> int:
    """Bytes that one layer of the policy saves for its backward pass."""
    size, qkv = row.dtype.itemsize, spec.q_dim + 2 * spec.kv_dim
    # Queries, keys, values and the result.
    saved = qkv + spec.q_dim if row.on_card else 5 * spec.q_dim
    attention = size * saved + FLOAT_BYTES * spec.num_heads
    if spec.qk_norm:
        attention += qk_norm_bytes(spec, row)
    # Weights of one product are joined, unless the checkpoint has them so.
    joined = (
        0 if FAMILIES[spec.family].joined else spec.hidden_size * (qkv + 2 * spec.intermediate_size)
    )
    weights = size * (layer_numbers(spec) if row.copies else joined)
    mlp = (2 if row.on_card else 4) * size * spec.intermediate_size  # gate, up; silu, the product
    return row.tokens * (2 * norm_bytes(spec, row) + attention + mlp) + weights


def norm_bytes(spec: ModelSpec, row: Row) -> int:
    """Bytes of a token that a norm saves: its input, op by op also the normed input and output."""
    size = row.dtype.itemsize
    if row.on_card:
        return size * spec.hidden_size
    return (FLOAT_BYTES + 2 * size) * spec.hidden_size + FLOAT_BYTES  # the input in float32


def qk_norm_bytes(spec: ModelSpec, row: Row) -> int:
    """Bytes of a token that the norms of queries and keys save besides q, k and v."""
    size, normed = row.dtype.itemsize, spec.q_dim + spec.kv_dim
    if row.on_card:
        return size * (normed + spec.kv_dim)  # their inputs are views of q, k and v
    inputs = normed if is_half(row.dtype) else normed + spec.kv_dim  # float32: views of q, k, v
    heads = spec.num_heads + spec.num_kv_heads
    return FLOAT_BYTES * (inputs + heads) + size * normed


def transit_bytes(spec: ModelSpec, row: Row) -> dict[str, int]:
    """Bytes of weights in the dtype of the pass that are not saved, and of their gradients."""
    size, head = row.dtype.itemsize, spec.vocab_size * spec.hidden_size
    if not row.sharded:
        found = {"copies of embedding and head": size * head} if row.copies else {}
        if row.from_host:
            layers = LAYERS_AHEAD * layer_numbers(spec)
            outer = head * (1 if spec.tie_word_embeddings else 2)
            found["gradients that leave"] = FLOAT_BYTES * max(layers, outer)
        return found
    outer = head * (1 if spec.tie_word_embeddings else 2)
    # Two layers are gathered; the gradients of one are there, and are reduced in float32.
    layers = layer_numbers(spec) * (3 * size + FLOAT_BYTES)
    return {"gathered weights": layers + size * outer}


def update_bytes(spec: ModelSpec, row: Row) -> dict[str, dict[str, int]]:
    """Bytes of a micro-batch at the moments that can be its peak.

    Returns:
        Phase -> part -> bytes: when the logits are computed, when the backward passes of the layers
        begin, and when they end. Sums of gradients are not included.
    """
    tokens, size, layer = row.tokens, row.dtype.itemsize, layer_bytes(spec, row)
    inputs = spec.num_layers * tokens * size * spec.hidden_size
    kept = inputs if row.checkpointing else spec.num_layers * layer
    # The final norm runs op by op; its output is the rows with logits.
    ends = tokens * (norm_bytes(spec, row) + row.on_card * size * spec.hidden_size)
    head, transit = spec.vocab_size * spec.hidden_size, transit_bytes(spec, row)
    return {
        "update, logits": {
            "activations": kept + ends,
            "logits chunk": chunk_bytes(spec, row),
            "gradients of the head": FLOAT_BYTES * head + tokens * size * spec.hidden_size,
            **transit,
        },
        "update, layers": {
            "activations": kept + (layer if row.checkpointing else 0),
            "backward": backward_bytes(spec, row),
            "gradient of the head": size * head,
            **transit,
        },
        "update, its end": {
            "activations": layer,
            "backward": backward_bytes(spec, row),
            "gradient of the head": size * head if is_half(row.dtype) else 0,  # else in the sums
            **transit,
        },
    }


def backward_bytes(spec: ModelSpec, row: Row) -> int:
    """Gradients alive in one layer's backward pass: three MLP widths, two residual streams."""
    widths = 3 + row.on_card  # the product of gate and up is computed again
    numbers = widths * spec.intermediate_size + 2 * spec.hidden_size
    return row.tokens * row.dtype.itemsize * numbers


def chunk_bytes(spec: ModelSpec, row: Row) -> int:
    """One chunk of rows: logits and what is made of them, or their gradient and the head's."""
    rows = min(row.tokens, max(1, logprobs.CHUNK_LOGITS // spec.vocab_size))
    share = row.dtype.itemsize * rows + FLOAT_BYTES * spec.hidden_size
    arrays = CHUNK_ARRAYS if row.on_card else CHUNK_ARRAYS_OP_BY_OP
    return spec.vocab_size * max(arrays * FLOAT_BYTES * rows, share)


def _engine_parts(config: Config, spec: ModelSpec, prompt_len: int) -> dict[str, int]:
    engine, longest = config.engine, longest_request(config, spec, prompt_len)
    with torch.device("meta"):
        weights = {n: torch.empty(shape, dtype=spec.dtype) for n, shape in spec.shapes().items()}
        parallel = TensorParallel(size=engine.tensor_parallel)  # its first rank holds most
        parts = build_parts(config, spec, weights, longest, "meta", parallel)
        target, cache = parts.target, parts.cache
        max_len = min(target.spec.max_position, cache.num_pages * cache.page_size)
        store = TokenStore(HISTORY * engine.max_batch, max_len, torch.device("meta"))
    own = held_bytes(target.state_dict())
    words = WORDS_PER_REQUEST + pages_for(max_len + MAX_DRAFTED, engine.page_size)
    held = {
        "engine weights": own,
        "engine buffers": held_bytes(vars(target)) - own,
        "engine state": held_bytes(vars(store)) + FLOAT_BYTES * engine.max_batch * words,
        "KV pages": held_bytes(cache.k, cache.v),
    }
    if cache.features is not None:
        held["feature pages"] = held_bytes(cache.features)
        held |= _drafter_parts(config, parts, prompt_len)
    if config.run.device != "cpu" and engine.graphs != "off":
        most = engine.spec_max_rows or target.max_rows
        cells = BucketPlan.of(engine, config.bandit.buckets, most).cells
        rejection, shared = engine.verify == REJECTION, engine.tensor_parallel > 1
        cost = GraphCost(spec, engine.graphs != "pass", rejection, shared)
        held[GRAPHS] = cost.bytes_of(*cells)
        if parts.runner is not None:
            held["drafts in graphs"] = draft_bytes(
                cells, parts.runner.spec, target.dtype.itemsize, rejection
            )
    return held


def _drafter_parts(config: Config, parts: Parts, prompt_len: int) -> dict[str, int]:
    target, drafter, runner = parts.target, parts.drafter, parts.runner
    assert drafter is not None and runner is not None
    with torch.device("meta"):
        runner.load(drafter.state_dict(), version=1)
    trained = held_bytes(drafter.trainable())
    on_card = config.run.device != "cpu"
    feature = target.feature_size * target.dtype.itemsize
    entry = feature if on_card else target.feature_size * FLOAT_BYTES
    longest = prompt_len + config.sampling.max_new_tokens
    recorded = int(_responses(config) * longest * (1 + config.spot.keep_long))
    trains = config.spot.mode != "off"
    held = {
        "drafter KV pages": held_bytes(runner.k, runner.v),
        "drafter": held_bytes(drafter) + held_bytes(runner.weights, runner.d2t),
        # Two moments, the gradients, the averaged weights.
        "drafter's optimizer": (3 + (config.spot.average > 0)) * trained,
        "data buffer": trains * min(config.spot.buffer_tokens, recorded) * feature,
        # The features of a step's entries, and three int64 each.
        "training bin": config.spot.tokens_per_step * (entry + 3 * 8),
    }
    if trains and on_card:
        # A captured step keeps what it saves for its backward pass.
        saved = 4 * drafter.spec.intermediate_size + STEP_WIDTHS * drafter.spec.hidden_size
        entries = config.spot.tokens_per_step * config.drafter.unroll
        held[STEP] = entries * saved * target.dtype.itemsize
    return held


def table(parts: Footprint) -> Sequence[str]:
    """The parts as lines, in 10^9 bytes."""
    lines = ["memory, GB (10^9 bytes)", "  for the whole run"]
    lines += [f"    {name:<22}{size / 1e9:>9.3f}" for name, size in parts.always.items()]
    lines.append(f"    {'together':<22}{sum(parts.always.values()) / 1e9:>9.3f}")
    lines.append("  on top, one phase at a time")
    for phase, needs in parts.phases.items():
        inner = ", ".join(f"{name} {size / 1e9:.3f}" for name, size in needs.items())
        lines.append(f"    {phase:<22}{sum(needs.values()) / 1e9:>9.3f}  ({inner})")
    lines.append(f"  peak{'':<20}{parts.peak / 1e9:>9.3f}  (in {parts.largest})")
    if parts.host:
        lines.append(f"  in host memory{'':<10}{parts.host / 1e9:>9.3f}")
    return lines
