"""The exported drafter: what serving loaders ask for, by name, and the same drafts read back."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file

from driver import export
from driver.common.errors import UserError
from driver.config.load import load_config
from driver.drafter.eagle3 import drafter_config, write_drafter
from driver.model.spec import ModelSpec, RopeSpec
from driver.model.target import default_feature_layers
from driver.rollout.draft_runner import DraftRunner
from driver.run.collector import Collector
from driver.run.warm_start import warm_start
from driver.session.load import spec_of
from tests.driver.drafting import SEED, Parts, build_parts
from tests.driver.hugging_face import random_model
from tests.driver.run.test_run import WORDS, run, share_of_ones
from tests.kit import same_bits


@pytest.fixture
def parts() -> Parts:
    return build_parts()


def write(parts: Parts, folder, dtype=torch.float32):
    layers = parts.target.feature_layers
    config = drafter_config(parts.drafter.spec, parts.model.config.to_dict(), layers, dtype)
    write_drafter(folder, parts.drafter.state_dict(), config)
    return config


def test_a_round_trip_keeps_every_bit(parts, tmp_path):
    write(parts, tmp_path)
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert modes == {(tmp_path / "config.json").stat().st_mode}  # a server may be another user
    state = load_file(tmp_path / "model.safetensors")
    own = parts.drafter.state_dict()
    assert state.keys() == own.keys()
    assert all(same_bits(state[name], own[name]) for name in own)
    runner = DraftRunner(parts.drafter.spec, parts.target, parts.cache, SEED, 0.0)
    runner.load(state, 1)
    for name, weight in runner.weights.items():
        assert same_bits(weight, parts.runner.weights[name]), name
    assert torch.equal(runner.d2t, parts.runner.d2t)


def rope_of(config):
    return ModelSpec.from_config(config | {"architectures": ["LlamaForCausalLM"]}).rope


def test_a_drafter_rotates_as_a_smollm3_does_where_it_has_rope(parts):
    """The drafter's one layer has RoPE, whatever layers of the target have none."""
    target = random_model("smollm3")
    layers = parts.target.feature_layers
    config = drafter_config(parts.drafter.spec, target.config.to_dict(), layers, torch.float32)
    assert rope_of(config) == spec_of(target).rope == RopeSpec(theta=2e6)
    assert config["rope_theta"] == 2e6 and "no_rope_layers" not in config


def test_names_and_keys_are_those_of_the_serving_loaders(parts, tmp_path):
    """Written out on purpose: the list in the code must not be its own witness. fault 38: the reach
    is the target's."""
    config = write(parts, tmp_path, torch.bfloat16)
    tensors = load_file(tmp_path / "model.safetensors")
    assert set(tensors) == {
        "fc.weight",
        "norm.weight",
        "lm_head.weight",
        "d2t",
        "t2d",
        *(f"midlayer.self_attn.{x}_proj.weight" for x in "qkvo"),
        *(f"midlayer.mlp.{x}_proj.weight" for x in ("gate", "up", "down")),
        "midlayer.input_layernorm.weight",
        "midlayer.hidden_norm.weight",
        "midlayer.post_attention_layernorm.weight",
    }
    spec, target = parts.drafter.spec, parts.target.spec
    assert tensors["midlayer.self_attn.q_proj.weight"].shape[1] == 2 * spec.hidden_size
    assert tensors["fc.weight"].shape == (spec.hidden_size, 3 * spec.hidden_size)
    assert tensors["fc.weight"].dtype == torch.bfloat16
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert tensors["t2d"].shape == (target.vocab_size,)
    drafted = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], drafted.sort().values)
    assert config == json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["model_type"] == "llama" and config["num_hidden_layers"] == 1
    assert config["vocab_size"] == target.vocab_size and config["draft_vocab_size"] == 24
    assert config["max_position_embeddings"] >= target.max_position
    assert config["attention_bias"] is False and config["tie_word_embeddings"] is False
    layers = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert layers == list(parts.target.feature_layers)
    assert config["rope_theta"] > 0 and config["hidden_act"] == "silu"
    assert rope_of(config) == target.rope and config["rms_norm_eps"] == target.rms_norm_eps
    assert config["rope_scaling"]["rope_type"] == "llama3"  # the target's own


