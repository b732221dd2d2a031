"""Position: positions have an effect, each has a row of its own, and rotary positions are relative.

Shapes: T positions, V outputs, N rows of a table.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from stackwise.checks.check import check
from stackwise.checks.engine.call import accepts, execute
from stackwise.checks.engine.examination import Examination, gradients_in, projection
from stackwise.checks.engine.question import Call
from stackwise.checks.model.pixel import is_image
from stackwise.checks.probe.batch import tensors_in
from stackwise.checks.probe.call import dtype_of, reason_of, refusals
from stackwise.checks.probe.difference import NOT_REPEATED, coarsest_rounding, relative_difference
from stackwise.checks.probe.recorded_calls import RecordedCall, recorded_calls
from stackwise.checks.probe.widened import Widened
from stackwise.checks.result import CheckResult, listed
from stackwise.checks.subject import Subject
from stackwise.support.system_errors import reraise_if_out_of_memory

# Positions by which a rotary model is shifted, and positions of the sequence.
_SHIFT, _LENGTH = 3, 11
# Effect of a shift, relative to that of doubled distances. In healthy models it is rounding.
_SHIFT_LIMIT = 1e-3
# The same, if tables of cos and sin are rounded to bfloat16.
_NARROW_SHIFT_LIMIT = 0.05
# Rounding of outputs in float64, without the casts to float32 that the model's own code has.
_ROUNDING = 1e-9
# Longest sequence on which all rows of a table are tested.
_LONGEST = 1024
# Inputs of this length reach all ranges of distances of usual tables.
_LONG_ENOUGH = 320
# Rows without a gradient that are listed.
_MOST_ROWS = 8
# Tables that start after this row are tables of distances.
_MOST_RESERVED = 2

# Names of tables of absolute positions.
_TABLE_NAME = re.compile(
    r"(^|[._])(w?pe|pos|positions?|position(al)?_\w+|pos_(?!tag)\w+)([._]|$)", re.IGNORECASE
)

# Names of tables of relative positions.
_RELATIVE_NAME = re.compile(
    r"rel(ative)?_?(pos|att|bias|emb|coord|height|width)|position_bias", re.IGNORECASE
)

# Returns the output (T, V) of a new model at positions (T,), which count from 0.
_Placed = Callable[[Tensor], Tensor]


@check
def token_order(subject: Subject) -> CheckResult:
    """Does exchanging two earlier inputs change the output?"""
    spec = subject.spec
    if spec.positionless:
        return subject.not_applicable("needs a model that is not declared positionless")
    exam = Examination.of(subject)
    length = exam.lengths[-1]
    if length < 3:
        return subject.not_applicable("needs at least 3 positions")
    sequence = exam.sequence(0, length)
    tables = _named_tables(exam.base, length)
    if spec.inputs != "tokens" and not (tables and len(sequence) == length):
        return subject.not_applicable("needs token ids, or a sequence of vectors and a table of positions")
    if not exam.is_repeatable:
        return subject.not_applicable(NOT_REPEATED)
    limit = _rounding(exam)
    try:
        places, effect, order = _exchanged(exam, sequence, limit)
    except refusals() as error:
        return subject.not_applicable(f"needs a model that takes other inputs: {reason_of(error)}")
    if order > limit:
        if spec.causal and (shared := _shared_rows(exam, tables, sequence)):
            return subject.failed(
                1.0,
                float(length),
                where=listed(shared),
                meaning=f"All {length} positions read the same row of the table of positions. Only the "
                "causal mask tells the order of the inputs.",
                advice="Look for positions that are constant, and for one row that all positions get.",
            )
        return subject.passed(meaning=f"the output changes by {order:.2g}")
    if effect <= limit:
        return subject.not_applicable("needs a model in which positions read each other; see token_effect")
    if order > limit / 3:  # a third of the limit is three times the measured rounding
        return subject.not_applicable("needs an effect of the order that exceeds the rounding of the model")
    idle = next((name for name in tables if _has_one_row_at_most(exam, name, tables[name], sequence)), "")
    if spec.inputs != "tokens" and not idle:
        return subject.not_applicable("needs token ids: a set of vectors has no order")
    meaning = "Exchanging two inputs does not change the output at other positions: the model does not know "
    meaning += "the order of its inputs."
    where = f"inputs {places[0]} and {places[1]} of {length}"
    correct_if: str | None = "it has no positions on purpose, as a bag of words"
    if idle:
        meaning += " At most one row of its table of positions has an effect."
        where, correct_if = f"{where}; {idle}", None
    return subject.failed_unless(
        correct_if,
        order,
        limit,
        where=where,
        meaning=meaning,
        advice="Look for positions that are computed and not added, for one row that is added at all "
        "positions, and for a rotation that is not applied. If the model needs no order and is not causal, "
        "declare positionless=True.",
    )


@check
@torch.no_grad()
def patch_order(subject: Subject) -> CheckResult:
    """Does exchanging two parts of an image change the output?"""
    image = subject.inputs(1)
    if not is_image(image) or subject.spec.per_position or subject.spec.positionless:
        return subject.not_applicable(
            "needs images with one output each, and no declaration positionless=True"
        )
    exam = Examination.of(subject)
    if not exam.is_repeatable:
        return subject.not_applicable(NOT_REPEATED)
    model, size = exam.model(), min(image.shape[-2:]) // 2
    plain, swapped, replaced = (
        subject.logits(model, each.to(dtype_of(model))) for each in (image, *_with_other_corners(image, size))
    )
    effect, order = (float(relative_difference(plain, each).max()) for each in (replaced, swapped))
    limit = _rounding(exam)
    if order > limit or effect <= limit:
        return subject.passed(meaning=f"the output changes by {order:.2g}")
    tables = [
        name
        for name, _ in (*exam.base.named_parameters(), *exam.base.named_buffers())
        if _TABLE_NAME.search(name) and not _RELATIVE_NAME.search(name)
    ]
    return subject.failed_unless(
        None if tables else "it has no positions on purpose, as a bag of patches",
        order,
        limit,
        where=listed(tables),
        meaning=f"Exchanging two corners of {size} x {size} pixels does not change the output: the model "
        "does not know the order of its patches.",
        advice="Look for a position embedding with one row for all patches, and for positions that are not "
        "added.",
    )


def _with_other_corners(image: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return images with two exchanged corners, and with two equal corners (B, C, H, W)."""
    first, last = (..., slice(size), slice(size)), (..., slice(-size, None), slice(-size, None))
    swapped, replaced = image.clone(), image.clone()
    swapped[first], swapped[last], replaced[first] = image[last], image[first], image[last]
    return swapped, replaced


