"""Locating: finds the first bad place of a step in a model, forward or backward."""

from stackwise.stability.locate.first_module import first_nan_module, first_nonfinite_module
from stackwise.stability.locate.location import Location, locate
from stackwise.stability.locate.module_scales import ModuleScales

__all__ = ["Location", "ModuleScales", "first_nan_module", "first_nonfinite_module", "locate"]
