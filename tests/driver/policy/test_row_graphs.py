"""Rows of the update as CUDA graphs: mask and padding on any device, the graphs on a card."""

import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from driver.common.deterministic import deterministic
from driver.config.sections import GrpoConfig
from driver.policy import masked_attention as module
from driver.policy import row_graphs
from driver.policy.masked_attention import BLOCK, block_mask, masked_attention
from driver.policy.micro_batch import build_micro_batch
from driver.policy.packed_forward import Documents, attend, layers_of, packed_logprobs
from driver.policy.row_graphs import RowGraphs, can_capture
from driver.policy.trainer import PolicyTrainer
from tests import kit
from tests.driver.policy.test_trainer import REWARDS, Cfg, make_model, make_responses

MOST = 4 * BLOCK
TOLERANCE = {torch.float64: 1e-12, torch.bfloat16: 0.03}  # of norms


class OpByOp:
    """The padded rows of `RowGraphs` without graphs."""

    def __init__(self, graphs):
        self.graphs, self.fits = graphs, graphs.fits

    def __call__(self, ids, documents):
        self.graphs.hold_gradients()
        row = self.graphs.row(ids, documents)
        return self.graphs._layers(row.ids, row.position)


def dense_flex(q, k, v, block_mask, scale, enable_gqa):
    """FlexAttention without its blocks, with a gradient on the CPU."""
    place = torch.arange(q.shape[2])
    seen = block_mask.mask_mod(None, None, place[:, None], place)
    return F.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=enable_gqa)


