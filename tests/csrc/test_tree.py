"""Draft trees: children by the target's own noise, and the best connected nodes of them."""

import itertools
import math

import pytest
import torch

import tlt_ext
from tests import kit, reference
from tests.grouping import flat
from tlt_ext import Nodes, Status, Tree, tree_capacity

pytestmark = pytest.mark.usefixtures("each_device")
each_device = kit.each_device

SEED, REQUEST = 2**40 + 7, 2**61 + 2**33 + 5
LONGEST = 2_800_000  # draft ids of a row


class Store:
    """A node store with its roots written, and the arrays of one expansion after another."""

    def __init__(self, batch=1, capacity=64, top_k=2, temperature=1.0, position=10):
        self.batch, self.capacity, self.top_k = batch, capacity, top_k
        self.token = torch.full((batch, capacity), 7, dtype=torch.int32)  # scratch: like real ids
        self.parent = self.token.clone()
        self.score = torch.full((batch, capacity), math.nan)
        self.depth = self.token.clone()
        self.token[:, 0], self.parent[:, 0], self.score[:, 0], self.depth[:, 0] = 3, -1, 0, 0
        self.count = torch.ones(batch, dtype=torch.int32)
        self.temperature = torch.full((batch,), float(temperature))
        self.request = REQUEST + torch.arange(batch, dtype=torch.int64)
        self.root_position = torch.full((batch,), position, dtype=torch.int32)
        self.status = torch.zeros(batch, dtype=torch.int32)
        self.frontier = torch.zeros(batch, 1, dtype=torch.int32)
        self.ancestors = None
        self.slot_base = 0

    @property
    def arrays(self):
        return Nodes(self.token, self.parent, self.score, self.depth, self.count)

    @property
    def named_arrays(self):
        return {f"node_{name}": array for name, array in self.arrays._asdict().items()}

    def expand(self, logits, top_k=None, **options):
        """One level; afterwards `frontier`, `row` and `ancestors` are the new ones."""
        shape = (self.batch, self.top_k if top_k is None else top_k)
        frontier = torch.full(shape, -9, dtype=torch.int32)
        row, ancestors = frontier.clone(), torch.full((*shape, 16), 99, dtype=torch.uint8)
        options = {
            "seed": SEED,
            "slot_base": self.slot_base,
            "vocab_size": logits.shape[1],
            "frontier_ancestors": self.ancestors,
            **options,
        }
        arrays = {
            "draft_logits": logits,
            "frontier": self.frontier,
            "temperature": self.temperature,
            "request": self.request,
            "root_position": self.root_position,
            "status": self.status,
            "next_frontier": frontier,
            "next_row": row,
            "next_ancestors": ancestors,
            **self.named_arrays,
        }
        on_device = {n: kit.to_device(x) for n, x in (arrays | options).items()}
        flat.expand_tree(**on_device)
        written = ("next_frontier", "next_row", "next_ancestors", "status", *self.named_arrays)
        outputs = {name: arrays[name] for name in written}
        for name, output in outputs.items():
            output.copy_(on_device[name])
        if self.ancestors is not None:
            self.slot_base += self.frontier.shape[1]
        self.frontier, self.row, self.ancestors = frontier, row, ancestors

    def nodes(self, b=0):
        return [
            dict(
                token=self.token[b, i].item(),
                parent=self.parent[b, i].item(),
                score=self.score[b, i].item(),
                depth=self.depth[b, i].item(),
            )
            for i in range(self.count[b])
        ]

    def fill(self, b, nodes):
        """Writes (token, parent, score) triples behind the root."""
        for i, (token, parent, score) in enumerate(nodes, start=1):
            self.token[b, i], self.parent[b, i], self.score[b, i] = token, parent, score
            self.depth[b, i] = self.depth[b, parent] + 1
        self.count[b] = 1 + len(nodes)

    def select(self, num_verify):
        rows = self.batch * num_verify
        ints = [torch.full((rows,), -5, dtype=torch.int32) for _ in range(4)]
        ancestors = torch.full((rows, 16), 99, dtype=torch.uint8)
        row_start = torch.full((self.batch + 1,), -5, dtype=torch.int32)
        tokens, parents, position, source = ints
        out = (tokens, parents, position, ancestors, source, row_start)
        out = [kit.to_device(x) for x in out]
        self.select_into(out, num_verify)
        return tuple(x.cpu() for x in out)

    def select_into(self, out, num_verify, nodes=None):
        """`out`: tokens, parents, position, ancestors, source and row_start on the device."""
        tokens, parents, position, ancestors, source, row_start = out
        tlt_ext.select_nodes(
            Nodes(*map(kit.to_device, nodes or self.arrays)),
            Tree(tokens, parents, ancestors),
            root_position=kit.to_device(self.root_position),
            position=position,
            row_start=row_start,
            source=source,
            num_verify=num_verify,
        )


