"""Registers, static shared memory and spills of every kernel, from the log of the build.

    python -m profiling.kernels.resources [--log build/build.log]

`setup.py` compiles CUDA with `-Xptxas=-v` and keeps what the build prints in `build/build.log`. The
command prints a line for each kernel. It exits with 1 where a kernel spills registers without a
reason in `SPILL_REASONS`, and with 2 where the log lacks a source of `csrc/`. Dynamic shared memory
is chosen at the launch and is not in the log. A stack frame without spills is an array that the
source indexes at run time.
"""

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILTERS = ("cu++filt", "c++filt")

# (regular expression over "<file>: <kernel> <arch>") -> why its spills are accepted.
SPILL_REASONS: dict[str, str] = {
    r"sampling/kernel\.cu: draw_path_kernel": "512 threads a block: 128 registers",
    r"attention/float\.cu: .* sm_80": "two words at 72 registers, in the path of float32 models",
    r"attention/kernel\.cu: .*(attend|cluster)_kernel.*128": "outside the loop over tiles",
    r"attention/kernel\.cu: merge_kernel": "128 registers: more blocks beside the other kernel",
    r"layers/linear_hopper\.cu: .*, 128, ": "outside the loop over blocks of K",
    r"tree/kernel\.cu: .*expand_kernel": "the noise of a level is held over the wait",
    r"kv/kernel\.cu: .*move_kernel<unsigned short>": "caches that are not aligned to 16 bytes",
}

# Ninja prints what it builds, then what the compiler printed for it.
STEP = re.compile(r"^\[\d+/\d+\] (.*)$", re.MULTILINE)
SOURCE = re.compile(r"Building CUDA object \S*?csrc/(\S+\.cu)\.o")
KERNEL = re.compile(
    r"Compiling entry function '(?P<name>[^']+)' for '(?P<arch>[^']+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Kernel:
    """What ptxas reports of one kernel for one architecture; sizes are in bytes."""

    name: str
    arch: str
    registers: int
    shared: int
    stack: int
    spilled: int  # stores and loads


def parse_ptxas(text: str) -> list[Kernel]:
    """The kernels of one `-Xptxas=-v` report, with mangled names."""
    kernels = []
    for match in KERNEL.finditer(text):
        shared = re.search(r"(\d+) bytes smem", match["rest"])
        kernels.append(
            Kernel(
                match["name"],
                match["arch"],
                int(match["registers"]),
                int(shared[1]) if shared else 0,
                int(match["stack"]),
                int(match["stores"]) + int(match["loads"]),
            )
        )
    return kernels


def parse_log(text: str) -> dict[str, list[Kernel]]:
    """Source below `csrc/` -> its kernels; of a source that was built twice the last report."""
    _, *parts = STEP.split(text)
    found = {}
    for title, report in zip(parts[::2], parts[1::2], strict=True):
        if match := SOURCE.match(title):
            found[match[1]] = parse_ptxas(report)
    return found


def demangle(names: Sequence[str]) -> list[str]:
    """Readable names without parameters and namespaces; unchanged where no tool is installed."""
    tools = (shutil.which(t) or shutil.which(t, path="/usr/local/cuda/bin") for t in FILTERS)
    tool = next(filter(None, tools), None)
    if tool is None or not names:
        return list(names)
    done = subprocess.run([tool], input="\n".join(names), capture_output=True, text=True)
    return [short_name(line) for line in done.stdout.splitlines()]


def short_name(name: str) -> str:
    name = re.sub(r"\(anonymous namespace\)::|<unnamed>::|\btlt::|^void ", "", name)
    return re.sub(r"\((?!\w+\)\d)[^()]*\)$", "", name)


def report(found: Mapping[str, list[Kernel]]) -> tuple[list[str], bool]:
    """The lines of the table, and whether every spill has a reason."""
    lines, fine = [f"{'registers':>9} {'shared':>7} {'stack':>6} {'spilled':>8}  kernel"], True
    for source, kernels in sorted(found.items()):
        names = demangle([kernel.name for kernel in kernels])
        for name, k in sorted(zip(names, kernels, strict=True), key=lambda p: (p[0], p[1].arch)):
            label, note = f"{source}: {name} {k.arch}", ""
            if k.spilled:
                reasons = (
                    why for pattern, why in SPILL_REASONS.items() if re.search(pattern, label)
                )
                why = next(reasons, None)
                fine = fine and why is not None
                note = f"  ({why})" if why else "  SPILLS"
            lines.append(f"{k.registers:9} {k.shared:7} {k.stack:6} {k.spilled:8}  {label}{note}")
    return lines, fine


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m profiling.kernels.resources", description=__doc__
    )
    parser.add_argument("--log", type=Path, help="default: build/build.log of the checkout")
    log = parser.parse_args(argv).log or ROOT / "build" / "build.log"
    try:
        if not log.exists():
            raise ValueError(f"no {log}: build with nvcc first (pip install -e .)")
        text = log.read_text(encoding="utf-8", errors="replace")
        sources = {str(p.relative_to(ROOT / "csrc")) for p in (ROOT / "csrc").glob("*/*.cu")}
        found = {source: of for source, of in parse_log(text).items() if source in sources}
        if missing := sorted(sources - found.keys()):
            what = f"{len(missing)} of {len(sources)} sources, {missing[0]} for one"
            raise ValueError(f"{log}: lacks {what}: remove build/ and build again")
    except (OSError, ValueError) as error:
        sys.stderr.write(f"profiling.kernels.resources: {error}\n")
        return 2
    lines, fine = report(found)
    sys.stdout.write("\n".join(lines) + "\n")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
