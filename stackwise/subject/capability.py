"""Capabilities: features of a model beyond the forward pass, found in its signature and by trial.

Shapes: B batch, T positions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise.subject.argument import LENGTHS, MASKS
from stackwise.subject.cached_call import find_cached_call
from stackwise.subject.call_form import CallForm, attempt, forward_parameters, influence_of_first
from stackwise.subject.facts import value_in
from stackwise.subject.output import logits_of, part_of
from stackwise.subject.rotary import rotary_in
from stackwise.support.random_state import seeded

__all__ = ["capabilities", "padding_id", "padding_of_rows"]

# Keys of a batch other than the inputs.
_IN_BATCHES = ("attention_mask", "labels")
_LABEL_NAME = re.compile(r"label|target|gold|answer|truth|(^|_)ys?(_|$)")

# Other names of masks. Such an argument is used if it hides a position, or if its name shows padding.
_OTHER_MASK = re.compile(rf"^(?!({'|'.join(MASKS)})$).*(mask|pad)(?!.*(id|token|ratio|index))")
_HIDDEN = 1e-5

# Names of the claim that the head is the embedding.
_TIED = ("tie_embeddings", "tie_word_embeddings", "tie_weights", "use_weight_tying", "weight_tying")
# Names of the document of each position.
_DOCUMENTS = ("document_ids", "documents", "doc_ids", "sequence_ids", "seq_ids", "seq_idx", "example_ids")
# Documents are meant to be separate if the influence of one on the next falls below this part.
_SEPARATED = 0.9


def capabilities(
    model: nn.Module,
    inputs: Tensor,
    form: CallForm,
    *,
    auxiliary: bool,
    cached: bool,
    capacity: int | None,
) -> dict[str, Any]:
    """Return the ModelSpec fields found by calling the model.

    A call counts if its output has the right shape. Calls with a cache are also compared with a full pass.

    Args:
        model: in eval mode. It is called without gradients, and its state may change.
        inputs: a batch that it takes, (B, T) ids or (B, T, C) vectors.
        form: how it is called.
        auxiliary: True if a call without further arguments returned `aux_loss`.
        cached: look for a cache.
        capacity: number of tokens of a cache, if the model preallocates it. None: 256.

    Raises:
        RuntimeError, MemoryError: memory was too small for a call, so the result is unknown.
    """
    named = _further_arguments(model, form)
    shape = inputs.shape[:2]
    found = _padding(model, inputs, form, shape)
    found["assumed"] = ("padding_sides",) * ("padding_sides" in found)
    if (packed := _packing(model, inputs, form, named)) is not None:
        found["packed"] = packed
        is_named = packed.keywords.get("name") in _DOCUMENTS  # type: ignore[attr-defined]
        if not is_named and _influence_left(packed, model, inputs):
            found["assumed"] += ("packed",)
    if cached:
        search = find_cached_call(model, inputs, form, capacity=capacity)
        found |= {"cache_problem": search.problem} if search.call is None else {"decode": search.call}
    for labelled_loss in _labellings(model, inputs, form):
        if _scalar(partial(labelled_loss, model, inputs, inputs)) is not None:
            found["labelled_loss"] = labelled_loss
            break
    asked = partial(_auxiliary_loss, form=form, output_router_logits=True)
    returned = partial(_auxiliary_loss, form=form)
    if "output_router_logits" in named and _scalar(partial(asked, model, inputs)) is not None:
        found["auxiliary_loss"] = asked
    elif auxiliary:
        with torch.enable_grad():
            loss = _scalar(partial(returned, model, inputs))
        if loss is not None and loss.requires_grad:  # otherwise it is only for logging
            found["auxiliary_loss"] = returned
    return found | dict(_claims(model))


def padding_of_rows(model: nn.Module, inputs: Tensor, form: CallForm) -> dict[str, Any]:
    """Return `masked` and `padding_sides` of a model with an output per row, or nothing."""
    found = _padding(model, inputs, form, logits_of(form(model, inputs)).shape)
    if "masked" in found:
        # A head that reads the first token takes no padding on the left, for example.
        sides = []
        for side in ("right", "left") if inputs.shape[1] > 1 else ():
            with suppress(RuntimeError, ValueError, IndexError):  # such as a model of one length only
                sides += [side] * _pads(found["masked"], side, model, inputs)
        found["padding_sides"] = tuple(sides) or ("right",)
    return found


def _embedding_weights(model: nn.Module) -> Iterator[Tensor]:
    """Yield the weights (V, C) of embeddings of torch and of other classes, such as a quantised one."""
    for module in model.modules():
        weight = getattr(module, "weight", None)
        is_named = "embedding" in type(module).__name__.lower()
        if (is_named or isinstance(module, nn.Embedding)) and isinstance(weight, Tensor) and weight.ndim == 2:
            yield weight


def padding_id(model: nn.Module) -> int | None:
    """Return the pad id of the configuration or the model; None if there is none, or no embedding has it."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    named = [getattr(each, "pad_token_id", None) for each in (config, text, model)]
    rows = max(map(len, _embedding_weights(model)), default=0)
    return next((each for each in named if isinstance(each, int) and 0 <= each < rows), None)


