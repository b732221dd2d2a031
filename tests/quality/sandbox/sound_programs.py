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
SOUND = [(program, checks, ("f",)) for program, checks in _ONE] + [
    ("def f(x): return x + 1\ndef g(x): return f(f(x))", "assert f(1) == 2 and g(1) == 3", ("f", "g")),
]
