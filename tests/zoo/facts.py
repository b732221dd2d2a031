"""Bugs that change a model consistently, so that only a stated fact shows them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from stackwise.subject.facts import Facts
from stackwise.subject.rotary import RotaryClaim
from stackwise.subject.spec import ModelSpec
from tests.zoo.forward import logits
from tests.zoo.gpt import GPT, spec_of
from tests.zoo.mutant import mutant

LLAMA3 = RotaryClaim(theta=5e5, kind="llama3", factor=8.0, original_length=32)


class Rotating(GPT):
    """Rotates queries and keys by frequencies of its own."""

    claim = RotaryClaim()

    def frequencies(self) -> Tensor:
        return self.claim.frequencies(self.head_dim)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        frequencies = self.frequencies()
        cos, sin = (f(positions[:, None, :, None] * frequencies).to(x.dtype) for f in (torch.cos, torch.sin))
        n = 2 * len(frequencies)
        one, two = x[..., :n].chunk(2, dim=-1)
        return torch.cat((one * cos - two * sin, two * cos + one * sin, x[..., n:]), dim=-1)


class Scaled(Rotating):
    """Has the frequencies of Llama 3.1 for a longer context."""

    claim = LLAMA3


class Partial(Rotating):
    """Rotates half of each head."""

    claim = RotaryClaim(dim=GPT.width // GPT.n_heads // 2)


def of(build: type[Rotating]) -> ModelSpec:
    return replace(spec_of(build), rotary=(build.claim,))


def rotating() -> ModelSpec:
    return of(Rotating)


def scaled() -> ModelSpec:
    return of(Scaled)


def partial() -> ModelSpec:
    return of(Partial)


@mutant("rotary", twin=rotating, family="rotary", source="classic", observable=logits)
def rotary_base_is_not_the_stated_one():
    """The base is 500,000, and the configuration says 10,000."""

    class Mutant(Rotating):
        def frequencies(self):
            return RotaryClaim(theta=5e5).frequencies(self.head_dim)

    return of(Mutant)


@mutant("rotary", twin=rotating, family="rotary", source="classic", observable=logits)
def rotary_exponents_too_small():
    """The exponents are i / dim and not 2i / dim."""

    class Mutant(Rotating):
        def frequencies(self):
            return super().frequencies().sqrt()

    return of(Mutant)


@mutant("rotary", twin=scaled, family="rotary", source="classic", observable=logits)
def rotary_scaling_is_ignored():
    """The scaling for a longer context is not applied."""

    class Mutant(Scaled):
        def frequencies(self):
            return RotaryClaim(theta=self.claim.theta).frequencies(self.head_dim)

    return of(Mutant)


@mutant("rotary", twin=scaled, family="rotary", source="classic", observable=logits)
def rotary_scaling_applied_twice():
    """Positions are divided by the factor, in addition to the scaling of the frequencies."""

    class Mutant(Scaled):
        def frequencies(self):
            return super().frequencies() / self.claim.factor

    return of(Mutant)


@mutant("rotary", twin=partial, family="rotary", source="classic", observable=logits)
def rotary_exponents_over_the_whole_head():
    """Half of each head is rotated, and the exponents are those for the whole head."""

    class Mutant(Partial):
        def frequencies(self):
            return RotaryClaim().frequencies(self.head_dim)[: self.head_dim // 4]

    return of(Mutant)


@mutant("rotary", twin=partial, family="rotary", source="classic", observable=logits)
def rotary_part_is_ignored():
    """The whole head is rotated, and not its half."""

    class Mutant(Partial):
        def frequencies(self):
            return RotaryClaim().frequencies(self.head_dim)

    return of(Mutant)


@mutant("rotary", twin=rotating, family="rotary", source="modalities#462", observable=logits)
def rotary_frequencies_rounded():
    """The frequencies are rounded to bfloat16."""

    class Mutant(Rotating):
        def frequencies(self):
            return super().frequencies().bfloat16().double()

    return of(Mutant)


@mutant("rotary", twin=rotating, family="rotary", source="classic", observable=logits)
def rotary_keys_by_other_frequencies():
    """Queries are rotated by the claimed frequencies, and keys by half of them."""

    class Mutant(Rotating):
        def rotate(self, x, positions):
            return super().rotate(x, positions if x.shape[1] == self.n_heads else positions / 2)

    return of(Mutant)


@mutant("rotary", twin=rotating, family="rotary", source="classic", observable=logits)
def rotary_keys_backwards():
    """Keys are rotated in the opposite direction of queries."""

    class Mutant(Rotating):
        def rotate(self, x, positions):
            return super().rotate(x, positions if x.shape[1] == self.n_heads else -positions)

    return of(Mutant)


class LastLayer(Rotating):
    """Knows in which layer it rotates."""

    is_last = False

    def attend(self, layer, *arguments):
        self.is_last = layer is self.layers[-1]
        return super().attend(layer, *arguments)


@mutant("rotary", twin=rotating, family="rotary", source="classic", observable=logits)
def rotary_is_missing_in_a_layer():
    """The last layer rotates nothing."""

    class Mutant(LastLayer):
        def rotate(self, x, positions):
            return x if self.is_last else super().rotate(x, positions)

    return of(Mutant)


@mutant("rotary", twin=rotating, family="rotary", source="classic", observable=logits)
def rotary_keys_missing_in_a_layer():
    """The last layer rotates queries only."""

    class Mutant(LastLayer):
        def rotate(self, x, positions):
            return x if self.is_last and x.shape[1] != self.n_heads else super().rotate(x, positions)

    return of(Mutant)


def interleaved(x: Tensor) -> Tensor:
    """Return an order of elements in which the elements of each pair are neighbours, not two halves."""
    return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


class Halves(Rotating):
    """Rotates element i with element i + dim / 2."""

    claim = RotaryClaim(layout="halves")


class Neighbours(Rotating):
    """Rotates each element with its neighbour."""

    claim = RotaryClaim(layout="interleaved")

    def rotate(self, x, positions):
        halves = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return interleaved(super().rotate(halves, positions))


def halves() -> ModelSpec:
    return of(Halves)


def neighbours() -> ModelSpec:
    return of(Neighbours)


@mutant("rotary", twin=halves, family="rotary", source="classic", observable=logits)
def rotary_pairs_are_neighbours():
    """Neighbours are rotated, and the weights are those of a model that rotates halves."""
    return replace(halves(), build=Neighbours)


@mutant("rotary", twin=neighbours, family="rotary", source="classic", observable=logits)
def rotary_pairs_are_halves():
    """Halves are rotated, and the weights are those of a model that rotates neighbours."""
    return replace(neighbours(), build=Halves)


@mutant("rotary", twin=neighbours, family="rotary", source="classic", observable=logits)
def rotary_pairs_differ_between_layers():
    """The last layer rotates halves, and the other layers rotate neighbours."""

    class Mutant(Neighbours, LastLayer):
        def rotate(self, x, positions):
            return Rotating.rotate(self, x, positions) if self.is_last else super().rotate(x, positions)

    return of(Mutant)


class Amplified(Scaled):
    """Multiplies queries and keys by the attention factor of YaRN."""

    claim = RotaryClaim(kind="yarn", factor=4.0, original_length=32, high=32.0, attention_factor=1.14)
    factors = (1.14, 1.14)

    def rotate(self, x, positions):
        return super().rotate(x, positions) * self.factors[x.shape[1] != self.n_heads]


def amplified(build: type[Amplified] = Amplified) -> ModelSpec:
    return replace(of(build), facts=Facts(attention_scale=8**-0.5))


def amplified_mutant(name: str, summary: str, factors: tuple[float, float]) -> None:
    def make() -> ModelSpec:
        return amplified(type("Mutant", (Amplified,), {"factors": factors}))

    make.__name__, make.__doc__ = f"rotary_attention_factor_{name}", summary
    mutant("rotary", twin=amplified, family="attention_facts", source="classic", observable=logits)(make)


amplified_mutant("is_ignored", "Queries and keys are not multiplied by the attention factor.", (1.0, 1.0))
amplified_mutant("of_queries_only", "Only queries are multiplied by the attention factor.", (1.14, 1.0))
amplified_mutant("is_squared", "The attention factor is applied twice.", (1.14**2, 1.14**2))
