"""The configuration of a run: defaults, then a preset in YAML, then `key=value` words."""

import dataclasses
import typing
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from ..common.errors import UserError
from . import sections
from .fields import Section, field_types, nearest, read_value, split_word
from .strategy import parse_strategies

DEFAULT_PRESET = "tiny"
PRESETS = Path(__file__).resolve().parents[1] / "presets"


@dataclass(frozen=True)
class Config:
    """All settings of a run; `preset` records which file they started from."""

    preset: str = DEFAULT_PRESET
    run: sections.RunConfig = field(default_factory=sections.RunConfig)
    model: sections.ModelConfig = field(default_factory=sections.ModelConfig)
    warmup: sections.WarmupConfig = field(default_factory=sections.WarmupConfig)
    task: sections.TaskConfig = field(default_factory=sections.TaskConfig)
    tool: sections.ToolConfig = field(default_factory=sections.ToolConfig)
    reward: sections.RewardConfig = field(default_factory=sections.RewardConfig)
    sampling: sections.SamplingConfig = field(default_factory=sections.SamplingConfig)
    engine: sections.EngineConfig = field(default_factory=sections.EngineConfig)
    bandit: sections.BanditConfig = field(default_factory=sections.BanditConfig)
    drafter: sections.DrafterConfig = field(default_factory=sections.DrafterConfig)
    spot: sections.SpotConfig = field(default_factory=sections.SpotConfig)
    grpo: sections.GrpoConfig = field(default_factory=sections.GrpoConfig)

    def __post_init__(self) -> None:
        arms = parse_strategies(self.engine.strategies)
        for arm in (self.bandit.fixed() or {}).values():
            if arm not in arms:
                raise UserError(
                    f"bandit.policy: '{arm}' is not among engine.strategies"
                    f" ({' '.join(map(str, arms))}); add it there"
                )


def load_config(argv: Sequence[str], *, saved: bool = False) -> Config:
    """The checked configuration of a command line: defaults, then the preset, then other words.

    Among the words may be `preset=NAME` or `preset=FILE.yaml`. With `saved` that is the
    `config.yaml` of a run, perhaps of an earlier version: its keys that are no longer settings are
    ignored with a warning. Raises UserError for any other wrong word: one line that names the key.
    """
    words = dict(split_word(word, "run.steps") for word in argv)
    preset = words.pop("preset", DEFAULT_PRESET)
    types = {key: t for kind in section_types().values() for key, t in field_types(kind).items()}
    texts = _read_preset(preset)
    if saved and not texts:  # its defaults would be compared
        raise UserError(f"{preset}: has no settings; restore it")
    if saved and (unknown := texts.keys() - types.keys()):
        names = ", ".join(key for key in texts if key in unknown)
        warnings.warn(f"{preset}: {names}: no longer a setting, ignored", stacklevel=2)
        texts = {key: text for key, text in texts.items() if key in types}
    try:
        return _from_texts(preset, types, texts | words)
    except UserError as error:
        if saved and str(error).partition(":")[0] not in words:
            raise UserError(f"{preset}: {error}; restore or correct it") from None
        raise


def _from_texts(preset: str, types: Mapping[str, Any], texts: Mapping[str, str]) -> Config:
    values = {key: read_value(key, _declared_type(types, key), t) for key, t in texts.items()}
    made: dict[str, Any] = {}
    for name, kind in section_types().items():
        mine = [key for key in values if key.startswith(kind.prefix)]
        made[name] = kind(**{key.removeprefix(kind.prefix): values[key] for key in mine})
    return Config(preset, **made)


def to_yaml(config: Config) -> str:
    """A configuration as YAML text with every key, which `preset=FILE` reads back."""
    # Escaped text is ASCII: U+0085 and the like would be read back as line ends.
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)


def preset_names() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def preset_title(preset: str) -> str:
    """The name of a preset; of a file, its name without the suffix."""
    return Path(preset).stem if _is_file(preset) else preset


def _is_file(preset: str) -> bool:
    return preset.endswith((".yaml", ".yml"))


def section_types() -> dict[str, type[Section]]:
    """Section name -> its dataclass, in the order of `Config`."""
    hints = typing.get_type_hints(Config)
    return {f.name: hints[f.name] for f in dataclasses.fields(Config) if f.name != "preset"}


class _Loader(yaml.BaseLoader):
    """Scalars stay text: a field's type decides what `off`, `007` or `1e-4` means."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [str(key.value) for key, _ in node.value]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise yaml.MarkedYAMLError(problem=f"{twice} is given twice")
        return super().construct_mapping(node, deep)


def _declared_type(types: Mapping[str, Any], key: str) -> Any:
    if key in types:
        return types[key]
    names = list(section_types())
    if key in names:
        first = next(name for name in types if name.startswith(f"{key}."))
        raise UserError(f"{key}: is a section; write {key}.<name>=value, such as {first}")
    leaves = {name.partition(".")[2]: name for name in types}
    near = get_close_matches(key, [*types, *names], n=1)
    near = near or [leaves[leaf] for leaf in get_close_matches(key.rpartition(".")[2], leaves, n=1)]
    hint = f"did you mean {near[0]}?" if near else f"sections are {', '.join(names)}"
    raise UserError(f"{key}: unknown key; {hint}")


def _read_preset(preset: str) -> dict[str, str]:
    """Dotted key -> text of a preset file, as on the command line."""
    if not _is_file(preset) and preset not in preset_names():
        hint = nearest(preset, [*preset_names(), "a FILE.yaml"])
        raise UserError(f"preset={preset}: unknown; {hint}")
    source = Path(preset) if _is_file(preset) else PRESETS / f"{preset}.yaml"
    try:
        tree = yaml.load(source.read_text(encoding="utf-8"), _Loader) or {}  # a safe loader
    except OSError as error:
        raise UserError(f"preset={preset}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise UserError(f"preset={preset}: not UTF-8 text ({error.reason})") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise UserError(f"preset={preset}: not YAML ({error})") from None
    if not isinstance(tree, dict):
        raise UserError(f"preset={preset}: must contain sections with keys, got {tree!r}")
    tree.pop("preset", None)
    texts: dict[str, str] = {}
    for name, section in tree.items():
        if name not in section_types():  # a dotted key, or a mistake
            found = {name: section}
        elif section and not isinstance(section, dict):
            raise UserError(f"preset={preset}: {name} must contain keys, got {section!r}")
        else:
            found = {f"{name}.{key}": value for key, value in (section or {}).items()}
        if twice := sorted(texts.keys() & found.keys()):
            raise UserError(f"preset={preset}: {twice[0]} is given twice")
        texts |= {key: _text(value) for key, value in found.items()}
    return texts


def _text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
