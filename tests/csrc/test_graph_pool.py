"""Executable graphs: one launch that loops until the device says stop, costs, eviction."""

import dataclasses
import time

import pytest
import torch

import tlt_ext
from tests import kit
from tlt_ext import (
    Control,
    GraphError,
    GraphPool,
    PassRing,
    Requests,
    Rows,
    Sampling,
    StopReason,
    TokenTable,
    Tree,
    VerifyOutput,
)

VOCAB, WIDTH, LENGTH = 1000, 17, 4096
INT = {"dtype": torch.int32, "device": "cuda"}


def needs(condition: bool, why: str):
    return pytest.mark.skipif(not condition, reason=why)


on_gpu = [kit.gpu, kit.needs_gpu]
loops = [*on_gpu, needs(GraphPool.supports_loop(), "no conditional nodes here")]


@dataclasses.dataclass
class Bigram:
    """A model whose next token depends on the last one alone, decoded by the real ops.

    A pass is `verify_tree` on roots (clusters, dependent launches), then `advance_batch`.
    """

    batch: int
    ring: PassRing
    work: int = 0  # side of matrix products that make a pass slow

    def __post_init__(self):
        rows = self.batch
        self.table = kit.randn(VOCAB, VOCAB, seed=1).cuda()
        self.logits = torch.empty(rows, VOCAB, device="cuda")
        self.last_token, self.context_len, self.status, self.num_new = torch.zeros(
            4, rows, **INT
        ).unbind()
        self.num_emitted, self.finish = torch.zeros(2, rows, **INT).unbind()
        self.remaining, self.granted = torch.full((2, rows), LENGTH, **INT).unbind()
        self.slot = torch.arange(rows, **INT)
        self.tokens = torch.zeros(rows, LENGTH, **INT)
        self.emitted, self.path = torch.zeros(2, rows, WIDTH, **INT).unbind()
        self.logprobs = torch.zeros(rows, WIDTH, device="cuda")
        self.output = VerifyOutput(
            self.emitted, self.logprobs, self.num_emitted, self.finish, self.path
        )
        self.parents = torch.full((rows,), -1, **INT)
        self.row_start = torch.arange(rows + 1, **INT)
        self.temperature = torch.ones(rows, device="cuda")
        self.top_k = torch.zeros(rows, **INT)
        self.top_p = torch.ones(rows, device="cuda")
        self.request = torch.arange(rows, device="cuda")
        self.stop_ids = torch.full((rows, 1), -1, **INT)
        size = tlt_ext.sampling_workspace_bytes(rows)
        self.workspace = torch.zeros(size, dtype=torch.uint8, device="cuda")
        self.control = torch.zeros(8, **INT)
        self.square = torch.zeros(2, self.work, self.work, device="cuda") if self.work else None

    def reset(self, limits: list[int], seed: int = 0) -> None:
        for array in (self.context_len, self.status, self.tokens, self.emitted):
            array.zero_()
        self.remaining.copy_(torch.tensor(limits))
        self.granted.fill_(LENGTH)
        self.slot.copy_(torch.arange(self.batch))  # a finished request has slot -1
        self.request.copy_(torch.arange(self.batch) + 1000 * seed)
        self.last_token.copy_(torch.arange(self.batch) + seed)

    def step(self) -> None:
        if self.square is not None:
            for _ in range(8):
                torch.mm(self.square[0], self.square[0], out=self.square[1])
        torch.index_select(self.table, 0, self.last_token, out=self.logits)
        tlt_ext.verify_tree(
            self.logits,
            Tree(self.last_token, self.parents),
            Rows(self.row_start, self.context_len, self.status),
            Sampling(self.temperature, self.request, self.top_k, self.top_p),
            self.output,
            stop_ids=self.stop_ids,
            limit=self.remaining,
            seed=5,
            workspace=self.workspace,
        )
        self.context_len.add_(self.num_emitted)
        tlt_ext.advance_batch(
            self.output,
            TokenTable(self.tokens, self.slot),
            Requests(
                self.context_len,
                self.status,
                self.last_token,
                self.remaining,
                self.num_new,
                self.granted,
            ),
            self.control,
            self.ring,
            lookahead=1,
        )

    def capture(self, *calls) -> list[torch.cuda.CUDAGraph]:
        """A graph of each call, by default of one pass; nothing of it is run."""
        graphs = []
        for call in calls or (self.step,):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                call()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            with torch.cuda.graph(graph):
                call()
            graphs.append(graph)
        return graphs

    def run(self, go, limit: int, ends: int = 1) -> list[tuple]:
        """Arms, calls `go` until passes stop, and returns what came through the ring."""
        begin = self.ring.sequence
        tlt_ext.arm_passes(self.control, self.ring, limit=limit, ends=ends)
        while not self.ring.reason:
            go()
            torch.cuda.synchronize()
        return self.ring.collect(begin, self.ring.sequence, self.batch)


