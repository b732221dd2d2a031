"""Export: what safetensors' own reader finds is the module's state_dict; parts are in test_ranks.py."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from stackwise.checkpoint import CheckpointManager, DamagedCheckpointError, export


def saved(folder):
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 3, bias=False).bfloat16())
    model[2].weight.data[0, 0] = float("nan")
    model.tied = model[0]
    optimizer = torch.optim.AdamW(model[:2].parameters())
    objects = {"model": model, "optimizer": optimizer, "counts": {"x": torch.ones(2)}}
    return model.state_dict(), CheckpointManager(folder).save(3, objects)


def test_is_the_state_of_the_module(tmp_path):
    state, path = saved(tmp_path / "run")
    (tmp_path / "weights.safetensors").write_text("what was there")
    export(path, "model", str(tmp_path / "weights.safetensors"))
    found = load_file(tmp_path / "weights.safetensors")
    assert found.keys() == state.keys() and "tied.weight" in found
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, equal_nan=True)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run", "weights.safetensors"]


@pytest.mark.parametrize(
    "name, match",
    [
        ("other", "name: got 'other'; allowed: what .*: model, optimizer"),
        ("counts", "name: got 'counts'"),
        ("optimizer", "name: got 'optimizer'; allowed: a module whose state is tensors"),
    ],
)
def test_what_is_no_module(tmp_path, name, match):
    _, path = saved(tmp_path / "run")
    with pytest.raises(ValueError, match=match):
        export(path, name, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_no_checkpoint_and_a_damaged_one(tmp_path):
    _, path = saved(tmp_path / "run")
    with pytest.raises(ValueError, match=r"^checkpoint: got"):
        export(tmp_path / "none", "model", tmp_path / "x")
    content = bytearray((path / "tensors/rank-00000.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "tensors/rank-00000.safetensors").write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match="rank-00000"):
        export(path, "model", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_disk_that_refuses_leaves_what_was_there(tmp_path, monkeypatch):
    _, path = saved(tmp_path / "run")
    (tmp_path / "x").write_text("what was there")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        export(path, "model", tmp_path / "x")
    assert (tmp_path / "x").read_text() == "what was there"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run", "x"]
