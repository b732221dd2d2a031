"""State files: a guard's state comes back, and what nobody wrote is an error that names the file."""

import json

import pytest
import torch
from safetensors.torch import save_file

from stackwise.stability.adapters.state_file import read_state, write_state

STATE = {"again": [torch.arange(3.0), torch.tensor([1 + 2j])], "counts": (1, None), "steps": {2: "x"}}


def test_it_comes_back(tmp_path):
    place = write_state(STATE, tmp_path / "deep", 1)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == [place.name] == ["guard_1.safetensors"]
    found = read_state(tmp_path / "deep", 1)
    assert all(torch.equal(a, b) for a, b in zip(found.pop("again"), STATE["again"], strict=True))
    assert found == {"counts": (1, None), "steps": {2: "x"}}
    assert read_state(tmp_path / "deep", 0) is None


@pytest.mark.parametrize(
    "state",
    [
        json.dumps({"again": {"$tensor": ["x", [5, 8]]}}),
        json.dumps({"again": {"$tensor": ["y", [3]]}}),
        json.dumps([1]),
        "[" * 100_000,
        "no JSON",
    ],
    ids=["another shape", "missing", "no mapping", "deep", "no JSON"],
)
def test_what_nobody_wrote_is_an_error_that_names_the_file(tmp_path, state):
    save_file({"x": torch.ones(3)}, tmp_path / "guard_0.safetensors", {"format": "1", "state": state})
    with pytest.raises(ValueError, match=r"guard_0.safetensors: no state of a guard, or a damaged one"):
        read_state(tmp_path, 0)


def test_a_dtype_that_no_file_takes_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match=r"guard.x: got torch.complex128"):
        write_state({"x": torch.ones(1, dtype=torch.complex128)}, tmp_path, 0)
    assert list(tmp_path.iterdir()) == []
