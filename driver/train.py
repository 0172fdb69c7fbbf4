"""`tlt train`, or `python -m driver.train`: the training loop.

Each step makes rollouts with speculation, computes rewards, updates the policy once by GRPO and
copies the new weights into the engine. The spot trainer trains the drafter while the tail of a
rollout (its last, long responses) leaves the machine idle. `run_steps` is the loop;
`driver/run/run.py` has the phases of a step, `driver/rollout/engine.py` the rollouts.
"""

if __name__ == "__main__":  # before the imports below, which take seconds
    from .cli import start

    start("train")


import gc
import io
import warnings
from collections.abc import Sequence

from rich.console import Console

from .common.errors import SharedWarning, UserError, after_error
from .common.stop import Stopped, StopRequest
from .common.world import World
from .config.load import Config, load_config
from .config.options import DRY_RUN
from .records.progress import Progress
from .run.dry_run import dry_run
from .run.run import Run
from .run.start import start_run
from .run.summary import summarize, summary_lines


def train(config: Config, progress: Progress) -> Run:
    """Trains until the last step; Stopped after a signal, with the last step saved."""
    stop = StopRequest()
    try:
        run = start_run(config, progress.note, stop)
    except KeyboardInterrupt as error:
        message = "stopped while the run was prepared: nothing new is saved"
        raise Stopped.by(error, message) from None
    try:
        with stop:
            run_steps(run, progress)
    except BaseException as error:
        saved = "its state could not be saved"
        with after_error():
            saved = save_after(run, error)
        with after_error():
            run.close(whole=False)
        if isinstance(error, Stopped):
            message = f"stopped by {error.name} after step {run.step}: {saved}"
            raise Stopped(error.name, message) from None
        if isinstance(error, KeyboardInterrupt) and run.world.size > 1:
            raise UserError(run.world.where()) from error
        progress.note(f"ended after step {run.step}: {saved}")
        raise
    finally:
        gc.unfreeze()
    run.close(whole=True)
    return run


def save_after(run: Run, error: BaseException) -> str:
    """Saves the last finished step after a signal or an error; returns the message about it.

    After an error the ranks of a distributed run cannot agree to save. A second signal saves
    nothing.
    """
    signalled = isinstance(error, Stopped)
    may_save = signalled or (isinstance(error, Exception) and run.world.size == 1)
    if run.step > 0 and run.consistent and may_save:
        run.checkpoint()
        run.end_checkpoint()
    if run.saved_step < 0:
        return "nothing is saved yet"
    return f"step {run.saved_step} is saved, run.resume=true continues from it"


def run_steps(run: Run, progress: Progress) -> None:
    """Runs the remaining steps, then writes report and summary."""
    config = run.config
    if run.step == 0 and config.run.steps:
        if config.warmup.steps and not config.warmup.keep:
            run.checkpoint()  # the warm-up is the longest part of a short run
        if config.run.eval_every and config.run.eval_first:
            run.evaluate()
    begin = run.step
    for _ in range(begin, config.run.steps):
        step = run.gather()  # rollouts with speculation, and their rewards
        with run.phases("update_drafter"):
            if news := run.finish_bubble():
                progress.note(news)
        metrics = run.update_policy(step)
        with run.phases("update_weights"):
            run.sync_weights()
        try:
            if config.run.eval_every and run.is_due(config.run.eval_every):
                run.evaluate()
        except Exception:
            if run.world.size == 1:  # the step is saved, so it needs its record
                with after_error():
                    run.log(metrics, step)
            raise
        run.log(metrics, step)
        progress.step(run.step, run.last_metrics)
        if run.step == begin + 1:
            with run.phases("log"):
                gc.collect()
                gc.freeze()  # else later collections read all objects of torch, which takes 0.3 s
        if run.is_due(config.run.checkpoint_every):
            run.checkpoint()
    run.checkpoint()
    if run.folder is not None:
        with run.phases("plots"):
            from .report.page import write_page  # here: matplotlib takes half a second to import

            write_page([run.folder.path], run.folder.path / "report.html")
        if run.writer.busy:
            progress.note(f"writing the checkpoint of step {run.saved_step}")
        run.end_checkpoint()
        run.folder.write_summary(summarize(run))


def check_warmup(argv: Sequence[str], config: Config) -> None:
    """Refuses to warm up a model of the user's by settings that nobody named."""
    named = {word.partition("=")[0] for word in argv}
    if named & {"preset", "warmup.steps"} or config.model.path == "tiny" or not config.warmup.steps:
        return
    raise UserError(
        f"model.path={config.model.path}: preset={config.preset}, the default, would train it for"
        f" {config.warmup.steps} steps at a learning rate of {config.warmup.lr:g} first; name a"
        " preset, such as preset=1.5b, or set warmup.steps"
    )


def main(argv: Sequence[str]) -> None:
    if DRY_RUN in argv:
        return dry_run(argv, Console(soft_wrap=True, highlight=False, markup=False).print)
    config = load_config(argv)
    check_warmup(argv, config)
    # Only the first rank prints.
    console = None if World.is_first() else Console(file=io.StringIO())
    if not World.is_first():
        warnings.simplefilter("ignore", SharedWarning)
    with Progress(config.run.steps, console=console) as progress:
        run = train(config, progress)
        for line in summary_lines(run) if run.folder is not None else []:
            progress.note(line)
