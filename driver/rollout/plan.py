"""Which passes to capture: batch buckets times strategies."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import tlt_ext

from ..common.memory import FLOAT_BYTES
from ..config.strategy import OFF, Strategy, parse_strategies
from ..model.drafter import DraftSpec
from ..model.spec import ModelSpec
from ..model.target import FUSED_ROWS, LARGE_WEIGHTS, appends, fuses, layer_launches

if TYPE_CHECKING:
    from ..config.sections import EngineConfig


@dataclass(frozen=True)
class Cell:
    """One graph: passes of a strategy over up to `batch` requests."""

    batch: int
    strategy: Strategy

    @property
    def rows(self) -> int:
        return self.batch * self.strategy.num_verify

    def __str__(self) -> str:
        return f"{self.strategy} x {self.batch}"


CHAIN_LAUNCHES = 7  # of torch ops that compute the probabilities of a chain for rejection


@dataclass(frozen=True)
class GraphCost:
    """Memory model of a graph, from the launches of its pass."""

    spec: ModelSpec  # of the target
    loop: bool = True  # the pass is repeated inside its graph
    rejection: bool = False  # learned drafts are verified by rejection
    shared: bool = False  # by ranks: two exchanges a layer, one for the logits, of two launches

    def nodes(self, cell: Cell) -> int:
        """Upper bound of the launches of a pass."""
        strategy, spec = cell.strategy, self.spec
        launches = layer_launches(spec, cell.rows) * spec.num_layers + 8
        launches += 2 * (2 * spec.num_layers + 1) * self.shared
        launches += strategy.drafting.launches
        if strategy.needs_drafter:
            widest = max(2 * spec.intermediate_size, spec.vocab_size) * spec.hidden_size
            drafted, late = cell.batch * strategy.top_k, cell.batch * (strategy.levels + 1)
            few = fuses(drafted, 2 * spec.intermediate_size * spec.hidden_size)
            first, level = (17, 12)
            if few and widest <= LARGE_WEIGHTS:  # many rows append in two, and the head has a norm
                first = 14 + (not appends(late)) + (cell.batch > FUSED_ROWS)
                level = 9 + (not appends(drafted)) + (drafted > FUSED_ROWS)
            launches += first + level * (strategy.depth - 1) + CHAIN_LAUNCHES * self.rejection
        return launches

    def bytes_of(self, *cells: Cell) -> int:
        """Predicted device memory of the executables."""
        return sum(tlt_ext.graph_bytes(self.nodes(cell), self.loop) for cell in cells)


def draft_bytes(
    cells: Iterable[Cell], spec: DraftSpec, number_bytes: int, rejection: bool = False
) -> int:
    """Predicted device memory of learned drafts in graphs, without the executables, in bytes.

    It holds static arrays of features for each batch and depth, and the temporaries of the widest
    level (its layer and its logits), which all graphs share. Rejection keeps the distributions of
    all levels.
    """
    learned = [cell for cell in cells if cell.strategy.needs_drafter]
    new_rows = {(cell.batch, cell.strategy.levels + 1) for cell in learned}
    entries = sum(batch * most for batch, most in new_rows)
    widest = max((cell.batch * cell.strategy.top_k for cell in learned), default=0)
    # Hidden states before and after, their norms, inputs of two widths; queries and their results.
    layer = 7 * spec.hidden_size + 2 * spec.num_heads * spec.head_dim + spec.intermediate_size
    features = 3 * spec.hidden_size * number_bytes
    total = entries * features + widest * (layer * number_bytes + FLOAT_BYTES * spec.draft_vocab)
    if rejection:  # logits one by one, stacked, and their softmax; then over the whole vocabulary
        rows = max((cell.rows for cell in learned), default=0)
        total += rows * FLOAT_BYTES * (3 * spec.draft_vocab + spec.vocab_size)
    return total


def plain_buckets(max_batch: int) -> list[int]:
    """Batch sizes of plain decoding: powers of two, halves between them from 8 on, and the largest.

    Example:
        >>> plain_buckets(40)
        [1, 2, 4, 8, 12, 16, 24, 32, 40]
    """
    sizes = {max_batch}
    size = 1
    while size < max_batch:
        sizes.add(size)
        if size >= 8 and size * 3 // 2 < max_batch:
            sizes.add(size * 3 // 2)
        size *= 2
    return sorted(sizes)


@dataclass(eq=False)
class BucketPlan:
    """The graphs to capture, and the one that serves a batch.

    Plain decoding has one for every batch. `cells` are the largest first, so that later ones reuse
    memory.
    """

    max_batch: int
    spec_max_batch: int  # largest batch that may speculate
    strategies: Sequence[Strategy]  # arms to capture; `off` is always planned
    spec_buckets: Sequence[int]  # rising batch sizes; those above `spec_max_batch` are clipped
    max_rows: int  # of a speculative pass

    def __post_init__(self) -> None:
        top = min(self.spec_max_batch, self.max_batch)
        sizes = {min(size, top) for size in (*self.spec_buckets, top)} - {0}
        arms = set(self.strategies) - {OFF}
        speculative = [Cell(size, strategy) for size in sizes for strategy in arms]
        cells = [Cell(size, OFF) for size in plain_buckets(self.max_batch)]
        cells += [cell for cell in speculative if cell.rows <= self.max_rows]
        self.cells = sorted(cells, key=lambda c: (-c.rows, -c.batch, c.strategy))
        self._buckets: dict[Strategy, list[int]] = {}
        for cell in sorted(cells, key=lambda c: c.batch):
            self._buckets.setdefault(cell.strategy, []).append(cell.batch)

    @staticmethod
    def of(engine: EngineConfig, buckets: Sequence[int], max_rows: int) -> BucketPlan:
        """The plan of an engine's settings, with the buckets of the bandit."""
        arms = parse_strategies(engine.strategies)
        return BucketPlan(engine.max_batch, engine.spec_max_batch, arms, buckets, max_rows)

    def find(self, batch: int, strategy: Strategy) -> Cell | None:
        """The smallest planned graph of the strategy for the batch; None: there is none."""
        buckets = self._buckets.get(strategy, [])
        index = bisect_left(buckets, batch)
        return Cell(buckets[index], strategy) if index < len(buckets) else None

    def below(self, cell: Cell) -> int:
        """The batch of the next smaller graph of the strategy; 0: this is the smallest."""
        index = bisect_left(self._buckets[cell.strategy], cell.batch)
        return self._buckets[cell.strategy][index - 1] if index else 0
