"""`tlt export`, or `python -m driver.export`: a run's drafter as an EAGLE-3 draft model."""

if __name__ == "__main__":  # before the imports below, which take seconds
    from .cli import start

    start("export")


import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from .common.errors import UserError
from .common.storage import storage_errors, user_path
from .config.fields import read_options
from .config.load import Config, load_config
from .config.options import ExportOptions
from .config.strategy import LEARNED, OFF, Strategy
from .drafter.eagle3 import CONFIG, KIND, LAYERS, WEIGHTS, config_of_state, write_drafter
from .model.prompts import PromptEncoder
from .model.spec import ModelSpec, read_json
from .rollout.request import Request, request_id
from .run.assemble import check_prompts, longest_request, prompt_encoder
from .run.warm_start import sampling_params
from .session.load import load_policy, spec_of
from .session.parts import build_rollout, drafter_state
from .tasks import Task, make_task

CARD = "README.md"
UNSEEN = ("multiplication", "addition")  # the first that the drafter was not trained on


@dataclass(frozen=True)
class Measurement:
    task: str
    accept_length: float
    tokens: int
    seen: bool


class _Bench:
    def __init__(
        self,
        options: ExportOptions,
        config: Config,
        checkpoint: Path,
        drafters: Sequence[Mapping[str, Tensor]],
    ) -> None:
        self.options, self.config, self.drafters = options, config, drafters
        self.policy, tokenizer = load_policy(self.config, checkpoint)
        self.spec = spec_of(self.policy)
        tasks = [_task(config, name) for name in (config.task.name, options.unseen)]
        self.tasks = [(task, prompt_encoder(config, task, tokenizer)) for task in tasks]
        limit, context = self.config.sampling.max_new_tokens, self.spec.max_position
        prompt_len = max(check_prompts(*each, limit, context) for each in self.tasks)
        self.rollout = build_rollout(
            self.config,
            self.spec,
            self.policy.state_dict(),
            longest_request(self.config, self.spec, prompt_len),
        )

    def measure(self, task: Task, encode: PromptEncoder, seen: bool) -> Measurement:
        params = sampling_params(self.config, self.spec, task, encode)
        count = min(self.options.prompts, task.size("eval") or self.options.prompts)
        requests = [
            Request(request_id("eval", 0, prompt.id, 0), i, encode(prompt.text), params)
            for i, prompt in enumerate(task.prompt("eval", i) for i in range(count))
        ]
        learned: Any = self.rollout.engine.proposers[LEARNED.name]
        lengths, strategy = [], Strategy.parse(self.options.strategy)
        plain = self._generate(requests, OFF)
        for version, state in enumerate(self.drafters, 1):
            learned.load(state, version)
            if self._generate(requests, strategy) != plain:
                raise UserError(f"{task.name}: the drafter changed a token; please report this")
            lengths.append(self.rollout.engine.stats.accept_length or 1.0)
        if len(set(lengths)) > 1:  # tokens are equal with any drafter, accept lengths are not
            raise UserError(
                f"{task.name}: accept length {lengths[0]} became {lengths[1]} when the drafter was"
                " read back; please report this"
            )
        return Measurement(task.name, lengths[0], sum(map(len, plain)), seen)

    def _generate(self, requests: Sequence[Request], strategy: Strategy) -> list[list[int]]:
        self.rollout.fix(strategy)
        responses = self.rollout.engine.generate(requests, record=False)
        return [response.token_ids for response in responses]


def _task(config: Config, name: str) -> Task:
    return make_task(**asdict(replace(config.task, name=name)))


