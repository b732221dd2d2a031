"""The registry, the run over all checks, and results as data."""

import json
import random
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import stackwise.checks.model
from stackwise.checks import Check, CheckResult, check_model, check_trainer, known_checks
from stackwise.checks import check as check_module
from stackwise.checks.check import select_checks
from stackwise.checks.run import Declared, broken_off
from stackwise.checks.subject import Subject
from stackwise.subject.spec import ModelSpec
from stackwise.subject.trainer_spec import TrainerSpec
from stackwise.support.arguments import check_sizes

pytestmark = pytest.mark.usefixtures("few_compositions")

STATUSES = ["passed", "failed", "warned", "accepted warning", "not applicable", "expected failure", "error"]


@pytest.fixture
def registry():
    """The registry, put back as it was after the test."""
    known_checks()
    stored = dict(check_module._registry)
    yield check_module._registry
    check_module._registry.clear()
    check_module._registry.update(stored)
    known_checks.cache_clear()


def names(checks):
    return [c.name for c in checks]


def test_determinism_comes_first():
    order = list(known_checks())
    first = [name for name in order if known_checks()[name].family == "determinism"]
    assert order[0] == "determinism"
    assert order == [*first, *sorted(set(order) - set(first))]
    assert {"causality", "batch_invariance", "finite_gradients", "finite_logits", "initial_loss"} < set(order)


def test_what_is_known_of_a_check():
    for name, one in known_checks().items():
        assert one.name == name
        assert one.summary.endswith("?")
        assert "\n" not in one.summary


@pytest.mark.parametrize(
    "wanted, found",
    [
        (["causality"], ["causality"]),
        (["causality_far"], ["long_sequences"]),
        (["padding_content", "cache_padding", "padding_amount"], ["padding_amount"]),
        (["finiteness"], ["finite_gradients", "finite_logits", "finite_weights", "half_precision"]),
        (["finite_logits"], ["finite_logits"]),
        (
            ["initial_loss", "determinism", "invariance"],
            ["determinism", "batch_invariance", "initial_loss", "permutation_equivariance"],
        ),
        (["loss_formula", "backend", "causality"], ["backend_gradients", "causality", "loss_formula"]),
    ],
)
def test_selection(wanted, found):
    assert names(select_checks(wanted)) == found
    assert names(select_checks(iter(wanted))) == found


def test_selection_of_all():
    of_models = [name for name, one in known_checks().items() if one.asks == "model"]
    assert names(select_checks(suite="full")) == of_models
    assert names(select_checks()) == [n for n in of_models if known_checks()[n].suite == "fast"]
    assert {*known_checks()} == {*of_models, *names(select_checks(suite="full", asks="trainer"))}


def test_a_family_is_that_of_the_suite():
    fast, full = (names(select_checks(["precision"], suite=suite)) for suite in ("fast", "full"))
    assert set(full) - set(fast) == {"cast_buffers"}
    with pytest.raises(ValueError, match="suite: got 'slow'"):
        select_checks(suite="slow")


def test_selection_of_nothing():
    # No check at all would pass in silence.
    with pytest.raises(ValueError, match="checks: got"):
        select_checks([])


@pytest.mark.parametrize("name", ["causality", "cache_chunks"])
def test_check_of_a_model_is_refused_for_a_training_step(name):
    with pytest.raises(ValueError, match=f"{name}: for models only"):
        select_checks([name], asks="trainer")


def test_unknown_names():
    with pytest.raises(
        ValueError,
        match=r"unknown finite, speed; did you mean .*; families: determinism, .*; checks: determinism",
    ) as raised:
        select_checks(["causality", "speed", "finite"])
    assert all(name in str(raised.value) for name in names(select_checks(suite="full")))


@pytest.mark.parametrize("unknown", ["cauzality", "initial_los"])
def test_unknown_name_with_a_suggestion_needs_no_list(unknown):
    with pytest.raises(ValueError, match="families: determinism, ") as raised:
        select_checks([unknown])
    assert "checks: determinism" not in str(raised.value)


