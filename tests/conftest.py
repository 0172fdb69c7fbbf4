"""Options of the test command, and how many processes and threads it takes."""

import gc
import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: tests share the cores
gc.disable()  # until all modules are imported: a quarter of the time until the first test


def pytest_collection_finish():
    gc.freeze()  # modules and tests stay: later collections need not visit them
    gc.enable()


def pytest_addoption(parser):
    parser.addoption(
        "--soak", type=int, default=400, metavar="N", help="passes of the engine's soak test"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Runs the whole suite in three processes; selected files, and GPU machines, take one.

    On two cores that is 12 % faster than two, since some tests wait for a time limit.
    Some GPU tests measure the free memory of the card, which a second process changes.
    """
    option = config.option
    whole = config.args_source is config.ArgsSource.TESTPATHS
    chosen = getattr(option, "numprocesses", 0) is not None  # 0: pytest-xdist is missing
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    has_gpu = Path("/dev/nvidiactl").exists()
    if whole and not (chosen or is_worker or has_gpu or option.usepdb):
        option.numprocesses, option.dist = 3, "worksteal"
