"""The rollout engine: requests in, responses with tokens and log-probs out."""
