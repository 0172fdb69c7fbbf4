"""`sample`, `verify_tree`, `verify_rejection` and the `expand_tree` levels of a draft.

V = 151,936 in bf16, T = 1.

Every case but the levels of a draft, whose logits are just written in a pass, runs on inputs that
together exceed the L2 several times over. `read_us` is one read of the logits by a sum. `noise_x`
is a sampled batch over a greedy one, which differ by the noise alone. The peers are FlashInfer's
samplers, which take float32, from logits and, for top-p, from probabilities made beforehand. Chains
are verified by rejection on the rows of `verify_tree` as well; half of the drafts are drawn from
the target. The peer is FlashInfer's `chain_speculative_sampling`, which takes probabilities: with
the softmax of the logits that ours includes, and without.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

import tlt_ext
from profiling.rig import timing
from profiling.rig.bench import Bench, say
from profiling.rig.timing import INT

Arms = dict[str, list[timing.Call]]

VOCAB = 151_936
DRAFT_VOCAB = 16_384
BATCHES = [1, 4, 16, 64]
TREES = {
    "tree16 b1": (1, 16),
    "chain5 b64": (64, 5),
    "chain5 b8": (8, 5),
    "tree16 b8": (8, 16),
    "tree64 b1": (1, 64),
}
EXPANSIONS = [(1, 1), (16, 1), (64, 1), (1, 4), (1, 8), (16, 4), (64, 4)]  # requests, top K


def logits_of(rows: int, vocab: int = VOCAB) -> torch.Tensor:
    """Rows with a few thousand likely ids, as of a language model at T = 1."""
    return 3 * torch.randn(rows, vocab, device="cuda", dtype=torch.bfloat16)


def peaked_logits(rows: int) -> torch.Tensor:
    """Rows with twenty likely ids; the noise can lift half of the others to the best score."""
    logits = 2 * torch.randn(rows, VOCAB, device="cuda") - 8
    likely = torch.randint(0, VOCAB, (rows, 20), device="cuda")
    heights = (14 - 0.7 * torch.arange(20, device="cuda")).expand(rows, -1)
    return logits.scatter_(1, likely, heights).bfloat16()


def settings(
    batch: int, temperature: float = 1.0, top_p: float = 1.0, rows: int = 1
) -> tlt_ext.Sampling:
    """Settings of requests, or of `rows` rows of each."""
    count = batch * rows
    return tlt_ext.Sampling(
        temperature=torch.full((count,), temperature, device="cuda"),
        request=torch.arange(batch, device="cuda").repeat_interleave(rows),
        top_k=torch.zeros(count, **INT),
        top_p=torch.full((count,), top_p, device="cuda"),
    )


def sampler(batch: int, temperature: float = 1.0, top_p: float = 1.0) -> Callable:
    """A function of logits that runs `sample` on its own arrays."""
    sampling = settings(batch, temperature, top_p)
    tokens, position, status = torch.zeros(3, batch, **INT).unbind()
    logprobs = torch.zeros(batch, device="cuda")
    run = partial(tlt_ext.sample, position=position, tokens=tokens, logprobs=logprobs)
    return lambda logits: run(logits, sampling, status=status, seed=1)


def softmax(logits: torch.Tensor) -> torch.Tensor:
    return torch.softmax(logits.float(), -1)


def flashinfer_arms(make: Callable[[Any], Arms]) -> Arms:
    """The arms that `make` gives for FlashInfer's samplers; {} where it does not run."""
    try:
        from flashinfer import sampling

        arms = make(sampling)
        for calls in arms.values():
            timing.record(calls[0])
    except Exception as error:  # the other peers still run
        say(f"no flashinfer: {type(error).__name__}: {str(error).splitlines()[:1]}")
        return {}
    return arms


def sample_arms(inputs: list[torch.Tensor], sampling: Any) -> Arms:
    top_p = sampling.top_p_sampling_from_probs
    wide = [logits.float() for logits in inputs]
    return {
        "flashinfer": [partial(sampling.sampling_from_logits, x) for x in wide],
        "flashinfer_top_p": [partial(top_p, torch.softmax(x, -1), 0.9) for x in wide],
    }


