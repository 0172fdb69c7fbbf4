"""Benchmarks and profiling tools. They run from a checkout and are not installed."""

from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
if not (_ROOT / "pyproject.toml").exists():
    raise SystemExit(f"profiling: {_ROOT} is not a checkout; run the command in a clone's root")
