"""Speculative rollout driver for reasoning RL."""
