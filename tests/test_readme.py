"""What the documents name exists, and their examples run."""

import dataclasses
import importlib.util
import re
import shlex
from pathlib import Path

import pytest

import tlt_ext
from driver.config.fields import field_types, read_value
from driver.config.load import load_config, section_types
from driver.config.options import check_words
from driver.config.strategy import KINDS
from driver.model.tiny import build_policy
from driver.tasks import TASKS
from driver.tasks.own import OwnTask
from profiling import bench
from profiling.benches import cpu, peers
from profiling.rig.bench import Bench

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "profiling" / "README.md"]
    if path.name != "THIRD_PARTY_NOTICES.md"
}
README, USAGE = DOCUMENTS["README.md"], DOCUMENTS["docs/usage.md"]
PATH = re.compile(r"`((?:csrc|tlt_ext|driver|tests|profiling|docs|examples)/[\w/.-]*)`")
NAME_IN = re.compile(r"`((?:tlt_ext|driver)/[\w/]+\.py)`,\s`([\w.]+)`")
INLINE = re.compile(r"`python -m ([\w.]+)")
SECTIONS = section_types()
WORDS = {  # of each setting; empty: others are allowed
    kind.prefix + item.name: item.metadata["words"] or ()
    for kind in SECTIONS.values()
    for item in dataclasses.fields(kind)
}
SETTING = re.compile(rf"(?<![\w./])((?:{'|'.join(SECTIONS)})\.\w+)(?:=([^\s`\"]+))?(?=[\s`\"])")
PYTHON = re.compile(r"^```python\n(.*?)^```", flags=re.S | re.M)
EXTRA = re.compile(r"-e '\.\[(\w+)\]'")
PAST = ("CHANGELOG.md", "docs/notes/")  # name settings that are gone


def commands(text):
    """The commands of the text's bash blocks, as lists of words."""
    blocks = re.findall(r"```bash\n(.*?)```", text.replace("\\\n", " "), flags=re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    parts = [part.strip() for line in lines for part in line.split("&&")]
    return [shlex.split(part, comments=True) for part in parts]


def in_prose(text, start):
    """The commands of the text's inline code that start so, as lists of words."""
    prose = re.sub(r"```.*?```", "", text, flags=re.S).replace("\\|", "|")
    spans = re.findall(rf"`({start}[^`]*)`", prose)
    return [shlex.split(" ".join(part.split())) for span in spans for part in span.split(" && ")]


COMMANDS = [words for text in DOCUMENTS.values() for words in commands(text) if "-m" in words]
COMMANDS = [words for words in COMMANDS if words[0] != "pytest"]  # whose -m is a marker
COMMANDS += [each for t in DOCUMENTS.values() for each in in_prose(t, r"python -m driver\.")]
COMMANDS = [words for words in COMMANDS if words[-1] != "--help"]
by_document = pytest.mark.parametrize("name", DOCUMENTS)


@by_document
def test_no_placeholder_is_left(name):
    assert "@@" not in DOCUMENTS[name]


@by_document
def test_links_point_to_files(name):
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", DOCUMENTS[name])
    assert [link for link in links if not ((ROOT / name).parent / link).exists()] == []


@by_document
def test_links_point_to_headings(name):
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", DOCUMENTS[name]):
        text = ((ROOT / name).parent / link if link else ROOT / name).read_text(encoding="utf-8")
        headings = re.findall(r"^#+ (.+)$", text, flags=re.M)
        assert anchor in [
            re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings
        ]


@by_document
def test_settings_exist(name):
    """Keys, and values other than a placeholder such as N or FILE."""
    types = {key: kind for each in SECTIONS.values() for key, kind in field_types(each).items()}
    for key, value in [] if name.startswith(PAST) else SETTING.findall(DOCUMENTS[name]):
        assert key in types
        if value and not value.isupper():
            assert read_value(key, types[key], value) in WORDS[key] or not WORDS[key]


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
    assert ["big", "--only", "train 15b"] in benchmarks("docs/notes/memory.md")
    assert len(NAME_IN.findall(DOCUMENTS["docs/architecture.md"])) > 5
    assert PATH.search(README) and INLINE.search(DOCUMENTS["profiling/README.md"])


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_modules_exist_and_take_their_words(words):
    module, *rest = words[words.index("-m") + 1 :]
    assert importlib.util.find_spec(module)
    package, _, command = module.partition(".")
    if package == "driver" and command != "report":
        check_words(command, rest)


def benchmarks(name):
    """The words after `bench` of the benchmarks that a document calls."""
    calls = in_prose(DOCUMENTS[name], r"(?:python -m profiling\.)?bench [a-z]")
    calls = [words[3 if words[0] == "python" else 1 :] for words in calls]
    blocks = [words for words in commands(DOCUMENTS[name]) if "profiling.bench" in words]
    return calls + [words[words.index("profiling.bench") + 1 :] for words in blocks]


@by_document
def test_benchmarks_have_the_options_and_cases_that_are_named(name, monkeypatch):
    """Of a benchmark that is gone, which a note may name, nothing is checked."""
    known = {path.stem for path in (ROOT / "profiling" / "benches").glob("[a-z]*.py")}
    cases = []
    monkeypatch.setattr(Bench, "wanted", lambda _, case: cases.append(case))  # so nothing runs
    monkeypatch.setattr(peers, "lacks_vllm", lambda folder: "")
    monkeypatch.setattr(bench, "needs_cuda", lambda *_: False)

    def look(module, args, command):
        empty = Bench(args.name, 1.0, options=args.options)
        empty.own_options(getattr(module, "OPTIONS", {}))
        if args.only:
            cases[:] = [*getattr(module, "CPU_PARTS", ()), *[cpu.CHECKS] * (module is cpu)]
            module.run(empty)
            assert any(re.search(args.only, case) for case in cases), command
        return []

    monkeypatch.setattr(bench, "run_one", look)
    for words in benchmarks(name):
        assert words[0] in {*known, "all"} or name.startswith(PAST), words
        if words[0] in known:
            assert bench.main(words) == 0


def python_with(name, document):
    """The example of a document that contains a name."""
    (example,) = [each for each in PYTHON.findall(DOCUMENTS[document]) if name in each]
    return example


@pytest.mark.parametrize(("document", "responses"), [("README.md", 8), ("docs/usage.md", 9)])
def test_the_examples_of_the_session_run(document, responses, capsys):
    example = python_with("Session", document)
    small = {'"smollm2"': '"tiny"', "max_new_tokens=256": "max_new_tokens=8"}
    for found, replacement in ({"tlt_ext.driver": "driver"} | small).items():
        assert found in example
        example = example.replace(found, replacement)
    policy = build_policy(load_config([]).model, 1)
    exec(compile(example, document, "exec"), {"new_weights": policy.state_dict()})
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith(("length ", "stop ", "["))]) == responses