def add(
    pool: GraphPool,
    key: str,
    graphs: list[torch.cuda.CUDAGraph],
    model: Bigram,
    loop: bool,
    priority: int = 0,
):
    """Adds graphs, which must live that long and no longer."""
    parts = [graph.raw_cuda_graph() for graph in graphs]
    return pool.add(key, parts, model.control, loop=loop, priority=priority)


def bigram(batch=3, passes=64, **options) -> Bigram:
    return Bigram(batch, PassRing(passes, batch, pinned=True), **options)


@pytest.mark.parametrize(
    "loop", [pytest.param(True, marks=loops), pytest.param(False, marks=on_gpu)]
)
def test_a_graph_gives_what_single_calls_give(loop):
    """One launch, or one a pass: the same tokens and log-probs as op by op, with every limit."""
    model, pool = bigram(), GraphPool()
    graphs = model.capture()
    add(pool, "pass", graphs, model, loop)
    del graphs  # the pool has its own
    for seed, limits in enumerate([[40, 50, 60], [9, 7, 30], [100, 100, 100], [1, 1, 1]]):
        model.reset(limits, seed)
        expected = model.run(model.step, 64)
        tokens, reason = model.tokens.clone(), model.ring.reason
        model.reset(limits, seed)
        launches = pool.usage()["pass"].launches
        assert model.run(lambda: pool.launch("pass"), 64) == expected
        assert torch.equal(model.tokens, tokens)
        assert model.ring.reason == reason
        assert model.control[Control.PASSES] == min(64, *limits)
        launches = pool.usage()["pass"].launches - launches
        assert launches == (1 if loop else min(64, *limits))
        times = torch.from_numpy(model.ring.time_ns.copy())
        assert model.ring.begin_ns[0] <= times.max()


@pytest.mark.parametrize("loop", [pytest.param(True, marks=loops)])
def test_the_host_reads_and_stops_a_running_loop(loop):
    model, pool = bigram(passes=4000, work=2048), GraphPool()
    add(pool, "pass", model.capture(), model, loop)
    model.reset([4000] * 3)
    begin = model.ring.sequence
    tlt_ext.arm_passes(model.control, model.ring, limit=4000)
    pool.launch("pass")
    deadline = time.monotonic() + 60
    while model.ring.sequence < begin + 12 and time.monotonic() < deadline:
        pass
    early, reason = model.ring.collect(begin, begin + 12, 3), model.ring.reason
    assert reason == 0, "the loop had ended before it was read"
    assert model.ring.wait(0.0) == 0
    model.ring.request_stop()
    assert model.ring.wait(60.0) == StopReason.STOPPED
    torch.cuda.synchronize()
    assert 12 <= model.control[Control.PASSES] < 4000
    for (tokens, _, counts, _, _), stored in zip(early, model.tokens.tolist(), strict=True):
        assert counts == [1] * 12 and tokens == stored[1:13]
    times = model.ring.time_ns[begin : begin + 12]
    assert (times[1:] > times[:-1]).all() and times[0] > model.ring.begin_ns[0]


@pytest.mark.parametrize("loop", [pytest.param(True, marks=loops)])
def test_pages_and_finished_requests_end_a_loop(loop):
    model, pool = bigram(), GraphPool()
    add(pool, "pass", model.capture(), model, loop)
    model.reset([64] * 3)
    model.granted[1] = 20
    model.run(lambda: pool.launch("pass"), 64)
    assert model.ring.reason == StopReason.PAGES
    assert model.context_len.tolist() == [20] * 3  # the next pass would write slot 20
    model.granted[1] = LENGTH
    model.run(lambda: pool.launch("pass"), 64)
    assert model.ring.reason == StopReason.FINISHED
    assert model.finish.tolist() == [2] * 3
    model.stop_ids[2] = model.tokens[2, 1]
    model.reset([64] * 3)
    model.run(lambda: pool.launch("pass"), 64)
    assert model.control[Control.PASSES] == 1 and model.finish.tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    "loop", [pytest.param(True, marks=loops), pytest.param(False, marks=on_gpu)]
)
@pytest.mark.parametrize("ends", [1, 2, 3])
def test_passes_go_on_without_those_that_ended(loop, ends):
    """`verify_tree` has nothing left to emit for them: what they had stays as it was."""
    model, pool, limits = bigram(), GraphPool(), [4, 30, 11]
    add(pool, "pass", model.capture(), model, loop)
    model.reset(limits)
    expected = model.run(model.step, 64, ends)
    tokens, lengths = model.tokens.clone(), model.context_len.tolist()
    model.reset(limits)
    assert model.run(lambda: pool.launch("pass"), 64, ends) == expected
    passes = sorted(limits)[ends - 1]
    assert lengths == model.context_len.tolist() == [min(passes, n) for n in limits]
    assert torch.equal(model.tokens, tokens) and not model.status.any()
    assert [row[3] for row in expected] == [2 * (n <= passes) for n in limits]
    assert model.slot.tolist() == [-1 if n <= passes else b for b, n in enumerate(limits)]
    assert model.control[Control.PASSES] == passes


