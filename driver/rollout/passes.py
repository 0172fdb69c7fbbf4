"""One pass of the engine, as a sequence of launches without other host work."""

from dataclasses import dataclass
from typing import Any

import tlt_ext

from ..common.spans import Spans
from ..config.strategy import OFF, REJECTION, SHARED, Strategy
from ..model.kv_cache import KvCache
from ..model.target import TargetModel
from .proposers import Proposer
from .state import Batch, BatchState
from .tree import Tree


@dataclass(eq=False)
class PassProgram:
    """Drafts, verifies, commits and advances a batch by one pass.

    It reads and writes static arrays and never waits for the device. If the strategy's proposer is
    `on_device`, the same calls can be captured into a graph.
    """

    model: TargetModel
    cache: KvCache  # with feature pages if a drafter is trained or used
    state: BatchState  # the running requests
    ring: tlt_ext.PassRing  # results of each pass
    proposers: dict[str, Proposer]  # by strategy kind
    seed: int  # of the keyed noise
    spans: Spans  # of drafting and verifying
    verify: str = SHARED  # `engine.verify`

    def run(self, batch: Batch, strategy: Strategy) -> int:
        """Makes one pass over the batch; returns the number of rows of the target."""
        tree = batch.roots
        if strategy != OFF:
            proposer = self.proposers[strategy.kind]
            with self.spans("draft", active=len(batch), strategy=str(strategy)):
                tree = proposer.propose(batch, strategy, self.state.store)
        with self.spans("verify", active=len(batch), strategy=str(strategy)):
            self._verify(batch, tree, strategy)
        tlt_ext.advance_batch(
            batch.output,
            batch.table,
            batch.requests,
            self.state.control,
            self.ring,
            lookahead=self.lookahead(strategy),
        )
        return tree.num_rows

    def on_device(self, strategy: Strategy) -> bool:
        return strategy == OFF or self.proposers[strategy.kind].on_device

    def version(self, strategy: Strategy) -> int:
        """Version of the learned drafter; 0: the strategy uses none."""
        return 0 if strategy == OFF else self.proposers[strategy.kind].version

    def lookahead(self, strategy: Strategy) -> int:
        """KV slots past the committed ones that a pass may write."""
        if strategy == OFF:
            return 1
        return max(strategy.num_verify, self.proposers[strategy.kind].lookahead(strategy))

    def _verify(self, batch: Batch, tree: Tree, strategy: Strategy) -> None:
        """Runs the target on the tree, verifies it and commits the accepted rows."""
        rows = batch.rows_of(tree)
        logits, features = self.model.forward(
            tree.tokens, rows, self.cache, ancestors=tree.ancestors
        )
        assert logits is not None
        arrays = tree.group, rows, batch.sampling, batch.output
        settings: Any = {
            "stop_ids": batch.stop_ids,
            "limit": batch.remaining,
            "seed": self.seed,
            "vocab_size": self.model.spec.vocab_size,
        }
        if self.verify == REJECTION and strategy != OFF:
            q = tree.draft_probs  # n-gram drafts are not drawn
            tlt_ext.verify_rejection(logits, q, *arrays, **settings, deterministic=q is None)
        else:
            workspace = self.model.workspace.for_sampling(logits)
            tlt_ext.verify_tree(logits, *arrays, **settings, workspace=workspace)
        self.cache.commit(rows, batch.output.path, batch.output.num_emitted, features)
