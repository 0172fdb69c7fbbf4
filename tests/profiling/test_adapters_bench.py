"""The benchmark of TRL reads what the example prints, without TRL."""

import sys

import pytest

from profiling.benches import adapters
from profiling.rig.bench import Bench

PRINTS = """
import sys
assert "run.steps=3" in sys.argv and "run.seed=2" in sys.argv
for arm, scale in (("trl", 10.0), ("tlt", 1.0)):
    for step, seconds in enumerate((30.0, 2.0, 4.0), 1):
        line = f"{arm} step {step}: {scale * seconds:.2f} s  reward 0.250"
        print(f"{line}  length 41  accept length 1.50")
    print("a line of TRL")
sys.exit(int(sys.argv[1].removeprefix("code=")))
"""


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.setattr(adapters, "PROGRAM", [sys.executable, "-c", PRINTS])
    return Bench("adapters", 1.0, quick=True, settings=["run.seed=2"])


def test_the_first_step_does_not_count(bench, monkeypatch, capsys):
    monkeypatch.setattr(adapters, "WORDS", "code=0")
    adapters.run(bench)
    assert bench.got == {"trl_step_over_generate_x": 10.0}
    assert [row["case"] for row in bench.rows][2:4] == ["trl step 3", "tlt step 1"]
    row = bench.rows[-1]
    shown = {name: row[name] for name in ("median_us", "reward", "mean_length", "accept_length")}
    assert list(shown.values()) == [4e6, 0.25, 41, 1.5]
    assert "a line of TRL" in capsys.readouterr().out


def test_a_failure_of_the_example_is_one_of_the_benchmark(bench, monkeypatch):
    monkeypatch.setattr(adapters, "WORDS", "code=3")
    with pytest.raises(RuntimeError, match="failed with exit code 3"):
        adapters.run(bench)
    assert len(bench.rows) == 6 and not bench.got
