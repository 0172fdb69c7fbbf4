"""The report's page: what it shows of whole, unfinished and very long runs."""

import json
import re
import subprocess
import sys

import pytest

from driver import report
from driver.common.errors import UserError
from driver.records.phases import StepTimes
from driver.report import figures
from driver.report import page as report_page
from driver.report.data import read_run
from driver.report.page import render
from tests.driver.report.runs import write_run

SECTIONS = (
    "Reward",
    "Step time",
    "The long tail",
    "Response lengths",
    "Policy update",
    "Drafting",
    "Strategies",
    "Memory",
    "Samples",
    "Settings",
)


def titles(page):
    return [title for title in SECTIONS if f"<h2>{title}</h2>" in page]


def test_a_whole_run_has_every_section(tmp_path):
    run = read_run(write_run(tmp_path / "a"))
    page = render([run])
    assert titles(page) == list(SECTIONS)
    assert "0.42 <i>→</i> 0.66" in page  # single evaluations
    assert "12 steps in 13 s" in page and "0.73 <i>→</i> 0.8 <i>GB</i>" in page


def test_two_runs_stand_side_by_side_and_settings_that_differ_come_first(tmp_path):
    runs = [write_run(tmp_path / name, seed=seed) for name, seed in (("a", 0), ("b", 7))]
    page = render([read_run(run) for run in runs])
    tail = page.partition("<h2>The long tail</h2>")[2].partition("</section>")[0]
    assert tail.count('<figure class="chart"') == 4  # first and last step of each
    rows = page.partition("<h2>Settings</h2>")[2]
    assert rows.index("run.seed") < rows.index("<details>")
    assert "<td>0</td><td>7</td>" in rows


def test_a_run_without_results_still_makes_a_page(tmp_path):
    (tmp_path / "config.yaml").write_text("preset: tiny\n")
    assert titles(render([read_run(tmp_path)])) == ["Settings"]


def test_a_run_that_goes_on_or_was_killed_has_a_page(tmp_path):
    """A value may be missing, and the last line may be cut; another damage is named."""
    folder = write_run(tmp_path / "a")
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines()
    lines[3] = lines[3].replace('"critic/rewards/mean": ', '"critic/rewards/mean": null, "x": ')
    path.write_text("\n".join(lines) + "\n" + lines[0][:40])
    (folder / "summary.json").unlink()
    run = read_run(folder)
    steps = [step for step, _ in run.series("critic/rewards/mean")]
    assert steps == [1, 2, 3, *range(5, 13)] and titles(render([run])) == list(SECTIONS)
    path.write_text("\n".join([lines[0][:40], *lines]) + "\n")
    with pytest.raises(UserError, match="metrics.jsonl:1: not a JSON object"):
        read_run(folder)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.yaml", "", "config.yaml: must contain the sections of a run, got None"),
        ("config.yaml", "- run", r"must contain the sections of a run, got \['run'\]"),
        ("config.yaml", "run: {", "config.yaml: cannot be used .ParserError"),
        ("metrics.jsonl", '{"x": 1}\n', "metrics.jsonl:1: not a JSON object with a step"),
    ],
)
def test_a_damaged_file_is_one_line(tmp_path, name, text, message):
    folder = write_run(tmp_path / "a", steps=1)
    (folder / name).write_text(text)
    with pytest.raises(UserError, match=message):
        read_run(folder)


@pytest.mark.parametrize("value", [None, "x", True, [1], {"a": 1}, float("nan")])
def test_values_of_another_kind_break_nothing(tmp_path, value):
    folder = write_run(tmp_path / "a", steps=2)
    for name in ("metrics", "samples"):
        path = folder / f"{name}.jsonl"
        record = dict.fromkeys(json.loads(path.read_text().splitlines()[0]), value)
        path.write_text(json.dumps(record | {"step": 1}) + "\n")
    assert "<h2>Samples</h2>" in render([read_run(folder)])


