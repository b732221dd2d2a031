"""Diagnosis: a bundle comes back as it was, is computed again to the bit, and a damaged one is refused."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from stackwise.stability.guard import Alarm, GuardPolicy
from stackwise.stability.guard.attribution import attributed_module
from stackwise.stability.guard.diagnosis import Bundle, BundleFolder, histogram, replay
from stackwise.stability.guard.examination import rerun
from stackwise.stability.guard.replay_loader import DrawnBatch
from stackwise.support.random_state import random_states


def make_model():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 1))


def loss_of(model, batch):
    return (model(batch["x"]) - batch["more"][0]).square().mean()


@pytest.fixture
def broken():
    torch.manual_seed(3)
    model = make_model()
    states = random_states()
    batch = {"x": torch.randn(8, 4), "more": (torch.ones(8, 1), [1, "text", None, math.inf])}
    weights = {n: t.detach().clone() for n, t in [*model.named_parameters(), *model.named_buffers()]}
    given = DrawnBatch(12, ("a", 3), batch, states)
    alarm = {"step": 12, "kind": "gradient spike", "value": math.inf, "batch": (("a", 3),)}
    return model, Bundle(alarm, [given], {"0.weight": 10.0, "3.bias": math.nan}, True, weights, {"seed": 3})


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return a == b or (a != a and b != b)


def test_a_bundle_comes_back(broken, tmp_path):
    _, bundle = broken
    folder = bundle.write(tmp_path / "deep" / "step")
    again = Bundle.read(folder)
    assert same(again.alarm, bundle.alarm)
    assert same(again.norms, bundle.norms)
    assert again.notes == {"seed": 3}
    [given] = again.batches
    assert (given.step, given.id) == (12, ("a", 3))
    assert same(given.batch, bundle.batches[0].batch)
    assert same(given.random, bundle.batches[0].random)
    assert same(dict(again.weights), dict(bundle.weights))
    assert sorted(p.name for p in tmp_path.joinpath("deep").iterdir()) == ["step"]
    told = json.loads((folder / "bundle.json").read_text())
    assert told["histogram"] == {"decades": [1], "counts": [1], "zero": 0, "non_finite": 1}
    with pytest.raises(ValueError, match="folder: got"):
        bundle.write(folder)


def test_the_step_is_computed_again_to_the_bit(broken, tmp_path):
    model, bundle = broken
    folder = bundle.write(tmp_path / "step")
    torch.set_rng_state(bundle.batches[0].random["torch"])
    expected = loss_of(model, bundle.batches[0].batch)  # the dropout of the step
    expected.backward()
    other = make_model().eval()
    before = torch.get_rng_state()
    found = replay(folder, other, loss_of)
    assert found.loss == expected.item()
    norms = {name: p.grad.norm().item() for name, p in model.named_parameters()}
    assert found.parameter_norms == pytest.approx(norms, rel=1e-5, abs=1e-7)
    assert found.grad_norm == pytest.approx(math.hypot(*norms.values()), rel=1e-5)
    assert not found.broken
    assert not other.training
    assert all(p.grad is None for p in other.parameters())
    assert torch.equal(torch.get_rng_state(), before)
    assert same(dict(other.named_buffers()), {n: bundle.weights[n] for n, _ in other.named_buffers()})


@pytest.mark.parametrize(
    "kind, factor, reproduced, spike",
    [
        ("gradient spike", 0.9, True, True),
        ("gradient spike", 1.1, True, False),
        ("loss spike", 0.9, True, True),
        ("loss spike", 0.9, None, True),
        ("loss spike", 1.1, True, False),
        ("loss spike", 0.3, False, False),  # above the limit, but far from what it was
        ("logit growth", 0.0, None, None),
        ("non-finite loss", 0.0, True, False),
    ],
)
def test_a_finite_number_breaks_again_where_it_is_above_its_limit(broken, kind, factor, reproduced, spike):
    model, bundle = broken
    # Norms are those of what is optimized, here of one part.
    first = Bundle({}, bundle.batches, {"3.weight": 1.0}, True, bundle.weights)
    plain = replay(first, model, loss_of)
    number = plain.parameter_norms["3.weight"] if kind == "gradient spike" else plain.loss
    value = 3 * number if reproduced is False else number
    alarm = {"kind": kind, "value": value, "limit": factor * number, "reproduced": reproduced}
    told = Bundle(alarm, bundle.batches, first.norms, True, bundle.weights)
    found = replay(told, model, loss_of)
    assert (found.spike, found.broken) == (spike, bool(spike))
    assert found._replace(spike=False) == plain
    if kind.endswith("spike"):
        unlimited = Bundle({"kind": kind, "value": value}, bundle.batches, {}, True, bundle.weights)
        assert replay(unlimited, model, loss_of).spike is None


def test_without_weights_those_of_the_model_are_taken(broken, tmp_path):
    model, bundle = broken
    bare = Bundle(bundle.alarm, bundle.batches, bundle.norms)
    folder = bare.write(tmp_path / "step")
    with torch.no_grad():
        model[3].weight[0, 0] = math.nan
    found = replay(folder, model, loss_of)
    assert found.broken
    assert "3.weight" in found.where


class Narrow(torch.autograd.Function):
    """Its gradient passes through float16."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.half().float()


