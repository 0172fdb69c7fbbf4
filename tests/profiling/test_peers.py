"""The benchmark beside vLLM, on a small model on the CPU, with a stand-in for vLLM."""

import math
import time
from argparse import Namespace
from pathlib import Path

import pytest
from transformers import Qwen2Config

from profiling.benches import peers, rollout
from profiling.peers.vllm import HOW_TO_GET, Vllm, lacks_vllm
from profiling.rig.bench import Bench
from profiling.rig.subjects import of_shape
from profiling.studies import by_turns, exported
from profiling.studies.vllm_engines import engines
from tests.profiling.test_engine_benches import TINY_SHAPE

# An LLM that makes token 5 and, with a drafter, counts drafts of which half are accepted. A token
# takes .1 ms on a clock of its own.
STAND_IN = """
import time
from types import SimpleNamespace as Space

__version__ = "stand-in"
now = 0.0
time.perf_counter = lambda: now

class SamplingParams:
    def __init__(self, **values):
        self.__dict__.update(values)

class LLM:
    def __init__(self, model, speculative_config=None, **settings):
        print("vLLM prints to stdout")
        if settings.get("max_model_len") == 13:
            raise ValueError("no such length")
        self.spec, self.drafts, self.accepted = speculative_config, 0, 0
        compiled = Space(cudagraph_mode="FULL", max_cudagraph_capture_size=512)
        self.config = Space(
            compilation_config=compiled, use_v2_model_runner=True,
            scheduler_config=Space(async_scheduling=True),
        )
        core = Space(engine_core=Space(log_stats=True, scheduler=Space(log_stats=True)))
        self.llm_engine = Space(
            vllm_config=self.config, log_stats=True, logger_manager="logger",
            output_processor=Space(log_stats=True), engine_core=core,
        )

    def get_metrics(self):
        values = {"drafts": self.drafts, "accepted_tokens": self.accepted}
        name = "vllm:spec_decode_num_"
        return [Space(name=name + part, value=value) for part, value in values.items()]

    def generate(self, prompts, params, use_tqdm):
        global now
        now += 1e-4 * max(p.max_tokens for p in params)
        out = []
        for prompt, p in zip(prompts, params):
            assert p.ignore_eos == (not p.stop_token_ids) and prompt["prompt_token_ids"]
            if self.llm_engine.log_stats and self.spec:
                k = self.spec["num_speculative_tokens"]
                self.drafts, self.accepted = self.drafts + 2, self.accepted + k
            out.append(Space(outputs=[Space(token_ids=[5] * p.max_tokens)]))
        return out
"""
STAND_IN_CONFIG = "class LoadConfig:\n    def __init__(self, load_format): pass\n"
WORDS = ["model.hidden_size=32", "model.num_layers=3", "run.threads=1", "drafter.draft_vocab=24"]
WARM = [
    "warmup.keep=true",
    "warmup.steps=4",
    "warmup.batch=4",
    "warmup.drafter_steps=4",
    "warmup.drafter_tokens=64",
    "warmup.responses=4",
    "sampling.max_new_tokens=24",
    "engine.max_batch=8",
]


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "kit" / "vllm"
    made.mkdir(parents=True)
    (made / "__init__.py").write_text(STAND_IN)
    (made / "config.py").write_text(STAND_IN_CONFIG)
    return made.parent


@pytest.fixture
def small(monkeypatch, folder, tmp_path):
    """The benchmark with small sizes, and its options."""
    sizes = {"BATCHES": [1, 2], "SPEC_BATCHES": [2], "ALONE": [1], "LOOKUP_BATCH": 2}
    sizes |= {"PROMPTS": 2, "SAMPLES": 2, "STEP_TOKENS": 8, "CHAINS": [4]}
    for name, value in sizes.items():
        monkeypatch.setattr(peers, name, value)
    sizes = {"HIDDEN": 32, "SMALL": {"qwen3": 3, "qwen2": 3}, "PROMPTS": 3, "TOKENS": 12}
    sizes |= {"SMALL_WORDS": ["preset=tiny", "run.threads=1", *WARM]}
    for name, value in sizes.items():
        monkeypatch.setattr(exported, name, value)
    monkeypatch.setattr(by_turns, "ROUNDS", 1)
    monkeypatch.setattr(rollout, "ADAPT_S", 0.1)
    monkeypatch.setattr(peers, "NEW_TOKENS", 10)
    monkeypatch.setattr(peers, "trace_lengths", lambda: [9, 5, 3])
    return Namespace(vllm=str(folder), logs=tmp_path / "logs")


