"""The training data of the drafter: finished responses with the target's recorded features."""

from __future__ import annotations

import random
import threading
import warnings
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Document:
    """A prompt with its response, and the target's features of every committed position."""

    tokens: Tensor  # int64 [N]
    features: Tensor  # [N - 1, 4H]: three layers, then the final hidden state
    target_version: int
    spilled: bool = False  # the features are in host memory
    ready: torch.cuda.Event | None = None  # recorded after the features were written
    # int64 [N - 2], for each entry the targets in a row from its own on that the model generated;
    # None: no tool wrote a token.
    generated: Tensor | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def entries(self) -> int:
        """Training entries: entry t needs the features of t and t + 1."""
        return len(self.tokens) - 2


def generated_run(count: int, tools: Iterable[tuple[int, int]]) -> Tensor | None:
    """The field `generated` of a document.

    A draft ends where a tool writes, so no entry is trained to draft a tool's token or past one.

    Args:
        count: tokens of the document.
        tools: half-open ranges of them that tools wrote, in order.

    Returns:
        int64 [count - 2], or None without ranges. The target of entry t is token t + 2.

    Example:
        >>> generated_run(9, [(5, 7)])
        tensor([3, 2, 1, 0, 0, 2, 1])
    """
    bounds = [(begin, min(end, count)) for begin, end in tools if begin < count]
    if not bounds:
        return None
    left = torch.zeros(count, dtype=torch.int64)
    begins = [0, *(end for _, end in bounds)]
    for begin, end in zip(begins, [*(begin for begin, _ in bounds), count], strict=True):
        left[begin:end] = torch.arange(end - begin, 0, -1)
    return left[2:]


@dataclass(frozen=True)
class Piece:
    """A range of entries of one document."""

    document: Document
    start: int
    length: int


class HostRing:
    """A ring of `rows` feature rows in host memory, pinned if the features are on a GPU.

    Copies run on a separate stream, after the reads of what they overwrite, so neither the rollout
    nor the training waits for them.
    """

    def __init__(self, rows: int, like: Tensor) -> None:
        self.rows = torch.empty(rows, like.shape[1], dtype=like.dtype, pin_memory=like.is_cuda)
        self._stream = torch.cuda.Stream(like.device) if like.is_cuda else None
        self._head = 0
        self._held: deque[tuple[int, int, Document]] = deque()  # in the order of the rows

    def put(self, document: Document, read: torch.cuda.Event | None) -> Document:
        """The document with its features copied into the ring.

        First drop the documents that `overwritten` returns. `read` was recorded after the last
        reads of the ring.
        """
        begin = self._place(len(document.features))
        rows = self.rows[begin : begin + len(document.features)]
        ready = None
        if self._stream is None:
            rows.copy_(document.features)
        else:
            for event in (document.ready, read):
                if event is not None:
                    self._stream.wait_event(event)
            with torch.cuda.stream(self._stream):
                rows.copy_(document.features, non_blocking=True)
            ready = self._stream.record_event()
            document.features.record_stream(self._stream)
        held = replace(document, features=rows, spilled=True, ready=ready)
        self._head = begin + len(rows)
        self._held.append((begin, self._head, held))
        return held

    def overwritten(self, count: int) -> list[Document]:
        """Removes and returns the documents that the next `count` rows would overwrite."""
        begin, gone = self._place(count), []
        wraps = begin < self._head
        while self._held:
            first, last, document = self._held[0]
            behind = wraps and first >= self._head  # older than those before it in the ring
            if not (behind or (first < begin + count and last > begin)):
                break
            self._held.popleft()
            gone.append(document)
        return gone

    def _place(self, count: int) -> int:
        return self._head if self._head + count <= len(self.rows) else 0


