"""Processes of a test as forks of one process that has imported the driver.

Importing `driver.train` takes five CPU-seconds, and torchrun pays that for every rank. A fork
server pays it once per test process. As torchrun does, `run_ranks` holds the store and stops the
other ranks when one fails.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist

GRACE_S = (2, 30)  # for a rank to stop after SIGTERM, and after a second one, which ends a sleep

# A CUDA build of torch crashes in a fork of a process that has imported it.
context = multiprocessing.get_context("forkserver" if torch.version.cuda is None else "spawn")
context.set_forkserver_preload(["driver.train", "driver.report.page", __name__])


def run_ranks(
    script: str, argv: Sequence[str], ranks: int, log: Path, timeout_s: float = 240.0
) -> int:
    """Runs a script on several ranks.

    Args:
        script: Python source.
        argv: words that the script finds in `sys.argv[1:]`.
        ranks: number of processes; 1 starts one without the variables of torchrun.
        log: file for the output of all ranks.
        timeout_s: seconds after which all ranks are killed.

    Returns:
        The exit code of the first rank that failed, or 0.

    Raises:
        TimeoutError: the ranks did not end in time.
    """
    deadline = time.monotonic() + timeout_s
    log.write_bytes(b"")
    common, store = {"OMP_NUM_THREADS": "1"}, None
    if ranks > 1:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        common |= {
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
    running = {}
    for rank in range(ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
        process = context.Process(target=_rank, args=(script, list(argv), log, common | own))
        process.start()
        running[process.sentinel] = process
    code = 0
    try:
        while running and code == 0:
            left = deadline - time.monotonic()
            ended = wait(list(running), max(left, 0.0))
            if not ended:
                raise TimeoutError(f"ranks still run after {timeout_s:g} s: {log.read_text()}")
            for sentinel in ended:
                process = running.pop(sentinel)
                process.join()
                code = code or process.exitcode
        for grace_s in GRACE_S:
            for process in running.values():
                process.terminate()
            for process in running.values():
                process.join(grace_s)
    finally:
        for process in running.values():
            process.kill()
            process.join()
        del store
    return code


def run_module(command: Sequence[str], log: Path, timeout_s: float = 240.0) -> int:
    """Runs `python -m module word ...`, given as a list, and returns its exit code."""
    _, flag, module, *words = command
    assert flag == "-m"
    script = f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    return run_ranks(script, words, 1, log, timeout_s)


def _rank(script: str, argv: list[str], log: Path, environment: dict[str, str]) -> None:
    """The forked process."""
    os.environ.update(environment)
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.enable()
    sys.argv = ["script", *argv]
    if page := sys.modules.get("driver.report.page"):
        page.write_page = lambda folders, out: None  # as in tests/driver/conftest.py
    try:
        exec(compile(script, "script", "exec"), {"__name__": "__main__"})
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
