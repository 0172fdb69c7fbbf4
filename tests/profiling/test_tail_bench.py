"""The benchmark of the update in the tail runs on a small model on the CPU."""

import math

import pytest

from driver.config.load import load_config
from driver.run.start import start_run
from profiling.benches import tail
from profiling.rig.bench import Bench
from tests.driver.run.test_tail_update import RUN, reward


@pytest.fixture
def run(tmp_path, monkeypatch):
    made = start_run(load_config([*RUN, f"run.root={tmp_path}", "run.steps=9"]), print)
    monkeypatch.setattr(made.task, "reward", reward)
    yield made
    made.close(whole=True)


def test_cases_take_turns(run):
    bench, cases = (
        Bench("tail", math.nan),
        {"1x80x80": (1, 80, 80), "0x0x80": (0, 0, 80), "1x40x900": (1, 40, 900)},
    )
    tail.measure(bench, run, cases, repeats=2)
    assert run.step == tail.FIRST_STEPS + 2 * len(cases)
    assert [row["case"] for row in bench.rows] == list(cases)
    assert [row["hidden_share"] > 0 for row in bench.rows] == [True, False, True]
    assert all(row["steps"] == 2 and row["update_s"] > 0 for row in bench.rows)


def test_cases_have_a_place_and_a_row_size():
    assert tail.options([]).repeats > 0
    for names in (tail.CASES, tail.QUICK_CASES):
        assert all(len(list(map(int, name.split("x")))) == 3 for name in names.split(","))
