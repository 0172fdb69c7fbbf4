"""Sampling and trees on a GPU: the CPU's bits, replays of one graph, nothing written outside."""

import math
import random

import pytest
import torch

import tlt_ext
from tests import kit
from tests.csrc.test_tree import Store
from tests.csrc.verify_kit import call
from tests.grouping import flat
from tlt_ext import Frontier, Nodes, Sampling, Tree

pytestmark = [kit.gpu, kit.needs_gpu]
GUARD = 64


class Guarded:
    """Output arrays on the GPU, each in the middle of a buffer whose ends must stay as they are."""

    def __init__(self):
        self.buffers = []

    def __call__(self, *shape: int, dtype=torch.int32) -> torch.Tensor:
        size = math.prod(shape)
        buffer = torch.full((size + 2 * GUARD,), 77, device="cuda").to(dtype)
        self.buffers.append(buffer)
        return buffer[GUARD : GUARD + size].view(shape)

    def assert_intact(self):
        for buffer in self.buffers:
            assert (buffer[:GUARD] == 77).all() and (buffer[-GUARD:] == 77).all()


def on_both(monkeypatch, run):
    """What `run()` gives with the helpers on the CPU, and on the GPU."""
    results = []
    for device in ("cpu", "cuda"):
        monkeypatch.setattr(kit, "DEVICE", device)
        results.append(run())
    return results


def sample_once(logits, rng_seed, vocab_size, filtered):
    rows = logits.shape[0]
    random = kit.generator(rng_seed)

    def pick(values, dtype):
        values = torch.tensor(values, dtype=dtype)
        return values[torch.randint(0, len(values), (rows,), generator=random)]

    arrays = {
        "logits": logits,
        "temperature": pick([0.0, 0.3, 1.0, 1.0, 2.0], torch.float32),
        "top_k": pick([0, 0, 1, 40, 1 << 30], torch.int32),
        "top_p": pick([1.0, 1.0, 0.9, 0.3, 0.0, 0.9999], torch.float32),
        "request": torch.randint(0, 2**62, (rows,), generator=random),
        "position": torch.randint(0, 2**20, (rows,), generator=random).int(),
    }
    out = {
        "tokens": torch.zeros(rows, dtype=torch.int32),
        "logprobs": torch.zeros(rows),
        "status": torch.zeros(rows, dtype=torch.int32),
    }
    if filtered:
        out["filtered_logprobs"] = torch.zeros(rows)
    arrays, out = (
        {name: kit.to_device(array) for name, array in group.items()} for group in (arrays, out)
    )
    flat.sample(**arrays, **out, seed=7, vocab_size=vocab_size)
    return kit.to_cpu(out)


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("spread", [0.01, 3.0, 300.0])
@pytest.mark.parametrize("vocab", [1, 7, 2048, 2049, 8193, 128257, 262_144])
def test_sample_has_the_bits_of_the_cpu(monkeypatch, vocab, spread, dtype, filtered):
    """Tokens and status bit for bit; log-probs within float32 rounding of the CPU's exact sums."""
    rows = 48 if vocab < 100_000 else 12
    logits = (spread * kit.randn(rows, vocab + 3, seed=vocab)).to(dtype)
    logits[:, vocab:] = math.nan
    logits[1, ::3] = -math.inf
    logits[2, ::2] = math.nan
    logits[3, 0] = math.inf
    logits[4] = math.nan
    logits[5] = 0.0  # all tie
    cpu, gpu = on_both(monkeypatch, lambda: sample_once(logits, vocab, vocab, filtered))
    assert torch.equal(gpu["tokens"], cpu["tokens"])
    assert torch.equal(gpu["status"], cpu["status"])
    for name in set(cpu) - {"tokens", "status"}:
        torch.testing.assert_close(gpu[name], cpu[name], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    ("op", "vocab"),
    [
        (tlt_ext.verify_tree, 5),
        (tlt_ext.verify_tree, 3000),
        (tlt_ext.verify_tree, 262_144),
        (tlt_ext.verify_rejection, 5),
        (tlt_ext.verify_rejection, 3000),
    ],
)
def test_verification_has_the_bits_of_the_cpu(monkeypatch, op, vocab):
    """Emitted tokens, paths, finish words and status of random and broken trees.

    The last five ids are drafted, and together five times as likely as all others.
    """
    rng = random.Random(vocab)
    for case in range(12):
        tokens, parents, position, row_start = [], [], [], [0]
        for _ in range(rng.randint(1, 5)):
            size = rng.choice([0, 1, 9, 40])
            for node in range(size):
                parents.append(rng.randint(max(0, node - 4), node - 1) if node else -1)
                tokens.append(vocab - 1 - rng.randrange(5))
                position.append(node)
                if rng.random() < 0.05:
                    parents[-1], tokens[-1] = rng.choice([-2, node, 2**31 - 1]), -1
            row_start.append(len(tokens))
        logits = kit.randn(len(tokens), vocab, seed=case, dtype=rng.choice(kit.DTYPES))
        logits[:, -5:] += math.log(vocab)
        options = {
            "position": torch.tensor(position, dtype=torch.int32),
            "temperature": rng.choice([0.0, 0.7, 1.0]),
            "top_k": rng.choice([0, 3]),
            "top_p": rng.choice([1.0, 0.8]),
            "stop_ids": [vocab - 1],
            "limit": rng.choice([0, 2, 17]),
        }
        if op is tlt_ext.verify_rejection:
            options["deterministic"] = case % 3 == 0
            draft = torch.softmax(logits.float() + kit.randn(len(tokens), vocab, seed=99), -1)
            options["draft_probs"] = None if options["deterministic"] else draft

        def run(logits=logits, links=(tokens, parents, row_start), options=options):
            return vars(call(op, logits, *links, **options))

        cpu, gpu = on_both(monkeypatch, run)
        for name in ("emitted", "path", "num_emitted", "finish", "status"):
            assert torch.equal(gpu[name], cpu[name]), name
        torch.testing.assert_close(
            gpu["logprobs"], cpu["logprobs"], rtol=1e-6, atol=1e-5, equal_nan=True
        )


