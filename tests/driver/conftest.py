"""Runs of the driver in tests."""

import sys

import pytest


@pytest.fixture(autouse=True)
def _no_figures(request, monkeypatch):
    """Drawing takes half of the time of a short run, so only the marker `figures` draws."""
    page = sys.modules.get("driver.report.page")
    if page is not None and request.node.get_closest_marker("figures") is None:
        monkeypatch.setattr(page, "write_page", lambda folders, out: None)
