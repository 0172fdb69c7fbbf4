import copy
import dataclasses

import pytest
import torch

import tlt_ext
from driver.common.errors import UserError
from driver.model.checkpoint import load_checkpoint
from driver.model.kv_cache import KvCache
from driver.model.target import TargetModel, default_feature_layers
from driver.session.load import spec_of
from tests.driver.hugging_face import VARIANTS, YARN_ROPE, logits_of, random_model, save_model
from tests.kit import generator, relative_error, same_bits

ATOL = 1e-4  # on logits of order one, float32
UNUSED_PAGE = 1 << 30  # block-table entries past the end must not be followed
# A tree in packed order; depths 0, 1, 1, 2, 2, 2, 3, 4, with rejected siblings between.
PARENTS = [-1, 0, 0, 1, 2, 2, 5, 6]


@pytest.fixture(scope="module", params=list(VARIANTS))
def pair(request, tmp_path_factory):
    """A model of transformers and ours, loaded from the folder that it saved."""
    folder = tmp_path_factory.mktemp(request.param)
    reference = save_model(folder, request.param)
    return reference, load(folder)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    return save_model(folder, "llama-tied-llama3"), folder


def load(folder, **options) -> TargetModel:
    return TargetModel(*load_checkpoint(folder), **options)


def token_ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(97, (count,), generator=generator(seed)).tolist()


class Sequences:
    """Requests over one page pool in shuffled order; what was never written is NaN."""

    def __init__(
        self, model: TargetModel, batch: int = 1, page_size: int = 4, features: bool = False
    ) -> None:
        self.model, self.page_size, self.max_pages = model, page_size, 128 // page_size
        num_pages = batch * self.max_pages
        self.kv = KvCache(
            model.spec,
            num_pages=num_pages,
            page_size=page_size,
            feature_size=features * model.feature_size,
            dtype=model.dtype,
        )
        self.kv.k.fill_(torch.nan)
        self.kv.v.fill_(torch.nan)
        self.pages = torch.randperm(num_pages, generator=generator(7)).view(batch, -1).int()
        self.context = [0] * batch

    def rows(self, ids, *, positions=None, ancestors=None, inert=0, commit=True, **options):
        """Runs each request's ids on top of its context; returns clones of logits, features."""
        lengths = [len(own) for own in ids]
        table = torch.full_like(self.pages, UNUSED_PAGE)
        for b, (context, length) in enumerate(zip(self.context, lengths, strict=True)):
            used = -(-(context + length) // self.page_size)
            table[b, :used] = self.pages[b, :used]
        if positions is None:
            positions = [
                self.context[b] + i for b, length in enumerate(lengths) for i in range(length)
            ]
        batch = tlt_ext.Rows(
            row_start=torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]).int(),
            context_len=torch.tensor(self.context).int(),
            position=torch.tensor(positions + [0] * inert).int(),
            block_table=table,
            status=torch.zeros(len(ids)).int(),
        )
        flat = torch.tensor([token for own in ids for token in own] + [0] * inert).int()
        out = self.model.forward(flat, batch, self.kv, ancestors=ancestors, **options)
        assert batch.status.tolist() == [0] * len(ids)
        if commit:
            self.context = [c + n for c, n in zip(self.context, lengths, strict=True)]
        return [None if o is None else o.clone()[: sum(lengths)] for o in out]

    def logits(self, ids: list[int], **options) -> torch.Tensor:
        return self.rows([ids], **options)[0]

    def tree(self, tokens: list[int], parents: list[int]) -> torch.Tensor:
        """Logits of a draft tree after the context; commits nothing."""
        lines = [ancestors_of(node, parents) for node in range(len(parents))]
        # Entries past a row's depth are garbage.
        ancestors = torch.full((len(parents), 16), 255, dtype=torch.uint8)
        for node, line in enumerate(lines):
            ancestors[node, : len(line)] = torch.tensor(line, dtype=torch.uint8)
        positions = [self.context[0] + len(line) for line in lines]
        return self.rows([tokens], positions=positions, ancestors=ancestors, commit=False)[0]


def ancestors_of(node: int, parents: list[int]) -> list[int]:
    parent = parents[node]
    return [] if parent < 0 else [*ancestors_of(parent, parents), parent]


