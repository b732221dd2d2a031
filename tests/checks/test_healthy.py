"""Sound models of many kinds: no check fails, and each says why it does not apply or what is unusual."""

import pytest

from stackwise.checks import check_model
from stackwise.checks.check import select_checks

MODELS = [
    "tiny",
    "rack",
    pytest.param("window_rack", marks=pytest.mark.slow),
    pytest.param("grouped_rack", marks=pytest.mark.slow),
    pytest.param("layernorm_rack", marks=pytest.mark.slow),
    "dropout_rack",
    "bidirectional_rack",
    "llama",
    "gpt2",
    "bert",
    "x_decoder",
    "x_encoder",
    "gru",
    "conv",
    "encoder",
    "causal_encoder",
]
# Can be asked of each of them, except for the reasons below.
ASKED = {
    "determinism",
    "finite_logits",
    "finite_gradients",
    "causality",
    "batch_invariance",
    "initial_loss",
}
# Not applicable, each with its reason.
SKIPPED = {
    "bidirectional_rack": {"causality": "claims no causality"},
    "bert": {"causality": "claims no causality"},
    "x_encoder": {"causality": "claims no causality"},
    "encoder": {"causality": "needs the claim", "initial_loss": "needs token ids"},
    "causal_encoder": {"initial_loss": "needs token ids"},
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_healthy(subjects, name, seed):
    results = {r.check: r for r in check_model(getattr(subjects, name), seed=seed)}
    assert list(results) == [c.name for c in select_checks()]
    for check, reason in SKIPPED.get(name, {}).items():
        assert results[check].status == "not applicable"
        assert reason in results[check].meaning
    for check in ASKED - SKIPPED.get(name, {}).keys():
        assert results[check].status == "passed", results[check]
    for result in results.values():
        assert result.status in ("passed", "warned", "not applicable"), result
        if result.status != "passed":
            assert result.meaning
        elif result.limit is not None:
            assert result.value <= result.limit, result
