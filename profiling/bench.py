"""Runs one benchmark and writes its JSON: `python -m profiling.bench layers [--quick]`.

A benchmark is a module of `profiling.benches` with `run(bench: Bench) -> None`: it adds rows, and
values for the targets of its own table in `targets.toml`. A target without a value is unmet.
"""

import argparse
import datetime
import importlib
import json
import pkgutil
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch

from profiling import benches, timing

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent


@dataclass
class Bench:
    """What a benchmark fills: rows of its table, and what its targets got.

    `copy_gb_per_s` is this card's ceiling; `quick` asks for few cases; `wanted` tells whether a
    case is to run (`--only` is a regular expression over case names).
    """

    name: str
    copy_gb_per_s: float
    quick: bool = False
    only: str = ""
    rows: list[dict] = field(default_factory=list)
    got: dict[str, float] = field(default_factory=dict)

    def wanted(self, case: str) -> bool:
        return re.search(self.only, case) is not None

    def add(
        self,
        case: str,
        ours: timing.Timing,
        num_bytes: int,
        peers: dict[str, timing.Timing] | None = None,
        **more: float | bool,
    ) -> dict:
        """Appends one row and prints it; `num_bytes` are those that the case must move."""
        gb_per_s = num_bytes / ours.median_us / 1e3
        row = {
            "bench": self.name,
            "case": case,
            "median_us": round(ours.median_us, 3),
            "spread": round(ours.spread, 4),
            "gb_per_s": round(gb_per_s, 1),
            "fraction_of_copy": round(gb_per_s / self.copy_gb_per_s, 4),
            "ratio_to": {
                peer: round(ours.median_us / peer_timing.median_us, 4)
                for peer, peer_timing in (peers or {}).items()
            },
            **more,
        }
        self.rows.append(row)
        say(
            f"{case:44} {row['median_us']:9.2f} us {gb_per_s:7.0f} GB/s "
            f"{row['fraction_of_copy']:6.1%} of copy  "
            + "  ".join(f"{ratio:.3f} x {peer}" for peer, ratio in row["ratio_to"].items())
        )
        return row


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def targets_of(name: str, got: dict[str, float]) -> list[dict]:
    """The targets of a benchmark's table, in its order, with what was got."""
    table = tomllib.loads((ROOT / "targets.toml").read_text())[name]
    unknown = set(got) - set(table)
    if unknown:
        raise ValueError(f"no such target in [{name}]: {', '.join(sorted(unknown))}")
    rows = []
    for target, wanted in table.items():
        value = got.get(target)
        met = value is not None and (
            value <= wanted["at_most"] if "at_most" in wanted else value >= wanted["at_least"]
        )
        rows.append({"name": target, "wanted": wanted, "got": value, "met": met})
    return rows


def output_of(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def meta(command: str, bench: Bench) -> dict:
    card = torch.cuda.get_device_name()
    driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "card": card,
        "driver": driver.split("\n")[0],
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "commit": output_of("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"),
        "command": command,
        "date": datetime.date.today().isoformat(),
        "copy_gb_per_s": round(bench.copy_gb_per_s, 1),
        "empty_graph_us": round(timing.empty_graph_us(), 3),
    }


def card_folder(card: str) -> str:
    """A folder's name for a card: "NVIDIA H100 80GB HBM3" -> "h100-80gb-hbm3"."""
    return re.sub(r"[^a-z0-9]+", "-", card.lower().removeprefix("nvidia")).strip("-")


def main(argv: list[str] | None = None) -> int:
    names = sorted(module.name for module in pkgutil.iter_modules(benches.__path__))
    parser = argparse.ArgumentParser(prog="python -m profiling.bench", description=__doc__)
    parser.add_argument("name", choices=names)
    parser.add_argument("--quick", action="store_true", help="only the cases of the targets")
    parser.add_argument("--only", default="", help="cases that match this regular expression")
    parser.add_argument("--out", type=Path, default=ROOT / "results", help="folder of the JSON")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        say("profiling.bench: no CUDA device")
        return 1
    bench = Bench(args.name, timing.copy_bandwidth(), args.quick, args.only)
    command = "python -m profiling.bench " + " ".join(argv if argv is not None else sys.argv[1:])
    about = meta(command, bench)
    say(
        f"{about['card']}: copy {about['copy_gb_per_s']} GB/s, "
        f"empty graph {about['empty_graph_us']} us"
    )
    importlib.import_module(f"profiling.benches.{args.name}").run(bench)
    targets = targets_of(args.name, bench.got)
    for target in targets:
        say(f"{'met  ' if target['met'] else 'UNMET'} {target['name']}: {target['got']}")
    path = args.out / card_folder(about["card"]) / f"{args.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {"meta": about, "rows": bench.rows, "targets": targets}
    path.write_text(json.dumps(result, indent=1) + "\n")
    say(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
