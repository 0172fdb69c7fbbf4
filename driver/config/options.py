"""Options of the commands other than the settings of a run; `--help` prints them.

The docstring of each class is the description of its command.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from difflib import get_close_matches

from ..common.errors import UserError
from .fields import Section, read_options, setting
from .load import Config, load_config
from .sections import DTYPES, MAX_BATCH, check_temperature
from .strategy import Strategy


@dataclass(frozen=True)
class GenerateOptions(Section):
    """Generate a text with speculation, then the same without, and compare.

    Prints the text, both speeds, and whether tokens and log-probs are equal. A learned or hybrid
    strategy uses the drafter of the checkpoint that `model` names. Without one, a drafter is
    trained for `train_seconds` on other samples of the same prompt.
    """

    model: str = setting("smollm2", "smollm2, a Hugging Face folder, or a checkpoint of a run")
    prompt: str = setting(
        "Natalia sold 48 clips in April and half as many in May. How many in all?",
        "the prompt; a chat model gets it as a user's message",
    )
    chat_template: str = setting(
        "auto",
        "whether the prompt is a message in the tokenizer's chat template; auto: where it has one",
        words=("auto", "true", "false"),
    )
    strategy: str = setting("learned:8,4,32", "off, or kind:depth,top_k,num_verify")
    seed: int = setting(0, "seed of the noise", low=0, high=2**63 - 1)
    temperature: float = setting(1.0, "divides the logits, at least 0.01; 0: greedy", low=0)
    top_k: int = setting(0, "most probable tokens kept; 0: all", low=0, high=2**31 - 1)
    top_p: float = setting(1.0, "probability mass kept; 1: all", above=0, high=1)
    max_new_tokens: int = setting(128, "longest response in tokens", low=1)
    train_seconds: float = setting(20.0, "seconds to train a new drafter", low=0)
    device: str = setting("cpu", "cpu, cuda or cuda:N")
    dtype: str = setting("float32", "of weights and activations", words=DTYPES)
    cache: str = setting("~/.cache/tlt", "folder for fetched and converted weights")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_temperature("temperature", self.temperature)
        Strategy.parse(self.strategy)


@dataclass(frozen=True)
class IdentityOptions(Section):
    """Check on many tokens that speculation changes none.

    Runs the same requests without speculation and with each strategy, and compares tokens, lengths
    and log-prob bits. Exits with 1 if anything differs. Four more arms: `oracle` drafts the right
    tokens on random branches among wrong siblings, `mixed` switches the strategy at every pass,
    `preempt` does so with too few KV pages, `arrivals` does so with requests that arrive late, are
    aborted and resumed, and are continued by a tool (compared with a plain rollout for each turn).
    """

    model: str = setting("tiny", "tiny, smollm2, a Hugging Face folder, or a checkpoint of a run")
    tokens: int = setting(20_000, "tokens to compare for each arm", low=1)
    strategies: list[str] = setting(
        [
            "ngram:4,1,5",
            "ngram:6,4,16",
            "learned:4,1,5",
            "learned:4,4,12",
            "learned:8,4,32",
            "hybrid:4,4,16",
            "oracle:8,4,16",
        ],
        "arms: kind:depth,top_k,num_verify with the kind ngram, learned, hybrid or oracle",
    )
    batch: int = setting(8, "requests that run at once", low=1, high=MAX_BATCH)
    max_new_tokens: int = setting(64, "longest response in tokens", low=1)
    task: str = setting("", "task of the prompts; empty: sums for tiny, questions for others")
    path: str = setting("", "task jsonl: the file, or its folder")
    train_steps: int = setting(30, "optimizer steps of the drafter; 0: random weights", low=0)
    warmup_steps: int = setting(150, "optimizer steps of the tiny model's warm-up", low=0)
    device: str = setting("cpu", "cpu, cuda or cuda:N")
    dtype: str = setting("float32", "of weights and activations", words=DTYPES)
    seed: int = setting(0, "seed of weights, noise and warm-up", low=0, high=2**63 - 1)
    cache: str = setting("~/.cache/tlt", "folder for fetched and converted weights")


@dataclass(frozen=True)
class ExportOptions(Section):
    """Write the drafter of a checkpoint as an EAGLE-3 draft model for serving engines.

    Reads it back into our engine, where it must draft what the checkpoint's drafter does, and
    writes a model card with the accept lengths measured there: on the task it was trained on and
    on one it was not.
    """

    drafter: str = setting("", "a checkpoint of a run or of a warm start; required")
    out: str = setting("", "the folder to write; required")
    strategy: str = setting("learned:8,4,32", "learned:depth,top_k,num_verify of the measurement")
    unseen: str = setting("", "the task that it was not trained on; empty: a built-in one")
    prompts: int = setting(16, "prompts of each task", low=1, high=MAX_BATCH)
    device: str = setting("cpu", "cpu, cuda or cuda:N")


@dataclass(frozen=True)
class DryRunOptions(Section):
    """Options of `--dry-run`, besides the settings of the run."""

    memory_gb: float = setting(0.0, "memory of the card, in 10^9 bytes; 0: measured", low=0)
    prompt_tokens: int = setting(0, "of the longest prompt; 0: counted, else 256", low=0)
    ranks: int = setting(1, "ranks that share the run", low=1)


OPTIONS: dict[str, type[Section]] = {
    "generate": GenerateOptions,
    "identity": IdentityOptions,
    "export": ExportOptions,
}
DRY_RUN = "--dry-run"
# Settings of a run that are options of other commands.
SETTINGS = {
    "model.path": "model",
    "model.cache": "cache",
    "model.dtype": "dtype",
    "run.device": "device",
    "sampling.max_new_tokens": "max_new_tokens",
    "task.chat_template": "chat_template",
}


@contextmanager
def options_in_errors() -> Iterator[None]:
    """Errors inside name the options of a command instead of the settings of a run."""
    try:
        yield
    except UserError as error:
        names = "|".join(map(re.escape, SETTINGS))
        text = re.sub(rf"\b({names})\b", lambda found: SETTINGS[found[0]], str(error))
        raise UserError(text) from error


def check_words(command: str, argv: Sequence[str]) -> Config | Section:
    """The settings of a run (train, warm) or the options of another command from its words."""
    if command in OPTIONS:
        return read_options(OPTIONS[command], argv)
    if command == "train" and DRY_RUN in argv:
        return read_dry_run(argv)[2]
    return load_config(argv)


def read_dry_run(argv: Sequence[str]) -> tuple[DryRunOptions, list[str], Config]:
    """Splits the words of a dry run: its own options, the words of the run, its settings."""
    own = {item.name for item in fields(DryRunOptions)}
    mine = [word for word in argv if word.partition("=")[0] in own]
    rest = [word for word in argv if word not in (DRY_RUN, *mine)]
    for key in (word.partition("=")[0] for word in rest):
        if "." not in key and (near := get_close_matches(key, own, n=1)):
            raise UserError(f"{key}: unknown key; did you mean {near[0]}?")
    return read_options(DryRunOptions, mine), rest, load_config(rest)
