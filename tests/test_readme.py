"""Every path, link and command in the documents exists."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

import tlt_ext
from driver.config.load import load_config
from driver.config.options import check_words
from driver.model.tiny import build_policy

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "profiling" / "README.md"]
    if path.name != "THIRD_PARTY_NOTICES.md"
}
PATH = re.compile(r"`((?:csrc|tlt_ext|driver|tests|profiling|docs|examples)/[\w/.-]*)`")
NAME_IN = re.compile(r"`((?:tlt_ext|driver)/[\w/]+\.py)`,\s`([\w.]+)`")
INLINE = re.compile(r"`python -m ([\w.]+)")


def commands(text):
    """The commands of the text's bash blocks, as lists of words."""
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    parts = [part.strip() for line in lines for part in line.split("&&")]
    return [shlex.split(part, comments=True) for part in parts]


COMMANDS = [words for text in DOCUMENTS.values() for words in commands(text) if "-m" in words]
COMMANDS = [words for words in COMMANDS if words[0] != "pytest"]  # whose -m is a marker
by_document = pytest.mark.parametrize("name", DOCUMENTS)


@by_document
def test_no_placeholder_is_left(name):
    assert "@@" not in DOCUMENTS[name]


@by_document
def test_links_point_to_files(name):
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", DOCUMENTS[name])
    assert [link for link in links if not ((ROOT / name).parent / link).exists()] == []


@by_document
def test_paths_in_code_exist(name):
    assert [path for path in PATH.findall(DOCUMENTS[name]) if not (ROOT / path).exists()] == []


@by_document
def test_modules_named_in_text_exist(name):
    modules = set(INLINE.findall(DOCUMENTS[name]))
    assert [module for module in modules if not importlib.util.find_spec(module)] == []


@by_document
def test_functions_named_beside_a_file_are_in_it(name):
    for path, function in NAME_IN.findall(DOCUMENTS[name]):
        *classes, last = function.split(".")
        text = (ROOT / path).read_text(encoding="utf-8")
        assert f"def {last}(" in text, (path, function)
        assert all(f"class {each}" in text for each in classes), (path, function)


def test_the_checks_read_something():
    """The documents have links, paths and commands in the form that the checks look for."""
    assert len(COMMANDS) > 10
    assert len(NAME_IN.findall(DOCUMENTS["docs/architecture.md"])) > 5
    assert PATH.search(README) and INLINE.search(DOCUMENTS["profiling/README.md"])


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_modules_exist_and_take_their_words(words):
    module, *rest = words[words.index("-m") + 1 :]
    assert importlib.util.find_spec(module)
    package, _, command = module.partition(".")
    if package == "driver" and command != "report":
        check_words(command, rest)


def python_of(heading):
    """The code under a heading."""
    (example,) = re.findall(rf"^## {heading}$.*?^```python\n(.*?)^```", README, flags=re.S | re.M)
    return example


def test_the_example_of_the_session_runs(capsys):
    example = python_of("Use the engine from your own code")
    small = {'"smollm2"': '"tiny"', "max_new_tokens=256": "max_new_tokens=8"}
    for found, replacement in small.items():
        assert found in example
        example = example.replace(found, replacement)
    policy = build_policy(load_config([]).model, 1)
    exec(compile(example, "README.md", "exec"), {"new_weights": policy.state_dict()})
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith(("length ", "stop "))]) == 8


def test_the_example_of_the_ops_is_the_one_that_runs():
    example = python_of("Use the ops")
    script = (ROOT / "examples" / "ops.py").read_text(encoding="utf-8")
    assert script.endswith('"""\n\n' + example)
    assert len([line for line in example.splitlines() if line]) <= 25


def test_every_op_is_in_the_table():
    benchmarks = DOCUMENTS["docs/benchmarks.md"]
    table = benchmarks.partition("<!-- results: ops -->")[2].partition("<!-- end of results")[0]
    assert not [op.__name__ for op in tlt_ext.OPS if f"`{op.__name__}`" not in table]


def test_pip_extras_exist():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = project.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = set(re.findall(r"-e '\.\[(\w+)\]'", README))
    assert extras and extras <= set(re.findall(r"^(\w+) = ", section, flags=re.M))
