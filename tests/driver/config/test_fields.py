"""Text becomes values of the declared types, and help is made of the same fields."""

import dataclasses

import pytest

from driver.common.errors import UserError
from driver.config.fields import read_options
from driver.config.help import help_text
from driver.config.load import load_config, section_types
from driver.config.options import (
    OPTIONS,
    DryRunOptions,
    GenerateOptions,
    check_words,
    read_dry_run,
)


def test_options_keep_text_as_it_is():
    options = read_options(GenerateOptions, ["prompt=a=b: [c]", "temperature=1"])
    assert options.prompt == "a=b: [c]"
    assert options.temperature == 1.0
    assert read_options(GenerateOptions, ["top_p=1e-6"]).top_p == 1e-6
    for word, message in (
        ("top_p=nan", "top_p: must be a finite number, got nan"),
        ("temperature=hot", "temperature: must be a number, got 'hot'"),
        ("prompt", "'prompt': must be key=value, for example model=..."),
    ):
        with pytest.raises(UserError, match=message):
            read_options(GenerateOptions, [word])


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        ("train", ["run.stesp=3"], "run.stesp: unknown key"),
        ("train", ["--dry-run", "ranks=-1"], "ranks: must be at least 1"),
        ("train", ["--dry-run", "memory=80"], r"memory: unknown key; did you mean memory_gb\?"),
        ("warm", ["ranks=1"], "ranks: unknown key"),
        ("identity", ["token=1"], "token: unknown key; did you mean tokens"),
    ],
)
def test_words_are_checked_by_command(command, words, message):
    with pytest.raises(UserError, match=message):
        check_words(command, words)


def test_a_dry_run_takes_words_of_both_kinds():
    own, words, config = read_dry_run(["--dry-run", "memory_gb=80", "run.steps=3"])
    assert (own, config.run.steps) == (DryRunOptions(memory_gb=80.0), 3)
    assert words == ["run.steps=3"]


@pytest.mark.parametrize("command", ["train", "warm", *OPTIONS])
def test_help_names_every_key_with_its_default_and_meaning(command):
    text = help_text(command)
    kinds = [OPTIONS[command]] if command in OPTIONS else list(section_types().values())
    flat = " ".join(text.split())
    for kind in kinds:
        for item in dataclasses.fields(kind):
            assert f"\n  {kind.prefix}{item.name}=" in text
            assert " ".join(item.metadata["meaning"].split()) in flat
    prose = [line for line in text.splitlines() if not line.startswith("  ") or line[2] == " "]
    assert max(map(len, prose)) <= 96


def test_help_shows_limits_and_the_values_of_a_preset():
    text = help_text("train", ["--help", "preset=h100"])
    assert "\n  run.steps=30  [20]\n" in text
    assert "\n  run.root=runs\n" in text
    assert "(one of float32, bfloat16, float16)" in text
    assert "\n  h100     One H100 or H200: SmolLM2-135M-Instruct on puzzles\n" in text
    assert "\n  run.steps=30  [28]\n" in help_text("train")
    with pytest.raises(UserError, match="preset=h10"):
        help_text("train", ["preset=h10"])


def test_a_field_without_a_meaning_cannot_be_declared():
    for kind in (*section_types().values(), *OPTIONS.values(), DryRunOptions):
        for item in dataclasses.fields(kind):
            meaning = item.metadata["meaning"]
            assert len(meaning) > 5 and not meaning.endswith("."), item.name


def test_fields_are_about_as_many_as_agreed():
    """A setting is a promise: before one is added, another should go."""
    assert sum(len(dataclasses.fields(kind)) for kind in section_types().values()) <= 95  # 116 once
    assert dataclasses.asdict(load_config([])).keys() >= section_types().keys()
