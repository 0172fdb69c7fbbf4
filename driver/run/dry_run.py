"""`python -m driver.train --dry-run key=value ...`: predicts the memory of a run.

Reports it by part (`footprint.py`) and rejects a run that does not fit. It downloads nothing:
`model.path=` may be a folder with only a `config.json`, and smollm2 need not be in the cache.
"""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from ..common.world import World
from ..config.load import Config
from ..config.options import read_dry_run
from ..model.fetch import is_smollm2, model_folder, smollm2_folder
from ..model.spec import ModelSpec
from ..session.load import TOKENIZER_FILES, load_tokenizer
from ..session.parts import check_kernels
from ..tasks import make_task
from .assemble import check_context, check_engine, check_prompts, check_ranks, prompt_encoder
from .fit import as_words, changed, check_fits, decided, faster, fits, fitting, memory_gb
from .footprint import RunShape, policy_spec, table
from .warm_start import check_dtype

PROMPT_TOKENS = 256  # assumed without a tokenizer


def dry_run(argv: Sequence[str], say: Callable[[str], None]) -> None:
    """Calls `say` with the lines about the memory of the run that the words `argv` describe.

    Raises UserError if the run does not fit.
    """
    words, own, config = read_dry_run(argv)
    check_dtype(config)
    shape = run_shape(config, shape_folder(config), words.ranks, words.prompt_tokens)
    check_ranks(config, words.ranks)
    spec = shape.spec
    limit_gb = words.memory_gb or memory_gb(config.run.device)
    say(f"{spec.family}, {spec.num_parameters / 1e6:.1f} M parameters, {config.model.dtype}")
    response = config.sampling.max_new_tokens
    say(f"prompts of {shape.prompt_len} tokens, responses of up to {response}")
    asked, config = config, decided(config, shape, limit_gb)
    for line in table(shape.footprint(config)):
        say(line)
    other = {"grpo.checkpointing": not config.grpo.checkpointing}
    peak = shape.footprint(decided(changed(asked, other), shape, limit_gb)).peak
    say(f"  with {as_words(other)}: peak {peak / 1e9:.3f}")
    fit = fits(config, shape, limit_gb)
    if changes := faster(asked, shape, limit_gb) if fit else fitting(config, shape, limit_gb):
        kept = [word for word in own if word.partition("=")[0] not in changes]
        command = shlex.join([*kept, *as_words(changes).split()])
        say(f"{'faster, and fits' if fit else 'fits'} {limit_gb:.0f} GB:")
        launch = f"torchrun --standalone --nproc-per-node {shape.ranks}"
        say(f"  {launch if shape.ranks > 1 else 'python'} -m driver.train {command}")
    check_fits(config, shape, limit_gb)


def check_run(config: Config, folder: Path | None, ranks: int = 1) -> tuple[Config, RunShape]:
    """The settings of a run with `auto` decided, and its shape; UserError unless it fits."""
    spec = policy_spec(config, folder)
    check_kernels(config, spec)
    shape = RunShape(spec, longest_prompt(config, folder, spec), ranks)
    check_engine(config, spec, shape.prompt_len)
    limit_gb = memory_gb(config.run.device)
    config = decided(config, shape, limit_gb)
    if config.run.check_memory and config.run.device != "cpu":
        host_gb = memory_gb("cpu") / min(ranks, World.local_size())
        check_fits(config, shape, limit_gb, host_gb)
    return config, shape


def run_shape(
    config: Config, folder: Path | None, ranks: int = 1, prompt_tokens: int = 0
) -> RunShape:
    """The inputs of the memory estimate; `prompt_tokens=0`: by the tokenizer, if there is one."""
    spec = policy_spec(config, folder)
    check_kernels(config, spec)  # no shorter prompt makes such a model run
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
