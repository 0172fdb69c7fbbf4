"""Benchmarks and profiling tools."""
