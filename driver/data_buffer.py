"""What the spot trainer learns from: finished responses with the target's recorded features."""

from __future__ import annotations

import random
import threading
from collections import Counter
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Document:
    """A prompt with its response, and the target's features of every committed position."""

    tokens: Tensor  # int64 [N]
    features: Tensor  # [N - 1, 4H]: three layers, then the final hidden state
    target_version: int

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def entries(self) -> int:
        """Training entries: entry t needs the features of t and t + 1."""
        return len(self.tokens) - 2


@dataclass(frozen=True)
class Piece:
    """A run of entries of one document."""

    document: Document
    start: int
    length: int


class DataBuffer:
    """Bounded store of documents, mixed from this step's and the last one's.

    Early finishers are short, so what is trained while the tail runs would teach short responses
    only; each batch therefore takes a share of its tokens from the longest documents kept from the
    step before. Nothing blocks when full: the oldest document of the step goes.

    Args:
        capacity: tokens held at most.
        keep_long: share of the capacity, and of each batch, given to the previous step.
        seed: of the sampling.
    """

    def __init__(self, capacity: int, keep_long: float, seed: int) -> None:
        self.capacity, self.keep_long, self.seed = capacity, keep_long, seed
        self.fresh: list[Document] = []
        self.kept: list[Document] = []  # longest first
        self.seen_tokens: Counter[int] = Counter()
        self._lock = threading.Lock()

    @property
    def num_tokens(self) -> int:
        with self._lock:
            return self._held()

    def _held(self) -> int:
        return sum(map(len, self.fresh)) + sum(map(len, self.kept))

    def add(self, document: Document) -> None:
        """Stores a document; one without a training entry, or too long to hold, teaches nothing."""
        if document.entries < 1:
            return
        with self._lock:
            self.seen_tokens.update(document.tokens.tolist())
            self.fresh.append(document)
            while self._held() > self.capacity:
                if len(self.fresh) == 1 and self.kept:
                    self.kept.pop()
                else:
                    self.fresh.pop(0)

    def start_step(self) -> None:
        """Keeps the longest documents of the step that ended and drops the rest."""
        with self._lock:
            budget = int(self.capacity * self.keep_long)
            self.kept = []
            for document in sorted(self.fresh, key=len, reverse=True):
                if len(document) <= budget:
                    budget -= len(document)
                    self.kept.append(document)
            self.fresh = []

    def clear(self) -> None:
        """Drops every document; token counts stay."""
        with self._lock:
            self.fresh, self.kept = [], []

    def sample(self, tokens: int, draw: int) -> list[Piece]:
        """Draws a training batch.

        Args:
            tokens: entries in all; fewer where less is held.
            draw: number of the batch. The same number draws the same from the same documents, so
                a resumed run needs no state of a generator.

        Returns:
            Pieces, each document at most once; [] where nothing is held.
        """
        chance = random.Random(f"{self.seed}/{draw}")
        with self._lock:
            share = int(tokens * self.keep_long) if self.fresh else tokens
            kept = _draw(self.kept, share, chance)
            return kept + _draw(self.fresh, tokens - sum(p.length for p in kept), chance)


def _draw(documents: list[Document], tokens: int, chance: random.Random) -> list[Piece]:
    """Whole documents in random order; the last one is cropped at a random place."""
    pieces: list[Piece] = []
    for document in chance.sample(documents, len(documents)):
        take = min(document.entries, tokens)
        if take == 0:
            break
        pieces.append(Piece(document, chance.randint(0, document.entries - take), take))
        tokens -= take
    return pieces
