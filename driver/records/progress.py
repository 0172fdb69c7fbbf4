"""The progress of a run on the command line: a bar, and above it one line for each step."""

from __future__ import annotations

import contextlib
import textwrap
import warnings
from collections.abc import Mapping

from rich import progress
from rich.console import Console

from .phases import StepTimes

STEP = "timing_s/step"
# Metric -> its short name and format in a step's line; absent metrics are left out.
COLUMNS = {
    "critic/rewards/mean": ("reward", "{:.3f}"),
    "eval/accuracy": ("held-out", "{:.3f}"),
    "response_length/mean": ("length", "{:.0f}"),
    "response_length/max": ("max", "{:.0f}"),
    "spec/accept_length": ("accept", "{:.2f}"),
    "actor/pg_loss": ("loss", "{:+.4f}"),
    "actor/entropy": ("entropy", "{:.3f}"),
    "drafter/loss": ("drafter loss", "{:.3f}"),
    "perf/throughput": ("tok/s", "{:.0f}"),
    STEP: ("s", "{:.1f}"),
}


def step_line(step: int, values: Mapping[str, float], width: int = 0) -> str:
    """Name and value of each metric of `COLUMNS`, wrapped between cells at `width`; 0 = one line.

    Example:
        >>> step_line(3, {"critic/rewards/mean": 0.5, "timing_s/step": 2.0})
        'step 3  reward 0.500  s 2.0'
    """
    if STEP in values:  # it includes warm-up, evaluations and checkpoints; the line does not
        values = {**values, STEP: StepTimes.of(values).total}
    cells = [
        f"{name} {form.format(values[metric])}"
        for metric, (name, form) in COLUMNS.items()
        if metric in values
    ]
    kept = "  ".join(cell.replace(" ", "\xa0") for cell in [f"step {step}", *cells])
    if width:
        kept = textwrap.fill(kept, width, subsequent_indent=" " * 5, break_on_hyphens=False)
    return kept.replace("\xa0", " ")


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """The run outlives the reader of its output, such as `head`; rich would end it."""
        with contextlib.suppress(SystemExit):
            super().on_broken_pipe()  # it prints nothing from now on
        warnings.warn("standard output is closed: the run goes on without printing", stacklevel=2)


class Progress:
    """A progress bar for the command line; a file or pipe gets plain lines and no bar."""

    def __init__(self, steps: int, console: Console | None = None) -> None:
        self.console = console or _Console(highlight=False)
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task("steps", total=steps)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if not self._bar.disable:  # rich before 14.3 prints an empty line
            self._bar.stop()

    def note(self, text: str) -> None:
        """Shows a line of plain text; brackets are not markup."""
        self.console.print(text, markup=False, soft_wrap=True)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self.note(step_line(step, values, self.console.width if self.console.is_terminal else 0))
        self._bar.update(self._task, completed=step)
