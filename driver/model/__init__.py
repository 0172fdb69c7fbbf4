"""Models as the engine runs them: description, weights, target, drafter, KV cache."""
