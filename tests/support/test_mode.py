"""Eval mode for a while: what was training trains again, what was not does not, whatever happens."""

import pytest
from torch import nn

from stackwise.support.mode import evaluating


@pytest.fixture
def module():
    module = nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 2)), nn.Linear(2, 2))
    module.train()
    module[1][0].eval()
    module[2].eval()
    return module


def modes(module):
    return {name: part.training for name, part in module.named_modules()}


MIXED = {"": True, "0": True, "1": True, "1.0": False, "1.1": True, "2": False}


def test_every_part_is_in_eval_mode_and_then_in_its_own(module):
    assert modes(module) == MIXED
    with evaluating(module):
        assert not any(modes(module).values())
    assert modes(module) == MIXED


def test_an_exception_passes_and_modes_are_put_back(module):
    with pytest.raises(KeyError, match="within"), evaluating(module):
        raise KeyError("within")
    assert modes(module) == MIXED


def test_nested(module):
    with evaluating(module):
        with evaluating(module):
            pass
        assert not any(modes(module).values())
    assert modes(module) == MIXED


def test_a_module_in_eval_mode_stays_there_and_is_not_walked(module, monkeypatch):
    module.eval()
    monkeypatch.setattr(
        nn.Module, "train", lambda self, mode=True: pytest.fail("each decoded token pays this")
    )
    with evaluating(module):
        assert not any(modes(module).values())
    assert not any(modes(module).values())


def test_a_part_that_trains_below_a_module_that_does_not(module):
    module.training = False
    with evaluating(module):
        assert not any(modes(module).values())
    assert modes(module) == {**MIXED, "": False}
