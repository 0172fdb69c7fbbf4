"""`sample`: draws equal the float64 reference, follow the target, and ignore other rows."""

import math
from types import SimpleNamespace

import pytest
import torch

import tlt_ext
from tests import kit, reference
from tests.grouping import flat
from tlt_ext import Status

pytestmark = pytest.mark.usefixtures("each_device")
each_device = kit.each_device
MILLION = 1_000_000


def as_row(value, rows: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.as_tensor(value, dtype=dtype).expand(rows).contiguous()


def call(logits, *, temperature=1.0, top_k=0, top_p=1.0, request=0, position=0, seed=0, **options):
    """Runs the op with scalars spread over the rows."""
    rows = logits.shape[0]
    arrays = {
        "logits": logits,
        "temperature": as_row(temperature, rows, torch.float32),
        "top_k": as_row(top_k, rows, torch.int32),
        "top_p": as_row(top_p, rows, torch.float32),
        "request": as_row(request, rows, torch.int64),
        "position": as_row(position, rows, torch.int32),
        "tokens": torch.full((rows,), -7, dtype=torch.int32),
        "logprobs": torch.full((rows,), math.nan),
        "filtered_logprobs": torch.full((rows,), math.nan),
        "status": torch.zeros(rows, dtype=torch.int32),
    }
    arrays = {name: kit.to_device(array) for name, array in arrays.items()}
    flat.sample(**arrays, seed=seed, **options)
    written = ("tokens", "logprobs", "filtered_logprobs", "status")
    out = kit.to_cpu({name: arrays[name] for name in written})
    out["filtered"] = out.pop("filtered_logprobs")
    return SimpleNamespace(**out)


def many(logits: torch.Tensor, draws: int = MILLION, **options):
    """Draws of one row's distribution under different request ids."""
    return call(logits.expand(draws, -1), request=torch.arange(draws), **options)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_that_is_no_word_is_refused(seed):
    with pytest.raises(ValueError, match=rf"seed: expected 0 \.\. 2\*\*64 - 1, got {seed}"):
        call(torch.zeros(1, 7), seed=seed)


# ---- against the reference -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize(("vocab", "rows"), [(1, 3), (7, 60), (1000, 60), (128257, 5)])
def test_sample_equals_reference(dtype, vocab, rows):
    """Tokens exactly, log-probs to float32; memory past the vocabulary is NaN and is not read."""
    wide = torch.full((rows, vocab + 5), math.nan, dtype=dtype)
    wide[:, :vocab] = 3 * kit.randn(rows, vocab, seed=vocab, dtype=dtype)
    temperature = torch.tensor([0.0, 0.6, 1.0])[torch.arange(rows) % 3]
    top_k = torch.tensor([0, 50, 1 << 30, 1])[torch.arange(rows) % 4]
    top_p = torch.tensor([1.0, 0.7, 0.95, 0.0, 1.0])[torch.arange(rows) % 5]
    request = torch.arange(rows) * (1 << 40) + 3
    seed = 2**63 + 11
    out = call(
        wide,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        request=request,
        position=torch.arange(rows),
        seed=seed,
        vocab_size=vocab,
    )
    assert not out.status.any()
    for row in range(rows):
        logits = wide[row, :vocab]
        setting = float(temperature[row]), int(top_k[row]), float(top_p[row])
        token = reference.sample(logits, *setting, int(request[row]), row, seed=seed)
        assert out.tokens[row] == token
        logprob = reference.logprob(logits, setting[0], token)
        filtered = reference.filtered_logprob(logits, *setting, token)
        assert float(out.logprobs[row]) == pytest.approx(logprob, rel=1e-6, abs=1e-6)
        assert float(out.filtered[row]) == pytest.approx(filtered, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("spread", [0.0, 1e-3, 8.0])
def test_logprobs_are_float32_accurate_at_a_large_vocabulary(spread):
    logits = spread * kit.randn(1, 151936, seed=1)
    out = call(logits)
    expected = reference.logprob(logits[0], 1.0, int(out.tokens))
    assert float(out.logprobs) == pytest.approx(expected, rel=3e-7)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
def test_logprobs_divide_the_logits_not_the_logprobs(temperature):
    """Fault 44: `log_softmax(logits / T)`, not `log_softmax(logits) / T`."""
    logits = kit.randn(1, 50, seed=2)
    out = call(logits, temperature=temperature)
    right = torch.log_softmax(logits.double() / temperature, -1)[0, out.tokens]
    assert float(out.logprobs) == pytest.approx(float(right), abs=1e-6)


# ---- distributions ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_a_million_draws_follow_the_target(dtype, temperature):
    logits = torch.tensor([0.4, 0.3, 0.2, 0.0999, 1e-4]).log().to(dtype)
    out = many(logits, temperature=temperature)
    kit.assert_distribution(out.tokens, reference.target_probs(logits, temperature, 0, 1.0))


def test_a_million_positions_follow_the_target_and_are_independent():
    probs = torch.tensor([0.5, 0.3, 0.2])
    logits = probs.log().expand(MILLION, -1)
    tokens = call(logits, position=torch.arange(MILLION), request=2**61, seed=5).tokens
    kit.assert_distribution(tokens, probs)
    pairs = 3 * tokens[:-1:2] + tokens[1::2]  # neighbours in position
    kit.assert_distribution(pairs, torch.outer(probs, probs).flatten())
    for other in (
        call(logits, position=torch.arange(MILLION), request=2**61, seed=6),
        call(logits, position=torch.arange(MILLION), request=2**61 + 1, seed=5),
        call(logits, position=torch.arange(MILLION), request=2**61 + 2**32, seed=5),
    ):
        kit.assert_distribution(3 * tokens + other.tokens, torch.outer(probs, probs).flatten())


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (0, 0.55), (4, 0.8), (1 << 30, 0.999)])
def test_filtered_draws_follow_the_filtered_target(top_k, top_p):
    """Fault 6: an id that top-k or top-p cut off is never drawn."""
    logits = torch.tensor([0.05, 0.35, 0.25, 0.05, 0.2, 0.1]).log()
    probs = reference.target_probs(logits, 1.0, top_k, top_p)
    out = many(logits, top_k=top_k, top_p=top_p)
    kit.assert_distribution(out.tokens, probs)
    filtered = probs[out.tokens.long()].log()
    assert (out.filtered - filtered).abs().max() < 2e-6


