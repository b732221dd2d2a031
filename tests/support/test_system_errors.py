"""System errors: out of memory and a full disk, as libraries report them."""

import errno

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from stackwise.support.system_errors import is_out_of_memory, safetensors_as_os_error


class TestSafetensors:
    def test_system_error_has_number_and_path(self, tmp_path):
        path = tmp_path / "none" / "a.safetensors"
        with pytest.raises(FileNotFoundError) as raised, safetensors_as_os_error(path):
            save_file({"a": torch.zeros(3)}, path)
        assert (raised.value.errno, raised.value.filename) == (errno.ENOENT, str(path))

    @pytest.mark.parametrize(
        "text, number",
        [
            ("Error while serializing: I/O error: No space left on device (os error 28)", errno.ENOSPC),
            ("I/O error: broken pipe", 0),
        ],
    )
    def test_system_error_is_recognised_by_its_text(self, tmp_path, text, number):
        with pytest.raises(OSError) as raised, safetensors_as_os_error(tmp_path):
            raise SafetensorError(text)
        assert (raised.value.errno, raised.value.strerror) == (number, text)

    def test_error_of_the_content_passes_unchanged(self, tmp_path):
        path = tmp_path / "a.safetensors"
        path.write_bytes(b"no tensors")
        with pytest.raises(SafetensorError), safetensors_as_os_error(path), safe_open(path, framework="pt"):
            pass


OUT_OF_MEMORY = {
    "cuda": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    "no text": torch.OutOfMemoryError(),
    "python": MemoryError(),
    "linux": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    "windows": RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."),
    "driver": RuntimeError("CUDA error: out of memory"),
    "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
}
OTHERS = {
    "shapes": RuntimeError("shapes do not fit"),
    "no text of another class": ValueError(),
    "word": IndexError("memory"),
}


@pytest.mark.parametrize(
    "error, expected",
    [(error, True) for error in OUT_OF_MEMORY.values()] + [(error, False) for error in OTHERS.values()],
    ids=[*OUT_OF_MEMORY, *OTHERS],
)
def test_out_of_memory_is_told_from_other_errors(error, expected):
    assert is_out_of_memory(error) == expected


def test_out_of_memory_of_the_host_is_recognised():
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(raised.value)
