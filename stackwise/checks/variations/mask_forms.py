"""Mask forms: the padding mask with another dtype, or with four dimensions.

Shapes: B rows, T columns of a call, S columns of the mask, which cover the cache as well.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from stackwise.checks.engine.call import accepts, execute
from stackwise.checks.engine.examination import Examination
from stackwise.checks.engine.question import Call, Place, Transform
from stackwise.checks.engine.variation import MASKED, Need, Refused, Variation
from stackwise.checks.probe.call import dtype_of, has_fixed_state, leaves_state
from stackwise.checks.probe.difference import relative_difference
from stackwise.support.system_errors import false_if_raised

_NAME = "attention_mask"
# Largest difference between two forms of a mask, relative to the effect of the mask.
_EXPLAINED = 0.01


class MaskForms(Variation):
    """Pass the padding mask in another form. Value: the form.

    A form applies if a mask of ones in this form gives the plain output.
    """

    name = "mask_forms"
    question = "Is the output the same with a padding mask of another dtype, or of four dimensions?"
    rank = 41
    needs = (
        MASKED,
        Need(f"needs a parameter {_NAME}", lambda exam: accepts(exam.base, _NAME)),
    )
    no_values = "the model takes only one form of the padding mask"
    words: ClassVar[dict[str, str]] = {
        "bool": "the padding mask is a tensor of bool",
        "int64": "the padding mask is a tensor of int64",
        "float32": "the padding mask is a tensor of float32, 0 or 1",
        "4d bool": "the padding mask is a tensor (B, 1, T, S) of bool",
        "4d additive": "the padding mask is a tensor (B, 1, T, S) that is added to the scores",
    }
    sets: ClassVar[dict[str, bool]] = {"mask": True}
    includes = frozenset({"mask_of_ones"})
    # Backends differ in the forms that they take, and attention weights need another backend.
    excludes = frozenset({"attention_backend", "extra_outputs"})
    advice = (
        "Look for a branch on the dtype or the dimensions of the mask, and for ~mask, which is not the "
        "opposite of an integer mask."
    )

    def values(self, exam: Examination) -> list[str]:
        """Return the forms that the model takes, other than the one that `masked` passes."""
        return exam.once("mask_forms", lambda: [form for form in self.words if _takes(exam, form)])

    def edit(self, call: Call, value: str, exam: Examination) -> None:
        """Convert the mask of each call."""
        call.transforms.append(partial(_converted, form=value, exam=exam))


def _converted(arguments: dict[str, Any], width: int, *, form: str, exam: Examination) -> dict[str, Any]:
    """Return the arguments of a call of `width` columns, with its mask in a form."""
    mask = arguments.get(_NAME)
    if not isinstance(mask, Tensor) or mask.ndim != 2 or not bool(((mask == 0) | (mask == 1)).all()):
        raise Refused("no mask (B, S) of 0 and 1 is passed")
    if not form.startswith("4d"):
        converted = mask.to(getattr(torch, form))
        if converted.dtype == mask.dtype:
            raise Refused("the mask already has this form")
        return {**arguments, _NAME: converted}
    keep, columns = mask.bool(), torch.arange(mask.shape[1], device=mask.device)
    is_shifted = bool(((keep.long().cumsum(dim=1) - 1 != columns) & keep).any())
    if is_shifted and arguments.get("position_ids") is None:
        raise Refused("a four-dimensional mask contains no positions, so that padded rows need position_ids")
    queries = columns[len(columns) - width :, None]
    visible = keep[:, None, None] & ((columns <= queries) | (not exam.spec.causal))
    visible = visible | (columns == queries)  # otherwise a padded query sees nothing
    if form == "4d bool":
        return {**arguments, _NAME: visible}
    scores = torch.zeros(visible.shape, dtype=dtype_of(exam.base), device=mask.device)
    return {**arguments, _NAME: scores.masked_fill(~visible, torch.finfo(scores.dtype).min)}


@false_if_raised
def _takes(exam: Examination, form: str) -> bool:
    inputs = exam.plain_inputs
    if form.startswith("4d") and (
        has_fixed_state(exam.subject, inputs) or leaves_state(exam.subject, inputs)
    ):
        return False  # a recurrent layer needs to know which tokens are padding
    keep = torch.ones(inputs.shape[:2], dtype=torch.bool, device=inputs.device)
    transforms: list[Transform] = [partial(_converted, form=form, exam=exam)]
    if not exam.agrees(Call(inputs, [Place(0, 0, inputs.shape[1])], keep, transforms=transforms)):
        return False
    if form in ("bool", "int64"):
        return True
    # A mask of ones has no effect if it is added to all scores. If one token is hidden, it has one.
    hidden, rest = keep.clone(), slice(2, None) if exam.spec.causal else slice(-1)
    hidden[:, 1 if exam.spec.causal else -1] = False
    none = list[Transform]()
    with torch.no_grad():
        calls = (
            Call(inputs, keep=mask, transforms=some)
            for mask, some in ((hidden, none), (hidden, transforms), (keep, none))
        )
        try:
            one, two, whole = (execute(exam.spec, exam.model(), call)[:, rest] for call in calls)
        except Refused:  # the positions of padded rows are not passed
            return True
    effect = float(relative_difference(whole, one).max())
    return float(relative_difference(one, two).max()) <= min(exam.limit, _EXPLAINED * effect)