def masked_with_positions(model: nn.Module, inputs: Tensor, keep: Tensor) -> Any:
    """Call a model with a padding mask and the positions of the real tokens."""
    # Number of real tokens before each position, (B, T).
    positions = (keep.long().cumsum(-1) - 1).clamp(min=0)
    return model(inputs, attention_mask=keep.long(), position_ids=positions)


def _further_arguments(model: nn.Module, form: CallForm) -> Collection[str]:
    return _IN_BATCHES if form.in_batch else forward_parameters(model)


def _works(call: Callable[[], Any], shape: torch.Size) -> bool:
    """Return True if a call gives an output whose shape begins with `shape`."""
    logits = attempt(lambda: logits_of(call()))
    return logits is not None and logits.shape[: len(shape)] == shape


def _scalar(call: Callable[[], Any]) -> Tensor | None:
    """Return the scalar that a call gives, otherwise None."""
    value = attempt(call)
    return value if isinstance(value, Tensor) and value.ndim == 0 else None


# Padding


def _padding(model: nn.Module, inputs: Tensor, form: CallForm, shape: torch.Size) -> dict[str, Any]:
    """Return the call with a padding mask and the sides on which padding is allowed, or nothing."""
    usable = _usable_maskings(model, inputs, form, shape)
    if not usable:
        return {}
    # Use a mask that hides the masked token, otherwise the mask that reduces its influence most.
    masked, sides, _ = min(usable, key=lambda way: max(_HIDDEN, round(way[2], 3)))
    if "left" not in sides and attempt(partial(_pads, masked, "left", model, inputs)):
        sides = (*sides, "left")  # the model counts positions from the mask
    return {"masked": masked, "padding_sides": sides}


