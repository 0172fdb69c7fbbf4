import json
import shutil

import pytest
import torch
from transformers import LlamaConfig, SmolLM3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from driver.common.errors import UserError
from driver.model.families import FAMILIES
from driver.model.spec import ModelSpec, RopeSpec, rope_frequencies, rope_table
from tests.driver.hugging_face import (
    LLAMA3_ROPE,
    SMOLLM3_3B,
    VARIANTS,
    YARN_ROPE,
    random_model,
    save_model,
)
from tlt_ext.limits import MAX_DEPTH

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "max_position_embeddings": 256,
}


def qwen2(**changes):
    return {**CONFIG, "architectures": ["Qwen2ForCausalLM"], **changes}


def smollm3(**changes):
    return {**CONFIG, "architectures": ["SmolLM3ForCausalLM"], **changes}


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    return save_model(folder, "llama-bias-linear"), folder


def test_defaults_of_a_short_config():
    spec = ModelSpec.from_config(CONFIG)
    assert (spec.num_kv_heads, spec.head_dim, spec.rms_norm_eps) == (6, 8, 1e-6)
    assert (spec.rope, spec.dtype, spec.eos_ids) == (RopeSpec(), torch.float32, ())
    assert not (spec.qkv_bias or spec.output_bias or spec.qk_norm or spec.tie_word_embeddings)
    spec = ModelSpec.from_config(qwen2(torch_dtype="bfloat16", eos_token_id=4))
    assert (spec.qkv_bias, spec.output_bias) == (True, False)
    assert (spec.dtype, spec.eos_ids) == (torch.bfloat16, (4,))
    spec = ModelSpec.from_config({**CONFIG, "architectures": ["Qwen3ForCausalLM"]})
    assert spec.head_dim == 128 and spec.qk_norm


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_rope_table_equals_transformers(variant, tmp_path):
    model = random_model(variant)
    model.config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = [type(model).__name__]
    spec = ModelSpec.from_config(config)
    # Drafted rows may lie past the last position.
    positions = torch.arange(spec.max_position + MAX_DEPTH)
    cos, sin = model.model.rotary_emb(torch.zeros(1), positions[None])
    half = spec.head_dim // 2
    expected = torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=1)
    assert rope_table(spec).shape == expected.shape
    assert (rope_table(spec) - expected).abs().max() < 2e-5


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"no_rope_layers": None, "no_rope_layer_interval": 2},
        {"no_rope_layers": [0, 1, 1, 0]},
        {"no_rope_layers": [1, 1, 0, 1, 0, 0], "no_rope_layer_interval": 1},  # more than layers
    ],
)
def test_layers_without_rope_are_those_of_transformers(changes):
    spec = ModelSpec.from_config(smollm3(**changes))
    theirs = SmolLM3Config(**smollm3(**changes))
    assert spec.no_rope == {i for i in range(4) if not theirs.no_rope_layers[i]}
    assert spec.tie_word_embeddings and theirs.tie_word_embeddings
    assert spec.rope.theta == theirs.rope_parameters["rope_theta"] == 2e6
    assert not ModelSpec.from_config(qwen2(**changes)).no_rope  # the key is of SmolLM3


def test_smollm3_3b_is_read_as_published():
    spec = ModelSpec.from_config(SMOLLM3_3B)
    assert spec.num_parameters == 3_075_098_624
    assert spec.no_rope == {3, 7, 11, 15, 19, 23, 27, 31, 35}
    assert (spec.head_dim, spec.rope.theta) == (128, 5e6)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"no_rope_layers": [1, 0, 1]}, r"no_rope_layers: wanted 0 \(no RoPE\) or 1 for each of 4"),
        ({"no_rope_layers": [1, 0, 1, 2]}, r"no_rope_layers: .* got \[1, 0, 1, 2\]"),
        ({"no_rope_layer_interval": 0}, "no_rope_layer_interval: wanted a positive integer, got 0"),
        # Whatever max_window_layers is: the windows are those of the layers without RoPE.
        (
            {"use_sliding_window": True, "sliding_window": 128},
            "use_sliding_window=true: sliding-window attention is not supported",
        ),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types: 'sliding_attention' is not supported; full_attention is",
        ),
    ],
)
def test_what_a_smollm3_may_not_have_is_refused_by_name(changes, match):
    with pytest.raises(UserError, match=match):
        ModelSpec.from_config(smollm3(**changes))


