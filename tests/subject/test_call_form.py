"""Call forms: models that are called in other ways than with inputs alone are found to be."""

import types
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise.checks import check_model
from stackwise.subject.call_form import CallForm, call_forms, forward_parameters, unwrapped
from stackwise.subject.spec import ModelSpec

V = 31


class Core(nn.Module):
    """Each position sees the mean of what is kept up to it."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(V, 8)
        self.up = nn.Linear(8, 16)
        self.head = nn.Linear(16, V)

    def hidden(self, ids, keep=None):
        x = self.embedding(ids)
        keep = torch.ones_like(ids) if keep is None else keep
        weights = keep[..., None].to(x)
        mean = (x * weights).cumsum(1) / weights.cumsum(1).clamp(min=1)
        return torch.tanh(self.up(x + mean))


class LastOnly(Core):
    """As in small training scripts: without targets, the logits of the last position alone."""

    def forward(self, ids, targets=None):
        x = self.hidden(ids)
        if targets is None:
            return self.head(x[:, [-1]]), None
        logits = self.head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


class Named(Core):
    def forward(self, *, input_ids):
        return self.head(self.hidden(input_ids))


class Batch(Core):
    def forward(self, batch):
        logits = self.head(self.hidden(batch["input_ids"], batch.get("attention_mask")))
        loss = None
        if "labels" in batch:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        return {"logits": logits, "loss": loss}


class FullBatch(Batch):
    def forward(self, batch):
        assert isinstance(batch["attention_mask"], Tensor) and isinstance(batch["labels"], Tensor)
        return types.SimpleNamespace(**super().forward(batch))


class DeafBatch(Core):
    def forward(self, batch):
        return self.head(self.hidden(batch["tokens"]))


FORMS = {
    LastOnly: (CallForm(extras=("targets",)), {"labelled_loss"}),
    Named: (CallForm("input_ids"), set()),
    Batch: (CallForm("input_ids", in_batch=True), {"labelled_loss", "masked"}),
    FullBatch: (
        CallForm("input_ids", in_batch=True, extras=("attention_mask", "labels")),
        {"labelled_loss", "masked"},
    ),
    DeafBatch: (CallForm("tokens", in_batch=True), set()),
}


@pytest.mark.parametrize("model", FORMS, ids=lambda model: model.__name__)
def test_form_is_found(model):
    form, can = FORMS[model]
    spec = ModelSpec.of(model)
    assert (spec.inputs, spec.width, spec.forward.function) == ("tokens", V, form)
    assert str(form) in spec.notes
    assert {name for name in ("labelled_loss", "masked", "packed", "decode") if getattr(spec, name)} == can
    built, ids = spec.create().eval(), spec.batch(2, 9)
    torch.testing.assert_close(spec.logits(built, ids), built.head(built.hidden(ids)))


@pytest.mark.parametrize("model", [LastOnly, Batch, FullBatch], ids=lambda model: model.__name__)
def test_loss_is_of_labels_that_are_not_shifted(model):
    spec = ModelSpec.of(model)
    built, ids = spec.create().eval(), spec.batch(2, 9)
    labels = ids.clone()
    labels[0, :4] = -100
    logits = built.head(built.hidden(ids))
    wanted = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(spec.labelled_loss(built, ids, labels), wanted)


@pytest.mark.parametrize("model", [Batch, FullBatch], ids=lambda model: model.__name__)
def test_mask_in_a_batch(model):
    spec = ModelSpec.of(model)
    built, ids = spec.create().eval(), spec.batch(2, 9)
    keep = torch.arange(9) < torch.tensor([[9], [5]])
    output = spec.masked(built, ids, keep)
    logits = output["logits"] if isinstance(output, dict) else output.logits
    torch.testing.assert_close(logits, built.head(built.hidden(ids, keep)))


@pytest.mark.parametrize("model", FORMS, ids=lambda model: model.__name__)
def test_checks_ask_in_that_form(model):
    results = check_model(model)
    assert not [str(result) for result in results if not result.ok]
    assert len([result for result in results if result.status == "passed"]) > 15


def test_a_target_that_is_shifted_once_more():
    class Twice(LastOnly):
        def forward(self, ids, targets=None):
            logits, _ = super().forward(ids, targets)
            if targets is None:
                return logits, None
            return logits, F.cross_entropy(
                logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), ignore_index=-1
            )

    results = {result.check: result.status for result in check_model(Twice, checks=["loss"])}
    assert "failed" in (results["label_shift"], results["loss_formula"])


def test_the_usual_form_comes_first_and_more_is_handed_on():
    assert next(call_forms(LastOnly())) == CallForm()
    seen = []
    model = nn.Identity()
    model.forward = lambda *args, **kwargs: seen.append((args, kwargs))
    ids = torch.arange(4)[None]
    CallForm()(model, ids, use_cache=True)
    CallForm("x", in_batch=True)(model, ids, labels=ids)
    assert seen[0] == ((ids,), {"use_cache": True})
    (batch,), _ = seen[1]
    assert set(batch) == {"x", "labels"}


def test_what_was_tried_is_said():
    class Never(Core):
        def forward(self, batch):
            return self.head(self.hidden(batch["something"]))

    with pytest.raises(ValueError, match=r"no call was found.*Declare inputs="):
        ModelSpec.of(Never)


@pytest.mark.parametrize("kind", [tuple, list])
def test_logits_first(kind):
    class Two(Core):
        def forward(self, ids):
            x = self.hidden(ids)
            return kind([x, self.head(x), None])

    model, ids = Two(), torch.randint(V, (2, 4))
    hidden, logits, rest = CallForm()(model, ids)
    first, second, third = CallForm(element=1)(model, ids)
    assert torch.equal(first, logits) and torch.equal(second, hidden) and third is rest is None
    assert str(CallForm(element=1)) == "called with inputs, logits at [1] of the output"


@pytest.mark.parametrize("element", [0, 1, 5])
def test_what_is_no_tuple_or_names_its_parts_is_left_alone(element):
    class Named(Core):
        def forward(self, ids):
            return types.SimpleNamespace(logits=self.head(self.hidden(ids)), loss=None)

    ids = torch.randint(V, (2, 4))
    assert CallForm(element=element)(Named(), ids).logits.shape == (2, 4, V)
    assert CallForm(element=5)(LastOnly(), ids)[1] is None


def test_what_a_trial_warns_of_is_kept_quiet():
    class Strict(Core):
        def forward(self, batch):
            if isinstance(batch, Tensor):
                warnings.warn("a tensor is no batch", UserWarning, stacklevel=1)
            return self.head(self.hidden(batch["input_ids"]))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ModelSpec.of(Strict).forward.function == CallForm("input_ids", in_batch=True)


def test_what_is_wrapped():
    core = Core()
    assert unwrapped(core) is core
    compiled = torch.compile(core, backend="eager")
    assert unwrapped(compiled) is core
    named = torch.compile(Named(), backend="eager")
    assert list(forward_parameters(named)) == ["input_ids"]
    assert list(call_forms(named)) == list(call_forms(Named())) == [CallForm(), CallForm("input_ids")]
