"""The n-gram drafter: by hand, and against its definition on random texts."""

import math

import pytest
import torch

import tlt_ext
from tests import kit, reference
from tests.grouping import flat
from tlt_ext import Nodes, Rows, Sampling, Status, TokenTable, Tree, VerifyOutput

SEED, REQUEST = 2**40 + 7, 2**61 + 2**33 + 5
HUGE = 2**31 - 1  # in memory that must not be read


class Case:
    """Texts in a table, and the requests that search them: `Case(texts, [(own, group), ...])`."""

    def __init__(self, texts, requests, *, max_len=None, temperature=0.0):
        longest = max([len(text) for text in texts], default=1)
        self.texts, self.requests = texts, requests
        self.tokens = torch.full((len(texts), max_len or longest), HUGE, dtype=torch.int32)
        for row, text in zip(self.tokens, texts, strict=True):
            row[: len(text)] = torch.tensor(text, dtype=torch.int32)
        self.length = self.ints([len(text) for text in texts])
        only_own = {own for own, _ in requests} - {s for own, g in requests for s in g if s != own}
        self.length[list(only_own)] = HUGE  # not read: the root's position says how long it is
        batch, width = len(requests), max([len(group) for _, group in requests], default=0)
        self.group_slots = torch.full((batch, width), -1, dtype=torch.int32)
        for row, (_, group) in zip(self.group_slots, requests, strict=True):
            row[: len(group)] = self.ints(group)
        self.slot = self.ints([own for own, _ in requests])
        self.context_len = self.ints([len(texts[own]) - 1 for own, _ in requests])
        self.temperature = torch.full((batch,), float(temperature))
        self.request = REQUEST + torch.arange(batch, dtype=torch.int64)
        self.status = torch.zeros(batch, dtype=torch.int32)

    @staticmethod
    def ints(values):
        return torch.tensor(values, dtype=torch.int32)

    def arrays(self, capacity):
        batch = len(self.slot)
        token, parent, depth = torch.full((3, batch, capacity), -7, dtype=torch.int32).unbind()
        return {
            "tokens": self.tokens,
            "length": self.length,
            "group_slots": self.group_slots,
            "slot": self.slot,
            "context_len": self.context_len,
            "node_token": token,
            "node_parent": parent,
            "node_score": torch.full((batch, capacity), math.nan),
            "node_depth": depth,
            "node_count": torch.full((batch,), -7, dtype=torch.int32),
            "temperature": self.temperature,
            "request": self.request,
            "status": self.status,
        }

    def propose(self, ops, *, depth=4, top_k=2, **options):
        """The trees, each as a list of (token, parent, score, depth)."""
        arrays = self.arrays(1 + depth * min(top_k, 32))
        ops.ngram_propose(**arrays, seed=SEED, depth=depth, top_k=top_k, **options)
        columns = [arrays[f"node_{name}"] for name in ("token", "parent", "score", "depth")]
        counts = arrays["node_count"].tolist()
        for b, count in enumerate(counts):  # nothing is written past the count
            assert columns[2][b, count:].isnan().all() and columns[0][b, count:].eq(-7).all()
        return [
            list(zip(*(column[b, :count].tolist() for column in columns), strict=True))
            for b, count in enumerate(counts)
        ]

    def expected(self, b, **options):
        own, group = self.requests[b]
        options = {"max_ngram": 8, "min_ngram": 1, "depth": 4, "top_k": 2, **options}
        return reference.ngram_propose(
            self.texts[own],
            [self.texts[slot] for slot in group],
            temperature=float(self.temperature[b]),
            seed=SEED,
            request=REQUEST + b,
            **options,
        )


def tokens_of(tree):
    return [node[0] for node in tree]


def first(ops, texts, own=0, group=None, **options):
    """The tokens proposed to one request that searches all texts."""
    case = Case(texts, [(own, list(range(len(texts))) if group is None else group)])
    return tokens_of(case.propose(ops, **options)[0])


