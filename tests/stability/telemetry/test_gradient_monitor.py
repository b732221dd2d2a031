"""GradientMonitor: norms by name against float64, and steps that a fused optimizer leaves out."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from stackwise.stability.telemetry import GradientMonitor, GradientRecord


def model_with(gradients):
    """Parameters of given gradients, by name; None: no gradient."""
    model = nn.Module()
    for name, gradient in gradients.items():
        shape = () if gradient is None else np.shape(gradient)
        model.register_parameter(name, nn.Parameter(torch.zeros(shape)))
        if gradient is not None:
            getattr(model, name).grad = torch.tensor(gradient, dtype=torch.float32)
    return model


@given(
    st.lists(
        st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=4), min_size=1, max_size=4
    )
)
def test_norms_by_name(rows):
    gradients = {f"p{i}": row for i, row in enumerate(rows)}
    monitor = GradientMonitor(model_with(gradients))
    state = monitor.observe()
    [record] = monitor.records()
    norms = {name: math.sqrt(sum(x * x for x in row)) for name, row in gradients.items()}
    total = math.sqrt(sum(norm * norm for norm in norms.values()))
    assert record.parameter_norms == pytest.approx(norms, rel=1e-5, abs=1e-30)
    assert record.total_norm == pytest.approx(total, rel=1e-5, abs=1e-30)
    assert state.total_norm.item() == record.total_norm
    assert state.found_inf.item() == 0.0
    assert record.first_non_finite is None


def test_state_is_what_clipping_takes():
    ours, theirs = (nn.Linear(5, 3) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    for model in (ours, theirs):
        model(torch.arange(5.0)).square().sum().backward()
    total = GradientMonitor(ours).observe().total_norm
    nn.utils.clip_grads_with_norm_(ours.parameters(), 0.5, total)
    nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_state_has_no_graph_and_is_a_scalar():
    state = GradientMonitor(model_with({"a": [1.0, 2.0]})).observe()
    for tensor in state[:2]:
        assert tensor.shape == () and tensor.dtype == torch.float32 and not tensor.requires_grad
    assert state.norms_P.shape == (1,)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_first_parameter_that_broke(value):
    monitor = GradientMonitor(model_with({"a": [1.0], "b": [2.0, value], "c": [value]}))
    state = monitor.observe()
    [record] = monitor.records()
    assert record.first_non_finite == "b"
    assert state.found_inf.item() == 1.0
    assert not math.isfinite(record.total_norm)


def test_parameters_without_a_gradient_have_no_norm():
    model = model_with({"a": [3.0], "b": None, "c": [4.0]})
    monitor = GradientMonitor(model)
    monitor.observe()
    model.a.grad, model.b.grad = None, torch.tensor(12.0)
    monitor.observe()
    assert monitor.records() == [
        GradientRecord(0, 5.0, {"a": 3.0, "c": 4.0}),
        GradientRecord(1, pytest.approx(math.hypot(4, 12)), {"b": 12.0, "c": 4.0}),
    ]


def test_a_monitor_that_is_not_read_forgets_nothing():
    model = model_with({"a": [0.0]})
    monitor = GradientMonitor(model, capacity=4)
    for number in range(30):
        model.a.grad = torch.tensor([float(number)])
        monitor.observe()
    records = monitor.records()
    assert [(record.step, record.total_norm) for record in records] == [(n, n) for n in range(30)]
    assert monitor.records() == monitor.drain() == []


def test_steps_as_they_are_given():
    monitor = GradientMonitor(model_with({"a": [1.0]}))
    for step in (None, 100, None, 7):
        monitor.observe(step)
    assert [record.step for record in monitor.records()] == [0, 100, 101, 7]


def test_names_and_parameters_of_ones_own():
    model = model_with({"a": [3.0], "b": [4.0]})
    monitor = GradientMonitor([("only", model.b)])
    monitor.observe()
    assert monitor.records()[0].parameter_norms == {"only": 4.0}


def test_record_is_data():
    record = GradientRecord(1, 5.0, {"a": 3.0, "b": 4.0})
    assert GradientRecord(**json.loads(json.dumps(record.to_dict()))) == record


def test_mixed_dtypes_keep_their_places():
    model = model_with({"a": [3.0], "b": [0.0], "c": [12.0]})
    model.b.data, model.b.grad = model.b.data.bfloat16(), torch.tensor([4.0]).bfloat16()
    monitor = GradientMonitor(model)
    monitor.observe()
    assert monitor.records() == [GradientRecord(0, 13.0, {"a": 3.0, "b": 4.0, "c": 12.0})]


def test_complex_gradients():
    p = nn.Parameter(torch.zeros(1, dtype=torch.complex64))
    p.grad = torch.tensor([3.0 + 4.0j])
    monitor = GradientMonitor([("p", p)])
    monitor.observe()
    assert monitor.records()[0].parameter_norms == {"p": 5.0}


class TestRefused:
    def test_no_parameters(self):
        with pytest.raises(ValueError, match=r"parameters: got \[\]; allowed: at least one"):
            GradientMonitor(nn.Tanh())

    def test_one_name_twice(self):
        p = nn.Parameter(torch.zeros(1))
        with pytest.raises(ValueError, match=r"parameters: got \['p'\]; allowed: each name once"):
            GradientMonitor([("p", p), ("q", p), ("p", p)])

    def test_capacity_of_one(self):
        with pytest.raises(ValueError, match="capacity: got 1; allowed: an integer >= 2"):
            GradientMonitor(nn.Linear(1, 1), capacity=1)

    def test_before_the_backward_pass(self):
        with pytest.raises(ValueError, match="gradients: got 'none'; allowed: backward"):
            GradientMonitor(nn.Linear(1, 1)).observe()

    def test_sparse_gradients(self):
        model = nn.Embedding(4, 2, sparse=True)
        model(torch.tensor([1])).sum().backward()
        with pytest.raises(ValueError, match=r"gradients: got torch\.sparse_coo; allowed: torch\.strided"):
            GradientMonitor(model).observe()

    @pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
    def test_optimizer_that_is_not_fused(self, kind):
        model = nn.Linear(1, 1)
        with pytest.raises(ValueError, match=r"param_groups\[0\]\['fused'\]: got .*only the fused kernels"):
            GradientMonitor(model).guard(kind(model.parameters(), lr=0.1, foreach=True))

    def test_dampening(self):
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5, fused=True)
        with pytest.raises(ValueError, match=r"param_groups\[0\]\['dampening'\]: got 0.5; allowed: 0"):
            GradientMonitor(model).guard(optimizer)

    def test_optimizer_that_reads_nothing(self):
        model = nn.Linear(1, 1)
        with pytest.raises(ValueError, match="optimizer: got 'RMSprop'; allowed: Adam, AdamW or SGD"):
            GradientMonitor(model).guard(torch.optim.RMSprop(model.parameters()))


@pytest.fixture
def nan_in_new_memory():
    """What is not written yet is NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
        lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    ],
    ids=["AdamW", "Adam", "SGD"],
)
@pytest.mark.usefixtures("nan_in_new_memory")
def test_a_guarded_optimizer_takes_the_sound_steps_alone(make, place):
    """The run with a broken step in it ends where the run without that step ends, state included."""

    def trained(inputs, guarded):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer, monitor = make(model.parameters()), GradientMonitor(model)
        if guarded:
            monitor.guard(optimizer)
        for x in inputs:
            model(x).square().sum().backward()
            monitor.observe()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer.state_dict()["state"]

    sound = [torch.tensor([1.0, -2.0, 0.5]) * k for k in (1, 2, 3)]
    broken = [*sound[:place], sound[place] * math.nan, *sound[place:]]
    (model, state), (twin, twin_state) = trained(broken, guarded=True), trained(sound, guarded=False)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
    for key in twin_state:
        for name, value in twin_state[key].items():
            assert torch.equal(state[key][name], value), name
    hurt, _ = trained(broken, guarded=False)
    assert not hurt.weight.isfinite().all()