def expand_wanted(nodes, frontier, logits, **more):
    """A level by the reference: of the first request of a `Store`, unless `more` says otherwise."""
    own = {"temperature": 1.0, "seed": SEED, "request": REQUEST, "root_position": 10}
    return reference.expand_tree(
        nodes, frontier, logits, **{**own, "vocab_size": logits.shape[1], **more}
    )


def root_only():
    return [dict(token=3, parent=-1, score=0.0, depth=0)]


def assert_same_nodes(got, wanted):
    assert [(n["token"], n["parent"], n["depth"]) for n in got] == [
        (n["token"], n["parent"], n["depth"]) for n in wanted
    ]
    for a, b in zip(got, wanted, strict=True):
        assert a["score"] == pytest.approx(b["score"], abs=2e-5)


@pytest.mark.parametrize("score_temperature", [0.0, 0.7])
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
@pytest.mark.parametrize(("draft_vocab", "top_k"), [(1, 1), (7, 3), (64, 4), (1000, 8), (1031, 1)])
def test_expand_equals_reference(draft_vocab, top_k, temperature, score_temperature):
    """Three levels of three requests; d2t scatters the draft ids over a larger vocabulary."""
    d2t = torch.randperm(5 * draft_vocab, generator=kit.generator(5))[:draft_vocab].int()
    store = Store(3, tree_capacity(3, top_k), top_k, temperature)
    wanted, frontiers = [root_only() for _ in range(3)], [[0]] * 3
    for level in range(3):
        width = store.frontier.shape[1]
        logits = 2 * kit.randn(3 * width, draft_vocab, seed=level)
        store.expand(
            logits, d2t=d2t, vocab_size=5 * draft_vocab, score_temperature=score_temperature
        )
        for b in range(3):
            frontiers[b] = expand_wanted(
                wanted[b],
                frontiers[b],
                logits[b * width :],
                top_k=top_k,
                temperature=temperature,
                request=REQUEST + b,
                vocab_size=5 * draft_vocab,
                d2t=d2t.tolist(),
                score_temperature=score_temperature,
            )
            assert_same_nodes(store.nodes(b), wanted[b])
            padded = frontiers[b] + [-1] * (top_k - len(frontiers[b]))
            assert store.frontier[b].tolist() == padded
    assert store.status.tolist() == [0, 0, 0]


@pytest.mark.parametrize("dtype", kit.DTYPES)
def test_top_k_equals_a_sort_with_ties_by_lower_target_id(dtype):
    """Fault 14: few distinct values, K up to 128, strided rows."""
    logits = kit.randn(4, 1040, seed=0).mul(2).round().to(dtype)[:, :1000]
    d2t = torch.randperm(1000, generator=kit.generator(1)).int()
    for top_k in (1, 5, 128):
        store = Store(4, 1 + top_k, top_k, temperature=0.0)
        store.expand(logits, d2t=d2t)
        for b in range(4):
            order = sorted(range(1000), key=lambda i: (-logits[b, i].item(), d2t[i].item()))
            assert store.token[b, 1:].tolist() == [d2t[i].item() for i in order[:top_k]]


@pytest.mark.parametrize("top_k", [4, 32, 100])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_where_every_id_has_a_chance(top_k, temperature):
    """Equal logits: more candidates than a warp holds, ties by the lower target id."""
    store, wanted = Store(1, 1 + top_k, top_k, temperature), root_only()
    logits = torch.zeros(1, 5000)
    d2t = torch.arange(5000).flip(0).int()
    store.expand(logits, d2t=d2t)
    expand_wanted(wanted, [0], logits, top_k=top_k, temperature=temperature, d2t=d2t.tolist())
    assert_same_nodes(store.nodes(), wanted)


