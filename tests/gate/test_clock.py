"""Clocks that tests cannot freeze."""

import sys
import time
from types import ModuleType

import pytest

from stackwise.gate.side import clock
from stackwise.gate.side.clock import real_time

NAMES = ["monotonic", "perf_counter", "perf_counter_ns", "process_time", "thread_time", "time"]


@pytest.mark.parametrize("name", NAMES)
def test_real_time_is_not_replaced_with_the_function_of_time(monkeypatch, name):
    real = getattr(time, name)
    monkeypatch.setattr(time, name, lambda: 0)
    assert getattr(real_time, name) is real


def test_real_time_is_not_an_attribute_of_a_module():
    # freezegun replaces the functions of `time` wherever a loaded module has one as an attribute.
    functions = {id(getattr(time, name)) for name in NAMES}
    modules = [module for name, module in sys.modules.items() if name.startswith("stackwise.gate")]
    assert clock in modules
    for module in filter(lambda each: isinstance(each, ModuleType), modules):
        assert not functions & set(map(id, vars(module).values())), module
