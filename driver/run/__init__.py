"""Assembles a run and executes it: collection of responses, memory model, warm start."""
