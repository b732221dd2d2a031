"""How far the predictions of small runs can be trusted: `python -m bench.prototype`."""

from bench.prototype.part import Part, Work
from bench.prototype.runs import RunStore

__all__ = ["Part", "RunStore", "Work"]
