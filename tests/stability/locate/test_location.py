"""A fault in every module, forward and backward, and places that are no module: each is named exactly."""

import math
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from stackwise.stability.locate import Location, ModuleScales, locate
from stackwise.stability.locate.reading import Readings

IDS = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])
ROOT = "(outside the submodules)"


class Bent(torch.autograd.Function):
    """Itself, with a gradient that `bend` has changed."""

    @staticmethod
    def forward(ctx, x, bend):
        ctx.bend = bend
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.bend(gradient), None


def one(value):
    """The last element becomes `value`."""

    def change(tensor):
        tensor = tensor.clone()
        tensor[(-1,) * tensor.ndim] = value
        return tensor

    return change


def times(factor):
    return lambda tensor: tensor * factor


def first_tensor(output, change):
    """The output with its first tensor changed."""
    if isinstance(output, torch.Tensor):
        return change(output) if output.is_floating_point() else output
    if isinstance(output, tuple):
        items = (first_tensor(output[0], change), *output[1:])
        return type(output)(*items) if hasattr(output, "_fields") else items
    if isinstance(output, dict):
        name = next(iter(output))
        output[name] = first_tensor(output[name], change)
    return output


class Broken:
    """A module whose output, or the gradient on its way back through it, is changed; says whether it was."""

    def __init__(self, module, direction, change, only=None):
        self.module, self.direction, self.change, self.only = module, direction, change, only
        self.calls, self.acted = 0, False

    def __enter__(self):
        self.handle = self.module.register_forward_hook(self.hook)
        return self

    def __exit__(self, *error):
        self.handle.remove()

    def hook(self, module, arguments, output):
        self.calls += torch._C._current_graph_task_id() == -1
        return output if self.only not in (None, self.calls) else first_tensor(output, self.bend)

    def bend(self, tensor):
        if self.direction == "forward":
            self.acted = True
            return self.change(tensor)
        return Bent.apply(tensor, self.noted) if tensor.requires_grad else tensor

    def noted(self, gradient):
        self.acted = True
        return self.change(gradient)


def module_of(model, name):
    return model if name == ROOT else model.get_submodule(name)


def step_of(model, inputs=IDS):
    """A training step on `inputs`; dropout and the like are the same each time."""

    def run():
        model.zero_grad()
        output = model(inputs)
        output = getattr(output, "logits", output)
        if inputs.is_floating_point():
            loss = output.square().mean()
        else:
            loss = F.cross_entropy(output.flatten(0, 1), inputs.flatten())
        loss.backward()

    return run


def called(model, run):
    names = []
    handles = [
        m.register_forward_hook(lambda *_, name=n or ROOT: names.append(name))
        for n, m in model.named_modules()
    ]
    run()
    for handle in handles:
        handle.remove()
    return list(dict.fromkeys(names))


def located(model, run, ways, scales=None):
    """What was said of a fault in each module that one could be put into, and what is right."""
    found, right = {}, {}
    for name in called(model, run):
        for direction in ("forward", "backward"):
            for way, change in ways.items():
                with Broken(module_of(model, name), direction, change) as broken:
                    location = locate(model, run, scales=scales)
                if broken.acted:
                    key = name, direction, way
                    right[key] = (name, direction)
                    found[key] = location and (location.module, location.direction)
    return found, right


KINDS = {
    "full": {},
    "grouped": {"n_kv_heads": 2},
    "one kv head": {"attention_type": "mqa", "n_kv_heads": 1},
    "latent": {"attention_type": "mla"},
    "kernel": {"attention_type": "kernel"},
    "window": {"sliding_window": 3},
    "bidirectional": {"attention_mode": "bidirectional"},
    "normed": {"qk_norm": "head", "norm": "layernorm", "norm_position": "post", "tie_embeddings": False},
}


# Of the attentions that differ from the first only in what they see or share.
SLOW = ("grouped", "one kv head", "window", "bidirectional")


