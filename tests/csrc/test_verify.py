"""`verify_tree` emits what `sample` draws, whatever was drafted; what both verify ops share."""

import math
import random
from types import SimpleNamespace

import pytest
import torch

import tlt_ext
from tests import grouping, kit, reference
from tests.csrc.verify_kit import (
    LIMIT,
    MILLION,
    REVERSED,
    RUNNING,
    STOP,
    TARGET,
    WIDTH,
    call,
    emitted_lists,
    int32,
    rejection,
    tree,
    valid,
)
from tests.grouping import flat
from tlt_ext import Status

pytestmark = pytest.mark.usefixtures("each_device")
each_device = kit.each_device


def sample_rows(logits, row_start, position, request, temperature, top_k, top_p, seed):
    """What `sample` draws at each row of each request, and its log-probs."""
    counts = int32(row_start).diff()
    spread = torch.repeat_interleave(torch.arange(len(counts)), counts)
    rows = len(spread)
    out = {
        "tokens": torch.zeros(rows).int(),
        "logprobs": torch.zeros(rows),
        "status": torch.zeros(rows).int(),
        "filtered_logprobs": torch.zeros(rows),
    }
    out = {name: kit.to_device(array) for name, array in out.items()}
    arrays = {
        "logits": logits[:rows],
        "temperature": temperature[spread],
        "top_k": top_k[spread],
        "top_p": top_p[spread],
        "request": request[spread],
        "position": position[:rows] + 1,
    }
    arrays = {name: kit.to_device(array) for name, array in arrays.items()}
    flat.sample(**arrays, seed=seed, **out)
    out = kit.to_cpu(out)
    return SimpleNamespace(
        tokens=out["tokens"], logprobs=out["logprobs"], filtered=out["filtered_logprobs"]
    )


def random_batch(rng: random.Random, vocab: int, malformed: bool):
    """Ragged requests with random links: duplicates always, bad links and ids if asked."""
    tokens, parents, position, row_start = [], [], [], [0]
    for _ in range(rng.randint(1, 6)):
        size = rng.choice([0, 1, 2, 9, 30])
        root = rng.randint(0, 1000)
        depth = []
        for node in range(size):
            parent = rng.randint(max(0, node - 4), node - 1) if node else -1
            depth.append(depth[parent] + 1 if node else 0)
            token = rng.randrange(vocab)
            if malformed and rng.random() < 0.2:
                parent = rng.choice([-1, -2, node, node + 1, size, 2**31 - 1, -(2**31)])
            if malformed and rng.random() < 0.1:
                token = rng.choice([-1, vocab, 2**31 - 1, -(2**31)])
            tokens.append(token)
            parents.append(parent)
            position.append(root + depth[-1])
        row_start.append(len(tokens))
    return tokens, parents, position, row_start


# ---- verify_tree: the tokens of `sample` -----------------------------------------------------


