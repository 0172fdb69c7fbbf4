"""The n-gram drafter: by hand, and against its definition on random sequences."""

import math

import pytest
import torch

import tlt_ext
from tests import kit, reference

SEED, REQUEST = 2**40 + 7, 2**61 + 2**33 + 5


def propose(index, handles, *, temperature=0.0, depth=4, top_k=2, min_order=1, capacity=80):
    """The proposed trees, each as a list of (token, parent, score, depth)."""
    batch = len(handles)
    token, parent, node_depth = (
        torch.full((batch, capacity), -7, dtype=torch.int32) for _ in range(3)
    )
    score = torch.full((batch, capacity), math.nan)
    count = torch.full((batch,), -7, dtype=torch.int32)
    index.propose(
        torch.tensor(handles, dtype=torch.int64),
        token,
        parent,
        score,
        node_depth,
        count,
        torch.full((batch,), float(temperature)),
        REQUEST + torch.arange(batch, dtype=torch.int64),
        torch.full((batch,), 20, dtype=torch.int32),
        seed=SEED,
        depth=depth,
        top_k=top_k,
        min_order=min_order,
    )
    columns = (token, parent, score, node_depth)
    for b in range(batch):  # nothing is written past the count
        assert score[b, count[b] :].isnan().all() and token[b, count[b] :].eq(-7).all()
    return [
        list(zip(*(column[b, : count[b]].tolist() for column in columns), strict=True))
        for b in range(batch)
    ]


def tokens_of(tree):
    return [node[0] for node in tree]


def test_chain_by_hand():
    """The suffix 2, 3 was seen once: what followed is proposed, and stops where the text stops."""
    index = tlt_ext.NgramIndex()
    index.start(0, [1, 2, 3, 4, 5])
    (tree,) = propose(index, [index.start(0, [9, 2, 3])])
    assert [(t, p, d) for t, p, _, d in tree] == [(3, -1, 0), (4, 0, 1), (5, 1, 2)]
    assert [s for _, _, s, _ in tree] == pytest.approx([0, math.log(1 / 2), 2 * math.log(1 / 2)])
    assert index.num_tokens == 8


def test_branches_by_hand():
    """Counts decide at T = 0, ties go to the lower id, and `top_k` nodes are kept per level."""
    index = tlt_ext.NgramIndex()
    for tail in ([5, 8], [7, 1], [7, 2], [6, 3]):
        index.start(0, [10, 11, *tail])
    handle = index.start(0, [10, 11])
    (tree,) = propose(index, [handle], top_k=2, depth=2)
    # Level 1: 7 twice, then 5 and 6 tie. Level 2: 8 follows 5 surely; 1 and 2 tie under 7.
    assert [(t, p, d) for t, p, _, d in tree] == [
        (11, -1, 0),
        (7, 0, 1),
        (5, 0, 1),
        (1, 1, 2),
        (2, 1, 2),
    ]
    seven = math.log(2 / 5)
    assert tree[1][2] == pytest.approx(seven) and tree[2][2] == pytest.approx(math.log(1 / 5))
    assert tree[3][2] == pytest.approx(seven + math.log(1 / 3))
    (wide,) = propose(index, [handle], top_k=4, depth=1)
    assert tokens_of(wide) == [11, 7, 5, 6]


def test_a_sequence_finds_its_own_past():
    index = tlt_ext.NgramIndex()
    handle = index.start(0, [1, 2, 3, 1, 2])
    assert tokens_of(propose(index, [handle])[0]) == [2, 3, 1, 2]
    index.extend(handle, [3])
    assert tokens_of(propose(index, [handle])[0]) == [3, 1, 2, 3]


def test_longest_suffix_wins_and_orders_are_bounded():
    texts = [[1, 2, 3, 50], [9, 2, 3, 60], [8, 3, 70], [8, 3, 70]]
    for max_order, wanted in ((3, [3, 50]), (2, [3, 50, 60]), (1, [3, 70, 50, 60])):
        index = tlt_ext.NgramIndex(max_order=max_order)
        for text in texts:
            index.start(0, text)
        handle = index.start(0, [1, 2, 3])
        assert tokens_of(propose(index, [handle], top_k=4, depth=1)[0]) == wanted
    index = tlt_ext.NgramIndex(max_order=3)
    index.start(0, [1, 2, 50])
    handle = index.start(0, [9, 9, 2])
    assert tokens_of(propose(index, [handle], min_order=1)[0]) == [2, 50]
    assert tokens_of(propose(index, [handle], min_order=2)[0]) == [2]