@pytest.mark.sanitize  # launches every kernel of expand_tree
@pytest.mark.parametrize(
    ("draft_vocab", "batch", "reduced"),
    [
        (1, 1, ""),
        (1000, 3, "scattered"),
        (16384, 1, "sorted"),
        (2500, 70, "sorted"),
        (9000, 40, ""),
    ],
)
@pytest.mark.parametrize("score_temperature", [0.0, 1.0])
def test_a_chain_takes_the_first_child_of_a_tree(draft_vocab, batch, reduced, score_temperature):
    """One row and one child: the score is the parent's. Broken and greedy rows are among them.

    The parent is any of five nodes. The drafter slot announces depth 4, so node 4 is the expected
    parent, with another depth.
    """
    d2t = None
    if reduced:
        d2t = torch.randperm(2 * draft_vocab, generator=kit.generator(2))[:draft_vocab].int()
        d2t[draft_vocab // 3] = 2 * draft_vocab  # no token
    if reduced == "sorted":
        d2t = d2t.sort().values
    logits = 2 * kit.randn(batch, draft_vocab, seed=batch)
    logits[::3, 1::5] = math.nan
    logits[1::5] = -math.inf
    stores = []
    for top_k in (1, 2):
        store = Store(batch, 8, top_k)
        store.temperature[::4] = 0.0
        for b in range(batch):
            store.fill(b, [(5, 0, -0.5), (6, 1, -1.5), (7, 1, -2.5), (8, 3, -3.5)])
        store.count[2::7] = 8  # no room
        store.frontier[:, 0] = (torch.arange(batch) + 4) % 5
        store.frontier[3::11] = -1
        parent = store.frontier.clamp_min(0).long()
        parent_score = store.score.gather(1, parent)[:, 0]
        store.ancestors = torch.arange(16 * batch).to(torch.uint8).view(batch, 1, 16)
        store.slot_base = 3
        options = {"d2t": d2t, "vocab_size": (1 + bool(reduced)) * draft_vocab}
        store.expand(logits, score_temperature=score_temperature, **options)
        stores.append(store)
    chain, tree = stores
    kept = tree.count.clamp(max=6).where(tree.count < 8, 8)
    found = kept == 6
    assert torch.equal(chain.count, kept) and found.any() and torch.equal(chain.status, tree.status)
    for name in ("token", "parent", "depth"):
        assert torch.equal(getattr(chain, name)[found, :6], getattr(tree, name)[found, :6])
    assert torch.equal(chain.score[found, 5], parent_score[found])
    assert chain.score[~found, 5].isnan().all()
    assert torch.equal(chain.frontier[:, 0], torch.where(found, 5, -1))
    assert torch.equal(chain.row, tree.row[:, :1])
    assert torch.equal(chain.ancestors, tree.ancestors[:, :1])


def test_rows_with_one_child_each_are_ranked():
    """Several frontier rows are no chain."""
    logits = 2 * kit.randn(2, 300, seed=0)
    store = Store(1, 8, 1)
    store.fill(0, [(5, 0, -0.5), (6, 0, -1.5)])
    store.frontier = torch.tensor([[1, 2]], dtype=torch.int32)
    store.ancestors = torch.zeros(1, 2, 16, dtype=torch.uint8)
    wanted = store.nodes()
    store.expand(logits)
    expand_wanted(wanted, [1, 2], logits, top_k=1)
    assert_same_nodes(store.nodes(), wanted)


@pytest.mark.parametrize("rows", [9, 40])
def test_more_frontier_rows_than_one_wave_takes(rows):
    """A level's nodes are those of each of its rows alone, whatever else is expanded beside it."""
    top_k, logits = 3, 2 * kit.randn(rows, 300, seed=rows)
    store = Store(1, 1 + rows + rows * top_k, top_k)
    store.fill(0, [(i, 0, -0.1 * (i % 7)) for i in range(rows)])
    store.frontier = torch.arange(1, rows + 1, dtype=torch.int32)[None]
    store.ancestors = torch.arange(16 * rows).to(torch.uint8).view(1, rows, 16)
    first = store.count.item()
    store.expand(logits)
    assert store.count.item() == first + rows * top_k
    for f in range(rows):
        alone = Store(1, 1 + rows + top_k, top_k)
        alone.fill(0, [(i, 0, -0.1 * (i % 7)) for i in range(rows)])
        alone.frontier = torch.tensor([[f + 1]], dtype=torch.int32)
        alone.expand(logits[f : f + 1])
        for name in ("token", "parent", "score", "depth"):
            begin = first + f * top_k
            of_all, of_one = getattr(store, name)[0], getattr(alone, name)[0]
            assert kit.same_bits(of_all[begin : begin + top_k], of_one[first : first + top_k])


@pytest.mark.parametrize("score_temperature", [0.0, 1.0])  # the latter sums all scores
def test_blocks_out_of_the_noise_are_skipped_without_a_trace(score_temperature):
    """A peaked row: what the noise cannot lift is never scored, and the result is the same."""
    logits = torch.full((1, 4096), -40.0)
    logits[0, 4000:4010] = torch.linspace(0, 3, 10)
    logits[0, :3] = torch.tensor([2.0, -21.0, 1.0])
    store, wanted = Store(1, 9, 8), root_only()
    store.expand(logits, score_temperature=score_temperature)
    expand_wanted(wanted, [0], logits, top_k=8, score_temperature=score_temperature)
    assert_same_nodes(store.nodes(), wanted)


def test_noise_is_the_one_that_sample_uses():
    """With the target's own logits as draft logits, the first child is the sampled token."""
    logits = 2 * kit.randn(16, 777, seed=3)
    store = Store(16, 4, 3)
    store.temperature = torch.tensor([0.0, 0.6, 1.0, 1.3]).repeat(4)
    store.root_position = torch.arange(16, dtype=torch.int32) * 1000
    store.expand(logits)
    tokens, status = torch.zeros(16, dtype=torch.int32), torch.zeros(16, dtype=torch.int32)
    flat.sample(
        logits,
        temperature=store.temperature,
        top_k=torch.zeros(16, dtype=torch.int32),
        top_p=torch.ones(16),
        request=store.request,
        position=store.root_position + 1,
        tokens=tokens,
        logprobs=torch.empty(16),
        status=status,
        seed=SEED,
    )
    assert store.token[:, 1].tolist() == tokens.tolist()


def test_greedy_rows_beside_sampled_rows_and_a_batch_of_one():
    """Fault 5 and fault 8: each row by its own temperature, the same bits alone."""
    logits = kit.randn(4, 333, seed=0)
    store = Store(4, 6, 5)
    store.temperature = torch.tensor([0.0, 1.0, 0.0, 0.3])
    store.expand(logits)
    for b in (0, 2):
        assert store.token[b, 1:6].tolist() == logits[b].topk(5).indices.tolist()
    for b in range(4):
        alone = Store(1, 6, 5)
        alone.temperature, alone.request = store.temperature[b : b + 1], store.request[b : b + 1]
        alone.expand(logits[b : b + 1])
        assert kit.same_bits(alone.token[0], store.token[b])
        assert kit.same_bits(alone.score[0], store.score[b])


@pytest.mark.parametrize("score_temperature", [0.0, 0.5])
@pytest.mark.parametrize("vocab", [3, 20_001])
def test_scores_count_all_ids_wherever_their_logits_lie(vocab, score_temperature):
    """Groups of eight ids have references of their own, multiples of 16: rows at any offset from
    them, with groups far below others, groups of -inf, and mass in ids far below the best."""
    offsets = torch.arange(-40.0, 41.0, 3.9)[:, None]
    logits = 3 * kit.randn(len(offsets), vocab, seed=0) + offsets
    group = torch.arange(vocab) // 8
    logits[::3] -= 13.0 * (group % 6)
    logits[1] = -8.1 * (score_temperature or 1.0)
    logits[1, vocab // 2] *= -1
    logits[2:, group % 5 == 1] = -math.inf
    store = Store(len(logits), 4, 3, temperature=0.0)
    store.expand(logits, score_temperature=score_temperature)
    wanted = (logits.double() / (score_temperature or 1.0)).log_softmax(1)
    wanted = wanted.gather(1, store.token[:, 1:].long())
    assert (store.score[:, 1:] - wanted).abs().max() < 2e-5
    for b in (1, 3, 7):
        alone = Store(1, 4, 3, temperature=0.0)
        alone.expand(logits[b : b + 1], score_temperature=score_temperature)
        assert kit.same_bits(alone.score[0], store.score[b])


@pytest.mark.parametrize("logit", [8.0, 15.9])  # the farthest above its reference, and below
def test_scores_of_the_longest_row(logit):
    """The sums do not overflow: their terms are at most exp(8), as with logits of 8."""
    store = Store(1, 3, 2, temperature=0.0)
    store.expand(torch.full((1, LONGEST), logit))
    assert store.score[0, 1:3].tolist() == pytest.approx([-math.log(LONGEST)] * 2, abs=2e-5)


@pytest.mark.parametrize(
    ("score_temperature", "logits", "wanted"),
    [
        (0.0, [1.0, 3e38, -3e38], [0.0, -3e38, -math.inf]),
        (0.0, [-3e38, -math.inf, -3e38], [-math.log(2)] * 2),
        (1e-6, [1e33, 1.0, 2e33, -1e33], [0.0, 0.0, -math.inf, -math.inf]),
        (1e-6, [-1e33, -2e33], [0.0, 0.0]),
        (1e6, [3e38, -3e38, 0.0], [0.0, -3e32, -6e32]),
    ],
)
def test_scores_of_values_near_overflow(score_temperature, logits, wanted):
    """No score is NaN: those of values that overflow are 0 or -inf."""
    store = Store(1, 5, 4, temperature=0.0)
    store.expand(torch.tensor([logits]), score_temperature=score_temperature)
    assert store.count.item() == 1 + len(wanted) and store.status.item() == 0
    assert store.score[0, 1 : 1 + len(wanted)].tolist() == pytest.approx(wanted)
    frontier = list(range(1, 1 + len(wanted)))
    assert store.frontier[0].tolist() == frontier + [-1] * (4 - len(wanted))


def test_children_never_score_above_their_parent():
    store = Store(2, tree_capacity(6, 4), 4, temperature=0.5)
    for level in range(6):
        width = store.frontier.shape[1]
        store.expand(kit.randn(2 * width, 50, seed=level) * 20, score_temperature=level % 2 * 0.5)
    for b in range(2):
        nodes = store.nodes(b)
        assert len(nodes) == tree_capacity(6, 4)
        assert all(n["score"] <= nodes[n["parent"]]["score"] for n in nodes[1:])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_and_infinite_draft_logits_never_become_children(temperature):
    """Fault 4: a broken draft row counts as useless."""
    logits = kit.randn(3, 100, seed=0)
    logits[0, ::2] = math.nan
    logits[0, 1] = math.inf
    logits[1] = math.nan
    logits[2, 4:] = -math.inf
    store = Store(3, 11, 10, temperature)
    store.expand(logits)
    assert store.count.tolist() == [11, 1, 5]
    assert store.status.tolist() == [Status.NAN_DRAFT, Status.NAN_DRAFT, 0]
    assert all(t % 2 == 1 and t > 1 for t in store.token[0, 1:].tolist())
    assert store.score[0, :11].isfinite().all()
    assert store.frontier[1].tolist() == [-1] * 10 and store.row[1].tolist() == [0] * 10
    assert sorted(store.token[2, 1:5].tolist()) == [0, 1, 2, 3]
    assert store.score[2, 1:5].exp().sum().item() == pytest.approx(1.0, abs=1e-5)


def test_ids_outside_the_vocabulary_are_neither_read_nor_proposed():
    """Fault 16: head padding; and d2t entries that point nowhere."""
    logits = -1 - kit.randn(1, 128, seed=0).abs()
    logits[0, 100:] = math.nan
    store = Store(1, 5, 4)
    store.expand(logits, vocab_size=100)
    assert store.status.item() == 0 and max(store.token[0, 1:].tolist()) < 100
    store = Store(1, 5, 4)
    d2t = torch.tensor([0, -1, 100, 99, 2**31 - 1], dtype=torch.int32)
    store.expand(torch.zeros(1, 5), d2t=d2t, vocab_size=100)
    assert store.status.item() == Status.BAD_TOKEN
    assert sorted(store.token[0, 1:3].tolist()) == [0, 99] and store.count.item() == 3
    assert store.score[0, 1:3].tolist() == pytest.approx([-math.log(2)] * 2)


def test_inert_frontier_rows_and_empty_requests():
    """Fault 26 and fault 32: -1 rows read nothing, a request of them is untouched."""
    store = Store(2, 20, 2)
    store.expand(kit.randn(2, 9, seed=0))
    store.frontier[0, 0], store.frontier[1] = -1, -1
    store.count[1] = -12345  # never looked at
    logits = kit.randn(4, 9, seed=1)
    logits[[0, 2, 3]] = math.nan
    store.expand(logits)
    assert store.status.tolist() == [0, 0]
    assert store.count.tolist() == [5, -12345]
    assert store.row.tolist() == [[1, 1], [0, 0]]
    assert sorted(store.frontier[0].tolist()) == [3, 4]
    assert store.frontier[1].tolist() == [-1, -1]
    assert store.parent[0, 3:5].tolist() == [store.parent[0, 3].item()] * 2
    empty = Store(0, 8, 2)
    empty.expand(torch.empty(0, 9))


@pytest.mark.parametrize("top_k", [1, 2])
def test_bad_stores_are_flagged_and_nothing_is_written_past_them(top_k):
    """Fault 9: garbage counts and frontier entries."""
    for count in (0, -1, 9 - top_k, 2**31 - 1):
        store = Store(1, 8, top_k)
        store.count[0] = count
        before = store.token.clone()
        store.expand(kit.randn(1, 9, seed=0))
        assert store.status.item() == Status.BAD_LENGTH
        assert store.count.item() == count and torch.equal(store.token, before)
        assert store.frontier.tolist() == [[-1] * top_k]
    for damage in ("past", "depth", "score"):
        store = Store(1, 8, top_k)
        if damage == "past":
            store.frontier[0, 0] = 1
        elif damage == "depth":
            store.depth[0, 0] = 16
        else:
            store.score[0, 0] = math.nan
        store.expand(kit.randn(1, 9, seed=0))
        assert store.status.item() == Status.BAD_TREE and store.count.item() == 1


def test_ancestors_of_the_next_frontier_by_hand():
    """Level 1: none (the root is committed). Level l: l - 1 slots, the parent's last."""
    store = Store(1, 64, 2, temperature=0.0)
    store.expand(torch.tensor([[0.0, 2.0, 1.0]]))
    assert store.frontier.tolist() == [[1, 2]] and store.row.tolist() == [[0, 0]]
    assert store.ancestors.count_nonzero() == 0
    # Row 0 (node 1) is flat and row 1 (node 2) is sure: the best new node is under node 2.
    store.expand(torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 30.0]]))
    assert store.frontier.tolist() == [[5, 3]]
    assert store.row.tolist() == [[1, 0]]
    assert store.ancestors[0, :, 0].tolist() == [1, 0]  # slots of nodes 2 and 1
    store.expand(torch.tensor([[0.0, 0.0, 30.0], [0.0, 0.0, 0.0]]))
    assert store.frontier.tolist() == [[7, 9]]
    assert store.ancestors[0, :, :2].tolist() == [[1, 2], [0, 3]]
    assert store.ancestors[0, :, 2:].count_nonzero() == 0


