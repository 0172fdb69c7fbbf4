"""Without a card: time and memory of the default run, token identity on the CPU.

`median_us` is the wall time of the run, or the time of a token of an identity arm. `--only checks`
runs `.ci/run`, which takes some 20 minutes, for the seconds of its stages; other words leave it
out. `--quick` leaves out SmolLM2, which takes ten minutes on two cores.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from driver.config.options import IdentityOptions
from driver.identity import Identity
from profiling.rig.bench import Bench, say
from profiling.rig.results import ROOT

NEEDS_CUDA = False
RUN, CHECKS = "tiny run", "checks"
# Stage of `.ci/run` -> target.
STAGES = {"install": "install_seconds", "tests": "pytest_seconds", "all": "ci_seconds"}
MODELS = {
    "tiny": IdentityOptions(batch=16),
    "smollm2": IdentityOptions(model="smollm2", tokens=2500),
}


def run_tiny(bench: Bench) -> None:
    """`python -m driver.train` as in the README, in its own process."""
    with tempfile.TemporaryDirectory() as root:
        command = [sys.executable, "-m", "driver.train", f"run.root={root}", "run.name=tiny"]
        subprocess.run(command, check=True)
        summary = json.loads((Path(root) / "tiny" / "summary.json").read_text())
    seconds, memory = summary["wall_s"]["wall"], summary["peak_memory_gb"]
    bench.add_row(RUN, 1e6 * seconds, steps=summary["steps"], peak_memory_gb=round(memory, 3))
    bench.got["tiny_run_seconds"] = round(seconds, 1)
    bench.got["tiny_run_rss_gb"] = round(memory, 3)


def run_identity(bench: Bench, model: str) -> None:
    identity = Identity(MODELS[model])
    identity.run()
    for arm in identity.arms:
        bench.add_row(
            f"identity {model} {arm.name}",
            1e6 * arm.seconds / arm.tokens,
            tokens=arm.tokens,
            equal=arm.worst_share,
        )
    bench.got[f"{model}_identity"] = min(arm.worst_share for arm in identity.arms)


def run_checks(bench: Bench) -> None:
    """Stages of `.ci/run`, and lines of the driver."""
    with subprocess.Popen([ROOT.parent / ".ci/run"], stdout=subprocess.PIPE, text=True) as checks:
        assert checks.stdout is not None
        for line in checks.stdout:
            say(line.rstrip())
            if found := re.fullmatch(r"=== (.+): (\d+) s\n", line):
                bench.add_row(f"{CHECKS}, {found[1]}", 1e6 * int(found[2]))
                if target := STAGES.get(found[1]):
                    bench.got[target] = float(found[2])
    if checks.returncode:
        raise RuntimeError(f".ci/run failed with exit code {checks.returncode}")
    sources = (ROOT.parent / "driver").rglob("*.py")
    bench.got["driver_lines"] = float(sum(len(path.read_text().splitlines()) for path in sources))


def run(bench: Bench) -> None:
    if bench.only == CHECKS:
        return run_checks(bench)
    if bench.wanted(RUN):
        run_tiny(bench)
    for model in ["tiny"] if bench.quick else MODELS:
        if bench.wanted(f"identity {model}"):
            run_identity(bench, model)