@pytest.mark.parametrize("value", [math.nan, pytest.param(math.inf, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if kind in SLOW else kind for kind in KINDS]
)
def test_every_module_of_the_rack(subjects, kind, value):
    torch.manual_seed(0)
    model = subjects.rack(n_stacks=1, blocks_per_stack=1, **KINDS[kind])
    run = step_of(model)
    scales = ModuleScales.observe(model, run)
    assert locate(model, run, scales=scales) is None
    found, right = located(model, run, {"one": one(value)})
    assert found == right
    assert {direction for _, direction in right.values()} == {"forward", "backward"}
    # All but containers, which are never called, and rotary tables, which hold no tensors with gradients.
    assert len(right) >= 2 * 12
    found, right = located(model, run, {"x10": times(10.0)}, scales)
    assert found == right


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "x_decoder")),
        "gru",
        "conv",
        "encoder",
    ],
)
def test_every_module_of_others(subjects, name):
    torch.manual_seed(0)
    model = getattr(subjects, name)()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    run = step_of(model, torch.randn(2, 6, 16) if name == "encoder" else IDS)
    scales = ModuleScales.observe(model, run)
    assert locate(model, run, scales=scales) is None
    found, right = located(model, run, {"nan": one(math.nan)})
    assert found == right
    assert len(right) >= 6
    found, right = located(model, run, {"x10": times(10.0)}, scales)
    assert found == right


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "bert", "x_decoder", "x_encoder", "gru", "conv", "encoder"]
)
def test_every_fault_in_every_module_of_others(subjects, name):
    torch.manual_seed(0)
    model = getattr(subjects, name)().eval()
    run = step_of(model, torch.randn(2, 6, 16) if name == "encoder" else IDS)
    scales = ModuleScales.observe(model, run)
    found, right = located(model, run, {"nan": one(math.nan), "inf": one(math.inf)})
    assert found == right
    found, right = located(model, run, {"x10": times(10.0), "x1000": times(1e3)}, scales)
    assert found == right


# Other ways in which a module's gradient may break


def backward_hook(module):
    return module.register_full_backward_hook(lambda _, gradients, __: tuple(g * math.nan for g in gradients))


def backward_pre_hook(module):
    return module.register_full_backward_pre_hook(lambda _, gradients: tuple(g * math.inf for g in gradients))


def hook_of_the_output(module):
    def hook(module, arguments, output):
        output.register_hook(times(math.nan))

    return module.register_forward_hook(hook)


def hook_of_the_weight(module):
    return module.weight.register_hook(times(math.nan))


@pytest.mark.parametrize("way", [backward_hook, backward_pre_hook, hook_of_the_output, hook_of_the_weight])
@pytest.mark.parametrize("name", ["layers.0.qkv", "layers.1.mlp.0", "layers.1.mlp.1", "norm", "head"])
def test_a_gradient_that_a_hook_breaks(subjects, way, name):
    model = subjects.tiny()
    way(model.get_submodule(name))
    location = locate(model, step_of(model))
    assert (location.module, location.direction, location.kind) == (name, "backward", "non-finite")
    assert not math.isfinite(location.value)
    assert str(location) == f"{name} (backward)"


class Root(nn.Module):
    """Finite, with an infinite slope at 0."""

    def forward(self, x):
        return x.abs().sqrt()


def test_a_slope_that_is_infinite():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), Root(), nn.Linear(3, 1))
    location = locate(model, step_of(model, torch.zeros(2, 3)))
    assert location.module == "1" and location.direction == "backward"


def test_a_module_that_overflows_in_half_precision():
    class Product(nn.Module):
        def forward(self, x):
            return (x * 600) * 600

    # Of mixed signs, so that -inf comes first where the norm makes NaN of it.
    model = nn.Sequential(nn.Identity(), Product(), nn.LayerNorm(2)).half()
    x = torch.tensor([[-1.0, 0.1], [-2.0, 0.05]], dtype=torch.float16, requires_grad=True)
    location = locate(model, step_of(model, x))
    assert (location.module, location.direction, location.value) == ("1", "forward", -math.inf)


# Modules that are called several times


class Repeated(nn.Module):
    """Layers in the order of `order`, shared where it names one twice."""

    def __init__(self, order, recompute=None):
        super().__init__()
        self.order, self.recompute = order, recompute
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        for index in self.order:
            if self.recompute is None:
                x = torch.tanh(self.layers[index](x))
            else:
                x = checkpoint(self.step, index, x, use_reentrant=self.recompute == "reentrant")
        return x

    def step(self, index, x):
        return torch.tanh(self.layers[index](x))


