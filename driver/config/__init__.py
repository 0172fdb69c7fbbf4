"""Settings: sections with their limits, strategies, the command line."""
