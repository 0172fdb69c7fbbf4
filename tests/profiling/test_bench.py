"""The command of the benchmarks without a card: result files, targets, limits, the warm start."""

import math
import os
import pkgutil
import signal
import sys
import time
import types

import pytest

from profiling import bench, benches
from profiling.rig import results, timing, warm

FAKE = types.SimpleNamespace(name="fake")
WANTED = {"low_us": {"at_most": 2.0}, "high_x": {"at_least": 3.0}, "absent": {"at_least": 0.0}}


@pytest.fixture
def cpu_bench(monkeypatch):
    """A benchmark without a card, `[fake]` in the targets."""
    module = types.ModuleType("profiling.benches.fake")
    module.NEEDS_CUDA = False

    def run(b):
        b.add("case", timing.Timing(10.0, 0.1), 1000, {"peer": timing.Timing(20.0, 0.1)})
        b.got |= {"low_us": 2.0, "high_x": 2.9}

    module.run = run
    monkeypatch.setattr(bench.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(results, "all_targets", lambda: {"fake": WANTED})
    monkeypatch.setattr(bench.pkgutil, "iter_modules", lambda path: [FAKE])
    monkeypatch.setattr(bench.importlib, "import_module", lambda name: module)
    return module


def test_a_result_has_meta_rows_and_every_target(cpu_bench, tmp_path, capsys):
    assert bench.main(["fake", "--out", str(tmp_path), "--commit", "abc"]) == 0
    result = results.load(tmp_path / "cpu" / "fake.json")
    assert result["meta"]["commit"] == "abc" and result["meta"]["card"]
    assert result["rows"][0]["ratio_to"] == {"peer": 0.5}
    assert [(t["name"], t["got"], t["met"]) for t in result["targets"]] == [
        ("low_us", 2.0, True),
        ("high_x", 2.9, False),
        ("absent", None, False),
    ]
    assert "UNMET high_x: 2.9" in capsys.readouterr().out


def test_quick_results_have_their_own_folder(cpu_bench, tmp_path):
    bench.main(["fake", "--out", str(tmp_path)])
    bench.main(["fake", "--out", str(tmp_path), "--quick"])
    whole, quick = tmp_path / "cpu" / "fake.json", tmp_path / "cpu" / "quick" / "fake.json"
    assert results.load(whole)["meta"]["command"] == "python -m profiling.bench fake"
    assert results.load(quick)["meta"]["command"] == "python -m profiling.bench fake --quick"


def test_the_command_of_a_result_can_be_copied_into_a_shell(cpu_bench, tmp_path):
    bench.main(["fake", "--out", str(tmp_path), "--only", "two words|case"])
    command = results.load(tmp_path / "cpu" / "fake.json")["meta"]["command"]
    assert command == "python -m profiling.bench fake --only 'two words|case'"


def test_a_part_that_needs_no_card_runs_without_one(cpu_bench, tmp_path, monkeypatch):
    monkeypatch.setattr(bench.torch.cuda, "is_available", lambda: False)
    cpu_bench.NEEDS_CUDA, cpu_bench.CPU_PARTS = True, ("case",)
    assert bench.main(["fake", "--out", str(tmp_path)]) == 1
    assert bench.main(["fake", "--out", str(tmp_path), "--only", "case"]) == 0
    found = {target.name: target.got for target in results.known_targets(tmp_path)}
    assert found == {"low_us": 2.0, "high_x": 2.9, "absent": None}


def test_some_of_the_cases_do_not_replace_a_result(cpu_bench, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    parser_default = ["fake", "--only", "case", "--out", str(tmp_path)]
    assert bench.main(parser_default) == 0
    assert list(tmp_path.iterdir()) == []
    assert "not written" in capsys.readouterr().out


def test_added_cases_are_merged_into_the_result(cpu_bench, tmp_path, monkeypatch):
    """Earlier cases and targets stay; those of both results are the later one's."""
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    options = ["--out", str(tmp_path), "--add"]
    bench.main(["fake", *options, "--commit", "one"])

    def other(b):
        assert [row["case"] for row in b.known][:1] == ["case"]
        b.add("other", timing.Timing(5.0, 0.1), 1000)
        b.got["high_x"] = 4.0

    cpu_bench.run = other
    for _ in range(2):  # the second time changes nothing
        bench.main(["fake", *options, "--only", "other", "--commit", "two"])
    result = results.load(tmp_path / "cpu" / "fake.json")
    assert [row["case"] for row in result["rows"]] == ["case", "other"]
    assert [target["got"] for target in result["targets"]] == [2.0, 4.0, None]
    assert result["meta"]["commit"] == "one, two"
    assert result["meta"]["command"] == (
        "python -m profiling.bench fake && python -m profiling.bench fake --only other"
    )


def test_a_figure_from_rows_has_their_commits_and_needs_all_of_them(cpu_bench, tmp_path):
    options = ["fake", "--out", str(tmp_path), "--add"]
    bench.main([*options, "--commit", "one"])

    def other(b):
        b.add("other", timing.Timing(5.0, 0.1), 1000)
        b.book("low_us", ["case", "other"], lambda row: row["median_us"], max)
        b.book("absent", ["case", "third"], lambda row: row["median_us"])

    cpu_bench.run = other
    bench.main([*options, "--commit", "two"])
    low, high, absent = results.load(tmp_path / "cpu" / "fake.json")["targets"]
    assert (low["got"], low["commit"]) == (10.0, "one, two")
    assert (high["got"], high["commit"], absent["got"]) == (2.9, "one", None)


def test_two_commands_add_to_one_result_at_once(cpu_bench, tmp_path):
    options = ["fake", "--out", str(tmp_path), "--add"]
    inner = cpu_bench.run

    def outer(b):
        b.add("outer", timing.Timing(5.0, 0.1), 1000)
        cpu_bench.run = inner
        bench.main(options)

    cpu_bench.run = outer
    assert bench.main(options) == 0
    result = results.load(tmp_path / "cpu" / "fake.json")
    assert [row["case"] for row in result["rows"]] == ["case", "outer"]
    assert result["targets"][0]["got"] == 2.0


def test_the_other_parts_run_after_a_failure(cpu_bench, tmp_path, capsys):
    whole = cpu_bench.run

    def run(b):
        with b.part("bad"):
            raise RuntimeError("no such card")
        whole(b)

    cpu_bench.run = run
    assert bench.main(["fake", "--out", str(tmp_path)]) == 1
    assert results.load(tmp_path / "cpu" / "fake.json")["targets"][0]["got"] == 2.0
    shown = capsys.readouterr().out
    assert "RuntimeError: no such card" in shown and "failed: bad (RuntimeError)" in shown


@pytest.mark.parametrize("end", [lambda: os.kill(os.getpid(), signal.SIGTERM), lambda: 1 / 0])
def test_rows_are_kept_when_a_benchmark_is_stopped_or_fails(cpu_bench, tmp_path, end):
    whole = cpu_bench.run

    def run(b):
        whole(b)
        end()
        raise AssertionError("runs on")

    cpu_bench.run = run
    before = signal.getsignal(signal.SIGTERM)
    assert bench.main(["fake", "--out", str(tmp_path)]) == 1
    found = results.load(tmp_path / "cpu" / "fake.json")
    assert [row["case"] for row in found["rows"]] == ["case"]
    assert found["meta"]["note"].startswith("incomplete: ")
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_benchmark_that_cannot_run_is_left_out_of_all(cpu_bench, capsys):
    cpu_bench.lacks = lambda: "no such file"
    assert bench.run_all({"fake": cpu_bench}, [], []) == 0
    assert "fake         left out: no such file" in capsys.readouterr().out


@pytest.fixture
def two_benches(cpu_bench, monkeypatch):
    """`fake`, and `warmed`, which needs the warm start; the steps of `run_all` in order."""
    warmed = types.ModuleType("profiling.benches.warmed")
    warmed.NEEDS_CUDA, warmed.NEEDS_WARM_START = False, True
    done = []
    monkeypatch.setattr(bench, "run_within", lambda command, seconds: done.append(command[3]) or 0)
    monkeypatch.setattr(bench, "find_warm_start", lambda words: None)
    monkeypatch.setattr(bench, "make_warm_start", lambda words: done.append("warm start"))
    return {"fake": cpu_bench, "warmed": warmed}, done


def test_the_warm_start_is_made_once_before_all_benchmarks(two_benches, capsys):
    modules, done = two_benches
    assert bench.run_all(modules | {"again": modules["warmed"]}, [], []) == 0
    assert done == ["warm start", "fake", "warmed", "again"]
    modules["warmed"].IN_ALL = False
    assert bench.run_all(modules, [], []) == 0 and done[4:] == ["fake"]
    done.clear()
    assert bench.run_all({"fake": modules["fake"]}, [], []) == 0
    assert "warm start   skipped: no benchmark that runs here needs it" in capsys.readouterr().out


def test_an_existing_warm_start_is_not_made_again(two_benches, monkeypatch, tmp_path, capsys):
    modules, done = two_benches
    monkeypatch.setattr(bench, "find_warm_start", lambda words: tmp_path)
    assert bench.run_all(modules, [], []) == 0 and done == ["fake", "warmed"]
    assert f"warm start   skipped: it is in {tmp_path}" in capsys.readouterr().out


@pytest.mark.parametrize("error", [TimeoutError("its limit"), SystemExit("exit code 2")])
def test_the_other_benchmarks_run_without_a_warm_start(two_benches, monkeypatch, capsys, error):
    def fail(words):
        raise error

    modules, done = two_benches
    monkeypatch.setattr(bench, "make_warm_start", fail)
    assert bench.run_all(modules, [], []) == 1 and done == ["fake"]
    shown = capsys.readouterr().out
    assert f"warm start   FAILED: {error}" in shown
    assert "warmed       left out: it needs the warm start" in shown


def test_all_benchmarks_use_one_warm_start(monkeypatch, tmp_path):
    """Settings of other prompts or lengths do not change it; it has its own limit."""
    limits = []
    monkeypatch.setattr(warm, "run_within", lambda command, seconds: limits.append(command[3:]))
    start = ["preset=h100", f"run.root={tmp_path}"]
    for more in ([], ["task.path=gsm8k", "task.name=jsonl"], ["sampling.max_new_tokens=512"]):
        with pytest.raises(TimeoutError, match="stopped at its limit of 600 s"):
            warm.make_warm_start([*start, *more])
    assert limits == [start] * 3
    monkeypatch.setattr(warm, "run_within", lambda command, seconds: 3)
    with pytest.raises(SystemExit, match="the warm start failed with exit code 3"):
        warm.make_warm_start(start)


def test_a_quick_run_of_all_ends_within_nine_minutes():
    on_a_card = {m.name for m in pkgutil.iter_modules(benches.__path__)} - {
        "adapters", "big", "cpu", "peers", "tail", "two_gpu",
    }  # fmt: skip
    assert set(bench.QUICK_SECONDS) == on_a_card
    assert sum(bench.QUICK_SECONDS.values()) <= 540


def test_a_benchmark_is_stopped_at_its_limit(tmp_path):
    script = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (open(sys.argv[1], 'w').close(), sys.exit(1)))\n"
        "time.sleep(600)"
    )
    kept = tmp_path / "kept"
    begin = time.perf_counter()
    assert bench.run_within([sys.executable, "-c", script, str(kept)], 3.0) is None
    assert time.perf_counter() - begin < 300 and kept.exists()
    assert bench.run_within([sys.executable, "-c", "raise SystemExit(3)"], 120.0) == 3