@pytest.fixture
def without_card(monkeypatch):
    """Rows are padded on the CPU, where nothing is captured."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(row_graphs, "current_stream", lambda: None)
    monkeypatch.setattr(module, "_flex", lambda: dense_flex)


# -- the mask


def named_blocks(count, indices):
    """[B, B], which blocks each block of the other side names."""
    named = torch.zeros(indices.shape[-2:], dtype=torch.bool)
    for row, number in enumerate(count[0, 0].tolist()):
        named[row, indices[0, 0, row, :number].long()] = True
    return named


@pytest.mark.parametrize("lengths", [[512], [1] * 512, [300, 128, 84], [BLOCK, BLOCK, 1, 255]])
def test_blocks_of_a_mask_are_those_with_something_to_see(lengths):
    position = Documents.of(lengths).position[0]
    mask = block_mask(position)
    place = torch.arange(len(position))
    document = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    wanted = (document[:, None] == document) & (place[:, None] >= place)
    assert torch.equal(mask.mask_mod(None, None, place[:, None], place), wanted)
    blocks = wanted.unfold(0, BLOCK, BLOCK).unfold(1, BLOCK, BLOCK).flatten(2)
    full = blocks.all(-1)
    partial = blocks.any(-1) & ~full
    assert torch.equal(named_blocks(mask.full_kv_num_blocks, mask.full_kv_indices), full)
    assert torch.equal(named_blocks(mask.kv_num_blocks, mask.kv_indices), partial)
    assert torch.equal(named_blocks(mask.full_q_num_blocks, mask.full_q_indices), full.T)
    assert torch.equal(named_blocks(mask.q_num_blocks, mask.q_indices), partial.T)
    # The kernels take no stride of them.
    for indices in (mask.kv_indices, mask.full_kv_indices, mask.q_indices, mask.full_q_indices):
        assert indices.is_contiguous() and indices.dtype == torch.int32


@kit.gpu
@kit.needs_gpu
@pytest.mark.parametrize("kv_heads", [9, 3, 1])
def test_masked_attention_is_that_of_each_document(kv_heads):
    """Values and gradients, with equal bits again."""
    lengths = [1100, 600, 300, 1, 64, 129, 110]
    documents = Documents.of(lengths)
    made = [kit.randn(sum(lengths), n, 64, seed=n) for n in (9, kv_heads, kv_heads, 9)]

    def results(device, dtype):
        q, k, v, grad = (x.bfloat16().to(device, dtype) for x in made)
        inputs = [x.requires_grad_() for x in (q, k, v)]
        if device == "cuda":
            mask = block_mask(documents.position[0].cuda())
            out = masked_attention(*inputs, mask, 0.125)
        else:
            out = attend(*inputs, documents, 0.125)
        return [x.cpu() for x in (out, *torch.autograd.grad(out, inputs, grad))]

    with deterministic(torch.device("cuda")):
        got, again = results("cuda", torch.bfloat16), results("cuda", torch.bfloat16)
    for one, same, exact in zip(got, again, results("cpu", torch.float64), strict=True):
        assert torch.equal(one, same)
        assert (one - exact).norm() <= kit.TOLERANCE[torch.bfloat16] * exact.norm()


# -- padded rows


def gradients_of(trainer, batches, graphs=None):
    """Log-probs and the sums of gradients; `graphs` = None: rows without padding."""
    trainer.weights._forward = functools.partial(packed_logprobs, trainer.model, graphs=graphs)
    trainer.optimizer.zero_grad()
    seen, shares = trainer.backward(batches, torch.linspace(-1, 1, 8).to(trainer.weights.device))
    sums = [share.pg_loss for share in shares]
    return [*(b.old_logprobs for b in seen), *sums, *(p.grad.clone() for p in trainer.params)]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_padding_of_a_row_changes_nothing(dtype, tied, without_card):
    model = make_model(torch.float32, tied=tied).to(dtype)
    responses = long_responses()
    trainer = PolicyTrainer(model, Cfg())
    rows = [build_micro_batch(responses, part, "cpu") for part in ([3, 0, 5], [1], [2, 4, 6])]
    graphs = RowGraphs(layers_of(model, trainer.weights.dtype), trainer.params, MOST)
    wanted = gradients_of(trainer, rows)
    for got, exact in zip(gradients_of(trainer, rows, OpByOp(graphs)), wanted, strict=True):
        assert (got - exact).norm() <= TOLERANCE[dtype] * exact.norm()
    assert sorted(size for size, _ in graphs._rows) == [BLOCK, 2 * BLOCK]


def long_responses():
    """Of 40 to 110 tokens."""
    return [
        replace(r, token_ids=r.token_ids * n, logprobs=r.logprobs * n)
        for r in make_responses(make_model())
        for n in [max(1, 70 // len(r.token_ids))]
    ]


class Marking(OpByOp):
    """Marks the node that adds up the embedding's gradient; torch keeps it while a graph does."""

    marked = 0

    def node(self):
        weight = self.graphs._params[0]
        return weight.expand_as(weight).grad_fn.next_functions[0][0]

    def __call__(self, ids, documents):
        self.marked += "of a row" in self.node().metadata
        hidden = super().__call__(ids, documents)
        self.node().metadata["of a row"] = True
        return hidden


def test_no_graph_of_a_row_is_left_when_the_next_one_is_captured(without_card):
    """The captured stream would wait for the stream on which that graph was made."""
    model = make_model(torch.bfloat16)
    trainer = PolicyTrainer(model, Cfg())
    graphs = Marking(RowGraphs(layers_of(model, torch.bfloat16), trainer.params, MOST))
    rows = [build_micro_batch(long_responses(), [i], "cpu") for i in range(3)]
    gradients_of(trainer, rows, graphs)
    assert graphs.marked == 0
    hidden = graphs(rows[0].input_ids, rows[0].documents)
    graphs(rows[1].input_ids, rows[1].documents)
    assert hidden.requires_grad and graphs.marked == 1  # one is left


def test_gradients_keep_their_place_and_their_sums(without_card):
    model = make_model()
    params = list(model.parameters())
    graphs = RowGraphs(layers_of(model, torch.float32), params, MOST)
    graphs.hold_gradients()
    places = [p.grad.data_ptr() for p in params]
    assert not any(p.grad.any() for p in params)
    params[0].grad += 2.0  # of a replay
    params[1].grad = torch.ones_like(params[1])  # of a row that did not fit
    graphs.hold_gradients()
    assert [p.grad.data_ptr() for p in params] == places
    assert (params[0].grad == 2.0).all() and (params[1].grad == 1.0).all()
    model.zero_grad()
    graphs.hold_gradients()
    assert [p.grad.data_ptr() for p in params] == places
    assert not any(p.grad.any() for p in params)


