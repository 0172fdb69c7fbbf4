"""The examples run and print what their docstrings promise."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from profiling.benches import adapters

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def run(name, monkeypatch, capsys, *words):
    return run_with_names(name, monkeypatch, capsys, *words)[0]


def run_with_names(name, monkeypatch, capsys, *words):
    """What an example prints, and its functions by name."""
    monkeypatch.setattr(sys, "argv", [name, *words])
    names = runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out, names


def test_generate_emits_equal_tokens_in_fewer_passes(monkeypatch, capsys):
    speculative, plain, tokens, logprobs = run("generate.py", monkeypatch, capsys).splitlines()
    assert int(speculative.split()[-2]) < int(plain.split()[-2])
    assert (tokens, logprobs) == ("tokens equal: True", "log-probs equal: True")


def test_train_tiny_prints_metrics_and_its_folder(monkeypatch, capsys, tmp_path):
    words = ["preset=tiny", "run.steps=1", "run.eval_prompts=4", "warmup.steps=2"]
    small = ["sampling.max_new_tokens=16", "grpo.prompts_per_step=2", "grpo.samples_per_prompt=2"]
    small += ["reward.workers=1"]
    out = run("train_tiny.py", monkeypatch, capsys, *words, *small, f"run.root={tmp_path}")
    assert "critic/rewards/mean" in out and "response_length/mean" in out
    folder = Path(out.splitlines()[-1].removeprefix("the run's folder: "))
    assert folder.parent == tmp_path and (folder / "summary.json").exists()


def test_own_loop_learns(monkeypatch, capsys):
    lines = run("own_loop.py", monkeypatch, capsys).splitlines()
    rewards = [float(line.split()[-1]) for line in lines]
    assert len(rewards) == 8 and sum(rewards[-2:]) > sum(rewards[:2]) + 0.1


def test_trl_grpo_trains_with_both_rollouts(monkeypatch, capsys, tmp_path):
    pytest.importorskip("trl", reason="needs the extra `trl`")
    small = ["run.steps=2", "grpo.prompts_per_step=1", "grpo.samples_per_prompt=4"]
    words = [*small, "sampling.max_new_tokens=16", f"run.root={tmp_path}"]
    out, names = run_with_names("trl_grpo.py", monkeypatch, capsys, *words)
    steps = re.findall(r"(trl|tlt) step (\d): .* reward (\S+) .* accept length (\S+)", out)
    arms = [("trl", "1"), ("trl", "2"), ("tlt", "1"), ("tlt", "2")]
    assert [(arm, step) for arm, step, _, _ in steps] == arms
    assert float(steps[3][3]) >= 1
    assert re.search(r"median \(range\): trl \S+ s \(.*\), tlt \S+ s \(.*\); a step .* fast$", out)
    assert len(adapters.LINE.findall(out)) == 4  # the benchmark reads them
    line = names["comparison"]([4, 1, 2], [1, 0.9, 1.1])
    medians = "median (range): trl 2.00 s (1.00 to 4.00), tlt 1.00 s (0.90 to 1.10)"
    assert line.endswith(f"{medians}; the ranges overlap: no clear difference")


def test_ops_accepts_the_child_that_the_target_draws(monkeypatch, capsys):
    try:
        counts, tokens, status = run("ops.py", monkeypatch, capsys).strip("[]\n").split("] [")
    finally:
        torch.set_default_device(None)
    assert (counts, status) == ("2, 1", "0, 0")
    assert tokens.startswith("5, ")
