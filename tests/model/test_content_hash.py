"""The content hash against the bytes themselves: whatever changes what is computed changes it."""

import copy
import dataclasses
import enum
import functools
import gc
import hashlib
import logging
import os
import sys
from collections import Counter, defaultdict
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import stackwise.model.content_hash as module_under_test
from stackwise.model import Stack, create_simple_rack
from stackwise.model.content_hash import ContentHash, tensor_digest
from stackwise.model.rotary import Rotary

SMALL, QUICK = 2**20, 0
PATHS = pytest.mark.parametrize("large", [SMALL, QUICK], ids=["all bytes", "product"])


def make_stack(**block):
    return create_simple_rack(1, 2, 16, 24, 4, 13, **block).get_stack(0)


def changed(act, part, content=None):
    """Whether the digest of a module is another one after `act(module)`."""
    content = content or ContentHash()
    before = content({"part": part})
    assert content({"part": part}) == before
    act(part)
    return content({"part": part}) != before


def step_of(kind, **options):
    def step(weight):
        weight.requires_grad_(True)
        weight.grad = torch.ones_like(weight)
        kind([weight], lr=0.1, **options).step()
        weight.requires_grad_(False)

    return step


def in_inference_mode(weight):
    with torch.inference_mode():
        weight.add_(1)


def without_grad(weight):
    with torch.no_grad():
        weight.add_(1)


def load(weight):
    layer = nn.Linear(*weight.shape[::-1], bias=False)
    layer.weight = weight
    layer.load_state_dict({"weight": torch.zeros_like(weight)})


def replace_data(weight):
    weight.data = weight.data + 1


WRITES = {
    "no_grad": without_grad,
    "data": lambda w: w.data.add_(1),
    "detach": lambda w: w.detach().add_(1),
    "inference_mode": in_inference_mode,
    "numpy": lambda w: w.detach().numpy().__iadd__(1),
    "from_numpy": lambda w: torch.from_numpy(w.detach().numpy()).add_(1),
    "dlpack": lambda w: torch.from_dlpack(w.detach()).add_(1),
    "storage": lambda w: w.untyped_storage().fill_(1),
    "new data": replace_data,
    "load_state_dict": load,
    "fused AdamW": step_of(torch.optim.AdamW, fused=True),
    "foreach AdamW": step_of(torch.optim.AdamW, foreach=True),
    "plain AdamW": step_of(torch.optim.AdamW, foreach=False),
    "fused SGD": step_of(torch.optim.SGD, fused=True),
    "foreach SGD": step_of(torch.optim.SGD, foreach=True),
    "foreach on data": lambda w: torch._foreach_add_([w.data], 1),
    "to parameters": lambda w: nn.utils.vector_to_parameters(torch.zeros(w.numel()), [w]),
}
UNSEEN_BY_VERSION = {
    "data",
    "numpy",
    "from_numpy",
    "dlpack",
    "storage",
    "fused AdamW",
    "fused SGD",
    "foreach on data",
}


@PATHS
@pytest.mark.parametrize("name", WRITES)
def test_every_way_to_write_is_seen(name, large, monkeypatch):
    monkeypatch.setattr(module_under_test, "_LARGE", large)
    layer = nn.Linear(96, 65).requires_grad_(False)
    assert changed(lambda part: WRITES[name](part.weight), layer)


def test_what_a_version_counter_would_have_missed():
    """Why all bytes are read: the trainer's own optimizer is among what `_version` does not see."""
    unseen = set()
    for name, write in WRITES.items():
        weight = nn.Parameter(torch.randn(8, 8), requires_grad=False)
        before = weight._version, weight.data_ptr(), id(weight)
        write(weight)
        if before == (weight._version, weight.data_ptr(), id(weight)):
            unseen.add(name)
    assert unseen == UNSEEN_BY_VERSION


@PATHS
def test_replaced_parameter_is_seen_wherever_it_lies(large, monkeypatch):
    monkeypatch.setattr(module_under_test, "_LARGE", large)
    content, layer, digests = ContentHash(), nn.Linear(96, 65, bias=False), set()
    for i in range(20):
        layer.weight = None
        layer.weight = nn.Parameter(torch.full((65, 96), float(i)))
        digests.add(content({"part": layer}))
    assert len(digests) == 20


def swap(flat, i, k):
    flat[[i, k]] = flat[[k, i]]


def flip_signs(flat, i, k):
    flat[[i, k]] = -flat[[i, k]]


