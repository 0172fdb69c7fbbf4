"""`python -m driver.train --dry-run key=value ...`: estimates memory and time of a run.

Reports the memory by part (`footprint.py`) and the time of a step by phase, as bytes, FLOPs and
launches over the ceilings of the machine. Rejects a run that does not fit. It downloads nothing:
`model.path=` may be a folder with only a `config.json`, and smollm2 need not be in the cache.
"""

from __future__ import annotations

import heapq
import json
import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import NormalDist

import torch

from ..common.errors import UserError
from ..common.memory import FLOAT_BYTES
from ..config.load import Config
from ..config.options import read_dry_run
from ..config.strategy import OFF
from ..model.drafter import DraftSpec
from ..model.fetch import is_smollm2, model_folder, smollm2_folder
from ..model.spec import ModelSpec
from ..policy.trainer import has_own_old_logprobs
from ..rollout.plan import Cell, GraphCost
from ..session.load import TOKENIZER_FILES, load_tokenizer
from ..tasks import make_task
from .assemble import check_context, check_engine, check_prompts, check_ranks, prompt_encoder
from .fit import as_words, changed, check_fits, decided, faster, fits, fitting, memory_gb
from .footprint import RunShape, comparison, policy_spec, table

CEILINGS = Path(__file__).with_name("ceilings.json")  # by `python -m profiling.rig.ceilings`
PROMPT_TOKENS = 256  # assumed without a tokenizer
HOST_BYTES_PER_S, PCIE_BYTES_PER_S = 1e11, 5e10  # stated, for grpo.offload
SIGMA = 1.0  # assumed: the deviation of the logarithm of response lengths
MEAN_SHARE = 0.25  # assumed: the mean length over the limit


@dataclass(frozen=True)
class Ceilings:
    """The peak rates of a machine, and the source of the numbers."""

    bytes_per_s: float
    flops_per_s: float
    launch_s: float  # of one of many small dependent kernels in a graph
    link_bytes_per_s: float  # from a rank to the others
    source: str


H100 = "stated for an H100: 3.0 TB/s, 600 TFLOP/s, 1.3 us a launch, NVLink at 300 GB/s"
CPU = "stated for two cores: 20 GB/s, 0.1 TFLOP/s, a network of 1 GB/s"
STATED = {
    "cuda": Ceilings(3.0e12, 6.0e14, 1.3e-6, 3.0e11, H100),
    "cpu": Ceilings(2.0e10, 1.0e11, 0.0, 1.0e9, CPU),
}


def dry_run(argv: Sequence[str], say: Callable[[str], None]) -> None:
    """Calls `say` with the lines about memory and time of the run that the words `argv` describe.

    With several numbers of ranks it compares the memory of a rank, and rejects none of them.

    Raises:
        UserError: a word is invalid, or the run does not fit into memory.
    """
    words, own, config = read_dry_run(argv)
    shape = run_shape(config, shape_folder(config), words.ranks[0], words.prompt_tokens)
    for ranks in words.ranks:
        check_ranks(config, ranks)
    most = config.sampling.max_new_tokens
    if words.mean_tokens > most:
        raise UserError(
            f"mean_tokens={words.mean_tokens}: expected at most sampling.max_new_tokens={most}"
        )
    mean = words.mean_tokens or max(1, round(MEAN_SHARE * most))
    spec, limits = shape.spec, ceilings(config)
    limit_gb = words.memory_gb or memory_gb(config.run.device)
    say(f"{spec.family}, {spec.num_parameters / 1e6:.1f} M parameters, {config.model.dtype}")
    if len(words.ranks) > 1:
        shapes = {n: replace(shape, ranks=n) for n in words.ranks}
        parts = {n: s.footprint(decided(config, s, limit_gb)) for n, s in shapes.items()}
        for line in comparison(parts, limit_gb):
            say(line)
        return
    asked, config = config, decided(config, shape, limit_gb)
    for line in table(shape.footprint(config)):
        say(line)
    other = {"grpo.checkpointing": not config.grpo.checkpointing}
    say(f"  with {as_words(other)}: peak {shape.footprint(changed(config, other)).peak / 1e9:.3f}")
    on = f" on each of {shape.ranks} ranks" if shape.ranks > 1 else ""
    say(
        f"a step in seconds, at least{on}: prompts of {shape.prompt_len} tokens, responses of"
        f" {mean} in the mean, without speculation"
    )
    say(f"  {limits.source}")
    seconds = step_seconds(config, shape, mean, limits)
    for name, value in seconds.items():
        say(f"    {name:<22}{value:>9.3f}")
    say(f"    {'together':<22}{sum(seconds.values()):>9.3f}")
    fit = fits(config, shape, limit_gb)
    if changes := faster(asked, shape, limit_gb) if fit else fitting(config, shape, limit_gb):
        kept = [word for word in own if word.partition("=")[0] not in changes]
        command = shlex.join([*kept, *as_words(changes).split()])
        say(f"{'faster, and fits' if fit else 'fits'} {limit_gb:.0f} GB:")
        launch = f"torchrun --standalone --nproc-per-node {shape.ranks}"
        say(f"  {launch if shape.ranks > 1 else 'python'} -m driver.train {command}")
    check_fits(config, shape, limit_gb)