def test_a_bundle_is_replayed_at_its_loss_scale(broken, tmp_path):
    model, bundle = broken

    def replayed(notes):
        told = Bundle(bundle.alarm, bundle.batches, {}, True, bundle.weights, notes)
        folder = told.write(tmp_path / str(len(list(tmp_path.iterdir()))))
        return replay(folder, model, lambda model, batch: Narrow.apply(loss_of(model, batch)))

    found = replayed({"loss_scale": 2.0**16})
    assert (found.broken, found.where) == (True, "the loss")
    sound = replayed({"loss_scale": 2.0**15})
    old = replayed({})
    assert not sound.broken
    assert not old.broken
    assert sound.grad_norm == pytest.approx(old.grad_norm, rel=1e-5)
    for scale in ("much", 0.0, math.inf):
        with pytest.raises(ValueError, match=r"loss_scale: got .*; allowed: a number above 0"):
            replayed({"loss_scale": scale})


def test_a_loss_in_float16_is_scaled_as_in_training(broken):
    model, bundle = broken

    def half(model, batch):
        loss = loss_of(model, batch)
        return (loss - loss.detach() + 2.0).half()

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15)
    assert scaler.scale(torch.tensor(2.0, dtype=torch.float16)).item() == 2.0**16
    found = rerun(model, bundle.batches, half, loss_scale=2.0**15)
    assert (found.loss, found.where, found.broken) == (2.0, "", False)
    plain = rerun(model, bundle.batches, loss_of)
    assert found.parameter_norms == pytest.approx(plain.parameter_norms, rel=1e-3, abs=1e-6)


def test_what_fails_leaves_nothing_behind_and_asks_no_other_process(broken):
    model, bundle = broken

    def failing(model, batch):
        loss = loss_of(model, batch)
        loss.backward()
        raise torch.OutOfMemoryError("no more")

    states = random_states()
    with pytest.raises(torch.OutOfMemoryError, match="no more"):
        rerun(model, bundle.batches, failing, group=object())
    assert all(p.grad is None for p in model.parameters())
    assert same(
        dict(model.named_buffers()), {name: bundle.weights[name] for name, _ in model.named_buffers()}
    )
    assert same(random_states(), states)


def test_weights_of_another_model_are_refused(broken, tmp_path):
    folder = broken[1].write(tmp_path / "step")
    with pytest.raises(ValueError, match=r"weights: got \['0.bias', .*allowed: the names of this model"):
        replay(folder, nn.Linear(4, 1), loss_of)
    more = nn.Sequential(*make_model(), nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"weights: got .*none of \['4.bias', '4.weight'\].*allowed: all of"):
        replay(folder, more, loss_of)
    wider = nn.Sequential(nn.Linear(4, 7), nn.BatchNorm1d(7), nn.Dropout(0.5), nn.Linear(7, 1))
    with pytest.raises(ValueError, match=r"weights\['0.weight'\]: got \(6, 4\)"):
        replay(folder, wider, loss_of)


