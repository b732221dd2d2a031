"""Groups by Stack: each parameter once, with the settings that were asked for."""

import pytest
import torch

from stackwise.config import OptimizerConfig
from stackwise.model import create_simple_rack
from stackwise.model.initialization import initialize_rack
from stackwise.model.surgery import append_stack, remove_stack
from stackwise.training.optimizer import per_stack_groups

CONFIG = OptimizerConfig(lr=1e-3, weight_decay=0.1)


def rack_of(**options):
    return create_simple_rack(3, 1, 16, 24, 4, 11, **options)


@pytest.mark.parametrize("options", [{}, {"tie_embeddings": False}, {"freeze_up_proj": True}])
def test_each_parameter_once_with_its_settings(options):
    rack = rack_of(**options)
    rack.get_stack(2).freeze()
    overrides = {1: {"lr": 1e-5}, 0: {"weight_decay": 0.3, "lr": 1.0}, 2: {"lr": 1.0}}
    groups = per_stack_groups(rack, CONFIG, overrides)
    found = {id(p): group for group in groups for p in group["params"]}
    assert len(found) == sum(len(group["params"]) for group in groups)
    assert found.keys() == {id(p) for p in rack.parameters() if p.requires_grad}
    for name, p in rack.named_parameters():
        if p.requires_grad:
            stack = name.split(".")[1] if name.startswith("stacks") else None
            lr, decay = {"0": (1.0, 0.3), "1": (1e-5, 0.1), None: (1e-3, 0.1)}[stack]
            matrix = p.ndim > 1 and p is not rack.embedding.weight
            assert (found[id(p)]["lr"], found[id(p)]["weight_decay"]) == (lr, decay if matrix else 0.0), name
            # What a schedule of the configured rate is multiplied by.
            assert found[id(p)]["lr_multiplier"] * CONFIG.lr == pytest.approx(lr)
    assert len(groups) == 6
    torch.optim.AdamW(groups, fused=True)


def test_rates_of_mup_are_multiplied():
    rack = rack_of()
    initialize_rack(rack, "mup", base_width=8)
    plain = {id(p): group["lr"] for group in per_stack_groups(rack, CONFIG, {}) for p in group["params"]}
    halved = {0: {"lr": CONFIG.lr / 2}}
    both = {id(p): group["lr"] for group in per_stack_groups(rack, CONFIG, halved) for p in group["params"]}
    assert len(set(plain.values())) > 1
    for name, p in rack.named_parameters():
        assert both[id(p)] == pytest.approx(plain[id(p)] * (0.5 if name.startswith("stacks.0.") else 1)), name


def test_new_stacks_learn_as_their_neighbour():
    rack = rack_of()
    optimizer = torch.optim.AdamW(per_stack_groups(rack, CONFIG, {2: {"lr": 0.5}}))
    stack = remove_stack(rack, 0, optimizer)
    append_stack(rack, stack, optimizer)
    lr = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert {lr[id(p)] for p in stack.parameters()} == {0.5}


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({3: {}}, r"overrides: got 3; allowed: 0 to 2"),
        ({-1: {}}, r"overrides: got -1"),
        ({0: {"betas": 1}}, r"overrides\[0\]: got \['betas'\]; allowed: lr, weight_decay"),
        ({1: {"lr": 0.0}}, r"overrides\[1\]"),
        ({1: {"weight_decay": -1.0}}, r"overrides\[1\]"),
    ],
)
def test_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        per_stack_groups(rack_of(), CONFIG, overrides)
