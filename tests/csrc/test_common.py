"""Keyed noise and the elementary functions that CPU and GPU share bit for bit."""

import collections
import math
import types

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tlt_ext
from tests import kit
from tlt_ext import _C
from tlt_ext.common import current_stream


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # the published known-answer vectors of Philox 4x32-10
        (
            [0, 0, 0, 0],
            [0, 0],
            [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8],
        ),
        (
            [0xFFFFFFFF] * 4,
            [0xFFFFFFFF] * 2,
            [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        ),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(counter, key, expected):
    assert list(_C.philox(counter, key)) == expected


def test_log_and_exp_are_float32_accurate():
    xs = np.concatenate([np.geomspace(2.0**-33, 90.0, 5001), [0.5, 1.0, 2.0]]).astype(np.float32)
    for x in xs:
        assert _C.log_f32(x) == pytest.approx(math.log(x), rel=3e-7, abs=3e-8)
    for x in np.linspace(-86.9, 20.0, 4001).astype(np.float32):
        assert _C.exp_f32(x) == pytest.approx(math.exp(x), rel=3e-7)
    assert _C.exp_f32(-math.inf) == 0.0
    assert _C.exp_f32(math.nan) == 0.0


def test_uniform_is_open_at_both_ends():
    """Fault 7: a word mapped to exactly 0 or 1."""
    for word in (0, 1, 2**31, 2**32 - 2, 2**32 - 1):
        assert 0.0 < _C.uniform_open(word) < 1.0


def test_gumbel_matches_its_formula_in_both_tails():
    for word in [0, 1, 7, 2**20, 2**30 - 1, 2**30, 2**31, 3 * 2**30, 2**32 - 2, 2**32 - 1]:
        u = (word + 0.5) / 2.0**32
        expected = -math.log(-math.log1p(-u))
        assert _C.gumbel(word) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(
    ("x", "error", "match"),
    [
        ([[1.0, 2.0]], TypeError, "expected an array that exports DLPack, got list"),
        (None, TypeError, "silu_mul: x: expected dtype float32 .*, got None"),
        (
            np.broadcast_to(np.float32(1), (1, 2)),
            ValueError,
            "exported by DLPack: .*readonly",
        ),
        (np.ones((1, 2), ">f4"), ValueError, "exported by DLPack: .*byte order"),
        (
            np.zeros(9, np.uint8)[1:].view(np.float32)[None],
            ValueError,
            "an array of float32 is not aligned to its elements; pass a copy",
        ),
        (np.zeros((1,) * 7, np.float32), ValueError, "an array has 7 axes; expected at most 6"),
        (np.zeros((1, 2), np.complex64), TypeError, r"unsupported dtype \(DLPack code 5, 64 bits"),
    ],
)
def test_an_argument_that_is_no_array_gives_one_line(x, error, match):
    with pytest.raises(error, match=match) as caught:
        tlt_ext.silu_mul(x, np.zeros((1, 1), np.float32))
    assert "\n" not in str(caught.value)


def test_a_group_needs_all_its_fields():
    """A tuple of the same name with fewer fields would be read past its end."""
    short = collections.namedtuple("Sampling", "temperature request")
    tokens, logprobs = np.zeros(1, np.int32), np.zeros(1, np.float32)
    with pytest.raises(TypeError, match="expected a tlt_ext.Sampling of 4 fields, got 2"):
        tlt_ext.sample(
            np.zeros((1, 3), np.float32),
            short(np.float32([1]), np.int64([0])),
            position=np.int32([0]),
            tokens=tokens,
            logprobs=logprobs,
            status=np.zeros(1, np.int32),
            seed=0,
        )


def freed():
    x = torch.ones(2, 4)
    x.untyped_storage().resize_(0)
    return x


def fake():
    with FakeTensorMode():
        return torch.ones(2, 4)


@pytest.mark.parametrize("make", [freed, fake])
def test_an_array_without_memory_gives_one_line(make):
    """As parameters have that FSDP shards, and all tensors under torch.export."""
    with pytest.raises(ValueError, match="an array has no memory"):
        tlt_ext.rms_norm(make(), torch.ones(4), torch.zeros(2, 4))


@pytest.mark.parametrize(
    ("free", "found"), [([9, 9], False), ([9, 8, 8, 9], False), ([9, 8, 8, 7, 7, 6], True)]
)
def test_memory_that_is_taken_at_every_try_is_found(monkeypatch, free, found):
    """The check of other tests; what is free before and after each try."""
    left = iter(free)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (next(left), 9))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    if found:
        with pytest.raises(AssertionError, match="1 bytes taken, and some at each of 3 tries"):
            kit.assert_takes_no_memory(lambda: None)
    else:
        kit.assert_takes_no_memory(lambda: None)


