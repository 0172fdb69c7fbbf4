import dataclasses

import pytest
from hypothesis import HealthCheck, assume, given, settings, strategies

import tlt_ext
from driver.common.errors import UserError
from driver.common.storage import write_text
from driver.config.fields import field_types
from driver.config.load import (
    Config,
    load_config,
    preset_names,
    preset_title,
    section_types,
    to_yaml,
)
from driver.config.options import OPTIONS, DryRunOptions, GenerateOptions
from driver.config.sections import GrpoConfig
from driver.rollout.request import SamplingParams


@pytest.mark.parametrize("name", ["tiny", "smollm2"])
def test_presets_load_and_differ_from_nothing_but_their_values(name):
    config = load_config([f"preset={name}"])
    assert config.preset == name
    assert config.model.path == name


def test_tiny_is_the_default():
    assert load_config([]) == load_config(["preset=tiny"])
    assert {"tiny", "smollm2"} <= set(preset_names())


def test_runs_are_named_after_the_preset_or_its_file():
    for preset, title in (("1.5b", "1.5b"), ("tiny", "tiny"), ("my/v1.2.yaml", "v1.2")):
        assert preset_title(preset) == title


def test_overrides_win_over_the_preset_wherever_it_stands():
    config = load_config(["run.steps=3", "preset=smollm2", "run.steps=4", "grpo.lr=1e-3"])
    assert config.run.steps == 4
    assert config.grpo.lr == 1e-3
    assert config.model.path == "smollm2"


def test_strings_are_taken_as_typed_and_off_is_not_a_boolean():
    config = load_config(["run.name=007", "bandit.policy=off"])
    assert config.run.name == "007"
    assert config.bandit.policy == "off"
    assert load_config(["spot.mode=off"]).spot.mode == "off"
    assert load_config(["task.path="]).task.path == ""


def test_lists_with_and_without_brackets():
    config = load_config(["engine.strategies=[off,ngram:2,1,3]", "bandit.buckets=1,2,32"])
    assert config.engine.strategies == ["off", "ngram:2,1,3"]
    assert config.bandit.buckets == [1, 2, 32]
    words = ["bandit.policy=16=ngram:4,1,5, 4=learned:8,4,32"]
    mapped = load_config(words).bandit.fixed()
    assert list(map(str, mapped.values())) == ["learned:8,4,32", "ngram:4,1,5"]
    assert list(mapped) == [4, 16]
    assert load_config(["bandit.buckets=[ 3 ]"]).bandit.buckets == [3]


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        load_config([]).run.steps = 3


def read_back(folder, config):
    """The configuration as a resumed run reads it from the run's folder."""
    write_text(folder / "config.yaml", to_yaml(config))
    again = load_config([f"preset={folder / 'config.yaml'}"])
    return dataclasses.replace(again, preset=config.preset)


def test_yaml_round_trip(tmp_path):
    config = load_config(["preset=smollm2", "spot.mode=off", "run.name=1e3", "grpo.lr=1e-7"])
    assert read_back(tmp_path, config) == config


@pytest.mark.parametrize(
    "text",
    [
        r"\${oops}",
        "${oops",
        "${run.seed}",
        "???",
        "null",
        "~",
        "yes",
        "007",
        "1_0",
        " a ",
        "'",
        "#",
    ],
)
def test_text_that_yaml_or_an_interpolation_would_change(tmp_path, text):
    config = load_config([f"run.name={text}", f"task.path={text}"])
    assert config.run.name == config.task.path == text
    assert read_back(tmp_path, config) == config


@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # each example overwrites the file
)
@given(text=strategies.text(), number=strategies.floats(min_value=1e-300, allow_infinity=False))
def test_every_value_is_read_back(tmp_path, text, number):
    try:
        config = load_config([f"task.path={text}", f"grpo.lr={number}"])
    except UserError:
        assume(False)
    assert (config.task.path, config.grpo.lr) == (text, number)
    assert read_back(tmp_path, config) == config


