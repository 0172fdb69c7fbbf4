"""Memory that comes back full of NaN: what reads the old contents gives other results."""

from driver.common.releasable import ReleasableMemory

restore = ReleasableMemory.restore


def poison(monkeypatch):
    """Fills restored tensors with NaN; returns a list that gets the number of tensors each time."""
    restored = []

    def poisoned(self):
        if not self.released:
            return
        restore(self)
        for tensor in self._tensors:
            tensor.fill_(float("nan"))
        restored.append(len(self._tensors))

    monkeypatch.setattr(ReleasableMemory, "restore", poisoned)
    return restored