def test_depth_sixteen_and_no_deeper():
    store = Store(1, 32, 1, temperature=0.0)
    for level in range(16):
        store.expand(torch.tensor([[0.0, 1.0]]))
        assert store.ancestors[0, 0, :level].tolist() == list(range(level))
    assert store.count.item() == 17
    store.expand(torch.tensor([[0.0, 1.0]]))
    assert store.count.item() == 17 and store.status.item() == Status.BAD_TREE


def brute_force(nodes, size):
    """The connected set of `size` nodes with the largest total probability."""
    sets = (
        (0, *rest)
        for rest in itertools.combinations(range(1, len(nodes)), size - 1)
        if all(nodes[i]["parent"] in (0, *rest) for i in rest)
    )
    return max(sets, key=lambda chosen: sum(math.exp(nodes[i]["score"]) for i in chosen))


@pytest.mark.parametrize("seed", range(4))
def test_expand_then_select_is_the_best_connected_tree(seed):
    store = Store(1, tree_capacity(3, 2), 2)
    for level in range(3):
        width = store.frontier.shape[1]
        store.expand(kit.randn(width, 40, seed=10 * seed + level) * 2)
    nodes = store.nodes()
    for size in (1, 2, 5, 8, 11):
        *_, source, row_start = store.select(size)
        assert row_start.tolist() == [0, size]
        assert sorted(source[:size].tolist()) == list(brute_force(nodes, size))


