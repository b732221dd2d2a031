"""Runs: a training run in equivalent ways, each compared with an uninterrupted run."""