def test_groups_are_apart_and_sequences_are_never_glued():
    index = tlt_ext.NgramIndex()
    index.start(0, [1, 2, 3])
    assert tokens_of(propose(index, [index.start(1, [1, 2])])[0]) == [2]
    # In arrival order 6 follows 5, but in another sequence: neither 4, 5 | 6 nor the n-gram 5, 6.
    first, second = index.start(2, [4, 5]), index.start(2, [6, 7])
    assert tokens_of(propose(index, [index.start(2, [4, 5])])[0]) == [5]
    assert tokens_of(propose(index, [index.start(2, [5, 6])], min_order=2)[0]) == [6]
    # Grown in turns, each sequence still reads as its own text.
    index.extend(first, [30])
    index.extend(second, [40])
    index.extend(first, [31])
    index.extend(second, [41])
    assert tokens_of(propose(index, [index.start(2, [4, 5])])[0]) == [5, 30, 31]
    assert tokens_of(propose(index, [index.start(2, [6, 7])])[0]) == [7, 40, 41]


def test_noise_ranks_when_sampling():
    """Design 5: children are the top of log count + the target's noise at that position."""
    index = tlt_ext.NgramIndex()
    for token in range(50):
        index.start(0, [1000, token])
    handles = [index.start(0, [1000]) for _ in range(5)]
    trees = propose(index, handles, temperature=1.0, top_k=3, depth=1)
    for b, tree in enumerate(trees):
        noise = reference.gumbel(reference.noise_words(SEED, REQUEST + b, 21, 50))
        assert tokens_of(tree)[1:] == noise.topk(3).indices.tolist()
        assert [node[2] for node in tree[1:]] == pytest.approx([math.log(1 / 51)] * 3)
    assert all(tokens_of(t)[1:] == [0, 1, 2] for t in propose(index, handles, top_k=3, depth=1))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("alphabet", "max_order"), [(2, 6), (3, 1), (4, 3), (30, 4)])
def test_equals_reference_on_random_sequences(alphabet, max_order, temperature):
    index, expected = tlt_ext.NgramIndex(max_order), reference.NgramIndex(max_order)
    random = kit.generator(alphabet)

    def draw(low, high):
        return int(torch.randint(low, high, (), generator=random))

    def text(length):
        return torch.randint(0, alphabet, (length,), generator=random).tolist()

    for step in range(60):
        if step < 4 or draw(0, 4) == 0:
            args = (draw(-1, 2), text(draw(1, 6)))
            assert index.start(*args) == expected.start(*args)
        else:
            args = (draw(0, len(expected.sequences)), text(draw(0, 9)))
            index.extend(*args)
            expected.extend(*args)
        handles = list(range(len(expected.sequences)))[-6:]
        options = dict(depth=draw(1, 6), top_k=draw(1, 5), min_order=draw(1, max_order + 1))
        for b, tree in enumerate(propose(index, handles, temperature=temperature, **options)):
            wanted = expected.propose(
                handles[b],
                temperature=temperature,
                seed=SEED,
                request=REQUEST + b,
                root_position=20,
                **options,
            )
            assert [(t, p, d) for t, p, _, d in tree] == [
                (n["token"], n["parent"], n["depth"]) for n in wanted
            ]
            assert [n[2] for n in tree] == pytest.approx([n["score"] for n in wanted], abs=1e-5)
            assert all(s <= tree[p][2] for _, p, s, _ in tree[1:])


def test_only_the_most_recent_places_are_looked_at():
    index = tlt_ext.NgramIndex(max_order=1)
    for _ in range(200):
        index.start(0, [1, 5])
    for _ in range(63):
        index.start(0, [1, 6])
    handle = index.start(0, [1])  # is itself one of the 64
    (tree,) = propose(index, [handle], depth=1)
    assert tokens_of(tree) == [1, 6]
    assert tree[1][2] == pytest.approx(math.log(63 / 64), rel=1e-4)


