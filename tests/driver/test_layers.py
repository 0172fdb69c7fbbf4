"""Packages of `driver` import lower layers only."""

import ast
from pathlib import Path

import driver

ROOT = Path(driver.__file__).parent
# From the bottom up; packages of one layer do not import each other.
LAYERS = [
    {"common"},
    {"config"},
    {"model", "tasks"},
    {"rollout"},
    {"policy", "drafter"},
    {"records"},
    {"report", "session"},
    {"adapters", "run"},
]
RANKS = {package: rank for rank, layer in enumerate(LAYERS) for package in layer}
COMMANDS = len(LAYERS)  # modules directly in `driver`, and `__main__` modules


def imports(source: str, package: list[str]) -> list[list[str]]:
    """Modules of `driver` that a file imports, under TYPE_CHECKING and in functions too."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = [*base, *(node.module.split(".") if node.module else [])]
            names = [[alias.name] for alias in node.names] if module == ["driver"] else [[]]
            found += [[*module, *name] for name in names]
        elif isinstance(node, ast.Import):
            found += [alias.name.split(".") for alias in node.names]
    return [module[1:] for module in found if module[0] == "driver" and len(module) > 1]


def is_command(path: Path) -> bool:
    return len(path.parts) == 1 or path.name == "__main__.py"


def upward(source: str, path: Path) -> list[str]:
    """Imports of a file that do not point to a lower layer or to its own package."""
    rank = COMMANDS if is_command(path) else RANKS[path.parts[0]]
    modules = imports(source, ["driver", *path.parts[:-1]])
    other = [module for module in modules if module[0] != path.parts[0]]
    # Commands may import each other.
    return [".".join(m) for m in other if rank < COMMANDS and RANKS.get(m[0], COMMANDS) >= rank]


def test_every_package_has_a_layer():
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages <= RANKS.keys()


def test_imports_point_down():
    files = [path.relative_to(ROOT) for path in sorted(ROOT.rglob("*.py"))]
    found = {str(path): upward((ROOT / path).read_text(), path) for path in files}
    assert {path: wrong for path, wrong in found.items() if wrong} == {}


def test_upward_imports_are_found():
    path = Path("rollout/engine.py")
    assert upward("from ..config.load import Config\nfrom .request import Request", path) == []
    assert upward("def f():\n    from ..run.run import Run", path) == ["run.run"]
    assert upward("from driver.drafter import trainer", path) == ["drafter"]
    assert upward("import driver.train", path) == ["train"]
    assert upward("from .. import policy", path) == ["policy"]
    checked = "if TYPE_CHECKING:\n    from ..records.folder import RunFolder"
    assert upward(checked, path) == ["records.folder"]
