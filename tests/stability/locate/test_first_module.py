"""Which module broke first: every leaf of two models is broken in turn, and found."""

import math

import pytest
import torch
from torch import nn

from stackwise.stability.locate import first_nan_module, first_nonfinite_module

IDS = torch.arange(8).view(2, 4)


def leaves(model):
    return [name for name, m in model.named_modules() if name and not any(True for _ in m.children())]


def hooks_of(model):
    return [hook for m in model.modules() for hook in m._forward_hooks]


def spoil(value):
    """One element of the output, the last."""

    def hook(module, arguments, output):
        if isinstance(output, tuple):
            return (hook(module, arguments, output[0]), *output[1:])
        output = output.clone()
        output[(-1,) * output.ndim] = value
        return output

    return hook


@pytest.mark.parametrize("name", ["rack", "llama", "x_decoder", "gru", "conv", "tiny"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_every_leaf(subjects, name, value):
    model = getattr(subjects, name)().eval()
    called = []
    handles = [
        model.get_submodule(leaf).register_forward_hook(lambda *_, leaf=leaf: called.append(leaf))
        for leaf in leaves(model)
    ]
    with torch.no_grad():
        model(IDS)
    for handle in handles:
        handle.remove()
    assert len(called) >= 3
    found = {}
    for leaf in dict.fromkeys(called):
        handle = model.get_submodule(leaf).register_forward_hook(spoil(value))
        with torch.no_grad():
            found[leaf] = first_nonfinite_module(model, lambda: model(IDS))
        handle.remove()
    assert found == {leaf: leaf for leaf in found}
    assert not hooks_of(model)


def test_sound_model(subjects):
    model = subjects.rack()
    assert first_nonfinite_module(model, lambda: model(IDS)) is None
    assert not hooks_of(model)


def test_the_first_of_several(subjects):
    model = subjects.tiny()
    for name in ("layers.1.mlp.1", "layers.0.out", "head"):
        model.get_submodule(name).register_forward_hook(spoil(math.nan))
    assert first_nonfinite_module(model, lambda: model(IDS)) == "layers.0.out"


def test_a_parent_whose_own_code_breaks(subjects):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(16, 16)

        def forward(self, x):
            return self.inner(x).sum(-1, keepdim=True).add(math.inf) + x

    class Broken(subjects.TinyLM):
        def __init__(self):
            super().__init__()
            self.extra = Attention()

        def mix(self, x):
            return self.extra(x)

    model = Broken()
    assert first_nonfinite_module(model, lambda: model(IDS)) == "extra"


def test_the_root_itself(subjects):
    class Broken(subjects.TinyLM):
        def forward(self, ids):
            return super().forward(ids) / 0

    model = Broken()
    assert first_nonfinite_module(model, lambda: model(IDS)) == "(outside the submodules)"


class Masked(nn.Module):
    """Makes an additive mask of -inf in a module of its own, as attention often does."""

    def __init__(self, reach):
        super().__init__()
        self.mask = Mask(reach)
        self.last = nn.Identity()

    def forward(self, x):
        return self.last((x @ x.mT + self.mask(x)).softmax(dim=-1) @ x)


class Mask(nn.Module):
    def __init__(self, reach):
        super().__init__()
        self.reach = reach

    def forward(self, x):
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(self.reach)
        return torch.zeros(hidden.shape).masked_fill(hidden, -math.inf)


def test_a_mask_is_no_culprit():
    x = torch.randn(1, 4, 3)
    model = Masked(reach=1)
    assert model(x).isfinite().all()
    model.last.register_forward_hook(spoil(math.nan))
    assert first_nonfinite_module(model, lambda: model(x)) == "last"
    # A row that hides everything is broken by the softmax, between the modules.
    model = Masked(reach=0)
    assert not model(x).isfinite().all()
    assert first_nonfinite_module(model, lambda: model(x)) == "(outside the submodules)"


def test_negative_infinity_where_nothing_else_is_found(subjects):
    model = subjects.tiny()
    model.get_submodule("head").register_forward_hook(spoil(-math.inf))
    assert first_nonfinite_module(model, lambda: model(IDS)) == "head"


def test_inputs_that_are_broken_already():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    assert first_nonfinite_module(model, lambda: model(torch.full((1, 3), math.nan))) is None


@pytest.mark.parametrize("pack", [lambda x: {"out": x}, lambda x: [x, "words"], lambda x: ("a", {"b": [x]})])
def test_outputs_of_other_forms(pack):
    class Packs(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = 1.0

        def forward(self, *, x):
            return pack(x * self.scale)

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.packs = Packs()

        def forward(self, x):
            return self.packs(x=x)

    model = Whole()
    assert first_nonfinite_module(model, lambda: model(torch.ones(2))) is None
    model.packs.scale = math.inf
    assert first_nonfinite_module(model, lambda: model(torch.ones(2))) == "packs"
    assert first_nonfinite_module(model, lambda: model(torch.full((2,), math.nan))) is None


def test_hooks_go_when_the_run_fails(subjects):
    model = subjects.tiny()

    def run():
        assert hooks_of(model)
        raise KeyError

    with pytest.raises(KeyError):
        first_nonfinite_module(model, run)
    assert not hooks_of(model)


@pytest.mark.parametrize("way", ["wrapped", "in place", "inner"])
def test_a_compiled_model_is_watched_as_it_was_written(subjects, way, recwarn, caplog):
    model = subjects.gru().eval()
    inner = next(name for name, m in model.named_modules() if name and not any(True for _ in m.children()))
    model.get_submodule(inner).register_forward_hook(spoil(math.nan))
    watched = model
    if way == "wrapped":
        watched = torch.compile(model, backend="eager")
    elif way == "in place":
        model.compile(backend="eager")
    else:
        model = nn.Sequential(torch.compile(model, backend="eager"))
        watched, inner = model, f"0.{inner}"
    with torch.no_grad(), caplog.at_level("WARNING"):
        assert first_nonfinite_module(watched, lambda: watched(IDS)) == inner
        assert first_nan_module(watched, lambda: watched(IDS)) == inner
    assert not recwarn.list and not caplog.records
