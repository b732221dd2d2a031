"""System errors: out of memory and a full disk, as libraries report them."""

import errno

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from stackwise.support.system_errors import is_out_of_memory, safetensors_as_os_error


def test_os_error_has_number_and_path(tmp_path):
    path = tmp_path / "none" / "a.safetensors"
    with pytest.raises(FileNotFoundError) as raised, safetensors_as_os_error(path):
        save_file({"a": torch.zeros(3)}, path)
    assert (raised.value.errno, raised.value.filename) == (errno.ENOENT, str(path))


@pytest.mark.parametrize(
    "text",
    [
        "I/O error: No space left on device (os error 28)",
        'IoError(Os { code: 28, kind: StorageFull, message: "No space left on device" })',  # 0.5.0 to 0.5.3
    ],
)
def test_os_error_of_a_full_disk(tmp_path, text):
    with pytest.raises(OSError) as raised, safetensors_as_os_error(tmp_path):
        raise SafetensorError(f"Error while serializing: {text}")
    assert raised.value.errno == errno.ENOSPC


@pytest.mark.parametrize(
    "text", ["I/O error: broken pipe", 'IoError(Custom { kind: BrokenPipe, error: "broken pipe" })']
)
def test_os_error_without_a_number(tmp_path, text):
    with pytest.raises(OSError, match="broken pipe") as raised, safetensors_as_os_error(tmp_path):
        raise SafetensorError(text)
    assert raised.value.errno == 0


def test_errors_of_the_content_pass_unchanged(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"no tensors")
    with pytest.raises(SafetensorError), safetensors_as_os_error(path), safe_open(path, framework="pt"):
        pass


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
def test_out_of_memory_is_recognised(error):
    assert is_out_of_memory(error)


def test_out_of_memory_of_the_host_is_recognised():
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(raised.value)


@pytest.mark.parametrize("error", [RuntimeError("shapes do not fit"), ValueError(), IndexError("memory")])
def test_other_errors_are_not_out_of_memory(error):
    assert not is_out_of_memory(error)
