"""The drafter at inference: a one-layer EAGLE-3 model that drafts with the target's noise.

Alignment: entry t of the drafter combines the target's features of position t with the embedding of
token t + 1 and predicts token t + 2. A request whose last token is at position c (its root, not yet
committed) therefore has entries 0 .. c - 1, as many as the target has committed, in the same slots
of the same pages.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import tlt_ext
from tlt_ext.limits import MAX_DEPTH

from ..common.rows import take_rows
from ..common.uploads import uploaded
from ..config.strategy import Strategy
from ..model.drafter import DraftSpec
from ..model.kv_cache import KvCache
from ..model.target import TargetModel, appends
from .state import Batch
from .token_store import TokenStore
from .tree import NodeStore, Tree

CATCH_UP_ROWS = 4096  # entries written at once outside of passes


class Levels:
    """Arrays of the levels that a strategy drafts for `batch` requests."""

    def __init__(self, batch: int, strategy: Strategy, device: torch.device) -> None:
        keep, depth = strategy.top_k, strategy.depth
        ints = partial(torch.zeros, dtype=torch.int32, device=device)
        # A hybrid's chain may have more nodes than its levels.
        capacity = max(tlt_ext.tree_capacity(depth, keep), 1 + strategy.levels)
        self.nodes = NodeStore(batch, capacity, strategy.num_verify, device)
        self.root = tlt_ext.Frontier(ints(batch, 1))  # of the first level
        nodes, rows = ints(2, depth, batch, keep)
        shape = (depth, batch, keep, MAX_DEPTH)
        self.ancestors = torch.zeros(shape, dtype=torch.uint8, device=device)
        self.frontiers = [
            tlt_ext.Frontier(*arrays) for arrays in zip(nodes, rows, self.ancestors, strict=True)
        ]
        self.position = ints(batch * keep)
        self.row_start = torch.arange(batch + 1, dtype=torch.int32, device=device) * keep
        levels = torch.arange(depth, dtype=torch.int32, device=device)
        self.slot_base = (levels * keep)[:, None].repeat(1, batch)
        # Frontier rows without a node have no ancestors; their status bits are ignored.
        self.ignored = ints(batch)


class NewRows:
    """Arrays of the entries to write for `batch` requests, at most `most` each."""

    def __init__(self, batch: int, most: int, features: Tensor) -> None:
        ints = partial(torch.zeros, dtype=torch.int32, device=features.device)
        self.row_start = ints(batch + 1)
        self.position, self.committed = ints(batch * most), ints(batch)
        self.each = torch.arange(batch + 1, dtype=torch.int32, device=features.device)
        self.out: Any = tlt_ext.NewRows(  # of tensors
            ids=ints(batch * most),
            first=ints(batch),
            last=ints(batch),
            features=features.new_zeros(batch * most, features.shape[-1]),
        )


@dataclass(eq=False)
class DraftRunner:
    """Drafts trees with a learned one-layer model; its KV is computed from recorded features."""

    spec: DraftSpec
    target: TargetModel  # its embedding and its head are read
    cache: KvCache  # of the engine, with the recorded features
    seed: int  # of the keyed noise
    # How drafted nodes are ranked (`tlt_ext.expand_tree`); at 0 by cumulative log-probability,
    # without the noise (`docs/notes/drafter.md` has accept lengths).
    score_temperature: float = 1.0

    def __post_init__(self) -> None:
        spec, cache = self.spec, self.cache
        self.version = 0  # of the weights; 0: none were loaded
        pages, page_size = cache.k.shape[1:3]
        shape = (pages, page_size, spec.num_kv_heads, spec.head_dim)
        self.k, self.v = (cache.memory.zeros(*shape, dtype=cache.k.dtype) for _ in range(2))
        self.d2t = torch.zeros(spec.draft_vocab, dtype=torch.int32, device=cache.k.device)
        self.weights: dict[str, Tensor] = {}
        self.late_rows = 0  # entries written outside of passes
        # Up to this many rows all attend: on a GPU a launch costs more than a few rows.
        self.few_rows = 16 if self.k.is_cuda else 0
        self._drafts: dict[tuple[int, Strategy], Levels] = {}
        self._gathered: dict[tuple[int, int], NewRows] = {}

    def load(self, state: Mapping[str, Tensor], version: int) -> None:
        """Loads weights in place; the drafter KV of every request is recomputed at its next use."""
        layer = "midlayer.self_attn."
        fused = {
            "qkv": torch.cat([state[f"{layer}{x}_proj.weight"] for x in "qkv"]),
            "o": state[f"{layer}o_proj.weight"],
            "gate_up": torch.cat([state[f"midlayer.mlp.{x}_proj.weight"] for x in ("gate", "up")]),
            "down": state["midlayer.mlp.down_proj.weight"],
            "input_norm": state["midlayer.input_layernorm.weight"],
            "hidden_norm": state["midlayer.hidden_norm.weight"],
            "post_norm": state["midlayer.post_attention_layernorm.weight"],
            "fc": state["fc.weight"],
            "norm": state["norm.weight"],
        }
        for name, tensor in fused.items():
            self._put(name, tensor.detach().to(self.k))
        offsets = state["d2t"].to(self.d2t.device)
        self.d2t.copy_(offsets + torch.arange(len(offsets), device=offsets.device))
        self.refresh_head()
        self.version = version

    def refresh_head(self) -> None:
        """Gathers the draft head from the target; call after each policy update."""
        self._put("head", self.target.head.index_select(0, self.d2t.long()))

    def _put(self, name: str, value: Tensor) -> None:
        """Writes a weight in place, since graphs read it."""
        if name in self.weights:
            self.weights[name].copy_(value)
        else:
            self.weights[name] = value.clone()

    # ---- the Proposer interface -----------------------------------------------------------------

    on_device = True

    def usable(self) -> bool:
        return self.version > 0

    def lookahead(self, strategy: Strategy) -> int:
        return strategy.depth * strategy.top_k

    def prepare(self, batch: Batch, strategy: Strategy, store: TokenStore) -> list[int] | None:
        """Writes missing entries of the drafter that a pass with `strategy` would not write.

        After plain decoding these are the entries of tokens committed since the last draft, after a
        swap of weights all entries. They are computed from recorded features, without the target.
        Returns the number of entries that each row now has, or None if none changed.
        """
        running, most, version = batch.running, strategy.levels + 1, self.version
        if all(s.draft_version == version and s.num_new <= most for s in running):
            return None
        written = np.array(
            [s.context_len - s.num_new if s.draft_version == version else 0 for s in running]
        )
        missing = np.array([s.context_len for s in running]) - written
        # The pass writes the last entry, since it needs its hidden state.
        late = np.where(missing > most, missing - 1, 0)
        if late.any():
            self._write_late(batch, written, late)
            if self.k.is_cuda:
                torch.cuda.current_stream(self.k.device).synchronize()  # rare; its time is measured
        return (written + late).tolist()

    def propose(self, batch: Batch, strategy: Strategy, store: TokenStore) -> Tree:
        nodes = self.draft(batch, strategy, store)
        # All nodes of a chain are verified, so it needs no selection and no scores.
        rows_of = nodes.chain if strategy.is_chain else nodes.select
        return rows_of(batch.context_len)

    def draft(
        self,
        batch: Batch,
        strategy: Strategy,
        store: TokenStore,
        keep_logits: list[Tensor] | None = None,
    ) -> NodeStore:
        """Drafts all levels and selects none; `keep_logits`: [B * frontier, draft_vocab] each."""
        hidden, key = self._catch_up(batch, strategy), (len(batch), strategy)
        if key not in self._drafts:
            self._drafts[key] = Levels(*key, self.k.device)
        level = self._drafts[key]
        nodes, keep, depth = level.nodes, strategy.top_k, strategy.depth
        nodes.begin(batch.last_token)
        frontier = level.root
        for index in range(depth):
            chosen = level.frontiers[index]
            logits = self._logits(hidden)
            if keep_logits is not None:
                keep_logits.append(logits)
            tlt_ext.expand_tree(
                logits,
                nodes.arrays,
                frontier,
                chosen,
                batch.draft_sampling,
                root_position=batch.context_len,
                status=batch.status,
                seed=self.seed,
                vocab_size=self.target.spec.vocab_size,
                slot_base=max(0, index - 1) * keep,
                d2t=self.d2t,
                score_temperature=self.score_temperature,
            )
            if index == depth - 1:
                break
            frontier = chosen
            hidden = self._next_level(batch, level, index, hidden)
        return nodes

    def _next_level(self, batch: Batch, level: Levels, index: int, hidden: Tensor) -> Tensor:
        """Hidden states [B * K, H] of the nodes that level `index` chose."""
        count, width = len(level.position), self.spec.hidden_size
        joined, parents = hidden.new_empty(count, 2 * width), hidden.new_empty(count, width)
        rows = tlt_ext.Rows(
            level.row_start,
            level.position,
            level.ignored,
            batch.context_len,
            batch.block_table,
            level.slot_base[index],
        )
        frontier = level.frontiers[index]
        tlt_ext.draft_level_inputs(
            self._input_weights,
            level.nodes.arrays,
            frontier,
            hidden,
            rows,
            out=joined,
            hidden_out=parents,
            depth=index,
            eps=self.spec.rms_eps,
        )
        q = self._append(joined, rows)
        return self._attend(q, parents, rows, level.ancestors[index].view(-1, MAX_DEPTH))

    # ---- the layer ------------------------------------------------------------------------------

    def _logits(self, hidden: Tensor) -> Tensor:
        shape = len(hidden), self.spec.draft_vocab
        logits = torch.empty(shape, dtype=torch.float32, device=hidden.device)
        read = self._norm_for(hidden, "norm", "head")
        tlt_ext.linear_rows(**read, weight=self.weights["head"], out=logits, pdl=True)
        return logits

    # `pdl`: weights are written by torch's copies, and `gather_new_rows`, which begins every draft,
    # starts after those have ended.

    def _norm_for(
        self, x: Tensor, norm: str, weight: str, *, gated: bool = False
    ) -> dict[str, Any]:
        read = self.weights[norm], self.weights[weight], self.spec.rms_eps, torch.empty_like(x)
        return self.target.norm_for(x, *read, gated=gated)

    @property
    def _features(self) -> Tensor:
        """The part that drafts read; training also reads the final hidden state."""
        assert self.cache.features is not None  # recorded whenever there is a drafter
        return self.cache.features[..., : 3 * self.spec.hidden_size]

    @property
    def _input_weights(self) -> tlt_ext.DraftWeights:
        weights = self.weights
        return tlt_ext.DraftWeights(
            self.target.embedding, weights["input_norm"], weights["hidden_norm"]
        )

    def _append(self, joined: Tensor, rows: tlt_ext.Rows) -> Tensor:
        """Writes K/V of rows from inputs [R, 2H]; returns their queries [R, heads, head_dim]."""
        count, weight, cos_sin = len(joined), self.weights["qkv"], self.target.cos_sin
        q = joined.new_empty(count, self.spec.num_heads, self.spec.head_dim)
        if appends(count) and self.target.fuses(count, weight):
            tlt_ext.linear_append(joined, weight, q, self.k, self.v, cos_sin, rows, pdl=True)
        else:
            qkv = joined.new_empty(count, len(weight))
            tlt_ext.linear_rows(joined, weight, qkv, pdl=True)
            tlt_ext.append_kv(qkv, q, self.k, self.v, cos_sin, rows)
        return q

    def _attend(
        self, q: Tensor, hidden: Tensor, rows: tlt_ext.Rows, ancestors: Tensor | None = None
    ) -> Tensor:
        """Attention and MLP over appended rows: hidden states [R, H]."""
        attended = torch.empty_like(q)
        tlt_ext.tree_attention(
            q,
            self.k,
            self.v,
            attended,
            rows,
            ancestors=ancestors,
            workspace=self.target.workspace.for_attention(q, self.k, rows.block_table),
        )
        weights, count = self.weights, len(q)
        middle = torch.empty_like(hidden)
        tlt_ext.linear_rows(attended.flatten(1), weights["o"], middle, residual=hidden, pdl=True)
        gated = hidden.new_empty(count, self.spec.intermediate_size)
        read = self._norm_for(middle, "post_norm", "gate_up", gated=True)
        tlt_ext.linear_silu_mul(**read, weight=weights["gate_up"], out=gated, pdl=True)
        out = torch.empty_like(hidden)
        tlt_ext.linear_rows(gated, weights["down"], out, residual=middle, pdl=True)
        return out

    # ---- catching up ----------------------------------------------------------------------------

    def _catch_up(self, batch: Batch, strategy: Strategy) -> Tensor:
        """Writes the entries of the tokens just emitted; returns hidden states of the last, [B, H].

        The entry of the bonus token is among them, and entries of drafted tokens are overwritten.
        K/V of a single layer need no attention, so only the last entry attends.
        """
        key = len(batch), strategy.levels + 1
        if key not in self._gathered:
            self._gathered[key] = NewRows(*key, self._features)
        new = self._gathered[key]
        q, hidden, rows = self._write(new, batch, batch.context_len, batch.num_new)
        if len(q) <= self.few_rows:
            return take_rows(self._attend(q, hidden, rows), new.out.last)
        torch.sub(batch.context_len, 1, out=new.committed)
        return self._attend(
            take_rows(q, new.out.last),
            take_rows(hidden, new.out.last),
            rows._replace(row_start=new.each, position=new.committed, context_len=new.committed),
        )

    def _write_late(self, batch: Batch, first: np.ndarray, counts: np.ndarray) -> None:
        """Writes `counts[b]` entries from `first[b]` on, in pieces of up to `CATCH_UP_ROWS`."""
        size, longest = len(batch), int(counts.max())
        most = max(1, min(CATCH_UP_ROWS // size, longest))
        new = NewRows(size, most, self._features)
        for done in range(0, longest, most):
            piece = (counts - done).clip(0, most)
            ends = np.where(piece > 0, first + done + piece, 0)  # 0: the request gets no entries
            num_new, context_len = uploaded([piece, ends], self.k.device)
            self._write(new, batch, context_len, num_new)
        self.late_rows += int(counts.sum())

    def _write(
        self, new: NewRows, batch: Batch, context_len: Tensor, num_new: Tensor
    ) -> tuple[Tensor, Tensor, tlt_ext.Rows]:
        """Writes K/V of `num_new[b]` entries before `context_len[b]`; queries, features, rows."""
        tlt_ext.gather_new_rows(
            self._features,
            tlt_ext.Rows(new.row_start, new.position, batch.status, context_len, batch.block_table),
            batch.table,
            num_new=num_new,
            out=new.out,
        )
        ids, position, features = new.out.ids, new.position, new.out.features
        if ids.device.type == "cpu":  # leave out inert rows
            used = max(1, int(new.row_start[-1]))  # `last` is 0 for a request without entries
            ids, position, features = ids[:used], position[:used], features[:used]
        width = self.spec.hidden_size
        fused = features.new_empty(len(ids), width)
        tlt_ext.linear_rows(features, self.weights["fc"], fused, pdl=True)
        joined = features.new_empty(len(ids), 2 * width)
        tlt_ext.draft_inputs(self._input_weights, ids, fused, joined, eps=self.spec.rms_eps)
        rows = tlt_ext.Rows(new.row_start, position, batch.status, new.out.first, batch.block_table)
        return self._append(joined, rows), fused, rows
