"""Operators: small mistakes that are planted in the source of a module.

Each operator gets a node of the syntax tree and yields its mutations: a label, and the nodes that replace
this node. A mutant is named by operator, function, line and variant, so that its name is enough to build it.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

__all__ = ["OPERATORS", "Mutant", "mutants", "mutate"]


class Mutant(NamedTuple):
    """Name of a mutant of one source.

    Attributes:
        operator: name of the operator.
        function: qualified name of the function.
        line: line of the source.
        variant: column and change. Unique among the mutants of the line.
    """

    operator: str
    function: str
    line: int
    variant: str


@dataclass(frozen=True)
class Place:
    """Node in its tree.

    Attributes:
        node: the node.
        parents: its parents, the module first.
        field: field of the last parent that has the node.
        index: index in this field. None: the field is no list.
        functions: names of the classes and functions around the node.
        parameters: names of the parameters of the innermost function.
    """

    node: ast.AST
    parents: tuple[ast.AST, ...] = ()
    field: str = ""
    index: int | None = None
    functions: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()

    @property
    def following(self) -> ast.AST | None:
        """Return the next node of the same list."""
        if self.index is None:
            return None
        return next(iter(getattr(self.parents[-1], self.field)[self.index + 1 :]), None)

    def replace(self, nodes: list[Any], span: int) -> None:
        """Write `nodes` in place of `span` nodes from this one."""
        if self.index is None:
            setattr(self.parents[-1], self.field, nodes[0])
        else:
            getattr(self.parents[-1], self.field)[self.index : self.index + span] = nodes


# Label of the change, the nodes in place of the node, and the number of nodes that they replace.
Variant = tuple[str, list[Any], int]
Operator = Callable[[Place], Iterator[Variant]]
OPERATORS: dict[str, Operator] = {}

# Functions that no forward pass calls, or that only prepare generation.
_NO_FORWARD = {"__init__", "_init_weights", "prepare_inputs_for_generation", "_reorder_cache", "extra_repr"}
_SIMPLE = ast.Assign | ast.AugAssign | ast.Expr
_ORDERS: dict[Any, type[ast.cmpop]] = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
_METHODS = {ast.Add: "add_", ast.Sub: "sub_", ast.Mult: "mul_", ast.Div: "div_"}
# Functions of which an integer is a dimension or a size of groups.
_ALONG = {"cat", "stack", "chunk", "split", "softmax", "mean", "sum", "cumsum", "unsqueeze", "flip", "roll"}
_OUT_OF_PLACE = {"add", "sub", "mul", "div", "masked_fill", "clamp", "scatter", "index_add", "exp"}


def mutants(source: str, lines: Collection[int]) -> list[Mutant]:
    """Return every mutant of a source in the given lines, in the order of the source."""
    return [mutant for mutant, _ in _sites(ast.parse(source), lines)]


def mutate(source: str, mutant: Mutant) -> ast.Module:
    """Return the syntax tree of a mutant.

    Raises:
        ValueError: the source has no such mutant.
    """
    tree = ast.parse(source)
    for other, apply in _sites(tree, {mutant.line}):
        if other == mutant:
            apply()
            return ast.fix_missing_locations(tree)
    raise ValueError(f"mutant: {mutant} does not exist in this source")


def _sites(tree: ast.Module, lines: Collection[int]) -> Iterator[tuple[Mutant, Callable[[], None]]]:
    seen: set[Mutant] = set()
    for place in _places(Place(tree)):
        line = getattr(place.node, "lineno", -1)
        if line not in lines or not place.parameters or _NO_FORWARD & set(place.functions):
            continue
        columns = f"{place.node.col_offset}-{place.node.end_col_offset}"  # type: ignore[attr-defined]
        for name, operator in OPERATORS.items():
            for label, nodes, span in operator(place):
                mutant = Mutant(name, ".".join(place.functions), line, f"{columns}: {label}")
                is_new = len(nodes) != 1 or ast.dump(nodes[0]) != ast.dump(place.node)
                if is_new and mutant not in seen:
                    seen.add(mutant)
                    yield mutant, partial(place.replace, nodes, span)


def _places(place: Place) -> Iterator[Place]:
    """Yield the node and those below it, except decorators, annotations, defaults, errors and logging."""
    node, functions, parameters = place.node, place.functions, place.parameters
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr) or _is_logging(node):
        return
    yield place
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        functions = (*functions, node.name)
    if isinstance(node, ast.FunctionDef):
        arguments = node.args
        every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        parameters = tuple(each.arg for each in every) or ("",)
    for field, value in ast.iter_fields(node):
        if field in ("decorator_list", "annotation", "returns", "args") and not isinstance(node, ast.Call):
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, ast.AST):
                yield from _places(Place(child, (*place.parents, node), field, index, functions, parameters))


def _is_logging(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and ast.unparse(node).startswith(("logger", "warnings", "'", '"'))


def _operator(function: Operator) -> Operator:
    OPERATORS[function.__name__] = function
    return function


def _expression(text: str, **parts: ast.AST) -> ast.expr:
    """Return the expression of a text, with copies of nodes in place of names."""
    return _Replaced(parts).visit(ast.parse(text, mode="eval").body)  # type: ignore[no-any-return]


class _Replaced(ast.NodeTransformer):
    """Replacement of names that are read by copies of nodes."""

    def __init__(self, parts: dict[str, ast.AST]) -> None:
        self.parts = parts
        self.count = 0

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id not in self.parts or not isinstance(node.ctx, ast.Load):
            return node
        self.count += 1
        return copy.deepcopy(self.parts[node.id])


def _changed(node: ast.AST, **fields: Any) -> Any:
    """Return a copy of a node with other fields."""
    changed = copy.deepcopy(node)
    for name, value in fields.items():
        setattr(changed, name, copy.deepcopy(value))
    return changed


def _swapped(nodes: list[Any], i: int) -> list[Any]:
    return [*nodes[:i], nodes[i + 1], nodes[i], *nodes[i + 2 :]]


def _name(node: ast.AST) -> str:
    """Return the last part of the name of a function or attribute."""
    if isinstance(node, ast.Call):
        return _name(node.func)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _integer(node: ast.AST | None) -> int | None:
    """Return the value of an integer constant."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _integer(node.operand)
        return None if value is None else -value
    return node.value if isinstance(node, ast.Constant) and type(node.value) is int else None


