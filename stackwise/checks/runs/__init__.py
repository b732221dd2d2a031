"""Runs: a training run in equivalent ways, each compared with the straight run."""