def test_old_and_new_layout_of_rope_give_one_spec():
    old = {key: value for key, value in LLAMA3_ROPE.items() if "theta" not in key}
    old["type"] = old.pop("rope_type")
    new = ModelSpec.from_config({**CONFIG, "rope_parameters": LLAMA3_ROPE})
    assert new.rope == RopeSpec("llama3", 500.0, 4.0, 1.0, 4.0, 64)
    assert ModelSpec.from_config({**CONFIG, "rope_scaling": old, "rope_theta": 500.0}) == new
    plain = ModelSpec.from_config({**CONFIG, "rope_scaling": None, "rope_theta": 7e4})
    assert plain.rope == RopeSpec(theta=7e4)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_factor": 1.5},
        {"beta_fast": 8.0, "beta_slow": 0.25},
        {"mscale": 0.7, "mscale_all_dim": 1.3},
        {"mscale": 0.7},
        {"factor": 0.5},
        {"original_max_position_embeddings": 4},
    ],
)
@pytest.mark.parametrize("head_dim", [8, 128])
def test_yarn_frequencies_are_those_of_transformers_to_the_bit(changes, head_dim):
    """Cosines of the same angles may differ in the last bit, by the place of an element."""
    rope = {**YARN_ROPE, "rope_theta": 1e6 if head_dim == 128 else 500.0, **changes}
    config = {**CONFIG, "head_dim": head_dim, "rope_parameters": rope}
    spec = ModelSpec.from_config(config)
    rotary = LlamaRotaryEmbedding(LlamaConfig(**config))
    assert torch.equal(rope_frequencies(spec), rotary.inv_freq)
    assert spec.rope.attention_factor == rotary.attention_scaling
    cos, _ = rotary(torch.zeros(1), torch.arange(256)[None])
    half = head_dim // 2
    assert (rope_table(spec)[:256, :half] - cos[0, :, :half]).abs().max() < 2e-5


