"""Inference: how a model can be called, and what it claims, as far as that shows from outside.

Shapes: B batch, T positions.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn

from stackwise.call_form import CallForm, call_forms
from stackwise.capability import capabilities
from stackwise.seed import seeded

__all__ = ["InferenceError", "cast", "infer", "logits_of"]

_TRIAL_LENGTHS = (16, 8, 4)
_LONGEST_TRIAL = 1024
_LONGEST_ERROR = 160
# Settings of configurations that make a model causal which is not without them.
_CAUSAL_SETTINGS = {
    "is_decoder": True,
    "is_causal": True,
    "causal": True,
    "attn_type": "uni",
    "use_bidirectional_attention": False,
    "bidirectional": False,
}
# What the longest sequence is called. Some of these names mean other things too, as the size of a block of
# sparse attention.
_LIMITS = (
    "max_position_embeddings",
    "max_seq_len",
    "max_length",
    "max_seq_length",
    "max_sequence_length",
    "max_context_length",
    "max_positions",
    "max_len",
    "n_positions",
    "n_ctx",
    "context_length",
    "context_size",
    "block_size",
)
# What a model was configured by.
_SETTINGS = ("config", "cfg", "args", "params")


_MASK = "attention_mask"
_ASSUMED_CAUSAL = "assumed causal (say causal=False if not)"


class InferenceError(ValueError):
    """A model's way of being called could not be inferred and has to be declared."""


@dataclass(frozen=True)
class _WithMask(CallForm):
    """The same for a model that cannot do without a mask: it is given one that hides nothing."""

    def __call__(self, model: nn.Module, inputs: Tensor, **more: Any) -> Any:
        ones = torch.ones(inputs.shape[:2], dtype=torch.long, device=inputs.device)
        return super().__call__(model, inputs, **{_MASK: ones, **more})

    def _call(self) -> str:
        return f"{super()._call()} and {_MASK}= of ones"


