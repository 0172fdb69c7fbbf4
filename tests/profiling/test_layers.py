"""Imports in `profiling/` go one way: rig, kernels and peers and studies, benches, the command."""

import ast
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "profiling"
LEVELS = {"rig": 0, "kernels": 1, "peers": 1, "figures": 1, "studies": 2, "benches": 3, "bench": 4}


def imported(path):
    """Second part of the name of each `profiling` module that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "profiling":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("profiling."):
            yield node.module.split(".")[1]


def test_no_module_imports_from_a_higher_level():
    wrong = [
        f"{path.relative_to(FOLDER)} imports {name}"
        for path in FOLDER.rglob("*.py")
        for own in [path.relative_to(FOLDER).parts[0].removesuffix(".py")]
        for name in imported(path)
        if name != own and LEVELS.get(name, 9) >= LEVELS.get(own, 9)
    ]
    assert wrong == []
