"""Lengths: stability of training at several sequence lengths, and the shortest unstable length."""

from stackwise.stability.lengths.first_unstable import FirstUnstable, first_unstable_length
from stackwise.stability.lengths.point import LengthPoint
from stackwise.stability.lengths.sweep import LengthSweep, length_sweep

__all__ = ["FirstUnstable", "LengthPoint", "LengthSweep", "first_unstable_length", "length_sweep"]
