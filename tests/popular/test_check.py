"""Popular models through `check_model`, `stackwise check` and the plugin: healthy ones have no finding."""

import pytest

from stackwise import check_model
from stackwise.cli import main
from tests.forked import HANG_SECONDS
from tests.popular import nanochat, nanogpt, vit

MODELS = [
    nanogpt.tiny,
    pytest.param(nanogpt.manual, marks=pytest.mark.slow),
    nanogpt.cropped,
    nanochat.cached,
    pytest.param(nanochat.no_smear, marks=pytest.mark.slow),
    vit.classifier,
    vit.convolutional_classifier,
]
ASKED = {
    "nanogpt": {"causality", "initial_loss", "tying", "label_shift", "ignored_labels", "loss_formula"},
    "nanochat": {
        "causality",
        "initial_loss",
        "gradient_flow",
        "label_shift",
        "ignored_labels",
        "loss_formula",
    },
    "vit": {"batch_invariance", "determinism", "depth_gradients", "gradient_flow", "norm_gains"},
}


@pytest.mark.parametrize(
    "model", MODELS, ids=lambda model: f"{model.__module__.split('.')[-1]}-{model.__name__}"
)
def test_healthy_model_passes_every_check(model):
    no_cache = model.__module__ == nanogpt.__name__ or model is nanochat.no_smear
    accepted = {"cache_call": "no call with a cache is declared"} if no_cache else {}

    results = {result.check: result for result in check_model(model, accepted_warnings=accepted)}

    found = {check for check, r in results.items() if r.status not in ("passed", "not applicable")}
    assert found == accepted.keys()
    passed = {name for name, result in results.items() if result.status == "passed"}
    assert passed >= ASKED[model.__module__.split(".")[-1]]


def test_cache_object_is_checked(few_compositions):
    results = check_model(nanochat.cached, checks=["cache_call", "cache_decoding", "cache_independence"])

    assert [result.status for result in results] == ["passed"] * 3


@pytest.mark.parametrize("place", ["nanogpt.py:tiny", "nanochat.py:cached", "vit.py:classifier"])
def test_command_checks_a_model(few_compositions, place, request, capsys):
    path = request.path.parent / place

    assert main(["check", str(path), "--checks", "determinism,batch_invariance"]) == 0
    assert "2 passed" in capsys.readouterr().out


@pytest.mark.parametrize("place", ["nanogpt.py:tiny", "nanochat.py:cached", "vit.py:classifier"])
def test_plugin_checks_a_model(place, request, pytester):
    path = request.path.parent / place

    result = pytester.runpytest_subprocess(
        f"--stackwise-model={path}", "--stackwise-checks=determinism,finite_logits", timeout=HANG_SECONDS
    )

    result.assert_outcomes(passed=3)
