"""Comparison of the behaviour of two revisions: `python -m bench.same BASE`."""
