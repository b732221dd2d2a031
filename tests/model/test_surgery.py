"""Surgery on a Rack in training: what stays is the same bit for bit, what joins learns."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import SGD, AdamW

from stackwise.model import Block, Rack, Stack, create_block_spec, create_rack_from_specs, create_simple_rack
from stackwise.model.build import create_stack_from_spec
from stackwise.model.surgery import (
    append_stack,
    fuse_stacks,
    insert_stack,
    prepend_stack,
    remove_stack,
    set_identity,
    split_stack,
    unfreeze_stack,
)
from tests.optimizer_kinds import Contained

WIDTH, VOCAB = 16, 13
KINDS = {
    "mha": {},
    "gqa": {"n_kv_heads": 2, "attention_type": "gqa", "qk_norm": "head", "qkv_bias": True},
    "mla": {
        "attention_type": "mla",
        "latent": {
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_nope_head_dim": 4,
            "qk_rope_head_dim": 4,
            "v_head_dim": 4,
        },
    },
    "kernel": {"attention_type": "kernel", "kernel": {"n_features": 8}},
}
OPTIMIZERS = {
    "fused": lambda rack: AdamW(decayed_and_kept(rack), lr=3e-3, fused=True),
    "foreach": lambda rack: AdamW(decayed_and_kept(rack), lr=3e-3, foreach=True),
    "sgd": lambda rack: SGD(decayed_and_kept(rack), lr=3e-2, momentum=0.9),
    "muon": lambda rack: [
        torch.optim.Muon([p for p in rack.stacks.parameters() if p.ndim == 2], lr=3e-3),
        AdamW([p for n, p in rack.named_parameters() if not n.startswith("stacks") or p.ndim < 2], lr=3e-3),
    ],
}


def make_stack(n_blocks=1, stack_id=0, width=WIDTH, **block):
    return create_stack_from_spec(stack_id, n_blocks, create_block_spec(width, 24, 4, **block))


def make_rack(n_stacks=3, blocks_per_stack=2, seed=0, **block):
    torch.manual_seed(seed)
    return sharpened(create_simple_rack(n_stacks, blocks_per_stack, WIDTH, 24, 4, VOCAB, **block))


@torch.no_grad()
def sharpened(module):
    """Weights of another size than those of the initialisation, so that mistakes show."""
    for p in module.parameters():
        p.mul_(4.0) if p.ndim > 1 else p.add_(0.3 * torch.randn_like(p))
    return module


def decayed_and_kept(rack):
    trained = [p for p in rack.parameters() if p.requires_grad]
    decayed = [p for p in trained if p.ndim > 1 and p is not rack.embedding.weight]
    kept = [p for p in trained if p.ndim < 2 or p is rack.embedding.weight]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": kept, "weight_decay": 0.0}]


def listed(optimizer):
    return optimizer if isinstance(optimizer, list) else [optimizer]


def train(rack, optimizer, steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        ids = torch.randint(VOCAB, (2, 9), generator=generator)
        loss = F.cross_entropy(rack(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        for each in listed(optimizer):
            each.step()
            each.zero_grad()
        losses.append(loss.item())
    return losses


def logits_of(rack):
    ids = torch.randint(VOCAB, (2, 7), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        return rack(ids)


def group_of(optimizer, parameter):
    found = [
        g for each in listed(optimizer) for g in each.param_groups if any(p is parameter for p in g["params"])
    ]
    assert len(found) <= 1
    return found[0] if found else None


def held(optimizer):
    return [p for each in listed(optimizer) for g in each.param_groups for p in g["params"]]


def state_of(optimizer):
    """A copy of each parameter's state, by identity."""
    return {
        id(p): {k: v.clone() if torch.is_tensor(v) else v for k, v in state.items()}
        for each in listed(optimizer)
        for p, state in each.state.items()
    }


def same_state(a, b):
    return a.keys() == b.keys() and all(torch.equal(torch.as_tensor(a[k]), torch.as_tensor(b[k])) for k in a)


def snapshot(rack, optimizer=(), stack=None):
    """Everything that a refused call must leave as it was."""
    parts = [rack] if stack is None else [rack, stack]
    return (
        [(n, id(p), p.clone(), p.requires_grad, p.dtype) for m in parts for n, p in m.named_parameters()],
        [[(id(p), g["lr"]) for p in g["params"]] for each in listed(optimizer) for g in each.param_groups],
        {key: sorted(value) for key, value in state_of(optimizer).items()} if optimizer else {},
        [[s.stack_id for s in rack.stacks], [id(b) for s in rack.stacks for b in s.blocks]],
        [getattr(stack, "stack_id", None), [m.training for m in rack.modules()]],
    )


