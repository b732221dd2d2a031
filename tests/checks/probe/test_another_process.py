"""Functions of a training run in new processes."""

import torch

from stackwise.checks.probe.another_process import Recipe, run_in_processes
from tests.zoo.loop import Loop, loop, loop_spec_of


def halve(build, number):
    if not isinstance(number, torch.Tensor):
        raise ArithmeticError("no number")
    return number / 2, type(build()).__name__


def waits(build):
    import time

    time.sleep(600)


def test_functions_in_new_processes():
    recipe = Recipe.of(loop())
    arguments = [{"number": torch.ones(2)}, {"number": None}]
    done, failed = run_in_processes(f"{__name__}:halve", recipe, arguments)
    assert torch.equal(done.value[0], torch.full((2,), 0.5))
    assert done.value[1] == "Loop" and not done.error
    assert failed.error.startswith("ArithmeticError: no number (test_another_process.py:") and failed.built
    [stopped] = run_in_processes(f"{__name__}:waits", recipe, [{}], stop=lambda: True)
    assert stopped.error == "the process was stopped"


def test_recipes():
    class Local(Loop):
        pass

    assert Recipe.of(loop_spec_of(Local)) is None
    recipe = Recipe.of(loop_spec_of(Local, factory="tests.zoo.loop:loop"))
    assert recipe.pickled is None and recipe.build() is Loop