def _usable_maskings(
    model: nn.Module, inputs: Tensor, form: CallForm, shape: torch.Size
) -> list[tuple[Callable[..., Any], tuple[str, ...], float]]:
    """Return calls with a padding mask that work, their sides, and the influence of a masked token."""
    partly = torch.ones(inputs.shape[:2], dtype=torch.bool, device=inputs.device)
    partly[-1, inputs.shape[1] // 2 :] = False
    working = [
        (masked, sides)
        for masked, sides in _maskings(model, form)
        if _works(partial(masked, model, inputs, partly), shape)
    ]
    if working and working[0][0] is masked_with_positions and not _keeps_output(model, inputs, form):
        working = working[1:]  # its positions do not start at 0, as in RoBERTa
    usable = [(masked, sides, _visible_part(masked, model, inputs)) for masked, sides in working]
    # A key of a dict may be unread without an error, and a mask may have another meaning.
    is_read = bool(usable) and influence_of_first(form, model, inputs, {}) > _HIDDEN
    # An optional argument may have the lengths of another sequence.
    known = (None, *(each.name for each in form.extras))

    def is_certain(masked: Callable[..., Any], visible: float) -> bool:
        return (_is_known(masked) and not form.in_batch) or (visible <= _HIDDEN and is_read)

    return [
        way
        for way in usable
        if is_certain(way[0], way[2]) and (_lengths_name(way[0]) in known or _shortens(way[0], model, inputs))
    ]


def _maskings(model: nn.Module, form: CallForm) -> Iterator[tuple[Callable[..., Any], tuple[str, ...]]]:
    """Yield functions that pass a padding mask, each with the sides on which padding is allowed."""
    of_context = {each.name for each in form.extras if each.width}
    named = [name for name in _further_arguments(model, form) if name not in of_context]
    for name in (*(name for name in MASKS if name in named), *filter(_OTHER_MASK.search, named)):
        if name == "attention_mask" and "position_ids" in named and not form.element:
            # Padding on the left needs the positions of the real tokens.
            yield masked_with_positions, ("right", "left")
        for polarity in MASKS.get(name, (False, True)):
            yield partial(_by_mask, form=form, name=name, true_is_real=polarity), ("right",)
    for name in filter(LENGTHS.match, named):
        yield partial(_by_lengths, form=form, name=name), ("right",)


def _by_lengths(model: nn.Module, inputs: Tensor, keep: Tensor, *, form: CallForm, name: str) -> Any:
    """Call a model with the length of each row, which has padding on the right."""
    return form(model, inputs, **{name: keep.sum(dim=1)})


def _lengths_name(masked: Callable[..., Any]) -> str | None:
    """Return the name of the argument with lengths, or None for another mask."""
    if isinstance(masked, partial) and masked.func is _by_lengths:
        return str(masked.keywords["name"])
    return None


def _is_known(masked: Callable[..., Any]) -> bool:
    """Return True if the name of a mask shows that it is a padding mask."""
    if not isinstance(masked, partial):
        return True
    name = masked.keywords["name"]
    return name in MASKS or "pad" in name or masked.func is _by_lengths


def _shortens(masked: Callable[..., Any], model: nn.Module, inputs: Tensor) -> bool:
    """Return True if inputs change the outputs before them, unless they are after the length of the row."""
    half = inputs.shape[1] // 2
    keep = (torch.arange(inputs.shape[1], device=inputs.device) < half).expand(inputs.shape[:2])
    changed = torch.cat((inputs[:, :half], inputs[:, half:].flip(0)), dim=1)
    gaps = []
    for mask in (keep, torch.ones_like(keep)):
        one, two = (logits_of(masked(model, x, mask)) for x in (inputs, changed))
        if one.shape[:2] == inputs.shape[:2]:
            one, two = one[:, :half], two[:, :half]
        gaps.append(float((one - two).abs().max() / one.abs().max()))
    return gaps[0] <= 1e-4 < gaps[1]


def _by_mask(
    model: nn.Module, inputs: Tensor, keep: Tensor, *, form: CallForm, name: str, true_is_real: bool
) -> Any:
    mask = keep if true_is_real else ~keep
    return form(model, inputs, **{name: mask.long() if name == "attention_mask" else mask})


def _keeps_output(model: nn.Module, inputs: Tensor, form: CallForm) -> bool:
    """Return True if a mask of ones, with the positions from 0, does not change the output."""
    ones = torch.ones(inputs.shape[:2], dtype=torch.bool, device=inputs.device)
    with seeded(0, inputs.device):
        plain = logits_of(form(model, inputs))
    with seeded(0, inputs.device):
        masked = logits_of(masked_with_positions(model, inputs, ones))
    limit = max(1e-3, 8 * torch.finfo(plain.dtype).eps)
    return bool((masked - plain).abs().max() <= limit * plain.abs().max())


def _visible_part(masked: Callable[..., Any], model: nn.Module, inputs: Tensor) -> float:
    """Return the influence of a masked first position on the other outputs."""
    keep = torch.ones(inputs.shape[:2], dtype=torch.bool, device=inputs.device)
    keep[:, 0] = False
    return influence_of_first(masked, model, inputs, {"keep": keep})


def _pads(masked: Callable[..., Any], side: str, model: nn.Module, inputs: Tensor) -> bool:
    """Return True if padding on a side does not change the output of a row."""
    row, padding = inputs[:1].chunk(2, dim=1)
    if (pad := padding_id(model)) is not None and not inputs.is_floating_point():
        padding = torch.full_like(padding, pad)
        row = row.where(row != pad, (row + 1) % (int(inputs.max()) + 1))
    real = torch.ones(row.shape[:2], dtype=torch.bool, device=inputs.device)
    none = torch.zeros(padding.shape[:2], dtype=torch.bool, device=inputs.device)
    parts, keeps = ((row, padding), (real, none)) if side == "right" else ((padding, row), (none, real))
    padded = logits_of(masked(model, torch.cat(parts, dim=1), torch.cat(keeps, dim=1)))
    alone = logits_of(masked(model, row, real))
    return torch.allclose(padded, alone, rtol=1e-3, atol=1e-4 * float(alone.abs().max()))


# Packed documents


def _packing(
    model: nn.Module, inputs: Tensor, form: CallForm, named: Collection[str]
) -> Callable[..., Any] | None:
    """Return the function that calls the model with packed documents. None: there is none.

    An argument with a name such as `document_ids` is always used. `segment_ids`, `position_ids` and
    `cu_seqlens` have several meanings. They are used only if a change of one document leaves the outputs of
    the next one bit-identical. `segment_ids` are also used if they clearly reduce the influence.
    """
    documents = torch.zeros(inputs.shape[:2], dtype=torch.long, device=inputs.device)
    for name in _DOCUMENTS:
        by_name = partial(_packed, form=form, name=name)
        if name in named and _works(partial(by_name, model, inputs, documents), inputs.shape[:2]):
            return by_name
    ways: list[partial[Any]] = []
    if "segment_ids" in named:
        ways.append(partial(_packed, form=form, name="segment_ids"))
    if "position_ids" in named:
        ways.append(partial(_packed_by_positions, form=form))
    if "cu_seqlens" in named:
        ways.append(partial(_packed_by_starts, form=form))
    left = [_influence_left(way, model, inputs) for way in ways]
    separate = (way for way, part in zip(ways, left, strict=True) if part == 0)
    partly = [w for w, part in zip(ways, left, strict=True) if w.func is _packed and part < _SEPARATED]
    return next(separate, *partly or (None,))


def _influence_left(packed: Callable[..., Any], model: nn.Module, inputs: Tensor) -> float:
    """Return the influence of a first document on the second, relative to that of two halves of one document.

    Return 1 if the first half has no influence on the second, or the first document none on itself.
    """
    half = inputs.shape[1] // 2
    documents = (torch.arange(inputs.shape[1], device=inputs.device) >= half).long().expand(inputs.shape[:2])
    changed = inputs.clone()
    changed[:, :half] = inputs[:, :half].flip(0)
    outputs = [
        attempt(partial(_output, packed, model, x, each))
        for each in (documents, torch.zeros_like(documents))
        for x in (inputs, changed)
    ]
    if any(each is None or each.shape[:2] != inputs.shape[:2] for each in outputs) or not half:
        return 1.0
    one, two, one_row, other_row = (each for each in outputs if each is not None)
    if torch.equal(one[:, :half], two[:, :half]) or torch.equal(one_row[:, half:], other_row[:, half:]):
        return 1.0
    gaps = [float((x - y)[:, half:].norm()) for x, y in ((one, two), (one_row, other_row))]
    return gaps[0] / gaps[1]


def _output(packed: Callable[..., Any], model: nn.Module, inputs: Tensor, documents: Tensor) -> Tensor:
    return logits_of(packed(model, inputs, documents))


def _packed(model: nn.Module, inputs: Tensor, documents: Tensor, *, form: CallForm, name: str) -> Any:
    return form(model, inputs, **{name: documents})


def _packed_by_positions(model: nn.Module, inputs: Tensor, documents: Tensor, *, form: CallForm) -> Any:
    """Call a model with positions that start again at each document."""
    places = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    is_first = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    positions = places - torch.where(is_first, places, 0).cummax(dim=1).values
    return form(model, inputs, position_ids=positions)


def _packed_by_starts(model: nn.Module, inputs: Tensor, documents: Tensor, *, form: CallForm) -> Any:
    """Call a model with the starts of all documents in the concatenated rows, and with the end."""
    is_first = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True).flatten()
    starts = F.pad(is_first.nonzero().flatten(), (0, 1), value=documents.numel())
    return form(model, inputs, cu_seqlens=starts.int())


