"""Beside vLLM: the same weights, prompts and lengths in both engines, on one card, alternately.

`smollm2`: plain decoding and speculation of the warmed policy by batch, the trace of `rollout`, and
the rollout of a GRPO step, all with the drafter of the warm start; and the trace with our drafter
adapted as in a run. `15b`, `7b`: random weights of these shapes. `export`: vLLM with our exported
drafters of three families. `--only` picks parts; `--vllm` is the folder with the package (`pip
install --target`), which runs in processes of its own.

Tokens a second of a batch are of its tokens after the first: B (n - 1) / (T(n) - T(1)), each the
least of three wall times of `generate`, token ids in and out, end tokens ignored, T = 1. Drafts of
random models are not accepted, so their rows with speculation are synthetic: vLLM accepts at the
rates of the warmed policy, and our time of a pass is multiplied by the same accept length. In the
rows of a comparison `over_vllm` is ours over vLLM's best setting.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

from transformers import AutoConfig, Qwen2Config

from driver.config.load import load_config
from driver.config.strategy import Strategy
from driver.model.drafter import Drafter, DraftSpec
from driver.session.parts import Rollout
from profiling.benches.decode import SHAPE_WORDS, recorded_accepts
from profiling.benches.rollout import adapt
from profiling.peers.vllm import HOW_TO_GET, lacks_vllm
from profiling.rig.bench import Bench, say
from profiling.rig.results import ROOT
from profiling.rig.subjects import QWEN2_7B, QWEN2_15B, Subject, of_checkpoint, of_shape
from profiling.rig.workload import accept_length, trace_lengths
from profiling.studies.by_turns import (
    Batch,
    Made,
    compare,
    median_round,
    ours,
    speeds,
    theirs,
    versus,
)
from profiling.studies.exported import ARMS, CHAIN, FAMILIES, case_of, exported
from profiling.studies.vllm_engines import Engines, eagle3, engines, export, write_state

NEEDS_WARM_START = True
BATCHES, SPEC_BATCHES = [1, 8, 32, 128, 256], [1, 32, 128]
NEW_TOKENS = 256  # of a request
STRATEGIES = ["ngram:6,1,7", CHAIN, "learned:8,1,9", "learned:12,1,13", "hybrid:15,1,16"]
CHAINS = [8, 12]  # tokens that vLLM drafts
LOOKUP, LOOKUP_BATCH = "ngram k=4", 32
ALONE = [1]  # requests
MAX_ROWS = 1280  # of a pass
LEAST_TOKENS = 8  # of a request, in the rollout before those that are timed
PROMPTS, SAMPLES, STEP_TOKENS = 32, 8, 4096  # of a step of preset=h100
# Folders: that holds the package vllm, and for what vLLM prints.
OPTIONS = {"vllm": "", "logs": ROOT / "out" / "vllm"}
SHAPES: dict[str, tuple[Qwen2Config, int]] = {"15b": (QWEN2_15B, 3), "7b": (QWEN2_7B, 5)}  # GiB


def lacks() -> str:
    """Why `all` leaves this benchmark out."""
    return f"it takes four minutes a part and runs by itself; it {HOW_TO_GET}"


def batch_of(subject: Subject, size: int) -> Batch:
    short = size > 32 or subject.policy is None  # a pass of a large shape takes longer
    return Batch(subject.prompts(size), [NEW_TOKENS // (1 + short)] * size)


def plain_rows(
    bench: Bench,
    name: str,
    subject: Subject,
    rollout: Rollout,
    made: Engines,
    engine: str,
    batches: Sequence[int],
) -> None:
    if engine not in made.engines:
        return
    for size in batches:
        arms = {"off": ours(rollout, "off"), "plain": theirs(made.engines[engine])}
        found = speeds(arms, arms, batch_of(subject, size))
        compare(bench, f"{name} plain b{size}", found, ["off"], ["plain"])


# ---- the warmed policy ---------------------------------------------------------------------------


def smollm2(bench: Bench, made: Engines) -> None:
    subject = of_checkpoint("smollm2", bench.words, warmed=True, note=say)
    assert subject.folder is not None
    drafter = export(subject, made.scratch / "drafter")
    longest: dict[str, Any] = {"max_model_len": 8192, "kv_gib": 6}
    made.start("plain", subject.folder, **longest)
    for k in CHAINS:
        made.start(f"eagle3 k={k}", subject.folder, **eagle3(drafter, k), **longest)
    # vLLM's n-gram proposer on the host needs numba.
    lookup = {"method": "ngram_gpu", "num_speculative_tokens": 4}
    lookup |= {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
    made.start(LOOKUP, subject.folder, k=4, speculative_config=lookup, **longest)
    rollout = subject.rollout(
        f"engine.strategies={' '.join(['off', *STRATEGIES])}", longest=max(trace_lengths()) + 512
    )
    made.ready()
    # The most important rows first, since the time may run out.
    plain_rows(bench, "smollm2", subject, rollout, made, "plain", BATCHES)
    best = speculative_rows(bench, subject, rollout, made)
    lengths = trace_lengths()
    trace = Batch(subject.prompts(len(lengths)), lengths)
    peer = rollouts(bench, "trace of 128", rollout, made, best, trace)
    fastest = max(peer, key=lambda name: peer[name].tokens_per_s)
    with bench.part("step"):
        step = of_checkpoint("step", bench.words, warmed=True, note=say, longest=False)
        prompts = [ids for ids in step.prompts(PROMPTS) for _ in range(SAMPLES)]
        batch = Batch(prompts, [STEP_TOKENS] * len(prompts), stops=subject.stops)
        rollouts(bench, "rollout of a step", rollout, made, [fastest], batch)
    with bench.part("adapted"):  # as in a run; vLLM keeps the drafter of the warm start
        adapt(rollout, subject, lengths)
        adapted = ours(rollout, "ucb")
        adapted(trace)
        versus(bench, "trace of 128, our drafter adapted", median_round(adapted, trace), peer)
    made.close(kept=["plain"])  # to see whether the other processes cost time
    plain_rows(bench, "smollm2 alone", subject, rollout, made, "plain", ALONE)


def speculative_rows(bench: Bench, subject: Subject, rollout: Rollout, made: Engines) -> set[str]:
    """Speculation by batch; the engines that were vLLM's best at several requests."""
    best = set()
    for size in SPEC_BATCHES:
        fitting = [s for s in STRATEGIES if size * Strategy.parse(s).num_verify <= MAX_ROWS]
        drafting = [name for name in made.engines if name != "plain"]
        if size != LOOKUP_BATCH:  # its n-grams take seconds
            drafting = [name for name in drafting if name != LOOKUP]
        if not drafting:
            continue
        arms = {s: ours(rollout, s) for s in fitting}
        timed = {n: theirs(made.engines[n]) for n in drafting}
        counted = {n: theirs(made.engines[n], counted=True) for n in drafting}
        found = speeds({**arms, **timed}, {**arms, **counted}, batch_of(subject, size))
        fastest = compare(bench, f"smollm2 speculative b{size}", found, fitting, drafting)
        if size > 1:
            best.add(fastest)
    return best


