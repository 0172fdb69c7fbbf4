"""The compiler's report is read right, and a spill without a reason fails."""

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


def test_report_of_the_compiler_is_parsed():
    first, second = resources.parse_ptxas(REPORT)
    assert first == resources.Kernel("_ZN3tlt6kernelEv", "sm_90a", 80, 512, 120, 192, 144)
    assert second == resources.Kernel("other", "sm_80", 32, 0, 0, 0, 0)
    assert first.spills and not second.spills


def test_names_lose_what_every_kernel_has():
    long = "void tlt::(anonymous namespace)::decode_kernel<__half, 1, (tlt::Before)0>(tlt::Params)"
    assert resources.short_name(long) == "decode_kernel<__half, 1, (Before)0>"


def test_a_spill_needs_a_listed_reason(monkeypatch, tmp_path):
    monkeypatch.setattr(resources, "ROOT", tmp_path)
    monkeypatch.setattr(resources, "compile_source", lambda *job: resources.parse_ptxas(REPORT))
    source = tmp_path / "csrc" / "layers" / "kernel.cu"
    lines, fine = resources.report([source], ["sm_90a"], "nvcc")
    assert not fine and any("SPILLS" in line for line in lines)
    monkeypatch.setattr(resources, "SPILL_REASONS", {r"layers/kernel.cu: .*sm_90a": "a test"})
    lines, fine = resources.report([source], ["sm_90a"], "nvcc")
    assert fine and any("(a test)" in line for line in lines)


@pytest.mark.skipif(resources.find_tool("nvcc") is None, reason="no nvcc")
def test_a_real_source_compiles_and_reports_its_kernels(capsys):
    assert resources.main(["--arch", "sm_90a", "--only", "layers/kernel.cu"]) == 0
    out = capsys.readouterr().out
    assert "rms_norm_kernel<float>" in out and "silu_mul_kernel<__half>" in out
