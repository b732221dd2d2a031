"""Feed-forward: a nonlinear function separates the matrix products of a network."""

from __future__ import annotations

import re
import weakref
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from stackwise.checks.check import check
from stackwise.checks.probe.batch import tensors_in
from stackwise.checks.probe.call import reason_of, refusals
from stackwise.checks.probe.layers import repeated_layers
from stackwise.checks.probe.operations import Operations
from stackwise.checks.result import CheckResult
from stackwise.checks.subject import Subject

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
# Operations whose result is the same linear function of the weights as their first argument.
_MOVES = {
    *("view", "_unsafe_view", "reshape", "transpose", "t", "permute", "unsqueeze", "squeeze", "expand"),
    *("clone", "_to_copy", "detach", "alias"),
}
_SCALES = {"add", "sub", "mul", "div", "add_", "mul_", "div_"}


@check
def product_separation(subject: Subject) -> CheckResult:
    """Is there a nonlinear function between a product that widens activations and the next product?"""
    model = subject.model()
    products = _Products({p.untyped_storage().data_ptr(): name for name, p in model.named_parameters()})
    try:
        with products.operations:
            subject.logits(model, subject.inputs(2))
    except refusals() as error:
        return subject.not_applicable(f"needs a model without compiled functions: {reason_of(error)}")
    if not products.count:
        return subject.not_applicable("needs products of activations and weight matrices")
    redundant = [pair for pair in products.redundant() if not _is_low_rank(model, *pair)]
    if redundant:
        one, two = redundant[0]
        return subject.failed_unless(
            None
            if products.is_feed_forward(_in_layer_of(model, two.weight), one, two)
            else "the product is a factorised matrix on purpose, and only this model is so small",
            where=f"{one.weight} and {two.weight}",
            meaning="Two products follow each other without a nonlinear function: "
            f"{one.before} -> {one.after} -> {two.after}. One matrix can compute the same.",
            advice="Look for an activation that is applied before the first or after the second product.",
        )
    return subject.passed(meaning=f"{products.count} matrix products")


def _is_low_rank(model: nn.Module, one: _Product, two: _Product) -> bool:
    """Return True for the matrices of an adapter: they are named so, or the second one starts at 0."""
    named = any(re.search("lora|adapter|rank", each.weight, re.IGNORECASE) for each in (one, two))
    return named or not model.get_parameter(two.weight).any()


def _in_layer_of(model: nn.Module, name: str) -> str:
    """Return the start of the names of the parameters in the same layer, such as "layers.0.", or ""."""
    layers = (f"{layer}." for group in repeated_layers(model) for layer in group)
    return min((layer for layer in layers if name.startswith(layer)), key=len, default="")


@dataclass(eq=False)
class _Product:
    """Product of activations and a weight.

    Attributes:
        weight: name of the weight.
        before: width of the activations before the product.
        after: width of the result.
        uses: number of operations that read the result, or a linear function of it.
    """

    weight: str
    before: int
    after: int
    uses: int = 0


class _Products:
    """Products of activations and weights in a call.

    Attributes:
        operations: context of the call.
        count: number of products.
        narrowing: names of the weights that narrow activations after a nonlinear function, with the width
            before.

    Args:
        names: address of the memory of a parameter -> its name.
    """

    def __init__(self, names: dict[int, str]) -> None:
        self.operations = Operations(self._record)
        self.count = 0
        self.narrowing: dict[str, int] = {}
        self._names = names
        self._pairs: list[tuple[_Product, _Product]] = []
        self._last: _Product | None = None
        # id of a tensor -> the tensor, and the product that it is a linear function of.
        self._linear: dict[int, tuple[weakref.ref[Tensor], _Product]] = {}

    def redundant(self) -> list[tuple[_Product, _Product]]:
        """Return pairs of products of which only the second one reads the first one.

        The width between them is the largest. The last product of a call is the head: if it has a low rank,
        the rank may be larger than the vocabulary of a small model.
        """
        return [(one, two) for one, two in self._pairs if one.uses == 1 and two is not self._last]

    def is_feed_forward(self, layer: str, one: _Product, two: _Product) -> bool:
        """Return True if a pair has the place and the widths of the feed-forward network of a layer."""
        is_inside = bool(layer) and one.weight.startswith(layer)
        is_wide = one.after >= 2 * max(one.before, two.after)
        others = (width for name, width in self.narrowing.items() if name.startswith(layer))
        return is_inside and is_wide and max(others, default=0) < one.after

    def _record(self, name: str, args: Any, output: Any) -> None:
        if not isinstance(output, Tensor):
            return
        tensors = list(tensors_in(args))
        result_of: _Product | None = None
        if name in _PRODUCTS:
            result_of = self._product(*tensors[-2:])
        elif name in _MOVES and tensors:
            result_of = self._source(tensors[0])
        elif name in _SCALES and tensors:
            # A sum with another activation, such as the residual stream, is no function of this product.
            first, *others = sorted(tensors, key=lambda each: self._name(each) is not None)
            is_alone = all(self._name(each) is not None or each.ndim == 0 for each in others)
            result_of = self._source(first) if is_alone else None
        for source in {self._source(each) for each in tensors}:
            if source is not None and source is not result_of:
                source.uses += 1
        if result_of is not None:
            self._linear[id(output)] = (weakref.ref(output), result_of)

    def _product(self, x: Tensor, weight: Tensor) -> _Product | None:
        name = self._name(weight)
        is_recurrent = name is not None and re.search(r"weight_[ih]h_l\d", name)
        if name is None or is_recurrent or x.ndim < 2 or self._name(x) is not None:
            return None
        self.count += 1
        product, before = _Product(name, *weight.shape[-2:]), self._source(x)
        if before is not None and before.after == product.before > max(before.before, product.after):
            self._pairs.append((before, product))
        elif before is None and product.before > product.after:
            self.narrowing[name] = product.before
        self._last = product
        return product

    def _source(self, x: Tensor) -> _Product | None:
        """Return the product that a tensor is a linear function of."""
        found = self._linear.get(id(x))
        return found[1] if found is not None and found[0]() is x else None

    def _name(self, x: Tensor) -> str | None:
        """Return the name of the parameter whose memory a tensor uses."""
        return self._names.get(x.untyped_storage().data_ptr())
