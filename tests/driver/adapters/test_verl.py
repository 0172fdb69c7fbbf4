"""verl's rollout `tlt`: its server, its weight transfer, and two steps of verl's own trainer."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from driver.config.sections import ModelConfig
from driver.model import tiny

ROOT = Path(__file__).resolve().parents[3]
MISSING = [m for m in ("verl", "ray", "transfer_queue") if not importlib.util.find_spec(m)]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"needs the extra `verl`: no {' '.join(MISSING)}"),
]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
# verl has no platform without an accelerator, and registers its FSDP engine for cuda and npu only.
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",
    "VERL_USE_EXTERNAL_MODULES": "tests.driver.adapters.verl_cpu,driver.adapters.verl",
}


def python(folder, *words, seconds=400):
    """Runs a program beside Ray; its output."""
    log = folder / "log.txt"
    with log.open("w") as out:
        subprocess.run(
            [sys.executable, "-m", *words],
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT},
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=seconds,
        )
    return log.read_text()


def save_model(folder):
    tokenizer = tiny.build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    shape = ModelConfig(num_layers=2, hidden_size=32)
    tiny.build_policy(shape, seed=1).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verl")
    save_model(folder)
    output = python(folder, "tests.driver.adapters.verl_server", str(folder))
    assert (folder / "seen.json").exists(), output
    return json.loads((folder / "seen.json").read_text())


def flat(rows):
    return [value for row in rows for value in row]


def logprobs(outputs):
    return flat(output["logprobs"] for output in outputs)


def test_concurrent_requests_have_the_tokens_of_lone_ones(seen):
    assert seen["together"] == seen["alone"]
    assert len({tuple(output["tokens"]) for output in seen["together"]}) > 12
    assert {output["stop"] for output in seen["together"]} == {"completed"}


def test_logprobs_are_those_of_the_model(seen):
    assert logprobs(seen["together"]) == pytest.approx(flat(seen["own"]), abs=1e-4)


def test_a_request_is_admitted_while_others_run(seen):
    assert len(seen["late"]["tokens"]) == 4 and seen["late"]["stop"] == "completed"
    assert seen["aborted_count"] == 4  # the long ones that were sent before it still ran


def test_aborted_requests_go_on_to_the_same_tokens(seen):
    for aborted, resumed, whole in zip(
        seen["aborted"], seen["resumed"], seen["whole"], strict=True
    ):
        assert aborted["stop"] == "aborted" and len(aborted["tokens"]) < len(whole["tokens"])
        assert aborted["tokens"] + resumed["tokens"] == whole["tokens"]
        assert aborted["logprobs"] + resumed["logprobs"] == whole["logprobs"]


def test_requests_wait_or_are_rejected_while_generation_is_stopped(seen):
    assert not seen["held_early"] and seen["held"]["stop"] == "completed"
    for name in ("rejected", "parked"):
        assert seen[name]["stop"] == "aborted" and seen[name]["tokens"] == []


def test_a_response_ends_with_the_budget_of_its_turns_or_a_stop_token_of_the_request(seen):
    assert len(seen["turn"]["tokens"]) == 16 + 24 - 30
    whole, stops = seen["whole"][0]["tokens"], seen["stops"]
    *body, last = seen["stopped"]["tokens"]
    assert last in stops and not set(body) & set(stops) and len(body) < len(whole)


def test_new_weights_arrive_with_their_version(seen):
    assert logprobs(seen["updated"]) == pytest.approx(flat(seen["updated_own"]), abs=1e-4)
    assert {output["version"] for output in seen["updated"]} == {7}
    assert {output["version"] for output in seen["together"]} == {0}


def test_what_cannot_run_is_an_error_of_the_request(seen):
    setting, audio, too_long, few, twin, drafter = seen["errors"]
    assert "no sampling settings {'min_p': 0.1}" in setting
    assert "a prompt of 400 tokens leaves no room" in too_long and "is missing" in few
    assert "there is no drafter to save" in drafter
    assert "request twin runs already" in twin and "from texts alone, got ['audio_data']" in audio


def test_settings_that_the_engine_lacks_are_refused(seen):
    expected = ["tensor_model_parallel_size=2", "quantization=fp8", "routing_replay.*priority"]
    expected += 2 * ["log-probs.*calculate_log_probs=False"]
    expected += ["logprobs_mode=raw_logprobs with temperature=0.5", "no reward", "no teacher"]
    assert len(seen["refused"]) == len(expected)
    assert all(map(re.search, expected, seen["refused"]))


REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    return sum(map(str.isdigit, solution_str)) / max(1, len(solution_str))
"""


SINGLE = "{param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}"


def test_the_trainer_of_verl_makes_two_steps(tmp_path):
    import pandas

    save_model(tmp_path)
    (tmp_path / "reward.py").write_text(REWARD)
    rows = [
        {
            "data_source": "digits",
            "prompt": [{"role": "user", "content": f"{a}+{b}="}],
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"index": 10 * a + b},
        }
        for a in range(2, 6)
        for b in range(2, 6)
    ]
    pandas.DataFrame(rows).to_parquet(tmp_path / "data.parquet")
    script = (ROOT / "examples" / "verl_grpo.sh").read_text()
    words = re.findall(r"^  (\S+=\S*?)(?: \\)?$", script, flags=re.M)
    assert "actor_rollout_ref.rollout.name=tlt" in words
    small = [
        f"data.train_files={tmp_path}/data.parquet",
        f"data.val_files={tmp_path}/data.parquet",
        "data.train_batch_size=4",
        "data.max_prompt_length=16",
        "data.max_response_length=16",
        "data.dataloader_num_workers=0",
        f"actor_rollout_ref.model.path={tmp_path}/model",
        "actor_rollout_ref.model.use_remove_padding=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=eager",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "actor_rollout_ref.actor.use_torch_compile=False",
        "actor_rollout_ref.actor.fsdp_config.model_dtype=float32",
        f"++actor_rollout_ref.actor.fsdp_config.mixed_precision={SINGLE}",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.dtype=float32",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=1",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
        f"reward.custom_reward_function.path={tmp_path}/reward.py",
        "reward.num_workers=1",
        "trainer.device=cpu",
        "trainer.total_training_steps=2",
        f"trainer.default_local_dir={tmp_path}/checkpoints",
        f"hydra.run.dir={tmp_path}/hydra",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "+ray_kwargs.ray_init.num_gpus=1",
        "ray_kwargs.ray_init.num_cpus=32",  # of the actors, most of which are idle
    ]
    names = {word.split("=")[0] for word in small}
    words = [word for word in words if word.split("=")[0] not in names]
    log = python(tmp_path, "verl.trainer.main_ppo", *words, *small)
    steps = re.findall(r"step:(\d+) - (.*)", log)
    assert [int(step) for step, _ in steps] == [1, 2], log[-4000:]
    for _, line in steps:
        metrics = dict(re.findall(r"(\S+):(\S+)", line))
        # The rollout's probabilities against those of the trainer: the weights arrived.
        assert float(metrics["training/rollout_probs_diff_max"]) < 1e-5, line
        assert float(metrics["actor/grad_norm"]) > 0
