"""`python -m driver.train --dry-run key=value ...`: what a run would take, before it takes it.

Memory by part (`footprint.py`), the time of a step by phase from bytes, FLOPs and launches over
the ceilings of the machine, and a refusal where the memory does not suffice. `model.path=` may be a
folder with nothing but a `config.json`. Further words: `memory_gb=` (of the card; default is
the one that is there), `prompt_tokens=` (of the longest prompt, where there is no tokenizer),
`mean_tokens=` (of a response) and `ranks=` (of which each may hold a part of the optimizer,
`grpo.shard`). A run on a card is refused by the same numbers.
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import NormalDist

import torch
from transformers import PreTrainedModel

from ..common.errors import UserError
from ..common.host_copies import held_bytes
from ..config.load import Config
from ..config.options import read_dry_run
from ..config.strategy import OFF
from ..model.drafter import DraftSpec
from ..model.fetch import resolve_model
from ..model.spec import ModelSpec
from ..policy.trainer import has_own_old_logprobs
from ..rollout.plan import Cell, GraphCost
from ..tasks import make_task
from .assemble import TOKENIZER_FILES, check_context, load_tokenizer, longest_prompt, spec_of
from .footprint import FLOAT, Footprint, empty_policy, footprint, table

RESULTS = Path(__file__).resolve().parents[2] / "profiling" / "results"
PROMPT_TOKENS = 256  # where nothing tells
SIGMA = 1.0  # of the logarithm of response lengths: the long tail that is assumed
MEAN_SHARE = 0.25  # of the limit, the mean length that is assumed


@dataclass(frozen=True)
class Ceilings:
    """What a machine can do at most, and where that is from."""

    bytes_per_s: float
    flops_per_s: float
    launch_s: float  # of one of many small kernels that wait for each other, in a graph
    source: str


STATED = {
    "cuda": Ceilings(3.0e12, 6.0e14, 1.3e-6, "stated for an H100: 3.0 TB/s, 600 TFLOP/s, 1.3 us"),
    "cpu": Ceilings(2.0e10, 1.0e11, 0.0, "stated for two cores: 20 GB/s, 0.1 TFLOP/s"),
}


def dry_run(argv: Sequence[str], say: Callable[[str], None]) -> None:
    """Reports a run of these words.

    Args:
        argv: `key=value` words.
        say: takes the lines.

    Raises:
        UserError: a mistake in the words, or the run does not fit: the message has the numbers.
    """
    words, config = read_dry_run(argv)
    folder = shape_folder(config)
    policy = empty_policy(config, folder)
    prompt_len = words.prompt_tokens or prompt_tokens(config, folder)
    check_context(prompt_len, config.sampling.max_new_tokens, spec_of(policy).max_position)
    ranks = words.ranks or 1
    parts = footprint(config, policy, prompt_len, ranks)
    numbers = sum(p.numel() for p in policy.parameters())
    say(f"{type(policy).__name__}, {numbers / 1e6:.1f} M parameters, {config.model.dtype}")
    for line in table(parts):
        say(line)
    other = replace(config.grpo, checkpointing=not config.grpo.checkpointing)
    flipped = footprint(replace(config, grpo=other), policy, prompt_len, ranks)
    state = str(other.checkpointing).lower()
    say(f"  with grpo.checkpointing={state}: peak {flipped.peak / 1e9:.3f}")
    most = config.sampling.max_new_tokens
    if words.mean_tokens > most:
        raise UserError(f"mean_tokens: wanted at most sampling.max_new_tokens={most}")
    mean = words.mean_tokens or max(1, round(MEAN_SHARE * most))
    limits = ceilings(config)
    say(
        f"a step in seconds, at least: prompts of {prompt_len} tokens, responses of {mean} in the"
        f" mean, without speculation"
    )
    say(f"  {limits.source}")
    seconds = step_seconds(config, policy, prompt_len, mean, limits)
    for name, value in seconds.items():
        say(f"    {name:<22}{value:>9.3f}")
    say(f"    {'together':<22}{sum(seconds.values()):>9.3f}")
    check_fits(parts, words.memory_gb or memory_gb(config.run.device))


def check_run(config: Config, folder: Path | None, ranks: int = 1) -> None:
    """Refuses a run whose responses its model, or whose memory its card, has no room for.

    Args:
        config: of the run.
        folder: of the model; None = the tiny one.
        ranks: of the run.

    Raises:
        UserError: as of a dry run, with the same numbers, before anything is taken.
    """
    policy, prompt_len = empty_policy(config, folder), prompt_tokens(config, folder)
    check_context(prompt_len, config.sampling.max_new_tokens, spec_of(policy).max_position)
    if config.run.check_memory:
        parts = footprint(config, policy, prompt_len, ranks)
        check_fits(parts, memory_gb(config.run.device))


def check_fits(parts: Footprint, limit_gb: float) -> None:
    """Refuses, with the numbers, what does not fit."""
    if limit_gb and parts.peak > limit_gb * 1e9:
        held = parts.always | parts.phases[parts.largest]
        largest = max(held.items(), key=lambda item: item[1])
        raise UserError(
            f"wanted {parts.peak / 1e9:.2f} GB in {parts.largest!r}, got {limit_gb:.2f} GB:"
            f" {(parts.peak / 1e9 - limit_gb):.2f} GB short. The largest part is {largest[0]},"
            f" {largest[1] / 1e9:.2f} GB; smaller: engine.num_pages, engine.max_batch,"
            " grpo.micro_batch_tokens, spot.buffer_tokens, grpo.checkpointing=true; where responses"
            " stay far below sampling.max_new_tokens, run.check_memory=false starts it anyway"
        )


def memory_gb(device: str) -> float:
    """Of the card or the machine, in 10^9 bytes; 0 where that is not known."""
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


def shape_folder(config: Config) -> Path | None:
    """The folder with the shape: weights need not be there."""
    path = Path(config.model.path).expanduser()
    if config.model.path == "tiny":
        return None
    if (path / "config.json").exists():
        ModelSpec.from_folder(path)  # refuses by name what the engine cannot run
        return path
    return resolve_model(config.model.path, config.model.cache)


def prompt_tokens(config: Config, folder: Path | None) -> int:
    """Of the longest prompt, where a tokenizer tells."""
    if folder is not None and not any((folder / name).exists() for name in TOKENIZER_FILES):
        return PROMPT_TOKENS
    return longest_prompt(make_task(**asdict(config.task)), load_tokenizer(folder))


# ---- the time of a step -------------------------------------------------------------------------


def ceilings(config: Config) -> Ceilings:
    """What this machine can do, as benchmarks measured it; what they did not, as stated."""
    if config.run.device == "cpu":
        return STATED["cpu"]
    here = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    found, limits = [], STATED["cuda"]
    for path in sorted(RESULTS.glob("*/l[ao]*.json")):  # of layers, of loop
        result = json.loads(path.read_text())
        meta, rows = result["meta"], result["rows"]
        if here not in (None, meta["card"]):
            continue
        if path.stem == "layers" and "copy_gb_per_s" in meta:
            limits = replace(limits, bytes_per_s=meta["copy_gb_per_s"] * 1e9)
            found.append(f"copy of {meta['copy_gb_per_s']:.0f} GB/s")
        if path.stem == "loop":
            us = {row["case"]: row["median_us"] for row in rows if "median_us" in row}
            each = (us["loop of 300 kernels b1"] - us["loop of 30 kernels b1"]) / 270
            limits = replace(limits, launch_s=each * 1e-6)
            found.append(f"{each:.2f} us a kernel")
    if found:
        limits = replace(limits, source=f"measured: {', '.join(found)}; else {limits.source}")
    return limits


def step_seconds(
    config: Config, policy: PreTrainedModel, prompt_len: int, mean: int, limits: Ceilings
) -> dict[str, float]:
    """Seconds of a step by phase: the largest of bytes, FLOPs and launches over the ceilings.

    Args:
        config: of the run.
        policy: of any device; its shape counts.
        prompt_len: tokens of a prompt.
        mean: tokens of a response.
        limits: of the machine.

    Returns:
        Phase -> seconds, without speculation; rewards and logging are not in it.
    """
    spec, grpo = spec_of(policy), config.grpo
    numbers = sum(p.numel() for p in policy.parameters())
    size = policy.dtype.itemsize
    # An embedding is looked up; as a head it is multiplied with.
    matrix = numbers - (0 if spec.tie_word_embeddings else spec.vocab_size * spec.hidden_size)
    head = spec.vocab_size * spec.hidden_size
    responses = grpo.prompts_per_step * grpo.samples_per_prompt
    tokens = responses * (prompt_len + mean)
    attention = 4 * spec.num_layers * spec.num_heads * spec.head_dim * (prompt_len + mean) / 2
    forward = tokens * (2 * matrix + attention)
    # Backward is twice a forward pass; logits are made again, and layers where so configured.
    update = 3 * forward + 2 * tokens * head
    if grpo.checkpointing:
        update += forward - 2 * tokens * head
    optimizer = numbers * (FLOAT * 8 + size) / limits.bytes_per_s
    minibatches = grpo.epochs * grpo.minibatches
    before = (not has_own_old_logprobs(grpo)) + (grpo.kl_coef > 0)  # the policy's, the reference's
    out = {
        "gen": rollout_seconds(config, policy, prompt_len, mean, matrix, limits),
        "old_log_prob": before * forward / limits.flops_per_s,
        "update_actor": grpo.epochs * update / limits.flops_per_s + minibatches * optimizer,
        "update_weights": 2 * held_bytes(policy) / limits.bytes_per_s,
    }
    if config.drafter.enabled and config.spot.mode != "off":
        draft = DraftSpec.of(spec, config.drafter.intermediate_size, config.drafter.draft_vocab)
        width = 5 * spec.hidden_size + 3 * draft.intermediate_size + draft.draft_vocab
        seen = config.spot.final_steps * config.spot.tokens_per_step * config.drafter.unroll
        out["update_drafter"] = 6 * seen * spec.hidden_size * width / limits.flops_per_s
    return out


def rollout_seconds(
    config: Config,
    policy: PreTrainedModel,
    prompt_len: int,
    mean: int,
    matrix: int,
    limits: Ceilings,
) -> float:
    """Seconds of all passes without speculation, on lengths with a long tail."""
    spec, size = spec_of(policy), policy.dtype.itemsize
    each = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * size  # KV bytes of a token
    responses = config.grpo.prompts_per_step * config.grpo.samples_per_prompt
    lengths = tail_lengths(responses, mean, config.sampling.max_new_tokens)
    seconds = 2 * matrix * config.grpo.prompts_per_step * prompt_len / limits.flops_per_s
    launches = limits.launch_s * GraphCost(spec).nodes(Cell(1, OFF))
    running = list(lengths[: config.engine.max_batch])  # the pass at which each ends
    heapq.heapify(running)
    waiting, now = list(lengths[config.engine.max_batch :]), 0
    while running:
        end, active = heapq.heappop(running), len(running) + 1
        context = active * (prompt_len + min(end, mean))
        read = matrix * size + context * each
        flops = 2 * active * matrix
        one = max(read / limits.bytes_per_s, flops / limits.flops_per_s, launches)
        seconds += (end - now) * one
        now = end
        if waiting:
            heapq.heappush(running, now + waiting.pop())
    return seconds


def tail_lengths(count: int, mean: int, limit: int) -> list[int]:
    """Lengths at even quantiles of a lognormal law, cut at the limit."""
    law = NormalDist(math.log(mean) - SIGMA**2 / 2, SIGMA)
    quantiles = [(i + 0.5) / count for i in range(count)]
    return [min(limit, max(1, round(math.exp(law.inv_cdf(q))))) for q in quantiles]
