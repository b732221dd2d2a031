"""The key of a machine: another where speed is decided by something else, the same where it is not."""

import json

import pytest
import torch

from stackwise.gate.history.machine import Machine
from stackwise.support.device import fingerprint as fingerprint_here

GPU = {"name": "H100", "memory_bytes": 8 * 10**10, "cuda": "13.0"}


def test_equal_facts_have_one_key(fingerprint):
    one = Machine.of(fingerprint)
    other = Machine.of(json.loads(json.dumps(dict(reversed(fingerprint.items())))) | {"uuid": "GPU-1"})
    assert one == other and one.key == other.key and hash(one) == hash(other)
    assert len(one.key) == 16 and int(one.key, 16) >= 0


@pytest.mark.parametrize(
    "change",
    [
        {"cpu": "Another CPU"},
        {"cpu_count": 8},
        {"torch_threads": 1},
        {"omp_wait_policy": None},
        {"python": "3.12.0"},
        {"torch": "2.12.0"},
        {"gpu": GPU},
        {"gpu": GPU | {"driver": "580.1"}},
        {"reference": 2},
    ],
    ids=lambda change: str(*change),
)
def test_what_decides_speed_is_in_the_key(fingerprint, change):
    one, other = Machine.of(fingerprint), Machine.of(fingerprint | change)
    assert one.key != other.key
    [name] = change
    assert [each.partition(":")[0] for each in one.differences(other)] == [name]
    assert one.differences(one) == []


def test_here(monkeypatch):
    here = Machine.here()
    assert here.facts["cpu"] == fingerprint_here()["cpu"] and here.facts["torch"] == torch.__version__
    assert here == Machine.here() and here == Machine.here("cpu")
    assert str(here.facts["torch_threads"]) in str(here)


def test_a_gpu_names_the_machine(fingerprint):
    assert str(Machine.of(fingerprint | {"gpu": GPU})).startswith("H100, 2 threads")
    assert str(Machine.of(fingerprint)).startswith("Some CPU")


def test_a_machine_without_a_processor_is_refused():
    with pytest.raises(ValueError, match=r"fingerprint: got \{\}"):
        Machine.of({})
