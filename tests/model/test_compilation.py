"""Compilation: each caller has graphs of its own."""

import functools
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from stackwise.model import compilation
from stackwise.model.compilation import Replayable, compiled
from stackwise.model.rotary import constant_tables


def double(x, *, factor=2):
    return x * factor


def test_computes_the_same_defaults_included():
    assert compiled(double)(torch.ones(3)).equal(torch.full((3,), 2.0))


def test_callers_share_no_code_object(monkeypatch):
    """The compiler's limit of graphs is for each code object."""
    seen = []
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: seen.append((function, dynamic)))
    for _ in range(3):
        compiled(double)
    assert len({id(function.__code__) for function, _ in seen} | {id(double.__code__)}) == 4
    assert all(function(2) == 4 and dynamic is False for function, dynamic in seen)


def test_more_callers_than_graphs_of_one_code_object():
    limit = torch._dynamo.config.recompile_limit
    failing = torch._dynamo.config.patch(fail_on_recompile_limit_hit=True)
    with failing, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))  # traced alone
        for n in range(1, limit + 3):
            assert compiled(double)(torch.ones(n)).sum() == 2 * n


class TestReplayable:
    @pytest.fixture(autouse=True)
    def _traced_alone(self, monkeypatch):
        monkeypatch.setattr(compilation, "BACKEND", "eager")

    def test_contents_may_change_and_nothing_else_is_looked_at(self):
        def line(x, by):
            return x * by.slope + by.height

        run, x = Replayable(line), torch.tensor([1.0])
        by = SimpleNamespace(slope=2.0, height=torch.tensor([1.0]))
        y, again = run(x, by)
        x.fill_(5)
        by.height.fill_(3)
        by.slope = 7.0
        assert (y, again()) == (3, 13)
        y, again = run(x, by)
        assert y == again() == 38

    def test_what_became_another_dtype_is_not_replayed(self):
        height = torch.tensor([1.0])
        y, again = Replayable(lambda x, by: x + by)(torch.tensor([1.0]), height)
        assert y == again() == 2
        height.data = height.data.double()
        assert again() is None
        height.data = torch.tensor([3.0])
        assert again() == 4

    @pytest.mark.parametrize("traced", [True, False])
    def test_what_no_single_graph_computes_is_not_replayed(self, traced):
        def broken(x, first):
            y = first(x)
            torch._dynamo.graph_break()
            return y.cos()

        first = torch.sin if traced else torch._dynamo.disable(torch.sin)
        y, again = Replayable(broken)(torch.ones(2), first)
        assert again is None and y.equal(torch.ones(2).sin().cos())

    def test_what_keeps_tensors_besides_its_result_is_not_replayed(self):
        def keeping(x, place):
            place.kept = x * 2
            return place.kept + 1

        place = SimpleNamespace()
        y, again = Replayable(keeping)(torch.ones(2), place)
        assert again is None and y.tolist() == [3, 3] and place.kept.tolist() == [2, 2]


def test_tables_are_marked_as_torch_marks_constants():
    marked = torch.compiler.assume_constant_result(lambda: None)
    assert vars(marked) and vars(marked).items() <= vars(constant_tables).items()


@pytest.mark.slow
def test_the_compiler_is_not_imported_before_it_is_needed():
    program = "import sys, stackwise.training; assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
