"""`python -m tlt_ext`: what was built, which devices it sees, and where each op can run."""

import sys

import tlt_ext
from tlt_ext import _C


def main() -> None:
    info = _C.build_info()
    cuda = info["cuda_compiler"]
    lines = [
        f"tlt_ext {info['version']}  (python {sys.version.split()[0]})",
        f"compiler   {info['compiler']}",
        "cuda       " + (f"{cuda}, archs {info['cuda_archs']}" if cuda else "not compiled"),
        f"devices    {', '.join(info['devices']) or 'no CUDA device'}",
        f"threads    {_C.num_threads()}",
        "",
        f"{'op':<20} runs on",
    ]
    lines += [f"{op:<20} {where}" for op, where in tlt_ext.op_places().items()]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