def test_select_by_hand():
    """Rows, parents, positions and ancestors of three packed requests, one of them empty."""
    store = Store(3, 8, position=100)
    #             1          2          3          4          5
    store.fill(0, [(11, 0, -1.0), (12, 0, -2.0), (13, 1, -1.5), (14, 2, -2.0), (15, 3, -9.0)])
    store.count[1] = 0
    store.fill(2, [(21, 0, -0.5), (22, 1, -0.5)])
    store.root_position[2] = 7
    tokens, parents, position, ancestors, source, row_start = store.select(5)
    assert row_start.tolist() == [0, 5, 5, 8]
    assert source[:8].tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert tokens[:8].tolist() == [3, 11, 12, 13, 14, 3, 21, 22]
    assert parents[:8].tolist() == [-1, 0, 0, 1, 2, -1, 0, 1]
    assert position[:8].tolist() == [100, 101, 101, 102, 102, 7, 8, 9]
    wanted = [[], [0], [0], [0, 1], [0, 2], [], [0], [0, 1]]
    for row, slots in enumerate(wanted):
        assert ancestors[row].tolist() == slots + [0] * (16 - len(slots))
    assert tokens[8:].tolist() == [-5] * 7 and ancestors[8:].eq(99).all()


def test_select_drops_duplicate_siblings_and_their_children():
    """Fault 10: of siblings with one token, the better one stays."""
    store = Store(1, 8)
    store.fill(0, [(5, 0, -2.0), (5, 0, -1.0), (5, 2, -1.5), (6, 1, -2.0), (6, 0, -8.0)])
    tokens, parents, *_, source, row_start = store.select(6)
    assert row_start.tolist() == [0, 4]
    assert source[:4].tolist() == [0, 2, 5, 3]
    assert tokens[:4].tolist() == [3, 5, 6, 5] and parents[:4].tolist() == [-1, 0, 0, 1]


