"""Peak rates by the names that torch reports."""

import pytest
import torch

from stackwise.benchmark.flops.peak_rate import (
    PeakRate,
    peak_flops,
    published_peak,
)

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture
def named(monkeypatch):
    return lambda name: monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)


@pytest.mark.parametrize(
    "name, teraflops, gigabytes",
    [
        ("NVIDIA H200", 989.5, 4800),
        ("NVIDIA H200 NVL", 835.5, 4800),
        ("NVIDIA GH200 480GB", 989.5, 4000),
        ("NVIDIA GH200 144G HBM3e", 989.5, None),
        ("NVIDIA H100 80GB HBM3", 989.5, 3350),
        ("NVIDIA H100 PCIe", 756.5, 2000),
        ("NVIDIA H100 NVL", 835.5, 3900),
        ("NVIDIA A100-SXM4-80GB", 312.0, 2039),
        ("NVIDIA A100-SXM4-40GB", 312.0, 1555),
        ("NVIDIA A100-PCIE-40GB", 312.0, 1555),
        ("NVIDIA A100 80GB PCIe", 312.0, 1935),
        ("NVIDIA A100-SXM-64GB", 312.0, None),
        ("NVIDIA B200", 2250.0, 8000),
        ("NVIDIA L4", 121.0, 300),
        ("NVIDIA L40", 181.0, 864),
        ("NVIDIA L40S", 362.0, 864),
        ("NVIDIA A10", 125.0, 600),
        ("NVIDIA A30", 165.0, 933),
        ("NVIDIA A40", 149.7, 696),
        ("NVIDIA GeForce RTX 4090", 165.2, 1008),
        ("AMD Instinct MI300X", 1307.4, 5300),
        # Tensor cores, but none for bfloat16.
        ("Tesla V100-SXM2-16GB", None, 900),
        # Cut-down and unlisted ones have rates of their own.
        ("NVIDIA A10G", None, None),
        ("NVIDIA GeForce RTX 4090 D", None, None),
        ("NVIDIA H20", None, None),
        ("NVIDIA GB200", None, None),
    ],
)
def test_published(name, teraflops, gigabytes, named):
    named(name)
    assert peak_flops(CUDA) == (None if teraflops is None else teraflops * 1e12)
    peak = published_peak(CUDA)
    assert (None if peak is None else peak.bandwidth) == (None if gigabytes is None else gigabytes * 1e9)


@pytest.mark.parametrize(
    "name, dtype, tf32, teraflops",
    [
        ("NVIDIA H100 80GB HBM3", torch.float16, False, 989.5),
        ("NVIDIA H100 80GB HBM3", torch.float8_e4m3fn, False, 1979.0),
        ("NVIDIA H100 80GB HBM3", torch.float32, False, 66.9),
        ("NVIDIA H100 80GB HBM3", torch.float32, True, 494.7),
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, True, 989.5),
        ("NVIDIA H100 80GB HBM3", torch.int8, False, None),
        ("NVIDIA A100-SXM4-80GB", torch.float8_e4m3fn, False, None),
        ("NVIDIA A100-SXM4-80GB", torch.float32, True, 156.0),
        ("Tesla V100-SXM2-16GB", torch.float16, False, 125.0),
        ("NVIDIA H200 NVL", torch.float32, True, None),
    ],
)
def test_by_dtype(name, dtype, tf32, teraflops, named):
    named(name)
    assert peak_flops(CUDA, dtype, tf32=tf32) == (None if teraflops is None else teraflops * 1e12)


def test_none_for_a_processor():
    assert peak_flops(CPU) is published_peak("cpu") is None


@pytest.mark.parametrize("name", ["NVIDIA H20", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"])
def test_none_for_one_that_is_not_in_the_table_and_for_a_part_of_one(name, named):
    named(name)
    assert published_peak(CUDA) is None


def test_plain_values(named):
    named("NVIDIA L4")
    stored = published_peak("cuda").to_dict()
    assert stored["source"] == "published"
    assert stored["device"] == "NVIDIA L4"
    assert stored["flops"]["bfloat16"] == 121e12
    assert PeakRate(**stored) == published_peak("cuda")