@pytest.mark.parametrize(
    ("outside", "inside", "context"),
    [(None, 64, 64), (None, None, 256), (32, None, 32), (32, 64, 32)],
)
def test_the_context_of_llama3_scaling_is_that_of_transformers(outside, inside, context):
    """A key beside the object wins over one in it; without either it is the model's context."""
    scaling = {**LLAMA3_ROPE, "original_max_position_embeddings": inside}
    config = {**CONFIG, "original_max_position_embeddings": outside}
    config = {key: value for key, value in config.items() if value is not None}
    scaling = {key: value for key, value in scaling.items() if value is not None}
    spec = ModelSpec.from_config({**config, "rope_parameters": scaling})
    assert spec.rope.original_max_position_embeddings == context
    theirs = LlamaConfig(**config, rope_parameters=scaling)
    assert ModelSpec.from_config({**theirs.to_dict(), **config}).rope == spec.rope
    rotary = LlamaRotaryEmbedding(theirs)
    cos, sin = rotary(torch.zeros(1), torch.arange(256)[None])
    assert (rope_table(spec)[:256, :4] - cos[0, :, :4]).abs().max() < 2e-5
    assert (rope_table(spec)[:256, 4:] - sin[0, :, :4]).abs().max() < 2e-5


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported; there are Ll"),
        ({"architectures": None}, "architectures: empty; name one of Llama"),
        (
            {"tie_word_embeddings": "false"},
            "tie_word_embeddings: wanted true or false, got 'false'",
        ),
        ({"rms_norm_eps": "1e-5"}, "wanted rms_norm_eps > 0, got '1e-5'"),
        ({"rope_theta": -1}, "wanted rope_theta > 0, got -1"),
        ({"eos_token_id": 0.0}, "eos_token_id: wanted token ids from 0 on, got 0.0"),
        ({"eos_token_id": [2, -1]}, r"eos_token_id: wanted token ids from 0 on, got \[2, -1\]"),
        ({"vocab_size": 2**40}, "vocab_size: wanted a positive integer, got 1099511627776"),
        ({"vocab_size": None}, "vocab_size: wanted a positive integer, got None"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers: wanted a positive integer, got '4'"),
        ({"num_key_value_heads": 4}, "num_key_value_heads: wanted a divisor of 6 heads, got 4"),
        ({"architectures": "LlamaForCausalLM2"}, "architecture LlamaForCausalLM2 is not supported"),
        ({"rope_scaling": [1]}, r"rope_scaling: wanted an object, got \[1\]"),
        ({"head_dim": 7}, "head_dim: wanted a multiple of 8 up to 256, got 7"),
        ({"mlp_bias": True}, "mlp_bias=true is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"dtype": "float64"}, "dtype 'float64' is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantized weights are not supported"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "'chunked_attention' is not"),
        ({"use_sliding_window": True, "max_window_layers": 2}, "sliding-window attention is not"),
        ({"rope_parameters": {**YARN_ROPE, "truncate": False}}, "truncate=false is not supported"),
        ({"rope_parameters": {**YARN_ROPE, "factor": None}}, "'yarn' needs factor > 0, got None"),
        ({"rope_parameters": {**YARN_ROPE, "beta_fast": "x"}}, "'yarn' needs beta_fast > 0, got"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "RoPE type 'dynamic' is not supported"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "RoPE type 'longrope' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "'linear' needs factor > 0, got None"),
        (
            {"rope_parameters": {**LLAMA3_ROPE, "high_freq_factor": 1.0}},
            "needs high_freq_factor > low_freq_factor",
        ),
        ({"rope_parameters": {"full_attention": {}}}, "RoPE that differs by layer"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial RoPE is not supported"),
        ({"partial_rotary_factor": 0.25}, "partial RoPE is not supported"),
    ],
)
def test_unsupported_settings_are_named(config, match):
    with pytest.raises(UserError, match=f"^here: .*{match}"):
        ModelSpec.from_config({**CONFIG, **config}, where="here")


ODD = (True, -1, 0, 0.5, "x", [], [1], {}, {"a": {}}, float("nan"), 10**400)
KEYS = (*CONFIG, "head_dim",
        "rope_scaling", "rope_parameters", "rope_theta", "eos_token_id", "dtype",
        "layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "mlp_bias",
        "hidden_act", "attention_bias", "rms_norm_eps", "partial_rotary_factor",
        "no_rope_layers", "no_rope_layer_interval", "tie_word_embeddings")  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_odd_values_are_refused_in_one_line_or_read(name):
    config = {**CONFIG, "architectures": [name], "sliding_window": None}
    for key in KEYS:
        for value in ODD:
            try:
                ModelSpec.from_config({**config, key: value}, "here")
            except UserError as error:
                assert str(error).startswith("here: ")


def test_a_sliding_window_that_is_not_in_use_is_accepted():
    full = ["full_attention"] * 4
    for unused in [
        {"use_sliding_window": False, "sliding_window": 128},
        {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 4},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 128, "layer_types": full},
    ]:
        assert ModelSpec.from_config(qwen2(**unused)).num_layers == 4


def test_end_ids_come_from_the_generation_config_first(sharded, tmp_path):
    model, folder = sharded
    assert ModelSpec.from_folder(folder).eos_ids == (3, 5)
    for name in ("config.json", "generation_config.json"):
        shutil.copy(folder / name, tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert ModelSpec.from_folder(tmp_path).eos_ids == (7,)
    (tmp_path / "generation_config.json").write_text("{}")
    assert ModelSpec.from_folder(tmp_path).eos_ids == (3, 5)
