"""vLLM with drafters that this package exported: accept lengths and greedy tokens.

A Llama (the warmed policy) and small models of two other families, trained here for a minute.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from driver.model.tiny import build_tokenizer
from profiling.rig.bench import Bench, say
from profiling.rig.subjects import Subject, of_checkpoint
from profiling.studies.by_turns import Batch, ours, theirs
from profiling.studies.vllm_engines import Engines, eagle3, export

K, CHAIN = 4, "learned:4,1,5"  # chains of equal length
PROMPTS, TOKENS = 64, 192
# Temperature, how vLLM drafts, how we verify. At T = 1 the last one is the same rule in both.
ARMS = ((0.0, "greedy", "shared"), (1.0, "greedy", "shared"), (1.0, "probabilistic", "rejection"))
# In bfloat16 1.3 % of SmolLM2's tokens differ even in vLLM's batch-invariant mode (an H200).
FLOAT32: dict[str, Any] = {"dtype": "float32", "attention_backend": "TRITON_ATTN"}
# Depths below and above seven layers, where vLLM's own choice of layers is another.
SMALL = {"qwen3": 6, "qwen2": 5}
HIDDEN = 256
LLAMA = "llama"
FAMILIES = (LLAMA, *SMALL)
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


def case_of(name: str, temperature: float, way: str) -> str:
    return f"export {name} T={temperature:g} {way}"


def exported(bench: Bench, made: Engines) -> None:
    subjects: dict[str, Subject] = {}
    for name in FAMILIES:
        drafts = [way for t, way, _ in ARMS if bench.wanted(case_of(name, t, way))]
        equal = bench.wanted(f"export {name} greedy tokens")
        if not drafts and not equal:
            continue
        words = bench.words if name == LLAMA else small_words(name, made.scratch)
        subject = of_checkpoint(name, words, warmed=True, note=say)
        assert subject.folder is not None
        drafter = export(subject, made.scratch / f"{name}-drafter")
        common: dict[str, Any] = {"max_model_len": 1024, "kv_gib": 2, "enforce_eager": True}
        exact = FLOAT32 if name == LLAMA else {"invariant": True}
        for way in dict.fromkeys(drafts):
            spec = eagle3(drafter, K, draft_sample_method=way)
            made.start(f"{name} {way}", subject.folder, invariant=True, **spec, **common)
        if equal:
            spec = eagle3(drafter, K, draft_sample_method="greedy")
            made.start(f"{name} exact", subject.folder, **exact, **spec, **common)
            made.start(f"{name} plain", subject.folder, **exact, **common)
        subjects[name] = subject
    made.ready()
    for name, subject in subjects.items():
        with bench.part(f"accept lengths {name}"):
            accept_lengths(bench, name, subject, made)
        with bench.part(f"equal tokens {name}"):
            equal_tokens(bench, name, subject, made)


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


def accept_lengths(bench: Bench, name: str, subject: Subject, made: Engines) -> None:
    """Accept lengths of both engines for chains of 4."""
    words = [f"engine.strategies=off {CHAIN}", "engine.num_pages=0"]
    for temperature, way, verify in ARMS:
        if not (engine := made.engines.get(f"{name} {way}")):
            continue
        rollout = subject.rollout(*words, f"engine.verify={verify}", longest=TOKENS + 512)
        batch = export_batch(subject, temperature)
        own = ours(rollout, CHAIN)(batch).accept_length
        got = theirs(engine, counted=True)(batch)
        bench.add_row(
            case_of(name, temperature, way),
            1e6 * got.seconds,
            accept_length=round(own, 3),
            vllm_accept_length=round(got.accept_length, 3),
            vllm_over_ours=round(got.accept_length / own, 4),
        )


def equal_tokens(bench: Bench, name: str, subject: Subject, made: Engines) -> None:
    """The share of vLLM's greedy tokens that are equal with the drafter and without."""
    pair = [made.engines.get(f"{name} {which}") for which in ("exact", "plain")]
    arms = [theirs(engine, tokens=True) for engine in pair if engine]
    if len(arms) < len(pair):
        return
    batch = export_batch(subject, 0.0)
    got, plain = (arm(batch) for arm in arms)
    share = equal_share(got.tokens, plain.tokens)
    bench.add_row(f"export {name} greedy tokens", 1e6 * got.seconds, equal_to_plain=share)


def export_batch(subject: Subject, temperature: float) -> Batch:
    prompts = subject.prompts(PROMPTS)
    return Batch(prompts, [TOKENS] * len(prompts), temperature, subject.stops)


def equal_share(some: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> float:
    """Share of the tokens before the first difference of each response."""
    equal = total = 0
    for one, other in zip(some, others, strict=True):
        longest = max(len(one), len(other))
        same = [i for i in range(longest) if one[i : i + 1] != other[i : i + 1]]
        equal += same[0] if same else longest
        total += longest
    return round(equal / total, 6)
