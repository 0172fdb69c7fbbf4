"""`tlt warm`, or `python -m driver.warm`: makes a warm start, policy and drafter, and keeps it."""

if __name__ == "__main__":  # before the imports below, which take seconds
    from .cli import start

    start("warm")


import sys
from collections.abc import Sequence

from .config.load import load_config
from .run.warm_start import REPORT, describe, warm_start


def _report(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(argv: Sequence[str]) -> None:
    config = load_config(argv)
    kept = warm_start(config, _report)
    sys.stdout.write((kept.path / REPORT).read_text(encoding="utf-8"))
    sys.stdout.write(f"{describe(kept.path)}\n")
