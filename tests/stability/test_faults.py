"""What a fault breaks, when, and what it refuses."""

import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

from stackwise.stability import Fault, GradientExplosion, NanInjection, stability_run
from stackwise.stability.faults import Anatomy, fault_table
from stackwise.subject.spec import ModelSpec


def hooks_of(model):
    return [
        h for m in model.modules() for h in (*m._forward_hooks, *m._forward_pre_hooks, *m._backward_hooks)
    ]


def backward(model, ids):
    model.zero_grad()
    output = model(ids)
    getattr(output, "logits", output).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def resolved(fault, model):
    """The fault as a run resolves it, on a model whose state is put back."""
    fault = fault.resolve(Anatomy.of(model, lambda: backward(model, torch.arange(6)[None])))
    model.zero_grad()
    return fault


def never():
    raise AssertionError("it did not act")


def test_page_of_faults_has_the_table_of_their_declarations():
    page = Path(__file__).parents[2] / "docs/reference/faults.md"
    assert fault_table() in page.read_text()


@pytest.mark.parametrize(
    "make, key, value",
    [
        (lambda v: NanInjection(step=v), "step", -1),
        (lambda v: NanInjection(step=v), "step", 1.0),
        (lambda v: NanInjection(step=v), "step", True),
        (lambda v: NanInjection(step=v), "step", None),
        (lambda v: NanInjection(step=0, duration=v), "duration", 0),
        (lambda v: NanInjection(step=0, duration=v), "duration", 2.5),
        (lambda v: NanInjection(step=0, kind=v), "kind", "NaN"),
        (lambda v: NanInjection(step=0, kind=v), "kind", math.nan),
        (lambda v: NanInjection(step=0, target=v), "target", ""),
        (lambda v: NanInjection(step=0, target=v), "target", "weights"),
        (lambda v: NanInjection(step=0, target=v), "target", "activation:"),
        (lambda v: NanInjection(step=0, target=v), "target", "gradient:"),
        (lambda v: NanInjection(step=0, target=v), "target", "loss:here"),
        (lambda v: NanInjection(step=0, target=v), "target", "activations"),
        (lambda v: NanInjection(step=0, target=v), "target", None),
        (lambda v: GradientExplosion(step=v), "step", "4"),
        (lambda v: GradientExplosion(step=4, duration=v), "duration", -1),
        (lambda v: GradientExplosion(step=4, factor=v), "factor", 1),
        (lambda v: GradientExplosion(step=4, factor=v), "factor", 0.1),
        (lambda v: GradientExplosion(step=4, factor=v), "factor", -10.0),
        (lambda v: GradientExplosion(step=4, factor=v), "factor", math.inf),
        (lambda v: GradientExplosion(step=4, factor=v), "factor", math.nan),
        (lambda v: GradientExplosion(step=4, factor=v), "factor", "10"),
        (lambda v: GradientExplosion(step=4, factor=v), "factor", True),
    ],
)
def test_arguments_that_are_refused(make, key, value):
    with pytest.raises(ValueError, match=rf"^(nan_injection|gradient_explosion): {key}: got ") as raised:
        make(value)
    assert f"got {value!r}; allowed: " in str(raised.value)


@pytest.mark.parametrize("target", ["loss", "activation", "gradient", "activation:a.*", "gradient:b:c"])
def test_targets_that_are_accepted(target):
    assert NanInjection(step=0, target=target).target == target


@pytest.mark.parametrize(
    "fault, text",
    [
        (NanInjection(step=3), "nan_injection(step=3)"),
        (NanInjection(step=0, duration=2, kind="inf"), "nan_injection(step=0, duration=2, kind='inf')"),
        (NanInjection(step=3, target="loss"), "nan_injection(step=3, target='loss')"),
        (GradientExplosion(step=8), "gradient_explosion(step=8)"),
        (GradientExplosion(step=8, factor=20), "gradient_explosion(step=8, factor=20)"),
    ],
)
def test_text(fault, text):
    assert str(fault) == text