@pytest.mark.parametrize("vocab", [3000, 151_936])
def test_paths_of_many_requests_have_the_tokens_of_the_cpu(monkeypatch, vocab):
    """Rows of one block and of several, top-p in some: a cluster starts a row while its blocks
    still read the previous one. Requests without rows or without tokens; trees and chains."""
    rng = random.Random(vocab)
    tokens, parents, row_start = [], [], [0]
    for request in range(40):
        for node in range(rng.choice([0, 1, 5, 9])):
            first = node - 1 if request % 2 else max(0, node - 4)
            parents.append(rng.randint(first, node - 1) if node else -1)
            tokens.append(rng.randrange(3))
        row_start.append(len(tokens))
    assert len(tokens) > 132  # else all rows are drawn at once
    logits = kit.randn(len(tokens), vocab, seed=3, dtype=torch.bfloat16)
    logits[:, :3] += 16.0
    options = {
        "top_p": torch.where(torch.arange(40) % 3 > 0, 1.0, 0.8),
        "limit": torch.where(torch.arange(40) % 7 > 0, 17, 0),
        "stop_ids": [7],
    }

    def run():
        return vars(call(tlt_ext.verify_tree, logits, tokens, parents, row_start, **options))

    cpu, gpu = on_both(monkeypatch, run)
    assert (cpu["num_emitted"] > 2).any()
    for name in ("emitted", "path", "num_emitted", "finish", "status"):
        assert torch.equal(gpu[name], cpu[name]), name


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("score_temperature", [0.0, 0.7])
@pytest.mark.parametrize(
    ("vocab", "top_k", "batch", "reduced"),
    [
        (1, 1, 1, "scattered"),
        (999, 4, 3, "scattered"),
        (16384, 4, 2, "sorted"),
        (5000, 33, 1, ""),
        (2500, 4, 70, "scattered"),  # several tiles a warp
        (16384, 4, 20, "sorted"),
        (2500, 4, 70, "sorted"),
        (2500, 4, 70, ""),
        (1500, 40, 70, "sorted"),  # and several waves of rows
        (999, 1, 3, "scattered"),  # chains
        (16384, 1, 1, "sorted"),
        (16384, 1, 20, "sorted"),
        (2500, 1, 70, ""),
        (2500, 1, 70, "sorted"),
        (40000, 1, 70, "scattered"),
        (49152, 1, 2, "scattered"),
        (70000, 1, 1, "sorted"),  # several tiles a warp, all with noise
        (80000, 1, 1, ""),
    ],
)
def test_trees_have_the_bits_of_the_cpu(
    monkeypatch, vocab, top_k, batch, reduced, score_temperature, dtype
):
    """Tokens, links, scores, frontiers, ancestors and selected rows, bit for bit."""
    d2t = None
    if reduced:
        d2t = torch.randperm(3 * vocab, generator=kit.generator(1))[:vocab].int()
    if reduced == "sorted":
        d2t = d2t.sort().values

    def run():
        store = Store(batch, tlt_ext.tree_capacity(3, top_k), top_k)
        store.temperature[3::5] = 0.0
        store.temperature[-1] = 0.6
        found = []
        for level in range(3):
            width = store.frontier.shape[1]
            logits = (2 * kit.randn(batch * width, vocab, seed=level)).to(dtype)
            logits[0, ::7] = math.nan if level == 1 else 0.0
            group = torch.arange(vocab) // 8
            logits[1::2] -= (13 * (group % 4)).to(dtype)  # more than one term of the sum
            logits[1::3, group % 5 == 1] = -math.inf
            store.expand(
                logits,
                d2t=d2t,
                vocab_size=3 * vocab if reduced else vocab - vocab // 10,
                score_temperature=score_temperature,
            )
            found += [store.frontier, store.row, store.ancestors]
        for b in range(batch):
            count = int(store.count[b])
            found += [array[b, :count].clone() for array in store.arrays[:4]]
        *rows, row_start = store.select(min(50, top_k * 4))
        found += [array[: int(row_start[-1])] for array in rows]
        return [*found, row_start, store.count, store.status]

    cpu, gpu = on_both(monkeypatch, run)
    for a, b in zip(gpu, cpu, strict=True):
        assert kit.same_bits(a, b)


