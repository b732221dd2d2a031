"""What is read of a GPU, from a driver that the test plays."""

import json
import sys
import types

import pytest
import torch

from stackwise.benchmark.timing.gpu_state import GpuSensor, GpuState, gpu_range

CUDA = torch.device("cuda:1")


class NVMLError(Exception):
    pass


@pytest.fixture
def nvml(monkeypatch):
    """The library pynvml, of a GPU in good health."""
    module = types.SimpleNamespace(
        NVMLError=NVMLError,
        NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2,
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: f"handle of {uuid}",
        nvmlDeviceGetClockInfo=lambda handle, which: {1: 1980, 2: 2619}[which],
        nvmlDeviceGetTemperature=lambda handle, which: 41,
        nvmlDeviceGetPowerUsage=lambda handle: 312_500,
        nvmlDeviceGetCurrentClocksEventReasons=lambda handle: 0,
    )
    monkeypatch.setitem(sys.modules, "pynvml", module)
    properties = types.SimpleNamespace(uuid="11-22")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return module


def refuse(*arguments):
    raise NVMLError("not supported")


def test_of_a_gpu(nvml):
    asked = []
    nvml.nvmlDeviceGetHandleByUUID = lambda uuid: asked.append(uuid) or "handle"
    sensor = GpuSensor(CUDA)
    assert asked == ["GPU-11-22"]
    assert sensor.note is None
    state = sensor.read()
    assert state == GpuState(1980, 2619, 41, 312.5, ())
    assert not state.throttled
    assert json.loads(json.dumps(state.to_dict()))["throttle_reasons"] == []


@pytest.mark.parametrize(
    "bits, reasons",
    [
        (0x1, ()),  # idle
        (0x2, ()),  # clocks that the user has set
        (0x10, ()),  # in step with other GPUs
        (0x100, ()),  # a display's
        (0x4, ("power cap",)),
        (0x8, ("hardware slowdown",)),
        (0x20, ("software thermal slowdown",)),
        (0x40, ("hardware thermal slowdown",)),
        (0x80, ("power brake",)),
        (0x1 | 0x8 | 0x40, ("hardware slowdown", "hardware thermal slowdown")),
    ],
)
@pytest.mark.parametrize("name", ["Event", "Throttle"])
def test_what_holds_the_clocks_down(nvml, bits, reasons, name):
    del nvml.nvmlDeviceGetCurrentClocksEventReasons
    setattr(nvml, f"nvmlDeviceGetCurrentClocks{name}Reasons", lambda handle: bits)
    state = GpuSensor(CUDA).read()
    assert state.throttle_reasons == reasons
    assert state.throttled is bool(reasons)


def test_an_older_driver_under_a_newer_library(nvml):
    nvml.nvmlDeviceGetCurrentClocksEventReasons = refuse
    nvml.nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: 0x4
    assert GpuSensor(CUDA).read().throttle_reasons == ("power cap",)


def test_what_the_driver_does_not_tell(nvml):
    for name in vars(nvml):
        if name.startswith("nvmlDeviceGet") and not name.endswith("UUID"):
            setattr(nvml, name, refuse)
    state = GpuSensor(CUDA).read()
    assert state == GpuState(None, None, None, None, None)
    assert not state.throttled
    assert state.to_dict()["throttle_reasons"] is None


@pytest.mark.parametrize("name", ["nvmlInit", "nvmlDeviceGetHandleByUUID"])
def test_a_driver_that_refuses(nvml, name):
    setattr(nvml, name, refuse)
    sensor = GpuSensor(CUDA)
    assert sensor.read() is None
    assert sensor.note == "clocks, temperature and throttling of the GPU were not read: not supported"


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    sensor = GpuSensor(CUDA)
    assert sensor.read() is None
    assert sensor.note.endswith("pip install 'stackwise[gpu]'")


def test_of_a_processor(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    sensor = GpuSensor(torch.device("cpu"))
    assert (sensor.read(), sensor.note) == (None, None)


def test_how_far_it_went():
    states = [
        GpuState(1980, 2619, 40, 300.0, ()),
        GpuState(1400, 2619, 88, None, ("power cap",)),
        GpuState(1500, None, 90, None, ("power cap", "power brake")),
        GpuState(1500, None, 90, None, None),
    ]
    assert gpu_range(states) == {
        "readings": 4,
        "sm_clock_mhz": [1400, 1980],
        "memory_clock_mhz": [2619, 2619],
        "temperature_celsius": [40, 90],
        "power_watts": [300.0, 300.0],
        "throttled": {"power cap": 2, "power brake": 1},
    }
    assert gpu_range(states[3:])["power_watts"] is None
    assert gpu_range([]) is None