@settings(deadline=None, max_examples=40)
@example(order=[0, 1, 0], place=0, direction="backward", recompute="reentrant", value=math.nan)
@example(order=[2, 2, 2], place=1, direction="backward", recompute="reentrant", value=math.inf)
@given(
    order=st.lists(st.integers(0, 2), min_size=1, max_size=5),
    place=st.integers(0, 4),
    direction=st.sampled_from(["forward", "backward"]),
    recompute=st.sampled_from([None, "reentrant", "not reentrant"]),
    value=st.sampled_from([math.nan, math.inf, -math.inf]),
)
def test_the_very_call(order, place, direction, recompute, value):
    place %= len(order)
    index, call = order[place], order[: place + 1].count(order[place])
    torch.manual_seed(0)
    model = Repeated(order, recompute)
    x = torch.randn(2, 4, requires_grad=True)
    run = step_of(model, x)
    if direction == "forward":
        change = one(value)
        target = Broken(model.layers[index], "forward", change, only=call)
    else:
        # Gradients come back in the other order; which call it is, its input says.
        seen = []
        handle = model.layers[index].register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
        model(x)
        handle.remove()
        wanted = seen[call - 1]

        class AtCall(Broken):
            def hook(self, module, arguments, output):
                return first_tensor(output, self.bend) if torch.equal(arguments[0], wanted) else output

        target = AtCall(model.layers[index], "backward", one(value))
    with target as broken:
        location = locate(model, run)
    if direction == "forward" and math.isinf(value):
        # tanh hides an infinity: nothing is broken but the slope, which is 0.
        assert location is None or location.module == f"layers.{index}"
        return
    assert broken.acted
    assert (location.module, location.direction) == (f"layers.{index}", direction)
    assert location.call == call
    shown = f", call {call}" if call > 1 else ""
    assert str(location) == f"layers.{index} ({direction}{shown})"


def test_calls_of_several_micro_batches():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    inputs = [torch.ones(1, 3), torch.ones(1, 3), torch.ones(1, 3)]

    def run():
        for x in inputs:
            model(x).mean().backward()

    for direction in ("forward", "backward"):
        with Broken(model[0], direction, one(math.nan), only=2):
            assert str(locate(model, run)) == f"0 ({direction}, call 2)"


def test_the_two_uses_of_a_tied_weight(subjects):
    model = subjects.rack(n_stacks=1, blocks_per_stack=1)
    assert model.lm_head.weight is model.embedding.weight
    for name in ("embedding", "lm_head"):
        with Broken(model.get_submodule(name), "backward", one(math.nan)):
            assert str(locate(model, step_of(model))) == f"{name} (backward)"


# Outputs and operations of all forms

Pair = namedtuple("Pair", "first second")


@dataclass
class Record:
    first: torch.Tensor
    words: str = "words"


@pytest.mark.parametrize(
    ("pack", "unpack"),
    [
        (lambda x: {"a": x}, lambda y: y["a"]),
        (lambda x: [x, None], lambda y: y[0]),
        (lambda x: ("a", {"b": [x]}), lambda y: y[1]["b"][0]),
        (lambda x: Pair(x, 1), lambda y: y.first),
        (lambda x: Record(x), lambda y: y.first),
    ],
    ids=["dict", "list", "nested", "namedtuple", "dataclass"],
)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_outputs_of_other_forms(pack, unpack, direction):
    class Packs(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, *, packed):
            x = self.inner(unpack(packed))
            if self.broken and direction == "forward":
                x = x * math.nan
            elif self.broken:
                x = Bent.apply(x, times(math.nan))
            return pack(x)

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([Packs(), Packs(), Packs()])

        def forward(self, x):
            for part in self.parts:
                x = unpack(part(packed=pack(x)))
            return x

    model = Whole()
    for number, part in enumerate(model.parts):
        part.broken = number == 1
    location = locate(model, step_of(model, torch.ones(1, 2)))
    assert str(location) == f"parts.1 ({direction})"


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_operations_in_place(direction):
    class InPlace(nn.Module):
        def forward(self, x):
            x.mul_(0.5)
            x[:, :1].add_(1.0)
            return x

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), InPlace(), nn.ReLU(inplace=True), nn.Linear(3, 2), InPlace())
    run = step_of(model, torch.randn(2, 3))
    assert locate(model, run) is None
    for name in ("0", "1", "2", "3", "4"):
        with Broken(model.get_submodule(name), direction, times(math.nan)):
            assert str(locate(model, run)) == f"{name} ({direction})"


def test_own_code_between_parts(subjects):
    class Own(subjects.TinyLM):
        def mix(self, x):
            return Bent.apply(x, times(math.nan)) if self.direction == "backward" else x / 0

    model = Own()
    for model.direction in ("forward", "backward"):
        assert str(locate(model, step_of(model))) == f"{ROOT} ({model.direction})"


# What is no module's doing


