"""A warm start: a warmed-up policy and its drafter, created once and stored.

The policy imitates worked responses (`driver.policy.warmup`) and samples responses of its own. The
drafter learns from the features recorded of these and of as many worked ones. Both are saved in
`<run.root>/warm/`, as a checkpoint that `driver.train` finds by the settings that made it.
"""

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tlt_ext.sampling import NOISE_VERSION

from ..common.deterministic import deterministic
from ..common.errors import UserError
from ..common.storage import storage_errors, user_path
from ..config.fields import MAX_NUMBER
from ..config.load import Config, preset_title, to_yaml
from ..config.sections import ToolConfig
from ..config.strategy import OFF, parse_strategies
from ..drafter.trainer import SpotTrainer
from ..model.checkpoint import folder_fingerprint
from ..model.fetch import is_smollm2, model_folder
from ..model.prompts import PromptEncoder
from ..model.spec import ModelSpec, read_json
from ..policy.warmup import demonstration, lr_share, warm_up
from ..records.checkpoint import Checkpoint, latest_checkpoint, save_checkpoint
from ..records.folder import WARM_STARTS
from ..records.phases import Phases
from ..rollout.request import Request, Response, SamplingParams, request_id
from ..session.load import find_model, load_policy, spec_of
from ..session.parts import Rollout, build_rollout
from ..session.session import Session
from ..tasks import Task, make_task
from ..tasks.workers import RewardWorkers
from .assemble import check_prompts, longest_request, prompt_encoder, stop_ids
from .tools import Tools, answering

REPORT = "warm.json"
PROCEDURE = 2  # one more whenever the same settings make another warm start
# Prompts of the train split that neither RL nor the policy's warm-up uses.
FIRST_INDEX = 1 << 39
NOTES = 10  # lines of a training's progress
NEVER = 1 << 30  # passes between two steps of the spot trainer in the tail
CHECKED = 32  # responses whose accept length is measured

Note = Callable[[str], None]


def warm_folder(config: Config) -> Path:
    """Folder of the warm start of these settings.

    Its name is a hash of all that affects it: settings, and the contents of data and model.
    """
    parts = {name: asdict(getattr(config, name)) for name in ("model", "warmup", "task")}
    del parts["model"]["cache"]
    parts["drafter"], parts["sampling"] = asdict(config.drafter), asdict(config.sampling)
    if config.tool != ToolConfig():  # other tasks keep the names they had before there were tools
        parts["tool"] = asdict(config.tool)
    inputs = {"task": make_task(**parts["task"]).fingerprint()}
    if config.model.path != "tiny" and not is_smollm2(config.model.path):
        inputs["model"] = folder_fingerprint(model_folder(config.model.path))
    if any(inputs.values()):  # generated data and built-in models have none
        parts["inputs"] = inputs
    key = json.dumps([PROCEDURE, NOISE_VERSION, parts, config.run.seed], sort_keys=True).encode()
    digest = hashlib.blake2b(key, digest_size=4).hexdigest()
    root = user_path(config.run.root)
    return root / WARM_STARTS / f"{preset_title(config.preset)}-{digest}"


