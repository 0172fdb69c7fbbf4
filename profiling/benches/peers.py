"""Beside vLLM: the same weights, prompts and lengths in both engines, on one card, by turns.

`smollm2`: plain decoding and speculation of the warmed policy by batch, the trace of `rollout`, and
the rollout of a GRPO step, all with the drafter of the warm start; and the trace with our drafter
adapted as in a run. `15b`, `7b`: random weights of these shapes. `export`: vLLM with our
exported drafters, a Llama (the warmed policy), a Qwen3 and a Qwen2. `--only` picks parts; `--vllm`
is the folder with the package (`pip install --target`), which runs in processes of its own.

Tokens a second of a batch are of its tokens after the first: B (n - 1) / (T(n) - T(1)), medians of
wall times of `generate`, token ids in and out, end tokens ignored, T = 1. Both have their CUDA
graphs. Drafts of random models are not accepted, so their rows with speculation are synthetic: vLLM
accepts at the rates of the warmed policy (its `synthetic_acceptance_rates`), and our time of a pass
is multiplied by the same accept length.

In the rows of a comparison `over_vllm` is ours over vLLM's better setting. Rows of single settings
hold what the comparison is made of, and how each vLLM engine was started.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config

from driver.config.load import load_config
from driver.config.strategy import Strategy
from driver.drafter.eagle3 import config_of_state, write_drafter
from driver.model.drafter import Drafter, DraftSpec
from driver.model.spec import read_json
from driver.model.tiny import build_tokenizer
from driver.session.parts import Rollout
from profiling.benches.decode import SHAPE_WORDS, recorded_accepts
from profiling.benches.rollout import adapt
from profiling.peers.vllm import HOW_TO_GET, lacks_vllm
from profiling.rig.bench import Bench, say
from profiling.rig.results import ROOT
from profiling.rig.subjects import (
    QWEN2_7B,
    QWEN2_15B,
    Subject,
    of_checkpoint,
    of_shape,
)
from profiling.rig.workload import accept_length, trace_lengths
from profiling.studies.by_turns import (
    Batch,
    Made,
    Peers,
    compare,
    equal_share,
    ours,
    speeds,
    theirs,
)

NEEDS_WARM_START = True
BATCHES, SPEC_BATCHES = [1, 8, 32, 128, 256], [1, 32, 128]
CHAIN = "learned:4,1,5"  # as vLLM's chains of 4
STRATEGIES = ["ngram:6,1,7", CHAIN, "learned:6,1,7", "hybrid:6,4,16"]
CHAINS = [4, 8]  # tokens that vLLM drafts
LOOKUP, LOOKUP_BATCH = "ngram k=4", 32
ALONE = [1, 32]  # requests
MAX_ROWS = 1280  # of a pass, as in preset=h100
LEAST_TOKENS = 8  # of a request, in the rollout before those that are timed
PROMPTS, SAMPLES, STEP_TOKENS = 32, 8, 4096  # of a step of preset=h100
LOGS = ROOT / "out" / "vllm"
SHAPES: dict[str, tuple[Qwen2Config, int]] = {"15b": (QWEN2_15B, 5), "7b": (QWEN2_7B, 9)}  # GiB
EXPORT_PROMPTS, EXPORT_TOKENS = 64, 192
# Temperature, how vLLM drafts, how we verify. At T = 1 the last one is the same rule in both.
EXPORT_ARMS = (
    (0.0, "greedy", "shared"),
    (1.0, "greedy", "shared"),
    (1.0, "probabilistic", "rejection"),
)
BOOKED = ("T=0 greedy", "T=1 probabilistic")
DRAWN = ("greedy", "probabilistic")
# In bfloat16 1.3 % of SmolLM2's tokens differ even in vLLM's batch-invariant mode (an H200).
FLOAT32: dict[str, Any] = {"dtype": "float32", "attention_backend": "TRITON_ATTN"}
# Depths below and above seven layers, where vLLM's own choice of layers is another.
SMALL = {"qwen3": 6, "qwen2": 5}
HIDDEN = 256
SMALL_WORDS = [
    "preset=tiny",
    "model.dtype=bfloat16",
    "warmup.keep=true",
    "warmup.steps=200",
    "warmup.drafter_steps=300",
    "warmup.drafter_tokens=4096",
    "warmup.responses=256",
    "engine.max_batch=64",
    "engine.spec_max_batch=64",
    f"engine.strategies=off {CHAIN}",
]


def options(words: Sequence[str]) -> argparse.Namespace:
    """The options of this benchmark alone."""
    parser = argparse.ArgumentParser(prog="python -m profiling.bench peers", description=__doc__)
    parser.add_argument("--vllm", default="", help="folder that holds the package vllm")
    parser.add_argument("--logs", type=Path, default=LOGS, help="folder for what vLLM prints")
    return parser.parse_args(words)


def lacks() -> str:
    """Why `all` leaves this benchmark out."""
    return f"it takes ten minutes and runs by itself; it {HOW_TO_GET}"


@contextlib.contextmanager
def peers(bench: Bench, chosen: argparse.Namespace) -> Iterator[tuple[Peers, Path]]:
    """Engines that are closed at the end, and a folder for models and drafters."""
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        made = Peers(bench, chosen.vllm, chosen.logs, Path(scratch))
        stack.callback(made.close)
        yield made, Path(scratch)


def tokens_of(batch: int) -> int:
    return 256 if batch <= 32 else 128


def write_state(
    state: Mapping[str, Tensor], subject: Subject, target: Mapping[str, Any], folder: Path
) -> None:
    write_drafter(folder, state, config_of_state(state, subject.spec, target, torch.bfloat16))


def export(subject: Subject, folder: Path) -> Path:
    """Writes the drafter of a warm start as `driver.export` does."""
    assert subject.drafter is not None and subject.folder is not None
    target = read_json(subject.folder / "config.json")
    write_state(subject.drafter["drafter"], subject, target, folder)
    return folder


def eagle3(drafter: Path, k: int, **more: Any) -> dict[str, Any]:
    config = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": k, **more}
    return {"k": k, "speculative_config": config}


# ---- the warmed policy ---------------------------------------------------------------------------


def smollm2(bench: Bench, chosen: argparse.Namespace) -> None:
    subject = of_checkpoint("smollm2", bench.words, warmed=True, note=say)
    assert subject.folder is not None
    with peers(bench, chosen) as (vllm, scratch):
        drafter = export(subject, scratch / "drafter")
        # Its proposer on the host needs numba.
        lookup = {"method": "ngram_gpu", "num_speculative_tokens": 4}
        lookup |= {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
        longest: dict[str, Any] = {"max_model_len": 8192, "kv_gib": 12}
        vllm.start("plain", subject.folder, **longest)
        for k in CHAINS:
            vllm.start(f"eagle3 k={k}", subject.folder, **eagle3(drafter, k), **longest)
        vllm.start(LOOKUP, subject.folder, k=4, speculative_config=lookup, **longest)
        rollout = subject.rollout(
            f"engine.strategies={' '.join(['off', *STRATEGIES])}",
            longest=max(trace_lengths()) + 512,
        )
        vllm.ready()
        plain_rows(bench, "smollm2", subject, rollout, vllm)
        for size in SPEC_BATCHES:
            fitting = [s for s in STRATEGIES if size * Strategy.parse(s).num_verify <= MAX_ROWS]
            # Its n-grams take seconds, so they are measured once.
            left_out = {"plain"} if size == LOOKUP_BATCH else {"plain", LOOKUP}
            speculative = [name for name in vllm.engines if name not in left_out]
            if not speculative:
                continue
            batch = Batch(subject.prompts(size), [tokens_of(size)] * size)
            arms = {s: ours(rollout, s) for s in fitting}
            timed = {n: theirs(vllm.engines[n]) for n in speculative}
            counted = {n: theirs(vllm.engines[n], counted=True) for n in speculative}
            found = speeds({**arms, **timed}, {**arms, **counted}, batch)
            compare(bench, f"smollm2 speculative b{size}", found, fitting, speculative)
        lengths = trace_lengths()
        trace = Batch(subject.prompts(len(lengths)), lengths)
        made = rollouts(bench, "trace of 128", rollout, vllm, trace)
        with bench.part("step"):
            step = of_checkpoint("step", bench.words, warmed=True, note=say, longest=False)
            prompts = [ids for ids in step.prompts(PROMPTS) for _ in range(SAMPLES)]
            batch = Batch(prompts, [STEP_TOKENS] * len(prompts), stops=subject.stops)
            rollouts(bench, "rollout of a step", rollout, vllm, batch)
        with bench.part("adapted"):  # as in a run; vLLM keeps the drafter of the warm start
            adapt(rollout, subject, lengths)
            adapted = ours(rollout, "ucb")
            adapted(trace)
            peer = {name: made[name] for name in vllm.engines if name in made}
            versus(bench, "trace of 128, our drafter adapted", {"bandit": adapted(trace)}, peer)
        vllm.close(kept=["plain"])  # does it matter that the other processes are there?
        plain_rows(bench, "smollm2 alone", subject, rollout, vllm, batches=ALONE)


def plain_rows(
    bench: Bench,
    name: str,
    subject: Subject,
    rollout: Rollout,
    vllm: Peers,
    engine: str = "plain",
    batches: Sequence[int] = (),
) -> None:
    """Plain decoding by batch; no batches = all."""
    if engine not in vllm.engines:
        return
    for size in batches or BATCHES:
        batch = Batch(subject.prompts(size), [tokens_of(size)] * size)
        arms = {"off": ours(rollout, "off"), "plain": theirs(vllm.engines[engine])}
        compare(bench, f"{name} plain b{size}", speeds(arms, arms, batch), ["off"], ["plain"])


def rollouts(
    bench: Bench, case: str, rollout: Rollout, vllm: Peers, batch: Batch
) -> dict[str, Made]:
    """A whole rollout in our engine, plain and with its bandit, and in vLLM's engines.

    Our bandit has learned in a rollout before. The other arms have run all smaller batches, for
    which vLLM compiles some kernels when it comes to them.
    """
    own = {"off": ours(rollout, "off"), "bandit": ours(rollout, "ucb")}
    peer = {n: theirs(e) for n, e in vllm.engines.items() if n != LOOKUP}
    falling = replace(batch, limits=[LEAST_TOKENS + i for i in range(len(batch.limits))])
    arms = {**own, **peer}
    for name, arm in arms.items():
        arm(batch if name == "bandit" else falling)
    made = {name: arm(batch) for name, arm in arms.items()}
    for name, one in made.items():
        bench.add_row(
            f"{case}, {name}",
            1e6 * one.seconds,
            tokens=sum(one.lengths),
            longest=max(one.lengths),
            tokens_per_s=round(one.tokens_per_s, 1),
        )
    versus(bench, case, {n: made[n] for n in own}, {n: made[n] for n in peer})
    return made


def versus(bench: Bench, case: str, own: Mapping[str, Made], peer: Mapping[str, Made]) -> None:
    """A row of our best over vLLM's best, by tokens a second: responses of a step differ."""
    ours_by, by = (max(of, key=lambda n: of[n].tokens_per_s) for of in (own, peer))
    bench.add_row(
        case,
        1e6 * own[ours_by].seconds,
        ours=ours_by,
        tokens_per_s=round(own[ours_by].tokens_per_s, 1),
        vllm=by,
        vllm_tokens_per_s=round(peer[by].tokens_per_s, 1),
        vllm_s=round(peer[by].seconds, 3),
        over_vllm=round(own[ours_by].tokens_per_s / peer[by].tokens_per_s, 3),
    )