class DataBuffer:
    """Bounded store of documents of this step and of the previous one.

    Responses that finish early are short, so a drafter trained on them alone would see short
    responses only. Each batch therefore takes the share `keep_long` of its entries from the longest
    documents of the previous step and the rest from this step, in random order and in pieces as
    long as the batch allows.

    Adding never blocks. When the buffer is full, the oldest document of the step moves to host
    memory, where it overwrites the oldest one; if it does not fit there it is dropped, which is
    reported once. Documents of the previous step are dropped last.

    Args:
        capacity: tokens held on the device that recorded them.
        keep_long: share of the capacity, and of each batch, given to the previous step.
        seed: of the sampling.
        spill: additional tokens held in host memory.
    """

    def __init__(self, capacity: int, keep_long: float, seed: int, spill: int = 0) -> None:
        self.capacity, self.keep_long, self.seed, self.spill = capacity, keep_long, seed, spill
        self.fresh: list[Document] = []  # of this step
        self.kept: list[Document] = []  # of the previous one, longest first
        self.seen_tokens: Counter[int] = Counter()
        self.dropped = 0  # documents dropped for lack of room
        self._on_device = 0  # tokens of documents that are not spilled
        self.lock = threading.RLock()  # also held while rows of pieces are copied out
        self.read: torch.cuda.Event | None = None  # recorded after the last such copies
        self._host: HostRing | None = None

    @property
    def num_tokens(self) -> int:
        with self.lock:
            return sum(map(len, self.fresh)) + sum(map(len, self.kept))

    @property
    def num_bytes(self) -> dict[str, int]:
        """Bytes of features in `device` and `host` memory."""
        with self.lock:
            held = [d.features.nbytes for d in self.fresh + self.kept if not d.spilled]
            return {"device": sum(held), "host": self._host.rows.nbytes if self._host else 0}

    def reserve(self, like: Tensor) -> None:
        """Allocates the host memory for features like these, once; pinning it takes seconds."""
        if self.spill and self._host is None:
            self._host = HostRing(self.spill, like)

    def add(self, document: Document) -> None:
        """Stores a document, unless it has no training entry or exceeds the capacity."""
        if document.entries < 1:
            return
        with self.lock:
            self.seen_tokens.update(document.tokens.tolist())
            if len(document) > self.capacity:
                self._count_dropped()
                return
            self.fresh.append(document)
            self._on_device += len(document)
            while self._on_device > self.capacity:
                self._evict()

    def _evict(self) -> None:
        """Moves one document to host memory, or drops it."""
        mine = [d for d in self.fresh[:-1] if not d.spilled]
        documents = self.fresh if mine else self.kept
        victim = mine[0] if mine else [d for d in self.kept if not d.spilled][-1]
        self._on_device -= len(victim)
        if len(victim) > self.spill:
            documents.remove(victim)
            self._count_dropped()
            return
        self.reserve(victim.features)
        assert self._host is not None
        for gone in self._host.overwritten(len(victim.features)):
            for held in (self.fresh, self.kept):
                if gone in held:
                    held.remove(gone)
                    self._count_dropped()
        documents[documents.index(victim)] = self._host.put(victim, self.read)

    def _count_dropped(self) -> None:
        if not self.dropped:
            warnings.warn(
                f"spot trainer: its buffer of {self.capacity} tokens (spot.buffer_tokens) is full;"
                " from now on new documents replace old ones",
                stacklevel=3,
            )
        self.dropped += 1

    def most_seen(self, count: int, vocab_size: int) -> Tensor:
        """int64 [count], rising: the tokens seen most often, then the lowest ids."""
        seen = self.seen_tokens
        chosen = sorted(seen, key=lambda token: (-seen[token], token))[:count]
        held = set(chosen)
        others = (token for token in range(vocab_size) if token not in held)
        return torch.tensor(sorted([*chosen, *islice(others, count - len(chosen))]))

    def start_step(self) -> None:
        """Keeps the longest documents of the step that ended and drops the rest."""
        with self.lock:
            budget = int((self.capacity + self.spill) * self.keep_long)
            kept: list[Document] = []
            for document in sorted(self.fresh, key=len, reverse=True):
                if len(document) <= budget:
                    budget -= len(document)
                    kept.append(document)
            self._hold([], kept)

    def drop_kept(self) -> None:
        """Drops the documents of the previous step."""
        with self.lock:
            self._hold(self.fresh, [])

    def clear(self) -> None:
        """Drops every document; token counts stay."""
        with self.lock:
            self._hold([], [])

    def _hold(self, fresh: list[Document], kept: list[Document]) -> None:
        self.fresh, self.kept = fresh, kept
        self._on_device = sum(len(d) for d in fresh + kept if not d.spilled)

    def sample(self, tokens: int, draw: int, most: int = 1 << 30) -> list[Piece]:
        """Draws a training batch.

        Args:
            tokens: entries; fewer if the buffer holds fewer.
            draw: number of the batch. The same number draws the same pieces from the same
                documents, so a resumed run needs no generator state.
            most: largest number of pieces.

        Returns:
            Pieces, at most one of each document; [] if the buffer is empty.
        """
        generator = random.Random(f"{self.seed}/{draw}")
        with self.lock:
            share = int(tokens * self.keep_long) if self.fresh else tokens
            kept = _draw(self.kept, share, generator, max(1, most // 2))
            rest = tokens - sum(p.length for p in kept)
            return kept + _draw(self.fresh, rest, generator, most - len(kept))


def _draw(
    documents: list[Document], tokens: int, generator: random.Random, most: int
) -> list[Piece]:
    """Whole documents in random order; the last one is cropped at a random place."""
    pieces: list[Piece] = []
    order = list(range(len(documents)))
    for place in range(min(most, len(order))):
        other = generator.randrange(place, len(order))
        order[place], order[other] = order[other], order[place]
        document = documents[order[place]]
        take = min(document.entries, tokens)
        if take == 0:
            break
        pieces.append(Piece(document, generator.randint(0, document.entries - take), take))
        tokens -= take
    return pieces
