"""`python -m profiling.rig.tables`: writes the tables of README and docs from `results/`.

A table stands between `<!-- results: NAME -->` and `<!-- end of results -->`. The lines between the
markers are replaced. `--check` writes nothing and exits 1 if a document differs.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from profiling.rig.beside import peers_table, speeds_table
from profiling.rig.results import Target, known_targets

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md")
MARKED = re.compile(
    r"(?P<begin><!-- results: (?P<name>\w+) -->\n).*?(?P<end><!-- end of results -->)", re.DOTALL
)
UNITS = {"us": "µs", "ms": "ms", "s": "s", "seconds": "s", "gb": "GB", "points": "points"}
EQUAL_SHARES = ("identity", "equal", "equal_share", "drafter", "_responses_32k", "_arrivals")


@dataclass(frozen=True)
class Case:
    """One line of the table of ops, with or without a measured case."""

    op: str
    source: str
    text: str = ""
    target: str = ""  # its name in `targets.toml`


HEADLINES = (
    ("GRPO step, full system over plain decoding", "grpo", "step_over_off_x"),
    ("steps with equal rewards and lengths, of 20", "grpo", "identical_reward_steps"),
    ("128 requests with a long tail, over plain decoding", "rollout", "trace_over_off_x"),
    ("tokens a second at 1 request, over plain decoding", "decode", "spec_over_plain_b1_x"),
    ("equal tokens, trained drafter, bf16", "identity", "smollm2_trained_drafter"),
    ("attention op, 32/8 heads, 32 requests of 4k keys", "attention", "decode_b32_kv4k_of_copy"),
)

OPS = (
    Case(
        "`tree_attention`",
        "FlashAttention, SpecInfer",
        "tree of 16, B=1, kv 8k, 32/8 heads × 128, bf16",
        "tree16_b1_kv8k_us",
    ),
    Case("", "", "tree of 8, B=32, kv 8k", "tree8_b32_kv8k_of_copy"),
    Case("", "", "decode, B=32, kv 4k", "decode_b32_kv4k_of_copy"),
    Case("`sample`", "Gumbel-max, Philox", "64 rows of 151,936", "sample_b64_us"),
    Case("`verify_tree`", "SpecInfer, keyed noise", "16 rows, B=1", "verify_tree16_b1_us"),
    Case(
        "`verify_rejection`",
        "Leviathan et al., SpecInfer",
        "time of `verify_tree` over its, 64 chains of 5",
        "verify_tree_over_rejection_x",
    ),
    Case(
        "`expand_tree`, `select_nodes`",
        "EAGLE-2, keyed noise",
        "8 levels of top 4, vocabulary 16,384, inputs of 30 MB",
        "expand_depth8_top4_b1_us",
    ),
    Case(
        "`linear_rows`, `linear_silu_mul`, `linear_append`, `fold_partials`, `rms_norm`, "
        "`silu_mul`",
        "SwiGLU, RMSNorm",
        "16 rows, 152064×3584",
        "linear_16row_152064x3584_of_copy",
    ),
    Case("", "", "1 row, 18944×3584", "linear_1row_18944x3584_of_copy"),
    Case("`append_kv`, `commit_path`, `copy_pages`", "RoFormer, vLLM's paging"),
    Case("`gather_new_rows`, `draft_inputs`, `draft_level_inputs`", "EAGLE"),
    Case("`advance_batch`, `arm_passes`, `GraphPool`", "conditional nodes of CUDA graphs"),
    Case(
        "`ngram_propose`",
        "prompt lookup, suffix trees",
        "B=1, 16k tokens in the group, in the L2",
        "propose_16k_b1_us",
    ),
)


def figure(name: str, value: float | None) -> str:
    """A value with the unit that its target's name ends in.

    Example:
        >>> figure("sample_b64_us", 33.02), figure("decode_b32_kv4k_of_copy", 0.932)
        ('33 µs', '93.2 % of copy')
    """
    if value is None:
        return "-"
    if "_of_copy" in name:
        return f"{100 * value:.3g} % of copy"
    if name.endswith("_x"):
        return f"{value:.2f} ×"
    if name.endswith(EQUAL_SHARES):
        return f"{100 * value:.7g} %"  # one token of a million must show
    if name.endswith("_of_weight_read") or "share" in name:
        return f"{100 * value:.3g} %"
    unit = UNITS.get(name.rpartition("_")[2], "")
    number = f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    return f"{number} {unit}".rstrip()


def headlines_table(targets: Sequence[Target]) -> list[str]:
    """The results that the README shows; exact commands are below all targets."""
    by_name = {(target.table, target.name): target for target in targets}
    named = [(text, by_name[table, name]) for text, table, name in HEADLINES]
    shown = [(text, target, target.figure) for text, target in named if target.figure]
    cards = {found.meta["card"] for *_, found in shown}
    head = f"{', '.join(sorted(cards))}; SmolLM2-135M but for the last row"
    out = [f"| {head} | measured | command | commit |", "|---|---|---|---|"]
    for text, target, found in shown:
        quick = " --quick" if "--quick" in found.meta["command"] else ""
        command = f"`python -m profiling.bench {target.table}{quick}`"
        out.append(f"| {text} | {figure(target.name, found.value)} | {command} | {found.commit} |")
    return out


def ops_table(targets: Sequence[Target]) -> list[str]:
    by_name = {target.name: target for target in targets}
    out = ["| op | source | case | measured | target | commit |", "|---|" + "---|" * 5]
    shown = []
    for case in OPS:
        got = wanted = commit = ""
        if case.target:
            target = by_name[case.target]
            shown.append(target)
            got = figure(target.name, target.got)
            wanted, commit = _wanted(target), target.commit
        out.append(f"| {case.op} | {case.source} | {case.text} | {got} | {wanted} | {commit} |")
    return [*out, "", *provenance(shown)]


def targets_table(targets: Sequence[Target]) -> list[str]:
    states = [target.state for target in targets]
    out = [
        f"{len(targets)} targets: {states.count('met')} met, {states.count('unmet')} not met,"
        f" {states.count('missing')} not measured.",
        "",
        "| target | wanted | measured | | commit |",
        "|---|---|---|---|---|",
    ]
    for target in targets:
        state = {"unmet": "not met", "missing": "not measured"}.get(target.state, target.state)
        out.append(
            f"| {target.table}: `{target.name}` | {_wanted(target)} |"
            f" {figure(target.name, target.got)} | {state} | {target.commit} |"
        )
    return [*out, "", *provenance(targets)]


def beside_vllm(targets: Sequence[Target]) -> list[str]:
    """The comparisons with vLLM and what made them."""
    made = provenance([target for target in targets if target.table == "peers"])
    return [*peers_table(), "", *made]


TABLES = {
    "headlines": headlines_table,
    "beside": lambda targets: speeds_table(),
    "ops": ops_table,
    "peers": beside_vllm,
    "targets": targets_table,
}


def provenance(targets: Sequence[Target]) -> list[str]:
    """A line for each result behind a table: card, driver, CUDA, torch, commit, date, command."""
    made = [(t.table, t.figure.meta) for t in targets if t.figure]
    lines = [f"* {meta.get('bench', table)}: {_made_by(meta)}" for table, meta in made]
    return list(dict.fromkeys(lines))


def _made_by(meta: dict) -> str:
    parts = [
        meta["card"],
        f"driver {meta['driver']}" if meta["driver"] else "",
        f"CUDA {meta['cuda']}" if meta["cuda"] else "",
        f"torch {meta['torch']}",
        f"commit {meta['commit']}" if meta["commit"] else "commit not recorded",
        f"{meta['date'][:10]}, `{re.sub(r' --out [^ ]+', '', meta['command'])}`",
        meta.get("note", ""),
    ]
    return ", ".join(part for part in parts if part)


def _wanted(target: Target) -> str:
    ((bound, value),) = target.wanted.items()
    return f"{bound.replace('_', ' ')} {figure(target.name, value)}"


def filled(text: str, targets: Sequence[Target]) -> str:
    """The text with every marked table replaced; ValueError for an unknown one."""

    def table(match: re.Match[str]) -> str:
        if match["name"] not in TABLES:
            raise ValueError(f"unknown table {match['name']}: use one of {', '.join(TABLES)}")
        lines = "\n".join(TABLES[match["name"]](targets))
        return f"{match['begin']}\n{lines}\n\n{match['end']}"

    return MARKED.sub(table, text)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m profiling.rig.tables", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if a table differs"
    )
    args = parser.parse_args(argv)
    differs = []
    for path in DOCUMENTS:
        before = path.read_text(encoding="utf-8")
        after = filled(before, known_targets())
        if before != after:
            differs.append(path.relative_to(ROOT).as_posix())
            if not args.check:
                path.write_text(after, encoding="utf-8")
    if args.check and differs:
        files = " and ".join(differs)
        sys.stderr.write(f"{files}: tables differ: run python -m profiling.rig.tables\n")
        return 1
    sys.stdout.write(f"written: {', '.join(differs)}\n" if differs else "nothing to change\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