@pytest.mark.parametrize("malformed", [False, True])
def test_verify_tree_emits_what_sample_draws_row_by_row(malformed):
    """Faults 9, 10, 21, 24: any tree, with duplicates, bad links and bad ids, bit for bit."""
    rng = random.Random(malformed)
    vocab, longest = 5, 0
    for case in range(400):
        tokens, parents, position, row_start = random_batch(rng, vocab, malformed)
        requests, rows = len(row_start) - 1, len(tokens)
        inert = 3  # rows past the last request
        logits = 2 * kit.randn(rows + inert, vocab, seed=case, dtype=rng.choice(kit.DTYPES))
        setting = {
            "temperature": torch.tensor([rng.choice([0.0, 0.6, 1.0]) for _ in range(requests)]),
            "top_k": int32([rng.choice([0, 2, 4]) for _ in range(requests)]),
            "top_p": torch.tensor([rng.choice([1.0, 0.7]) for _ in range(requests)]),
            "request": torch.tensor([rng.getrandbits(62) for _ in range(requests)]),
        }
        seed = rng.getrandbits(64)
        padded = [0] * inert
        filtered = torch.full((requests, WIDTH), math.nan)
        out = tree(
            logits,
            tokens + padded,
            parents + padded,
            row_start,
            position=int32(position + padded),
            filtered_logprobs=filtered,
            seed=seed,
            **setting,
        )
        drawn = sample_rows(logits, row_start, int32(position + padded), seed=seed, **setting)
        for b in range(requests):
            first, size = row_start[b], row_start[b + 1] - row_start[b]
            path, node = [], 0 if size else None
            while node is not None and len(path) < WIDTH:
                path.append(node)
                token = int(drawn.tokens[first + node])
                node = next(
                    (
                        row
                        for row in range(node + 1, size)
                        if parents[first + row] == node and tokens[first + row] == token
                    ),
                    None,
                )
            rows_on_path = [first + row for row in path]
            n = len(path)
            longest = max(longest, n)
            assert int(out.num_emitted[b]) == n
            assert int(out.finish[b]) == (LIMIT if n == WIDTH else RUNNING)
            assert out.path[b, :n].tolist() == path
            assert torch.equal(out.emitted[b, :n], drawn.tokens[rows_on_path])
            assert kit.same_bits(out.logprobs[b, :n], drawn.logprobs[rows_on_path])
            assert kit.same_bits(filtered[b, :n], drawn.filtered[rows_on_path])
            assert (out.emitted[b, n:] == -7).all() and (out.path[b, n:] == -7).all()
            assert out.logprobs[b, n:].isnan().all() and filtered[b, n:].isnan().all()
            bad_link = any(not 0 <= parents[first + r] < r for r in range(1, size))
            bad_link |= size > 0 and parents[first] != -1
            bad_id = any(not 0 <= tokens[first + r] < vocab for r in range(1, size))
            flags = bad_link * Status.BAD_TREE | bad_id * Status.BAD_TOKEN
            assert int(out.status[b]) == flags
    assert longest > 3


def test_verify_tree_equals_reference():
    rng = random.Random(3)
    for case in range(60):
        tokens, parents, position, row_start = random_batch(rng, 4, malformed=False)
        logits = 2 * kit.randn(len(tokens), 4, seed=case)
        setting = rng.choice([0.0, 0.7, 1.0]), rng.choice([0, 2]), rng.choice([1.0, 0.8])
        out = tree(
            logits,
            tokens,
            parents,
            row_start,
            position=int32(position),
            temperature=setting[0],
            top_k=setting[1],
            top_p=setting[2],
            stop_ids=[3],
            limit=3,
            seed=case,
        )
        for b, (first, end) in enumerate(zip(row_start[:-1], row_start[1:], strict=True)):
            if first == end:
                continue
            emitted, path, finish = reference.verify_tree(
                logits[first:end],
                tokens[first:end],
                parents[first:end],
                position[first],
                setting,
                b,
                [3],
                3,
                seed=case,
            )
            assert emitted_lists(out)[b] == emitted
            assert out.path[b, : len(path)].tolist() == path
            assert int(out.finish[b]) == finish
            for place, (node, token) in enumerate(zip(path, emitted, strict=True)):
                right = reference.logprob(logits[first + node], setting[0], token)
                assert float(out.logprobs[b, place]) == pytest.approx(right, abs=1e-6)


def test_drafts_change_no_token_and_acceptance_has_its_closed_form():
    """A million trees of one draft: tokens follow the target, sum(target * draft) are accepted."""
    draft = torch.multinomial(REVERSED, MILLION, replacement=True, generator=kit.generator(0))
    tokens = torch.stack([torch.zeros(MILLION), draft], 1).flatten()
    out = tree(
        TARGET.log().expand(2 * MILLION, -1),
        tokens,
        torch.tensor([-1, 0]).repeat(MILLION),
        torch.arange(0, 2 * MILLION + 1, 2),
        position=torch.tensor([7, 8]).repeat(MILLION),
    )
    kit.assert_distribution(out.emitted[:, 0], TARGET)
    accepted = out.num_emitted == 2
    kit.assert_distribution(out.emitted[accepted, 1], TARGET)
    chance = float((TARGET * REVERSED).sum())
    kit.assert_distribution(accepted, torch.tensor([1 - chance, chance]))


