"""Oracle: does a mutant change the answers of a model, and do its answers contradict each other?

Each way asks a model for an answer that is known from a plainer call of the same model. The oracle uses torch
and the public interface of the libraries only. Shapes: B rows, T positions, V vocabulary.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["WAYS", "Answer", "ask", "changed", "contradictions", "new_exceptions"]

# Relative differences: largest of rounding, largest of answers that agree, smallest of a contradiction.
_ROUNDING, _AGREE, _DISAGREE = 1e-4, 1e-3, 2e-3
_RATIO = 10.0  # of a contradiction to the difference in the unchanged model
# Rounding of these ways relative to that of the others.
_COARSE = {"bfloat16": 100.0, "finite difference": 10.0}
_ROWS, _LENGTH, _PADDED = 3, 12, (12, 9, 5)
_SPECIAL = 3  # ids of padding, start and end


class Answer(NamedTuple):
    """Answer of a way.

    Attributes:
        values: the answer. None: the way raised an exception.
        gap: relative difference to the answer that plainer calls give. None: nothing is expected.
        error: the exception, otherwise "".
    """

    values: list[Any] | None
    gap: float | None
    error: str = ""


def ask(make: Callable[[], nn.Module]) -> dict[str, Answer]:
    """Return the answer of each way. If the plain way raises an exception, no other way is asked."""
    answers: dict[str, Answer] = {}
    model = Model(make)
    for name, way in WAYS.items():
        torch.manual_seed(0)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                values, expected = way(model)
            values = values.detach().float()
            gap = None if expected is None else _gap(values, expected.detach().float())
            answers[name] = Answer(values.tolist(), gap)
        except Exception as error:
            answers[name] = Answer(None, None, f"{type(error).__name__}: {error}"[:150])
            if name == "plain":
                break
    return answers


def changed(answers: Mapping[str, Answer], originals: Mapping[str, Answer]) -> list[str]:
    """Return the ways whose answer is not that of the unchanged model."""
    return [
        name
        for name, answer in answers.items()
        if None not in (answer.values, originals[name].values)
        and _gap(torch.tensor(answer.values), torch.tensor(originals[name].values))
        > _ROUNDING * _COARSE.get(name, 1.0)
    ]


def contradictions(answers: Mapping[str, Answer], originals: Mapping[str, Answer]) -> dict[str, float]:
    """Return the differences of the ways that agree with plainer calls in the unchanged model only."""
    found = {}
    for name, answer in answers.items():
        before, scale = originals[name].gap, _COARSE.get(name, 1.0)
        if answer.gap is None or before is None or before > _AGREE * scale:
            continue
        if answer.gap > max(_DISAGREE * scale, _RATIO * before):
            found[name] = round(answer.gap, 6)
    return found


def new_exceptions(answers: Mapping[str, Answer], originals: Mapping[str, Answer]) -> dict[str, str]:
    """Return the exceptions of the ways that raise none in the unchanged model."""
    return {
        name: answer.error for name, answer in answers.items() if answer.error and not originals[name].error
    }


def _gap(a: Tensor, b: Tensor) -> float:
    """Return the largest difference relative to the largest value of `b`. inf: not comparable."""
    if a.shape != b.shape or not torch.equal(a.isfinite(), b.isfinite()):
        return torch.inf
    a, b = a.nan_to_num(0.0, 0.0, 0.0), b.nan_to_num(0.0, 0.0, 0.0)
    difference, scale = ((a - b).abs().max().item(), b.abs().max().item()) if b.numel() else (0.0, 0.0)
    return difference / scale if scale else (torch.inf if difference else 0.0)


@dataclass
class Model:
    """Model under test. Every way gets a new copy, with random weights and without dropout.

    Attributes:
        make: builds a model.
    """

    make: Callable[[], nn.Module]
    _plain: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.base = self.make().eval()
        with torch.no_grad():
            for p in self.base.parameters():
                noise = torch.randn(p.shape)
                p.copy_(noise / p[0].numel() ** 0.5 if p.ndim > 1 else p + 0.2 * noise)
        for module in self.base.modules():
            for name, value in vars(module).items():
                if isinstance(value, float) and ("drop" in name or name == "p" or "jitter" in name):
                    setattr(module, name, 0.0)
        self.is_wrapper = hasattr(self.base, "attn_layers")  # of x-transformers
        vocabulary = int(self.base.num_tokens if self.is_wrapper else self.base.config.vocab_size)  # type: ignore
        self.rows = torch.randint(_SPECIAL, vocabulary, (_ROWS, _LENGTH))

    def fresh(self, *, attention: str | None = None) -> nn.Module:
        """Return a copy that was never called. Only with `attention` it has a configuration of its own."""
        config = getattr(self.base, "config", None)
        if attention is None:
            return copy.deepcopy(self.base, {id(config): config})
        model = copy.deepcopy(self.base)
        model.set_attn_implementation(attention)  # type: ignore[operator]
        return model

    def call(self, model: nn.Module, ids: Tensor | None, **options: Any) -> Any:
        """Call a model with a copy of the ids. The options are those of transformers."""
        ids = None if ids is None else ids.clone()
        if not self.is_wrapper:
            return model(ids, **options)
        renamed = {"attention_mask": "mask", "use_cache": "return_intermediates", "past_key_values": "cache"}
        options = {renamed.get(name, name): value for name, value in options.items()}
        if "mask" in options:
            options["mask"] = options["mask"].bool()
        if "cache" in options:
            options["input_not_include_cache"] = True
        return model(ids, **options)

    @torch.no_grad()
    def logits(self, ids: Tensor | None, model: nn.Module | None = None, **options: Any) -> Tensor:
        """Return the logits of a call, by default of a new model."""
        return _logits(self.call(self.fresh() if model is None else model, ids, **options))

    def plain(self, row: int = 0, length: int = _LENGTH) -> Tensor:
        """Return the logits (T, V) of the first tokens of a row in a plain call."""
        if (row, length) not in self._plain:
            self._plain[row, length] = self.logits(self.rows[row : row + 1, :length])[0]
        return self._plain[row, length]

    def all_plain(self) -> Tensor:
        """Return the logits (B, T, V) of plain calls of all rows."""
        return torch.stack([self.plain(row) for row in range(_ROWS)])

    def padded(self, side: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows of several lengths, padded with id 0, their mask, and their plain logits."""
        rows, masks = [], []
        for row, length in zip(self.rows, _PADDED, strict=True):
            padding = (0, _LENGTH - length) if side == "right" else (_LENGTH - length, 0)
            rows.append(F.pad(row[:length], padding))
            masks.append(F.pad(torch.ones(length, dtype=torch.long), padding))
        expected = torch.cat([self.plain(row, length) for row, length in enumerate(_PADDED)])
        return torch.stack(rows), torch.stack(masks), expected

    def loss(self, model: nn.Module, labels: Tensor | None = None) -> Tensor:
        """Return the mean cross-entropy of labels (B, T), by default the ids, from plain logits."""
        targets = (self.rows if labels is None else labels)[:, 1:].flatten()
        return F.cross_entropy(_logits(self.call(model, self.rows))[:, :-1].flatten(0, 1), targets)

    def gradients(self, model: nn.Module, loss: Tensor) -> Tensor:
        """Return the gradients of all parameters in one vector."""
        model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        every = (torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters())
        return torch.cat([gradient.flatten() for gradient in every])