CONTENT = ContentHash()
# Of 6240 float32 numbers: six rows of the product and a rest. In place, at two different places.
CHANGES = {
    "bit": lambda flat, i, k: flat.view(torch.int32)[i].bitwise_xor_(1 << k % 31),
    "sign": lambda flat, i, k: flat[i].neg_(),
    "two signs": flip_signs,
    "all signs": lambda flat, i, k: flat.neg_(),
    "two swapped": swap,
    "all moved": lambda flat, i, k: flat.copy_(flat.roll(k - i)),
    "all doubled": lambda flat, i, k: flat.mul_(2),
    "moved from one to another": lambda flat, i, k: (flat[i].sub_(0.5), flat[k].add_(0.5)),
}


@given(
    change=st.sampled_from(sorted(CHANGES)),
    places=st.lists(st.integers(0, 6239), min_size=2, max_size=2, unique=True),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=60, derandomize=True)
def test_product_sees_what_the_bytes_show(change, places, seed):
    torch.manual_seed(seed)
    weight = torch.randn(65, 96)
    before, copied = CONTENT._quick_digest(weight), weight.clone()
    assert CONTENT._quick_digest(copied) == before
    CHANGES[change](weight.view(-1), *places)
    assert not torch.equal(weight.view(torch.int32), copied.view(torch.int32))
    assert CONTENT._quick_digest(weight) != before


@pytest.mark.parametrize("byte", [-128, -1, 0, 127])
@pytest.mark.parametrize("factor", [-64, 63, None])
def test_product_is_exact(byte, factor):
    """Its argument needs integer arithmetic without overflow or saturation, at the extremes above all."""
    columns = ContentHash()._columns
    assert columns.shape == (2**12, 16)
    assert columns.min() == -64
    assert columns.max() == 63
    if factor is not None:
        columns = torch.full_like(columns, factor)
    rows = torch.full((17, 2**12), byte, dtype=torch.int8)
    assert torch.equal(torch._int_mm(rows, columns).long(), rows.long() @ columns.long())


def test_columns_are_drawn_anew_and_leave_the_callers_random_numbers_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    first, second = ContentHash(), ContentHash()
    assert torch.equal(torch.rand(3), expected)
    assert not torch.equal(first._columns, second._columns)


@PATHS
def test_digest_is_that_of_the_content(large, monkeypatch):
    monkeypatch.setattr(module_under_test, "_LARGE", large)
    stack, content = make_stack(), ContentHash()
    twin = copy.deepcopy(stack)
    before = content({"part": stack})
    assert ContentHash()({"part": twin}) == before
    with torch.no_grad():
        weight = stack.get_block(0).feedforward.gate.weight
        kept = weight.clone()
        weight.mul_(2)
        assert content({"part": stack}) != before
        weight.copy_(kept)
    assert content({"part": stack}) == before
    # The same numbers in another order in memory.
    weight.data = weight.data.T.contiguous().T
    assert not weight.is_contiguous()
    assert content({"part": stack}) == before


def test_digest_of_a_tensor():
    x = torch.arange(6, dtype=torch.int16).view(2, 3)
    assert tensor_digest(x) == hashlib.sha256(b"torch.int16 (2, 3) " + x.numpy().tobytes()).hexdigest()
    others = [x.view(3, 2), x.view(torch.bfloat16), x.int(), x[:, :0], x[:0], x.T, torch.tensor(1)]
    assert len({tensor_digest(each) for each in [x, *others]}) == 8


@PATHS
def test_shape_and_dtype_count(large, monkeypatch):
    monkeypatch.setattr(module_under_test, "_LARGE", large)
    content = ContentHash()
    weight = torch.randn(128, 128)
    variants = [weight, weight.view(64, 256), weight.view(torch.int32), weight.view(-1)]
    assert len({content._digest(each) for each in variants}) == 4


def set_at(path, value):
    return lambda part: setattr(
        functools.reduce(getattr, path.split(".")[:-1], part), path.split(".")[-1], value
    )


@pytest.mark.parametrize(
    "path, value",
    [
        ("blocks.1.attention.softcap", 3.0),
        ("blocks.1.attention.sliding_window", 2),
        ("blocks.1.attention.causal", False),
        ("blocks.0.attention.rotary", None),
        ("blocks.0.attention.rotary", Rotary(4, 99.0)),
        ("blocks.0.attention_norm.eps", 0.5),
        ("blocks.0.feedforward.dropout", 0.5),
        ("blocks.0.norm_first", False),
        ("blocks.0.config.rope_theta", 5.0),
        ("training", False),
    ],
)
def test_settings_count(path, value):
    assert changed(set_at(path, value), make_stack())


