"""Builds the native core `tlt_ext._C`: setuptools drives CMake and Ninja.

TLT_CUDA=auto|0|1         compile the CUDA kernels (default: whenever nvcc is found)
TLT_CUDA_ARCHS="90a-real" CMake architectures (default: this machine's card, else a portable set)
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
PORTABLE_ARCHS = "80;90a-real"  # 80 without a suffix: its PTX too, which later cards compile
MIN_CMAKE = (3, 26)
# The objects stay in the checkout, so that another installation compiles what has changed only.
BUILD = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"
LOG = ROOT / "build" / "build.log"
PTXAS = re.compile(rb"^ptxas info|bytes stack frame")  # the lines of -Xptxas=-v


def output_of(*command: str) -> str:
    """Returns what a command prints, or "" where it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


def find_nvcc() -> str | None:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(name):
            if (Path(home) / "bin" / "nvcc").exists():
                return str(Path(home) / "bin" / "nvcc")
            sys.stderr.write(f"tlt-ext: {name}={home} has no bin/nvcc; looking elsewhere\n")
    default = Path("/usr/local/cuda/bin/nvcc")
    return shutil.which("nvcc") or (str(default) if default.exists() else None)


def wanted_nvcc() -> str | None:
    """The nvcc to build with, or None for a CPU-only core."""
    mode = os.environ.get("TLT_CUDA", "auto")
    if mode not in ("auto", "0", "1"):
        sys.exit(f"tlt-ext: TLT_CUDA must be auto, 0 or 1, got {mode!r}")
    nvcc = None if mode == "0" else find_nvcc()
    if mode == "1" and nvcc is None:
        sys.exit(
            "tlt-ext: TLT_CUDA=1 but no nvcc: put it on PATH, set CUDA_HOME, or use TLT_CUDA=0"
        )
    return nvcc


def cuda_archs(nvcc: str) -> str:
    archs = os.environ.get("TLT_CUDA_ARCHS") or card_archs() or PORTABLE_ARCHS
    known = set(re.findall(r"compute_(\w+)", output_of(nvcc, "--list-gpu-arch")))
    for arch in archs.split(";"):
        match = re.fullmatch(r"(\d+)[af]?(-real|-virtual)?", arch)
        if match is None or (known and match[1] not in known):
            sys.exit(
                f"tlt-ext: {arch!r} is not an architecture of {nvcc}; it knows "
                f"{', '.join(sorted(known, key=int))}: set TLT_CUDA_ARCHS, e.g. to 80-real, or "
                "install a newer CUDA toolkit"
            )
    return archs


def card_archs() -> str:
    """The architectures of the cards in this machine, e.g. "90a-real"."""
    query = output_of("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
    caps = sorted(set(re.findall(r"(\d+)\.(\d+)", query)))
    return ";".join(f"{a}{b}{'a' if (a, b) == ('9', '0') else ''}-real" for a, b in caps)


def check_cmake() -> None:
    found = re.search(r"version (\d+)\.(\d+)", output_of("cmake", "--version"))
    if found is None or (int(found[1]), int(found[2])) < MIN_CMAKE:
        have = f"{found[1]}.{found[2]}" if found else "none"
        sys.exit(
            f"tlt-ext: needs CMake {MIN_CMAKE[0]}.{MIN_CMAKE[1]} or newer, found {have}: "
            "pip install -U cmake"
        )


def check_compiler() -> None:
    wanted = os.environ.get("CXX", "").split()[:1]
    if not any(map(shutil.which, wanted or ["c++", "g++", "clang++"])):
        name = f" (CXX={wanted[0]})" if wanted else ""
        sys.exit(f"tlt-ext: no C++ compiler{name}: install g++ 12 or newer, or set CXX")


def run_logged(command: list[str], log: Path) -> int:
    """Runs a command; what it prints goes to the log as well, ptxas' reports to the log only."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("ab") as file,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process,
    ):
        for line in process.stdout:
            file.write(line)
            if not PTXAS.search(line):
                sys.stdout.buffer.write(line)
                sys.stdout.flush()
    return process.returncode


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        check_cmake()
        check_compiler()
        import pybind11

        nvcc = wanted_nvcc()
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        BUILD.mkdir(parents=True, exist_ok=True)
        args = [
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DTLT_VERSION={self.distribution.get_version()}",
            f"-DTLT_OUTPUT_DIR={target.parent}",
            f"-DTLT_OUTPUT_NAME={target.name}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DTLT_WITH_CUDA={'ON' if nvcc else 'OFF'}",
        ]
        if nvcc:
            args += [
                f"-DCMAKE_CUDA_COMPILER={nvcc}",
                f"-DCMAKE_CUDA_ARCHITECTURES={cuda_archs(nvcc)}",
            ]
        # pip makes a new build environment each time: what CMake remembers of the last is stale.
        (BUILD / "CMakeCache.txt").unlink(missing_ok=True)
        for found in BUILD.glob("CMakeFiles/[0-9]*"):  # the compilers
            shutil.rmtree(found)
        self.run_or_exit(["cmake", "-S", str(ROOT), "-B", str(BUILD), "-G", "Ninja", *args])
        self.run_or_exit(["cmake", "--build", str(BUILD)], LOG)

    @staticmethod
    def run_or_exit(command: list[str], log: Path | None = None) -> None:
        code = run_logged(command, log) if log else subprocess.run(command).returncode
        if code != 0:
            sys.exit(f"tlt-ext: {' '.join(command[:2])} failed; the compiler's message is above")


setup(
    ext_modules=[Extension("tlt_ext._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
