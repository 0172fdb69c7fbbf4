"""`python -m driver.train [preset=tiny] key=value ...`: the whole loop, in the order of the README.

Rollouts with speculation, rewards, one GRPO update, new weights into the engine; the spot trainer
works on the drafter while the tail of each rollout leaves the machine idle.
"""

from __future__ import annotations

from collections.abc import Sequence

from driver.command import run_command
from driver.config import Config, load_config
from driver.progress import Progress
from driver.run import Run
from driver.summary import summary_lines, write_plots, write_summary


def train(config: Config, progress: Progress) -> Run:
    """Runs a configuration to its end.

    Args:
        config: of the run.
        progress: where a person watches.

    Returns:
        The finished run; all that it leaves is in `run.folder.path`.

    Raises:
        UserError: bad input, or a run folder that cannot be written.
    """
    run = Run.start(config, progress.note)
    try:
        run_steps(run, progress)
    except BaseException:
        run.folder.discard()  # only if nothing was logged yet
        raise
    finally:
        run.close()
    run.folder.close()
    return run


def run_steps(run: Run, progress: Progress) -> None:
    """The loop, then figures and summary."""
    config = run.config
    if run.step == 0:
        run.evaluate()
    for _ in range(run.step, config.run.steps):
        step = run.gather()  # rollouts with speculation, and their rewards
        with run.phases("update_drafter"):
            run.finish_bubble()
        metrics = run.update_policy(step)
        with run.phases("update_weights"):
            run.sync_weights()
        if run.is_due(config.run.eval_every):
            run.evaluate()
        run.log(metrics, step)
        progress.step(run.step, run.last_metrics)
        if run.is_due(config.run.checkpoint_every):
            run.checkpoint()
    run.checkpoint()
    with run.phases("plots"):
        write_plots(run)
    write_summary(run)


def main(argv: Sequence[str]) -> None:
    config = load_config(argv)
    with Progress(config.run.steps) as progress:
        run = train(config, progress)
        for line in summary_lines(run):
            progress.note(line)


if __name__ == "__main__":
    run_command(main)