def test_prefill_in_chunks_and_decode_equal_transformers(pair):
    reference, model = pair
    ids = token_ids(60)
    expected = logits_of(reference, ids)
    assert 0.3 < expected.std() < 3
    sequence = Sequences(model)
    chunks = [sequence.logits(ids[:37]), sequence.logits(ids[37:50])]
    steps = [sequence.logits([token]) for token in ids[50:]]
    assert (torch.cat(chunks + steps) - expected).abs().max() < ATOL


def test_each_path_of_a_tree_equals_transformers(pair):
    reference, model = pair
    prompt, tokens = token_ids(33), token_ids(len(PARENTS), seed=1)
    sequence = Sequences(model)
    sequence.logits(prompt)
    logits = sequence.tree(tokens, PARENTS)
    for node in range(len(PARENTS)):
        path = [tokens[i] for i in [*ancestors_of(node, PARENTS), node]]
        assert (logits[node] - logits_of(reference, prompt + path)[-1]).abs().max() < ATOL


def test_a_row_has_the_same_bits_in_prefill_and_decode(pair):
    _, model = pair
    ids = token_ids(53, seed=2)
    whole = Sequences(model).logits(ids)
    chunked, single = Sequences(model, page_size=16), Sequences(model, page_size=1)
    chunks = [chunked.logits(ids[i : i + 7]) for i in range(0, len(ids), 7)]
    steps = [single.logits([token]) for token in ids]
    assert same_bits(torch.cat(chunks), whole)
    assert same_bits(torch.cat(steps), whole)


@pytest.mark.parametrize("context", [1, 15, 16, 31, 32, 45])
def test_a_row_has_the_same_bits_in_a_tree_and_in_decode(pair, context):
    _, model = pair
    prompt, tokens = token_ids(context, seed=3), token_ids(len(PARENTS), seed=4)
    sequence = Sequences(model)
    sequence.logits(prompt)
    logits = sequence.tree(tokens, PARENTS)
    leaves = set(range(len(PARENTS))) - set(PARENTS)
    for leaf in leaves:
        path = [*ancestors_of(leaf, PARENTS), leaf]
        plain = Sequences(model, page_size=8)
        plain.logits(prompt)
        for node in path:
            assert same_bits(plain.logits([tokens[node]])[0], logits[node])


def test_a_request_has_the_same_bits_alone_and_in_a_ragged_batch(llama):
    model = load(llama[1])
    prompts = [token_ids(20, seed=5), [], token_ids(5, seed=6), token_ids(1, seed=7)]
    alone = [Sequences(model, features=True).rows([ids]) for ids in prompts if ids]
    together = Sequences(model, batch=4, features=True).rows(prompts, inert=3)
    for which in range(2):
        assert same_bits(together[which], torch.cat([each[which] for each in alone]))


def test_logits_only_where_they_are_wanted(llama):
    model, ids = load(llama[1]), token_ids(9)
    every = Sequences(model).logits(ids)
    sequence = Sequences(model)
    logits, features = sequence.rows([ids[:8]], want_logits=False)
    assert logits is None and features is None
    assert same_bits(sequence.logits(ids[8:])[0], every[8])


def test_a_batch_that_drained_to_nothing_is_a_pass_over_no_rows_fault_25(llama):
    sequences = Sequences(load(llama[1]), batch=2, features=True)
    logits, features = sequences.rows([[], []])
    assert logits.shape == (0, 97) and features.shape == (0, 4 * 48)
    assert sequences.kv.k.isnan().all()


def test_features_are_the_outputs_of_their_layers_fault_37(llama):
    reference, folder = llama
    outputs = {}
    for index, layer in enumerate(reference.model.layers):
        layer.register_forward_hook(
            lambda _module, _inputs, out, index=index: outputs.update({index: out})
        )
    ids = token_ids(30)
    expected_logits = logits_of(reference, ids)
    for layers in [(), (0, 2, 3)]:
        model = load(folder)
        model.feature_layers = layers or model.feature_layers
        features = Sequences(model, features=True).rows([ids])[1]
        assert features.shape == (30, model.feature_size)
        for place, index in enumerate([*(layers or (0, 1, 2)), 3]):
            part = features[:, place * 48 : (place + 1) * 48]
            assert (part - outputs[index][0]).abs().max() < ATOL
    # The last part is what a teacher needs: head(final_norm(h)) gives the logits.
    teacher = reference.lm_head(reference.model.norm(features[:, -48:]))
    assert (teacher - expected_logits).abs().max() < ATOL


