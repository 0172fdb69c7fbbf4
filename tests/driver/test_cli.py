"""The start of the commands: fast, quiet on Ctrl-C, and one line where a package is missing."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "numpy", "rich", "matplotlib")


def python(code: str, *argv: str, **options) -> subprocess.CompletedProcess:
    """Runs code as a command line would, from the source tree."""
    command = [sys.executable, "-c", textwrap.dedent(code), *argv]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, **options)


LIGHT = f"""
    import atexit, sys
    atexit.register(lambda: print("heavy:", [n for n in {HEAVY} if n in sys.modules]))
    from driver.cli import main
    main()
"""


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        ("--help", 0, "usage: tlt COMMAND ..."),
        ("train --help", 0, "usage: tlt train [preset=NAME|FILE.yaml]"),
        ("report --help", 0, "usage: tlt report"),
        ("export -h", 0, "usage: tlt export"),
        ("train run.stesp=3", 2, "error: run.stesp: unknown key; did you mean run.steps?"),
        ("train --dry-run run.steps=x", 2, "error: run.steps: must be an integer, got 'x'"),
        ("train task.name=sum", 2, "error: task.name=sum: unknown task; did you mean sums?"),
        ("warm preset=tinny", 2, "error: preset=tinny: unknown; did you mean tiny?"),
        ("generate temperature=hot", 2, "error: temperature: must be a number, got 'hot'"),
        ("trian", 2, "error: trian: unknown command; choose one of train, generate"),
        ("report /no/run", 2, "error: /no/run: contains no run"),
    ],
)
def test_help_and_mistakes_are_answered_before_anything_heavy_is_imported(words, code, line):
    done = python(LIGHT, *words.split())
    assert done.returncode == code, done.stderr
    assert (done.stdout if code == 0 else done.stderr).startswith(line)
    if code:
        assert done.stderr.count("\n") == 1
    if "/no/run" not in words:
        assert done.stdout.endswith("heavy: []\n")


def test_a_signal_while_python_exits_prints_no_traceback():
    done = python(
        """
        import atexit, signal
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a test may inherit another
        atexit.register(lambda: signal.raise_signal(signal.SIGTERM))
        from driver.cli import main
        main()
        """,
        "report",
        "/no/run",
    )
    assert done.returncode == -signal.SIGTERM
    assert done.stderr.startswith("error: /no/run") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("module", ["driver.train", "driver.generate", "driver.report"])
def test_modules_start_the_same_way(module):
    command = [sys.executable, "-X", "importtime", "-m", module, "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: tlt {module.partition('.')[2]}")
    assert not [n for n in HEAVY if f"| {n}\n" in done.stderr or f" {n}\n" in done.stderr]


def test_a_missing_package_is_one_line():
    """As after `pip install -e .` alone."""
    code = """
        import sys
        sys.modules["rich"] = None  # as if it were not installed
        sys.argv = ["tlt", "train"]
        from driver.cli import main
        main()
    """
    done = python(code)
    assert done.returncode == 2
    remedy = "is missing; run pip install -e '.[driver]' in the checkout\n"
    assert done.stderr == f"error: rich {remedy}"
    done = python("import sys; sys.modules['transformers'] = None; from driver import Session")
    assert done.stderr.endswith(f"ImportError: driver: transformers {remedy}")


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_the_imports_ends_quietly(tmp_path, sent):
    """An import that takes long, and that would swallow KeyboardInterrupt."""
    (tmp_path / "rich").mkdir()
    (tmp_path / "rich" / "__init__.py").write_text(
        "import sys, time\nprint('importing', flush=True)\n"
        "for _ in range(600):\n"
        "    try:\n        time.sleep(0.1)\n    except BaseException:\n        pass\n"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "driver.train"]
    pipe = subprocess.PIPE
    before = signal.signal(sent, signal.SIG_DFL)  # a child of nohup would ignore SIGHUP
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=pipe, stderr=pipe, text=True)
    signal.signal(sent, before)
    assert process.stdout.readline() == "importing\n"
    process.send_signal(sent)
    out, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (128 + sent, "")
