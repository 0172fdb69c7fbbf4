"""Measures, once per run, how the drafter is best trained during the tail."""

import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import replace

import torch

from .partition import STOP_S, Overlap, Placement, choose_overlap, partition_of
from .trainer import SpotTrainer

SIZES = (8, 16, 32, 64)  # multiprocessors to try
TRIALS = 4  # steps and decode calls that are timed
LEAST_ROWS = 32  # of a step: shorter pieces have too little context
PACES = 3  # duty cycles to try
LEAST_DUTY = 0.05  # a duty cycle below this trains almost nothing


class OverlapTuner:
    """Measures and chooses the placement of a spot trainer's steps.

    `decode` runs plain passes while no request runs; it returns seconds per pass, or None if passes
    are not captured yet. `measured` has every candidate, `serial_step_s` the seconds of a step on
    the whole GPU.
    """

    def __init__(self, spot: SpotTrainer, decode: Callable[[], float | None]) -> None:
        self.spot, self.decode = spot, decode
        self.measured: dict[Overlap, Placement] = {}
        self.serial_step_s = 0.0
        self._done = False

    def tune(self) -> None:
        """Sets the placement, if the mode needs one and none was chosen yet.

        Call while no request runs. The measured steps see one rollout's documents many times, so
        they change no weight.
        """
        spot = self.spot
        if self._done or not (spot.bin.fixed and spot.config.mode in ("auto", "overlapped")):
            return
        spot.stop()
        if not spot.buffer.num_tokens or self.decode() is None:
            return  # graphs are captured before the next rollout
        self._done = True
        budget = spot.config.slowdown
        counters = spot.steps, spot.tokens_seen, spot.payoff.delay_s
        try:
            with spot.step.frozen():
                self.measure(budget)
        except Exception as error:  # training between passes is always possible
            self.measured, spot.placement = {}, None
            warnings.warn(
                f"spot trainer: no partition of the GPU ({type(error).__name__}: {error}); it"
                " trains between passes instead",
                stacklevel=2,
            )
            return
        finally:
            spot.steps, spot.tokens_seen, spot.payoff.delay_s = counters
        best = choose_overlap(list(self.measured), spot.bin.tokens / self.serial_step_s, budget)
        if best is None and spot.config.mode == "overlapped":
            best = min(self.measured, key=lambda overlap: overlap.slowdown)
            warnings.warn(
                f"spot trainer: no partition keeps to spot.slowdown={budget:g}, stops within"
                f" {1e3 * STOP_S:.0f} ms and trains more than between passes; spot.mode=overlapped"
                f" uses {best.sms} multiprocessors, which slow decoding {best.slowdown:.2f} times"
                f" and stop in {1e3 * best.stop_s:.0f} ms",
                stacklevel=2,
            )
        spot.overlap = best
        spot.placement = None if best is None else self.measured[best]

    def measure(self, budget: float) -> None:
        """Times training steps during decoding, in partitions of each size.

        The steps of each size are short enough for a stop. The size that would train most within
        the budget, a slowdown, is then measured again at duty cycles that keep to it. Raises
        RuntimeError if partitions are not supported, or training failed.
        """
        spot, device = self.spot, self.spot.target.device
        spot.attempt()  # captures the graph
        spot.reports.read(0)
        begin = time.perf_counter()
        for _ in range(TRIALS):
            spot.attempt()
        spot.reports.read(0)
        self.serial_step_s = (time.perf_counter() - begin) / TRIALS
        for sms in sizes_of(device):
            placement = Placement(partition_of(sms, device), spot.bin.tokens)
            overlap = self._time(placement)
            while overlap.stop_s > STOP_S and placement.rows >= 2 * LEAST_ROWS:
                placement = replace(placement, rows=placement.rows // 2)
                overlap = self._time(placement)
            self.measured[overlap] = placement
        in_time = [o for o in self.measured if o.stop_s <= STOP_S] or list(self.measured)
        best = max(in_time, key=lambda o: o.tokens_per_s * o.duty_within(budget) / o.duty)
        for _ in range(PACES):
            duty = best.duty_within(budget)
            if best.slowdown <= budget or duty < LEAST_DUTY:
                break
            placement = replace(self.measured[best], duty=duty)
            best = self._time(placement)
            self.measured[best] = placement

    def _time(self, placement: Placement) -> Overlap:
        """Times decoding alone, then during steps with this placement."""
        spot, decode = self.spot, self.decode
        spot.placement = placement
        for split in (0, spot.share(placement.rows)) if spot.buffer.kept else (0,):
            spot.step.capture(split, placement)
        decode()  # warm-up
        alone_s = statistics.median(decode() or 0.0 for _ in range(TRIALS))
        spot.start()
        passes = [decode() or alone_s]  # this one may have begun before a step did
        done, begin = spot.steps, time.perf_counter()
        while len(passes) <= TRIALS or spot.steps < done + TRIALS:
            passes.append(decode() or alone_s)
            if not spot.running:
                raise RuntimeError("training ended during its measurement")
        step_s = (time.perf_counter() - begin) / (spot.steps - done)
        spot.stop()
        sms, rows, duty = placement.partition.sms, placement.rows, placement.duty
        return Overlap.of(sms, alone_s, statistics.median(passes[1:]), step_s, rows, duty)


def sizes_of(device: torch.device) -> list[int]:
    """The sizes to try on a GPU: at most half of its multiprocessors."""
    count = torch.cuda.get_device_properties(device).multi_processor_count
    return [sms for sms in SIZES if 2 * sms <= count]
