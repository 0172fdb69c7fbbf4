"""Checkpoints: what is refused by its headers, and what the engine and the trainer both read."""

import json

import pytest
import torch
from safetensors.torch import load, save_file

from driver.common.errors import UserError
from driver.config.load import load_config
from driver.model.checkpoint import check_checkpoint, load_checkpoint, load_model, read_header
from driver.model.target import TargetModel
from driver.session.load import load_policy, load_tokenizer, spec_of
from tests.driver.hugging_face import VARIANTS, logits_of, save_model
from tests.driver.model.test_target import Sequences, token_ids

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def model(tmp_path):
    save_model(tmp_path / "model", "qwen3")
    return tmp_path / "model"


@pytest.fixture
def sharded(tmp_path):
    save_model(tmp_path / "sharded", "llama-bias-linear")
    return tmp_path / "sharded"


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


def test_a_header_lists_the_tensors(model):
    header = read_header(model / "model.safetensors")
    assert header["model.embed_tokens.weight"] == ("F32", [97, 48])
    assert "__metadata__" not in header


@pytest.mark.parametrize(
    ("named", "refused"),
    [
        (["GPT2LMHeadModel"], "architecture GPT2LMHeadModel is not supported"),
        (["Qwen2MoeForCausalLM"], "architecture Qwen2MoeForCausalLM is not supported"),
        ([], "architectures: empty"),
    ],
)
def test_unsupported_architecture_is_refused_by_name(model, named, refused):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": named}))
    with pytest.raises(UserError, match=f"config.json: {refused}"):
        check_checkpoint(model)


def test_missing_files_are_named(model):
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(UserError, match="model.safetensors: missing; pytorch_model.bin must be"):
        check_checkpoint(model)
    (model / "config.json").unlink()
    with pytest.raises(UserError, match="config.json: cannot be read"):
        check_checkpoint(model)


@pytest.mark.parametrize(("text", "match"), [("{", "cannot be read"), ("[]", "got list")])
def test_malformed_config_is_named(model, text, match):
    (model / "config.json").write_text(text)
    with pytest.raises(UserError, match=f"config.json: .*{match}"):
        check_checkpoint(model)


@pytest.mark.parametrize("missing", [1, 40, 58])
def test_truncated_safetensors_is_refused(model, missing):
    path = model / "model.safetensors"
    cut(path, path.stat().st_size - missing)
    with pytest.raises(UserError, match="not a whole safetensors file .*not fully covered"):
        check_checkpoint(model)


@pytest.mark.parametrize("size", [0, 7, 8, 30])
def test_safetensors_cut_inside_its_header_is_refused(model, size):
    cut(model / "model.safetensors", size)
    with pytest.raises(UserError, match="not a whole safetensors file .*header"):
        check_checkpoint(model)


def test_bytes_that_are_no_safetensors_are_refused(model):
    (model / "model.safetensors").write_bytes((4).to_bytes(8, "little") + b"what")
    with pytest.raises(UserError, match="not a whole safetensors file .*invalid JSON"):
        check_checkpoint(model)
    # A pointer file of Git LFS reads as a header of absurd length.
    (model / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(UserError, match="not a whole safetensors file .*too large"):
        check_checkpoint(model)


def test_a_file_that_cannot_be_opened_is_not_called_damaged(model):
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").mkdir()
    with pytest.raises(UserError, match="model.safetensors: cannot be read .Is a directory"):
        check_checkpoint(model)


def test_shards_are_checked_one_by_one(sharded):
    second = sorted(sharded.glob("*.safetensors"))[1]
    cut(second, second.stat().st_size - 2)
    with pytest.raises(UserError, match=f"{second.name}: not a whole safetensors file"):
        check_checkpoint(sharded)
    save_file({"c": torch.ones(2)}, second)
    with pytest.raises(UserError, match=f"{second.name}: tensor .* of the index is not in it"):
        check_checkpoint(sharded)
    second.unlink()
    with pytest.raises(UserError, match=f"{second.name}: shard missing"):
        check_checkpoint(sharded)
    (sharded / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(UserError, match="index.json: no weight_map"):
        check_checkpoint(sharded)


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(UserError, match=f"model folder {tmp_path / 'x'}: does not exist"):
        check_checkpoint(tmp_path / "x")
    with pytest.raises(UserError, match="config.json: cannot be read"):
        check_checkpoint(tmp_path)


def test_an_index_of_something_else_is_refused(sharded):
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    index.write_text(json.dumps({"weight_map": {**content["weight_map"], EMBEDDING: 3}}))
    with pytest.raises(UserError, match=f"{EMBEDDING}: wanted the name of a file, got 3"):
        check_checkpoint(sharded)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda w: w.pop("model.norm.weight"), "model.norm.weight is missing; Qwen3ForCausalLM ne"),
        (lambda w: w.update(x=torch.ones(2)), "x is not a tensor of Qwen3ForCausalLM"),
        (
            lambda w: w.update({"model.norm.weight": torch.ones(47)}),
            r"model.norm.weight has shape \[47\], config.json makes it \[48\]",
        ),
        (
            lambda w: w.update({EMBEDDING: torch.ones(90, 48)}),
            r"embed_tokens.weight has shape \[90, 48\], config.json makes it \[97, 48\]",
        ),
        (
            lambda w: w.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)}),
            "model.norm.weight is I8; wanted F64, F32, BF16, F16",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_their_headers(model, change, match):
    weights = load((model / "model.safetensors").read_bytes())
    change(weights)
    save_file(weights, model / "model.safetensors")
    with pytest.raises(UserError, match=match):
        check_checkpoint(model)


