"""By what a study knows an evaluation: what a script defines, by the script's name and the source."""

import runpy

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


def test_of_a_script_it_is_told_by_its_source(tmp_path):
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


def test_of_a_module_it_is_told_by_its_name():
    assert evaluation_name(bowl) == "tests.prototype.search.searches:bowl"
    assert evaluation_code(bowl) is None
