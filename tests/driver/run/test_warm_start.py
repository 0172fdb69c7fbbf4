"""The warm start: made once, found again, and what loads it."""

import contextlib
import json
from dataclasses import replace

import pytest
import torch

from driver.common.errors import UserError
from driver.config.load import load_config
from driver.config.options import GenerateOptions
from driver.config.strategy import Strategy
from driver.drafter.buffer import DataBuffer
from driver.drafter.trainer import SpotTrainer
from driver.generate import Generator
from driver.model import tiny
from driver.policy import warmup
from driver.records.progress import Progress
from driver.run import warm_start as warm
from driver.run.start import start_run
from driver.session.parts import adopt_drafter
from driver.tasks.calculator import CalculatorTask
from driver.tasks.puzzles import PuzzlesTask
from driver.train import train
from tests import kit

WORDS = [
    "preset=tiny",
    "model.hidden_size=32",
    "model.num_layers=2",
    "task.name=puzzles",
    "sampling.max_new_tokens=100",
    "engine.strategies=off learned:4,2,8",
    "engine.max_batch=8",
    "warmup.steps=4",
    "warmup.batch=4",
    "warmup.keep=true",
    "warmup.drafter_steps=12",
    "warmup.drafter_tokens=128",
    "warmup.responses=6",
    "drafter.draft_vocab=24",
    "run.eval_prompts=0",
    "run.steps=0",
    "run.threads=1",
    "grpo.prompts_per_step=4",
    "grpo.samples_per_prompt=4",
]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def config(root):
    return load_config([*WORDS, f"run.root={root}", "run.name=run"])


@pytest.fixture(scope="module")
def made(config):
    lines = []
    return warm.warm_start(config, lines.append), lines


def test_it_is_made_once_and_found_by_its_settings(config, made):
    checkpoint, lines = made
    assert any("drafter step 12/12" in line for line in lines)
    again = []
    assert warm.warm_start(config, again.append) == checkpoint
    marks = warm.fingerprints(checkpoint.path)
    described = f"{checkpoint.path}, policy {marks['policy']}, drafter {marks['drafter']}, noise 2"
    assert again == [f"warm start: {described}"]
    assert checkpoint.path.parent == warm.warm_folder(config)
    for other in (
        replace(config, run=replace(config.run, seed=1)),
        replace(config, warmup=replace(config.warmup, lr=1e-3)),
        replace(config, task=replace(config.task, difficulty=2)),
        replace(config, tool=replace(config.tool, turns=2)),
    ):
        assert warm.warm_folder(other) != warm.warm_folder(config)
    same = replace(
        config,
        model=replace(config.model, cache="/elsewhere"),
        run=replace(config.run, steps=9),
    )
    assert warm.warm_folder(same) == warm.warm_folder(config)


def test_other_data_and_another_model_make_another_one(config, tmp_path):
    """The same path may name other contents."""
    data, model = tmp_path / "data.jsonl", tmp_path / "model"
    model.mkdir()
    task = replace(config.task, name="jsonl", path=str(data), shots=0)
    of_data = replace(config, task=task)
    of_model = replace(config, model=replace(config.model, path=str(model)))
    folders = set()
    for number in range(3):
        line = f'"answer": "#### {number}"'
        data.write_text("".join(f'{{"question": "{i}", {line}}}\n' for i in range(8)))
        (model / "config.json").write_text(f'{{"vocab_size": {number}}}')
        folders |= {warm.warm_folder(of_data), warm.warm_folder(of_model)}
    assert len(folders) == 6


def test_a_run_without_a_learned_strategy_makes_the_same_warm_start(config, made, tmp_path):
    run = replace(config.run, root=str(tmp_path))
    other = replace(config, engine=replace(config.engine, strategies=["off"]), run=run)
    assert warm.warm_folder(other).name == warm.warm_folder(config).name
    again = warm.warm_start(other, lambda line: None)
    assert warm.fingerprints(again.path) == warm.fingerprints(made[0].path)


def test_the_report_says_what_was_measured(made):
    report = json.loads((made[0].path / warm.REPORT).read_text())
    assert report["sampled"]["responses"] == 6
    assert 0 < report["sampled"]["longest"] <= 100
    assert set(report["accept_length"]) == {"learned:4,2,8"}
    assert report["accept_length"]["learned:4,2,8"] >= 1
    assert report["drafter_loss"][1] < report["drafter_loss"][0]
    assert {"policy", "rollout", "drafter", "check"} <= set(report["seconds"])


