"""The engine's benchmarks run on a small model on the CPU."""

import math
import time
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen2Config

from driver.config.load import load_config
from driver.config.strategy import Strategy, parse_strategies
from driver.rollout.plan import BucketPlan
from driver.rollout.stats import RolloutStats
from profiling.benches import decode, graphs, rollout
from profiling.rig import timing
from profiling.rig.bench import Bench
from profiling.rig.subjects import (
    fix_bandit,
    of_checkpoint,
    of_shape,
)
from tests.driver.hugging_face import random_model
from tests.driver.rollout.test_bursts import Loops, looping

WORDS = [
    "preset=tiny",
    "model.hidden_size=32",
    "model.num_layers=2",
    "run.threads=1",
]
TINY_SHAPE = Qwen2Config(
    vocab_size=1024,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    eos_token_id=3,
)


@pytest.fixture(scope="module")
def subject():
    return of_checkpoint("tiny", WORDS, warmed=False, note=lambda line: None)


def test_prompts_with_the_longest_worked_responses_come_first(subject):
    assert len(subject.prompts(3)) == 3
    assert subject.prompts(3) != subject.prompts(30)[-3:]
    first, second = (subject.requests([4, 5], stop=False, round=r) for r in (0, 1))
    assert [r.params.max_new_tokens for r in first] == [4, 5]
    assert {r.id for r in first}.isdisjoint(r.id for r in second)
    assert first[0].params.stop_ids == ()
    assert subject.requests([4], stop=True)[0].params.stop_ids == subject.stops != ()


def test_weights_that_a_pass_reads_are_counted_once(subject):
    sizes = {name: t.nbytes for name, t in subject.weights.items()}
    assert subject.num_bytes == sum(sizes.values()) - sizes["lm_head.weight"]  # tied


def test_decode_measures_passes_of_the_whole_batch(subject, monkeypatch):
    monkeypatch.setattr(decode, "TOKENS", {8: 12})
    bench = Bench("decode", math.nan)
    strategies = ["ngram:4,1,5", "learned:2,2,5", "hybrid:2,1,6"]
    got = decode.grid(bench, subject, [1, 3], strategies)
    assert set(got) == {(b, s) for b in (1, 3) for s in ("off", *strategies)}
    for (batch, strategy), cell in got.items():
        assert cell["pass_us"] > 0
        assert 0 <= cell["host_share"] < 1
        if strategy == "off":
            assert cell["accept_length"] == 1.0
            assert cell["over_off"] == 1.0
        else:
            assert 1 <= cell["accept_length"] <= Strategy.parse(strategy).levels + 1
        assert len(cell["counts"]) == Strategy.parse(strategy).levels + 1
        assert sum(cell["counts"]) >= batch
    decode.book_warmed(bench, got)
    assert "tail_host_share" not in bench.got  # has more batches and strategies
    assert bench.got["smollm2_b1_us"] == pytest.approx(got[1, "off"]["pass_us"], abs=0.1)
    assert bench.got["spec_over_plain_b1_x"] > 0


def test_the_cost_of_a_pass_is_that_of_the_fastest_strategy_of_depth_4():
    def cell(pass_us, tokens_per_s):
        more = {"host_share": 0.0, "over_off": 1.0}
        return {"pass_us": pass_us, "tokens_per_s": tokens_per_s, **more}

    got = {(1, "off"): cell(100.0, 10.0), (1, "learned:6,1,7"): cell(110.0, 90.0)}
    chain, tree = ((1, strategy) for strategy in decode.DEPTH4)
    for pair, cost in (((40.0, 50.0), 1.6), ((50.0, 40.0), 1.3)):
        bench = Bench("decode", math.nan)
        decode.book_warmed(bench, got | {chain: cell(130.0, pair[0]), tree: cell(160.0, pair[1])})
        assert bench.got["pass_cost_over_plain_b1_x"] == cost


