"""`--help`: every key with its default and its meaning, generated from the fields."""

import dataclasses
import textwrap
from collections.abc import Sequence
from typing import Any

from .fields import Section
from .load import DEFAULT_PRESET, PRESETS, load_config, preset_names, section_types
from .options import OPTIONS, DryRunOptions

WIDTH = 96
TRAIN = """Train a policy by GRPO with speculative rollouts.

Each step: rollouts with speculation, rewards, one GRPO update, new weights into the engine. The
spot trainer trains the drafter in time that the tail of each rollout leaves idle. Everything is
kept under runs/<name>: metrics, samples, checkpoints, report, summary.

With --dry-run: print the memory that the run would take, and run nothing; then
model.path may be a folder with only a config.json. Without it, a run that by these numbers
does not fit into its card is refused."""
WARM = """Make and keep a warm start: a policy after supervised warm-up, with its drafter.

tlt train with the same settings and warmup.keep=true starts from it. Its folder can be used as
model.path=, and as model= of tlt generate. The same settings give the same bits on cards of one
kind; compare the printed fingerprints."""


def help_text(command: str, argv: Sequence[str] = ()) -> str:
    """The help of a command; with `preset=` among the words, also the values of that preset."""
    if command in OPTIONS:
        kind = OPTIONS[command]
        about = textwrap.dedent("    " + (kind.__doc__ or "")).strip()
        return "\n\n".join([f"usage: tlt {command} [key=value ...]", about, _fields(kind())])
    usage = f"usage: tlt {command} [preset=NAME|FILE.yaml] [section.key=value ...]"
    preset = ([w for w in argv if w.startswith("preset=")] or [f"preset={DEFAULT_PRESET}"])[-1]
    shown = load_config([preset])
    parts = [usage + " [--dry-run]" * (command == "train"), TRAIN if command == "train" else WARM]
    parts.append(f"Presets (without preset=, {DEFAULT_PRESET}):\n{_presets()}")
    parts.append(
        f"Each key has its default, and in brackets the value of {preset} if that differs."
    )
    if command == "train":
        parts.append(f"{DryRunOptions.__doc__}\n{_fields(DryRunOptions())}")
    for name, kind in section_types().items():
        section = getattr(shown, name)
        about = " ".join((kind.__doc__ or "").split())
        parts.append(f"{textwrap.fill(f'{name}: {about}', WIDTH)}\n{_fields(kind(), section)}")
    return "\n\n".join(parts)


def _presets() -> str:
    """A line for each preset: the first sentence of its file."""
    lines = []
    for name in preset_names():
        text = (PRESETS / f"{name}.yaml").read_text(encoding="utf-8").partition("\nrun:")[0]
        head = text[2:].replace("\n#", "").split(". ")[0].rstrip(".")
        lines.append(f"  {name:<8} {head}")
    return "\n".join(lines)


def _fields(defaults: Section, preset: Section | None = None) -> str:
    lines = []
    for item in dataclasses.fields(defaults):
        value = getattr(defaults, item.name)
        line = f"  {defaults.prefix}{item.name}={_show(value)}"
        if preset is not None and getattr(preset, item.name) != value:
            line += f"  [{_show(getattr(preset, item.name))}]"
        meaning = item.metadata["meaning"] + _limits(item.metadata)
        lines += [
            line,
            textwrap.fill(meaning, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6),
        ]
    return "\n".join(lines)


def _limits(limits: Any) -> str:
    if limits["words"]:
        return f" (one of {', '.join(map(str, limits['words']))})"
    low, above, high = limits["low"], limits["above"], limits["high"]
    bounds = [f"at least {low}"] * bool(low) + [f"more than {above}"] * (above is not None)
    bounds += [f"at most {high}"] * (high is not None)
    return f" ({', '.join(bounds)})" if bounds else ""


def _show(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
