"""Trial: call a model with several inputs and in several forms until one call gives an output.

Shapes: B batch, T positions, C width.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn

from stackwise.subject.argument import CONTEXT
from stackwise.subject.call_form import CallForm, attempt, call_forms, influence_of_first, required_names
from stackwise.subject.inference.example_code import (
    example_with_key,
    examples_by_keys,
    examples_by_output,
    examples_by_signature,
    returns_loss,
)
from stackwise.subject.inference.inputs import (
    example_batch,
    image_sizes,
    is_sequence,
    random_batches,
    reads_images_or_audio,
    vocabulary_candidates,
    vocabulary_read,
    width_candidates,
)
from stackwise.subject.inference.readers import arguments_read, keys_read
from stackwise.subject.output import cast, logit_places, logits_of, named_part, part_of
from stackwise.support.system_errors import is_out_of_memory

__all__ = ["InferenceError", "Trial", "try_calls"]

_TRIAL_LENGTHS, _LONGEST_TRIAL = (16, 8, 4), 512
_LONGEST_ERROR = 160
_MOST_ERRORS = 4
_MOST_INPUTS = 3
_HIDDEN = 1e-5
_SAME_ERRORS = 12  # more than the sizes of images that are tried


class InferenceError(ValueError):
    """No call of the model gave an output, so that the call must be declared."""


@dataclass
class Trial:
    """Result of a call that gave an output.

    Attributes:
        form: the call; None: the declared `forward`.
        element: index of the output in a tuple.
        n_others: number of other items of the tuple that could be the output.
        auxiliary: True if the output has a router loss.
        output_shape: shape of the output.
        shortens: True if the output has fewer positions than the inputs.
        attributes: attributes of a ModelSpec: inputs, width, and a length or batches that work.
    """

    form: CallForm | None
    element: int = 0
    n_others: int = 0
    auxiliary: bool = False
    output_shape: tuple[int, ...] = ()
    shortens: bool = False
    attributes: dict[str, Any] = field(default_factory=dict)


def try_calls(model: nn.Module, known: dict[str, Any]) -> Trial:
    """Return the first call that gives an output.

    An output per position (B, T, ...) is preferred to an output per row (B, ...). Inputs other than (B, T)
    and (B, T, C) are tried last, unless the first layer reads images or audio.

    Raises:
        InferenceError: no call did. The message has the errors, and a ModelSpec to complete.
    """
    calls = _Calls(model, known)
    stages = [calls.sequences, calls.random_batches]
    if "make_batch" in known:
        stages = [calls.declared_batches]
    elif "inputs" in known or "width" in known:
        stages = [calls.sequences]
    elif reads_images_or_audio(model):
        stages.reverse()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of wrong calls
        for stage in stages:
            for form in calls.forms():
                if (trial := stage(form)) is not None:
                    return trial
            if calls.per_row:
                return calls.per_row[0]
        if others := (*calls.one_length, *calls.other_lengths):
            return others[0]
        raise InferenceError(calls.failure())


class _Calls:
    """Calls of one model, with the errors of the calls that failed.

    Attributes:
        per_row: calls with sequences that gave one output per row.
        one_length: calls with vectors (B, T, C) that work with one T only.
        other_lengths: calls with vectors (B, T, C) whose output has fewer positions, as in speech encoders.
    """

    def __init__(self, model: nn.Module, known: dict[str, Any]) -> None:
        self._model, self._known = model, known
        self._errors: dict[str, list[str]] = {}
        self._misses_key = False  # a dict was passed without a key that the model reads
        self._examples: list[tuple[int, str]] = []  # ModelSpecs as code, with a priority
        self._returns_loss = False
        self._last_error = ""
        self.per_row: list[Trial] = []
        self.one_length: list[Trial] = []
        self.other_lengths: list[Trial] = []

    def forms(self) -> Iterator[CallForm | None]:
        """Yield the forms of the call; None: the declared one."""
        if "forward" in self._known:
            yield None
            return
        if len(required_names(self._model)) < 2:
            # Before `_forms` calls the model with another length: it may keep a value of its first call.
            yield CallForm()
        yield from self._forms

    @cached_property
    def _forms(self) -> list[CallForm]:
        model = self._model
        keys, sizes = keys_read(model), image_sizes(model)
        required = required_names(model)
        reads = arguments_read(model, keys or required, sizes, in_batch=bool(keys))
        forms = call_forms(model, width_candidates(model), reads, keys)
        return [form for form in forms if form != CallForm() or len(required) > 1]

    # Inputs

    def declared_batches(self, form: CallForm | None) -> Trial | None:
        """Call the model with batches of `make_batch`."""
        longest = _TRIAL_LENGTHS[0]
        seq_len = self._known.get("seq_len", min(self._known["max_length"] or longest, longest))
        inputs = example_batch(self._model, {**self._known, "seq_len": seq_len})
        if (trial := self._call(form, inputs)) is None:
            return None
        if inputs.is_floating_point():
            trial.attributes |= {"inputs": "vectors", "width": inputs.shape[-1], "seq_len": seq_len}
        else:
            width = vocabulary_read(self._model, self._forward(form), inputs)
            width = width or max(vocabulary_candidates(self._model), default=trial.output_shape[-1])
            trial.attributes |= {"inputs": "tokens", "width": width, "seq_len": seq_len}
        return trial

    def sequences(self, form: CallForm | None) -> Trial | None:
        """Call the model with ids (B, T) and vectors (B, T, C). Keep outputs per row in `per_row`."""
        known = self._known
        limit = known["max_length"] or max(_TRIAL_LENGTHS)
        lengths = tuple(t for t in _TRIAL_LENGTHS if t <= limit) + (limit,) * (limit <= _LONGEST_TRIAL)
        lengths = (known["seq_len"],) if "seq_len" in known else tuple(dict.fromkeys(lengths))
        for seq_len in lengths or (limit,):
            for kind in (known["inputs"],) if "inputs" in known else ("tokens", "vectors"):
                trial = self._tokens(form, seq_len) if kind == "tokens" else self._vectors(form, seq_len)
                if trial is None:
                    continue
                trial.attributes |= {"inputs": kind, "seq_len": seq_len}
                if "per_position" not in trial.attributes:
                    return trial
                self.per_row.append(trial)
            if self.other_lengths:  # with fewer positions, the output may have one position only
                return None
        return None

    def random_batches(self, form: CallForm | None) -> Trial | None:
        """Call the model with images, audio and features. Prefer a size that also works in train mode."""
        first, errors = None, list[str]()
        for make_batch in random_batches(self._model):
            inputs = self._moved(make_batch(2, 1, torch.Generator().manual_seed(0)))
            if (trial := self._call(form, inputs)) is None:
                errors.append(self._last_error)
                # The same error for several sizes: another argument is wrong, not the size.
                is_repeated = len(errors) == _SAME_ERRORS and len(set(errors)) == 1
                if form is not None and form.extras and is_repeated:
                    break
                continue
            trial.attributes |= {"per_position": False, "max_length": None}
            trial.attributes |= {"inputs": "vectors", "width": make_batch.shape[-1], "seq_len": 16}
            trial.attributes["make_batch"] = make_batch
            if self._trains(form, inputs):
                return trial
            first = first or trial
        return first

    def _trains(self, form: CallForm | None, inputs: Tensor) -> bool:
        """Return True if the call works in train mode. Masks of short audio do not fit, for example."""
        try:
            return attempt(lambda: self._forward(form)(self._model.train(), inputs)) is not None
        finally:
            self._model.eval()

    def _tokens(self, form: CallForm | None, seq_len: int) -> Trial | None:
        """Return the call whose output has the width of the vocabulary, otherwise the first one."""
        known = self._known
        accepted: Trial | None = None
        read: int | None = None
        for vocabulary in (known["width"],) if "width" in known else vocabulary_candidates(self._model):
            inputs = self._moved(torch.randint(vocabulary, (2, seq_len)))
            if read is not None and vocabulary > read:
                break
            if (trial := self._call(form, inputs)) is None:
                continue
            trial.attributes["width"] = vocabulary
            if "width" in known:
                return trial
            # The smallest embedding may be one of token types or positions. Ids that are all 0 do not tell.
            read = vocabulary_read(self._model, self._forward(form), inputs) if vocabulary > 1 else None
            is_per_position = "per_position" not in trial.attributes
            is_usual = read in (None, vocabulary) or vocabulary not in self._table_sizes()
            if trial.output_shape[-1:] == (vocabulary,) and is_per_position and is_usual:
                return trial
            trial.attributes["width"] = read or vocabulary
            accepted = trial if accepted is None or read is not None else accepted
        return accepted

    def _table_sizes(self) -> set[int]:
        return {m.num_embeddings for m in self._model.modules() if isinstance(m, nn.Embedding)}

    def _vectors(self, form: CallForm | None, seq_len: int) -> Trial | None:
        for width in (self._known["width"],) if "width" in self._known else width_candidates(self._model):
            if (trial := self._call(form, torch.randn(2, seq_len, width))) is None:
                continue
            trial.attributes["width"] = width
            if "width" in self._known or self._call(form, torch.randn(2, seq_len + 1, width)) is not None:
                return trial
            # Positions may be channels or features: images and rows are tried first.
            trial.attributes |= {"inputs": "vectors", "seq_len": seq_len, "max_length": seq_len}
            self.one_length.append(trial)
        return None

    # Calls

    def _call(self, form: CallForm | None, inputs: Tensor) -> Trial | None:
        """Return the trial, or None after adding the error to the errors."""
        inputs, trial, output = self._moved(inputs), Trial(form), None
        forward = self._forward(form)
        try:
            output = forward(self._model, inputs)
            logits = logits_of(output if form is None else self._element(trial, form, output, inputs))
            trial.output_shape = tuple(logits.shape)
            if form is not None and any(each.kind != "inputs" for each in form.extras):
                _require_rows(forward, self._model, inputs, logits)
                _require_polarity(trial.form or form, self._model, inputs)
            if self._is_per_position(logits, inputs):
                return trial
            if self._is_per_row(logits, inputs, trial.form or forward):
                trial.attributes["per_position"] = False
                return trial
        except Exception as error:  # every other error means that the call is wrong
            if is_out_of_memory(error):
                raise
            self._add_error(error, form, inputs, output)
            return None
        is_per_position = self._known.get("causal") or self._known.get("per_position")
        if self._is_shortened(logits, inputs) and not is_per_position:
            trial.attributes |= {"per_position": False, "inputs": "vectors", "width": inputs.shape[-1]}
            trial.attributes["seq_len"], trial.shortens = inputs.shape[1], True
            self.other_lengths.append(trial)
        self._returns_loss |= logits.ndim == 0
        if logits.shape == inputs.shape[:2]:
            self._examples += examples_by_output(self._model, self._known, form, inputs, output)
        self._last_error = f"output of shape {tuple(logits.shape)}"
        self._errors.setdefault(self._last_error, []).append(_describe(inputs))
        return None

    def _forward(self, form: CallForm | None) -> Callable[..., Any]:
        return self._known["forward"] if form is None else form

    def _moved(self, inputs: Tensor) -> Tensor:
        """Return the inputs on the device and in the dtype of the model."""
        device = next((p.device for p in self._model.parameters()), inputs.device)
        return cast(inputs.to(device), self._model)

    def _element(self, trial: Trial, form: CallForm, output: Any, inputs: Tensor) -> Any:
        """Return the item of a tuple that has the logits, otherwise the output, and add it to the trial."""
        trial.auxiliary = part_of(output, "aux_loss") is not None
        if attempt(lambda: logits_of(output)) is None and (part := named_part(output, inputs)):
            trial.form = replace(form, part=part)
            return part_of(output, part)
        if not (places := logit_places(output, inputs)):
            return output
        trial.element = _place_of_logits(self._model, form, output, inputs, places)
        trial.n_others = len(places) - 1
        trial.form = replace(form, element=trial.element)
        return output[trial.element]

    def _add_error(self, error: Exception, form: CallForm | None, inputs: Tensor, output: Any) -> None:
        text = shorten(f"{type(error).__name__}: {error}", _LONGEST_ERROR, placeholder=" ...")
        self._errors.setdefault(text, []).append(_describe(inputs))
        self._last_error = text
        if output is not None:
            self._examples += examples_by_output(self._model, self._known, form, inputs, output)
        elif isinstance(error, KeyError) and form is None:
            if not _is_raised_in(error, self._known["forward"]):
                self._examples += example_with_key(self._model, self._known, error.args[0])
        elif isinstance(error, KeyError) and form is not None:
            self._misses_key |= form.in_batch

    @staticmethod
    def _is_per_position(logits: Tensor, inputs: Tensor) -> bool:
        if not (is_sequence(inputs) and logits.is_floating_point()):
            return False
        return logits.ndim == 3 and logits.shape[:2] == inputs.shape[:2]

    @staticmethod
    def _is_shortened(logits: Tensor, inputs: Tensor) -> bool:
        """Return True for vectors (B, T, C) whose output (B, S, V) has fewer positions."""
        is_sequence_of_vectors = is_sequence(inputs) and inputs.is_floating_point()
        return (
            is_sequence_of_vectors
            and logits.ndim == 3
            and len(logits) == len(inputs)
            and (1 < logits.shape[1] < inputs.shape[1])
        )

    def _may_be_per_row(self, logits: Tensor, inputs: Tensor) -> bool:
        """Return True if neither the declared attributes nor the kinds of the tensors exclude it."""
        known = self._known
        if known.get("causal") or known.get("per_position"):
            return False
        is_kind = inputs.is_floating_point() or logits.ndim == 2 or "per_position" in known
        return is_kind and logits.is_floating_point() and logits.ndim > 0 and logits.numel() > 0

    def _is_per_row(self, logits: Tensor, inputs: Tensor, forward: Callable[..., Any]) -> bool:
        """Return True if the output has an entry per row, and its other dimensions do not follow the length.

        An output (B, n, ...) of ids is usually a mistake in a shape.
        """
        if not self._may_be_per_row(logits, inputs) or len(logits) != len(inputs):
            return False
        if logits.ndim == 3 and logits.shape[1] == CONTEXT and getattr(forward, "extras", None):
            return False  # the output is as long as another argument
        alone = logits_of(forward(self._model, inputs[:1]))
        if alone.ndim == 0 or len(alone) != 1:
            return False
        if len(logits) == logits.shape[1] != alone.shape[1]:
            return False  # a similarity between rows
        if not is_sequence(inputs) or not self._known.keys().isdisjoint({"make_batch", "per_position"}):
            return True
        shorter = attempt(lambda: logits_of(forward(self._model, inputs[:, : (inputs.shape[1] + 1) // 2])))
        return shorter is None or shorter.shape == logits.shape  # None: a model of one length only

    def failure(self) -> str:
        """Return the message of an InferenceError."""
        model, known, examples = self._model, self._known, list(self._examples)
        if "forward" not in known:
            self._returns_loss |= returns_loss(model)
            if self._misses_key:
                examples += examples_by_keys(model, known)
            if not self._returns_loss:
                examples += examples_by_signature(model, known)
        example = max(examples, key=lambda each: each[0], default=(0, ""))[1]
        has_inputs = "make_batch" in known or known.keys() >= {"inputs", "width"}
        missing = ["inputs= and width=, or make_batch="] * (not has_inputs)
        missing += ["forward="] * ("forward" not in known)
        advice = f"Declare {'; and '.join(missing)}" if missing else "Correct the declared inputs or forward="
        text = f"{known['name']}: no call gives an output per position or per row. {advice}. Tried:\n  "
        text += "\n  ".join(self._error_lines() or ["nothing: no layers seen"])
        if self._returns_loss:
            text += (
                "\nThe model returns a loss. forward= has to return logits; a training loop is checked with "
                "TrainerSpec.of or check_trainer."
            )
        return text + (f"\n\nFor example: {example}" if example else "")

    def _error_lines(self) -> list[str]:
        """Return the first errors, each with inputs. Errors that differ only in numbers share a line."""
        groups = dict[str, tuple[str, dict[str, None]]]()
        for error, inputs in self._errors.items():
            _, seen = groups.setdefault(re.sub(r"\d+", "#", error), (error, {}))
            seen |= dict.fromkeys(inputs)
        lines = []
        for error, seen in groups.values():
            more = f" and {len(seen) - _MOST_INPUTS} more" if len(seen) > _MOST_INPUTS else ""
            lines.append(f"{', '.join(list(seen)[:_MOST_INPUTS])}{more}: {error}")
        rest = len(lines) - _MOST_ERRORS
        return lines[:_MOST_ERRORS] + [f"and {rest} more"] * (rest > 0)


def _place_of_logits(
    model: nn.Module, form: CallForm, output: Sequence[Tensor], inputs: Tensor, places: list[int]
) -> int:
    """Return the index of the first output with the width of the vocabulary, otherwise the first index."""
    if len(places) == 1 or inputs.is_floating_point():
        return places[0]
    read = vocabulary_read(model, form, inputs)
    known = [size for size in reversed(vocabulary_candidates(model)) if size != read]
    for size in (read, *known):
        for place in places:
            if output[place].shape[-1] == size:
                return place
    return places[0]


def _require_rows(forward: Callable[..., Any], model: nn.Module, inputs: Tensor, logits: Tensor) -> None:
    """Raise if the output of a call with further arguments is not finite, or needs two rows.

    A mask of the wrong kind may hide all positions, or fit the number of heads by chance.

    Raises:
        ValueError: an output is not finite.
        Exception: the model does not take another number of rows.
    """
    if not logits.isfinite().all():
        raise ValueError("the output is not finite")
    for rows in (inputs[:1], torch.cat((inputs, inputs[:1]))):
        forward(model, rows)


def _require_polarity(form: CallForm, model: nn.Module, inputs: Tensor) -> None:
    """Raise if a mask hides all positions except the one that it should hide.

    Raises:
        ValueError: the opposite mask hides its position, but this one does not.
    """
    for extra in form.extras:
        if extra.kind not in ("mask", "bool mask", "padding") or extra.width or len(inputs) < 2:
            continue
        value = extra.value(model, inputs).clone()
        value[:, 0] = 1 - value[:, 0] if extra.kind == "mask" else ~value[:, 0]
        opposite = 1 - value if extra.kind == "mask" else ~value
        if influence_of_first(form, model, inputs, {extra.name: value}) <= _HIDDEN:
            continue
        other = attempt(lambda: influence_of_first(form, model, inputs, {extra.name: opposite}))  # noqa: B023
        if other is not None and other <= _HIDDEN:
            raise ValueError(f"{extra}: it hides the inputs")


def _is_raised_in(error: Exception, function: Any) -> bool:
    """Return True if a function raised an error itself, not a function that it called."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code is getattr(function, "__code__", None)


def _describe(inputs: Tensor) -> str:
    if not is_sequence(inputs):
        return f"inputs {tuple(inputs.shape)}"
    kind = "vectors" if inputs.is_floating_point() else "ids"
    return f"{kind} {tuple(inputs.shape)}"
