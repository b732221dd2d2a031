"""The model's own loss: each known mistake is told by name, and what is merely unusual is no failure."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stackwise.checks import check_model
from stackwise.checks.check import select_checks
from stackwise.checks.probe.loss_formula import read_loss_formula
from stackwise.checks.subject import Subject
from stackwise.subject.spec import ModelSpec
from stackwise.training.objective import next_token_loss

NAMES = ["empty_loss", "ignored_labels", "label_shift", "loss_formula", "loss_reduction"]


def nll(logits, labels, shift=1, reduction="mean", **options):
    """Cross-entropy of label t with the logits at t - shift."""
    if shift:
        logits, labels = logits[:, :-shift], labels[:, shift:]
    return F.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten().long(), reduction=reduction, **options
    )


def count(labels):
    return (labels[:, 1:] != -100).sum().clamp(min=1)


def sound(logits, labels):
    return nll(logits, labels, reduction="sum") / count(labels)


def spec_of(build, loss, **declared):
    def labelled_loss(model, ids, labels):
        return loss(model(ids), labels)

    return ModelSpec.of(build, labelled_loss=labelled_loss, **declared)


@pytest.fixture
def statuses(subjects):
    def ask(loss, build=subjects.tiny, **declared):
        results = check_model(spec_of(build, loss, **declared), checks=["loss"])
        assert [r.check for r in results] == NAMES
        return {r.check: r for r in results}

    return ask


def by_status(results, status):
    return [name for name, r in results.items() if r.status == status]


class Distilled(nn.Module):
    """The own loss adds the distance to the distribution of a teacher."""

    def __init__(self, masked):
        super().__init__()
        self.masked, self.embedding, self.head = masked, nn.Embedding(29, 16), nn.Linear(16, 29)

    def forward(self, input_ids, labels=None):
        logits, loss = self.head(self.embedding(input_ids)), None
        if labels is not None:
            teacher = torch.linspace(-1, 1, 29).to(logits).softmax(-1)
            distance = -(teacher * logits[:, :-1].log_softmax(-1)).sum(-1)
            used = (labels[:, 1:] != -100) | torch.tensor(not self.masked)
            loss = sound(logits, labels) + (distance * used).sum() / used.sum().clamp(min=1)
        return SimpleNamespace(logits=logits, loss=loss)


@pytest.mark.parametrize("masked, status", [(True, "passed"), (False, "warned")])
def test_gradient_of_outputs_without_a_label(subjects, masked, status):
    result = subjects.ask(ModelSpec.of(lambda: Distilled(masked)), "ignored_labels")
    assert result.status == status


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_sound(subjects, seed):
    results = check_model(spec_of(subjects.tiny, sound), checks=["loss"], seed=seed)
    assert {r.status for r in results} == {"passed"}


def test_sound_in_float64_and_by_other_code(statuses):
    def by_hand(logits, labels):
        p = (logits.double() - logits.double().amax(-1, keepdim=True)).exp()
        p = p / p.sum(-1, keepdim=True)
        rows = [
            -p[b, t - 1, labels[b, t]].log()
            for b in range(len(labels))
            for t in range(1, labels.shape[1])
            if labels[b, t] != -100
        ]
        return torch.stack(rows).mean() if rows else logits.sum() * 0

    assert by_status(statuses(by_hand), "passed") == NAMES


@pytest.mark.parametrize(
    "loss, place, meaning",
    [
        (lambda z, y: nll(z, y, shift=0), "at t+0", "just read"),
        (lambda z, y: nll(z, y, shift=2), "at t-2", "shifted twice"),
        (lambda z, y: nll(z[:, 1:], y[:, :-1], shift=0), "at t+1", "logits are shifted"),
        (lambda z, y: nll(z, y, shift=0) + 1e-3 * z.square().mean(), "at t+0", "just read"),
        (lambda z, y: nll(z, y, shift=2, reduction="sum"), "at t-2", "shifted twice"),
    ],
)
def test_shift(statuses, loss, place, meaning):
    results = statuses(loss)
    assert results["label_shift"].status == "failed"
    assert results["label_shift"].where.endswith(place)
    assert meaning in results["label_shift"].meaning
    assert results["label_shift"].limit == 0
    assert results["ignored_labels"].status == "passed"
    assert results["loss_formula"].status in ("passed", "warned")


def mixed(logits, labels, **options):
    """Positions and vocabulary change places before both are flattened."""
    rows = logits.transpose(1, 2).reshape(-1, logits.shape[-1])
    return F.cross_entropy(rows, labels.flatten(), **options)


class WithLoss(nn.Module):
    """A model whose call gives the logits and a loss of them."""

    def __init__(self, model, loss):
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, ids, labels=None):
        logits = self.model(ids)
        return logits, None if labels is None else self.loss(logits, labels)


def ask_whole(subjects, loss):
    spec = ModelSpec.of(
        lambda: WithLoss(subjects.tiny(), loss),
        labelled_loss=lambda model, ids, labels: model(ids, labels)[1],
    )
    return subjects.ask(spec, "loss_formula")


@pytest.mark.parametrize("options", [{}, {"ignore_index": -1}])
def test_positions_and_vocabulary_mixed_up(subjects, options):
    logits = torch.randn(2, 4, 7, requires_grad=True)
    labels = torch.randint(7, (2, 4))
    mixed(logits, labels).backward()
    own = logits.grad.gather(-1, labels[..., None])
    assert (own < 0).double().mean() < 0.5
    result = ask_whole(subjects, lambda logits, labels: mixed(logits, labels, **options))
    assert result.status == "failed"
    assert result.value < result.limit
    assert "own logit" in result.meaning
    assert "transpose()" in result.advice


@pytest.mark.parametrize(
    "loss",
    [
        # No formula that is known, and each falls as the label's own logit grows.
        lambda logits, labels: (
            (1 - logits.softmax(-1)).square().mul(F.one_hot(labels.clamp(min=0), 29)).mean()
        ),
        lambda logits, labels: nll(logits, labels) * logits.square().mean(),
        lambda logits, labels: nll(logits, labels, shift=3),
        lambda logits, labels: logits.square().mean() * 0 + 1.0,
    ],
)
def test_an_objective_of_its_own_is_unusual_and_no_failure(subjects, loss):
    assert ask_whole(subjects, loss).status == "warned"


def test_shift_of_models_that_are_not_causal(subjects, statuses):
    class Bidirectional(subjects.TinyLM):
        def visible(self, seq_len):
            return torch.ones(seq_len, seq_len, dtype=torch.bool)

    own = statuses(lambda z, y: nll(z, y, shift=0), Bidirectional, causal=False)
    assert own["label_shift"].status == "passed"
    following = statuses(lambda z, y: nll(z, y), Bidirectional, causal=False)
    assert following["label_shift"].status == "warned"
    assert "not causal" in following["label_shift"].meaning
    twice = statuses(lambda z, y: nll(z, y, shift=2), Bidirectional, causal=False)
    assert twice["label_shift"].status == "failed"
    # `causality` reports that the declaration is wrong.
    wrong = statuses(lambda z, y: nll(z, y, shift=0), Bidirectional, causal=True)
    assert wrong["label_shift"].status == "not applicable"


def test_decoders_of_encoder_decoders_leave_the_shift_to_the_caller(subjects):
    class Decoder(subjects.TinyLM):
        """With weights for what an encoder says, which is not there."""

        def __init__(self):
            super().__init__()
            self.across = nn.Linear(16, 16)

        def forward(self, ids, encoder_hidden_states=None, labels=None):
            logits = super().forward(ids)
            loss = None if labels is None else nll(logits, labels, shift=0)
            return {"logits": logits, "loss": loss}

    class Complete(Decoder):
        def mix(self, x):
            return x + self.across(x)

    def ask(kind):
        spec = ModelSpec.of(kind, labelled_loss=lambda m, ids, y: m(ids, labels=y)["loss"])
        return subjects.ask(spec, "label_shift")

    assert ask(Decoder).status == "passed"
    assert "encoder-decoder" in ask(Decoder).meaning
    assert ask(Complete).status == "failed"


@pytest.mark.parametrize(
    "loss, place",
    [
        (lambda z, y: nll(z, y, reduction="sum"), "divided by 1"),
        (lambda z, y: nll(z, y, reduction="sum") / len(y), "divided by the number of rows"),
        (lambda z, y: nll(z, y, reduction="sum") / y.numel(), "divided by rows * positions"),
        (lambda z, y: nll(z, y, reduction="none").mean(), "divided by rows * (positions - 1)"),
        (lambda z, y: nll(z, y, reduction="sum") / (y != -100).sum().clamp(min=1), "before the shift"),
        # Something added that no label moves does not hide it.
        (lambda z, y: nll(z, y, reduction="sum") / y.numel() + z.square().mean(), "rows * positions"),
    ],
)
def test_reduction(statuses, loss, place):
    results = statuses(loss)
    assert by_status(results, "failed") == ["loss_reduction"]
    assert place in results["loss_reduction"].meaning
    assert results["loss_reduction"].limit == 1


def test_reduction_is_measured(statuses):
    result = statuses(lambda z, y: nll(z, y, reduction="sum"))["loss_reduction"]
    assert result.value == pytest.approx(3 * 15, rel=1e-5)


def test_a_mean_of_rows_is_unusual(statuses):
    def rows(logits, labels):
        each = nll(logits, labels, reduction="none").view(len(labels), -1).sum(dim=1)
        return (each / (labels[:, 1:] != -100).sum(dim=1).clamp(min=1)).mean()

    results = statuses(rows)
    assert by_status(results, "failed") == []
    assert results["loss_reduction"].status == "warned"
    assert "row" in results["loss_reduction"].meaning


def test_softmax_twice(statuses):
    result = statuses(lambda z, y: sound(z.softmax(dim=-1), y))["loss_formula"]
    assert result.status == "failed"
    assert "taken twice" in result.meaning
    assert result.value > result.limit
    # log_softmax of a log_softmax is itself.
    assert by_status(statuses(lambda z, y: sound(z.log_softmax(dim=-1), y)), "passed") == NAMES


@pytest.mark.parametrize(
    "scores, meaning",
    [
        (lambda z: z.float().softmax(dim=-1), "minus the probability"),
        (lambda z: z.float(), "minus the logit"),
    ],
)
def test_no_logarithm(statuses, scores, meaning):
    def loss(logits, labels):
        flat = scores(logits[:, :-1]).flatten(0, 1)
        return F.nll_loss(flat, labels[:, 1:].flatten(), reduction="sum") / count(labels)

    results = statuses(loss)
    assert by_status(results, "failed") == ["loss_formula"]
    assert meaning in results["loss_formula"].meaning


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow(statuses, dtype):
    def loss(logits, labels):
        scores, targets = logits[:, :-1].flatten(0, 1).to(dtype), labels[:, 1:].flatten()
        if not (targets != -100).any():
            return scores.sum() * 0
        return F.cross_entropy(scores, targets).double()

    results = statuses(loss)
    assert by_status(results, "failed") == ["loss_formula"]
    assert results["loss_formula"].where == str(dtype).removeprefix("torch.")


def test_a_loss_in_the_narrow_dtype_of_the_model_is_unusual(subjects, statuses):
    def build():
        return subjects.TinyLM().bfloat16()

    def own_dtype(logits, labels):
        scores, targets = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return F.cross_entropy(scores, targets, reduction="sum") / count(labels)

    assert statuses(own_dtype, build)["loss_formula"].status == "warned"
    assert statuses(sound, build)["loss_formula"].status == "passed"
    assert statuses(own_dtype)["loss_formula"].status == "passed"


@pytest.mark.parametrize(
    "loss, place",
    [
        (lambda z, y: nll(z, y.clamp(min=0)), "labels of -100"),
        (lambda z, y: sound(z, y.masked_fill(y == 0, -100)), "labels of 0"),
        (lambda z, y: nll(z, y.clamp(min=0), reduction="sum") / count(y), "labels of -100"),
        (lambda z, y: nll(z, y, ignore_index=0), "labels of -100"),
        (
            lambda z, y: 0.9 * sound(z, y) - 0.1 * z[:, :-1].float().log_softmax(-1).mean(),
            "labels of -100",
        ),
    ],
)
def test_ignored(statuses, loss, place):
    result = statuses(loss)["ignored_labels"]
    assert result.status == "failed"
    assert result.where == place


def test_refused_labels_are_said_to_be(statuses):
    results = statuses(lambda z, y: nll(z, y, ignore_index=-1))
    assert results["ignored_labels"].status == "failed"
    assert "IndexError" in results["ignored_labels"].meaning
    assert results["loss_formula"].status == "not applicable"
    assert "see ignored_labels" in results["loss_formula"].meaning
    assert results["empty_loss"].status == "warned"


def smoothed(logits, labels):
    if not (labels[:, 1:] != -100).any():
        return logits.sum() * 0
    return nll(logits, labels, label_smoothing=0.1)


@pytest.mark.parametrize(
    "loss",
    [
        lambda z, y: sound(z, y) + 1e-3 * z.logsumexp(dim=-1).square().mean(),
        smoothed,
        lambda z, y: sound(z, y) + 0.01,
        lambda z, y: sound(z, y) + 1e-2 * z.softmax(dim=-1).square().sum(dim=-1).mean(),
        lambda z, y: sound(z, y).square(),
        lambda z, y: 0.5 * sound(z, y),
        lambda z, y: sound(z, y) * (1 - (-sound(z, y)).exp()) ** 2,
        lambda z, y: z[:, 0, 0].sum() * 0 + 3.0,
    ],
)
def test_unusual_is_no_failure(statuses, loss):
    results = statuses(loss)
    assert by_status(results, "failed") == []
    assert results["loss_formula"].status == "warned"
    assert results["loss_formula"].value > results["loss_formula"].limit


def test_smoothing_is_read(subjects):
    spec = spec_of(subjects.tiny, smoothed)
    found = read_loss_formula(Subject(spec, torch.device("cpu")))
    assert (found.known, found.exact, found.shift, found.ignored) == (True, False, 1, "skipped")
    assert found.scale == pytest.approx(0.9, abs=1e-3)


def test_the_expected_value_is_that_of_numpy(subjects):
    spec = spec_of(subjects.tiny, sound)
    subject = Subject(spec, torch.device("cpu"))
    seen = []
    watched = ModelSpec.of(spec, labelled_loss=lambda m, ids, y: seen.append((m(ids), y)) or sound(*seen[-1]))
    found = read_loss_formula(Subject(watched, torch.device("cpu")))
    logits, labels = next((z.detach().double().numpy(), y.numpy()) for z, y in seen[1:])
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    terms = [-log_p[b, t - 1, labels[b, t]] for b in range(3) for t in range(1, subject.seq_len)]
    assert found.expected == pytest.approx(np.mean(terms), rel=1e-9)
    assert found.value == pytest.approx(np.mean(terms), rel=1e-5)


def test_nothing_to_predict(statuses):
    # What cross_entropy does by itself: NaN, while every gradient is 0.
    result = statuses(nll)["empty_loss"]
    assert result.status == "passed"
    assert "0 / 0" in result.meaning
    assert result.where == "a batch without targets"

    def masked(logits, labels):
        each = -logits[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:, None].clamp(min=0))[..., 0]
        keep = labels[:, 1:] != -100
        return (each * keep).sum() / keep.sum()

    result = statuses(masked)["empty_loss"]
    assert result.status == "failed"
    assert "gradients, first" in result.where

    def rows(logits, labels):
        each = nll(logits, labels, reduction="none").view(len(labels), -1).sum(dim=1)
        return (each / (labels[:, 1:] != -100).sum(dim=1)).mean()

    result = statuses(rows)["empty_loss"]
    assert result.status == "failed"
    assert result.where.startswith("one row without targets")


def test_a_loss_that_is_not_finite(statuses):
    results = statuses(lambda z, y: sound(z, y) / 0)
    assert results["loss_formula"].status == "failed"
    assert results["empty_loss"].status == "not applicable"


def test_not_applicable(subjects):
    def reasons(spec):
        return {
            r.check: r.meaning for r in check_model(spec, checks=["loss"]) if r.status == "not applicable"
        }

    assert reasons(subjects.tiny) == dict.fromkeys(NAMES, "needs labelled_loss")
    vectors = spec_of(subjects.encoder, lambda z, y: z.mean())
    assert all("needs token ids" in text for text in reasons(vectors).values())
    assert list(reasons(vectors)) == NAMES
    short = reasons(spec_of(subjects.tiny, sound, seq_len=3))
    assert "at least 4 positions" in short["label_shift"]

    class Constant(subjects.TinyLM):
        def forward(self, ids):
            return super().forward(ids) * 1e-6

    assert "logits that vary" in reasons(spec_of(Constant, sound))["label_shift"]


def test_a_head_that_starts_at_zero_hides_nothing(subjects, statuses):
    class ZeroHead(subjects.TinyLM):
        def __init__(self):
            super().__init__()
            nn.init.zeros_(self.head.weight)

    assert by_status(statuses(sound, ZeroHead), "passed") == NAMES
    assert statuses(lambda z, y: nll(z, y, shift=0), ZeroHead)["label_shift"].status == "failed"


def test_a_padded_vocabulary(subjects, statuses):
    class Padded(subjects.TinyLM):
        def forward(self, ids):
            forbidden = torch.zeros(29)
            forbidden[20:] = -1e9
            return super().forward(ids) + forbidden

    assert by_status(statuses(sound, Padded), "passed") == NAMES
    assert statuses(lambda z, y: nll(z, y, shift=0), Padded)["label_shift"].status == "failed"


def test_float32_only(subjects, statuses):
    class Stubborn(subjects.TinyLM):
        def forward(self, ids):
            if self.head.weight.dtype == torch.float64:
                raise RuntimeError("not in float64")
            return super().forward(ids)

    assert by_status(statuses(sound, Stubborn), "passed") == NAMES
    assert statuses(lambda z, y: nll(z, y, shift=2), Stubborn)["label_shift"].status == "failed"


def test_labels_that_make_the_decoders_inputs(subjects):
    """As in an encoder-decoder: what is predicted follows from the labels themselves, shifted."""

    class EncoderDecoder(subjects.TinyLM):
        def forward(self, ids, labels=None):
            if labels is not None:
                ids = F.pad(labels.clamp(min=0)[:, :-1], (1, 0))
            return {"logits": super().forward(ids)}

    def spec(shift):
        return ModelSpec.of(
            EncoderDecoder,
            causal=None,
            labelled_loss=lambda m, ids, y: nll(m(ids, labels=y)["logits"], y, shift),
        )

    assert subjects.ask(spec(0), "loss_formula").status == "passed"
    assert subjects.ask(spec(0), "label_shift").status == "passed"
    assert subjects.ask(spec(1), "label_shift").status == "warned"


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_models_of_transformers(subjects, name):
    results = {r.check: r for r in check_model(getattr(subjects, name), checks=["loss"])}
    assert by_status(results, "passed") == NAMES


def test_the_loss_of_our_own_trainer(subjects):
    def labelled_loss(model, ids, labels):
        return next_token_loss(model, {"input_ids": ids, "labels": labels})

    results = check_model(ModelSpec.of(subjects.rack, labelled_loss=labelled_loss), checks=["loss"])
    assert {r.check: r.status for r in results} == dict.fromkeys(NAMES, "passed")


def test_nothing_of_the_callers_is_touched(subjects):
    spec = spec_of(subjects.tiny, sound)
    state, mode = torch.get_rng_state(), torch.is_grad_enabled()
    check_model(spec, checks=["loss"])
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled() == mode
    assert all(c.suite == "fast" for c in select_checks(["loss"]))


class OfTheTrainer(nn.Module):
    """Language model that the Trainer of transformers calls with num_items_in_batch."""

    config = SimpleNamespace()
    divides = True

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(29, 16), nn.Linear(16, 29)

    def save_pretrained(self, folder):
        raise NotImplementedError

    def forward(self, input_ids, labels=None, **kwargs):
        logits = self.head(self.tokens(input_ids))
        if labels is None:
            return SimpleNamespace(logits=logits)
        number = kwargs.get("num_items_in_batch") if self.divides else None
        total, targets = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        loss = F.cross_entropy(total, targets, reduction="mean" if number is None else "sum")
        return SimpleNamespace(logits=logits, loss=loss if number is None else loss / number)


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, "passed"),
        ({"divides": False}, "warned"),
        ({"divides": False, "accepts_loss_kwargs": False}, "not applicable"),
    ],
)
def test_loss_items(subjects, changes, status):
    assert subjects.ask(type("Model", (OfTheTrainer,), changes), "loss_items").status == status
