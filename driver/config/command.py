"""How a command runs: one line for a mistake of the user, no traceback for a signal."""

from __future__ import annotations

import signal
import sys
import warnings
from collections.abc import Callable, Sequence

from ..common.errors import UserError

STOPPED = 130  # the exit code of a process that Ctrl-C ended


def run_command(command: Callable[[Sequence[str]], None]) -> None:
    """Runs `command(argv)` on the words of the command line.

    A UserError is one line on stderr and exit code 2. SIGTERM (a time limit) ends the command as
    Ctrl-C does, so that what was found so far is still printed.

    Args:
        command: takes the words.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    try:
        command(sys.argv[1:])
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(UserError.exit_code)
    except KeyboardInterrupt:
        sys.stderr.write("stopped\n")
        sys.exit(STOPPED)
