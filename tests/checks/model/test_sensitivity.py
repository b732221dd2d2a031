"""Sensitivity: inputs and results without an effect are reported, unless a window is declared."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from stackwise import ModelSpec
from tests.zoo.gpt import GPT, Windowed, encoder, gpt, placed, spec_of, windowed


class FirstTokenHidden(GPT):
    def visible(self, T, past, keep, documents):
        visible = super().visible(T, past, keep, documents).clone()
        visible[..., 1:, 0] = False
        return visible


@pytest.mark.parametrize("make", [gpt, placed])
def test_every_input_of_a_sound_model_has_an_effect(subjects, make):
    result = subjects.ask(make(), "token_effect")
    assert result.status == "passed"
    assert result.value > 0


@pytest.mark.parametrize(
    "build, count, last",
    # Two layers of five positions reach 8 positions back, of 24.
    [(Windowed, 15, "input 14 of 24"), (FirstTokenHidden, 1, "input 0 of 24")],
)
def test_inputs_without_an_effect_are_reported(subjects, build, count, last):
    for window, status in ((None, "warned"), ("full", "failed")):
        result = subjects.ask(spec_of(build, window=window), "token_effect")
        assert (result.status, result.value, result.where) == (status, count, last)


@pytest.mark.parametrize("make", [windowed, encoder])
def test_windows_and_pooled_outputs_are_left_to_other_checks(subjects, make):
    assert subjects.ask(make(), "token_effect").status == "not applicable"


class LastUnread(nn.Module):
    """Averages over all inputs but the last one."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(31, 16), nn.Linear(16, 31)

    def forward(self, ids):
        x = self.embedding(ids)
        return self.head(x[:, :-1].mean(1, keepdim=True).expand_as(x))


def _all(ids):
    return torch.ones(ids.shape[1], ids.shape[1])


@pytest.mark.parametrize(
    ("make", "status"),
    [
        (lambda: replace(gpt(), visible=lambda ids: _all(ids).tril()), "passed"),
        (lambda: ModelSpec.of(LastUnread, causal=False, visible=_all), "failed"),
    ],
)
def test_visible_inputs_have_an_effect_on_some_output(subjects, make, status):
    assert subjects.ask(make(), "token_effect").status == status