def verify_arrays(requests, size, vocab, out, dtype=torch.bfloat16):
    """A batch of chains with its outputs, on the GPU."""
    rows = requests * size
    logits = kit.randn(rows, vocab, seed=1, dtype=dtype).cuda()
    ints = {"dtype": torch.int32, "device": "cuda"}
    arrays = {
        "logits": logits,
        "tokens": torch.randint(0, vocab, (rows,), **ints),
        "parents": torch.arange(-1, size - 1, **ints).repeat(requests),
        "position": torch.arange(5, 5 + size, **ints).repeat(requests),
        "row_start": torch.arange(0, rows + 1, size, **ints),
        "temperature": torch.ones(requests, device="cuda"),
        "top_k": torch.zeros(requests, **ints),
        "top_p": torch.ones(requests, device="cuda"),
        "request": torch.arange(requests, device="cuda"),
        "stop_ids": torch.full((requests, 2), -1, **ints),
        "limit": torch.full((requests,), 17, **ints),
        "emitted": out(requests, 17),
        "logprobs": out(requests, 17, dtype=torch.float32),
        "num_emitted": out(requests),
        "path": out(requests, 17),
        "finish": out(requests),
        "status": torch.zeros(requests, **ints),
    }
    size = tlt_ext.sampling_workspace_bytes(rows)
    return {**arrays, "workspace": out(size, dtype=torch.uint8)}


@pytest.mark.sanitize
def test_nothing_is_written_outside_the_outputs():
    """Fault 15: guard bands around every output and the workspace, top-k in some rows only."""
    out = Guarded()
    arrays = verify_arrays(5, 6, 160_000, out)
    arrays["top_k"][::2] = 9
    arrays["top_p"][1] = 0.5
    flat.verify_tree(**arrays, seed=1)
    rows = 9
    ints = {"dtype": torch.int32, "device": "cuda"}
    flat.sample(
        arrays["logits"][:rows],
        temperature=torch.ones(rows, device="cuda"),
        top_k=torch.tensor([0, 5, 0, 0, 1, 0, 160_000, 0, 0], **ints),
        top_p=torch.tensor([1.0, 1, 0.9, 1, 1, 1, 1, 1, 0.1], device="cuda"),
        request=torch.arange(rows, device="cuda"),
        position=torch.arange(rows, **ints),
        tokens=out(rows),
        logprobs=out(rows, dtype=torch.float32),
        status=torch.zeros(rows, **ints),
        seed=1,
    )
    nodes = Nodes(out(2, 40), out(2, 40), out(2, 40, dtype=torch.float32), out(2, 40), out(2))
    for array, root in zip(nodes, (3, -1, 0, 0), strict=False):
        array[:, 0] = root
    nodes.count.fill_(1)
    position = torch.zeros(2, **ints)
    tlt_ext.expand_tree(
        kit.randn(2, 10_000, seed=0).cuda(),
        nodes,
        Frontier(torch.zeros(2, 1, **ints)),
        Frontier(out(2, 20), out(2, 20), out(2, 20, 16, dtype=torch.uint8)),
        Sampling(torch.ones(2, device="cuda"), torch.arange(2, device="cuda")),
        root_position=position,
        status=torch.zeros(2, **ints),
        seed=0,
        vocab_size=10_000,
    )
    tree = Tree(out(60), out(60), out(60, 16, dtype=torch.uint8))
    row_start = out(3)
    tlt_ext.select_nodes(
        nodes,
        tree,
        root_position=position,
        position=out(60),
        row_start=row_start,
        source=out(60),
        num_verify=30,
    )
    out.assert_intact()
    assert nodes.count.tolist() == [21, 21] and row_start.tolist() == [0, 21, 42]
    tail = tree.tokens[42:].tolist() + tree.ancestors[42:].flatten().tolist()
    assert set(tail) == {77}  # packed rows past the last request