def test_ctrl_c_leaves_a_benchmark_the_time_to_write_its_rows(tmp_path):
    """Both processes get the signal; the one that measures needs a second to end."""
    # A background job of a shell ignores the signal, and Python would inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    script = (
        "import os, signal, sys, time\n"
        "try:\n"
        "    os.kill(os.getppid(), signal.SIGINT)\n"
        "    time.sleep(1.0)\n"
        "finally:\n"
        "    open(sys.argv[1], 'w').close()"
    )
    kept = tmp_path / "kept"
    try:
        with pytest.raises(KeyboardInterrupt):
            bench.run_within([sys.executable, "-c", script, str(kept)], 120.0)
    finally:
        signal.signal(signal.SIGINT, before)
    assert kept.exists()


def test_an_unknown_target_is_refused():
    with pytest.raises(ValueError, match=r"no such target in \[sampling\]: sample_b65_us"):
        results.targets_of("sampling", {"sample_b65_us": 1.0})


def test_an_unreadable_result_is_named(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match="x.json: not a result; it must have meta, rows"):
        results.load(path)
    with pytest.raises(ValueError, match="y.json: cannot be read"):
        results.load(tmp_path / "y.json")


def test_folders_are_named_after_cards():
    assert results.card_folder("NVIDIA H200") == results.TARGETS_CARD
    assert results.card_folder("NVIDIA H100 80GB HBM3") == "h100-80gb-hbm3"


def test_without_a_card_there_is_no_share_of_copy(capsys):
    bench.Bench("fake", math.nan).add("one", timing.Timing(10.0, 0.1), 1000)
    assert "GB/s" in (shown := capsys.readouterr().out) and "nan" not in shown
