"""Live memory: bytes and objects, counted against what a test has made itself."""

import gc

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from stackwise.benchmark.memory import live_memory
from stackwise.benchmark.memory.live_memory import Earlier, bytes_now, census

CPU = torch.device("cpu")
needs_glibc = pytest.mark.skipif(
    bytes_now(CPU).host is None, reason="this C library does not tell what it gave out"
)


class Thing:
    """Something that the garbage collector knows."""

    def __init__(self):
        self.itself = self


@pytest.fixture
def frozen():
    """What there was before is not looked at."""
    gc.freeze()
    yield
    gc.unfreeze()


@needs_glibc
@pytest.mark.parametrize("numel", [50_000, 5_000_000])
def test_host_bytes_are_those_of_tensors(numel):
    before = bytes_now(CPU)
    held = torch.ones(numel)
    during = bytes_now(CPU)
    assert during.host - before.host == pytest.approx(held.nbytes, rel=0.05, abs=4096)
    assert during.host_kept >= during.host
    del held
    assert abs(bytes_now(CPU).host - before.host) < 20_000
    assert (during.device, during.device_kept) == (None, None)


@needs_glibc
def test_host_bytes_see_a_graph_that_python_does_not():
    weight = torch.ones(3, requires_grad=True)
    before = bytes_now(CPU).host
    total = weight
    for _ in range(1000):
        total = total + 1
    assert bytes_now(CPU).host - before > 100 * 1000


@pytest.mark.parametrize(
    "reading",
    [
        pytest.param(AttributeError("mallinfo2"), id="no such function"),
        pytest.param(0, id="another allocator"),
    ],
)
def test_no_reading_is_put_in_the_place_of_the_allocator(monkeypatch, reading):
    live_memory._glibc_allocates.cache_clear()

    class Library:
        def mallinfo2(self):
            return live_memory._Mallinfo2()

    def library():
        if isinstance(reading, Exception):
            raise reading
        return Library()

    monkeypatch.setattr(live_memory, "_library", library)
    now = bytes_now(CPU)
    assert (now.host, now.host_kept) == (None, None)
    live_memory._glibc_allocates.cache_clear()


def test_tensors_and_their_storages_are_counted(frozen):
    before = census(names=True, sizes=True)
    base = torch.zeros(1000)
    views = [base[:10], base[10:20]]
    parameter = torch.nn.Parameter(torch.zeros(7, dtype=torch.float64))
    seen = census(names=True, sizes=True)
    # The parameter shares the storage of the tensor that it was made from, which is gone.
    assert seen.tensors - before.tensors == 4
    assert seen.counts["torch.Tensor"] - before.counts["torch.Tensor"] == 3
    assert seen.sizes["torch.Tensor"] - before.sizes["torch.Tensor"] == 4000
    assert seen.counts["torch.nn.parameter.Parameter"] == 1
    assert seen.sizes["torch.nn.parameter.Parameter"] == 56
    assert len(views) == 2
    assert parameter.numel() == 7


def test_objects_are_counted_by_type(frozen):
    before = census(names=True)
    held = [Thing() for _ in range(5)]
    seen = census(names=True, sizes=True)
    (name,) = [name for name in seen.counts if name.endswith(".Thing")]
    assert seen.counts[name] - before.counts[name] == len(held)
    assert seen.objects - before.objects >= 5
    assert seen.sizes["list"] > 0


def test_nodes_within_reach_are_counted(frozen):
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * 2).exp().sum()
    seen = census(names=True)
    names = {name: count for name, count in seen.counts.items() if name.startswith("autograd ")}
    # `weight` itself has no node; that which adds to its gradient is within reach.
    assert names == {
        "autograd SumBackward0": 1,
        "autograd ExpBackward0": 1,
        "autograd MulBackward0": 1,
        "autograd torch::autograd::AccumulateGrad": 1,
    }
    assert seen.nodes == 4
    del loss
    assert census().nodes == 0


def test_graph_of_a_frozen_tensor_that_grows_in_its_place():
    weight = torch.ones(3, requires_grad=True)
    total = torch.zeros(3)
    before = Earlier.now()
    gc.freeze()
    try:
        others = census(before).nodes  # of tensors that tests before this one have left
        for _ in range(5):
            total += weight
        assert census(before).nodes - others == 5 + 1
        assert census().nodes == 0
    finally:
        gc.unfreeze()


def test_types_that_cannot_be_hashed_and_odd_tensors(frozen):
    class Meta(type):
        def __eq__(cls, other):
            return cls is other

        __hash__ = None

    class Odd(metaclass=Meta):
        pass

    held = [Odd(), torch.eye(3).to_sparse(), torch.empty(1000, device="meta")]
    seen = census(names=True, sizes=True)
    assert [count for name, count in seen.counts.items() if name.endswith(".Odd")] == [1]
    assert seen.sizes["torch.Tensor"] < 4000
    assert len(held) == 3


def test_looking_leaves_nothing_behind(frozen):
    census(names=True, sizes=True)
    before = len(gc.get_objects())
    for _ in range(5):
        census(names=True, sizes=True)
    assert len(gc.get_objects()) - before < 5


@pytest.mark.gpu
def test_bytes_of_a_gpu():
    device = torch.device("cuda")
    before = bytes_now(device)
    held = torch.ones(1_000_000, device=device)
    now = bytes_now(device)
    assert now.device - before.device >= held.nbytes
    assert now.device_kept >= now.device


def test_sizes_of_tensors_with_symbolic_shapes_are_left_out():
    symbolic = StatelessSymbolicContext(
        [DimDynamic.DYNAMIC, DimDynamic.STATIC], constraint_sizes=[None, None]
    )
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fake = mode.from_tensor(torch.zeros(5, 3), static_shapes=False, symbolic_context=symbolic)
    assert type(fake.untyped_storage().nbytes()) is torch.SymInt
    assert all(type(size) is int for size in census(sizes=True).sizes.values())
