"""One module per benchmark of `python -m profiling.bench`."""
