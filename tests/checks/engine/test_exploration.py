"""The engine: its plan, its comparison, its shrinking and its report."""

from collections import Counter
from dataclasses import replace
from itertools import combinations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stackwise.checks import check_model, compare
from stackwise.checks.engine.composition import Composition, plans
from stackwise.checks.engine.examination import Examination
from stackwise.checks.engine.execution import first_difference
from stackwise.checks.engine.exploration import Explorer
from stackwise.checks.subject import Subject
from stackwise.checks.variations import known_variations
from stackwise.subject.spec import ModelSpec
from tests.zoo.gpt import GPT, Placed, encoder, gpt, placed, spec_of, windowed

CPU = torch.device("cpu")
KNOWN = known_variations("fast")
SOME = ("mask_of_ones", "cache_parts", "batch", "history")


def exam_of(spec, seed=0):
    return Examination(Subject(spec, CPU, seed))


class StateLost(GPT):
    """A mask makes the second chunk forget the cache: only a mask and a cache together show it."""

    def visible(self, T, past, keep, documents):
        visible = super().visible(T, past, keep, documents)
        if keep is not None and past:
            visible[..., :past] = False
        return visible


class Counting(GPT):
    """Each call changes the next one."""

    calls = 0

    def embed(self, input_ids):
        self.calls += 1
        return super().embed(input_ids) * self.calls


class FirstLengthKept(GPT):
    """The mask of the first call is used again, so that a call of another length raises an exception."""

    def visible(self, T, past, keep, documents):
        if not hasattr(self, "kept"):
            self.kept = super().visible(T, past, keep, documents)
        return self.kept


class Noisy(GPT):
    def embed(self, input_ids):
        x = super().embed(input_ids)
        return x + torch.randn_like(x)


class NotANumber(GPT):
    """NaN beside padding, although no hidden token is read."""

    def visible(self, T, past, keep, documents):
        visible = super().visible(T, past, keep, documents)
        return visible if keep is None else visible & keep.bool()[:, None, None, :]


class ShortTable(Placed):
    """Takes 16 positions, which is not declared."""

    def __init__(self):
        super().__init__()
        self.places = nn.Embedding(16, self.width)


def images(*layers):
    """Return the spec of a classifier of images of 6 x 6 pixels: one output per row."""
    return ModelSpec.of(
        lambda: nn.Sequential(*(layer() for layer in layers)),
        make_batch=lambda b, t, g: torch.randn(b, 3, 6, 6, generator=g),
    )


def linear():
    return images(nn.Flatten, lambda: nn.Linear(108, 8), nn.ReLU, lambda: nn.Linear(8, 3))


def frames():
    """Return the spec of a classifier of 40 frames, which are more than the positions of the examination."""
    return ModelSpec.of(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(240, 8), nn.ReLU(), nn.Linear(8, 3)),
        make_batch=lambda b, t, g: torch.randn(b, 40, 6, generator=g),
    )


def batch_norm():
    convolution, norm = lambda: nn.Conv2d(3, 4, 3), lambda: nn.BatchNorm2d(4)
    return images(convolution, norm, nn.Flatten, lambda: nn.Linear(64, 3))