def test_buffers_count():
    stack = make_stack(attention_type="kernel")
    assert changed(lambda part: next(part.buffers()).data.add_(1), stack)


def test_order_and_repetition_of_blocks_count():
    first, second = make_stack().blocks
    orders = [[first], [first, first], [first, second], [second, first], [first, second, first]]
    content = ContentHash()
    assert len({content({"part": Stack(blocks)}) for blocks in orders}) == 5


def test_names_count():
    stack, content = make_stack(), ContentHash()
    assert content({"a": stack}) != content({"b": stack})
    first, second = (Stack([block]) for block in stack.blocks)
    assert content({"a": first, "b": second}) != content({"a": second, "b": first})


def test_code_of_the_package_counts(monkeypatch):
    files = sorted(Path(module_under_test.__file__).parent.glob("*.py"))
    assert {"attention.py", "backend.py", "rotary.py"} < {path.name for path in files}
    content = b"".join(path.read_bytes() for path in files)
    assert hashlib.sha256(content).hexdigest() == module_under_test._OWN_CODE
    stack = make_stack()
    before = ContentHash()({"part": stack})
    monkeypatch.setattr(module_under_test, "_OWN_CODE", hashlib.sha256(content + b"#").hexdigest())
    assert ContentHash()({"part": stack}) != before


class Scaled(nn.Module):
    """A module from elsewhere."""

    gain = 1.0

    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return self.scale * x


def test_class_from_elsewhere_counts_as_the_object_that_it_is():
    content = ContentHash()
    assert content.code_of(Scaled) == ContentHash().code_of(Scaled)
    assert content.code_of(nn.Linear) == "torch.nn.modules.linear.Linear"
    assert content.code_of(dict) == "builtins.dict"
    assert changed(lambda part: setattr(part, "scale", 3.0), Scaled(2.0))


# Code of which nothing in its text tells what `Own` computes.
SOURCES = {
    "closure": """
def scaling(by):
    return lambda self, x: x * by

class Own:
    forward = scaling(by)
""",
    "default": """
class Own:
    def forward(self, x, by=by):
        return x * by
""",
    "partial": """
class Own:
    forward = functools.partialmethod(lambda self, by, x: x * by, by)
""",
    "called": """
class Own:
    __call__ = functools.partial(lambda by, x: x * by, by)
""",
    "decorated": """
class Own:
    @torch.set_grad_enabled(by == 1)
    def forward(self, x):
        return x
""",
    "base": """
class Own(torch.nn.ReLU if by == 1 else torch.nn.GELU):
    pass
""",
    "helper": """
def scale(x, by=by):
    return x * by

class Own:
    def forward(self, x):
        return scale(x)
""",
    "object": """
class Scale:
    def __init__(self, by):
        self.by, self.lock = by, threading.Lock()

class Own:
    scale = Scale(by)

    def forward(self, x):
        return self.scale.by * x
""",
    "without a name of its module": """
del __name__
class Own:
    def forward(self, x, by=by):
        return x * by
""",
}


@pytest.fixture
def own(monkeypatch):
    """The class `Own` of a source, of a module that no file has; loaded anew as `importlib.reload` does."""
    module = ModuleType("elsewhere")
    monkeypatch.setitem(sys.modules, "elsewhere", module)

    def make(source, by=1.0):
        vars(module).update(__name__="elsewhere", by=by)
        exec("import functools, threading\n\nimport torch\n" + source, vars(module))
        return module.Own

    return make


@pytest.mark.parametrize("name", SOURCES)
def test_classes_of_one_name_and_text_are_told_apart(name, own):
    first = own(SOURCES[name])
    known = ContentHash().code_of(first)
    assert ContentHash().code_of(first) == known
    assert ContentHash().code_of(own(SOURCES[name], 3.0)) != known


def test_a_function_that_is_replaced_counts(own):
    first = own(SOURCES["helper"])
    known = ContentHash().code_of(first)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first, "forward", lambda self, x: x)
        assert ContentHash().code_of(first) != known
    assert ContentHash().code_of(first) == known


def test_a_helper_that_is_replaced_counts(own):
    first = own(SOURCES["helper"])
    known = ContentHash().code_of(first)
    sys.modules["elsewhere"].scale = lambda x: x
    assert ContentHash().code_of(first) != known


