"""`python -m driver.train [preset=tiny] key=value ...`: the whole loop, in the order of the README.

Rollouts with speculation, rewards, one GRPO update, new weights into the engine; the spot trainer
works on the drafter while the tail of each rollout leaves the machine idle.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from driver.command import run_command
from driver.config import Config, load_config
from driver.run import Run, torch_threads
from driver.run_report import finish_report, step_line


def train(config: Config) -> Run:
    """Runs a configuration to its end; everything it leaves is in its run folder."""
    torch_threads(config)
    run = Run.start(config)
    run.evaluate()
    for _ in range(run.step, config.run.steps):
        prompts, requests = run.next_requests()
        with run.phases("gen"):
            responses = run.rollout.engine.generate(requests)
        with run.phases("reward"):
            rewards = run.rewards(prompts, responses)
        with run.phases("update_drafter"):
            run.finish_bubble()
        metrics = run.update_policy(responses, rewards)
        with run.phases("update_weights"):
            run.sync_weights()
        run.step += 1
        run.log(metrics, prompts, responses, rewards)
        if run.is_due(config.run.eval_every):
            run.evaluate()
        if run.is_due(config.run.checkpoint_every):
            run.checkpoint()
        run.progress(step_line(run))
    finish_report(run)
    return run


def main(argv: Sequence[str]) -> None:
    config = load_config(argv)
    run = train(config)
    sys.stdout.write(f"{run.folder.path}: summary.json, metrics.jsonl, plots, samples\n")


if __name__ == "__main__":
    run_command(main)
