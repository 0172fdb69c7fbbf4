"""The drafter at inference: a one-layer EAGLE-3 model on the ops, drafting with the target's noise.

Alignment: the drafter's entry t joins the target's features of position t with the embedding of
token t + 1 and predicts token t + 2. A request whose last token sits at position c (its root, not
yet committed) therefore has entries 0 .. c - 1, as many as the target has committed, in the same
slots of the same pages.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

import tlt_ext
from driver.drafter import DraftSpec
from driver.model import TargetModel
from driver.rollout.batch import Batch
from driver.rollout.kv_cache import KvCache
from driver.rollout.scheduler import Sequence
from driver.rollout.tree import MAX_DEPTH, NodeStore, Tree
from driver.strategy import Strategy

CATCH_UP_ROWS = 256  # rows of a request per catch-up pass


class DraftRunner:
    """Drafts trees with a learned one-layer model and keeps its KV rewritten from real features.

    Args:
        spec: shape of the drafter.
        target: the policy; its embedding is read, never written, its head gathered by `d2t`.
        cache: the engine's KV cache, which holds the recorded features.
        seed: run seed of the keyed noise.
        score_temperature: how drafted nodes are ranked (`tlt_ext.expand_tree`). 0, cumulative
            log-probability, is as good as any: accept length on the tiny policy at T = 1 of
            4,2,8 / 6,4,16 / 8,4,32 is 3.19 / 3.83 / 4.15; with perturbed scores at 0.7, 1, 1.5, 2
            and 3 the last is 3.85, 3.98, 4.12, 4.09 and 3.83.
    """

    def __init__(
        self,
        spec: DraftSpec,
        target: TargetModel,
        cache: KvCache,
        seed: int,
        score_temperature: float = 0.0,
    ) -> None:
        self.spec, self.target, self.cache, self.seed = spec, target, cache, seed
        self.score_temperature = score_temperature
        self.version = 0  # 0: never loaded
        pages, page_size = cache.k.shape[1:3]
        shape = (pages, page_size, spec.num_kv_heads, spec.head_dim)
        self.k, self.v = (cache.k.new_zeros(shape) for _ in range(2))
        self.d2t = torch.zeros(spec.draft_vocab, dtype=torch.int32, device=cache.k.device)
        self.weights: dict[str, Tensor] = {}
        self.caught_up_rows = 0

    def load(self, state: Mapping[str, Tensor], version: int) -> None:
        """Swaps weights in place; every request's drafter KV is rewritten on its next draft.

        Args:
            state: tensors in the EAGLE-3 layout (`driver.drafter.Drafter.state_dict`).
            version: stamped on what is drafted from here on.
        """
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
            value = tensor.detach().to(self.k)
            if name in self.weights:
                self.weights[name].copy_(value)
            else:
                self.weights[name] = value.clone()
        offsets = state["d2t"].to(self.d2t.device)
        self.d2t.copy_(offsets + torch.arange(len(offsets), device=offsets.device))
        self.refresh_head()
        self.version = version

    def refresh_head(self) -> None:
        """Gathers the draft head from the target again; call after each policy update."""
        head = self.target.head.index_select(0, self.d2t.long())
        if "head" in self.weights:
            self.weights["head"].copy_(head)
        else:
            self.weights["head"] = head

    # ---- the Proposer interface -----------------------------------------------------------------

    def usable(self) -> bool:
        return self.version > 0

    def lookahead(self, strategy: Strategy) -> int:
        return strategy.depth * strategy.top_k

    def finished(self, sequence: Sequence) -> None:
        pass

    def propose(self, batch: Batch, strategy: Strategy) -> Tree:
        hidden = self._catch_up(batch)
        size, keep = len(batch), strategy.top_k
        device = self.k.device
        # Frontier rows without a node have no ancestors: what attention says of them is no fault.
        ignored = torch.zeros_like(batch.status)
        store = NodeStore(batch.last_tokens(), 1 + keep + (strategy.depth - 1) * keep * keep)
        frontier = torch.zeros(size, 1, dtype=torch.int32, device=device)
        ancestors = None
        row_start = torch.arange(0, size * keep + 1, keep, dtype=torch.int32, device=device)
        for level in range(1, strategy.depth + 1):
            next_frontier, next_row = torch.empty(
                2, size, keep, dtype=torch.int32, device=device
            ).unbind()
            next_ancestors = torch.zeros(size, keep, MAX_DEPTH, dtype=torch.uint8, device=device)
            tlt_ext.expand_tree(
                self._logits(hidden),
                frontier,
                *store.arrays,
                next_frontier,
                next_row,
                next_ancestors,
                batch.temperature,
                batch.request,
                batch.context_len,
                batch.status,
                seed=self.seed,
                d2t=self.d2t,
                frontier_ancestors=ancestors,
                slot_base=max(0, level - 2) * keep,
                score_temperature=self.score_temperature,
                vocab_size=self.target.spec.vocab_size,
            )
            if level == strategy.depth:
                break
            frontier, ancestors = next_frontier, next_ancestors
            ids = store.token.gather(1, frontier.clamp_min(0).long()).view(-1)
            hidden = self._layer(
                ids,
                hidden.index_select(0, next_row.view(-1).long()),
                row_start=row_start,
                context_len=batch.context_len,
                position=(batch.context_len + level - 1).repeat_interleave(keep),
                block_table=batch.block_table,
                status=ignored,
                ancestors=ancestors.view(-1, MAX_DEPTH),
                slot_base=torch.full_like(batch.context_len, (level - 1) * keep),
            )
        return store.select(batch.context_len, strategy.num_verify)

    # ---- the layer ------------------------------------------------------------------------------

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = torch.empty(len(hidden), self.spec.draft_vocab, device=hidden.device)
        tlt_ext.rms_norm_linear(
            hidden, self.weights["norm"], self.weights["head"], logits, eps=self.spec.rms_eps
        )
        return logits

    def _inputs(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """[R, 2H]: the normed embedding beside the normed features."""
        width = self.spec.hidden_size
        joined = hidden.new_empty(len(ids), 2 * width)
        embedded = self.target.embedding.index_select(0, ids.long())
        eps = self.spec.rms_eps
        tlt_ext.rms_norm(embedded, self.weights["input_norm"], joined[:, :width], eps=eps)
        tlt_ext.rms_norm(hidden, self.weights["hidden_norm"], joined[:, width:], eps=eps)
        return joined

    def _append(self, ids: Tensor, hidden: Tensor, **rows: Tensor | None) -> Tensor:
        """Writes the rows' K/V; returns their queries [R, heads, head_dim]."""
        spec = self.spec
        qkv = hidden.new_empty(len(ids), (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim)
        tlt_ext.linear_rows(self._inputs(ids, hidden), self.weights["qkv"], qkv)
        q = hidden.new_empty(len(ids), spec.num_heads, spec.head_dim)
        tlt_ext.append_kv(
            qkv,
            q,
            self.k,
            self.v,
            self.target.cos_sin,
            rows["row_start"],
            rows["context_len"],
            rows["position"],
            rows["block_table"],
            rows["status"],
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            slot_base=rows.get("slot_base"),
        )
        return q

    def _attend(self, q: Tensor, hidden: Tensor, **rows: Tensor | None) -> Tensor:
        """Attention and MLP over appended rows: the drafter's hidden states [R, H]."""
        attended = torch.empty_like(q)
        tlt_ext.tree_attention(
            q,
            self.k,
            self.v,
            attended,
            rows["row_start"],
            rows["context_len"],
            rows["position"],
            rows["block_table"],
            rows["status"],
            ancestors=rows.get("ancestors"),
            slot_base=rows.get("slot_base"),
            workspace=self.target.workspace.for_attention(q, self.k, rows["block_table"]),
        )
        weights, count = self.weights, len(q)
        middle = torch.empty_like(hidden)
        tlt_ext.linear_rows(attended.view(count, -1), weights["o"], middle, residual=hidden)
        gate_up = hidden.new_empty(count, 2 * self.spec.intermediate_size)
        tlt_ext.rms_norm_linear(
            middle, weights["post_norm"], weights["gate_up"], gate_up, eps=self.spec.rms_eps
        )
        out = torch.empty_like(hidden)
        tlt_ext.silu_mul_linear(gate_up, weights["down"], out, residual=middle)
        return out

    def _layer(self, ids: Tensor, hidden: Tensor, **rows: Tensor | None) -> Tensor:
        return self._attend(self._append(ids, hidden, **rows), hidden, **rows)

    # ---- catching up ----------------------------------------------------------------------------

    def _catch_up(self, batch: Batch) -> Tensor:
        """Writes every missing drafter entry from recorded features; hidden states of the last.

        After a verify pass these are the rows just accepted, the bonus token's included; after the
        gate opened, all that the target has committed since; after a swap, all of them. What the
        drafter wrote from its own guesses is written over. One layer's K/V need no attention, so
        only the last entry of a request attends.

        Returns:
            [B, H], of each request's entry `context_len - 1`.
        """
        for sequence in batch.sequences:
            if sequence.draft_version != self.version:
                sequence.draft_version, sequence.draft_len = self.version, 0
        while True:
            lag = [s.context_len - min(s.draft_len, s.context_len - 1) for s in batch.sequences]
            counts = [min(n, CATCH_UP_ROWS) for n in lag]
            q, hidden, last = self._append_committed(batch, counts)
            for sequence, count, behind in zip(batch.sequences, counts, lag, strict=True):
                sequence.draft_len = sequence.context_len - behind + count
            if lag == counts:
                break
        size = len(batch)
        committed = batch.context_len - 1
        return self._attend(
            q.index_select(0, last),
            hidden.index_select(0, last),
            row_start=torch.arange(size + 1, dtype=torch.int32, device=q.device),
            context_len=committed,
            position=committed,
            block_table=batch.block_table,
            status=batch.status,
        )

    def _append_committed(self, batch: Batch, counts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """K/V of the next `counts[b]` entries of each request, from features and tokens."""
        device = self.k.device
        page_size = self.k.shape[1]
        first, ids, places, ends = [], [], [], []
        for sequence, count in zip(batch.sequences, counts, strict=True):
            start = min(sequence.draft_len, sequence.context_len - 1)
            first.append(start)
            ids += sequence.tokens[start + 1 : start + count + 1]
            places += [
                sequence.pages[t // page_size] * page_size + t % page_size
                for t in range(start, start + count)
            ]
            ends.append(len(ids))
        self.caught_up_rows += len(ids)
        context_len = torch.tensor(first, dtype=torch.int32, device=device)
        row_start = torch.tensor([0, *ends], dtype=torch.int32, device=device)
        steps = torch.arange(len(ids), dtype=torch.int32, device=device)
        sizes = torch.tensor(counts, device=device)
        position = steps + (context_len - row_start[:-1]).repeat_interleave(sizes)
        features = self.cache.features.flatten(0, 1).index_select(
            0, torch.tensor(places, device=device)
        )
        fused = features.new_empty(len(ids), self.spec.hidden_size)
        width = 3 * self.spec.hidden_size
        tlt_ext.linear_rows(features[:, :width], self.weights["fc"], fused)
        q = self._append(
            torch.tensor(ids, device=device),
            fused,
            row_start=row_start,
            context_len=context_len,
            position=position.to(torch.int32),
            block_table=batch.block_table,
            status=batch.status,
        )
        return q, fused, torch.tensor(ends, device=device) - 1
