"""A short table of Nsight Compute's CSV: `python -m profiling.kernels.ncu_table x.csv`."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from profiling.kernels.resources import short_name

# Column of the table -> metric, factor, digits after the point.
COLUMNS = {
    "us": ("gpu__time_duration.sum", 1e-3, 2),
    "DRAM %": ("dram__throughput.avg.pct_of_peak_sustained_elapsed", 1.0, 1),
    "tensor %": ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed", 1.0, 1),
    "registers": ("launch__registers_per_thread", 1.0, 0),
    "occupancy %": ("sm__warps_active.avg.pct_of_peak_sustained_active", 1.0, 1),
}
WIDTH = 11


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel; a metric that the card does not have is None."""

    kernel: str
    grid: str
    block: str
    values: dict[str, float | None]  # by column


def parse(lines: Iterable[str]) -> list[Launch]:
    """The launches of a report, in order.

    Args:
        lines: of `ncu --csv --page raw`; what ncu prints before the header is skipped.

    Raises:
        ValueError: there is no header, or no launch.

    Example:
        >>> parse(['"ID","Kernel Name","launch__registers_per_thread"', '"","","register/thread"',
        ...        '"0","void k(int)","32"'])[0].values["registers"]
        32.0
    """
    text = [line for line in lines if line.startswith('"')]
    if not text or not text[0].startswith('"ID"'):
        raise ValueError('no table of ncu: no line starts with "ID"')
    _, *rows = csv.DictReader(text) if len(text) > 1 else [{}]  # the first row holds the units
    if not rows:
        raise ValueError("no kernel was profiled: did the range profile_target hold a launch?")
    return [
        Launch(
            short_name(row["Kernel Name"]),
            row.get("Grid Size", ""),
            row.get("Block Size", ""),
            {name: _number(row.get(metric), by) for name, (metric, by, _) in COLUMNS.items()},
        )
        for row in rows
    ]


def _number(text: str | None, factor: float) -> float | None:
    try:
        return float((text or "").replace(",", "")) * factor
    except ValueError:  # "n/a"
        return None


def table(launches: list[Launch]) -> list[str]:
    """Lines of the table."""
    out = [" ".join(f"{name:>{WIDTH}}" for name in COLUMNS) + "  kernel"]
    for launch in launches:
        cells = [
            f"{'-':>{WIDTH}}" if value is None else f"{value:{WIDTH}.{COLUMNS[name][2]}f}"
            for name, value in launch.values.items()
        ]
        out.append(f"{' '.join(cells)}  {launch.kernel} {launch.grid}x{launch.block}".rstrip("x "))
    return out


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m profiling.kernels.ncu_table", description=__doc__
    )
    parser.add_argument("csv", nargs="?", type=Path, help="of ncu --csv --page raw")
    parser.add_argument("--metrics", action="store_true", help="print the metrics for ncu")
    args = parser.parse_args(argv)
    if args.metrics:
        sys.stdout.write(",".join(metric for metric, _, _ in COLUMNS.values()) + "\n")
        return 0
    if args.csv is None:
        parser.error("name a CSV file, or --metrics")
    try:
        launches = parse(args.csv.read_text(encoding="utf-8").splitlines())
    except (OSError, ValueError) as error:
        sys.stderr.write(f"profiling.kernels.ncu_table: {args.csv}: {error}\n")
        return 1
    sys.stdout.write("\n".join(table(launches)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
