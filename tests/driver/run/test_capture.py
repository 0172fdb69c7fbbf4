"""Inputs of an op are saved from a real step and give the same outputs when run again."""

import pytest
import torch

import tlt_ext
from driver.common.errors import UserError
from driver.config.load import load_config
from driver.records.progress import Progress
from driver.run.capture import Capture, capture_op, copy_arguments
from driver.train import train
from profiling.kernels import replay
from tests.driver.run.test_run import WORDS

INTS = {"dtype": torch.int32}


def attention_arguments(pages=9):
    """Two requests of 5 and 11 tokens on pages of 4, three rows each, in views with gaps."""
    generator = torch.Generator().manual_seed(0)
    caches = torch.randn(pages, 2, 4, 1, 8, generator=generator)
    table = torch.tensor([[7, 2, 2**30, -5], [3, 8, 0, 5]], **INTS)
    q = torch.randn(6, 2, 24, generator=generator)[..., :8]
    return {
        "q": q,
        "k_cache": caches[:, 0],
        "v_cache": caches[:, 1],
        "out": torch.empty(6, 2, 8),
        "rows": tlt_ext.Rows(
            row_start=torch.tensor([0, 3, 6], **INTS),
            position=torch.tensor([5, 6, 7, 11, 12, 13], **INTS),
            status=torch.zeros(2, **INTS),
            context_len=torch.tensor([5, 11], **INTS),
            block_table=table,
        ),
    }


def test_only_the_pages_of_the_requests_are_kept():
    arguments = attention_arguments()
    tlt_ext.tree_attention(**arguments)
    saved = copy_arguments(tlt_ext.tree_attention, (), arguments)
    assert saved["k_cache"].shape[0] == 6 and int(saved["rows.block_table"].max()) == 5
    assert saved["q"].stride() == arguments["q"].stride()
    out = saved["out"].zero_()
    replay.call_flat(tlt_ext.tree_attention, saved)
    assert torch.equal(out, arguments["out"]) and not saved["rows.status"].any()


def test_calls_are_spread_over_the_step_and_hold_what_was_before(tmp_path):
    before = tlt_ext.silu_mul
    with capture_op(Capture("silu_mul", step=2, calls=4), tmp_path):
        for index in range(20):
            x, out = torch.full((1, 8), float(index)), torch.zeros(1, 4)
            tlt_ext.silu_mul(x, out)
            x.zero_()
    assert tlt_ext.silu_mul is before
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"silu_mul-000002-{index:06d}.pt" for index in (0, 8, 16)]
    last = torch.load(tmp_path / names[-1])["arguments"]
    assert torch.equal(last["x"], torch.full((1, 8), 16.0)) and not last["out"].any()


def test_a_step_that_fails_leaves_the_op_as_it_was(tmp_path):
    before = tlt_ext.silu_mul
    with pytest.raises(RuntimeError), capture_op(Capture("silu_mul", 1), tmp_path):
        raise RuntimeError
    assert tlt_ext.silu_mul is before
    with pytest.warns(UserWarning, match="run.capture=silu_mul:1: no Python code called it"):
        with capture_op(Capture("silu_mul", 1), tmp_path):
            pass


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("tree_atention:1", "run.capture: the op must be one of .*tree_attention.*, got"),
        ("sample:9", "run.capture=sample:9: the run ends with step 3"),
    ],
)
def test_what_cannot_be_captured_is_refused(text, reason):
    with pytest.raises(UserError, match=reason):
        Capture.parse(text, 3)


def test_a_run_s_calls_can_be_replayed(tmp_path, capsys):
    words = [*WORDS, f"run.root={tmp_path}", "run.name=a", "run.steps=1", "run.eval_prompts=0"]
    for op in ("tree_attention", "commit_path"):
        config = load_config([*words, f"run.capture={op}:1", f"run.name={op}"])
        train(config, Progress(1))
        folder = tmp_path / op / "captures"
        calls = [replay.Call.load(path, "cpu") for path in sorted(folder.iterdir())]
        assert 1 < len(calls) <= 8
        lengths = [call.arguments["rows.context_len"].clone() for call in calls]
        for call, before in zip(calls, lengths, strict=True):
            call()
            call()
            assert torch.equal(call.arguments["rows.context_len"], before)
            assert not call.arguments["rows.status"].any()
            assert ("rows.context_len" in call.restored) == (op == "commit_path")
        assert replay.main([str(folder), "--device", "cpu"]) == 0
        assert capsys.readouterr().out.count(f"{op}-000001-") == 2 * len(calls)


def test_a_file_that_is_no_capture_gives_one_line(tmp_path, capsys):
    assert replay.main([str(tmp_path)]) == 2
    (tmp_path / "x.pt").write_bytes(b"no")
    assert replay.main([str(tmp_path)]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "no captured calls" in first and "x.pt: no captured call (" in second
