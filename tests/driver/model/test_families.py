"""Every supported family is tested: inference, training, memory and checkpoints."""

import re

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from driver.common.errors import UserError
from driver.model.checkpoint import check_checkpoint
from driver.model.families import FAMILIES, NEEDS, family_of
from driver.model.spec import ModelSpec
from driver.policy.packed_forward import Documents
from driver.run.dry_run import dry_run
from driver.session.load import spec_of
from tests.driver import hugging_face
from tests.driver.hugging_face import PHI4, VARIANTS, YARN_ROPE, packed_hidden, random_model


def test_every_family_has_its_tests():
    assert {model.__name__ for _, model in hugging_face.FAMILIES.values()} == set(FAMILIES)
    assert {family for family, _ in VARIANTS.values()} == set(hugging_face.FAMILIES)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_spec_lists_the_tensors_of_its_checkpoint(variant):
    model = random_model(variant)
    spec = spec_of(model)
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    assert spec.shapes() == shapes
    assert spec.num_parameters == sum(weight.numel() for weight in model.parameters())


def test_other_families_are_refused_by_name():
    with pytest.raises(
        UserError, match="architecture GemmaForCausalLM is not supported: it needs Ge"
    ):
        family_of("GemmaForCausalLM")

    class GemmaForCausalLM(type(random_model("qwen2"))):
        pass

    model = random_model("qwen2")
    model.__class__ = GemmaForCausalLM
    with pytest.raises(UserError, match="architecture GemmaForCausalLM is not supported"):
        packed_hidden(model, None, Documents.of([1]))


def test_a_mistral_with_windows_is_refused_by_name():
    config = random_model("mistral").config.to_dict() | {"architectures": ["MistralForCausalLM"]}
    assert ModelSpec.from_config(config).head_dim == 16
    with pytest.raises(UserError, match="sliding_window=128: sliding-window attention is not supp"):
        ModelSpec.from_config(config | {"sliding_window": 128})
    del config["sliding_window"]  # the class in transformers then has a window of 4096
    with pytest.raises(UserError, match="sliding_window=4096: .* needs sliding_window=null"):
        ModelSpec.from_config(config)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"sliding_window": 2047}, "sliding_window=2047: .* needs sliding_window=null"),
        ({"rope_scaling": YARN_ROPE}, "RoPE type 'yarn' is not supported; there are default"),
        ({"rope_scaling": {"type": "longrope"}}, "RoPE type 'longrope' is not supported"),
        ({"partial_rotary_factor": 0.75}, "partial RoPE is not supported"),
    ],
)
def test_what_other_models_of_phi3_s_class_have_is_refused_by_name(changes, match):
    assert ModelSpec.from_config(PHI4).num_parameters == 14_659_507_200
    with pytest.raises(UserError, match=match):
        ModelSpec.from_config(PHI4 | changes)


@pytest.mark.parametrize(
    "kind",
    ["cohere2", "deepseek_v3", "falcon", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_oss",
     "granite", "llama4_text", "mamba2", "ministral3", "mixtral", "olmo2", "olmo3", "qwen3_moe",
     "qwen3_next", "seed_oss"],
)  # fmt: skip
def test_a_folder_of_another_family_is_one_line(kind, tmp_path):
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    config = CONFIG_MAPPING[kind]()
    config.architectures = [name]
    config.save_pretrained(tmp_path)
    needs = f": it needs {NEEDS[name]}" if name in NEEDS else ""
    wanted = re.escape(f"config.json: architecture {name} is not supported{needs}; there are Ll")
    with pytest.raises(UserError, match=wanted):
        check_checkpoint(tmp_path)
    with pytest.raises(UserError, match=wanted):
        dry_run([f"model.path={tmp_path}"], lambda line: None)


def test_a_model_with_images_is_refused_for_what_its_text_model_needs():
    for name in ("Gemma3ForConditionalGeneration", "Llama4ForConditionalGeneration"):
        text = name.replace("ForConditionalGeneration", "ForCausalLM")
        with pytest.raises(UserError, match=f"architecture {name} .*: it needs {NEEDS[text]}; th"):
            family_of(name)


def test_what_other_families_need_is_of_classes_that_exist():
    assert set(NEEDS) <= set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()) - set(FAMILIES)
