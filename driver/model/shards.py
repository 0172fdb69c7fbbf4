"""Which part of a model a rank of a tensor-parallel group holds.

A linear adds up K in eight parts: part w is the sum of the blocks of 64 columns w, w + 8, ..., and
the parts are added as a binary tree (docs/notes/layers.md). A rank of R owns 8 / R consecutive
parts, which are a subtree. So the ranks' partial sums, added in the same tree, are bit-identical to
one rank's sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..common.errors import UserError
from .families import GATE_UP, JOINED_GATE_UP, JOINED_QKV, QKV
from .spec import ModelSpec

PARTS, BLOCK = 8, 64  # of the order of additions, `csrc/layers/linear.cuh`
HOST = "cpu"  # of indices, for models on the meta device too
OUTPUT, DOWN = "self_attn.o_proj", "mlp.down_proj"


@dataclass(frozen=True)
class Shard:
    spec: ModelSpec  # its shape; queries have a place for each head that the rank computes
    # Tensor of a layer -> axis, and indices of the whole tensor that the rank holds; -1: zeros.
    chosen: dict[str, tuple[int, Tensor]] = field(default_factory=dict)

    @staticmethod
    def of(spec: ModelSpec, rank: int, size: int) -> Shard:
        """The part of a rank of a group; UserError if a head would be divided between two ranks.

        Attention needs the same number of query heads for each key-value head. So each key-value
        head that an owned query head reads is repeated on the rank. A place without an owned query
        head computes another one, whose columns of `o` are zeros.
        """
        if size == 1:
            return Shard(spec)
        heads = _owned_heads(spec, rank, size)
        group = spec.num_heads // spec.num_kv_heads
        readers: dict[int, list[int]] = {}  # key-value head -> owned query heads
        for head in heads:
            readers.setdefault(head // group, []).append(head)
        readers = readers or {0: []}
        places = _places(list(readers.values()), spec.head_dim, PARTS // size)
        firsts = [kv * group for kv in readers for _ in range(len(places) // len(readers))]
        slots = [f if head is None else head for head, f in zip(places, firsts, strict=True)]
        columns = _of_heads(slots, spec.head_dim).view(-1, spec.head_dim)
        columns[[head is None for head in places]] = -1
        inner = owned_columns(spec.intermediate_size, rank, size)
        rows = _of_heads(slots, spec.head_dim), *[_of_heads(list(readers), spec.head_dim)] * 2
        chosen = {
            f"{name}.{kind}": (0, own)
            for name, own in zip(QKV, rows, strict=True)
            for kind in ("weight", "bias")
        }
        chosen |= {f"{name}.weight": (0, inner) for name in GATE_UP}
        q, k, v = rows
        joined = torch.cat((q, spec.q_dim + k, spec.q_dim + spec.kv_dim + v))
        chosen[f"{JOINED_QKV}.weight"] = (0, joined)
        both = torch.cat((inner, spec.intermediate_size + inner))
        chosen[f"{JOINED_GATE_UP}.weight"] = (0, both)
        chosen[f"{OUTPUT}.weight"] = (1, columns.flatten())
        chosen[f"{DOWN}.weight"] = (1, inner)
        own = replace(
            spec, num_heads=len(slots), num_kv_heads=len(readers), intermediate_size=len(inner)
        )
        return Shard(own, chosen)


def owned_columns(count: int, rank: int, size: int) -> Tensor:
    """The columns of K that a rank adds up, int64, in rising order.

    Example:
        >>> len(owned_columns(72, 0, 8)), len(owned_columns(72, 1, 8)), len(owned_columns(72, 2, 8))
        (64, 8, 0)
    """
    columns = torch.arange(count, device=HOST)
    return columns[columns // BLOCK % PARTS // (PARTS // size) == rank]


def _owned_heads(spec: ModelSpec, rank: int, size: int) -> list[int]:
    owners = torch.arange(spec.q_dim, device=HOST) // BLOCK % PARTS // (PARTS // size)
    owners = owners.view(spec.num_heads, spec.head_dim)
    if not torch.equal(owners.amin(1), owners.amax(1)):
        raise UserError(
            f"engine.tensor_parallel={size}: it would divide heads of {spec.head_dim} columns,"
            f" which are added up in blocks of {BLOCK}; use a smaller one"
        )
    return torch.nonzero(owners[:, 0] == rank).flatten().tolist()


def _places(readers: list[list[int]], head_dim: int, parts: int) -> list[int | None]:
    """The query head of each place, equally many for each key-value head; None: no owned one.

    The columns of a head stay in their part of K: its place and its number are equal modulo the
    heads of `parts` blocks.
    """
    columns = parts * BLOCK
    cycle = columns // math.gcd(columns, head_dim)
    width = max(1, *map(len, readers))
    while True:
        found: list[int | None] = []
        for number, own in enumerate(readers, 1):
            for head in own:
                found += [None] * ((head - len(found)) % cycle) + [head]
            if len(found) > number * width:
                break
            found += [None] * (number * width - len(found))
        else:
            return found
        width += 1


def _of_heads(heads: list[int], head_dim: int) -> Tensor:
    first = torch.tensor(heads, dtype=torch.int64, device=HOST)[:, None] * head_dim
    return (first + torch.arange(head_dim, device=HOST)).flatten()


def head_rows(vocab_size: int, size: int) -> int:
    """Rows of the head of each rank; the last ranks may have fewer."""
    return -(-vocab_size // size)
