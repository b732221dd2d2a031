"""Routers' losses: what does not reach the router, or counts padding, is caught."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stackwise.checks import check_model
from stackwise.subject.spec import ModelSpec

NAMES = ["auxiliary_gradient", "auxiliary_in_loss", "auxiliary_padding", "auxiliary_value"]


@pytest.fixture(scope="module")
def models(subjects):
    class Routed(subjects.TinyLM):
        """Two experts, of which each token goes to one."""

        coefficient = 0.01

        def __init__(self):
            super().__init__()
            self.router = nn.Linear(16, 3, bias=False)

        def forward(self, ids, keep=None, labels=None):
            self.probabilities = []
            logits = super().forward(ids)
            self.auxiliary = self.balance(torch.stack(self.probabilities), self.weight(ids, keep))
            if labels is None:
                return logits
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            return {"logits": logits, "loss": loss + self.coefficient * self.auxiliary}

        def mix(self, x):
            self.probabilities.append(self.route(x).softmax(dim=-1))
            return x * (1 + self.probabilities[-1].amax(dim=-1, keepdim=True))

        def route(self, x):
            return self.router(x)

        def weight(self, ids, keep):
            keep = torch.ones_like(ids) if keep is None else keep
            return keep.to(self.router.weight.dtype)[None, ..., None]

        def balance(self, p, weight):
            chosen = F.one_hot(p.argmax(dim=-1), 3)
            share = (chosen * weight).sum(dim=(1, 2)) / weight.sum()
            return 3 * (share * (p * weight).sum(dim=(1, 2)) / weight.sum()).sum(dim=-1).mean()

    class Detached(Routed):
        def balance(self, p, weight):
            return super().balance(p.detach(), weight)

    class Counts(Routed):
        def balance(self, p, weight):
            return F.one_hot(p.argmax(dim=-1), 3).double().mean(dim=(1, 2)).square().sum()

    class CountsPadding(Routed):
        def weight(self, ids, keep):
            return super().weight(ids, None)

    class CountsPaddingInPart(Routed):
        """The counts leave padding out, the probabilities do not."""

        def balance(self, p, weight):
            share = (F.one_hot(p.argmax(dim=-1), 3) * weight).sum(dim=(1, 2)) / weight.sum()
            return 3 * (share * p.mean(dim=(1, 2))).sum(dim=-1).mean()

    class LeftOut(Routed):
        coefficient = 0.0

    class Asked(LeftOut):
        class config:  # noqa: N801
            output_router_logits = True
            router_aux_loss_coef = 0.01

    class AskedForNothing(LeftOut):
        class config:  # noqa: N801
            output_router_logits = True
            router_aux_loss_coef = 0.0

    class Negative(Routed):
        def balance(self, p, weight):
            return (p * p.log()).sum(dim=-1).mean()

    class Infinite(Routed):
        def balance(self, p, weight):
            return -(p - p).log().mean()

    class OnlyInTraining(Routed):
        def balance(self, p, weight):
            return super().balance(p, weight) / (0.0 if self.training else 1.0)

    class Everywhere(Routed):
        """Every token to every expert: the loss is a constant."""

        def balance(self, p, weight):
            return 3 * p.mean(dim=(1, 2)).sum(dim=-1).mean() / 3

    return {name: value for name, value in locals().items() if isinstance(value, type)}


def spec_of(kind, **declared):
    def auxiliary_loss(model, ids, keep):
        model(ids, keep=keep)
        return model.auxiliary

    attributes = {
        "auxiliary_loss": auxiliary_loss,
        "labelled_loss": lambda model, ids, labels: model(ids, labels=labels)["loss"],
        "masked": lambda model, ids, keep: model(ids, keep=keep),
    }
    return ModelSpec.of(kind, **attributes | declared)


def results_of(spec):
    results = check_model(spec, checks=["auxiliary"])
    assert [r.check for r in results] == NAMES
    return {r.check: r for r in results}


@pytest.mark.parametrize("seed", [0, 1])
def test_sound(models, seed):
    results = check_model(spec_of(models["Routed"]), checks=["auxiliary"], seed=seed)
    assert {r.status for r in results} == {"passed"}


@pytest.mark.parametrize("name", ["Detached", "Counts"])
def test_cut_off(models, name):
    spec = spec_of(models[name])
    assert not spec.auxiliary_loss(spec.create(), spec.batch(2, 8), None).requires_grad
    result = results_of(spec)["auxiliary_gradient"]
    assert result.status == "failed"
    assert "has no effect" in result.meaning


@pytest.mark.parametrize("name", ["CountsPadding", "CountsPaddingInPart"])
def test_padding(models, name):
    spec = spec_of(models[name])
    model, inputs = spec.create().eval(), spec.batch(2, 8)
    keep = torch.arange(8).expand(2, 8) < 5
    with torch.no_grad():
        moved = spec.auxiliary_loss(model, inputs, keep)
        inputs[:, 6:] = 0
        assert moved != spec.auxiliary_loss(model, inputs, keep)
    results = results_of(spec)
    assert [n for n in NAMES if results[n].status == "failed"] == ["auxiliary_padding"]
    assert results["auxiliary_padding"].value > results["auxiliary_padding"].limit
    assert results["auxiliary_padding"].where in ("other padding", "more padding")


@pytest.mark.parametrize(
    "name, status", [("CountsPadding", "not applicable"), ("CountsPaddingInPart", "failed")]
)
def test_padding_of_a_model_that_takes_no_mask(models, name, status):
    result = results_of(spec_of(models[name], masked=None))["auxiliary_padding"]
    assert result.status == status
    if status == "not applicable":
        assert "masked" in result.meaning


def test_left_out_of_the_loss(models):
    result = results_of(spec_of(models["LeftOut"]))["auxiliary_in_loss"]
    assert result.status == "warned"
    assert abs(result.value) <= result.limit
    asked = results_of(spec_of(models["Asked"]))["auxiliary_in_loss"]
    assert asked.status == "failed"
    assert "output_router_logits" in asked.meaning
    assert results_of(spec_of(models["AskedForNothing"]))["auxiliary_in_loss"].status == "warned"


def test_what_is_added_is_measured(models):
    spec = spec_of(models["Routed"])
    model, inputs = spec.create().train(), spec.batch(2, 16)
    with torch.no_grad():
        expected = 0.01 * spec.auxiliary_loss(model, inputs, None).item()
    assert results_of(spec)["auxiliary_in_loss"].value == pytest.approx(expected, rel=1e-3)


def test_value(models):
    negative = results_of(spec_of(models["Negative"]))["auxiliary_value"]
    assert (negative.status, negative.limit) == ("warned", 0)
    assert negative.value < 0
    assert results_of(spec_of(models["Infinite"]))["auxiliary_value"].status == "failed"
    training = results_of(spec_of(models["OnlyInTraining"]))["auxiliary_value"]
    assert (training.status, training.where) == ("failed", "train mode")


def test_gradients_of_a_constant_are_unusual(models):
    result = results_of(spec_of(models["Everywhere"]))["auxiliary_gradient"]
    assert result.status == "warned"


def test_not_applicable(subjects, models):
    results = results_of(ModelSpec.of(subjects.tiny))
    assert {r.meaning for r in results.values()} == {"needs auxiliary_loss"}
    assert {r.status for r in results.values()} == {"not applicable"}
    results = results_of(spec_of(models["Routed"], labelled_loss=None))
    assert results["auxiliary_in_loss"].meaning == "needs labelled_loss"

    def maskless(model, ids, keep):
        if keep is not None:
            raise TypeError("no mask")
        model(ids)
        return model.auxiliary

    results = results_of(spec_of(models["Routed"], auxiliary_loss=maskless))
    assert results["auxiliary_padding"].status == "not applicable"
    assert "no mask" in results["auxiliary_padding"].meaning
    short = results_of(spec_of(models["Routed"], seq_len=4))
    assert "at least 6 positions" in short["auxiliary_padding"].meaning
