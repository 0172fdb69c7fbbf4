"""Builds the parts of rollouts: target, cache, drafter, bandit, engine."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import tlt_ext
from tlt_ext.limits import GPU_HEAD_DIMS, GPU_MAX_GROUP, GPU_PAGE_SIZES

from ..common.errors import UserError
from ..common.spans import Sink
from ..common.tensor_parallel import TensorParallel
from ..config.load import Config
from ..config.sections import EngineConfig
from ..config.strategy import OFF, Strategy, parse_strategies
from ..drafter.overlap import OverlapTuner
from ..drafter.trainer import SpotTrainer
from ..model.checkpoint import check_finite
from ..model.drafter import Drafter, DraftSpec
from ..model.kv_cache import KvCache
from ..model.spec import ModelSpec
from ..model.target import TargetModel
from ..model.target_weights import Weights
from ..records.checkpoint import Checkpoint, earlier_versions
from ..rollout.bandit import Bandit
from ..rollout.draft_runner import DraftRunner
from ..rollout.engine import RolloutEngine
from ..rollout.pages import pages_for
from ..rollout.proposers import make_proposers

Note = Callable[[str], None]


@dataclass
class Rollout:
    target: TargetModel
    engine: RolloutEngine
    bandit: Bandit
    spot: SpotTrainer | None
    tuner: OverlapTuner | None = None  # of `spot`

    def watch(self, sink: Sink) -> None:
        """Sends the spans of the engine and of the spot trainer to `sink`."""
        self.engine.spans.sink = sink
        if self.spot is not None:
            self.spot.spans.sink = sink

    def fix(self, strategy: Strategy) -> None:
        """Makes the engine use one strategy wherever it can run, and `off` elsewhere."""
        engine = self.engine
        config = replace(engine.bandit.config, policy=str(strategy))
        engine.bandit = Bandit([OFF, strategy], config, engine.config.spec_max_batch)

    def update_weights(self, weights: Weights, version: int) -> None:
        target, dtype = self.target, self.target.dtype
        if isinstance(weights, Mapping):  # before the old ones are overwritten
            check_finite(weights, dtype, "weights")
        target.load_weights(weights)
        if not isinstance(weights, Mapping):
            check_finite(target.state_dict(), dtype, "weights")
        self.engine.target_version = version
        if self.spot is not None:
            self.spot.start_step(version)


@dataclass
class Parts:
    """The parts that hold the memory of rollouts."""

    target: TargetModel
    cache: KvCache
    drafter: Drafter | None
    runner: DraftRunner | None  # the drafter's twin at inference


def build_parts(
    config: Config,
    spec: ModelSpec,
    weights: dict[str, torch.Tensor],
    longest: int,
    device: str,
    parallel: TensorParallel | None = None,
) -> Parts:
    """Target, cache and drafter; for a memory estimate `device` is meta, not `run.device`."""
    engine, arms = config.engine, parse_strategies(config.engine.strategies)
    dtype = getattr(torch, config.model.dtype)
    spec = replace(spec, max_position=min(longest, spec.max_position))
    rows = max_rows(engine, arms)
    target = TargetModel(
        spec,
        weights,
        device=device,
        dtype=dtype,
        max_rows=rows,
        # Prefill has none. Without the limit, the largest pass may be of an oracle.
        max_logits=min(rows, max(engine.max_batch, engine.spec_max_rows or rows)),
        parallel=parallel,
    )
    num_pages = engine.num_pages or auto_pages(engine, arms, longest)
    try:
        cache = KvCache(
            target.shard.spec,
            num_pages=num_pages,
            page_size=engine.page_size,
            feature_size=recorded_features(config, spec.hidden_size),
            dtype=dtype,
            device=device,
        )
    except RuntimeError as error:  # the CPU's allocator has no type of its own for it
        raise UserError(
            f"engine.num_pages={num_pages}: the KV cache does not fit ({error}); lower it or"
            " engine.max_batch, or see the memory of each part with driver.train --dry-run"
        ) from error
    if not engine.needs_drafter:
        return Parts(target, cache, None, None)
    shape = DraftSpec.of(spec, draft_vocab=config.drafter.draft_vocab)
    drafter = build_drafter(shape, target, config.run.seed, on_card=config.run.device != "cpu")
    runner = DraftRunner(shape, target, cache, config.run.seed)
    return Parts(target, cache, drafter, runner)


def build_rollout(
    config: Config,
    spec: ModelSpec,
    weights: dict[str, torch.Tensor],
    longest: int,
    parallel: TensorParallel | None = None,
) -> Rollout:
    """The engine of a run with its proposers and spot trainer.

    It keeps its own fused copy of the weights. `longest` is the number of tokens of the longest
    request, `parallel` the ranks that share the model; None = this rank has all of it.
    """
    check_kernels(config, spec)
    seed, arms = config.run.seed, parse_strategies(config.engine.strategies)
    parts = build_parts(config, spec, weights, longest, config.run.device, parallel)
    target, cache, runner = parts.target, parts.cache, parts.runner
    spot = None
    if runner is not None and parts.drafter is not None:
        spot = SpotTrainer(parts.drafter, runner, target, cache, config.spot, config.drafter, seed)
    bandit = Bandit(arms, config.bandit, config.engine.spec_max_batch, seed)
    engine = RolloutEngine(
        target,
        cache,
        config.engine,
        bandit,
        make_proposers(seed, runner, config.engine.verify),
        seed,
        observer=spot,
    )
    tlt_ext.set_num_threads(config.run.threads)
    tuner = OverlapTuner(spot, engine.runner.decode_s) if spot else None
    return Rollout(target, engine, bandit, spot, tuner)


def recorded_features(config: Config, hidden_size: int) -> int:
    """Columns of the recorded features: those that drafts read, and those that training reads."""
    if not config.engine.needs_drafter:
        return 0
    return (3 if config.spot.mode == "off" else 4) * hidden_size


def check_kernels(config: Config, spec: ModelSpec) -> None:
    """Raises UserError for a shape that the 16-bit kernels of a card do not take."""
    dtype, page_size = config.model.dtype, config.engine.page_size
    if config.run.device == "cpu" or dtype == "float32":
        return
    where, group = f"on a card with model.dtype={dtype}", spec.num_heads // spec.num_kv_heads
    other = "set model.dtype=float32 or run.device=cpu, or use another model"
    if spec.head_dim not in GPU_HEAD_DIMS:
        raise UserError(
            f"model.path: head_dim is {spec.head_dim}; {where} it must be"
            f" {' or '.join(map(str, GPU_HEAD_DIMS))}; {other}"
        )
    if group > GPU_MAX_GROUP:
        raise UserError(
            f"model.path: {spec.num_heads} heads share {spec.num_kv_heads} key-value heads; {where}"
            f" at most {GPU_MAX_GROUP} heads may share one; {other}"
        )
    if page_size not in GPU_PAGE_SIZES:
        raise UserError(
            f"engine.page_size={page_size}: {where} it must be one of"
            f" {', '.join(map(str, GPU_PAGE_SIZES))}"
        )


def build_drafter(
    shape: DraftSpec, target: TargetModel, seed: int, on_card: bool = False
) -> Drafter:
    """A drafter with random weights; `on_card`: a target on the meta device represents a card's."""
    drafter = Drafter(shape, seed).to(target.device)
    if on_card or target.device.type == "cuda":
        drafter.lm_head.to(target.head.dtype)  # a copy of the target's head, never trained
    drafter.refresh_head(target.head)
    return drafter


