"""`python -m profiling.rig.ceilings`: writes `driver/run/ceilings.json` from `results/`.

The file holds what the dry run of a training needs to know of a card, since an installation has no
results. `--check` writes nothing and exits 1 if the file differs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from driver.run.dry_run import CEILINGS
from profiling.rig.results import RESULTS, load, newest_first

KERNELS = (30, 300)  # in the loops whose difference is the time of a kernel


def ceilings(results: Path = RESULTS) -> dict[str, dict[str, float]]:
    """Card -> its measured ceilings; those without a result are left out."""
    cards: dict[str, dict[str, float]] = {}
    for path in newest_first(results, "layers")[:1]:
        meta = load(path)["meta"]
        cards.setdefault(meta["card"], {})["copy_gb_per_s"] = meta["copy_gb_per_s"]
    for path in newest_first(results, "loop")[:1]:
        loop = load(path)
        few, many = (_median_us(loop, f"loop of {n} kernels b1") for n in KERNELS)
        us = (many - few) / (KERNELS[1] - KERNELS[0])
        cards.setdefault(loop["meta"]["card"], {})["us_per_kernel"] = round(us, 3)
    return cards


def _median_us(result: dict[str, Any], case: str) -> float:
    (row,) = (row for row in result["rows"] if row["case"] == case)
    return row["median_us"]


def main(argv: Sequence[str]) -> int:
    text = json.dumps(ceilings(), indent=2) + "\n"
    if "--check" in argv:
        return int(CEILINGS.read_text(encoding="utf-8") != text)
    CEILINGS.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
