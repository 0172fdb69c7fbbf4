"""Shares of kernels that overlap."""

import sys

import pytest
import torch

from profiling.kernels.time_line import main, shares, short


def event(name, begin, duration, kind="kernel"):
    return {"name": name, "ts": begin, "dur": duration, "cat": kind}


def test_a_kernel_has_the_time_from_the_end_before_to_its_own():
    events = [
        event("a", 10, 5),
        event("b", 11, 8),  # waits for a
        event("a", 25, 2),
        event("launch", 0, 90, "cuda_runtime"),
    ]
    assert shares(events) == {"a": (2, 7, 7), "idle": (0, 6, 0), "b": (1, 4, 8)}


def test_names_are_short():
    name = "void tlt::(anonymous namespace)::mid_kernel<__nv_bfloat16, 4>(tlt::Params, int)"
    assert short(name) == "mid_kernel"
    assert short("memcpy32_post") == "memcpy32_post"


def test_without_a_card_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["time_line"])
    with pytest.raises(SystemExit):
        main()
    assert "needs a CUDA device" in capsys.readouterr().err
