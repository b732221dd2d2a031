"""Trees: any state comes back bit for bit, what cannot be told is refused, and nothing else is understood."""

import json
import math
import pickle
from collections import Counter, OrderedDict, deque, namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from stackwise.checkpoint.tree import MalformedTreeError, decode, encode
from stackwise.support.tensor_tree import leaves

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
CODES = ["<f8", ">f4", "<i2", "|u1", "|b1", "<c16", "<u8"]
scalars = st.builds(lambda code, n: np.dtype(code).type(n), st.sampled_from(CODES), st.integers(0, 9))
numbers = st.integers() | st.floats() | scalars
hashed = st.none() | st.booleans() | numbers | st.text() | st.binary()
keys = hashed | st.tuples(st.integers(), st.tuples(st.text()))
counts = st.dictionaries(keys, numbers, max_size=3).map(Counter)
plain = hashed | st.sets(keys, max_size=3) | counts


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    return torch.randn(shape).to(draw(st.sampled_from(DTYPES)))


@st.composite
def arrays(draw):
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    code = draw(st.sampled_from(CODES))
    return np.arange(math.prod(shape)).reshape(shape).astype(code)


trees = st.recursive(
    plain | tensors() | arrays(),
    lambda down: (
        st.lists(down, max_size=3)
        | st.lists(down, max_size=3).map(tuple)
        | st.dictionaries(keys, down, max_size=3)
        | st.dictionaries(keys, down, max_size=3).map(OrderedDict)
    ),
    max_leaves=8,
)


def there_and_back(tree):
    held = {}
    text = json.dumps(encode(tree, ("x",), held), allow_nan=False)

    def fetch(name, shape, path):
        assert held[name].shape == shape
        return held[name].clone()

    return decode(json.loads(text), fetch)


