"""The figure is drawn from a result file; a folder without them is an error."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from profiling import figures
from profiling.studies.grpo_arms import ArmRun, curves

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path):
    """A results folder with the file that is drawn."""
    times = {"timing_s/gen": 1.0, "timing_s/step": 2.0, "critic/rewards/mean": 0.5}
    runs = [ArmRun(name, 0, [{"step": 1, **times}], [[10, 20]], []) for name in ("off", "full")]
    (tmp_path / figures.SOURCE).write_text(json.dumps(curves(runs)))
    return tmp_path


def test_the_figure_is_drawn_from_results(folder, capsys):
    assert figures.main([str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder / figures.FIGURE}\n"
    assert (folder / figures.FIGURE).stat().st_size > 5000


def test_a_folder_without_results_gives_one_line(tmp_path, capsys):
    for folder in (tmp_path, tmp_path / "nowhere"):
        assert figures.main([str(folder)]) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err == f"profiling.figures: {folder}: holds no grpo-curves.json\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("module", ["rig.tables", "kernels.resources"])
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