# ---- shapes with random weights ------------------------------------------------------------------


def shapes(bench: Bench, chosen: argparse.Namespace) -> None:
    wanted = {name: shape for name, shape in SHAPES.items() if bench.wanted(name)}
    counts = recorded_accepts()[CHAIN]
    rates = [sum(counts[n:]) / sum(counts) for n in range(1, len(counts))]
    synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
    with peers(bench, chosen) as (vllm, scratch):
        subjects = {}
        for name, (shape, kv_gib) in wanted.items():
            subject = of_shape(name, [*bench.words, *SHAPE_WORDS], shape, "cuda")
            subjects[name] = subject
            folder = scratch / name
            config = {**shape.to_dict(), "architectures": ["Qwen2ForCausalLM"]}
            write_config(folder, config)
            drafter = scratch / f"{name}-drafter"
            size = load_config(subject.words).drafter.draft_vocab
            random = Drafter(DraftSpec.of(subject.spec, draft_vocab=size), 0)
            write_state(random.state_dict(), subject, config, drafter)
            common: dict[str, Any] = {"max_model_len": 2048, "kv_gib": kv_gib}
            common["load_format"] = "dummy"
            vllm.start(f"{name} plain", folder, **common)
            spec = eagle3(drafter, len(rates), draft_load_format="auto", **synthetic)
            vllm.start(f"{name} eagle3 k=4", folder, most=max(SPEC_BATCHES), **spec, **common)
        vllm.ready()
        for name, subject in subjects.items():
            with bench.part(name):
                one_shape(bench, name, subject, vllm, accept_length(counts))


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True)
    AutoConfig.for_model(**config).save_pretrained(folder)


