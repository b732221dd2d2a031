"""How a peak is measured, on a clock that the test turns; no real rate is asserted."""

import subprocess
import sys
import types

import pytest
import torch

from stackwise.benchmark.flops import measured_peak as module
from stackwise.benchmark.flops.measured_peak import (
    measure_peak,
    measured_peak,
    product_rate,
    stream_rate,
)
from stackwise.benchmark.flops.peak_rate import multiplies_in_tf32

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch):
    """Each call takes the next of `durations`, the last of them from then on."""

    def use(*durations):
        left, now, calls = list(durations), [0.0], []

        def time_call(call, device):
            call()
            calls.append(device)
            seconds = left.pop(0) if len(left) > 1 else left[0]
            now[0] += seconds
            return seconds

        monkeypatch.setattr(module, "time_call", time_call)
        monkeypatch.setattr(module, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
        return calls

    return use


def test_the_fastest_product_counts(clock):
    calls = clock(0.5, 0.1, 0.2)
    assert product_rate(CPU, torch.float32, 32, seconds=0.7) == 2 * 32**3 / 0.1
    assert len(calls) == 3


def test_at_least_one_product(clock):
    calls = clock(9.0)
    assert product_rate(CPU, torch.bfloat16, 32, seconds=1e-9) == 2 * 32**3 / 9
    assert len(calls) == 1


def test_streams_count_what_they_read_and_write(clock):
    # A read in 3 s, a copy in 4 s and a scaled sum in 5 s: 1/3, 2/4 and 3/5 of the bytes a second.
    clock(3.0, 4.0, 5.0)
    assert stream_rate(CPU, 4000, seconds=3e-9) == pytest.approx(3 * 4000 / 5)
    clock(1.0, 4.0, 5.0)
    assert stream_rate(CPU, 4000, seconds=3e-9) == pytest.approx(4000)


def test_all_of_it(clock, monkeypatch):
    clock(2.0)
    monkeypatch.setattr(module, "_stream_bytes", lambda device: 4000)
    monkeypatch.setattr(module, "_SIZES", (8, 16))
    peak = measure_peak("cpu", [torch.float32, torch.bfloat16], seconds=1e-9)
    assert peak.source == "measured"
    assert peak.flops == {"float32": 2 * 16**3 / 2, "bfloat16": 2 * 16**3 / 2}
    assert peak.bandwidth == 3 * 4000 / 2
    assert peak.conditions["threads"] == torch.get_num_threads()
    assert peak.flops_of(torch.bfloat16) == 2 * 16**3 / 2
    assert peak.flops_of(torch.float16) is None
    assert peak.conditions["products"] == {"float32": [8, 16], "bfloat16": [8, 16]}
    assert peak.conditions["still_rising"] == ["float32", "bfloat16"], "there was time for no larger ones"


@pytest.fixture
def rates(monkeypatch):
    """Products of so many rows run at rates[size], whatever they are."""

    def use(**more):
        tried = []

        def product_rate(device, dtype, size, *, seconds):
            tried.append(size)
            return more["rate"](size)

        monkeypatch.setattr(module, "product_rate", product_rate)
        monkeypatch.setattr(module, "stream_rate", lambda device, n_bytes, *, seconds: 1e9)
        monkeypatch.setattr(module, "_free_host_bytes", lambda: more.get("free", 2**50))
        return tried

    return use


def test_products_grow_until_that_makes_them_no_faster(rates):
    """Of a device that takes 16384 rows to be busy: the three sizes of a CPU would be told as its peak."""
    tried = rates(rate=lambda size: 1e15 * min(1.0, size / 16384))
    peak = measure_peak("cpu", [torch.bfloat16])
    assert peak.flops == {"bfloat16": 1e15}
    assert tried == [512, 1024, 2048, 4096, 8192, 16384, 32768]
    assert peak.conditions["products"] == {"bfloat16": tried}
    assert peak.conditions["still_rising"] == []


def test_products_that_become_too_long_or_too_large_say_so(rates):
    # 2 x 4096^3 operations take 1.4 s at 1e11 a second.
    tried = rates(rate=lambda size: 1e11 * min(1.0, size / 2048))
    peak = measure_peak("cpu", [torch.float32], seconds=1.0)
    assert tried == [512, 1024, 2048]
    assert peak.conditions["still_rising"] == ["float32"]
    # Three matrices of float64 and two of float32 of 8192 rows are 2 GiB.
    tried = rates(rate=float, free=3 * 2**30)
    peak = measure_peak("cpu", [torch.float64], seconds=1e9)
    assert tried == [512, 1024, 2048, 4096]
    assert peak.conditions["still_rising"] == ["float64"]


def test_a_small_rise_does_not_count(rates):
    tried = rates(rate=lambda size: 1e15 * (1 + 0.009 * (size > 1024)))
    assert measure_peak("cpu", [torch.float32]).flops["float32"] == pytest.approx(1.009e15)
    assert tried == [512, 1024, 2048]


def test_rounded_products_are_told_as_such(rates, monkeypatch):
    rates(rate=lambda size: 1e14)
    monkeypatch.setattr(module, "multiplies_in_tf32", lambda device: True)
    peak = measure_peak("cpu", [torch.float32, torch.bfloat16])
    assert set(peak.flops) == {"tf32", "bfloat16"}
    assert peak.flops_of(torch.float32, tf32=True) == 1e14
    assert peak.flops_of(torch.float32) is None


@pytest.mark.parametrize(
    ("device", "precision", "capability", "rounds"),
    [
        ("cuda", "tf32", (9, 0), True),
        ("cuda", "tf32", (8, 0), True),
        ("cuda", "ieee", (9, 0), False),
        ("cuda", "none", (9, 0), False),
        ("cuda", "tf32", (7, 5), False),
        ("cpu", "tf32", (9, 0), False),
    ],
)
def test_when_products_are_rounded(monkeypatch, device, precision, capability, rounds):
    matmul = types.SimpleNamespace(fp32_precision=precision)
    monkeypatch.setattr(torch.backends.cuda, "matmul", matmul)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert multiplies_in_tf32(torch.device(device)) is rounds


SWITCHES = """
import torch
from stackwise.benchmark.flops.peak_rate import multiplies_in_tf32
torch.cuda.get_device_capability = lambda device: (9, 0)
device, told = torch.device("cuda"), []
for precision in ("high", "medium", "highest"):
    torch.set_float32_matmul_precision(precision)
    told.append(multiplies_in_tf32(device))
torch.set_float32_matmul_precision("high")
for precision in ("ieee", "tf32"):
    torch.backends.cuda.matmul.fp32_precision = precision
    told.append(multiplies_in_tf32(device))
print(told)
"""


def test_by_either_switch_the_last_counts():
    """In a process of its own: there is no way back to the state before."""
    done = subprocess.run([sys.executable, "-c", SWITCHES], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[True, True, False, False, True]"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.int64, torch.complex64])
def test_a_dtype_whose_best_rate_no_such_product_shows_is_left_out(rates, dtype):
    tried = rates(rate=lambda size: 1e14)
    peak = measure_peak("cpu", [dtype])
    assert (tried, peak.flops, peak.conditions["products"]) == ([], {}, {})
    assert peak.flops_of(dtype) is None
    assert peak.bandwidth == 1e9


def test_what_was_measured_is_found_by_its_dtype(rates):
    rates(rate=lambda size: 1e14)
    dtypes = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
    peak = measure_peak("cpu", dtypes)
    assert [peak.flops_of(dtype) for dtype in dtypes] == [1e14] * 4


def test_what_the_host_has_free(tmp_path, monkeypatch):
    file = tmp_path / "meminfo"
    monkeypatch.setattr(module, "_MEMORY", file)
    assert module._free_host_bytes() == 0
    file.write_text("MemTotal:       9 kB\nMemAvailable:    3 kB\n")
    assert module._free_host_bytes() == 3072


def test_random_states_are_left_alone(clock):
    clock(1.0)
    before = torch.random.get_rng_state()
    product_rate(CPU, torch.float32, 8, seconds=1e-9)
    stream_rate(CPU, 4000, seconds=1e-9)
    assert torch.equal(before, torch.random.get_rng_state())


def test_inputs_are_random_normals(clock, monkeypatch):
    clock(1.0)
    seen = []
    monkeypatch.setattr(torch, "mm", lambda one, two, out: seen.append((one, two)))
    product_rate(CPU, torch.float32, 64, seconds=1e-9)
    one, two = seen[0]
    assert not torch.equal(one, two)
    for each in (one, two):
        assert abs(each.mean()) < 0.1
        assert 0.9 < each.std() < 1.1


def test_once_for_each_dtype_and_number_of_threads(monkeypatch):
    made = []
    monkeypatch.setattr(module, "measure_peak", lambda device, dtypes: made.append(dtypes) or object())
    module._measured.cache_clear()
    try:
        first = measured_peak("cpu", torch.float32)
        assert measured_peak(CPU, torch.float32) is first
        assert measured_peak(CPU, torch.bfloat16) is not first
        with monkeypatch.context() as patch:
            patch.setattr(torch, "get_num_threads", lambda: 99)
            assert measured_peak(CPU, torch.float32) is not first
        monkeypatch.setattr(module, "multiplies_in_tf32", lambda device: True)
        assert measured_peak(CPU, torch.float32) is not first
    finally:
        module._measured.cache_clear()
    assert made == [[torch.float32], [torch.bfloat16], [torch.float32], [torch.float32]]


def test_vectors_are_four_times_the_last_cache(monkeypatch):
    for size, expected in ((None, 1 << 27), (2**20, 1 << 27), (2**28, 2**30)):
        monkeypatch.setattr(module, "last_level_cache_bytes", lambda device, size=size: size)
        assert module._stream_bytes(CPU) == expected


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: measure_peak("cpu", []), r"dtypes: got \[\]"),
        (lambda: measure_peak("cpu", seconds=0), "seconds: got 0"),
        (lambda: product_rate(CPU, torch.float32, 0), "size: got 0"),
        (lambda: stream_rate(CPU, 3), "n_bytes: got 3"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_real_one():
    rate = product_rate(CPU, torch.float32, 64, seconds=0.01)
    assert rate > 0
    assert stream_rate(CPU, 1 << 16, seconds=0.01) > 0
