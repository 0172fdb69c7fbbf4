"""`python -m profiling.rig.tables`: writes the README's tables from `results/`.

Each table stands between `<!-- results: NAME -->` and `<!-- end of results -->`; the lines between
are replaced. `--check` writes nothing and exits 1 where they differ.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from profiling.rig.results import Figure, Target, known_targets
from profiling.rig.targets import wanted_text

README = Path(__file__).resolve().parents[2] / "README.md"
MARKED = re.compile(
    r"(?P<begin><!-- results: (?P<name>\w+) -->\n).*?(?P<end><!-- end of results -->)", re.DOTALL
)
UNITS = {"us": "µs", "ms": "ms", "seconds": "s", "gb": "GB", "points": "points"}


@dataclass(frozen=True)
class Case:
    """One line of the table of ops: a measured case, or none yet."""

    op: str
    source: str
    text: str = ""
    target: str = ""  # its name in `targets.toml`


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
    Case("`verify_rejection`", "Leviathan et al., SpecInfer", "the classical rule, for comparison"),
    Case(
        "`expand_tree`, `select_nodes`",
        "EAGLE-2, keyed noise",
        "8 levels of top 4, vocabulary 16,384",
        "expand_depth8_top4_b1_us",
    ),
    Case(
        "`linear_rows`, `linear_silu_mul`, `linear_append`, `rms_norm`, `silu_mul`",
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
    if name.endswith(("identity", "equal", "drafter")):
        return f"{100 * value:.7g} %"  # one token of a million must show
    if name.endswith("_of_weight_read") or "share" in name:
        return f"{100 * value:.3g} %"
    if name.endswith("_x"):
        return f"{value:.2f} ×"
    unit = UNITS.get(name.rpartition("_")[2], "")
    return f"{value:.3g} {unit}".rstrip()


def ops_table(targets: Sequence[Target]) -> list[str]:
    """The ops with one measured case or more each."""
    by_name = {target.name: target for target in targets}
    out = ["| op | source | case | measured | wanted |", "|---|---|---|---|---|"]
    shown = []
    for case in OPS:
        got = wanted = ""
        if case.target:
            target = by_name[case.target]
            shown.append(target)
            got = figure(target.name, target.got)
            wanted = _wanted(target)
        out.append(f"| {case.op} | {case.source} | {case.text} | {got} | {wanted} |")
    return [*out, "", *provenance([(target.table, target.figure) for target in shown])]


def targets_table(targets: Sequence[Target]) -> list[str]:
    """Every target, met or not, and what other cards have for it."""
    cards = sorted({card for target in targets for card in target.elsewhere})
    heads = [f"one {card.removeprefix('NVIDIA ')}" for card in cards]
    out = [
        f"{len(targets)} targets: {_counted([target.state for target in targets])}.",
        *(
            f"Beside them, {head}: {_counted(_states(targets, card))}."
            for head, card in zip(heads, cards, strict=True)
        ),
        "",
        "<details><summary>All targets</summary>",
        "",
        "| " + " | ".join(["target", "wanted", "got", "", *heads]) + " |",
        "|---" * (4 + len(cards)) + "|",
    ]
    for target in targets:
        cells = [f"{target.table}: `{target.name}`", _wanted(target)]
        cells += [figure(target.name, target.got), target.state]
        for card in cards:
            other = target.elsewhere.get(card)
            cells.append(
                f"{figure(target.name, other.value)}, {target.state_of(other)}" if other else ""
            )
        out.append("| " + " | ".join(cells) + " |")
    figures = [(t.table, figure) for t in targets for figure in (t.figure, *t.elsewhere.values())]
    return [*out, "", *provenance(figures), "", "</details>"]


def _states(targets: Sequence[Target], card: str) -> list[str]:
    """Of the targets that a card of another kind has figures for."""
    return [t.state_of(t.elsewhere[card]) for t in targets if card in t.elsewhere]


def _counted(states: Sequence[str]) -> str:
    """How many are met and how many are not: "3 met, 1 not, 1 without a result yet"."""
    out = f"{states.count('met')} met, {states.count('unmet')} not"
    missing = states.count("missing")
    return out + (f", {missing} without a result yet" if missing else "")


TABLES = {"ops": ops_table, "targets": targets_table}


def provenance(figures: Sequence[tuple[str, Figure | None]]) -> list[str]:
    """A line for each result behind a table: card, driver, CUDA, torch, commit, date.

    Args:
        figures: with the tables of their targets.
    """
    lines = [f"* {table}: {_made_by(figure.meta)}" for table, figure in figures if figure]
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
    bound = wanted_text(target.wanted).rpartition(" ")[0]
    ((_, value),) = target.wanted.items()
    return f"{bound} {figure(target.name, value)}"


def filled(text: str, targets: Sequence[Target]) -> str:
    """The text with every marked table written anew.

    Args:
        text: of the README.
        targets: with what they got.

    Raises:
        ValueError: a marker names no table.
    """

    def table(match: re.Match[str]) -> str:
        if match["name"] not in TABLES:
            raise ValueError(f"no table {match['name']}: there are {', '.join(TABLES)}")
        lines = "\n".join(TABLES[match["name"]](targets))
        return f"{match['begin']}\n{lines}\n\n{match['end']}"

    return MARKED.sub(table, text)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m profiling.rig.tables", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 where it differs"
    )
    args = parser.parse_args(argv)
    before = README.read_text(encoding="utf-8")
    after = filled(before, known_targets())
    if args.check:
        if before != after:
            sys.stderr.write("README.md differs from results: run python -m profiling.rig.tables\n")
        return int(before != after)
    README.write_text(after, encoding="utf-8")
    sys.stdout.write("README.md is as the results are\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