def test_order_of_results(subjects):
    results = check_model(subjects.gru, checks=["initial_loss", "determinism", "causality"])
    assert [r.check for r in results] == ["determinism", "causality", "initial_loss"]
    assert {r.model for r in results} == {"gru"}


def test_unknown_check_is_refused_before_any_runs(subjects):
    with pytest.raises(ValueError, match="unknown speed"):
        check_model(subjects.gru, checks=["speed"])


def test_an_exception_is_an_answer(subjects):
    class OnlyTwoRows(subjects.GRULM):
        """Breaks in a call of one row, which only variations make."""

        def forward(self, ids):
            if len(ids) == 1:
                raise ArithmeticError("rows|of the wrong number")
            return super().forward(ids)

    asked = ["determinism", "finite_logits", "batch_invariance", "causality", "initial_loss"]
    results = {r.check: r for r in check_model(OnlyTwoRows, checks=asked)}
    assert {name for name, r in results.items() if r.status == "error"} == {"batch_invariance", "causality"}
    assert {r.status for name, r in results.items()} == {"error", "passed"}
    for name in ("batch_invariance", "causality"):
        result = results[name]
        assert result.meaning == "ArithmeticError: rows|of the wrong number"
        file, _, line = result.where.rpartition(":")
        assert file == __file__
        assert int(line) > 1
        assert not result.ok


def test_a_check_by_itself_does_not_hide_the_exception(subjects):
    spec = ModelSpec(lambda: subjects.GRULM(), "gru", "vectors", 3)
    with pytest.raises(RuntimeError):
        known_checks()["determinism"].run(spec)


def test_interrupts_are_no_answer(subjects):
    class Interrupted(subjects.GRULM):
        def forward(self, ids):
            raise KeyboardInterrupt

    spec = ModelSpec(Interrupted, "interrupted", "tokens", 50)
    with pytest.raises(KeyboardInterrupt):
        check_model(spec)


def test_run_names_the_check(subjects):
    spec = ModelSpec.of(subjects.gru)
    result = known_checks()["finite_logits"].run(spec, seed=3)
    assert (result.check, result.model) == ("finite_logits", "gru")


def leaky(subjects):
    class Leaky(subjects.ConvLM):
        padding = (1, 1)

    return Leaky


def test_expected_failure(subjects):
    [result] = check_model(
        leaky(subjects), checks=["causality"], expected_failures={"causality": "a known leak"}
    )
    assert result.status == "expected failure"
    assert result.ok
    assert result.advice == "declared: a known leak"
    assert "position" in result.where


def test_expected_failure_that_does_not_fail(subjects):
    known = {"causality": "a known leak"}
    passed, result = check_model(subjects.gru, checks=["causality", "determinism"], expected_failures=known)
    assert (passed.status, result.status) == ("passed", "failed")
    assert "declared as an expected failure, but passed" in result.meaning
    assert "remove the declaration (a known leak)" in result.advice


@pytest.mark.parametrize(
    "status, expected, accepted, strict",
    [
        ("passed", "failed", "failed", "passed"),
        ("warned", "failed", "accepted warning", "failed"),
        ("not applicable", "failed", "failed", "not applicable"),
        ("failed", "expected failure", "failed", "failed"),
        ("error", "error", "error", "error"),
    ],
)
def test_status_under_declarations(status, expected, accepted, strict):
    result = CheckResult("c", "m", status, meaning="It says.")
    for reason in ("why", ""):
        assert Declared(expected_failures={"c": reason}).apply(result).status == expected
        assert Declared(accepted_warnings={"c": reason}).apply(result).status == accepted
        assert Declared(accepted_warnings={"c": reason}, strict=True).apply(result).status == accepted
    assert Declared(strict=True).apply(result).status == strict
    assert Declared({"other": "why"}, {"another": "why"}).apply(result) == result


def test_declaration_takes_the_other_name_of_a_check():
    failed = CheckResult("cache_decoding", "m", "failed")
    assert Declared({"cache_chunks": "why"}).apply(failed).status == "expected failure"
    warned = CheckResult("padding_amount", "m", "warned")
    assert Declared(accepted_warnings={"padding_content": "why"}).apply(warned).status == "accepted warning"


def memoryless():
    """A model without memory, of which the check token_effect warns."""
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))


