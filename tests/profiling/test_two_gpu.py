"""The benchmark of two GPUs on two processes of a CPU and a very small model."""

import subprocess

import pytest

from driver.model.tiny import build_tokenizer
from profiling.benches import two_gpu
from profiling.rig.bench import Bench
from profiling.rig.subjects import qwen2
from tests.driver.run.test_run import WORDS
from tests.driver.run.test_world import PRELUDE
from tests.forks import run_ranks

SECOND_IS_SLOW = """
generate = collector.Collector.roll_out
def slow(self, prompts, requests):
    time.sleep(0.5 * RANK)
    return generate(self, prompts, requests)
collector.Collector.roll_out = slow
run_command(main)
"""


def test_every_arm_runs_and_the_targets_follow(monkeypatch, tmp_path):
    log = tmp_path / "log"

    def start(command, **options):
        where = command.index("driver.train")
        ranks = int(command[where - 2].removeprefix("--nproc-per-node="))
        code = run_ranks(PRELUDE + SECOND_IS_SLOW, command[where + 1 :], ranks, log)
        return subprocess.CompletedProcess(command, code, "", log.read_text())

    monkeypatch.setattr(subprocess, "run", start)
    bench = Bench("two_gpu", 1.0, quick=True, settings=["preset=tiny", *WORDS])
    monkeypatch.setattr(two_gpu, "QUICK_STEPS", 2)
    monkeypatch.setattr(two_gpu, "SHARED_SHAPES", {})
    monkeypatch.setattr(
        two_gpu, "QWEN2_7B", qwen2(64, 128, 2, 4, 2, vocab_size=len(build_tokenizer()))
    )
    monkeypatch.setattr(two_gpu, "LARGE_WORDS", [])
    monkeypatch.setattr(two_gpu, "SHORT", [])
    two_gpu.run(bench)
    assert not bench.failed, log.read_text()
    rows = {row["case"]: row for row in bench.rows}
    assert set(rows) == {*two_gpu.ARMS, two_gpu.LARGE}
    assert rows[two_gpu.LARGE]["update_actor_s"] > 0
    assert rows["one GPU"]["ranks"] == 1 and "idle_share" not in rows["one GPU"]
    assert 0 <= rows["two GPUs"]["idle_share"] < 1
    both = [rows["two GPUs"][f"idle_share_{rank}"] for rank in range(2)]
    assert rows["two GPUs"]["idle_share"] == pytest.approx(sum(both) / 2, abs=1e-3)
    assert rows["one GPU"]["drafter_tokens"] > 0
    assert rows["two GPUs"]["drafter_tokens"] > 0
    assert rows["two GPUs"]["bubble_used_share"] > 0.5
    assert rows["two GPUs, coordinator off"]["drafter_tokens"] == 0
    assert "accept_length" not in rows["two GPUs, off"]
    assert bench.got["step_over_one_gpu_x"] == pytest.approx(
        rows["one GPU"]["median_us"] / rows["two GPUs"]["median_us"], abs=1e-3
    )
    assert set(bench.got) >= {"step_over_one_gpu_x", "step_over_off_two_gpu_x"}


SMALL = """
import sys
from profiling.rig import subjects, tensor_parallel
tensor_parallel.SHAPES["qwen2_7b"] = subjects.qwen2(512, 1024, 2, 8, 2, vocab_size=1024)
tensor_parallel.BATCHES, tensor_parallel.TOKENS, tensor_parallel.TIMED_TOKENS = (1, 2), 12, 4
tensor_parallel.WORDS += ["drafter.draft_vocab=64", "engine.max_batch=4"]
sys.argv[1] = "device=cpu"
tensor_parallel.main()
"""


def test_two_ranks_share_a_shape(monkeypatch, tmp_path):
    log = tmp_path / "log"

    def start(command, **options):
        where = command.index("profiling.rig.tensor_parallel")
        code = run_ranks(SMALL, command[where + 1 :], 2, log)
        return subprocess.CompletedProcess(command, code, log.read_text(), log.read_text())

    monkeypatch.setattr(subprocess, "run", start)
    bench = Bench("two_gpu", 1.0, only="^tensor parallel, qwen2_7b")
    two_gpu.run(bench)
    assert not bench.failed, log.read_text()
    assert bench.got["tp2_identity"] == 1.0 and bench.got["tp2_7b_b1_over_one_x"] > 0
    assert [row["case"] for row in bench.rows] == [
        f"tensor parallel, qwen2_7b, {batch} rows" for batch in (1, 2)
    ]
    assert bench.rows[0]["tokens"] == 2 * 6 * 4
    assert bench.rows[0]["weights_gb"] < bench.rows[0]["one_weights_gb"]


def test_without_both_arms_no_target_has_a_figure():
    bench = Bench("two_gpu", 1.0, quick=True, only="^nothing$")
    two_gpu.run(bench)
    assert bench.rows == [] and bench.got == {}


def test_an_arm_is_compared_with_one_of_an_earlier_result(monkeypatch):
    def steps_of(bench, arm, ranks, words, steps):
        bench.add_row(arm, 2e6)
        return 2.0, [{}, {}]

    monkeypatch.setattr(two_gpu, "steps_of", steps_of)
    bench = Bench("two_gpu", 1.0, only="two GPUs$", settings=["preset=tiny", "warmup.keep=false"])
    bench.known = [
        {"case": "one GPU", "median_us": 3e6, "commit": bench.commit},
        {"case": "two GPUs, off", "median_us": 9e6, "commit": "another"},
        {"case": "other", "median_us": 1.0, "commit": bench.commit},
    ]
    two_gpu.run(bench)
    assert bench.got == {"step_over_one_gpu_x": 1.5}
    assert [row["case"] for row in bench.rows] == ["two GPUs"]  # and no run of the 7B


def test_a_failing_arm_is_reported_with_its_error(tmp_path):
    with pytest.raises(RuntimeError, match="grpo.lrr: unknown key"):
        two_gpu.train(["preset=tiny", *WORDS, "grpo.lrr=1"], 1, 1, tmp_path)