def _logits(output: Any) -> Tensor:
    logits = output if isinstance(output, Tensor) else output[0] if type(output) is tuple else output.logits
    assert isinstance(logits, Tensor)
    return logits


def _positions(mask: Tensor) -> Tensor:
    return (mask.cumsum(-1) - 1).clamp(min=0)


Result = tuple[Tensor, Tensor | None]


def _called(model: Model, **options: Any) -> Result:
    return model.logits(model.rows, **options), model.all_plain()


def _later_tokens(model: Model) -> Result:
    row = torch.cat((model.rows[:1, :8], model.rows[1:2, 8:]), dim=1)
    return model.logits(row)[0, :8], model.plain()[:8]


def _padding(model: Model, side: str, *, positions: bool = False, attention: str | None = None) -> Result:
    ids, mask, expected = model.padded(side)
    options = {"position_ids": _positions(mask)} if positions else {}
    logits = model.logits(ids, model.fresh(attention=attention), attention_mask=mask, **options)
    return logits[mask.bool()], expected


def _cache(model: Model, *parts: int, padded: bool = False) -> Result:
    """Ask for parts of the rows, one after the other through the cache."""
    ids, mask, expected = model.padded("left") if padded else (model.rows, None, model.all_plain())
    called, end, logits = model.fresh(), 0, []
    options: dict[str, Any] = {"use_cache": True}
    for size in parts:
        start, end = end, end + size
        if mask is not None:
            options |= {"attention_mask": mask[:, :end], "position_ids": _positions(mask)[:, start:end]}
        with torch.no_grad():
            output = model.call(called, ids[:, start:end], **options)
        logits.append(_logits(output))
        if model.is_wrapper:
            options["past_key_values"] = output[1]
        else:
            takes_state = "cache_params" in inspect.signature(called.forward).parameters
            name = "cache_params" if takes_state else "past_key_values"
            options[name] = output[name]
    answer = torch.cat(logits, dim=1)
    return (answer if mask is None else answer[mask.bool()]), expected