def _constant(value: Any) -> ast.expr:
    return ast.parse(repr(value), mode="eval").body


def _with(nodes: list[Any], index: int, node: ast.AST | None) -> list[Any]:
    """Return the nodes with another node at an index, or without it."""
    return [*nodes[:index], *([] if node is None else [node]), *nodes[index + 1 :]]


@_operator
def kept_state(place: Place) -> Iterator[Variant]:
    """Cache a local value on the module at the first call, and use it again later."""
    node = place.node
    if not isinstance(node, ast.Assign) or place.parameters[0] != "self":
        return
    if any(isinstance(part, ast.Attribute) for part in ast.walk(node.targets[0])):
        return
    kept = f"_kept_{node.lineno}"
    shapes = f"getattr(getattr(self, '{kept}', 0), 'shape', 0) != getattr(new, 'shape', 0)"
    for label, text in (
        ("first value", f"if not hasattr(self, '{kept}'): self.{kept} = value\nnew = self.{kept}"),
        ("same shape", f"new = value\nif {shapes}: self.{kept} = new\nnew = getattr(self, '{kept}', new)"),
    ):
        parts = _Replaced({"value": node.value}).visit(ast.parse(text)).body
        targets: list[ast.expr] = copy.deepcopy(node.targets)
        parts[-1].targets = targets
        yield label, parts, 1


