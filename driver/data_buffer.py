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
        self.capacity, self.keep_long = capacity, keep_long
        self.fresh: list[Document] = []
        self.kept: list[Document] = []
        self.seen_tokens: Counter[int] = Counter()
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    @property
    def num_tokens(self) -> int:
        with self._lock:
            return sum(len(d.tokens) for d in self.fresh + self.kept)

    def add(self, document: Document) -> None:
        """Stores a document of at least three tokens; shorter ones have nothing to teach."""
        if len(document.tokens) < 3:
            return
        with self._lock:
            self.fresh.append(document)
            self.seen_tokens.update(document.tokens.tolist())
            held = sum(len(d.tokens) for d in self.fresh)
            room = self.capacity - sum(len(d.tokens) for d in self.kept)
            while held > room and len(self.fresh) > 1:
                held -= len(self.fresh.pop(0).tokens)

    def start_step(self) -> None:
        """Keeps the longest documents of the step that ended and drops the rest."""
        with self._lock:
            budget = int(self.capacity * self.keep_long)
            self.kept = []
            for document in sorted(self.fresh, key=lambda d: -len(d.tokens)):
                if len(document.tokens) <= budget:
                    budget -= len(document.tokens)
                    self.kept.append(document)
            self.fresh = []

    def sample(self, tokens: int) -> list[Piece]:
        """Pieces of `tokens` entries in all, fewer where less is held; [] where nothing is."""
        with self._lock:
            kept = self._draw(self.kept, int(tokens * self.keep_long))
            rest = tokens - sum(piece.length for piece in kept)
            fresh = self._draw(self.fresh, rest)
            if not fresh and self.kept:
                kept += self._draw(self.kept, rest)
            return fresh + kept

    def _draw(self, documents: list[Document], tokens: int) -> list[Piece]:
        pieces: list[Piece] = []
        if not documents:
            return pieces
        for document in self._random.sample(documents, len(documents)):
            entries = len(document.tokens) - 2  # entry t needs the features of t + 1
            take = min(entries, tokens)
            if take <= 0:
                break
            start = self._random.randint(0, entries - take)
            pieces.append(Piece(document, start, take))
            tokens -= take
        return pieces
