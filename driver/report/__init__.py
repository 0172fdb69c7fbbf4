"""One HTML page about one run or several, which opens from disk.

    tlt report runs/tiny                                    # writes runs/tiny/report.html
    tlt report runs/off runs/tree --out compare.html

Settings, reward, step times, the long tail, response lengths, the policy update, drafting,
strategies, memory and samples, of one run or of several side by side. A run may still go on.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ..common.errors import UserError

MAX_RUNS = 4  # colours of the page


def main(argv: Sequence[str]) -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="tlt report", description=__doc__, formatter_class=form)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--out", type=Path, help="default: report.html in the first run's folder")
    args = parser.parse_args(argv)
    if len(args.runs) > MAX_RUNS:
        raise UserError(f"{len(args.runs)} runs: at most {MAX_RUNS} fit side by side; name fewer")
    from .page import write_page  # here: a help text does not need it

    out = args.out or args.runs[0] / "report.html"
    write_page(args.runs, out)
    sys.stdout.write(f"wrote {out} ({out.stat().st_size / 1e6:.2f} MB)\n")
