"""Bad input to the commands: one line with thing and remedy, exit code 2, nothing left."""

import errno
import json
import signal
import subprocess
import sys
import warnings

import pytest
import torch
from safetensors.torch import load, save_file

from driver import export, generate, identity, train
from driver.common.stop import SIGNALS
from driver.config.command import run_command
from driver.model.tiny import build_tokenizer
from tests.driver.hugging_face import save_model

SMALL = ["model.hidden_size=32", "model.num_layers=1", "warmup.steps=1"]


def fails(capsys, monkeypatch, command, *words):
    """The line that a command prints as it exits with code 2."""
    monkeypatch.setattr(sys, "argv", ["command", *map(str, words)])
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        run_command(command)
    assert stop.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1, error
    return error[0]


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_has_an_exit_code_of_its_own(capsys, monkeypatch, sent):
    monkeypatch.setattr(sys, "argv", ["command"])
    before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    try:
        with pytest.raises(SystemExit) as stop:
            run_command(lambda argv: signal.raise_signal(sent))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert (stop.value.code, capsys.readouterr().err) == (128 + sent, "stopped\n")


def test_a_path_without_permission_is_one_line(capsys, monkeypatch):
    def command(argv):  # root may read everything
        raise PermissionError(errno.EACCES, "Permission denied", "/models/mine")

    line = fails(capsys, monkeypatch, command)
    assert line.startswith("error: /models/mine: Permission denied; change its permissions")


def test_a_closed_pipe_ends_a_command_without_a_traceback():
    """As `| head` does."""
    script = "from driver.config.command import run_command\n"
    script += "run_command(lambda argv: [print('x' * 999, flush=True) for _ in range(999)])"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script], **pipes) as command:
        command.stdout.close()
        assert command.stderr.read() == b""
    assert command.returncode == 128 + signal.SIGPIPE


def test_a_warning_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["command"])
    monkeypatch.setattr(warnings, "formatwarning", None)  # put back behind the test
    run_command(lambda argv: None)
    assert warnings.formatwarning("ValueError: two\nlines", UserWarning) == (
        "warning: ValueError: two lines\n"
    )


@pytest.fixture
def root(tmp_path):
    yield tmp_path / "runs"
    assert not list((tmp_path / "runs").glob("*/checkpoints/*"))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["run.stesp=3"], "run.stesp: unknown key; did you mean run.steps?"),
        (["engine.strategies=off learned:8,4"], "strategy 'learned:8,4': malformed"),
        (["model.path=/no/such/folder", "preset=tiny"], "/no/such/folder: no such folder"),
        (["model.path=/some/model"], "would train it for 320 steps at a learning rate of 0.003"),
        (["task.name=sum"], "task.name=sum: unknown task; did you mean sums?"),
        (["task.name=gsm8k"], "reasoning_gym, a class of yours, FILE.py:Class"),
        (["run.root=~nobody-of-this-name/x"], "~nobody-of-this-name/x: unknown home directory"),
        (["preset=tinny"], "preset=tinny: unknown; did you mean tiny?"),
        (["run.steps"], "'run.steps': must be key=value"),
        (["engine.page_size=5000"], "engine.page_size: must be at most 1024"),
        (["model.hidden_size=40"], "model.hidden_size: must be a multiple of 16"),
        (["model.path=" + "x" * 300, "preset=tiny"], "File name too long; choose a shorter one"),
        (["task.name=jsonl", "task.path=" + "x" * 300], "File name too long"),
        (["run.device=cuda:99"], "run.device=cuda:99: torch sees"),
    ],
)
def test_mistyped_words(capsys, monkeypatch, root, words, line):
    assert line in fails(capsys, monkeypatch, train.main, f"run.root={root}", *words)
    assert not root.exists()


def test_truncated_weights(capsys, monkeypatch, root, tmp_path):
    save_model(tmp_path / "model", "llama-tied-llama3")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    words = ["preset=tiny", f"run.root={root}", f"model.path={tmp_path / 'model'}"]
    assert "model.safetensors" in fails(capsys, monkeypatch, train.main, *words)
    assert not root.exists()


def test_unsupported_architecture(capsys, monkeypatch, root, tmp_path):
    save_model(tmp_path / "model", "llama-tied-llama3")
    config = tmp_path / "model" / "config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"architectures": ["MambaForCausalLM"]})
    )
    words = ["preset=tiny", f"run.root={root}", f"model.path={tmp_path / 'model'}"]
    assert "MambaForCausalLM" in fails(capsys, monkeypatch, train.main, *words)


def test_tensors_that_a_library_would_fill_in(capsys, monkeypatch, root, tmp_path):
    """A tensor that is missing, misshapen or unknown is refused by name, never made up."""
    folder = tmp_path / "model"
    words = ["preset=tiny", f"run.root={root}", f"model.path={folder}"]
    save_model(folder, "qwen2")
    whole = load((folder / "model.safetensors").read_bytes())
    name = "model.layers.1.mlp.down_proj.weight"
    for what, changed in (
        ("missing", {k: v for k, v in whole.items() if k != name}),
        ("has shape [3, 3]", whole | {name: torch.ones(3, 3)}),
        ("is not a tensor of", whole | {f"{name}2": torch.ones(3)}),
    ):
        save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
        line = fails(capsys, monkeypatch, train.main, *words)
        assert name in line and what in line
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    assert "no usable tokenizer" in fails(capsys, monkeypatch, train.main, *words)