@pytest.mark.parametrize(("vocab", "draws"), [(8193, 40_000), (10000, 40_000), (151936, 2_000)])
def test_large_vocabularies_whose_last_tile_has_no_probability(vocab, draws):
    """Fault 2: an id past the vocabulary."""
    logits = 2 * kit.randn(vocab, seed=vocab)
    logits[-600:] = -math.inf
    tokens = many(logits, draws).tokens
    assert 0 <= int(tokens.min()) and int(tokens.max()) < vocab - 600
    probs = torch.softmax(logits.double(), -1)
    group = torch.arange(vocab) % 37
    kit.assert_distribution(
        group[tokens.long()], torch.zeros(37).double().index_add_(0, group, probs)
    )


def test_chi_square_catches_planted_bugs():
    """The helper fails on repeated noise, a temperature 1 % off, a distribution that was cut."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    probs = reference.target_probs(logits, 1.0, 0, 1.0)
    with pytest.raises(AssertionError):  # one position for all
        kit.assert_distribution(call(logits.expand(MILLION, -1)).tokens, probs)
    with pytest.raises(AssertionError):  # 1 % off in temperature
        kit.assert_distribution(many(logits, 4 * MILLION, temperature=1.01).tokens, probs)
    with pytest.raises(AssertionError):  # an id that the distribution does not have
        kit.assert_distribution(many(logits).tokens, reference.target_probs(logits, 1.0, 3, 1.0))
    with pytest.raises(AssertionError, match="past the distribution"):
        kit.assert_distribution(torch.tensor([0, 1, 4]), probs)


# ---- rows are independent --------------------------------------------------------------------


def test_tokens_do_not_depend_on_batch_order_size_or_threads():
    """Fault 8: a fixed seed gives other tokens at another batch size or order."""
    rows, vocab = 64, 3001
    logits = 2 * kit.randn(rows, vocab, seed=4)
    keys = {
        "temperature": torch.rand(rows, generator=kit.generator(1)).round(decimals=1),
        "top_k": torch.arange(rows) % 5 * 20,
        "top_p": 1.1 - torch.arange(rows) % 4 / 10,
        "request": torch.arange(rows) * 12345678901,
        "position": torch.arange(rows) * 7,
    }
    whole = call(logits, **keys)
    order = torch.randperm(rows, generator=kit.generator(2))
    shuffled = call(logits[order], **{name: key[order] for name, key in keys.items()})
    threads = tlt_ext.num_threads()
    tlt_ext.set_num_threads(3)
    try:
        threaded = call(logits, **keys)
    finally:
        tlt_ext.set_num_threads(threads)
    for name in ("tokens", "logprobs", "filtered"):
        assert kit.same_bits(getattr(shuffled, name), getattr(whole, name)[order])
        assert kit.same_bits(getattr(threaded, name), getattr(whole, name))
    for row in range(rows):
        alone = call(logits[row : row + 1], **{name: key[row] for name, key in keys.items()})
        assert kit.same_bits(alone.tokens, whole.tokens[row : row + 1])
        assert kit.same_bits(alone.logprobs, whole.logprobs[row : row + 1])


def test_greedy_and_sampled_rows_share_a_batch():
    """Fault 5: T = 0 beside T > 0, with -inf logits: no NaN, greedy rows are plain argmax."""
    logits = kit.randn(200, 50, seed=3)
    logits[:, 10:20] = -math.inf
    temperature = torch.tensor([0.0, 1.0]).repeat(100)
    out = call(logits, temperature=temperature, request=torch.arange(200))
    assert torch.equal(out.tokens[::2].long(), logits[::2].argmax(-1))
    assert not torch.equal(out.tokens[1::2].long(), logits[1::2].argmax(-1))
    assert not ((out.tokens >= 10) & (out.tokens < 20)).any()
    assert out.logprobs.isfinite().all() and out.filtered.isfinite().all()
    assert not out.status.any()


def test_only_some_rows_set_top_k():
    """Fault 15: each row by its own setting, and nothing is written outside the outputs."""
    rows, vocab = 8, 160_000
    logits = kit.randn(rows, vocab, seed=6)
    top_k = torch.tensor([0, 5, 0, 0, 1, 0, vocab, 0])
    guarded = [torch.full((rows + 2,), 77, dtype=d) for d in (torch.int32, torch.float32)]
    flat.sample(
        logits,
        temperature=torch.ones(rows),
        top_k=top_k.int(),
        top_p=torch.ones(rows),
        request=torch.arange(rows),
        position=torch.zeros(rows, dtype=torch.int32),
        tokens=guarded[0][1:-1],
        logprobs=guarded[1][1:-1],
        status=torch.zeros(rows, dtype=torch.int32),
        seed=0,
    )
    plain = call(logits, request=torch.arange(rows))
    off = (top_k == 0) | (top_k == vocab)
    assert torch.equal(guarded[0][1:-1][off], plain.tokens[off])
    assert int(guarded[0][1 + 4]) == int(logits[4].argmax())
    assert int(guarded[0][1 + 1]) in logits[1].topk(5).indices.tolist()
    for array in guarded:
        assert array[0] == 77 and array[-1] == 77


def test_inputs_are_const():
    """Fault 20: the logits are the same after the call."""
    logits = kit.randn(4, 100, seed=0)
    logits[2, 5] = math.nan
    before = logits.clone()
    call(logits, temperature=0.5, top_k=7, top_p=0.5)
    assert kit.same_bits(logits, before)


# ---- ties, filters, odd rows -----------------------------------------------------------------


@pytest.mark.parametrize("rows", range(4, 20))
def test_top_k_at_ties_equals_a_sort(rows):
    """Fault 14: k = 128 among ties keeps the lower ids."""
    logits = (2 * kit.randn(rows, 1000, seed=rows)).round()
    for row in range(rows):
        kept = reference.kept_ids(logits[row], 1.0, 128, 1.0)
        draws = many(logits[row], 300, top_k=128)
        assert set(draws.tokens.tolist()) <= set(kept)
        for token, filtered in zip(draws.tokens[:5], draws.filtered[:5], strict=True):
            right = reference.filtered_logprob(logits[row], 1.0, 128, 1.0, int(token))
            assert float(filtered) == pytest.approx(right, abs=1e-6)


def test_ties_go_to_the_lower_id():
    flat = torch.zeros(1, 300)
    assert int(call(flat, temperature=0.0).tokens) == 0
    assert int(call(flat, top_k=1).tokens) == 0
    assert int(call(flat, top_p=0.0).tokens) == 0
    signed = torch.tensor([[-0.0, 0.0]])  # equal numbers
    assert int(call(signed, top_k=1).tokens) == 0
    top = many(flat[0], 2000, top_k=128)
    assert set(top.tokens.tolist()) == set(range(128))
    assert (top.filtered + math.log(128)).abs().max() < 1e-6


def test_top_p_keeps_the_token_that_crosses():
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    kept = {p: set(many(logits, 5000, top_p=p).tokens.tolist()) for p in (0.49, 0.5, 0.51, 0.8)}
    assert kept[0.49] == {0}
    assert kept[0.51] == {0, 1}
    assert kept[0.8] == {0, 1, 2}


def test_top_p_follows_top_k():
    """top-p counts the mass of what top-k left: .4 of .7 is above .5, of 1 it is not."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert set(many(logits, 5000, top_k=2, top_p=0.5).tokens.tolist()) == {0}
    assert set(many(logits, 5000, top_p=0.5).tokens.tolist()) == {0, 1}


