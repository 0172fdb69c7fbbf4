"""Starts a run: checks its settings, loads the policy, builds the other parts."""

import gc
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from ..common.errors import after_error
from ..common.stop import StopRequest
from ..common.storage import user_path
from ..common.tensor_parallel import TensorParallel
from ..common.world import World
from ..config.load import Config, preset_title
from ..drafter.checkpoint import DraftCheckpoints
from ..drafter.coordinator import Coordinator
from ..model.checkpoint import folder_fingerprint
from ..model.prompts import PromptEncoder
from ..policy.trainer import PolicyTrainer
from ..policy.weights import is_sharded
from ..records.checkpoint import Checkpoint
from ..records.checkpoint_writer import CheckpointWriter
from ..records.folder import WARM_STARTS, RunFolder
from ..records.phases import Phases
from ..session.load import find_model, load_policy, spec_of, use_device
from ..session.parts import adopt_drafter, build_rollout, drafter_state
from ..session.session import Session
from ..tasks import Task, make_task
from ..tasks.workers import RewardWorkers
from .assemble import check_ranks, longest_request, prompt_encoder, warn_of_deep_drafts
from .collector import Collector
from .dry_run import check_run
from .fit import changed
from .run import Run
from .tail_update import TailUpdate
from .tools import Tools
from .warm_start import check_dtype, sampling_params, warm_start


def start_run(config: Config, note: Callable[[str], None], stop: StopRequest | None = None) -> Run:
    """Opens the run folder, finds or makes the warm start, loads the policy, builds the rest.

    A start that fails removes the new folder, so that the next try can use its name. `stop` ends
    rollouts after a signal.
    """
    stop = stop or StopRequest()
    world = World.join(config.run.device, config.run.timeout_s)
    config = for_rank(config, world)
    phases = Phases(world.rank, world.size)
    phases.timeline.align(world.share(phases.timeline.started_unix_s))
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    with phases("load"):
        # Invalid settings are reported before the run folder is created.
        use_device(config.run.device)
        check_dtype(config)
        task = make_task(**asdict(config.task))
        source = find_model(config, note)
        checked, shape = check_run(config, source, world.size)
        shard = max(world.gather(checked.grpo.shard))  # cards differ in memory: true if any is
        checked = changed(checked, {"grpo.shard": shard})
        folder = RunFolder(config) if world.rank == 0 else None
    try:
        saved = world.share(folder.resumed if folder else None)
        if checked.engine.free_in_update == "true":
            note("KV cache and features are released during updates (engine.free_in_update)")
        parts = task, shape.prompt_len, folder, saved, source
        return _Start(checked, note, stop, world, phases, *parts).run()
    except BaseException:
        if folder is not None:
            with after_error():
                folder.discard()
        raise