def one_shape(bench: Bench, name: str, subject: Subject, vllm: Peers, accept: float) -> None:
    rollout = subject.rollout(
        f"engine.strategies=off {CHAIN}",
        f"bandit.buckets={BATCHES}",
        f"engine.max_batch={max(BATCHES)}",
        f"engine.spec_max_batch={max(SPEC_BATCHES)}",
        "engine.num_pages=0",
        longest=512,
    )
    subject.weights.clear()  # the engine has its own copy
    plain_rows(bench, name, subject, rollout, vllm, f"{name} plain")
    if not (engine := vllm.engines.get(f"{name} eagle3 k=4")):
        return
    for size in SPEC_BATCHES:
        batch = Batch(subject.prompts(size), [tokens_of(size)] * size)
        arms = {CHAIN: ours(rollout, CHAIN), "eagle3 k=4": theirs(engine)}
        counted = {**arms, "eagle3 k=4": theirs(engine, counted=True)}
        found = speeds(arms, counted, batch)
        # Every pass of ours emits one token of a request, and would emit `accept`.
        own = found[CHAIN]
        factor = accept / own.accept_length
        found[CHAIN] = replace(own, tokens_per_s=factor * own.tokens_per_s, accept_length=accept)
        case = f"{name} speculative b{size}"
        compare(bench, case, found, [CHAIN], ["eagle3 k=4"], synthetic=True)