def test_the_example_of_an_op_runs():
    names = {}
    exec(python_with("tlt_ext.sample", "README.md"), names)
    assert names["tokens"].count_nonzero() == 2 and names["status"].count_nonzero() == 0


def test_the_lines_for_trl_are_those_of_its_page():
    lines = python_with("TltRollout", "README.md").split("\n")
    assert [line for line in lines if line not in DOCUMENTS["docs/adapters.md"]] == []


def test_the_example_of_a_task_is_one():
    names = {}
    exec(python_with("class Reverse", "docs/usage.md"), names)
    task = OwnTask("my_task.py:Reverse", names["Reverse"]())
    prompt = task.prompt("train", 5)
    assert (prompt.text, prompt.answer) == ("39595=", "59593")
    assert (task.reward(prompt, "59593"), task.reward(prompt, "39595")) == (1, 0)


def test_the_example_of_the_ops_is_the_one_that_runs():
    example = python_with("tlt_ext.verify_tree", "docs/usage.md")
    script = (ROOT / "examples" / "ops.py").read_text(encoding="utf-8")
    assert script.endswith('"""\n\n' + example)
    assert len([line for line in example.splitlines() if line]) <= 25


def test_the_tables_of_strategies_and_settings_are_complete():
    rows = dict(re.findall(r"^\| `(\S+)` \| (.*) \|$", USAGE, flags=re.M))
    assert {kind.form for kind in KINDS.values() if kind.in_config} <= set(rows)
    found = rows.keys() & WORDS.keys()
    assert len(found) > 5
    for key in found:
        words = TASKS if key == "task.name" else WORDS[key]
        assert [word for word in words if f"`{word}`" not in rows[key]] == [], key


def test_every_op_is_in_the_table():
    benchmarks = DOCUMENTS["docs/benchmarks.md"]
    table = benchmarks.partition("<!-- results: ops -->")[2].partition("<!-- end of results")[0]
    assert not [op.__name__ for op in tlt_ext.OPS if f"`{op.__name__}`" not in table]


def test_pip_extras_exist():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = project.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = {name for text in DOCUMENTS.values() for name in EXTRA.findall(text)}
    assert len(extras) > 3 and extras <= set(re.findall(r"^(\w+) = ", section, flags=re.M))
