"""The warm start that the benchmarks of the whole system share, made once in its own process."""

import sys
from collections.abc import Sequence
from pathlib import Path

from driver.config.load import load_config
from driver.records.checkpoint import whole_checkpoints
from driver.run.warm_start import warm_folder, warm_start
from profiling.rig.bench import run_within, say

LIMIT_S = 600.0  # an H100 takes 150 to 200 s
OTHER_USE = ("task.", "sampling.max_new_tokens=")


def warm_words(words: Sequence[str]) -> list[str]:
    """The settings of the warm start: without other prompts or lengths to benchmark with."""
    return [word for word in words if not word.startswith(OTHER_USE)]


def find_warm_start(words: Sequence[str]) -> Path | None:
    """The folder of a finished warm start; None where there is none yet."""
    folder = warm_folder(load_config(warm_words(words)))
    return folder if whole_checkpoints(folder) else None


def make_warm_start(words: Sequence[str], seconds: float = LIMIT_S) -> Path:
    """Makes the warm start in a process, if there is none, and returns its folder."""
    start = warm_words(words)
    if find_warm_start(start) is None:
        code = run_within([sys.executable, "-m", "driver.warm", *start], seconds)
        if code is None:
            raise TimeoutError(f"the warm start was stopped at its limit of {seconds:.0f} s")
        if code:
            raise SystemExit(f"the warm start failed with exit code {code}")
    return warm_start(load_config(start), say).path
