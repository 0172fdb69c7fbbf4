"""The tables of results beside vLLM, TRL and transformers, from the results of three benchmarks."""

from pathlib import Path

from profiling.rig.results import RESULTS, Row, newest
from profiling.rig.workload import trace_lengths

VERSIONS = "vLLM 0.24.0, TRL 1.16.0, transformers 5.17"
COLUMNS = ("ours", "vLLM", "TRL + vLLM", "`generate`")
# Case of `bench peers` -> its name; `peers_table` has all cases.
CASES = {
    "smollm2 plain b256": "SmolLM2-135M, plain, 256 requests",
    "smollm2 speculative b128": "SmolLM2-135M, speculation, 128 requests",
    "rollout of a step": "SmolLM2-135M, rollout of a GRPO step",
    "7b plain b256": "7B shape, plain, 256 requests",
    "7b speculative b128": "7B shape, speculation, 128 requests",
}
TRACE = "SmolLM2-135M, 128 requests with a long tail"
TRAINERS = {"full": "ours", "trl_vllm": "TRL + vLLM", "trl": "`generate`"}
SHORT = ", 512 tokens"  # end of the cases of runs that TRL makes too


def found_rows(results: Path) -> list[tuple[str, dict[str, tuple[float, Row]]]]:
    """Text -> column -> tokens a second and the row that they are of."""
    peers, rollout, grpo = (newest(name, results) for name in ("peers", "rollout", "grpo"))

    def both(case: str) -> dict[str, tuple[float, Row]]:
        sides = {"ours": "tokens_per_s", "vLLM": "vllm_tokens_per_s"}
        row = peers.get(case)
        return {side: (row[rate], row) for side, rate in sides.items()} if row else {}

    out = [(text, both(case)) for case, text in CASES.items()]
    tail = both("trace of 128")
    if not tail and (row := rollout.get("bandit, adapted")):
        tail["ours"] = row["tokens_per_s"], row
    if row := rollout.get("transformers static"):
        tail["`generate`"] = 1e6 * sum(trace_lengths()) / row["median_us"], row
    steps = {column: grpo.get(f"{arm} seed 0{SHORT}") for arm, column in TRAINERS.items()}
    step = {column: (row["tokens_per_s"], row) for column, row in steps.items() if row}
    out += [(TRACE, tail), (f"GRPO step{SHORT} a response", step)]
    return [(text, cells) for text, cells in out if len(cells) > 1]


def speeds_table(results: Path = RESULTS) -> list[str]:
    """Tokens a second of each system; the fastest is bold."""
    out = [f"| tokens a second | {' | '.join(COLUMNS)} |", "|---|" + "---|" * len(COLUMNS)]
    cards: dict[str, None] = {}  # in the order of the rows
    commits: dict[str, None] = {}
    for text, found in found_rows(results):
        best = max(rate for rate, _ in found.values())
        shown = {name: f"{rate:,.0f}" for name, (rate, _) in found.items()}
        shown |= {name: f"**{shown[name]}**" for name, (rate, _) in found.items() if rate == best}
        out.append(f"| {text} | {' | '.join(shown.get(name, '') for name in COLUMNS)} |")
        for _, row in found.values():
            meta = row["meta"]
            cards[f"{meta['card']}, torch {meta['torch']}"] = None
            commits[f"{meta['bench']} {row['commit']}"] = None
    return [*out, "", f"{', '.join(cards)}; {VERSIONS}. Commits: {', '.join(commits)}."]


def peers_table(results: Path = RESULTS) -> list[str]:
    """Each comparison with vLLM, and the accept lengths of exported drafters."""
    rows = newest("peers", results)
    columns = ("case", "ours, tokens/s", "vLLM, tokens/s", "ours / vLLM", "commit")
    out = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for case, row in rows.items():
        if "over_vllm" in row:
            own = f"{row['tokens_per_s']:,.0f} ({row['ours']})"
            peer = f"{row['vllm_tokens_per_s']:,.0f} ({row['vllm']})"
            out.append(f"| {case} | {own} | {peer} | {row['over_vllm']:.2f} × | {row['commit']} |")
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
