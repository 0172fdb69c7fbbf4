"""`python -m driver.report runs/A [runs/B ...]`: one HTML page that opens from disk.

    python -m driver.report runs/tiny                       # writes runs/tiny/report.html
    python -m driver.report runs/off runs/tree --out compare.html

Settings, reward, step times, the long tail, response lengths, drafting, strategies, memory and
samples, of one run or of several side by side. What is missing or damaged is named on the page.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ..common.errors import UserError
from ..common.storage import storage_errors
from ..config.command import run_command
from .data import read_run
from .page import render

MAX_RUNS = 4  # colours of the page


def main(argv: Sequence[str]) -> None:
    """Writes the page."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m driver.report", description=__doc__, formatter_class=form
    )
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--out", type=Path, help="default: report.html in the first run's folder")
    args = parser.parse_args(argv)
    if len(args.runs) > MAX_RUNS:
        raise UserError(f"{len(args.runs)} runs: wanted at most {MAX_RUNS} side by side")
    page = render([read_run(path) for path in args.runs])
    out = args.out or args.runs[0] / "report.html"
    with storage_errors(out):
        # Half a surrogate pair, from a response cut in the middle, becomes a question mark.
        out.write_bytes(page.encode("utf-8", errors="replace"))
    sys.stdout.write(f"wrote {out} ({len(page) / 1e6:.2f} MB)\n")


if __name__ == "__main__":
    run_command(main)
