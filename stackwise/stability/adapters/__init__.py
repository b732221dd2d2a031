"""The guard in training loops of other libraries, one file for each, which alone imports it."""