def assert_same(before, after):
    assert [x[:2] + x[3:] for x in before[0]] == [x[:2] + x[3:] for x in after[0]]
    assert all(a[2].is_meta or torch.equal(a[2], b[2]) for a, b in zip(before[0], after[0], strict=True))
    assert before[1:] == after[1:]


class TestIdentity:
    @pytest.mark.parametrize("position", ["pre", "post"])
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("index", [0, 1, 2])
    def test_leaves_logits_and_learns(self, kind, position, index):
        rack = make_rack(2, norm_position=position, **KINDS[kind])
        before = logits_of(rack)
        stack = sharpened(make_stack(2, norm_position=position, **KINDS[kind]))
        other = copy.deepcopy(rack)
        insert_stack(other, index, copy.deepcopy(stack))
        assert (logits_of(other) - before).abs().max() > 1e-2 * before.abs().max()

        insert_stack(rack, index, stack, identity=True)
        assert (logits_of(rack) - before).abs().max() <= 1e-6 * before.abs().max()
        rack(torch.randint(VOCAB, (2, 7))).square().mean().backward()
        for block in stack.blocks:
            ends = (
                [block.attention.out, block.feedforward.down]
                if position == "pre"
                else [block.attention_norm, block.feedforward_norm]
            )
            assert all((end.weight == 0).all() for end in ends)
            assert all((end.weight.grad != 0).any() for end in ends)

    def test_second_step_trains_all_of_the_new_stack(self):
        rack = make_rack(2)
        optimizer = OPTIMIZERS["fused"](rack)
        stack = make_stack(2)
        append_stack(rack, stack, optimizer, identity=True)
        before = [p.clone() for p in stack.parameters()]
        train(rack, optimizer, 2)
        assert all(not torch.equal(a, b) for a, b in zip(before, stack.parameters(), strict=True))

    def test_of_one_block_and_of_a_stack(self):
        stack = sharpened(make_stack(2))
        x = torch.randn(2, 5, WIDTH)
        set_identity(stack.get_block(1))
        assert torch.equal(stack(x), stack.get_block(0)(x))
        assert not torch.equal(stack(x), x)
        set_identity(stack)
        assert torch.equal(stack(x), x)

    def test_loss_has_no_jump(self):
        rack, twin = make_rack(2), make_rack(2)
        optimizer, reference = OPTIMIZERS["fused"](rack), OPTIMIZERS["fused"](twin)
        train(rack, optimizer, 5)
        train(twin, reference, 5)
        append_stack(rack, make_stack(2), optimizer, identity=True)
        grown, unchanged = train(rack, optimizer, 6, seed=2), train(twin, reference, 6, seed=2)
        assert grown[0] == pytest.approx(unchanged[0], rel=1e-6)
        # The new Stack moves from its second step on, and so slowly at first that the curves stay together.
        assert grown == pytest.approx(unchanged, rel=0.05)
        assert grown[1:] != unchanged[1:]


