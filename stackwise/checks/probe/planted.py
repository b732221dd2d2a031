"""Planted: a call of a model in which random values replace each product of activations and a weight.

So all queries and keys have known sizes, and each branch adds a known vector to the residual stream. The
factors that a model applies to them can be measured in any code, because a dispatch mode sees the operations.

Shapes: B batch, T positions, C width, N batch times heads, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from stackwise.checks.probe.applicable import UnmeasuredError, needed
from stackwise.checks.probe.call import real_inputs, refusals
from stackwise.checks.probe.layers import residual_stream
from stackwise.checks.probe.operations import Operations
from stackwise.checks.probe.recorded_calls import RecordedCall, recorded_calls
from stackwise.checks.subject import Subject

__all__ = ["N_ROWS", "SMALL", "Planted", "Site", "fitted", "planted"]

N_ROWS = 4
_LENGTH = 13  # unlikely to be a head size or a number of heads
# Small enough that soft caps are linear, and large enough for the eps of norms.
SMALL = 0.1
_MASKED = -1e3
# Largest residual of a fit, relative to the fitted tensor. Some models compute parts in float32.
_MISFIT = 1e-4
_SAME = 0.999  # least cosine of a query head and the part of a product that it is
_MOST = 20_000  # largest number of elements in a fit


@dataclass
class Site:
    """Attention of one layer.

    Attributes:
        queries, keys: operands (N, T, D) of the product of scores. If the product multiplies a key head by
            several query heads at once, the key head is repeated.
        scores: input of the softmax (N, T, T).
        weights: output of the softmax (N, T, T).
        start: number of products before the scores.
        n_shared: number of query heads that the product multiplies by a key head at once.
        used: weights that are multiplied by values, after dropout. None: not seen.
        values: (N, T, D), or None.
    """

    queries: Tensor
    keys: Tensor
    scores: Tensor
    weights: Tensor
    start: int
    n_shared: int = 1
    used: Tensor | None = None
    values: Tensor | None = None

    @cached_property
    def visible(self) -> Tensor:
        """Mask (N, T, T): True if the query reads the key."""
        return self.scores.isfinite() & (self.scores > _MASKED) & (self.weights > 0)

    @cached_property
    def factor(self) -> float | None:
        """Factor between products of queries and keys, and scores. None: scores are not such products."""
        if len(self.queries) % N_ROWS:
            return None
        visible = by_row(self.visible).all(dim=0)
        products, scores = (by_row(x)[:, visible] for x in (self.queries @ self.keys.mT, self.scores))
        found = fitted(scores, [products])
        return None if found is None else found[0]

    @property
    def size(self) -> float | None:
        """RMS of queries times RMS of keys, or None if it differs between positions."""
        sizes = [x.square().mean(dim=-1).sqrt() for x in (self.queries, self.keys)]
        is_even = all(x.max() <= x.min() * (1 + _MISFIT) for x in sizes)
        return float(sizes[0].mean() * sizes[1].mean()) if is_even else None


@dataclass
class Product:
    """Product of activations and a weight.

    Attributes:
        inputs: activations.
        weight: the weight.
        planted: values (B * T, width) that replace the result.
    """

    inputs: Tensor
    weight: Tensor
    planted: Tensor


@dataclass
class Planted:
    """Call with planted products.

    Attributes:
        inputs: inputs of the model.
        length: T, the number of positions of the layers.
        sites: attention of each layer, in the order of calls.
        products: products of all B * T vectors with a weight, in the order of calls.
        parts: one entry for each product of a part of the tokens, as in experts: the number of earlier
            products of all tokens, the number of its inputs that are not 0, and the width of its result.
        lookups: indices and results of all embeddings.
        leaves: calls of modules without submodules.
        found: residual stream (B, T, C) before the first layer and after each layer, or [].
        logits: logits.
    """

    inputs: Tensor
    length: int
    sites: list[Site] = field(default_factory=list)
    products: list[Product] = field(default_factory=list)
    parts: list[tuple[int, int, int]] = field(default_factory=list)
    lookups: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    leaves: list[RecordedCall] = field(default_factory=list)
    found: list[Tensor] = field(default_factory=list)
    logits: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def streams(self) -> list[Tensor]:
        """Residual stream before the first layer and after each layer.

        Raises:
            UnmeasuredError: no layers were found.
        """
        return needed(self.found, "layers of one type that run one after the other")

    def order(self, site: Site) -> list[int] | None:
        """Return the query heads of a site in the order of the product that they are parts of.

        None: the heads are no parts of one product. Only the first position is compared, because a rotary
        embedding does not change it.
        """
        if len(site.queries) % N_ROWS:
            return None
        D = site.queries.shape[-1]
        heads = by_row(site.queries)[:, :, 0].transpose(0, 1).flatten(1)  # (H, B * D)
        for product in reversed(self.products[: site.start]):
            if product.planted.shape[-1] % D:
                continue
            parts = product.planted.reshape(N_ROWS, self.length, -1, D)[:, 0].transpose(0, 1).flatten(1)
            likeness = nn.functional.cosine_similarity(heads[:, None].to(parts), parts, dim=-1)
            best, places = likeness.max(dim=-1)
            if best.min() > _SAME and len(set(places.tolist())) == len(heads):
                return places.argsort().tolist()
        return None

    def branches(self) -> list[dict[int, float]]:
        """Return, for each layer, the products that it adds to the residual stream, and their factors.

        {}: the layer is not a sum of the stream and products, for example because a norm follows.
        """
        before, *later = (x.reshape(-1, x.shape[-1]) for x in self.streams)
        numbers = [i for i, each in enumerate(self.products) if each.planted.shape == before.shape]
        added = []
        for after in later:
            factors = fitted(after, [before, *(self.products[i].planted for i in numbers)]) or [0.0]
            added.append({i: x for i, x in zip(numbers, factors[1:], strict=False) if abs(x) > 1e-6})
            before = after
        return added


def planted(
    subject: Subject,
    amplitude: float = SMALL,
    *,
    even: bool = False,
    length: int = _LENGTH,
    train: bool = False,
    only: Collection[int] | None = None,
    part: float = 0.0,
    noise: float = 0.0,
) -> Planted:
    """Return a call with planted products.

    Args:
        subject: the model.
        amplitude: size of the planted values.
        even: all vectors have this size. Otherwise, some are larger, which makes a norm visible.
        length: number of positions, within the limit of the model. If the output has no positions, as for
            images, the model determines it.
        train: call the model in train mode.
        only: indices of the products with planted values. The other products are 0. None: all products.
        part: value of each product of a part of the tokens, for inputs that are not 0.
        noise: standard deviation of noise that is added to each parameter.

    Raises:
        UnmeasuredError: the model does not run.
    """
    length = min(length, subject.spec.max_length or length)
    for dtype in (torch.float64, torch.float32):  # some kernels for mixtures of experts have no float64
        model = subject.model(dtype=dtype, train=train)
        generator = torch.Generator().manual_seed(subject.seed)
        for p in model.parameters() if noise else ():
            p.data += noise * torch.randn(p.shape, generator=generator).to(p)
        call = Planted(real_inputs(subject, N_ROWS, length, model=model), length)
        generator = torch.Generator().manual_seed(subject.seed)
        try:
            _call(subject, model, call, _Plant(call, generator, amplitude, even, only, part))
        except refusals():
            continue
        return call
    raise UnmeasuredError("needs a model that runs with planted activations")


def _call(subject: Subject, model: nn.Module, call: Planted, plant: _Plant) -> None:
    """Call the model with planted products, and record the call."""

    def run() -> None:
        call.logits = subject.spec.logits(model, call.inputs).detach()

    def run_planted() -> None:
        with Operations(plant.record):
            call.leaves = recorded_calls(model, run, lambda _, module: not [*module.children()])

    # Without gradients, torch's layers take a fused path without a visible softmax.
    with torch.enable_grad(), subject.fixed_randomness(), sdpa_kernel([SDPBackend.MATH]):
        if not subject.spec.per_position and (free := residual_stream(model, run)) is not None:
            call.length = free.first.shape[1]
        stream = residual_stream(model, run_planted)
    call.found = [] if stream is None else [x.detach() for x in (stream.first, *stream.after)]


def by_row(x: Tensor) -> Tensor:
    """Return a tensor (N, ...) as (B, H, ...)."""
    return x.reshape(N_ROWS, -1, *x.shape[1:])


def fitted(target: Tensor, columns: list[Tensor]) -> list[float] | None:
    """Return factors so that the weighted sum of columns (n, ...) plus a constant (...) is a target (n, ...).

    Return None if there are no such factors.
    """
    n = len(target)
    flat = [x.detach().double().reshape(n, -1) for x in (target, *columns)]
    if any(x.shape != flat[0].shape for x in flat):
        return None
    wanted, *parts = ((x - x.mean(dim=0)).flatten()[:_MOST] for x in flat)
    matrix = torch.stack(parts, dim=1)
    if not (wanted.isfinite().all() and matrix.isfinite().all() and wanted.any()):
        return None
    solution = torch.linalg.lstsq(matrix, wanted, driver="gelsd").solution
    is_explained = (matrix @ solution - wanted).norm() <= _MISFIT * wanted.norm()
    return [float(x) for x in solution] if is_explained else None


@dataclass
class _Plant:
    """Replace and record the products of a call. The attributes are those of `planted`."""

    call: Planted
    generator: torch.Generator
    amplitude: float
    even: bool
    only: Collection[int] | None
    part: float
    operands: tuple[Tensor, Tensor] | None = None

    def record(self, name: str, args: Any, output: Any) -> None:
        """Replace or record the result of an operation."""
        if name in ("mm", "addmm", "_grouped_mm") and output.is_floating_point():
            if name == "_grouped_mm" or len(output) != N_ROWS * self.call.length:
                inputs = args[0] if name == "_grouped_mm" else args[-2]
                is_token = (inputs != 0).any(dim=-1, keepdim=True)
                output.copy_(self.part * is_token.expand(output.shape))
                self.call.parts.append((len(self.call.products), int(is_token.sum()), output.shape[-1]))
            else:
                self._plant(args[-2], args[-1], output)
        elif name in ("bmm", "baddbmm"):
            self._multiply(args[-2], args[-1], output)
        elif name in ("_softmax", "_safe_softmax") and self.operands is not None:
            self._score(*self.operands, args[0], output)
        elif name == "embedding":
            self.call.lookups.append((args[1], output.detach().clone()))

    def _plant(self, inputs: Tensor, weight: Tensor, output: Tensor) -> None:
        signs = torch.randint(2, output.shape, generator=self.generator) * 2 - 1
        sizes = self.amplitude * (1 + torch.rand(len(output), 1, generator=self.generator) * (not self.even))
        is_planted = self.only is None or len(self.call.products) in self.only
        output.copy_(signs * sizes * is_planted)
        product = Product(inputs.detach().clone(), weight.detach(), output.detach().clone())
        self.call.products.append(product)

    def _multiply(self, one: Tensor, two: Tensor, output: Tensor) -> None:
        T, site = self.call.length, self.call.sites[-1] if self.call.sites else None
        is_square = one.shape[-1] == T and one.shape[-2] % T == 0
        weighs = site is not None and is_square and one.numel() == site.weights.numel()
        is_score = output.shape[-1] == T and output.shape[-2] % T == 0
        # A head size may be T.
        if site is not None and weighs and (not is_score or (site.used is None and self.operands is None)):
            self._weigh(site, one.detach(), two.detach())
        elif is_score:
            self.operands = one.detach().clone(), two.detach().mT.clone()

    def _weigh(self, site: Site, used: Tensor, values: Tensor) -> None:
        """Record the weights and values of a product. Its rows are heads and positions, or the reverse."""
        n, T = len(site.weights) // len(used), self.call.length
        forms = (used.reshape(-1, n, T, T), used.reshape(-1, T, n, T).transpose(1, 2))
        weights = site.weights.reshape(-1, n, T, T)
        nearest = min(forms, key=lambda form: float((form - weights).norm()))
        site.used = nearest.flatten(0, 1).clone()
        site.values = values.repeat_interleave(n, dim=0)

    def _score(self, queries: Tensor, keys: Tensor, scores: Tensor, weights: Tensor) -> None:
        T = self.call.length
        n = queries.shape[1] // T
        shape = (n * len(queries), T, T)
        if scores.shape[-2:] == shape[1:] and scores.numel() == weights.numel() == shape[0] * T**2:
            queries, keys = queries.reshape(shape[0], T, -1), keys.repeat_interleave(n, dim=0)
            scores, weights = (x.detach().reshape(shape).clone() for x in (scores, weights))
            self.call.sites.append(Site(queries, keys, scores, weights, len(self.call.products), n))
            self.operands = None