@_operator
def swapped_order(place: Place) -> Iterator[Variant]:
    """Swap two adjacent arguments, operands, elements or statements."""
    node, following = place.node, place.following
    for field in ("args", "elts"):
        nodes = getattr(node, field, None) if isinstance(node, ast.Call | ast.Tuple) else None
        for i in range(len(nodes or ()) - 1):
            yield f"{field} {i} and {i + 1}", [_changed(node, **{field: _swapped(nodes or [], i)})], 1
    if isinstance(node, ast.BinOp) and not isinstance(node.op, ast.Add | ast.Mult):
        yield "operands", [_changed(node, left=node.right, right=node.left)], 1
    if isinstance(node, _SIMPLE) and isinstance(following, _SIMPLE):
        names = [
            {(part.id, type(part.ctx)) for part in ast.walk(each) if isinstance(part, ast.Name)}
            for each in (node, following)
        ]
        stored = {name for name, context in names[0] | names[1] if context is ast.Store}
        if stored & {name for name, _ in names[0]} & {name for name, _ in names[1]}:
            yield "statements", [copy.deepcopy(following), copy.deepcopy(node)], 2


@_operator
def off_by_one(place: Place) -> Iterator[Variant]:
    """Move a bound, an index, a range, a diagonal or a comparison by one."""
    node, parent = place.node, place.parents[-1]
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _ORDERS:
        yield "comparison", [_changed(node, ops=_with(node.ops, 0, _ORDERS[type(node.ops[0])]()))], 1
    if isinstance(node, ast.Slice):
        for bound, first in (("lower", 1), ("upper", -1)):
            if getattr(node, bound) is None:
                yield f"{bound} {first}", [_changed(node, **{bound: _constant(first)})], 1
        return
    around = place.parents[-2] if isinstance(parent, ast.Tuple) else parent
    is_index = isinstance(around, ast.Subscript) and place.field != "value" and _integer(node) is not None
    in_range = isinstance(parent, ast.Call) and _name(parent) in ("arange", "range") and place.field == "args"
    is_diagonal = isinstance(parent, ast.keyword) and parent.arg == "diagonal"
    if is_index or in_range or is_diagonal or isinstance(parent, ast.Slice):
        value = _integer(node)
        for step in (1, -1):
            moved = _expression(f"x + {step}", x=node) if value is None else _constant(value + step)
            yield f"{step:+}", [moved], 1


@_operator
def wrong_group(place: Place) -> Iterator[Variant]:
    """Split, merge, repeat or reduce along another dimension or in another order."""
    node = place.node
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and "->" in node.value:
        # A pattern such as "b n (h d) -> b h n d".
        for match in re.finditer(r"\((\w+) (\w+)\)", node.value):
            text = f"{node.value[: match.start()]}({match[2]} {match[1]}){node.value[match.end() :]}"
            yield repr(text), [_constant(text)], 1
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return
    name, on = node.func.attr, node.func.value
    if name in ("transpose", "permute", "swapaxes"):
        yield "view in place of a transposition", [_expression("x.reshape(y.shape)", x=on, y=node)], 1
    if name == "repeat_interleave":
        yield "tiled", [_changed(node, func=_changed(node.func, attr="tile"))], 1
    if name == "expand" and isinstance(on, ast.Subscript) and isinstance(on.slice, ast.Tuple):
        # Copies of all groups in turn, in place of adjacent copies of each group.
        for i in range(1, min(len(node.args), len(on.slice.elts))):
            if ast.unparse(on.slice.elts[i]) == "None":
                moved = _changed(node, args=_swapped(node.args, i - 1))
                moved.func.value.slice.elts = _swapped(on.slice.elts, i - 1)
                yield "copies in turn", [moved], 1
    if name in _ALONG | {"transpose"}:
        for step in (1, -1):
            for i, argument in enumerate(node.args):
                if (value := _integer(argument)) is not None:
                    moved = _changed(node, args=_with(node.args, i, _constant(value + step)))
                    yield f"argument {i} {step:+}", [moved], 1
            for i, word in enumerate(node.keywords):
                if word.arg == "dim" and (value := _integer(word.value)) is not None:
                    other = _changed(word, value=_constant(value + step))
                    yield f"dim {step:+}", [_changed(node, keywords=_with(node.keywords, i, other))], 1


