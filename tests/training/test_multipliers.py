"""Learning rates of a `mup` Rack: multiplied in groups of their own, from the first step to the last."""

import pytest
import torch
from torch import nn

from stackwise.config import OptimizerConfig, TrainingConfig
from stackwise.model import create_simple_rack
from stackwise.training.objective import Objective
from stackwise.training.optimizer import create_optimizer, parameter_groups
from stackwise.training.phase_model import PhaseModel
from stackwise.training.step import MicroBatch, TrainStep

MATRICES = ("attention.qkv", "attention.out", "feedforward.gate", "feedforward.up", "feedforward.down")


def rack_of(**changes):
    torch.manual_seed(0)
    return create_simple_rack(1, 1, 16, 24, 2, 11, initialization="mup", mup_base_width=8, **changes)


@pytest.mark.parametrize("tied", [True, False])
def test_groups(tied):
    rack = rack_of(tie_embeddings=tied)
    names = {id(weight): name for name, weight in rack.named_parameters()}
    found = {
        names[id(weight)]: (group["lr"], group["weight_decay"])
        for group in create_optimizer(rack, OptimizerConfig(lr=0.1, weight_decay=0.2)).param_groups
        for weight in group["params"]
    }
    expected = {f"stacks.0.blocks.0.{name}.weight": (0.05, 0.4) for name in MATRICES}
    expected |= {f"stacks.0.blocks.0.{norm}_norm.weight": (0.1, 0.0) for norm in ("attention", "feedforward")}
    expected |= {"final_norm.weight": (0.05, 0.0), "embedding.weight": (0.1, 0.0)}
    if not tied:
        expected["lm_head.weight"] = (0.1, 0.2)
    assert found == expected


def test_an_update_is_multiplied_and_its_decay_is_not():
    model = nn.ParameterList(nn.Parameter(torch.full((2, 2), 3.0)) for _ in range(2))
    groups = parameter_groups(model, 0.5, {"1": 0.25})
    for group in groups:
        group["lr"] = 0.1 * group["lr_multiplier"]
    for weight in model:
        weight.grad = torch.ones(2, 2)
    torch.optim.AdamW(groups, eps=0.0).step()
    assert model[0][0, 0].item() == pytest.approx(3.0 * (1 - 0.05) - 0.1)
    assert model[1][0, 0].item() == pytest.approx(3.0 * (1 - 0.05) - 0.025)


@pytest.mark.parametrize("precision", ["fp32", "bf16_weights"])
def test_of_a_step(precision):
    rack = rack_of()
    optimizer = {"weight_decay": 0.0, "eps": 1e-30}
    settings = TrainingConfig.from_dict({"precision": precision, "optimizer": optimizer})
    objective = Objective(settings.objective, rack.vocab_size)
    step = TrainStep(PhaseModel(rack, objective), settings, rack)
    before = {name: weight.detach().float().clone() for name, weight in rack.named_parameters()}
    targets = objective.targets({"input_ids": torch.randint(11, (4, 9))}, (0,))
    step([MicroBatch(targets)], 0.01)
    if precision == "bf16_weights":
        step.optimizer.finish()
    for name, weight in rack.named_parameters():
        # The first update of Adam is the learning rate itself, wherever there is a gradient.
        rate = 0.005 if name == "final_norm.weight" or name.split(".")[-2] in " ".join(MATRICES) else 0.01
        moved = (weight - before[name]).abs().max().item()
        assert moved == pytest.approx(rate, rel=0.02 if precision == "fp32" else 0.5), name


def test_other_racks_have_two_groups():
    rack = create_simple_rack(1, 1, 16, 24, 2, 11)
    groups = create_optimizer(rack, OptimizerConfig(lr=0.1)).param_groups
    assert [(group["lr"], group["lr_multiplier"]) for group in groups] == [(0.1, 1.0)] * 2
