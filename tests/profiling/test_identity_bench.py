"""The identity benchmark runs on small models on the CPU and finds planted faults."""

import json
import math
from dataclasses import replace

import pytest

from driver.run.comparison import Arm, Comparison
from profiling.benches import identity
from profiling.benches.decode import SHAPE_WORDS
from profiling.rig.bench import Bench
from profiling.rig.results import TARGETS_CARD, all_targets
from profiling.rig.subjects import of_checkpoint, of_shape
from tests.profiling.test_engine_benches import TINY_SHAPE, WORDS

SIZE = identity.Size(tokens=250, batch=4, requests=12, longest=24, train_steps=3)
CARD = "task.name=sums"  # the tiny tokenizer has no letters for questions


@pytest.fixture(autouse=True)
def no_results(monkeypatch, tmp_path):
    monkeypatch.setattr(identity, "RESULTS", tmp_path)


@pytest.fixture(scope="module")
def subject():
    return of_checkpoint("smollm2", [*WORDS, CARD], warmed=False, note=lambda line: None)


def compared(subject, parts=identity.SMOLLM2_ARMS, size=SIZE, only=""):
    bench = Bench("identity", math.nan, only=only)
    identity.run_subject(bench, subject, parts, size, train=True, seconds=math.inf)
    return bench


def test_every_arm_of_a_checkpoint_is_equal_bit_for_bit(subject):
    bench = compared(subject)
    rows = {row["case"]: row for row in bench.rows}
    assert set(rows) == {f"smollm2 {arm}" for arm in ("off", *identity.SMOLLM2_ARMS)}
    for case, row in rows.items():
        assert row["equal_tokens"] == row["equal_lengths"] == row["equal_bits"] == 1.0, case
        assert row["tokens"] > 0 and row["median_us"] > 0
    whole = rows["smollm2 off"]
    assert whole["tokens"] >= SIZE.tokens and whole["speculative_passes"] == 0
    for arm in ("learned:4,2,8", "oracle:4,2,8"):
        assert rows[f"smollm2 {arm}"]["tokens"] == whole["tokens"]
        assert rows[f"smollm2 {arm}"]["speculative_passes"] == rows[f"smollm2 {arm}"]["passes"]
    assert rows["smollm2 oracle:4,2,8"]["accept_length"] > 2.5
    mixed = rows["smollm2 mixed"]
    assert 0 < mixed["speculative_passes"] < mixed["passes"]
    assert mixed["tokens"] < whole["tokens"] / 2  # a quarter of the requests
    identity.book(bench)
    assert bench.got == {}  # equal so far, but of too few tokens


@pytest.fixture
def small(subject, monkeypatch):
    """Subjects and sizes with which `run` needs no card."""

    def tiny_shape(name, words, shape, device):
        made = [*WORDS, *SHAPE_WORDS[:1], "drafter.draft_vocab=128", *words[-1:]]
        return of_shape(name, made, TINY_SHAPE, "cpu")

    monkeypatch.setattr(identity, "of_checkpoint", lambda name, words, **rest: subject)
    monkeypatch.setattr(identity, "of_shape", tiny_shape)
    monkeypatch.setattr(identity, "QUICK", replace(SIZE, tokens=200))
    monkeypatch.setattr(identity, "TOKENS", 200)


@pytest.mark.parametrize("only", ["", "shape", "smollm2 (learned|mixed)"])
def test_the_whole_benchmark_runs(small, only):
    bench = Bench("identity", math.nan, quick=True, only=only, options=["--seconds", "1000"])
    identity.run(bench)
    cases = {row["case"] for row in bench.rows}
    every = {f"smollm2 {a}" for a in identity.SMOLLM2_ARMS}
    every |= {f"qwen2_7b_shape {a}" for a in identity.SHAPE_ARMS}
    assert {case for case in cases if not case.endswith(" off")} == set(filter(bench.wanted, every))
    assert all(row["equal_tokens"] == row["equal_bits"] == 1.0 for row in bench.rows)
    wanted = {target for case, target in identity.TARGETS.items() if case in cases}
    assert set(bench.got) == wanted | ({"logprobs_bit_equal"} if not only else set())


