"""The optimizer: which weights decay, what a gradient norm is, what clipping does."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from stackwise.config import OptimizerConfig, StackOptimizerConfig
from stackwise.model import create_simple_rack
from stackwise.stability.telemetry import clip_divisor, global_norm, gradient_norms
from stackwise.training.optimizer import create_optimizer, parameter_groups

RACKS = {
    "tied": {},
    "untied": {"tie_embeddings": False},
    "layernorm": {"norm": "layernorm"},
    "frozen up": {"freeze_up_proj": True},
    "frozen up, untied": {"freeze_up_proj": True, "tie_embeddings": False},
}
DECAYED = ("attention.qkv.weight", "attention.out.weight", "gate.weight", "up.weight", "down.weight")


def divided(gradients, total_norm, max_norm):
    """What the fused optimizers do with `grad_scale`."""
    for gradient in gradients:
        gradient /= clip_divisor(total_norm, max_norm)


class Zoo(nn.Module):
    """Kinds of parameter that a Rack does not have."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.linear = nn.Linear(4, 4)
        self.convolution = nn.Conv1d(4, 4, 2)
        self.norm = nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.ones(()))
        self.same_again = self.linear


def rack_of(**changes):
    return create_simple_rack(2, 1, 16, 24, 2, 11, **changes)


def names_in(model, group):
    names = {id(weight): name for name, weight in model.named_parameters()}
    return [names[id(weight)] for weight in group["params"]]