@pytest.mark.parametrize(
    "loop", [pytest.param(True, marks=loops), pytest.param(False, marks=on_gpu)]
)
def test_a_thousand_launches_allocate_nothing(loop):
    """Fault 31: data changes between launches, and each one sees what is there then."""
    model, pool = bigram(), GraphPool()
    add(pool, "pass", model.capture(), model, loop)
    model.reset([LENGTH] * 3)
    model.run(lambda: pool.launch("pass"), 3)
    before, done = torch.cuda.memory_stats()["allocation.all.allocated"], model.ring.sequence
    emitted = set()
    for launch in range(1000):
        model.request.fill_(launch)
        model.context_len.zero_()
        model.last_token.fill_(launch)
        tlt_ext.arm_passes(model.control, model.ring, limit=1)
        pool.launch("pass")
        assert model.ring.wait(10.0) == StopReason.LIMIT
        got = [row[0] for row in model.ring.collect(launch + done, launch + done + 1, 3)]
        assert got[0] == got[1] == got[2]  # the same request thrice
        emitted.add(got[0][0])
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert len(emitted) > 300
    assert pool.usage()["pass"].launches == 1000 + (1 if loop else 3)


@pytest.mark.parametrize(
    "loop",
    [
        pytest.param(True, marks=loops),
        pytest.param(False, marks=[*on_gpu, pytest.mark.sanitize]),
    ],
)
def test_several_graphs_are_one_body_in_order(loop):
    model, pool, seen = bigram(), GraphPool(), torch.zeros(2, 3, **INT)

    def before():
        seen[0].copy_(model.last_token)

    def after():
        seen[1].copy_(model.last_token)

    add(pool, "pass", model.capture(before, model.step, after), model, loop)
    model.reset([5, 9, 9])
    model.run(lambda: pool.launch("pass"), 64)
    assert seen.tolist() == [[int(t[4]) for t in model.tokens], [int(t[5]) for t in model.tokens]]
    assert pool.usage()["pass"].nodes > 4


@pytest.mark.parametrize("loop", [pytest.param(True, marks=loops)])
def test_a_loop_whose_body_ends_no_pass_is_bounded(loop):
    model, pool = bigram(), GraphPool()
    count = torch.zeros(1, **INT)
    add(pool, "endless", model.capture(lambda: count.add_(1)), model, loop)
    count.zero_()
    tlt_ext.arm_passes(model.control, model.ring, limit=5)
    pool.launch("endless")
    torch.cuda.synchronize()
    assert count.item() == 5


def many_nodes(model: Bigram, count: int) -> list[torch.cuda.CUDAGraph]:
    return model.capture(lambda: [model.logits.add_(1.0) for _ in range(count)])


@pytest.mark.parametrize("loop", [pytest.param(False, marks=on_gpu)])
def test_the_least_recently_used_graphs_give_way(loop):
    model = bigram()
    graphs = many_nodes(model, 4000)
    free = GraphPool()
    for key in "abcd":
        assert add(free, key, graphs, model, loop) == []
    usage = list(free.usage().values())
    assert all(u.peak_bytes >= u.resident_bytes >= 0 and u.nodes == 4000 for u in usage)
    charged = usage[0].charged_bytes
    pool, gone = GraphPool(budget_bytes=2 * charged), []
    for key in "abc":
        gone += add(pool, key, graphs, model, loop)
        pool.launch(key)
        torch.cuda.synchronize()
    assert gone == ["a"] and list(pool.usage()) == ["b", "c"]
    pool.launch("b")
    torch.cuda.synchronize()
    assert add(pool, "d", graphs, model, loop) == ["c"]
    with pytest.raises(GraphError, match="launch: there is no graph 'c'"):
        pool.launch("c")
    small = GraphPool(budget_bytes=charged - 1)
    with pytest.raises(GraphError, match=f"'x' needs {charged} bytes, the budget is {charged - 1}"):
        add(small, "x", graphs, model, loop)


