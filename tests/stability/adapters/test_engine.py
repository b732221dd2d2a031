"""Which engines have gradients where a guard sees them, and what a scaler multiplies them with."""

from types import SimpleNamespace

import pytest
import torch

from stackwise.stability.adapters.outer_loop import check_engine, scale_of


def accelerator(engine, **more):
    return SimpleNamespace(distributed_type=SimpleNamespace(value=engine), **more)


def test_engines_whose_gradients_are_in_the_parameters():
    for engine in ("NO", "MULTI_CPU", "MULTI_GPU"):
        assert check_engine(accelerator(engine)) is False
    assert check_engine(accelerator("FSDP", is_fsdp2=True)) is True


@pytest.mark.parametrize(
    "kept", [accelerator("DEEPSPEED"), accelerator("FSDP", is_fsdp2=False), accelerator("FSDP")], ids=str
)
def test_engines_that_keep_them_are_refused(kept):
    with pytest.raises(ValueError, match=r"distributed_type: got .*; allowed: one process, DDP or FSDP2"):
        check_engine(kept)


def test_scale():
    assert scale_of(None, torch.device("cpu")) is None
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    assert scale_of(scaler, torch.device("cpu")).item() == 8.0
    assert scale_of(torch.amp.GradScaler("cpu", enabled=False), torch.device("cpu")).item() == 1.0
