"""`tlt <command> ...`, and the start of `python -m driver.<command> ...`.

This module imports the standard library only. Help is printed, and a mistyped setting is refused,
before torch is imported.
"""

import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

COMMANDS = {
    "train": "train a policy by GRPO with speculative rollouts",
    "generate": "generate a text with speculation and without, and compare",
    "identity": "check on many tokens that speculation changes none",
    "export": "write a run's drafter as a draft model for serving engines",
    "warm": "make a warm start and keep it",
    "report": "write one HTML page about one run or several",
}
HELP = {"-h", "--help"}
INSTALL = "pip install -e '.[driver]' in the checkout"


def main() -> NoReturn:
    """The console script `tlt`."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in COMMANDS:
        del sys.argv[1]
        start(name)
    lines = [f"  {command:<10}{about}" for command, about in COMMANDS.items()]
    usage = "\n".join(["usage: tlt COMMAND ...", "", *lines, "", "options: tlt COMMAND --help"])
    if name in HELP:
        sys.stdout.write(usage + "\n")
        sys.exit()
    sys.stderr.write(f"error: {name}: unknown command; choose one of {', '.join(COMMANDS)}\n")
    sys.exit(2)


def start(name: str) -> NoReturn:
    """Runs one of `COMMANDS` on `sys.argv[1:]` and exits."""
    signal.signal(signal.SIGINT, _quit)
    try:
        from .config.command import run_command

        run_command(lambda argv: _run(name, argv))
    except (ImportError, AttributeError) as error:
        missing = (error.name or "").partition(".")[0]
        older_build = getattr(getattr(error, "obj", None), "__name__", "") == "tlt_ext._C"
        if older_build or missing == "tlt_ext":  # the message names the remedy
            sys.stderr.write(f"error: {error}\n")
        elif isinstance(error, ModuleNotFoundError) and missing != __name__.partition(".")[0]:
            sys.stderr.write(f"error: {missing} is missing; run {INSTALL}\n")
        else:
            raise
        sys.exit(2)
    finally:  # a signal while Python exits prints no traceback
        from .common.stop import SIGNALS

        with contextlib.suppress(OSError):
            sys.stdout.flush()
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
    sys.exit()


def _run(name: str, argv: Sequence[str]) -> None:
    # An import may swallow KeyboardInterrupt, or turn it into another error.
    from .common.stop import SIGNALS

    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in handlers.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, _quit)
    if name != "report":  # it has a parser of its own
        from .config.help import help_text
        from .config.load import Config
        from .config.options import check_words
        from .tasks import check_task_name

        if HELP & set(argv):
            sys.stdout.write(help_text(name, argv) + "\n")
            return
        settings = check_words(name, argv)
        if isinstance(settings, Config):
            check_task_name(settings.task.name)
    command = importlib.import_module(f".{name}", __package__).main
    for number, handler in handlers.items():
        signal.signal(number, handler)
    command(argv)


def _quit(number: int, frame: FrameType | None) -> NoReturn:
    os._exit(128 + number)
