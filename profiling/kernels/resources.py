"""Registers, static shared memory and spills of every kernel, by the compiler alone: no GPU needed.

    python -m profiling.kernels.resources [--arch sm_90a] [--only layers]

Compiles each `.cu` of `csrc/` with `-Xptxas=-v` and prints one line a kernel. Exits 1 where a
kernel spills registers for no reason listed in `SPILL_REASONS`. Dynamic shared memory is the
launcher's choice and is not seen here; a stack frame without spills is an array that the source
indexes at run time.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ARCHS = ["sm_80", "sm_90a"]
# Flags that change the code of a kernel, as CMakeLists.txt has them.
FLAGS = ["-std=c++17", "-O3", "-lineinfo", "--expt-relaxed-constexpr", "-Xptxas=-v"]

# (regular expression over "<file>: <kernel> <arch>") -> why its spills are accepted.
SPILL_REASONS: dict[str, str] = {
    r"sampling/kernel\.cu: walk_kernel": "512 threads a block: 128 registers",
    r"attention/float\.cu: .* sm_80": "two words at 72 registers, in the path of float32 models",
    r"attention/kernel\.cu: .*(attend|cluster)_kernel.*128": "outside the loop over tiles",
    r"attention/kernel\.cu: merge_kernel": "128 registers: more blocks beside the other kernel",
    r"layers/linear_hopper\.cu: .*, 128, ": "outside the loop over blocks of K",
    r"tree/kernel\.cu: .*expand_kernel": "at most ten words: the first noise is held over the wait",
    r"kv/kernel\.cu: .*move_kernel<unsigned short>": "caches that are not aligned to 16 bytes",
}


@dataclass(frozen=True)
class Kernel:
    """What ptxas says of one kernel; bytes, but for `registers`."""

    name: str
    arch: str
    registers: int
    shared: int
    stack: int
    spill_stores: int
    spill_loads: int

    @property
    def spills(self) -> bool:
        return self.spill_stores > 0 or self.spill_loads > 0


def parse_ptxas(text: str) -> list[Kernel]:
    """The kernels of one `-Xptxas=-v` report, names as the compiler mangled them."""
    kernels = []
    pattern = re.compile(
        r"Compiling entry function '(?P<name>[^']+)' for '(?P<arch>[^']+)'.*?"
        r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
        r"(?P<loads>\d+) bytes spill loads.*?"
        r"Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
        re.DOTALL,
    )
    for match in pattern.finditer(text):
        shared = re.search(r"(\d+) bytes smem", match["rest"])
        kernels.append(
            Kernel(
                match["name"],
                match["arch"],
                int(match["registers"]),
                int(shared[1]) if shared else 0,
                int(match["stack"]),
                int(match["stores"]),
                int(match["loads"]),
            )
        )
    return kernels


def find_tool(*names: str) -> str | None:
    for name in names:
        found = shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")
        if found:
            return found
    return None


def demangle(names: list[str]) -> list[str]:
    """Readable names, without parameters and namespaces; as they are where no tool is found."""
    tool = find_tool("cu++filt", "c++filt")
    if tool is None or not names:
        return names
    done = subprocess.run([tool], input="\n".join(names), capture_output=True, text=True)
    return [short_name(line) for line in done.stdout.splitlines()]


def short_name(name: str) -> str:
    name = re.sub(r"\(anonymous namespace\)::|<unnamed>::|\btlt::|^void ", "", name)
    return re.sub(r"\((?!\w+\)\d)[^()]*\)$", "", name)


def compile_source(nvcc: str, source: Path, arch: str) -> list[Kernel]:
    number = arch.removeprefix("sm_")
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [nvcc, *FLAGS, f"-gencode=arch=compute_{number},code={arch}", f"-I{ROOT / 'csrc'}"]
            + ["-cubin", str(source), "-o", str(Path(folder) / "out.cubin")],
            capture_output=True,
            text=True,
        )
    if done.returncode != 0:
        raise RuntimeError(f"{source.relative_to(ROOT)} for {arch}:\n{done.stderr}")
    return parse_ptxas(done.stderr)


def reason_for(label: str) -> str | None:
    return next((why for pattern, why in SPILL_REASONS.items() if re.search(pattern, label)), None)


def report(sources: list[Path], archs: list[str], nvcc: str) -> tuple[list[str], bool]:
    """The lines of the table, and whether every spill has a reason."""
    jobs = [(source, arch) for source in sources for arch in archs]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda job: compile_source(nvcc, *job), jobs))
    lines = [f"{'registers':>9} {'shared':>7} {'stack':>6} {'spilled':>8}  kernel"]
    fine = True
    for (source, arch), kernels in zip(jobs, found, strict=True):
        names = demangle([kernel.name for kernel in kernels])
        for kernel, name in sorted(zip(kernels, names, strict=True), key=lambda pair: pair[1]):
            label = f"{source.relative_to(ROOT / 'csrc')}: {name} {arch}"
            note = ""
            if kernel.spills:
                why = reason_for(label)
                fine = fine and why is not None
                note = f"  ({why})" if why else "  SPILLS"
            spilled = kernel.spill_stores + kernel.spill_loads
            figures = f"{kernel.registers:9} {kernel.shared:7} {kernel.stack:6} {spilled:8}"
            lines.append(f"{figures}  {label}{note}")
    return lines, fine


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m profiling.kernels.resources", description=__doc__
    )
    parser.add_argument("--arch", action="append", help=f"default: {' and '.join(ARCHS)}")
    parser.add_argument("--only", default="", help="sources whose path matches")
    args = parser.parse_args(argv)
    nvcc = find_tool("nvcc")
    if nvcc is None:
        sys.stderr.write("profiling.kernels.resources: no nvcc: put it on PATH\n")
        return 2
    sources = [
        path for path in sorted((ROOT / "csrc").glob("*/*.cu")) if re.search(args.only, str(path))
    ]
    lines, fine = report(sources, args.arch or ARCHS, nvcc)
    sys.stdout.write("\n".join(lines) + "\n")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
