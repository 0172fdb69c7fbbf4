"""The measuring rig: timing, results, targets, tables, workloads."""
