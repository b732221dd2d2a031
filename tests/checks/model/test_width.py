"""Width: the slope of activations, against slopes that are built in."""

import pytest
import torch
from torch import nn

from stackwise.model import create_simple_rack
from stackwise.model.initialization import initialize_rack, learning_rate_multipliers
from stackwise.subject.spec import ModelSpec


class Wide(nn.Module):
    """Two layers; `power` is how activations of the second go with the width."""

    def __init__(self, factor=1, power=0.0, rate=-1.0):
        super().__init__()
        width = 32 * factor
        self.tokens = nn.Embedding(29, width)
        self.layer = nn.Linear(width, width, bias=False)
        self.head = nn.Linear(width, 29, bias=False)
        nn.init.normal_(self.layer.weight, std=width**-0.5 * factor**power)
        nn.init.normal_(self.head.weight, std=1 / width)
        self.layer.weight.rate = 1e-3 * factor**rate
        self.head.weight.rate = 1e-3 / factor

    def forward(self, ids):
        return self.head(self.layer(self.tokens(ids)).tanh())


def adam(parameters):
    return torch.optim.Adam([{"params": [p], "lr": getattr(p, "rate", 1e-3)} for p in parameters], eps=1e-12)


def ask(subjects, **options):
    spec = ModelSpec.of(lambda: Wide(**options), at_width=lambda f: Wide(f, **options), optimizer=adam)
    return subjects.ask(spec, "width_independence")


def test_right_parametrisation(subjects):
    result = ask(subjects)
    assert result.status == "passed"
    assert result.value < 0.25


@pytest.mark.parametrize("power", [-0.5, 0.5])
def test_initial_size(subjects, power):
    result = ask(subjects, power=power)
    assert (result.status, result.where) == ("failed", "layer")
    assert result.value == pytest.approx(abs(power), abs=0.15)


def test_learning_rate(subjects):
    # Updates of one sign add up over the width.
    result = ask(subjects, rate=0.0)
    assert (result.status, result.where) == ("failed", "layer")
    assert "change after" in result.meaning


def test_no_claim(subjects):
    result = subjects.ask(Wide, "width_independence")
    assert result.status == "not applicable"
    assert "at_width" in result.meaning


def mup_rack(factor):
    rack = create_simple_rack(1, 1, 16 * factor, 32 * factor, 2 * factor, 29)
    initialize_rack(rack, "mup", 16)
    multipliers = learning_rate_multipliers(rack, 16)
    for name, p in rack.named_parameters():
        p.rate = 1e-3 * multipliers[name]
    return rack


def test_a_rack_whose_final_norm_has_the_multiplier(subjects):
    result = subjects.ask(
        ModelSpec.of(lambda: mup_rack(1), at_width=mup_rack, optimizer=adam), "width_independence"
    )
    assert (result.status, result.value < 0.2) == ("passed", True)


def test_a_rack_whose_optimizer_has_no_multipliers(subjects):
    spec = ModelSpec.of(lambda: mup_rack(1), at_width=mup_rack)
    assert subjects.ask(spec, "width_independence").status == "failed"
