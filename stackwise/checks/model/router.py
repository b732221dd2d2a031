"""Router: the bias that selects experts must not change their weights."""

from __future__ import annotations

import torch
from torch import nn

from stackwise.checks.check import check
from stackwise.checks.engine.examination import Examination
from stackwise.checks.probe.difference import relative_difference
from stackwise.checks.result import CheckResult, listed
from stackwise.checks.subject import Subject

# Constants that are added to all biases. With the second one, all biased sigmoid scores are negative.
_CONSTANTS = (1.0, -2.0)


@check
def selection_bias(subject: Subject) -> CheckResult:
    """Does the output stay the same if one constant is added to the selection biases of all experts?"""
    exam = Examination.of(subject)
    names = _selection_biases(exam.base)
    if not names or not exam.is_repeatable:
        return subject.not_applicable("needs a repeatable model with e_score_correction_bias or expert_bias")
    key = (0, exam.longest)
    limit, worst = exam.limit_of(*key), 0.0

    @torch.no_grad()
    def gap(some: list[str], constant: float) -> float:
        """Return the change of the output if a constant is added to some biases."""
        model = exam.model()
        for name in some:
            dict((*model.named_parameters(), *model.named_buffers()))[name].add_(constant)
        output = exam.plain(model, exam.sequence(*key))
        return float(relative_difference(exam.answer(*key), output).max())

    for constant in _CONSTANTS:
        if (value := gap(names, constant)) > limit:
            wrong = [name for name in names if gap([name], constant) > limit]
            return subject.failed(
                value,
                limit,
                where=listed(wrong or names),
                meaning=f"The output changes if {constant:g} is added to the selection bias of all experts, "
                "which does not change their order.",
                advice="Select experts by scores with the bias, and weight them by scores without it. "
                "Exclude an expert by a score of -inf, because 0 is larger than a negative score.",
            )
        worst = max(worst, value)
    return subject.passed(worst, limit)


def _selection_biases(model: nn.Module) -> list[str]:
    """Return the names of biases that only select experts.

    A buffer `expert_bias` gets no gradient, so it should not be a part of the weights of experts. Biases in
    16 bits are excluded, because rounding changes the order of similar scores.
    """
    buffers = dict(model.named_buffers())
    return [
        name
        for name, tensor in (*model.named_parameters(), *buffers.items())
        if (name.endswith("correction_bias") or (name.endswith("expert_bias") and name in buffers))
        and tensor.dtype in (torch.float32, torch.float64)
    ]
