"""The profiling scripts parse, name a missing tool and call the tools with the right options."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from profiling.kernels import ncu_table

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "profiling" / "kernels"
SCRIPTS = sorted(FOLDER.glob("*.sh"))
PERCENT = "avg.pct_of_peak_sustained"
RAW = "\n".join(
    (
        "==PROF== Connected to process 7",
        '"ID","Process ID","Kernel Name","Block Size","Grid Size",'
        f'"dram__throughput.{PERCENT}_elapsed","gpu__time_duration.sum",'
        f'"launch__registers_per_thread","sm__pipe_tensor_cycles_active.{PERCENT}_elapsed",'
        f'"sm__warps_active.{PERCENT}_active"',
        '"","","","","","%","ns","register/thread","%","%"',
        '"0","7","void tlt::<unnamed>::attend_kernel<__nv_bfloat16, 128>(tlt::Params)",'
        '"(128, 1, 1)","(8, 16, 1)","61.5","29,646","255","12.25","24.9"',
        '"1","7","merge_kernel","(64, 1, 1)","(4, 1, 1)","1.5","2100","40","n/a","6"',
        "",
    )
)


def test_the_csv_is_read():
    first, second = ncu_table.parse(RAW.splitlines())
    assert (first.kernel, first.grid, first.block) == (
        "attend_kernel<__nv_bfloat16, 128>",
        "(8, 16, 1)",
        "(128, 1, 1)",
    )
    assert first.values == {
        "us": pytest.approx(29.646),
        "DRAM %": 61.5,
        "tensor %": 12.25,
        "registers": 255,
        "occupancy %": 24.9,
    }
    assert second.values["tensor %"] is None and second.values["us"] == pytest.approx(2.1)


def test_the_table_has_a_line_a_launch(tmp_path, capsys):
    (tmp_path / "x.csv").write_text(RAW)
    assert ncu_table.main([str(tmp_path / "x.csv")]) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["us", "DRAM", "%"]
    assert first.split()[:5] == ["29.65", "61.5", "12.2", "255", "24.9"]
    assert second.split()[:5] == ["2.10", "1.5", "-", "40", "6.0"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("==ERROR== no permission\n", "no table of ncu"),
        ("\n".join(RAW.splitlines()[:3]), "no kernel was profiled"),
    ],
)
def test_a_report_without_launches_is_one_line(tmp_path, capsys, text, reason):
    (tmp_path / "x.csv").write_text(text)
    assert ncu_table.main([str(tmp_path / "x.csv")]) == 1
    assert reason in capsys.readouterr().err


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


def test_ncu_profiles_the_range_and_its_csv_becomes_a_table(tmp_path):
    (tmp_path / "raw.csv").write_text(RAW)
    stub(tmp_path, "ncu", f'if [ "$1" = --import ]; then cat {tmp_path}/raw.csv; fi\n')
    done = run_script("ncu.sh", "attention", "--only", "tree16 b1", tools=[tmp_path])
    assert done.returncode == 0, done.stderr
    profile, convert = (tmp_path / "calls").read_text().splitlines()
    assert "--nvtx-include profile_target/" in profile and "dram__throughput" in profile
    assert profile.endswith("-m profiling.bench attention --quick --profile --only tree16 b1")
    assert convert.startswith("--import profiling/out/attention.ncu-rep --csv --page raw")
    assert "29.65" in done.stdout and "wrote profiling/out/attention.ncu-rep" in done.stdout


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