def check_run(config: Config, folder: Path | None, ranks: int = 1) -> tuple[Config, RunShape]:
    """The settings of a run, with those decided that are `auto`, and its shape.

    Raises:
        UserError: the run exceeds the context of its model, its engine, or the memory or the
            kernels of its card.
    """
    spec = policy_spec(config, folder)
    shape = RunShape(spec, longest_prompt(config, folder, spec), ranks)
    check_engine(config, spec, shape.prompt_len)
    limit_gb = memory_gb(config.run.device)
    config = decided(config, shape, limit_gb)
    if config.run.check_memory and config.run.device != "cpu":
        check_fits(config, shape, limit_gb)
    return config, shape


def run_shape(
    config: Config, folder: Path | None, ranks: int = 1, prompt_tokens: int = 0
) -> RunShape:
    """The inputs of the memory and time estimates besides the configuration.

    Args:
        folder: from `shape_folder`.
        prompt_tokens: of the longest prompt; 0 = by the tokenizer, else `PROMPT_TOKENS`.
    """
    spec = policy_spec(config, folder)
    if not prompt_tokens:
        if folder is None or any((folder / name).exists() for name in TOKENIZER_FILES):
            prompt_tokens = longest_prompt(config, folder, spec)
    prompt_tokens = prompt_tokens or PROMPT_TOKENS
    check_context(prompt_tokens, config.sampling.max_new_tokens, spec.max_position)
    check_engine(config, spec, prompt_tokens)
    return RunShape(spec, prompt_tokens, ranks)


def longest_prompt(config: Config, folder: Path | None, spec: ModelSpec) -> int:
    """Tokens of the longest prompt of a run; a prompt that exceeds the context is an error."""
    task = make_task(**asdict(config.task))
    encode = prompt_encoder(config, task, load_tokenizer(folder))
    return check_prompts(task, encode, config.sampling.max_new_tokens, spec.max_position)


def shape_folder(config: Config) -> Path | None:
    """The folder with the model's `config.json`, which smollm2 may not have yet; None = tiny."""
    model = config.model
    if model.path == "tiny":
        return None
    if is_smollm2(model.path):
        return smollm2_folder(model.cache)
    return model_folder(model.path)


# ---- the time of a step -------------------------------------------------------------------------


def ceilings(config: Config) -> Ceilings:
    """The ceilings of this machine: measured by benchmarks, or else the stated values."""
    if config.run.device == "cpu":
        return STATED["cpu"]
    cards = json.loads(CEILINGS.read_text(encoding="utf-8"))
    # Without a card, the estimate is for a measured one.
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else next(iter(cards), "")
    limits, measured = STATED["cuda"], cards.get(card, {})
    if not {"copy_gb_per_s", "us_per_kernel"} <= measured.keys():
        return limits
    copy, launch = measured["copy_gb_per_s"], measured["us_per_kernel"]
    source = f"measured on {card}: copy of {copy:.0f} GB/s, {launch:.2f} us a kernel; else "
    return replace(
        limits, bytes_per_s=copy * 1e9, launch_s=launch * 1e-6, source=source + limits.source
    )


