"""Disk errors: what safetensors says of the system is an OSError with its number, and nothing else is."""

import errno

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from stackwise.disk_error import told_as_os_error


def test_what_the_system_says_has_its_number_and_its_path(tmp_path):
    path = tmp_path / "none" / "a.safetensors"
    with pytest.raises(FileNotFoundError) as raised, told_as_os_error(path):
        save_file({"a": torch.zeros(3)}, path)
    assert (raised.value.errno, raised.value.filename) == (errno.ENOENT, str(path))


@pytest.mark.parametrize(
    "said",
    [
        "I/O error: No space left on device (os error 28)",
        'IoError(Os { code: 28, kind: StorageFull, message: "No space left on device" })',  # 0.5.0 to 0.5.3
    ],
)
def test_a_full_disk(tmp_path, said):
    with pytest.raises(OSError) as raised, told_as_os_error(tmp_path):
        raise SafetensorError(f"Error while serializing: {said}")
    assert raised.value.errno == errno.ENOSPC


@pytest.mark.parametrize(
    "said", ["I/O error: broken pipe", 'IoError(Custom { kind: BrokenPipe, error: "broken pipe" })']
)
def test_no_number_is_known(tmp_path, said):
    with pytest.raises(OSError, match="broken pipe") as raised, told_as_os_error(tmp_path):
        raise SafetensorError(said)
    assert raised.value.errno == 0


def test_other_errors_are_let_through(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"no tensors")
    with pytest.raises(SafetensorError), told_as_os_error(path), safe_open(path, framework="pt"):
        pass
