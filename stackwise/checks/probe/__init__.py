"""Probes: each file measures one property of a model or a training step, for several checks."""