def fingerprint(state: Mapping[str, Tensor]) -> str:
    """A hash of all bits of a module's state, eight hex digits."""
    digest = hashlib.blake2b(digest_size=4)
    for name in sorted(state):
        digest.update(name.encode())
        digest.update(state[name].detach().cpu().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def fingerprints(folder: Path) -> dict[str, str]:
    """The hashes of policy and drafter of a warm start, and its noise; {} if it has none."""
    path = folder / REPORT
    report = read_json(path) if path.exists() else {}
    return report.get("fingerprint", {})


def start_fingerprints(config: Config) -> dict[str, str]:
    """The hashes of the warm start that a run with these settings starts from."""
    found = latest_checkpoint(warm_folder(config)) if config.warmup.keep else None
    return fingerprints(found.path if found else user_path(config.model.path))


def describe(folder: Path) -> str:
    return ", ".join([str(folder), *map(" ".join, fingerprints(folder).items())])


def check_dtype(config: Config) -> None:
    """Rejects training in float16: small gradients become 0, because the loss is not scaled."""
    if config.model.dtype == "float16":
        raise UserError(
            "model.dtype=float16: gradients underflow in float16; train in bfloat16 or float32"
        )


def warm_start(config: Config, note: Note, folder: Path | None = None) -> Checkpoint:
    """The warm start in a folder, made if there is none, with its report `warm.json`.

    Without a folder it is the one that all runs of these settings share.
    """
    folder = folder or warm_folder(config)
    found = latest_checkpoint(folder)
    if found is not None:
        note(f"warm start: {describe(found.path)}")
        return found
    check_dtype(config)
    if not config.warmup.steps:
        raise UserError("warmup.steps: 0 makes no warm start; set it, or warmup.keep=false")
    task = make_task(**asdict(config.task))
    with storage_errors(folder):  # not after hours of training
        folder.mkdir(parents=True, exist_ok=True)
    policy, tokenizer = load_policy(config, find_model(config, note))
    encode, spec = prompt_encoder(config, task, tokenizer), spec_of(policy)
    prompt_len = check_prompts(task, encode, config.sampling.max_new_tokens, spec.max_position)
    phases = Phases()
    with phases("policy"):
        progress = warm_up_progress(config, note)
        losses = warm_up(policy, encode, task, config.warmup, config.run.seed, progress)
    report: dict[str, Any] = {"loss": [losses[0], float(np.mean(losses[-20:]))]}
    marks = {"policy": fingerprint(policy.state_dict())}
    states: dict[str, Any] = {}
    if config.warmup.drafter_steps:
        params = sampling_params(config, spec, task, encode)
        longest = longest_request(config, spec, prompt_len)
        rollout = build_rollout(_on_request(config), spec, policy.state_dict(), longest)
        assert rollout.spot is not None
        warming = Warming(config, task, encode, rollout, rollout.spot, params, note)
        report |= warming.run(phases)
        states["spot"] = rollout.spot.state_dict()
        marks["drafter"] = fingerprint(states["spot"]["drafter"])
    report["fingerprint"] = marks | {"noise": str(NOISE_VERSION)}
    report["seconds"] = {name: round(value, 2) for name, value in phases.summary().items()}

    def write_policy(path: Path) -> None:
        policy.save_pretrained(path)
        tokenizer.save_pretrained(path)
        (path / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
        (path / REPORT).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    return save_checkpoint(folder, 0, write_policy, states, keep=1)


def sampling_params(
    config: Config, spec: ModelSpec, task: Task, encode: PromptEncoder
) -> SamplingParams:
    return SamplingParams(
        config.sampling.temperature,
        max_new_tokens=config.sampling.max_new_tokens,
        stop_ids=stop_ids(spec, task, encode),
        max_turn_tokens=config.tool.turn_tokens if task.has_turns else 0,
    )


@dataclass(frozen=True)
class Warming:
    """The drafter's warm-up on a policy that is in the engine."""

    config: Config
    task: Task
    encode: PromptEncoder
    rollout: Rollout
    spot: SpotTrainer
    params: SamplingParams
    note: Note

    def run(self, phases: Phases) -> dict[str, Any]:
        with phases("rollout"):
            sampled = self.sample()
            self.prefill_demonstrations()
        report: dict[str, Any] = {"sampled": sampled}
        self.note(
            "accuracy {accuracy:.3f}, {cut:.1%} cut at the limit, {responses} responses;"
            " lengths p50 {p50:.0f}, p99 {p99:.0f}, longest {longest}; correct ones"
            " p50 {correct_p50:.0f}, p99 {correct_p99:.0f}".format(**sampled)
        )
        with phases("drafter"):
            with deterministic(self.rollout.target.device):
                losses = self.train()
            self.spot.swap()
            report["drafter_loss"] = [losses[0], losses[-1]]
        with phases("check"):
            report["accept_length"] = self.accept_length()
        for strategy, length in report["accept_length"].items():
            self.note(f"accept length {length:.2f} with {strategy}")
        return report

    def roll_out(self, first: int, count: int, record: bool = True) -> list[Response]:
        """Responses to prompts from the index `first` on."""
        prompts = [self.task.prompt("train", first + i) for i in range(count)]
        requests = [
            Request(request_id("train", 0, p.id, 0), i, self.encode(p.text), self.params)
            for i, p in enumerate(prompts)
        ]
        tools = Tools.of(self.task, self.encode, self.config)
        with answering(tools, dict(enumerate(prompts))) as on_end, Session(self.rollout) as session:
            return session.roll_out(requests, record=record, on_end=on_end)

    def sample(self) -> dict[str, float]:
        """Samples responses, whose features the spot trainer records; returns their statistics."""
        count = self.config.warmup.responses
        self.rollout.fix(OFF)
        responses = self.roll_out(FIRST_INDEX, count)
        lengths = np.array([len(r.token_ids) for r in responses])
        decode: Callable[..., Any] = self.encode.tokenizer.decode
        workers = RewardWorkers(self.task, self.config.reward)
        with contextlib.closing(workers):
            for i, r in enumerate(responses):
                finished = r.finish == "stop"
                text = decode(r.token_ids[:-1] if finished else r.token_ids)
                prompt = self.task.prompt("train", FIRST_INDEX + i)
                workers.submit(i, prompt, text, finished)
            right = np.array(workers.collect(count))
        correct = lengths[right >= 1.0] if (right >= 1.0).any() else np.zeros(1)
        return {
            "responses": count,
            "accuracy": float(right.mean()),
            "cut": float(np.mean([r.finish == "length" for r in responses])),
            "p50": float(np.percentile(lengths, 50)),
            "p99": float(np.percentile(lengths, 99)),
            "longest": int(lengths.max()),
            "correct_p50": float(np.percentile(correct, 50)),
            "correct_p99": float(np.percentile(correct, 99)),
        }

    def prefill_demonstrations(self) -> None:
        """Prefills as many worked responses, which records features without decoding."""
        first, count = FIRST_INDEX + self.config.warmup.responses, self.config.warmup.responses
        worked = [demonstration(self.encode, self.task, first + i) for i in range(count)]
        limit = self.params.max_new_tokens
        requests = [
            replace(
                r.request,
                params=replace(self.params, max_new_tokens=len(r.token_ids) + 1),
                resume=replace(r, finish="abort"),
            )
            for r in worked
            if len(r.token_ids) <= limit
        ]
        with Session(self.rollout) as session:
            session.roll_out(requests)

    def train(self) -> list[float]:
        """Trains the drafter; returns the logged losses."""
        steps, spot = self.config.warmup.drafter_steps, self.spot
        # The order in which responses finished may depend on the timing of the host.
        spot.buffer.fresh.sort(key=lambda document: document.tokens.tolist())
        losses = []
        for step in range(steps):
            spot.set_lr(self.config.drafter.lr * lr_share(step, steps))
            spot.micro_step()
            if step % max(1, steps // NOTES) == 0 or step == steps - 1:
                last = spot.metrics()
                losses.append(last["drafter/loss"])
                self.note(
                    f"drafter step {step + 1}/{steps}: loss {losses[-1]:.3f},"
                    f" top-1 {last['drafter/top1']:.3f}"
                )
        spot.set_lr(spot.lr)
        return losses

    def accept_length(self) -> dict[str, float]:
        """The accept length of each learned strategy, on prompts not used for training."""
        first = FIRST_INDEX + 2 * self.config.warmup.responses
        count = min(CHECKED, self.config.engine.spec_max_batch)
        out = {}
        for strategy in parse_strategies(self.config.engine.strategies):
            if strategy.needs_drafter:
                self.rollout.fix(strategy)
                self.roll_out(first, count, record=False)
                out[str(strategy)] = self.rollout.engine.stats.accept_length or 1.0
        return out


def _on_request(config: Config) -> Config:
    """Settings with which the spot trainer keeps all data and trains only on request."""
    engine, responses = config.engine, 2 * config.warmup.responses
    if not engine.needs_drafter:  # runs of other strategies find this warm start too
        engine = replace(engine, strategies=[*engine.strategies, "learned:4,1,5"])
    spot = replace(
        config.spot,
        mode="serial",
        every=NEVER,
        average=0,  # the rate decays, so the last weights need none
        tokens_per_step=config.warmup.drafter_tokens,
        buffer_tokens=min(MAX_NUMBER, responses * 2 * config.sampling.max_new_tokens),
    )
    return replace(config, engine=engine, spot=spot)


def warm_up_progress(config: Config, note: Note) -> Callable[[int, float], None]:
    steps, started = config.warmup.steps, time.perf_counter()
    note(f"supervised warm-up: {steps} steps")

    def progress(step: int, loss: float) -> None:
        if step % max(1, steps // NOTES) == 0 or step == steps:
            seconds = time.perf_counter() - started
            note(f"step {step}/{steps}: loss {loss:.3f}, {seconds:.0f} s")

    return progress