def test_duplicate_siblings_count_once():
    """Fault 10: target (.5, .5), children [0, 0]: both tokens appear, the first child is taken."""
    n = 100_000
    out = tree(
        torch.zeros(3 * n, 2),
        [0] * (3 * n),
        torch.tensor([-1, 0, 0]).repeat(n),
        torch.arange(0, 3 * n + 1, 3),
    )
    kit.assert_distribution(out.emitted[:, 0], torch.tensor([0.5, 0.5]))
    assert not (out.path == 2).any()
    one_hot = rejection(
        torch.zeros(3 * n, 2),
        [0] * (3 * n),
        torch.tensor([-1, 0, 0]).repeat(n),
        torch.arange(0, 3 * n + 1, 3),
        deterministic=True,
    )
    kit.assert_distribution(one_hot.emitted[:, 0], torch.tensor([0.5, 0.5]))


def follow(tokens, vocab):
    """Greedy logits of a chain that accepts `tokens[1:]` and then emits 0."""
    logits = torch.zeros(len(tokens), vocab)
    logits[torch.arange(len(tokens)), torch.tensor([*tokens[1:], 0])] = 5.0
    return logits


@pytest.mark.parametrize("op", [tlt_ext.verify_tree, tlt_ext.verify_rejection])
def test_stop_ids_and_limits_inside_an_accepted_block(op):
    """Fault 33: nothing is emitted past a stop id or the limit."""
    chain = [9, 1, 2, 3, 4, 5]
    parents = [-1, 0, 1, 2, 3, 4]
    options = {"temperature": 0.0}
    if op is tlt_ext.verify_rejection:
        options["deterministic"] = True

    def run(**more):
        out = call(op, follow(chain, 10), chain, parents, [0, 6], **options, **more)
        n = int(out.num_emitted)
        assert (out.emitted[0, n:] == -7).all() and out.logprobs[0, n:].isnan().all()
        assert out.path[0, :n].tolist() == list(range(n)) and (out.path[0, n:] == -7).all()
        return emitted_lists(out)[0], int(out.finish)

    assert run() == ([1, 2, 3, 4, 5, 0], RUNNING)
    assert run(stop_ids=[3]) == ([1, 2, 3], STOP)
    assert run(stop_ids=[-1, 8, 2, -1]) == ([1, 2], STOP)
    assert run(stop_ids=[0]) == ([1, 2, 3, 4, 5, 0], STOP)
    assert run(stop_ids=[1, 5]) == ([1], STOP)
    assert run(limit=0) == ([], LIMIT)
    assert run(limit=-3) == ([], LIMIT)
    assert run(limit=1) == ([1], LIMIT)
    assert run(limit=4) == ([1, 2, 3, 4], LIMIT)
    assert run(limit=6) == ([1, 2, 3, 4, 5, 0], LIMIT)
    assert run(limit=7) == ([1, 2, 3, 4, 5, 0], RUNNING)
    assert run(limit=3, stop_ids=[3]) == ([1, 2, 3], STOP)  # a stop id at the limit is a stop
    assert run(limit=2, stop_ids=[3]) == ([1, 2], LIMIT)


def test_drafts_padded_with_minus_one():
    """Fault 11: V = 4, drafts [1, 0, 1, -1, -1]: a request's own rows count, -1 is no draft."""
    chain = [3, 1, 0, 1, -1, -1]
    logits = follow([3, 1, 0, 1, 2, 2], 4)
    parents = [-1, 0, 1, 2, 3, 4]
    own = tree(logits, chain, parents, [0, 4], temperature=0.0)
    assert emitted_lists(own) == [[1, 0, 1, 2]]
    assert int(own.status) == 0
    padded = tree(logits, chain, parents, [0, 6], temperature=0.0)
    assert emitted_lists(padded) == [[1, 0, 1, 2]]
    assert int(padded.status) == Status.BAD_TOKEN


@pytest.mark.parametrize("size", [1, 31, 32, 33, 63, 64, 65, 127, 128])
@pytest.mark.parametrize("op", [tlt_ext.verify_tree, tlt_ext.verify_rejection])
def test_wide_trees_at_the_edges_of_words(op, size):
    """Fault 27: the right child is the last row of the request; its neighbour is left alone."""
    parents = [-1] + [0] * (size - 1)
    tokens = [0, *range(1, size)]
    logits = torch.zeros(2 * size, 200)
    logits[:, size - 1] = 9.0
    options = {"deterministic": True} if op is tlt_ext.verify_rejection else {}
    out = call(op, logits, tokens * 2, parents * 2, [0, size, 2 * size], temperature=0.0, **options)
    expected = [size - 1] * (2 if size > 1 else 1)
    assert emitted_lists(out) == [expected, expected]
    assert out.path[0, : len(expected)].tolist() == [0, size - 1][: len(expected)]


