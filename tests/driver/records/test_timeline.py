"""The timeline stays small and whole; spans are NVTX ranges and events."""

import json
import time

import pytest

from driver.common import spans
from driver.common.spans import Spans
from driver.records.phases import Phases
from driver.records.timeline import Timeline


def fill(timeline, steps, passes=20):
    for step in steps:
        for index in range(passes):
            at = timeline.started + step + index / passes
            timeline.add("rollout", "verify", at, at + 0.5 / passes, active=passes - index)
        timeline.add("train", "gen", timeline.started + step, timeline.started + step + 1)
        timeline.end_step(step)


def read(path):
    whole = json.loads(path.read_text())
    return whole, [event for event in whole["traceEvents"] if event["ph"] == "X"]


def step_numbers(events):
    return [event["args"]["step"] for event in events if event["name"].startswith("step ")]


def test_events_are_chrome_s_complete_events_on_named_tracks(tmp_path):
    timeline = Timeline(rank=3)
    timeline.add("rollout", "verify", timeline.started + 0.5, timeline.started + 0.75, active=2)
    timeline.end_step(1)
    timeline.write(tmp_path / "trace.json")
    whole, (step, event) = read(tmp_path / "trace.json")
    assert (event["name"], event["cat"], event["pid"]) == ("verify", "rollout", 3)
    assert (event["ts"], event["dur"], event["args"]) == (500_000, 250_000, {"active": 2})
    assert (step["name"], step["ts"], step["dur"]) == ("step 1", 500_000, 250_000)
    names = {
        e["tid"]: e["args"]["name"] for e in whole["traceEvents"] if e["name"] == "thread_name"
    }
    assert names[event["tid"]] == "rollout" and names[step["tid"]] == "train"
    assert {e["args"]["name"] for e in whole["traceEvents"] if e["name"] == "process_name"} == {
        "rank 3"
    }


def test_a_long_run_is_thinned_evenly_and_stays_under_the_limit(tmp_path):
    timeline = Timeline(max_bytes=40_000)
    fill(timeline, range(1, 400))
    timeline.write(tmp_path / "trace.json")
    whole, events = read(tmp_path / "trace.json")
    every = whole["otherData"]["every"]
    assert (tmp_path / "trace.json").stat().st_size <= 40_000
    assert step_numbers(events) == list(range(every, 400, every)) and every >= 16
    assert sum(event["name"] == "verify" for event in events) == 20 * len(step_numbers(events))


def test_ranks_share_a_file(tmp_path):
    path = tmp_path / "trace.json"
    ranks = [Timeline(rank, 2, max_bytes=80_000) for rank in (0, 1)]
    for timeline in ranks:
        fill(timeline, range(1, 200), passes=10 + 10 * timeline.rank)
    ranks[0].write(path, [ranks[1].text()])
    whole, events = read(path)
    assert path.stat().st_size <= 80_000
    assert {event["pid"] for event in events} == {0, 1}
    names = [e["args"]["name"] for e in whole["traceEvents"] if e["name"] == "process_name"]
    assert names == ["rank 0", "rank 1"]


def test_ranks_are_aligned_by_the_wall_clock(tmp_path, monkeypatch):
    """Both clocks of rank 1 begin elsewhere; what happens to both at once is shown at once."""
    ranks = []
    for rank, late in ((0, 0.0), (1, 7.0)):
        monkeypatch.setattr(time, "time", lambda wall=1000.0 + late: wall)
        monkeypatch.setattr(time, "perf_counter", lambda own=30.0 * rank: own)
        ranks.append(Timeline(rank, 2))
        ranks[rank].align(ranks[0].started_unix_s)
    for timeline, own in zip(ranks, (20.0, 43.0), strict=True):  # both at 1020 by the wall
        timeline.add("train", "gather", own, own + 2)
        timeline.end_step(1)
    ranks[0].write(tmp_path / "trace.json", [ranks[1].text()])
    _, events = read(tmp_path / "trace.json")
    gathers = [(e["pid"], e["ts"] / 1e6) for e in events if e["name"] == "gather"]
    assert gathers == [(0, 20), (1, 20)]


class Ranges:
    """Stands in for the package `nvtx`."""

    def __init__(self):
        self.open, self.seen = [], []

    def annotate(self, name):
        outer = self

        class Range:
            def __enter__(self):
                outer.seen.append("/".join([*outer.open, name]))
                outer.open.append(name)

            def __exit__(self, *error):
                outer.open.pop()

        return Range()


def test_spans_are_ranges_and_end_with_an_error(monkeypatch):
    ranges, timeline = Ranges(), Timeline()
    monkeypatch.setattr(spans, "nvtx", ranges)
    rollout = Spans("rollout", timeline.add)
    with pytest.raises(RuntimeError), rollout("verify"):
        raise RuntimeError
    with rollout("draft") as span:
        time.sleep(0.002)
    assert ranges.seen == ["tlt/rollout/verify", "tlt/rollout/draft"] and ranges.open == []
    assert span.seconds >= 0.002
    assert [event.name for event in timeline._events] == ["verify", "draft"]


def test_without_the_package_spans_still_measure(monkeypatch):
    monkeypatch.setattr(spans, "nvtx", None)
    with Spans("rollout")("verify") as span:
        time.sleep(0.001)
    assert span.seconds >= 0.001


def test_a_phase_is_an_event_and_a_part_of_its_step():
    phases = Phases()
    with phases("gen"):
        time.sleep(0.001)
    (gen,) = phases.timeline._events
    assert (gen.part, gen.name) == ("train", "gen")
    assert phases.end_step(1)["timing_s/gen"] == gen.length_s >= 0.001
    assert phases.end_step(2).keys() == {"timing_s/step"}
