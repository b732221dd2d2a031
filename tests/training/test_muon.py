"""Muon against Muon and AdamW of PyTorch, and against the polar factor that it approximates."""

import copy
import math
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from stackwise.config import OptimizerConfig, StackOptimizerConfig
from stackwise.model import append_stack, create_simple_rack, prepend_stack, remove_stack, unfreeze_stack
from stackwise.model.block import Block
from stackwise.model.initialization import initialize_rack
from stackwise.model.parameter_group import block_matrices
from stackwise.training.muon import Muon, orthogonalised
from stackwise.training.optimizer import create_optimizer

SHAPES = [(16, 16), (24, 8), (8, 24), (16, 16), (400, 400)]
CONFIG = OptimizerConfig(kind="muon", lr=1e-2, weight_decay=0.1)
LATENT = {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}


def weights(shapes=SHAPES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def give(params, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = scale * torch.randn(p.shape, generator=generator)


def reference(params, **settings):
    settings = {"lr": 1e-2, "weight_decay": 0.1, **settings}
    return torch.optim.Muon(params, nesterov=True, adjust_lr_fn="match_rms_adamw", **settings)


def close(ours, theirs, before):
    """Within the rounding of bfloat16, which both take into the iteration, of what moved."""
    for p, q, start in zip(ours, theirs, before, strict=True):
        assert (p - q).norm() < 0.03 * (q - start).norm()


def rack_of(**changes):
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_ff": 24, "n_heads": 4, "vocab_size": 11}
    return create_simple_rack(2, 1, **{**sizes, **changes})


def backward(rack, seed=0):
    ids = torch.randint(11, (2, 7), generator=torch.Generator().manual_seed(seed))
    nn.functional.cross_entropy(rack(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()


def same_state(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def state_of(optimizer):
    return copy.deepcopy(optimizer.state_dict()["state"])


def same(state, other):
    assert state.keys() == other.keys()
    return all(value.equal(other[n][key]) for n, of in state.items() for key, value in of.items())


class TestOrthogonalised:
    @given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 1000), st.sampled_from([1e-3, 1.0, 1e4]))
    def test_singular_vectors_stay_and_values_are_about_one(self, rows, columns, seed, size):
        x = size * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
        u, values, vh = torch.linalg.svd(x.double(), full_matrices=False)
        within = u.mT @ orthogonalised(x).double() @ vh.mT
        clear = values > 0.05 * values[0]
        assert (within.diagonal()[clear] > 0.65).all()
        assert torch.linalg.matrix_norm(within, 2) < 1.25
        # A direction is kept as exactly as bfloat16 keeps a number.
        assert (within - within.diagonal().diag())[clear][:, clear].abs().max() < 0.1

    @pytest.mark.parametrize("shape", [(12, 12), (6, 30), (30, 6)])
    def test_many_are_each_by_itself(self, shape):
        x = torch.randn(5, *shape, generator=torch.Generator().manual_seed(0))
        x[2] *= 1e4
        for one, among in zip(x, orthogonalised(x), strict=True):
            torch.testing.assert_close(among, orthogonalised(one), rtol=0, atol=0.02)

    def test_nothing_stays_nothing(self):
        assert orthogonalised(torch.zeros(3, 4, 5)).equal(torch.zeros(3, 4, 5, dtype=torch.bfloat16))


class TestTrajectory:
    @pytest.mark.parametrize("momentum", [0.95, 0.5])
    def test_of_matrices_is_that_of_torch(self, momentum):
        ours, theirs, before = weights(), weights(), weights()
        optimizer = Muon(ours, lr=1e-2, weight_decay=0.1, momentum=momentum)
        other = reference(theirs, momentum=momentum)
        for step in range(6):
            give(ours, step)
            give(theirs, step)
            for group in (*optimizer.param_groups, *other.param_groups):
                group["lr"] = 1e-2 / (1 + step)
            optimizer.step()
            other.step()
        close(ours, theirs, before)

    def test_of_a_rack(self):
        """Matrices of the Blocks as Muon of torch moves each map by itself; the rest as AdamW of torch."""
        rack = rack_of(n_kv_heads=2, tie_embeddings=False)
        twin, start = copy.deepcopy(rack), copy.deepcopy(rack)
        optimizer = create_optimizer(rack, CONFIG)
        matrices = {n: p for n, p in twin.named_parameters() if n.startswith("stacks") and p.ndim == 2}
        maps = {
            n: [nn.Parameter(part.clone()) for part in p.detach().split((16, 8, 8) if "qkv" in n else len(p))]
            for n, p in matrices.items()
        }
        rest = [p for n, p in twin.named_parameters() if n not in matrices]
        head = [p for p in rest if p is twin.lm_head.weight]
        others = [p for p in rest if p is not twin.lm_head.weight]
        by_muon = reference([part for parts in maps.values() for part in parts])
        by_adamw = torch.optim.AdamW(
            [{"params": head, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
            lr=1e-2,
            betas=(0.9, 0.95),
        )
        for step in range(5):
            # Of full rank: where a singular value is nothing, both runs orthogonalise rounding.
            give(list(rack.parameters()), step)
            give(list(twin.parameters()), step)
            for name, parts in maps.items():
                gradient = matrices[name].grad
                for part, of_it in zip(parts, gradient.split([len(each) for each in parts]), strict=True):
                    part.grad = of_it
            for each in (optimizer, by_muon, by_adamw):
                each.step()
            optimizer.zero_grad()
        for name, p in rack.named_parameters():
            if name in maps:
                close([p], [torch.cat([part.detach() for part in maps[name]])], [start.get_parameter(name)])
            else:
                torch.testing.assert_close(p, twin.get_parameter(name), rtol=1e-5, atol=1e-6)

    def test_update_has_the_size_of_adamws(self):
        """Liu et al. 2025: a root mean square of 0.2 where the momentum has full rank."""
        for p in (params := weights([(32, 32), (64, 256), (256, 64)])):
            before = p.detach().clone()
            give([p], 0)
            Muon([p], lr=1.0).step()
            assert (p - before).square().mean().sqrt().item() == pytest.approx(0.2, rel=0.25)
        assert len(params) == 3


class TestProtocol:
    def make(self):
        rack = rack_of()
        return rack, create_optimizer(rack, CONFIG)

    @pytest.mark.parametrize("divisor", [4.0, 0.3])
    def test_gradients_are_divided(self, divisor):
        (ours, optimizer), (theirs, other) = self.make(), self.make()
        for step in range(3):
            give(list(ours.parameters()), step)
            give(list(theirs.parameters()), step)
            for p in theirs.parameters():
                p.grad /= divisor
            optimizer.grad_scale = torch.tensor(divisor)
            optimizer.step()
            other.step()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-2, atol=2e-4)
        for mine, other_state in zip(
            optimizer.state_dict()["state"].values(), other.state_dict()["state"].values(), strict=True
        ):
            for key, value in mine.items():
                torch.testing.assert_close(value, other_state[key], rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    @pytest.mark.parametrize("at", [0, 2])
    def test_a_step_with_found_inf_changes_nothing(self, at, bad):
        (ours, optimizer), (twin, other) = self.make(), self.make()
        for step in range(4):
            if step == at:
                weights_before, state = copy.deepcopy(ours.state_dict()), state_of(optimizer)
                for p in ours.parameters():
                    p.grad = torch.full_like(p, bad)
                optimizer.found_inf = torch.tensor(1.0)
                optimizer.step()
                optimizer.found_inf = torch.tensor(0.0)
                assert all(value.equal(weights_before[name]) for name, value in ours.state_dict().items())
                assert not state or same(state_of(optimizer), state)
            give(list(ours.parameters()), step)
            give(list(twin.parameters()), step)
            optimizer.step()
            other.step()
        assert same(state_of(optimizer), state_of(other))
        for p, q in zip(ours.parameters(), twin.parameters(), strict=True):
            assert p.equal(q)

    def test_without_gradient_nothing_moves(self):
        rack, optimizer = self.make()
        before = copy.deepcopy(rack.state_dict())
        optimizer.step()
        assert all(value.equal(before[name]) for name, value in rack.state_dict().items())
        assert not optimizer.state_dict()["state"]

    def test_step_waits_for_nothing(self):
        """On tensors without values, whatever would read one fails. (AdamW's kernel is torch's own.)"""
        params = [nn.Parameter(torch.zeros(shape, device="meta")) for shape in SHAPES]
        optimizer = Muon([{"params": params[:1], "rows": (8, 4, 4)}, {"params": params[1:]}])
        for p in params:
            p.grad = torch.zeros_like(p)
        optimizer.found_inf = optimizer.grad_scale = torch.zeros((), device="meta")
        optimizer.step()

    def test_state_survives_a_round_trip(self, tmp_path):
        def run(interrupted):
            rack, optimizer = self.make()
            for step in range(5):
                if interrupted and step == 2:
                    torch.save((rack.state_dict(), optimizer.state_dict()), tmp_path / "state.pt")
                    saved = torch.load(tmp_path / "state.pt")
                    rack, optimizer = self.make()
                    rack.load_state_dict(saved[0])
                    optimizer.load_state_dict(saved[1])
                give(list(rack.parameters()), step)
                optimizer.step()
            return rack, optimizer

        (whole, of_whole), (parts, of_parts) = run(False), run(True)
        assert all(p.equal(q) for p, q in zip(whole.parameters(), parts.parameters(), strict=True))
        assert same(state_of(of_whole), state_of(of_parts))
        assert of_whole.state_dict()["param_groups"] == of_parts.state_dict()["param_groups"]

    def test_state_goes_where_the_weights_are(self):
        here = weights([(3, 3), (4,)])
        there = [nn.Parameter(p.detach().to("meta")) for p in here]
        optimizer, elsewhere = (
            Muon([{"params": [m]}, {"params": [v], "kind": "adamw"}]) for m, v in (here, there)
        )
        give(here, 0)
        optimizer.step()
        elsewhere.load_state_dict(optimizer.state_dict())
        kept = [value for state in elsewhere.state.values() for value in state.values()]
        assert len(kept) == 1 + 3
        assert {(value.device.type, value.dtype) for value in kept} == {("meta", torch.float32)}


class TestGroups:
    @pytest.mark.parametrize("attention_type", ["mha", "mla", "kernel"])
    @pytest.mark.parametrize("tied", [True, False])
    def test_each_parameter_once_by_its_kind(self, tied, attention_type):
        rack = rack_of(tie_embeddings=tied, attention_type=attention_type, freeze_up_proj=True)
        optimizer = create_optimizer(rack, CONFIG)
        found = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        assert len(found) == sum(len(group["params"]) for group in optimizer.param_groups)
        assert found.keys() == {id(p) for p in rack.parameters() if p.requires_grad}
        for name, p in rack.named_parameters():
            if p.requires_grad:
                group = found[id(p)]
                assert group["kind"] == ("muon" if name.startswith("stacks") and p.ndim == 2 else "adamw")
                decays = p.ndim == 2 and p is not rack.embedding.weight
                assert group["weight_decay"] == (0.1 if decays else 0.0), name
                assert (group["lr"], group["lr_multiplier"]) == (1e-2, 1.0)
                assert group["kind"] == "adamw" or (len(group["rows"]) == 3) == (".qkv." in name)

    def test_settings_of_a_stack(self):
        rack = rack_of()
        config = CONFIG.model_copy(update={"per_stack": {1: StackOptimizerConfig(lr=1e-3, weight_decay=0.5)}})
        of = {id(p): group for group in create_optimizer(rack, config).param_groups for p in group["params"]}
        for name, p in rack.named_parameters():
            if p.ndim == 2 and p is not rack.embedding.weight:
                lr, decay = (1e-3, 0.5) if name.startswith("stacks.1.") else (1e-2, 0.1)
                group = of[id(p)]
                assert (group["kind"], group["weight_decay"]) == ("muon", decay)
                assert group["lr_multiplier"] * config.lr == pytest.approx(group["lr"]) == pytest.approx(lr)

    def test_a_wide_mup_rack_moves_as_its_base(self):
        """Yang et al. 2023, condition 1: the spectral norm of an update does not depend on width."""
        norms = {}
        for width in (16, 64):
            rack = rack_of(d_model=width, d_ff=2 * width)
            initialize_rack(rack, "mup", base_width=16)
            optimizer = create_optimizer(rack, CONFIG.model_copy(update={"weight_decay": 0.0}))
            before = {name: p.detach().clone() for name, p in rack.named_parameters()}
            give(list(rack.parameters()), 0)
            optimizer.step()
            norms[width] = {
                name: torch.linalg.matrix_norm(p - before[name], 2).item()
                for name, p in rack.named_parameters()
                if name.startswith("stacks") and p.ndim == 2 and ".qkv." not in name
            }
        for name, norm in norms[64].items():
            # A factor of 2 would be missing without the root, and be too much without its own rate.
            assert norm == pytest.approx(norms[16][name], rel=0.3), name

    def test_stacks_come_and_go(self):
        rack = rack_of()
        optimizer = create_optimizer(rack, CONFIG)
        backward(rack)
        optimizer.step()
        stack = remove_stack(rack, 0, optimizer)
        append_stack(rack, stack, optimizer)
        kinds = {id(p): group["kind"] for group in optimizer.param_groups for p in group["params"]}
        assert kinds.keys() == {id(p) for p in rack.parameters()}
        assert {kinds[id(p)] for p in stack.parameters() if p.ndim == 2} == {"muon"}
        backward(rack)
        optimizer.step()

    @pytest.mark.parametrize("kind", ["adamw", "muon"])
    def test_a_new_one_for_the_rack_takes_its_state(self, kind):
        config = OptimizerConfig(kind=kind, lr=1e-2, weight_decay=0.1)
        rack = rack_of(tie_embeddings=False)
        optimizer = create_optimizer(rack, config)
        for operation in (None, prepend_stack, append_stack):
            if operation is not None:
                operation(rack, rack_of().get_stack(0), optimizer)
            backward(rack)
            optimizer.step()
            optimizer.zero_grad()
        twin = copy.deepcopy(rack)
        other = create_optimizer(twin, config)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for each, its in ((rack, optimizer), (twin, other)):
            backward(each, seed=1)
            its.step()
        assert all(map(torch.equal, rack.parameters(), twin.parameters()))

    @pytest.mark.parametrize(
        "attention, joins",
        [
            ({}, True),
            ({"qkv_bias": True}, True),
            ({"n_kv_heads": 4}, False),
            ({"attention_type": "mla", "latent": LATENT}, True),
        ],
    )
    def test_a_stack_of_another_attention(self, attention, joins):
        """What fits no group by the rows of its maps is refused; what is of one map joins others of one."""
        rack = rack_of(n_kv_heads=2)
        optimizer = create_optimizer(rack, CONFIG)
        stack = rack_of(**{"n_kv_heads": None if "latent" in attention else 2, **attention}).get_stack(0)
        if not joins:
            with pytest.raises(ValueError, match=r"no group for attention\.qkv\.weight"):
                append_stack(rack, stack, optimizer)
            assert len(rack.stacks) == 2
            return
        append_stack(rack, stack, optimizer)
        backward(rack)
        optimizer.step()
        of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        for name, p in stack.named_parameters():
            assert of[id(p)]["kind"] == ("muon" if p.ndim == 2 else "adamw")
            assert p.ndim < 2 or of[id(p)]["rows"] == ((16, 8, 8) if "qkv" in name else ())

    def test_groups_of_ones_own(self):
        """The same weight of another Stack says what this one is for, whatever is usual."""
        rack = rack_of()
        matrices = [p for n, p in rack.named_parameters() if ".up." in n or ".down." in n]
        others = [p for p in rack.parameters() if not any(p is m for m in matrices)]
        optimizer = Muon([{"params": matrices}, {"params": others, "kind": "adamw"}], lr=1e-2)
        stack = rack_of().get_stack(0)
        append_stack(rack, stack, optimizer)
        of = {id(p): group["kind"] for group in optimizer.param_groups for p in group["params"]}
        for name, p in stack.named_parameters():
            assert of[id(p)] == ("muon" if ".up." in name or ".down." in name else "adamw")

    def test_groups_come_in_the_same_order_whichever_stack_is_first(self):
        rack = rack_of(n_kv_heads=2)
        optimizer = create_optimizer(rack, CONFIG)
        prepend_stack(rack, rack_of(attention_type="mla", latent=LATENT).get_stack(0), optimizer)
        backward(rack)
        optimizer.step()
        other = create_optimizer(rack, CONFIG)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for p in rack.parameters():
            assert same_state(optimizer.state[p], other.state[p])

    @pytest.mark.parametrize("tied", [True, False])
    def test_matrices_are_never_taken_for_something_else(self, tied):
        rack = rack_of(tie_embeddings=tied)
        for stack in rack.stacks:
            stack.freeze()
        optimizer = create_optimizer(rack, CONFIG)
        groups = list(optimizer.param_groups)
        optimizer.param_groups[:] = [group for group in groups if group["params"]]
        with pytest.raises(ValueError, match="no group for attention"):
            unfreeze_stack(rack, 0, optimizer)
        assert not any(p.requires_grad for p in rack.stacks.parameters())
        optimizer.param_groups[:] = groups
        unfreeze_stack(rack, 0, optimizer)
        for group in groups:
            assert all((group["kind"] == "muon") == (id(p) in block_matrices(rack)) for p in group["params"])


class TestRefused:
    @pytest.mark.parametrize(
        "group, message",
        [
            ({"params": weights([(3,)])}, r"params: got \(3,\); allowed: matrices, for kind='muon'"),
            (
                {"params": weights([(4, 3)]), "rows": (2, 1)},
                r"rows: got \(2, 1\); allowed: .*4 rows together",
            ),
            ({"params": weights([(4, 3)]), "kind": "sgd"}, r"kind: got 'sgd'; allowed: 'muon', 'adamw'"),
        ],
    )
    def test_groups(self, group, message):
        optimizer = Muon(weights([(2, 2)]))
        with pytest.raises(ValueError, match=message):
            optimizer.add_param_group(group)
        assert len(optimizer.param_groups) == 1

    def test_with_masters(self):
        rack = rack_of()
        with pytest.raises(ValueError, match=r"training.optimizer.kind: got 'muon'; .*'bf16_weights'"):
            create_optimizer(rack, CONFIG, masters=True)
        assert {p.dtype for p in rack.parameters()} == {torch.float32}

    def test_a_model_without_blocks(self):
        with pytest.raises(ValueError, match=r"training.optimizer.kind: got 'muon'; .*without a Block"):
            create_optimizer(nn.Linear(3, 3), CONFIG)


@contextmanager
def processes(rank, count, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    try:
        yield init_device_mesh("cpu", (count,))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def differences(kind, mesh):
    """How far weights in shards are from whole ones after four steps, and the step counts of AdamW."""
    rack = rack_of()
    twin = copy.deepcopy(rack)
    for module in (*(m for m in rack.modules() if isinstance(m, Block)), rack):
        fully_shard(module, mesh=mesh)
    both = [(model, create_optimizer(model, OptimizerConfig(kind=kind, lr=1e-2))) for model in (rack, twin)]
    for step in range(4):
        for model, optimizer in both:
            backward(model, step)
            # Plain scalars, though the parameters are none.
            optimizer.grad_scale = torch.tensor(2.0)
            optimizer.found_inf = torch.tensor(float(step == 1))
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(rack.parameters(), twin.parameters(), strict=True)
    far = max((p.full_tensor() - q).abs().max().item() for p, q in pairs)
    return far, {state["step"].item() for state in both[0][1].state.values() if "step" in state}


def of_one_process(rank, count, store):
    if count > 1:
        torch.set_num_threads(1)
    with processes(rank, count, store) as mesh:
        for kind in ("adamw", "muon"):
            far, counts = differences(kind, mesh)
            # Of three steps of 1e-2 each.
            assert far < 1e-4, (kind, far)
            assert counts == {3.0}, kind


def test_weights_in_one_shard_move_as_whole_ones(tmp_path):
    of_one_process(0, 1, tmp_path / "store")


@pytest.mark.slow
def test_weights_in_two_shards_move_as_whole_ones(tmp_path):
    torch.multiprocessing.spawn(of_one_process, (2, tmp_path / "store"), nprocs=2)
