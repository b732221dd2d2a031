"""Units that train one after the other: against loops by hand, and what must not change meanwhile."""

import math
import tempfile
import weakref
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from stackwise.model import create_rack_from_config
from stackwise.training import ArchitectureTrainer, NonFiniteStepError, load_rack
from stackwise.training.objective import Objective
from stackwise.training.prefix import PrefixOutputs
from stackwise.training.record_log import read_json_lines
from stackwise.training.storage_meter import uncollected

UNIT_KEYS = {
    "num_blocks",
    "avg_loss",
    "final_loss",
    "num_batches",
    "parameters",
    "trainable_parameters",
    "first_record",
    "prefix_blocks",
    "seconds",
}
RESULT_KEYS = {
    "training_architecture",
    "n_stacks",
    "blocks_per_stack",
    "num_stacks",
    "parameters",
    "trainable_parameters",
    "num_batches",
    "avg_loss",
    "final_loss",
    "training_history",
    "seconds",
    "tokens_per_second",
    "records",
}
STEPS = 3
EPS = 1e-3  # of AdamW, large enough that rounding does not decide where a weight goes


class Part(NamedTuple):
    """What a loop by hand does for some steps.

    `trains` is of the blocks by their index, and of the ends: e embedding, n final norm, h head of its own.
    """

    path: tuple[int, ...]
    blocks: set[int]
    ends: str
    steps: int = STEPS
    first_step: int = 0
    enters: tuple[int, ...] = ()
    fresh: bool = False
    goes_on: bool = False


# Of three Stacks of one Block: settings, whether head and embedding are one, and what is done.
BLOCKWISE = {"training_architecture": "blockwise"}
BY_HAND = {
    "own head": (
        {},
        False,
        [Part((0,), {0}, "enh"), Part((0, 1), {1}, "nh"), Part((0, 1, 2), {2}, "nh")],
    ),
    "tied": ({}, True, [Part((0,), {0}, "en"), Part((0, 1), {1}, "n"), Part((0, 1, 2), {2}, "n")]),
    "overlap": (
        {"overlap": 1},
        False,
        [Part((0,), {0}, "enh"), Part((0, 1), {0, 1}, "enh"), Part((0, 1, 2), {1, 2}, "nh")],
    ),
    "tied overlap": (
        {"overlap": 1},
        True,
        [Part((0,), {0}, "en"), Part((0, 1), {0, 1}, "en"), Part((0, 1, 2), {1, 2}, "n")],
    ),
    "suffix": (
        {"suffix": 1},
        False,
        [Part((0, 2), {0, 2}, "enh"), Part((0, 1, 2), {1, 2}, "nh"), Part((0, 1, 2), {2}, "nh")],
    ),
    "right to left": (
        {"order": "right_to_left"},
        False,
        [Part((0, 1, 2), {2}, "nh"), Part((0, 1, 2), {1}, ""), Part((0, 1, 2), {0}, "e")],
    ),
    "tied right to left": (
        {"order": "right_to_left"},
        True,
        [Part((0, 1, 2), {2}, "n"), Part((0, 1, 2), {1}, ""), Part((0, 1, 2), {0}, "e")],
    ),
    "head per unit": (
        {"head": "per_unit"},
        False,
        [
            Part((0,), {0}, "enh"),
            Part((0, 1), {1}, "nh", fresh=True),
            Part((0, 1, 2), {2}, "nh", fresh=True),
        ],
    ),
    "growth": (
        {"growth": True},
        False,
        [
            Part((0,), {0}, "enh"),
            Part((0, 1), {1}, "nh", enters=(1,)),
            Part((0, 1, 2), {2}, "nh", enters=(2,)),
        ],
    ),
    "growth beside a suffix": (
        {"growth": True, "suffix": 1},
        False,
        [
            Part((0, 2), {0, 2}, "enh"),
            Part((0, 1, 2), {1, 2}, "nh", enters=(1,)),
            Part((0, 1, 2), {2}, "nh"),
        ],
    ),
    "polish": (
        {"polish_steps": 1},
        True,
        [
            Part((0,), {0}, "en", 2),
            Part((0, 1), {1}, "n", 2),
            Part((0, 1, 2), {2}, "n", 2),
            Part((0, 1, 2), {0, 1, 2}, "en", 1, 2),
        ],
    ),
}
GROWING = [
    Part((0,), {0}, "enh", 2),
    Part((0, 1), {0, 1}, "enh", 2, 2, enters=(1,), goes_on=True),
    Part((0, 1, 2), {0, 1, 2}, "enh", 3, 4, enters=(2,), goes_on=True),
]


def weights_of(rack):
    return {name: weight.detach().clone() for name, weight in rack.state_dict().items()}


def changed(before, after):
    return {name for name in before if not before[name].equal(after[name])}


def losses_of(result):
    return [record.loss for record in result["records"]]