@_operator
def shared_buffer(place: Place) -> Iterator[Variant]:
    """Write into a tensor that others use as well."""
    node = place.node
    if isinstance(node, ast.BinOp) and type(node.op) in _METHODS:
        method = _METHODS[type(node.op)]
        for label, target, other in (("left", node.left, node.right), ("right", node.right, node.left)):
            is_tensor = isinstance(target, ast.Name | ast.Call | ast.Attribute)
            if is_tensor and (label == "left" or method in ("add_", "mul_")):
                yield f"{method} on the {label}", [_expression(f"x.{method}(y)", x=target, y=other)], 1
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        name, on = node.func.attr, node.func.value
        if name in ("clone", "contiguous"):
            yield f"{name} dropped", [copy.deepcopy(on)], 1
        if name in _OUT_OF_PLACE and _name(on) != "torch":
            yield f"{name}_", [_changed(node, func=_changed(node.func, attr=f"{name}_"))], 1


@_operator
def wrong_dtype(place: Place) -> Iterator[Variant]:
    """Drop a cast, or use half precision in place of float32."""
    node = place.node
    if isinstance(node, ast.Attribute) and node.attr in ("float32", "float") and _name(node.value) == "torch":
        for half in ("bfloat16", "float16"):
            yield half, [_expression(f"torch.{half}")], 1
    if not isinstance(node, ast.Call):
        return
    if isinstance(node.func, ast.Attribute):
        name, on = node.func.attr, node.func.value
        if name in ("float", "type_as") or (
            name in ("to", "type") and re.search("dtype|float", ast.unparse(node))
        ):
            yield "cast dropped", [copy.deepcopy(on)], 1
        if name == "float":
            for half in ("bfloat16", "float16"):
                yield half, [_expression(f"x.to(torch.{half})", x=on)], 1
    for i, word in enumerate(node.keywords):
        if word.arg == "dtype":
            yield "dtype dropped", [_changed(node, keywords=_with(node.keywords, i, None))], 1


@_operator
def dropped_argument(place: Place) -> Iterator[Variant]:
    """Drop an argument of a call, or pass None."""
    node = place.node
    if not isinstance(node, ast.Call):
        return
    for i, word in enumerate(node.keywords):
        yield f"{word.arg or '**'} dropped", [_changed(node, keywords=_with(node.keywords, i, None))], 1
        if word.arg is not None:
            none = _changed(word, value=_constant(None))
            yield f"{word.arg}=None", [_changed(node, keywords=_with(node.keywords, i, none))], 1
    for i, argument in enumerate(node.args):
        if i and isinstance(argument, ast.Name):
            yield f"argument {i} None", [_changed(node, args=_with(node.args, i, _constant(None)))], 1


@_operator
def ignored_in_branch(place: Place) -> Iterator[Variant]:
    """Ignore a parameter of the function in one branch of an if."""
    node = place.node
    if not isinstance(node, ast.If | ast.IfExp):
        return
    for field in ("body", "orelse"):
        for name in place.parameters:
            for value in ("None", f"torch.zeros_like({name})", f"torch.ones_like({name})"):
                replaced = _Replaced({name: ast.parse(value, mode="eval").body})
                branch = copy.deepcopy(getattr(node, field))
                is_block = isinstance(branch, list)
                branch = [replaced.visit(each) for each in branch] if is_block else replaced.visit(branch)
                if name != "self" and replaced.count:
                    yield f"{value} for {name} in {field}", [_changed(node, **{field: branch})], 1