def test_names_are_those_of_the_model_without_what_is_put_around_it(broken, tmp_path):
    model, bundle = broken
    parts = nn.Sequential(*model[:3], torch.compile(model[3], backend="eager"))
    wrapped = torch.compile(parts, backend="eager")
    assert "_orig_mod.3._orig_mod.bias" in dict(wrapped.named_parameters())
    alarm = Alarm(12, "gradient spike", 1.0, 0.5)
    norms = dict.fromkeys(dict(wrapped.named_parameters()), 1.0)
    written = BundleFolder(tmp_path, GuardPolicy(), None).write(wrapped, bundle.batches, alarm, norms, 1.0)
    read = Bundle.read(written.bundle)
    assert same(dict(read.weights), bundle.weights)
    assert read.norms.keys() == dict(model.named_parameters()).keys()
    plain, found = (replay(read, each, loss_of) for each in (make_model(), wrapped))
    assert plain == found
    assert plain.parameter_norms.keys() == read.norms.keys()


def test_what_needs_a_pickle_is_refused_and_leaves_nothing(tmp_path):
    bundle = Bundle({}, [DrawnBatch(0, 0, {"x": object()}, {})], {})
    with pytest.raises(ValueError, match=r"batch.0.x: got builtins.object"):
        bundle.write(tmp_path / "step")
    wide = Bundle({}, [DrawnBatch(0, 0, torch.ones(2, dtype=torch.complex128), {})], {})
    with pytest.raises(ValueError, match=r"batch.0: got torch.complex128"):
        wide.write(tmp_path / "step")
    assert list(tmp_path.iterdir()) == []


