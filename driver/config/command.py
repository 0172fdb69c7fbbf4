"""How a command runs: one line for a mistake of the user, no traceback for a signal."""

import errno
import io
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NoReturn

from ..common.errors import UserError
from ..common.stop import SIGNALS, Stopped

REMEDIES = {  # of errors that any path from the user may cause
    errno.ENAMETOOLONG: "choose a shorter one",
    errno.EACCES: "change its permissions or choose another one",
}


def run_command(command: Callable[[Sequence[str]], None]) -> None:
    """Runs `command(argv)`; a UserError is one line on stderr and exit code 2.

    SIGTERM, SIGUSR1 and SIGHUP end it as Ctrl-C does, so that the results so far are printed. The
    exit code is 128 plus the signal's number.
    """
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, _interrupt)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal may not know all characters
    warnings.formatwarning = lambda message, *_, **__: (
        f"warning: {' '.join(str(message).split())}\n"  # an error of the user's code may have lines
    )
    try:
        command(sys.argv[1:])
    except Stopped as stop:
        sys.stderr.write(f"{stop}\n")
        sys.exit(stop.exit_code)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(UserError.exit_code)
    except BrokenPipeError:  # as by `| head`; Python would report it again at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:
        if error.errno not in REMEDIES or error.filename is None:
            raise
        remedy = REMEDIES[error.errno]
        sys.stderr.write(f"error: {error.filename}: {error.strerror}; {remedy}\n")
        sys.exit(UserError.exit_code)
    except KeyboardInterrupt as error:
        ended = Stopped.by(error)
        sys.stderr.write(f"{ended}\n")
        sys.exit(ended.exit_code)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt(signal.Signals(number).name)