def test_the_same_seed_makes_the_same(config, made, tmp_path, monkeypatch):
    """Also where responses end in another order: when the host looks decides it."""
    add = DataBuffer.add

    def add_in_front(buffer, document):
        add(buffer, document)
        buffer.fresh.insert(0, buffer.fresh.pop())

    monkeypatch.setattr(DataBuffer, "add", add_in_front)
    elsewhere = replace(config, run=replace(config.run, root=str(tmp_path)))
    again = warm.warm_start(elsewhere, lambda line: None)
    mine, theirs = (c.state("spot")["drafter"] for c in (made[0], again))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert warm.fingerprints(made[0].path) == warm.fingerprints(again.path)


def test_all_that_learns_does_so_in_one_order(config, tmp_path, monkeypatch):
    """What is deterministic on a card only: each backward pass is inside."""
    inside, passes = [], []

    @contextlib.contextmanager
    def noted(device):
        inside.append(device)
        yield
        inside.pop()

    for module in (warm, warmup):
        monkeypatch.setattr(module, "deterministic", noted)
    for owner, name in ((warmup, "cross_entropy"), (SpotTrainer, "micro_step")):
        call = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *a, c=call, n=name: passes.append((n, len(inside))) or c(*a)
        )
    warm.warm_start(replace(config, run=replace(config.run, root=str(tmp_path))), lambda line: None)
    assert set(passes) == {("cross_entropy", 1), ("micro_step", 1)}


def test_a_fingerprint_is_of_all_bits():
    state = {"a": torch.zeros(3, dtype=torch.bfloat16), "b": torch.tensor(1), "c": torch.ones(2)}
    mark = warm.fingerprint(state)
    assert len(mark) == 8
    assert warm.fingerprint(dict(reversed(state.items()))) == mark
    assert warm.fingerprint({**state, "a": -state["a"]}) != mark  # equal numbers, another bit
    assert warm.fingerprint({"z": state["a"], "b": state["b"], "c": state["c"]}) != mark


def test_the_fingerprints_of_the_weights_a_run_starts_from(config, made, tmp_path):
    marks = warm.fingerprints(made[0].path)
    assert set(marks) == {"policy", "drafter", "noise"}
    assert warm.start_fingerprints(config) == marks
    assert warm.start_fingerprints(load_config([f"model.path={made[0].path}"])) == marks
    assert warm.start_fingerprints(load_config([])) == {}
    (tmp_path / warm.REPORT).write_text("{}")  # of an earlier version
    assert warm.start_fingerprints(load_config([f"model.path={tmp_path}"])) == {}


@kit.gpu
@kit.needs_gpu
def test_two_of_a_card_are_the_same_bits(tmp_path):
    """Documents of several blocks of FlashAttention, whose gradients would meet in any order."""
    words = [
        *(word for word in WORDS if not word.startswith("model.")),
        "run.device=cuda",
        "model.dtype=bfloat16",
        "model.max_position=4096",
        "task.difficulty=2",
        "sampling.max_new_tokens=600",
        "engine.prefill_chunk=256",
        "warmup.batch=16",
        "warmup.drafter_tokens=2048",
    ]
    marks = [
        warm.fingerprints(warm.warm_start(load_config(run), lambda line: None).path)
        for run in ([*words, f"run.root={tmp_path / name}"] for name in "ab")
    ]
    assert marks[0] == marks[1]


def test_drafter_learns_from_sampled_and_worked_responses(config, made):
    state = made[0].state("spot")
    assert state["version"] == 1
    assert state["steps"] == 12
    sampled = 6
    shown = state["seen_tokens"][1]  # worked responses keep their end token, <eos>
    assert shown > 0
    assert sum(state["seen_tokens"].values()) > 100 * sampled


def test_the_drafter_learns_from_responses_of_several_turns(config, tmp_path, monkeypatch):
    """Sampled and worked ones; the answers in them are context."""
    buffers, train = [], warm.Warming.train
    monkeypatch.setattr(
        warm.Warming,
        "train",
        lambda self: buffers.append(list(self.spot.buffer.fresh)) or train(self),
    )
    monkeypatch.setattr(
        CalculatorTask, "respond", lambda self, p, turn, text: "<1" if text[-1:] == ">" else None
    )
    task, run = replace(config.task, name="calculator"), replace(config.run, root=str(tmp_path))
    warm.warm_start(replace(config, task=task, run=run), lambda line: None)
    (documents,) = buffers
    masked = [d for d in documents if d.generated is not None]
    assert len(documents) == 12 and len(masked) > 6  # all worked ones, and some that were sampled
    call = tiny.build_tokenizer().encode("><1")
    for document in masked:
        tokens = document.tokens.tolist()
        end = next(i for i in range(len(tokens)) if tokens[i : i + 3] == call)
        # The targets of the entries end - 1 and end are the answer.
        assert document.generated[end - 2 : end + 1].tolist() == [1, 0, 0]


