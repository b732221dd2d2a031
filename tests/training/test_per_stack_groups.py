"""Groups by Stack: each parameter once, with the settings that were asked for."""

import copy

import pytest
import torch

from stackwise.checkpoint import CheckpointManager
from stackwise.config import OptimizerConfig
from stackwise.model import create_simple_rack
from stackwise.model.initialization import initialize_rack
from stackwise.model.surgery import append_stack, prepend_stack, remove_stack, unfreeze_stack
from stackwise.training.optimizer import create_optimizer, per_stack_groups

CONFIG = OptimizerConfig(lr=1e-3, weight_decay=0.1)


def config_of(kind, *stacks):
    own = {i: {"lr": 1e-5 * (i + 1), "weight_decay": 0.3} for i in stacks}
    return OptimizerConfig.from_dict({"kind": kind, "lr": 1e-3, "weight_decay": 0.1, "per_stack": own})


def settings_of(optimizer):
    return {
        id(p): (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for p in group["params"]
    }


def step(rack, optimizer):
    rack(torch.arange(8).view(2, 4)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def assert_same_state(rack, optimizer, twin, other):
    for p, q in zip(rack.parameters(), twin.parameters(), strict=True):
        ours, theirs = optimizer.state.get(p, {}), other.state.get(q, {})
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


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
    # Those of the frozen Stack are empty.
    assert [len(group["params"]) > 0 for group in groups] == [
        "tie_embeddings" in options,
        *[True] * 5,
        *[False] * 2,
    ]
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


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("part", ["all", "matrices"])
def test_a_stack_that_was_frozen_has_its_own_settings(kind, part):
    rack, config = rack_of(), config_of(kind, 1, 2)
    wanted = settings_of(create_optimizer(rack, config))
    for p in rack.get_stack(1).parameters():
        p.requires_grad_(part == "matrices" and p.ndim < 2)
    optimizer = create_optimizer(rack, config)
    step(rack, optimizer)
    unfreeze_stack(rack, 1, optimizer)
    assert settings_of(optimizer) == wanted
    step(rack, optimizer)
    twin = copy.deepcopy(rack)
    other = create_optimizer(twin, config)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_same_state(rack, optimizer, twin, other)


def test_settings_of_a_frozen_stack_are_its_own_alone():
    rack = rack_of()
    rack.get_stack(2).freeze()
    optimizer = create_optimizer(rack, config_of("adamw", 2))
    append_stack(rack, rack_of().get_stack(0), optimizer)
    assert {settings_of(optimizer)[id(p)][0] for p in rack.get_stack(3).parameters()} == {1e-3}
    unfreeze_stack(rack, 2, optimizer)
    assert [*rates_of(rack.get_stack(2), optimizer)] == [pytest.approx(3e-5)]


def rates_of(stack, optimizer):
    return {settings_of(optimizer)[id(p)][0] for p in stack.parameters()}


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_number_that_comes_again_is_another_stack(kind):
    rack = rack_of()
    rack.get_stack(2).freeze()
    optimizer = create_optimizer(rack, config_of(kind, 2))
    new = remove_stack(rack, 2, optimizer)
    for add in (append_stack, prepend_stack):
        add(rack, new, optimizer)
        at = 0 if add is prepend_stack else 2
        unfreeze_stack(rack, at, optimizer)
        assert rates_of(new, optimizer) == {1e-3}
        remove_stack(rack, at, optimizer)
        new.freeze()


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("frozen", [(0, 1, 2), (0,), (0, 2), (2, 1)])
@pytest.mark.parametrize("base_width", [None, 8])
def test_a_stack_without_settings_of_its_own_takes_none_of_anothers(kind, frozen, base_width):
    rack, config = rack_of(tie_embeddings=False), config_of(kind, 1)
    if base_width is not None:
        initialize_rack(rack, "mup", base_width=base_width)
    wanted = settings_of(create_optimizer(rack, config))
    for i in frozen:
        rack.get_stack(i).freeze()
    optimizer = create_optimizer(rack, config)
    for i in frozen:
        unfreeze_stack(rack, i, optimizer)
    assert settings_of(optimizer) == wanted
    create_optimizer(rack, config).load_state_dict(optimizer.state_dict())


def test_a_state_whose_empty_groups_are_elsewhere():
    """As many of them, for another Stack."""
    rack = rack_of()
    optimizer = create_optimizer(rack, config_of("adamw", 0, 1))
    step(rack, optimizer)
    twin = copy.deepcopy(rack)
    other = create_optimizer(twin, config_of("adamw", 0, 1))
    state = copy.deepcopy(optimizer.state_dict())
    groups = other.param_groups
    groups.insert(0, {**groups[0], "params": []})
    state["param_groups"].append({**state["param_groups"][0], "params": []})
    other.load_state_dict(state)
    assert_same_state(rack, optimizer, twin, other)


def test_stacks_of_one_name_are_not_taken_for_each_other():
    rack = rack_of()
    rack.get_stack(1).stack_id = 0
    rack.get_stack(0).freeze()
    rack.get_stack(1).freeze()
    optimizer = create_optimizer(rack, config_of("adamw", 1))
    unfreeze_stack(rack, 0, optimizer)
    assert {settings_of(optimizer)[id(p)][0] for p in rack.get_stack(0).parameters()} == {1e-3}


@pytest.mark.parametrize("kind, masters", [("adamw", False), ("adamw", True), ("muon", False)])
@pytest.mark.parametrize("named", [False, True])
def test_a_state_without_the_groups_of_a_frozen_stack(kind, masters, named, tmp_path):
    """Such as was saved before they were kept; what they are for is not forgotten with it."""
    rack, config = rack_of(), config_of(kind, 0, 1)
    wanted = settings_of(create_optimizer(copy.deepcopy(rack), config)).values()
    rack.get_stack(0).freeze()
    twin = copy.deepcopy(rack)
    optimizer = create_optimizer(rack, config, masters=masters)
    optimizer.param_groups[:] = [
        {key: value for key, value in group.items() if key not in ("stack_id", "matrices")}
        for group in optimizer.param_groups
        if group["params"] or "stack_id" not in group
    ]
    step(rack, optimizer)
    other = create_optimizer(twin, config, masters=masters)
    assert len(other.param_groups) > len(optimizer.param_groups)
    if named:
        CheckpointManager(tmp_path).save(1, {"rack": rack, "optimizer": optimizer})
        CheckpointManager(tmp_path).restore({"rack": twin, "optimizer": other})
    else:
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_same_state(rack, optimizer, twin, other)
    unfreeze_stack(twin, 0, other)
    assert list(settings_of(other).values()) == list(wanted)
    step(twin, other)


@pytest.mark.parametrize("named", [False, True])
def test_a_state_with_the_groups_of_a_stack_that_left(named, tmp_path):
    rack = rack_of()
    optimizer = create_optimizer(rack, config_of("adamw", 2))
    step(rack, optimizer)
    remove_stack(rack, 2, optimizer)
    twin = copy.deepcopy(rack)
    other = create_optimizer(twin, config_of("adamw"))
    assert len(other.param_groups) < len(optimizer.param_groups)
    if named:
        CheckpointManager(tmp_path).save(1, {"rack": rack, "optimizer": optimizer})
        CheckpointManager(tmp_path).restore({"rack": twin, "optimizer": other})
    else:
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_same_state(rack, optimizer, twin, other)


def test_a_state_of_other_groups_is_refused():
    rack = rack_of()
    state = create_optimizer(rack, config_of("adamw", 2)).state_dict()
    with pytest.raises(ValueError, match="different number of parameter groups"):
        create_optimizer(rack, config_of("adamw")).load_state_dict(state)


@pytest.mark.parametrize("tied", [True, False])
def test_a_mup_rack_of_which_all_stacks_were_frozen(tied):
    rack = rack_of(tie_embeddings=tied)
    initialize_rack(rack, "mup", base_width=8)
    config = config_of("adamw")
    wanted = settings_of(create_optimizer(rack, config))
    assert len(set(wanted.values())) == 4 - tied
    for stack in rack.stacks:
        stack.freeze()
    optimizer = create_optimizer(rack, config)
    for i in (1, 0, 2):
        unfreeze_stack(rack, i, optimizer)
    assert settings_of(optimizer) == wanted
    create_optimizer(rack, config).load_state_dict(optimizer.state_dict())


def test_a_mup_rack_whose_groups_do_not_tell():
    rack = rack_of(tie_embeddings=False)
    initialize_rack(rack, "mup", base_width=8)
    for stack in rack.stacks:
        stack.freeze()
    ends = [p for p in rack.parameters() if p.requires_grad]
    with pytest.raises(ValueError, match="got no group for"):
        unfreeze_stack(rack, 0, torch.optim.AdamW(ends))


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
