"""The phases of a run: what trains when, on what, and where each parameter's data begins."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stackwise.config import ConfigError, TrainingConfig
from stackwise.training.scope import plan_phases, units_of

STACKS = st.lists(st.integers(1, 4), min_size=1, max_size=4)


def settings(architecture, max_steps=10, **scope):
    return TrainingConfig.from_dict(
        {"training_architecture": architecture, "max_steps": max_steps, "scope": scope}
    )


def facts(phases):
    return [(phase.path, sorted(phase.trained)) for phase in phases]


@given(STACKS, st.sampled_from(["rackwise", "stackwise", "blockwise"]))
def test_units_cover_every_block_once_and_in_order(blocks_per_stack, architecture):
    units = units_of(blocks_per_stack, architecture)
    assert [i for unit in units for i in unit.blocks] == list(range(sum(blocks_per_stack)))
    wanted = {"rackwise": 1, "stackwise": len(blocks_per_stack), "blockwise": sum(blocks_per_stack)}
    assert len(units) == wanted[architecture]


def test_a_unit_says_where_it_is():
    stack, block = units_of([2, 3], "stackwise")[1], units_of([2, 3], "blockwise")[3]
    assert (stack.name, stack.blocks) == ("stack 1", range(2, 5))
    assert (block.name, block.stack, block.block, block.blocks) == ("stack 1 block 1", 1, 1, range(3, 4))


@given(STACKS, st.sampled_from(["stackwise", "blockwise"]), st.integers(0, 3))
def test_from_left_to_right(blocks_per_stack, architecture, overlap):
    units = units_of(blocks_per_stack, architecture)
    phases = plan_phases(blocks_per_stack, settings(architecture, overlap=overlap))
    assert [phase.unit for phase in phases] == units
    for index, phase in enumerate(phases):
        assert phase.path == tuple(range(units[index].blocks.stop))
        assert phase.trained == {
            i for unit in units[max(0, index - overlap) : index + 1] for i in unit.blocks
        }
        # What is before is frozen, and everything from the first Block that trains on is in the graph.
        assert phase.path[: phase.n_prefix] == tuple(range(min(phase.trained)))
        assert phase.trains_embedding == (index <= overlap)
        assert phase.trains_head and phase.steps == phase.schedule_steps == 10
    assert [phase.is_last for phase in phases] == [False] * (len(phases) - 1) + [True]


def test_from_right_to_left_every_block_is_computed_and_one_unit_trains():
    phases = plan_phases([1, 2], settings("blockwise", order="right_to_left"))
    assert facts(phases) == [((0, 1, 2), [2]), ((0, 1, 2), [1]), ((0, 1, 2), [0])]
    assert [phase.n_prefix for phase in phases] == [2, 1, 0]
    # The head is trained by the unit that is before it, the embedding by the one behind it.
    assert [phase.trains_head for phase in phases] == [True, False, False]
    assert [phase.trains_embedding for phase in phases] == [False, False, True]


def test_a_suffix_trains_with_every_unit_and_what_is_between_is_left_out():
    phases = plan_phases([2, 2], settings("blockwise", suffix=1))
    assert facts(phases) == [
        ((0, 3), [0, 3]),
        ((0, 1, 3), [1, 3]),
        ((0, 1, 2, 3), [2, 3]),
        ((0, 1, 2, 3), [3]),
    ]


@pytest.mark.parametrize("suffix", [2, 9])
def test_a_suffix_leaves_the_first_unit_alone(suffix):
    with pytest.raises(ValueError, match=f"training.scope.suffix: got {suffix}; allowed: 0 to 1"):
        plan_phases([2, 1], settings("stackwise", suffix=suffix))


def test_polish_steps_are_taken_from_units_and_continue_their_data():
    *units, polish = plan_phases([1, 1], settings("stackwise", polish_steps=4))
    assert [(phase.steps, phase.first_step) for phase in units] == [(6, 0), (6, 0)]
    assert (polish.steps, polish.first_step, polish.schedule_start) == (4, 6, 0)
    assert facts([polish]) == [((0, 1), [0, 1])] and polish.unit.stack is None


def test_growth_of_units_begins_each_but_the_first_as_the_identity():
    assert [p.enters for p in plan_phases([2, 2], settings("stackwise", growth=True))] == [(), (2, 3)]


@given(STACKS, st.integers(4, 30))
def test_a_growing_rack_is_one_schedule(blocks_per_stack, max_steps):
    phases = plan_phases(blocks_per_stack, settings("rackwise", max_steps, growth=True))
    assert sum(phase.steps for phase in phases) == max_steps
    assert all(phase.steps for phase in phases)
    position = 0
    for phase in phases:
        assert phase.first_step == position
        assert phase.schedule_start == position and phase.schedule_steps == max_steps
        assert phase.trained == set(phase.path) and phase.n_prefix == 0
        position += phase.steps
    assert [phase.continues for phase in phases] == [False] + [True] * (len(phases) - 1)
    assert phases[-1].path == tuple(range(sum(blocks_per_stack)))


def test_a_growing_rack_needs_a_step_for_each_stack():
    with pytest.raises(ValueError, match=r"training\.max_steps: got 2; allowed: at least 3"):
        plan_phases([1, 1, 1], settings("rackwise", 2, growth=True))


@pytest.mark.parametrize("architecture", ["stackwise", "blockwise"])
def test_a_head_of_its_own_is_not_for_units_that_do_not_train_it(architecture):
    chosen = settings(architecture, head="per_unit", order="right_to_left")
    with pytest.raises(
        ValueError, match=r"training\.scope\.head: got 'per_unit'; allowed: 'shared' with order"
    ):
        plan_phases([1, 2], chosen)


def test_a_head_of_its_own_is_that_of_the_only_unit():
    [phase] = plan_phases([3], settings("stackwise", head="per_unit", order="right_to_left"))
    assert phase.trains_head and not phase.fresh_head


def test_a_head_of_its_own_is_fresh_for_every_unit_but_the_first():
    phases = plan_phases([1, 1, 1], settings("stackwise", head="per_unit"))
    assert [phase.fresh_head for phase in phases] == [False, True, True]


@pytest.mark.parametrize(
    "architecture, scope, message",
    [
        ("rackwise", {"overlap": 1}, "scope.overlap: got 1"),
        ("rackwise", {"offload": "cpu"}, "scope.offload: got 'cpu'"),
        ("blockwise", {"overlap": 1, "suffix": 1}, "scope.suffix: got 1"),
        ("blockwise", {"overlap": 1, "order": "right_to_left"}, "scope.order: got 'right_to_left'"),
        ("blockwise", {"growth": True, "order": "right_to_left"}, "scope.growth: got True"),
        ("blockwise", {"cache_dir": "x"}, "scope.cache_dir: got 'x'"),
        ("blockwise", {"offload": "disk"}, "scope.offload_dir: got None"),
        ("blockwise", {"offload_dir": "x"}, "scope.offload_dir: got 'x'"),
        ("blockwise", {"polish_steps": 10}, "scope.polish_steps: got 10"),
    ],
)
def test_what_does_not_go_together_is_refused(architecture, scope, message):
    with pytest.raises(ConfigError) as refusal:
        settings(architecture, **scope)
    assert message in str(refusal.value)