def _tuple(model: Model) -> Result:
    with torch.no_grad():
        return model.fresh()(model.rows[:1], return_dict=False)[0][0], model.plain()


def _hidden_states(model: Model) -> Result:
    """The head of the last hidden states gives the logits."""
    called = model.fresh()
    with torch.no_grad():
        states = called(model.rows[:1], output_hidden_states=True).hidden_states
        return called.get_output_embeddings()(states[-1])[0], model.plain()  # type: ignore[operator]


def _attention_weights(model: Model) -> Result:
    """The weights of a query have the sum 1."""
    called = model.fresh(attention="eager")
    sums = torch.stack(called(model.rows[:1], output_attentions=True).attentions).sum(-1)
    return sums, torch.ones_like(sums)


def _embeddings(model: Model) -> Result:
    called = model.fresh()
    embeddings = called.get_input_embeddings()(model.rows[:1])  # type: ignore[operator]
    return model.logits(None, called, inputs_embeds=embeddings)[0], model.plain()


def _other_calls_before(model: Model) -> Result:
    called = model.fresh()
    model.logits(model.rows[1:, :9], called)
    model.loss(called.train()).backward()  # type: ignore[no-untyped-call]
    return model.logits(model.rows[:1], called.eval())[0], model.plain()


def _same_shape_before(model: Model) -> Result:
    called = model.fresh()
    model.logits(model.rows.flip(0), called)
    return model.logits(model.rows, called), model.all_plain()


def _inputs(model: Model) -> Result:
    """A call writes into none of its inputs."""
    ids, mask, _ = model.padded("right")
    given = torch.cat((ids, mask)).float()
    model.fresh()(ids, attention_mask=mask)
    return torch.cat((ids, mask)), given


def _state_dict(model: Model) -> Result:
    called, other = model.fresh(), model.make().eval()
    model.logits(model.rows, called)
    other.load_state_dict(called.state_dict())
    return model.logits(model.rows[:1], other)[0], model.plain()


def _loss(model: Model, ignores: bool, gradient: bool) -> Result:
    """The loss is the mean cross-entropy of the labels that are not ignored."""
    labels, called, other = model.rows.clone(), model.fresh(), model.fresh()
    if ignores:
        labels[:, :4], labels[1] = -100, -100
    own, expected = model.call(called, model.rows, labels=labels).loss, model.loss(other, labels)
    return (model.gradients(called, own), model.gradients(other, expected)) if gradient else (own, expected)


