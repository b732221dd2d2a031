"""Initialisation: a fresh model knows nothing, and says so."""

from __future__ import annotations

import math

import torch.nn.functional as F

from stackwise.checks.check import check
from stackwise.checks.result import CheckResult
from stackwise.checks.subject import Subject

# A sound model stays well below the first; beyond the second with widely spread logits none does.
USUAL, LIMIT = 0.25, 1.0


@check
def initial_loss(subject: Subject) -> CheckResult:
    """Is the first loss near ln(vocabulary)?"""
    spec = subject.spec
    if spec.trained:
        return subject.not_applicable("the weights are trained")
    if spec.inputs != "tokens":
        return subject.not_applicable("needs token ids and logits over a vocabulary")
    logits = subject.logits(subject.model(), subject.inputs(4)).float()
    if logits.shape[-1] < spec.width:
        return subject.not_applicable(f"{logits.shape[-1]} outputs are no logits over {spec.width} tokens")
    # Independent random targets: what no model can know, causal or not.
    targets = subject.inputs(4, shift=1)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
    expected = math.log(logits.shape[-1])
    distance, spread = abs(loss - expected), logits.std().item()
    meaning = (
        f"First loss {loss:.2f} nats, ln({logits.shape[-1]}) = {expected:.2f}; std of logits {spread:.2f}."
    )
    if distance <= USUAL:
        return subject.passed(distance, USUAL, meaning=meaning)
    advice = (
        "Look at the scale of the embedding and the head (N(0, 1), torch's default, is too large when "
        "they are tied), and at a final norm that is missing."
    )
    if not distance <= LIMIT and not spread <= 1.0:
        return subject.failed(distance, LIMIT, meaning=meaning, advice=advice)
    return subject.warned(distance, USUAL, meaning=meaning, advice=advice)
