"""Sound models of many kinds: every check passes, or says why it does not apply."""

import pytest

from stackwise.checks import check_model, known_checks

MODELS = [
    "tiny",
    "rack",
    "window_rack",
    "grouped_rack",
    "layernorm_rack",
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
# Not applicable, each with its reason.
SKIPPED = {
    "bidirectional_rack": {"causality": "claims no causality"},
    "bert": {"causality": "claims no causality"},
    "x_encoder": {"causality": "claims no causality"},
    "encoder": {"causality": "needs the claim", "initial_loss": "needs token ids"},
    "causal_encoder": {"initial_loss": "needs token ids"},
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", [0, 1])
def test_healthy(subjects, name, seed):
    results = {r.check: r for r in check_model(getattr(subjects, name), seed=seed)}
    skipped = SKIPPED.get(name, {})
    expected = {check: "not applicable" if check in skipped else "passed" for check in known_checks()}
    assert {check: r.status for check, r in results.items()} == expected
    for check, reason in skipped.items():
        assert reason in results[check].meaning
    for check in expected.keys() - skipped.keys():
        assert results[check].value <= results[check].limit