def test_dropped_and_missing_sequences_propose_the_root_alone():
    """Fault 26: inert requests beside others."""
    index = tlt_ext.NgramIndex()
    gone, kept = index.start(7, [1, 2, 1]), index.start(8, [1, 2, 1])
    empty = index.start(8, [])
    index.drop(7)
    index.drop(12345)
    assert index.num_tokens == 3
    index.extend(gone, [4])
    trees = propose(index, [gone, kept, -1, empty])
    assert [tokens_of(t) for t in trees] == [[-7], [1, 2, 1], [-7], [-7]]
    # A new group of the same name does not see the old one's tokens.
    assert tokens_of(propose(index, [index.start(7, [1])])[0]) == [1]
    index.clear()
    assert index.num_tokens == 0
    assert tokens_of(propose(index, [kept])[0]) == [-7]
    assert index.start(0, [1]) > kept
    assert propose(index, []) == []


def test_a_full_pool_forgets_the_least_recently_extended():
    index = tlt_ext.NgramIndex(capacity=16)
    oldest = index.start(0, [1, 2, 1, 2])
    other = index.start(1, [3, 4, 3, 4])
    active = index.start(2, [5, 6, 5, 6])
    index.extend(oldest, [1])
    index.extend(active, [5, 6, 5])
    assert index.num_tokens == 16
    index.extend(active, [6])  # forgets `other`: `oldest` was extended after it
    assert index.num_tokens == 13
    trees = propose(index, [oldest, other, active], top_k=1, depth=2)
    assert [tokens_of(t) for t in trees] == [[1, 2, 1], [-7], [6, 5, 6]]
    index.extend(other, [3])
    assert index.num_tokens == 13


def test_a_full_pool_first_clears_out_dropped_groups():
    index = tlt_ext.NgramIndex(capacity=16)
    for step in range(100):
        handle = index.start(step, [1, 2, 3, 1])
        assert tokens_of(propose(index, [handle], depth=3)[0]) == [1, 2, 3, 1]
        index.drop(step - 1)
        assert index.num_tokens == 4


@pytest.mark.parametrize("capacity", [1, 2, 3, 4, 17])
def test_one_sequence_that_fills_the_pool_is_forgotten(capacity):
    index = tlt_ext.NgramIndex(capacity=capacity)
    handle = index.start(0, [1] * capacity)
    assert index.num_tokens == capacity
    index.extend(handle, [1] * 100)
    assert index.num_tokens == 0
    assert tokens_of(propose(index, [handle])[0]) == [-7]
    again = index.start(0, [1] * capacity)
    assert tokens_of(propose(index, [again])[0])[0] == 1


def test_many_tokens_survive_growth_and_rebuilds():
    """Tables grow, the pool turns over many times, and the newest text is still found."""
    index = tlt_ext.NgramIndex(max_order=3, capacity=1000)
    random = kit.generator(0)
    for step in range(150):
        text = torch.randint(0, 1000, (50,), generator=random).tolist()
        index.start(step % 7, text)
        assert index.num_tokens <= 1000
        probe = index.start(step % 7, text[:20])
        tree = propose(index, [probe], top_k=1)[0]
        assert tokens_of(tree) == text[19:24]