def step_seconds(config: Config, shape: RunShape, mean: int, limits: Ceilings) -> dict[str, float]:
    """Seconds of a step by phase: the largest of bytes, FLOPs and launches over the ceilings.

    Args:
        mean: tokens of a response.

    Returns:
        Phase -> seconds of one rank, without speculation; rewards and logging are not in it.
    """
    spec, grpo, ranks = shape.spec, config.grpo, shape.ranks
    numbers, size = spec.num_parameters, spec.dtype.itemsize
    head = spec.vocab_size * spec.hidden_size
    length = shape.prompt_len + mean
    tokens = grpo.prompts_per_step * grpo.samples_per_prompt * length / ranks
    attention = 4 * spec.num_layers * spec.q_dim * length / 2
    forward = tokens * (2 * matrix_numbers(spec) + attention)
    # Backward is twice a forward pass; logits are recomputed, and layers if checkpointed.
    update = 3 * forward + 2 * tokens * head
    if grpo.checkpointing:
        update += forward - 2 * tokens * head
    optimizer = numbers * FLOAT_BYTES * 8 / ranks / limits.bytes_per_s
    # Of each micro-batch: weights are gathered twice, float32 gradients scattered once.
    rows = -(-int(tokens) // grpo.micro_batch_tokens)
    others = (ranks - 1) / ranks / limits.link_bytes_per_s
    exchange = rows * numbers * (2 * size + FLOAT_BYTES) * others
    if grpo.offload == "moments":
        optimizer += numbers * 4 * FLOAT_BYTES / ranks / PCIE_BYTES_PER_S
    if grpo.offload == "all":
        optimizer *= limits.bytes_per_s / HOST_BYTES_PER_S
        exchange += rows * numbers * 3 * FLOAT_BYTES / ranks / PCIE_BYTES_PER_S
    minibatches = grpo.epochs * grpo.minibatches
    before = (not has_own_old_logprobs(grpo)) + (grpo.kl_coef > 0)  # the policy's, the reference's
    out = {
        "gen": rollout_seconds(config, shape, mean, limits),
        "old_log_prob": before * forward / limits.flops_per_s,
        "update_actor": grpo.epochs * update / limits.flops_per_s
        + minibatches * optimizer
        + grpo.epochs * exchange,
        "update_weights": 2 * numbers * size / limits.bytes_per_s + numbers * size * others,
    }
    if config.engine.needs_drafter and config.spot.mode != "off":
        draft = DraftSpec.of(spec, draft_vocab=config.drafter.draft_vocab)
        width = 5 * spec.hidden_size + 3 * draft.intermediate_size + draft.draft_vocab
        seen = config.spot.final_steps * config.spot.tokens_per_step * config.drafter.unroll
        out["update_drafter"] = 6 * seen * spec.hidden_size * width / limits.flops_per_s
    return out


def matrix_numbers(spec: ModelSpec) -> int:
    """Weights that a row is multiplied with: all but the embedding, unless it is the head too."""
    embedding = 0 if spec.tie_word_embeddings else spec.vocab_size * spec.hidden_size
    return spec.num_parameters - embedding


def rollout_seconds(config: Config, shape: RunShape, mean: int, limits: Ceilings) -> float:
    """Seconds of all passes of a rank without speculation, on lengths with a long tail."""
    spec, size, prompt_len = shape.spec, shape.spec.dtype.itemsize, shape.prompt_len
    shared = config.engine.tensor_parallel  # the time of its exchanges is not included
    matrix, groups = matrix_numbers(spec) // shared, shape.ranks // shared
    each = 2 * spec.num_layers * spec.kv_dim * size  # KV bytes of a token
    prompts = -(-config.grpo.prompts_per_step // groups)
    responses = config.grpo.prompts_per_step * config.grpo.samples_per_prompt
    lengths = tail_lengths(responses, mean, config.sampling.max_new_tokens)
    # Lengths of the rank with the longest response; the ranks' lengths are nearly equal.
    lengths = lengths[::-1][::groups][::-1]
    seconds = 2 * matrix * prompts * prompt_len / limits.flops_per_s
    launches = limits.launch_s * GraphCost(spec).nodes(Cell(1, OFF))
    running = list(lengths[: config.engine.max_batch])  # the last pass of each
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
    """Lengths at even quantiles of a lognormal distribution, cut at the limit."""
    logarithm = NormalDist(math.log(mean) - SIGMA**2 / 2, SIGMA)
    quantiles = [(i + 0.5) / count for i in range(count)]
    return [min(limit, max(1, round(math.exp(logarithm.inv_cdf(q))))) for q in quantiles]