def test_chain_by_hand(ops):
    """2, 3 was followed by 4, 5: a match of two tokens, which weighs 4."""
    (tree,) = Case([[9, 2, 3], [1, 2, 3, 4, 5]], [(0, [0, 1])]).propose(ops)
    assert [(t, p, d) for t, p, _, d in tree] == [(3, -1, 0), (4, 0, 1), (5, 1, 2)]
    assert [s for _, _, s, _ in tree] == pytest.approx([0, math.log(4 / 5), 2 * math.log(4 / 5)])


@pytest.mark.sanitize
def test_branches_by_hand(ops):
    """Counts decide at T = 0, ties go to the lower id, and `top_k` nodes are kept per level."""
    texts = [[10, 11], *([10, 11, *tail] for tail in ([5, 8], [7, 1], [7, 2], [6, 3]))]
    (tree,) = Case(texts, [(0, range(5))]).propose(ops, depth=2)
    # Level 1: 7 twice, then 5 and 6 tie. Level 2: 8 follows 5 surely; 1 and 2 tie under 7.
    assert [(t, p, d) for t, p, _, d in tree] == [
        (11, -1, 0),
        (7, 0, 1),
        (5, 0, 1),
        (1, 1, 2),
        (2, 1, 2),
    ]
    seven = math.log(8 / 17)
    assert tree[1][2] == pytest.approx(seven) and tree[2][2] == pytest.approx(math.log(4 / 17))
    assert tree[3][2] == pytest.approx(seven + math.log(4 / 9))
    assert first(ops, texts, top_k=4, depth=1) == [11, 7, 5, 6]


def test_a_sequence_finds_its_own_past(ops):
    assert first(ops, [[1, 2, 3, 1, 2]]) == [2, 3, 1, 2]
    assert first(ops, [[1, 2, 3, 1, 2, 3]]) == [3, 1, 2, 3]
    assert first(ops, [[1, 2, 3, 1, 2]], group=[]) == [2]


def test_longer_matches_weigh_more_and_shorter_ones_still_count(ops):
    texts = [[1, 2, 3], [1, 2, 3, 50], [9, 2, 3, 60], [8, 3, 70], [8, 3, 70]]
    options = dict(top_k=4, depth=1)
    assert first(ops, texts, max_ngram=3, **options) == [3, 50, 60, 70]  # 16, 4, 1 + 1
    assert first(ops, texts, max_ngram=2, **options) == [3, 50, 60, 70]  # 4, 4, 1 + 1
    assert first(ops, texts, max_ngram=1, **options) == [3, 70, 50, 60]  # 1, 1, 1 + 1
    assert first(ops, texts, min_ngram=2, **options) == [3, 50, 60]
    # Four matches of one token are worth one of two tokens, and then the lower id wins.
    texts = [[1, 2], [1, 2, 9], *([0, 2, 7] for _ in range(4))]
    assert first(ops, texts, top_k=1, depth=1) == [2, 7]
    assert first(ops, texts[:-1], top_k=1, depth=1) == [2, 9]


def test_texts_are_never_glued_and_groups_are_apart(ops):
    """In the store 6 stands after 4, 5, but in another row."""
    assert first(ops, [[4, 5], [6, 7], [4, 5]]) == [5]
    assert first(ops, [[5, 6], [4, 5], [6, 7]], min_ngram=2) == [6]
    assert first(ops, [[1, 2], [1, 2, 3]], group=[0]) == [2]
    # A match ends where its text starts, on both sides.
    assert first(ops, [[2], [9, 2, 5], [2, 5]], min_ngram=2) == [2]
    assert first(ops, [[2], [9, 2, 5], [2, 6]], depth=1) == [2, 5, 6]


def test_negative_tokens_end_a_continuation(ops):
    assert first(ops, [[1, 2], [1, 2, 3, -1, 4]]) == [2, 3]


def test_noise_ranks_when_sampling(ops):
    """Design 5: children are the top of log count + the target's noise at that position."""
    texts = [[1000], *([1000, token] for token in range(30))]
    case = Case(texts, [(0, range(31))] * 5, temperature=1.0)
    for b, tree in enumerate(case.propose(ops, top_k=3, depth=1)):
        noise = reference.target_noise(SEED, REQUEST + b, 1, 30)
        assert tokens_of(tree)[1:] == noise.topk(3).indices.tolist()
        assert [node[2] for node in tree[1:]] == pytest.approx([math.log(1 / 31)] * 3)
    assert first(ops, texts, top_k=3, depth=1) == [1000, 0, 1, 2]


