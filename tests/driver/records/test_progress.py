import io
import subprocess
import sys

from rich.console import Console

from driver.records.progress import Progress, step_line


def test_a_step_is_one_line_whatever_its_width():
    out = io.StringIO()
    with Progress(steps=2, console=Console(file=out, width=20)) as progress:
        progress.note("[bold] stays")
        progress.step(
            1,
            dict.fromkeys(("critic/rewards/mean", "spec/accept_length"), 0.25)
            | {"timing_s/step": float("nan")},
        )
    assert out.getvalue().splitlines() == [
        "[bold] stays",
        "step 1  reward 0.250  accept 0.25  s nan",
    ]
    assert step_line(4, {}) == "step 4"
    assert step_line(4, {"drafter/loss": 0.5}) == "step 4  drafter loss 0.500"
    first = {"timing_s/step": 40.0, "timing_s/load": 1.0, "timing_s/warmup": 36.0}
    assert step_line(1, first) == "step 1  s 3.0"  # what came before it is not its own


def test_a_run_outlives_the_reader_of_its_output():
    script = """
from driver.records.progress import Progress
with Progress(steps=9) as progress:
    progress.note("first")
    input()  # until the reader has gone
    progress.note("second")
    progress.step(1, {})
print("whole")
raise SystemExit(7)
"""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=pipe, stdout=pipe, stderr=pipe
    ) as p:
        assert p.stdout.readline() == b"first\n"
        p.stdout.close()
        p.stdin.write(b"\n")
        p.stdin.close()
        error = p.stderr.read().decode()
        assert p.wait() == 7, error
    assert error.count("standard output is closed: the run goes on without printing") == 1