def test_keys_of_an_earlier_version_are_named_and_ignored(tmp_path):
    """A run that an earlier version began is resumed; elsewhere such a key is a mistake."""
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(load_config([])) + "old: {x: 1}\nengine.invariance: true\n")
    with pytest.warns(
        UserWarning, match="config.yaml: old, engine.invariance: no longer a setting"
    ):
        config = load_config([f"preset={path}"], saved=True)
    assert dataclasses.replace(config, preset="tiny") == load_config([])
    with pytest.raises(UserError, match="^old: unknown key"):
        load_config([f"preset={path}"])


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["run.stesp=3"], r"^run.stesp: unknown key; did you mean run.steps\?$"),
        (["lr=3"], r"^lr: unknown key; did you mean \w+.lr\?$"),
        (["samples_per_promt=3"], r"did you mean grpo.samples_per_prompt\?"),
        (["rum=3"], r"^rum: unknown key; did you mean run\?"),
        (["zzzzqq=3"], r"^zzzzqq: unknown key; sections are run, model"),
        (["run=3"], r"^run: is a section; write run.<name>=value, such as run.name$"),
        (["run.prefix=x"], r"^run.prefix: unknown key"),
        (["run.steps"], r"^'run.steps': must be key=value"),
        (["=3"], r"^'=3': must be key=value"),
        (["--help"], r"^'--help': must be key=value, .*; --help lists the keys$"),
        (["run.steps=abc"], r"^run.steps: must be an integer, got 'abc'$"),
        (["run.steps=1.5"], r"^run.steps: must be an integer, got '1.5'$"),
        (["run.steps="], r"^run.steps: must be an integer, got ''$"),
        (["run.steps=[1"], r"^run.steps: must be an integer, got '\[1'$"),
        (["run.steps={a: 1}"], r"^run.steps: must be an integer"),
        (["run.steps=${run.seed}"], r"^run.steps: must be an integer, got '\${run.seed}'$"),
        (["run.steps=" + "9" * 5000], r"^run.steps: must be an integer"),
        (["run.resume=maybe"], r"^run.resume: must be true or false, got 'maybe'$"),
        (["grpo.lr=fast"], r"^grpo.lr: must be a number, got 'fast'$"),
        (["grpo.lr=nan"], r"^grpo.lr: must be a finite number, got nan$"),
        (["grpo.lr=0"], r"^grpo.lr: must be more than 0, got 0"),
        (["model.path=\udcff"], r"^model.path: must be text, got '\\udcff'$"),
        (["run.seed=-1"], r"^run.seed: must be at least 0, got -1"),
        (["bandit.epsilon=1.5"], r"^bandit.epsilon: must be at most 1, got 1.5"),
        (["grpo.advantage=grop"], r"^grpo.advantage: must be one of .*did you mean grpo\?"),
        (
            ["spot.mode=false"],
            r"^spot.mode: must be one of auto, overlapped, serial, coordinated, off",
        ),
        (["run.threads=1025"], r"^run.threads: must be at most 1024, got 1025"),
        (["run.name=a\0b"], r"^run.name: must be text, got 'a\\x00b'"),
        (["sampling.temperature=0"], r"^sampling.temperature: must be at least 0.01, got 0"),
        (["sampling.temperature=1e-8"], r"^sampling.temperature: must be at least 0.01"),
        (["run.device=gpu"], r"^run.device: must be cpu, cuda or cuda:N, got 'gpu'"),
        (["run.name=../x"], r"^run.name: must be a plain folder name"),
        (["model.path="], r"^model.path: empty"),
        (["model.hidden_size=40"], r"^model.hidden_size: must be a multiple of 16, got 40"),
        (["model.hidden_size=1024"], r"^model.hidden_size: must be at most 512, got 1024"),
        (["model.num_layers=1000000"], r"^model.num_layers: must be at most 128, got 1000000$"),
        (["engine.max_batch=100000000"], r"^engine.max_batch: must be at most 16384, got"),
        (["grpo.lr=1e300"], r"^grpo.lr: must be at most 2147483647, got 1e\+300$"),
        (["bandit.buckets=[4,2]"], r"^bandit.buckets: must be rising sizes"),
        (["bandit.buckets=[1,x]"], r"^bandit.buckets\[1\]: must be an integer, got 'x'$"),
        (["bandit.buckets=[0,1]"], r"^bandit.buckets: must be at least 1, got 0"),
        (["bandit.buckets=[]"], r"^bandit.buckets: must be rising sizes, got \[\]"),
        (["engine.strategies=off,learned:8,4"], r"^engine.strategies: strategy 'learned:8,4'"),
        (["engine.strategies=ngram:4,1,5"], r"^engine.strategies: 'off' is missing"),
        (["engine.strategies="], r"^engine.strategies: 'off' is missing"),
        (["bandit.policy=greedy"], r"^bandit.policy: must be beg, .* strategy 'greedy': malformed"),
        (
            ["bandit.policy=ngram:9,1,3"],
            r"^bandit.policy: 'ngram:9,1,3' is not among engine.strategies",
        ),
        (
            ["bandit.policy=1=off, 4=ngram:9,1,3"],
            r"^bandit.policy: 'ngram:9,1,3' is not among engine.strategies",
        ),
        (["grpo.minibatches=257"], r"^grpo.minibatches: must be at most the 256 responses"),
        (
            ["grpo.advantage=rloo", "grpo.samples_per_prompt=1"],
            r"^grpo.samples_per_prompt: must be at least 2, since rloo",
        ),
        (["grpo.samples_per_prompt=1"], r"^grpo.samples_per_prompt: .* since grpo .*reinforce$"),
        (["preset=tiyn"], r"^preset=tiyn: unknown; did you mean tiny\?$"),
        (["preset=mine.json"], r"^preset=mine.json: unknown; .* smollm2, tiny, a FILE.yaml$"),
        (["preset=/nowhere/x.yaml"], r"^preset=/nowhere/x.yaml: cannot be read"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key(words, match):
    with pytest.raises(UserError, match=match) as caught:
        load_config(words)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_every_number_has_a_bound():
    kinds = (*section_types().values(), *OPTIONS.values(), DryRunOptions)
    for kind in kinds:
        for key, declared in field_types(kind).items():
            if declared in (int, float, list[int]):
                value = [10**22] if declared == list[int] else 10**22
                with pytest.raises(UserError, match=rf"^{key}: must be (at most|one of) "):
                    kind(**{key.removeprefix(kind.prefix): value})


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("run: {stesp: 3}", r"^run.stesp: unknown key; did you mean run.steps\?"),
        ("rum: {steps: 3}", r"^rum: unknown key; did you mean run\?"),
        ("rum: {}", r"^rum: unknown key"),
        ("run: 3", r"run must contain keys, got '3'"),
        ("- run", r"must contain sections with keys, got \['run'\]"),
        ("run: [", r"not YAML"),
        ("spot: {mode: no}", r"^spot.mode: must be one of .*got 'no'"),
        ("engine: {strategies: [[x]]}", r"^engine.strategies: strategy 'x': malformed"),
        ("bandit: {buckets: {a: 1}}", r"^bandit.buckets\[0\]: must be an integer, got \"{'a':\""),
        ("run: {steps: null}", r"^run.steps: must be an integer, got 'null'"),
        ("run: {steps: }", r"^run.steps: must be an integer, got ''"),
        ("run: {steps: 1, steps: 2}", r"not YAML \(steps is given twice\)"),
        ("run: {steps: 1}\nrun: {seed: 2}", r"not YAML \(run is given twice\)"),
        ("run.steps: 1\nrun: {steps: 2}", r"run.steps is given twice"),
        ("[" * 2000, r"not YAML"),
        ("run: &a\n  steps: *a", r"not YAML"),
    ],
)
def test_a_mistake_in_a_preset_file_names_the_key(tmp_path, text, match):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=match):
        load_config([f"preset={path}"])


