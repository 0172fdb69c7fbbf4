"""The drafter's parameters: layout, vocabulary, and whose tensors they are."""

import torch

from driver.model.drafter import Drafter, DraftSpec
from driver.session.load import spec_of
from tests.driver.drafting import build_parts
from tests.driver.hugging_face import random_model
from tests.kit import randn

SPEC = DraftSpec(32, 4, 2, 8, 1e-5, vocab_size=50, intermediate_size=40, draft_vocab=12)


def test_parameters_have_the_names_and_shapes_of_the_eagle3_layout():
    state = Drafter(SPEC).state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == {
        "fc.weight": (32, 96),
        "midlayer.self_attn.q_proj.weight": (32, 64),
        "midlayer.self_attn.k_proj.weight": (16, 64),
        "midlayer.self_attn.v_proj.weight": (16, 64),
        "midlayer.self_attn.o_proj.weight": (32, 32),
        "midlayer.mlp.gate_proj.weight": (40, 32),
        "midlayer.mlp.up_proj.weight": (40, 32),
        "midlayer.mlp.down_proj.weight": (32, 40),
        "midlayer.input_layernorm.weight": (32,),
        "midlayer.hidden_norm.weight": (32,),
        "midlayer.post_attention_layernorm.weight": (32,),
        "norm.weight": (32,),
        "lm_head.weight": (12, 32),
        "d2t": (12,),
        "t2d": (50,),
    }
    assert state["d2t"].dtype == torch.int64 and state["t2d"].dtype == torch.bool


def test_d2t_holds_offsets_and_the_head_is_gathered_by_it():
    drafter = Drafter(SPEC)
    ids = torch.tensor([0, 3, 4, 9, 10, 11, 20, 30, 31, 40, 48, 49])
    head = randn(50, 32, seed=0)
    drafter.set_vocabulary(ids)
    drafter.refresh_head(head)
    assert drafter.d2t.tolist() == [0, 2, 2, 6, 6, 6, 14, 23, 23, 31, 38, 38]
    assert drafter.t2d.nonzero()[:, 0].tolist() == ids.tolist()
    assert torch.equal(drafter.target_ids, ids)
    assert torch.equal(drafter.lm_head.weight, head[ids])


def test_the_head_is_not_trained_and_shares_no_storage_with_the_target():
    """fault 36: the whole vocabulary is drafted and the target's head is tied."""
    parts = build_parts(draft_vocab=97)
    drafter, target = parts.drafter, parts.target
    assert target.head is target.embedding
    assert torch.equal(drafter.lm_head.weight, target.head)
    assert all(weight is not drafter.lm_head.weight for weight in drafter.trainable())
    theirs = {weight.data_ptr() for weight in target.state_dict().values()}
    assert not theirs & {weight.data_ptr() for weight in drafter.state_dict().values()}


def test_the_shape_follows_the_target():
    target = spec_of(random_model("qwen3"))
    spec = DraftSpec.of(target)
    assert (spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (48, 6, 2, 16)
    assert (spec.intermediate_size, spec.draft_vocab, spec.vocab_size) == (72, 97, 97)
    assert DraftSpec.of(target, 40, 500).draft_vocab == 97
    assert DraftSpec.of(target, 40, 24).draft_vocab == 24


def test_a_seed_decides_the_weights_and_leaves_the_global_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, again, other = Drafter(SPEC, 1), Drafter(SPEC, 1), Drafter(SPEC, 2)
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(first.fc.weight, again.fc.weight)
    assert not torch.equal(first.fc.weight, other.fc.weight)