@pytest.mark.slow
def test_a_long_run_stays_small(tmp_path):
    folder = write_run(tmp_path / "a", steps=3000)
    many = [[i * 1e-3, 5000 - i % 5000, f"learned:4,2,{8 + i % 2}"] for i in range(50_000)]
    long = {"step": 3000, "lengths": list(range(1, 60_000)), "active": [*many, [51.0, 0, "off"]]}
    with (folder / "rollouts.jsonl").open("a") as file:
        file.write(json.dumps(long) + "\n")
    run = read_run(folder)
    assert len(render([run] * 4)) < 5_000_000


def test_a_step_without_a_value_is_a_gap(tmp_path):
    """Step 5 never speculated: no line leads across it."""
    run = read_run(write_run(tmp_path / "a", steps=8))
    assert [step for step, _ in run.series("spec/accept_length")] == [1, 2, 3, 4, 6, 7, 8]
    for metric, pieces in (("spec/accept_length", 2), ("drafter/loss", 1)):
        drawn = figures.curves([run], metric, "label")
        (path,) = re.findall(rf'd="([^"]*)"[^>]*stroke: {figures.RUN_COLORS[0]}; stroke-w', drawn)
        assert path.count("M") == pieces


def test_what_a_policy_update_logs_is_drawn(tmp_path):
    page = render([read_run(write_run(tmp_path / "a"))])
    section = page.partition("<h2>Policy update</h2>")[2].partition("</section>")[0]
    assert section.count('<figure class="chart"') == 6
    for label in ("policy loss", "entropy", "KL to the reference", "gradient norm", "clipped"):
        assert label in section


def test_reward_is_drawn_against_time_as_well(tmp_path):
    run = read_run(write_run(tmp_path / "a", steps=3))
    assert run.seconds() == pytest.approx({1: 2.6, 2: 4.2, 3: 0.6 + 2 / 3 + 4.2})
    page = render([run])
    reward = page.partition("<h2>Reward</h2>")[2].partition("</section>")[0]
    assert "mean reward by step" in reward and "mean reward by seconds since the start" in reward
    for record in run.records:
        record["timing_s/step"] = 4000.0
    assert "by hours since the start" in render([run])


def test_step_bars_hold_the_whole_step_without_the_start(tmp_path):
    record = {"step": 1, "timing_s/warmup": 30.0, "timing_s/gen": 2.0, "timing_s/step": 33.0}
    times = StepTimes.of(record)
    assert times.phases["gen"] == 2.0
    assert times.other + times.unaccounted == pytest.approx(1.0)
    assert times.total == pytest.approx(3.0)
    folder = write_run(tmp_path / "a", steps=1)
    (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    (drawn,) = figures.step_times([read_run(folder)])
    assert "gen 67%" in drawn and "other 33%" in drawn


@pytest.mark.figures
def test_the_command_writes_beside_the_run_and_names_what_is_no_run(tmp_path, capsys):
    folder = write_run(tmp_path / "a")
    report.main([str(folder)])
    assert "wrote" in capsys.readouterr().out
    assert "<h2>Reward</h2>" in (folder / "report.html").read_text(encoding="utf-8")
    with pytest.raises(UserError, match="nowhere: contains no run; name a folder with config"):
        report.main([str(tmp_path / "nowhere")])
    with pytest.raises(UserError, match="5 runs: at most 4 fit side by side"):
        report.main([str(folder)] * 5)


def test_a_user_s_mistake_is_one_line(tmp_path):
    command = [sys.executable, "-m", "driver.report", str(tmp_path / "nowhere")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert (
        done.stderr
        == f"error: {tmp_path}/nowhere: contains no run; name a folder with config.yaml\n"
    )


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.25, "0.25"), (123.4, "123"), (12500, "12.5k"), (2.5e6, "2.5M")]
)
def test_numbers_are_short(value, text):
    assert report_page.short(value) == text
