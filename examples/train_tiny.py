"""Trains the tiny model for four steps from Python and prints what was logged.

Run from the root of the checkout: `python -m examples.train_tiny`. The run's folder is `runs/tiny`,
numbered if that exists. Words such as `preset=smollm2 run.steps=2` replace the settings below.
"""

import sys

from driver.config.load import load_config
from driver.records.progress import Progress
from driver.train import train

SETTINGS = ["preset=tiny", "run.steps=4", "run.eval_prompts=64", "sampling.max_new_tokens=96"]


def main():
    config = load_config(sys.argv[1:] or SETTINGS)
    with Progress(config.run.steps) as progress:
        run = train(config, progress)
    for name in ("critic/rewards/mean", "response_length/mean", "spec/accept_length"):
        print(f"{name:<24}{run.last_metrics.get(name)}")
    print("the run's folder:", run.folder.path)


if __name__ == "__main__":  # workers of `reward.workers` import this file again
    main()