def test_unquoted_off_in_a_preset_file_is_the_word(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("spot: {mode: off}\nengine: {strategies: [off]}\nbandit: {policy: off}\n")
    config = load_config([f"preset={path}"])
    assert (config.spot.mode, config.engine.strategies) == ("off", ["off"])
    assert config.bandit.policy == "off" and not config.engine.needs_drafter


def test_sections_built_in_code_are_checked():
    with pytest.raises(UserError, match="grpo.epochs: must be at least 1, got 0"):
        GrpoConfig(epochs=0)
    assert Config() == Config()
    assert Config().bandit.buckets is not Config().bandit.buckets


def test_the_bound_of_threads_is_that_of_the_core():
    assert load_config(["run.threads=1024"]).run.threads == 1024
    with pytest.raises(ValueError, match="expected 0 to 1024"):
        tlt_ext.set_num_threads(1025)


def test_requests_have_no_temperature_that_the_trainer_would_divide_by_and_the_engine_not():
    """Below 1e-6 the kernels decode greedily."""
    for temperature in (0.0, 0.01, 2.0):
        assert SamplingParams(temperature).temperature == temperature
    for temperature in (1e-8, 0.009, -1.0, float("nan")):
        with pytest.raises(UserError, match="temperature: must be 0 .greedy. or at least 0.01"):
            SamplingParams(temperature)
        with pytest.raises(UserError, match="temperature: must be"):
            GenerateOptions(temperature=temperature)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"top_k": -1}, "top_k: must be 0"),
        ({"top_k": 2**31}, "top_k: must be 0"),
        ({"top_p": 0.0}, "top_p: must be above 0"),
        ({"top_p": 1.5}, "top_p: must be above 0"),
        ({"top_p": float("nan")}, "top_p: must be above 0"),
        ({"max_new_tokens": -1}, "max_new_tokens: must be 0 or more, got -1"),
        ({"max_turn_tokens": -1}, "max_turn_tokens: must be 0"),
        ({"stop_ids": (5, 2**31)}, "stop_ids: must be ids of tokens, got 2147483648"),
    ],
)
def test_requests_have_no_settings_that_an_op_would_misread(settings, message):
    with pytest.raises(UserError, match=message):
        SamplingParams(**settings)