def test_steps():
    assert list(NanInjection(step=3).steps) == [3]
    assert list(GradientExplosion(step=3, duration=3).steps) == [3, 4, 5]


def test_a_fault_does_not_change():
    with pytest.raises(AttributeError):
        NanInjection(step=3).step = 4


def test_the_base_breaks_nothing(subjects):
    model, ids = subjects.tiny(), torch.arange(6)[None]
    clean = backward(model, ids)

    class Nothing(Fault):
        name = "nothing"

    fault = Nothing(step=0)
    assert str(fault) == "nothing(step=0)"
    assert resolved(fault, model) == fault
    with fault.around_forward(model, never):
        broken = backward(model, ids)
    fault.on_gradients(model, never)
    loss = torch.ones(())
    assert fault.on_loss(loss, never) is loss
    assert all(torch.equal(broken[name], clean[name]) for name in clean)


@pytest.mark.parametrize("kind, sound", [("nan", math.isnan), ("inf", math.isinf)])
@pytest.mark.parametrize(
    "model, target, place",
    [
        ("rack", "activation:stacks.0.blocks.1.attention.qkv", "stacks.0.blocks.1.attention.qkv"),
        ("rack", "activation:stacks.1.*.down", "stacks.1.blocks.0.feedforward.down"),
        ("rack", "activation:embedding", "embedding"),
        ("llama", "activation:*.1.self_attn.o_proj", "model.layers.1.self_attn.o_proj"),
        ("llama", "activation:*.rotary_emb", "model.rotary_emb"),
        ("llama", "activation:*.self_attn", "model.layers.0.self_attn"),
        ("gru", "activation:recurrence", "recurrence"),
        ("gru", "activation", "recurrence"),
        ("conv", "activation", "convolution"),
    ],
)
def test_one_element_of_one_activation(subjects, model, target, place, kind, sound):
    model = getattr(subjects, model)()
    model.eval()
    seen = {}

    def keep(name):
        def hook(module, arguments, output):
            seen.setdefault(name, []).append(output[0] if isinstance(output, tuple) else output)

        return hook

    handle = model.get_submodule(place).register_forward_hook(keep("after"))
    fault = resolved(NanInjection(step=0, target=target, kind=kind), model)
    seen.clear()
    acted = []
    ids = torch.arange(6)[None]
    with torch.no_grad():
        clean = model(ids)
        with fault.around_forward(model, lambda: acted.append(1)):
            assert not acted
            model(ids)
        again = model(ids)
    assert acted == [1]
    before, broken, after = seen["after"]
    changed = (before != broken).nonzero()
    assert changed.tolist() == [[0] * before.ndim]
    assert sound(broken.flatten()[0].item())
    assert torch.equal(before, after)
    assert torch.equal(getattr(clean, "logits", clean), getattr(again, "logits", again))
    handle.remove()
    assert not hooks_of(model)


def test_hooks_go_when_the_forward_pass_fails(subjects):
    model = subjects.gru()
    fault = resolved(NanInjection(step=0), model)

    def fail():
        with fault.around_forward(model, never):
            assert hooks_of(model)
            model("no ids")

    with pytest.raises(TypeError):
        fail()
    assert not hooks_of(model)


@pytest.mark.parametrize("kind, sound", [("nan", math.isnan), ("inf", math.isinf)])
@pytest.mark.parametrize(
    "target, place",
    [
        ("gradient:*.1.attention.qkv.weight", "stacks.0.blocks.1.attention.qkv.weight"),
        ("gradient:*norm.weight", "stacks.0.blocks.0.attention_norm.weight"),
        ("gradient:embedding.weight", "embedding.weight"),
    ],
)
def test_one_element_of_one_gradient(subjects, target, place, kind, sound):
    model, ids, acted = subjects.rack(), torch.arange(6)[None], []
    fault = resolved(NanInjection(step=0, target=target, kind=kind), model)
    clean = backward(model, ids)
    fault.on_gradients(model, lambda: acted.append(1))
    assert acted == [1]
    changed = {n: (p.grad != clean[n]).nonzero().tolist() for n, p in model.named_parameters()}
    assert {name: where for name, where in changed.items() if where} == {place: [[0] * clean[place].ndim]}
    assert sound(model.get_parameter(place).grad.flatten()[0].item())


