"""What a benchmark fills while it runs, and how it starts and stops other processes."""

from __future__ import annotations

import contextlib
import math
import re
import subprocess
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from profiling.rig import timing

STOPPING_S = 20  # for a process that was asked to end, to write what it has


@dataclass
class Bench:
    """What a benchmark fills: rows of its table, and what its targets got.

    `copy_gb_per_s` is this card's ceiling; `quick` asks for few cases; `wanted` tells whether a
    case is to run (`--only` is a regular expression over case names). `settings` are `key=value`
    words for a configuration (`--set`), `options` words that this benchmark alone takes; `known`
    are the rows of the result that this one adds to (`--add`). What is in `files` is written beside
    the result, as `<bench>-<name>.json`; `failed` names the parts that did not come to their end.
    """

    name: str
    copy_gb_per_s: float
    quick: bool = False
    only: str = ""
    settings: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)
    known: list[dict] = field(default_factory=list)
    rows: list[dict] = field(default_factory=list)
    files: dict[str, Any] = field(default_factory=dict)
    got: dict[str, float] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    @property
    def words(self) -> list[str]:
        """The configuration of a benchmark of the whole system: its preset under `settings`."""
        return ["preset=h100", *self.settings]

    def wanted(self, case: str) -> bool:
        return re.search(self.only, case) is not None

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part whose failure costs its own figures only."""
        try:
            yield
        except Exception as error:
            say(f"{name} FAILED: {traceback.format_exc()}")
            self.failed.append(f"{name} ({type(error).__name__})")

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
        known = not math.isnan(self.copy_gb_per_s)  # of a card; not of a CPU
        share = f"{row['fraction_of_copy']:6.1%} of copy  " if known else ""
        say(
            f"{case:44} {row['median_us']:9.2f} us {gb_per_s:7.0f} GB/s {share}"
            + "  ".join(f"{ratio:.3f} x {peer}" for peer, ratio in row["ratio_to"].items())
        )
        return row

    def add_row(self, case: str, median_us: float, **more: float | str | bool) -> dict:
        """Appends a row whose bytes are of no interest, and prints it."""
        row = {"bench": self.name, "case": case, "median_us": round(median_us, 3), **more}
        self.rows.append(row)
        shown = "  ".join(f"{name} {value}" for name, value in more.items())
        say(f"{case:44} {median_us:11.2f} us  {shown}")
        return row


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def output_of(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


class Stopped(KeyboardInterrupt):
    """SIGTERM, which unlike Ctrl-C reaches only this process and not those that it started."""


def run_within(command: list[str], seconds: float = math.inf) -> int | None:
    """Runs a command; its exit code, or None where it was stopped because the time was up."""
    process = subprocess.Popen(command)
    try:
        return process.wait(None if math.isinf(seconds) else seconds)
    except (subprocess.TimeoutExpired, Stopped) as error:
        process.terminate()
        if isinstance(error, Stopped):
            raise
        return None
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOPPING_S)
        if process.poll() is None:
            process.kill()
            process.wait()
