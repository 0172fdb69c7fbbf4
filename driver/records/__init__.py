"""The files of a run: folder, metrics, checkpoints, timeline, progress."""