def test_top_p_over_a_flat_large_vocabulary():
    out = many(torch.zeros(20_000), 500, top_p=0.25)
    assert int(out.tokens.max()) < 5001
    assert (out.filtered - out.logprobs - math.log(4)).abs().max() < 1e-3


@pytest.mark.parametrize("top_k", [-1, 0, 7, 8, 1 << 30, 2**31 - 1])
def test_filters_that_are_off_change_nothing(top_k):
    logits = kit.randn(7, seed=0)
    off, plain = many(logits, 1000, top_k=top_k, top_p=math.inf), many(logits, 1000)
    assert torch.equal(off.tokens, plain.tokens)
    assert kit.same_bits(off.filtered, plain.logprobs)


def test_one_hot_row_with_a_huge_top_k():
    """Fault 12."""
    logits = torch.full((3, 1000), -math.inf)
    logits[torch.arange(3), torch.tensor([0, 500, 999])] = -3.0
    out = call(logits, top_k=1 << 30)
    assert out.tokens.tolist() == [0, 500, 999]
    assert out.logprobs.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("temperature", "top_k"), [(0.0, 0), (1.0, 0), (1.0, 3)])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_logits_lose_and_flag_their_request(bad, temperature, top_k):
    """Fault 3: NaN (or +inf) somewhere, then everywhere: a valid id, only its request flagged."""
    logits = kit.randn(4, 9, seed=1)
    logits[1, ::2] = bad
    logits[3] = bad
    out = call(logits, temperature=temperature, top_k=top_k, request=torch.arange(4))
    assert out.status.tolist() == [0, Status.NAN_LOGITS, 0, Status.NAN_LOGITS]
    assert int(out.tokens[1]) % 2 == 1
    expected = reference.logprob(logits[1], temperature, int(out.tokens[1]))
    assert float(out.logprobs[1]) == pytest.approx(expected, abs=1e-6)
    assert int(out.tokens[3]) == 0
    assert out.logprobs[3] == -math.inf and out.filtered[3] == -math.inf


