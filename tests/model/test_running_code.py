"""Code from elsewhere is told apart by what runs, wherever it was written and whatever its file now says."""

import pytest

from stackwise.model import running_code
from stackwise.model.content_hash import ContentHash

# Each with a number that decides what `Own` computes.
SOURCES = {
    "constant": """
class Own:
    def forward(self, x):
        return x * {}
""",
    "default": """
class Own:
    def forward(self, x, by={}):
        return x * by
""",
    "keyword default": """
class Own:
    def forward(self, x, *, by={}):
        return x * by
""",
    "class attribute": """
class Own:
    by = {}
""",
    "inner function": """
class Own:
    def forward(self, x):
        return [y + (lambda z: z * {})(y) for y in x]
""",
    "closure": """
def scaling(by):
    def forward(self, x):
        return x * by
    return forward

class Own:
    forward = scaling({})
""",
    "partial": """
class Own:
    def scale(self, by, x):
        return x * by
    forward = functools.partialmethod(scale, {})
""",
    "partial of a closure": """
class Own:
    forward = functools.partial((lambda by: lambda x: x * by)({}))
""",
    "property": """
class Own:
    @property
    def by(self):
        return {}
""",
    "cached property": """
class Own:
    @functools.cached_property
    def by(self):
        return {}
""",
    "static method": """
class Own:
    @staticmethod
    def by():
        return {}
""",
    "class method": """
class Own:
    @classmethod
    def by(cls):
        return {}
""",
    "method of an object": """
class Scale:
    def __init__(self, by):
        self.by = by
    def scale(self, x):
        return x * {}

class Own:
    forward = Scale(2.0).scale
""",
    "decorated by torch": """
class Own:
    @torch.no_grad()
    def forward(self, x):
        return x * {}
""",
    "wrapper of what is torch's": """
def scaled(function):
    @functools.wraps(function)
    def run(x):
        return function(x) * {}
    return run

class Own:
    forward = scaled(torch.nn.functional.softmax)
""",
    "base": """
class Base:
    def forward(self, x):
        return x * {}

class Own(Base):
    pass
""",
    "class that it makes": """
class Part:
    by = {}

class Own:
    def __init__(self):
        self.part = Part()
""",
    "function of its module": """
def outer(x):
    return scale(x)

def scale(x):
    return x * {}

class Own:
    def forward(self, x):
        return outer(x)
""",
    "cached function of its module": """
@functools.lru_cache
def scale():
    return {}

class Own:
    def forward(self, x):
        return x * scale()
""",
    "number of its module": """
BY = {}

class Own:
    def forward(self, x):
        return [y * BY for y in x]
""",
    "numbers of its module": """
KINDS = {"a": [{1, 2}, (float, {})]}

class Own:
    def forward(self, x):
        return KINDS
""",
    "class of an object of its module": """
class Scale:
    def __call__(self, x):
        return x * {}

scale = Scale()

class Own:
    def forward(self, x):
        return scale(x)
""",
    "what names itself": """
def even(n):
    return n == 0 or odd(n - 1)

def odd(n):
    return n != {} and even(n - 1)

class Own:
    def make(self):
        return Own, super().__init__, even(4)
""",
}


def own(source, by=1.0, **namespace):
    namespace = {"__name__": "elsewhere", **namespace}
    exec("import functools\n\nimport torch\n" + source.replace("{}", str(by)), namespace)
    return ContentHash().code_of(namespace["Own"])


@pytest.mark.parametrize("name", SOURCES)
def test_what_decides_the_result_counts(name):
    source = SOURCES[name]
    assert own(source) == own(source)
    assert own(source) != own(source, 3.0)
    assert own(source) == own("# Moved.\n" + source)


def test_code_executed_without_a_name_counts():
    digests = []
    for by in (1.0, 1.0, 3.0):
        namespace = {}
        exec(SOURCES["constant"].replace("{}", str(by)), namespace)
        assert running_code.from_elsewhere(namespace["Own"]) == [namespace["Own"]]
        digests.append(ContentHash().code_of(namespace["Own"]))
    assert digests[0] == digests[1] != digests[2]
    assert running_code.from_elsewhere(dict) == []


def test_an_import_counts_by_name():
    """Else all that it imports in turn would be read at each call."""
    source = "class Own:\n    def forward(self, x):\n        return scale(x)\n"
    functions = []
    for module, by in (("helpers", 1), ("helpers", 3), ("others", 1)):
        namespace = {"__name__": module}
        exec(f"def scale(x):\n    return x * {by}\n", namespace)
        functions.append(namespace["scale"])
    first, edited, another = (own(source, scale=function) for function in functions)
    assert first == edited != another


def test_a_global_is_not_asked_for_what_it_would_make():
    """Such as the activations of transformers, of which most are no plain values."""
    source = """
class Making(dict):
    def __getitem__(self, key):
        raise AssertionError

made = Making(relu=torch.nn.ReLU)
layer = torch.nn.Linear(2, 2)
layer.forward = torch.relu

class Own:
    def forward(self, x):
        return layer(made["relu"](x))
"""
    assert own(source) == own(source)


def test_order_of_a_constant_set_does_not_count():
    digests = set()
    for values in ("{0, 8}", "{8, 0}"):  # 0 and 8 collide: the order is that of insertion
        digests.add(own(f"class Own:\n    def forward(self, x):\n        return x in {values}\n"))
    assert len(digests) == 1