# ---- what is read -------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_engine_and_trainer_read_the_same_tensors(tmp_path, variant):
    saved = save_model(tmp_path, variant)
    spec, weights = load_checkpoint(tmp_path)
    parameters = dict(saved.named_parameters())
    assert weights.keys() == parameters.keys() == spec.shapes().keys()
    assert all(torch.equal(weights[name], weight) for name, weight in parameters.items())
    trained = load_model(tmp_path, torch.float32)
    assert type(trained) is type(saved) and spec_of(trained) == spec
    assert trained.config.to_dict() == saved.config.to_dict() | {
        "dtype": "float32",
        "_name_or_path": str(tmp_path),
    }
    assert trained.generation_config.eos_token_id == [3, 5]
    ids = token_ids(20)
    assert torch.equal(logits_of(trained, ids), logits_of(saved, ids))


def test_shards_need_no_metadata_in_their_index(sharded):
    index = sharded / "model.safetensors.index.json"
    assert len(list(sharded.glob("model-*.safetensors"))) > 2
    before = load_model(sharded, torch.float32).state_dict()
    index.write_text(json.dumps({"weight_map": json.loads(index.read_text())["weight_map"]}))
    after = load_model(sharded, torch.float32).state_dict()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


def test_weights_do_not_change_with_their_file(model):
    _, weights = load_checkpoint(model)
    before = {name: weight.clone() for name, weight in weights.items()}
    path = model / "model.safetensors"
    path.write_bytes(bytes(path.stat().st_size))
    assert all(torch.equal(weights[name], weight) for name, weight in before.items())


def logits_in_the_engine(folder, ids):
    return Sequences(TargetModel(*load_checkpoint(folder))).logits(ids)


def test_mapped_weights_share_the_memory_of_their_file(model):
    """Those in another dtype are copies."""
    path = model / "model.safetensors"
    whole = load_checkpoint(model, torch.float32)[1]
    mapped, copied = (load_checkpoint(model, d, True)[1] for d in (torch.float32, torch.bfloat16))
    assert all(torch.equal(mapped[name], whole[name]) for name in whole)
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert not any(tensor.any() for tensor in mapped.values())
    assert all(torch.equal(copied[name], whole[name].bfloat16()) for name in whole)


def test_a_head_of_its_own_counts_whatever_the_config_says(tmp_path):
    """The config ties it, the file has another one: the engine dropped it, the trainer did not."""
    save_model(tmp_path, "llama-tied-llama3")
    path, ids = tmp_path / "model.safetensors", token_ids(20)
    whole = load(path.read_bytes())
    tied = logits_in_the_engine(tmp_path, ids)
    save_file(whole | {HEAD: whole[EMBEDDING].clone()}, path)
    assert torch.equal(logits_in_the_engine(tmp_path, ids), tied)
    assert spec_of(load_model(tmp_path, torch.float32)).tie_word_embeddings
    save_file(whole | {HEAD: whole[EMBEDDING].flip(0)}, path)
    trained = load_model(tmp_path, torch.float32)
    spec, weights = load_checkpoint(tmp_path)
    assert spec == spec_of(trained) and not spec.tie_word_embeddings
    apart = logits_in_the_engine(tmp_path, ids)
    assert (apart - tied).abs().max() > 0.5
    assert (apart - logits_of(trained, ids)).abs().max() < 1e-4
    again = tmp_path / "again"
    trained.save_pretrained(again)
    assert torch.equal(load_checkpoint(again)[1][HEAD], weights[HEAD])


