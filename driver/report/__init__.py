"""One HTML page about one run or several, which opens from disk.

    tlt report runs/tiny                                    # writes runs/tiny/report.html
    tlt report runs/off runs/tree --out compare.html
    tlt report runs/tiny --watch                            # writes it again as the run goes on

Settings, reward, step times, the long tail, response lengths, the policy update, drafting,
strategies, memory and samples, of one run or of several side by side. What is missing or damaged is
named on the page.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..common.errors import UserError

if TYPE_CHECKING:
    from .data import RunData

MAX_RUNS = 4  # colours of the page
WATCH_S = 10


def main(argv: Sequence[str]) -> None:
    """Writes the page, with `--watch` again and again until the runs are finished."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="tlt report", description=__doc__, formatter_class=form)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--out", type=Path, help="default: report.html in the first run's folder")
    parser.add_argument(
        "--watch",
        nargs="?",
        type=seconds,
        const=WATCH_S,
        default=0,
        metavar="SECONDS",
        help=f"write it again every so often (default: {WATCH_S} s) until the runs are finished",
    )
    args = parser.parse_args(argv)
    if len(args.runs) > MAX_RUNS:
        raise UserError(f"{len(args.runs)} runs: at most {MAX_RUNS} fit side by side; name fewer")
    out = args.out or args.runs[0] / "report.html"
    runs = write_page(args.runs, out, args.watch)
    sys.stdout.write(f"wrote {out} ({out.stat().st_size / 1e6:.2f} MB)\n")
    if not args.watch:
        return
    try:
        while not all(run.finished for run in runs):
            time.sleep(args.watch)
            runs = write_page(args.runs, out, args.watch)
    finally:
        write_page(args.runs, out)  # a page that a browser does not read again


def write_page(folders: Sequence[Path], out: Path, refresh_s: int = 0) -> list[RunData]:
    """Reads the runs and writes their page."""
    from ..common.storage import write_text
    from .data import read_run
    from .page import render

    runs = [read_run(folder) for folder in folders]
    # Half a surrogate pair, from a response cut in the middle, becomes a question mark.
    page = render(runs, refresh_s).encode("utf-8", errors="replace").decode("utf-8")
    write_text(out, page)
    return runs


def seconds(text: str) -> int:
    """A whole number of seconds from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be seconds from 1 on, got {text!r}")
    return int(text)