# ---- the exported drafter ------------------------------------------------------------------------


def exported(bench: Bench, chosen: argparse.Namespace) -> None:
    with peers(bench, chosen) as (vllm, scratch):
        subjects = {}
        for name in ("llama", *SMALL):
            words = bench.words if name == "llama" else small_words(name, scratch)
            subject = of_checkpoint(name, words, warmed=True, note=say)
            assert subject.folder is not None
            subjects[name] = subject
            drafter = export(subject, scratch / f"{name}-drafter")
            common: dict[str, Any] = {"max_model_len": 1024, "kv_gib": 2, "enforce_eager": True}
            specs = {w: eagle3(drafter, 4, draft_sample_method=w) for w in DRAWN}
            for way, spec in specs.items():
                vllm.start(f"{name} {way}", subject.folder, invariant=True, **spec, **common)
            exact = FLOAT32 if name == "llama" else {"invariant": True}
            vllm.start(f"{name} plain", subject.folder, **exact, **common)
            if exact is FLOAT32:
                vllm.start(f"{name} exact", subject.folder, **exact, **specs["greedy"], **common)
        vllm.ready()
        for name, subject in subjects.items():
            with bench.part(f"accept lengths {name}"):
                accept_lengths(bench, name, subject, vllm)
            with bench.part(f"equal tokens {name}"):
                equal_tokens(bench, name, subject, vllm)