def run_sample(bench: Bench, batch: int, peaked: bool = False) -> None:
    rows = f"b{batch} peaked" if peaked else f"b{batch}"
    case = f"sample {rows}"
    if not bench.wanted(case):
        return
    num_bytes = 2 * batch * VOCAB
    make = peaked_logits if peaked else logits_of
    inputs = [make(batch) for _ in range(timing.num_cold_inputs(num_bytes))]
    ops = {
        "sample": sampler(batch),
        "greedy": sampler(batch, temperature=0.0),
        "top_p": sampler(batch, top_p=0.9),
        "read": lambda logits: torch.sum(logits, dtype=torch.float32),
    }
    arms: Arms = {name: [partial(op, logits) for logits in inputs] for name, op in ops.items()}
    if not bench.quick:
        arms |= flashinfer_arms(partial(sample_arms, inputs))
    times = timing.measure_in_turn(arms)
    floor_us = num_bytes / bench.copy_gb_per_s / 1e3

    def peers(*names: str) -> dict[str, timing.Timing]:
        return {name: times[name] for name in names if name in times}

    row = bench.add(
        case,
        times["sample"],
        num_bytes,
        peers("flashinfer"),
        read_us=round(times["read"].median_us, 3),
        noise_x=round(times["sample"].median_us / times["greedy"].median_us, 3),
        over_read_x=round(times["sample"].median_us / floor_us, 3),
    )
    others = peers("flashinfer_top_p")
    top_p = bench.add(f"sample top-p 0.9 {rows}", times["top_p"], num_bytes, others)
    greedy = bench.add(f"sample greedy {rows}", times["greedy"], num_bytes)
    if batch == 64 and not peaked:
        bench.got["sample_b64_us"] = row["median_us"]
        bench.got["sample_b64_over_read_x"] = row["over_read_x"]
        bench.got["sample_greedy_b64_us"] = greedy["median_us"]
        bench.got["top_p_b64_us"] = top_p["median_us"]


@dataclass
class Verified:
    """Rows to verify, in which half of the drafts are the target's own tokens."""

    logits: torch.Tensor
    tokens: torch.Tensor  # [rows]
    right: torch.Tensor  # bool [rows], whether the token is the target's
    run: Callable[..., None]  # either op, with its own arguments

    def tree(self) -> None:
        self.run(tlt_ext.verify_tree, workspace=self.workspace)

    @cached_property
    def workspace(self) -> torch.Tensor:
        size_bytes = tlt_ext.sampling_workspace_bytes(len(self.logits))
        return torch.zeros(size_bytes, dtype=torch.uint8, device="cuda")

    @cached_property
    def draft_probs(self) -> torch.Tensor:
        """Of chains: the target's where the next row's draft is right, else uniform."""
        right = self.right.roll(-1)[:, None]
        return torch.where(right, softmax(self.logits), 1 / VOCAB)

    def rejection(self) -> None:
        self.run(tlt_ext.verify_rejection, self.draft_probs)


def chain_arms(inputs: list[Verified], requests: int, sampling: Any) -> Arms:
    """FlashInfer's rejection sampling of the same chains, from logits and from probabilities."""

    def probs(rows: Verified) -> torch.Tensor:
        return torch.softmax(rows.logits.view(requests, -1, VOCAB), -1, dtype=torch.float32)

    def from_logits(drafts: torch.Tensor, ids: torch.Tensor, rows: Verified) -> None:
        op(drafts, ids, probs(rows))

    op = sampling.chain_speculative_sampling
    drafts = [rows.draft_probs.view(requests, -1, VOCAB)[:, :-1].contiguous() for rows in inputs]
    ids = [rows.tokens.view(requests, -1)[:, 1:].contiguous() for rows in inputs]
    chains = list(zip(drafts, ids, inputs, strict=True))
    return {
        "flashinfer": [partial(from_logits, *chain) for chain in chains],
        "flashinfer_from_probs": [partial(op, d, i, probs(rows)) for d, i, rows in chains],
    }


