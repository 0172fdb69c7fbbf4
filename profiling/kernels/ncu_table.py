"""A short table of Nsight Compute's CSV: `python -m profiling.kernels.ncu_table x.csv`."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from profiling.kernels.resources import short_name

# Column of the table -> metric.
METRICS = {
    "us": "gpu__time_duration.sum",
    "dram_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "tensor_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "registers": "launch__registers_per_thread",
    "occupancy_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
}


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel; a metric that the card does not have is None."""

    kernel: str
    grid: str
    block: str
    us: float | None
    dram_percent: float | None
    tensor_percent: float | None
    registers: float | None
    occupancy_percent: float | None


def parse(lines: Iterable[str]) -> list[Launch]:
    """The launches of a report, in order.

    Args:
        lines: of `ncu --csv`, of the raw page (a column a metric) or of the details page (a row a
            metric); what ncu itself says before the header is skipped.

    Raises:
        ValueError: there is no header, or no launch.

    Example:
        >>> parse(['"ID","Kernel Name","launch__registers_per_thread"', '"","","register/thread"',
        ...        '"0","void k(int)","32"'])[0].registers
        32.0
    """
    text = [line for line in lines if line.startswith('"')]
    if not text or not text[0].startswith('"ID"'):
        raise ValueError('no table of ncu: wanted a line that starts with "ID"')
    rows = list(csv.DictReader(text))
    if "Metric Name" in (rows[0] if rows else ()):
        rows = _widened(rows)
    else:
        rows = rows[1:]  # the first holds the units
    if not rows:
        raise ValueError(
            "no kernel was profiled: did the range profile_target hold a launch on the card?"
        )
    return [
        Launch(
            short_name(row["Kernel Name"]),
            row.get("Grid Size", ""),
            row.get("Block Size", ""),
            **{
                column: _number(row.get(metric), 1e-3 if column == "us" else 1.0)
                for column, metric in METRICS.items()
            },
        )
        for row in rows
    ]


def _widened(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """One row a launch, from one row a metric."""
    launches: dict[str, dict[str, str]] = {}
    for row in rows:
        launch = launches.setdefault(row["ID"], dict(row))
        launch[row["Metric Name"]] = row["Metric Value"]
    return list(launches.values())


def _number(text: str | None, factor: float) -> float | None:
    try:
        return float((text or "").replace(",", "")) * factor
    except ValueError:  # "n/a"
        return None


def table(launches: list[Launch]) -> list[str]:
    """Lines of the table."""
    out = [f"{'us':>9} {'DRAM %':>7} {'tensor %':>8} {'registers':>9} {'occupancy %':>11}  kernel"]
    for x in launches:
        cells = [
            _cell(x.us, 9, 2),
            _cell(x.dram_percent, 7, 1),
            _cell(x.tensor_percent, 8, 1),
            _cell(x.registers, 9, 0),
            _cell(x.occupancy_percent, 11, 1),
        ]
        out.append(f"{' '.join(cells)}  {x.kernel} {x.grid}x{x.block}".rstrip("x "))
    return out


def _cell(value: float | None, width: int, digits: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:{width}.{digits}f}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m profiling.kernels.ncu_table", description=__doc__
    )
    parser.add_argument("csv", nargs="?", type=Path, help="of `ncu --csv --print-units base`")
    parser.add_argument("--metrics", action="store_true", help="print what ncu is to measure")
    args = parser.parse_args(argv)
    if args.metrics:
        sys.stdout.write(",".join(METRICS.values()) + "\n")
        return 0
    if args.csv is None:
        parser.error("wanted a CSV file, or --metrics")
    try:
        launches = parse(args.csv.read_text(encoding="utf-8").splitlines())
    except (OSError, ValueError) as error:
        sys.stderr.write(f"profiling.kernels.ncu_table: {args.csv}: {error}\n")
        return 1
    sys.stdout.write("\n".join(table(launches)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
