"""The drafter's training: buffer, loss, steps, spot trainer, coordination of ranks."""