def captured(config, num_layers, reads_nested):
    """Layers whose outputs vLLM 0.24 feeds to the drafter, by its source: ids name the inputs of
    its layers, and each one is appended when the model comes to it. Model runner V1 reads the
    nested key after the upper one, V2 does not."""
    name = "eagle_aux_hidden_state_layer_ids"
    nested = config["eagle_config"][name] if reads_nested else None
    ids = config.get(name) or nested or (2, num_layers // 2, num_layers - 3)
    return [i - 1 for i in range(num_layers + 1) if i in ids]


@pytest.mark.parametrize("reads_nested", [True, False])
@pytest.mark.parametrize(
    ("num_layers", "layers"),
    [(n, default_feature_layers(n)) for n in (3, 4, 5, 6, 7, 28, 30)]
    + [(30, (0, 1, 2)), (30, (5, 20, 29))],
)
def test_servers_read_the_layers_of_the_features(parts, num_layers, layers, reads_nested):
    config = drafter_config(parts.drafter.spec, {"max_position_embeddings": 8}, layers, torch.half)
    assert captured(config, num_layers, reads_nested) == list(layers)
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == list(layers)  # of SGLang


@pytest.mark.parametrize(
    "layers", [default_feature_layers(1), default_feature_layers(2), (2, 0, 1)]
)
def test_layers_that_a_server_cannot_represent_are_refused(parts, layers):
    with pytest.raises(UserError, match=r"feature layers .* each layer once, in rising order"):
        drafter_config(parts.drafter.spec, {"max_position_embeddings": 8}, layers, torch.half)


def train(root, *words):
    """A checkpoint of a short run."""
    words = ("model.num_layers=3", "drafter.draft_vocab=20", *words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Collector, "rewards", share_of_ones)
        trained = run(root, "run", "run.steps=2", *words)
    return trained.folder.path / "checkpoints" / "step-000002"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return train(tmp_path_factory.mktemp("runs"))


def command(checkpoint, out):
    return [f"drafter={checkpoint}", f"out={out}", "strategy=learned:4,2,8", "prompts=3"]


def test_the_command_measures_what_it_wrote(checkpoint, tmp_path, capsys):
    words = command(checkpoint, tmp_path / "out")
    export.main(words)
    out = capsys.readouterr().out
    assert "15 tensors in the layout that serving engines load" in out
    assert re.search("^lm_head.weight +20x32$", out, flags=re.M)
    assert "sums: accept length" in out and "multiplication: accept length" in out
    page = (tmp_path / "out" / "README.md").read_text()
    assert "| sums | yes |" in page and "| multiplication | no |" in page
    with pytest.raises(UserError, match="step-000002: holds other files"):
        export.main([*words, f"out={checkpoint}"])
    with pytest.raises(UserError, match="task.name=sum: unknown task"):
        export.main([*words, f"out={tmp_path / 'none'}", "unseen=sum"])
    assert not (tmp_path / "none").exists()
    with pytest.raises(UserError, match="unseen=sums: the drafter was trained on it"):
        export.main([*words, "unseen=sums"])
    with pytest.raises(UserError, match="must be learned"):
        export.main([*words, "strategy=off"])
    with pytest.raises(UserError, match="nowhere: must be a checkpoint with a trained drafter"):
        export.main(["drafter=nowhere", "out=x"])
    with pytest.raises(UserError, match="drafter: missing"):
        export.main(["out=x"])


def test_the_limits_of_the_run_do_not_limit_the_measurement(checkpoint, tmp_path):
    """With them no pass would speculate, or the strategy would be refused."""
    copy = tmp_path / "run" / "checkpoints" / checkpoint.name
    shutil.copytree(checkpoint, copy)
    saved = (checkpoint.parents[1] / "config.yaml").read_text()
    for key, value in {"verify": "rejection", "spec_max_rows": 1, "num_pages": 5}.items():
        saved, count = re.subn(rf"^  {key}: .*$", f"  {key}: {value}", saved, flags=re.M)
        assert count == 1
    (tmp_path / "run" / "config.yaml").write_text(saved)
    pages = []
    for folder in (checkpoint, copy):
        export.main(command(folder, tmp_path / str(len(pages))))
        pages.append((tmp_path / str(len(pages)) / "README.md").read_text())
    assert pages[0] == pages[1]
    assert "| sums | yes | 1.00 |" not in pages[0]


def test_a_warm_start_is_exported_too(tmp_path, capsys):
    words = [*WORDS, "model.num_layers=3", "drafter.draft_vocab=20", "warmup.drafter_steps=8"]
    words += [
        "warmup.keep=true",
        "warmup.responses=4",
        "warmup.drafter_tokens=64",
        f"run.root={tmp_path}",
    ]
    made = warm_start(load_config(["preset=tiny", *words]), lambda line: None).path
    export.main(command(made, tmp_path / "out"))
    assert "sums: accept length" in capsys.readouterr().out
    assert f"# Draft model of {made.parent.name}" in (tmp_path / "out" / "README.md").read_text()


def test_a_drafter_that_was_read_back_wrong_is_found(checkpoint, tmp_path, monkeypatch):
    """Its tokens are right as any drafter's are."""
    read = export.load_file

    def wrong(*args):
        state = read(*args)
        return state | {"d2t": state["d2t"].flip(0)}

    monkeypatch.setattr(export, "load_file", wrong)
    with pytest.raises(UserError, match="sums: accept length .* when the drafter was read back"):
        export.main(command(checkpoint, tmp_path / "out"))


def test_a_task_that_was_trained_on_is_not_the_unseen_one(tmp_path, capsys):
    checkpoint = train(tmp_path, "task.name=multiplication", "warmup.steps=0")
    export.main(command(checkpoint, tmp_path / "out"))
    out = capsys.readouterr().out
    assert "multiplication: accept length" in out and "addition: accept length" in out


def test_other_files_in_the_output_folder_are_not_overwritten(parts, tmp_path):
    """A checkpoint's own folder would lose the weights of its policy."""
    export.check_out(tmp_path / "new")
    write(parts, tmp_path / "again")
    export.check_out(tmp_path / "again")
    for name in ("notes.txt", "config.json"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).write_text('{"architectures": ["LlamaForCausalLM"]}')
        with pytest.raises(UserError, match="holds other files"):
            export.check_out(folder)
    write(parts, tmp_path / "again")
    with pytest.raises(UserError, match="config: holds another model; choose an empty"):
        write(parts, tmp_path / "config")  # as `Session.save_drafter` does