@pytest.mark.parametrize("module", ["torch.nn.parameter", "my_engine.weights", "__main__"])
def test_a_subclass_of_a_tensor_has_the_current_stream(monkeypatch, module):
    """The class's module says nothing: quantised weights come from other libraries."""
    fields = {
        "__module__": module,
        "is_cuda": property(lambda self: True),
        "device": property(lambda self: torch.device("cuda:0")),
    }
    weight = torch.zeros(1).as_subclass(type("Weight", (torch.Tensor,), fields))
    now = types.SimpleNamespace(cuda_stream=12345)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now)
    assert current_stream(weight, None) == 12345
    assert current_stream(weight, 7) == 7


class Tensor:
    """An array of another library: what counts is that it exports DLPack, not its name."""

    def __init__(self, array):
        self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__


def test_arrays_of_any_library_whatever_their_name():
    out = np.zeros((2, 4), np.float32)
    tlt_ext.rms_norm(Tensor(np.ones((2, 4), np.float32)), Tensor(np.ones(4, np.float32)), out)
    assert out == pytest.approx(1.0, rel=1e-5)
    assert current_stream(Tensor(out), None) == 0


def test_empty_arrays_may_have_any_strides():
    """NumPy 2.4 gives np.zeros((0, 5)) strides of 0."""
    empty = np.lib.stride_tricks.as_strided(np.zeros((0, 5), np.float32), strides=(0, 0))
    assert empty.strides == (0, 0)
    tlt_ext.rms_norm(empty, np.ones(5, np.float32), empty)


def rows_of(*strides):
    return torch.zeros(64).as_strided((4, 6), strides)


@pytest.mark.parametrize("strides", [(0, 1), (5, 1)])
def test_outputs_whose_rows_share_memory_are_refused(strides):
    match = r"out: expected elements that share no memory, got shape \[4, 6\] with strides"
    with pytest.raises(ValueError, match=match):
        tlt_ext.rms_norm(torch.ones(4, 6), torch.ones(6), rows_of(*strides))
    for given in ((6, 1), (8, 1)):
        tlt_ext.rms_norm(torch.ones(4, 6), torch.ones(6), rows_of(*given))


def test_rows_that_run_backwards_are_refused():
    x = np.ones((4, 6), np.float32)
    with pytest.raises(ValueError, match=r"x: expected strides of 0 or more, got st.* \[-6, 1\]"):
        tlt_ext.rms_norm(x[::-1], np.ones(6, np.float32), np.zeros_like(x))
    with pytest.raises(ValueError, match=r"x: expected strides of 0 or more, got st.* \[-6, 1\]"):
        tlt_ext.silu_mul(x[::-1], np.zeros((4, 3), np.float32))


def test_the_axes_of_a_cache_may_be_in_any_order():
    """Heads before slots, as some engines keep their pages."""
    k, v = torch.zeros(2, 3, 2, 16, 64).transpose(2, 3)
    q, out = torch.ones(2, 1, 4, 64)
    starts, zero, status = torch.tensor([[0, 1], [0, 0], [0, 0]], dtype=torch.int32)
    rows = tlt_ext.Rows(starts, zero[:1], status[:1], zero[:1], zero[None, :1])
    tlt_ext.tree_attention(q, k, v, out, rows)
    assert not out.any()