def rollouts(
    bench: Bench, case: str, rollout: Rollout, made: Engines, among: Collection[str], batch: Batch
) -> Mapping[str, Made]:
    """A whole rollout in our engine with its bandit, and in some of vLLM's engines.

    Each is the median of `ROUNDS` with other noise, so other responses. Our bandit has learned in a
    rollout before. vLLM's engines have run all smaller batches, for which they compile some kernels
    when they come to them.
    """
    own = ours(rollout, "ucb")
    own(batch)
    falling = replace(batch, limits=[LEAST_TOKENS + i for i in range(len(batch.limits))])
    peer = {}
    for name in among:
        arm = theirs(made.engines[name])
        arm(falling)
        peer[name] = median_round(arm, batch)
    mine = median_round(own, batch)
    for name, one in {"bandit": mine, **peer}.items():
        bench.add_row(
            f"{case}, {name}",
            1e6 * one.seconds,
            tokens=sum(one.lengths),
            longest=max(one.lengths),
            tokens_per_s=round(one.tokens_per_s, 1),
        )
    versus(bench, case, mine, peer)
    return peer


# ---- shapes with random weights ------------------------------------------------------------------


def shapes(bench: Bench, made: Engines) -> None:
    counts = recorded_accepts()[CHAIN]
    rates = [sum(counts[n:]) / sum(counts) for n in range(1, len(counts))]
    synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
    subjects = {}
    for name, (shape, kv_gib) in SHAPES.items():
        if not bench.wanted(name):
            continue
        subject = of_shape(name, [*bench.words, *SHAPE_WORDS], shape, "cuda")
        subjects[name] = subject
        folder, drafter = made.scratch / name, made.scratch / f"{name}-drafter"
        config = {**shape.to_dict(), "architectures": ["Qwen2ForCausalLM"]}
        folder.mkdir()
        AutoConfig.for_model(**config).save_pretrained(folder)
        size = load_config(subject.words).drafter.draft_vocab
        random = Drafter(DraftSpec.of(subject.spec, draft_vocab=size), 0)
        write_state(random.state_dict(), subject, config, drafter)
        common: dict[str, Any] = {"max_model_len": 2048, "kv_gib": kv_gib, "load_format": "dummy"}
        made.start(f"{name} plain", folder, **common)
        spec = eagle3(drafter, len(rates), draft_load_format="auto", **synthetic)
        made.start(f"{name} eagle3 k=4", folder, most=max(SPEC_BATCHES), **spec, **common)
    made.ready()
    for name, subject in subjects.items():
        with bench.part(name):
            one_shape(bench, name, subject, made, accept_length(counts))


