"""Two calls in eval mode: what is caught, what it is called, and what is left alone."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stackwise.checks import check_model
from stackwise.subject.spec import ModelSpec

# Not torch's: a generator that no seed of torch reaches, as NumPy's is.
_draws = itertools.count()


@pytest.fixture(scope="module")
def models(subjects):
    class TinyLM(subjects.TinyLM):
        pass

    class DropoutInEval(TinyLM):
        def mix(self, x):
            return F.dropout(x, 0.1)

    class NoiseInEval(TinyLM):
        def mix(self, x):
            return x + 0.1 * torch.randn_like(x)

    class Dropout(TinyLM):
        def mix(self, x):
            return F.dropout(x, 0.1, self.training)

    class CountsCalls(TinyLM):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, ids):
            self.calls += 1
            return super().forward(ids) + 0.01 * self.calls

    class CountsTraining(CountsCalls):
        def forward(self, ids):
            if self.training:
                return super().forward(ids)
            return subjects.TinyLM.forward(self, ids) + 0.01 * self.calls

    class CountsSilently(CountsCalls):
        def forward(self, ids):
            self.calls += 1
            return subjects.TinyLM.forward(self, ids)

    class OtherGenerator(TinyLM):
        def forward(self, ids):
            return super().forward(ids) + 0.01 * (next(_draws) % 5)

    class RunningStatistics(TinyLM):
        def __init__(self):
            super().__init__()
            self.batch_norm = nn.BatchNorm1d(16)

        def mix(self, x):
            return self.batch_norm(x.transpose(1, 2)).transpose(1, 2)

    class StatisticsInEval(RunningStatistics):
        def mix(self, x):
            self.batch_norm.train()
            self.batch_norm(x.transpose(1, 2))
            self.batch_norm.eval()
            return super().mix(x)

    return {name: value for name, value in locals().items() if isinstance(value, type)}


RANDOM = ["DropoutInEval", "NoiseInEval"]
CHANGING = ["CountsCalls", "OtherGenerator", "StatisticsInEval"]
SOUND = ["TinyLM", "Dropout", "CountsTraining", "CountsSilently", "RunningStatistics"]


@torch.no_grad()
def two_calls(factory, reseed=None):
    torch.manual_seed(0)
    model, outputs = factory().eval(), []
    ids = torch.arange(12).view(2, 6)
    for _ in range(2):
        if reseed is not None:
            torch.manual_seed(reseed)
        outputs.append(model(ids))
    return outputs


@pytest.mark.parametrize("name", RANDOM)
def test_randomness_in_eval_mode(subjects, models, name):
    assert not torch.equal(*two_calls(models[name]))
    assert torch.equal(*two_calls(models[name], reseed=1))
    result = subjects.ask(models[name], "determinism")
    assert result.status == "failed"
    assert result.value > result.limit
    assert "agree under one seed" in result.meaning
    assert "dropout" in result.advice


@pytest.mark.parametrize("name", CHANGING)
def test_change_between_calls(subjects, models, name):
    assert not torch.equal(*two_calls(models[name], reseed=1))
    result = subjects.ask(models[name], "determinism")
    assert result.status == "failed"
    assert result.value > result.limit
    assert "even under one seed" in result.meaning
    assert "buffers" in result.advice


@pytest.mark.parametrize("name", SOUND)
def test_sound_models(subjects, models, name):
    assert torch.equal(*two_calls(models[name]))
    result = subjects.ask(models[name], "determinism")
    assert (result.status, result.value) == ("passed", 0.0)


def test_the_value_is_the_largest_relative_change(subjects, models):
    result = subjects.ask(models["CountsCalls"], "determinism")
    spec = ModelSpec.of(models["CountsCalls"])
    with torch.no_grad():
        first = spec.create().eval()(spec.batch(2, spec.seq_len))
    spread = (first - first[0, 0]).abs().max().item()
    assert result.value == pytest.approx(0.01 / spread, rel=1e-3)


def test_the_caller_may_have_seeded(subjects, models):
    # The same global seed before each call must not hide what is random.
    for seed in range(3):
        torch.manual_seed(seed)
        assert subjects.ask(models["DropoutInEval"], "determinism", seed=seed).status == "failed"


def test_a_random_model_leaves_the_random_state_and_is_judged_by_the_seed(subjects, models):
    results = []
    for seed in range(2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        results.append(subjects.ask(models["DropoutInEval"], "determinism"))
        assert torch.equal(torch.get_rng_state(), before)
    assert results[0] == results[1]


def test_a_model_that_writes_into_its_input(subjects):
    class Writes(subjects.TinyLM):
        def forward(self, ids):
            output = super().forward(ids)
            ids.fill_(3)
            return output

    class Copies(Writes):
        def forward(self, ids):
            return super().forward(ids.clone())

    result = subjects.ask(Writes, "determinism")
    assert result.status == "failed"
    assert "writes into its own input" in result.meaning
    assert subjects.ask(Copies, "determinism").status == "passed"
    # Other comparisons are answered as if it did not: each call has inputs of its own.
    for other in check_model(Writes, checks=["causality", "batch_invariance", "initial_loss"]):
        assert other.status == "passed"


def test_outputs_that_are_infinite_at_some_positions_hide_nothing(subjects, models):
    class Forbidden(models["DropoutInEval"]):
        """Some tokens are ruled out at every second position, as in constrained decoding."""

        def forward(self, ids):
            output = super().forward(ids)
            output[:, 1::2, :3] = -math.inf
            return output

    result = subjects.ask(Forbidden, "determinism")
    assert result.status == "failed"
    assert math.isfinite(result.value)


def test_one_sided_nan_is_a_difference(subjects):
    class SometimesNan(subjects.TinyLM):
        calls = 0

        def forward(self, ids):
            SometimesNan.calls += 1
            return super().forward(ids) * (float("nan") if SometimesNan.calls % 2 else 1.0)

    result = subjects.ask(ModelSpec.of(SometimesNan), "determinism")
    assert (result.status, result.value) == ("failed", float("inf"))


@pytest.mark.parametrize("name", ["seed", "hash_seed"])
def test_randomness_that_a_setting_fixes(subjects, name):
    class Hashed(subjects.TinyLM):
        """Random projections at each call, unless a seed is set."""

        def __init__(self):
            super().__init__()
            setattr(self, name, None)

        def mix(self, x):
            seed = getattr(self, name)
            generator = None if seed is None else torch.Generator().manual_seed(seed)
            return x + 0.1 * torch.randn(x.shape, generator=generator)

    assert not torch.equal(*two_calls(Hashed))
    result = subjects.ask(Hashed, "determinism")
    assert result.status == "warned"
    assert result.where == name
    assert f"if {name} is set" in result.meaning


def test_a_seed_that_is_not_used_excuses_nothing(subjects, models):
    class Unused(models["NoiseInEval"]):
        seed = None

        def __init__(self):
            super().__init__()
            self.seed = None

    assert subjects.ask(Unused, "determinism").status == "failed"
