"""Runs a benchmark and writes its JSON: `python -m profiling.bench layers [--quick]`, or `all`.

A benchmark is a module of `profiling.benches` with `run(bench: Bench) -> None`. It adds rows, and
figures for the targets of its table in `targets.toml`. A target without a figure counts as missed.
"""

import argparse
import contextlib
import datetime
import fcntl
import importlib
import json
import math
import os
import pkgutil
import platform
import re
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from driver.common.errors import UserError
from driver.common.storage import write_text
from profiling import benches
from profiling.rig import timing
from profiling.rig.bench import Bench, Stopped, output_of, run_within, say
from profiling.rig.results import CPU, QUICK, RESULTS, ROOT, card_folder, joined, load, targets_of
from profiling.rig.warm import find_warm_start, make_warm_start


def meta(command: str, commit: str) -> dict[str, Any]:
    """Card, versions, commit, command and date; a commit with a plus had uncommitted changes."""
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()
    driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "card": card,
        "driver": driver.split("\n")[0],
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "commit": commit or current_commit(),
        "command": command,
        "date": datetime.datetime.now().isoformat(timespec="minutes"),
    }


def cpu_name() -> str:
    try:
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1] if found else platform.machine()


def current_commit() -> str:
    head = output_of("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD")
    changed = output_of("git", "-C", str(ROOT), "status", "--porcelain", "-uno", "..")
    return head + ("+" if changed else "")


def needs_cuda(module: ModuleType, only: str = "") -> bool:
    """Whether a benchmark, or the part that `--only` names, measures the card, not the CPU."""
    return getattr(module, "NEEDS_CUDA", True) and only not in getattr(module, "CPU_PARTS", ())


def needs_warm_start(module: ModuleType) -> bool:
    """Whether a benchmark runs the warmed policy (`NEEDS_WARM_START = True`)."""
    return getattr(module, "NEEDS_WARM_START", False)


def lacks(module: ModuleType) -> str:
    """Why a benchmark cannot run on this machine; "" = it can."""
    return getattr(module, "lacks", str)()


@contextlib.contextmanager
def kept_when_stopped(bench: Bench) -> Iterator[None]:
    """Keeps the rows of a benchmark that is stopped by SIGTERM (of `timeout`) or Ctrl-C."""

    def stop(*_: object) -> None:
        raise Stopped

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        say("stopped")
        bench.failed.append("stopped before its end")
    finally:
        signal.signal(signal.SIGTERM, before)


def run_one(module: ModuleType, args: argparse.Namespace, command: str) -> list[str]:
    """Runs a benchmark and writes its JSON; returns the parts that failed."""
    about = meta(command, args.commit)
    bench = Bench(
        args.name, math.nan, about["commit"], args.quick, args.only, args.set, args.options
    )
    timing.profiling = args.profile
    if args.profile:
        module.run(bench)
        return bench.failed
    on_card = needs_cuda(module, args.only)
    if on_card:
        bench.copy_gb_per_s = timing.copy_bandwidth()
        about["copy_gb_per_s"] = round(bench.copy_gb_per_s, 1)
        about["empty_graph_us"] = round(timing.empty_graph_us(), 3)
        say(
            f"{about['card']}: copy {about['copy_gb_per_s']} GB/s, "
            f"empty graph {about['empty_graph_us']} us"
        )
    folder = args.out / (card_folder(about["card"]) if on_card else CPU)
    path = (folder / QUICK if args.quick else folder) / f"{args.name}.json"
    if args.add and path.exists():
        bench.known = load(path)["rows"]
    with kept_when_stopped(bench), bench.part(args.name):
        module.run(bench)
    if bench.failed and not bench.rows:
        return bench.failed
    if args.only and args.out.resolve() == RESULTS and not args.add:
        say("--only: a part of the cases, not written; take --add, or --out FOLDER")
        return bench.failed
    if bench.failed:
        about["note"] = f"incomplete: {', '.join(bench.failed)}"
    targets = targets_of(args.name, bench.got)
    for target in targets:
        if rows := bench.sources.get(target["name"]):
            made = [about | row for row in rows]
            target["commit"] = ", ".join(dict.fromkeys(row["commit"] for row in made))
            target["date"] = min(row["date"] for row in made)
        say(f"{'met  ' if target['met'] else 'UNMET'} {target['name']}: {target['got']}")
    write_result(path, {"meta": about, "rows": bench.rows, "targets": targets}, add=args.add)
    for name, content in bench.files.items():
        beside = path.with_name(f"{args.name}-{name}.json")
        beside.write_text(json.dumps(content) + "\n")
        say(f"wrote {beside}")
    return bench.failed