@pytest.mark.parametrize("name", ["tokens.weight", "layers.0.qkv.bias", "layers.1.mlp.0.weight", "norm.bias"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_parameter_that_was_broken_before(subjects, name, value):
    model = subjects.tiny()
    with torch.no_grad():
        # Of the table, a row that the batch reads.
        model.get_parameter(name).view(-1)[3 * 16 if name == "tokens.weight" else -1] = value
    location = locate(model, step_of(model))
    assert (location.module, location.direction, location.call) == (name, "parameter", 0)
    assert location.value == value or math.isnan(value)
    assert str(location) == f"parameter {name} is non-finite already"


def test_a_broken_parameter_behind_a_broken_module(subjects):
    model = subjects.tiny()
    with torch.no_grad():
        model.layers[1]["out"].weight[0, 0] = math.nan
    with Broken(model.layers[0]["mlp"], "forward", one(math.nan)):
        assert str(locate(model, step_of(model))) == "layers.0.mlp (forward)"


def test_a_parameter_that_the_batch_does_not_read(subjects):
    model = subjects.gru()
    with torch.no_grad():
        model.embedding.weight[40] = math.nan
    assert str(locate(model, step_of(model))) == "parameter embedding.weight is non-finite already"
    for broken, direction in ((model.head, "backward"), (model, "forward")):
        with Broken(broken, direction, one(math.nan)):
            name = "head" if broken is model.head else ROOT
            assert str(locate(model, step_of(model))) == f"{name} ({direction})"


def test_buffers():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).eval()
    run = step_of(model, torch.randn(4, 3))
    model[2].register_buffer("least", torch.tensor(math.inf))  # of nothing yet
    assert locate(model, run) is None
    model[1].running_var[1] = math.nan
    assert str(locate(model, run)) == "parameter 1.running_var is non-finite already"


def test_an_input(subjects):
    class Dressed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, batch):
            return self.layer(batch["x"] * 2)

    model = Dressed()

    def run(x):
        model({"x": x}).mean().backward()

    location = locate(model, lambda: run(torch.tensor([[1.0, math.nan, 1.0]])))
    assert (location.module, location.direction) == (ROOT, "input")
    assert str(location) == f"the input of {ROOT} is non-finite already"
    assert locate(model, lambda: run(torch.ones(1, 3))) is None
    # A model that is called by its parts.
    location = locate(model, lambda: model.layer(torch.full((1, 3), math.inf)).sum().backward())
    assert (location.module, location.direction) == ("layer", "input")


@pytest.mark.parametrize(
    "broken", [lambda y: (y.mean() - y.mean()).log(), lambda y: y.mean() * math.nan, lambda y: y.mean() / 0]
)
def test_the_loss(subjects, broken):
    model = subjects.tiny()
    location = locate(model, lambda: broken(model(IDS)).backward())
    assert (location.module, location.direction, location.call) == ("the loss", "loss", 0)
    assert str(location) == "the loss is non-finite"


def test_the_gradient_of_the_loss(subjects):
    model = subjects.tiny()

    def run():
        # Finite, with an infinite slope.
        (model(IDS).mean() * 0).abs().sqrt().backward()

    assert locate(model, run).direction == "loss"
    assert locate(model, lambda: model(IDS).mean().backward(torch.tensor(math.nan))).direction == "loss"
    assert locate(model, lambda: torch.autograd.backward([model(IDS).mean()])) is None


def test_nothing():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))
    runs = []

    def run():
        runs.append(1)
        model(torch.ones(1, 3)).sum().backward()

    assert locate(model, run) is None
    assert len(runs) == 1


# Infinities and NaNs that belong there


class Masked(nn.Module):
    """Additive masks of a module of their own; rows that hide everything are cleared after the softmax."""

    def __init__(self, hidden):
        super().__init__()
        self.mask, self.weigh, self.clear = Mask(hidden), nn.Softmax(-1), Clear()
        self.last = nn.Linear(3, 3)

    def forward(self, x):
        return self.last(self.clear(self.weigh(x @ x.mT + self.mask(x))) @ x)


