"""Questions about a training step, one family a file."""
