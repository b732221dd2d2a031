"""Mutations: a grammar of bugs for the models of `bench.architectures`.

Shapes: B batch, T queries, S keys, C model width, H query heads, D head size.
"""

# ruff: noqa: ARG002  what is overridden has its arguments, used or not

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

from bench.architectures import MAX_LENGTH, Architecture, Model, architectures, spec_of
from stackwise.subject.spec import ModelSpec


@dataclass(frozen=True)
class Mutation:
    """A rule of the grammar of bugs.

    Attributes:
        name: of the function that makes it.
        kind: of bug.
        values: of its one parameter.
        suits: the architectures that it can break.
        decidable: whether the model then contradicts what is claimed of it, or what holds of any. Else the
            mutant is a sound model of another architecture, which only a reference tells from the right one.
        make: (class, value) -> class with the bug.
    """

    name: str
    kind: str
    values: tuple[Any, ...]
    suits: Callable[[Architecture], bool]
    decidable: bool
    make: Callable[[type[Model], Any], type[Model]]


MUTATIONS: dict[str, Mutation] = {}


def mutation(
    kind: str,
    *values: Any,
    suits: Callable[[Architecture], bool] = lambda _: True,
    decidable: bool = True,
) -> Callable[[Callable[..., type[Model]]], Callable[..., type[Model]]]:
    """Enter a rule under the function's name; without values it takes none."""

    def enter(function: Callable[..., type[Model]]) -> Callable[..., type[Model]]:
        make = function if values else lambda base, _: function(base)
        MUTATIONS[function.__name__] = Mutation(
            function.__name__, kind, values or (None,), suits, decidable, make
        )
        return function

    return enter


def _positioned(a: Architecture) -> bool:
    return a.positions != "none"


def _several_tokens_seen(a: Architecture) -> bool:
    return a.window is None or a.window > 1


@mutation("mask", 1, 2)
def mask_ahead(base, k):
    class Mutant(base):
        def causal(self, query, key):
            return key <= query + k

    return Mutant


@mutation("mask")
def mask_in_training_only(base):
    class Mutant(base):
        def causal(self, query, key):
            return super().causal(query, key) if self.training else key >= 0

    return Mutant


@mutation("mask")
def mask_in_evaluation_only(base):
    class Mutant(base):
        def causal(self, query, key):
            return key >= 0 if self.training else super().causal(query, key)

    return Mutant


@mutation("mask", decidable=False)
def mask_hides_self(base):
    class Mutant(base):
        def causal(self, query, key):
            return (key < query) | ((key == query) & (query == 0))

    return Mutant


@mutation("mask", -1, 1, suits=lambda a: a.window is not None)
def window_off(base, k):
    class Mutant(base):
        def window(self):
            return self.architecture.window + k

    return Mutant


@mutation("mask", suits=lambda a: a.window is not None)
def window_lost(base):
    class Mutant(base):
        def window(self):
            return None

    return Mutant


@mutation("mask")
def padding_seen(base):
    class Mutant(base):
        def hide_padding(self, visible, keep, query, key):
            return visible.expand(len(keep), -1, -1)

    return Mutant


@mutation("mask")
def padding_hides_its_neighbour(base):
    class Mutant(base):
        def hide_padding(self, visible, keep, query, key):
            return super().hide_padding(visible, keep & keep.roll(1, dims=1), query, key)

    return Mutant


@mutation("mask")
def padding_rows_empty(base):
    class Mutant(base):
        def hide_padding(self, visible, keep, query, key):
            return visible & keep[:, None] & keep[:, :, None]

    return Mutant


@mutation("mask")
def documents_see_each_other(base):
    class Mutant(base):
        def visible(self, T, past, keep, documents):
            seen = super().visible(T, past, keep, documents)
            return seen if documents is None else super().visible(T, past, keep, None).expand_as(seen)

    return Mutant


