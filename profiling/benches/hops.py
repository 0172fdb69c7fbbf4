"""What it costs to hand data from one multiprocessor to another, microseconds a hop.

`profiling/kernels/hops.cu` is compiled and run. The figures decide whether several ops of a decode
step pay in one launch. `boundary`: between two dependent kernels of a graph. `flag`: words in L2
that hold data and an epoch, from every block to every block. `remote`: the same through distributed
shared memory, within clusters. `read`: a block, or all blocks at once, read from L2.
"""

import json
import shutil
import subprocess
import tempfile
from pathlib import Path

from profiling.rig.bench import Bench, output_of

SOURCE = Path(__file__).resolve().parents[1] / "kernels" / "hops.cu"
COMPILE = ("-std=c++20", "-O3", "-gencode", "arch=compute_90a,code=sm_90a")


def lacks() -> str:
    """Why the probe cannot run on this machine; "" = it can."""
    return "" if shutil.which("nvcc") else "nvcc is not installed"


def run(bench: Bench) -> None:
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "hops")
        subprocess.run(["nvcc", *COMPILE, str(SOURCE), "-o", program], check=True)
        for case, value in json.loads(output_of(program)).items():
            if isinstance(value, float):
                bench.add_row(case, value)
            else:
                bench.rows.append({"bench": bench.name, "case": case, "count": value})