@pytest.mark.sanitize
def test_the_32_best_matches_are_followed(ops):
    """Longest first, then the earlier text of the group, then the later place."""
    texts = [[0, 1], *([9, 1, 5] for _ in range(20)), *([9, 1, 6] for _ in range(20))]
    (tree,) = Case(texts, [(0, range(41))]).propose(ops, depth=1)
    assert tokens_of(tree) == [1, 5, 6]
    assert [n[2] for n in tree[1:]] == pytest.approx([math.log(20 / 33), math.log(12 / 33)])
    texts = [[0, 1], [1, 7] * 10 + [1, 8] * 32]
    assert first(ops, texts, depth=1, top_k=4) == [1, 8]
    assert first(ops, [*texts, [0, 1, 4]], depth=1, top_k=4) == [1, 8, 4]


def random_case(alphabet, max_len, seed, temperature, batch=3, group=5, periodic=False):
    random = kit.generator(seed)

    def draw(low, high):
        return int(torch.randint(low, high, (), generator=random))

    texts = []
    for _ in range(batch + group):
        text = torch.randint(0, alphabet, (draw(1, max_len + 1),), generator=random).tolist()
        texts.append((text[:3] * max_len)[: len(text)] if periodic else text)
    others = range(batch, batch + group)
    requests = [(b, [b, *others][draw(0, 2) : draw(2, group + 2)]) for b in range(batch)]
    return Case(texts, requests, max_len=max_len, temperature=temperature)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("max_len", [1, 2, 7, 64, 131])
@pytest.mark.parametrize("alphabet", [2, 4, 30])
def test_equals_reference_on_random_texts(ops, alphabet, max_len, temperature):
    for step in range(6):
        case = random_case(alphabet, max_len, step, temperature)
        options = dict(depth=1 + step * 3, top_k=[1, 2, 5, 40][step % 4], max_ngram=8 - step)
        options["min_ngram"] = 1 + step % 2
        for b, tree in enumerate(case.propose(ops, **options)):
            wanted = case.expected(b, **options)
            assert [(t, p, d) for t, p, _, d in tree] == [
                (n["token"], n["parent"], n["depth"]) for n in wanted
            ]
            assert [n[2] for n in tree] == pytest.approx([n["score"] for n in wanted], abs=1e-4)
            assert all(s <= tree[p][2] for _, p, s, _ in tree[1:])
        assert case.status.tolist() == [0] * 3


NODES = ("node_token", "node_parent", "node_score", "node_depth", "node_count")


def kept(ops, case, capacity, **options):
    """The node arrays after a proposal that keeps what the unmatched have, here other numbers."""
    arrays = case.arrays(capacity)
    ops.ngram_propose(**arrays, seed=SEED, keep_unmatched=True, **options)
    return {name: arrays[name] for name in NODES}


@pytest.mark.sanitize
def test_without_a_match_another_s_nodes_stay(ops):
    """Too short a match, none, no slot, a slot outside: not a word is written."""
    texts = [[7, 2, 3], [1, 2, 3], [8], [5, 5], [4, 1, 2, 3, 6], [5, 5]]
    case = Case(texts, [(b, [b, 4]) for b in range(6)])
    case.slot[3], case.slot[5] = -1, HUGE
    before = case.arrays(5)
    after = kept(ops, case, 5, depth=4, top_k=1, min_ngram=3)
    (alone,) = Case(texts, [(1, [1, 4])]).propose(ops, depth=4, top_k=1, min_ngram=3)
    assert tokens_of(alone) == [3, 6]
    for b in (0, 2, 3, 4, 5):
        assert all(kit.same_bits(after[name][b:][:1], before[name][b:][:1]) for name in NODES), b
    assert after["node_count"][1] == 2 and after["node_token"][1, :2].tolist() == [3, 6]
    assert after["node_token"][1, 2:].eq(-7).all()
    assert case.status.tolist() == [0] * 5 + [Status.BAD_LENGTH]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("min_ngram", [1, 3, 6])