@given(data=st.data())
def test_damage_is_an_error_that_names_the_file(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundle") / "step"
    weights = {"w": torch.arange(3.0)}
    Bundle({"step": 1}, [DrawnBatch(1, 2, torch.ones(2), {})], {"w": 1.0}, True, weights).write(folder)
    name = data.draw(st.sampled_from(["bundle.json", "tensors.safetensors", "weights.safetensors"]))
    content = (folder / name).read_bytes()
    cut = data.draw(st.integers(0, len(content) - 3))  # behind it JSON has a newline
    (folder / name).write_bytes(content[:cut])
    with pytest.raises(ValueError, match="no bundle, or a damaged one"):
        Bundle.read(folder)


HARMS = {
    "another shape": {
        "batches": [{"step": 1, "id": 2, "batch": {"$tensor": ["batch.0", [5]]}, "random": {}}]
    },
    "no end": {"batches": [{"step": math.inf, "id": 2, "batch": 1, "random": {}}]},
    "no random states": {"batches": [{"step": 1, "id": 2, "batch": 1, "random": []}]},
    "deep": {"batches": "deep"},
    "alarm": {"alarm": [1]},
    "norms": {"norms": "x"},
    "no norms": {"norms": {"w": "x"}},
    "notes": {"notes": None},
}


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_what_nobody_wrote_is_an_error_that_names_the_file(harm, tmp_path):
    folder = Bundle({"step": 1}, [DrawnBatch(1, 2, torch.ones(2), {})], {"w": 1.0}).write(tmp_path / "step")
    place = folder / "bundle.json"
    text = json.dumps(json.loads(place.read_text()) | harm)
    place.write_text(text.replace('"deep"', "[" * 100_000))
    with pytest.raises(ValueError, match=r"bundle.json: no bundle, or a damaged one"):
        Bundle.read(folder)


def test_no_bundle(tmp_path):
    with pytest.raises(ValueError, match=r"bundle.json: no bundle"):
        Bundle.read(tmp_path)


def test_files_are_safetensors(broken, tmp_path):
    folder = broken[1].write(tmp_path / "step")
    assert sorted(p.name for p in folder.iterdir()) == [
        "bundle.json",
        "tensors.safetensors",
        "weights.safetensors",
    ]
    assert load_file(folder / "weights.safetensors").keys() == dict(broken[1].weights).keys()


def test_histogram():
    norms = {"a": 0.5, "b": 0.11, "c": 20.0, "d": 0.0, "e": math.inf, "f": math.nan}
    assert histogram(norms) == {"decades": [-1, 0, 1], "counts": [2, 0, 1], "zero": 1, "non_finite": 2}
    assert histogram({}) == {"decades": [], "counts": [], "zero": 0, "non_finite": 0}


EVERYWHERE = "all modules (gradients x10)"


@pytest.mark.parametrize(
    "norms, reference, where",
    [
        ({"a.w": 10.0, "a.b": 10.0, "c.w": 10.0}, {"a.w": 1.0, "a.b": 1.0, "c.w": 1.0}, EVERYWHERE),
        # Two of three layers: backward, the second was the first.
        ({"e.w": 9.0, "x.a.w": 10.0, "y.w": 1.1}, {"e.w": 1.0, "x.a.w": 1.0, "y.w": 1.0}, "x.a"),
        ({"a.w": 8.0, "b.w": 14.0, "c.w": 7.0}, {"a.w": 1.0, "b.w": 1.0, "c.w": 1.0}, EVERYWHERE),
        # What is as small as a rounding error may change by any factor.
        ({"a.w": 10.0, "b.w": 10.0, "c.w": 1e-9}, {"a.w": 1.0, "b.w": 1.0, "c.w": 1e-18}, EVERYWHERE),
        # The parts that are trained have a name in common.
        ({"l.0.w": 9.0, "l.1.w": 10.0, "l.2.w": 1.1}, {"l.0.w": 1.0, "l.1.w": 1.0, "l.2.w": 1.0}, "l.1"),
        ({"x.a.w": 10.0, "x.a.b": 9.0, "x.c.w": 1.1}, {"x.a.w": 1.0, "x.a.b": 1.0, "x.c.w": 1.0}, "x.a"),
        ({"x.a.w": 10.0, "x.c.w": 9.0, "y.w": 1.1}, {"x.a.w": 1.0, "x.c.w": 1.0, "y.w": 1.0}, "x"),
        ({"x.a.w": 10.0, "y.w": 50.0}, {"x.a.w": 1.0, "y.w": 40.0}, "x.a.w"),
        ({"x.a.w": 10.0, "y.w": 50.0}, {}, "y.w"),
        ({"x.a.w": 1.0, "y.w": 2.0}, {"x.a.w": 1.0, "y.w": 2.0}, "y.w"),
        ({"a": math.nan, "b": 1.0}, {}, "a"),
        (dict.fromkeys("abcde", math.inf) | {"f": 1.0}, {}, "e, d, c and 2 more"),
        (dict.fromkeys("abcde", math.inf), {}, "all modules (non-finite gradients)"),
        ({}, {}, ""),
    ],
)
def test_blame(norms, reference, where):
    assert attributed_module(norms, reference) == where


def test_gradients_of_another_optimizer_are_left_as_they_are(broken):
    model, bundle = broken
    model(bundle.batches[0].batch["x"]).sum().backward()
    named = [(name, p) for name, p in model.named_parameters() if name.startswith("0.")]
    before = {name: (p.grad, p.grad.clone()) for name, p in model.named_parameters()}
    found = rerun(model, bundle.batches, loss_of, named=named)
    assert found.parameter_norms == pytest.approx(rerun(model, bundle.batches, loss_of).parameter_norms)
    for name, p in model.named_parameters():
        gradient, values = before[name]
        assert (p.grad is None) if name.startswith("0.") else (p.grad is gradient)
        assert torch.equal(gradient, values)


def test_gradients_that_share_memory_with_what_a_look_writes_come_back(broken):
    """As under DDP with `gradient_as_bucket_view`: it writes into its buckets, of which they are views."""
    model, bundle = broken
    model(bundle.batches[0].batch["x"]).sum().backward()
    bucket = torch.cat([p.grad.flatten() for p in model.parameters()])
    start = 0
    for p in model.parameters():
        p.grad = bucket[start : start + p.numel()].view_as(p)
        start += p.numel()
    values = bucket.clone()

    def overwriting(model, batch):
        bucket.fill_(7.0)
        return loss_of(model, batch)

    rerun(model, bundle.batches, overwriting)
    assert torch.equal(bucket, values)
    assert all(p.grad._is_view() for p in model.parameters())


def test_expanded_buffers_are_computed_with_again(tmp_path):
    def make():
        model = nn.Linear(4, 1)
        model.register_buffer("scale", torch.full((1,), 2.0).expand(4))
        return model

    model = make()
    weights = {n: t.detach().clone() for n, t in [*model.named_parameters(), *model.named_buffers()]}
    given = DrawnBatch(1, 1, torch.ones(3, 4), random_states())
    folder = Bundle({"step": 1, "kind": "non-finite loss"}, [given], {}, True, weights).write(
        tmp_path / "step"
    )
    other = make()
    other.scale[0] = 1.0
    loss = replay(folder, other, lambda model, x: model(x * model.scale).square().mean()).loss
    assert loss == model(torch.full((3, 4), 2.0)).square().mean().item()