def _train_gradient(model: Model, recomputed: bool) -> Result:
    called, other = model.fresh().train(), model.fresh()
    if recomputed:
        called.gradient_checkpointing_enable()  # type: ignore[operator]
    return model.gradients(called, model.loss(called)), model.gradients(other, model.loss(other))


def _finite_difference(model: Model) -> Result:
    """The gradient is the slope of the loss in two random directions, in float64."""
    called, step, slopes, expected = model.fresh().double(), 1e-3, [], []
    gradients = model.gradients(called, model.loss(called))
    for _ in range(2):
        directions = [torch.randn_like(p) for p in called.parameters()]
        losses = []
        for sign in (1.0, -1.0):
            moved = model.fresh().double()
            with torch.no_grad():
                for p, direction in zip(moved.parameters(), directions, strict=True):
                    p.add_(sign * step * direction)
                losses.append(model.loss(moved))
        slopes.append((losses[0] - losses[1]) / (2 * step))
        expected.append(gradients @ torch.cat([direction.flatten() for direction in directions]))
    return torch.stack(slopes), torch.stack(expected)


WAYS: dict[str, Callable[[Model], Result]] = {
    "plain": lambda model: (model.all_plain(), None),
    "batch": _called,
    "train mode": lambda model: (model.logits(model.rows, model.fresh().train()), model.all_plain()),
    "prefix": lambda model: (model.plain(0, 7), model.plain()[:7]),
    "later tokens": _later_tokens,
    "right padding": partial(_padding, side="right"),
    "left padding": partial(_padding, side="left"),
    "right padding with positions": partial(_padding, side="right", positions=True),
    "left padding with positions": partial(_padding, side="left", positions=True),
    "eager attention": partial(_padding, side="right", attention="eager"),
    "sdpa attention": partial(_padding, side="right", attention="sdpa"),
    "mask of ones": partial(_called, attention_mask=torch.ones(_ROWS, _LENGTH, dtype=torch.long)),
    "positions": partial(_called, position_ids=torch.arange(_LENGTH).expand(_ROWS, -1)),
    "use_cache": partial(_called, use_cache=True),
    "no cache": partial(_called, use_cache=False),
    "output_hidden_states": partial(_called, output_hidden_states=True),
    "output_attentions": partial(_called, output_attentions=True),
    "last logits": lambda model: (model.logits(model.rows, logits_to_keep=2), model.all_plain()[:, -2:]),
    "tuple": _tuple,
    "hidden states": _hidden_states,
    "attention weights": _attention_weights,
    "embeddings": _embeddings,
    "cache, single tokens": lambda model: _cache(model, *[1] * _LENGTH),
    "cache, prompt and single tokens": lambda model: _cache(model, 5, *[1] * 7),
    "cache, parts of 2 and 3": lambda model: _cache(model, 2, 3, 2, 3, 2),
    "cache, long parts": lambda model: _cache(model, 7, 5),
    "cache, padded prompt": lambda model: _cache(model, 8, 1, 1, 1, 1, padded=True),
    "other calls before": _other_calls_before,
    "same shape before": _same_shape_before,
    "inputs unchanged": _inputs,
    "state_dict": _state_dict,
    "bfloat16": lambda model: (model.logits(model.rows, model.fresh().bfloat16()), model.all_plain()),
    "float64": lambda model: (model.logits(model.rows, model.fresh().double()), model.all_plain()),
    "loss": partial(_loss, ignores=False, gradient=False),
    "loss, ignored labels": partial(_loss, ignores=True, gradient=False),
    "gradient of the loss": partial(_loss, ignores=False, gradient=True),
    "gradient of the loss, ignored labels": partial(_loss, ignores=True, gradient=True),
    "gradient in train mode": partial(_train_gradient, recomputed=False),
    "gradient checkpointing": partial(_train_gradient, recomputed=True),
    "finite difference": _finite_difference,
}