def test_matched_requests_get_the_same_tree_after_any_drafter(ops, min_ngram, temperature):
    matched = 0
    for step in range(8):
        case = random_case(3, 40, step, temperature, batch=6)
        options = dict(depth=7, top_k=2, min_ngram=min_ngram)
        wanted, after = case.propose(ops, **options), kept(ops, case, 15, **options)
        for b, tree in enumerate(wanted):
            is_matched = len(tree) > 1
            matched += is_matched
            assert after["node_count"][b] == (len(tree) if is_matched else -7)
            if is_matched:
                columns = [after[name][b, : len(tree)].tolist() for name in NODES[:4]]
                assert list(zip(*columns, strict=True)) == tree
    assert 0 < matched and (matched < 48 or min_ngram == 1)


@kit.gpu
@kit.needs_gpu
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("periodic", "alphabet"), [(False, 3), (True, 50)])
def test_kept_nodes_have_the_bits_of_the_cpu(periodic, alphabet, temperature):
    changed = 0
    for step in range(4):
        after = []
        for device in ("cpu", "cuda"):
            case = random_case(alphabet, 300, step, temperature, 16, 8, periodic)
            options = dict(depth=15, top_k=1, min_ngram=8)
            after.append(kept(kit.Ops(device), case, 17, **options))
        assert all(kit.same_bits(after[0][name], after[1][name]) for name in NODES)
        changed += int(after[0]["node_count"].ne(-7).sum())
    assert 0 < changed < 64


@kit.gpu
@kit.needs_gpu
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("alphabet", "max_len", "periodic"),
    [(3, 4096, False), (50, 4096, False), (2000, 4094, False), (50, 1027, True), (2, 300, True)],
)
def test_trees_have_the_bits_of_the_cpu(alphabet, max_len, periodic, temperature):
    for step in range(4):
        trees = []
        for device in ("cpu", "cuda"):
            case = random_case(alphabet, max_len, step, temperature, 8, 24, periodic)
            ops = kit.Ops(device)
            trees.append(case.propose(ops, depth=16, top_k=[1, 3, 8, 128][step]))
        assert trees[0] == trees[1]


def test_a_row_of_a_batch_equals_a_batch_of_one(ops):
    case = random_case(5, 200, 1, 1.0, batch=6)
    together = case.propose(ops)
    for b in range(6):
        alone = Case(case.texts, [case.requests[b]], temperature=1.0)
        alone.request += b
        assert alone.propose(ops) == [together[b]]


def test_inert_requests_beside_others(ops):
    """Fault 26: a row without a request gets no nodes, and the others do not notice."""
    case = random_case(4, 50, 2, 1.0, batch=4)
    together = case.propose(ops)
    case.slot[[0, 2]] = -1
    case.context_len[0] = HUGE
    case.group_slots[2] = HUGE
    assert case.propose(ops) == [[], together[1], [], together[3]]
    assert case.status.tolist() == [0] * 4
    assert Case([[1]], []).propose(ops) == []


@pytest.mark.sanitize
def test_bad_slots_and_lengths_are_left_out(ops):
    """Fault 32 and its kind: huge numbers set the status and are never followed."""
    texts = [[1, 2], [1, 2, 3], [1, 2, 4]]
    for bad_slot in (-2, 3, HUGE, -HUGE - 1):
        case = Case(texts, [(0, [0, 1, 2])] * 2)
        case.group_slots[0, 1] = bad_slot
        assert [tokens_of(t) for t in case.propose(ops)] == [[2, 4], [2, 3, 4]]
        assert case.status.tolist() == [Status.BAD_LENGTH, 0]
        case = Case(texts, [(0, [0, 1, 2])] * 2)
        case.slot[1] = bad_slot
        assert [tokens_of(t) for t in case.propose(ops)] == [[2, 3, 4], []]
        assert case.status.tolist() == [0, Status.BAD_LENGTH]
    for bad_length in (-1, 4, HUGE, -HUGE - 1):
        case = Case(texts, [(0, [0, 1, 2])])
        case.length[1] = bad_length
        assert tokens_of(case.propose(ops)[0]) == [2, 4]
        assert case.status.tolist() == [Status.BAD_LENGTH]
        case = Case(texts, [(0, [0, 1, 2])])
        case.context_len[0] = bad_length
        case.status[0] = Status.NAN_LOGITS  # bits are added
        assert case.propose(ops) == [[]]
        assert case.status.tolist() == [Status.BAD_LENGTH | Status.NAN_LOGITS]