def test_an_address_that_is_used_again_is_another_class():
    """As many as there are: a class that is gone leaves its place to the next."""
    content, codes = ContentHash(), set()
    for _ in range(50):
        codes.add(content.code_of(type("Own", (), {"__module__": "elsewhere"})))
        gc.collect()
    assert len(codes) == 50


def test_in_another_process_code_from_elsewhere_is_another():
    reader, writer = os.pipe()
    known = ContentHash().code_of(Scaled)
    child = os.fork()
    if not child:
        os.write(writer, ContentHash().code_of(Scaled).encode())
        os._exit(0)
    os.waitpid(child, 0)
    told = os.read(reader, 10000).decode()
    os.close(reader), os.close(writer)
    assert told.split()[0] == known.split()[0]
    assert told != known


def test_a_version_stands_for_the_code(own):
    source = SOURCES["object"]
    digests = [ContentHash(version).code_of(own(source)) for version in ("1", "1", "2")]
    assert digests[0] == digests[1] == "elsewhere.Own builtins.object '1'"
    assert digests[1] != digests[2]
    kind = own(source.replace("class Own:", "class Own(torch.nn.Module):"))
    assert ContentHash("1")({"": kind()}) == ContentHash("1")({"": kind()})
    assert "elsewhere" not in ContentHash("1").code_of(nn.Linear)


def test_attributes_of_a_class_from_elsewhere_count(monkeypatch):
    assert changed(lambda _: monkeypatch.setattr(Scaled, "gain", 3.0), Scaled(2.0))
    assert changed(lambda _: monkeypatch.setattr(Scaled, "gain", torch.ones(2)), Scaled(2.0))
    part = Scaled(2.0)
    part.gain = 5.0  # hides that of the class
    assert not changed(lambda _: monkeypatch.setattr(Scaled, "gain", 4.0), part)


class Nested:
    pass


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: int


