"""The type stub of the native core is the one that its signatures give."""

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_stub_is_up_to_date():
    made = runpy.run_path(str(ROOT / ".ci" / "stub.py"))
    assert made["STUB"].read_text() == made["stub"](), "run python .ci/stub.py"
