"""The bounded store of recorded documents."""

import threading

import pytest
import torch

from driver.drafter.buffer import DataBuffer, Document

pytestmark = pytest.mark.filterwarnings("ignore:spot trainer. its buffer")


def document(length: int, token: int = 1) -> Document:
    return Document(torch.full((length,), token), torch.zeros(length - 1, 4), 0)


def lengths(documents: list[Document]) -> list[int]:
    return [len(d) for d in documents]


def test_the_bound_holds_and_the_oldest_document_is_dropped():
    buffer = DataBuffer(100, 0.25, seed=0)
    for length in (40, 30, 20, 25, 60):
        buffer.add(document(length))
        assert buffer.num_tokens <= 100
    assert lengths(buffer.fresh) == [25, 60]


def test_kept_documents_are_dropped_last_and_too_long_ones_are_not_stored():
    buffer = DataBuffer(100, 1.0, seed=0)
    buffer.add(document(50))
    buffer.add(document(40))
    buffer.start_step()
    assert lengths(buffer.kept) == [50, 40]
    buffer.add(document(45))  # only the shorter of the kept ones is dropped
    assert (lengths(buffer.kept), lengths(buffer.fresh)) == ([50], [45])
    buffer.add(document(101))
    assert buffer.num_tokens <= 100 and 101 not in lengths(buffer.fresh)


def test_documents_without_an_entry_are_left_out():
    buffer = DataBuffer(100, 0.25, seed=0)
    buffer.add(document(2))
    assert buffer.num_tokens == 0 and not buffer.seen_tokens
    buffer.add(document(3))
    assert buffer.sample(8, 0)[0].length == 1


def test_a_step_keeps_the_longest_documents_within_its_share():
    buffer = DataBuffer(200, 0.25, seed=0)
    for length in (10, 60, 30, 20, 15):
        buffer.add(document(length))
    buffer.start_step()
    assert (lengths(buffer.kept), buffer.fresh) == ([30, 20], [])
    buffer.start_step()
    assert buffer.num_tokens == 0


def test_a_batch_mixes_long_documents_of_the_previous_step():
    buffer = DataBuffer(4000, 0.25, seed=0)
    old = document(400)
    buffer.add(old)
    buffer.start_step()
    for _ in range(40):
        buffer.add(document(20))
    pieces = buffer.sample(200, 0)
    from_old = sum(p.length for p in pieces if p.document is old)
    assert (from_old, sum(p.length for p in pieces)) == (50, 200)
    assert len({id(p.document) for p in pieces}) == len(pieces)


def test_only_old_documents_fill_the_batch_at_the_start_of_a_step():
    buffer = DataBuffer(400, 0.5, seed=0)
    buffer.add(document(100))
    buffer.start_step()
    assert sum(p.length for p in buffer.sample(60, 0)) == 60
    assert DataBuffer(10, 0.5, seed=0).sample(60, 0) == []


def test_crops_lie_inside_and_start_anywhere():
    buffer = DataBuffer(400, 0.0, seed=0)
    buffer.add(document(12))
    starts = set()
    for draw in range(200):
        (piece,) = buffer.sample(4, draw)
        assert piece.length == 4 and 0 <= piece.start <= 10 - 4
        starts.add(piece.start)
    assert starts == set(range(7))


def test_windows_of_long_responses_lie_anywhere_and_fit_into_the_buffer():
    buffer = DataBuffer(65536, 0.25, seed=0)
    assert buffer.window(16384, 1) == (0, 16384)
    drawn = [buffer.window(32768, request) for request in range(2000)]
    assert {end - start for start, end in drawn} == {16384}
    assert drawn == [buffer.window(32768, request) for request in range(2000)]
    starts = torch.tensor([start for start, _ in drawn])
    counts = (starts * 8 // 16385).bincount(minlength=8)
    assert counts.min() > 0.75 * 250 and counts.max() < 1.25 * 250
    assert DataBuffer(65536, 0.25, seed=1).window(32768, 1) != drawn[1]
    assert DataBuffer(100, 0.0, seed=0).window(300, 5)[1] <= 300


def test_crops_come_from_all_of_a_long_document():
    """32k tokens, as much as a batch in every part of it, beside short responses."""
    buffer, parts = DataBuffer(65536, 0.25, seed=0), torch.zeros(8)
    long = document(32768)
    for each in (document(900), long, document(900)):
        buffer.add(each)
    for draw in range(4000):
        for piece in buffer.sample(1024, draw):
            if piece.document is long:
                ends = torch.arange(piece.start, piece.start + piece.length) * 8 // 32768
                parts += ends.bincount(minlength=8)
    assert parts.min() > 0.7 * parts.mean() and parts.max() < 1.3 * parts.mean()


def test_the_number_of_the_draw_determines_the_batch():
    buffers = [DataBuffer(400, 0.0, seed=s) for s in (0, 0, 1)]
    for buffer in buffers:
        for length in range(5, 25):
            buffer.add(document(length))
    drawn = [
        [[(len(p.document), p.start, p.length) for p in b.sample(50, draw)] for draw in range(3)]
        for b in buffers
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0][0] != drawn[0][1]


def test_tokens_are_counted_over_all_documents():
    buffer = DataBuffer(20, 0.0, seed=0)
    buffer.add(document(10, token=7))
    buffer.add(document(15, token=8))
    buffer.clear()
    assert buffer.seen_tokens == {7: 10, 8: 15} and buffer.num_tokens == 0


def test_adding_never_waits_while_another_thread_draws():
    buffer = DataBuffer(2000, 0.25, seed=0)
    buffer.add(document(50))
    stop = threading.Event()

    def draw() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            assert sum(p.length for p in buffer.sample(100, number)) > 0

    thread = threading.Thread(target=draw)
    thread.start()
    for _ in range(500):
        buffer.add(document(50))
    stop.set()
    thread.join(10)
    assert not thread.is_alive() and buffer.num_tokens == 2000


def numbered(length: int, number: int) -> Document:
    rows = torch.arange(length - 1).float()[:, None].repeat(1, 4) + 1000 * number
    return Document(torch.full((length,), number), rows, 0)


def test_a_full_buffer_drops_the_oldest_and_keeps_its_bound():
    """Every listed document has its own rows; those of the previous step are dropped last."""
    buffer = DataBuffer(100, 0.5, seed=0)
    chance = torch.Generator().manual_seed(0)
    for number in range(1, 300):
        length = int(torch.randint(3, 70, (1,), generator=chance))
        kept = len(buffer.kept)
        buffer.add(numbered(length, number))
        if len(buffer.kept) < kept:
            assert len(buffer.fresh) == 1
        if number % 40 == 0:
            buffer.start_step()
        held = buffer.fresh + buffer.kept
        assert buffer.num_tokens == sum(map(len, held)) <= 100
        assert sum(d.features.nbytes for d in held) == sum(16 * (len(d) - 1) for d in held)
        assert [int(d.tokens[0]) for d in buffer.fresh] == sorted(
            range(number + 1 - len(buffer.fresh), number + 1)
        ) or not buffer.fresh
        for document in held:
            expected = numbered(len(document), int(document.tokens[0])).features
            assert torch.equal(document.features, expected)
    assert buffer.dropped > 100


def test_a_bin_takes_no_more_pieces_than_it_has_room_for():
    buffer = DataBuffer(400, 0.5, seed=0)
    for _ in range(20):
        buffer.add(document(10))
    buffer.start_step()
    for _ in range(20):
        buffer.add(document(10))
    pieces = buffer.sample(300, 0, most=6)
    assert len(pieces) == 6 and sum(p.document in buffer.kept for p in pieces) == 3
