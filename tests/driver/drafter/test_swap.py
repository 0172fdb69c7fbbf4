"""Weights handed to the runner: the newest are used, and versions only rise."""

import threading

import pytest
import torch

from driver.drafter.swap import WeightSwap


class Numbered:
    """A drafter whose only weight is the number of its training steps."""

    def __init__(self):
        self.step = 0

    def state_dict(self):
        return {"weight": torch.tensor([float(self.step)])}


class Runner:
    def __init__(self):
        self.version, self.loaded = 0, []

    def load(self, state, version):
        self.version = version
        self.loaded.append((version, int(state["weight"])))


class Late:
    """A CUDA event that is not complete; something may happen during the query."""

    def __init__(self, meanwhile=lambda: None):
        self.meanwhile = meanwhile

    def query(self):
        self.meanwhile()
        return False


@pytest.fixture
def ready():
    return WeightSwap(Numbered().state_dict, Runner())


def publish(ready, step, event=None):
    ready.weights.__self__.step = step
    ready.publish()
    state, finite, _ = ready._ready
    ready._ready = (state, finite, event)


def test_incomplete_weights_stay_until_newer_ones_come(ready):
    publish(ready, 1, Late())
    ready.swap()
    assert ready.runner.loaded == []
    publish(ready, 2)
    ready.swap()
    ready.swap()
    assert ready.runner.loaded == [(1, 2)]


def test_weights_published_during_a_swap_are_not_lost_to_older_ones(ready):
    def newer():
        ready.weights.__self__.step = 2
        ready.publish()

    trainer = threading.Thread(target=newer)

    def begin():
        trainer.start()
        trainer.join(0.05)  # it publishes now, or as soon as the swap releases the lock

    publish(ready, 1, Late(begin))
    ready.swap()
    trainer.join()
    ready.swap()
    assert ready.runner.loaded == [(1, 2)]


def test_weights_published_before_a_load_are_dropped(ready):
    publish(ready, 1)
    ready.runner.load({"weight": torch.tensor([7.0])}, 5)
    ready.drop()
    ready.swap()
    assert ready.runner.loaded == [(5, 7)]
