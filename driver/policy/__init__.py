"""The policy's training: advantages, loss, packed forward pass, optimizer, warm-up."""
