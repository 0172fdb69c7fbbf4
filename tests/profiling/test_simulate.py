"""The simulated step: closed forms, a loop over tokens, and properties of every model."""

import pytest

from driver.config.strategy import OFF, Strategy
from profiling.rig.workload import trace_lengths
from profiling.studies import simulate as sim
from profiling.studies.simulate import Arm, CostModel, Machine, rank_seconds, simulate

TREE = Strategy.parse("learned:4,1,5")
FREE_CACHE = Machine(kv_bytes=0.0, overhead_s=0.0)


def loop(lengths, model, max_batch, prompt, speculate):
    """One token of every running request at a time."""
    waiting, running, seconds = list(lengths), [], 0.0
    while waiting or running:
        while waiting and len(running) < max_batch:
            running.append([waiting.pop(0), 0])
        context = prompt + sum(done + 0.5 for _, done in running) / len(running)
        seconds += model.token_s(len(running), context, speculate)
        running = [[left, done + 1] for left, done in running if done + 1 < left]
    return seconds


@pytest.mark.parametrize("max_batch", [1, 3, 64])
@pytest.mark.parametrize("speculate", [False, True])
def test_a_rank_equals_a_loop_over_its_tokens(max_batch, speculate):
    model = CostModel(Machine(), [Arm(TREE, 2.5)])
    lengths = [7, 40, 3, 3, 90, 12, 1]
    options = {"max_batch": max_batch, "prompt": 20, "speculate": speculate}
    assert rank_seconds(lengths, model, **options) == pytest.approx(
        loop(lengths, model, max_batch, 20, speculate), rel=1e-9
    )


def test_one_response_without_a_cache_is_its_tokens_times_the_weights():
    model = CostModel(FREE_CACHE, [])
    weights = 2 * FREE_CACHE.parameters / FREE_CACHE.bytes_per_s
    step = simulate([1000], model, gpus=1, speculate=False)
    assert step.rollout_s == pytest.approx(1000 * weights)
    assert step.idle_share == 0


def test_measured_passes_replace_the_roofline():
    measured = {(1, OFF): 0.010, (4, OFF): 0.016, (1, TREE): 0.012}
    model = CostModel(Machine(), [Arm(TREE, 2.0)], measured)
    assert model.pass_s(1, OFF) == 0.010
    assert model.pass_s(2, OFF) == pytest.approx(0.012)
    assert model.pass_s(1, TREE) == 0.012
    assert model.pass_s(64, OFF) == CostModel(Machine(), []).pass_s(64, OFF)
    assert model.token_s(1, 0, True) == pytest.approx(0.006)
    assert model.token_s(1, 0, False) == pytest.approx(0.010)


def test_speculation_never_loses_and_gains_more_where_batches_are_small():
    model = CostModel(Machine(), [Arm(TREE, 2.5)])
    lengths = trace_lengths(1024, 400, 1.0, 0, 4000)
    ratios = []
    for gpus in (8, 32, 128):
        off, on = (simulate(lengths, model, gpus, speculate=s) for s in (False, True))
        assert on.seconds <= off.seconds
        assert 0 <= on.idle_share < 1 and off.gpus == gpus
        ratios.append(off.seconds / on.seconds)
    assert ratios == sorted(ratios)


def test_ranks_without_responses_are_idle():
    step = simulate([50], CostModel(Machine(), []), gpus=10, speculate=False)
    assert step.idle_share == pytest.approx(0.9)
    assert step.idle_gpu_s == pytest.approx(9 * step.rollout_s)


def test_the_command_prints_a_line_for_each_size_and_reads_a_run(tmp_path, capsys):
    (tmp_path / "rollouts.jsonl").write_text('{"lengths": [1]}\n{"lengths": [9, 400, 30, 12]}\n')
    sim.main(["--gpus", "1,2,8", "--lengths", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "4 responses, longest 400, mean 113" in printed
    rows = [line.split() for line in printed.splitlines()[-3:]]
    assert [row[0] for row in rows] == ["1", "2", "8"]
    assert all(float(row[6]) >= 1 and row[7] == "x" for row in rows)


def printed_by(capsys, *words):
    sim.main(["--gpus", "8", "--requests", "64", *words])
    return capsys.readouterr().out


def test_what_was_measured_and_what_is_assumed_is_printed(capsys, monkeypatch, tmp_path):
    text = printed_by(capsys)
    assert "passes and a small policy's accept lengths as measured: " in text
    assert "assumed: flops 6e+14, update_share 0.4, overhead_s 0.0003, " in text
    monkeypatch.setattr(sim, "RESULTS", tmp_path)
    assert "passes by roofline, accept lengths assumed" in printed_by(capsys)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ([], True),
        (["--requests", "64"], False),
        (["--median", "64"], False),
        (["--cap", "9"], False),
    ],
)
def test_published_ratios_are_shown_beside_the_default_lengths_only(capsys, words, shown):
    sim.main(["--gpus", "8", *words])
    assert ("1.21 x" in capsys.readouterr().out) == shown


def test_other_accept_lengths_may_be_given(capsys):
    out = printed_by(capsys, "--accept", "learned:4,1,5=2.2 learned:4,4,16=3.2")
    assert "accept lengths as given: off 1.00, learned:4,1,5 2.20, learned:4,4,16 3.20" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "8,0"], "--gpus: must be a number from 1 on, got '0'"),
        (["--requests", "many"], "--requests: must be a number from 1 on"),
        (["--accept", "learned:4,1,5"], "--accept: must be STRATEGY=LENGTH"),
        (["--accept", "learned:4,1=2"], "got 'learned:4,1=2'"),
        (["--accept", "off=1 learned:4,1,5=0"], "a length from 1 on, got 'learned:4,1,5=0'"),
        (["--lengths", "nowhere.jsonl"], "nowhere.jsonl: holds no response lengths"),
        (["--lengths", "README.md"], "README.md: holds no response lengths"),
    ],
)
def test_mistakes_are_one_line(words, message, capsys):
    with pytest.raises(SystemExit):
        sim.main(words)
    assert message in capsys.readouterr().err