def test_the_host_share_of_a_phase_is_that_of_all_its_cells():
    cell = {"pass_us": 1.0, "tokens_per_s": 1.0, "over_off": 1.0}
    names = ["off", *decode.STRATEGIES]
    got = {
        (batch, name): {**cell, "host_share": batch / 100}
        for batch in decode.BATCHES
        for name in names
        if decode.fits(batch, name)
    }
    whole, part = (Bench("decode", math.nan) for _ in range(2))
    decode.book_warmed(whole, got)
    assert (whole.got["tail_host_share"], whole.got["dense_host_share"]) == (0.08, 2.56)
    decode.book_warmed(part, {key: value for key, value in got.items() if key[0] not in (4, 256)})
    assert not {"tail_host_share", "dense_host_share"} & part.got.keys()


def test_a_shape_uses_recorded_accept_lengths(monkeypatch):
    monkeypatch.setattr(decode, "TOKENS", {8: 6})
    words = [*WORDS, "model.dtype=bfloat16", "drafter.draft_vocab=128"]
    shape = of_shape("shape", words, TINY_SHAPE, "cpu")
    assert shape.spec.qkv_bias and not shape.spec.tie_word_embeddings
    embedding = shape.weights["model.embed_tokens.weight"].nbytes
    assert shape.num_bytes == sum(t.nbytes for t in shape.weights.values()) - embedding
    bench = Bench("decode", math.nan)
    accepts = {"learned:2,1,3": [0, 10, 0]}
    got = decode.grid(bench, shape, [2], ["learned:2,1,3", "learned:1,1,2"], accepts)
    cell = got[2, "learned:2,1,3"]
    assert cell["accept_length"] == 2.0
    assert cell["tokens_per_s"] == pytest.approx(4e6 / cell["pass_us"])
    rows = {row["case"]: row for row in bench.rows}
    assert rows["shape b2 learned:2,1,3"]["synthetic"] is True
    assert "shape b2 learned:1,1,2" not in rows  # without recorded counts


def test_only_picks_cases(subject, monkeypatch):
    monkeypatch.setattr(decode, "TOKENS", {8: 4})
    bench = Bench("decode", math.nan, only="b2 off")
    decode.grid(bench, subject, [1, 2], ["ngram:4,1,5"])
    assert [row["case"] for row in bench.rows] == ["tiny b2 off"]


def test_both_ways_to_verify_a_chain_are_compared(subject, monkeypatch):
    monkeypatch.setattr(decode, "TOKENS", {8: 12})
    bench = Bench("decode", math.nan, quick=True)
    monkeypatch.setattr(decode, "TEMPERATURES", (1.0, 0.0))
    decode.compare_verification(bench, subject, [3])
    case = "tiny b3 learned:4,1,5"
    lengths = {row["case"].removeprefix(f"{case} "): row["accept_length"] for row in bench.rows}
    assert [*lengths] == ["T1 shared", "T0 shared", "T1 rejection", "T0 rejection"]
    assert lengths["T0 shared"] == lengths["T0 rejection"]  # greedy drafts and decisions
    assert lengths["T1 shared"] != lengths["T1 rejection"]


@pytest.fixture(scope="module")
def arms(subject):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout, "STATIC", ["ngram:4,1,5", "learned:2,2,5"])
        patch.setattr(rollout, "BUCKETS", [1, 2, 4])
        patch.setattr(rollout, "ADAPT_S", 0.3)
        bench = Bench("rollout", math.nan, quick=True)
        arms = rollout.Arms(bench, subject, [40, 9, 5, 21, 3, 12])
        rollout.replay_arms(arms)
        arms.add_rows()
        rollout.book(bench, arms)
    return arms


