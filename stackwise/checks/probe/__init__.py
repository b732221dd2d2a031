"""What checks see with: each file one way to look at a model or a training step."""
