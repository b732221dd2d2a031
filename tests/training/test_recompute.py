"""Recomputation: the same gradients to the bit, less held between the passes, and everything put back."""

import copy
import inspect
from collections import Counter
from fnmatch import fnmatchcase

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from bench.recompute import bytes_held
from stackwise import create_simple_rack
from stackwise.config import RecomputeConfig
from stackwise.model.backend import using
from stackwise.model.block import Block
from stackwise.training.recompute import _policy, find_layers, recomputing

KINDS = {
    "full": {"kind": "full"},
    "every_nth": {"kind": "every_nth", "every": 2},
    "selective": {"kind": "selective"},
    "by_name": {"kind": "by_name", "names": ["*.attention", "*.feedforward"]},
    "by_name_stacks": {"kind": "by_name", "names": ["stacks.?"]},
}
ATTENTION = {
    "full": {"n_kv_heads": 1},
    "post_norm": {"norm_position": "post"},
    "window": {"sliding_window": 3},
    "bidirectional": {"attention_mode": "bidirectional"},
    "favor": {"attention_type": "kernel", "kernel": {"feature_map": "favor", "n_features": 8}},
    "elu": {"attention_type": "kernel", "kernel": {"feature_map": "elu"}},
    "latent": {
        "attention_type": "mla",
        "latent": {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 8},
    },
}
B, T, V = 2, 12, 31


def configured(**options):
    return RecomputeConfig.from_dict(options)


def make_rack(n_stacks=2, n_blocks=2, **options):
    torch.manual_seed(3)
    sizes = {"d_model": 16, "d_ff": 32, "n_heads": 2, "vocab_size": V}
    return create_simple_rack(n_stacks, n_blocks, **{**sizes, **options}).train()


def token_ids():
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(5))


def gradients(model, loss):
    """Of equal random states."""
    model.zero_grad()
    torch.manual_seed(11)
    loss(model).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        if gradient is None:
            assert found[name] is None, name
        else:
            assert torch.equal(found[name], gradient), name
    assert any(gradient is not None and gradient.any() for gradient in wanted.values())


def rack_loss(model, **inputs):
    return model(token_ids(), **inputs).logsumexp(-1).square().mean()


def padding():
    mask = torch.ones(B, T, dtype=torch.long)
    mask[0, 9:] = 0
    mask[1, :2] = 0
    return mask


INPUTS = {
    "plain": {},
    "padded": {"attention_mask": padding()},
    "packed": {"document_ids": torch.tensor([[0] * 5 + [1] * 7, [4] * 8 + [2] * 4])},
}


@pytest.mark.parametrize("given_inputs", INPUTS)
@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_the_same_to_the_bit(kind, attention, given_inputs):
    rack, inputs = make_rack(**ATTENTION[attention], dropout=0.2), INPUTS[given_inputs]
    wanted = gradients(rack, lambda model: rack_loss(model, **inputs))
    with recomputing(rack, configured(**KINDS[kind])):
        assert_same(gradients(rack, lambda model: rack_loss(model, **inputs)), wanted)


