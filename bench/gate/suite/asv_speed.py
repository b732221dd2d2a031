"""The same calls for asv."""

import functools

from subject.effect import NAMES
from subject.work import make

# Not in `setup`, which asv would run before each single call.
made = functools.cache(make)


class Speed:
    """All calls."""

    params = NAMES
    param_names = ("name",)

    def time_call(self, name):
        made(name)()
