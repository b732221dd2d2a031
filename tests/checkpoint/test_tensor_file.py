"""Tensor files: what any reader of safetensors reads, hashed as written, and read by regions."""

import errno
import hashlib
import itertools
import os
import stat

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from stackwise.checkpoint import tensor_file
from stackwise.checkpoint.tensor_file import (
    MalformedFileError,
    Part,
    TensorIndex,
    write_bytes,
    write_parts,
    write_tensors,
)

DTYPES = sorted(tensor_file._CODES, key=str)


def content():
    torch.manual_seed(3)
    tensors = {f"{dtype}": torch.randn(3, 5).abs().to(dtype) for dtype in DTYPES}
    tensors |= {"scalar": torch.tensor(1.5), "empty": torch.zeros(0, 3), "transposed": torch.randn(4, 6).t()}
    tensors['odd \N{SNOWMAN} " name'] = torch.arange(7, dtype=torch.uint8)
    return tensors


def raw(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_the_library_reads_the_same_bits(tmp_path):
    tensors = content()
    entry = write_tensors(tmp_path / "x.safetensors", tensors)
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(raw(found[name]), raw(tensor)), name
        assert found[name].data_ptr() % tensor.element_size() == 0
    written = (tmp_path / "x.safetensors").read_bytes()
    assert entry == tensor_file.FileEntry(len(written), hashlib.sha256(written).hexdigest())
    assert int.from_bytes(written[:8], "little") % 8 == 0
    index = TensorIndex([tmp_path / "x.safetensors"])
    for name, tensor in tensors.items():
        read = index.read(name, (0,) * tensor.ndim, tuple(tensor.shape))
        assert torch.equal(raw(read), raw(tensor))


def test_what_the_library_writes_is_read(tmp_path):
    tensors = {name: tensor.contiguous() for name, tensor in content().items()}
    save_file(tensors, tmp_path / "x.safetensors")
    index = TensorIndex([tmp_path / "x.safetensors"])
    for name, tensor in tensors.items():
        assert torch.equal(raw(index.read(name, (0,) * tensor.ndim, tuple(tensor.shape))), raw(tensor))


def test_values_that_are_still_to_be_conjugated_or_negated(tmp_path):
    x = torch.randn(3, dtype=torch.complex64)
    write_tensors(tmp_path / "x.safetensors", {"c": x.conj(), "n": x.conj().imag})
    found = load_file(tmp_path / "x.safetensors")
    assert torch.equal(found["c"], x.conj().resolve_conj())
    assert torch.equal(found["n"], -x.imag)


@given(st.data())
def test_any_region_of_any_cut(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("cut")
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    whole = torch.randn(shape)
    cuts = [sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    paths = []
    for i, region in enumerate(itertools.product(*(itertools.pairwise(cut) for cut in cuts))):
        part = whole[tuple(slice(low, high) for low, high in region)]
        paths.append(folder / f"{i}.safetensors")
        write_parts(paths[-1], {"w": Part(part, tuple(low for low, _ in region))})
    offsets = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    size = tuple(data.draw(st.integers(0, n - o)) for n, o in zip(shape, offsets, strict=True))
    index = TensorIndex(paths)
    expected = whole[tuple(slice(o, o + n) for o, n in zip(offsets, size, strict=True))]
    assert torch.equal(index.read("w", offsets, size), expected)
    with pytest.raises(MalformedFileError, match="the files have"):
        index.read("w", (0,) * len(shape), tuple(n + 1 for n in shape))
    if len(paths) > 1:
        with pytest.raises(MalformedFileError, match="the files have"):
            TensorIndex(paths[1:]).read("w", (0,) * len(shape), tuple(shape))


def test_what_is_read_is_not_the_file(tmp_path):
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"w": torch.ones(5000)})
    read = TensorIndex([path]).read("w", (0,), (5000,))
    path.write_bytes(bytes(path.stat().st_size))
    assert torch.equal(read, torch.ones(5000))
    read.add_(1)


def test_a_claimed_size_takes_no_memory(tmp_path):
    write_tensors(tmp_path / "x.safetensors", {"w": torch.ones(2, 2)})
    index = TensorIndex([tmp_path / "x.safetensors"])
    with pytest.raises(MalformedFileError, match="the files have 4 of its"):
        index.read("w", (0, 0), (2**40, 2**40))
    with pytest.raises(MalformedFileError, match="dimensions"):
        index.read("w", (0,), (4,))
    with pytest.raises(MalformedFileError, match="v: missing"):
        index.read("v", (0,), (4,))


@pytest.mark.parametrize(
    "info",
    [
        "[]",
        "{",
        '{"w": {}}',
        '{"w": {"saved_offsets": [0]}}',
        "3",
    ],
)
def test_where_parts_begin_is_checked(tmp_path, info):
    save_file({"w": torch.ones(2, 2)}, tmp_path / "x.safetensors", {"DCP_SHARDING_INFO": info})
    if info == "[]":  # says nothing of w: it is whole
        TensorIndex([tmp_path / "x.safetensors"])
        return
    with pytest.raises(MalformedFileError, match=r"^x\.safetensors"):
        TensorIndex([tmp_path / "x.safetensors"])


def test_parts_of_two_dtypes(tmp_path):
    write_parts(tmp_path / "x.safetensors", {"w": Part(torch.ones(2), (0,))})
    write_parts(tmp_path / "y.safetensors", {"w": Part(torch.ones(2).half(), (2,))})
    with pytest.raises(MalformedFileError, match=r"w begins at \(2,\) and is of torch\.float16"):
        TensorIndex([tmp_path / "x.safetensors", tmp_path / "y.safetensors"])


def test_a_dtype_that_cannot_be(tmp_path):
    with pytest.raises(ValueError, match=r"w: got torch\.complex128; allowed in a checkpoint"):
        write_tensors(tmp_path / "x", {"w": torch.ones(2, dtype=torch.complex128)})
    assert not (tmp_path / "x").exists()


def test_a_short_write_is_gone_on_with(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:7]))
    content = bytes(range(100))
    entry = write_bytes(tmp_path / "x", [content[:30], b"", content[30:]])
    assert (tmp_path / "x").read_bytes() == content
    assert entry.bytes == 100


def test_what_the_disk_says_names_the_file(tmp_path, monkeypatch):
    def refuse(descriptor):
        raise OSError(errno.EDQUOT, "no more for you")

    write_bytes(tmp_path / "here", [b"x"])
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match=r"no more for you.*there") as raised:
        write_bytes(tmp_path / "there", [b"x"])
    assert raised.value.errno == errno.EDQUOT
    monkeypatch.undo()
    with pytest.raises(FileExistsError):
        write_bytes(tmp_path / "here", [b"x"])


def test_mode_is_as_umask_says(tmp_path):
    before = os.umask(0o027)
    try:
        write_bytes(tmp_path / "x", [b"x"])
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o640
