"""Tracers that are active in the process of a side."""

import sys
import threading
import tracemalloc
from types import SimpleNamespace

import pytest

from stackwise.gate.side.subject import active_tracer


def of_a_test(frame, event, argument):
    return None


@pytest.fixture(autouse=True)
def no_tracer(monkeypatch):
    """Hide the tracers of this run, such as a debugger or coverage."""
    for module in (sys, threading):
        for name in ("gettrace", "getprofile"):
            monkeypatch.setattr(module, name, lambda: None)
    monkeypatch.setattr(sys, "monitoring", SimpleNamespace(get_tool=lambda _: None), raising=False)
    monkeypatch.setattr(tracemalloc, "is_tracing", lambda: False)


def test_no_tracer_is_active():
    assert active_tracer() == ""


@pytest.mark.parametrize("module", [sys, threading])
@pytest.mark.parametrize("kind", ["trace", "profile"])
def test_tracer_is_named_with_its_module(monkeypatch, module, kind):
    monkeypatch.setattr(module, f"get{kind}", lambda: of_a_test)
    assert active_tracer() == f"{__name__}.of_a_test ({module.__name__}.set{kind})"


def test_tracer_object_is_named_by_its_type(monkeypatch):
    monkeypatch.setattr(sys, "gettrace", SimpleNamespace)
    assert active_tracer() == "types.SimpleNamespace (sys.settrace)"


def test_monitoring_tool_is_named(monkeypatch):
    tools = {3: "coverage"}
    monkeypatch.setattr(sys, "monitoring", SimpleNamespace(get_tool=tools.get), raising=False)
    assert active_tracer() == "coverage (sys.monitoring)"


def test_tracemalloc_is_named(monkeypatch):
    monkeypatch.setattr(tracemalloc, "is_tracing", lambda: True)
    assert active_tracer() == "tracemalloc"
