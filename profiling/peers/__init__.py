"""Other implementations, measured beside ours."""