def test_rollout_arms_emit_the_trace_exactly(arms):
    names = {"off", "bandit", "bandit, first", "bandit, adapted", "bandit, adapted, first"}
    names |= {f"{arm}, adapted" for arm in ("ngram:4,1,5", "learned:2,2,5")}
    assert set(arms.rounds) == names
    for stats in (stats for rounds in arms.rounds.values() for stats in rounds):
        assert stats.emitted == 40 + 9 + 5 + 21 + 3 + 12
        assert stats.reprefilled_tokens == 0
    assert arms.median("learned:2,2,5, adapted").spec_passes > 0
    assert arms.median("off").spec_passes == 0
    rows = {row["case"]: row for row in arms.bench.rows}
    assert rows["off"]["over_off"] == 1.0
    assert set(rows) == names
    for name, rounds in arms.rounds.items():  # all figures of a row are of one round
        (shown,) = [s for s in rounds if round(1e6 * s.elapsed_s, 3) == rows[name]["median_us"]]
        assert rows[name]["target_passes"] == shown.target_passes
        assert sum(s.elapsed_s < shown.elapsed_s for s in rounds) == len(rounds) // 2


def test_rounds_of_an_arm_have_different_noise(subject, monkeypatch):
    ids = []
    engine = SimpleNamespace(
        generate=lambda requests, record: ids.append(requests[0].id),
        forget=lambda: None,
        stats=RolloutStats(),
    )
    monkeypatch.setattr(rollout, "fix_bandit", lambda made, policy: None)
    arms = rollout.Arms(Bench("rollout", math.nan), subject, [4])
    rollout.compare(arms, SimpleNamespace(engine=engine), ["off"])
    uncounted, *rounds = ids
    assert len(set(rounds)) == len(arms.rounds["off"]) == rollout.ROUNDS


def test_rollout_books_its_targets(arms):
    wanted = {"trace_over_off_x", "bandit_over_best_static_x", "never_below_off_x", "switch_ms"}
    assert wanted <= set(arms.bench.got)
    assert arms.bench.got["reprefilled_tokens"] == 0
    assert arms.bench.got["trace_s"] == round(arms.seconds("bandit, adapted"), 3)


def test_the_drafter_adapts_to_other_prompts_than_the_trace(subject):
    lengths = [7, 5, 6, 4]
    own = subject.requests(lengths, stop=False)
    others = rollout.other_requests(subject, lengths)
    assert [r.params.max_new_tokens for r in others] == lengths
    assert {r.prompt_ids for r in others}.isdisjoint(r.prompt_ids for r in own)
    assert {r.id for r in others}.isdisjoint(r.id for r in own)


def test_adapting_trains_the_drafter_and_changes_no_token(subject, monkeypatch):
    monkeypatch.setattr(rollout, "ADAPT_S", 0.5)
    made = subject.rollout("engine.strategies=off learned:2,2,5", longest=96)
    requests = subject.requests([20, 9], stop=False)
    fix_bandit(made, policy="learned:2,2,5")
    before = [r.token_ids for r in made.engine.generate(requests, record=False)]
    version, steps = made.spot.runner.version, made.spot.steps
    rollout.adapt(made, subject, [30, 12])
    assert made.spot.steps > steps and made.spot.runner.version > version
    fix_bandit(made, policy="learned:2,2,5")
    steps = made.spot.steps
    assert [r.token_ids for r in made.engine.generate(requests, record=False)] == before
    assert made.spot.steps == steps  # a timed rollout trains nothing


def test_transformers_is_extrapolated_from_its_steps(subject, monkeypatch):
    calls = []
    monkeypatch.setattr(rollout, "HF_STEPS", 5)
    monkeypatch.setattr(rollout, "seconds_of", lambda call: calls.append(call()) or len(calls))
    subject.policy.set_attn_implementation("sdpa")
    seconds = rollout.hf_seconds(subject.policy, subject.prompts(2), [100, 7], "dynamic")
    whole, first = calls
    assert whole.shape[1] - first.shape[1] == 4  # end tokens do not end a response
    # "1" second for five tokens, "2" for the first: 2 + (1 - 2) / 4 a token.
    assert seconds == pytest.approx(2 - 99 / 4)


def test_prompts_are_padded_on_the_left():
    batch = rollout.padded([(5, 6, 7), (8,)], 0, torch.device("cpu"))
    assert batch["input_ids"].tolist() == [[5, 6, 7], [0, 0, 8]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]