# The model's own loss


def _labellings(model: nn.Module, inputs: Tensor, form: CallForm) -> Iterator[Callable[..., Any]]:
    """Yield functions that compute the model's own loss from labels that are not shifted.

    - `labels`: the model shifts them.
    - `targets`: already shifted; -1 or -100 means none.

    An argument with another name is used if its loss equals the
    cross-entropy with shifted or unshifted labels, or if it is named like labels.
    """
    named = _further_arguments(model, form)
    if "labels" in named:
        yield partial(_labelled_loss, form=form, name="labels")
    if inputs.is_floating_point():
        return
    names = {"targets": False} if "targets" in named else {}
    if not names and "labels" not in named:
        names = _label_names(model, inputs, form)
    for name, is_shifted_inside in names.items():
        if is_shifted_inside:
            yield partial(_labelled_loss, form=form, name=name)
            continue
        shift = _sees_only_the_past(model, inputs, form)
        if shift is None:
            continue
        for ignored in (-100, -1):
            way = partial(_targeted_loss, form=form, name=name, shift=int(shift), ignored=ignored)
            if _scalar(partial(way, model, inputs, torch.full_like(inputs, -100))) is not None:
                yield way


def _sees_only_the_past(model: nn.Module, inputs: Tensor, form: CallForm) -> bool | None:
    """Return True if the last id has no effect on the first output. None: the model needs targets to run."""
    changed = inputs.clone()
    changed[:, -1] = inputs[:, 0]
    with seeded(0, inputs.device):
        first = attempt(lambda: logits_of(form(model, inputs))[:, 0])
    with seeded(0, inputs.device):
        other = attempt(lambda: logits_of(form(model, changed))[:, 0])
    return None if first is None or other is None else torch.equal(first, other)


