"""Programs that do what their checks ask for: (program, checks, functions)."""

_ONE = [
    ("def f(a, b): return a + b", "assert f(1, 2) == 3 and f('a', 'b') == 'ab' and f([1], [2]) == [1, 2]"),
    ("def f(x): return [x / 3, -x, x * 1e300 * 1e300]", "assert f(1.0) == [1 / 3, -1.0, float('inf')]"),
    ("def f(): return float('nan')", "import math\nassert math.isnan(f())"),
    ("def f(n): return 2 ** n", "assert f(5000) == 1 << 5000 and f(3) == 8 and type(f(3)) is int"),
    ("def f(x): return not x", "assert f(False) is True and f([1]) is False"),
    ("def f(): return None", "assert f() is None"),
    ("def f(s): return s[::-1]", "assert f('añ漢🎈\\x00') == '\\x00🎈漢ña'"),
    ("def f(b): return b[::-1] + bytearray(b'x')", "assert f(b'ab') == b'bax'"),
    ("def f(x): return {i: (i, {i}) for i in x}", "assert f([1, 'a']) == {1: (1, {1}), 'a': ('a', {'a'})}"),
    ("def f(x): return frozenset(x)", "assert f([1, 1, 2]) == {1, 2} and type(f([])) is frozenset"),
    ("def f(z): return z.conjugate()", "assert f(1 + 2j) == 1 - 2j"),
    ("def f(n):\n    for i in range(n): yield i * i", "assert list(f(4)) == [0, 1, 4, 9]"),
    ("def f(x): return map(str, x)", "assert list(f((1, 2))) == ['1', '2']"),
    ("def f(n): return range(n)", "assert list(f(3)) == [0, 1, 2] and f(3) == range(3)"),
    ("def f(x): x.sort(); x.append(0)", "l = [3, 1, 2]\nassert f(l) is None\nassert l == [1, 2, 3, 0]"),
    ("def f(d): d.pop('a'); d['b'] = [1]", "d = {'a': 1}\nf(d)\nassert d == {'b': [1]}"),
    (
        "def f(x):\n    if x < 0: raise ValueError('below 0')\n    return x",
        "assert f(1) == 1\ntry: f(-1)\nexcept ValueError as e: assert str(e) == 'below 0'\nelse: assert 0",
    ),
    ("def f(x): return {}[x]", "try: f(1)\nexcept KeyError: pass\nelse: raise AssertionError"),
    (
        (
            "from collections import Counter, OrderedDict, defaultdict, namedtuple\n"
            "P = namedtuple('P', 'x y')\n"
            "def f(s): return Counter(s), P(1, 2), defaultdict(list, a=[1]), OrderedDict(b=2)"
        ),
        "assert f('aab') == ({'a': 2, 'b': 1}, (1, 2), {'a': [1]}, {'b': 2})",
    ),
    (
        (
            "import functools, heapq, itertools, math, re, statistics, string\n"
            "@functools.lru_cache\ndef g(n): return n if n < 2 else g(n - 1) + g(n - 2)\n"
            "def f(n): return [g(n), math.gcd(n, 10), re.findall('[a-z]', 'aB'), heapq.nsmallest(1, [2, 1])]"
        ),
        "assert f(60) == [1548008755920, 10, ['a'], [1]]",
    ),
    (
        "class A:\n    def __init__(s, x): s.x = x\ndef f(x, *, y=1): return A(x).x + y",
        "assert f(1, y=5) == 6",
    ),
    ("calls = []\ndef f(): calls.append(1); return len(calls)", "assert [f(), f(), f()] == [1, 2, 3]"),
    ("print('noise')\nimport sys\ndef f(): print('more', file=sys.stderr); return 1", "assert f() == 1"),
    (
        (
            "import tempfile, pathlib\ndef f(t):\n    with tempfile.TemporaryDirectory() as d:\n"
            "        p = pathlib.Path(d, 'x'); p.write_text(t); return p.read_text()"
        ),
        "assert f('kept') == 'kept'",
    ),
    (
        (
            "import threading\ndef f(n):\n    out = []\n"
            "    ts = [threading.Thread(target=out.append, args=(i,))"
            " for i in range(n)]\n    [t.start() for t in ts]; [t.join() for t in ts]\n    return sorted(out)"
        ),
        "assert f(3) == [0, 1, 2]",
    ),
    (
        "import sys\nsys.setrecursionlimit(5000)\ndef f(n): return n and 1 + f(n - 1)",
        "assert f(3000) == 3000",
    ),
    ("def f(n):\n    x = 0\n    for i in range(n): x += i\n    return x", "assert f(300_000) == 44999850000"),
    ("if __name__ == '__main__': raise SystemExit\ndef f(x): return x", "assert f([[[()]]]) == [[[()]]]"),
    (
        "from datetime import date\ndef f(y): return date(y, 2, 28).isoformat()",
        "assert f(2024) == '2024-02-28'",
    ),
]
# What a program and its checks have to find as it is anywhere.
LANGUAGE = {
    "annotations": (
        """
from __future__ import annotations
import dataclasses, pickle, typing
@dataclasses.dataclass
class P:
    x: int
    y: typing.ClassVar[int] = 2
def f(): return P(1).x, len(dataclasses.fields(P)), pickle.loads(pickle.dumps(P(3))).x
""",
        """
from dataclasses import dataclass
@dataclass
class Q:
    x: int
assert Q.__annotations__ == {'x': int}
assert f() == (1, 1, 3)
""",
    ),
    "sockets": (
        """
import asyncio, socket
async def echo():
    one, other = socket.socketpair()
    reader, _ = await asyncio.open_connection(sock=one)
    other.send(b"a")
    return await reader.read(1)
def f():
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close()
    return asyncio.run(echo())
""",
        "assert f() == b'a'",
    ),
    "views of dicts": (
        "def f(d): return d.keys(), d.values(), d.items()",
        """
keys, values, items = f({2: [1], 1: [2]})
assert keys == {1, 2} and list(keys) == [2, 1] and list(values) == [[1], [2]]
assert items == {2: [1], 1: [2]}.items() and sorted(items) == [(1, [2]), (2, [1])]
""",
    ),
    "errors of standard modules": (
        """
import decimal, json, subprocess
def f(what):
    match what:
        case 'json': json.loads('{')
        case 'decimal': decimal.Decimal('a')
        case 'process': raise subprocess.CalledProcessError(3, 'ls', stderr='no')
        case 'group': raise ExceptionGroup('several', [ValueError(1)])
""",
        """
import decimal, json, subprocess
def raised(kind, what):
    try: f(what)
    except kind as error: return error
    raise AssertionError(what)
error = raised(json.JSONDecodeError, 'json')
assert (error.pos, error.doc) == (1, '{')
assert isinstance(raised(decimal.InvalidOperation, 'decimal'), ArithmeticError)
error = raised(subprocess.CalledProcessError, 'process')
assert (error.returncode, error.stderr) == (3, 'no')
assert str(raised(Exception, 'group')) == 'several (1 sub-exception)'
""",
    ),
    "annotations are no texts": (
        "def g(x: int): ...\ndef f(): return g.__annotations__['x'] is int, __name__",
        "assert f() == (True, 'candidate')",
    ),
    "errors": (
        """
import json
class Bad(ValueError): pass
class Own(Exception):
    def __str__(self): return 'its own text'
class Many(UnicodeDecodeError): pass
def f(what):
    match what:
        case 'json': json.loads('{')
        case 'bad': raise Bad('a', 1)
        case 'own': raise Own(1)
        case 'decode': bytes([255]).decode()
        case 'key': raise KeyError('a')
        case 'file': open('/nowhere')
        case 'strange': raise Many('ascii', b'a', 0, 1, 'b')
        case 'not plain': raise ValueError(object)
        case 'end': raise SystemExit(3)
""",
        """
def raised(kind, what):
    try: f(what)
    except kind as error: return error
    raise AssertionError(what)
assert raised(ValueError, 'json').args == ('Expecting property name enclosed in double quotes: '
    'line 1 column 2 (char 1)',)
error = raised(ValueError, 'bad')
assert error.args == ('a', 1) and type(error).__name__ == 'Bad'
assert str(raised(Exception, 'own')) == 'its own text'
assert type(raised(ValueError, 'decode')) is UnicodeDecodeError
assert raised(LookupError, 'key').args == ('a',) and type(raised(KeyError, 'key')) is KeyError
assert raised(FileNotFoundError, 'file').errno == 2
assert raised(UnicodeDecodeError, 'strange').reason == 'b'
assert str(raised(ValueError, 'not plain')) == "<class 'object'>"
assert 'SystemExit: 3' in str(raised(Exception, 'end'))
""",
    ),
    "objects": (
        """
def f(*args, **kwargs): return globals()[args[0]](*args[1:], **kwargs)
def named(xs): xs.append(1)
def inner(xs): xs[0]['a'].add(1); xs.reverse()
def both(a, b): a.append(1); return len(b), a is b
def back(a): return a, [a]
def twins(): a = []; return a, a
def lazy(a):
    for i in range(2): a.append(i); yield a
def swap(a, b): a[:], b[:] = [b], []
""",
        """
from collections import Counter, OrderedDict
a = []
f('named', xs=a)
assert a == [1]
i, j = {'a': set()}, []
a = [i, j]
f('inner', a)
assert i == {'a': {1}} and a[0] is j and a[1] is i
assert f('both', j, j) == (1, True) and j == [1]
one, [two] = f('back', a)
assert one is two is a
one, two = f('twins')
assert one is two
assert [each is j for each in f('lazy', j)] == [True, True] and j == [1, 0, 1]
a, b = [1], [2]
f('swap', a, b)
assert a == [[]] and a[0] is b
for own in (Counter('aab'), OrderedDict(a=2, b=1)):
    kept = type(own)
    f('back', [own])
    assert type(own) is kept and own == {'a': 2, 'b': 1} and list(own) == ['a', 'b']
""",
    ),
}
SOUND = [(program, checks, ("f",)) for program, checks in _ONE] + [
    ("def f(x): return x + 1\ndef g(x): return f(f(x))", "assert f(1) == 2 and g(1) == 3", ("f", "g")),
]