def same(a, b):
    """By type and by bits, in order."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        alike = (a.dtype, a.shape) == (b.dtype, b.shape)
        return alike and raw(a).numpy(force=True).tobytes() == raw(b).numpy().tobytes()
    if isinstance(a, np.ndarray | np.generic):
        return (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    if isinstance(a, set):
        return len(a) == len(b) and all(any(same(x, y) for y in b) for x in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float):
        return repr(a) == repr(b)
    return a == b


def raw(tensor):
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


@given(trees)
def test_every_state_comes_back(tree):
    assert same(tree, there_and_back(tree))


def test_namedtuple_becomes_a_tuple():
    """Its class would have to be imported."""
    pair = namedtuple("Pair", "first second")(1, (2.0, "x"))
    assert same(there_and_back([pair]), [(1, (2.0, "x"))])


class Hashed(list):
    def __hash__(self):
        return 1


def test_milestones_of_numpy():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    milestones = np.linspace(1, 5, 3).astype(int)
    state = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones).state_dict()
    assert same(state, there_and_back(state))


@pytest.mark.parametrize(
    "value",
    [
        Counter({3: 2, "a": -1}),
        np.float64(0.1),
        np.int8(-3),
        {1, 2, (3, "x")},
        {"$tensor": ["x", []]},
        {"$": 1, "b": 2},
        {1: "int", "1": "text", True + 1: "two", None: 0, (1, 2): 3},
        torch.tensor(math.nan),
        -0.0,
        [math.inf, -math.inf, math.nan],
        torch.randn(4, 3).t(),
        torch.view_as_complex(torch.randn(3, 2)).conj(),
        nn.Parameter(torch.randn(2)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_corners(value):
    found = there_and_back(value)
    if isinstance(value, torch.Tensor):
        # A layout, and whether a gradient is wanted, are the module's and not its state's.
        assert found.dtype == value.dtype
        assert torch.equal(torch.nan_to_num(found), torch.nan_to_num(value.detach()))
    else:
        assert same(value, found)


def test_versions_of_modules_are_kept():
    module = nn.BatchNorm1d(2)
    state = there_and_back(module.state_dict())
    assert state._metadata == module.state_dict()._metadata
    assert state._metadata[""]["version"] == 2


def test_what_is_tied_is_stored_once_and_what_only_looks_so_is_not():
    one = torch.randn(4, 4)
    held = {}
    plain = encode(
        {"a": one, "b": one.view(4, 4), "c": one.t(), "d": one[:2], "e": one.clone()}, ("x",), held
    )
    assert list(held) == ["x.a", "x.c", "x.d", "x.e"]
    assert plain["b"] == plain["a"]
    found = decode(plain, lambda name, shape, path: held[name])
    assert found["b"] is found["a"]
    assert torch.equal(found["c"], one.t())


def test_names_are_each_of_one_tensor():
    held = {}
    encode({"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}, ("x",), held)
    assert len(held) == 2
    # Of nothing there can be no two that are one.
    encode({"p": torch.empty(0), "q": torch.empty(0, 3)}, ("y",), held)
    assert len(held) == 4


@pytest.mark.parametrize(
    "value",
    [
        object(),
        deque([1]),
        lambda: None,
        torch.zeros(2, device="meta"),
        torch.eye(3).to_sparse(),
        np.array(["text"]),
        np.array([object()]),
        np.datetime64("2026-01-01"),
        {frozenset(): 1},
        {(torch.ones(1),): 1},
        {(1, (Hashed(),))},
        Counter({"a": "text"}),
        frozenset([1]),
        bytearray(b"a"),
        torch.float32,
        1j,
        Path("a"),
        np.ma.masked_array([1, 2], [True, False]),
        torch.Generator(),
        10**6000,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_told_is_refused_by_its_place(value):
    with pytest.raises(ValueError, match=r"^optimizer\.deep\.1.*allowed in a checkpoint"):
        encode({"deep": [0, value]}, ("optimizer",), {})


class Evil:
    def __reduce__(self):
        return exec, ("raise SystemExit",)


@pytest.mark.parametrize(
    "value",
    [
        {"$tensor": ["x"]},
        {"$tensor": ["x", [-1]]},
        {"$tensor": ["x", [True]]},
        {"$tensor": [1, []]},
        {"$tensor": ["x", [0, 10**30]]},
        {"$tensor": ["x", [0, 2**40, 2**40]]},
        {"$tensor": ["x", [1] * 100]},
        {"$array": ["x", "<f8", [0, 10**30]]},
        {"$array": ["x", "|O8", [1]]},
        {"$array": ["x", "<f7", [1]]},
        {"$array": ["x", "<f8", "y"]},
        {"$scalar": ["x", "<f8", [2]]},
        {"$scalar": ["|O8", "AAAAAAAAAAA="]},
        {"$scalar": ["<f8", "AAAA"]},
        {"$scalar": ["<f8", 3]},
        {"$bytes": "not base64!"},
        {"$bytes": 3},
        {"$number": "1"},
        {"$number": []},
        {"$tuple": 3},
        {"$set": [[1]]},
        {"$dict": [[[1], 2]]},
        {"$dict": [[1, 2, 3]]},
        {"$dict": {}},
        {"$state_dict": [1]},
        {"$counter": [["a", "b"]]},
        {"$pickle": pickle.dumps(Evil()).hex()},
        {"$tuple": [], "more": 1},
        {"$dict": [[{"$tensor": ["x", []]}, 1]]},
    ],
    ids=repr,
)
def test_what_was_not_encoded_is_not_understood(value):
    with pytest.raises(MalformedTreeError):
        decode({"a": [value]}, lambda name, shape, path: torch.zeros(shape, dtype=torch.uint8))


def contains_itself(kind):
    state = OrderedDict() if kind is dict else []
    state.update(self=state) if kind is dict else state.append(state)
    return state


def nested(levels, wrap):
    tree = 1
    for _ in range(levels):
        tree = wrap(tree)
    return tree


@pytest.mark.parametrize(
    "tree",
    [
        contains_itself(dict),
        contains_itself(list),
        nested(65, lambda tree: [tree]),
        nested(100_000, lambda tree: (tree,)),
        {nested(500, lambda tree: (tree,)): 1},
        {nested(500, lambda tree: (tree,))},
    ],
    ids=["mapping in itself", "list in itself", "one level too many", "many levels", "key", "set"],
)
def test_too_many_levels_are_refused_by_their_place(tree):
    with pytest.raises(ValueError, match=r"^state.*at most 64 levels") as refusal:
        encode([tree], ("state",), {})
    assert len(str(refusal.value)) < 300


@pytest.mark.parametrize(
    "wrap",
    [lambda tree: [tree], lambda tree: (tree,), lambda tree: OrderedDict(a=tree), lambda tree: {1: tree}],
)
def test_many_levels_come_back(wrap):
    tree = nested(63, wrap)
    plain = json.loads(json.dumps(encode(tree, ("state",), {})))
    assert decode(plain, lambda *_: None) == tree


def test_depth_is_bounded():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(MalformedTreeError, match="deeply"):
        decode(deep, lambda name, shape, path: None)


def test_leaves():
    a, b = torch.ones(1), torch.ones(2)
    assert leaves({"x": [1, {"y": a}], "z": b}) == {("x", 1, "y"): a, ("z",): b}
