"""Call forms: calls with a name, with targets, with a mask or with a dict are found."""

import types
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise.checks import check_model
from stackwise.subject.argument import Argument, Read, arguments_for
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
    LastOnly: (CallForm(extras=(Argument("targets"),)), {"labelled_loss"}),
    Named: (CallForm("input_ids"), set()),
    Batch: (CallForm("input_ids", in_batch=True), {"labelled_loss", "masked"}),
    FullBatch: (
        CallForm("input_ids", in_batch=True, extras=(Argument("attention_mask", "mask"), Argument("labels"))),
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
            return self.head(self.hidden(batch["something"])) * batch["other"]

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
    assert list(call_forms(named)) == list(call_forms(Named()))


class Denoiser(nn.Module):
    """Takes a time and a context beside its inputs, as a diffusion transformer."""

    def __init__(self):
        super().__init__()
        self.patches, self.pixels = nn.Conv2d(3, 16, 4, stride=4), nn.ConvTranspose2d(16, 3, 4, stride=4)
        self.time, self.text = nn.Linear(1, 16), nn.Linear(12, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, hidden_states, timestep, encoder_hidden_states):
        x = self.patches(hidden_states)
        tokens = x.flatten(2).transpose(1, 2) + self.time(timestep[:, None].to(x))[:, None]
        context = self.text(encoder_hidden_states)
        tokens = tokens + self.attention(tokens, context, context, need_weights=False)[0]
        return types.SimpleNamespace(sample=self.pixels(tokens.transpose(1, 2).unflatten(2, x.shape[2:])))


class Frames(nn.Module):
    """Takes the lengths of its rows, as a speech encoder. `reads` rows beyond them as well."""

    def __init__(self, reads=False):
        super().__init__()
        self.reads = reads
        self.inner, self.out = nn.Linear(20, 16), nn.Linear(16, 7)
        self.convolution = nn.Conv1d(16, 16, 3, padding=1)

    def forward(self, frames, frame_lengths):
        keep = torch.arange(frames.shape[1]) < frame_lengths[:, None]
        x = self.inner(frames) * (keep[..., None] | self.reads)
        x = x + self.convolution(x.transpose(1, 2)).transpose(1, 2)
        return self.out(x * keep[..., None]), frame_lengths


def test_time_and_context_of_a_denoiser_are_given():
    spec = ModelSpec.of(Denoiser)
    extras = (Argument("timestep", "step"), Argument("encoder_hidden_states", "context", 12))
    assert spec.forward.function == CallForm(extras=extras)
    assert not spec.per_position
    assert "timestep=3 and encoder_hidden_states=7 fixed vectors of width 12" in spec.notes
    assert not [str(result) for result in check_model(spec) if not result.ok]


@pytest.mark.parametrize("reads", [False, True])
def test_lengths_of_rows_are_a_padding_mask(reads):
    spec = ModelSpec.of(lambda: Frames(reads))
    assert spec.forward.function == CallForm(extras=(Argument("frame_lengths", "lengths"),))
    assert spec.padding_sides == ("right",)
    [result] = check_model(spec, checks=["padding_amount"])
    assert result.status == ("failed" if reads else "passed")


@pytest.mark.parametrize("kind", ["mask", "bool mask", "lengths", "step", "time", "positions", "context"])
def test_value_of_an_argument_is_the_same_for_each_row(kind):
    model, inputs = nn.Linear(4, 4).double(), torch.randn(3, 5, 4)
    value = Argument("name", kind, 6).value(model, inputs)
    assert len(value) == 3
    assert torch.equal(value, value[:1].expand_as(value))
    assert not value.is_floating_point() or value.dtype == torch.float64


def test_arguments_with_unknown_names_need_a_reader():
    assert list(arguments_for(["tgt"], [], {"tgt": Read("labels")})) == [((Argument("tgt"),), 0)]
    assert not list(arguments_for(["tgt"], [16]))
    assert not list(arguments_for(["timestep", "tgt"], [16]))
    assert len(list(arguments_for(["timestep", "encoder_hidden_states"], [16, 32]))) == 4


class Padded(Core):
    """Needs a mask that is True at padding."""

    def forward(self, input_ids, src_key_padding_mask):
        keep = ~src_key_padding_mask
        return self.head(self.hidden(input_ids, keep)).masked_fill(~keep.any(dim=1)[:, None, None], torch.nan)


def test_required_mask_that_hides_padding_hides_nothing():
    spec = ModelSpec.of(Padded)
    assert spec.forward.function == CallForm(extras=(Argument("src_key_padding_mask", "padding"),))
    assert not [
        str(result) for result in check_model(spec, checks=["finiteness", "padding"]) if not result.ok
    ]


class OtherLengths(Core):
    """Takes lengths of other sequences, which do not hide inputs."""

    def forward(self, input_ids, label_lengths=None, row_lengths=None):
        return self.head(self.hidden(input_ids))


def test_lengths_of_other_sequences_are_no_padding_mask():
    assert ModelSpec.of(OtherLengths).masked is None


class Subsampled(nn.Module):
    """Speech encoder with a quarter of the positions."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv1d(20, 7, 4, stride=4, padding=1)

    def forward(self, frames, lengths):
        return self.convolution(frames.transpose(1, 2)).transpose(1, 2)


def test_output_with_fewer_positions_is_an_output_per_row_of_any_length():
    spec = ModelSpec.of(Subsampled)
    assert (spec.inputs, spec.width, spec.per_position, spec.max_length) == ("vectors", 20, False, None)
    assert spec.masked is None
    assert not [str(result) for result in check_model(spec, checks=["equivalence"]) if not result.ok]
