"""A tool sees the ranges: a small library stands where Nsight's does and writes down each."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import kit

ROOT = Path(__file__).resolve().parents[1]
NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
# NVTX loads it by NVTX_INJECTION64_PATH. A registered name is handed back as its own handle.
TOOL = """
#include <nvtx3/nvToolsExt.h>
#include <cstdio>
#include <cstring>

int push(const char* name) { return std::fprintf(stderr, "nvtx+%s\\n", name); }
int pop() { return std::fprintf(stderr, "nvtx-\\n"); }
int push_in(nvtxDomainHandle_t, const nvtxEventAttributes_t* event) {
  return push(event->message.ascii);
}
int pop_in(nvtxDomainHandle_t) { return pop(); }
nvtxStringHandle_t keep(nvtxDomainHandle_t, const char* name) {
  return reinterpret_cast<nvtxStringHandle_t>(strdup(name));
}
extern "C" int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t table_of) {
  auto table = static_cast<const NvtxExportTableCallbacks*>(table_of(NVTX_ETID_CALLBACKS));
  auto slots = [&](NvtxCallbackModule module) {
    NvtxFunctionTable found = nullptr;
    unsigned size = 0;
    table->GetModuleFunctionTable(module, &found, &size);
    return found;
  };
  NvtxFunctionTable core = slots(NVTX_CB_MODULE_CORE), domains = slots(NVTX_CB_MODULE_CORE2);
  *core[NVTX_CBID_CORE_RangePushA] = reinterpret_cast<NvtxFunctionPointer>(push);
  *core[NVTX_CBID_CORE_RangePop] = reinterpret_cast<NvtxFunctionPointer>(pop);
  *domains[NVTX_CBID_CORE2_DomainRangePushEx] = reinterpret_cast<NvtxFunctionPointer>(push_in);
  *domains[NVTX_CBID_CORE2_DomainRangePop] = reinterpret_cast<NvtxFunctionPointer>(pop_in);
  *domains[NVTX_CBID_CORE2_DomainRegisterStringA] = reinterpret_cast<NvtxFunctionPointer>(keep);
  return 1;
}
"""


def build(source, folder, name, *flags):
    """Compiles with the toolkit's own headers."""
    (folder / f"{name}.cpp").write_text(source)
    out = folder / name
    command = [NVCC, "-std=c++17", "-cudart", "none", *flags, f"{out}.cpp", "-o", str(out)]
    subprocess.run(command, check=True)
    return out


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """Runs a command and returns the ranges that it opened and closed, in order."""
    if NVCC is None or shutil.which("g++") is None:
        pytest.skip("no nvcc with a compiler and NVTX's headers")
    folder = tmp_path_factory.mktemp("tool")
    tool = build(TOOL, folder, "tool.so", "-shared", "-Xcompiler", "-fPIC")

    def run(*command):
        env = {**os.environ, "NVTX_INJECTION64_PATH": str(tool)}
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        lines = done.stderr.splitlines()
        return [line.removeprefix("nvtx") for line in lines if line.startswith("nvtx")]

    return run


def test_a_range_of_cpp_is_open_for_its_block(seen, tmp_path):
    source = """
#include "common/range.h"
int main() {
  const tlt::Range outer("graph", "off x 8");
  { const tlt::Range inner("op", "tree_attention"); }
}
"""
    flags = ["-DTLT_WITH_CUDA=1", "-I", str(ROOT / "csrc"), "-ldl"]
    ranges = seen(build(source, tmp_path, "ranges", *flags))
    assert ranges == ["+tlt/graph/off x 8", "+tlt/op/tree_attention", "-", "-"]


def test_a_span_of_python_is_a_range(seen):
    pytest.importorskip("nvtx")
    code = "from driver.common.spans import Spans\nwith Spans('rollout')('verify'): pass"
    assert seen(sys.executable, "-c", code) == ["+tlt/rollout/verify", "-"]


@kit.gpu
@kit.needs_gpu
def test_a_launcher_s_range_is_inside_the_one_that_ncu_looks_at(seen):
    code = """
import torch, tlt_ext
from profiling.rig.timing import run_in_profile_range
x, out = torch.ones(1, 8, device="cuda"), torch.empty(1, 4, device="cuda")
run_in_profile_range({"ours": [lambda: tlt_ext.silu_mul(x, out)]})
"""
    ranges = seen(sys.executable, "-c", code)
    assert ranges[:2] == ["+tlt/op/silu_mul", "-"]  # warm, outside
    assert ranges[-4:] == ["+profile_target", "+tlt/op/silu_mul", "-", "-"]
