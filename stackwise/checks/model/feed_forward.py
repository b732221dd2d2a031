"""Feed-forward: a nonlinear function separates the matrix products of a network."""

from __future__ import annotations

import re
import weakref
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from stackwise.checks.check import check
from stackwise.checks.probe.batch import tensors_in
from stackwise.checks.probe.call import reason_of, refusals
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
            n_logits = subject.logits(model, subject.inputs(2)).shape[-1]
    except refusals() as error:
        return subject.not_applicable(f"needs a model without compiled functions: {reason_of(error)}")
    if not products.count:
        return subject.not_applicable("needs products of activations and weight matrices")
    # A head of low rank is wider than the vocabulary of a small model.
    redundant = [each for each in products.redundant if each[2][2] != n_logits]
    if redundant:
        one, two, sizes = redundant[0]
        # A layer with a feed-forward network of its own may also have a product of low rank.
        has_other = any(
            _layer(name) == _layer(two) and width >= sizes[1] for name, width in products.narrowing.items()
        )
        return subject.failed_unless(
            "the product is a matrix of low rank, and its rank is not small in this small model"
            if has_other
            else None,
            where=f"{one} and {two}",
            meaning="Two products follow each other without a nonlinear function: "
            f"{' -> '.join(map(str, sizes))}. One matrix can compute the same.",
            advice="Look for an activation that is applied before the first or after the second product, or "
            "whose result is not used.",
        )
    return subject.passed(meaning=f"{products.count} products")


def _layer(name: str) -> str:
    """Return the name of a parameter up to its first index, which is the name of the layer, or ""."""
    found = re.match(r".*?\d+(?=\.)", name)
    return "" if found is None else found[0]


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
        # id of a tensor -> the tensor, and the product that it is a linear function of.
        self._linear: dict[int, tuple[weakref.ref[Tensor], _Product]] = {}

    @property
    def redundant(self) -> list[tuple[str, str, tuple[int, int, int]]]:
        """Return the weights of products that only the next product reads, and the widths around them.

        The width between them is the largest.
        """
        pairs = ((one, two) for one, two in self._pairs if one.uses == 1)
        return [(one.weight, two.weight, (one.before, one.after, two.after)) for one, two in pairs]

    def _record(self, name: str, args: Any, output: Any) -> None:
        if not isinstance(output, Tensor):
            return
        tensors = list(tensors_in(args))
        known: _Product | None = None
        if name in _PRODUCTS:
            known = self._product(*tensors[-2:])
        elif name in _MOVES and tensors:
            known = self._known(tensors[0])
        elif name in _SCALES and tensors:
            # A sum with another activation, such as the residual stream, is no function of this product.
            first, *others = sorted(tensors, key=lambda each: self._name(each) is not None)
            is_alone = all(self._name(each) is not None or each.ndim == 0 for each in others)
            known = self._known(first) if is_alone else None
        for read in {self._known(each) for each in tensors} - {known}:
            if read is not None:
                read.uses += 1
        if known is not None:
            self._linear[id(output)] = (weakref.ref(output), known)

    def _product(self, x: Tensor, weight: Tensor) -> _Product | None:
        name = self._name(weight)
        if name is None or x.ndim < 2 or self._name(x) is not None:
            return None
        self.count += 1
        product, before = _Product(name, *weight.shape[-2:]), self._known(x)
        if before is not None and before.after == product.before > max(before.before, product.after):
            self._pairs.append((before, product))
        elif before is None and product.before > product.after:
            self.narrowing[name] = product.before
        return product

    def _known(self, x: Tensor) -> _Product | None:
        found = self._linear.get(id(x))
        return found[1] if found is not None and found[0]() is x else None

    def _name(self, x: Tensor) -> str | None:
        """Return the name of the parameter whose memory a tensor uses."""
        return self._names.get(x.untyped_storage().data_ptr())
