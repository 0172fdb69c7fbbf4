"""Every path and command in the README exists."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

import tlt_ext
from driver import generate, identity
from driver.config.command import read_options
from driver.config.load import load_config
from driver.run.dry_run import read_words
from driver.train import DRY_RUN

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```bash\n(.*?)```", README, flags=re.S)
LINES = [
    part.strip() for block in BLOCKS for line in block.splitlines() for part in line.split("&&")
]
COMMANDS = [shlex.split(line, comments=True) for line in LINES]


def test_nothing_is_left_to_fill_in():
    assert "@@" not in README


def test_links_point_to_files():
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_paths_in_code_exist():
    names = re.findall(r"`((?:csrc|tlt_ext|driver|tests|profiling)/[\w/.]*)`", README)
    assert [name for name in names if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("words", [c for c in COMMANDS if "-m" in c], ids=" ".join)
def test_modules_exist_and_take_their_words(words):
    module, *rest = words[words.index("-m") + 1 :]
    assert importlib.util.find_spec(module)
    if module == "driver.train" and DRY_RUN in rest:
        read_words([word for word in rest if word != DRY_RUN])
    elif module == "driver.train":
        load_config([word for word in rest if not word.startswith("run.resume")])
    if module == "driver.generate":
        read_options(generate.Options, rest)
    if module == "driver.identity":
        read_options(identity.Options, rest)


def test_the_example_for_other_engines_runs(capsys):
    """On the CPU, as the README says: another device and dtype, the same lines."""
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    exec(example.replace('"cuda"', '"cpu"').replace("bfloat16", "float32"), {})
    emitted, tokens, status = capsys.readouterr().out.split("]", 2)
    assert emitted.count(",") == 1 and int(emitted[1]) >= 1
    assert status.strip() == "[0, 0]"


def test_every_op_is_in_the_table():
    table = README.partition("<!-- results: ops -->")[2].partition("<!-- end of results -->")[0]
    assert not [op.__name__ for op in tlt_ext.OPS if f"`{op.__name__}`" not in table]


def test_pip_extras_exist():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = project.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = set(re.findall(r"-e '\.\[(\w+)\]'", README))
    assert extras and extras <= set(re.findall(r"^(\w+) = ", section, flags=re.M))
