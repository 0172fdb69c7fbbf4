"""The log of the build is read right, and a spill without a reason fails."""

import shutil
import subprocess

import pytest

from profiling.kernels import resources

REPORT = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN3tlt6kernelEv' for 'sm_90a'
ptxas info    : Function properties for _ZN3tlt6kernelEv
    120 bytes stack frame, 192 bytes spill stores, 144 bytes spill loads
ptxas info    : Used 80 registers, used 1 barriers, 120 bytes cumulative stack size, 512 bytes smem
ptxas info    : Compile time = 1.0 ms
ptxas info    : Compiling entry function 'other' for 'sm_80'
ptxas info    : Function properties for other
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, 400 bytes cmem[0]
"""
QUIET = REPORT.replace("192", "0").replace("144", "0")
STEP = "[{}/9] Building CUDA object CMakeFiles/_C.dir/csrc/{}.o\n{}"


def test_report_of_the_compiler_is_parsed():
    first, second = resources.parse_ptxas(REPORT)
    assert first == resources.Kernel("_ZN3tlt6kernelEv", "sm_90a", 80, 512, 120, 336)
    assert second == resources.Kernel("other", "sm_80", 32, 0, 0, 0)


def test_a_log_is_split_by_source_and_a_later_build_replaces_an_earlier_one():
    log = STEP.format(1, "layers/kernel.cu", REPORT)
    log += "[2/9] Building CXX object CMakeFiles/_C.dir/csrc/kv/op.cpp.o\n"
    log += STEP.format(3, "kv/kernel.cu", QUIET) + "[9/9] Linking CXX shared module _C.so\n"
    found = resources.parse_log(log)
    assert [kernel.spilled for kernel in found["layers/kernel.cu"]] == [336, 0]
    assert found["kv/kernel.cu"][1].registers == 32 and len(found) == 2
    again = resources.parse_log(log + STEP.format(1, "layers/kernel.cu", QUIET))
    assert [kernel.spilled for kernel in again["layers/kernel.cu"]] == [0, 0]


def test_kernel_names_are_shortened():
    long = "void tlt::(anonymous namespace)::decode_kernel<__half, 1, (tlt::Before)0>(tlt::Params)"
    assert resources.short_name(long) == "decode_kernel<__half, 1, (Before)0>"


@pytest.fixture
def checkout(monkeypatch, tmp_path):
    """A checkout of one source with a built log; returns a function that writes the log."""
    monkeypatch.setattr(resources, "ROOT", tmp_path)
    source = tmp_path / "csrc" / "layers" / "kernel.cu"
    source.parent.mkdir(parents=True)
    source.touch()
    log = tmp_path / "build" / "build.log"
    log.parent.mkdir()
    return log.write_text


def test_a_spill_needs_a_listed_reason(checkout, monkeypatch, capsys):
    checkout(STEP.format(1, "layers/kernel.cu", REPORT))
    assert resources.main([]) == 1
    assert "layers/kernel.cu: kernel sm_90a  SPILLS" in capsys.readouterr().out
    monkeypatch.setattr(resources, "SPILL_REASONS", {r"layers/kernel.cu: .*sm_90a": "a test"})
    assert resources.main([]) == 0
    assert "336  layers/kernel.cu: kernel sm_90a  (a test)" in capsys.readouterr().out


def test_a_log_that_lacks_a_source_is_refused(checkout, tmp_path, capsys):
    assert resources.main([]) == 2  # no log
    assert "build/build.log: build with nvcc first" in capsys.readouterr().err
    checkout(STEP.format(1, "removed/kernel.cu", REPORT))
    assert resources.main([]) == 2
    assert "lacks 1 of 1 sources, layers/kernel.cu for one" in capsys.readouterr().err
    assert resources.main(["--log", str(tmp_path / "none")]) == 2


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_the_report_of_a_real_source_is_read(tmp_path):
    flags = ["-std=c++17", "-O1", "--expt-relaxed-constexpr", "-Xptxas=-v", "-arch=sm_90a"]
    source = resources.ROOT / "csrc" / "layers" / "kernel.cu"
    command = ["nvcc", *flags, f"-I{resources.ROOT / 'csrc'}", "-cubin", str(source)]
    command += ["-o", str(tmp_path / "out.cubin")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = resources.parse_log(STEP.format(1, "layers/kernel.cu", done.stderr))
    lines, fine = resources.report(found)
    assert fine
    assert any("rms_norm_kernel<float, 256>" in line for line in lines)
    assert any("silu_mul_kernel<__half>" in line for line in lines)