def test_a_run_starts_from_it_with_its_drafter(config, made):
    run = start_run(config, lambda line: None)
    kept = made[0].state("spot")
    assert run.rollout.spot.runner.version == kept["version"]
    drafter = run.rollout.spot.drafter.state_dict()
    assert all(torch.equal(drafter[name], kept["drafter"][name]) for name in drafter)
    run.folder.discard()


def test_a_run_that_started_from_it_resumes(config, made):
    """With and without a KL: only the first start needs the warm start as its policy."""
    for kl_coef in (0.0, 0.1):
        for steps in (1, 2):
            words = replace(config.run, name=f"kl-{kl_coef}", steps=steps, resume=steps > 1)
            again = replace(config, run=words, grpo=replace(config.grpo, kl_coef=kl_coef))
            assert train(again, Progress(steps)).step == steps


def test_a_drafter_of_another_shape_is_left_out(config, made, root):
    words = [w for w in WORDS if not w.startswith(("drafter", "warmup"))]
    words += ["warmup.steps=0", f"run.root={root}", "run.name=other", f"model.path={made[0].path}"]
    lines = []
    run = start_run(load_config(words), lines.append)  # draft_vocab: the whole vocabulary
    assert run.rollout.spot.runner.version == 0
    assert any("another shape" in line for line in lines)
    run.folder.discard()


def test_missing_parts_of_an_earlier_drafter_are_named(made):
    state = made[0].state("spot")
    del state["acceptance"]
    options = GenerateOptions(model=str(made[0].path), strategy="learned:4,2,8")
    spot = Generator(options).rollout.spot
    with pytest.raises(UserError, match="drafter lacks 'acceptance', an earlier version wrote it"):
        adopt_drafter(spot, state, print)


def test_generate_takes_it(made):
    options = GenerateOptions(
        model=str(made[0].path), prompt="3+4=\n", strategy="learned:4,2,8", max_new_tokens=12
    )
    generator = Generator(options)
    fast, _ = generator.run(Strategy.parse(options.strategy))
    assert generator.rollout.engine.stats.spec_passes > 0
    plain, _ = generator.run(Strategy("off"))
    assert (fast.token_ids, fast.logprobs) == (plain.token_ids, plain.logprobs)


def test_refusals(config):
    with pytest.raises(UserError, match="warmup.drafter_steps: needs warmup.keep=true and warmup"):
        load_config(["warmup.drafter_steps=3"])
    none = replace(config, warmup=replace(config.warmup, steps=0, drafter_steps=0))
    with pytest.raises(UserError, match="warmup.steps: 0 makes no warm start"):
        warm.warm_start(none, lambda line: None)


def test_prompts_that_do_not_fit_are_refused_before_the_training(config, tmp_path, monkeypatch):
    monkeypatch.setattr(warm, "warm_up", lambda *_: pytest.fail("trained"))
    long = replace(
        config,
        sampling=replace(config.sampling, max_new_tokens=1024),
        run=replace(config.run, root=str(tmp_path)),
    )
    with pytest.raises(UserError, match="max_new_tokens=1024 exceed the context of 1024"):
        warm.warm_start(long, lambda line: None)


def test_a_response_that_cannot_be_scored_counts_as_the_settings_say(config, tmp_path, monkeypatch):
    monkeypatch.setattr(PuzzlesTask, "reward", lambda *_: float("nan"))
    run = replace(config.run, root=str(tmp_path))
    with pytest.raises(UserError, match="reward of response 0 to prompt puzzles/train/.* got nan"):
        warm.warm_start(replace(config, run=run), lambda line: None)
    reward = replace(config.reward, on_error="zero")
    with pytest.warns(UserWarning, match="got nan; counted as 0"):
        made = warm.warm_start(replace(config, run=run, reward=reward), lambda line: None)
    assert json.loads((made.path / warm.REPORT).read_text())["sampled"]["accuracy"] == 0.0


def test_a_place_that_cannot_be_written_is_refused_before_the_training(config, monkeypatch):
    monkeypatch.setattr(warm, "warm_up", lambda *_: pytest.fail("trained"))
    nowhere = replace(config, run=replace(config.run, root="/dev/null/runs"))
    with pytest.raises(UserError, match=r"runs/warm/tiny-\w+: cannot be written .Not a dir"):
        warm.warm_start(nowhere, lambda line: None)


def test_the_preset_fits_its_card_and_its_task():
    config = load_config(["preset=h100"])
    assert config.warmup.keep
    assert config.sampling.max_new_tokens == 4096
    assert config.engine.num_pages * config.engine.page_size * 28_000 < 16e9  # bytes of KV