def small_words(family: str, scratch: Path) -> list[str]:
    """The settings of a small random model of a family, which is written to the disk."""
    config = AutoConfig.for_model(
        family,
        vocab_size=len(build_tokenizer()),
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=SMALL[family],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        initializer_range=0.08,
        tie_word_embeddings=True,
        eos_token_id=build_tokenizer().eos_token_id,
        pad_token_id=build_tokenizer().pad_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    folder = scratch / family
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return [
        *SMALL_WORDS,
        f"model.path={folder}",
        f"run.root={scratch / 'runs'}",
        f"run.device={device}",
    ]


def accept_lengths(bench: Bench, name: str, subject: Subject, vllm: Peers) -> None:
    """Accept lengths of both engines for chains of 4."""
    words = [f"engine.strategies=off {CHAIN}", "engine.num_pages=0"]
    for temperature, way, verify in EXPORT_ARMS:
        rollout = subject.rollout(*words, f"engine.verify={verify}", longest=EXPORT_TOKENS + 512)
        batch = export_batch(subject, temperature)
        own = ours(rollout, CHAIN)(batch)
        made = theirs(vllm.engines[f"{name} {way}"], counted=True)(batch)
        bench.add_row(
            f"export {name} T={temperature:g} {way}",
            1e6 * made.seconds,
            accept_length=round(own.accept_length, 3),
            vllm_accept_length=round(made.accept_length, 3),
            vllm_over_ours=round(made.accept_length / own.accept_length, 4),
        )


def equal_tokens(bench: Bench, name: str, subject: Subject, vllm: Peers) -> None:
    """The share of vLLM's greedy tokens that are equal with the drafter and without."""
    batch = export_batch(subject, 0.0)
    exact = vllm.engines.get(f"{name} exact") or vllm.engines[f"{name} greedy"]
    arms = [theirs(engine, tokens=True) for engine in (exact, vllm.engines[f"{name} plain"])]
    made, plain = (arm(batch) for arm in arms)
    share = equal_share(made.tokens, plain.tokens)
    bench.add_row(f"export {name} greedy tokens", 1e6 * made.seconds, equal_to_plain=share)


def export_batch(subject: Subject, temperature: float) -> Batch:
    prompts = subject.prompts(EXPORT_PROMPTS)
    return Batch(prompts, [EXPORT_TOKENS] * len(prompts), temperature, subject.stops)


def book(bench: Bench) -> None:
    """The targets, each the worst of its rows, those of earlier parts among them."""
    rows = {row["case"]: row for row in [*bench.known, *bench.rows]}

    def worst(target: str, cases: Sequence[str], field: str = "over_vllm") -> None:
        if all(case in rows for case in cases):
            bench.got[target] = min(rows[case][field] for case in cases)

    plain = [f"smollm2 plain b{b}" for b in BATCHES]
    worst("decode_smollm2_over_vllm_x", [*plain, *(f"smollm2 alone plain b{b}" for b in ALONE)])
    worst("decode_big_over_vllm_x", [f"{s} plain b{b}" for s in SHAPES for b in BATCHES])
    worst("spec_smollm2_over_vllm_eagle3_x", [f"smollm2 speculative b{b}" for b in SPEC_BATCHES])
    big = [f"{s} speculative b{b}" for s in SHAPES for b in SPEC_BATCHES]
    worst("spec_big_over_vllm_eagle3_x", big)
    worst("trace_over_vllm_x", ["trace of 128"])
    families = ["llama", *SMALL]
    accepts = [f"export {name} {case}" for name in families for case in BOOKED]
    worst("vllm_accept_over_ours_x", accepts, "vllm_over_ours")
    tokens = [f"export {name} greedy tokens" for name in families]
    worst("vllm_greedy_equal_share", tokens, "equal_to_plain")


def run(bench: Bench) -> None:
    chosen = options(bench.options)
    if lacking := lacks_vllm(chosen.vllm):
        raise SystemExit(f"peers: {lacking}")
    try:
        if bench.wanted("smollm2"):
            with bench.part("smollm2"):
                smollm2(bench, chosen)
        if any(bench.wanted(name) for name in SHAPES):
            with bench.part("shapes"):
                shapes(bench, chosen)
        if bench.wanted("export"):
            with bench.part("export"):
                exported(bench, chosen)
    finally:
        book(bench)