@pytest.mark.parametrize("backend", ["sliced", "math"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_the_same_with_each_backend(kind, backend):
    rack = make_rack(softcap=None, dropout=0.1)
    with using(backend):
        wanted = gradients(rack, rack_loss)
        with recomputing(rack, configured(**KINDS[kind])):
            assert_same(gradients(rack, rack_loss), wanted)


@pytest.mark.parametrize("attention", ["full", "favor"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_the_same_under_autocast(kind, attention):
    rack = make_rack(**ATTENTION[attention], dropout=0.1)

    def loss(model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return rack_loss(model)

    wanted = gradients(rack, loss)
    assert any(not torch.equal(g, wanted[n]) for n, g in gradients(rack, rack_loss).items())
    with recomputing(rack, configured(**KINDS[kind])):
        assert_same(gradients(rack, loss), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_the_same_behind_a_frozen_prefix(kind):
    rack = make_rack(dropout=0.1)
    rack.embedding.requires_grad_(False)
    rack.get_stack(0).freeze()
    wanted = gradients(rack, rack_loss)
    assert wanted["stacks.0.blocks.0.attention.out.weight"] is None
    with recomputing(rack, configured(**KINDS[kind])):
        assert_same(gradients(rack, rack_loss), wanted)


def test_the_random_state_afterwards_is_that_of_one_run():
    rack = make_rack(dropout=0.3)
    gradients(rack, rack_loss)
    wanted = torch.rand(3)
    with recomputing(rack, configured(kind="full")):
        gradients(rack, rack_loss)
        assert torch.equal(torch.rand(3), wanted)


class Counting:
    """How often each module's class runs its forward."""

    def __init__(self, monkeypatch, *kinds):
        self.calls = Counter()
        for kind in kinds:
            monkeypatch.setattr(kind, "forward", self.counted(kind.forward))

    def counted(self, forward):
        def counting(module, *args, **kwargs):
            self.calls[module] += 1
            return forward(module, *args, **kwargs)

        counting.__signature__ = inspect.signature(forward)
        return counting


@pytest.mark.parametrize(
    "options, twice",
    [
        ({"kind": "none"}, []),
        ({"kind": "full"}, [0, 1, 2, 3, 4]),
        ({"kind": "selective"}, [0, 1, 2, 3, 4]),
        ({"kind": "every_nth", "every": 1}, [0, 1, 2, 3, 4]),
        ({"kind": "every_nth", "every": 2}, [0, 2, 4]),
        ({"kind": "every_nth", "every": 3}, [0, 3]),
        ({"kind": "every_nth", "every": 9}, [0]),
        ({"kind": "by_name", "names": ["*.blocks.1", "*.3"]}, [1, 3]),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_a_chosen_block_runs_once_more_and_no_other(options, twice, monkeypatch):
    counting = Counting(monkeypatch, Block)
    rack = make_rack(1, 5)
    blocks = [rack.get_stack(0).get_block(i) for i in range(5)]
    with recomputing(rack, configured(**options)) as names:
        loss = rack_loss(rack)
        assert [counting.calls[block] for block in blocks] == [1] * 5
        loss.backward()
    assert [i for i, block in enumerate(blocks) if counting.calls[block] == 2] == twice
    assert names == [f"stacks.0.blocks.{i}" for i in twice]


def test_nothing_runs_again_without_gradients_or_in_eval_mode(monkeypatch):
    counting = Counting(monkeypatch, Block)
    rack = make_rack(1, 1)
    with recomputing(rack, configured(kind="full")), torch.no_grad():
        rack_loss(rack)
    rack.embedding.requires_grad_(False)
    with recomputing(rack.eval(), configured(kind="full")):
        rack_loss(rack).backward()  # the head has a gradient, and what enters the Block has none
    assert set(counting.calls.values()) == {2}
    rack.embedding.requires_grad_(True)
    with recomputing(rack, configured(kind="full")):
        rack_loss(rack).backward()
    assert set(counting.calls.values()) == {4}


def saved_bytes(call):
    """Bytes of distinct storages that autograd saves during a call, its inputs and parameters included."""
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        kept.append(tensor)
        return tensor

    kept = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = call()
    assert result.requires_grad
    return sum(storages.values())


def of_blocks(rack, x_BTC):
    """What one pass through the only Stack holds, beyond its input and its weights."""
    parameters = sum(p.nbytes for p in rack.get_stack(0).parameters())
    return saved_bytes(lambda: rack.get_stack(0)(x_BTC)) - parameters - x_BTC.nbytes


@pytest.mark.parametrize("attention", ATTENTION)
def test_full_saves_what_the_blocks_are_given_and_nothing_else(attention):
    rack = make_rack(1, 4, **ATTENTION[attention])
    x_BTC = torch.randn(B, T, 16, requires_grad=True)
    parameters = sum(p.nbytes for p in rack.get_stack(0).parameters())
    with recomputing(rack, configured(kind="full")):
        # Blocks save no weight either: it is where it was. The first Block's input is x itself.
        assert of_blocks(rack, x_BTC) + parameters == 3 * B * T * 16 * 4
    with recomputing(rack, configured(kind="every_nth", every=2)):
        half = saved_bytes(lambda: rack.get_stack(0)(x_BTC))
    whole = saved_bytes(lambda: rack.get_stack(0)(x_BTC))
    # x, one input of a recomputed Block, and two Blocks as they are, which hold equal parts each.
    assert 0.4 * whole < half < 0.6 * whole + 2 * x_BTC.nbytes


def held(rack):
    x_BTC = torch.randn(B, T, 16, requires_grad=True)
    return bytes_held(lambda: rack.get_stack(0)(x_BTC))


def test_memory_held_is_what_each_kind_promises():
    n_blocks, width, ff = 4, 16, 32
    rack = make_rack(1, n_blocks, d_model=width, d_ff=ff, n_heads=2)
    found = {}
    for name, options in {"none": {"kind": "none"}, **KINDS}.items():
        with recomputing(rack, configured(**options)):
            found[name] = held(rack)
    token = B * T * 4
    # The output of the Stack itself, and what the first Block leaves in the Layout: positions and tables.
    rest = token * width + 8 * T + 2 * T * (width // 2 // 2) * 4
    assert found["full"] == (n_blocks - 1) * token * width + rest
    # Of each Block: q, k, v, attention with a logarithm of a sum for each head, out, gate, up, down.
    products = token * (6 * width + 2 + 2 * ff)
    assert found["selective"] == n_blocks * products + (n_blocks - 1) * token * width + rest
    assert found["by_name_stacks"] == token * width  # its Layout is made within it
    assert found["full"] < found["every_nth"] < found["none"]
    assert found["full"] < found["by_name"] < found["none"]
    assert found["full"] < found["selective"] < found["none"]


@pytest.mark.parametrize(
    "operation, keeps",
    [
        (torch.ops.aten.mm.default, True),
        (torch.ops.aten.addmm.default, True),
        (torch.ops.aten.bmm.default, True),
        (torch.ops.aten.mul.Tensor, False),
        (torch.ops.aten.native_dropout.default, False),
        (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, True),
        (torch.ops.aten._scaled_dot_product_efficient_attention.default, True),
        (torch.ops.higher_order.flex_attention, True),
    ],
    ids=lambda value: value.name() if hasattr(value, "name") else None,
)
def test_what_selective_keeps(operation, keeps):
    wanted = CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE
    assert _policy(None, operation) == wanted


def test_attention_that_draws_random_numbers_is_not_kept():
    # The dropout after it would otherwise draw other numbers the second time.
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    assert _policy(None, flash, None, None, None, 0.0) == CheckpointPolicy.MUST_SAVE
    assert _policy(None, flash, None, None, None, 0.1) == CheckpointPolicy.PREFER_RECOMPUTE
    assert _policy(None, flash, None, None, None, dropout_p=0.1) == CheckpointPolicy.PREFER_RECOMPUTE


def tiny_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        attention_dropout=0.1,
    )
    return LlamaForCausalLM(config).train()


def encoder():
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
    return nn.TransformerEncoder(layer, 3).train()


def encoder_loss(model):
    x_BTC = torch.randn(B, T, 16, generator=torch.Generator().manual_seed(1))
    return model(x_BTC, src_key_padding_mask=padding() == 0).square().mean()


def llama_loss(model):
    return model(token_ids(), attention_mask=padding(), labels=token_ids(), use_cache=False).loss


OTHERS = {"llama": (tiny_llama, llama_loss, 3), "encoder": (encoder, encoder_loss, 3)}


@pytest.mark.parametrize("kind", ["full", "every_nth", "selective"])
@pytest.mark.parametrize("name", OTHERS)
def test_models_of_others(name, kind):
    build, loss, n_layers = OTHERS[name]
    model = build()
    wanted = gradients(model, loss)
    with recomputing(model, configured(**KINDS[kind])) as names:
        assert len(names) == (2 if kind == "every_nth" else n_layers)
        assert_same(gradients(model, loss), wanted)


def test_memory_of_others_falls():
    model = tiny_llama()
    before = bytes_held(lambda: llama_loss(model))
    with recomputing(model, configured(kind="full")):
        assert bytes_held(lambda: llama_loss(model)) < 0.5 * before


def test_a_cache_that_would_be_written_twice_is_refused():
    model = tiny_llama()
    with recomputing(model, configured(kind="full")):
        with pytest.raises(
            ValueError, match=r"^(past_key_values|cache): got DynamicCache; allowed: None .*use_cache"
        ):
            model(token_ids())
        with torch.no_grad():
            model(token_ids())
    rack = make_rack(1, 1)
    cache = rack.new_cache(B, T)
    with recomputing(rack, configured(kind="full")):
        with pytest.raises(ValueError, match=r"^cache: got SlotCache"):
            rack(token_ids(), cache=cache)
        with pytest.raises(ValueError, match=r"^cache: got SlotCache"):
            rack.get_stack(0).get_block(0)(torch.randn(B, T, 16), None, None, cache.blocks[0][0])


@pytest.mark.parametrize("name", ["cache", "kv", "layer_kv_cache", "past"])
def test_cache_of_any_usual_name_is_refused(name):
    class Layer(nn.Linear):
        def forward(self, x, **options):
            return super().forward(x)

    model, x = nn.Sequential(Layer(4, 4), Layer(4, 4)), torch.randn(2, 4)
    with recomputing(model, configured(kind="full")):
        with pytest.raises(ValueError, match=f"^{name}: got list; allowed: None"):
            model[0](x, **{name: []})
        model[0](x, **{name: None, "use_cache": True, "cache_length": 3})


class Pair(nn.Module):
    """Takes and returns what is no tensor."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x, names, *, scale=1.0, extra=None):
        assert names == ["a"]
        y = self.linear(x).tanh() * scale
        return {"y": y if extra is None else y + extra["z"], "names": names}


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.Sequential(Pair(4), Pair(4))

    def forward(self, x, z):
        for part in self.parts:
            result = part(x, ["a"], scale=2.0, extra={"z": z})
            x = result["y"]
        assert result["names"] == ["a"]
        return x


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_arguments_and_results_of_any_kind(kind):
    model, x, z = Pairs(), torch.randn(3, 4), torch.randn(3, 4, requires_grad=True)

    def loss(model):
        z.grad = None
        return model(x, z).square().sum()

    wanted, wanted_z = gradients(model, loss), z.grad
    with recomputing(model, configured(kind=kind)) as names:
        assert names == ["parts.0", "parts.1"]
        assert_same(gradients(model, loss), wanted)
    assert torch.equal(z.grad, wanted_z)


# What is found, and what is refused.


class Repeated(nn.Module):
    def __init__(self, *containers):
        super().__init__()
        self.containers = nn.ModuleList(containers)


def linears(count, width):
    return [nn.Linear(width, width) for _ in range(count)]


def test_layers_are_blocks_or_the_largest_group_of_one_class():
    rack = make_rack(2, 3)
    assert find_layers(rack) == [rack.get_stack(i).get_block(j) for i in range(2) for j in range(3)]
    llama = tiny_llama()
    assert find_layers(llama) == list(llama.model.layers)
    mixed = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    small, large = nn.ModuleList(nn.LayerNorm(2) for _ in range(9)), nn.ModuleList(linears(2, 8))
    assert find_layers(Repeated(mixed, small, large)) == list(large)
    both = Repeated(nn.ModuleList(linears(2, 8)), nn.Sequential(*linears(3, 8)))
    assert find_layers(both) == [*both.containers[0], *both.containers[1]]


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU())])
def test_no_layers_is_an_error_that_says_what_to_pass(model):
    with (
        pytest.raises(ValueError, match=r"^layers: \w+ has no nn.ModuleList .*allowed: a sequence"),
        recomputing(model, configured(kind="full")),
    ):
        pass


def test_layers_can_be_given():
    rack = make_rack(2, 2)
    layers = [rack.get_stack(1), rack.get_stack(0)]
    wanted = gradients(rack, rack_loss)
    with recomputing(rack, configured(kind="every_nth", every=2), layers) as names:
        assert names == ["stacks.1"]
        assert_same(gradients(rack, rack_loss), wanted)


def test_layers_of_another_model_are_refused():
    rack = make_rack(1, 2)
    for layers, message in [
        ([], r"^layers: got \[\]; allowed: at least one"),
        ([nn.Linear(2, 2)], r"^layers: got 'Linear'; allowed: modules of the model$"),
        ([rack.stacks[0], rack.stacks[0].blocks[0]], r"^layers: got 'stacks.0.blocks.0'; allowed: .*no part"),
        ([rack.stacks], r"^recompute: got 'stacks, a ModuleList'; allowed: modules that are called$"),
    ]:
        with pytest.raises(ValueError, match=message), recomputing(rack, configured(kind="full"), layers):
            pass
        assert not replaced(rack)


def test_running_statistics_are_refused():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    with (
        pytest.raises(ValueError, match=r"^recompute: got '0.1, a BatchNorm1d'; allowed: .*running stat"),
        recomputing(model, configured(kind="full")),
    ):
        pass
    still = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False)))
    with recomputing(still, configured(kind="full")) as names:
        assert names == ["0"]


def test_a_pattern_that_matches_nothing_names_what_is_near():
    rack = make_rack(1, 1)
    with (
        pytest.raises(
            ValueError, match=r"^recompute.names: '\*.atention' matches no .*'stacks.0.blocks.0.attention'"
        ),
        recomputing(rack, configured(kind="by_name", names=["*.feedforward", "*.atention"])),
    ):
        pass
    assert not replaced(rack)


def test_a_list_is_no_module_that_is_called():
    with (
        pytest.raises(ValueError, match=r"^recompute.names: 'stacks' matches no"),
        recomputing(make_rack(1, 1), configured(kind="by_name", names=["stacks"])),
    ):
        pass


RACK = make_rack(2, 2)
NAMES = [name for name, module in RACK.named_modules() if name and not isinstance(module, nn.ModuleList)]


@settings(max_examples=40)
@given(
    st.lists(
        st.sampled_from(NAMES).flatmap(
            lambda name: st.sampled_from([name, f"*{name[-6:]}", f"{name[:6]}*", name.replace("0", "?")])
        ),
        min_size=1,
        max_size=3,
    )
)
def test_any_patterns_give_the_same_gradients(patterns):
    wanted = gradients(RACK, rack_loss)
    with recomputing(RACK, configured(kind="by_name", names=patterns)) as names:
        assert_same(gradients(RACK, rack_loss), wanted)
    matched = {name for name in NAMES if any(fnmatchcase(name, pattern) for pattern in patterns)}
    # Every matched module is recomputed, by itself or as a part of one, and nothing twice.
    assert set(names) <= matched
    for name in matched:
        assert sum(name == outer or name.startswith(f"{outer}.") for outer in names) == 1


def test_a_module_with_two_names_is_found_by_either():
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict({"first": nn.Sequential(shared), "second": shared})
    for pattern in ("first.0", "second"):
        with recomputing(model, configured(kind="by_name", names=[pattern])) as names:
            assert names == ["first.0"]
            assert replaced(model) == ["first.0"]


# Everything as it was.


def replaced(model):
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


@pytest.mark.parametrize("kind", [*KINDS, "budget"])
def test_everything_is_put_back(kind):
    options = KINDS.get(kind, {"kind": "budget"})
    rack = make_rack()
    before = {name: dict(vars(module)) for name, module in rack.named_modules()}
    weights, classes = list(rack.state_dict()), [type(module) for module in rack.modules()]
    settings_before = compiler_settings()
    for error in (None, KeyError):
        try:
            with recomputing(rack, configured(**options)):
                assert replaced(rack)
                assert list(rack.state_dict()) == weights
                assert [type(module) for module in rack.modules()] == classes
                assert compiler_settings() != settings_before
                if error:
                    raise error
        except KeyError:
            pass
        assert {name: dict(vars(module)) for name, module in rack.named_modules()} == before
        assert compiler_settings() == settings_before


def compiler_settings():
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch

    return dynamo.skip_fwd_side_effects_in_bwd_under_checkpoint, functorch.activation_memory_budget


def test_what_others_put_on_the_instance_runs_and_stays():
    model = nn.Sequential(*linears(2, 4))
    plain, calls = model[0].forward, []

    def theirs(x):
        calls.append(x)
        return plain(x)

    model[0].forward = theirs
    x = torch.randn(3, 4)
    wanted = gradients(model, lambda model: model(x).square().sum())
    with recomputing(model, configured(kind="full")):
        calls.clear()
        assert_same(gradients(model, lambda model: model(x).square().sum()), wanted)
        assert len(calls) == 2
    assert vars(model[0])["forward"] is theirs


def test_a_second_use_within_is_refused():
    rack = make_rack(1, 2)
    with recomputing(rack, configured(kind="every_nth", every=2)):
        for model in (rack, rack.get_stack(0)):
            with (
                pytest.raises(
                    ValueError, match=r"^recompute: got '[\w.]+'; allowed: a model that is not recomp"
                ),
                recomputing(model, configured(kind="full")),
            ):
                pass
        assert replaced(rack) == ["stacks.0.blocks.0"]
    with recomputing(rack, configured(kind="full")) as names:
        assert len(names) == 2


def test_recomputation_within_recomputed_modules_of_others_is_right():
    rack = make_rack(1, 2, dropout=0.1)
    wanted = gradients(rack, rack_loss)
    stack = rack.get_stack(0)
    with recomputing(stack.get_block(0), configured(kind="by_name", names=["attention", "feedforward"])):
        outer = torch.utils.checkpoint.checkpoint

        def loss(model):
            x_BTC = outer(stack, model.embed(token_ids()), use_reentrant=False)
            return model.head(x_BTC).logsumexp(-1).square().mean()

        assert_same(gradients(rack, loss), wanted)


def test_hooks_run_once_and_signatures_stay():
    rack, calls = make_rack(1, 1), Counter()
    block = rack.get_stack(0).get_block(0)
    block.register_forward_pre_hook(lambda *_: calls.update(["before"]))
    block.register_forward_hook(lambda *_: calls.update(["after"]))
    block.register_full_backward_hook(lambda *_: calls.update(["backward"]))
    signature = inspect.signature(block.forward)
    with recomputing(rack, configured(kind="full")):
        assert inspect.signature(block.forward) == signature
        rack_loss(rack).backward()
    assert calls == {"before": 1, "after": 1, "backward": 1}


def test_a_copy_computes_with_its_own_weights():
    rack = make_rack(1, 2)
    with recomputing(rack, configured(kind="full")):
        twin = copy.deepcopy(rack)
        with torch.no_grad():
            for p in rack.parameters():
                p.zero_()
        found = gradients(twin, rack_loss)
    assert_same(found, gradients(make_rack(1, 2), rack_loss))


# The compiler.


def test_budget_uncompiled_is_refused():
    rack = make_rack(1, 1)
    with recomputing(rack, configured(kind="budget", budget=0.5)) as names:
        assert names == []
        with pytest.raises(
            ValueError, match=r"^recompute: got 'budget 0.5'; allowed: under torch.compile only"
        ):
            rack_loss(rack)
        with torch.no_grad():
            rack_loss(rack)
        rack_loss(rack.eval())
    linear = nn.Linear(2, 2)
    with recomputing(linear, configured(kind="budget")), pytest.raises(ValueError, match="compile only"):
        linear(torch.randn(2))


# Graphs are cut in two as the default compiler cuts them, and run as they are: no code is generated.
PARTITIONED = "aot_eager_decomp_partition"


def compiled_loss(backend=PARTITIONED):
    ids, mask = token_ids(), padding()

    def loss(model):
        return model(ids, mask).logsumexp(-1).square().mean()

    return torch.compile(loss, fullgraph=True, dynamic=False, backend=backend)


def assert_close(found, wanted):
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "kind", [kind if kind == "full" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_compiled_gradients_agree_and_less_is_saved(kind):
    torch._dynamo.reset()
    rack = make_rack(1, 2)
    wanted = gradients(rack, lambda model: rack_loss(model, attention_mask=padding()))
    loss = compiled_loss()
    whole = saved_bytes(lambda: loss(rack))
    # What is compiled already is compiled anew, for the time being.
    with recomputing(rack, configured(**KINDS[kind])):
        assert_close(gradients(rack, loss), wanted)
        assert saved_bytes(lambda: loss(rack)) < 0.9 * whole
    assert saved_bytes(lambda: loss(rack)) == whole


@pytest.mark.slow
def test_a_smaller_budget_saves_less_and_gives_the_same_gradients():
    torch._dynamo.reset()
    rack, loss = make_rack(1, 2), compiled_loss()
    wanted = gradients(rack, lambda model: rack_loss(model, attention_mask=padding()))
    saved = []
    for budget in (1.0, 0.5, 0.0):
        with recomputing(rack, configured(kind="budget", budget=budget)):
            assert_close(gradients(rack, loss), wanted)
            saved.append(saved_bytes(lambda: loss(rack)))
    assert saved[0] > saved[1] > saved[2]


@pytest.mark.slow
def test_one_compiled_function_is_compiled_once_for_each_kind():
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    rack, loss, saved = make_rack(1, 2), compiled_loss(), {}
    for _ in range(2):
        for kind in ("full", "selective", "every_nth"):
            with recomputing(rack, configured(**KINDS[kind])):
                saved.setdefault(kind, set()).add(saved_bytes(lambda: loss(rack)))
        for budget in (0.0, 1.0):
            with recomputing(rack, configured(kind="budget", budget=budget)):
                saved.setdefault(budget, set()).add(saved_bytes(lambda: loss(rack)))
    assert all(len(found) == 1 for found in saved.values())
    assert len(set.union(*saved.values())) == 5
    assert counters["stats"]["unique_graphs"] == 5


@pytest.mark.slow
def test_gradients_agree_with_generated_code():
    torch._dynamo.reset()
    rack = make_rack(1, 2)
    wanted = gradients(rack, lambda model: rack_loss(model, attention_mask=padding()))
    with recomputing(rack, configured(kind="full")):
        assert_close(gradients(rack, compiled_loss("inductor")), wanted)