def test_status_bits_are_ored_in():
    status = torch.tensor([int(Status.BAD_PAGE)], dtype=torch.int32)
    changes = {"logits": torch.full((1, 3), math.nan), "status": status}
    flat.sample(**valid(rows=1) | changes, seed=0)
    assert Status(int(status)) == Status.BAD_PAGE | Status.NAN_LOGITS


def test_all_minus_infinity_is_flagged():
    out = call(torch.full((1, 5), -math.inf))
    assert (int(out.tokens), float(out.logprobs), int(out.status)) == (0, -math.inf, 1)


def test_bfloat16_with_minus_infinity_rows_terminates():
    """Fault 13: bf16 [206, 100352] with -inf rows, top-k 1."""
    logits = kit.randn(206, 100_352, seed=0, dtype=torch.bfloat16)
    logits[5::50] = -math.inf
    out = call(logits, top_k=1)
    live = out.status == 0
    assert (~live).nonzero().flatten().tolist() == [5, 55, 105, 155, 205]
    assert torch.equal(out.tokens[live].long(), logits[live].float().argmax(-1))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padding_of_the_vocabulary_never_wins(temperature):
    """Fault 16: 151936 ids padded to 153600 with zeros, all real logits negative."""
    logits = torch.zeros(40, 153_600)
    logits[:, :151_936] = kit.randn(151_936, seed=1) - 50.0
    out = call(
        logits, temperature=temperature, request=torch.arange(40), vocab_size=151_936, top_p=0.9
    )
    assert int(out.tokens.max()) < 151_936
    assert (out.logprobs > -20).all()


