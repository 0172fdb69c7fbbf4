"""The tables of results beside vLLM, TRL and transformers, from the results of three benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from profiling.rig.results import RESULTS, load, newest_first
from profiling.rig.workload import trace_lengths

Row = Mapping[str, Any]
VERSIONS = "vLLM 0.24.0, TRL 1.16.0, transformers 5.17"
COLUMNS = ("ours", "vLLM", "TRL + vLLM", "`generate`")
# Case of `bench peers` -> its name.
CASES = {
    "smollm2 plain b1": "SmolLM2-135M, plain, 1 request",
    "smollm2 plain b256": "SmolLM2-135M, plain, 256 requests",
    "smollm2 speculative b1": "SmolLM2-135M, speculation, 1 request",
    "smollm2 speculative b128": "SmolLM2-135M, speculation, 128 requests",
    "rollout of a step": "SmolLM2-135M, rollout of a GRPO step",
    "7b plain b1": "7B shape, plain, 1 request",
    "7b plain b256": "7B shape, plain, 256 requests",
    "7b speculative b32": "7B shape, speculation, 32 requests",
}
TRACE = "SmolLM2-135M, 128 requests with a long tail"
TRAINERS = {"full": "ours", "trl_vllm": "TRL + vLLM", "trl": "`generate`"}
BENCHES = ("peers", "rollout", "grpo")
SHORT = ", 512 tokens"  # end of the cases of runs that TRL makes too


def newest(bench: str, results: Path) -> tuple[dict[str, Row], dict[str, Any]]:
    """Case -> row of the newest result of a benchmark, and its `meta`; both empty without one."""
    for path in newest_first(results, bench)[:1]:
        result = load(path)
        return {row["case"]: row for row in result["rows"]}, result["meta"]
    return {}, {}


def speeds(results: Path = RESULTS) -> list[tuple[str, dict[str, float]]]:
    """Text -> column -> tokens a second, of what was measured."""
    peers, rollout, grpo = (newest(name, results)[0] for name in BENCHES)
    out = []
    for case, text in CASES.items():
        if row := peers.get(case):
            out.append((text, {"ours": row["tokens_per_s"], "vLLM": row["vllm_tokens_per_s"]}))
    cells = {}
    if row := peers.get("trace of 128"):
        cells = {"ours": row["tokens_per_s"], "vLLM": row["vllm_tokens_per_s"]}
    elif row := rollout.get("bandit, adapted"):
        cells = {"ours": row["tokens_per_s"]}
    if row := rollout.get("transformers static"):
        cells["`generate`"] = 1e6 * sum(trace_lengths()) / row["median_us"]
    out.append((TRACE, cells))
    rows = {column: grpo.get(f"{arm} seed 0{SHORT}") for arm, column in TRAINERS.items()}
    step = {column: row["tokens_per_s"] for column, row in rows.items() if row}
    out.append((f"GRPO step{SHORT} a response", step))
    return [(text, found) for text, found in out if len(found) > 1]


def speeds_table(results: Path = RESULTS) -> list[str]:
    """Tokens a second of each system; the fastest is bold."""
    out = [f"| tokens a second | {' | '.join(COLUMNS)} |", "|---|" + "---|" * len(COLUMNS)]
    for text, found in speeds(results):
        best = max(found.values())
        cells = [f"{found[name]:,.0f}" if name in found else "" for name in COLUMNS]
        marked = [
            f"**{c}**" if found.get(n) == best else c for n, c in zip(COLUMNS, cells, strict=True)
        ]
        out.append(f"| {text} | {' | '.join(marked)} |")
    found = {name: meta for name in BENCHES if (meta := newest(name, results)[1])}
    made = ", ".join(f"{name} {meta['commit']}" for name, meta in found.items())
    cards = ", ".join(dict.fromkeys(f"{m['card']}, torch {m['torch']}" for m in found.values()))
    return [*out, "", f"{cards}; {VERSIONS}. Commits: {made}."]


def peers_table(results: Path = RESULTS) -> list[str]:
    """Each comparison with vLLM, and the accept lengths of exported drafters."""
    rows, _ = newest("peers", results)
    out = ["| case | ours, tokens/s | vLLM, tokens/s | ours / vLLM |", "|---|---|---|---|"]
    for case, row in rows.items():
        if "over_vllm" in row:
            own = f"{row['tokens_per_s']:,.0f} ({row['ours']})"
            peer = f"{row['vllm_tokens_per_s']:,.0f} ({row['vllm']})"
            out.append(f"| {case} | {own} | {peer} | {row['over_vllm']:.2f} × |")
    if len(out) == 2:
        out = ["Speeds are not measured yet."]
    out += ["", "| exported drafter | accept length, ours | vLLM |", "|---|---|---|"]
    for case, row in rows.items():
        if "vllm_accept_length" in row:
            lengths = f"{row['accept_length']:.2f} | {row['vllm_accept_length']:.2f}"
            out.append(f"| {case.removeprefix('export ')} | {lengths} |")
    out += ["", "| vLLM's greedy tokens | equal with the drafter and without |", "|---|---|"]
    for case, row in rows.items():
        if "equal_to_plain" in row:
            family = case.split()[1]
            out.append(f"| {family} | {100 * row['equal_to_plain']:.7g} % |")
    return out