class Pooled(nn.Module):
    """Text classifier that pools at one token. The padding id is 2."""

    pad_token_id = 2

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(31, 16), nn.Linear(16, 3)

    def forward(self, input_ids, attention_mask=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        x = (self.embedding(input_ids) * attention_mask[..., None]).cumsum(1)
        return self.head(x[torch.arange(len(x)), self.last(input_ids, attention_mask)])

    def last(self, input_ids, attention_mask):
        return (attention_mask * torch.arange(input_ids.shape[1])).argmax(-1)


class BeforeFirstPadding(Pooled):
    def last(self, input_ids, attention_mask):
        return (input_ids == 2).int().argmax(-1) - 1


class LastOfAnotherId(Pooled):
    def last(self, input_ids, attention_mask):
        return ((input_ids != 2) * torch.arange(input_ids.shape[1])).argmax(-1)


class NoPaddingId(BeforeFirstPadding):
    pad_token_id = None


@pytest.mark.parametrize(
    "build, status",
    [
        (BeforeFirstPadding, "failed"),
        (LastOfAnotherId, "passed"),
        (Pooled, "passed"),
        (NoPaddingId, "not applicable"),
        (GPT, "not applicable"),
    ],
)
def test_text_after_a_padding_id_is_read(subjects, build, status):
    assert subjects.ask(build, "text_after_padding_id").status == status


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Statement(nn.Module):
    """Executes a statement with the hidden state x (B, T, C)."""

    def __init__(self, statement):
        super().__init__()
        self.embedding, self.head = nn.Embedding(31, 16), nn.Linear(16, 31)
        self.dropout, self.batch_norm = nn.Dropout(0.1), nn.BatchNorm1d(16)
        self.statement = statement

    def forward(self, ids):
        x = self.embedding(ids)
        self.statement(self, x)
        return self.head(x)


def _clamped(model, x):
    x.clamp(-1, 1)


def _dropped(model, x):
    model.dropout(x)


def _summed(model, x):
    x + 1


def _applied(model, x):
    Identity.apply(x)


@pytest.mark.parametrize(
    ("statement", "name"),
    [(_clamped, "clamp"), (_dropped, "dropout"), (_summed, "add"), (_applied, "Identity.apply")],
)
def test_discarded_results_names_the_function(subjects, statement, name):
    result = subjects.ask(lambda: Statement(statement), "discarded_results")
    assert (result.status, result.value) == ("failed", 1.0)
    assert f"that {name} computes" in result.meaning
    assert "test_sensitivity.py" in result.where


def _changed_in_place(model, x):
    x.mul_(2)
    nn.functional.relu(x, inplace=True)
    x[:, 0] = 0


def _counted(model, x):
    model.batch_norm(x.detach().transpose(1, 2))


def _stored(model, x):
    model.last = x.mean()


def _applied_and_used(model, x):
    model.last = Identity.apply(x)


def _applied_to_an_unused_variable(model, x):
    result = Identity.apply(x)
    if model.training:
        x = result


def test_discarded_results_names_custom_function_with_unused_result(subjects):
    result = subjects.ask(lambda: Statement(_applied_to_an_unused_variable), "discarded_results")
    assert result.status == "failed"
    assert "that Identity.apply computes" in result.meaning


def _stored_in_a_variable(model, x):
    y = x + 1  # noqa: F841


def _stored_in_a_variable_on_purpose(model, x):
    _y = x + 1


def test_discarded_results_warns_about_a_variable_that_is_never_read(subjects):
    result = subjects.ask(lambda: Statement(_stored_in_a_variable), "discarded_results")
    assert result.status == "warned"
    assert "that add computes" in result.meaning
    sound = subjects.ask(lambda: Statement(_stored_in_a_variable_on_purpose), "discarded_results")
    assert sound.status == "passed"


def _applied_and_summed(model, x):
    model.auxiliary = Identity.apply(x).mean()


def _applied_and_selecting(model, x):
    model.choice = Identity.apply(x).argmax(-1)


def _applied_and_read(model, x):
    model.size = float(Identity.apply(x).norm().detach())


def _applied_twice(model, x):
    model.last = Identity.apply(Identity.apply(x))


class TwoScales(nn.Module):
    """Scales of two streams, from one matrix."""

    overwrites = False

    def __init__(self):
        super().__init__()
        self.embedding, self.scale, self.head = nn.Embedding(31, 16), nn.Linear(16, 16), nn.Linear(16, 31)

    def forward(self, ids):
        x = self.embedding(ids)
        first, second = self.scaled(x), self.scaled(x.flip(-1))
        if self.overwrites:
            first = second
        return self.head(x * first + x.flip(-1) * second)

    def scaled(self, x):
        return nn.functional.softplus(self.scale(x))


class OverwrittenScale(TwoScales):
    overwrites = True


class DiscardedInLastLayer(TwoScales):
    """The last of three layers also updates a second stream, which nobody reads."""

    def forward(self, ids):
        x = y = self.embedding(ids)
        for _ in range(3):
            x, y = x + y, self.scaled(y)
        return self.head(x)


class SelectsByScale(TwoScales):
    """The scores only choose a position, which has no gradient."""

    def forward(self, ids):
        x = self.embedding(ids)
        chosen = self.scaled(x).sum(-1).argmax(-1)
        return self.head(x + x[torch.arange(len(x)), chosen][:, None])


class NeededByAnOption(OverwrittenScale):
    """Returns both scales on request."""

    def forward(self, ids, return_scales=False):
        x = self.embedding(ids)
        scale, other = self.scaled(x), self.scale(x.flip(-1))
        return (self.head(x * scale), other) if return_scales else self.head(x * scale)


class ScaledInPlace(TwoScales):
    def forward(self, ids):
        x = self.scale(self.embedding(ids))
        x /= 2
        return self.head(x)


class WithLossTerm(TwoScales):
    """The balancing loss is computed in each call, and used if labels are passed."""

    adds_term = True

    def forward(self, ids, labels=None):
        x = self.scaled(self.embedding(ids))
        balance = x.mean(dim=(0, 1)).square().sum()
        logits = self.head(x)
        if labels is None:
            return {"logits": logits}
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"logits": logits, "loss": loss + balance if self.adds_term else loss}