def verified(requests: int, size: int, chain: bool, logits: torch.Tensor) -> Verified:
    nodes = torch.arange(size, **INT)
    parents = nodes - 1 if chain else torch.where(nodes == 0, -1, (nodes - 1) // 4).int()
    depth = torch.zeros(size, **INT)
    for row in range(1, size):
        depth[row] = depth[parents[row]] + 1
    rows = requests * size
    sampling = settings(requests)
    drawn, status = torch.zeros(2, rows, **INT).unbind()
    position = depth.repeat(requests) + 7
    tlt_ext.sample(
        logits,
        settings(requests, rows=size),
        position=position + 1,
        tokens=drawn,
        logprobs=torch.zeros(rows, device="cuda"),
        status=status,
        seed=1,
    )
    source = torch.arange(rows, device="cuda") - torch.arange(size, device="cuda").repeat(requests)
    source = source + parents.clamp_min(0).repeat(requests)
    wrong = torch.randint(0, VOCAB, (rows,), **INT)
    right = torch.rand(rows, device="cuda") < 0.5
    tokens = torch.where(right, drawn[source.long()], wrong).int()
    emitted, path = torch.zeros(2, requests, 17, **INT).unbind()
    num_emitted, finish, status = torch.zeros(3, requests, **INT).unbind()
    tree = tlt_ext.Tree(tokens, parents.repeat(requests))
    packed = tlt_ext.Rows(torch.arange(0, rows + 1, size, **INT), position, status)
    logprobs = torch.zeros(requests, 17, device="cuda")
    output = tlt_ext.VerifyOutput(emitted, logprobs, num_emitted, finish, path)
    stop_ids, limit = torch.full((requests, 2), -1, **INT), torch.full((requests,), 17, **INT)

    def run(op: Callable, *draft_probs: torch.Tensor, **more: torch.Tensor) -> None:
        arrays = tree, packed, sampling, output
        op(logits, *draft_probs, *arrays, stop_ids=stop_ids, limit=limit, seed=1, **more)

    return Verified(logits, tokens, right, run)


def run_verify(bench: Bench, case: str, requests: int, size: int) -> None:
    if not bench.wanted(f"verify {case}"):
        return
    rows = requests * size
    num_bytes = 2 * rows * VOCAB
    count = timing.num_cold_inputs(num_bytes)
    inputs = [logits_of(rows) for _ in range(count)]
    chain = case.startswith("chain")
    trees = [verified(requests, size, chain, logits) for logits in inputs]
    arms: Arms = {"ours": [rows.tree for rows in trees]}
    if chain:
        arms["rejection"] = [rows.rejection for rows in trees]
        if not bench.quick:
            arms |= flashinfer_arms(partial(chain_arms, trees, requests))
    times = timing.measure_in_turn(arms)
    others = {name: times.pop(name) for name in list(times) if name.startswith("flashinfer")}
    row = bench.add(f"verify {case}", times.pop("ours"), num_bytes, times)
    if chain:
        num_bytes += 4 * requests * (size - 1) * VOCAB
        other = bench.add(f"verify by rejection {case}", times["rejection"], num_bytes, others)
        if case == "chain5 b64":
            over = row["median_us"] / other["median_us"]
            bench.got["verify_tree_over_rejection_x"] = round(over, 3)
    names = {"tree16 b1": "verify_tree16_b1_us", "chain5 b64": "verify_chain5_b64_us"}
    if case in names:
        bench.got[names[case]] = row["median_us"]


def expander(batch: int, top_k: int, levels: int) -> Callable:
    """A call that drafts all levels of a tree, on its own arrays."""
    capacity = tlt_ext.tree_capacity(levels, top_k)
    d2t = torch.randperm(VOCAB, device="cuda")[:DRAFT_VOCAB].sort().values.int()
    token, parent, depth = torch.zeros(3, batch, capacity, **INT).unbind()
    count, status, root_position = torch.ones(3, batch, **INT).unbind()
    nodes = tlt_ext.Nodes(token, parent, torch.zeros(batch, capacity, device="cuda"), depth, count)
    sampling = tlt_ext.Sampling(
        torch.ones(batch, device="cuda"), torch.arange(batch, device="cuda")
    )
    logits, frontiers = [], [tlt_ext.Frontier(torch.zeros(batch, 1, **INT))]
    for level in range(levels):
        logits.append(logits_of(batch * (top_k if level else 1), DRAFT_VOCAB))
        node, row = torch.zeros(2, batch, top_k, **INT).unbind()
        ancestors = torch.zeros(batch, top_k, 16, dtype=torch.uint8, device="cuda")
        frontiers.append(tlt_ext.Frontier(node, row, ancestors))

    def call() -> None:
        count.fill_(1)
        for level in range(levels):
            tlt_ext.expand_tree(
                logits[level],
                nodes,
                frontiers[level],
                frontiers[level + 1],
                sampling,
                root_position=root_position,
                status=status,
                seed=1,
                vocab_size=VOCAB,
                slot_base=top_k * max(0, level - 1),
                d2t=d2t,
            )

    return call


def run_expand(bench: Bench, batch: int, top_k: int, levels: int = 8) -> None:
    case = f"expand depth{levels} top{top_k} b{batch}"
    if not bench.wanted(case):
        return
    num_bytes = 2 * batch * DRAFT_VOCAB * (1 + (levels - 1) * top_k)
    count = min(32, timing.num_cold_inputs(num_bytes))
    calls = [expander(batch, top_k, levels) for _ in range(count)]
    row = bench.add(case, timing.measure_in_turn({"ours": calls})["ours"], num_bytes)
    if (batch, top_k, levels) == (1, 4, 8):
        bench.got["expand_depth8_top4_b1_us"] = row["median_us"]


def run(bench: Bench) -> None:
    torch.manual_seed(0)
    for batch in [64] if bench.quick else BATCHES:
        run_sample(bench, batch)
    run_sample(bench, 64, peaked=True)
    for case in ["tree16 b1", "chain5 b64"] if bench.quick else TREES:
        run_verify(bench, case, *TREES[case])
    for batch, top_k in [(1, 4)] if bench.quick else EXPANSIONS:
        run_expand(bench, batch, top_k)