def one_shape(bench: Bench, name: str, subject: Subject, made: Engines, accept: float) -> None:
    rollout = subject.rollout(
        f"engine.strategies=off {CHAIN}",
        f"bandit.buckets={BATCHES}",
        f"engine.max_batch={max(BATCHES)}",
        f"engine.spec_max_batch={max(SPEC_BATCHES)}",
        "engine.num_pages=0",
        longest=512,
    )
    subject.weights.clear()  # the engine has its own copy
    plain_rows(bench, name, subject, rollout, made, f"{name} plain", BATCHES)
    if not (engine := made.engines.get(f"{name} eagle3 k=4")):
        return
    for size in SPEC_BATCHES:
        arms = {CHAIN: ours(rollout, CHAIN), "eagle3 k=4": theirs(engine)}
        counted = {**arms, "eagle3 k=4": theirs(engine, counted=True)}
        found = speeds(arms, counted, batch_of(subject, size))
        # Every pass of ours emits one token of a request, and would emit `accept`.
        own = found[CHAIN]
        factor = accept / own.accept_length
        found[CHAIN] = replace(own, tokens_per_s=factor * own.tokens_per_s, accept_length=accept)
        case = f"{name} speculative b{size}"
        compare(bench, case, found, [CHAIN], ["eagle3 k=4"], synthetic=True)


def book(bench: Bench) -> None:
    """The targets, each the worst of its rows, those of earlier parts among them."""

    def worst(target: str, cases: Sequence[str], field: str = "over_vllm") -> None:
        bench.book(target, cases, itemgetter(field))

    plain = [f"smollm2 plain b{b}" for b in BATCHES]
    worst("decode_smollm2_over_vllm_x", [*plain, *(f"smollm2 alone plain b{b}" for b in ALONE)])
    worst("decode_big_over_vllm_x", [f"{s} plain b{b}" for s in SHAPES for b in BATCHES])
    worst("spec_smollm2_over_vllm_eagle3_x", [f"smollm2 speculative b{b}" for b in SPEC_BATCHES])
    big = [f"{s} speculative b{b}" for s in SHAPES for b in SPEC_BATCHES]
    worst("spec_big_over_vllm_eagle3_x", big)
    worst("trace_over_vllm_x", ["trace of 128"])
    booked = [(t, way) for t, way, verify in ARMS if t == 0.0 or verify == "rejection"]
    accepts = [case_of(name, t, way) for name in FAMILIES for t, way in booked]
    worst("vllm_accept_over_ours_x", accepts, "vllm_over_ours")
    tokens = [f"export {name} greedy tokens" for name in FAMILIES]
    worst("vllm_greedy_equal_share", tokens, "equal_to_plain")


def run(bench: Bench) -> None:
    chosen = bench.own_options(OPTIONS)
    if lacking := lacks_vllm(chosen.vllm):
        raise SystemExit(f"peers: {lacking}")
    cases = [case_of(name, t, way) for name in FAMILIES for t, way, _ in ARMS]
    cases += [f"export {name} greedy tokens" for name in FAMILIES]
    parts = ((["smollm2"], smollm2), ([*SHAPES], shapes), (cases, exported))
    try:
        for names, part in parts:
            if any(bench.wanted(name) for name in names):
                with bench.part(part.__name__), engines(bench, chosen.vllm, chosen.logs) as made:
                    part(bench, made)
    finally:
        book(bench)