def test_longer_rows_do_not_fit(without_card):
    graphs = RowGraphs(None, [], MOST - 5)
    assert graphs.fits(Documents.of([MOST - 1, 1]))
    assert not graphs.fits(Documents.of([MOST, 1]))


@pytest.mark.parametrize(
    ("options", "model", "wanted"),
    [
        ({}, ("cuda", torch.bfloat16, 576, 1), True),
        ({}, ("cuda:1", torch.float16, 576, 1), True),
        ({"graphs": "off"}, ("cuda", torch.bfloat16, 576, 1), False),
        ({"offload": "moments"}, ("cuda", torch.bfloat16, 576, 1), False),
        ({"checkpointing": True}, ("cuda", torch.bfloat16, 576, 1), False),
        ({}, ("cpu", torch.bfloat16, 576, 1), False),
        ({}, ("cuda", torch.float32, 576, 1), False),
        ({}, ("cuda", torch.bfloat16, 64, 1), False),
        ({}, ("cuda", torch.bfloat16, 576, 2), False),
    ],
)
def test_where_rows_are_captured(options, model, wanted):
    assert can_capture(GrpoConfig(**{"graphs": "rows", **options}), *model) == wanted


# -- graphs


def wide_trainer(**options):
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=29,
        hidden_size=512,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(shape).to("cuda", torch.bfloat16)
    return PolicyTrainer(model, Cfg(graphs="rows", micro_batch_tokens=MOST, **options))


@kit.gpu
@kit.needs_gpu
def test_a_replay_has_the_bits_of_single_ops():
    """Also after rows of another size, which use the same memory."""
    trainer, responses = wide_trainer(), long_responses()
    graphs = trainer.weights.graphs
    parts = [[0, 1, 2, 3], [0], [4, 5, 6, 7], [1, 2], [3]]
    batches = [build_micro_batch(responses, part, "cuda") for part in parts]
    with deterministic(trainer.weights.device):
        wanted = gradients_of(trainer, batches, OpByOp(graphs))
        for _ in range(3):
            got = gradients_of(trainer, batches, graphs)
            assert all(map(torch.equal, got, wanted))
    assert len(graphs._rows) == 3 and all(row.forward for row in graphs._rows.values())


@kit.gpu
@kit.needs_gpu
def test_a_padded_row_has_nearly_the_gradient_of_the_row():
    """Of FlashAttention, and without padding."""
    trainer, responses = wide_trainer(), long_responses()
    batches = [build_micro_batch(responses, part, "cuda") for part in ([0, 1, 2, 3], [4])]
    got, other = (
        torch.cat([x.flatten().float() for x in gradients_of(trainer, batches, graphs)])
        for graphs in (trainer.weights.graphs, None)
    )
    assert (got - other).norm() <= 0.05 * other.norm()


@kit.gpu
@kit.needs_gpu
@pytest.mark.filterwarnings("ignore:sampling_logp_difference")
def test_updates_with_graphs_make_the_policy_of_single_ops():
    """Weights, gradients and moments stay where the graphs read and write them."""
    responses, found = long_responses(), []
    for op_by_op in (True, False):
        trainer = wide_trainer(lr=1e-2)
        if op_by_op:
            graphs = OpByOp(trainer.weights.graphs)
            trainer.weights._forward = functools.partial(
                packed_logprobs, trainer.model, graphs=graphs
            )
        for _ in range(3):
            metrics = trainer.update(responses, REWARDS)
        found.append([torch.tensor(metrics["actor/grad_norm"]), *trainer.params])
    assert all(map(torch.equal, *found))
