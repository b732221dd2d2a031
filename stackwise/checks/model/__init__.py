"""Questions about a model, one family a file."""
