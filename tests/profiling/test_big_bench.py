"""The benchmark of big shapes runs on small ones on the CPU."""

import pytest

from driver.config.load import load_config
from profiling.benches import big
from profiling.rig.bench import Bench
from profiling.rig.subjects import of_shape
from tests.profiling.test_engine_benches import TINY_SHAPE, WORDS

SMALL = [
    "run.device=cpu",
    "run.threads=1",
    "engine.graphs=off",
    "engine.prefill_chunk=64",
    "engine.free_in_update=true",
    "sampling.max_new_tokens=24",
    "grpo.prompts_per_step=2",
    "grpo.samples_per_prompt=4",
    "grpo.micro_batch_tokens=256",
    "drafter.draft_vocab=16",
    "spot.tokens_per_step=64",
]


@pytest.mark.parametrize("case", big.TRAINED)
def test_steps_of_a_shape_are_timed_and_its_checkpoint_is_written(case, monkeypatch):
    _, _, saves, words = big.TRAINED[case]
    assert load_config([*words, "model.path=x"]).run.device == "cuda"
    bench = Bench("big", 100.0, settings=SMALL, only=case)
    monkeypatch.setattr(big, "PEAK_TFLOPS", 1e-6)
    monkeypatch.setattr(big, "TRAINED", {case: (TINY_SHAPE, 2, saves, words)})
    big.run(bench)
    assert not bench.failed
    (row,) = bench.rows
    assert row["case"] == case and row["median_us"] > 0
    assert 2 * 4 * 20 < row["tokens"] <= 2 * 4 * 24  # an early end token is rare
    assert row["update_actor_s"] > 0 and row["mfu"] > 0
    assert "free_pages_s" in row  # rounded, so it may be 0
    assert row["predicted_gb"] > 0 and row["freed_in_update"] == "true"
    assert ("blocked_s" in row) == saves
    if saves:
        assert row["written_s"] >= row["blocked_s"] and row["written_gb"] > 0


def test_long_rollouts_of_all_arms_are_equal():
    words = [*WORDS, "model.dtype=bfloat16", "spot.mode=off"]
    shape = of_shape("decode 32k", words, TINY_SHAPE, "cpu")
    bench = Bench("big", 100.0)
    big.decode(bench, shape, big.Long(requests=2, prompt=40, new=60, last=20))
    rows = {row["case"]: row for row in bench.rows}
    assert set(rows) == {f"decode 32k {arm}" for arm in ("off", *big.ARMS)}
    for row in rows.values():
        assert row["equal_tokens"] == row["equal_bits"] == 1.0 and row["tokens"] == 120
    off = rows["decode 32k off"]
    kv = 2 * (40 + 49) * 2 * 2 * 32 * 2  # requests, context, K and V, layers, width, bytes
    assert off["context"] == 89 and off["read_gb"] == round((shape.num_bytes + kv) / 1e9, 2)
    assert off["over_bytes"] > 0 and "over_bytes" not in rows[f"decode 32k {big.ARMS[1]}"]
    assert rows[f"decode 32k {big.ARMS[1]}"]["accept_length"] > 2


@pytest.mark.slow
def test_ranks_have_the_bits_of_one():
    assert big.fsdp(Bench("big", 100.0), 2) == 1.0


def test_passes_are_timed_while_the_batch_is_full():
    times = big.PassTimes(2)
    for active, passes in [(2, 1), (2, 4), (2, 4), (1, 4), (0, 9)]:
        times.on_pass(active, passes)
    times.ends = [(count, 0.5 * count) for count, _ in times.ends]
    assert [count for count, _ in times.ends] == [1, 5, 9]
    assert times.last(4) == (0.5, 7.0) and times.last(100) == (0.5, 5.0)