def test_the_other_peers_run_after_a_failure(subject, monkeypatch, capsys):
    def hf_seconds(policy, prompts, lengths, how):
        if how == "static":
            raise RuntimeError("no such thing\nhere")
        return 40.0 if how == "dynamic" else 8.0

    monkeypatch.setattr(rollout, "hf_seconds", hf_seconds)
    bench = Bench("rollout", math.nan)
    rollout.compare_hugging_face(bench, subject, [3, 4], ours=2.0)
    assert [row["case"] for row in bench.rows] == [
        "transformers dynamic",
        "transformers continuous",
    ]
    assert not bench.got  # without the compiled one, which is the fastest
    assert "transformers static: RuntimeError: no such thing" in capsys.readouterr().out


def test_a_quick_run_decides_nothing_about_transformers(subject, monkeypatch):
    """It leaves out the compiled one, which is the fastest."""
    monkeypatch.setattr(rollout, "hf_seconds", lambda policy, prompts, lengths, how: 40.0)
    bench = Bench("rollout", math.nan, quick=True)
    rollout.compare_hugging_face(bench, subject, [3, 4], ours=2.0)
    assert [row["ours_over"] for row in bench.rows] == [20.0] and not bench.got


def test_a_peer_that_hangs_is_stopped():
    with pytest.raises(TimeoutError, match="not done within 1 s"), timing.time_limit(1):
        time.sleep(20)
    with timing.time_limit(1):
        pass


# -- graphs


def test_graph_cases_differ_in_what_they_capture():
    plans = {}
    for case in graphs.CASES:
        config = load_config(graphs.words_of(case))
        engine = config.engine
        assert (case == "single") == (len(engine.strategies) == 2)
        plans[case] = BucketPlan(
            engine.max_batch,
            engine.spec_max_batch,
            parse_strategies(engine.strategies),
            config.bandit.buckets,
            1 << 20,
        )
    assert len(plans["single"].cells) < len(plans["ours"].cells) < len(plans["naive"].cells)
    assert max(c.rows for c in plans["naive"].cells) == 8 * max(c.rows for c in plans["ours"].cells)
    assert len(graphs.STRATEGIES) == 6  # of the targets
    assert all(plan.find(256, Strategy("off")) for plan in plans.values())


def test_graph_memory_is_booked_only_where_all_was_captured():
    def cell(mib, failed=""):
        return {
            "mib": mib,
            "graphs_mib": mib - 1.0,
            "settled_mib": mib - 2.0,
            "buffers_mib": 1.0,
            "count": 3,
            "capture_s": 0.5,
            "setup_s": 9.0,
            "failed": failed,
        }

    bench = Bench("graphs", math.nan)
    graphs.book(bench, {"single": cell(100), "ours": cell(110), "naive": cell(550)})
    assert bench.got == {"all_over_single_x": 1.1, "naive_over_ours_x": 5.0}
    bench = Bench("graphs", math.nan)
    graphs.book(bench, {"ours": cell(110), "naive": cell(550, "out of memory")})
    assert bench.got == {}
    graphs.add_row(bench, "naive", cell(550, "out of memory"))
    assert bench.rows[0]["median_us"] == 5e5 and bench.rows[0]["failed"] == "out of memory"
    assert "predicted_over_measured" not in bench.rows[0]
    graphs.add_row(bench, "ours", cell(110) | {"predicted_over_measured": 0.9})
    assert bench.rows[1]["predicted_over_measured"] == 0.9


@pytest.mark.parametrize("kind", [graphs.Unrun, graphs.OwnMemory])
def test_measured_graphs_are_not_launched(kind, monkeypatch):
    monkeypatch.setattr(graphs.PassGraphs, "_capture", Loops._capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    runner = looping(random_model("llama-tied-llama3")).engine.runner
    runner.graphs.__class__ = kind
    runner.prepare()
    assert len(runner.graphs._captured) == len(runner.graphs.plan.cells) > 0
    assert runner.graphs._pool.launches == 0
