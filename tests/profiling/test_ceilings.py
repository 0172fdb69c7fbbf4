"""The ceilings that an installation ships are those of the results."""

import json

import pytest

from profiling.rig import ceilings


def test_the_shipped_file_follows_from_the_results():
    assert ceilings.main(["--check"]) == 0, "run python -m profiling.rig.ceilings"


def test_ceilings_of_results(tmp_path):
    folder = tmp_path / "h200"
    folder.mkdir()
    whole = {"targets": [], "rows": []}
    meta = {"card": "X", "date": "2026-01-01"}
    assert ceilings.ceilings(tmp_path) == {}
    layers = whole | {"meta": meta | {"copy_gb_per_s": 1234.5}}
    (folder / "layers.json").write_text(json.dumps(layers))
    assert ceilings.ceilings(tmp_path) == {"X": {"copy_gb_per_s": 1234.5}}
    rows = [{"case": f"loop of {n} kernels b1", "median_us": 10.0 + 2 * n} for n in (30, 300)]
    (folder / "loop.json").write_text(json.dumps(whole | {"meta": meta, "rows": rows}))
    assert ceilings.ceilings(tmp_path)["X"]["us_per_kernel"] == pytest.approx(2)
