import dataclasses

import pytest

from driver.common.errors import UserError
from driver.config.load import Config, GrpoConfig, load_config, preset_names, to_yaml


@pytest.mark.parametrize("name", ["tiny", "smollm2"])
def test_presets_load_and_differ_from_nothing_but_their_values(name):
    config = load_config([f"preset={name}"])
    assert config.preset == name
    assert config.model.path == name


def test_tiny_is_the_default():
    assert load_config([]) == load_config(["preset=tiny"])
    assert {"tiny", "smollm2"} <= set(preset_names())


def test_overrides_win_over_the_preset_wherever_it_stands():
    config = load_config(["run.steps=3", "preset=smollm2", "run.steps=4", "grpo.lr=1e-3"])
    assert config.run.steps == 4
    assert config.grpo.lr == 1e-3
    assert config.model.path == "smollm2"


def test_strings_are_taken_as_typed_and_off_is_not_a_boolean():
    config = load_config(["run.name=007", "bandit.policy=static", "bandit.static=off"])
    assert config.run.name == "007"
    assert config.bandit.static == "off"
    assert load_config(["spot.mode=off"]).spot.mode == "off"
    assert load_config(["task.path="]).task.path == ""


def test_lists_with_and_without_brackets():
    config = load_config(["engine.strategies=[off,ngram:2,1,3]", "bandit.buckets=1,2,32"])
    assert config.engine.strategies == ["off", "ngram:2,1,3"]
    assert config.bandit.buckets == [1, 2, 32]
    mapped = load_config(["bandit.map=4=learned:8,4,32,16=ngram:4,1,5"]).bandit
    assert mapped.map == ["4=learned:8,4,32", "16=ngram:4,1,5"]
    assert load_config(["drafter.feature_layers=[]"]).drafter.feature_layers == []


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        load_config([]).run.steps = 3


