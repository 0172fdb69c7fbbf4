"""The benchmark of the update in the tail runs on a small model on the CPU."""

import math

import pytest
import torch

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


def test_cases_alternate(run):
    bench, cases = (
        Bench("tail", math.nan),
        {"1x80x80": (1, 80, 80), "0x0x80": (0, 0, 80), "1x40x900": (1, 40, 900)},
    )
    before = [p.clone() for p in run.trainer.params]
    tail.measure(bench, run, cases, repeats=2)
    for old, new in zip(before, run.trainer.params, strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=1e-25)  # a weight of 0 may change
    assert run.version == tail.FIRST_STEPS + 2 * len(cases)
    assert len({row["tokens"] for row in bench.rows}) == 1
    assert [row["case"] for row in bench.rows] == list(cases)
    assert [row["hidden_share"] > 0 for row in bench.rows] == [True, False, True]
    assert all(row["median_us"] / 1e6 > row["gen_s"] > 0 for row in bench.rows)


def test_cases_have_a_place_and_a_row_size():
    for names in (tail.CASES, tail.QUICK_CASES):
        assert all(len(list(map(int, name.split("x")))) == 3 for name in names.split(","))