def max_rows(config: EngineConfig, arms: tuple[Strategy, ...]) -> int:
    """Rows of the largest pass: plain, speculative or prefill."""
    speculative = max((arm.num_verify for arm in arms), default=1)
    rows = min(config.max_batch, config.spec_max_batch) * speculative
    if config.spec_max_rows:
        rows = min(rows, config.spec_max_rows)
    return max(config.max_batch, rows, config.prefill_chunk)


def auto_pages(config: EngineConfig, arms: tuple[Strategy, ...], longest: int) -> int:
    """Pages that hold `max_batch` of the longest requests and the rows in flight of the tail."""
    flight = max((max(arm.num_verify, arm.depth * arm.top_k) for arm in arms), default=1)
    batch = min(config.max_batch, config.spec_max_batch)
    size = config.page_size
    return config.max_batch * (pages_for(longest, size) + 1) + batch * (pages_for(flight, size) + 1)


def drafter_state(folder: Path | None) -> dict[str, Any] | None:
    """The drafter's state in a checkpoint; None if the folder has none."""
    if folder is None or not (folder / "state" / "spot.pt").exists():
        return None
    return Checkpoint(folder, 0).state("spot")


def adopt_drafter(spot: SpotTrainer | None, state: dict[str, Any] | None, note: Note) -> None:
    """Loads the drafter of the policy's checkpoint, if its shape matches."""
    if spot is None or state is None:
        return
    have = {name: value.shape for name, value in state["drafter"].items()}
    want = {name: value.shape for name, value in spot.drafter.state_dict().items()}
    if have == want:
        with earlier_versions("the checkpoint's drafter", "remove its state/spot.pt to start anew"):
            spot.load_state_dict(state)
    else:
        note("the checkpoint's drafter has another shape (drafter.*): starting a new one")
