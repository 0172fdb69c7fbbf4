"""The stages of the checks become figures."""

import math

import pytest

from profiling.benches import cpu
from profiling.rig.bench import Bench


@pytest.mark.parametrize("code", [0, 3])
def test_seconds_of_the_stages_are_read(code, tmp_path, monkeypatch):
    (tmp_path / ".ci").mkdir()
    script = tmp_path / ".ci" / "run"
    lines = [
        "=== install",
        "=== install: 7 s",
        "1 passed in 5 s",
        "=== tests: 60 s",
        "=== all: 90 s",
    ]
    script.write_text(
        "#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines) + f"exit {code}\n"
    )
    script.chmod(0o755)
    (tmp_path / "driver").mkdir()
    (tmp_path / "driver" / "one.py").write_text("a = 1\nb = 2\n")
    monkeypatch.setattr(cpu, "ROOT", tmp_path / "profiling")
    bench = Bench("cpu", math.nan, only="checks")
    if code:
        with pytest.raises(RuntimeError, match="failed with exit code 3"):
            cpu.run(bench)
        return
    cpu.run(bench)
    assert bench.got == {
        "install_seconds": 7.0, "pytest_seconds": 60.0, "ci_seconds": 90.0, "driver_lines": 2.0,
    }  # fmt: skip
    assert [row["case"] for row in bench.rows] == [
        "checks, install",
        "checks, tests",
        "checks, all",
    ]
