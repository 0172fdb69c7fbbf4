"""The drafter's benchmark runs whole on a small model on the CPU; its rules meet closed forms."""

import json

import pytest
import torch

from profiling.bench import Bench
from profiling.benches import drafter
from profiling.benches.drafter import compare
from profiling.drafting import Sizes, first_acceptance
from profiling.subjects import of_checkpoint

WORDS = [
    "preset=tiny",
    "model.hidden_size=32",
    "model.num_layers=3",
    "model.intermediate_size=64",
    "drafter.draft_vocab=24",
    "run.threads=1",
]
SMALL = Sizes(
    prompts=16, rounds=1, tokens=24, batch=4, bin=64, steps=6, family_steps=4, unroll=2,
    strategies=("learned:2,2,5",),
)  # fmt: skip


def logs(rows: int, count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(rows, count, generator=generator)).log_softmax(-1)


def test_acceptance_of_one_child_is_one_minus_the_variation_at_best():
    rows, count = 20_000, 12
    target = logs(1, count, 1).expand(rows, -1)
    ids = torch.tensor([0, 2, 3, 5, 6, 9, 10, 11])
    draft = logs(1, len(ids), 2).expand(rows, -1)
    wide = torch.zeros(count).index_add(0, ids, draft[0].exp())
    generator = torch.Generator().manual_seed(0)
    shares = first_acceptance(target, draft, ids, 1, generator)
    best = float(torch.minimum(target[0].exp(), wide).sum())
    assert shares["multi_round"] == pytest.approx(best, abs=0.015)
    argmax = float(target[0].exp()[ids[draft[0].argmax()]])
    assert shares["target_only"] == pytest.approx(argmax, abs=0.015)
    assert 0 < shares["shared_noise"] < best + 0.015


def test_all_children_hold_the_token_by_every_rule():
    """A draft with the target's support: nothing can be missed."""
    target, draft, ids = logs(500, 6, 1), logs(500, 6, 2), torch.arange(6)
    shares = first_acceptance(target, draft, ids, 6, torch.Generator().manual_seed(0))
    assert shares == {"shared_noise": 1.0, "target_only": 1.0, "multi_round": 1.0}
    equal = first_acceptance(target, target, ids, 1, torch.Generator().manual_seed(0))
    assert equal["shared_noise"] == equal["multi_round"] == 1.0 > equal["target_only"]


def test_the_benchmark_runs_whole_on_the_cpu(monkeypatch):
    monkeypatch.setattr(drafter, "MEASURED_ROWS", 100)
    monkeypatch.setattr(drafter, "SCORE_TEMPERATURES", [0.0, 1.0])
    subject = of_checkpoint("tiny", WORDS, warmed=False, note=lambda line: None)
    bench = Bench("drafter", copy_gb_per_s=float("nan"))
    compare(bench, subject, SMALL)
    cases = {row["case"]: row for row in bench.rows}
    assert cases["responses to learn from"]["tokens"] > 14 * 24
    for steps in (1, 3, 7):
        (name,) = [case for case in cases if case.startswith(f"unroll {steps},")]
        assert cases[name]["accept_length"] >= 1.0 and cases[name]["step_us"] > 0
    assert cases["learned:2,2,5, shared noise"]["passes"] > 0
    assert {"position 0-31", "batch 2-3", "nodes by scores at 1"} <= cases.keys()
    assert {"mix, 0 of kept long ones", "mix, 0.25 of kept long ones"} <= cases.keys()
    assert {f"missed tokens weigh {weight}" for weight in (1, 2, 4)} <= cases.keys()
    assert cases["first draft, 8 children"]["shared_noise"] > 0.05
    assert 0 <= cases["favourites"]["top1"] <= cases["favourites"]["top3"] <= 1
    assert set(bench.got) == {
        "accept_length_smollm2_gsm8k_t1",
        "shared_noise_over_target_only_x",
        "checkpoint_stall_ms",
        "packing_over_padding_x",
    }
    assert all(value > 0 for value in bench.got.values())


def test_a_part_can_be_chosen():
    subject = of_checkpoint("tiny", WORDS, warmed=False, note=lambda line: None)
    bench = Bench("drafter", copy_gb_per_s=float("nan"), only="packing")
    compare(bench, subject, SMALL)
    assert [row["case"] for row in bench.rows][-2:] == ["packed", "padded"]
    assert set(bench.got) == {"packing_over_padding_x"}


def test_runs_are_compared_by_their_last_steps(tmp_path):
    for name, last in (("frozen", 2.0), ("serial", 2.2), ("overlapped", 2.1)):
        (tmp_path / name).mkdir()
        rows = [{"step": i, "spec/accept_length": 9.0 if i < 20 else last} for i in range(30)]
        lines = "".join(json.dumps(row) + "\n" for row in [{"step": -1}, *rows])
        (tmp_path / name / "metrics.jsonl").write_text(lines)
    bench = Bench("drafter", copy_gb_per_s=float("nan"))
    drafter.adaptive_over_frozen(bench, tmp_path)
    assert bench.got == {"adaptive_over_frozen_accept_x": 1.1}
    drafter.adaptive_over_frozen(Bench("drafter", float("nan")), tmp_path / "none")
