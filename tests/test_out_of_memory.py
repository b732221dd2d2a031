"""Out of memory: what allocators of devices and hosts say, and what others do."""

import pytest
import torch

from stackwise.out_of_memory import is_out_of_memory


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        torch.OutOfMemoryError(),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=["cuda", "no text", "python", "linux", "windows", "driver", "cublas"],
)
def test_it_is_seen(error):
    assert is_out_of_memory(error)


def test_what_the_allocator_of_the_host_says():
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(raised.value)


@pytest.mark.parametrize("error", [RuntimeError("shapes do not fit"), ValueError(), IndexError("memory")])
def test_other_errors_are_none(error):
    assert not is_out_of_memory(error)
