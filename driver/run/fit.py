"""Whether a run fits into memory, and the nearest settings that do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..common.errors import UserError
from ..config.load import Config
from ..config.strategy import parse_strategies
from ..model.spec import ModelSpec
from ..rollout.pages import pages_for
from .assemble import auto_pages, longest_request
from .footprint import Footprint, footprint

MOST_RANKS = 64  # largest number of ranks in a proposal


@dataclass(frozen=True)
class RunShape:
    """The inputs of the memory estimate besides the configuration.

    Attributes:
        spec: of the policy, in the dtype of the run.
        prompt_len: tokens of the longest prompt.
        ranks: number of ranks.
    """

    spec: ModelSpec
    prompt_len: int
    ranks: int = 1

    def footprint(self, config: Config) -> Footprint:
        return footprint(config, self.spec, self.prompt_len, self.ranks)


def check_fits(config: Config, shape: RunShape, limit_gb: float) -> None:
    """Rejects a run that does not fit into memory.

    Args:
        config: of the run.
        shape: its model, longest prompt and ranks.
        limit_gb: memory of the card or the machine, in 10^9 bytes; 0 = unknown.

    Raises:
        UserError: with the predicted peak, its largest part, and settings that fit.
    """
    parts, limit = shape.footprint(config), round(limit_gb * 1e9)
    if not limit or parts.peak <= limit:
        return
    held = parts.always | parts.phases[parts.largest]
    largest = max(held, key=lambda part: held[part])
    raise UserError(
        f"memory: the run needs {parts.peak / 1e9:.2f} GB in the phase {parts.largest!r}, there are"
        f" {limit_gb:.2f} GB; the largest part is {largest}, {held[largest] / 1e9:.2f} GB;"
        f" {_remedy(config, shape, limit)}"
    )


def _remedy(config: Config, shape: RunShape, limit: int) -> str:
    ranks = shape.ranks
    while ranks <= min(MOST_RANKS, config.grpo.prompts_per_step):
        larger = replace(shape, ranks=ranks)
        words = fitting(config, larger, limit)
        if words is not None:
            more = f" on {ranks} ranks" if ranks > shape.ranks else ""
            return (
                f"these settings fit{more}: {' '.join(words)}; if responses stay far below"
                " sampling.max_new_tokens, run.check_memory=false starts the run anyway"
            )
        ranks *= 2
    least = shape.footprint(_smallest(config, shape)).peak
    return (
        f"the smallest micro-batch, batch and page pool still need {least / 1e9:.2f} GB: use a"
        " smaller model, more ranks with grpo.shard=true, or a shorter sampling.max_new_tokens"
    )


def fitting(config: Config, shape: RunShape, limit: int) -> list[str] | None:
    """The nearest settings whose run fits.

    Starts from the smallest run and raises the settings one by one as far as the limit allows,
    starting with those that matter most for speed.

    Args:
        config: of a run that does not fit.
        shape: its model, longest prompt and ranks.
        limit: bytes.

    Returns:
        `key=value` words to add to those of the run; None = not even the smallest run fits.
    """
    chosen = _smallest(config, shape)
    if shape.footprint(chosen).peak > limit:
        return None
    words = []
    for knob in KNOBS:
        values = list(knob.values(config, shape))
        # Values fall, and so does the peak: find the first value that fits.
        low, high = 0, len(values) - 1
        while low < high:
            middle = (low + high) // 2
            if shape.footprint(knob.set(chosen, values[middle])).peak <= limit:
                high = middle
            else:
                low = middle + 1
        chosen = knob.set(chosen, values[high])
        if high:
            words.append(f"{knob.section}.{knob.name}={str(values[high]).lower()}")
    return words


@dataclass(frozen=True)
class Knob:
    """A setting that memory depends on.

    Attributes:
        section, name: its key.
        values: its value in the run, then falling values.
    """

    section: str
    name: str
    values: Callable[[Config, RunShape], Iterator[int | bool]]

    def set(self, config: Config, value: int | bool) -> Config:
        section = replace(getattr(config, self.section), **{self.name: value})
        return replace(config, **{self.section: section})


def _smallest(config: Config, shape: RunShape) -> Config:
    for knob in KNOBS:
        config = knob.set(config, list(knob.values(config, shape))[-1])
    return config


def _halved(value: int, least: int) -> Iterator[int]:
    yield value
    while value // 2 >= least:
        value //= 2
        yield value


def _micro_batches(config: Config, shape: RunShape) -> Iterator[int]:
    # A row holds the longest response whatever the setting.
    longest = shape.prompt_len + config.sampling.max_new_tokens
    return _halved(config.grpo.micro_batch_tokens, min(longest, config.grpo.micro_batch_tokens))


def _checkpointing(config: Config, shape: RunShape) -> Iterator[bool]:
    yield config.grpo.checkpointing
    if not config.grpo.checkpointing:
        yield True


def _shard(config: Config, shape: RunShape) -> Iterator[bool]:
    yield config.grpo.shard
    if not config.grpo.shard and shape.ranks > 1:
        yield True


def _pages(config: Config, shape: RunShape) -> Iterator[int]:
    """Sizes of the pool, down to one request of full length."""
    engine, arms = config.engine, parse_strategies(config.engine.strategies)
    longest = longest_request(config, shape.spec, shape.prompt_len)
    flight = max((max(arm.num_verify, arm.depth * arm.top_k) for arm in arms), default=1)
    yield engine.num_pages
    wanted = engine.num_pages or auto_pages(engine, arms, longest)
    yield from list(_halved(wanted, pages_for(longest + flight, engine.page_size) + 2))[1:]


def _batches(config: Config, shape: RunShape) -> Iterator[int]:
    return _halved(config.engine.max_batch, 1)


def _buffers(config: Config, shape: RunShape) -> Iterator[int]:
    spot = config.spot
    return _halved(spot.buffer_tokens, min(spot.buffer_tokens, spot.tokens_per_step))


# The settings that matter most for speed come first: they are lowered last.
KNOBS = (
    Knob("engine", "max_batch", _batches),
    Knob("engine", "num_pages", _pages),
    Knob("grpo", "checkpointing", _checkpointing),
    Knob("spot", "buffer_tokens", _buffers),
    Knob("grpo", "micro_batch_tokens", _micro_batches),
    Knob("grpo", "shard", _shard),
)


def memory_gb(device: str) -> float:
    """Memory of the card or the machine, in 10^9 bytes; 0 = unknown."""
    if device == "cpu":
        try:
            lines = Path("/proc/meminfo").read_text().splitlines()
        except OSError:
            return 0.0
        found = [line.split()[1] for line in lines if line.startswith("MemTotal:")]
        return int(found[0]) * 1024 / 1e9 if found else 0.0
    index = int(device.partition(":")[2] or 0)
    if index >= torch.cuda.device_count():
        return 0.0
    return torch.cuda.get_device_properties(index).total_memory / 1e9