@dataclass
class _Vain:
    """Calls that did not give logits.

    Attributes:
        errors: why not -> inputs.
        missing: name of the inputs in a dict -> what else the model looked for in it.
        examples: ModelSpecs that may be meant, as code, and how likely that is.
    """

    errors: dict[str, list[str]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    examples: list[tuple[int, str]] = field(default_factory=list)


@dataclass
class _Trial:
    """What one call of the model gave.

    Attributes:
        element: where in a tuple of outputs the logits are.
        beside: how many more of its outputs could have been these.
        auxiliary: whether a loss of its routers came with them.
        attributes: of a ModelSpec: the kind of input, width, a length that works.
    """

    element: int = 0
    beside: int = 0
    auxiliary: bool = False
    attributes: dict[str, Any] = field(default_factory=dict)


def infer(model: nn.Module, declared: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes of a ModelSpec: how it is called, what it claims, what else it can do, `assumed`, `notes`.

    Args:
        model: in eval mode; it is called, and of no other use afterwards.
        declared: attributes that are known already; only calls that agree with them are tried.

    Raises:
        InferenceError: no call was found; the message says what was tried.
    """
    inferred: dict[str, Any] = {}
    max_length, doubtful = _length_limit(model)
    inferred["max_length"] = max_length
    notes = []
    if "forward" not in declared and _is_sequence_first(model):
        inferred["forward"] = _transposed_call
        notes.append("batch_first=False: called with positions first")
    form, trial = _try_calls(model, {**inferred, **declared})
    found = {"forward": form, **inferred, **trial.attributes, **declared}
    if doubtful and "max_length" not in declared and _takes_more(model, found):
        inferred["max_length"] = None
        form, trial = _try_calls(model, {**inferred, **declared})
    inferred |= trial.attributes
    if form is not None and form != CallForm():
        inferred["forward"] = form
        notes.append(str(form))
    known = {**inferred, **declared}
    notes.append(f"takes {known['inputs']} of width {known['width']}")
    if trial.beside:
        notes.append(f"judged by its output [{trial.element}] alone, beside which are {trial.beside} more")
    if "causal" not in declared:
        inferred["causal"], reason = _claimed_causality(model, known)
        inferred["assumed"] = ("causal",) if reason == _ASSUMED_CAUSAL else ()
        notes.append(reason)
    if known["max_length"] is not None:
        notes.append(f"at most {known['max_length']} positions")
    if form is not None:
        shown = capabilities(model, _example(model, known), logits_of, form, auxiliary=trial.auxiliary)
        can = {key: value for key, value in shown.items() if key not in known}
        inferred |= can
        if can:
            notes.append("also " + ", ".join(can))
    return inferred | {"notes": "; ".join(notes)}


def logits_of(output: Any) -> Tensor:
    """The logits in a model's output: itself, `.logits`, `["logits"]`, or the first of a tuple.

    Raises:
        TypeError: none of these is a tensor.
    """
    found = output
    if not isinstance(found, Tensor):
        if hasattr(output, "logits"):
            found = output.logits
        elif isinstance(output, Mapping):
            found = output.get("logits")
        elif isinstance(output, tuple | list) and output:
            found = output[0]
    if not isinstance(found, Tensor):
        raise TypeError(
            f"output: got {type(output).__name__}; wanted a tensor, or logits in an object or dict"
        )
    return found


def cast(inputs: Tensor, model: nn.Module) -> Tensor:
    """Floating-point inputs in the model's own dtype; ids as they are."""
    if not inputs.is_floating_point():
        return inputs
    return inputs.to(next((p.dtype for p in model.parameters() if p.is_floating_point()), inputs.dtype))


@torch.no_grad()
def _try_calls(model: nn.Module, known: dict[str, Any]) -> tuple[CallForm | None, _Trial]:
    """How the model can be called (None: as declared), and what that gave."""
    vain = _Vain()
    forms = [None] if "forward" in known else [*call_forms(model), *_masked_forms(model)]
    for form in forms:
        trial = _try_form(model, known, known["forward"] if form is None else form, vain)
        if trial is not None:
            return None if form is None else replace(form, element=trial.element), trial
    lines = [f"{', '.join(dict.fromkeys(inputs))}: {error}" for error, inputs in vain.errors.items()]
    if "forward" not in known:
        vain.examples += _examples_by_missing(model, known, vain.missing)
        vain.examples += _examples_by_signature(model, known)
    example = max(vain.examples, key=lambda each: each[0], default=(0, ""))[1]
    raise InferenceError(
        f"{known['name']}: no call was found that gives (batch, positions, width). Declare inputs=, width= "
        "and forward= in ModelSpec.of(factory, ...). Tried:\n  "
        + "\n  ".join(lines or ["nothing: no layers seen"])
        + (f"\nFor example: {example}" if example else "")
    )


def _masked_forms(model: nn.Module) -> Iterator[CallForm]:
    """The call forms of a model without a default for its mask, with one of ones."""
    mask = inspect.signature(model.forward).parameters.get(_MASK)
    if mask is not None and mask.default is mask.empty:
        for form in call_forms(model):
            if not form.in_batch:
                yield _WithMask(form.keyword, with_targets=form.with_targets)


def _try_form(
    model: nn.Module, known: dict[str, Any], forward: Callable[..., Any], vain: _Vain
) -> _Trial | None:
    """What a call gives; None: it cannot be called so, and in `vain` is why."""

    def attempt(inputs: Tensor) -> tuple[_Trial, int] | None:
        """The trial, and how wide its logits are."""
        device = next((p.device for p in model.parameters()), inputs.device)
        given, trial, output = cast(inputs.to(device), model), _Trial(), None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a call that is none of the model's
                output = forward(model, given)
            if isinstance(forward, CallForm):
                trial.auxiliary = _in(output, "aux_loss") is not None
                if places := _candidates(output, given):
                    trial.element = _place_of_logits(model, forward, output, given, places)
                    trial.beside = len(places) - 1
                    output = output[trial.element]
            logits = logits_of(output)
        except Exception as error:  # any failure is an answer: this is not how it is called
            text = shorten(f"{type(error).__name__}: {error}", _LONGEST_ERROR, placeholder=" ...")
            vain.errors.setdefault(text, []).append(_describe(inputs))
            if isinstance(forward, CallForm) and output is not None:
                vain.examples += _examples_by_output(model, known, forward, inputs, output)
            elif isinstance(forward, CallForm) and forward.in_batch and isinstance(error, KeyError):
                vain.missing[str(forward.keyword)] = str(next(iter(error.args), ""))
            return None
        if logits.ndim == 3 and logits.shape[:2] == inputs.shape[:2] and logits.is_floating_point():
            return trial, logits.shape[-1]
        vain.errors.setdefault(f"output of shape {tuple(logits.shape)}", []).append(_describe(inputs))
        return None

    kinds = (known["inputs"],) if "inputs" in known else ("tokens", "vectors")
    limit = known["max_length"] or max(_TRIAL_LENGTHS)
    lengths = (known["seq_len"],) if "seq_len" in known else tuple(t for t in _TRIAL_LENGTHS if t <= limit)
    for seq_len in lengths or (limit,):
        if "tokens" in kinds:
            accepted = None
            for vocab_size in (known["width"],) if "width" in known else _vocabulary_candidates(model):
                if (found := attempt(torch.randint(vocab_size, (2, seq_len)))) is None:
                    continue
                trial, width = found
                trial.attributes = {"inputs": "tokens", "width": vocab_size, "seq_len": seq_len}
                if width == vocab_size:
                    return trial
                accepted = accepted or trial  # of the smallest
            if accepted:
                return accepted
        if "vectors" in kinds:
            for width in (known["width"],) if "width" in known else _width_candidates(model):
                if (found := attempt(torch.randn(2, seq_len, width))) is not None:
                    trial, _ = found
                    trial.attributes = {"inputs": "vectors", "width": width, "seq_len": seq_len}
                    return trial
    return None


def _examples_by_output(
    model: nn.Module, known: Mapping[str, Any], form: CallForm, inputs: Tensor, output: Any
) -> Iterator[tuple[int, str]]:
    """What came back under another name than that of logits."""
    kind = "vectors" if inputs.is_floating_point() else "tokens"
    width = inputs.shape[-1] if kind == "vectors" else max(_vocabulary_candidates(model), default=0)
    mapping = isinstance(output, Mapping)
    parts = output if mapping else getattr(output, "__dict__", {})
    for name, part in parts.items():
        if isinstance(part, Tensor) and part.ndim == 3 and part.shape[:2] == inputs.shape[:2]:
            place = f'["{name}"]' if mapping else f".{name}"
            text = _example_text(known, kind, width, _written(form) + place)
            yield 5 if part.shape[-1] == width else 4, text


def _examples_by_missing(
    model: nn.Module, known: Mapping[str, Any], missing: Mapping[str, str]
) -> Iterator[tuple[int, str]]:
    """What the model looked for in a dict: the inputs, or beside them, where it has looked for those too."""
    inputs = next((name for name in missing if name in missing.values()), None)
    for sought in list(missing.values())[:1]:
        batch = f'"{sought}": x' if inputs is None else f'"{inputs}": x, "{missing[inputs]}": ...'
        for rank, kind, width in _likely_inputs(model, known):
            yield rank + 2, _example_text(known, kind, width, f"m({{{batch}}})")


def _examples_by_signature(model: nn.Module, known: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """What the arguments that have no default show of it; nothing, where there is but one, as usual."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = inspect.signature(model.forward).parameters.values()
    required = [p for p in named if p.default is p.empty and p.kind not in variadic]
    by_name = [p for p in required if p.kind is p.KEYWORD_ONLY]
    if len(required) < 2 and not by_name:
        return
    first = next((p for p in required if p not in by_name), by_name[0] if by_name else required[0])
    others = [f"{p.name}=..." for p in required if p is not first]
    call = ", ".join([f"{first.name}=x" if first in by_name else "x", *others])
    for rank, kind, width in _likely_inputs(model, known):
        yield rank, _example_text(known, kind, width, f"m({call})")


def _likely_inputs(model: nn.Module, known: Mapping[str, Any]) -> Iterator[tuple[int, str, int]]:
    """Kind and width of what the layers of a model take, with how likely that is."""
    sizes = {"tokens": _vocabulary_candidates(model)[-1:], "vectors": _width_candidates(model)[:1]}
    for rank, kind in ((1, "tokens"), (0, "vectors")):
        if known.get("inputs", kind) == kind:
            yield from ((rank, kind, width) for width in sizes[kind])


def _example_text(known: Mapping[str, Any], kind: str, width: int, call: str) -> str:
    """A ModelSpec that may be meant, as code; what is declared wins."""
    width = known.get("width", width)
    return f'ModelSpec.of({known["name"]}, inputs="{kind}", width={width}, forward=lambda m, x: {call})'


def _written(form: CallForm) -> str:
    """A call in this form, as code."""
    more = ["targets=x"] if form.with_targets else []
    if isinstance(form, _WithMask):
        more.append(f"{_MASK}=torch.ones(x.shape[:2], dtype=torch.long)")
    if form.in_batch:
        batch = [f'"{form.keyword}": x']
        if form.complete:
            batch += [f'"{_MASK}": torch.ones(x.shape[:2], dtype=torch.long)', '"labels": x']
        return f"m({{{', '.join(batch)}}})"
    return f"m({', '.join(['x' if form.keyword is None else f'{form.keyword}=x', *more])})"


def _in(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def _candidates(output: Any, inputs: Tensor) -> list[int]:
    """Where in a tuple of outputs, if it is one that names none, logits may be."""
    if not isinstance(output, tuple | list) or hasattr(output, "logits"):
        return []
    return [
        place
        for place, each in enumerate(output)
        if isinstance(each, Tensor)
        and each.ndim == 3
        and each.shape[:2] == inputs.shape[:2]
        and each.is_floating_point()
    ]


def _place_of_logits(
    model: nn.Module, form: CallForm, output: Sequence[Tensor], inputs: Tensor, places: list[int]
) -> int:
    """The first of several outputs that is as wide as the vocabulary; else the first."""
    if len(places) == 1 or inputs.is_floating_point():
        return places[0]
    read = _vocabulary_read(model, form, inputs)
    known = [size for size in reversed(_vocabulary_candidates(model)) if size != read]
    for size in (read, *known):
        for place in places:
            if output[place].shape[-1] == size:
                return place
    return places[0]


def _vocabulary_read(model: nn.Module, form: CallForm, inputs: Tensor) -> int | None:
    """The size of the embedding that the ids themselves go into, and not their positions or kinds."""
    sizes: list[int] = []

    def see(module: nn.Module, given: tuple[Any, ...]) -> None:
        if given and isinstance(given[0], Tensor) and torch.equal(given[0], inputs):
            sizes.append(module.num_embeddings)  # type: ignore[arg-type]

    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    handles = [module.register_forward_pre_hook(see) for module in embeddings]
    try:
        form(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return next(iter(sizes), None)


def _example(model: nn.Module, known: Mapping[str, Any]) -> Tensor:
    """A batch that the model takes."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    shape = (2, known["seq_len"])
    if known["inputs"] == "tokens":
        return torch.randint(known["width"], shape, device=device)
    return cast(torch.randn(*shape, known["width"], device=device), model)


def _is_sequence_first(model: nn.Module) -> bool:
    """Whether this is one of torch's own layers in torch's own default order, (positions, batch, width)."""
    match model:
        case nn.RNNBase() | nn.MultiheadAttention():
            return not model.batch_first
        case nn.TransformerEncoder():
            return _is_sequence_first(model.layers[0])
        case nn.TransformerEncoderLayer():
            return not model.self_attn.batch_first
    return False


def _transposed_call(model: nn.Module, inputs: Tensor) -> Tensor:
    return logits_of(model(inputs.transpose(0, 1))).transpose(0, 1)


def _describe(inputs: Tensor) -> str:
    kind = "vectors" if inputs.is_floating_point() else "ids"
    return f"{kind} {tuple(inputs.shape)}"


def _vocabulary_candidates(model: nn.Module) -> list[int]:
    config = getattr(model, "config", None)
    named = [getattr(config, "vocab_size", None)] + [
        getattr(model, n, None) for n in ("vocab_size", "num_tokens")
    ]
    seen = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    # From the smallest, so that ids are tried beyond an embedding only where no other way is left: on
    # CUDA an index out of range ruins the process.
    return sorted({v for v in (*named, *seen) if isinstance(v, int) and v > 0})


def _width_candidates(model: nn.Module) -> list[int]:
    widths: list[Any] = [getattr(model, name, None) for name in ("d_model", "dim", "hidden_size")]
    for module in model.modules():
        match module:
            case nn.LayerNorm() | nn.RMSNorm():
                widths.append(module.normalized_shape[-1])
            case nn.Linear():
                widths.append(module.in_features)
            case nn.MultiheadAttention():
                widths.append(module.embed_dim)
    return list(dict.fromkeys(w for w in widths if isinstance(w, int) and w > 0))


def _claimed_causality(model: nn.Module, known: Mapping[str, Any]) -> tuple[bool | None, str]:
    """What the model says of itself; a next-token model by its shape is assumed to be causal."""
    layers = getattr(model, "attn_layers", None)
    for owner in (model, layers):
        for name in ("is_causal", "causal"):
            claim = getattr(owner, name, None)
            if isinstance(claim, bool):
                return claim, f"says {name}={claim}"
    can_generate = getattr(model, "can_generate", None)
    if inspect.ismethod(can_generate) and isinstance(answer := can_generate(), bool):
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            return None, "no claim about causality: its encoder sees everything"
        if not answer:
            return False, "not causal: it cannot generate"
        if (setting := _setting_against_causality(model, known)) is not None:
            return False, f"not causal, as configured: {setting}"
        return True, "causal, since it can generate"
    if known["inputs"] == "tokens":
        return True, _ASSUMED_CAUSAL
    return None, "no claim about causality (say causal=True to check it)"


def _setting_against_causality(model: nn.Module, known: Mapping[str, Any]) -> str | None:
    """The setting of its configuration that a model which reads ahead would have to change not to.

    A model that reads ahead whatever is set, or that did not when it was built, has a defect instead.
    """
    config = getattr(model, "config", None)
    settings = {
        name: value
        for name, value in _CAUSAL_SETTINGS.items()
        if getattr(config, name, None) not in (None, value)
    }
    if not settings or not _reads_ahead(model, known):
        return None

    def rebuilt(**changes: Any) -> nn.Module:
        changed = copy.deepcopy(config)
        for name, value in changes.items():
            setattr(changed, name, value)
        twin: nn.Module = type(model)(changed)
        return twin.to(next(model.parameters()).device).eval()

    try:
        if not _reads_ahead(rebuilt(), known):
            return None
        for name, value in settings.items():
            if not _reads_ahead(rebuilt(**{name: value}), known):
                return f"{name}={getattr(config, name)!r}"
    except Exception:  # a class that is not built from its configuration alone
        return None
    return None


@torch.no_grad()
def _reads_ahead(model: nn.Module, known: Mapping[str, Any]) -> bool:
    """Whether another last input moves earlier outputs by more than rounding, whichever input it is."""
    if known["seq_len"] < 2:
        return False
    forward = known.get("forward", lambda module, inputs: module(inputs))
    for _ in range(3):  # ids that stand for padding may cut a row off, before and after them
        inputs = _example(model, known)
        changed = inputs.clone()
        last = inputs[:, -1]
        changed[:, -1] = (last + 1) % known["width"] if known["inputs"] == "tokens" else -last
        outputs = []
        for each in (inputs, changed):
            with seeded(0, inputs.device):
                outputs.append(logits_of(forward(model, each)).double())
        moved = (outputs[1] - outputs[0]).abs()
        if not moved[:, :-1].max() > 1e-5 * moved.max():
            return False
    return True


def _length_limit(model: nn.Module) -> tuple[int | None, bool]:
    """The longest sequence that the model's settings name, and whether the name may mean something else."""
    config = getattr(model, "config", None)
    owners = (model, *(getattr(model, name, None) for name in _SETTINGS))
    certain = [(config, "max_position_embeddings"), (model, "max_seq_len"), (model, "max_length")]
    # Of a configuration, max_length may be that of the texts that it is to generate.
    doubtful = [(o, name) for name in _LIMITS for o in owners if o is model or name != "max_length"]
    for place, (owner, name) in enumerate(certain + doubtful):
        limit = getattr(owner, name, None)
        if isinstance(limit, int) and not isinstance(limit, bool) and limit > 0:
            return limit, place >= len(certain)
    return None, False


@torch.no_grad()
def _takes_more(model: nn.Module, known: Mapping[str, Any]) -> bool:
    """Whether the model takes one position more than its limit; one that is too long to try is believed.

    On CUDA, where an index out of range ruins the process, every limit is.
    """
    limit = known["max_length"]
    on_cpu = next((p.device.type for p in model.parameters()), "cpu") == "cpu"
    if limit is None or limit > _LONGEST_TRIAL or not on_cpu:
        return False
    inputs = _example(model, {**known, "seq_len": limit + 1})[:1]
    try:
        return logits_of(known["forward"](model, inputs)).shape[:2] == inputs.shape[:2]
    except Exception:  # any failure is an answer: it does not
        return False
