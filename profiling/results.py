"""Where measured numbers lie, and how they meet what `targets.toml` wants.

`results/<card>/<bench>.json` holds a whole benchmark, `results/<card>/quick/<bench>.json` one of
`--quick`; what is shown of a benchmark is the newer of the two.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent
RESULTS = ROOT / "results"
TARGETS_CARD = "h100-80gb-hbm3"  # the card that `targets.toml` speaks of
CPU = "cpu"  # the folder of results that need no card


def card_folder(card: str) -> str:
    """A folder's name for a card: "NVIDIA H100 80GB HBM3" -> "h100-80gb-hbm3"."""
    return re.sub(r"[^a-z0-9]+", "-", card.lower().removeprefix("nvidia")).strip("-")


def all_targets() -> dict[str, dict[str, dict[str, float]]]:
    """Table -> name -> `{"at_most": x}` or `{"at_least": x}`, in the order of the file."""
    return tomllib.loads((ROOT / "targets.toml").read_text())


def is_met(wanted: dict[str, float], got: float | None) -> bool:
    """Whether a figure reaches its target; one that is missing does not."""
    if got is None:
        return False
    return got <= wanted["at_most"] if "at_most" in wanted else got >= wanted["at_least"]


def targets_of(name: str, got: dict[str, float]) -> list[dict[str, Any]]:
    """The targets of a benchmark's table, in its order, with what was got."""
    table = all_targets().get(name, {})
    unknown = set(got) - set(table)
    if unknown:
        raise ValueError(f"no such target in [{name}]: {', '.join(sorted(unknown))}")
    return [
        {
            "name": target,
            "wanted": wanted,
            "got": got.get(target),
            "met": is_met(wanted, got.get(target)),
        }
        for target, wanted in table.items()
    ]


def load(path: Path) -> dict[str, Any]:
    """One result file: `meta`, `rows`, `targets`.

    Raises:
        ValueError: it is not such a file; the message is one line.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    if not isinstance(result, dict) or not {"meta", "rows", "targets"} <= set(result):
        raise ValueError(f"{path}: wanted an object with meta, rows and targets")
    return result


def newest(name: str, card: str = TARGETS_CARD, folder: Path = RESULTS) -> dict[str, Any] | None:
    """The newer of a benchmark's whole and quick results on a card; None where there is none."""
    paths = [folder / card / f"{name}.json", folder / card / "quick" / f"{name}.json"]
    found = [load(path) for path in paths if path.exists()]
    return max(found, key=lambda result: result["meta"]["date"], default=None)