def test_more_than_128_rows_or_rows_out_of_range_are_refused():
    """Fault 22: a request whose rows do not fit emits nothing and says so; others go on."""
    logits = torch.zeros(140, 5)
    for row_start, flags in [
        ([0, 129, 130], [Status.BAD_LENGTH, 0]),
        ([0, 1, 200], [0, Status.BAD_LENGTH]),
        ([-1, 1, 2], [Status.BAD_LENGTH, 0]),
        ([2, 1, 2], [Status.BAD_LENGTH, 0]),
        ([0, 1, -(2**31)], [0, Status.BAD_LENGTH]),
    ]:
        out = tree(logits, [0] * 140, [-1] * 140, row_start)
        assert out.status.tolist() == flags
        assert out.num_emitted.tolist() == [0 if flag else 1 for flag in flags]
        assert out.finish.tolist() == [RUNNING, RUNNING]


def test_a_path_longer_than_the_outputs_stops_at_their_width():
    chain = [9] + [1] * 30
    out = tree(follow(chain, 10), chain, range(-1, 30), [0, 31], temperature=0.0, limit=100)
    assert int(out.num_emitted) == WIDTH and int(out.finish) == RUNNING


@pytest.mark.parametrize("op", [tlt_ext.verify_tree, tlt_ext.verify_rejection])
def test_empty_batches_requests_and_padded_rows_are_inert(op):
    """Faults 25, 26, 32: no request, a request without rows, NaN rows past the last request."""
    options = {"deterministic": True} if op is tlt_ext.verify_rejection else {}
    assert emitted_lists(call(op, torch.empty(0, 5), [], [], [0], **options)) == []
    assert emitted_lists(call(op, torch.empty(0, 5), [], [], [0, 0, 0], **options)) == [[], []]
    logits = torch.full((6, 5), math.nan)
    logits[:2] = torch.eye(5)[:2]
    huge = 2**31 - 1
    out = call(
        op,
        logits,
        [0, 0, huge, huge, huge, huge],
        [-1, 0, huge, huge, huge, huge],
        [0, 0, 2, 2],
        temperature=0.0,
        **options,
    )
    assert emitted_lists(out) == [[], [0, 1], []]
    assert out.status.tolist() == [0, 0, 0]
    assert out.finish.tolist() == [RUNNING] * 3


@pytest.mark.parametrize("op", [tlt_ext.verify_tree, tlt_ext.verify_rejection])
def test_bad_logits_flag_a_request_only_on_its_path(op):
    """Fault 3: a NaN row gives a valid id; a NaN row that is not visited says nothing."""
    options = {"deterministic": True} if op is tlt_ext.verify_rejection else {}
    logits = torch.zeros(6, 4)
    logits[[0, 3], 2] = 5.0  # both roots want token 2
    logits[2] = math.nan
    logits[5] = math.nan
    out = call(
        op,
        logits,
        [0, 1, 2, 0, 2, 1],
        [-1, 0, 0, -1, 0, 0],
        [0, 3, 6],
        temperature=0.0,
        **options,
    )
    assert emitted_lists(out) == [[2, 0], [2, 0]]
    assert out.status.tolist() == [Status.NAN_LOGITS, 0]
    assert out.logprobs[0, 1] == -math.inf
    assert out.logprobs[1, 1] == pytest.approx(-math.log(4))


def test_verify_tree_does_not_depend_on_batch_order_or_threads():
    """Fault 8."""
    rng = random.Random(1)
    vocab, size, requests = 3000, 8, 24
    logits = 0.2 * kit.randn(requests * size, vocab, seed=1)
    logits[:, :3] += 8.0
    tokens = int32([rng.randrange(3) for _ in range(requests * size)])
    parents = int32([-1, 0, 0, 0, 1, 1, 2, 2] * requests)
    whole = tree(logits, tokens, parents, range(0, requests * size + 1, size))
    threads = tlt_ext.num_threads()
    tlt_ext.set_num_threads(3)
    try:
        threaded = tree(logits, tokens, parents, range(0, requests * size + 1, size))
    finally:
        tlt_ext.set_num_threads(threads)
    assert torch.equal(threaded.emitted, whole.emitted)
    assert kit.same_bits(threaded.logprobs, whole.logprobs)
    for b in range(requests):
        rows = slice(b * size, (b + 1) * size)
        alone = tree(logits[rows], tokens[rows], parents[rows], [0, size], request=[b])
        assert emitted_lists(alone)[0] == emitted_lists(whole)[b]
        assert kit.same_bits(alone.logprobs[0], whole.logprobs[b])
    assert int(whole.num_emitted.max()) > 2


