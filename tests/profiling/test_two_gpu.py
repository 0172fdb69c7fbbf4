"""The benchmark of two ranks, whole, on two processes of a CPU and a very small model."""

import pytest

from profiling.bench import Bench
from profiling.benches import two_gpu
from tests.driver.test_train import WORDS


def test_every_arm_runs_and_the_targets_follow(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    bench = Bench("two_gpu", 1.0, quick=True, settings=["preset=tiny", *WORDS])
    monkeypatch.setattr(two_gpu, "QUICK_STEPS", 2)
    two_gpu.run(bench)
    rows = {row["case"]: row for row in bench.rows}
    assert set(rows) == set(two_gpu.ARMS)
    assert rows["one GPU"]["ranks"] == 1 and "idle_share" not in rows["one GPU"]
    assert 0 <= rows["two GPUs"]["idle_share"] < 1
    both = [rows["two GPUs"][f"idle_share_{rank}"] for rank in range(2)]
    assert rows["two GPUs"]["idle_share"] == pytest.approx(sum(both) / 2, abs=1e-3)
    # Alone it makes its final steps; that two train in such short bubbles is chance.
    assert rows["one GPU"]["drafter_tokens"] > 0
    assert rows["two GPUs"]["drafter_tokens"] >= 0
    assert rows["two GPUs, coordinator off"]["drafter_tokens"] == 0
    assert "accept_length" not in rows["two GPUs, off"]
    assert bench.got["step_over_one_gpu_x"] == pytest.approx(
        rows["one GPU"]["median_us"] / rows["two GPUs"]["median_us"], rel=1e-3
    )
    assert set(bench.got) >= {"step_over_one_gpu_x", "step_over_off_two_gpu_x"}


def test_one_arm_alone_decides_no_target():
    bench = Bench("two_gpu", 1.0, quick=True, only="^nothing$")
    two_gpu.run(bench)
    assert bench.rows == [] and bench.got == {}


def test_an_arm_that_fails_says_why(tmp_path):
    with pytest.raises(RuntimeError, match="grpo.lrr: unknown key"):
        two_gpu.train(["preset=tiny", *WORDS, "grpo.lrr=1"], 1, 1, tmp_path)