@mutation("index", 1, -1, suits=_positioned)
def cache_offset(base, k):
    class Mutant(base):
        def positions(self, input_ids, past, keep, documents):
            return super().positions(input_ids, max(0, past + k) if past else 0, keep, documents)

    return Mutant


@mutation("index", suits=_positioned)
def cache_forgets_positions(base):
    class Mutant(base):
        def positions(self, input_ids, past, keep, documents):
            return super().positions(input_ids, 0, keep, documents)

    return Mutant


@mutation("index", suits=_positioned)
def cache_offset_twice(base):
    class Mutant(base):
        def positions(self, input_ids, past, keep, documents):
            return super().positions(input_ids, 2 * past, keep, documents).clamp(max=MAX_LENGTH - 1)

    return Mutant


@mutation("index", suits=lambda a: a.positions == "learned")
def documents_share_positions(base):
    class Mutant(base):
        def positions(self, input_ids, past, keep, documents):
            return super().positions(input_ids, past, keep, None)

    return Mutant


@mutation("index", suits=lambda a: a.positions == "learned")
def padding_is_counted(base):
    class Mutant(base):
        def positions(self, input_ids, past, keep, documents):
            return super().positions(input_ids, past, None, documents)

    return Mutant


@mutation("index", suits=_positioned)
def positions_from_the_end(base):
    class Mutant(base):
        def positions(self, input_ids, past, keep, documents):
            right = super().positions(input_ids, past, keep, documents)
            return (right.amax(dim=1, keepdim=True) - right) if not past else right

    return Mutant


