"""The target model on the native ops: fused weights, a paged KV cache, ragged rows.

Prefill, plain decoding and the verification of a draft tree are one call. Each row has a position
and, in a tree, its ancestors. A row's logits are the same bits in all three (row invariance).
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import tlt_ext

from ..common.rows import take_rows
from ..common.symmetric import SymmetricArrays
from ..common.tensor_parallel import TensorParallel
from .exchange import shared_arrays
from .kv_cache import KvCache
from .shards import PARTS, Shard, head_rows
from .spec import ModelSpec, rope_table
from .target_weights import DecoderLayer, TargetWeights
from .workspace import Workspace

LayerCache = tuple[Tensor, Tensor, Tensor]  # a layer's keys, values and RoPE table

# When a GPU uses fused ops (docs/notes/layers.md). They are faster for up to FUSED_ROWS rows. With
# an append or a gate they are faster for more rows, too, as long as the weights, which are read
# once per PIECE_ROWS rows, stay below FUSED_WEIGHTS in total. With more than LARGE_WEIGHTS a
# separate norm costs nothing: its launch overlaps with the prefetch of the weights, and the linear
# alone reads them faster.
FUSED_ROWS, PIECE_ROWS, FUSED_WEIGHTS, LARGE_WEIGHTS = 8, 32, 10 << 20, 32 << 20

# The most rows with which a linear also appends: without a norm, with one. Every piece of rows
# looks up the places of its rows, so for more rows separate launches are faster.
APPENDED_ROWS, NORMED_APPENDED_ROWS = 64, 96

# A linear of more rows may be two launches, if its last round of tiles has few
# (`csrc/layers/linear_hopper.cu`).
WHOLE_ROWS = 64


def fuses(rows: int, weights: int) -> bool:
    """Whether a GPU fuses norm and append, or norm and gate, into a linear."""
    return rows <= FUSED_ROWS or -(-rows // PIECE_ROWS) * weights <= FUSED_WEIGHTS


def norms(rows: int, weights: int, *, gated: bool = False) -> bool:
    """Whether a GPU fuses the norm into a linear that does not append."""
    few = fuses(rows, weights) if gated else rows <= FUSED_ROWS
    return few and weights <= LARGE_WEIGHTS


def appends(rows: int) -> bool:
    """Whether a GPU fuses the append into a linear of so many rows without a norm."""
    return rows <= APPENDED_ROWS


def layer_launches(spec: ModelSpec, rows: int) -> int:
    """Upper bound of a layer's launches on a GPU; attention counts as two."""
    qkv = (spec.q_dim + 2 * spec.kv_dim) * spec.hidden_size
    appended = rows <= NORMED_APPENDED_ROWS and fuses(rows, qkv) and not spec.qk_norm
    normed = appended or norms(rows, qkv)
    gated = norms(rows, 2 * spec.intermediate_size * spec.hidden_size, gated=True)
    divided = 4 * (rows > WHOLE_ROWS)
    return 6 + (not normed) + (not appended) + (not gated) + divided


def default_feature_layers(num_layers: int) -> tuple[int, int, int]:
    """The low, middle and high layer whose outputs are the drafter's input, counted from 0.

    Serving engines use the same for EAGLE-3 (they count the inputs of layers 2, n / 2 and n - 3). A
    model with fewer than seven layers spreads them over its layers; below three they repeat.

    Example:
        >>> default_feature_layers(30), default_feature_layers(4)
        ((1, 14, 26), (0, 1, 2))
    """
    if num_layers >= 7:
        return 1, num_layers // 2 - 1, num_layers - 4
    high = num_layers - 2 if num_layers > 3 else num_layers - 1
    return 0, high // 2, high


