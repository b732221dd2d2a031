"""Peak memory: of one call, within another watch, in a real process and on a CUDA that is played."""

import gc
import json

import pytest
import torch
from torch import nn

from stackwise.benchmark.memory import peak as memory
from stackwise.benchmark.memory.peak import (
    PeakMemory,
    high_water_mark,
    peak_memory,
    peak_memory_bytes,
    watch_peak,
)
from stackwise.subject.spec import ModelSpec
from tests.forked import printed

CPU = torch.device("cpu")
MB = 1_000_000
needs_reset = pytest.mark.skipif(
    peak_memory_bytes(lambda: None, CPU) is None, reason="this kernel does not reset the high-water mark"
)


APART = """
import json, torch
from stackwise.benchmark.memory.peak import *
from stackwise.support.device import keep_freed_memory

cpu, seen = torch.device("cpu"), {}
for name, call in (
    ("nothing", lambda: None),
    ("held", lambda: torch.ones(50_000_000)),
    ("after", lambda: None),
):
    seen[name] = peak_memory(call).to_dict()
seen["bytes"] = peak_memory_bytes(lambda: torch.ones(50_000_000), cpu)
seen["mark"] = high_water_mark()
with watch_peak() as outer:
    torch.ones(50_000_000)
    with watch_peak() as inner:
        torch.ones(25_000_000)
with watch_peak() as around:
    peak_memory_bytes(lambda: torch.ones(25_000_000), cpu)
    torch.ones(2_000_000)
seen |= {"outer": outer.peak.added, "inner": inner.peak.added, "around": around.peak.added}
keep_freed_memory()
torch.ones(25_000_000)
seen["kept"] = peak_memory(lambda: torch.ones(25_000_000)).added
print(json.dumps(seen))
"""


@pytest.fixture(autouse=True)
def _no_collections(monkeypatch):
    """A collection takes longer than all the rest of a test."""
    monkeypatch.setattr(gc, "collect", lambda *_: 0)


@pytest.fixture(scope="module")
def seen():
    """What a process measures whose allocator nothing else has touched."""
    return json.loads(printed(APART))


@needs_reset
def test_a_call_that_held_much_and_one_after_it(seen):
    held, nothing, after = seen["held"], seen["nothing"], seen["after"]
    assert 195 * MB < held["added"] < 215 * MB
    assert held["in_use"] == held["resident"] == held["before"] + held["added"]
    assert held["in_use"] - nothing["in_use"] == pytest.approx(held["added"], abs=20 * MB)
    for other in (nothing, after):
        assert 0 <= other["added"] < 20 * MB
    assert after["in_use"] == pytest.approx(nothing["in_use"], abs=40 * MB)
    assert held["allocated"] is held["reserved"] is held["device_delta"] is None


@needs_reset
def test_number_of_the_whole_process(seen):
    assert seen["bytes"] == pytest.approx(seen["held"]["in_use"], abs=20 * MB)
    assert seen["mark"] == seen["bytes"]


@needs_reset
def test_memory_that_was_freed_and_kept_does_not_hide_the_peak(seen):
    """The allocator has room for the call from an earlier one, unless that is given back."""
    assert seen["kept"] > 90 * MB


@needs_reset
def test_an_outer_watch_keeps_what_an_inner_one_resets(seen):
    assert 190 * MB < seen["outer"] < 220 * MB
    assert 90 * MB < seen["inner"] < 120 * MB
    assert 90 * MB < seen["around"] < 120 * MB


def test_peak_is_read_after_the_block():
    with watch_peak() as watch, pytest.raises(RuntimeError, match="the block of watch_peak has not ended"):
        _ = watch.peak
    assert isinstance(watch.peak, PeakMemory)


def test_a_call_that_raises_leaves_no_watch_behind():
    def call():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        peak_memory(call)
    assert memory._WATCHES == []


@pytest.fixture
def files(monkeypatch, tmp_path):
    """proc(5) of the test: files(status text)."""
    monkeypatch.setattr(memory, "_CLEAR_REFS", tmp_path / "clear_refs")
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "status")

    def write(text):
        (tmp_path / "status").write_text(text)
        return tmp_path

    return write