def with_gradients(shapes, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weights = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for weight in weights:
        weight.grad = scale * torch.randn(weight.shape, generator=generator)
    return weights


def norm_in_float64(weights):
    return math.sqrt(sum(value**2 for weight in weights for value in weight.grad.double().flatten().tolist()))


class TestGroups:
    @pytest.mark.parametrize("changes", RACKS.values(), ids=RACKS)
    def test_every_trainable_weight_once(self, changes):
        rack = rack_of(**changes)
        grouped = [id(weight) for group in parameter_groups(rack, 0.1) for weight in group["params"]]
        assert sorted(grouped) == sorted(id(weight) for weight in rack.parameters() if weight.requires_grad)
        assert len(set(grouped)) == len(grouped)

    @pytest.mark.parametrize("changes", RACKS.values(), ids=RACKS)
    def test_what_decays(self, changes):
        rack = rack_of(**changes)
        decayed, kept = parameter_groups(rack, 0.25)
        assert (decayed["weight_decay"], kept["weight_decay"]) == (0.25, 0.0)
        wanted = [
            name
            for name, weight in rack.named_parameters()
            if weight.requires_grad and (name.endswith(DECAYED) or name == "lm_head.weight")
        ]
        assert sorted(names_in(rack, decayed)) == sorted(wanted)
        assert {"embedding.weight", "final_norm.weight"} <= set(names_in(rack, kept))

    def test_tied_head_is_an_embedding(self):
        rack = rack_of()
        decayed, kept = parameter_groups(rack, 0.1)
        head = id(rack.lm_head.weight)
        assert [id(weight) for weight in kept["params"]].count(head) == 1
        assert head not in {id(weight) for weight in decayed["params"]}

    def test_untied_head_is_a_matrix(self):
        rack = rack_of(tie_embeddings=False)
        decayed, _ = parameter_groups(rack, 0.1)
        assert any(weight is rack.lm_head.weight for weight in decayed["params"])

    def test_other_models(self):
        model = Zoo()
        decayed, kept = parameter_groups(model, 0.1)
        assert sorted(names_in(model, decayed)) == ["convolution.weight", "linear.weight"]
        assert sorted(names_in(model, kept)) == [
            "convolution.bias",
            "embedding.weight",
            "linear.bias",
            "norm.bias",
            "norm.weight",
            "scale",
        ]

    def test_frozen_are_absent(self):
        rack = rack_of()
        rack.get_stack(0).freeze()
        rack.final_norm.weight.requires_grad_(False)
        names = {name for group in parameter_groups(rack, 0.1) for name in names_in(rack, group)}
        assert not [name for name in names if name.startswith(("stacks.0.", "final_norm"))]
        assert len(names) == 7 + 1


class TestCreate:
    def test_settings(self):
        config = OptimizerConfig(lr=3e-3, weight_decay=0.2, betas=[0.7, 0.8], eps=1e-5)
        optimizer = create_optimizer(rack_of(), config)
        assert isinstance(optimizer, torch.optim.AdamW)
        for group, decay in zip(optimizer.param_groups, (0.2, 0.0), strict=True):
            assert (group["lr"], group["weight_decay"], group["betas"], group["eps"]) == (
                3e-3,
                decay,
                (0.7, 0.8),
                1e-5,
            )

    def test_all_frozen(self):
        rack = rack_of()
        rack.freeze()
        with pytest.raises(ValueError, match="every parameter is frozen"):
            create_optimizer(rack, OptimizerConfig())

    @pytest.mark.parametrize("left", ["embedding", "lm_head", "stacks"])
    def test_one_group_may_be_empty(self, left):
        rack = rack_of(tie_embeddings=False)
        rack.freeze()
        getattr(rack, left).requires_grad_(True)
        optimizer = create_optimizer(rack, OptimizerConfig())
        for weight in getattr(rack, left).parameters():
            weight.grad = torch.ones_like(weight)
        before = copy.deepcopy(rack.state_dict())
        optimizer.step()
        changed = {name for name, weight in rack.state_dict().items() if not weight.equal(before[name])}
        assert changed == {name for name in before if name.startswith(left)}


class Part(nn.Module):
    """Some modules of a Rack, by other names, as a phase of training has them."""

    def __init__(self, rack, stacks, embedding):
        super().__init__()
        self.blocks = nn.ModuleList(block for i in stacks for block in rack.get_stack(i).blocks)
        self.final_norm, self.lm_head = rack.final_norm, rack.lm_head
        if embedding:
            self.embedding = rack.embedding


class TestPartOfARack:
    @pytest.mark.parametrize("kind", ["adamw", "muon"])
    @pytest.mark.parametrize("embedding", [True, False])
    @pytest.mark.parametrize("changes", [{}, {"tie_embeddings": False}, {"initialization": "mup"}])
    def test_settings_are_those_of_the_rack(self, changes, embedding, kind):
        mup = {"mup_base_width": 8} if "initialization" in changes else {}
        rack = rack_of(**changes, **mup)
        per_stack = {0: StackOptimizerConfig(lr=0.5), 1: StackOptimizerConfig(weight_decay=0.7)}
        config = OptimizerConfig(kind=kind, lr=0.1, per_stack=per_stack)

        def settings(optimizer):
            return {
                id(p): {key: value for key, value in group.items() if key != "params"}
                for group in optimizer.param_groups
                for p in group["params"]
            }

        whole = settings(create_optimizer(rack, config))
        for stacks in ([0], [1], [0, 1], []):
            part = Part(rack, stacks, embedding)
            found = settings(create_optimizer(part, config, rack=rack))
            assert found == {id(p): whole[id(p)] for p in part.parameters()}

    def test_a_head_of_its_own_has_the_rate_of_its_name(self):
        rack = rack_of(tie_embeddings=False, initialization="mup", mup_base_width=8)
        part = Part(rack, [0], embedding=False)
        part.final_norm, part.lm_head = copy.deepcopy(part.final_norm), copy.deepcopy(part.lm_head)
        groups = create_optimizer(part, OptimizerConfig(lr=0.1), rack=rack).param_groups
        lr = {id(p): group["lr"] for group in groups for p in group["params"]}
        # By half, as wide as the base is narrow; the head's is that of the base.
        assert (lr[id(part.final_norm.weight)], lr[id(part.lm_head.weight)]) == (0.05, 0.1)


class TestPerStack:
    def test_each_stack_moves_at_its_rate(self):
        """The first update of Adam is the learning rate itself, wherever there is a gradient."""
        rack = rack_of()
        config = OptimizerConfig(
            lr=1e-2, weight_decay=0.0, eps=1e-30, per_stack={1: StackOptimizerConfig(lr=2e-4)}
        )
        optimizer = create_optimizer(rack, config)
        before = {name: p.detach().clone() for name, p in rack.named_parameters()}
        for p in rack.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        for name, p in rack.named_parameters():
            rate = 2e-4 if name.startswith("stacks.1.") else 1e-2
            torch.testing.assert_close(before[name] - p, torch.full_like(p, rate), rtol=1e-3, atol=1e-7)

    def test_with_masters(self):
        rack = rack_of()
        config = OptimizerConfig(lr=0.1, per_stack={0: StackOptimizerConfig(lr=0.5)})
        optimizer = create_optimizer(rack, config, masters=True)
        lr = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
        assert {lr[id(p)] for p in rack.get_stack(0).parameters()} == {0.5}
        assert {lr[id(p)] for p in rack.get_stack(1).parameters()} == {0.1}

    @pytest.mark.parametrize(
        "per_stack, model, message",
        [
            ({2: {"lr": 1.0}}, rack_of(), r"training.optimizer.per_stack: got 2; allowed: 0 to 1"),
            ({0: {}}, nn.Linear(2, 2), r"training.optimizer.per_stack: got 0; allowed: none, .*no part of a"),
        ],
    )
    def test_refused(self, per_stack, model, message):
        config = OptimizerConfig.from_dict({"per_stack": per_stack})
        with pytest.raises(ValueError, match=message):
            create_optimizer(model, config)


class TestLeftOut:
    @pytest.mark.parametrize("kind, masters", [("adamw", False), ("adamw", True), ("muon", False)])
    def test_nothing_is_touched(self, kind, masters):
        rack = rack_of()
        optimizer = create_optimizer(rack, OptimizerConfig(kind=kind, lr=0.1), masters=masters)
        for bad, left_out in [(1.0, 0.0), (math.inf, 1.0), (math.nan, 1.0)]:
            for p in rack.parameters():
                p.grad = torch.full_like(p, bad)
            before = copy.deepcopy((rack.state_dict(), optimizer.state_dict()["state"]))
            optimizer.found_inf, optimizer.grad_scale = torch.tensor(left_out), torch.tensor(2.0)
            optimizer.step()
            weights = {name: value.equal(before[0][name]) for name, value in rack.state_dict().items()}
            assert set(weights.values()) == {bool(left_out)}
            if left_out:
                for number, state in optimizer.state_dict()["state"].items():
                    assert all(value.equal(before[1][number][key]) for key, value in state.items())


class TestNorm:
    @given(
        st.lists(st.lists(st.integers(1, 5), max_size=3), min_size=1, max_size=6),
        st.sampled_from([1e-6, 1.0, 1e4]),
        st.integers(0, 1000),
    )
    def test_root_of_the_sum_of_squares(self, shapes, scale, seed):
        weights = with_gradients(shapes, scale, seed)
        assert global_norm(gradient_norms(weights)).item() == pytest.approx(
            norm_in_float64(weights), rel=1e-6
        )

    def test_is_not_the_sum_of_norms(self):
        weights = with_gradients([(1,), (1,)])
        weights[0].grad, weights[1].grad = torch.tensor([3.0]), torch.tensor([4.0])
        norms = gradient_norms(weights)
        assert norms.tolist() == [3.0, 4.0]
        assert global_norm(norms).item() == 5.0 != norms.sum().item()

    def test_of_a_rack(self):
        rack = rack_of()
        rack.get_stack(1).freeze()
        ids = torch.arange(10).view(2, 5)
        nn.functional.cross_entropy(rack(ids).flatten(0, 1), ids.flatten()).backward()
        trained = [weight for weight in rack.parameters() if weight.grad is not None]
        norms = gradient_norms(rack.parameters())
        assert len(norms) == len(trained) == 7 + 2
        assert global_norm(norms).item() == pytest.approx(norm_in_float64(trained), rel=1e-6)
        assert norms.sum().item() > 1.1 * norm_in_float64(trained)

    def test_without_gradients(self):
        assert global_norm(gradient_norms(rack_of().parameters())).item() == 0.0

    def test_half_precision_gradients(self):
        weights = [nn.Parameter(torch.zeros(4096, dtype=torch.bfloat16))]
        weights[0].grad = torch.full_like(weights[0], 1 + 2**-7)
        norms = gradient_norms(weights)
        assert norms.dtype == torch.float32
        assert global_norm(norms).item() == pytest.approx(64 * (1 + 2**-7), rel=1e-6)

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_one_bad_value_shows(self, bad):
        weights = with_gradients([(3, 3), (5,)])
        weights[1].grad[2] = bad
        assert not global_norm(gradient_norms(weights)).isfinite()


class TestClip:
    @given(
        st.lists(st.lists(st.integers(1, 5), max_size=3), min_size=1, max_size=6),
        st.sampled_from([1e-4, 0.1, 1.0, 30.0]),
        st.floats(1e-3, 100.0),
        st.integers(0, 1000),
    )
    def test_as_torch_has_it(self, shapes, scale, max_norm, seed):
        ours, theirs = with_gradients(shapes, scale, seed), with_gradients(shapes, scale, seed)
        gradients = [weight.grad for weight in ours]
        divided(gradients, global_norm(gradient_norms(ours)), max_norm)
        nn.utils.clip_grad_norm_(theirs, max_norm)
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-6, atol=1e-6)
        assert norm_in_float64(ours) <= max_norm * (1 + 1e-6)

    def test_direction_is_kept(self):
        weights = with_gradients([(4, 4), (7,)], scale=50.0)
        before = [weight.grad.clone() for weight in weights]
        norm = norm_in_float64(weights)
        divided([weight.grad for weight in weights], torch.tensor(norm), 2.0)
        for weight, old in zip(weights, before, strict=True):
            torch.testing.assert_close(weight.grad, old * (2.0 / norm), rtol=1e-6, atol=0)

    @pytest.mark.parametrize("scale", [0.0, 1e-20, 1e-3])
    def test_below_the_limit_nothing_changes(self, scale):
        weights = with_gradients([(4, 4), (7,)], scale)
        before = [weight.grad.clone() for weight in weights]
        divided([weight.grad for weight in weights], global_norm(gradient_norms(weights)), 1.0)
        assert all(weight.grad.equal(old) for weight, old in zip(weights, before, strict=True))