def _exchanged(exam: Examination, sequence: Tensor, limit: float) -> tuple[tuple[int, int], float, float]:
    """Return two places, and the largest changes if one input is replaced, and if two are exchanged.

    The changes are those of outputs at other places. The first exchange with an effect ends the search.
    """
    length, effect, order = len(sequence), 0.0, 0.0
    other = exam.unlike(sequence, exam.filler(1, length)[0])
    for i, j in ((length - 3, length - 2), (0, length - 2), (0, 1)):
        original, changed, exchanged = sequence.clone(), sequence.clone(), sequence.clone()
        original[i] = exam.unlike(sequence[j], other[i])
        changed[i] = sequence[j]
        exchanged[i], exchanged[j] = original[j], original[i]
        plain, replaced, swapped = (
            _read_at(exam, _output(exam, exam.model(), each), (i, j))
            for each in (original, changed, exchanged)
        )
        effect = max(effect, float(relative_difference(plain, replaced).max()))
        order = max(order, float(relative_difference(plain, swapped).max()))
        if order > limit:
            break
    return (i, j), effect, order


def _named_tables(model: nn.Module, length: int) -> dict[str, int]:
    """Return the number of rows of tensors that are named like a table of positions, and are long enough."""
    return {
        name: tensor.shape[-2]
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if _TABLE_NAME.search(name)
        and tensor.is_floating_point()
        and tensor.ndim > 1
        and tensor.shape[-2] >= length
        and tensor.numel() == tensor.shape[-2] * tensor.shape[-1]
    }