def check_out(folder: Path) -> None:
    """Refuses a folder with anything but an earlier export, such as a checkpoint with weights."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    ours = names <= {WEIGHTS, CONFIG, CARD} and CONFIG in names
    if names and not (ours and read_json(folder / CONFIG).get("architectures") == [KIND]):
        raise UserError(f"out={folder}: holds other files; choose an empty or a new folder")


def run_config(checkpoint: Path, options: ExportOptions) -> Config:
    """The configuration of the run, with limits and verification for the measurement."""
    recorded = checkpoint / "config.yaml"  # of a warm start
    if not recorded.exists():
        recorded = checkpoint.parent.parent / "config.yaml"
    if not recorded.exists():
        raise UserError(
            f"drafter={checkpoint}: must be a checkpoint in the folder of a run, such as"
            " runs/tiny/checkpoints/step-000028, or of a warm start, such as"
            " runs/warm/tiny-1234abcd/step-000000"
        )
    return load_config(
        [
            f"preset={recorded}",
            f"run.device={options.device}",
            f"engine.strategies=off {options.strategy}",
            f"engine.max_batch={options.prompts}",
            f"engine.spec_max_batch={options.prompts}",
            "engine.max_len=0",
            "engine.num_pages=0",
            "engine.spec_max_rows=0",
            "engine.verify=shared",  # with the tokens of plain decoding, which are compared
            "spot.mode=off",
            "bandit.policy=off",
        ],
        saved=True,
    )


def card(config: Mapping[str, Any], run: str, version: int, rows: Sequence[Measurement]) -> str:
    """Returns the model card in Markdown."""
    layers = config["eagle_config"][LAYERS]
    names = ", ".join(map(str, layers))
    text = (
        "A one-layer EAGLE-3 draft model, trained on the responses of a policy in reinforcement"
        f" learning (version {version}). It reads the outputs of layers {names} of"
        f" its target and drafts {config['draft_vocab_size']} of {config['vocab_size']} tokens. It"
        " suits that policy, and drafts worse for others."
    )
    lines = [
        f"# Draft model of {run}",
        "",
        *textwrap.wrap(text, 100),
        "",
        "| task | trained on it | mean tokens per verify pass | tokens measured |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {r.task} | {'yes' if r.seen else 'no'} | {r.accept_length:.2f} | {r.tokens} |"
        for r in rows
    ]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> None:
    options = read_options(ExportOptions, argv)
    for name in ("drafter", "out"):
        if not getattr(options, name):
            raise UserError(f"{name}: missing; write {name}=FOLDER")
    if Strategy.parse(options.strategy).drafting is not LEARNED:
        raise UserError(f"strategy={options.strategy}: must be learned:depth,top_k,num_verify")
    checkpoint, out = user_path(options.drafter), user_path(options.out)
    check_out(out)
    saved = drafter_state(checkpoint)
    if saved is None or not saved["version"]:
        raise UserError(
            f"drafter={checkpoint}: must be a checkpoint with a trained drafter, such as"
            " runs/tiny/checkpoints/step-000028"
        )
    run, spec = run_config(checkpoint, options), ModelSpec.from_folder(checkpoint)
    unseen = options.unseen or next(name for name in UNSEEN if name != run.task.name)
    options = replace(options, unseen=unseen)
    if options.unseen == run.task.name:
        raise UserError(
            f"unseen={options.unseen}: the drafter was trained on it; name another task"
        )
    _task(run, options.unseen)  # refuses a mistyped name before anything is written
    state, target = saved["drafter"], read_json(checkpoint / CONFIG)
    config = config_of_state(state, spec, target, getattr(torch, run.model.dtype))
    write_drafter(out, state, config)
    read = load_file(out / WEIGHTS)
    bench = _Bench(options, run, checkpoint, (state, read))
    rows = [bench.measure(*each, seen=each is bench.tasks[0]) for each in bench.tasks]
    of = checkpoint.parent if (checkpoint / "config.yaml").exists() else checkpoint.parent.parent
    text = card(config, of.name, saved["version"], rows)
    with storage_errors(out):
        (out / CARD).write_text(text, encoding="utf-8")
    for name, tensor in read.items():
        sys.stdout.write(f"{name:<48}{'x'.join(map(str, tensor.shape))}\n")
    sys.stdout.write(f"{out}: {len(read)} tensors in the layout that serving engines load\n")
    for row in rows:
        sys.stdout.write(f"{row.task}: accept length {row.accept_length:.2f}\n")