def close(one, other, atol=2e-6):
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(
            one[name], other[name], rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


def loss_by_hand(rack, path, ids):
    x_BTC = rack.embedding(ids[:, :-1])
    for i in path:
        x_BTC = rack.get_blocks()[i](x_BTC)
    logits_BTV = rack.lm_head(rack.final_norm(x_BTC))
    return F.cross_entropy(logits_BTV.flatten(0, 1), ids[:, 1:].flatten())


def adamw_by_hand(rack, weight_decay=0.1):
    weights = [(name, w) for name, w in rack.named_parameters() if w.requires_grad]
    decayed = [w for name, w in weights if w.ndim == 2 and name != "embedding.weight"]
    spared = [w for name, w in weights if w.ndim == 1 or name == "embedding.weight"]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": spared, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=EPS, fused=False, foreach=False)


def train_by_hand(rack, parts, batches):
    """The losses of all steps: plain autograd through all of the path, torch's AdamW and clipping."""
    losses, fresh = [], weights_of(rack)
    for part in parts:
        for i in part.enters:
            for end in (rack.get_blocks()[i].attention.out, rack.get_blocks()[i].feedforward.down):
                torch.nn.init.zeros_(end.weight)
        if part.fresh:
            rack.load_state_dict(
                {n: w for n, w in fresh.items() if "norm" in n[:10] or "head" in n}, strict=False
            )
        if not part.goes_on:
            ends = {"e": rack.embedding, "n": rack.final_norm, "h": rack.lm_head}
            later = parts[-1].blocks if parts[-1].goes_on else part.blocks
            rack.requires_grad_(False)
            for module in [*(rack.get_blocks()[i] for i in later), *(ends[end] for end in part.ends)]:
                module.requires_grad_(True)
            optimizer = adamw_by_hand(rack)
        for step in range(part.first_step, part.first_step + part.steps):
            loss = loss_by_hand(rack, part.path, batches[step % len(batches)])
            rack.zero_grad()  # also of what trained before: no part of the norm
            loss.backward()
            torch.nn.utils.clip_grad_norm_(rack.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
    rack.requires_grad_(True)
    return losses


class Watched(list):
    """Batches that remember the weights of a Rack before each was given out."""

    rack = None

    def __init__(self, batches, rack):
        super().__init__(batches)
        self.rack, self.before = rack, []

    def __iter__(self):
        for batch in list.__iter__(self):
            self.before.append(weights_of(self.rack))
            yield batch


@pytest.fixture(scope="session")
def make(make_config, make_rack, make_batches):
    """A configuration of three Stacks of one Block, its Rack, and batches."""

    def build(training=None, n_stacks=3, blocks_per_stack=1, count=4, **model):
        shape = {"n_stacks": n_stacks, "blocks_per_stack": blocks_per_stack}
        config = make_config(
            model={"architecture": shape} | model,
            training={"max_steps": STEPS, "optimizer": {"eps": EPS}} | (training or {}),
        )
        return config, make_rack(config), make_batches(config, count)

    return build


@pytest.fixture
def run(make):
    """Train a fresh Rack; the result, the Rack, and the weights before each step."""

    def train(training=None, prepare=None, dataloader=None, **sizes):
        config, rack, batches = make(training, **sizes)
        if prepare:
            prepare(rack)
        watched = Watched(batches, rack) if dataloader is None else dataloader
        result = ArchitectureTrainer(config).train_architecture(rack, watched)
        return result, rack, getattr(watched, "before", [])

    return train


class TestAgainstALoopByHand:
    @pytest.mark.parametrize("scope, tied, parts", BY_HAND.values(), ids=BY_HAND)
    def test_losses_and_weights(self, make, scope, tied, parts):
        config, rack, batches = make(BLOCKWISE | {"scope": scope}, tie_embeddings=tied)
        twin = create_rack_from_config(config)
        twin.load_state_dict(rack.state_dict())
        result = ArchitectureTrainer(config).train_architecture(rack, batches)
        assert losses_of(result) == pytest.approx(train_by_hand(twin, parts, batches), abs=2e-6)
        close(rack.state_dict(), twin.state_dict())

    def test_stacks(self, make):
        config, rack, batches = make(
            {"training_architecture": "stackwise"}, n_stacks=2, blocks_per_stack=2, tie_embeddings=False
        )
        twin = create_rack_from_config(config)
        twin.load_state_dict(rack.state_dict())
        parts = [Part((0, 1), {0, 1}, "enh"), Part((0, 1, 2, 3), {2, 3}, "nh")]
        result = ArchitectureTrainer(config).train_architecture(rack, batches)
        assert losses_of(result) == pytest.approx(train_by_hand(twin, parts, batches), abs=2e-6)
        close(rack.state_dict(), twin.state_dict())

    def test_a_growing_rack_keeps_its_optimizer(self, make):
        config, rack, batches = make({"scope": {"growth": True}, "max_steps": 7}, tie_embeddings=False)
        twin = create_rack_from_config(config)
        twin.load_state_dict(rack.state_dict())
        result = ArchitectureTrainer(config).train_architecture(rack, batches)
        assert losses_of(result) == pytest.approx(train_by_hand(twin, GROWING, batches), abs=2e-6)
        close(rack.state_dict(), twin.state_dict())
        # Another optimizer at each joining would have been noticed.
        forgetful = create_rack_from_config(config)
        torch.manual_seed(7)
        forgetful.load_state_dict(create_rack_from_config(config).state_dict())
        parts = [part._replace(goes_on=False) for part in GROWING]
        assert train_by_hand(forgetful, parts, batches)[3:] != pytest.approx(losses_of(result)[3:], abs=1e-4)


class TestResult:
    @pytest.mark.parametrize("architecture, own", [("stackwise", set()), ("blockwise", {"block_idx"})])
    def test_keys(self, run, architecture, own):
        result, rack, _ = run(
            {"training_architecture": architecture, "accumulation_steps": 2}, n_stacks=2, blocks_per_stack=2
        )
        total = {"stackwise": "total_stacks", "blockwise": "total_blocks"}[architecture]
        assert set(result) == RESULT_KEYS | {"results", total}
        units = [(0, None), (1, None)] if own == set() else [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert [(unit["stack_idx"], unit.get("block_idx")) for unit in result["results"]] == units
        assert result[total] == len(units) and result["num_stacks"] == result["n_stacks"] == 2
        assert result["blocks_per_stack"] == [2, 2]
        of_block = sum(p.numel() for p in rack.get_stack(0).get_block(0).parameters())
        for i, unit in enumerate(result["results"]):
            assert set(unit) == UNIT_KEYS | {"stack_idx"} | own
            assert unit["num_blocks"] == (1 if own else 2)
            assert unit["parameters"] == unit["trainable_parameters"] == unit["num_blocks"] * of_block
            assert unit["num_batches"] == 2 * STEPS and unit["first_record"] == STEPS * i
            losses = losses_of(result)[STEPS * i : STEPS * (i + 1)]
            assert unit["avg_loss"] == pytest.approx(sum(losses) / STEPS)
            assert unit["final_loss"] == losses[-1]
            assert unit["prefix_blocks"] == i * unit["num_blocks"] * 2 * STEPS
        assert result["num_batches"] == 2 * STEPS * len(units)
        assert [record.step for record in result["records"]] == list(range(STEPS * len(units)))

    def test_polish_is_no_unit(self, run):
        result, _, _ = run(BLOCKWISE | {"scope": {"polish_steps": 1}})
        assert set(result) == RESULT_KEYS | {"results", "total_blocks", "polish"}
        assert len(result["results"]) == result["total_blocks"] == 3
        assert set(result["polish"]) == UNIT_KEYS and result["polish"]["num_blocks"] == 3
        assert result["polish"]["first_record"] == 6 and result["polish"]["num_batches"] == 1

    def test_history_is_the_last_units(self, run):
        result, _, _ = run(BLOCKWISE | {"max_steps": 6})
        last = losses_of(result)[-6:]
        means = [sum(last[:4]) / 4, sum(last[4:]) / 2]
        assert [entry["epoch"] for entry in result["training_history"]] == [0, 1]
        assert [entry["loss"] for entry in result["training_history"]] == pytest.approx(means)

    @pytest.mark.parametrize("scope", [{}, {"polish_steps": 1}])
    def test_each_unit_has_a_schedule_of_its_own(self, run, scope):
        schedule = {"kind": "linear", "warmup_steps": 2, "min_lr": 1e-3}
        result, _, _ = run(BLOCKWISE | {"max_steps": 5, "schedule": schedule, "scope": scope})
        of_five = [5e-3, 1e-2, 1e-2, 5.5e-3, 1e-3]
        of_four_and_one = [*([1e-2, 1e-2, 5.5e-3, 1e-3] * 3), 1e-2]  # a warm-up of the same share
        expected = of_four_and_one if scope else of_five * 3
        assert [record.lr for record in result["records"]] == pytest.approx(expected)

    def test_a_growing_rack_has_one_schedule(self, run):
        schedule = {"kind": "linear", "warmup_steps": 2}
        growing, _, _ = run({"max_steps": 7, "schedule": schedule, "scope": {"growth": True}})
        plain, _, _ = run({"max_steps": 7, "schedule": schedule})
        assert [r.lr for r in growing["records"]] == [r.lr for r in plain["records"]]
        assert set(growing) == RESULT_KEYS and len(growing["records"]) == 7


class TestWhatMoves:
    @pytest.mark.parametrize("tied", [True, False])
    @pytest.mark.parametrize("order", ["left_to_right", "right_to_left"])
    def test_everything_has_moved_in_the_end(self, run, tied, order):
        _, rack, before = run(BLOCKWISE | {"scope": {"order": order}}, tie_embeddings=tied)
        assert changed(before[0], weights_of(rack)) == set(before[0])

    @pytest.mark.parametrize(
        "scope, trains",
        [
            ({}, [{0}, {1}, {2}]),
            ({"overlap": 1}, [{0}, {0, 1}, {1, 2}]),
            ({"suffix": 1}, [{0, 2}, {1, 2}, {2}]),
            ({"order": "right_to_left"}, [{2}, {1}, {0}]),
        ],
    )
    def test_what_is_frozen_keeps_every_bit(self, run, scope, trains):
        _, rack, before = run(BLOCKWISE | {"scope": scope}, tie_embeddings=False)
        before.append(weights_of(rack))
        for step, after in enumerate(before[1:]):
            moved = {int(n.split(".")[1]) for n in changed(before[step], after) if n.startswith("stacks.")}
            assert moved == trains[step // STEPS]

    def test_frozen_bfloat16_weights_come_back_as_they_were(self, run):
        """From right to left, Blocks behind the unit are computed in bfloat16 and do not train."""
        scope = {"order": "right_to_left"}
        _, one, _ = run(BLOCKWISE | {"precision": "bf16_weights", "scope": scope}, tie_embeddings=False)
        _, other, _ = run(
            BLOCKWISE | {"precision": "bf16_weights", "scope": scope},
            tie_embeddings=False,
            prepare=lambda rack: rack.get_stack(1).freeze(),
        )
        # The last unit has trained before the others, which differ.
        for name in one.state_dict():
            if name.startswith(("stacks.2.", "final_norm", "lm_head")):
                assert one.state_dict()[name].equal(other.state_dict()[name])
        assert any((w != w.bfloat16().float()).any() for w in one.get_stack(2).state_dict().values())

    def test_a_frozen_stack_is_left_out(self, run):
        result, rack, before = run(BLOCKWISE, prepare=lambda rack: rack.get_stack(1).freeze())
        assert [unit["stack_idx"] for unit in result["results"]] == [0, 2]
        of_stack = {name for name in before[0] if name.startswith("stacks.1.")}
        assert of_stack == set(before[0]) - changed(before[0], weights_of(rack))
        assert not any(p.requires_grad for p in rack.get_stack(1).parameters())
        assert all(p.requires_grad for i in (0, 2) for p in rack.get_stack(i).parameters())

    def test_a_frozen_part_of_a_unit_stays(self, run):
        def prepare(rack):
            rack.get_stack(1).get_block(0).attention.requires_grad_(False)
            rack.embedding.requires_grad_(False)

        result, rack, before = run(BLOCKWISE, prepare=prepare, tie_embeddings=False)
        kept = set(before[0]) - changed(before[0], weights_of(rack))
        assert kept == {n for n in before[0] if n.startswith(("embedding", "stacks.1.blocks.0.attention."))}
        assert result["results"][1]["trainable_parameters"] < result["results"][1]["parameters"]

    @pytest.mark.parametrize("frozen, heads_unit", [((2,), 1), ((1, 2), 0)])
    def test_the_head_trains_with_the_last_stack_that_is_not_frozen(self, run, frozen, heads_unit):
        _, rack, before = run(
            BLOCKWISE | {"scope": {"order": "right_to_left"}},
            prepare=lambda rack: [rack.get_stack(i).freeze() for i in frozen],
            tie_embeddings=False,
        )
        moved = changed(before[0], before[STEPS] if heads_unit else weights_of(rack))
        assert {"final_norm.weight", "lm_head.weight"} <= moved
        assert {name[:8] for name in moved if name.startswith("stacks.")} == {f"stacks.{heads_unit}"}
        if heads_unit:
            later = changed(before[STEPS], weights_of(rack))
            assert not later & {"final_norm.weight", "lm_head.weight"}

    def test_a_tied_head_is_no_units_own(self, run):
        with pytest.raises(ValueError, match=r"training\.scope\.head: got 'per_unit'.*tie_embeddings"):
            run(BLOCKWISE | {"scope": {"head": "per_unit"}})

    def test_all_frozen(self, run):
        with pytest.raises(ValueError, match="every Block is frozen"):
            run(BLOCKWISE, prepare=lambda rack: [stack.freeze() for stack in rack.stacks])


class TestGrowth:
    @pytest.mark.parametrize("scope", [{"growth": True}, {"growth": True, "suffix": 1}])
    def test_a_unit_begins_where_those_before_it_end(self, make, scope):
        """Its first loss is that of what was there before, on the same batch."""
        config, rack, batches = make(BLOCKWISE | {"scope": scope}, tie_embeddings=False)
        watched = Watched(batches, rack)
        result = ArchitectureTrainer(config).train_architecture(rack, watched)
        paths = [(0,), (0, 1), (0, 1, 2)] if "suffix" not in scope else [(0, 2), (0, 1, 2), (0, 1, 2)]
        for unit in (1, 2):
            before = create_rack_from_config(config)
            before.load_state_dict(watched.before[unit * STEPS])
            expected = loss_by_hand(before, paths[unit - 1], batches[0]).item()
            assert losses_of(result)[unit * STEPS] == pytest.approx(expected, abs=1e-6)

    @pytest.mark.parametrize("architecture", ["rackwise", "stackwise"])
    @pytest.mark.parametrize("part", ["attention.out", "feedforward.down"])
    def test_what_is_frozen_is_not_set_to_zero(self, make, architecture, part):
        """It would not leave zero again."""
        training = {"training_architecture": architecture, "scope": {"growth": True}}
        config, rack, batches = make(training, n_stacks=2, blocks_per_stack=2)
        rack.get_submodule(f"stacks.1.blocks.1.{part}").requires_grad_(False)
        before = weights_of(rack)
        message = rf"scope\.growth: got True; allowed: false while stacks\.1\.blocks\.1\.{part}\.weight is"
        with pytest.raises(ValueError, match=message):
            ArchitectureTrainer(config).train_architecture(rack, batches)
        assert not changed(before, weights_of(rack))

    def test_frozen_stacks_that_do_not_enter(self, run):
        """One that is a unit left out, and the one that a Rack grows from."""
        for architecture, frozen in (("stackwise", 1), ("rackwise", 0)):
            _, rack, before = run(
                {"training_architecture": architecture, "scope": {"growth": True}},
                prepare=lambda rack, frozen=frozen: rack.get_stack(frozen).freeze(),
            )
            after, kept = weights_of(rack), f"stacks.{frozen}."
            assert not any(name.startswith(kept) for name in changed(before[0], after))

    @pytest.mark.parametrize("precision", ["fp32", "bf16_weights"])
    def test_stacks_join_a_rack_without_a_jump(self, make, precision):
        training = {"scope": {"growth": True}, "max_steps": 6, "precision": precision}
        config, rack, batches = make(training, tie_embeddings=False)
        watched = Watched(batches, rack)
        result = ArchitectureTrainer(config).train_architecture(rack, watched)
        for step, n in ((2, 1), (4, 2)):
            joined = create_rack_from_config(config)
            joined.load_state_dict(watched.before[step])
            ids = batches[step % 4]
            with torch.no_grad():
                x_BTC = joined.embedding(ids)
                shorter = joined.head(joined.forward_from_stack(x_BTC, 0, n))
                longer = joined.head(joined.forward_from_stack(x_BTC, 0, n + 1))
            torch.testing.assert_close(shorter, longer, rtol=0, atol=1e-6)
        # Nor in the step after: what a Stack adds has grown from nothing by one update.
        ends = [w for n, w in watched.before[3].items() if n.startswith("stacks.1") and "down.weight" in n]
        assert max(end.float().abs().max().item() for end in ends) < 1.2e-2
        assert all(math.isfinite(loss) for loss in losses_of(result))


class TestMemory:
    @settings(max_examples=12)
    @given(
        budget=st.integers(0, 5 * 2 * 8 * 16 * 4),
        on_disk=st.booleans(),
        offloads=st.booleans(),
        beside=st.sampled_from(
            [
                {},
                {"overlap": 1},
                {"suffix": 1},
                {"order": "right_to_left"},
                {"growth": True, "polish_steps": 1},
            ]
        ),
        architecture=st.sampled_from(["blockwise", "stackwise"]),
    )
    def test_weights_are_the_same_to_the_bit(self, make, budget, on_disk, offloads, beside, architecture):
        plain = {"training_architecture": architecture, "scope": beside, "max_steps": 5}
        model = {"blocks_per_stack": 2, "n_stacks": 2, "dropout": 0.2}
        config, rack, batches = make(plain, **model)
        expected = ArchitectureTrainer(config).train_architecture(rack, batches)
        with tempfile.TemporaryDirectory() as folder:
            scope = beside | {"cache_bytes": budget}
            scope |= {"cache_dir": f"{folder}/cache"} if on_disk and budget else {}
            scope |= {"offload": "disk", "offload_dir": f"{folder}/blocks"} if offloads else {}
            config, twin, _ = make(plain | {"scope": scope}, **model)
            result = ArchitectureTrainer(config).train_architecture(twin, batches)
            assert changed(weights_of(rack), weights_of(twin)) == set()
            assert losses_of(result) == losses_of(expected)
            assert not [path for path in Path(folder).glob("cache/**/*") if path.is_file()]

    def test_a_budget_makes_deep_units_as_cheap_as_the_second(self, run):
        kept, _, _ = run(BLOCKWISE | {"max_steps": 8, "scope": {"cache_bytes": 2**20}}, n_stacks=4)
        again, _, _ = run(BLOCKWISE | {"max_steps": 8}, n_stacks=4)
        # Four batches, each seen twice.
        assert [unit["prefix_blocks"] for unit in kept["results"]] == [0, 4, 4, 4]
        assert [unit["prefix_blocks"] for unit in again["results"]] == [0, 8, 16, 24]

    def test_from_right_to_left_a_budget_spares_what_comes_again_within_a_unit(self, run):
        scope = {"order": "right_to_left"}
        kept, _, _ = run(BLOCKWISE | {"max_steps": 8, "scope": scope | {"cache_bytes": 2**20}})
        again, _, _ = run(BLOCKWISE | {"max_steps": 8, "scope": scope})
        # Four batches, each seen twice.
        assert [unit["prefix_blocks"] for unit in kept["results"]] == [8, 4, 0]
        assert [unit["prefix_blocks"] for unit in again["results"]] == [16, 8, 0]

    @pytest.mark.parametrize("recompute", ["none", "full"])
    def test_a_prefix_is_held_for_one_micro_batch_at_a_time(self, run, monkeypatch, recompute):
        said, living, unpatched = [], [], PrefixOutputs.__call__

        def watched(self, *args):
            living.append(sum(each() is not None for each in said))
            hidden_BTC = unpatched(self, *args)
            said.append(weakref.ref(hidden_BTC))
            return hidden_BTC

        monkeypatch.setattr(PrefixOutputs, "__call__", watched)
        with uncollected():
            run(BLOCKWISE | {"accumulation_steps": 3, "recompute": {"kind": recompute}})
        assert living == [0] * (2 * STEPS * 3)


def fails(block, after, kind):
    """A Block whose forward pass, so many times in training, goes wrong from then on."""

    def prepare(rack):
        calls = iter(range(10**6))

        def hook(module, _inputs, output):
            if module.training and next(calls) >= after:
                if kind == "error":
                    raise RuntimeError("stop")
                return output * math.nan
            return output

        rack.get_blocks()[block].register_forward_hook(hook)

    return prepare


class TestAfterAnError:
    @pytest.mark.parametrize("kind, error", [("error", RuntimeError), ("nan", NonFiniteStepError)])
    @pytest.mark.parametrize("precision", ["fp32", "bf16_weights"])
    @pytest.mark.parametrize("log_interval", [1, 10])
    def test_weights_are_those_before(self, make, kind, error, precision, log_interval):
        """In the second step of the second unit."""
        training = BLOCKWISE | {"precision": precision, "log_interval": log_interval}
        config, rack, batches = make(training, tie_embeddings=False)
        watched = Watched(batches, rack)
        ArchitectureTrainer(config).train_architecture(rack, watched)
        config, broken, _ = make(training, tie_embeddings=False)
        broken.get_stack(2).freeze()
        fails(1, 1, kind)(broken)
        with pytest.raises(error):
            ArchitectureTrainer(config).train_architecture(broken, batches)
        expected = watched.before[STEPS + 1]
        for name, weight in broken.state_dict().items():
            assert weight.dtype == torch.float32
            # What was in training was seen in bfloat16, and its masters come back.
            assert weight.to(expected[name].dtype).equal(expected[name])
        assert not any(p.requires_grad for p in broken.get_stack(2).parameters())
        assert all(p.requires_grad for n, p in broken.named_parameters() if not n.startswith("stacks.2."))
        assert all(module.training for module in broken.modules())

    def test_the_step_that_ended_it_is_in_the_log(self, make, tmp_path):
        telemetry = {"jsonl": str(tmp_path / "steps.jsonl"), "parameter_norms": True}
        config, rack, batches = make(BLOCKWISE | {"telemetry": telemetry, "log_interval": 10})
        fails(1, 1, "nan")(rack)
        with pytest.raises(NonFiniteStepError):
            ArchitectureTrainer(config).train_architecture(rack, batches)
        lines = read_json_lines(tmp_path / "steps.jsonl").lines
        assert [(line["step"], line["skipped"]) for line in lines[: STEPS + 2]] == [
            *((step, False) for step in range(STEPS + 1)),
            (STEPS + 1, True),
        ]
        assert math.isnan(lines[STEPS + 1]["loss"])
        assert {name.split(".")[1] for name in lines[STEPS]["parameter_norms"] if "stacks" in name} == {"1"}

    def test_of_what_was_in_no_memory(self, make, tmp_path):
        scope = {"offload": "disk", "offload_dir": str(tmp_path), "cache_bytes": 2**20}
        config, rack, batches = make(BLOCKWISE | {"scope": scope})
        fails(1, 1, "error")(rack)
        with pytest.raises(RuntimeError, match="stop"):
            ArchitectureTrainer(config).train_architecture(rack, batches)
        assert all(p.requires_grad and p.isfinite().all() for p in rack.parameters())
        assert len(list(tmp_path.glob("block-*.safetensors"))) == 3

    def test_flags_and_modes_after_a_good_run(self, run):
        _, rack, _ = run(BLOCKWISE | {"scope": {"order": "right_to_left"}})
        assert all(p.requires_grad for p in rack.parameters())
        assert all(module.training for module in rack.modules())

    def test_weights_are_float32_after_a_good_run(self, run):
        _, rack, _ = run(BLOCKWISE | {"precision": "bf16_weights", "scope": {"polish_steps": 1}})
        assert {p.dtype for p in rack.parameters()} == {torch.float32}
        assert any((p != p.bfloat16().float()).any() for p in rack.parameters())


class TestData:
    def test_an_iterator_cannot_be_gone_through_again(self, run, make):
        *_, batches = make()
        allowed = "dataloader: got 'list_iterator'; allowed: what gives its batches again to each of 3 units"
        with pytest.raises(ValueError, match=allowed):
            run(BLOCKWISE, dataloader=iter(batches))
        result, _, _ = run({"scope": {"growth": True}}, dataloader=iter(batches))
        assert len(result["records"]) == STEPS

    def test_each_unit_sees_the_same_batches(self, make):
        config, rack, batches = make(BLOCKWISE | {"max_steps": 6})
        given_out = []

        class Loader(list):
            def __iter__(self):
                for i, batch in enumerate(list.__iter__(self)):
                    given_out.append(i)
                    yield batch

        ArchitectureTrainer(config).train_architecture(rack, Loader(batches))
        assert given_out == [0, 1, 2, 3, 0, 1] * 3

    @pytest.mark.parametrize("training", [{}, BLOCKWISE, BLOCKWISE | {"scope": {"overlap": 1}}])
    def test_accumulated_steps_are_steps_of_larger_batches(self, make, training):
        """To the token: rows of a micro-batch with few tokens count no more than others."""
        config, rack, _ = make(training | {"accumulation_steps": 3})
        generator = torch.Generator().manual_seed(5)
        ids = torch.randint(23, (3 * STEPS, 2, 9), generator=generator)
        mask = torch.ones_like(ids)
        for i in range(len(ids)):
            mask[i, :, 9 - i % 3 * 3 :] = 0
        parts = [{"input_ids": i, "attention_mask": m} for i, m in zip(ids, mask, strict=True)]
        whole = [
            {
                key: torch.cat([part[key] for part in parts[i : i + 3]])
                for key in ("input_ids", "attention_mask")
            }
            for i in range(0, len(parts), 3)
        ]
        in_parts = ArchitectureTrainer(config).train_architecture(rack, parts)
        config, twin, _ = make(training)
        at_once = ArchitectureTrainer(config).train_architecture(twin, whole)
        assert losses_of(in_parts) == pytest.approx(losses_of(at_once), abs=2e-6)
        close(rack.state_dict(), twin.state_dict())
        assert in_parts["num_batches"] == 3 * at_once["num_batches"]


class TestCheckpoints:
    @pytest.mark.parametrize("precision", ["fp32", "bf16_weights"])
    @pytest.mark.parametrize("offload", ["none", "disk"])
    def test_steps_are_counted_through_all_units(self, make, tmp_path, precision, offload):
        training = BLOCKWISE | {
            "checkpoint_dir": str(tmp_path / "runs"),
            "save_interval": 4,
            "precision": precision,
            "scope": {"offload": offload}
            | ({"offload_dir": str(tmp_path / "b")} if offload == "disk" else {}),
        }
        config, rack, batches = make(training)
        watched = Watched(batches, rack)
        ArchitectureTrainer(config).train_architecture(rack, watched)
        watched.before.append(weights_of(rack))
        assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["step-4", "step-8", "step-9"]
        for step in (4, 8, 9):
            saved = load_rack(tmp_path / "runs" / f"step-{step}").state_dict()
            for name, weight in watched.before[step].items():
                assert saved[name].dtype == torch.float32
                assert saved[name].to(weight.dtype).equal(weight)

    def test_saving_changes_nothing(self, run, tmp_path):
        _, plain, _ = run(BLOCKWISE)
        _, saved, _ = run(
            BLOCKWISE | {"checkpoint_dir": str(tmp_path), "save_interval": 2, "log_interval": 9}
        )
        assert changed(weights_of(plain), weights_of(saved)) == set()


class Noise:
    """Random tokens of which nothing can be known, new ones at each step, the same in each pass."""

    def __init__(self, row_length):
        self.row_length = row_length

    def __iter__(self):
        generator = torch.Generator().manual_seed(11)
        while True:
            yield torch.randint(8, (16, self.row_length), generator=generator)


class TestNothingLeaks:
    """On random tokens of 8 kinds the best loss is ln 8, for every unit and objective."""

    STEPS = 60

    def losses(self, make, objective, mode, **scope):
        config, rack, _ = make(
            BLOCKWISE
            | {"objective": objective, "max_steps": self.STEPS, "scope": scope, "optimizer": {"eps": 1e-8}},
            n_stacks=2,
            vocab_size=9,
            attention_mode=mode,
        )
        row_length = Objective(config.training.objective, 9).row_length(16)
        result = ArchitectureTrainer(config).train_architecture(rack, Noise(row_length))
        of_units = [losses_of(result)[i : i + self.STEPS] for i in range(0, 2 * self.STEPS, self.STEPS)]
        return [sum(losses[-20:]) / 20 for losses in of_units]

    SCOPES = ({}, {"order": "right_to_left"}, {"overlap": 1, "cache_bytes": 2**20})

    @pytest.mark.parametrize(
        "kind, scope",
        [
            *(("next_token", scope) for scope in SCOPES),
            ("masked_token", {}),
            ("mask_diffusion", {}),
            *(pytest.param("masked_token", scope, marks=pytest.mark.slow) for scope in SCOPES[1:]),
            *(pytest.param("mask_diffusion", scope, marks=pytest.mark.slow) for scope in SCOPES[1:]),
        ],
    )
    def test_no_unit_knows_what_cannot_be_known(self, make, kind, scope):
        masked = {} if kind == "next_token" else {"mask_token_id": 8}
        mode = "bidirectional" if masked else "causal"
        for loss in self.losses(make, {"kind": kind} | masked, mode, **scope):
            # Standard error of a mean over 20 steps: 0.01 at most of predictions; weights of mask diffusion
            # make its own larger.
            assert loss > math.log(8) - (0.3 if kind == "mask_diffusion" else 0.05)

    def test_a_leak_would_be_seen(self, make, monkeypatch):
        monkeypatch.setattr(Objective, "check", lambda self, rack: None)
        assert max(self.losses(make, {"kind": "next_token"}, "bidirectional")) < math.log(8) - 0.3


class TestLimits:
    def test_the_last_checkpoint_is_written_where_the_last_unit_is_frozen(self, run, tmp_path):
        training = BLOCKWISE | {"checkpoint_dir": str(tmp_path), "save_interval": 99}
        result, _, _ = run(training, prepare=lambda rack: rack.get_stack(2).freeze())
        assert len(result["results"]) == 2
        assert [path.name for path in tmp_path.iterdir()] == [f"step-{2 * STEPS}"]

    def test_a_checkpoint_of_a_growing_rack_computes_what_was_trained(self, run, tmp_path):
        training = {"scope": {"growth": True}, "max_steps": 6, "checkpoint_dir": str(tmp_path)}
        run(training | {"save_interval": 1})
        early = load_rack(tmp_path / "step-4").eval()
        ids = torch.randint(23, (2, 7))
        # Of three Stacks two have joined by then.
        two = early.head(early.forward_from_stack(early.embed(ids), 0, 2))
        torch.testing.assert_close(early(ids), two)

    def test_rows_of_the_buffer_are_no_more_than_steps(self, run):
        result, _, _ = run({"log_interval": 10**12})
        assert len(result["records"]) == STEPS

    def test_weights_that_are_not_float32_are_refused(self, make):
        config, rack, batches = make()
        with pytest.raises(ValueError, match=r"dtype of stacks\.0.*: got torch\.bfloat16"):
            ArchitectureTrainer(config).train_architecture(rack.bfloat16(), batches)

    @pytest.mark.parametrize("precision", ["bf16", "bf16_weights"])
    def test_a_frozen_stack_may_be_bfloat16(self, run, precision):
        """It is computed with as it is, and is as it was in the end."""
        result, rack, before = run(
            {"precision": precision, "eval_interval": None},
            prepare=lambda rack: rack.get_stack(1).bfloat16().freeze(),
        )
        assert {p.dtype for p in rack.get_stack(1).parameters()} == {torch.bfloat16}
        assert {p.dtype for i in (0, 2) for p in rack.get_stack(i).parameters()} == {torch.float32}
        moved = {name[:8] for name in changed(before[0], weights_of(rack)) if name.startswith("stacks.")}
        assert moved == {"stacks.0", "stacks.2"}
        assert all(math.isfinite(loss) for loss in losses_of(result))

    def test_a_loader_is_not_started_to_see_whether_it_starts_again(self, make):
        config, rack, batches = make(BLOCKWISE)
        loader = torch.utils.data.DataLoader(torch.cat(batches), batch_size=2, shuffle=False)
        before = torch.get_rng_state()
        ArchitectureTrainer(config).train_architecture(rack, loader)
        assert torch.get_rng_state().equal(before)

    def test_records_say_what_trained(self, run):
        result, _, _ = run(BLOCKWISE | {"scope": {"polish_steps": 1}})
        units = [record.unit for record in result["records"]]
        assert units[0] == "stack 0 block 0" and units[-1] == "rack"

    def test_what_is_checked_is_what_trains(self, make):
        config, _, _ = make(BLOCKWISE)
        with pytest.raises(ValueError, match=r"training\.training_architecture: got 'blockwise'"):
            ArchitectureTrainer(config).trainer_spec()