def test_speculation_on_proposals_emits_what_sample_emits():
    """Any tree gives the tokens of plain decoding: here n-gram trees over a toy target."""
    vocab, batch, length = 24, 3, 40
    table = 3 * kit.randn(vocab, vocab, seed=0)  # logits of the next token given the last
    temperature = torch.tensor([0.0, 0.6, 1.0])
    top_k, top_p = torch.zeros(batch, dtype=torch.int32), torch.ones(batch)
    request = REQUEST + torch.arange(batch, dtype=torch.int64)

    plain = torch.zeros(batch, length, dtype=torch.int32)
    for i in range(1, length):
        tokens = torch.zeros(batch, dtype=torch.int32)
        tlt_ext.sample(
            table[plain[:, i - 1].long()],
            temperature,
            top_k,
            top_p,
            request,
            torch.full((batch,), i, dtype=torch.int32),
            tokens,
            torch.empty(batch),
            torch.zeros(batch, dtype=torch.int32),
            seed=SEED,
        )
        plain[:, i] = tokens

    index, spoken = tlt_ext.NgramIndex(), [[0] for _ in range(batch)]
    for b in range(batch):
        index.start(b, plain[b, 5:].tolist())  # an earlier epoch said much the same
    handles = torch.tensor([index.start(b, [0]) for b in range(batch)])
    passes, num_verify, capacity = 0, 9, 64
    while min(map(len, spoken)) < length:
        passes += 1
        token, parent, depth = (torch.zeros(batch, capacity, dtype=torch.int32) for _ in "123")
        score, count = torch.zeros(batch, capacity), torch.zeros(batch, dtype=torch.int32)
        nodes = (token, parent, score, depth, count)
        position = torch.tensor([len(s) - 1 for s in spoken], dtype=torch.int32)
        index.propose(handles, *nodes, temperature, request, position, seed=SEED, depth=4, top_k=3)
        rows = batch * num_verify
        tokens, parents, positions, source = (torch.zeros(rows, dtype=torch.int32) for _ in "1234")
        ancestors = torch.zeros(rows, 16, dtype=torch.uint8)
        row_start = torch.zeros(batch + 1, dtype=torch.int32)
        tlt_ext.select_nodes(
            *nodes,
            position,
            tokens,
            parents,
            positions,
            ancestors,
            source,
            row_start,
            num_verify=num_verify,
        )
        emitted, path = (torch.zeros(batch, 17, dtype=torch.int32) for _ in "12")
        num_emitted, finish, status = (torch.zeros(batch, dtype=torch.int32) for _ in "123")
        tlt_ext.verify_tree(
            table[tokens.long()],
            tokens,
            parents,
            positions,
            row_start,
            temperature,
            top_k,
            top_p,
            request,
            torch.full((batch, 1), -1, dtype=torch.int32),
            torch.tensor([length - len(s) for s in spoken], dtype=torch.int32),
            emitted,
            torch.zeros(batch, 17),
            num_emitted,
            path,
            finish,
            status,
            seed=SEED,
        )
        for b in range(batch):
            new = emitted[b, : num_emitted[b]].tolist()
            spoken[b] += new
            index.extend(int(handles[b]), new)
    assert spoken == plain.tolist()
    assert passes < 20  # drafts are accepted: 39 tokens each


def test_checks():
    with pytest.raises(ValueError, match="NgramIndex: max_order: expected 1 to 16, got 0"):
        tlt_ext.NgramIndex(max_order=0)
    with pytest.raises(ValueError, match="max_order: expected 1 to 16, got 17"):
        tlt_ext.NgramIndex(max_order=17)
    with pytest.raises(ValueError, match="capacity: expected 1 to 1073741824, got 0"):
        tlt_ext.NgramIndex(capacity=0)
    index = tlt_ext.NgramIndex()
    with pytest.raises(ValueError, match="start: tokens: expected ids of 0 or more, got -1"):
        index.start(0, [3, -1])
    handle = index.start(0, [3])
    with pytest.raises(ValueError, match="extend: tokens: expected ids of 0 or more, got -2"):
        index.extend(handle, [-2])
    for bad in (-1, handle + 1):
        with pytest.raises(ValueError, match="extend: handle: expected one that start.* returned"):
            index.extend(bad, [1])
    with pytest.raises(ValueError, match=r"propose: handle: expected one that start\(\) returned"):
        propose(index, [handle + 1])
    with pytest.raises(ValueError, match="propose: handle: .* got -2"):
        propose(index, [-2])
    with pytest.raises(ValueError, match="depth: expected 1 to 16, got 17"):
        propose(index, [handle], depth=17)
    with pytest.raises(ValueError, match="top_k: expected 1 to 128, got 0"):
        propose(index, [handle], top_k=0)
    with pytest.raises(ValueError, match="min_order: expected 1 to 6, got 7"):
        propose(index, [handle], min_order=7)
    with pytest.raises(ValueError, match="node_token: expected room for 9 nodes a request, got 8"):
        propose(index, [handle], capacity=8)
    arrays = [torch.zeros(1, 9, dtype=torch.int32) for _ in range(4)]
    arrays[2] = torch.zeros(1, 9)
    count, position = (torch.zeros(1, dtype=torch.int32) for _ in range(2))
    rest = (torch.ones(1), torch.zeros(1, dtype=torch.int64), position)
    with pytest.raises(TypeError, match="handles: expected dtype int64, got int32"):
        index.propose(count, *arrays, count, *rest, seed=0, depth=1, top_k=1)
    with pytest.raises(ValueError, match=r"temperature: expected shape \[1\], got \[2\]"):
        index.propose(rest[1], *arrays, count, torch.ones(2), *rest[1:], seed=0, depth=1, top_k=1)