@pytest.mark.sanitize
def test_tokens_past_a_length_are_not_read(ops):
    """The tokens behind it would match and continue, and so would those of the rows around it."""
    texts = [[5, 1, 2, 3, 1, 2, 9], [1, 2, 7, 1, 2, 8, 1], [2, 6, 1, 2, 4, 2, 1]]
    case = Case(texts, [(0, [0, 1])])
    case.context_len[0], case.length[1] = 2, 2
    assert tokens_of(case.propose(ops)[0]) == [2]
    case.length[1] = 3
    assert tokens_of(case.propose(ops)[0]) == [2, 7]


def arrays_on(device, case, capacity):
    return {name: array.to(device) for name, array in case.arrays(capacity).items()}


@kit.gpu
@kit.needs_gpu
def test_one_graph_serves_changing_lengths():
    """A thousand replays while the texts grow: no allocation, no node outside, the CPU's trees."""
    texts = torch.randint(0, 6, (9, 1100), generator=kit.generator(3)).tolist()
    case = Case(texts, [(b, [b, 4, 5, 6, 7, 8]) for b in range(4)], temperature=1.0)
    gpu, cpu = (arrays_on(device, case, 25) for device in ("cuda", "cpu"))
    options = dict(seed=SEED, depth=6, top_k=4)
    flat.ngram_propose(**gpu, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flat.ngram_propose(**gpu, **options)
    held = torch.cuda.memory_allocated()
    for replay in range(1000):
        if replay % 20 == 0:
            lengths = torch.randint(0, 1101, (9,), generator=kit.generator(replay)).int()
            roots = torch.randint(0, 1100, (4,), generator=kit.generator(-replay)).int()
            for arrays in (gpu, cpu):
                arrays["length"].copy_(lengths)
                arrays["context_len"].copy_(roots)
                arrays["slot"][replay // 20 % 4] = -1 if replay % 40 else replay // 20 % 4
        graph.replay()
        if replay % 100 == 0:
            flat.ngram_propose(**cpu, **options)
            assert torch.equal(gpu["node_count"].cpu(), cpu["node_count"])
            for b, count in enumerate(cpu["node_count"].tolist()):
                for name in ("node_token", "node_parent", "node_score", "node_depth"):
                    assert kit.same_bits(gpu[name][b, :count], cpu[name][b, :count])
    assert torch.cuda.memory_allocated() == held


def test_speculation_on_proposals_emits_what_sample_emits():
    """Any tree gives the tokens of plain decoding: here n-gram trees over a toy target."""
    vocab, batch, length = 24, 3, 40
    table = 3 * kit.randn(vocab, vocab, seed=0)  # logits of the next token given the last
    temperature = torch.tensor([0.0, 0.6, 1.0])
    top_k, top_p = torch.zeros(batch, dtype=torch.int32), torch.ones(batch)
    request = REQUEST + torch.arange(batch, dtype=torch.int64)
    sampling = Sampling(temperature, request, top_k, top_p)

    plain = torch.zeros(batch, length, dtype=torch.int32)
    for i in range(1, length):
        tokens = torch.zeros(batch, dtype=torch.int32)
        tlt_ext.sample(
            table[plain[:, i - 1].long()],
            sampling,
            position=torch.full((batch,), i, dtype=torch.int32),
            tokens=tokens,
            logprobs=torch.empty(batch),
            status=torch.zeros(batch, dtype=torch.int32),
            seed=SEED,
        )
        plain[:, i] = tokens

    store = torch.zeros(2 * batch, length, dtype=torch.int32)
    store[batch:, : length - 5] = plain[:, 5:]  # an earlier epoch said much the same
    known = torch.tensor([1] * batch + [length - 5] * batch, dtype=torch.int32)
    own = torch.arange(batch, dtype=torch.int32)
    group = torch.stack([own, own + batch], dim=1)
    passes, num_verify, capacity = 0, 9, 64
    while min(known[:batch]) < length:
        passes += 1
        token, parent, depth = (torch.zeros(batch, capacity, dtype=torch.int32) for _ in "123")
        score, count = torch.zeros(batch, capacity), torch.zeros(batch, dtype=torch.int32)
        nodes = Nodes(token, parent, score, depth, count)
        position = (known[:batch] - 1).clamp_max(length - 1)
        status = torch.zeros(batch, dtype=torch.int32)
        tlt_ext.ngram_propose(
            TokenTable(store, own, known, group),
            nodes,
            sampling,
            context_len=position,
            status=status,
            seed=SEED,
            depth=4,
            top_k=3,
        )
        rows = batch * num_verify
        tokens, parents, positions, source = (torch.zeros(rows, dtype=torch.int32) for _ in "1234")
        tree = Tree(tokens, parents, torch.zeros(rows, 16, dtype=torch.uint8))
        row_start = torch.zeros(batch + 1, dtype=torch.int32)
        tlt_ext.select_nodes(
            nodes,
            tree,
            root_position=position,
            position=positions,
            row_start=row_start,
            source=source,
            num_verify=num_verify,
        )
        emitted, path = (torch.zeros(batch, 17, dtype=torch.int32) for _ in "12")
        num_emitted, finish = (torch.zeros(batch, dtype=torch.int32) for _ in "12")
        tlt_ext.verify_tree(
            table[tokens.long()],
            tree,
            Rows(row_start, positions, status),
            sampling,
            VerifyOutput(emitted, torch.zeros(batch, 17), num_emitted, finish, path),
            stop_ids=torch.full((batch, 1), -1, dtype=torch.int32),
            limit=(length - known[:batch]).int(),
            seed=SEED,
        )
        for b in range(batch):
            new = int(num_emitted[b])
            store[b, known[b] : known[b] + new] = emitted[b, :new]
            known[b] += new
    assert torch.equal(store[:batch], plain)
    assert passes < 20  # drafts are accepted: 39 tokens each


def test_checks(ops):
    case = Case([[1, 2], [1, 2]], [(0, [0, 1])])
    with pytest.raises(ValueError, match="ngram_propose: depth: expected 1 to 16, got 17"):
        case.propose(ops, depth=17)
    with pytest.raises(ValueError, match="top_k: expected 1 to 128, got 0"):
        case.propose(ops, top_k=0)
    with pytest.raises(ValueError, match="max_ngram: expected 1 to 8, got 9"):
        case.propose(ops, max_ngram=9)
    with pytest.raises(ValueError, match="min_ngram: expected 1 to 3, got 4"):
        case.propose(ops, max_ngram=3, min_ngram=4)
    wide = Case([[1, 2]], [(0, [0] * 129)])
    with pytest.raises(ValueError, match="group_slots' second axis: expected 0 to 128, got 129"):
        wide.propose(ops)
    arrays = case.arrays(8)
    options = dict(seed=0, depth=4, top_k=2)
    with pytest.raises(ValueError, match="nodes.token: expected room for 9 nodes a request, got 8"):
        ops.ngram_propose(**arrays, **options)
    arrays = case.arrays(9)
    for name, wrong, message in (
        ("length", case.length.long(), "length: expected dtype int32, got int64"),
        ("request", case.slot, "request: expected dtype int64, got int32"),
        ("temperature", case.slot, "temperature: expected dtype float32, got int32"),
    ):
        with pytest.raises(TypeError, match=message):
            ops.ngram_propose(**{**arrays, name: wrong}, **options)
    for name, wrong, message in (
        ("length", case.length[:1], r"length: expected shape \[2\], got \[1\]"),
        ("slot", case.length, r"slot: expected shape \[1\], got \[2\]"),
        ("tokens", case.tokens.t(), "tokens: expected a contiguous array"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.ngram_propose(**{**arrays, name: wrong}, **options)