class TinyBench(Bench):
    words = ["preset=tiny", *WORDS, *WARM]


@pytest.fixture
def tiny(tmp_path):
    bench = TinyBench("peers", math.nan)
    bench.words = [*TinyBench.words, f"run.root={tmp_path}"]
    return bench


def engine(folder, tmp_path, **settings):
    return Vllm("one", str(folder), tmp_path / "log", {}, model="m", **settings)


def wait_for_state(one, state):
    """Of the process by Linux; T = stopped."""
    while Path(f"/proc/{one.process.pid}/stat").read_text().rpartition(")")[2].split()[0] != state:
        time.sleep(0.01)


def test_an_engine_in_another_process_answers_batches(folder, tmp_path):
    one = engine(folder, tmp_path, speculative_config={"num_speculative_tokens": 4})
    try:
        about = one.ready()
        assert about["vllm"] == "stand-in" and about["runner"] == "v2"
        wait_for_state(one, "T")
        made = one.generate([[1], [2]], [3, 4], counted=True, tokens=True)
        assert made["lengths"] == [3, 4] and made["tokens"] == [[5] * 3, [5] * 4]
        assert made["accept_length"] == 3.0
        assert made["seconds"] > 0
        again = one.generate([[1]], [2], stops=[7], temperature=0.0)
        assert "accept_length" not in again and "tokens" not in again
        # What the timed runs did not count is not in the next counts either.
        assert one.generate([[1]], [2], counted=True)["accept_length"] == 3.0
    finally:
        one.close()
    assert one.process.poll() == 0
    assert "vLLM prints to stdout" in (tmp_path / "log").read_text()


def test_an_engine_that_fails_is_one_line(folder, tmp_path):
    one = engine(folder, tmp_path, max_model_len=13)
    with pytest.raises(RuntimeError, match="vLLM one: ValueError: no such length; see .*log"):
        one.ready()
    with pytest.raises(RuntimeError, match="vLLM one: it ended"):
        one.generate([[1]], [1])
    one.close()


def test_without_vllm_the_command_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert lacks_vllm("") == HOW_TO_GET and HOW_TO_GET in peers.lacks()
    assert "holds no folder named vllm" in lacks_vllm(str(tmp_path))
    with pytest.raises(SystemExit, match="peers: needs vLLM: pip install --target"):
        peers.run(Bench("peers", 1.0))


def test_the_warmed_policy_beside_the_stand_in(small, tiny, monkeypatch):
    medians = []

    def median_round(arm, batch):
        medians.append(len(batch.limits))
        return by_turns.median_round(arm, batch)

    monkeypatch.setattr(peers, "median_round", median_round)
    with engines(tiny, small.vllm, small.logs) as made:
        peers.smollm2(tiny, made)
    assert tiny.failed == []
    assert medians == [3, 3, 4, 4, 3]  # vLLM's trace and ours, the step, ours adapted
    rows = {row["case"]: row for row in tiny.rows}
    assert rows["start of vLLM, eagle3 k=4"]["graphs"] == "FULL"
    plain = rows["smollm2 plain b2"]
    assert plain["ours"] == "off" and plain["vllm"] == "plain"
    assert plain["over_vllm"] == pytest.approx(
        plain["tokens_per_s"] / plain["vllm_tokens_per_s"], abs=0.001
    )
    assert plain["vllm_tokens_per_s"] == pytest.approx(2 / 1e-4)
    assert rows["smollm2 speculative b2, eagle3 k=4"]["accept_length"] == 3.0
    assert rows["smollm2 speculative b2"]["ours"] in peers.STRATEGIES
    assert rows["trace of 128, bandit"]["longest"] == 9
    adapted = rows["trace of 128, our drafter adapted"]
    best = rows["trace of 128"]["vllm"]
    assert rows[f"trace of 128, {best}"]["tokens"] == 17
    assert adapted["ours"] == "bandit" and adapted["vllm"] == best
    assert adapted["accept_length"] >= 1.0
    assert rows[f"rollout of a step, {best}"]["tokens"] == 4 * 8
    peers.book(tiny)
    assert tiny.got["decode_smollm2_over_vllm_x"] == min(
        rows[f"smollm2 {case}"]["over_vllm"] for case in ("plain b1", "plain b2", "alone plain b1")
    )
    assert rows["smollm2 speculative b2, ngram k=4"]["tokens_per_s"] > 0
    assert "decode_big_over_vllm_x" not in tiny.got