def test_yaml_round_trip(tmp_path):
    config = load_config(["preset=smollm2", "spot.mode=off", "run.name=1e3", "grpo.lr=1e-7"])
    saved = tmp_path / "config.yaml"
    saved.write_text(to_yaml(config))
    again = load_config([f"preset={saved}"])
    assert dataclasses.replace(again, preset="smollm2") == config


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["run.stesp=3"], r"^run.stesp: unknown key; did you mean run.steps\?$"),
        (["lr=3"], r"^lr: unknown key; did you mean \w+.lr\?$"),
        (["samples_per_promt=3"], r"did you mean grpo.samples_per_prompt\?"),
        (["rum=3"], r"^rum: unknown key; did you mean run\?"),
        (["zzzzqq=3"], r"^zzzzqq: unknown key; sections are run, model"),
        (["run=3"], r"^run: is a section; write run.<name>=value, as run.name$"),
        (["run.prefix=x"], r"^run.prefix: unknown key"),
        (["run.steps"], r"^'run.steps': wanted key=value"),
        (["=3"], r"^'=3': wanted key=value"),
        (["--help"], r"^'--help': wanted key=value"),
        (["run.steps=abc"], r"^run.steps: .*'abc'.*Integer"),
        (["run.steps=1.5"], r"^run.steps: .*'1.5'"),
        (["run.steps="], r"^run.steps: .*None"),
        (["run.steps=[1"], r"^run.steps: cannot read the value '\[1'"),
        (["run.steps={a: 1}"], r"^run.steps: "),
        (["run.resume=maybe"], r"^run.resume: .*'maybe'"),
        (["grpo.lr=fast"], r"^grpo.lr: .*'fast'"),
        (["grpo.lr=nan"], r"^grpo.lr: wanted a finite number"),
        (["grpo.lr=0"], r"^grpo.lr: wanted more than 0, got 0"),
        (["run.seed=-1"], r"^run.seed: wanted at least 0, got -1"),
        (["sampling.top_p=1.5"], r"^sampling.top_p: wanted at most 1, got 1.5"),
        (["grpo.advantage=grop"], r"^grpo.advantage: wanted one of .*did you mean grpo\?"),
        (
            ["spot.mode=false"],
            r"^spot.mode: wanted one of auto, overlapped, serial, coordinated, off",
        ),
        (["run.device=gpu"], r"^run.device: wanted cpu, cuda or cuda:N, got 'gpu'"),
        (["run.name=../x"], r"^run.name: wanted a plain folder name"),
        (["run.name=${oops"], r"^run.name: "),
        (["model.path="], r"^model.path: empty"),
        (["model.num_kv_heads=3"], r"^model.num_kv_heads: wanted a divisor"),
        (["model.head_dim=7"], r"^model.head_dim: wanted at least 8"),
        (["model.head_dim=12"], r"^model.head_dim: wanted a multiple of 8"),
        (["bandit.buckets=[4,2]"], r"^bandit.buckets: wanted rising sizes"),
        (["bandit.buckets=[1,x]"], r"^bandit.buckets\[1\]: .*'x'"),
        (["bandit.buckets=[0,1]"], r"^bandit.buckets: wanted at least 1, got 0"),
        (["drafter.feature_layers=[1,2]"], r"^drafter.feature_layers: wanted three layers"),
        (["engine.strategies=off,learned:8,4"], r"^engine.strategies: strategy 'learned:8,4'"),
        (["engine.strategies=ngram:4,1,5"], r"^engine.strategies: 'off' is missing"),
        (["engine.invariant=false"], r"^engine.invariant: wanted true"),
        (["engine.strategies="], r"^engine.strategies: 'off' is missing"),
        (["engine.draft_temperature=0"], r"^engine.draft_temperature: wanted at least 0.01, got 0"),
        (
            ["engine.score_temperature=1e-7"],
            r"^engine.score_temperature: wanted 0 or at least 1e-06, got 1e-07",
        ),
        (["bandit.static=greedy"], r"^bandit.static: strategy 'greedy': malformed"),
        (
            ["bandit.policy=static", "bandit.static=ngram:9,1,3"],
            r"^bandit.static: 'ngram:9,1,3' is not among engine.strategies",
        ),
        (
            ["bandit.policy=map", "bandit.map=1=off, 4=ngram:9,1,3"],
            r"^bandit.map: 'ngram:9,1,3' is not among engine.strategies",
        ),
        (["drafter.enabled=false"], r"^engine.strategies: 'learned:.*needs a drafter"),
        (
            ["drafter.enabled=false", "engine.strategies=off hybrid:4,4,16"],
            r"^engine.strategies: 'hybrid:4,4,16' needs a drafter",
        ),
        (["grpo.minibatches=257"], r"^grpo.minibatches: wanted at most the 256 responses"),
        (
            ["grpo.advantage=rloo", "grpo.samples_per_prompt=1"],
            r"^grpo.samples_per_prompt: rloo compares responses to one prompt",
        ),
        (["grpo.samples_per_prompt=1"], r"^grpo.samples_per_prompt: grpo compares .*reinforce$"),
        (["preset=tiyn"], r"^preset=tiyn: unknown; did you mean tiny\? there are"),
        (["preset=/nowhere/x.yaml"], r"^preset=/nowhere/x.yaml: cannot be read"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key(words, match):
    with pytest.raises(UserError, match=match) as caught:
        load_config(words)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("run: {stesp: 3}", r"^run.stesp: unknown key; did you mean run.steps\?"),
        ("rum: {steps: 3}", r"^rum: unknown key; did you mean run\?"),
        ("rum: {}", r"^rum: unknown key"),
        ("run: 3", r"run wants keys below it, got 3"),
        ("- run", r"wanted sections with keys, got list"),
        ("run: [", r"not YAML"),
        ("spot: {mode: no}", r"^spot.mode: wanted one of .*got 'no'"),
        ("engine: {strategies: [[1]]}", r"^engine.strategies: wanted a list of str"),
    ],
)
def test_a_mistake_in_a_preset_file_names_the_key(tmp_path, text, match):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=match):
        load_config([f"preset={path}"])


def test_unquoted_off_in_a_preset_file_is_the_word(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("spot: {mode: off}\nengine: {strategies: [off]}\ndrafter: {enabled: false}\n")
    config = load_config([f"preset={path}"])
    assert (config.spot.mode, config.engine.strategies) == ("off", ["off"])
    assert config.drafter.enabled is False


def test_sections_built_in_code_are_checked():
    with pytest.raises(UserError, match="grpo.epochs: wanted at least 1, got 0"):
        GrpoConfig(epochs=0)
    assert Config() == Config()
    assert Config().bandit.buckets is not Config().bandit.buckets