def test_default_feature_layers_of_deep_and_shallow_models():
    assert default_feature_layers(32) == (1, 15, 28)
    assert default_feature_layers(7) == (1, 2, 3)
    for num_layers in range(1, 41):
        layers = default_feature_layers(num_layers)
        assert sorted(layers) == list(layers)
        assert 0 <= layers[0] and layers[-1] < num_layers
        assert num_layers < 3 or len(set(layers)) == 3


def test_bfloat16_is_as_near_as_transformers_bfloat16(pair):
    reference, model = pair
    ids = token_ids(40)
    exact = logits_of(reference, ids)
    honest = copy.deepcopy(reference).bfloat16()
    baseline = relative_error(logits_of(honest, ids).float(), exact)
    half = TargetModel(model.spec, model.state_dict(), dtype=torch.bfloat16)
    logits = Sequences(half).logits(ids)
    assert logits.dtype == torch.float32
    assert relative_error(logits, exact) < 1.5 * baseline


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ops_one_by_one_have_the_bits_of_fused_ones(pair, monkeypatch, dtype):
    """What a layer runs where rows or weights are many."""
    model = TargetModel(pair[1].spec, pair[1].state_dict(), dtype=dtype)
    ids = token_ids(21)
    fused = [x.clone() for x in Sequences(model, features=True).rows([ids])]
    monkeypatch.setattr(model, "fuses", lambda *_: False)
    apart = Sequences(model, features=True).rows([ids])
    assert all(same_bits(a, b) for a, b in zip(fused, apart, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_without_rope_appends_its_input(dtype):
    """Every number stays; only a zero may change its sign, which no score depends on."""
    whole = random_model("smollm3", rope_parameters=YARN_ROPE)
    spec = spec_of(whole)
    model = TargetModel(spec, whole.state_dict())
    table = model._no_rope
    assert spec.rope.attention_factor > 1
    qkv = torch.randn(5, spec.q_dim + 2 * spec.kv_dim, generator=generator(2)).to(dtype)
    qkv[2] = -0.0
    kv = KvCache(spec, num_pages=2, page_size=4, dtype=dtype)
    q = torch.empty(5, spec.num_heads, spec.head_dim, dtype=dtype)
    rows = tlt_ext.Rows(
        row_start=torch.tensor([0, 5]).int(),
        context_len=torch.zeros(1).int(),
        position=torch.arange(5).int(),
        block_table=torch.tensor([[0, 1]]).int(),
        status=torch.zeros(1).int(),
    )
    tlt_ext.append_kv(qkv, q, kv.k[0], kv.v[0], table, rows)
    keys, values = (cache[0].flatten(0, 1)[:5].flatten(1) for cache in (kv.k, kv.v))
    assert torch.equal(torch.cat((q.flatten(1), keys, values), 1), qkv)
    assert table.shape == model.cos_sin.shape
    assert table.untyped_storage().nbytes() == 4 * spec.head_dim


def test_few_rows_or_few_weights_are_fused(llama, monkeypatch):
    model = load(llama[1])
    small, large = (torch.empty(shape, device="meta") for shape in ((3072, 576), (4608, 3584)))
    assert model.fuses(512, large)  # on a CPU
    monkeypatch.setattr(model, "device", torch.device("cuda"))
    assert model.fuses(8, large) and not model.fuses(9, large)
    assert model.fuses(160, small) and not model.fuses(161, small)
    assert model.fuses(96, small, 96) and not model.fuses(97, small, 96)


@pytest.mark.parametrize(("wide", "inside"), [(49152, True), (37888, False)])
def test_large_weights_have_norms_of_their_own(llama, monkeypatch, wide, inside):
    """Their launch hides behind the weights, which a linear alone reads faster."""
    model = load(llama[1])
    calls = []
    monkeypatch.setattr("tlt_ext.rms_norm", lambda *_, **__: calls.append("rms_norm"))
    x, weight = torch.empty(1, 8), torch.empty(wide, 576 if inside else 3584, device="meta")
    monkeypatch.setattr(model, "device", torch.device("cuda"))
    read = model.norm_for(x, x[0], weight, 1e-5, torch.empty(4, 8))
    assert ("norm_weight" in read) == inside and (calls == []) == inside


@pytest.mark.parametrize(
    ("rows", "gated", "inside"), [(8, 0, 1), (9, 0, 0), (9, 1, 1), (161, 1, 0)]
)
def test_norms_of_more_rows_are_fused_with_a_gate_only(llama, monkeypatch, rows, gated, inside):
    model = load(llama[1])
    monkeypatch.setattr("tlt_ext.rms_norm", lambda *_, **__: None)
    x, weight = torch.empty(rows, 8), torch.empty(3072, 576, device="meta")
    monkeypatch.setattr(model, "device", torch.device("cuda"))
    read = model.norm_for(x, x[0], weight, 1e-5, torch.empty(rows, 8), gated=bool(gated))
    assert ("norm_weight" in read) == inside


@pytest.mark.parametrize(("rows", "ops"), [(96, 1), (97, 3)])
def test_many_rows_append_apart(llama, monkeypatch, rows, ops):
    model, calls = load(llama[1]), []
    for op in ("linear_append", "rms_norm", "linear_rows", "append_kv"):
        monkeypatch.setattr(f"tlt_ext.{op}", lambda *_, op=op, **__: calls.append(op))
    monkeypatch.setattr(model, "device", torch.device("cuda"))
    model._append(model.layers[0], torch.empty(rows, 8), None, (None,) * 3, None)
    assert len(calls) == ops and ("linear_append" in calls) == (ops == 1)


def test_weights_are_reloaded_in_place(pair, request):
    variant = request.node.callspec.params["pair"]
    _, model = pair
    ids = token_ids(11)
    old = {name: weight.clone() for name, weight in model.state_dict().items()}
    before = Sequences(model).logits(ids)
    places = [weight.data_ptr() for weight in model.state_dict().values()]
    changed = random_model(variant, seed=1)
    model.load_weights(changed.state_dict())
    assert (Sequences(model).logits(ids) - logits_of(changed, ids)).abs().max() < ATOL
    assert [weight.data_ptr() for weight in model.state_dict().values()] == places
    model.load_weights(old)
    assert same_bits(Sequences(model).logits(ids), before)


def test_state_dict_is_what_was_loaded(pair):
    reference, model = pair
    saved = dict(reference.named_parameters())
    assert model.state_dict().keys() == saved.keys()
    assert all(same_bits(weight, saved[name]) for name, weight in model.state_dict().items())


def without(weights, name):
    return {key: weight for key, weight in weights.items() if key != name}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda w: without(w, "model.norm.weight"), "model.norm.weight is missing"),
        (
            lambda w: without(w, "model.layers.3.self_attn.k_proj.weight"),
            r"layers.3.self_attn.k_proj.weight is missing; LlamaForCausalLM needs it",
        ),
        (
            lambda w: {f"module.{name}": weight for name, weight in w.items()},
            "by its config.json; remove the prefix of module.model.embed_tokens.weight",
        ),
        (
            lambda w: {**w, "model.layers.0.mlp.up_proj.weight": torch.zeros(72, 49)},
            r"layers.0.mlp.up_proj.weight has shape \[72, 49\], config.json makes it \[72, 48\]",
        ),
        (
            lambda w: {**w, "model.norm.weight": torch.zeros(48, dtype=torch.int8)},
            "model.norm.weight is torch.int8; expected floats",
        ),
        (
            lambda w: {**w, "model.layers.0.self_attn.q_proj.bias": torch.zeros(48)},
            "layers.0.self_attn.q_proj.bias is not a tensor of LlamaForCausalLM",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_leave_the_old_ones_whole(llama, change, match):
    model = load(llama[1])
    _, good = load_checkpoint(llama[1])
    bad = change({name: weight + 1 for name, weight in good.items()})
    with pytest.raises(UserError, match=match):
        model.load_weights(bad)
    assert all(same_bits(weight, good[name]) for name, weight in model.state_dict().items())
    with pytest.raises(UserError, match=match):
        TargetModel(model.spec, bad)


def test_a_tied_head_and_rope_frequencies_may_be_there(llama):
    spec, weights = load_checkpoint(llama[1])
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    model = TargetModel(spec, weights)
    assert same_bits(Sequences(model).logits([1, 2]), Sequences(load(llama[1])).logits([1, 2]))
    weights["lm_head.weight"][3, 4] += 1
    with pytest.raises(UserError, match="lm_head.weight is not model.embed_tokens.weight, which"):
        model.load_weights(weights)


def test_limits_are_refused_by_name(llama):
    spec, weights = load_checkpoint(llama[1])
    with pytest.raises(UserError, match=r"shape \[97, 48\], config.json makes it \[98, 48\]"):
        TargetModel(dataclasses.replace(spec, vocab_size=98), weights)
    with pytest.raises(ValueError, match="at most max_rows = 4 rows, got 5"):
        Sequences(load(llama[1], max_rows=4)).logits(token_ids(5))