class TestTrainingGoesOn:
    """Against a twin that never had surgery: with a frozen identity, training is the same bit for bit."""

    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_frozen_identity_in_and_out(self, name):
        rack, twin = make_rack(), make_rack()
        optimizer, reference = OPTIMIZERS[name](rack), OPTIMIZERS[name](twin)
        assert train(rack, optimizer, 3) == train(twin, reference, 3)
        stack = make_stack(2)
        stack.freeze()
        insert_stack(rack, 1, stack, optimizer, identity=True)
        assert train(rack, optimizer, 3) == train(twin, reference, 3)
        assert remove_stack(rack, 1, optimizer) is stack
        assert train(rack, optimizer, 3) == train(twin, reference, 3)
        for ours, theirs in zip(rack.parameters(), twin.parameters(), strict=True):
            assert torch.equal(ours, theirs)

    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_fused_and_split(self, name):
        rack, twin = make_rack(), make_rack()
        optimizer, reference = OPTIMIZERS[name](rack), OPTIMIZERS[name](twin)
        assert train(rack, optimizer, 3) == train(twin, reference, 3)
        fuse_stacks(rack, 0, 2, optimizer)
        assert train(rack, optimizer, 3) == train(twin, reference, 3)
        split_stack(rack, 0, 3, optimizer)
        assert [s.num_blocks for s in rack.stacks] == [3, 1, 2]
        assert train(rack, optimizer, 3) == train(twin, reference, 3)

    @pytest.mark.parametrize("name", OPTIMIZERS)
    @pytest.mark.parametrize("operation", ["append", "prepend", "insert", "remove", "fuse", "split"])
    def test_state_follows_its_parameter(self, name, operation):
        rack = make_rack()
        optimizer = OPTIMIZERS[name](rack)
        train(rack, optimizer, 3)
        before, lists = state_of(optimizer), held(optimizer)
        old = {id(p) for p in rack.parameters()}
        gone, new = [], []
        match operation:
            case "remove":
                gone = list(remove_stack(rack, 1, optimizer).parameters())
            case "fuse":
                fuse_stacks(rack, 0, 3, optimizer)
            case "split":
                split_stack(rack, 1, 1, optimizer)
            case _:
                stack = make_stack(2)
                new = list(stack.parameters())
                act = {"append": append_stack, "prepend": prepend_stack}
                if operation == "insert":
                    insert_stack(rack, 1, stack, optimizer)
                else:
                    act[operation](rack, stack, optimizer)
        after = state_of(optimizer)
        survivors = old - {id(p) for p in gone}
        assert after.keys() == survivors
        assert all(same_state(before[key], after[key]) for key in survivors)
        expected = [id(p) for p in lists if id(p) in survivors]
        assert sorted(map(id, held(optimizer))) == sorted([*expected, *map(id, new)])
        assert {id(p) for p in rack.parameters()} == survivors | {id(p) for p in new}

        start = [p.clone() for p in rack.parameters()]
        train(rack, optimizer, 2)
        assert all(not torch.equal(a, b) for a, b in zip(start, rack.parameters(), strict=True))
        if name == "fused":
            # A new parameter counts its own steps, so that its moments are corrected as at a beginning.
            steps = {id(p): optimizer.state[p]["step"].item() for p in held(optimizer)}
            assert {steps[key] for key in survivors} == {5}
            assert {steps[id(p)] for p in new} <= {2}

    def test_moments_of_a_new_stack_are_those_of_adam_from_zero(self):
        rack = make_rack()
        optimizer = AdamW(decayed_and_kept(rack), lr=3e-3, betas=(0.9, 0.95), fused=True)
        train(rack, optimizer, 4)
        stack = make_stack()
        append_stack(rack, stack, optimizer)
        weight = stack.get_block(0).feedforward.gate.weight
        ids = torch.randint(VOCAB, (2, 9))
        F.cross_entropy(rack(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
        start, g = weight.detach().double(), weight.grad.double()
        optimizer.step()
        # Kingma & Ba 2015, the decay of Loshchilov & Hutter 2019: at the first step m / sqrt(v) is g / |g|.
        expected = start * (1 - 3e-3 * 0.1) - 3e-3 * g / (g.abs() + 1e-8)
        torch.testing.assert_close(weight.detach().double(), expected, rtol=1e-5, atol=1e-7)

    @pytest.mark.parametrize("tied", [True, False])
    def test_tied_weight_is_held_once(self, tied):
        rack = make_rack(tie_embeddings=tied)
        optimizer = OPTIMIZERS["fused"](rack)
        append_stack(rack, make_stack(), optimizer)
        remove_stack(rack, 0, optimizer)
        ids = [id(p) for p in held(optimizer)]
        assert len(ids) == len(set(ids)) == len(list(rack.parameters()))
        assert group_of(optimizer, rack.embedding.weight)["weight_decay"] == 0

    def test_schedule_goes_on(self):
        rack = make_rack()
        optimizer = OPTIMIZERS["fused"](rack)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        train(rack, optimizer, 1)
        schedule.step()
        remove_stack(rack, 0, optimizer)
        append_stack(rack, make_stack(), optimizer)
        train(rack, optimizer, 1)
        schedule.step()
        assert [group["lr"] for group in optimizer.param_groups] == [pytest.approx(1e-3)] * 2


class TestGroups:
    def test_decay_by_kind(self):
        rack = make_rack()
        optimizer = OPTIMIZERS["fused"](rack)
        stack = make_stack(2, qkv_bias=True, qk_norm="head")
        append_stack(rack, stack, optimizer)
        for name, p in stack.named_parameters():
            assert group_of(optimizer, p)["weight_decay"] == (0.1 if p.ndim > 1 else 0.0), name

    def per_stack(self, rack):
        groups = [{"params": [rack.embedding.weight, *rack.final_norm.parameters()], "weight_decay": 0.0}]
        for i, stack in enumerate(rack.stacks):
            for is_matrix in (True, False):
                parameters = [p for p in stack.parameters() if (p.ndim > 1) == is_matrix]
                groups.append({"params": parameters, "lr": 0.1 * (i + 1), "weight_decay": 0.1 * is_matrix})
        return AdamW(groups, lr=1e-3)

    @pytest.mark.parametrize(
        "index, like, lr", [(0, None, 0.1), (1, None, 0.1), (2, None, 0.2), (3, None, 0.3)]
    )
    def test_lr_of_the_neighbour(self, index, like, lr):
        rack = make_rack()
        optimizer = self.per_stack(rack)
        stack = make_stack(2)
        insert_stack(rack, index, stack, optimizer, like=like)
        for p in stack.parameters():
            group = group_of(optimizer, p)
            assert group["lr"] == pytest.approx(lr)
            assert group["weight_decay"] == (0.1 if p.ndim > 1 else 0.0)

    @pytest.mark.parametrize("like", [0, 1, 2])
    def test_lr_of_the_stack_asked_for(self, like):
        rack = make_rack()
        optimizer = self.per_stack(rack)
        stack = make_stack()
        insert_stack(rack, 1, stack, optimizer, like=like)
        assert {group_of(optimizer, p)["lr"] for p in stack.parameters()} == {0.1 * (like + 1)}

    def test_same_weight_before_same_kind(self):
        rack = make_rack(2)
        attention = [p for n, p in rack.stacks.named_parameters() if "attention." in n and p.ndim > 1]
        rest = [p for p in rack.parameters() if all(p is not q for q in attention)]
        optimizer = AdamW([{"params": rest, "lr": 0.1}, {"params": attention, "lr": 0.2}])
        stack = make_stack()
        append_stack(rack, stack, optimizer)
        for name, p in stack.named_parameters():
            wanted = 0.2 if "attention." in name else 0.1
            assert group_of(optimizer, p)["lr"] == wanted, name

    def test_other_kind_of_attention(self):
        rack = make_rack()
        optimizer = OPTIMIZERS["muon"](rack)
        stack = make_stack(**KINDS["mla"])
        append_stack(rack, stack, optimizer)
        for p in stack.parameters():
            assert any(p is q for q in held(optimizer[0 if p.ndim > 1 else 1]))
        train(rack, optimizer, 2)

    def test_frozen_neighbours_have_no_say(self):
        rack = make_rack()
        rack.get_stack(1).freeze()
        rack.get_stack(2).freeze()
        optimizer = self.per_stack_trained(rack)
        stack = make_stack()
        append_stack(rack, stack, optimizer)
        assert {group_of(optimizer, p)["lr"] for p in stack.parameters()} == {0.5}
        assert len(held(optimizer)) == len([p for p in rack.parameters() if p.requires_grad])

    def per_stack_trained(self, rack):
        first = list(rack.get_stack(0).parameters())
        rest = [rack.embedding.weight, *rack.final_norm.parameters()]
        return AdamW([{"params": rest}, {"params": first, "lr": 0.5}], lr=0.1)

    @pytest.mark.parametrize("tied", [True, False])
    def test_all_stacks_frozen(self, tied):
        rack = make_rack(tie_embeddings=tied)
        for stack in rack.stacks:
            stack.freeze()
        groups = decayed_and_kept(rack)
        assert bool(groups[0]["params"]) != tied
        optimizer = AdamW(groups, lr=1e-3)
        stack = make_stack()
        append_stack(rack, stack, optimizer)
        for p in stack.parameters():
            assert group_of(optimizer, p)["weight_decay"] == (0.1 if p.ndim > 1 else 0.0)
        train(rack, optimizer, 2)

    def test_empty_groups_are_told_apart_by_their_decay(self):
        rack = make_rack()
        groups = [{"params": [], "weight_decay": decay} for decay in (0.0, 0.1)]
        optimizer = AdamW([{"params": [rack.embedding.weight], "weight_decay": 0.3}, *groups], lr=1e-3)
        stack = make_stack()
        append_stack(rack, stack, optimizer)
        for p in stack.parameters():
            assert group_of(optimizer, p)["weight_decay"] == (0.1 if p.ndim > 1 else 0.0)

    def test_emptied_groups_take_a_stack_again(self):
        rack = make_rack(2)
        rack.get_stack(0).freeze()
        optimizer = AdamW(decayed_and_kept(rack), lr=1e-3, fused=True)
        remove_stack(rack, 1, optimizer)
        assert [len(group["params"]) for group in optimizer.param_groups] == [0, 2]
        train(rack, optimizer, 1)
        stack = make_stack()
        append_stack(rack, stack, optimizer)
        assert group_of(optimizer, stack.get_block(0).attention.out.weight) is optimizer.param_groups[0]

    def test_frozen_parameters_join_no_group(self):
        rack = make_rack()
        optimizer = OPTIMIZERS["fused"](rack)
        stack = make_stack(freeze_up_proj=True)
        stack.get_block(0).attention.requires_grad_(False)
        append_stack(rack, stack, optimizer)
        for p in stack.parameters():
            assert (group_of(optimizer, p) is not None) == p.requires_grad
        assert not any(p.requires_grad for p in stack.get_block(0).attention.parameters())

    def test_unfrozen_stack_joins(self):
        rack = make_rack(freeze_up_proj=True)
        rack.get_stack(1).freeze()
        optimizer = OPTIMIZERS["fused"](rack)
        train(rack, optimizer, 2)
        before = state_of(optimizer)
        unfreeze_stack(rack, 1, optimizer)
        after = state_of(optimizer)
        assert before.keys() == after.keys()
        assert all(same_state(before[key], after[key]) for key in before)
        trained = [p for p in rack.parameters() if p.requires_grad]
        assert sorted(map(id, held(optimizer))) == sorted(map(id, trained))
        for name, p in rack.get_stack(1).named_parameters():
            assert p.requires_grad == ("feedforward.up" not in name)
        unfreeze_stack(rack, 1, optimizer)
        assert len(held(optimizer)) == len(trained)
        train(rack, optimizer, 1)

    @pytest.mark.parametrize("operation", ["insert", "remove", "fuse", "split"])
    def test_names_follow(self, operation):
        rack = make_rack()
        optimizer = AdamW(rack.named_parameters(), lr=1e-3)
        match operation:
            case "insert":
                insert_stack(rack, 1, make_stack(), optimizer)
            case "remove":
                remove_stack(rack, 0, optimizer)
            case "fuse":
                fuse_stacks(rack, 0, 2, optimizer)
            case "split":
                split_stack(rack, 0, 1, optimizer)
        (group,) = optimizer.param_groups
        now = {id(p): name for name, p in rack.named_parameters()}
        assert group["param_names"] == [now[id(p)] for p in group["params"]]
        assert len(group["params"]) == len(now)

    @pytest.mark.parametrize("name", OPTIMIZERS)
    @pytest.mark.parametrize("operation", ["append", "prepend", "insert", "remove", "unfreeze"])
    def test_a_state_dict_fits_an_optimizer_made_for_the_rack_as_it_is(self, name, operation):
        rack = make_rack()
        if operation == "unfreeze":
            rack.get_stack(0).freeze()
        optimizer = OPTIMIZERS[name](rack)
        train(rack, optimizer, 2)
        match operation:
            case "append":
                append_stack(rack, make_stack(2), optimizer)
            case "prepend":
                prepend_stack(rack, make_stack(2), optimizer)
            case "insert":
                insert_stack(rack, 1, make_stack(2), optimizer)
            case "remove":
                remove_stack(rack, 1, optimizer)
            case "unfreeze":
                unfreeze_stack(rack, 0, optimizer)
        train(rack, optimizer, 2)
        twin = copy.deepcopy(rack)
        others = OPTIMIZERS[name](twin)
        for one, other in zip(listed(optimizer), listed(others), strict=True):
            other.load_state_dict(copy.deepcopy(one.state_dict()))
        for p, q in zip(rack.parameters(), twin.parameters(), strict=True):
            assert same_state(state_of(optimizer)[id(p)], state_of(others)[id(q)])
        assert train(rack, optimizer, 2) == train(twin, others, 2)


class TestRack:
    def test_fuse_and_split_leave_logits_bitwise(self):
        rack = make_rack()
        before, blocks = logits_of(rack), [b for s in rack.stacks for b in s.blocks]
        fused = fuse_stacks(rack, 1, 3)
        assert fused is rack.get_stack(1)
        assert [s.num_blocks for s in rack.stacks] == [2, 4]
        assert torch.equal(logits_of(rack), before)
        first, second = split_stack(rack, 1, 3)
        assert [first, second] == list(rack.stacks)[1:]
        assert [s.num_blocks for s in rack.stacks] == [2, 3, 1]
        assert torch.equal(logits_of(rack), before)
        assert all(a is b for a, b in zip(blocks, (b for s in rack.stacks for b in s.blocks), strict=True))

    def test_order_of_insertion(self):
        rack = make_rack(2)
        stacks = [make_stack() for _ in range(4)]
        prepend_stack(rack, stacks[0])
        append_stack(rack, stacks[1])
        insert_stack(rack, 1, stacks[2])
        insert_stack(rack, 4, stacks[3])
        order = [next((i for i, s in enumerate(stacks) if s is each), None) for each in rack.stacks]
        assert order == [0, 2, None, None, 3, 1]

    def test_removed_stack_leaves_the_function_without_it(self):
        rack = make_rack()
        ids = torch.randint(VOCAB, (2, 7))
        with torch.no_grad():
            x = rack.forward_from_stack(rack.embed(ids), 0, 1)
            expected = rack.head(rack.forward_from_stack(x, 2))
        stack = rack.get_stack(1)
        assert remove_stack(rack, 1) is stack
        with torch.no_grad():
            assert torch.equal(rack(ids), expected)

    def test_names_of_stacks(self):
        rack = make_rack()
        append_stack(rack, make_stack(stack_id=7))
        prepend_stack(rack, make_stack(stack_id=1))
        assert [s.stack_id for s in rack.stacks] == [8, 0, 1, 2, 7]
        remove_stack(rack, 2)
        assert [s.stack_id for s in rack.stacks] == [8, 0, 2, 7]
        fuse_stacks(rack, 1, 3)
        assert [s.stack_id for s in rack.stacks] == [8, 0, 7]
        split_stack(rack, 1, 2)
        assert [s.stack_id for s in rack.stacks] == [8, 0, 9, 7]

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_stack_gets_dtype_mode_and_no_old_gradient(self, dtype):
        rack = make_rack().to(dtype).eval()
        stack = make_stack()
        stack(torch.randn(1, 3, WIDTH)).sum().backward()
        append_stack(rack, stack)
        assert {p.dtype for p in rack.parameters()} == {dtype}
        assert all(p.grad is None for p in stack.parameters())
        assert not any(m.training for m in stack.modules())
        assert logits_of(rack).dtype == dtype

    def test_modes_of_the_halves(self):
        rack = make_rack().eval()
        split_stack(rack, 0, 1)
        assert not any(m.training for m in rack.modules())

    def test_frozen_stays_frozen(self):
        rack = make_rack()
        rack.get_stack(0).freeze()
        fuse_stacks(rack, 0, 2)
        trains = [all(p.requires_grad for p in b.parameters()) for s in rack.stacks for b in s.blocks]
        split_stack(rack, 0, 2)
        assert trains == [False, False, True, True, True, True]
        assert [any(p.requires_grad for p in s.parameters()) for s in rack.stacks] == [False, True, True]

    def test_bidirectional_stack_joins_as_in_the_constructor(self):
        rack = make_rack()
        append_stack(rack, make_stack(attention_mode="bidirectional"))
        assert not rack.is_causal
        with pytest.raises(ValueError, match="bidirectional"):
            rack.new_cache(1, 4)

    def test_cache_made_afterwards_agrees(self):
        rack = make_rack().double().eval()
        append_stack(rack, sharpened(make_stack(**KINDS["mla"])))
        fuse_stacks(rack, 0, 2)
        ids = torch.randint(VOCAB, (2, 6))
        cache = rack.new_cache(2, 6)
        with torch.no_grad():
            pieces = torch.cat([rack(ids[:, i : i + 2], cache=cache) for i in (0, 2, 4)], dim=1)
            torch.testing.assert_close(pieces, rack(ids), rtol=1e-9, atol=1e-9)

    def test_shared_block_leaves_with_its_last_stack_only(self):
        block = Block(WIDTH, 24, 4)
        rack = Rack(
            [Stack([block], 0), Stack([block, Block(WIDTH, 24, 4)], 1), Stack([Block(WIDTH, 24, 4)], 2)],
            VOCAB,
            WIDTH,
        )
        optimizer = OPTIMIZERS["fused"](rack)
        train(rack, optimizer, 1)
        remove_stack(rack, 1, optimizer)
        assert all(group_of(optimizer, p) is not None and p in optimizer.state for p in block.parameters())
        remove_stack(rack, 0, optimizer)
        assert all(group_of(optimizer, p) is None and p not in optimizer.state for p in block.parameters())


def with_weight_of(rack):
    stack = make_stack()
    stack.get_block(0).attention.out.weight = rack.get_stack(0).get_block(0).attention.out.weight
    return stack


def on_meta():
    with torch.device("meta"):
        return make_stack()


def foreign():
    return AdamW(make_rack(seed=9).parameters())


def only_matrices(rack):
    return torch.optim.Muon([p for p in rack.stacks.parameters() if p.ndim == 2])


# What is called with the Rack, its optimizer and a Stack; and the Stack, a fitting one unless said here.
REFUSED = {
    "other width": (lambda r, o, s: append_stack(r, s, o), lambda r: make_stack(width=32)),
    "a block of other width": (
        lambda r, o, s: append_stack(r, s, o),
        lambda r: Stack([Block(WIDTH, 24, 4), Block(32, 24, 4)]),
    ),
    "own stack, no optimizer": (lambda r, o, s: append_stack(r, s), lambda r: r.get_stack(0)),
    "own weight, no optimizer": (lambda r, o, s: append_stack(r, s), with_weight_of),
    "own stack": (lambda r, o, s: append_stack(r, s, o), lambda r: r.get_stack(0)),
    "own block": (lambda r, o, s: append_stack(r, s, o), lambda r: Stack([r.get_stack(0).get_block(1)])),
    "own weight": (lambda r, o, s: append_stack(r, s, o), with_weight_of),
    "on meta": (lambda r, o, s: append_stack(r, s, o), lambda r: on_meta()),
    "a block": (lambda r, o, s: append_stack(r, s, o), lambda r: Block(WIDTH, 24, 4)),
    "beyond": (lambda r, o, s: insert_stack(r, 4, s, o), None),
    "negative": (lambda r, o, s: insert_stack(r, -1, s, o), None),
    "no index": (lambda r, o, s: insert_stack(r, True, s, o), None),
    "like beyond": (lambda r, o, s: insert_stack(r, 0, s, o, like=3), None),
    "foreign optimizer": (lambda r, o, s: append_stack(r, s, foreign()), None),
    "foreign beside ours": (lambda r, o, s: append_stack(r, s, [o, foreign()]), None),
    "no optimizer": (lambda r, o, s: append_stack(r, s, [r]), None),
    "lbfgs": (lambda r, o, s: append_stack(r, s, torch.optim.LBFGS(r.parameters())), None),
    "no group": (lambda r, o, s: append_stack(r, s, only_matrices(r), identity=True), None),
    "remove beyond": (lambda r, o, s: remove_stack(r, 3, o), None),
    "remove negative": (lambda r, o, s: remove_stack(r, -1, o), None),
    "remove, foreign optimizer": (lambda r, o, s: remove_stack(r, 0, foreign()), None),
    "fuse one": (lambda r, o, s: fuse_stacks(r, 1, 2, o), None),
    "fuse beyond": (lambda r, o, s: fuse_stacks(r, 1, 4, o), None),
    "fuse negative": (lambda r, o, s: fuse_stacks(r, -1, 2, o), None),
    "split at start": (lambda r, o, s: split_stack(r, 0, 0, o), None),
    "split at end": (lambda r, o, s: split_stack(r, 0, 2, o), None),
    "split beyond": (lambda r, o, s: split_stack(r, 3, 1, o), None),
    "split, foreign optimizer": (lambda r, o, s: split_stack(r, 0, 1, foreign()), None),
    "unfreeze beyond": (lambda r, o, s: unfreeze_stack(r, 3, o), None),
}


class TestRefusals:
    @pytest.mark.parametrize("case", REFUSED)
    def test_refused_call_changes_nothing(self, case):
        act, make = REFUSED[case]
        rack = make_rack()
        optimizer = OPTIMIZERS["fused"](rack)
        train(rack, optimizer, 2)
        rack.eval()
        stack = make(rack) if make else make_stack()
        before = snapshot(rack, optimizer, stack)
        with pytest.raises(ValueError, match=r"got .*; allowed"):
            act(rack, optimizer, stack)
        assert_same(before, snapshot(rack, optimizer, stack))

    def test_stack_that_the_optimizer_has_already(self):
        rack, stack = make_rack(), make_stack()
        optimizer = OPTIMIZERS["fused"](rack)
        optimizer.add_param_group({"params": [stack.get_block(0).feedforward.up.weight]})
        before = snapshot(rack, optimizer, stack)
        with pytest.raises(ValueError, match=r"stack: got 'blocks.0.feedforward.up.weight'; allowed"):
            append_stack(rack, stack, optimizer)
        assert_same(before, snapshot(rack, optimizer, stack))

    @pytest.mark.parametrize("ours, theirs", [(None, 8), (8, None), (8, 4)])
    def test_stack_of_another_base_of_mup(self, ours, theirs):
        of_base = {
            base: {"initialization": "normal" if base is None else "mup", "mup_base_width": base}
            for base in (ours, theirs)
        }
        rack = make_rack(**of_base[ours])
        optimizer = OPTIMIZERS["fused"](rack)
        blocks = [Block(WIDTH, 24, 4, **of_base[base]) for base in (ours, theirs)]
        for stack in (make_stack(**of_base[theirs]), Stack(blocks)):
            before = snapshot(rack, optimizer, stack)
            with pytest.raises(ValueError, match=f"^mup_base_width: got {theirs}; allowed: {ours}, as in"):
                append_stack(rack, stack, optimizer)
            assert_same(before, snapshot(rack, optimizer, stack))
        append_stack(rack, make_stack(**of_base[ours]), optimizer)
        assert len(rack.stacks) == 4

    def test_last_stack_stays(self):
        rack = make_rack(1)
        with pytest.raises(ValueError, match="the only one"):
            remove_stack(rack, 0)
        assert len(rack.stacks) == 1

    def test_unfreezing_without_a_group(self):
        rack = make_rack(1)
        rack.get_stack(0).freeze()
        optimizer = AdamW([rack.embedding.weight])
        before = snapshot(rack, optimizer)
        with pytest.raises(ValueError, match=r"no group for attention_norm\.weight"):
            unfreeze_stack(rack, 0, optimizer)
        assert_same(before, snapshot(rack, optimizer))


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["insert", "remove", "fuse", "split", "train"]), st.integers(0, 99)), max_size=8
)