@pytest.mark.parametrize("variant", ["llama-tied-llama3", "llama-bias-linear"])
def test_rows_past_the_vocabulary_are_cut(tmp_path, variant):
    """Padding makes a matrix a multiple of some size; no token has such an id."""
    saved, ids = save_model(tmp_path, variant, num_hidden_layers=1), token_ids(20)
    for path in tmp_path.glob("*.safetensors"):
        weights = load(path.read_bytes())
        for name in {EMBEDDING, HEAD} & weights.keys():
            weights[name] = torch.cat((weights[name], torch.full((7, 48), 9.0)))
        save_file(weights, path)
    trained = load_model(tmp_path, torch.float32)
    assert torch.equal(logits_of(trained, ids), logits_of(saved, ids))
    logits = logits_in_the_engine(tmp_path, ids)
    assert logits.shape == (20, 97)
    assert (logits - logits_of(saved, ids)).abs().max() < 1e-4


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e6])
def test_weights_that_are_not_finite_are_refused(model, value):
    name, path = "model.layers.2.mlp.up_proj.weight", model / "model.safetensors"
    weights = load(path.read_bytes())
    weights[name][3, 4] = value
    save_file(weights, path)
    if value == 1e6:
        load_checkpoint(model)
    dtype = "float16" if value == 1e6 else "float32"
    with pytest.raises(UserError, match=f"{name} holds a weight that is not finite in {dtype}"):
        load_model(model, getattr(torch, dtype))


# ---- values that a library refuses --------------------------------------------------------------


ODD = (None, True, -1, 0, 0.5, 2**40, "x", [], [1], {}, {"a": 1})


def test_odd_values_of_a_config_are_one_line(model):
    config = json.loads((model / "config.json").read_text())
    refused = set()
    for key in config:
        for value in ODD:
            (model / "config.json").write_text(json.dumps({**config, key: value}))
            try:
                load_model(model, torch.float32)
            except UserError as error:
                assert "config.json" in str(error), (key, value)
                refused.add(key)
    assert {"hidden_size", "rms_norm_eps", "attention_dropout", "pad_token_id"} <= refused


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": "hot"},
        {"temperature": 0.5, "do_sample": False},  # valid until it is saved
        {"eos_token_id": "</s>"},
        {"eos_token_id": 0.0},
        {"eos_token_id": [-1]},
        {"max_new_tokens": -3},
    ],
)
def test_odd_values_of_a_generation_config_are_one_line(model, settings):
    (model / "generation_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match=r"generation_config.json: .*(tok|temp)"):
        load_model(model, torch.float32)


def test_a_tokenizer_larger_than_the_embedding_is_refused(model):
    from driver.model.tiny import build_tokenizer

    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(model)
    config = load_config([f"model.path={model}"])
    assert load_policy(config, model)[1].vocab_size == 32
    tokenizer.add_tokens([f"<{i}>" for i in range(97 - 32)])
    tokenizer.save_pretrained(model)
    load_policy(config, model)
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(model)
    with pytest.raises(UserError, match="has token '<more>' with id 97, but the embedding has 97"):
        load_policy(config, model)


def test_code_that_comes_with_a_model_is_not_run(model, monkeypatch):
    (model / "own.py").write_text("raise SystemExit('was run')")
    (model / "vocab.json").write_text("{}")
    (model / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}})
    )
    config = json.loads((model / "config.json").read_text())
    mapped = {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}
    (model / "config.json").write_text(json.dumps({**config, "auto_map": mapped}))

    asked = []
    monkeypatch.setattr("builtins.input", lambda *prompt: asked.append(prompt) or "n")
    assert load_model(model, torch.float32).config.model_type == "qwen3"
    for kind in ("qwen3", "own"):  # of the second transformers has no class
        own = {**config, "auto_map": mapped, "model_type": kind}
        (model / "config.json").write_text(json.dumps(own))
        with pytest.raises(
            UserError, match="no usable tokenizer .it needs code from the model folder"
        ):
            load_tokenizer(model)
    assert asked == []