def test_a_step_that_was_not_observed_is_made():
    """Also behind one that was left out."""
    model = nn.Linear(3, 2)
    optimizer, monitor = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True), GradientMonitor(model)
    monitor.guard(optimizer)
    for factor, moves in ((math.nan, False), (1.0, True)):
        before = model.weight.detach().clone()
        model(torch.ones(3)).square().sum().mul(factor).backward()
        if not moves:
            monitor.observe()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(model.weight, before) != moves
        assert model.weight.isfinite().all()


def test_an_optimizer_of_ones_own_that_has_found_inf():
    class Own(torch.optim.RMSprop):
        found_inf = None

    model = model_with({"a": [math.nan]})
    optimizer, monitor = Own(model.parameters()), GradientMonitor(model)
    monitor.guard(optimizer)
    monitor.observe()
    assert optimizer.found_inf.item() == 1.0


@pytest.fixture
def alone():
    """A process group of this process."""
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_sharded_gradients(alone):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    named = []
    for name, value, placement in (("a", 3e30, Shard(0)), ("b", 4e30, Replicate())):
        p = nn.Parameter(distribute_tensor(torch.zeros(1, 1), mesh, [placement]))
        p.grad = distribute_tensor(torch.full((1, 1), value), mesh, [placement])
        named.append((name, p))
    monitor = GradientMonitor(named)
    state = monitor.observe()
    assert type(state.total_norm) is torch.Tensor
    [record] = monitor.records()
    assert record.total_norm == pytest.approx(5e30)
    assert record.parameter_norms == pytest.approx({"a": 3e30, "b": 4e30})