@dataclass
class _Start:
    """A run whose folder is open and whose parts are built next."""

    config: Config
    note: Callable[[str], None]
    stop: StopRequest
    world: World
    phases: Phases
    task: Task
    prompt_len: int  # of the longest prompt
    folder: RunFolder | None  # None: rank 0 keeps the records
    saved: Checkpoint | None  # that the run resumes from
    source: Path | None  # of the policy; None = the tiny one

    def run(self) -> Run:
        warn_of_deep_drafts(self.config)
        self.find_source()
        with self.phases("load"):
            policy, tokenizer = self.load()
            encode = prompt_encoder(self.config, self.task, tokenizer)
            self.note(encode.describe())
            held_out, wanted = self.task.size("eval"), self.config.run.eval_prompts
            if held_out is not None and held_out < wanted:
                self.note(
                    f"evaluation: the task has {held_out} held-out prompts, fewer than"
                    f" run.eval_prompts={wanted}"
                )
            run = self.build(policy, tokenizer, encode)
            spot = run.rollout.spot
            if self.saved is not None:
                run.restore(self.saved)
            else:
                if spot is not None and spot.checkpoints is not None:
                    spot.checkpoints.clear()  # of an earlier start without a checkpoint
                adopt_drafter(spot, drafter_state(self.source), self.note)
            if spot is not None:
                spot.prepare()
            run.prepare_checkpoint()
        return run

    def find_source(self) -> None:
        """Checks the inputs of a resumed run; makes or finds the warm start, if the run has one."""
        if self.folder is not None:  # before a warm start, which a resumed run may not need
            model = "" if self.source is None else folder_fingerprint(self.source)
            inputs = {"task.path": self.task.fingerprint(), "model.path": model}
            self.folder.check_inputs(inputs)
        if self.config.warmup.steps and (self.saved is None or self.config.grpo.kl_coef):
            self.world.enter("warmup")
            with self.phases("warmup"):  # one rank creates it, all ranks use it
                made = None
                if self.folder is not None:
                    place = None if self.config.warmup.keep else self.folder.path / WARM_STARTS
                    made = warm_start(self.config, self.note, place).path
                self.source = self.world.share(made)
                gc.collect()  # its engine refers to itself, and holds a card's memory

    def load(self) -> tuple[PreTrainedModel, Tokenizer]:
        """The policy that this process starts with."""
        if self.folder is not None and self.config.run.resume and self.saved is None:
            self.note(f"{self.folder.path} contains no complete checkpoint: starting over")
        source = self.source
        if self.saved is not None:
            self.saved.check(contents=self.folder is not None)  # one rank reads all of it
            if self.folder is not None and self.saved.step >= self.config.run.steps:
                self.note(
                    f"{self.folder.path} has made {self.saved.step} steps, and run.steps="
                    f"{self.config.run.steps}: nothing is left to do; raise it to train further"
                )
            source = self.saved.path
        # No card needs to hold all of a policy that ranks share, or that is kept in host memory.
        grpo = self.config.grpo
        mapped = is_sharded(self.world.size, grpo) or grpo.offload == "all"
        return load_policy(self.config, source, mapped)

    def build(self, policy: PreTrainedModel, tokenizer: Tokenizer, encode: PromptEncoder) -> Run:
        config, world, folder, task = self.config, self.world, self.folder, self.task
        spec = spec_of(policy)
        params = sampling_params(config, spec, task, encode)
        longest = longest_request(config, spec, self.prompt_len)
        parallel = TensorParallel.of(world, config.engine.tensor_parallel)
        rollout = build_rollout(config, spec, policy.state_dict(), longest, parallel)
        session = Session(rollout, encode, params)
        rollout.watch(self.phases.timeline.add)
        if rollout.spot is not None and folder is not None and world.size == 1:
            if config.spot.checkpoint_every:
                rollout.spot.checkpoints = DraftCheckpoints(folder.path / "drafter")
        with torch.device("meta"):
            blank: Any = type(policy)(policy.config)
            blank.to(policy.dtype)
        blank.generation_config = policy.generation_config
        device = torch.device(config.run.device)
        trainer = PolicyTrainer(policy, config.grpo, self.reference, world, device, self.phases)
        coordinator = None
        if rollout.spot is not None and config.spot.mode == "coordinated":
            coordinator = Coordinator(world, rollout.spot)
        collector = Collector(
            config,
            world,
            self.phases,
            task,
            encode,
            session,
            RewardWorkers(task, config.reward),
            coordinator,
            self.stop,
            Tools.of(task, encode, config),
        )
        collector.tail = TailUpdate.of(
            config, world, trainer, collector.keeps, rollout.spot, self.note
        )
        return Run(
            config,
            world,
            folder,
            self.phases,
            policy,
            blank,
            trainer,
            session,
            collector,
            CheckpointWriter(threaded=config.run.device != "cpu"),
            world.share(folder.checkpoints if folder else Path()),
        )

    def reference(self) -> PreTrainedModel:
        """The policy before the first RL step, the reference of the KL term."""
        return load_policy(self.config, self.source)[0]


def for_rank(config: Config, world: World) -> Config:
    """The configuration with the settings that depend on the number of ranks."""
    check_ranks(config, world.size)
    if world.size == 1:
        return config
    folder = user_path(config.run.root) / (config.run.name or preset_title(config.preset))
    restarted = world.restarts() > 0 and (folder / "config.yaml").exists()  # by torchrun
    run = replace(config.run, device=world.device, resume=config.run.resume or restarted)
    mode = "off" if config.spot.mode == "off" else "coordinated"
    return replace(config, run=run, spot=replace(config.spot, mode=mode))