def test_select_breaks_ties_by_store_index():
    store = Store(1, 8)
    store.fill(0, [(1, 0, -1.0), (2, 0, -1.0), (3, 1, -1.0), (4, 0, -1.0), (5, 2, -1.0)])
    assert store.select(4)[4][:4].tolist() == [0, 1, 2, 3]
    assert store.select(5)[4][:5].tolist() == [0, 1, 2, 4, 3]


@pytest.mark.parametrize("num_verify", [1, 31, 32, 33, 63, 64, 65, 127, 128])
def test_select_is_exact_at_word_edges(num_verify):
    """Fault 27: random trees with ties and duplicates; fault 22: packed over requests."""
    store = Store(3, 300)
    random = kit.generator(num_verify)
    for b, size in enumerate((299, num_verify - 1, 150)):
        triples, scores, depths = [], [0.0], [0]
        for i in range(1, size + 1):
            parent = int(torch.randint(max(0, i - 40), i, (), generator=random))
            while depths[parent] == 16:
                parent = int(torch.randint(0, i, (), generator=random))
            step = int(torch.randint(0, 3, (), generator=random))
            depths.append(depths[parent] + 1)
            scores.append(scores[parent] - step)
            triples.append((int(torch.randint(0, 30, (), generator=random)), parent, scores[-1]))
        store.fill(b, triples)
    tokens, parents, position, ancestors, source, row_start = store.select(num_verify)
    for b in range(3):
        begin, end = row_start[b].item(), row_start[b + 1].item()
        want_source, want_parents, want_ancestors = reference.select_nodes(
            store.nodes(b), num_verify
        )
        assert source[begin:end].tolist() == want_source
        assert parents[begin:end].tolist() == want_parents
        assert torch.equal(tokens[begin:end], store.token[b, want_source])
        assert torch.equal(position[begin:end], 10 + store.depth[b, want_source])
        for row, slots in enumerate(want_ancestors):
            assert ancestors[begin + row, : len(slots)].tolist() == slots