def test_accepted_warning(subjects):
    accepted = {"token_effect": "no memory by design"}
    [result] = check_model(memoryless, checks=["token_effect"], accepted_warnings=accepted, strict=True)
    assert result.status == "accepted warning" and result.ok
    assert result.advice == "declared: no memory by design"
    assert "have no effect" in result.meaning
    [result] = check_model(subjects.gru, checks=["token_effect"], accepted_warnings=accepted)
    assert result.status == "failed"
    assert "declared as an accepted warning, but passed" in result.meaning


def test_accepted_warning_leaves_a_failure_as_it_is(subjects):
    accepted = {"causality": "no memory by design"}
    [result] = check_model(leaky(subjects), checks=["causality"], accepted_warnings=accepted)
    assert result.status == "failed"
    assert "The output changes" in result.meaning and "declared" not in str(result)


def test_strict_fails_what_is_otherwise_a_warning():
    [warned] = check_model(memoryless, checks=["token_effect"])
    [failed] = check_model(memoryless, checks=["token_effect"], strict=True)
    assert (warned.status, failed.status) == ("warned", "failed")
    assert failed.meaning == warned.meaning
    assert failed.advice.startswith(warned.advice) and "accepted_warnings" in failed.advice


def test_strict_fails_warnings_of_a_training_step():
    def asked(**how):
        return check_trainer(SlowStart.spec(), checks=["scheduler_order"], **how)[0].status

    accepted = {"scheduler_order": "a published schedule"}
    assert [asked(), asked(strict=True), asked(accepted_warnings=accepted)] == [
        "warned",
        "failed",
        "accepted warning",
    ]


class SlowStart:
    """A training step whose learning rate starts at 0, of which the check scheduler_order warns."""

    def __init__(self):
        self.model = memoryless()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(step / 10, 1.0))

    @classmethod
    def spec(cls):
        return TrainerSpec.of(cls, batch_size=2, vocab_size=11)

    def step(self, batch):
        logits = self.model(batch["input_ids"])[:, :-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.detach()


@pytest.mark.parametrize("argument", ["expected_failures", "accepted_warnings"])
@pytest.mark.parametrize("name", ["causalty", "causality", "finiteness"], ids=["typo", "not asked", "family"])
def test_declaration_for_a_check_that_is_not_asked_is_refused(subjects, argument, name):
    text = f"{argument}: got {name}, which this run does not select; allowed: determinism"
    with pytest.raises(ValueError, match=f"^{text}$"):
        check_model(subjects.gru, checks=["determinism"], **{argument: {name: "why"}})


@pytest.mark.parametrize("argument", ["expected_failures", "accepted_warnings"])
@pytest.mark.parametrize("reason", ["", " ", None])
def test_declaration_without_a_reason_is_refused(subjects, argument, reason):
    with pytest.raises(ValueError, match=rf"^{argument}\['causality'\]: got .*; allowed: a reason"):
        check_model(subjects.tiny, checks=["causality"], **{argument: {"causality": reason}})


def test_two_declarations_for_one_check_are_refused(subjects):
    reasons = {"causality": "why"}
    with pytest.raises(ValueError, match="accepted_warnings: got causality, also in expected_failures"):
        check_model(subjects.gru, expected_failures=reasons, accepted_warnings=reasons)


def test_a_warning_says_first_what_is_wrong_then_when_it_is_correct():
    [result] = check_model(memoryless, checks=["token_effect"])
    first, *rest = str(result).splitlines()[1:]
    assert "have no effect on the last output" in first
    assert rest[-1].startswith("  This is correct if the model has a window") and "Otherwise, " in rest[-1]


@pytest.mark.parametrize("status", STATUSES)
def test_ok(status):
    expected = {"failed": False, "error": False}.get(status, True)
    assert CheckResult("c", "m", status).ok is expected


def test_results_are_data(subjects):
    results = check_model(leaky(subjects), checks=["determinism", "causality", "cache_limit"])
    results += check_model(memoryless, checks=["token_effect"])
    assert {r.status for r in results} == {"passed", "failed", "warned", "not applicable"}
    for result in results:
        stored = json.loads(json.dumps(result.to_dict(), allow_nan=False))
        assert CheckResult(**stored) == result
        assert list(stored) == [
            "check",
            "model",
            "status",
            "value",
            "limit",
            "where",
            "meaning",
            "advice",
            "seconds",
            "combined",
        ]


def test_text_of_a_result():
    result = CheckResult("causality", "m", "failed", 0.123456, 1e-5, "position 1", "It moved.", "Look there.")
    assert str(result).splitlines() == [
        "m: causality failed: measured 0.123, limit 1e-05",
        "  It moved.",
        "  position 1",
        "  Look there.",
    ]
    assert str(CheckResult("c", "m", "passed", 0.0)) == "m: c passed: measured 0"
    assert str(CheckResult("c", "m", "not applicable", meaning="No.")) == "m: c not applicable\n  No."


@pytest.mark.parametrize(
    "kind", ["module", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("factory", "spec"))]
)
def test_nothing_of_the_callers_is_touched(subjects, kind):
    module = subjects.dropout_rack().train()
    subject = {"factory": subjects.dropout_rack, "module": module, "spec": ModelSpec.of(module)}[kind]
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    settings = torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads()
    check_model(subject)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]  # noqa: NPY002
    assert (torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads()) == settings
    assert all(torch.equal(value, weights[name]) for name, value in module.state_dict().items())
    assert module.training
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize("name", ["dropout", pytest.param("dropout_rack", marks=pytest.mark.slow)])
def test_results_are_a_function_of_the_seed(subjects, name):
    def dropout():
        return nn.Sequential(nn.Embedding(29, 16), nn.Dropout(0.2), nn.Linear(16, 29))

    model = dropout if name == "dropout" else subjects.dropout_rack
    one, again, other = (check_model(model, seed=seed) for seed in (1, 1, 2))
    assert one == again
    assert one != other


