"""The training data of the drafter: finished responses with the target's recorded features."""

from __future__ import annotations

import random
import threading
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from ..model.kv_cache import KvCache
from ..rollout.pages import pages_for
from ..rollout.request import RunningRequest


@dataclass(frozen=True, eq=False)
class Document:
    """A prompt with its response, or a range of both, and the target's features there."""

    tokens: Tensor  # int64 [N]
    features: Tensor  # [N - 1, 4H]: three layers, then the final hidden state
    target_version: int
    ready: torch.cuda.Event | None = None  # recorded after the features were written
    # int64 [N - 2], for each entry the targets in a row from its own on that the model generated;
    # None: no tool wrote a token.
    generated: Tensor | None = None
    start: int = 0  # position of the first token

    @staticmethod
    def of(
        request: RunningRequest, window: tuple[int, int], cache: KvCache, version: int
    ) -> Document:
        """Copies a range of a finished request out of the cache, without waiting for the device."""
        recorded, size, (start, end) = cache.features, cache.page_size, window
        assert recorded is not None
        first = start // size  # whole pages need few indices
        pages = request.pages[first : pages_for(end - 1, size)]
        index = torch.tensor(pages, dtype=torch.int64, pin_memory=recorded.is_cuda)
        index = index.to(recorded.device, non_blocking=True)
        rows = recorded.index_select(0, index).flatten(0, 1)
        features = rows[start - first * size : end - 1 - first * size].clone()
        tokens = torch.from_numpy(np.array(request.tokens[start:end]))
        ready = torch.cuda.current_stream().record_event() if recorded.is_cuda else None
        prompt, count = len(request.request.prompt_ids), request.context_len + 1
        generated = generated_run(count, [(prompt + a, prompt + b) for a, b in request.tools])
        if generated is not None:
            generated = generated[start : end - 2]
        return Document(tokens, features, version, ready, generated, start)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def entries(self) -> int:
        """Training entries: entry t needs the features of t and t + 1."""
        return len(self.tokens) - 2


def generated_run(count: int, tools: Iterable[tuple[int, int]]) -> Tensor | None:
    """The field `generated` of a document, int64 [count - 2]; None if no tool wrote a token.

    A draft ends where a tool writes, so no entry is trained to draft a tool's token or past one.
    `tools` are half-open ranges of the `count` tokens, in order; the target of entry t is token t +
    2.

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
    document: Document
    start: int
    length: int


class DataBuffer:
    """Bounded store of documents of this step and of the previous one.

    Responses that finish early are short, so a drafter trained on them alone would see short
    responses only. Each batch therefore takes the share `keep_long` of its entries from the longest
    documents of the previous step and the rest from this step, in random order and in pieces as
    long as the batch allows.

    Of a response with more than `longest` tokens, what the buffer can keep for the next step, a
    range at a random place is stored (`window`). Adding never blocks. When the buffer has
    `capacity` tokens, the oldest document of the step is dropped, which is reported once; those of
    the previous step are dropped last.
    """

    def __init__(self, capacity: int, keep_long: float, seed: int) -> None:
        self.capacity, self.keep_long, self.seed = capacity, keep_long, seed
        self.longest = max(3, int(capacity * keep_long)) if keep_long else capacity
        self.fresh: list[Document] = []  # of this step
        self.kept: list[Document] = []  # of the previous one, longest first
        self.seen_tokens: Counter[int] = Counter()
        self.dropped = 0  # documents dropped for lack of room
        self.lock = threading.RLock()  # also held while rows of pieces are copied out

    @property
    def num_tokens(self) -> int:
        with self.lock:
            return sum(map(len, self.fresh)) + sum(map(len, self.kept))

    def window(self, count: int, request: int) -> tuple[int, int]:
        """The range of `count` tokens that is stored, at a random place by the request's id."""
        room = max(0, count - self.longest)
        start = random.Random(f"{self.seed}/window/{request}").randint(0, room)
        return start, start + count - room

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
            while self.num_tokens > self.capacity:
                if len(self.fresh) > 1:
                    del self.fresh[0]
                else:
                    del self.kept[-1]
                self._count_dropped()

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
            budget = int(self.capacity * self.keep_long)
            kept: list[Document] = []
            for document in sorted(self.fresh, key=len, reverse=True):
                if len(document) <= budget:
                    budget -= len(document)
                    kept.append(document)
            self.fresh, self.kept = [], kept

    def drop_kept(self) -> None:
        with self.lock:
            self.kept = []

    def clear(self) -> None:
        with self.lock:
            self.fresh, self.kept = [], []

    def sample(self, tokens: int, draw: int, most: int = 1 << 30) -> list[Piece]:
        """Draws a training batch of `tokens` entries, fewer if the buffer holds fewer.

        Returns at most `most` pieces, at most one of each document. The same number `draw` draws
        the same pieces from the same documents, so a resumed run needs no generator state.
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