@pytest.mark.parametrize(
    "value, other",
    [
        (nn.LayerNorm, nn.RMSNorm),
        (Nested, Scaled),
        (torch.relu, torch.tanh),
        (frozenset({"a", "b"}), frozenset({"a", "c"})),
        ({1, "a"}, {1}),
        (logging.getLogger(), Nested()),
        ({"act": (torch.relu, nn.LayerNorm)}, {"act": (torch.tanh, nn.LayerNorm)}),
        ([torch.ones(2)], [torch.zeros(2)]),
        (Slotted(1), Slotted(2)),
        (nn.Linear(2, 2), nn.Linear(2, 2)),
        ((nn.Linear(2, 2),), (nn.Linear(2, 2),)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_whatever_a_class_from_elsewhere_holds_counts(value, other, monkeypatch):
    monkeypatch.setattr(Scaled, "gain", value)
    assert changed(lambda _: monkeypatch.setattr(Scaled, "gain", other), Scaled(2.0))


def test_order_of_a_set_does_not_count(monkeypatch):
    digests = set()
    for values in ([0, 8], [8, 0]):  # 0 and 8 collide: the order is that of insertion
        monkeypatch.setattr(Scaled, "gain", set(values))
        digests.add(ContentHash()({"part": Scaled(2.0)}))
    assert len(digests) == 1


def test_module_of_a_class_counts_in_full_and_once(monkeypatch):
    inner = Scaled(nn.Linear(2, 2))
    monkeypatch.setattr(Scaled, "gain", inner)  # which has itself in turn
    parts = nn.ModuleList([Scaled(2.0), Scaled(2.0)])
    assert changed(lambda _: setattr(inner.scale, "bias", None), parts)
    digested, content = [], ContentHash()
    monkeypatch.setattr(content, "_digest", lambda tensor: digested.append(tensor) or "")
    content({"part": parts})
    assert len(digested) == 1


def test_only_on_attention_is_the_kernel_of_the_last_pass_left_out():
    assert changed(lambda part: setattr(part, "backend", "double"), Scaled(2.0))
    for kind in ("mha", "mla", "kernel"):
        stack = make_stack(attention_type=kind)
        attention = stack.get_block(0).attention
        of_ones_own = type("OwnAttention", (type(attention),), {"__module__": __name__})
        for each in (type(attention), of_ones_own):
            attention.__class__ = each
            assert not changed(lambda _, a=attention: setattr(a, "backend", f"{a.backend}'"), stack)
            assert changed(lambda _, a=attention: setattr(a, "dropout", a.dropout + 0.5), stack)


def test_compiled_modules_count():
    assert changed(lambda part: part.get_block(0).compile(), make_stack())


class Pair(NamedTuple):
    x: int
    y: int


class Named(str):
    pass


class Kind(enum.Enum):
    A = 1
    B = 1.0


def test_class_of_a_value_counts():
    rules = [dataclasses.make_dataclass("Rule", ["x"], namespace={"__module__": "nowhere"}) for _ in range(2)]
    values = [*(rule(1) for rule in rules), (1, 2), [1, 2], Pair(1, 2), {1: 2}, Counter({1: 2})]
    values += [defaultdict(int, {1: 2}), defaultdict(float, {1: 2}), "a", Named("a"), b"a", bytearray(b"a")]
    values += [*Kind, 1, 1.0, True]
    content = ContentHash()
    assert len({content({"part": Scaled(value)}) for value in values}) == len(values)


def test_what_a_value_has_beside_its_content_counts():
    content, digests = ContentHash(), set()
    for kind in (type("Own", (base,), {}) for base in (list, dict, float, str)):
        for by in (1.0, 1.0, 3.0):
            value = kind()
            value.by = by
            digests.add(content({"part": Scaled(value)}))
    assert len(digests) == 8


def test_values_that_are_in_themselves():
    def ring(*beside):
        value = [*beside]
        value.append({"ring": value})
        return value

    content = ContentHash()
    digests = [content({"part": Scaled(ring(*beside))}) for beside in ((), (), (1,))]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        2,
        2.5,
        "x",
        b"x",
        (1, [2]),
        {"b": 1, "a": (2,)},
        torch.float32,
        torch.device("cpu"),
        torch.ones(2),
    ],
    ids=str,
)
def test_plain_values(value):
    content = ContentHash()
    assert content({"part": Scaled(value)}) == content({"part": Scaled(copy.deepcopy(value))})
    assert content({"part": Scaled(value)}) != content({"part": Scaled("other")})


def test_value_that_is_not_plain_is_refused():
    with pytest.raises(ValueError, match=r"part\.scale: got function; allowed: a plain value"):
        ContentHash()({"part": Scaled(lambda x: x)})
    stack = make_stack()
    stack.get_block(0).forward = lambda x, **_: x
    with pytest.raises(ValueError, match=r"part\.blocks\.0\.forward: got function"):
        ContentHash()({"part": stack})


@pytest.mark.parametrize("hook", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_are_refused(hook):
    stack, content = make_stack(), ContentHash()
    handle = getattr(stack.get_block(1).attention.out, hook)(lambda *_: None)
    with pytest.raises(ValueError, match=r"part\.blocks\.1\.attention\.out: got 'a forward hook'"):
        content({"part": stack})
    handle.remove()
    content({"part": stack})


@pytest.mark.parametrize("hook", ["register_module_forward_hook", "register_module_forward_pre_hook"])
@pytest.mark.parametrize("called", [lambda *_: None, functools.partial(lambda *_: None)])
def test_hooks_of_all_modules_are_refused(hook, called):
    stack, content = make_stack(), ContentHash()
    handle = getattr(nn.modules.module, hook)(called)
    try:
        with pytest.raises(ValueError, match="all modules: got 'a forward hook'"):
            content({"part": stack})
    finally:
        handle.remove()
    content({"part": stack})
    with FlopCounterMode(display=False):  # whose hooks are torch's own, and change nothing
        content({"part": stack})


def test_write_between_the_two_hashes_is_not_remembered(monkeypatch):
    """Else the old content would be known by the digest of the new one."""
    monkeypatch.setattr(module_under_test, "_LARGE", QUICK)
    weight, content = torch.randn(65, 96), ContentHash()
    old, expected = weight.clone(), tensor_digest(weight)
    digest = module_under_test.tensor_digest

    def written_to(tensor):
        weight.add_(1)
        return digest(tensor)

    monkeypatch.setattr(module_under_test, "tensor_digest", written_to)
    assert content._digest(weight) != expected
    monkeypatch.setattr(module_under_test, "tensor_digest", digest)
    assert content._digest(old) == expected


def test_memory_of_digests_is_bounded(monkeypatch):
    monkeypatch.setattr(module_under_test, "_LARGE", QUICK)
    content = ContentHash()
    content._known = dict.fromkeys(range(2**12), "")
    x = torch.randn(3)
    assert content._digest(x) == content._digest(x) == tensor_digest(x)
    assert len(content._known) == 1