def test_where_the_reset_is_refused_no_call_is_made(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(memory, "_CLEAR_REFS", tmp_path / "no" / "such" / "folder")
    assert peak_memory_bytes(lambda: calls.append(1), CPU) is None
    assert not calls


def test_a_watch_where_the_reset_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_CLEAR_REFS", tmp_path / "no" / "such" / "folder")
    calls = []
    assert peak_memory(lambda: calls.append(1)) == PeakMemory()
    assert calls == [1]


def test_where_the_status_says_nothing(files):
    folder = files("Name:\tpython\nVmRSS:\t  100 kB\n")
    assert peak_memory_bytes(lambda: None, CPU) is None
    assert high_water_mark() is None
    files("VmPeak:\t 900 kB\nVmHWM:\t  300 kB\n")
    assert peak_memory_bytes(lambda: None, CPU) == 300 * 1024
    assert (folder / "clear_refs").read_text() == "5"


def test_what_is_read_before_and_after_the_call(files):
    files("VmHWM:\t 7 kB\nVmRSS:\t 5 kB\n")
    peak = peak_memory(lambda: files("VmHWM:\t 9 kB\nVmRSS:\t 6 kB\n"))
    assert peak == PeakMemory(resident=9 * 1024, before=5 * 1024, resident_before=5 * 1024)
    assert (peak.in_use, peak.added) == (9 * 1024, 4 * 1024)


def test_libraries_that_come_in_meanwhile(files, played):
    files("VmHWM:\t 7 kB\nVmRSS:\t 5 kB\nRssFile:\t 2 kB\n")
    peak = peak_memory(lambda: files("VmHWM:\t 9 kB\nVmRSS:\t 6 kB\nRssFile:\t 3 kB\n"), "cuda")
    assert (peak.resident, peak.resident_before, peak.mapped, peak.before) == (9216, 5120, 1024, 100)
    assert peak.host_added == 3 * 1024


def test_where_there_is_no_proc(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "none")
    assert high_water_mark() is None


@pytest.mark.parametrize(
    "peak, in_use, added",
    [
        (PeakMemory(), None, None),
        (PeakMemory(resident=10, before=4), 10, 6),
        (PeakMemory(resident=10), 10, None),
        (PeakMemory(allocated=7, reserved=8, device_delta=9, resident=100, before=3), 7, 4),
        (PeakMemory(allocated=0, resident=100, before=0), 0, 0),
    ],
)
def test_arithmetic(peak, in_use, added):
    assert (peak.in_use, peak.added) == (in_use, added)
    assert peak.to_dict() == {
        "allocated": peak.allocated,
        "reserved": peak.reserved,
        "device_delta": peak.device_delta,
        "resident": peak.resident,
        "before": peak.before,
        "in_use": in_use,
        "added": added,
        "resident_before": peak.resident_before,
        "mapped": peak.mapped,
        "host_added": None,
    }


@pytest.mark.parametrize(
    "peak, added",
    [
        (PeakMemory(resident=100), None),
        (PeakMemory(resident=100, resident_before=60), 40),
        (PeakMemory(resident=100, resident_before=60, mapped=30), 10),
        (PeakMemory(resident=100, resident_before=60, mapped=-5), 40),
        (PeakMemory(resident=100, resident_before=60, mapped=70), 0),
    ],
)
def test_what_was_added_on_the_host(peak, added):
    assert peak.host_added == added


class PlayedCuda:
    """An allocator as CUDA has it: bytes in use, reserved and free, and their peaks since the last reset."""

    def __init__(self, patch):
        self.used, self.taken, self.free, self.order = 100, 150, 10_000, []
        self.peak_used, self.peak_taken = self.used, self.taken
        for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
            patch.setattr(torch.cuda, name, self._noted(name))
        patch.setattr(torch.cuda, "memory_allocated", lambda device: self.used)
        patch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.peak_used)
        patch.setattr(torch.cuda, "max_memory_reserved", lambda device: self.peak_taken)
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (self.free, 20_000))

    def _noted(self, name):
        def call(device=None):
            self.order.append(name)
            if name == "reset_peak_memory_stats":
                self.peak_used, self.peak_taken = self.used, self.taken

        return call

    def hold(self, used, taken):
        """As many bytes more for a moment; what was reserved stays so."""
        self.order.append("call")
        self.peak_used = max(self.peak_used, self.used + used)
        self.peak_taken = max(self.peak_taken, self.taken + taken)
        self.taken += taken
        self.free -= taken + 5


@pytest.fixture
def played(monkeypatch):
    return PlayedCuda(monkeypatch)


def test_peaks_of_a_device(played):
    peak = peak_memory(lambda: played.hold(40, 60), "cuda")
    assert (peak.allocated, peak.reserved, peak.device_delta, peak.before) == (140, 210, 65, 100)
    assert (peak.in_use, peak.added) == (140, 40)
    order = played.order
    assert order.index("synchronize") < order.index("empty_cache") < order.index("reset_peak_memory_stats")
    assert order.index("reset_peak_memory_stats") < order.index("call")
    assert "synchronize" in order[order.index("call") :]
    assert peak_memory_bytes(lambda: played.hold(7, 0), torch.device("cuda")) == 107


def test_watches_of_a_device_within_each_other(played):
    with watch_peak("cuda") as outer:
        played.hold(500, 600)
        with watch_peak("cuda") as inner:
            played.hold(40, 60)
    assert (outer.peak.allocated, outer.peak.reserved) == (600, 810)
    assert (inner.peak.allocated, inner.peak.reserved) == (140, 810)


@pytest.mark.gpu
def test_peak_on_a_gpu():
    device = torch.device("cuda")
    kept = torch.ones(1_000_000, device=device)
    peak = peak_memory(lambda: torch.ones(5_000_000, device=device), device)
    assert peak.allocated - peak.before == pytest.approx(20 * MB, rel=0.05)
    assert peak.reserved >= peak.allocated > kept.nbytes
    assert peak.device_delta >= 20 * MB
    assert peak_memory_bytes(lambda: None, device) < peak.allocated


@pytest.mark.parametrize(
    ("call", "got"),
    [
        (nn.Identity, "Identity, a class of nn.Module"),
        (nn.Identity(), "Identity(), an nn.Module"),
        (ModelSpec(nn.Identity, "identity", "vectors", 2), "ModelSpec"),
    ],
    ids=["class", "model", "spec"],
)
def test_a_model_is_no_call(call, got):
    with pytest.raises(TypeError) as raised:
        peak_memory(call)
    assert str(raised.value) == f"call: got {got}; wanted a function that makes one call"


def test_how_much_it_takes_to_make_a_model_can_be_asked():
    assert isinstance(peak_memory(lambda: nn.Linear(2, 2)), PeakMemory)
