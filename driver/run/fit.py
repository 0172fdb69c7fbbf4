"""Whether a run fits into memory, and which settings make it fit."""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import torch

from ..common.errors import UserError
from ..common.memory import host_bytes
from ..config.load import Config
from ..config.sections import GROUP_SIZES
from ..model.shards import Shard
from ..tasks import make_task
from .footprint import RunShape

Changes = dict[str, Any]  # setting -> value


def decided(config: Config, shape: RunShape, limit_gb: float) -> Config:
    """The configuration with `grpo.shard=auto` and `engine.free_in_update=auto` decided."""
    shard, free = [config.grpo.shard], [config.engine.free_in_update]
    if shard == ["auto"]:
        shard = ["false", "true"] if config.grpo.offload == "none" else ["true"]
    if free == ["auto"]:
        free = ["false", "true"] if config.run.device != "cpu" else ["false"]
    words = [{"grpo.shard": s, "engine.free_in_update": f} for f in free for s in shard]
    made = [changed(config, each) for each in words]
    return next((each for each in made if fits(each, shape, limit_gb)), made[-1])


def check_fits(config: Config, shape: RunShape, limit_gb: float, host_gb: float = math.inf) -> None:
    """Rejects a run that does not fit, with its peak, the largest part, and settings that fit.

    `limit_gb` is the memory of the card or the machine, in 10^9 bytes, 0 = unknown; `host_gb` a
    rank's share of the memory of the machine with the card.
    """
    parts = shape.footprint(config)
    if parts.host > host_gb * 1e9:
        raise UserError(
            f"grpo.offload={config.grpo.offload}: it keeps {parts.host / 1e9:.2f} GB on the host,"
            f" which has {host_gb:.2f} GB for a rank; use more machines or another grpo.offload"
        )
    if fits(config, shape, limit_gb):
        return
    held = parts.always | parts.phases[parts.largest]
    largest = max(held, key=lambda part: held[part])
    changes = fitting(config, shape, limit_gb)
    remedy = f"it fits with {as_words(changes)}" if changes else "use more ranks"
    raise UserError(
        f"memory: the run needs {parts.peak / 1e9:.2f} GB in the phase {parts.largest!r}, there are"
        f" {limit_gb:.2f} GB; the largest part is {largest}, {held[largest] / 1e9:.2f} GB;"
        f" {remedy}; if responses stay far below"
        " sampling.max_new_tokens, run.check_memory=false starts the run anyway"
    )


def fits(config: Config, shape: RunShape, limit_gb: float) -> bool:
    """Whether the predicted peak is within the limit; always with an unknown one."""
    return not limit_gb or shape.footprint(config).peak <= limit_gb * 1e9


def fitting(config: Config, shape: RunShape, limit_gb: float) -> Changes:
    """The changes that make a run fit and cost least time; {} if none do.

    Settings are changed by rising cost until the run fits, then set back as far as it still fits.
    With all weights on the host, each packed row moves them over the bus: long ones are chosen.
    """
    changes: Changes = {}
    tried: dict[str, list[Any]] = {}
    for key, value in _savings(config, shape):
        changes[key] = value
        tried.setdefault(key, []).append(value)
        if fits(changed(config, changes), shape, limit_gb):
            break
    else:
        return {}
    for key in reversed(list(tried)):
        others = {other: value for other, value in changes.items() if other != key}
        milder = [others, *({**changes, key: value} for value in tried[key])]
        changes = next(some for some in milder if fits(changed(config, some), shape, limit_gb))
    for factor in (4, 2) if changes.get("grpo.offload") == "all" else ():
        longer = {**changes, "grpo.micro_batch_tokens": factor * config.grpo.micro_batch_tokens}
        if fits(changed(config, longer), shape, limit_gb):
            return longer
    return changes


def faster(config: Config, shape: RunShape, limit_gb: float) -> Changes:
    """The changes that cost memory, save time and still fit; {} if the memory is not known."""
    changes: Changes = {}
    for key, value in (("grpo.offload", "none"), ("grpo.checkpointing", False)):
        other = changed(config, {**changes, key: value})
        if limit_gb and other != changed(config, changes):
            if fits(decided(other, shape, limit_gb), shape, limit_gb):
                changes[key] = value
    return changes


def _savings(config: Config, shape: RunShape) -> Iterator[tuple[str, Any]]:
    """Settings and values that save memory, by rising cost in time."""
    engine, grpo = config.engine, config.grpo
    if engine.free_in_update != "true" and config.run.device != "cpu":
        yield "engine.free_in_update", "true"
    if grpo.shard == "false" and shape.ranks > 1:
        yield "grpo.shard", "true"
    longest = shape.prompt_len + config.sampling.max_new_tokens  # a packed row is as long at least
    for size in _halves(grpo.micro_batch_tokens, longest):
        yield "grpo.micro_batch_tokens", size
    if not grpo.checkpointing:
        yield "grpo.checkpointing", True
    if grpo.offload == "none":
        yield "grpo.offload", "moments"
    for size in _halves(engine.max_batch, 8):
        yield "engine.max_batch", size
    if engine.num_pages:
        yield "engine.num_pages", 0
    for size in _group_sizes(config, shape):
        yield "engine.tensor_parallel", size
    if grpo.offload != "all":
        yield "grpo.offload", "all"
    for size in _halves(min(engine.max_batch, 8), 1):
        yield "engine.max_batch", size


def _group_sizes(config: Config, shape: RunShape) -> Iterator[int]:
    """Larger values of `engine.tensor_parallel` that the run could use."""
    sizes = [n for n in GROUP_SIZES if n > config.engine.tensor_parallel and shape.ranks % n == 0]
    if not sizes or make_task(**asdict(config.task)).has_turns:
        return
    for size in sizes:
        with suppress(UserError):  # a head would be divided
            Shard.of(shape.spec, 0, size)
            yield size


def _halves(value: int, least: int) -> Iterator[int]:
    while value > least:
        value = max(value // 2, least)
        yield value


def changed(config: Config, changes: Changes) -> Config:
    """The configuration with other values of some settings."""
    for key, value in changes.items():
        section, name = key.split(".")
        part = replace(getattr(config, section), **{name: value})
        config = replace(config, **{section: part})
    return config


def as_words(changes: Changes) -> str:
    """The changes as words of a command."""
    return " ".join(f"{key}={str(value).lower()}" for key, value in changes.items())


def memory_gb(device: str) -> float:
    """Memory of the card or the machine, in 10^9 bytes; 0 = unknown."""
    if device == "cpu":
        return host_bytes() / 1e9
    index = int(device.partition(":")[2] or 0)
    if index >= torch.cuda.device_count():
        return 0.0
    return torch.cuda.get_device_properties(index).total_memory / 1e9
