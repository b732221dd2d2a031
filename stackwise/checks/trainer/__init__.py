"""Checks of a training loop, one file for each family."""
