"""What a run leaves: folder, metrics, checkpoints, timeline, plots, progress."""