def test_limits_differ_and_each_round_has_other_noise(subject):
    done = identity.comparison(subject, [Arm("oracle:4,2,8")], SIZE, train=False)
    first, second = done.requests(0), done.requests(1)
    limits = {r.params.max_new_tokens for r in first}
    assert len(limits) > 6 and max(limits) == 24 and min(limits) >= 12
    assert {r.id for r in first}.isdisjoint(r.id for r in second)
    assert len({r.params.temperature for r in first}) == 4


@pytest.mark.parametrize("fault", ["token", "length", "bit"])
def test_a_planted_fault_shows(subject, monkeypatch, fault):
    """One token of one response, its end, or the last bit of a log-prob."""
    generate = Comparison._generate

    def planted(self, arm, requests, record=False):
        out = generate(self, arm, requests, record)
        if arm.name == "oracle:4,2,8" and self.rounds == 0:
            bad = max(out, key=lambda response: len(response.token_ids))
            if fault == "token":
                bad.token_ids[5] += 1
            elif fault == "length":
                del bad.token_ids[-1], bad.logprobs[-1]
            else:
                bad.logprobs[2] *= 1 + 2**-23
        return out

    monkeypatch.setattr(Comparison, "_generate", planted)
    bench = compared(subject)
    rows = {row["case"]: row for row in bench.rows}
    row = rows["smollm2 oracle:4,2,8"]
    one = 1 - 1 / row["tokens"]
    wrong = {"token": ["equal_tokens"], "length": ["equal_tokens", "equal_bits"]}
    for name in ("equal_tokens", "equal_bits"):
        assert row[name] == pytest.approx(one if name in wrong.get(fault, ["equal_bits"]) else 1.0)
    assert (row["equal_lengths"] < 1) == (fault == "length")
    assert rows["smollm2 learned:4,2,8"]["equal_tokens"] == 1.0
    identity.book(bench)
    assert ("smollm2_oracle_drafter" in bench.got) == (fault != "bit")
    assert ("logprobs_bit_equal" in bench.got) == (fault != "token")
    assert all(share < 1 for share in bench.got.values())


def test_targets_are_met_by_enough_equal_tokens_only():
    def row(case, tokens, share=1.0):
        return {"case": case, "tokens": tokens, "equal_tokens": share, "equal_bits": 1.0}

    measured = {*identity.TARGETS.values(), "logprobs_bit_equal"}
    assert measured <= set(all_targets()["identity"])
    bench = Bench("identity", math.nan)
    bench.rows = [row(case, identity.TOKENS) for case in identity.TARGETS]
    identity.book(bench)
    assert bench.got == dict.fromkeys(measured, 1.0)
    half = Bench("identity", math.nan, known=bench.rows[:2])
    half.rows = bench.rows[2:]
    identity.book(half)
    assert half.got == bench.got
    half.known[0]["equal_bits"] = 0.5  # in the earlier result
    identity.book(half)
    assert half.got["logprobs_bit_equal"] == 0.5
    few = Bench("identity", math.nan)
    few.rows = [row("smollm2 learned:4,2,8", 99), row("smollm2 oracle:4,2,8", 100, 0.99)]
    identity.book(few)
    assert few.got == {"smollm2_oracle_drafter": 0.99}


@pytest.mark.parametrize(("tokens", "share", "got"), [(10**5, 0.9, 0.9), (99_999, 0.9, None)])
def test_long_responses_are_those_of_the_benchmark_of_big_shapes(tmp_path, tokens, share, got):
    cases = {"train 7b": {}, "decode 32k off": {"tokens": tokens, "equal_tokens": 1.0}}
    cases["decode 32k ngram:6,1,7"] = {"tokens": tokens, "equal_tokens": share}
    rows = [{"case": case, "bench": "big", **values} for case, values in cases.items()]
    path = tmp_path / TARGETS_CARD / "big.json"
    path.parent.mkdir()
    path.write_text(
        json.dumps({"meta": {"date": "2026", "commit": "a"}, "rows": rows, "targets": []})
    )
    bench = Bench("identity", math.nan)
    identity.book(bench)
    assert bench.got.get("long_responses_32k") == got
    assert {row["commit"] for row in bench.sources.get("long_responses_32k", [])} <= {"a"}


def test_no_round_begins_after_the_time_limit(subject):
    done = identity.comparison(subject, [Arm("ngram:4,1,5")], SIZE, train=False)
    done.run(10**9, seconds=0.0)
    assert done.rounds == 1