def write_result(path: Path, result: dict[str, Any], *, add: bool) -> None:
    """Writes a result, or adds it to the file, which another process may add to meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        if add and path.exists():
            result = joined(load(path), result)
        write_text(path, json.dumps(result, indent=1) + "\n")
    finally:
        os.close(handle)
    say(f"wrote {path}")


# Limits of `all --quick` in seconds: nine minutes after the warm start.
QUICK_SECONDS = {
    "attention": 28,
    "decode": 42,
    "drafter": 108,
    "graphs": 72,
    "grpo": 84,
    "hops": 15,
    "identity": 34,
    "layers": 8,
    "ngram": 6,
    "rollout": 68,
    "sampling": 7,
    "step": 6,
    "update": 40,
}


def warm_start_first(words: list[str]) -> tuple[str, bool]:
    """Makes the warm start where there is none; a line about it, and whether it failed."""
    begin = time.perf_counter()
    try:
        if found := find_warm_start(words):
            return f"skipped: it is in {found}", False
        say("--- warm start")
        made = make_warm_start(words)
    except (SystemExit, TimeoutError, UserError) as error:
        return f"FAILED: {error}", True
    return f"{time.perf_counter() - begin:6.0f} s  made in {made}", False


def run_all(modules: dict[str, ModuleType], settings: list[str], options: list[str]) -> int:
    """Runs the benchmarks that this machine has the device for, each in its own process.

    The warm start is made first, within its own limit; without it the benchmarks that need it are
    left out. A benchmark that fails, or is stopped at its limit of a quick run, costs its own
    numbers only. `options` are the words of the command, which each benchmark takes.
    """
    modules = {n: m for n, m in modules.items() if getattr(m, "IN_ALL", True)}
    modules = {n: m for n, m in modules.items() if needs_cuda(m) == torch.cuda.is_available()}
    left_out = {name: reason for name, module in modules.items() if (reason := lacks(module))}
    needing = [n for n, m in modules.items() if needs_warm_start(m) and n not in left_out]
    text, failed = "skipped: no benchmark that runs here needs it", False
    if needing:
        text, failed = warm_start_first(["preset=h100", *settings])
    if failed:
        left_out |= dict.fromkeys(needing, "it needs the warm start")
    lines = [(failed, f"warm start   {text}")]
    limits = QUICK_SECONDS if "--quick" in options else {}
    for name in modules:
        if name in left_out:
            lines.append((False, f"{name:12} left out: {left_out[name]}"))
            continue
        say(f"--- {name}")
        begin = time.perf_counter()
        command = [sys.executable, "-m", "profiling.bench", name, *options]
        code = run_within(command, limits.get(name, math.inf))
        seconds = time.perf_counter() - begin
        ended = "written"
        if code is None:
            ended = f"STOPPED at its limit of {limits[name]} s; its rows so far are written"
        elif code:
            ended = f"FAILED (exit code {code})"
        lines.append((code != 0, f"{name:12} {seconds:6.0f} s  {ended}"))
    for _, line in lines:
        say(line)
    return 0 if modules and not any(failed for failed, _ in lines) else 1


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    names = sorted(module.name for module in pkgutil.iter_modules(benches.__path__))
    parser = argparse.ArgumentParser(prog="python -m profiling.bench", description=__doc__)
    parser.add_argument("name", choices=["all", *names])
    parser.add_argument("--quick", action="store_true", help="only the cases of the targets")
    parser.add_argument("--only", default="", help="cases that match this regular expression")
    parser.add_argument(
        "--profile", action="store_true", help="run each case once, for ncu: nothing is timed"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of the run, as in driver.train",
    )
    parser.add_argument("--add", action="store_true", help="keep the other cases of the JSON")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON")
    parser.add_argument("--commit", default="", help="the measured commit, where git is missing")
    args, options = parser.parse_known_args(argv)
    args.options = options
    wanted = names if args.name == "all" else [args.name]
    modules = {name: importlib.import_module(f"profiling.benches.{name}") for name in wanted}
    if args.name == "all":
        return run_all(modules, args.set, [word for word in argv if word != "all"])
    module = modules[args.name]
    if args.options and not hasattr(module, "OPTIONS"):
        parser.error(f"{args.name} does not take {' '.join(args.options)}")
    if needs_cuda(module, args.only) and not torch.cuda.is_available():
        say(f"profiling.bench: {args.name} needs a CUDA device; `profiling.bench cpu` needs none")
        return 1
    flags = ["--quick"] * args.quick + (["--only", args.only] if args.only else [])
    flags += [word for setting in args.set for word in ("--set", setting)]
    flags += args.options
    command = f"python -m profiling.bench {shlex.join([args.name, *flags])}"
    failed = run_one(module, args, command)
    if failed:
        say(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