def random_store(capacity, sizes, seed, reach=40):
    """Requests of given sizes: random links, few distinct scores and tokens."""
    store = Store(len(sizes), capacity)
    random = kit.generator(seed)
    for b, size in enumerate(sizes):
        back, step, token = torch.randint(1, 1 << 20, (3, size + 1), generator=random).tolist()
        triples, scores, depths = [], [0.0], [0]
        for i in range(1, size + 1):
            parent = max(0, i - 1 - back[i] % reach)
            parent = 0 if depths[parent] == 16 else parent
            depths.append(depths[parent] + 1)
            scores.append(scores[parent] - step[i] % 3)
            triples.append((token[i] % 30, parent, scores[-1]))
        store.fill(b, triples)
    return store


def assert_selects_as_reference(store, num_verify):
    tokens, parents, position, ancestors, source, row_start = store.select(num_verify)
    assert row_start[0] == 0
    for b in range(store.batch):
        begin, end = row_start[b].item(), row_start[b + 1].item()
        wanted = ([], [], [])
        if store.count[b] > 0:
            wanted = reference.select_nodes(store.nodes(b), num_verify)
        assert source[begin:end].tolist() == wanted[0]
        assert parents[begin:end].tolist() == wanted[1]
        assert torch.equal(tokens[begin:end], store.token[b, wanted[0]])
        assert torch.equal(position[begin:end], 10 + store.depth[b, wanted[0]])
        filled = [slots + [0] * (16 - len(slots)) for slots in wanted[2]]
        assert ancestors[begin:end].tolist() == filled
    rest = row_start[-1].item()
    for array, untouched in (
        (tokens, -5),
        (parents, -5),
        (position, -5),
        (ancestors, 99),
        (source, -1),
    ):
        assert array[rest:].eq(untouched).all()


