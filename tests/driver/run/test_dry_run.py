"""`--dry-run`: what it says, that it refuses, and that it makes nothing."""

import json
from dataclasses import replace

import pytest

from driver.common.errors import UserError
from driver.config.load import PRESETS, load_config
from driver.model import fetch
from driver.model.tiny import build_tokenizer
from driver.policy.weights import SUM_BYTES
from driver.run import dry_run, start
from driver.run.fit import changed, check_fits, decided, fits, fitting
from driver.run.footprint import policy_spec
from driver.session.parts import build_rollout
from driver.train import main
from tests.driver.hugging_face import LLAMA_70B, QWEN2_1_5B, QWEN2_7B, QWEN2_32B, save_model


def shape_of(config):
    return dry_run.run_shape(config, dry_run.shape_folder(config))


@pytest.fixture
def seven_b(tmp_path):
    """A folder with nothing but a shape."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN2_7B))
    return f"model.path={tmp_path}"


def test_the_command_reports_and_makes_no_run(tmp_path, capsys):
    main(["--dry-run", f"run.root={tmp_path}", "memory_gb=4"])
    text = capsys.readouterr().out
    for part in ("policy", "Adam", "KV pages", "data buffer", "logits chunk"):
        assert part in text
    assert "with grpo.checkpointing=true: peak" in text
    assert list(tmp_path.iterdir()) == []


def test_a_shape_without_weights_is_refused_with_the_numbers(seven_b):
    lines = []
    words = ["preset=h100", seven_b, "grpo.micro_batch_tokens=65536", "memory_gb=80"]
    wanted = r"needs \d{3}\.\d\d GB in the phase 'update, layers', there are 80.00 .*is activations"
    with pytest.raises(UserError, match=wanted):
        dry_run.dry_run(words, lines.append)
    assert lines[0] == "Qwen2ForCausalLM, 7615.6 M parameters, bfloat16"
    assert "    policy                   30.462" in lines
    dry_run.dry_run([*words[:3], "memory_gb=620"], lines.append)
    dry_run.dry_run([*words[:3], "memory_gb=540", "ranks=8", "grpo.shard=true"], lines.append)
    assert "    policy                    3.808" in lines
    shared = ["engine.tensor_parallel=4", "ranks=8"]
    dry_run.dry_run([*words[:3], "memory_gb=540", *shared], lines.append)
    own = [float(line.split()[-1]) for line in lines if "engine weights" in line]
    assert own[-2] > 2 * own[-1]
    dry_run.dry_run([*words[:3], "memory_gb=580", "grpo.offload=all"], lines.append)
    assert "  in host memory            121.850" in lines
    dry_run.dry_run([*words[:3], "memory_gb=580", "grpo.offload=moments"], lines.append)
    assert "  in host memory             60.925" in lines


@pytest.mark.parametrize(
    ("preset", "config", "memory_gb", "responses"),
    [("7b", QWEN2_7B, 141, 64), ("1.5b", QWEN2_1_5B, 80, 128)],
)
def test_the_presets_of_models_that_people_train_fit_their_card(
    tmp_path, preset, config, memory_gb, responses
):
    words = [f"preset={preset}", f"memory_gb={memory_gb}"]
    with pytest.raises(UserError, match="model.path: empty"):
        dry_run.dry_run(words, lambda line: None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    lines = []
    dry_run.dry_run([*words, f"model.path={tmp_path}"], lines.append)
    (peak,) = [float(line.split()[1]) for line in lines if line.startswith("  peak ")]
    text = (PRESETS / f"{preset}.yaml").read_text()
    assert f"predicts a peak of {peak:.0f} GB" in text.replace("\n# ", " ")
    made = load_config([words[0], f"model.path={tmp_path}"])
    assert made.grpo.prompts_per_step * made.grpo.samples_per_prompt == responses
    assert made.engine.max_batch == responses and made.sampling.max_new_tokens == 4096
    with pytest.raises(UserError, match=r"needs \d+\.\d\d GB"):
        other = [
            "grpo.checkpointing=false",
            "engine.free_in_update=false",
            f"model.path={tmp_path}",
        ]
        dry_run.dry_run([*words, *other], lambda line: None)


def test_the_peak_without_checkpointing_is_of_the_run_that_is_recommended(seven_b):
    """With its own choice for `auto`: that run frees the KV cache in the update, this one not."""
    lines = []
    dry_run.dry_run(["preset=7b", seven_b, "memory_gb=141"], lines.append)
    assert lines[-2:-1] == ["faster, and fits 141 GB:"]
    assert lines[-1].endswith("grpo.checkpointing=false")
    (line,) = [line for line in lines if "with grpo.checkpointing=false: peak" in line]
    assert float(line.split()[-1]) < 141


def test_a_run_is_refused_with_the_same_numbers_before_it_takes_anything(tmp_path, monkeypatch):
    monkeypatch.setattr(start, "use_device", lambda device: None)
    monkeypatch.setattr(dry_run, "memory_gb", lambda device: 0.25)
    words, refusals = ["run.device=cuda", "model.dtype=bfloat16", f"run.root={tmp_path}"], []
    for command in (lambda: dry_run.dry_run(words, lambda line: None), lambda: main(words)):
        with pytest.raises(UserError, match=r"needs .* GB .*, there are 0\.25 GB;") as refusal:
            command()
        refusals.append(str(refusal.value))
    assert refusals[0] == refusals[1]
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(dry_run, "memory_gb", lambda device: 80.0)
    dry_run.check_run(load_config(words), None)
    monkeypatch.setattr(dry_run, "memory_gb", lambda device: 0.25)
    words += ["run.check_memory=false"]
    dry_run.check_run(load_config(words), None)
    with pytest.raises(UserError, match=r"exceed the context of 1024"):
        dry_run.check_run(load_config([*words, "sampling.max_new_tokens=1020"]), None)
    with pytest.raises(UserError, match=r"exceed the 100 of a request; .* raise engine.max_len"):
        dry_run.check_run(load_config([*words, "engine.max_len=100"]), None)


def test_checkpointing_and_less_to_hold_make_it_smaller(seven_b):
    def peak(*words):
        config = load_config(["preset=h100", seven_b, *words])
        return shape_of(config).footprint(config).peak

    whole = peak()
    for word in (
        "grpo.checkpointing=true",
        "engine.num_pages=4096",
        "grpo.micro_batch_tokens=8192",
        "spot.buffer_tokens=8192",
        "engine.strategies=off",
    ):
        assert peak(*word.split(" ")) < whole
    assert peak("grpo.kl_coef=0.1") > whole


def test_a_checkpoint_is_measured_with_its_own_tokenizer(tmp_path):
    save_model(tmp_path, "qwen3", max_position_embeddings=1024)
    config = load_config([f"model.path={tmp_path}"])
    assert shape_of(config).prompt_len == dry_run.PROMPT_TOKENS  # it has no tokenizer
    build_tokenizer().save_pretrained(tmp_path)
    assert shape_of(config).prompt_len == shape_of(load_config([])).prompt_len < 20


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["memory_gb=much"], "memory_gb: must be a number, got 'much'"),
        (["prompt_tokens=-5"], "prompt_tokens: must be at least 0"),
        (["memory_gb=inf"], "memory_gb: must be a finite number, got inf"),
        (["run.stepps=1"], "run.stepps: unknown key"),
        (["sampling.max_new_tokens=5000"], "exceed the context of 1024"),
        (
            ["engine.max_len=100"],
            r"max_new_tokens=192 exceed the 100 of a request; .* raise engine.max_len",
        ),
        ([f"engine.num_pages={10**22}"], "engine.num_pages: must be at most 2147483647, got 10"),
        (["engine.num_pages=9"], r"engine.num_pages=9: one request of \d+ tokens needs \d+ pages"),
    ],
)
def test_mistakes(words, message):
    with pytest.raises(UserError, match=message):
        dry_run.dry_run(words, lambda line: None)


@pytest.mark.parametrize(
    ("shape", "words", "message"),
    [
        ({"hidden_size": 2688}, [], "model.path: head_dim is 96; .* must be 64 or 128; set model"),
        ({"num_key_value_heads": 2}, [], "28 heads share 2 .* at most 8 heads may share one"),
        ({}, ["engine.page_size=8"], "engine.page_size=8: .* must be one of 16, 32, 64, 128"),
    ],
)
def test_what_the_kernels_of_a_card_do_not_take_is_refused(tmp_path, shape, words, message):
    """By the dry run, by the check before a run, and by a session."""
    (tmp_path / "config.json").write_text(json.dumps({**QWEN2_7B, **shape}))
    words = ["preset=7b", f"model.path={tmp_path}", *words]
    with pytest.raises(UserError, match=message):
        dry_run.dry_run([*words, "memory_gb=141"], lambda line: None)
    build_tokenizer().save_pretrained(tmp_path)
    config = load_config([*words, "task.difficulty=1", "run.check_memory=false"])
    with pytest.raises(UserError, match=message):
        dry_run.check_run(config, tmp_path)
    with pytest.raises(UserError, match=message):
        build_rollout(config, policy_spec(config, tmp_path), {}, longest=100)
    config = load_config([*words, "run.check_memory=false", "model.dtype=float32"])
    dry_run.check_run(config, tmp_path)
    config = load_config([*words, "run.check_memory=false", "run.device=cpu"])
    dry_run.check_run(config, tmp_path)


def test_what_no_shorter_response_would_mend_is_refused_first(tmp_path):
    shape = {**QWEN2_7B, "hidden_size": 2688, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    with pytest.raises(UserError, match="model.path: head_dim is 96"):
        dry_run.dry_run(["preset=7b", f"model.path={tmp_path}"], lambda line: None)


@pytest.mark.parametrize("text", ["x", "{}", '{"architectures": ["GPT2LMHeadModel"]}'])
def test_a_damaged_or_foreign_shape_is_one_line(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match="config.json|architecture"):
        dry_run.dry_run([f"model.path={tmp_path}"], lambda line: None)


# ---- what fits ----------------------------------------------------------------------------------


def test_a_run_of_an_unknown_machine_fits_and_a_refusal_names_settings_that_help(seven_b):
    config = load_config(["preset=h100", seven_b])
    shape = shape_of(config)
    check_fits(config, shape, 0)  # a machine whose memory is not known
    peak = shape.footprint(config).peak / 1e9
    check_fits(config, shape, peak + 0.01)
    wanted = "there are .* GB; .*it fits with engine.free_in_update=true;.*run.check_memory"
    with pytest.raises(UserError, match=wanted):
        check_fits(config, shape, peak - 0.01)
    with pytest.raises(UserError, match="GB; use more ranks; .*run.check_memory"):
        check_fits(config, shape, 15.0)  # less than the engine's weights


def test_moments_that_exceed_the_host_s_memory_are_refused(seven_b):
    config = load_config(["preset=7b", seven_b])
    shape = shape_of(config)
    host_gb = shape.footprint(config).host / 1e9
    assert host_gb == pytest.approx(8e-9 * shape.spec.num_parameters)
    check_fits(config, shape, 141, host_gb)
    with pytest.raises(
        UserError, match="grpo.offload=moments: it keeps 60.92 GB on the host, which"
    ):
        check_fits(config, shape, 141, host_gb - 0.01)


def test_ranks_of_a_machine_share_its_memory(monkeypatch):
    config = load_config(["run.device=cuda", "model.dtype=bfloat16", "grpo.offload=moments"])
    _, shape = dry_run.check_run(config, None, 2)
    host_gb = shape.footprint(config).host / 1e9
    sizes = {"cpu": 1.5 * host_gb, "cuda": 80.0}
    monkeypatch.setattr(dry_run, "memory_gb", sizes.__getitem__)
    dry_run.check_run(config, None, 2)  # on two machines
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(UserError, match="GB for a rank; use more machines or another"):
        dry_run.check_run(config, None, 2)


def test_pages_are_released_in_the_update_if_the_run_would_not_fit_otherwise(seven_b):
    config = load_config(["preset=7b", seven_b])
    shape = shape_of(config)
    whole = shape.footprint(config)
    pages = sum(whole.always[part] for part in ("KV pages", "feature pages", "drafter KV pages"))
    for limit_gb, word in [(0, "false"), (121, "false"), (120, "true"), (60, "true")]:
        made = decided(config, shape, limit_gb)
        assert made.engine.free_in_update == word
        parts = shape.footprint(made)
        if word == "true":
            assert sum(parts.phases["rollout"].values()) == pages
            assert parts.peak == whole.peak - pages  # of an update
    here = changed(config, {"run.device": "cpu"})
    assert decided(here, shape, 60).engine.free_in_update == "false"
    fixed = changed(config, {"engine.free_in_update": "false"})
    assert decided(fixed, shape, 60).engine.free_in_update == "false"


def test_ranks_share_the_optimizer_if_the_run_would_not_fit_otherwise(seven_b):
    words = ["preset=7b", seven_b, "grpo.offload=none"]
    config = load_config(words)
    shape = replace(shape_of(config), ranks=2)
    choices = [
        (182, "false", "false"),
        (150, "true", "false"),
        (120, "true", "true"),
        (20, "true", "true"),
    ]
    for limit_gb, shard, freed in choices:
        made = decided(config, shape, limit_gb)
        assert (made.grpo.shard, made.engine.free_in_update) == (shard, freed), limit_gb
    whole, parted = (shape.footprint(changed(config, {"grpo.shard": s})) for s in ("false", "true"))
    assert whole.always["policy"] == 4 * shape.spec.num_parameters
    assert whole.always["policy"] == pytest.approx(2 * parted.always["policy"], rel=1e-4)
    assert whole.phases["optimizer"]["sums of ranks"] == SUM_BYTES
    moved = changed(config, {"grpo.offload": "moments"})
    assert decided(moved, shape, 999).grpo.shard == "true"
    with pytest.raises(UserError, match="it fits with grpo.shard=true;"):
        check_fits(changed(config, {"grpo.shard": "false"}), shape, 150)


@pytest.mark.parametrize(
    ("words", "limit_gb", "wanted"),
    [
        (["grpo.offload=none"], 141, {"grpo.offload": "moments"}),
        ([], 80, {"grpo.offload": "all", "grpo.micro_batch_tokens": 32768}),
        (["grpo.checkpointing=false"], 110, {"grpo.checkpointing": True}),
        (["grpo.checkpointing=false"], 125, {"grpo.micro_batch_tokens": 4352}),
        (["sampling.max_new_tokens=16384"], 110, {"engine.max_batch": 32}),
    ],
)
def test_the_settings_that_fit_and_cost_least_are_found(seven_b, words, limit_gb, wanted):
    words = ["preset=7b", seven_b, *words]
    config = load_config(words)
    shape = shape_of(config)
    config = decided(config, shape, limit_gb)
    found = fitting(config, shape, limit_gb)
    assert found == wanted
    assert fits(changed(config, found), shape, limit_gb) and not fits(config, shape, limit_gb)


def test_ranks_that_cannot_hold_the_engine_are_told_to_share_it(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    lines, least = [], ["engine.max_batch=1", "grpo.offload=all", "engine.free_in_update=true"]
    words = ["preset=7b", f"model.path={tmp_path}", *least, "ranks=8", "memory_gb=141"]
    with pytest.raises(UserError, match="it fits with engine.tensor_parallel=2;"):
        dry_run.dry_run(words, lines.append)
    start = f"  torchrun --standalone --nproc-per-node 8 -m driver.train {' '.join(words[:-2])}"
    assert lines[-2:] == ["fits 141 GB:", f"{start} engine.tensor_parallel=2"]
    dry_run.dry_run([*words, "engine.tensor_parallel=2"], lines.append)
    with pytest.raises(UserError, match="use more ranks;"):  # groups refuse turns
        dry_run.dry_run([*words, "task.name=calculator"], lines.append)


def test_the_command_that_fits_is_printed(seven_b):
    lines = []
    with pytest.raises(UserError, match="it fits with grpo.offload=moments; "):
        words = ["preset=7b", seven_b, "memory_gb=141", "prompt_tokens=300", "grpo.offload=none"]
        dry_run.dry_run(["--dry-run", *words], lines.append)
    start = f"  python -m driver.train preset=7b {seven_b} "
    assert lines[-2:] == ["fits 141 GB:", start + "grpo.offload=moments"]
    more, words = [], [*lines[-1].split()[3:], "prompt_tokens=300"]
    dry_run.dry_run([*words, "memory_gb=125"], more.append)
    assert not any("driver.train" in line for line in more)
    dry_run.dry_run([*words, "memory_gb=160"], more.append)  # with its pages released
    assert more[-2:] == [
        "faster, and fits 160 GB:",
        f"  python -m driver.train preset=7b {seven_b} grpo.offload=none",
    ]
    dry_run.dry_run([*words, "memory_gb=250"], more.append)
    assert more[-1].endswith(f"{seven_b} grpo.offload=none grpo.checkpointing=false")


# ---- what a dry run takes -----------------------------------------------------------------------


def test_nothing_is_downloaded(tmp_path, monkeypatch):
    def download(*args, **options):
        raise AssertionError("a download")

    monkeypatch.setattr(fetch, "_from_hub", download)
    monkeypatch.setattr(fetch, "_download_wheel", download)
    lines = []
    dry_run.dry_run(["preset=h100", "memory_gb=80", f"model.cache={tmp_path}"], lines.append)
    assert lines[0] == "LlamaForCausalLM, 134.5 M parameters, bfloat16"
    assert any("prompts of 256 tokens" in line for line in lines)
    assert list(tmp_path.iterdir()) == []


def test_ranks_share_the_weights_of_the_update(tmp_path):
    """A 32B and a 70B shape: weights of the update are shared, those of the engine are not."""
    for config in (QWEN2_32B, LLAMA_70B):
        (tmp_path / "config.json").write_text(json.dumps(config))
        words = ["preset=7b", f"model.path={tmp_path}", "grpo.prompts_per_step=64"]
        words.append("engine.free_in_update=true")
        policy, engine = [], []
        for ranks in (8, 16, 64):
            lines = []
            dry_run.dry_run([*words, f"ranks={ranks}", "memory_gb=999"], lines.append)
            rows = {line[:26].strip(): line[26:].split() for line in lines[2:]}
            policy.append(float(rows["policy"][0]))
            engine.append(float(rows["engine weights"][0]))
        assert policy[0] == pytest.approx(2 * policy[1], abs=2e-3)
        assert policy[0] == pytest.approx(8 * policy[2], abs=5e-3)
        assert len(set(engine)) == 1


def test_ranks_beyond_the_prompts_are_refused():
    with pytest.raises(UserError, match="33 ranks for .*=32: each needs one prompt"):
        dry_run.dry_run(["ranks=33"], lambda line: None)
    with pytest.raises(UserError, match="66 ranks for .*=32: each group of 2 needs one"):
        dry_run.dry_run(["ranks=66", "engine.tensor_parallel=2"], lambda line: None)
    dry_run.dry_run(["ranks=32"], lambda line: None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.dtype=float16"], "model.dtype=float16: gradients underflow"),
        (["spot.mode=coordinated"], "spot.mode=coordinated: expected several ranks, got one"),
        (
            ["engine.tensor_parallel=2", "ranks=2", "task.name=calculator"],
            "engine.tensor_parallel=2: task calculator has turns",
        ),
    ],
)
def test_what_a_run_refuses_is_refused(words, message):
    with pytest.raises(UserError, match=message):
        dry_run.dry_run(words, lambda line: None)