def _shared_rows(exam: Examination, tables: Mapping[str, int], sequence: Tensor) -> list[str]:
    """Return the tables of which one row has an effect, and that no other positions complete.

    Another table of the same module may count positions within blocks.
    """
    if exam.spec.rotary or _claims_rotary(exam.base):
        return []
    by_module = defaultdict[str, list[str]](list)
    try:
        for name in tables:
            if _effect_of_rows(exam, name, sequence)([*range(tables[name])]):
                by_module[name.removesuffix(".weight").rpartition(".")[0]].append(name)
        shared = {
            module: all(_has_one_row_at_most(exam, name, tables[name], sequence) for name in names)
            for module, names in by_module.items()
        }
    except refusals():  # such as tables whose shapes depend on the mode
        return []
    return [name for module, names in by_module.items() if shared[module] for name in names]


def _has_one_row_at_most(exam: Examination, name: str, n_rows: int, sequence: Tensor) -> bool:
    """Return True if at most one row of a table has an effect on the output."""
    has_effect, rows = _effect_of_rows(exam, name, sequence), list(range(n_rows))
    if not has_effect(rows):
        return True
    while len(rows) > 1:
        half = rows[: len(rows) // 2]
        rows = half if has_effect(half) else rows[len(half) :]
    return not has_effect([row for row in range(n_rows) if row != rows[0]])


def _effect_of_rows(exam: Examination, name: str, sequence: Tensor) -> Callable[[list[int]], bool]:
    """Return a function that tests if noise in rows of a table (..., N, C) changes the output."""
    plain = _output(exam, exam.model(), sequence)

    @torch.no_grad()
    def has_effect(rows: list[int]) -> bool:
        model = exam.model()
        table = dict((*model.named_parameters(), *model.named_buffers()))[name]
        noise = torch.randn(len(rows), table.shape[-1], generator=torch.Generator().manual_seed(len(rows)))
        table[..., rows, :] += noise.to(table)
        return float(relative_difference(plain, _output(exam, model, sequence)).max()) > _rounding(exam)

    return has_effect


def _read_at(exam: Examination, output: Tensor, places: tuple[int, int]) -> Tensor:
    """Return the outputs (., V) that are not at these places: of a causal model, the last one."""
    if not exam.spec.per_position:
        return output
    if exam.spec.causal:
        return output[-1:]
    keep = torch.ones(len(output), dtype=torch.bool, device=output.device)
    keep[list(places)] = False
    return output[keep]


@check
def position_effect(subject: Subject) -> CheckResult:
    """Do position_ids, tables of cos and sin, and rotary modules have an effect on the output?"""
    exam = Examination.of(subject)
    is_rotary = _claims_rotary(exam.base)
    knows_order = _layers_know_order(exam) if _calls(exam, _is_rotary) else None
    if knows_order is False:
        return subject.failed(
            0.0,
            meaning="The model has rotary positions, but no layer uses the order of its inputs: if two "
            "earlier inputs are exchanged, the last output of each layer stays the same.",
            advice="Look for a rotation whose result is not used, and for one along another dimension than "
            "the positions, such as the heads.",
        )
    found = _placed(exam)
    if isinstance(found, str):
        return subject.not_applicable(found)
    limit = _rounding(exam)
    for name, place in found.items():
        effect = _effect(exam, place, 2 * _positions(exam))
        if effect <= limit:
            if is_rotary is None and not _tables(exam):
                return subject.not_applicable(
                    "needs positions: a rotary module, tables of cos and sin, or a learned table"
                )
            is_replaced = name == "position_ids" and is_rotary and knows_order
            return subject.failed_unless(
                None
                if is_replaced
                else "the model has no positions, or counts them itself, and takes the argument for "
                "compatibility",
                effect,
                limit,
                where=name,
                meaning=f"The output is the same with other {name}.",
                advice="Look for positions that are replaced by a count, and for a missing rotation.",
            )
    return subject.passed(meaning=f"The output depends on {listed(found)}.")


def _layers_know_order(exam: Examination) -> bool | None:
    """Return True if an exchange of two inputs of a layer changes its last output.

    None: no layer can be asked.
    """
    if not exam.is_repeatable or exam.lengths[-1] < 4:
        return None
    calls = _calls(exam, lambda name, _: name.rpartition(".")[2].isdigit())
    known = {call.name: _layer_knows_order(exam, call) for call in calls}
    if True in known.values():
        return True
    outermost = [name for name in known if not any(name.startswith(f"{other}.") for other in known)]
    return False if outermost and all(known[name] is False for name in outermost) else None


def _calls(exam: Examination, is_recorded: Callable[[str, nn.Module], bool]) -> list[RecordedCall]:
    """Return the calls of some modules in a plain call of the model."""
    model, sequence = exam.model(), exam.sequence(0, exam.lengths[-1])
    return recorded_calls(model, lambda: _output(exam, model, sequence), is_recorded)


@torch.no_grad()
def _layer_knows_order(exam: Examination, call: RecordedCall) -> bool | None:
    """Return True if an exchange of two of its vectors (1, T, C) changes the last output of a layer."""
    length = exam.lengths[-1]
    inputs = (each for each in (*call.args, *call.named.values()) if isinstance(each, Tensor))
    x = next((each for each in inputs if each.shape[:2] == (1, length)), None)
    if x is None or x.ndim != 3 or not x.is_floating_point():
        return None

    def output(changed: Tensor) -> Tensor:
        others = {name: changed if value is x else value for name, value in call.named.items()}
        with exam.subject.fixed_randomness():
            result = call.module(*(changed if value is x else value for value in call.args), **others)
        return next(each for each in tensors_in((result,)) if each.shape[:2] == (1, length))[0, -1:]

    order = torch.arange(length, device=x.device)
    order[[length - 3, length - 2]] = order[[length - 2, length - 3]]
    replaced = x.clone()
    replaced[:, length - 2] = x[:, length - 3]
    try:
        plain, again, exchanged, changed = (output(each) for each in (x, x, x[:, order], replaced))
    except Exception as error:  # such as a layer that cannot be called alone
        reraise_if_out_of_memory(error)
        return None
    limit = _rounding(exam)
    effects = [float(relative_difference(plain, each).max()) for each in (again, exchanged, changed)]
    if effects[0] > limit or effects[2] <= limit:
        return None
    return effects[1] > limit


@check
def rotary_shift(subject: Subject) -> CheckResult:
    """Does the output of a model with rotary positions stay the same if all positions are shifted?"""
    exam = Examination.of(subject)
    certain = _has_rotary_setting(exam.base) or _claims_rotary(exam.base)
    if certain is None:
        return subject.not_applicable("needs rotary positions: a rotary module, or tables of cos and sin")
    found = _placed(exam)
    if isinstance(found, str):
        return subject.not_applicable(found)
    if not _rotary_modules(exam.base) and _layers_know_order(exam) is False:
        return subject.not_applicable("needs rotary positions: those of this model are added to its inputs")
    if not (shifts := _shifts(exam, found)):
        return subject.not_applicable("needs rotary positions that have an effect, without a learned table")
    name, limit = max(shifts, key=lambda each: shifts[each]), _shift_limit(exam.base)
    if shifts[name] <= limit:
        return subject.passed(shifts[name], limit)
    correct_if = None if certain else "inv_freq belongs to absolute positions, such as sinusoids"
    if _mixes_frequencies(exam.base):
        correct_if = "weights of the rotary module mix several frequencies on purpose, as in FoPE"
    elif certain:
        other = Examination(subject, random_norms=False)
        placed = _placed(other)
        shifts_of_other = {} if isinstance(placed, str) else _shifts(other, placed)
        if shifts_of_other and max(shifts_of_other.values()) <= limit:
            correct_if = "a norm with weights follows the rotation on purpose"
    return subject.failed_unless(
        correct_if,
        shifts[name],
        limit,
        where=name,
        meaning=f"The output changes if {_SHIFT} is added to all positions. A score of rotated queries and "
        "keys depends on their distance only.",
        advice="Rotate queries and keys by the same angles, and not values. Look for a rotation that only "
        "one of them has, for halves in one and interleaved pairs in the other, for other positions of the "
        "keys, and for a norm with weights after the rotation.",
    )


def _shifts(exam: Examination, found: Mapping[str, _Placed]) -> dict[str, float]:
    """Return the effect of a shift, relative to that of doubled distances, for each way that has one."""
    shifts = {}
    for name, place in found.items():
        if name == "position_ids" and _tables(exam):
            continue  # they also choose the row of a learned table
        effect = _effect(exam, place, 2 * _positions(exam))
        if effect > _rounding(exam):
            shifts[name] = _effect(exam, place, _positions(exam) + _SHIFT) / effect
    return shifts


@check
def position_table(subject: Subject) -> CheckResult:
    """Has each position up to max_length a separate row in a learned table, with a gradient?"""
    exam, limit = Examination.of(subject), subject.spec.max_length
    if not exam.is_repeatable:
        return subject.not_applicable(NOT_REPEATED)
    tables = _tables(exam)
    for name, rows in tables.items():
        first = min(rows)
        if unlearned := _rows_without_gradient(exam, name, rows):
            return subject.failed(
                float(len(unlearned)),
                0.0,
                where=f"{name}, row {listed(map(str, unlearned))}",
                meaning="Rows of the position table change the output and get no gradient.",
                advice="Remove padding_idx from the embedding of positions. Look for a hook or a detach().",
            )
        if n_skipped := max(rows) + 1 - first - len(rows):
            return subject.warned(
                float(n_skipped),
                0.0,
                where=f"{name}, rows {listed(map(str, sorted(rows)), 8)}",
                meaning=f"A sequence of {exam.lengths[-1]} positions does not read consecutive rows of the "
                "position table.",
                correct_if="positions are numbered in another way on purpose",
                advice="Look for positions of -1, which are the last row, and for a step other than 1.",
            )
        if _reserves(exam.base, name, first) or first > _MOST_RESERVED:
            continue
        if limit is None and first:
            return subject.warned(
                float(first),
                0.0,
                where=name,
                meaning=f"The first token reads row {first} of the position table; earlier rows are unused.",
                correct_if="these rows are reserved on purpose",
                advice="Count positions from 0.",
            )
        if limit is None or limit > _LONGEST:
            continue
        try:
            used = len(_used_rows(exam, exam.sequence(0, limit))[name])
        except refusals() as error:
            return subject.failed(
                where=name,
                meaning=f"A call of max_length = {limit} positions raises {reason_of(error)}. The first "
                f"token reads row {first} of the position table.",
                advice="Count positions from 0, or add the reserved rows to the table.",
            )
        if used < limit:
            return subject.failed(
                float(used),
                float(limit),
                where=name,
                meaning=f"{limit} positions, which are max_length, read only {used} rows of the position "
                "table: some positions share a row.",
                advice="Look for a clamp of the positions, and for a count that starts at 1.",
            )
    if not tables:
        return subject.not_applicable("needs a learned table with a row for each position")
    return subject.passed(where=listed(tables))


@check
def relative_table(subject: Subject) -> CheckResult:
    """Is every row of a table of relative positions read?"""
    exam = Examination.of(subject)
    longest = exam.lengths[-1]
    try:
        short: dict[str, set[int]] = {}
        half: dict[str, set[int]] = {}
        if exam.sequence(0, longest).ndim < 3:  # no image, which has one size
            longest = min(subject.spec.max_length or _LONG_ENOUGH, _LONG_ENOUGH)
            short, half = (_used_rows(exam, exam.sequence(0, n)) for n in (2, longest // 2))
        rows = {
            name: used
            for name, used in _used_rows(exam, exam.sequence(0, longest)).items()
            # Rows of a table for another input do not depend on the length. Still longer inputs may read more
            # rows, unless half of the length is enough.
            if _RELATIVE_NAME.search(name) and short.get(name) != used == half.get(name, used) and used
        }
    except refusals() as error:
        return subject.not_applicable(f"needs a model with a backward pass: {reason_of(error)}")
    if not rows:
        return subject.not_applicable("needs a table of relative positions whose rows inputs can all reach")
    for name, used in rows.items():
        n = len(exam.base.get_parameter(name).squeeze(0))
        if len(used) < n:
            unread = [str(row) for row in range(n) if row not in used]
            # Without a causal mask, each pair of positions reads the rows of two opposite distances.
            is_symmetric = {n - 1 - row for row in used} == used
            may_be_spare = subject.spec.causal or is_symmetric or n % 2 == 0
            return subject.failed_unless(
                "the rows are for later positions, or for larger inputs" if may_be_spare else None,
                float(len(unread)),
                0.0,
                where=f"{name}, rows {listed(unread)}",
                meaning=f"{len(unread)} of {n} rows of the table of relative positions are never read.",
                advice="Check if several distances share a row: the strides and the offset of the index of "
                "the table, and the number of buckets for earlier and later positions.",
            )
    return subject.passed(where=listed(rows))


def _rounding(exam: Examination) -> float:
    """Return the largest change of the output that is rounding.

    The limit of an examination is 100 times its rounding. Positions may have smaller effects.
    """

    def measured() -> float:
        sequence = exam.sequence(0, exam.lengths[-1])
        if exam.is_float64 and not coarsest_rounding(exam.model(), lambda m: _output(exam, m, sequence)):
            return _ROUNDING
        return exam.limit / 10

    return exam.once("rounding of positions", measured)


def _output(exam: Examination, model: nn.Module, sequence: Tensor) -> Tensor:
    """Return the plain output (T, V), or (1, V)."""
    return _widened(exam, lambda: exam.plain(model, sequence))


@torch.no_grad()
def _widened(exam: Examination, call: Callable[[], Tensor]) -> Tensor:
    """Return the result of a call of the model, without its casts to float32 if it runs in float64."""
    if exam.is_float64:
        try:
            with Widened():
                return call()
        except refusals():  # such as a constant that does not fit into float32
            pass
    return call()


def _positions(exam: Examination) -> Tensor:
    """Return the positions 1, 2, 3, ..., such that they can be doubled and shifted.

    Position 0 is left out, because some recurrent layers reset their state at it.
    """
    longest = exam.spec.max_length or 2 * _LENGTH + 1
    length = min(exam.lengths[-1], _LENGTH, (longest - 1) // 2, longest - _SHIFT - 1)
    return torch.arange(1, max(length, 0) + 1, device=exam.subject.device)


def _effect(exam: Examination, place: _Placed, positions: Tensor) -> float:
    """Return the largest change of the output if its positions are `positions`."""
    return float(relative_difference(place(_positions(exam)), place(positions)).max())


def _placed(exam: Examination) -> dict[str, _Placed] | str:
    """Return each way to place the inputs at other positions, or why there is none."""
    if not exam.spec.per_position or not exam.is_repeatable:
        return "needs an output per position that repeats itself"
    positions = _positions(exam)
    n = len(positions)
    if n < 3:
        return "needs at least 7 positions"
    sequence = exam.sequence(0, n)[None]
    ways: dict[str, _Placed] = {}
    replacements: list[bool] = []

    def by_argument(positions: Tensor) -> Tensor:
        arguments = {"position_ids": positions[None] + exam.first_position}
        if accepts(exam.base, "attention_mask"):  # without one, gaps may mean packed documents
            arguments["attention_mask"] = torch.ones_like(sequence[:, :n], dtype=torch.long)
        call = Call(sequence, arguments=arguments)
        with exam.subject.fixed_randomness():
            return _widened(exam, lambda: execute(exam.spec, exam.model(), call)[0])

    def by_table(positions: Tensor) -> Tensor:
        model = exam.model()
        start, step = int(positions[0]), int(positions[1] - positions[0])
        for table, dim in _rotary_tables(model, 2 * n + 1):
            # All rows, because the model may not start at the first one.
            rows = torch.arange(start, table.shape[dim], step, device=table.device)
            table.narrow(dim, 0, len(rows)).copy_(table.index_select(dim, rows))
        return _output(exam, model, sequence[0])

    def by_module(positions: Tensor) -> Tensor:
        model = exam.model()
        for module in _rotary_modules(model):
            module.forward = partial(_counted, module.forward, positions, replacements)
        return _output(exam, model, sequence[0])

    if exam.takes_positions:
        ways["position_ids"] = by_argument
    if _rotary_tables(exam.base, 2 * n + 1):
        ways["tables of cos and sin"] = by_table
    try:
        for place in ways.values():
            place(2 * positions)
        if not ways and _rotary_modules(exam.base):
            by_module(2 * positions)
        if any(replacements):
            ways["positions of the rotary module"] = by_module
    except refusals() as error:
        return f"the model does not take other positions: {reason_of(error)}"
    return ways or "needs a parameter position_ids, tables of cos and sin, or a module that computes them"


def _counted(
    forward: Callable[..., Any], positions: Tensor, replacements: list[bool], /, *args: Any, **kwargs: Any
) -> Any:
    """Call a rotary module with `positions` (T,) in place of 0, 1, ..., T - 1.

    `replacements` gets True if this was possible.
    """
    count = torch.arange(len(positions), device=positions.device)

    def replaced(value: Any) -> Any:
        is_count = (
            isinstance(value, Tensor)
            and value.dtype != torch.bool
            and value.shape[-1:] == count.shape
            and bool((value - value[..., :1] == count).all())
        )
        replacements.append(is_count)
        return positions.to(value.dtype).expand_as(value) if is_count else value

    class Counted(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            return replaced(result) if func is torch.arange else result

    args = tuple(map(replaced, args))
    with Counted():
        return forward(*args, **{name: replaced(value) for name, value in kwargs.items()})


def _rotary_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that compute angles."""
    return [module for name, module in model.named_modules() if _is_rotary(name, module)]


def _is_rotary(_: str, module: nn.Module) -> bool:
    """Return True if the class is named rotary and contains no other modules."""
    is_named = re.search(r"[Rr]otary|RoPE|Rope(?![a-z])|(?<![A-Za-z])rope", type(module).__name__)
    return bool(is_named) and not any(True for _ in module.children())


def _mixes_frequencies(model: nn.Module) -> bool:
    """Return True if a rotary module has a weight matrix. Then its output is not a pure rotation."""
    return any(p.ndim > 1 for module in _rotary_modules(model) for p in module.parameters())


def _has_rotary_setting(model: nn.Module) -> bool:
    """Return True for a configuration with a setting that is named rotary or rope."""
    settings = vars(getattr(model, "config", object))
    return any(value and re.search("(^|_)(rotary|rope)(_|$)", name) for name, value in settings.items())


def _claims_rotary(model: nn.Module) -> bool | None:
    """Return True for tables of cos and sin, and for a module that is named rotary.

    False for other modules with inv_freq, which may be absolute sinusoids. None: there is neither.
    """
    if _rotary_tables(model, 1) or _rotary_modules(model):
        return True
    names = [name.rpartition(".")[2] for name, _ in model.named_buffers()]
    return False if any("inv_freq" in name for name in names) else None


def _shift_limit(model: nn.Module) -> float:
    """Return the largest effect of a shift that is rounding of the tables of cos and sin."""
    tables = [table for table, _ in _rotary_tables(model, 1) if not table.is_complex()]
    narrow = any(torch.equal(table, table.bfloat16().to(table)) for table in tables)
    return _NARROW_SHIFT_LIMIT if narrow else _SHIFT_LIMIT


def _rotary_tables(model: nn.Module, n: int) -> list[tuple[Tensor, int]]:
    """Return each buffer that has cos or sin of at least n positions, and the dimension of the positions.

    Its first row is the rotation by 0: all cos are 1, or all sin are 0.
    """
    found = [(buffer, *_dimension(buffer, n)) for buffer in model.buffers()]
    tables = [(buffer, dim) for buffer, dim, _ in found if dim is not None]
    # A table of sin alone may be absolute sinusoids whose first row is padding.
    return tables if any(has_cos for *_, has_cos in found) else []


def _dimension(buffer: Tensor, n: int) -> tuple[int | None, bool]:
    """Return the dimension of the positions in a table of cos or sin, and True if it has cos.

    The dimension is None if it is no such table.
    """
    table = torch.view_as_real(buffer) if buffer.is_complex() else buffer
    is_pair = buffer.is_complex() or (table.ndim > 2 and table.shape[-1] == 2)
    sizes = list(table.shape[:-2] if is_pair else table.shape[:-1])
    if not table.is_floating_point() or max(sizes, default=0) < max(n, 2):
        return None, False
    dim = sizes.index(max(sizes))
    first, second = (table.select(dim, index) for index in (0, 1))
    unit = torch.tensor([1.0, 0.0]).to(first) if is_pair else first.flatten()[:1].round()
    is_unit = bool((first == unit).all() and (unit >= 0).all())
    if not is_unit or table.abs().max() > 1 or torch.equal(first, second):
        return None, False
    return dim, bool(is_pair or unit)


def _tables(exam: Examination) -> dict[str, set[int]]:
    """Return the learned position tables, and the rows that a sequence of the longest length reads.

    Which rows get a gradient depends on the length only, and each position adds one.
    """
    long, short = exam.lengths[-1], (exam.lengths[0] + exam.lengths[-1]) // 2

    def found() -> dict[str, set[int]]:
        if short == long or not exam.spec.per_position:
            return {}
        try:
            one, other = (_used_rows(exam, exam.sequence(number, long)) for number in (0, 1))
            fewer = defaultdict(set, _used_rows(exam, exam.sequence(0, short)))
        except refusals():  # the model does not take this length, or has no backward pass
            return {}
        same = {name: rows for name, rows in one.items() if rows == other.get(name)}
        return {n: r for n, r in same.items() if fewer[n] <= r and len(r) - len(fewer[n]) == long - short}

    return exam.once("position tables", found)


def _used_rows(exam: Examination, sequence: Tensor) -> dict[str, set[int]]:
    """Return the rows that get a gradient, for each parameter (N, .) or (1, N, .)."""
    model = exam.model()
    with torch.enable_grad():
        output = exam.plain(model, sequence)
        if output.requires_grad:
            (output * projection(output, 0)).sum().backward()  # type: ignore[no-untyped-call]
    rows = {}
    for name, gradient in gradients_in(model).items():
        table = gradient.to_dense()
        table = table[0] if table.ndim == 3 and len(table) == 1 else table
        if table.ndim == 2:
            rows[name] = set(table.any(dim=1).nonzero().flatten().tolist())
    return rows


def _rows_without_gradient(exam: Examination, name: str, rows: set[int]) -> list[int]:
    """Return the rows before the last one of `rows` that change the output and are not in `rows`."""
    has_effect, found = _effect_of_rows(exam, name, exam.sequence(0, exam.lengths[-1])), list[int]()
    unused = sorted(set(range(max(rows))) - rows)
    # Halves of the rows that have an effect are tested again, until each row is alone.
    groups = [unused] if unused and has_effect(unused) else []
    while groups and len(found) < _MOST_ROWS:
        group = groups.pop()
        if len(group) == 1:
            found += group
            continue
        halves = group[: len(group) // 2], group[len(group) // 2 :]
        groups += [half for half in halves if has_effect(half)]
    return sorted(found)


def _reserves(model: nn.Module, name: str, first: int) -> bool:
    """Return True if the rows before the first position are declared by padding_idx, as in RoBERTa."""
    owner = model.get_submodule(name.rpartition(".")[0])
    return first > 0 and getattr(owner, "padding_idx", None) == first - 1