# Name -> spec, and a variation that does not apply, with a part of the reason.
HEALTHY = {
    "gpt": (gpt, "embeddings", "inputs_embeds"),
    "window": (windowed, "hidden_tokens", "visible"),
    "learned positions": (placed, "static_cache", "transformers"),
    "encoder": (encoder, "cache_parts", "decode"),
    "undeclared length limit": (lambda: spec_of(ShortTable), "embeddings", "inputs_embeds"),
    "output per row": (linear, "empty_row", "needs masked"),
    "output per row of many frames": (frames, "empty_row", "needs masked"),
    "running statistics": (batch_norm, "train_mode", "statistics"),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_model_has_no_findings(name):
    make, variation, reason = HEALTHY[name]
    exploration = Explorer(Subject(make(), CPU), KNOWN, count=0).explore()
    assert not exploration.findings
    assert max(exploration.largest.values()) <= exploration.limit
    asked = {name for name in KNOWN if exploration.asked[frozenset({name})]}
    assert "batch" in asked
    assert asked | exploration.missing.keys() == set(KNOWN)
    assert reason in exploration.missing[variation]


class EachAsked(Counter):
    """Each pair was executed."""

    def __missing__(self, pair):
        return 1


def test_every_pair_that_can_be_combined_is_planned():
    exam = exam_of(gpt())
    names = [name for name in KNOWN if not KNOWN[name].missing(exam)]
    planned = [set(each.names) for each in plans(names, 0, 0, EachAsked())]
    for a, b in combinations(names, 2):
        excluded = b in KNOWN[a].excludes or a in KNOWN[b].excludes
        assert any({a, b} <= each for each in planned) != excluded
    assert max(len(each) for each in planned) <= 5


def test_pair_that_no_set_has_asked_is_planned_alone():
    names = ["batch", "later_tokens", "history"]
    planned = [set(each.names) for each in plans(names, 0, 0, Counter())]
    assert {"batch", "history"} in planned
    assert {"batch", "history"} not in [
        set(each.names) for each in plans(names, 0, 0, EachAsked()) if each.label == "batch history"
    ]


def test_a_new_variation_changes_no_value_of_the_others():
    exam, names = exam_of(gpt()), ["batch", "later_tokens", "history"]

    def drawn(some):
        for plan in plans(some, 0, 0, EachAsked()):
            yield {name: each for name, each in plan.draw(exam).values.items() if name in names}

    values = list(drawn([*names, "copies"]))
    assert all(each in values for each in drawn(names))


def test_large_model_is_asked_each_variation_alone(monkeypatch):
    monkeypatch.setattr("stackwise.checks.engine.exploration.LARGE", 10)
    asked = Explorer(Subject(gpt(), CPU), SOME).explore().asked
    assert asked.pop(frozenset({"history"})) == 2  # and after a long call
    assert asked.pop(frozenset({"cache_parts"})) == 3  # and in the two usual ways to generate text
    assert asked and all(len(names) == 1 and count == 1 for names, count in asked.items())


def test_model_that_is_too_large_for_copies_does_not_apply(monkeypatch):
    monkeypatch.setattr("stackwise.checks.engine.exploration._TOO_LARGE", 10)
    exploration = Explorer(Subject(gpt(), CPU), SOME).explore()
    assert exploration.missing.keys() == set(SOME)
    assert all("GB" in reason and "fewer layers" in reason for reason in exploration.missing.values())


def test_next_call_that_raises_is_a_finding():
    [finding] = Explorer(Subject(spec_of(FirstLengthKept), CPU), SOME).explore().findings
    assert finding.variation == "history"
    assert "RuntimeError" in finding.where


def test_same_seed_gives_the_same_result():
    subject = Subject(spec_of(StateLost), CPU, 3)
    first, second = (Explorer(subject, SOME, count=100).explore() for _ in range(2))
    assert [each.composition for each in first.findings] == [each.composition for each in second.findings]
    assert first.asked == second.asked


def test_finding_is_shrunk_located_and_repeatable():
    findings = Explorer(Subject(spec_of(StateLost), CPU), KNOWN, count=0).explore().findings
    assert {each.composition.names for each in findings} == {
        frozenset({"padded_prompt"}),
        frozenset({"cache_parts", "mask_of_ones"}),
        frozenset({"cache_parts", "padded_rows"}),
    }
    [finding] = [each for each in findings if each.composition.names == {"cache_parts", "mask_of_ones"}]
    assert not finding.composition.gradients
    assert not finding.composition.after
    assert "first difference: layers.0.out" in finding.where
    again = compare(spec_of(StateLost), finding.composition.values, length=finding.composition.length)
    assert again[0] == finding.difference
    assert f"length={finding.composition.length}" in finding.code


def test_call_that_leaves_traces_is_reported_once():
    [finding] = Explorer(Subject(spec_of(Counting), CPU), KNOWN).explore().findings
    assert finding.variation == "history"
    assert not finding.composition.values


def test_two_values_that_are_not_finite_never_agree():
    exploration = Explorer(Subject(spec_of(NotANumber), CPU), ["padded_rows"]).explore()
    [finding] = exploration.findings
    assert finding.difference.value == float("inf")


def test_model_that_does_not_repeat_itself_is_not_asked():
    exploration = Explorer(Subject(spec_of(Noisy), CPU), KNOWN).explore()
    assert exploration.missing.keys() == KNOWN.keys()
    assert not exploration.findings


def test_weights_that_are_constant_are_made_random():
    class Gated(GPT):
        """A wrong branch is hidden by a gate of 0."""

        def __init__(self):
            super().__init__()
            self.gate = nn.Parameter(torch.zeros(1))

        def embed(self, input_ids):
            x = super().embed(input_ids)
            return x + self.gate * x.mean(dim=1, keepdim=True)

    exploration = Explorer(Subject(spec_of(Gated), CPU), ["later_tokens"]).explore()
    assert [each.variation for each in exploration.findings] == ["later_tokens"]


def test_location_is_empty_if_no_module_differs():
    assert first_difference(Composition({"batch": [4]}, 6), exam_of(gpt())) == ""


def test_arguments_of_two_declared_functions_are_combined():
    """A mask of ones replaces the documents: only a call with both shows it."""

    class Overridden(GPT):
        def visible(self, T, past, keep, documents):
            return super().visible(T, past, keep, documents if keep is None else None)

    values = {"documents": [3], "mask_of_ones": True}
    differences = compare(spec_of(Overridden), values, length=5)
    assert differences[0].is_real
    assert not compare(spec_of(Overridden), {"documents": [3]}, length=5)[0].is_real


@pytest.mark.parametrize(
    "values, part",
    [({"cache": [1]}, "cache_parts"), ({"embeddings": True}, "inputs_embeds")],
)
def test_compare_names_what_is_wrong(values, part):
    with pytest.raises(ValueError, match=part):
        compare(gpt(), values)


def answers(spec, *checks):
    return {result.check: result for result in check_model(spec, checks=checks)}


def failed(results):
    return {check for check, result in results.items() if result.status == "failed"}


def test_checks_report_the_exploration():
    results = answers(spec_of(StateLost), "equivalence", "batch_invariance", "padding_amount")
    own = {each.name for each in KNOWN.values() if each.family == "equivalence"}
    assert set(results) == own | {"batch_invariance", "padding_amount", "unexpected_exceptions"}
    assert failed(results) == {"mask_of_ones", "padding_amount"}
    assert "compare(model, {" in results["mask_of_ones"].advice
    assert results["embeddings"].status == "not applicable"
    assert results["batch_invariance"].status == "passed"


def test_bug_that_many_variations_show_is_reported_once():
    class NextTokenRead(GPT):
        def embed(self, input_ids):
            x = super().embed(input_ids)
            return x + F.pad(x[:, 1:], (0, 0, 0, 1))

    results = answers(spec_of(NextTokenRead), *(each.check or each.name for each in KNOWN.values()))
    assert failed(results) == {"causality"}
    assert results["cache_decoding"].status == "not applicable"


def test_model_whose_copies_use_the_original_is_built_again():
    def build():
        model = GPT()
        original = model.forward
        model.forward = lambda *args, **kwargs: original(*args, **kwargs)
        return model

    some = ("copies", "batch")
    assert not Explorer(Subject(replace(gpt(), build=build), CPU), some, count=0).explore().findings


def test_longest_sequence_that_the_model_takes_is_found():
    assert exam_of(spec_of(ShortTable)).longest == 16


class NeedsFirstId(GPT):
    """The second token is a marker: other tokens there are an error."""

    def embed(self, input_ids):
        if input_ids.shape[1] > 1 and bool((input_ids[:, 1] != 5).any()):
            raise ValueError("the second token has to be 5")
        return super().embed(input_ids)


def test_model_that_refuses_replaced_tokens_is_explored():
    def make_batch(batch_size, length, generator):
        ids = torch.randint(6, GPT.vocab_size, (batch_size, length), generator=generator)
        ids[:, 1:2] = 5
        return ids

    exploration = Explorer(Subject(spec_of(NeedsFirstId, make_batch=make_batch), CPU), SOME).explore()
    assert not exploration.findings
    assert exploration.asked[frozenset({"batch"})]


class WithFurtherTerm(GPT):
    """The own loss has a term over the real tokens."""

    def forward(self, input_ids, attention_mask=None, labels=None, *others, **named):
        output = super().forward(input_ids, attention_mask, labels, *others, **named)
        if labels is not None:
            real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            output.loss = output.loss + (output.logits.square().mean(-1) * real).sum() / real.sum()
        return output


def test_loss_with_a_further_term_is_not_compared_with_an_empty_row():
    some = ("labels", "empty_row")
    assert not Explorer(Subject(spec_of(WithFurtherTerm), CPU), some).explore().findings


class WithHeadForALaterToken(GPT):
    """The own loss adds the loss of the token after the next, which a short row does not have."""

    def __init__(self):
        super().__init__()
        self.ahead = nn.Linear(self.vocab_size, self.vocab_size)

    def forward(self, input_ids, attention_mask=None, labels=None, *others, **named):
        output = super().forward(input_ids, attention_mask, labels, *others, **named)
        if labels is not None:
            later = self.ahead(output.logits[:, :-2]).flatten(0, 1)
            output.loss = output.loss + 0.2 * F.cross_entropy(later, labels[:, 2:].flatten())
        return output


def test_loss_without_a_later_token_is_not_compared():
    spec = spec_of(WithHeadForALaterToken)
    ids = torch.arange(2)[None]
    assert spec.labelled_loss(spec.create(), ids, ids).isnan()
    assert not Explorer(Subject(spec, CPU), ["labels"]).explore().findings


class DropPath(nn.Module):
    """Stochastic depth with a low rate: two calls seldom differ."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x):
        return x * self.draw(x) / 0.99 if self.training else x


@pytest.mark.parametrize(
    "draw, has_train_mode",
    [
        (lambda x: (0.99 + torch.rand(len(x), 1, 1)).floor(), False),
        (lambda x: x.new_empty(len(x), 1, 1).bernoulli_(0.99), False),
        (lambda x: 0.99 if torch.rand([]) >= 0.0 else 0.0, True),
        (lambda x: 1 + 0 * torch.empty_like(x).exponential_(), False),  # may select among equal scores
    ],
)
def test_stochastic_depth_is_no_train_mode_to_compare(draw, has_train_mode):
    class Stochastic(GPT):
        def __init__(self):
            super().__init__()
            self.drop_path = DropPath(draw)

        def mlp(self, layer, x):
            return self.drop_path(super().mlp(layer, x))

    assert exam_of(spec_of(Stochastic)).has_train_mode is has_train_mode


def test_model_without_a_backward_pass_is_explored():
    class InPlace(GPT):
        def embed(self, input_ids):
            x = super().embed(input_ids).exp()
            x += 1  # exp needs its result in the backward pass
            return x

    assert not failed(answers(spec_of(InPlace), "causality", "batch_invariance"))
    assert not exam_of(spec_of(InPlace)).has_gradients


def test_mask_is_not_passed_to_a_decode_without_one():
    def decode(model, inputs, cache):
        output = model(inputs, cache=cache, use_cache=True)
        return output.logits, output.cache

    some = ("mask_of_ones", "turns")
    result = Explorer(Subject(spec_of(GPT, decode=decode), torch.device("cpu")), some, count=0).explore()
    assert result.refused[frozenset({"mask_of_ones", "turns"})] == "decode takes no mask"
    assert not result.raised
