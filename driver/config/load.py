"""The configuration of a run: presets in YAML under `key=value` overrides.

`load_config` turns every mistake of a user into one line that names the key.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ..common.errors import UserError
from .sections import (
    BanditConfig,
    CaptureConfig,
    DrafterConfig,
    EngineConfig,
    GrpoConfig,
    ModelConfig,
    RewardConfig,
    RunConfig,
    SamplingConfig,
    SpotConfig,
    TaskConfig,
    WarmupConfig,
)
from .strategy import Strategy, parse_strategies, split_strategies

__all__ = [
    "BanditConfig",
    "CaptureConfig",
    "Config",
    "DrafterConfig",
    "EngineConfig",
    "GrpoConfig",
    "ModelConfig",
    "RewardConfig",
    "RunConfig",
    "SamplingConfig",
    "SpotConfig",
    "TaskConfig",
    "WarmupConfig",
    "load_config",
    "preset_names",
    "to_yaml",
]

DEFAULT_PRESET = "tiny"

PRESETS = Path(__file__).resolve().parents[1] / "presets"


@dataclass(frozen=True)
class Config:
    """Everything that decides a run; `preset` records where the values started from."""

    preset: str = DEFAULT_PRESET
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    bandit: BanditConfig = field(default_factory=BanditConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    spot: SpotConfig = field(default_factory=SpotConfig)
    grpo: GrpoConfig = field(default_factory=GrpoConfig)
    capture: CaptureConfig = field(default_factory=CaptureConfig)

    def __post_init__(self) -> None:
        arms = parse_strategies(self.engine.strategies)
        chosen = {
            "static": [Strategy.parse(self.bandit.static)],
            "map": self.bandit.strategy_map().values(),
        }
        for arm in chosen.get(self.bandit.policy, []):
            if arm not in arms:
                raise UserError(
                    f"bandit.{self.bandit.policy}: '{arm}' is not among engine.strategies"
                    f" ({' '.join(map(str, arms))}); add it there"
                )
        learned = [str(arm) for arm in arms if arm.needs_drafter]
        if learned and not self.drafter.enabled:
            raise UserError(
                f"engine.strategies: {learned[0]!r} needs a drafter; set drafter.enabled=true"
                " or list only off and ngram strategies"
            )


def load_config(argv: Sequence[str]) -> Config:
    """Builds the configuration of a command line.

    Args:
        argv: `key=value` words; `preset=NAME` (or a YAML file) is applied before the others.

    Returns:
        The checked configuration: dataclass defaults, then the preset, then the overrides.

    Raises:
        UserError: unknown key or preset, malformed word, wrong type or value out of its limits.

    Example:
        >>> load_config(["run.steps=3"]).run.steps
        3
    """
    preset, overrides = DEFAULT_PRESET, []
    for word in argv:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise UserError(f"{word!r}: wanted key=value, for example run.steps=20")
        if key == "preset":
            preset = text
        else:
            overrides.append(_override(key, text))
    return _build(preset, [_read_preset(preset), *overrides])


def to_yaml(config: Config) -> str:
    """The configuration as YAML text that `preset=FILE` reads back.

    Args:
        config: any configuration.

    Returns:
        YAML, every key present, in the order of the dataclasses.

    Example:
        >>> to_yaml(Config()).splitlines()[0]
        'preset: tiny'
    """
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def preset_names() -> list[str]:
    """Names of the shipped presets, sorted."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


class _Loader(yaml.SafeLoader):
    """YAML in which only true and false are booleans: `off` is a strategy and a mode here."""


_Loader.yaml_implicit_resolvers = {
    first: [pair for pair in pairs if pair[0] != "tag:yaml.org,2002:bool"]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"true|false|True|False"), list("tfTF")
)


def _sections() -> dict[str, type]:
    hints = typing.get_type_hints(Config)
    return {f.name: hints[f.name] for f in dataclasses.fields(Config) if f.name != "preset"}


def _key_types() -> dict[str, Any]:
    """Dotted key -> declared type, over all sections."""
    types = {}
    for name, section in _sections().items():
        hints = typing.get_type_hints(section)
        types |= {f"{name}.{f.name}": hints[f.name] for f in dataclasses.fields(section)}
    return types


def _override(key: str, text: str) -> dict[str, Any]:
    """One `key=value` word as a nested mapping."""
    declared = _declared_type(key)
    section, _, name = key.partition(".")
    if declared is str:
        return {section: {name: text}}
    if key in ("engine.strategies", "bandit.map"):
        return {section: {name: split_strategies(text)}}
    if typing.get_origin(declared) is list and not text.startswith("["):
        text = f"[{text}]"
    try:
        return {section: {name: yaml.load(text, _Loader)}}  # a SafeLoader
    except yaml.YAMLError:
        raise UserError(f"{key}: cannot read the value {text!r}") from None


def _declared_type(key: str) -> Any:
    types = _key_types()
    if key in types:
        return types[key]
    if key in _sections():
        raise UserError(f"{key}: is a section; write {key}.<name>=value, as {_first(types, key)}")
    near = difflib.get_close_matches(key, [*types, *_sections()], n=1)
    leaves = {name.partition(".")[2]: name for name in types}
    near = near or [
        leaves[leaf] for leaf in difflib.get_close_matches(key.rpartition(".")[2], leaves, n=1)
    ]
    hint = f"did you mean {near[0]}?" if near else f"sections are {', '.join(_sections())}"
    raise UserError(f"{key}: unknown key; {hint}")


def _first(types: Mapping[str, Any], section: str) -> str:
    return next(key for key in types if key.startswith(f"{section}."))


def _read_preset(preset: str) -> dict[str, Any]:
    if preset.endswith((".yaml", ".yml")):
        source = Path(preset)
    elif preset in preset_names():
        source = PRESETS / f"{preset}.yaml"
    else:
        names = preset_names()
        near = difflib.get_close_matches(preset, names, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"preset={preset}: unknown; {hint}there are {', '.join(names)}")
    try:
        tree = yaml.load(source.read_text(encoding="utf-8"), _Loader) or {}
    except OSError as error:
        raise UserError(f"preset={preset}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise UserError(f"preset={preset}: not UTF-8 text ({error.reason})") from None
    except yaml.YAMLError as error:
        raise UserError(f"preset={preset}: not YAML ({error})") from None
    if not isinstance(tree, dict):
        raise UserError(f"preset={preset}: wanted sections with keys, got {type(tree).__name__}")
    tree.pop("preset", None)
    for name, section in tree.items():
        if name not in _sections():
            _declared_type(str(name))
        if not isinstance(section, dict):
            raise UserError(f"preset={preset}: {name} wants keys below it, got {section!r}")
        for key in section:
            _declared_type(f"{name}.{key}")
    return tree


def _build(preset: str, layers: Sequence[Mapping[str, Any]]) -> Config:
    """Merges the layers over the defaults and checks types and limits."""
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Config), *layers, {"preset": preset})
        _check_items(merged)
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        reason = str(error.msg or error).splitlines()[0]
        raise UserError(f"{error.full_key or 'configuration'}: {reason}") from None
    assert isinstance(config, Config)
    return config


def _check_items(merged: Any) -> None:
    """Types of list items, which merging does not check."""
    for key, declared in _key_types().items():
        if typing.get_origin(declared) is not list:
            continue
        (wanted,) = typing.get_args(declared)
        for item in OmegaConf.select(merged, key):
            if type(item) is not wanted:
                raise UserError(f"{key}: wanted a list of {wanted.__name__}, got item {item!r}")