def _label_names(model: nn.Module, inputs: Tensor, form: CallForm) -> dict[str, bool]:
    """Return the arguments that take labels, and True if the model shifts them itself.

    They are named like labels, or their loss is the cross-entropy with shifted or unshifted labels. A model
    that shifts them never reads the first label. If no label has an effect, as with a head of zeros, the
    convention is unknown, and the argument is left out.
    """
    found: dict[str, bool] = {}
    labels = inputs.roll(1, dims=0).flip(1)
    for name in (name for name, each in forward_parameters(model).items() if each.default is None):

        def loss(given: Tensor) -> Tensor:
            with seeded(0, inputs.device):
                return _labelled_loss(model, inputs, given, form=form, name=name)  # noqa: B023

        if (value := _scalar(partial(loss, labels))) is None:
            continue
        logits = logits_of(form(model, inputs))
        if not value.isfinite() or not (_LABEL_NAME.search(name) or _is_cross_entropy(value, logits, labels)):
            continue
        first, last = labels.clone(), labels.clone()
        for changed, place in ((first, 0), (last, -1)):
            changed[:, place] = inputs[:, place].where(inputs[:, place] != labels[:, place], inputs[:, 1])
        reads_first, reads_last = (not torch.equal(loss(each), value) for each in (first, last))
        if reads_first or reads_last:
            found[name] = not (reads_first and reads_last)
    return found


def _is_cross_entropy(value: Tensor, logits: Tensor, labels: Tensor) -> bool:
    """Return True if a loss is the cross-entropy of labels, shifted or not."""
    if logits.shape[-1] <= int(labels.max()):
        return False
    pairs = ((logits, labels), (logits[:, :-1], labels[:, 1:]))
    losses = [F.cross_entropy(x.flatten(0, 1).double(), y.flatten()) for x, y in pairs]
    return any(torch.isclose(value.double(), each, rtol=1e-3) for each in losses)


def _labelled_loss(model: nn.Module, inputs: Tensor, labels: Tensor, *, form: CallForm, name: str) -> Tensor:
    """Return `loss` of the output, the only scalar in a tuple, or an output that is a scalar itself."""
    output = form(model, inputs, **{name: labels})
    loss: Tensor
    if isinstance(output, Mapping) or hasattr(output, "loss"):
        loss = part_of(output, "loss")
    else:
        parts = output if isinstance(output, tuple) else (output,)
        (loss,) = (part for part in parts if isinstance(part, Tensor) and part.ndim == 0)
    return loss


def _targeted_loss(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    *,
    form: CallForm,
    name: str,
    shift: int,
    ignored: int,
) -> Tensor:
    targets = F.pad(labels[:, shift:], (0, shift), value=-100)
    targets = targets.masked_fill(targets == -100, ignored)
    return _labelled_loss(model, inputs, targets, form=form, name=name)


def _auxiliary_loss(
    model: nn.Module, inputs: Tensor, keep: Tensor | None = None, *, form: CallForm, **switch: bool
) -> Tensor:
    """Return the loss of routers in the output."""
    mask = {} if keep is None else {"attention_mask": keep.long()}
    found = part_of(form(model, inputs, **mask, **switch), "aux_loss")
    if not isinstance(found, Tensor):
        raise TypeError("aux_loss: none came back")
    return found


def _claims(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the claims of the configuration: tied head, padding sides, window and rotary embeddings."""
    config = getattr(model, "config", None)
    claims = (getattr(owner, name, None) for owner in (model, config) for name in _TIED)
    if (claim := next((each for each in claims if isinstance(each, bool)), None)) is not None:
        yield "tied", claim
    if isinstance(sides := getattr(model, "padding_sides", None), tuple):
        yield "padding_sides", sides
    windows: set[Any] = {m.sliding_window for m in model.modules() if hasattr(m, "sliding_window")}
    # If no layer has a window, the setting holds for all layers, unless it is per layer or disabled.
    everywhere = getattr(config, "layer_types", None) is None and getattr(config, "use_sliding_window", True)
    if not windows and everywhere:
        windows = {value_in(config, "sliding_window")}
    if len(windows) == 1 and isinstance(window := windows.pop(), int):
        yield "window", window
    if rotary := rotary_in(config):
        yield "rotary", rotary