@given(operations=OPERATIONS, name=st.sampled_from(sorted(OPTIMIZERS)))
@settings(deadline=None, max_examples=15, derandomize=True)
def test_any_sequence_keeps_the_books(operations, name):
    """The optimizer holds each trainable parameter once, in a group of its kind, and no state of others."""
    rack = make_rack(2, 1)
    optimizer = OPTIMIZERS[name](rack)
    for operation, number in operations:
        count = len(rack.stacks)
        before, logits = state_of(optimizer), logits_of(rack)
        match operation:
            case "train":
                train(rack, optimizer, 1)
                continue
            case "insert" if count < 5:
                insert_stack(rack, number % (count + 1), make_stack(1 + number % 2), optimizer, identity=True)
            case "remove" if count > 1:
                remove_stack(rack, number % count, optimizer)
                logits = None
            case "fuse" if count > 1:
                fuse_stacks(rack, number % (count - 1), number % (count - 1) + 2, optimizer)
            case "split" if rack.get_stack(number % count).num_blocks > 1:
                split_stack(rack, number % count, 1, optimizer)
        after = state_of(optimizer)
        assert all(same_state(before[key], state) for key, state in after.items())
        assert logits is None or torch.equal(logits_of(rack), logits)
        assert sorted(map(id, held(optimizer))) == sorted(map(id, rack.parameters()))
        place = {id(p): i for i, p in enumerate(rack.parameters())}
        assert after.keys() <= place.keys()
        for group in (g for each in listed(optimizer) for g in each.param_groups):
            places = [place[id(p)] for p in group["params"]]
            assert places == sorted(places)
        ids = [s.stack_id for s in rack.stacks]
        assert len(ids) == len(set(ids))
    train(rack, optimizer, 1)


def test_a_rack_of_different_stacks_takes_any_of_them():
    spec = create_block_spec(WIDTH, 24, 4)
    rack = create_rack_from_specs(
        VOCAB, WIDTH, [{"n_blocks": 1, "block_spec": {**spec, **kind}} for kind in KINDS.values()]
    )
    optimizer = OPTIMIZERS["fused"](rack)
    for kind in KINDS.values():
        append_stack(rack, make_stack(**kind), optimizer, identity=True)
    losses = train(rack, optimizer, 2)
    assert all(torch.isfinite(torch.tensor(losses)))
    for name, p in rack.stacks.named_parameters():
        assert group_of(optimizer, p)["weight_decay"] == (0.1 if p.ndim > 1 else 0.0), name


def test_states_within_a_container_leave_with_their_parameters():
    rack = make_rack()
    inner = OPTIMIZERS["muon"](rack)
    train(rack, inner, 2)
    gone = list(rack.get_stack(1).parameters())
    remove_stack(rack, 1, Contained(*inner))
    left = {id(p) for p in rack.parameters()}
    assert all({id(p) for p in each.state} <= left for each in inner)
    assert not {id(p) for p in held(inner)} & {id(p) for p in gone}