@mutation("index", suits=lambda a: a.positions == "learned" or a.positions == "rope")
def positions_scaled_by_length(base):
    class Mutant(base):
        def angles(self, positions, frequencies):
            return super().angles(positions / positions.amax().clamp(min=1), frequencies)

        def positions(self, input_ids, past, keep, documents):
            right = super().positions(input_ids, past, keep, documents)
            if self.architecture.positions == "rope":
                return right
            return (right * (MAX_LENGTH // 2) // max(input_ids.shape[1] + past, 1)).clamp(max=MAX_LENGTH - 1)

    return Mutant


@mutation("index", decidable=False, suits=lambda a: 1 < a.n_kv_heads < a.n_heads)
def heads_tiled(base):
    class Mutant(base):
        def repeat(self, x):
            return x.repeat(1, self.architecture.n_heads // self.architecture.n_kv_heads, 1, 1)

    return Mutant


@mutation("index")
def cache_overwrites(base):
    class Mutant(base):
        def append(self, cache, k, v):
            k, v = super().append(cache, k, v)
            return k, torch.cat((v[:, :, 1:], v[:, :, -1:]), dim=2)

    return Mutant


@mutation("scale", decidable=False)
def attention_unscaled(base):
    class Mutant(base):
        def scale(self):
            return 1.0

    return Mutant


@mutation("scale", 0.25, 4.0, decidable=False)
def attention_scale(base, factor):
    class Mutant(base):
        def scale(self):
            return factor * super().scale()

    return Mutant


@mutation("scale", 30.0, 100.0)
def logits_scale(base, factor):
    class Mutant(base):
        def logits(self, x):
            return factor * super().logits(x)

    return Mutant


@mutation("scale", 50.0)
def embedding_std(base, factor):
    class Mutant(base):
        def std(self, name):
            return super().std(name) * (factor if name.startswith(("embedding", "head")) else 1.0)

    return Mutant


@mutation("scale")
def norm_gains_random(base):
    class Mutant(base):
        def initialize(self):
            super().initialize()
            for name, p in self.named_parameters():
                if "norm" in name and name.endswith("weight"):
                    nn.init.normal_(p, std=0.02)

    return Mutant


@mutation("scale", 0.0, 5.0, decidable=False)
def norm_gain(base, value):
    class Mutant(base):
        def initialize(self):
            super().initialize()
            nn.init.constant_(self.norm.weight, value)

    return Mutant


@mutation("scale", 10.0, decidable=False)
def branch_scale(base, factor):
    class Mutant(base):
        def add(self, x, y):
            return x + factor * y

    return Mutant


@mutation("dtype", torch.bfloat16, torch.float16)
def softmax_dtype(base, dtype):
    class Mutant(base):
        def softmax(self, scores):
            return super().softmax(scores.to(dtype)).to(scores.dtype)

    return Mutant


@mutation("dtype", torch.bfloat16, torch.float16)
def norm_dtype(base, dtype):
    class Mutant(base):
        def normalize(self, norm, x):
            return super().normalize(norm, x.to(dtype).to(x.dtype))

    return Mutant


@mutation("dtype", torch.bfloat16)
def logits_dtype(base, dtype):
    class Mutant(base):
        def logits(self, x):
            return super().logits(x).to(dtype).to(x.dtype)

    return Mutant


@mutation("dtype", torch.bfloat16, suits=lambda a: a.positions == "rope")
def rotary_dtype(base, dtype):
    class Mutant(base):
        def angles(self, positions, frequencies):
            return super().angles(positions.to(dtype), frequencies.to(dtype)).double()

    return Mutant


@mutation("detach")
def branch_detached(base):
    class Mutant(base):
        def add(self, x, y):
            return x + y.detach()

    return Mutant


@mutation("detach")
def mlp_detached(base):
    class Mutant(base):
        def mlp(self, layer, x):
            return super().mlp(layer, x).detach()

    return Mutant


@mutation("detach")
def scores_detached(base):
    class Mutant(base):
        def softmax(self, scores):
            return super().softmax(scores.detach())

    return Mutant


@mutation("detach")
def embedding_detached(base):
    class Mutant(base):
        def embed(self, input_ids):
            return super().embed(input_ids).detach()

    return Mutant


@mutation("detach", suits=lambda a: a.depth > 1)
def stream_cut(base):
    class Mutant(base):
        def forward(self, *args, **named):
            self.cut = True
            return super().forward(*args, **named)

        def mlp(self, layer, x):
            y = super().mlp(layer, x)
            first, self.cut = self.cut, False
            return y.detach() if first else y

    return Mutant


@mutation("detach", decidable=False)
def frozen_by_mistake(base):
    class Mutant(base):
        def initialize(self):
            super().initialize()
            for p in self.layers[-1].parameters():
                p.requires_grad_(False)

    return Mutant


@mutation("shift", 0, 2)
def label_shift(base, shift):
    class Mutant(base):
        def loss(self, logits, labels):
            end = logits.shape[1] - shift
            return self.reduce(logits[:, :end].flatten(0, 1), labels[:, shift:].flatten())

    return Mutant


@mutation("shift")
def inputs_rolled(base):
    class Mutant(base):
        def embed(self, input_ids):
            return super().embed(input_ids.roll(-1, dims=1))

    return Mutant


@mutation("shift", suits=_several_tokens_seen, decidable=False)
def values_late(base):
    class Mutant(base):
        def attend(self, layer, x, positions, visible, cache):
            y, now = super().attend(layer, x, positions, visible, cache)
            return F.pad(y, (0, 0, 1, 0))[:, :-1] if cache is None else y, now

    return Mutant


@mutation("reduction")
def loss_summed(base):
    class Mutant(base):
        def reduce(self, logits, targets):
            return F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")

    return Mutant


@mutation("reduction")
def loss_over_ignored_too(base):
    class Mutant(base):
        def reduce(self, logits, targets):
            total = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
            return total / targets.numel()

    return Mutant


# What torch itself gives; its gradients are finite.
@mutation("reduction", decidable=False)
def loss_of_nothing_is_nan(base):
    class Mutant(base):
        def reduce(self, logits, targets):
            return F.cross_entropy(logits, targets, ignore_index=-100)

    return Mutant


@mutation("reduction")
def softmax_twice(base):
    class Mutant(base):
        def reduce(self, logits, targets):
            return super().reduce(logits.softmax(dim=-1), targets)

    return Mutant


@mutation("reduction")
def ignored_is_token_0(base):
    class Mutant(base):
        def reduce(self, logits, targets):
            return super().reduce(logits, targets.clamp(min=0))

    return Mutant


@mutation("reduction")
def softmax_over_queries(base):
    class Mutant(base):
        def softmax(self, scores):
            return scores.softmax(dim=-2).nan_to_num()

    return Mutant


@mutation("reduction")
def norm_over_positions(base):
    class Mutant(base):
        def normalize(self, norm, x):
            x = super().normalize(norm, x)
            return x - x.mean(dim=1, keepdim=True)

    return Mutant


@mutation("reduction")
def norm_over_batch(base):
    class Mutant(base):
        def normalize(self, norm, x):
            return super().normalize(norm, x) / x.std(dim=0, keepdim=True, correction=0).add(1.0)

    return Mutant


@mutation("layout", suits=lambda a: a.n_heads > 1)
def heads_merged_by_view(base):
    class Mutant(base):
        def merge(self, x):
            B, H, T, D = x.shape
            return x.reshape(B, T, H * D)

    return Mutant


@mutation("layout", suits=lambda a: a.n_kv_heads > 1)
def heads_split_by_view(base):
    class Mutant(base):
        def split(self, x):
            B, T, C = x.shape
            D = self.architecture.head_dim
            return x.reshape(B, C // D, T, D)

    return Mutant


@mutation("layout", suits=lambda a: a.n_heads > 1, decidable=False)
def heads_merged_in_another_order(base):
    class Mutant(base):
        def merge(self, x):
            return x.flip(1).transpose(1, 2).flatten(2)

    return Mutant


@mutation("residual", decidable=False)
def residual_dropped(base):
    class Mutant(base):
        def add(self, x, y):
            return y

    return Mutant


@mutation("residual", decidable=False)
def residual_doubled(base):
    class Mutant(base):
        def add(self, x, y):
            return 2 * x + y

    return Mutant


@mutation("residual", decidable=False)
def norm_skipped(base):
    class Mutant(base):
        def normalize(self, norm, x):
            return x if norm is self.norm else super().normalize(norm, x)

    return Mutant


@mutation("tie", suits=lambda a: a.tied)
def tie_broken(base):
    class Mutant(base):
        def tie(self):
            self.head.weight = nn.Parameter(self.embedding.weight.detach().clone())

    return Mutant


@mutation("tie", suits=lambda a: a.tied)
def tie_forgotten(base):
    class Mutant(base):
        def tie(self):
            pass

    return Mutant


@mutation("state")
def dropout_in_evaluation(base):
    class Mutant(base):
        def drop(self, x):
            return F.dropout(x, 0.1)

    return Mutant


@mutation("state")
def remembers_the_last_call(base):
    class Mutant(base):
        last = None

        def embed(self, input_ids):
            x = super().embed(input_ids)
            before, self.last = self.last, x.detach().mean()
            return x if before is None else x + before

    return Mutant


@dataclass(frozen=True)
class Case:
    """An architecture with one bug."""

    mutation: str
    value: Any
    architecture: Architecture

    @property
    def rule(self) -> Mutation:
        return MUTATIONS[self.mutation]

    def mutant(self) -> ModelSpec:
        return spec_of(self.rule.make(Model, self.value), self.architecture, self.mutation)

    def twin(self) -> ModelSpec:
        return spec_of(Model, self.architecture, "clean")


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A bug first, then an architecture that can have it."""
    rule = MUTATIONS[draw(st.sampled_from(sorted(MUTATIONS)))]
    value = draw(st.sampled_from(rule.values))
    return Case(rule.name, value, draw(architectures().filter(rule.suits)))
