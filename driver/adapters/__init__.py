"""Rollouts of other trainers with the engine of this package."""