@pytest.mark.parametrize(("capacity", "size"), [(700, 600), (1100, 1025), (8193, 1500)])
def test_select_of_large_stores(capacity, size):
    """More nodes than a block has threads, and stores whose tokens stay where they are."""
    assert_selects_as_reference(random_store(capacity, [size, size // 2], seed=size), 24)


def test_select_packs_more_rows_than_one_round_takes():
    sizes = [(7 * b) % 150 for b in range(40)]
    store = random_store(151, sizes, seed=1)
    store.count[::9] = 0
    assert_selects_as_reference(store, 128)


def test_select_of_no_requests():
    assert Store(0, 4).select(3)[-1].tolist() == [0]


def test_select_writes_ancestors_at_any_address():
    store = random_store(60, [59], seed=2)
    aligned = store.select(20)
    ints = [torch.zeros_like(array) for array in aligned]
    memory = torch.zeros(20 * 16 + 1, dtype=torch.uint8)
    ints = [kit.to_device(x) for x in ints]
    ints[3] = kit.to_device(memory)[1:].view(20, 16)
    store.select_into(ints, 20)
    assert torch.equal(ints[3].cpu(), aligned[3])


def test_select_leaves_out_damaged_nodes():
    """Fault 9: cycles, links past the end, wrong depths, NaN scores and garbage counts."""
    store = Store(1, 10)
    store.fill(0, [(i, 0, -1.0) for i in range(1, 9)])
    store.parent[0, 1] = 1
    store.parent[0, 2] = -1
    store.parent[0, 3] = 2**31 - 1
    store.depth[0, 4] = 17
    store.depth[0, 5] = 2
    store.score[0, 6] = math.nan
    *_, source, row_start = store.select(8)
    assert source[: row_start[1]].tolist() == [0, 7, 8]
    for count in (-1, 11, 2**31 - 1):
        store.count[0] = count
        assert store.select(8)[-1].tolist() == [0, 0]


def test_expand_checks_its_arguments():
    def expand(logits=None, top_k=2, prepare=lambda store: None, **options):
        store = Store(1, 8, 2)
        prepare(store)
        store.expand(torch.zeros(1, 5) if logits is None else logits, top_k, **options)

    def put(name, value):
        return lambda store: setattr(store, name, value)

    with pytest.raises(TypeError, match="expand_tree: draft_logits: expected dtype float32 or"):
        expand(torch.zeros(1, 5, dtype=torch.int32))
    with pytest.raises(ValueError, match="draft_logits: expected a contiguous last axis"):
        expand(torch.zeros(5, 2).t()[:1])
    with pytest.raises(ValueError, match=r"draft_logits: expected shape \[1, \*\], got \[2, 5\]"):
        expand(torch.zeros(2, 5))
    with pytest.raises(ValueError, match="draft_logits: expected at most 2800000 .*, got 2800001"):
        expand(torch.zeros(1, LONGEST + 1))
    with pytest.raises(TypeError, match="frontier.node: expected dtype int32, got int64"):
        expand(prepare=put("frontier", torch.zeros(1, 1, dtype=torch.int64)))
    with pytest.raises(TypeError, match="request: expected dtype int64, got int32"):
        expand(prepare=put("request", torch.zeros(1, dtype=torch.int32)))
    with pytest.raises(TypeError, match="d2t: expected dtype int32, got int64"):
        expand(d2t=torch.arange(5))
    with pytest.raises(ValueError, match=r"d2t: expected shape \[5\], got \[4\]"):
        expand(d2t=torch.arange(4, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"frontier.ancestors: expected shape \[1, 1, 16\]"):
        expand(frontier_ancestors=torch.zeros(1, 1, 8, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"nodes.score: expected shape \[1, 8\], got \[1, 7\]"):
        expand(prepare=put("score", torch.zeros(1, 7)))
    with pytest.raises(ValueError, match="nodes.depth: expected a contiguous array"):
        expand(prepare=put("depth", torch.zeros(1, 16, dtype=torch.int32)[:, ::2]))
    with pytest.raises(ValueError, match="nodes.token: expected room for 9 nodes a request, got 8"):
        expand(top_k=8)
    with pytest.raises(ValueError, match="top_k .*: expected 1 to 128, got 129"):
        expand(top_k=129)
    with pytest.raises(ValueError, match="top_k .*: expected 1 to 128, got 0"):
        expand(top_k=0)
    for base in (256, -1, 2**63 - 1):  # the last one overflows in a sum
        match = f"slot_base: expected drafter slots 0 to 255, got 1 slots from {base}"
        with pytest.raises(ValueError, match=match):
            expand(slot_base=base)
    with pytest.raises(ValueError, match="score_temperature: expected 0 or 1e-6 to 1e6, got -1"):
        expand(score_temperature=-1.0)
    with pytest.raises(ValueError, match="score_temperature: .* got nan"):
        expand(score_temperature=math.nan)
    with pytest.raises(ValueError, match="vocab_size: expected 1 or more, got 0"):
        expand(vocab_size=0)


def test_select_checks_its_arguments():
    store = Store(1, 8)
    with pytest.raises(ValueError, match="select_nodes: num_verify: expected 1 to 128, got 129"):
        store.select(129)  # fault 22
    with pytest.raises(ValueError, match="num_verify: expected 1 to 128, got 0"):
        store.select(0)
    no_room = [array[:, :0] for array in store.arrays[:4]]
    with pytest.raises(ValueError, match="nodes.token: expected room for 1 nodes a request, got 0"):
        store.select_into(map(kit.to_device, store.select(4)), 4, (*no_room, store.count))
    store.root_position = store.root_position.long()
    with pytest.raises(TypeError, match="root_position: expected dtype int32, got int64"):
        store.select(4)
    store = Store(1, 8)
    out = list(store.select(4))
    out[3] = out[3][:3]
    with pytest.raises(ValueError, match=r"ancestors: expected shape \[4, 16\], got \[3, 16\]"):
        store.select_into(map(kit.to_device, out), 4)