def test_one_graph_serves_changing_settings():
    """A thousand replays of a captured pass: no allocation, no synchronisation, the eager bits."""
    out = Guarded()
    arrays = verify_arrays(3, 5, 3001, out)
    arrays["logits"][:, :4] += 9.0
    flat.verify_tree(**arrays, seed=1)  # loads the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flat.verify_tree(**arrays, seed=1)
    torch.cuda.synchronize()
    names = ("emitted", "logprobs", "num_emitted", "path", "finish", "status")
    held = torch.cuda.memory_allocated()
    for replay in range(1000):
        arrays["position"].add_(7)
        if replay % 10 == 0:
            arrays["temperature"].fill_((replay // 10) % 3 / 2)
            arrays["top_k"][0] = (replay // 10) % 4
            arrays["row_start"][1:3] = torch.tensor([4, 8] if replay % 20 else [5, 10])
        graph.replay()
        if replay % 50:
            continue
        replayed = {name: arrays[name].clone() for name in names}
        flat.verify_tree(**arrays, seed=1)
        for name in names:
            assert kit.same_bits(replayed[name], arrays[name])
    del replayed
    assert torch.cuda.memory_allocated() == held
    out.assert_intact()


def test_logprobs_are_the_same_bits_in_any_batch():
    """Plain rows, trees and batches of one agree bit for bit on the card."""
    out = Guarded()
    arrays = verify_arrays(16, 4, 20_000, out)
    flat.verify_tree(**arrays, seed=1)
    for b in range(16):
        row = 4 * b
        token, logprob = out(1), out(1, dtype=torch.float32)
        flat.sample(
            arrays["logits"][row : row + 1],
            **{name: arrays[name][b : b + 1] for name in Sampling._fields},
            position=arrays["position"][row : row + 1] + 1,
            tokens=token,
            logprobs=logprob,
            status=torch.zeros(1, dtype=torch.int32, device="cuda"),
            seed=1,
        )
        assert token[0] == arrays["emitted"][b, 0]
        assert kit.same_bits(logprob, arrays["logprobs"][b, :1])


def test_select_refuses_a_store_that_shared_memory_cannot_hold():
    ints = {"dtype": torch.int32, "device": "cuda"}
    token, parent, depth = torch.zeros(3, 1, 16385, **ints)
    nodes = Nodes(token, parent, token.float(), depth, torch.zeros(1, **ints))
    tokens, parents, position, source, root_position = torch.zeros(5, 1, **ints)
    ancestors = torch.zeros(1, 16, dtype=torch.uint8, device="cuda")
    with pytest.raises(ValueError, match="nodes.token: expected at most 16384 nodes a request"):
        tlt_ext.select_nodes(
            nodes,
            Tree(tokens, parents, ancestors),
            root_position=root_position,
            position=position,
            row_start=torch.zeros(2, **ints),
            source=source,
            num_verify=1,
        )


def test_expand_refuses_a_level_that_shared_memory_cannot_hold(monkeypatch):
    monkeypatch.setattr(kit, "DEVICE", "cuda")
    store = Store(1, 40_000, 128)
    store.frontier = torch.full((1, 65), -1, dtype=torch.int32)
    with pytest.raises(ValueError, match="at most 8192 children a request .*, got 8320"):
        store.expand(torch.zeros(65, 200))


def test_a_workspace_that_is_too_small_is_refused():
    out = Guarded()
    arrays = verify_arrays(1, 2, 100, out)
    arrays["workspace"] = arrays["workspace"][:-1]
    with pytest.raises(ValueError, match="workspace: expected at least 32 bytes, got 31"):
        flat.verify_tree(**arrays, seed=1)
    arrays["workspace"] = torch.zeros(32, device="cuda")
    with pytest.raises(TypeError, match="workspace: expected dtype uint8, got float32"):
        flat.verify_tree(**arrays, seed=1)
