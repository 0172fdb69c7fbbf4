"""The profiling scripts parse, name a missing tool and call the tools with the right options."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "profiling" / "kernels"
SCRIPTS = sorted(FOLDER.glob("*.sh"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse_and_show_their_usage(script):
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert f"profiling/kernels/{script.name}" in script.read_text().partition("\nset -")[0]


def run_script(name, *words, tools):
    path = os.pathsep.join([*map(str, tools), "/usr/bin", "/bin"])
    environment = {"PATH": path, "PYTHON": sys.executable, "HOME": "/tmp"}
    return subprocess.run(
        ["bash", str(FOLDER / name), *words],
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("ncu.sh", "cuda-nsight-compute"),
        ("nsys.sh", "cuda-nsight-systems"),
        ("sanitize.sh", "cuda-sanitizer"),
    ],
)
def test_a_missing_tool_is_named_with_its_package(name, package):
    done = run_script(name, "attention", tools=[])
    assert done.returncode == 127 and package in done.stderr


def stub(folder, name, body):
    path = folder / name
    path.write_text(f'#!/bin/bash\necho "$@" >>{folder}/calls\n{body}')
    path.chmod(0o755)


def test_ncu_profiles_the_range_and_shows_its_sections(tmp_path):
    stub(tmp_path, "ncu", 'if [ "$1" = --import ]; then echo details; fi\n')
    done = run_script("ncu.sh", "attention", "--only", "tree16 b1", tools=[tmp_path])
    assert done.returncode == 0, done.stderr
    profile, show = (tmp_path / "calls").read_text().splitlines()
    assert "--nvtx-include profile_target/" in profile and "SpeedOfLight" in profile
    assert profile.endswith("-m profiling.bench attention --quick --profile --only tree16 b1")
    assert show == "--import profiling/out/attention.ncu-rep --page details"
    assert "details" in done.stdout and "wrote profiling/out/attention.ncu-rep" in done.stdout


def test_nsys_traces_a_short_run_with_the_caller_s_settings(tmp_path):
    make_run = 'for w in "$@"; do [[ $w == run.root=* ]] && root=${w#*=}; done\n'
    make_run += '[ "$1" = stats ] || { mkdir -p $root/nsys; echo "{}" >$root/nsys/trace.json; }\n'
    stub(tmp_path, "nsys", make_run)
    done = run_script("nsys.sh", "preset=smollm2", "run.steps=2", tools=[tmp_path])
    assert done.returncode == 0, done.stderr
    trace, stats = (tmp_path / "calls").read_text().splitlines()
    words = trace.partition("-m driver.train ")[2].split()
    assert words[0] == "preset=smollm2" and words[-1] == "run.steps=2"
    assert "--cuda-graph-trace node" in trace and "cuda,nvtx" in trace
    assert stats.startswith("stats") and "next:" in done.stdout