# ---- checks --------------------------------------------------------------------------------------

CHECKS = [
    ("logits", torch.zeros(6, 10).double(), TypeError, "expected dtype float32 or float16"),
    ("logits", torch.zeros(10, 6).t(), ValueError, "expected a contiguous last axis"),
    ("logits", torch.zeros(60), ValueError, r"expected shape \[\*, \*\], got \[60\]"),
    ("emitted", torch.zeros(2, WIDTH).int().t(), ValueError, "expected a contiguous last axis"),
    ("tokens", torch.zeros(12).int()[::2], ValueError, "expected a contiguous array"),
    ("limit", torch.zeros(2, 1).int(), ValueError, r"expected shape \[\*\], got \[2, 1\]"),
    ("stop_ids", torch.zeros(3, 2).int(), ValueError, r"expected shape \[2, \*\], got \[3, 2\]"),
    ("row_start", torch.zeros(2).int(), ValueError, r"expected shape \[3\], got \[2\]"),
    ("tokens", torch.zeros(5).int(), ValueError, r"expected shape \[6\], got \[5\]"),
    ("parents", torch.zeros(7).int(), ValueError, r"expected shape \[6\], got \[7\]"),
    ("position", torch.zeros(7).int(), ValueError, r"expected shape \[6\], got \[7\]"),
    ("logprobs", torch.zeros(2, 18), ValueError, r"expected shape \[2, 17\], got \[2, 18\]"),
    ("path", torch.zeros(2, 16).int(), ValueError, r"expected shape \[2, 17\], got \[2, 16\]"),
    *[
        (name, torch.zeros(3, dtype=array.dtype), ValueError, r"expected shape \[2\], got \[3\]")
        for name, array in valid().items()
        if name in ("temperature", "top_k", "top_p", "request", "num_emitted", "finish", "status")
    ],
    *[
        (name, array.double(), TypeError, f"expected dtype {str(array.dtype)[6:]}, got float64")
        for name, array in valid().items()
        if name != "logits"
    ],
]


@pytest.mark.parametrize("op", [tlt_ext.verify_tree, tlt_ext.verify_rejection])
@pytest.mark.parametrize(("name", "bad", "error", "message"), CHECKS)
def test_verify_checks_its_arrays(op, name, bad, error, message):
    options = {"seed": 0}
    if op is tlt_ext.verify_rejection:
        options |= {"draft_probs": None, "deterministic": True}
    with pytest.raises(error, match=f"{op.__name__}: {name}: {message}"):
        grouping.call(op, **{**valid(), name: bad}, **options)


@pytest.mark.parametrize("op", [tlt_ext.verify_tree, tlt_ext.verify_rejection])
def test_verify_checks_vocab_size_and_width(op):
    options = {"seed": 0}
    if op is tlt_ext.verify_rejection:
        options |= {"draft_probs": None, "deterministic": True}
    for vocab_size in (0, 11):
        with pytest.raises(
            ValueError, match=r"vocab_size: expected 1 \.\. 10 .*got " + str(vocab_size)
        ):
            grouping.call(op, **valid(), vocab_size=vocab_size, **options)
    narrow = valid()
    for name in ("emitted", "logprobs", "path"):
        narrow[name] = narrow[name][:, :16]
    with pytest.raises(ValueError, match="emitted: expected at least 17 columns, got 16"):
        grouping.call(op, **narrow, **options)


def test_verify_tree_checks_filtered_logprobs():
    with pytest.raises(TypeError, match="filtered_logprobs: expected dtype float32, got int32"):
        flat.verify_tree(**valid(), seed=0, filtered_logprobs=torch.zeros(2, 17).int())
    with pytest.raises(ValueError, match=r"filtered_logprobs: expected shape \[2, 17\], got"):
        flat.verify_tree(**valid(), seed=0, filtered_logprobs=torch.zeros(2, 18))