class WithoutLossTerm(WithLossTerm):
    adds_term = False


@pytest.mark.parametrize(
    ("build", "status"),
    [
        (TwoScales, "passed"),
        (OverwrittenScale, "failed"),
        (NeededByAnOption, "warned"),
        (DiscardedInLastLayer, "passed"),
        (SelectsByScale, "passed"),
        (ScaledInPlace, "passed"),
        (WithLossTerm, "passed"),
        (WithoutLossTerm, "warned"),
    ],
)
def test_discarded_results_that_no_output_depends_on(subjects, build, status):
    result = subjects.ask(build, "discarded_results")
    assert result.status == status, result
    assert status == "passed" or "test_sensitivity.py" in result.where


@pytest.mark.parametrize(
    "statement",
    [
        *(_changed_in_place, _counted, _stored, _applied_and_used),
        *(_applied_and_summed, _applied_and_selecting, _applied_and_read, _applied_twice),
    ],
)
def test_discarded_results_passes_statements_with_an_effect(subjects, statement):
    assert subjects.ask(lambda: Statement(statement), "discarded_results").status == "passed"


class Conditioned(nn.Module):
    """Computes `use(x, value)` on embeddings x."""

    def __init__(self, use):
        super().__init__()
        self.embedding, self.head = nn.Embedding(29, 16), nn.Linear(16, 29)
        self.use = use

    def forward(self, ids, value, attention_mask=None):
        return self.head(self.use(self.embedding(ids), value))


class Reversed(torch.autograd.Function):
    """Scales the gradient only, as in domain-adversarial training."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.factor * gradient, None


def conditioned(use, value):
    def forward(model, ids):
        if isinstance(value, float):
            return model(ids, value, torch.ones(ids.shape))
        row = value.expand(len(ids))
        return model(ids, row.to(model.head.weight) if row.is_floating_point() else row)

    return ModelSpec.of(lambda: Conditioned(use), inputs="tokens", width=29, forward=forward)


TENSOR, NUMBER = torch.tensor(0.3), 0.3
USES = {
    "time": (lambda x, t: x + t[:, None, None], TENSOR, "passed"),
    "ignored time": (lambda x, t: x, TENSOR, "failed"),
    "ignored integer": (lambda x, t: x, torch.tensor(3), "not applicable"),  # it is not named like a step
    "bucket": (lambda x, t: x + (t * 50).long()[:, None, None], TENSOR, "passed"),
    "temperature of 1 / 3": (lambda x, t: x / t, 1 / 3, "passed"),
    "gradient": (Reversed.apply, NUMBER, "passed"),
    "limit": (lambda x, cap: x.clamp(-cap, cap), 100.0, "passed"),
    "ignored strength": (lambda x, strength: x, NUMBER, "warned"),
    "no limit": (lambda x, cap: x, float("inf"), "not applicable"),
}


@pytest.mark.parametrize("name", USES)
def test_numbers_that_forward_gets_have_an_effect(subjects, name):
    use, value, status = USES[name]
    result = subjects.ask(conditioned(use, value), "argument_effect")
    assert (result.status, result.where) == (status, "value" if status in ("failed", "warned") else ""), (
        result
    )


class Denoiser(nn.Module):
    """The inferred call passes 3 as the time step."""

    def __init__(self, *, reads_step):
        super().__init__()
        self.embedding, self.layer, self.reads_step = nn.Embedding(10, 8), nn.Linear(8, 8), reads_step

    def forward(self, x, t):
        return self.layer(x) + self.embedding(t)[:, None] * self.reads_step


@pytest.mark.parametrize(("reads_step", "status"), [(True, "passed"), (False, "failed")])
def test_step_of_a_denoiser_has_an_effect(subjects, reads_step, status):
    result = subjects.ask(ModelSpec.of(lambda: Denoiser(reads_step=reads_step)), "argument_effect")
    assert result.status == status, result


def test_a_model_that_gets_ids_only(subjects):
    assert subjects.ask(gpt(), "argument_effect").status == "not applicable"