def test_the_middle_parameter_by_default(subjects):
    model, ids = subjects.gru(), torch.arange(6)[None]
    fault = resolved(NanInjection(step=0, target="gradient"), model)
    clean = backward(model, ids)
    fault.on_gradients(model, lambda: None)
    [broken] = [n for n, p in model.named_parameters() if not torch.equal(p.grad, clean[n])]
    # Of seven: embedding, four of the recurrence, two of the head.
    assert broken == list(clean)[3]


def test_a_scalar_parameter(subjects):
    class Scaled(subjects.TinyLM):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, ids):
            return super().forward(ids) * self.scale

    model = Scaled()
    backward(model, torch.arange(6)[None])
    NanInjection(step=0, target="gradient:scale").on_gradients(model, lambda: None)
    assert model.scale.grad.isnan()


def test_frozen_parameters_are_no_target(subjects):
    model = subjects.gru()
    model.embedding.requires_grad_(False)
    with pytest.raises(ValueError, match=r"matches nothing; .*: recurrence"):
        resolved(NanInjection(step=0, target="gradient:embedding.weight"), model)


@pytest.mark.parametrize("kind, expected", [("nan", math.isnan), ("inf", math.isinf)])
def test_the_loss(kind, expected):
    fault = NanInjection(step=0, target="loss", kind=kind)
    loss = torch.tensor(2.0, requires_grad=True)
    acted = []
    broken = fault.on_loss(loss, lambda: acted.append(1))
    assert acted == [1]
    assert expected(broken.item())
    broken.backward()
    assert not math.isfinite(loss.grad.item())
    assert NanInjection(step=0, target="gradient").on_loss(loss, never) is loss


@pytest.mark.parametrize("factor", [1.5, 10.0, 100])
def test_every_gradient_explodes(subjects, factor):
    model, ids = subjects.rack(), torch.arange(6)[None]
    clean = backward(model, ids)
    frozen = model.final_norm.weight
    frozen.grad = None
    acted = []
    GradientExplosion(step=4, factor=factor).on_gradients(model, lambda: acted.append(1))
    assert acted == [1]
    for name, parameter in model.named_parameters():
        if parameter is not frozen:
            torch.testing.assert_close(parameter.grad, clean[name] * factor)
    assert frozen.grad is None
    model.zero_grad()
    GradientExplosion(step=4, factor=factor).on_gradients(model, never)


@pytest.mark.parametrize("target", ["activation:attention", "gradient:embedding", "activation:stacks.*.qkw"])
def test_pattern_that_matches_nothing(subjects, target):
    updates = []

    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            updates.append(1)

    spec = ModelSpec.of(subjects.rack, optimizer=lambda parameters: Counting(parameters, lr=0.1))
    place = target.partition(":")[0]
    with pytest.raises(ValueError, match="which matches nothing; ") as raised:
        stability_run(spec, steps=4, faults=[NanInjection(step=2, target=target)])
    assert repr(target) in str(raised.value)
    listed = str(raised.value).rpartition(": ")[2].split(", ")
    model = subjects.rack()
    names = dict(model.named_modules() if place == "activation" else model.named_parameters())
    assert len(listed) == 7
    assert set(listed[:6]) <= set(names)
    assert not updates, "it is refused before the run"


def test_module_that_returns_no_tensor(subjects):
    class Says(nn.Module):
        def forward(self, x):
            return "words"

    class Talks(subjects.TinyLM):
        def __init__(self):
            super().__init__()
            self.says = Says()

        def mix(self, x):
            self.says(x)
            return x

    fault = NanInjection(step=0, target="activation:says")
    with pytest.raises(ValueError, match="activation:says"):
        stability_run(ModelSpec.of(Talks), steps=1, faults=[fault])


