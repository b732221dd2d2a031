"""By what a study knows an evaluation: what a script defines, by the script's name and the code."""

import runpy
from functools import update_wrapper

import pytest

from stackwise.prototype.search.evaluation_name import evaluation_code, evaluation_name
from tests.prototype.search.searches import bowl

SCRIPT = """
from dataclasses import dataclass
from functools import partial
from stackwise.prototype.search.evaluation_name import evaluation_code, evaluation_name


def way(config, seed, report, by=1.0):
    return {loss}


@dataclass(frozen=True)
class Way:
    by: float

    def __call__(self, config, seed, report):
        return {loss}

    def twice(self, config, seed, report):
        return 2 * self(config, seed, report)


ways = [way, partial(way, by=2.0), Way(1.0), Way(1.0).twice]
codes, names = [evaluation_code(each) for each in ways], [evaluation_name(each) for each in ways]
"""


CELL = """
from dataclasses import dataclass
from functools import wraps


def decorated(function):
    @wraps(function)
    def inner(*given):
        return function(*given)

    return inner


def way(config, seed, report, by=1.0, *, twice=False):
    # a comment
    if seed in {0, 8}:
        return [loss for loss in (3.0, 4.0)]
    try:
        return by
    except KeyError:
        return None


@dataclass(frozen=True)
class Way:
    by: float
    factor = 5.0

    @staticmethod
    def scaled(by):
        return 6.0 * by

    @decorated
    def __call__(self, config, seed, report):
        return self.scaled(self.by)
"""


def test_of_a_script_it_is_told_by_its_code(tmp_path):
    def run(script, loss):
        (tmp_path / script).write_text(SCRIPT.replace("{loss}", str(loss)))
        return runpy.run_path(str(tmp_path / script), run_name="__main__")

    one, edited, other = run("one.py", 1.0), run("one.py", 22.0), run("other.py", 1.0)
    for found in (one, edited, other):
        function, of_partial, kind, of_method = found["codes"]
        assert function == of_partial != kind == of_method
    assert not {*one["codes"]} & {*edited["codes"], *other["codes"]}
    assert one["codes"][0].startswith("one.py:") and other["codes"][0].startswith("other.py:")
    assert run("one.py", 1.0)["codes"] == one["codes"]
    assert one["names"] == edited["names"] == other["names"]
    assert one["names"][0] == "__main__:way"


def test_of_a_script_that_is_edited_while_it_runs_it_is_told_by_what_runs(tmp_path):
    script = tmp_path / "one.py"
    begin, end = SCRIPT.replace("{loss}", "1.0").split("ways = ")
    edit = f"from pathlib import Path\nPath(__file__).write_text({SCRIPT.replace('{loss}', '22.0')!r})\n"
    script.write_text(f"{begin}{edit}ways = {end}")
    first = runpy.run_path(str(script), run_name="__main__")["codes"]
    edited = runpy.run_path(str(script), run_name="__main__")["codes"]
    script.write_text(SCRIPT.replace("{loss}", "1.0"))
    assert runpy.run_path(str(script), run_name="__main__")["codes"] == first
    assert not {*first} & {*edited}


def codes_of(cell):
    """Of a function, an object, its method and a function in a wrapper: what a notebook's cell defines."""
    made = {"__name__": "__main__"}
    exec(compile(cell, "<cell>", "exec"), made)

    class Wrapper:
        pass

    wrapper, way = update_wrapper(Wrapper(), made["way"]), made["Way"](1.0)
    return [evaluation_code(each) for each in (made["way"], wrapper, way, way.__call__)]


def test_of_a_cell_it_is_told_by_its_code():
    function, wrapper, kind, method = codes_of(CELL)
    assert function == wrapper != kind == method
    assert codes_of(CELL.replace("# a comment", "# another\n\n")) == [function, wrapper, kind, method]
    assert codes_of(CELL.replace("{0, 8}", "{8, 0}")) == [function, wrapper, kind, method]


@pytest.mark.parametrize(
    "before, after",
    [
        ("by=1.0", "by=2.0"),
        ("twice=False", "twice=True"),
        ("{0, 8}", "{0, 7}"),
        ("(3.0, 4.0)", "(3.0, 4)"),
        ("KeyError", "IndexError"),
        ("return by", "return seed"),
    ],
)
def test_an_edited_function_is_another_one(before, after):
    function, _, kind, _ = codes_of(CELL)
    edited, _, kept, _ = codes_of(CELL.replace(before, after))
    assert edited != function and kept == kind


@pytest.mark.parametrize(
    "before, after",
    [("factor = 5.0", "factor = 5"), ("6.0 * by", "7.0 * by"), ("self.scaled(", "abs(")],
)
def test_an_edited_class_is_another_one(before, after):
    function, _, kind, _ = codes_of(CELL)
    kept, _, edited, _ = codes_of(CELL.replace(before, after))
    assert edited != kind and kept == function


def test_of_a_module_it_is_told_by_its_name():
    assert evaluation_name(bowl) == "tests.prototype.search.searches:bowl"
    assert evaluation_code(bowl) is None
