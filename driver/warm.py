"""`python -m driver.warm preset=h100`: makes a warm start (policy and drafter) once and keeps it.

`driver.train` finds the warm start by the settings that made it; `model.path=` and
`driver.generate model=` take its folder. The same settings give the same bits on cards of one kind;
the printed fingerprints show whether two machines have the same warm start.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which take seconds
    from .cli import start

    start("warm")


import sys
from collections.abc import Sequence

from .config.load import load_config
from .run.warm_start import REPORT, told, warm_start


def _report(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(argv: Sequence[str]) -> None:
    config = load_config(argv)
    kept = warm_start(config, _report)
    sys.stdout.write((kept.path / REPORT).read_text(encoding="utf-8"))
    sys.stdout.write(f"{told(kept.path)}\n")
