"""Figures are drawn from result files; a folder without them is an error."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from profiling import figures
from profiling.rig import targets
from profiling.studies.drafter_runs import curves
from profiling.studies.grpo_arms import ArmRun
from profiling.studies.grpo_arms import curves as grpo_curves

ROOT = Path(__file__).resolve().parents[2]
DECODE = [
    {"case": f"warmed b{batch} {strategy}", "tokens_per_s": 100.0 * batch}
    for batch in (1, 4)
    for strategy in ("off", "learned:4,1,5")
]
TRACE = [[0.0, 8, "off"], [0.5, 3, "learned:4,1,5"], [0.75, 0, "off"]]


def arm(name, accepts):
    """A run whose accept length rises within each step; one step has too few passes."""
    times = {"timing_s/gen": 1.0, "timing_s/step": 2.0, "critic/rewards/mean": 0.5}
    records = []
    for step, accept in enumerate(accepts, 1):
        quarters = {f"spec/accept_length_q{n}": accept + n / 8 - 0.5 for n in range(1, 5)}
        records.append({"step": step, "spec/accept_length": accept, **quarters, **times})
    records[1]["spec/accept_length"] = records[1]["spec/accept_length_q2"] = None
    return ArmRun(name, 0, records, [[10, 20]] * len(records), [])


@pytest.fixture
def folder(tmp_path):
    """A results folder with every file that is drawn."""
    runs = [arm(name, [2.0, 2.1, last]) for name, last in (("frozen", 2.0), ("serial", 2.2))]
    files = {
        "decode": {"rows": [*DECODE, {"case": "warmed b1 learned:2,1,3", "tokens_per_s": 90.0}]},
        "rollout-trace": {"off": TRACE, "bandit, adapted": TRACE, "ucb": TRACE},
        "grpo-curves": grpo_curves(runs),
        "drafter-rl": curves({run.arm: run for run in runs}),
    }
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return tmp_path


def test_figures_are_drawn_from_results(folder, capsys):
    assert figures.main([str(folder)]) == 0
    names = [Path(line).name for line in capsys.readouterr().out.splitlines()]
    assert names == [
        "speed-warmed.png",
        "active-off.png",
        "active-bandit-adapted.png",
        "grpo-parts.png",
        "drafter-rl.png",
    ]
    assert all((folder / "figures" / name).stat().st_size > 5000 for name in names)
    points = figures.speeds(DECODE)["warmed"]
    assert points["off"] == [(1, 100.0), (4, 400.0)]


def test_a_folder_without_results_gives_one_line(tmp_path, capsys):
    for folder in (tmp_path, tmp_path / "nowhere"):
        assert figures.main([str(folder)]) == 1
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.startswith(
            f"profiling.figures: {folder}: holds none of decode.json, rollout-trace.json"
        )
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_results_has_no_table(tmp_path, capsys):
    assert targets.main(["--results", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"profiling.rig.targets: {tmp_path}: holds no results\n"


@pytest.mark.parametrize("module", ["rig.targets", "rig.tables", "kernels.resources"])
def test_outside_a_checkout_a_command_is_an_error_of_one_line(tmp_path, module):
    """As in an installation that holds the package and not the checkout."""
    ignore = shutil.ignore_patterns("results", "__pycache__")
    shutil.copytree(ROOT / "profiling", tmp_path / "profiling", ignore=ignore)
    command = [sys.executable, "-m", f"profiling.{module}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"profiling: {tmp_path} is not a checkout; run the command in a clone's root\n"
    )
