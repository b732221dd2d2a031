"""Compilation: each caller has graphs of its own."""

import functools
import subprocess
import sys

import pytest
import torch

from stackwise.model.compilation import compiled
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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._dynamo.config, "fail_on_recompile_limit_hit", True)
        patch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))  # traced alone
        for n in range(1, limit + 3):
            assert compiled(double)(torch.ones(n)).sum() == 2 * n


def test_tables_are_marked_as_torch_marks_constants():
    marked = torch.compiler.assume_constant_result(lambda: None)
    assert vars(marked) and vars(marked).items() <= vars(constant_tables).items()


@pytest.mark.slow
def test_the_compiler_is_not_imported_before_it_is_needed():
    program = "import sys, stackwise.training; assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