def test_parameter_without_a_gradient(subjects):
    class Unused(subjects.TinyLM):
        def __init__(self):
            super().__init__()
            self.unused = nn.Linear(2, 2)

    fault = NanInjection(step=0, target="gradient:unused.weight")
    with pytest.raises(ValueError, match=r"gradient:unused\.weight"):
        stability_run(ModelSpec.of(Unused), steps=1, faults=[fault])


# Containers and MultiheadAttention's projection are modules that forward() never calls.
@pytest.mark.parametrize(
    "model, target", [("encoder", "activation:layers.0.self_attn.out_proj"), ("rack", "activation:stacks")]
)
def test_module_that_is_never_called(subjects, model, target):
    factory = getattr(subjects, model)
    model, called = factory(), Counter()
    module = model.get_submodule(target.partition(":")[2])
    module.register_forward_hook(lambda *_: called.update(["called"]))
    model.train()(ModelSpec.of(factory).batch(1, 4))
    assert not called
    # A fault that did not act has not been missed by the guard: it is refused, or it is not counted.
    try:
        run = stability_run(ModelSpec.of(factory), steps=2, faults=[NanInjection(step=0, target=target)])
    except ValueError as error:
        outcome = str(error)
    else:
        outcome = "counted" if run.fired else "not counted"
    assert outcome == "not counted" or target in outcome


def first_time(run):
    """Records of the steps as they were made first: one whose gradient alone was broken is made again."""
    return list({record.step: record for record in reversed(run.records)}.values())[::-1]


@pytest.mark.parametrize("target", ["activation", "loss", "gradient"])
@pytest.mark.parametrize("step, duration", [(0, 1), (2, 2), (5, 1)])
def test_fires_at_its_steps_and_at_no_other(subjects, target, step, duration):
    spec = ModelSpec.of(subjects.gru)
    # An optimizer that changes nothing, so that every step can be compared with the clean run's.
    spec = ModelSpec.of(spec, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    clean = stability_run(spec, steps=6, batch_size=2)
    broken = stability_run(
        spec, steps=6, batch_size=2, faults=[NanInjection(step=step, duration=duration, target=target)]
    )
    differing = [
        a.step
        for a, b in zip(clean.records, first_time(broken), strict=True)
        if (a.loss, a.grad_norm) != (b.loss, b.grad_norm)
    ]
    assert differing == list(range(step, step + duration)) == broken.fired
    for record in first_time(broken):
        assert math.isfinite(record.grad_norm) == (record.step not in differing)
        assert math.isfinite(record.loss) == (record.step not in differing or target == "gradient")


def test_an_explosion_fires_at_its_steps_and_at_no_other(subjects):
    spec = ModelSpec.of(subjects.gru)
    spec = ModelSpec.of(spec, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    clean = stability_run(spec, steps=9, batch_size=2)
    broken = stability_run(
        spec, steps=9, batch_size=2, faults=[GradientExplosion(step=5, duration=2, factor=7.0)]
    )
    assert [r.loss for r in clean.records] == [r.loss for r in first_time(broken)]
    ratios = [b.grad_norm / a.grad_norm for a, b in zip(clean.records, first_time(broken), strict=True)]
    assert ratios == pytest.approx([7.0 if step in (5, 6) else 1.0 for step in range(9)], rel=1e-6)
    assert broken.fired == [5, 6]


def test_two_faults_at_once(subjects):
    faults = [NanInjection(step=1, target="loss"), NanInjection(step=1, target="gradient", duration=2)]
    run = stability_run(ModelSpec.of(subjects.gru), steps=5, batch_size=2, faults=faults)
    assert (run.fired, run.alarm_steps, run.verdict) == ([1, 2], [1, 2], "caught")
    assert [a.kind for a in run.alarms] == ["non-finite loss", "non-finite gradient"]
