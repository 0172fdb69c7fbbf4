"""The result of a benchmark while it runs, and the processes that it starts."""

import argparse
import contextlib
import math
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from profiling.rig import timing

STOPPING_S = 20  # for a process that was asked to end, to write what it has


@dataclass
class Bench:
    """Rows, figures of targets and further files of one benchmark."""

    name: str
    copy_gb_per_s: float  # of the card, measured; NaN without a card
    commit: str = ""  # that is measured
    quick: bool = False  # run only the cases of targets
    only: str = ""  # regular expression over case names
    settings: list[str] = field(default_factory=list)  # words for a configuration (`--set`)
    options: list[str] = field(default_factory=list)  # that this benchmark alone takes
    known: list[dict] = field(default_factory=list)  # rows of the earlier result (`--add`)
    rows: list[dict] = field(default_factory=list)
    files: dict[str, Any] = field(default_factory=dict)  # content of `<bench>-<name>.json`
    got: dict[str, float] = field(default_factory=dict)  # target -> its figure
    sources: dict[str, list[dict]] = field(default_factory=dict)  # target -> its rows, of `book`
    failed: list[str] = field(default_factory=list)  # parts that failed or were stopped

    @property
    def words(self) -> list[str]:
        """The configuration of a benchmark of the whole system: its preset under `settings`."""
        return ["preset=h100", *self.settings]

    def own_options(self, defaults: Mapping[str, Any]) -> argparse.Namespace:
        """The words of this benchmark alone, by the defaults of its `OPTIONS`; False: a flag."""
        parser = argparse.ArgumentParser(prog=f"python -m profiling.bench {self.name}")
        for name, default in defaults.items():
            how = {"action": "store_true"} if default is False else {"type": type(default)}
            parser.add_argument(f"--{name}", default=default, **how)
        return parser.parse_args(self.options)

    def wanted(self, case: str) -> bool:
        return re.search(self.only, case) is not None

    @property
    def cases(self) -> dict[str, dict]:
        """Case -> its row of this run or else of the earlier result."""
        return {row["case"]: row for row in (*self.known, *self.rows)}

    def book(
        self,
        target: str,
        cases: Iterable[str],
        of: Callable[[dict], float],
        worst: Callable[[Iterable[float]], float] = min,
    ) -> None:
        """The figure of a target from rows, earlier ones among them, if there is one of each."""
        rows, wanted = self.cases, list(cases)
        if wanted and all(case in rows for case in wanted):
            self.sources[target] = [rows[case] for case in wanted]
            self.got[target] = worst(map(of, self.sources[target]))

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part of the benchmark; if it fails the other parts still run."""
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
        """Appends a row of a kernel and prints it; `num_bytes` is what the case must move."""
        gb_per_s = num_bytes / ours.median_us / 1e3
        ratios = {n: round(ours.median_us / t.median_us, 4) for n, t in (peers or {}).items()}
        row = {
            "bench": self.name,
            "case": case,
            "median_us": round(ours.median_us, 3),
            "spread": round(ours.spread, 4),
            "gb_per_s": round(gb_per_s, 1),
            "fraction_of_copy": round(gb_per_s / self.copy_gb_per_s, 4),
            "ratio_to": ratios,
            **more,
        }
        self.rows.append(row)
        on_card = not math.isnan(self.copy_gb_per_s)
        share = f"{row['fraction_of_copy']:6.1%} of copy  " if on_card else ""
        say(
            f"{case:44} {row['median_us']:9.2f} us {gb_per_s:7.0f} GB/s {share}"
            + "  ".join(f"{ratio:.3f} x {peer}" for peer, ratio in ratios.items())
        )
        return row

    def add_row(self, case: str, median_us: float, **more: float | str | bool) -> dict:
        """Appends a row without bandwidth and prints it."""
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
    """SIGTERM reached this process; unlike Ctrl-C it does not reach those that it started."""


def run_apart(module: str, *words: str, ranks: int = 0, seconds: float | None = None) -> str:
    """The last line of a module in its own process, or on ranks; RuntimeError with its errors."""
    command = [sys.executable, "-m", module, *words]
    if ranks:
        torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command[1:1] = ["-m", *torchrun]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return (done.stdout.strip().splitlines() or [""])[-1]


def run_within(command: list[str], seconds: float = math.inf) -> int | None:
    """Runs a command; returns its exit code, or None where it was stopped at the limit."""
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