def test_extreme_temperatures_and_logits():
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    for temperature in (0.0, 1e-38, 1e-7, -1.0, math.nan):  # all greedy
        out = call(logits, temperature=temperature)
        assert int(out.tokens) == 1
        assert float(out.logprobs) == pytest.approx(-0.4076059, abs=1e-6)
    cold = call(logits, temperature=1e-6)
    assert (int(cold.tokens), float(cold.logprobs)) == (1, 0.0)
    hot = many(logits[0], temperature=1e30)
    kit.assert_distribution(hot.tokens, torch.full((3,), 1 / 3))
    over = call(torch.tensor([[3e38, 1.0, 2.0]]), temperature=0.5)  # overflows when divided
    assert int(over.tokens) in (1, 2) and int(over.status) == Status.NAN_LOGITS


@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_an_infinite_temperature_never_draws_a_masked_id(top_p):
    logits = torch.where(torch.arange(400) % 3 == 0, -torch.inf, kit.randn(400, seed=1))
    got = call(
        logits.expand(500, -1), temperature=torch.inf, top_p=top_p, request=torch.arange(500)
    )
    assert not got.status.any()
    assert (got.tokens % 3 != 0).all() and len(got.tokens.unique()) > 50
    assert torch.allclose(got.logprobs, -torch.tensor(266.0).log(), atol=1e-5)


def test_a_nan_temperature_is_greedy_and_flagged():
    logits = kit.randn(2, 100, seed=1)
    got = call(logits, temperature=torch.tensor([torch.nan, 0.0]))
    assert torch.equal(got.tokens.long(), logits.argmax(1))
    assert got.status.tolist() == [Status.NAN_LOGITS, 0]