def test_a_family_is_one_file(subjects, registry, tmp_path, monkeypatch):
    (tmp_path / "steadiness.py").write_text(
        '"""One more family."""\n'
        "from stackwise.checks.check import check\n\n"
        "@check\n"
        "def steady(subject):\n"
        '    """Is it steady?\n\n    More words.\n    """\n'
        "    return subject.passed(float(subject.seed), 9.0)\n\n"
        "@check\n"
        "def calm(subject):\n"
        '    """Is it calm?"""\n'
        "    return subject.failed(where='everywhere')\n"
    )
    monkeypatch.setattr(stackwise.checks.model, "__path__", [*stackwise.checks.model.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "stackwise.checks.model.steadiness", raising=False)
    before = list(known_checks())
    known_checks.cache_clear()
    try:
        assert sorted([*before[1:], "calm", "steady"]) == list(known_checks())[1:]
        assert names(select_checks(["steadiness"])) == ["calm", "steady"]
        steady = known_checks()["steady"]
        assert (steady.family, steady.summary) == ("steadiness", "Is it steady?")
        results = check_model(subjects.gru, checks=["steadiness"], seed=4)
        assert [(r.check, r.status, r.value) for r in results] == [
            ("calm", "failed", None),
            ("steady", "passed", 4.0),
        ]
    finally:
        sys.modules.pop("stackwise.checks.model.steadiness", None)
        vars(stackwise.checks.model).pop("steadiness", None)


def test_a_name_is_taken_once(registry):
    def causality(subject):
        """Again?"""

    with pytest.raises(AssertionError, match="causality"):
        check_module.check(causality)


def test_a_check_without_a_question(registry):
    def wordless(subject):
        pass

    with pytest.raises(AssertionError, match="wordless"):
        check_module.check(wordless)
    assert "wordless" not in registry


def test_subject_is_made_anew_each_time(subjects):
    subject = Subject(ModelSpec.of(subjects.gru), torch.device("cpu"), seed=2)
    one, two = subject.model(), subject.model(train=True, dtype=torch.float64)
    assert (one.training, two.training) == (False, True)
    assert two.head.weight.dtype == torch.float64
    torch.testing.assert_close(one.head.weight.double(), two.head.weight, rtol=0, atol=0)
    assert torch.equal(subject.inputs(3), subject.inputs(3))
    assert not torch.equal(subject.inputs(3), subject.inputs(3, shift=1))
    assert subject.inputs(3, 5).shape == (3, 5)


def test_subject_stays_within_the_model(subjects):
    spec = ModelSpec.of(subjects.gru, seq_len=32, max_length=10)
    subject = Subject(spec, torch.device("cpu"))
    assert subject.seq_len == 10
    assert subject.inputs(2).shape == (2, 10)
    assert {r.status for r in check_model(spec)} <= {"passed", "not applicable"}


def test_randomness_of_a_subject(subjects):
    subject = Subject(ModelSpec.of(subjects.dropout_rack), torch.device("cpu"), seed=2)
    model, inputs = subject.model(train=True), subject.inputs(2)
    before = torch.get_rng_state()
    first = subject.logits(model, inputs)
    assert torch.equal(subject.logits(model, inputs), first)
    assert torch.equal(torch.get_rng_state(), before)
    with torch.no_grad():
        assert not torch.equal(model(inputs), first)
    assert not first.requires_grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_models_of_another_precision(subjects, dtype):
    # Vectors are made in float32; every check has to hand them over in the model's own type.
    def forward(model, inputs):
        assert inputs.dtype == model.layers[0].linear1.weight.dtype
        return model(inputs)

    spec = ModelSpec(
        lambda: subjects.encoder().to(dtype), "encoder", "vectors", 16, forward=forward, tolerance=0.1
    )
    assert {r.check: r.status for r in check_model(spec) if r.status == "error"} == {}


def test_check_is_a_plain_value():
    one = known_checks()["causality"]
    assert isinstance(one, Check)
    with pytest.raises(AttributeError):
        one.name = "other"


@pytest.mark.parametrize("library", ["torch", "fractions"])
def test_an_error_is_told_at_the_callers_own_line(subjects, library):
    class Breaks(subjects.GRULM):
        def forward(self, ids):
            if len(ids) == 1:
                return self.no_such_layer(ids) if library == "torch" else Fraction(1, 0)
            return super().forward(ids)

    (result,) = check_model(Breaks, checks=["batch_invariance"])
    assert result.status == "error"
    assert result.meaning.startswith("AttributeError" if library == "torch" else "ZeroDivisionError")
    file, _, line = result.where.rpartition(":")
    assert file == __file__ and "no_such_layer" in Path(file).read_text().splitlines()[int(line) - 1]


def test_an_error_of_ours_alone_is_told_where_it_is():
    with pytest.raises(ValueError, match="width") as raised:
        check_sizes(width=0)
    error = raised.value
    assert broken_off("causality", "rack", error).where.rpartition(":")[0] == __file__
    ours = broken_off("causality", "rack", error.with_traceback(error.__traceback__.tb_next)).where
    assert ours.rpartition(":")[0] == sys.modules[check_sizes.__module__].__file__


def test_complex_buffers_are_as_wide_as_weights_and_nothing_is_said(recwarn):
    class Turning(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
            self.register_buffer("turns", torch.polar(torch.ones(32, 4), torch.rand(32, 4)))

        def forward(self, ids):
            x = torch.view_as_complex(self.embedding(ids).float().unflatten(-1, (4, 2)).contiguous())
            turned = torch.view_as_real(x * self.turns[: ids.shape[1]].to(x.dtype)).flatten(-2)
            return self.head(turned.to(self.head.weight.dtype))

    subject = Subject(ModelSpec.of(Turning), torch.device("cpu"))
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        model = subject.model(dtype=dtype)
        assert model.turns.dtype == dtype.to_complex()
    assert not recwarn.list


@pytest.mark.parametrize("width, threads", [(8, 1), (1024, 2)])
def test_checks_of_tiny_models_run_on_one_thread(registry, width, threads):
    seen = []

    @check_module.check
    def counts_threads(subject):
        """How many threads are there?"""
        seen.append(torch.get_num_threads())
        return subject.passed()

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        registry["counts_threads"].run(ModelSpec.of(lambda: nn.Linear(width, width)))
    finally:
        torch.set_num_threads(before)
    assert seen == [threads]
