"""The report's page: what it shows of whole, damaged and very long runs."""

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


def test_a_whole_run_has_every_section_and_no_notes(tmp_path):
    run = read_run(write_run(tmp_path / "a"))
    page = render([run])
    assert run.notes == [] and "Not shown" not in page
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
    (tmp_path / "metrics.jsonl").write_text("")
    run = read_run(tmp_path)
    page = render([run])
    assert titles(page) == []
    assert run.notes == [
        "rollouts.jsonl: No such file or directory",
        "samples.jsonl: No such file or directory",
        "config.yaml: No such file or directory",
        "summary.json: missing; the run is still running or was stopped",
        "metrics.jsonl: no finished training step yet",
    ]
    assert all(note in page for note in run.notes)


def test_damage_is_left_out_and_named(tmp_path):
    folder = write_run(tmp_path / "a")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    lines[3] = lines[3].replace('"critic/rewards/mean": ', '"critic/rewards/mean": null, "x": ')
    lines[4] = '{"step": "five"}'
    lines[5] = "[1, 2]"
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n" + lines[0][:40])
    odd = {"step": 3, "lengths": [1, None], "active": [[0, 1, "off"]]}
    unknown = {"step": 4, "lengths": [1], "active": [[0, 1, "magic:1,1,1"], [1, 0, "off"]]}
    (folder / "rollouts.jsonl").write_text(f"{json.dumps(odd)}\n{json.dumps(unknown)}\n")
    (folder / "summary.json").write_text('{"wall_s": ')
    (folder / "config.yaml").write_text("a: [")
    run = read_run(folder)
    page = render([run])
    assert run.notes == [
        "metrics.jsonl: 2 damaged or truncated lines left out",
        "config.yaml: cannot be read",
        "summary.json: cannot be read",
    ]
    assert [step for step, _ in run.series("critic/rewards/mean")] == [1, 2, 3, 7, 8, 9, 10, 11, 12]
    assert "Response lengths" not in titles(page) and "Reward" in titles(page)


@pytest.mark.parametrize("value", [None, "x", True, [1], {"a": 1}, float("nan")])
def test_values_of_another_kind_break_nothing(tmp_path, value):
    folder = write_run(tmp_path / "a", steps=2)
    for name in ("metrics", "samples"):
        path = folder / f"{name}.jsonl"
        record = dict.fromkeys(json.loads(path.read_text().splitlines()[0]), value)
        path.write_text(json.dumps(record | {"step": 1}) + "\n")
    (folder / "summary.json").write_text(json.dumps({"wall_s": value, "peak_memory_gb": value}))
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


def test_watch_writes_the_page_until_the_run_is_finished(tmp_path, monkeypatch, capsys):
    folder = write_run(tmp_path / "a", steps=2)
    (folder / "config.yaml").write_text("run:\n  steps: 3\n")
    whole = (write_run(tmp_path / "b", steps=3) / "metrics.jsonl").read_text()
    page = folder / "report.html"
    seen = []

    def sleep(seconds):
        seen.append((seconds, 'http-equiv="refresh" content="2"' in page.read_text()))
        if len(seen) == 2:  # a step later
            (folder / "metrics.jsonl").write_text(whole)

    monkeypatch.setattr(report.time, "sleep", sleep)
    report.main([str(folder), "--watch", "2"])
    assert seen == [(2, True)] * 2
    assert "refresh" not in page.read_text() and "3 steps in" in page.read_text()
    with pytest.raises(SystemExit):
        report.main([str(folder), "--watch", "0"])
    assert "--watch: must be seconds from 1 on, got '0'" in capsys.readouterr().err


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


def test_the_command_writes_beside_the_run_and_names_what_is_no_run(tmp_path, capsys):
    folder = write_run(tmp_path / "a")
    report.main([str(folder)])
    assert "wrote" in capsys.readouterr().out
    assert "<h2>Reward</h2>" in (folder / "report.html").read_text(encoding="utf-8")
    with pytest.raises(UserError, match="nowhere: contains no run; name a folder with metrics"):
        report.main([str(tmp_path / "nowhere")])
    with pytest.raises(UserError, match="5 runs: at most 4 fit side by side"):
        report.main([str(folder)] * 5)


def test_a_user_s_mistake_is_one_line(tmp_path):
    command = [sys.executable, "-m", "driver.report", str(tmp_path / "nowhere")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert (
        done.stderr
        == f"error: {tmp_path}/nowhere: contains no run; name a folder with metrics.jsonl\n"
    )


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.25, "0.25"), (123.4, "123"), (12500, "12.5k"), (2.5e6, "2.5M")]
)
def test_numbers_are_short(value, text):
    assert report_page.short(value) == text
