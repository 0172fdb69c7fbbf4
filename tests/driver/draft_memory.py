"""Memory of the drafter's training by part: predicted from its settings, and allocated."""

from __future__ import annotations

from driver.drafter.trainer import SpotTrainer
from driver.model.drafter import DraftSpec

BYTES = 4  # of a trained weight, its gradient, each of its moments


def trained_numbers(spec: DraftSpec) -> int:
    """Number of trained weights: all except the head."""
    hidden, attention = spec.hidden_size, spec.num_heads * spec.head_dim
    projections = 2 * hidden * (attention + 2 * spec.num_kv_heads * spec.head_dim)
    layer = projections + attention * hidden + 3 * hidden * spec.intermediate_size
    return 3 * hidden * hidden + layer + 4 * hidden


def training_memory(spot: SpotTrainer) -> dict[str, tuple[int, int]]:
    """Bytes of features, spilled features, weights, gradients, optimizer, average, bin.

    Args:
        spot: a trainer that made a step.

    Returns:
        Part -> (predicted from shapes, settings and the tokens in the buffer; allocated).

    Example:
        >>> training_memory(spot)["optimizer"]  # doctest: +SKIP
        (1703936, 1703936)
    """
    target, shape = spot.target, spot.drafter.spec
    row = 4 * target.spec.hidden_size * target.embedding.element_size()
    documents, made = spot.buffer.fresh + spot.buffer.kept, spot.bin
    rows, held = sum(len(d) - 1 for d in documents), sum(d.features.nbytes for d in documents)
    trained = trained_numbers(shape)
    # The head in the target's precision on a GPU, ids of the draft vocabulary, a flag per token.
    head = shape.draft_vocab * shape.hidden_size * spot.drafter.lm_head.weight.element_size()
    whole = BYTES * trained + head + 8 * shape.draft_vocab + shape.vocab_size
    weights, copies = spot.drafter.trainable(), spot.drafter.state_dict().values()
    moments = [
        state[name].nbytes
        for state in spot.step.optimizer.state.values()
        for name in ("exp_avg", "exp_avg_sq")
    ]
    average = spot.step.average.values.values() if spot.config.average else ()
    entry = row if spot.bin.fixed else 4 * target.spec.hidden_size * BYTES
    return {
        "features": (rows * row, held),
        "weights": (whole, sum(w.nbytes for w in copies)),
        "gradients": (BYTES * trained, sum(w.grad.nbytes for w in weights if w.grad is not None)),
        "optimizer": (2 * BYTES * trained, sum(moments)),
        "average": (BYTES * trained if spot.config.average else 0, sum(w.nbytes for w in average)),
        # Features, and three int64.
        "bin": (
            made.tokens * (entry + 24),
            sum(x.nbytes for x in (made.features, made.final, *made.small)),
        ),
    }