class TargetModel(TargetWeights):
    """A model with its own fused weights and scratch buffers.

    `forward` returns views of the buffers, which the next call overwrites. It has up to `max_rows`
    rows, `max_logits` of them with logits (0 = all). All ranks of `parallel` make the same calls,
    and get the same bits as one rank with the whole model. Raises UserError if the weights do not
    fit the spec, or the ranks cannot share the model.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Tensor],
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        max_rows: int = 512,
        max_logits: int = 0,
        parallel: TensorParallel | None = None,
    ) -> None:
        self.parallel = parallel or TensorParallel()
        shard = Shard.of(spec, self.parallel.rank, self.parallel.size)
        super().__init__(spec, shard, torch.device(device), dtype or spec.dtype)
        self.max_rows, self.max_logits = max_rows, max_logits or max_rows
        self.feature_layers = default_feature_layers(spec.num_layers)
        self.workspace = Workspace(self.device)
        self.cos_sin = rope_table(spec).to(self.device)
        # Position 0 is not rotated, and a layer without RoPE rotates none (arXiv 2501.18795).
        unrotated = self.cos_sin[:1] / spec.rope.attention_factor
        self._no_rope = unrotated.expand_as(self.cos_sin)
        self._allocate_buffers()
        self.load_weights(weights)

    @property
    def feature_size(self) -> int:
        """Columns of the features: three layers and the final hidden state."""
        return 4 * self.spec.hidden_size

    @property
    def shares_memory(self) -> bool:
        """Whether ranks exchange data through memory that their GPUs share."""
        return isinstance(self._columns, SymmetricArrays)

    def forward(
        self,
        ids: Tensor,
        rows: tlt_ext.Rows,
        kv: KvCache,
        *,
        ancestors: Tensor | None = None,
        want_logits: bool = True,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Runs all layers on R rows and writes their keys and values into the cache.

        Args:
            ids: int32 or int64 [R], tokens of the rows.
            rows: the requests of the rows. Rows past the last request are computed too: their ids
                must be valid, their results are undefined.
            kv: the cache; slots from `context_len` on are written. If it records features, they
                are returned too.
            ancestors: uint8 [R, 16], in-flight slots of a row's ancestors, root first; None where
                the rows of a request are a chain (prefill, plain decoding).
            want_logits: compute the logits; a prefill needs none.

        Returns:
            logits: float32 [R, vocab_size], or None if they are not wanted.
            features: [R, 4 H] in the model's dtype, or None: the outputs (residual stream) of the
                three feature layers, then the final hidden state *before* the final norm, so that
                a teacher's logits are head(final_norm(last H columns)).

        Raises:
            ValueError: more rows than `max_rows` or `max_logits`, or an array that does not fit.
        """
        count = len(ids)
        if count > self.max_rows:
            raise ValueError(f"ids: wanted at most max_rows = {self.max_rows} rows, got {count}")
        hidden = stream = self._hidden[:count]
        take_rows(self.embedding, ids, hidden)
        features = None if kv.features is None else self._features[:count]
        recorded = (*self.feature_layers, len(self.layers) - 1)  # layer of each part of a feature
        for index, layer in enumerate(self.layers):
            # A recorded layer writes the residual stream into the features, others into one buffer.
            parts = [] if features is None else [i for i, of in enumerate(recorded) if of == index]
            out = self._feature(count, parts[0]) if parts else stream
            cos_sin = self._no_rope if index in self.spec.no_rope else self.cos_sin
            cache = kv.k[index], kv.v[index], cos_sin
            self._decoder_layer(layer, hidden, out, cache, rows, ancestors)
            hidden = out
            for again in parts[1:]:  # recorded twice: a model with few layers
                self._feature(count, again).copy_(hidden)
        return self._logits_of(hidden) if want_logits else None, features

    def _decoder_layer(
        self,
        layer: DecoderLayer,
        hidden: Tensor,
        out: Tensor,
        cache: LayerCache,
        rows: tlt_ext.Rows,
        ancestors: Tensor | None,
    ) -> None:
        """One layer: residual stream `hidden` [R, H] in, `out` out; they may be one tensor."""
        q, attended, gated = (b[: len(hidden)] for b in (self._q, self._attended, self._gated))
        self._append(layer, hidden, q, cache, rows)
        k_cache, v_cache, _ = cache
        tlt_ext.tree_attention(
            q,
            k_cache,
            v_cache,
            attended,
            rows,
            ancestors=ancestors,
            workspace=self.workspace.for_attention(q, k_cache, rows.block_table),
            pdl=True,
        )
        joined = attended.flatten(1)
        self._add_up(0, joined, layer.output, out, bias=layer.output_bias, residual=hidden)
        eps = self.spec.rms_norm_eps
        norm, weight = layer.post_norm, layer.gate_up
        read = self.norm_for(out, norm, weight, eps, self._normed, gated=True)
        tlt_ext.linear_silu_mul(**read, weight=weight, out=gated, pdl=True)
        self._add_up(1, gated, layer.down, out, residual=out)

    def _add_up(self, turn: int, x: Tensor, weight: Tensor, out: Tensor, **addends: Any) -> None:
        """A linear whose sums are divided among the ranks, on two arrays that alternate."""
        if self._sums is None:
            return tlt_ext.linear_rows(x, weight, out, **addends, pdl=True)
        parts = PARTS // self.parallel.size
        sums = self._sums[turn]
        tlt_ext.linear_rows(x, weight, sums.own(len(x)), parts=parts, pdl=True)
        sums.fold(len(x), out, **addends)

    # With few rows and few weights launches dominate, and one op replaces two or three, with the
    # same bits. `pdl` and `pdl_tables` are safe: weights, lengths, tables, positions and committed
    # slots are written by kernels before torch's lookup of the embedding, which is launched without
    # `pdl` and separates them from the layers.

    def fuses(self, rows: int, weight: Tensor, most: float = math.inf) -> bool:
        """Whether a norm or an append is fused into a linear; on a GPU up to `most` rows."""
        return self.device.type == "cpu" or (rows <= most and fuses(rows, weight.numel()))

    def norm_for(
        self,
        x: Tensor,
        norm: Tensor,
        weight: Tensor,
        eps: float,
        between: Tensor,
        *,
        gated: bool = False,
    ) -> dict[str, Any]:
        """Arguments for a linear: x and its norm to fuse, or the rows normed into `between`."""
        inside = self.device.type == "cpu" or norms(len(x), weight.numel(), gated=gated)
        if inside and self.fuses(len(x), weight):
            return {"x": x, "norm_weight": norm, "eps": eps}
        normed = between[: len(x)]
        tlt_ext.rms_norm(x, norm, normed, eps=eps)
        return {"x": normed}

    def _append(
        self, layer: DecoderLayer, hidden: Tensor, q: Tensor, cache: LayerCache, rows: tlt_ext.Rows
    ) -> None:
        """Writes the rotated queries into `q`, keys and values into the cache."""
        eps = self.spec.rms_norm_eps
        if not self.spec.qk_norm and self.fuses(len(hidden), layer.qkv, NORMED_APPENDED_ROWS):
            return tlt_ext.linear_append(
                hidden,
                layer.qkv,
                q,
                *cache,
                rows,
                norm_weight=layer.input_norm,
                eps=eps,
                bias=layer.qkv_bias,
                pdl=True,
                pdl_tables=True,
            )
        qkv = self._qkv[: len(hidden)]
        read = self.norm_for(hidden, layer.input_norm, layer.qkv, eps, self._normed)
        tlt_ext.linear_rows(**read, weight=layer.qkv, out=qkv, bias=layer.qkv_bias, pdl=True)
        tlt_ext.append_kv(qkv, q, *cache, rows, q_norm=layer.q_norm, k_norm=layer.k_norm, eps=eps)

    def _logits_of(self, hidden: Tensor) -> Tensor:
        count, head, eps = len(hidden), self._head_rows, self.spec.rms_norm_eps
        if count > self.max_logits:
            raise ValueError(f"logits: wanted at most max_logits = {self.max_logits}, got {count}")
        logits = self._logits[:count]
        read = self.norm_for(hidden, self.final_norm, head, eps, self._normed)
        if self._columns is None:
            tlt_ext.linear_rows(**read, weight=head, out=logits, pdl=True)
            return logits
        part = self._columns.own(count)[:, : len(head)]
        tlt_ext.linear_rows(**read, weight=head, out=part, pdl=True)
        torch.cat(self._columns.gather(count), 1, out=logits)
        return logits[:, : self.spec.vocab_size]

    def _feature(self, count: int, place: int) -> Tensor:
        width = self.spec.hidden_size
        return self._features[:count, place * width : (place + 1) * width]

    def _allocate_buffers(self) -> None:
        spec = self.shard.spec

        def rows(*shape: int) -> Tensor:
            # Zeros: inert rows are computed too, and NaN there would be slow and raise alarms.
            return torch.zeros(self.max_rows, *shape, dtype=self.dtype, device=self.device)

        self._hidden, self._normed = (rows(spec.hidden_size) for _ in range(2))
        self._qkv = rows(spec.q_dim + 2 * spec.kv_dim)
        self._q, self._attended = (rows(spec.num_heads, spec.head_dim) for _ in range(2))
        self._gated = rows(spec.intermediate_size)
        self._features = rows(self.feature_size)
        size, columns = self.parallel.size, head_rows(spec.vocab_size, self.parallel.size)
        self._head_rows = self.head[self.parallel.rank * columns :][:columns]
        shape = self.max_logits, size * columns
        self._logits = torch.zeros(shape, dtype=torch.float32, device=self.device)
        self._sums = self._columns = None
        if size > 1:
            width = spec.hidden_size
            self._sums = shared_arrays(self.parallel, self.max_rows, width, self.device, count=2)
            (self._columns,) = shared_arrays(self.parallel, self.max_logits, columns, self.device)
