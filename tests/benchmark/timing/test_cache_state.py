"""What is read between calls, and which inputs a call is given: the sizes, not the speed."""

import pytest
import torch

from stackwise.benchmark.timing import cache_state
from stackwise.benchmark.timing.cache_state import (
    CacheFlush,
    RotatingCall,
    last_level_cache_bytes,
    rotating_inputs,
)

CPU = torch.device("cpu")
KIB = 1024


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """A machine whose caches have these sizes, as the kernel writes them."""

    def set_sizes(*sizes, cores=4, share=4):
        """Of each core; `share` of them have the last one together."""
        for core in range(cores):
            first = core - core % share
            shared = [str(core)] * (len(sizes) - 1) + [f"{first}-{first + share - 1}"]
            for index, size in enumerate(sizes):
                folder = tmp_path / f"cpu{core}" / "cache" / f"index{index}"
                folder.mkdir(parents=True)
                (folder / "size").write_text(f"{size}\n")
                (folder / "level").write_text(f"{index + 1}\n")
                (folder / "shared_cpu_list").write_text(f"{shared[index]}\n")
        monkeypatch.setattr(cache_state, "_CORES", tmp_path)

    return set_sizes


@pytest.mark.parametrize(
    "sizes, expected",
    [
        (["32K", "32K", "1024K", "32768K"], 32 * KIB * KIB),
        (["48K", "2M"], 2 * KIB * KIB),
        (["1G"], KIB**3),
        (["4096"], 4096),
        (["0K"], None),
    ],
)
def test_the_largest_is_the_last(cache, sizes, expected):
    cache(*sizes)
    assert last_level_cache_bytes(CPU) == expected


def test_slices_of_some_cores_each_are_one_cache(cache):
    cache("32K", "32K", "1024K", "32768K", cores=16, share=4)
    assert last_level_cache_bytes(CPU) == 4 * 32 * KIB * KIB


def test_where_the_system_says_nothing(cache, monkeypatch):
    cache()
    monkeypatch.setattr(cache_state.os, "sysconf_names", {})
    assert last_level_cache_bytes(CPU) is None
    with pytest.raises(ValueError, match="does not say how large the last-level cache of cpu is"):
        CacheFlush(CPU)
    CacheFlush(CPU, 4096)()


@pytest.mark.parametrize("told, expected", [(8 * KIB, 8 * KIB), (0, None), (-1, None)])
def test_where_only_the_c_library_says_it(cache, monkeypatch, told, expected):
    cache()
    monkeypatch.setattr(cache_state.os, "sysconf_names", {"SC_LEVEL3_CACHE_SIZE": 194})
    monkeypatch.setattr(cache_state.os, "sysconf", {"SC_LEVEL3_CACHE_SIZE": told}.__getitem__)
    assert last_level_cache_bytes(CPU) == expected


def test_of_a_gpu(monkeypatch):
    properties = type("Properties", (), {"L2_cache_size": 50 * KIB * KIB})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert last_level_cache_bytes(torch.device("cuda")) == 50 * KIB * KIB


def test_a_flush_reads_twice_the_cache_and_writes_none_of_it(cache):
    cache("64K")
    torch.manual_seed(5)
    state = torch.get_rng_state()
    flush = CacheFlush(CPU)
    assert torch.equal(torch.get_rng_state(), state), "the caller's random numbers are its own"
    data = flush._data.clone()
    assert data.nbytes == 128 * KIB
    flush()
    assert torch.equal(flush._data, data)
    assert flush._sum.item() == pytest.approx(data.double().sum().item(), rel=1e-3, abs=0.1)
    # Random normals: zeros, or anything else that repeats, would cost less power.
    assert abs(data.mean()) < 0.05
    assert data.std() == pytest.approx(1.0, abs=0.05)


def test_a_flush_of_a_given_size():
    assert CacheFlush(CPU, 4000)._data.nbytes == 4000


@pytest.mark.parametrize("size", [0, -1, 1.5])
def test_other_sizes(size):
    with pytest.raises(ValueError, match=f"size_bytes: got {size}; allowed: an integer >= 1"):
        CacheFlush(CPU, size)


def test_inputs_take_turns(cache):
    cache("1K")
    example = {"ids": torch.arange(128), "mask": (torch.ones(3), None), "name": "x"}
    inputs = rotating_inputs(example, CPU)
    # 1036 bytes each, together at least five times 1024.
    assert len(inputs) == 5
    assert all(torch.equal(each["ids"], example["ids"]) for each in inputs)
    assert len({each["ids"].data_ptr() for each in [example, *inputs]}) == 6
    assert inputs[0]["mask"][1] is None
    assert inputs[0]["name"] == "x"

    seen = []
    call = RotatingCall(seen.append, inputs)
    for _ in range(7):
        call()
    assert [id(each) for each in seen] == [id(inputs[n % 5]) for n in range(7)]


def test_the_result_of_a_rotating_call(cache):
    cache("1K")
    assert RotatingCall(lambda x: x.shape, [torch.ones(5000)])() == (5000,)


def test_too_few_inputs_would_still_be_warm(cache):
    cache("1K")
    with pytest.raises(ValueError, match="inputs: got 4096 bytes; allowed: 5120 bytes, five times"):
        RotatingCall(len, [torch.ones(1024)])


@pytest.mark.parametrize("inputs", [[], [{}], ["x"]])
def test_inputs_without_tensors(cache, inputs):
    cache("1K")
    with pytest.raises(ValueError, match=r"inputs: got .*; allowed: one or more trees of tensors"):
        RotatingCall(len, inputs)
    with pytest.raises(ValueError, match=r"example: got .*; allowed: a tree with tensors"):
        rotating_inputs(inputs, CPU)
