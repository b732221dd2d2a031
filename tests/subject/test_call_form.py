"""Call forms: calls with a name, with targets, with a mask or with a dict are found."""

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
    """Each position reads the mean of the real tokens up to it."""

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
    """Without targets, only the last logits are returned, as in small training scripts."""

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


class OnlyTokens(Core):
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
    OnlyTokens: (CallForm("tokens", in_batch=True), set()),
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
def test_labels_of_a_loss_are_not_shifted(model):
    spec = ModelSpec.of(model)
    built, ids = spec.create().eval(), spec.batch(2, 9)
    labels = ids.clone()
    labels[0, :4] = -100
    logits = built.head(built.hidden(ids))
    wanted = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(spec.labelled_loss(built, ids, labels), wanted)


@pytest.mark.parametrize("model", [Batch, FullBatch], ids=lambda model: model.__name__)
def test_mask_in_a_dict_is_found(model):
    spec = ModelSpec.of(model)
    built, ids = spec.create().eval(), spec.batch(2, 9)
    keep = torch.arange(9) < torch.tensor([[9], [5]])
    output = spec.masked(built, ids, keep)
    logits = output["logits"] if isinstance(output, dict) else output.logits
    torch.testing.assert_close(logits, built.head(built.hidden(ids, keep)))


@pytest.mark.parametrize("model", FORMS, ids=lambda model: model.__name__)
def test_checks_use_the_form(model):
    results = check_model(model)
    assert not [str(result) for result in results if not result.ok]
    assert len([result for result in results if result.status == "passed"]) > 15


def test_target_that_is_shifted_twice_fails():
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


def test_further_arguments_are_passed():
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


def test_error_advises_a_declaration():
    class Never(Core):
        def forward(self, batch):
            return self.head(self.hidden(batch["something"]))

    with pytest.raises(ValueError, match=r"no call gives an output.*Declare inputs="):
        ModelSpec.of(Never)


@pytest.mark.parametrize("kind", [tuple, list])
def test_logits_are_moved_to_the_front_of_a_tuple(kind):
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
def test_other_outputs_are_returned_unchanged(element):
    class Named(Core):
        def forward(self, ids):
            return types.SimpleNamespace(logits=self.head(self.hidden(ids)), loss=None)

    ids = torch.randint(V, (2, 4))
    assert CallForm(element=element)(Named(), ids).logits.shape == (2, 4, V)
    assert CallForm(element=5)(LastOnly(), ids)[1] is None


def test_warnings_of_trials_are_hidden():
    class Strict(Core):
        def forward(self, batch):
            if isinstance(batch, Tensor):
                warnings.warn("a tensor is no batch", UserWarning, stacklevel=1)
            return self.head(self.hidden(batch["input_ids"]))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ModelSpec.of(Strict).forward.function == CallForm("input_ids", in_batch=True)


def test_compiled_model_has_the_forms_of_the_model():
    core = Core()
    assert unwrapped(core) is core
    compiled = torch.compile(core, backend="eager")
    assert unwrapped(compiled) is core
    named = torch.compile(Named(), backend="eager")
    assert list(forward_parameters(named)) == ["input_ids"]
    assert list(call_forms(named)) == list(call_forms(Named())) == [CallForm(), CallForm("input_ids")]