@pytest.mark.parametrize("value", [0.37, 3.3, 17.9, 250.3, -23.7])
@pytest.mark.parametrize("temperature", [1.00001e-6, 2.7e-6, 1e-4])
def test_top_p_at_ties_of_a_tiny_temperature(value, temperature):
    """Of four equal ids top-p keeps the first ones, however coarse logit / T is.

    Where it is coarser than the noise, the lowest id wins alone.
    """
    logits = torch.full((300,), -1e4)
    logits[[7, 100, 101, 250]] = value
    for top_p, kept in ((0.1, {7}), (0.3, {7, 100}), (0.55, {7, 100, 101})):
        got = call(
            logits.expand(64, -1), temperature=temperature, top_p=top_p, request=torch.arange(64)
        )
        drawn = set(got.tokens.tolist())
        assert drawn == kept or (drawn < kept and abs(value) / temperature > 1e6)


def test_empty_batch():
    assert call(torch.empty(0, 10)).tokens.shape == (0,)


# ---- checks ----------------------------------------------------------------------------------


def valid(rows=3, vocab=10):
    return {
        "logits": torch.zeros(rows, vocab),
        "temperature": torch.ones(rows),
        "top_k": torch.zeros(rows, dtype=torch.int32),
        "top_p": torch.ones(rows),
        "request": torch.zeros(rows, dtype=torch.int64),
        "position": torch.zeros(rows, dtype=torch.int32),
        "tokens": torch.zeros(rows, dtype=torch.int32),
        "logprobs": torch.zeros(rows),
        "status": torch.zeros(rows, dtype=torch.int32),
        "filtered_logprobs": torch.zeros(rows),
    }


@pytest.mark.parametrize(
    ("name", "bad", "error", "message"),
    [
        ("logits", torch.zeros(3, 10, dtype=torch.int32), TypeError, "dtype float32 or float16"),
        ("temperature", torch.ones(3).double(), TypeError, "dtype float32, got float64"),
        ("top_k", torch.zeros(3), TypeError, "dtype int32, got float32"),
        ("top_p", torch.ones(3).half(), TypeError, "dtype float32, got float16"),
        ("request", torch.zeros(3).int(), TypeError, "dtype int64, got int32"),
        ("position", torch.zeros(3).long(), TypeError, "dtype int32, got int64"),
        ("tokens", torch.zeros(3).long(), TypeError, "dtype int32, got int64"),
        ("logprobs", torch.zeros(3).bfloat16(), TypeError, "dtype float32, got bfloat16"),
        ("status", torch.zeros(3), TypeError, "dtype int32, got float32"),
        ("filtered_logprobs", torch.zeros(3).int(), TypeError, "dtype float32, got int32"),
        ("logits", torch.zeros(10, 3).t(), ValueError, "contiguous last axis, got stride 3"),
        ("tokens", torch.zeros(6).int()[::2], ValueError, r"contiguous array, got strides \[2\]"),
        ("logits", torch.zeros(30), ValueError, r"shape \[\*, \*\], got \[30\]"),
        ("temperature", torch.ones(2), ValueError, r"shape \[3\], got \[2\]"),
        ("request", torch.zeros(3, 1).long(), ValueError, r"shape \[3\], got \[3, 1\]"),
    ],
)
def test_sample_checks_its_arrays(name, bad, error, message):
    with pytest.raises(error, match=f"sample: {name}: expected (a )?{message}"):
        flat.sample(**{**valid(), name: bad}, seed=0)


@pytest.mark.parametrize("vocab_size", [0, -1, 11])
def test_sample_checks_vocab_size(vocab_size):
    with pytest.raises(ValueError, match=r"sample: vocab_size: expected 1 \.\. 10"):
        flat.sample(**valid(), seed=0, vocab_size=vocab_size)


def test_sample_refuses_a_vocabulary_past_its_integer_sums():
    arrays = valid(rows=1)
    arrays["logits"] = torch.zeros(1, 2**22 + 1, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="vocab_size: expected at most 4194304, got 4194305"):
        flat.sample(**arrays, seed=0)