def test_a_broken_line_in_a_task_file(capsys, monkeypatch, root, tmp_path):
    path = tmp_path / "task.jsonl"
    path.write_text('{"question": "1+1?", "answer": "#### 2"}\n{"question": broken\n')
    words = [f"run.root={root}", "task.name=jsonl", f"task.path={path}", *SMALL]
    assert "task.jsonl:2" in fails(capsys, monkeypatch, train.main, *words)


def test_a_prompt_longer_than_the_context(capsys, monkeypatch, root):
    monkeypatch.setattr("driver.run.warm_start.warm_up", None)  # it is seen before the warm-up
    words = [f"run.root={root}", *SMALL, "model.max_position=8", "sampling.max_new_tokens=4"]
    line = fails(capsys, monkeypatch, train.main, *words)
    assert "context of 8" in line


def test_a_start_that_fails_late_frees_its_name(capsys, monkeypatch, root):
    words = [f"run.root={root}", "run.name=a", *SMALL]
    for _ in range(2):  # the second would find the name taken
        line = fails(capsys, monkeypatch, train.main, *words, "engine.num_pages=1")
        assert "engine.num_pages=1" in line
    assert not (root / "a").exists()


def test_an_unwritable_run_folder(capsys, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    words = [f"run.root={tmp_path / 'file'}", *SMALL]
    assert str(tmp_path / "file") in fails(capsys, monkeypatch, train.main, *words)


def test_the_other_commands(capsys, monkeypatch):
    line = fails(capsys, monkeypatch, generate.main, "promt=hello")
    assert line == "error: promt: unknown key; did you mean prompt?"
    assert "malformed" in fails(capsys, monkeypatch, generate.main, "strategy=learned")
    assert "has no trained weights" in fails(capsys, monkeypatch, generate.main, "model=tiny")
    assert "temperature: must be at least 0, got -1" in fails(
        capsys, monkeypatch, generate.main, "temperature=-1"
    )
    assert "tokens: must be an integer, got 'many'" in fails(
        capsys, monkeypatch, identity.main, "tokens=many"
    )
    assert "tokens: must be at least 1" in fails(capsys, monkeypatch, identity.main, "tokens=0")
    line = fails(capsys, monkeypatch, identity.main, "max_new_tokens=0")
    assert "max_new_tokens: must be at least 1" in line
    line = fails(capsys, monkeypatch, identity.main, "dtype=float8")
    assert "dtype: must be one of float32" in line
    line = fails(capsys, monkeypatch, identity.main, "train_steps=-1")
    assert "train_steps: must be at least 0" in line
    line = fails(capsys, monkeypatch, identity.main, "batch=70", "strategies=oracle:16,15,128")
    assert "batch=70: the oracle would verify 8960 rows in a pass, at most 8192 fit" in line
    monkeypatch.setattr("driver.identity.warm_up", None)  # it is seen before the warm-up
    line = fails(capsys, monkeypatch, identity.main, "max_new_tokens=2000")
    assert "context of 1024" in line


def test_errors_name_the_options_of_a_command(capsys, monkeypatch, tmp_path):
    folder = tmp_path / "model"
    save_model(folder, "qwen2")
    build_tokenizer().save_pretrained(folder)
    line = fails(capsys, monkeypatch, identity.main, "device=cuda:99")
    assert line.startswith("error: device=cuda:99: torch sees ")
    for words, error in {
        f"model={tmp_path}/none": f"model={tmp_path}/none: no such folder; ",
        "device=tpu": "device: must be cpu, cuda or cuda:N, got 'tpu'",
        "chat_template=true": "chat_template=true: the tokenizer has no chat template; ",
        "max_new_tokens=5000": "prompt of 2 tokens and max_new_tokens=5000 exceed the context of",
    }.items():
        given = {"prompt": "1+", "model": folder} | dict([words.split("=")])
        words = [f"{key}={value}" for key, value in given.items()]
        line = fails(capsys, monkeypatch, generate.main, *words)
        assert line.startswith(f"error: {error}") and "sampling." not in line


def test_identity_needs_no_drafter_where_no_strategy_does(capsys):
    sizes = ["tokens=40", "batch=4", "max_new_tokens=8", "warmup_steps=1"]
    identity.main(["model=tiny", "strategies=ngram:4,1,5", *sizes])
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows[1:5]] == ["off", "ngram:4,1,5", "mixed", "preempt"]
    assert all(row.count("100.00%") == 3 for row in rows[1:5])


def test_a_run_in_place_of_its_checkpoint(capsys, monkeypatch, tmp_path):
    step = tmp_path / "checkpoints" / "step-000004"
    step.mkdir(parents=True)
    for folder in (tmp_path, step.parent):
        line = fails(capsys, monkeypatch, generate.main, f"model={folder}")
        assert line.endswith(f"name one of its checkpoints, as {step}")
        line = fails(capsys, monkeypatch, export.main, f"drafter={folder}", f"out={tmp_path}/out")
        assert "must be a checkpoint with a trained drafter" in line


def test_a_cache_that_does_not_fit(capsys, monkeypatch, root):
    words = [f"run.root={root}", *SMALL, "engine.num_pages=2147483647"]
    line = fails(capsys, monkeypatch, train.main, *words)
    assert "engine.num_pages=2147483647: the KV cache does not fit" in line