class Mask(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.hidden = hidden

    def forward(self, x):
        return torch.zeros(self.hidden.shape).masked_fill(self.hidden, -math.inf)


class Clear(nn.Module):
    def forward(self, weights):
        return weights.nan_to_num(0.0)


def test_masks_and_what_is_cleared():
    torch.manual_seed(0)
    x = torch.randn(2, 4, 3)
    for hidden in (torch.ones(4, 4, dtype=torch.bool).triu(1), torch.ones(4, 4, dtype=torch.bool).triu(0)):
        model = Masked(hidden)
        run = step_of(model, x)
        for direction in ("forward", "backward"):
            with Broken(model.last, direction, one(math.nan)):
                scales = None
                assert str(locate(model, run)) == f"last ({direction})"
        scales = ModuleScales.observe(model, run)
        assert locate(model, run, scales=scales) is None
        for name in ("last", "clear"):
            for direction in ("forward", "backward"):
                with Broken(model.get_submodule(name), direction, one(math.nan)) as broken:
                    location = locate(model, run, scales=scales)
                # No gradient comes to the weights of attention, which are made of data.
                assert broken.acted == (name == "last" or direction == "forward")
                assert not broken.acted or str(location) == f"{name} ({direction})"


def test_a_neighbour_that_takes_no_notice_is_no_excuse():
    class Whole(nn.Module):
        """As rotary tables do, `shape` only looks at how large its argument is."""

        def __init__(self):
            super().__init__()
            self.first, self.shape, self.last = nn.Linear(3, 3), Shape(), nn.Linear(3, 3)

        def forward(self, x):
            x = self.first(x)
            return self.last(x) + self.shape(x)

    class Shape(nn.Module):
        def forward(self, x):
            return torch.ones(x.shape)

    model = Whole()
    with Broken(model.first, "forward", one(math.nan)):
        assert str(locate(model, step_of(model, torch.ones(2, 3)))) == "first (forward)"


def test_negative_infinity_is_the_cause_of_what_comes_of_it():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    run = step_of(model, torch.randn(2, 4))
    for name in ("0", "1", "2", "3"):
        with Broken(model.get_submodule(name), "forward", one(-math.inf)):
            location = locate(model, run)
        assert (location.module, location.direction, location.value) == (name, "forward", -math.inf)


def test_a_nan_that_only_gradients_show():
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(3, 3), nn.Linear(3, 1)

        def forward(self, x):
            y = self.inner(x)
            return self.outer(torch.where(y.isnan(), x, y * y))

    model = Hidden()
    run = step_of(model, torch.randn(2, 3))
    with Broken(model.inner, "forward", one(math.nan)):
        assert str(locate(model, run)) == "inner (forward)"


# How the model runs


@pytest.mark.parametrize("way", ["wrapped", "in place", "inner"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_compiled(subjects, way, direction):
    model = subjects.gru()
    with Broken(model.recurrence, direction, one(math.nan)):
        watched, name = model, "recurrence"
        if way == "wrapped":
            watched = torch.compile(model, backend="eager")
        elif way == "in place":
            model.compile(backend="eager")
        else:
            watched, name = nn.Sequential(torch.compile(model, backend="eager")), "0.recurrence"
        assert str(locate(watched, step_of(watched))) == f"{name} ({direction})"


def test_inner_modules_of_recomputed_ones(subjects):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for reentrant in (True, False):
        model = subjects.tiny()
        for layer in model.layers:
            layer["mlp"] = checkpoint_wrapper(layer["mlp"])
            layer["mlp"].checkpoint_impl = "reentrant" if reentrant else "no_reentrant"
        run = step_of(model)
        assert locate(model, run) is None
        for name in ("layers.0.mlp.0", "layers.1.mlp.1", "layers.1.mlp.2", "head"):
            part = model
            for step in name.split("."):
                part = getattr(part, "_checkpoint_wrapped_module", part).get_submodule(step)
            for direction in ("forward", "backward"):
                with Broken(part, direction, one(math.nan)):
                    assert str(locate(model, run)) == f"{name} ({direction})"


def test_autocast_and_scaled_losses(subjects):
    model = subjects.tiny()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def run():
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(IDS).float().square().mean()
        scaler.scale(loss).backward()

    assert locate(model, run) is None
    for name in ("layers.0.mlp.1", "head"):
        for direction in ("forward", "backward"):
            with Broken(model.get_submodule(name), direction, one(math.inf)):
                assert str(locate(model, run)) == f"{name} ({direction})"


def test_a_model_in_parts(tmp_path):
    """One process, whose parameters are DTensors nevertheless."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (1,))
        model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 1))
        fully_shard(model[1], mesh=mesh)
        fully_shard(model, mesh=mesh)
        run = step_of(model, torch.randn(2, 4))
        assert locate(model, run) is None
        for name in ("0", "1.0", "1.1", "1", "2"):
            for direction in ("forward", "backward"):
                with Broken(model.get_submodule(name), direction, one(math.nan)):
                    assert str(locate(model, run)) == f"{name} ({direction})"
        with torch.no_grad():
            model[1][0].weight.to_local()[1, 1] = math.nan
        assert str(locate(model, run)) == "parameter 1.0.weight is non-finite already"
    finally:
        dist.destroy_process_group()


# Traces are left neither in the model nor in what it computes


def hooks_of(model):
    return [
        h for m in model.modules() for h in (*m._forward_hooks, *m._forward_pre_hooks, *m._backward_hooks)
    ]


@pytest.mark.parametrize("name", ["rack", "dropout_rack", "llama", "x_decoder", "gru", "conv"])
def test_watching_changes_nothing(subjects, name):
    model = getattr(subjects, name)().train()

    def gradients(watched):
        torch.manual_seed(7)
        run = step_of(model)
        locate(model, run) if watched else run()
        return [p.grad.clone() for p in model.parameters()], torch.get_rng_state()

    plain, state = gradients(False)
    seen, state_after = gradients(True)
    assert all(map(torch.equal, plain, seen))
    assert torch.equal(state, state_after)


def test_all_is_put_back_when_the_run_fails(subjects):
    model, plain = subjects.tiny(), torch.autograd.backward

    def run():
        assert hooks_of(model)
        model(IDS).mean().backward()
        raise KeyError

    with pytest.raises(KeyError):
        locate(model, run)
    assert not hooks_of(model)
    assert torch.autograd.backward is plain


def test_no_hook_stays_on_what_outlives_the_pass(subjects, monkeypatch):
    model = subjects.tiny()
    # As DistributedDataParallel does, hold what adds up the gradients.
    held = [p.view_as(p).grad_fn.next_functions[0][0] for p in model.parameters()]
    assert locate(model, step_of(model)) is None
    taken = []
    monkeypatch.setattr(Readings, "take", lambda *arguments: taken.append(arguments) or [])
    step_of(model)()
    assert held and not taken
    locate(model, step_of(model))
    assert taken


def test_later_hooks_of_others_count_as_the_modules_own(subjects):
    model = subjects.tiny()

    def run():
        with Broken(model.layers[1]["norm"], "forward", one(math.nan)):
            step_of(model)()

    assert str(locate(model, run)) == "layers.1.norm (forward)"


class Cancelling(nn.Module):
    """What comes back to a module from two places is nearly the same with the other sign."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x):
        x = self.inner(x)
        return x.exp() - 0.99 * x.exp()


def test_gradients_that_cancel_out_before_they_come_in():
    torch.manual_seed(0)
    model, x = Cancelling(), torch.randn(8, 4)

    def run():
        model.zero_grad()
        model(x).sum().backward()

    scales = ModuleScales.observe(model, run)
    for name in ("inner", "inner.1", "inner.0"):
        with Broken(model.get_submodule(name), "backward", times(10.0)) as fault:
            location = locate(model, run, scales=scales)
        assert fault.acted
        assert (location.module, location.direction, location.kind) == (name, "backward", "exploding")


def test_a_gradient_that_is_too_large_when_it_comes_into_the_model(subjects):
    """Some module lets through more of it than it did of the reference: it is not to blame."""
    model = subjects.tiny()

    def run(factor=1.0, uneven=1.0):
        model.zero_grad()
        with Broken(model.layers[0]["norm"], "backward", times(uneven)):
            logits = model(IDS)
        logits.register_hook(lambda gradient: gradient * factor)
        logits.square().mean().backward()

    scales = ModuleScales.observe(model, run)
    for factor, uneven in ((10.0, 1.0), (1000.0, 8.0)):
        location = locate(model, lambda f=factor, u=uneven: run(f, u), scales=scales)
        assert (location.module, location.direction, location.kind) == ("the loss", "loss", "exploding")
        assert location.value == pytest.approx(factor, rel=1e-3)
    # The other way about: one that is a little larger, of a broken module.
    location = locate(model, lambda: run(4.5, 1000.0), scales=scales)
    assert (location.module, location.direction) == ("layers.0.norm", "backward")


def test_text_of_what_explodes():
    assert (
        str(Location("a.b", "forward", 1, "exploding", 12.34)) == "a.b (forward, 12.3 times its usual size)"
    )
    assert str(Location("a", "backward", 2, "non-finite", math.nan)) == "a (backward, call 2)"
