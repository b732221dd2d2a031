"""History: earlier calls of the same model."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from stackwise.checks.engine.examination import Examination
from stackwise.checks.engine.question import Question
from stackwise.checks.engine.variation import Refused, Variation
from stackwise.checks.probe.dropout import WithoutDropout
from stackwise.subject.inference import cast
from stackwise.subject.spec import ModelSpec

_NAMES = {
    "plain": "a call",
    "wider": "a call",
    "broken": "a call that raised an error in a module,",
    "train": "a backward pass in train mode",
    "decode": "decoding",
    "padded": "a call with padding",
}


class History(Variation):
    """Call the model before. Value: kind and length of each call."""

    name = "history"
    question = "Is the output the same after earlier calls of the model?"
    rank = 60
    advice = (
        "Look for tensors that a call stores on the model (masks, positions, caches) and that a later call "
        "uses although its inputs differ."
    )

    def draw(self, exam: Examination, rng: random.Random) -> list[list[Any]]:
        """Draw one or two calls."""
        kinds = ["plain", "wider", "broken"]
        if exam.has_train_mode:
            kinds.append("train")
        if exam.spec.decode is not None and exam.spec.causal:
            kinds.append("decode")
        if exam.spec.masked is not None and exam.spec.padding_sides:
            kinds.append("padded")
        count = rng.choice((1, 2))
        return [[rng.choice(kinds), rng.choice(exam.drawn_lengths)] for _ in range(count)]

    def first_values(self, exam: Examination) -> Iterator[list[list[Any]]]:
        """Yield a long call, after which a rotary embedding may stay scaled."""
        if exam.far:
            yield [["plain", exam.far]]

    def simpler(self, value: list[list[Any]]) -> Iterator[list[list[Any]]]:
        """Yield each call alone, then a plain one."""
        if len(value) > 1:
            yield from ([each] for each in value)
        elif value[0][0] != "plain":
            yield [["plain", value[0][1]]]

    def text(self, value: list[list[Any]]) -> str:
        """Return the earlier calls."""
        return "the model was used before: " + ", ".join(
            f"{_NAMES[kind]} of {n} positions" for kind, n in value
        )

    def change(self, question: Question, value: list[list[Any]], exam: Examination) -> None:
        """Allow rounding to float32: a long call may compute a table again, in another dtype than before."""
        is_long = any(length > exam.longest for _, length in value)
        question.computes_in_float32 = question.computes_in_float32 or is_long

    def prepare(self, model: nn.Module, value: list[list[Any]], exam: Examination) -> nn.Module:
        """Make the calls."""
        spec = exam.spec
        for index, (kind, length) in enumerate(value):
            make = exam.repeated if length > exam.longest else exam.sequence
            inputs = torch.stack([make(50 + index + row, length) for row in range(1 + (kind != "plain"))])
            with torch.set_grad_enabled(kind == "train"), exam.subject.fixed_randomness(), WithoutDropout():
                if kind == "broken":
                    _break(spec, model.eval(), inputs)
                elif kind == "train":
                    spec.logits(model.train(), inputs).square().mean().backward()  # type: ignore[no-untyped-call]
                    model.zero_grad(set_to_none=True)
                elif kind == "decode" and spec.decode is not None:
                    half = max(1, length // 2)
                    _, cache = spec.decode(model.eval(), inputs[:, :half].contiguous(), None)
                    spec.decode(model, inputs[:, half:].contiguous(), cache)
                elif kind == "padded" and spec.masked is not None:
                    spec.masked(
                        model.eval(), cast(inputs, model), _half_padded(inputs, spec.padding_sides[0])
                    )
                else:
                    spec.logits(model.eval(), inputs)
        return model.eval()


def _half_padded(inputs: Tensor, side: str) -> Tensor:
    """Return a mask (B, T) that hides one half of the last row."""
    keep = torch.ones(inputs.shape[:2], dtype=torch.bool, device=inputs.device)
    half = inputs.shape[1] // 2
    keep[-1, slice(half) if side == "left" else slice(-half, None)] = False
    return keep


def _break(spec: ModelSpec, model: nn.Module, inputs: Tensor) -> None:
    """Call a model, and raise an exception after half of its modules."""

    def fail(*_: object) -> None:
        raise Refused

    modules = [module for module in model.modules() if module is not model]
    if not modules:
        return
    with suppress(Refused), modules[len(modules) // 2].register_forward_hook(fail):
        spec.logits(model, inputs)
