"""The state of one training run: its parts, its step counter, and the phases of a step."""

import contextlib
import copy
import functools
import math
import time
import warnings
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from tlt_ext.sampling import NOISE_VERSION

from ..common.errors import SharedWarning, UserError
from ..common.memory import CARD_MEMORY, memory_metrics
from ..common.world import World
from ..config.load import Config
from ..config.strategy import OFF
from ..policy.trainer import PolicyTrainer
from ..records.checkpoint import PARTS, Checkpoint, save_checkpoint, scratch_folder
from ..records.checkpoint_writer import CheckpointWriter
from ..records.folder import RunFolder, Sample
from ..records.parts import Parts, save_parts
from ..records.phases import Phases
from ..session.parts import Rollout
from ..session.session import Session
from ..tasks import Task
from .collector import Collector, Experience

MOST_BAD_UPDATES = 3
MOSTLY = 0.9  # share of the responses
MUST_BE_FINITE = ("actor/pg_loss", "actor/grad_norm")

SAMPLES = 4  # responses of a step that are kept to read


@dataclass
class Run:
    """The parts and the phases of a training loop; `driver/train.py` calls the phases in order."""

    config: Config
    world: World
    folder: RunFolder | None  # None: rank 0 keeps the records
    phases: Phases
    policy: PreTrainedModel
    blank: PreTrainedModel  # the policy without weights, which writes checkpoints
    trainer: PolicyTrainer
    session: Session
    collector: Collector
    writer: CheckpointWriter
    checkpoints: Path  # their folder, on all ranks
    step: int = 0  # finished steps
    saved_step: int = -1  # of the last checkpoint
    version: int = 0  # of the policy in the engine
    evaluations: dict[int, float] = field(default_factory=dict)  # step -> held-out accuracy
    tokens: int = 0  # emitted in training rollouts
    target_passes: int = 0
    prompts_drawn: int = 0  # from the training split, in finished steps
    correct: list[int] = field(default_factory=list)  # lengths of all correct responses
    consistent: bool = True  # False from the start of an update until its step is logged
    bad_updates: int = 0  # in a row, whose loss or gradient was not finite
    last_metrics: dict[str, float] = field(default_factory=dict)

    @property
    def rollout(self) -> Rollout:
        return self.session.rollout

    @property
    def task(self) -> Task:
        return self.collector.task

    # ---- the phases of a step -------------------------------------------------------------------

    def gather(self) -> Experience:
        self._hold_pages()
        return self.collector.gather(self.step)

    def _hold_pages(self) -> None:
        """Restores the pages that `update_policy` released."""
        if self.config.engine.free_in_update == "true":
            with self.phases("free_pages"):
                self.session.wake()

    def finish_bubble(self) -> str:
        """Starts the final drafter steps of the rollout.

        Returns the reason if training of the drafter pauses or resumes, else an empty text.
        """
        spot = self.rollout.spot
        if spot is None or self.config.spot.mode == "off":
            return ""
        reason = spot.weigh(self.collector.stats)
        self.session.train_drafter()
        return reason and f"step {self.step + 1}: drafter {reason}"

    def update_policy(self, step: Experience) -> dict[str, float]:
        self.world.enter("update_actor")
        if self.config.grpo.offload != "none":
            with self.phases("checkpoint"):
                self.writer.collect()
        self.consistent = False
        if self.config.engine.free_in_update == "true":
            with self.phases("free_pages"):
                self.session.sleep()
        batch, ahead = (step.responses, step.rewards, step.keep), None
        if self.collector.tail is not None:
            with self.phases("update_actor"):
                ahead = self.collector.tail.take(*batch)
        metrics = self.trainer.update(*batch, ahead)
        if self.config.grpo.max_refills:
            metrics["dynamic_sampling/refills"] = step.refills
            metrics["dynamic_sampling/kept"] = sum(step.keep) / len(step.keep)
        self._check_finite(metrics)
        return metrics

    def _check_finite(self, metrics: dict[str, float]) -> None:
        """Ends a run whose weights, or `MOST_BAD_UPDATES` updates in a row, are not finite."""
        finite = all(math.isfinite(metrics[name]) for name in MUST_BE_FINITE)
        self.bad_updates = 0 if finite else self.bad_updates + 1
        whole = self.trainer.weights.is_finite()
        if whole and self.bad_updates < MOST_BAD_UPDATES:
            return
        what = f"loss or gradient was not finite in {self.bad_updates} updates in a row"
        if not whole:
            what = "the policy's weights are not finite after the update"
        raise UserError(
            f"step {self.step + 1}: {what}; lower grpo.lr or grpo.max_grad_norm and resume from the"
            " last checkpoint"
        )

    def sync_weights(self) -> None:
        """Copies the new policy into the engine, in place, and finishes the step."""
        self.step += 1
        self.version += 1
        self.session.update_weights(self.trainer.weights.stream(), self.version)
        self.prompts_drawn = self.collector.prompts_drawn
        if self.trainer.step == 1:  # Adam's moments are new
            self.prepare_checkpoint()

    def evaluate(self) -> None:
        count = self.config.run.eval_prompts
        if count == 0 or self.step in self.evaluations:
            return
        self._hold_pages()
        with self.phases("eval"):
            self.evaluations[self.step] = self.collector.evaluate(count)
        if self.step == 0 and self.folder is not None:  # later ones are in their step's record
            self.folder.log_step(0, {"eval/accuracy": self.evaluations[0]})

    def close(self, whole: bool) -> None:
        """Ends workers, threads and records of the run; `whole` is whether it finished."""
        with contextlib.ExitStack() as ends:  # all are called, last to first, even if one fails
            if self.folder is not None:
                ends.callback(self.folder.close if whole else self.folder.discard)
            if whole:
                ends.callback(self.world.leave)
            ends.callback(self.writer.collect)
            ends.callback(self.session.close)
            ends.callback(self.collector.workers.close)

    # ---- records --------------------------------------------------------------------------------

    def log(self, metrics: dict[str, float], step: Experience) -> None:
        """Logs the finished step; `self.step` already counts it."""
        begin = time.perf_counter()
        self.writer.collect(wait=False)  # a full disk ends the run
        stats = self.collector.stats
        self.tokens += stats.emitted
        self.target_passes += stats.target_passes
        lengths = [len(r.token_ids) for r in step.responses]
        self.correct += [n for n, r in zip(lengths, step.rewards, strict=True) if r >= 1.0]
        metrics = {**metrics, **stats.metrics(), **self.rollout.bandit.metrics()}
        metrics |= self.rollout.engine.metrics() | self._answer_metrics(step)
        metrics["perf/throughput"] = stats.emitted / max(stats.elapsed_s, 1e-9)
        if self.rollout.spot is not None:
            metrics |= self.rollout.spot.metrics()
        if self.collector.tools is not None:
            metrics |= self.collector.tool_stats.metrics(step.responses)
        metrics |= memory_metrics(self.rollout.engine.cache.memory)
        if self.step in self.evaluations:
            metrics["eval/accuracy"] = self.evaluations[self.step]
        metrics |= self.collector.ranks.metrics(metrics.get(CARD_MEMORY))
        self.last_metrics = metrics | self.phases.end_step(self.step)
        if self.folder is not None:
            trace = [*stats.trace, (stats.elapsed_s, 0, str(OFF))]
            self.folder.log_rollout(self.step, step.responses, trace)
            self.folder.log_samples(self.step, self._samples(step))
            self.folder.log_step(self.step, self.last_metrics)
        self.consistent = True
        self.phases.add("log", time.perf_counter() - begin)

    def _answer_metrics(self, step: Experience) -> dict[str, float]:
        """The share of responses without an answer, for tasks that check for one."""
        if type(self.task).states_answer is Task.states_answer:
            return {}
        stated = [self.task.states_answer(self.collector.text(r)) for r in step.responses]
        share = 1 - sum(stated) / len(stated)
        if share > MOSTLY:
            warnings.warn(
                f"{share:.0%} of the responses state no answer in the form that task"
                f" {self.task.name} looks for; show it in the prompt (task.shots) or in a warm-up",
                SharedWarning,
                stacklevel=2,
            )
        return {"reward/unanswered_share": share}

    def _samples(self, step: Experience) -> list[Sample]:
        """The first response to each of the first prompts."""
        each, texts = self.config.grpo.samples_per_prompt, self.collector
        firsts = zip(step.prompts, step.responses[::each], step.rewards[::each], strict=True)
        return [
            Sample(p.id, p.text, texts.text(r), reward, len(r.token_ids), r.finish, texts.parts(r))
            for p, r, reward in islice(firsts, SAMPLES)
        ]

    def is_due(self, every: int) -> bool:
        """Whether this is an `every`-th step or the last one; with 0, only the last one."""
        return self.step == self.config.run.steps or (every > 0 and self.step % every == 0)

    def checkpoint(self) -> None:
        """Saves all that a resumed run needs, atomically; on a card, waits for a copy only."""
        timelines = self.world.gather(self.phases.timeline.text())
        with self.phases("checkpoint"):
            if self.saved_step != self.step:
                fixed = self.step, self._kept_tokenizer, self._parts(live=True)
                self.writer.save(functools.partial(self._write, *fixed), self._saved())
                self.saved_step = self.step
            if self.folder is not None:
                self.phases.timeline.write(self.folder.path / "trace.json", timelines[1:])

    def prepare_checkpoint(self) -> None:
        """Starts to allocate host memory for copies of the state, unless it has to be gathered."""
        if self.writer.threaded and self.rollout.target.parallel.size == 1:
            self.writer.prepare(self._saved())

    def _saved(self) -> dict[str, Any]:
        """The state to copy and save: this rank's tensors, and on the first rank all the rest."""
        parts, policy = {"parts": self._parts(live=False)}, self.rollout.target.state_dict()
        if self.rollout.target.parallel.size > 1:  # a rank has parts of it
            stream = self.trainer.weights.stream()
            policy = {name: w.cpu() for name, w in stream if self.folder is not None}
        if self.folder is None:
            return parts
        spot = self.rollout.spot
        return parts | {
            "policy": policy,  # in the dtype of the run
            "states": {
                "trainer": self.trainer.state_dict(),
                "bandit": self.rollout.bandit.state_dict(),
                "spot": spot.state_dict() if spot else None,
                "counters": {
                    "noise": NOISE_VERSION,
                    "version": self.version,
                    "prompts_drawn": self.prompts_drawn,
                    "tokens": self.tokens,
                    "target_passes": self.target_passes,
                    "evaluations": self.evaluations,
                    "correct": self.correct,
                    "phases": self.phases.state_dict(),
                },
            },
        }

    def _parts(self, live: bool) -> Parts:
        """The trained tensors to write: from host memory, if `grpo.offload` holds them, or others.

        The next update waits until the former are written.
        """
        offloaded = self.config.grpo.offload != "none"
        return {
            kind: named
            for kind, named in self.trainer.weights.written(self.trainer.optimizer).items()
            if (offloaded and all(not part.is_cuda for part in named.values())) == live
        }

    def _write(self, step: int, tokenizer: Tokenizer, live: Parts, saved: dict[str, Any]) -> None:
        parts = self.trainer.weights.placed({**saved["parts"], **live})

        def write_model(path: Path) -> None:
            save_parts(path / PARTS, parts, self.world.background)
            self.blank.save_pretrained(path, state_dict=saved["policy"])
            tokenizer.save_pretrained(path)

        if self.folder is None:
            scratch = scratch_folder(self.checkpoints, step)
            save_parts(scratch / PARTS, parts, self.world.background)
        else:
            keep = self.config.run.keep_checkpoints
            save_checkpoint(self.checkpoints, step, write_model, saved["states"], keep)

    @functools.cached_property
    def _kept_tokenizer(self) -> Tokenizer:
        """A copy for the writer: a tokenizer cannot be saved while another thread encodes."""
        return copy.deepcopy(self.collector.encoder.tokenizer)

    def end_checkpoint(self) -> None:
        """Waits until the last checkpoint is on the disk; UserError if it could not be written."""
        with self.phases("checkpoint_end"):
            self.writer.collect()

    def restore(self, saved: Checkpoint) -> None:
        self.step = self.saved_step = saved.step
        saved.restore("trainer", self.trainer.load_state_dict)
        weights = self.trainer.weights
        parts = weights.placed(weights.tensors(self.trainer.optimizer))
        saved.restore_parts(parts, self.world.background)
        saved.restore("bandit", self.rollout.bandit.load_state_dict)
        saved.restore("counters", self._restore_counters)
        self.rollout.engine.target_version = self.version
        spot = self.rollout.spot
        if spot is not None:
            saved.restore("spot", spot.load_state_dict)
            spot.resume()
            spot.target_version = self.version

    def _restore_counters(self, counters: dict[str, Any]) -> None:
        if counters["noise"] != NOISE_VERSION:
            raise UserError(
                f"the checkpoint was made with noise of version {counters['noise']}, and version"
                f" {NOISE_VERSION} draws other tokens; model.path=FOLDER starts a new run from the"
                " policy of a checkpoint's folder"
            )
        self.version, self.tokens = counters["version"], counters["tokens"]
        self.target_passes = counters["target_passes"]
        self.prompts_drawn = self.collector.prompts_drawn = counters["prompts_drawn"]
        self.evaluations = {int(k): v for k, v in counters["evaluations"].items()}
        self.correct = counters["correct"]
        self.phases.load_state_dict(counters["phases"])