def test_exported_drafters_of_three_families(small, tiny):
    with engines(tiny, small.vllm, small.logs) as made:
        exported.exported(tiny, made)
    assert tiny.failed == []
    rows = {row["case"]: row for row in tiny.rows}
    for name in ("llama", "qwen3", "qwen2"):
        greedy = rows[f"export {name} T=0 greedy"]
        assert greedy["vllm_accept_length"] == 3.0
        assert rows[f"export {name} greedy tokens"]["equal_to_plain"] == 1.0
        assert greedy["vllm_over_ours"] == pytest.approx(3.0 / greedy["accept_length"], rel=1e-3)
        assert f"export {name} T=1 probabilistic" in rows
    peers.book(tiny)
    assert tiny.got["vllm_greedy_equal_share"] == 1.0


def test_random_shapes_get_the_accept_length_of_the_warmed_policy(small, tiny, monkeypatch):
    shape = Qwen2Config.from_dict(
        {**TINY_SHAPE.to_dict(), "num_hidden_layers": 3, "layer_types": None}
    )
    monkeypatch.setattr(peers, "SHAPES", {"7b": (shape, 1)})
    monkeypatch.setattr(peers, "recorded_accepts", lambda: {peers.CHAIN: [0, 5, 5, 0, 0]})
    monkeypatch.setattr(peers, "of_shape", lambda n, w, s, d: of_shape(n, words, s, "cpu"))
    words = [*tiny.words, "model.dtype=bfloat16"]
    with engines(tiny, small.vllm, small.logs) as made:
        peers.shapes(tiny, made)
    assert tiny.failed == []
    rows = {row["case"]: row for row in tiny.rows}
    own = rows["7b speculative b2, learned:4,1,5"]
    assert own["accept_length"] == 2.5
    assert rows["7b speculative b2"]["synthetic"] is True
    assert rows["7b plain b1"]["vllm_tokens_per_s"] == pytest.approx(1e4)


def test_the_median_round_is_of_rounds_with_other_noise():
    batch, seen = by_turns.Batch([(1,), (2,)], [8, 8]), []

    def arm(batch):
        seen.append([request.id for request in batch.requests()])
        return by_turns.Made([5.0, 1.0, 2.0][len(seen) - 1], batch.limits)

    assert by_turns.median_round(arm, batch).seconds == 2.0
    own = [request.id for request in batch.requests()]
    assert len({*own, *(id for ids in seen for id in ids)}) == 8


def test_a_response_that_ends_early_is_no_speed():
    batch = by_turns.Batch([(1,), (2,)], [8, 8])
    arms = {"one": lambda batch: by_turns.Made(1.0, [8, 7])}
    with pytest.raises(RuntimeError, match="one: responses end before their limits"):
        by_turns.speeds(arms, arms, batch)


def test_targets_count_rows_of_earlier_parts():
    bench = Bench("peers", math.nan)
    bench.known = [{"case": f"15b plain b{b}", "over_vllm": 2.0} for b in peers.BATCHES]
    bench.rows = [{"case": f"7b plain b{b}", "over_vllm": 1 + b} for b in peers.BATCHES]
    peers.book(bench)
    assert bench.got == {"decode_big_over_vllm_x": 2.0}
    bench.rows[0]["over_vllm"] = 0.5
    peers.book(bench)
    assert bench.got == {"decode_big_over_vllm_x": 0.5}


@pytest.mark.parametrize(
    ("some", "others", "share"),
    [([[1, 2]], [[1, 2]], 1.0), ([[1, 2, 3]], [[1, 2]], 0.666667), ([[9, 2]], [[1, 2]], 0.0)],
)
def test_tokens_after_a_difference_do_not_count(some, others, share):
    assert exported.equal_share(some, others) == share
