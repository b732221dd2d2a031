"""Peak rates by the names that torch reports."""

import pytest
import torch

from stackwise.benchmark.peak_rate import peak_flops


@pytest.mark.parametrize(
    "name, teraflops",
    [
        ("NVIDIA H200", 989.5),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA GH200 480GB", 989.5),
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40", 181.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        # Cut-down and unlisted ones have rates of their own.
        ("NVIDIA A10G", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA H20", None),
        ("NVIDIA GB200", None),
        ("Tesla V100-SXM2-16GB", None),
    ],
)
def test_published(name, teraflops, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    expected = None if teraflops is None else teraflops * 1e12
    assert peak_flops(torch.device("cuda")) == expected


def test_none_for_a_processor():
    assert peak_flops(torch.device("cpu")) is None