@pytest.mark.parametrize("loop", [pytest.param(False, marks=on_gpu)])
def test_graphs_give_way_by_priority_first(loop):
    model = bigram()
    graphs = many_nodes(model, 100)
    pool = GraphPool()
    add(pool, "first", graphs, model, loop)
    pool = GraphPool(budget_bytes=3 * pool.usage()["first"].charged_bytes)
    for key, priority in {"first": 1, "small": 0, "other": 0}.items():
        assert add(pool, key, graphs, model, loop, priority) == []
    assert add(pool, "late", graphs, model, loop, priority=0) == ["small"]
    assert add(pool, "high", graphs, model, loop, priority=1) == ["other"]
    assert add(pool, "higher", graphs, model, loop, priority=1) == ["late"]
    with pytest.raises(GraphError, match="'low' needs"):  # not for the like of it
        add(pool, "low", graphs, model, loop, priority=0)
    assert list(pool.usage()) == ["first", "high", "higher"]
    assert add(pool, "last", graphs, model, loop, priority=1) == ["first"]


@pytest.mark.parametrize("loop", [pytest.param(False, marks=on_gpu)])
def test_a_graph_that_can_never_fit_evicts_none(loop):
    model = bigram()
    small, large = many_nodes(model, 10), many_nodes(model, 1000)
    pool = GraphPool()
    add(pool, "a", small, model, loop)
    pool = GraphPool(budget_bytes=2 * pool.usage()["a"].charged_bytes)
    for key in "ab":
        add(pool, key, small, model, loop)
    with pytest.raises(GraphError, match="'c' needs .* with .* in use"):
        add(pool, "c", large, model, loop)
    assert list(pool.usage()) == ["a", "b"]


@pytest.mark.parametrize("loop", [pytest.param(True, marks=loops)])
def test_a_running_graph_is_not_evicted(loop):
    model = bigram(passes=4000, work=2048)
    graphs, others = model.capture(), many_nodes(model, 100)
    pool = GraphPool()
    add(pool, "pass", graphs, model, loop)
    charged = pool.usage()["pass"].charged_bytes
    pool = GraphPool(budget_bytes=charged + 1)
    add(pool, "pass", graphs, model, loop)
    model.reset([4000] * 3)
    tlt_ext.arm_passes(model.control, model.ring, limit=4000)
    torch.cuda.synchronize()
    pool.launch("pass")
    with pytest.raises(GraphError, match="'other' needs"):
        add(pool, "other", others, model, loop)
    assert "pass" in pool and model.ring.reason == 0
    model.num_new.add_(0)  # torch finds no error that the pool has left
    model.ring.request_stop()
    pool.remove("pass")  # waits for its end
    assert model.ring.reason == StopReason.STOPPED and "pass" not in pool


@pytest.mark.parametrize("loop", [pytest.param(True, marks=loops)])
def test_nodes_that_a_loop_cannot_contain_are_named(loop):
    model, pool = bigram(), GraphPool()
    event = torch.cuda.Event(external=True)

    def with_event():
        model.logits.add_(1.0)
        event.record()

    add(pool, "good", model.capture(), model, loop)
    with pytest.raises(GraphError, match="GraphPool: "):
        add(pool, "bad", model.capture(with_event), model, loop)
    assert "bad" not in pool and list(pool.usage()) == ["good"]
    model.reset([5, 5, 5])
    assert len(model.run(lambda: pool.launch("good"), 64)[0][0]) == 5


@pytest.mark.parametrize("loop", [pytest.param(False, marks=on_gpu)])
def test_a_pool_checks_its_arguments(loop):
    model, pool = bigram(), GraphPool()
    (graph,) = model.capture()
    graphs = [graph.raw_cuda_graph()]
    with pytest.raises(ValueError, match="GraphPool: graphs: expected one or more"):
        pool.add("x", [], model.control, loop=loop)
    with pytest.raises(ValueError, match="GraphPool: graphs: expected captured graphs, got a null"):
        pool.add("x", [0], model.control, loop=loop)
    with pytest.raises(ValueError, match="GraphPool: control: expected device cuda:0, got cpu"):
        pool.add("x", graphs, model.control.cpu(), loop=loop)
    with pytest.raises(TypeError, match="GraphPool: control: expected dtype int32"):
        pool.add("x", graphs, model.control.float(), loop=loop)
    with pytest.raises(ValueError, match=r"GraphPool: control: expected shape \[8\]"):
        pool.add("x", graphs, model.control[:2], loop=loop)
    with pytest.raises(GraphError, match="remove: there is no graph 'x'"):
        pool.remove("x")
    with pytest.raises(ValueError, match="GraphPool: budget_bytes: expected 0 or more, got -1"):
        GraphPool(budget_bytes=-1)
    with pytest.raises(ValueError, match="GraphPool: device: expected 0 to "):
        GraphPool(device=99)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a CUDA device")
def test_without_a_gpu_a_pool_says_so():
    assert not GraphPool.supports_loop()
    reason = "the devices" if tlt_ext._C.cuda_ops() else "this build has no CUDA graphs"
    with pytest.raises(GraphError, match="GraphPool: " + reason):
        GraphPool()
