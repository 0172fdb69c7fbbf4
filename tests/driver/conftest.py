"""Runs of the driver in tests."""

import sys

import pytest


@pytest.fixture(autouse=True)
def _no_figures(request, monkeypatch):
    """Drawing takes half of the time of a short run, so only the marker `figures` draws."""
    plots = sys.modules.get("driver.records.plots")
    if plots is not None and request.node.get_closest_marker("figures") is None:
        monkeypatch.setattr(plots, "save", lambda figure, path: None)
