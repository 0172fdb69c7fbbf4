"""The training pass against the models' own, document by document, and its pieces by themselves."""

import copy
import doctest

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from driver.policy import fused
from driver.policy import packed_forward as module
from driver.policy.logprobs import token_logprobs
from driver.policy.micro_batch import _moved
from driver.policy.packed_forward import Documents, _norm, _rotate, attend
from tests import kit
from tests.driver.hugging_face import FAMILIES, TRAINED, packed_hidden

LENGTHS = [5, 1, 17, 9]


def make_model(family, dtype=torch.float32, **options):
    config, model = FAMILIES[family]
    torch.manual_seed(0)
    made = model(config(vocab_size=61, **TRAINED, **options))
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "norm" in name or "bias" in name:
                weight += 0.3 * torch.randn_like(weight)
    return made.to(dtype).eval()


def own_pass(model, ids):
    """The model's pass over each document by itself."""
    hidden = [
        model.base_model(input_ids=part, use_cache=False).last_hidden_state[0]
        for part in ids.split(LENGTHS, 1)
    ]
    return torch.cat(hidden)


@pytest.fixture
def ids():
    return torch.randint(61, (1, sum(LENGTHS)), generator=kit.generator(0))


@pytest.mark.parametrize(
    "options", [{}, {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, {"pad_token_id": 29}]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_the_models_own_pass_and_gradient(family, options, ids):
    if family == "phi3":  # it takes no such scaling
        options = {key: value for key, value in options.items() if key != "rope_scaling"}
    own, packed = make_model(family, **options), make_model(family, **options)
    weight = kit.randn(sum(LENGTHS), 32, seed=1)
    wanted = own_pass(own, ids)
    (wanted * weight).sum().backward()
    for checkpointing in (False, True):
        packed.zero_grad()
        got = packed_hidden(packed, ids, Documents.of(LENGTHS), checkpointing)
        assert_close(got, wanted, rtol=1e-5, atol=1e-5)
        (got * weight).sum().backward()
        for (name, a), (_, b) in zip(
            packed.base_model.named_parameters(), own.base_model.named_parameters(), strict=True
        ):
            assert (a.grad - b.grad).norm() <= 1e-5 * b.grad.norm() + 1e-6, name


@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_is_about_as_near_to_float64_as_the_models_own(family, ids):
    own = make_model(family, torch.bfloat16)
    wanted = own_pass(copy.deepcopy(own).double(), ids)
    with torch.no_grad():
        errors = [
            (got.double() - wanted).norm()
            for got in (packed_hidden(own, ids, Documents.of(LENGTHS)), own_pass(own, ids))
        ]
    assert errors[0] <= 1.25 * errors[1]


@pytest.mark.parametrize("device", kit.DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_norm_is_rounded_before_its_weight(dtype, device):
    """As in the engine: any other rounding changes every log-prob in half precision."""
    norm = make_model("llama", dtype).model.norm.to(device)
    x = kit.randn(300, 32, seed=2).to(device, dtype)
    same = _norm(x, norm.weight, norm.variance_epsilon) == norm(x)
    assert same.all() if device == "cpu" else same.double().mean() > 0.999
    at_once = F.rms_norm(x, (32,), norm.weight, norm.variance_epsilon)
    assert (at_once == norm(x)).double().mean() < 0.9


@pytest.mark.parametrize("device", kit.DEVICES)
@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("strided", [False, True])
def test_gradient_of_a_norm_is_that_of_float64(strided, dtype, device):
    """Of queries and keys too, which lie in rows with the values, as their gradients may."""
    norm = make_model("llama", dtype).model.norm.to(device)
    shape, heads = ((14, 7, 32), slice(1, 6)) if strided else ((14, 5, 32), slice(None))
    x, grad = (kit.randn(*shape, seed=seed).to(device, dtype)[:, heads] for seed in (3, 4))
    x.requires_grad_()
    got = torch.autograd.grad(_norm(x, norm.weight, norm.variance_epsilon), (x, norm.weight), grad)
    exact, weight = (t.detach().double().requires_grad_() for t in (x, norm.weight))
    out = F.rms_norm(exact, (32,), weight, norm.variance_epsilon)
    wanted = torch.autograd.grad(out, (exact, weight), grad.double())
    for one, other in zip(got, wanted, strict=True):
        assert (one - other).norm() <= kit.TOLERANCE[dtype] * other.norm()


def test_rotation_turns_and_its_gradient_turns_back():
    angle = kit.randn(6, 1, 4, seed=5).double()
    x = kit.randn(6, 3, 8, seed=6).double().requires_grad_()
    out = _rotate(x, angle.cos(), angle.sin())
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angle), angle)
    assert_close(out, torch.cat((turned.real, turned.imag), -1))
    assert torch.autograd.gradcheck(lambda x: _rotate(x, angle.cos(), angle.sin()), x)


@kit.gpu
@kit.needs_gpu
@pytest.mark.parametrize("family", ["llama", "qwen3", "smollm3"])
def test_compiled_layers_agree_with_single_ops(family, ids, monkeypatch):
    config, model = FAMILIES[family]
    torch.manual_seed(0)
    options = {**TRAINED, "hidden_size": 512, "head_dim": 64, "num_attention_heads": 8}
    made = model(config(vocab_size=1000, **options)).to("cuda", torch.bfloat16).eval()
    documents, ids = _moved(Documents.of(LENGTHS), torch.device("cuda")), ids.cuda()
    tokens = torch.arange(len(ids[0]), device="cuda") % 1000

    def run():
        made.zero_grad()
        hidden = packed_hidden(made, ids, documents)
        head = made.get_output_embeddings().weight
        logprobs, entropy = token_logprobs(hidden, head, tokens, 1.0, True)
        (logprobs.sum() + entropy.sum()).backward()
        return [logprobs, entropy, *(p.grad for p in made.parameters() if p.grad is not None)]

    monkeypatch.setattr(fused, "LEAST_WIDTH", 1 << 20)
    single = run()
    monkeypatch.setattr(fused, "LEAST_WIDTH", 512)
    compiled = run()
    assert fused._compiled.cache_info().currsize == 4
    for one, other in zip(compiled, single, strict=True):
        assert (one - other).norm() <= kit.TOLERANCE[torch.bfloat16] * other.norm()


@kit.gpu
@kit.needs_gpu
def test_short_rows_use_the_kernels_of_long_ones():
    """Two compilations of the update's layers would cost a run several seconds more."""
    weights = [(512, 1024), (512,), (2048, 512), (512, 1024)]
    output, norm, gate_up, down = (
        kit.randn(*shape, seed=i).to("cuda", torch.bfloat16).requires_grad_()
        for i, shape in enumerate(weights)
    )
    compiled = []
    for rows in (12_000, 300):
        hidden = kit.randn(rows, 512, seed=4).to("cuda", torch.bfloat16).requires_grad_()
        attended = kit.randn(rows, 1024, seed=5).to("cuda", torch.bfloat16).requires_grad_()
        layer = module._after_attention
        out = layer(hidden, attended, output, None, norm, gate_up, down, 1e-5)
        out.sum().backward()
        compiled.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert 0 < compiled[0] == compiled[1]


def test_docstring_examples():
    assert doctest.testmod(module).failed == 0


@kit.gpu
@kit.needs_gpu
@pytest.mark.parametrize(("kv_heads", "size"), [(9, 64), (3, 64), (1, 128)])
def test_attention_of_a_card(kv_heads, size):
    """Values and gradients, equal in every pass and beside other documents, even with NaN."""
    lengths = [1100, 600, 300, 1, 64, 129]
    made = [kit.randn(sum(lengths), n, size, seed=n) for n in (9, kv_heads, kv_heads, 9)]

    def results(device, dtype, lengths, tensors):
        q, k, v, grad = (x.bfloat16().to(device, dtype) for x in tensors)
        inputs = [x.requires_grad_() for x in (q, k, v)]
        documents = _moved(Documents.of(lengths), torch.device(device))
        out = attend(*inputs, documents, size**-0.5)
        return [x.cpu() for x in (out, *torch.autograd.grad(out, inputs, grad))]

    got = results("cuda", torch.bfloat16, lengths, made)
    for one, exact in zip(got, results("cpu", torch.float64, lengths, made), strict=True):
        assert (one - exact).norm() <= kit.TOLERANCE[torch.bfloat16] * exact.norm()
    turned = [torch.cat(x.split(lengths)[::-1]) for x in made]
    for x in turned:
        x[:129] = float("nan")
    again = results("cuda", torch.bfloat16, lengths[::-1], turned)
    for one, other in zip(got, again, strict=True):
        parts = zip(one.split(lengths)[:-1], other.split(lengths[::-1])[:0:-1], strict=True)
        assert all(torch.equal(a, b) for a, b in parts)
