"""Wrong constants of a model, each with the fact that its author states."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise.subject.facts import Facts, alibi_slopes
from stackwise.subject.spec import ModelSpec
from stackwise.support.random_state import seeded
from tests.zoo.gpt import GPT, Placed, spec_of
from tests.zoo.mutant import mutant

Knob = float | tuple[Any, ...] | None


class Head(nn.Linear):
    """Scales and caps logits."""

    def __init__(self, model: GPT) -> None:
        super().__init__(model.width, model.vocab_size, bias=False)
        self.knobs = type(model)

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x * self.knobs.before_head) * self.knobs.after_head
        for _ in range(self.knobs.logit_caps):
            logits = self.knobs.logit_cap * (logits / self.knobs.logit_cap).tanh()
        return logits


def bucket(steps: Tensor, number: int, farthest: float, *, both: bool = False) -> Tensor:
    """Return the buckets of T5 (arXiv:1910.10683) of keys' positions minus those of queries."""
    number = number // 2 if both else number
    start = number * (steps > 0) if both else 0 * steps
    n = steps.abs() if both else (-steps).clamp(min=0)
    exact = number // 2
    far = exact + (n.clamp(min=1) / exact).log() / math.log(farthest / exact) * (number - exact)
    return start + n.where(n < exact, far.long().clamp(max=number - 1))


class Stated(Placed):
    """Has a knob for each constant. A tuple has one value for each layer."""

    tied = False
    score_scale: Knob = 8**-0.5
    score_cap, score_caps = 5.0, 0
    slopes: Knob = None
    buckets: Callable[[Tensor], Tensor] | None = None
    order, value_order, n_kv_heads = "consecutive", "consecutive", 2
    embedding_scale = 1.0
    attention_scale: Knob = 1.0
    mlp_scale: Knob = 1.0
    stream_scale = 1.0
    before_head, after_head, logit_cap, logit_caps = 1.0, 1.0, 3.0, 0
    offset = 0
    windows: tuple[int | None, ...] = (None, None)
    eps: Knob = 1e-5
    last_eps = 1e-5
    q_eps = k_eps = 0.0
    embedding_rate, weight_rate = 0.0, 0.0
    attention_rate: Knob = 0.0
    mlp_rate: Knob = 0.0
    times_dropped = 1
    is_rescaled = True
    q_std: Knob = 0.05
    out_std: Knob = 0.02
    layer_order = (0, 1)

    def __init__(self) -> None:
        super().__init__()
        self.head = Head(self)
        self.biases = nn.Embedding(8 if self.buckets else 1, self.n_heads)
        self.layers = nn.ModuleList(self.layers[i] for i in self.layer_order)
        for i, layer in enumerate(self.layers):
            layer["attention_norm"].eps = layer["mlp_norm"].eps = self.at(self.eps, i)
            nn.init.normal_(layer["q"].weight, std=self.at(self.q_std, i))
            nn.init.normal_(layer["out"].weight, std=self.at(self.out_std, i))
            if self.q_eps:
                layer["q_norm"] = nn.RMSNorm(self.head_dim, eps=self.q_eps)
                layer["k_norm"] = nn.RMSNorm(self.head_dim, eps=self.k_eps)
        self.norm.eps = self.last_eps
        nn.init.normal_(self.head.weight, std=0.02)

    def at(self, knob: Any, index: int | None = None) -> Any:
        """Return the value for a layer."""
        return knob[self.index if index is None else index] if isinstance(knob, tuple) else knob

    def forward(self, *args: Any, **named: Any) -> Any:
        self.index = -1
        return super().forward(*args, **named)

    def place(self, *args: Any) -> Tensor:
        return super().place(*args) + self.offset

    def embed(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids) * self.embedding_scale + self.places(self.at_positions)
        return self.dropped(x, self.embedding_rate)

    def positions(self, *args: Any) -> Tensor:
        self.at_positions = self.place(*args)
        return self.at_positions

    def drop(self, x: Tensor) -> Tensor:
        return x  # each site has its own rate

    def dropped(self, x: Tensor, rate: float) -> Tensor:
        for _ in range(self.times_dropped if rate else 0):
            y = F.dropout(x, rate, self.training)
            x = y if self.is_rescaled or not self.training else y * (1 - rate)
        return x

    def attend(self, layer: Any, x: Tensor, positions: Tensor, visible: Tensor, cache: Any) -> Any:
        self.index += 1
        q, k, v = (self.split(layer[name](x)) for name in ("q", "k", "v"))
        if self.q_eps:
            q, k = layer["q_norm"](q), layer["k_norm"](k)
        if cache is not None:
            k, v = torch.cat((cache[0], k), dim=2), torch.cat((cache[1], v), dim=2)
        place = torch.arange(k.shape[2])
        distance = place[-q.shape[2] :, None] - place
        if (window := self.windows[self.index]) is not None:
            visible = visible & (distance < window)
        scores = q @ self.shared(k, self.at(self.order)).mT * self.at(self.score_scale)
        for _ in range(self.at(self.score_caps)):
            scores = self.score_cap * (scores / self.score_cap).tanh()
        if self.slopes is not None:
            slopes = torch.tensor(self.slopes, dtype=x.dtype)
            scores = scores - slopes[:, None, None] * distance
        if self.buckets is not None:
            scores = scores + self.biases(type(self).buckets(-distance)).permute(2, 0, 1)
        weights = self.softmax(scores.masked_fill(~visible, -torch.inf))
        weights = self.dropped(weights, self.at(self.weight_rate))
        y = layer["out"](self.merge(weights @ self.shared(v, self.value_order)))
        return self.dropped(y, self.at(self.attention_rate)) * self.at(self.attention_scale), (k, v)

    def shared(self, x: Tensor, order: str) -> Tensor:
        n = self.n_heads // self.n_kv_heads
        return x.repeat_interleave(n, dim=1) if order == "consecutive" else x.repeat(1, n, 1, 1)

    def mlp(self, layer: Any, x: Tensor) -> Tensor:
        y = self.branch(layer, x)
        return self.dropped(y, self.at(self.mlp_rate)) * self.at(self.mlp_scale)

    def branch(self, layer: Any, x: Tensor) -> Tensor:
        return super().mlp(layer, x)


class Routed(Stated):
    """Two of four experts process each token."""

    n_experts, n_chosen = 4, 2
    is_normalised = True
    routing_scale = 1.0
    coefficient = 0.1
    d_ff = 48

    def layer(self) -> nn.Module:
        layer = super().layer()
        layer["router"] = nn.Linear(self.width, self.n_experts, bias=False)
        for name, sizes in {"up": (self.width, self.d_ff), "down": (self.d_ff, self.width)}.items():
            layer[name] = nn.ModuleList(nn.Linear(*sizes, bias=False) for _ in range(self.n_experts))
        del layer["gate"]
        return layer

    def visible(self, T: int, past: int, keep: Tensor | None, documents: Tensor | None) -> Tensor:
        self.keep = None if keep is None else keep[:, -T:]
        return super().visible(T, past, keep, documents)

    def branch(self, layer: Any, x: Tensor) -> Tensor:
        shape, x = x.shape, x.flatten(0, 1)
        shares = layer["router"](x).softmax(dim=-1)
        weights, chosen = shares.topk(self.n_chosen)
        if self.is_normalised:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        y = torch.zeros_like(x)
        for number in range(self.n_experts):
            tokens, place = (chosen == number).nonzero(as_tuple=True)
            outputs = layer["down"][number](F.relu(layer["up"][number](x[tokens])))
            y = y.index_add(0, tokens, outputs * weights[tokens, place, None] * self.routing_scale)
        # Padding does not count.
        real = slice(None) if self.keep is None else self.keep.flatten().bool()
        busy = F.one_hot(chosen[real], self.n_experts).sum(dim=1).to(x.dtype).mean(dim=0)
        self.balance = self.n_experts * (busy * shares[real].mean(dim=0)).sum()
        return y.view(shape)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().loss(logits, labels) + self.coefficient * self.balance


def auxiliary_loss(model: Any, ids: Tensor, keep: Tensor | None) -> Tensor:
    model(ids, attention_mask=keep)
    return model.balance


def observed(spec: ModelSpec) -> list[Tensor]:
    """Logits in eval and train mode, the loss, and the weights."""
    model, inputs = spec.create().eval(), spec.batch(2, 12)
    loss = spec.labelled_loss(model, inputs, inputs)
    logits = [spec.logits(model, inputs)]
    with seeded(0):
        logits.append(spec.logits(model.train(), inputs))
    return [each.detach() for each in (*logits, loss, *model.parameters())]


def made(name: str, facts: Facts, knobs: dict[str, Any]) -> Callable[[], ModelSpec]:
    base = Routed if {"experts_per_token", "routing_sum", "router_loss"} & {name} else Stated
    more = {"auxiliary_loss": auxiliary_loss} if base is Routed else {}

    def spec() -> ModelSpec:
        build = type(base.__name__, (base,), knobs)
        return spec_of(build, max_length=60, facts=facts, name=name, **more)

    return spec


SCALE, ROOT = 8**-0.5, 32**0.5
SLOPES = alibi_slopes(4)
ATTENTION, LAYERS, INITIAL = "attention_facts", "layer_facts", "initial_facts"
# fact -> (family, its value, knobs of the twin, name of a mutant -> knobs that differ)
STATED: dict[str, tuple[str, Any, dict[str, Any], dict[str, dict[str, Any]]]] = {
    "attention_scale": (
        ATTENTION,
        SCALE,
        {},
        {
            "missing": {"score_scale": 1.0},
            "applied_twice": {"score_scale": SCALE**2},
            "of_the_width": {"score_scale": 1 / ROOT},
            "multiplied": {"score_scale": 1 / SCALE},
            "wrong_in_one_layer": {"score_scale": (SCALE, 1.1 * SCALE)},
        },
    ),
    "attention_cap": (
        ATTENTION,
        5.0,
        {"score_caps": 1},
        {
            "missing": {"score_caps": 0},
            "applied_twice": {"score_caps": 2},
            "another_one": {"score_cap": 50.0},
            "missing_in_one_layer": {"score_caps": (1, 0)},
        },
    ),
    "alibi_slopes": (
        ATTENTION,
        SLOPES,
        {"slopes": SLOPES},
        {
            "wrong_sign": {"slopes": tuple(-each for each in SLOPES)},
            "missing": {"slopes": None},
            "applied_twice": {"slopes": tuple(2 * each for each in SLOPES)},
            "of_eight_heads": {"slopes": alibi_slopes(8)[:4]},
            "in_reverse_order": {"slopes": SLOPES[::-1]},
            "scaled_as_scores": {"slopes": tuple(SCALE * each for each in SLOPES)},
        },
    ),
    "relative_buckets": (
        ATTENTION,
        (8, 12),
        {"buckets": lambda x: bucket(x, 8, 12)},
        {
            "wrong_sign": {"buckets": lambda x: bucket(-x, 8, 12)},
            "of_both_directions": {"buckets": lambda x: bucket(x, 8, 12, both=True)},
            "of_another_distance": {"buckets": lambda x: bucket(x, 8, 11)},
            "off_by_one": {"buckets": lambda x: bucket(x - 1, 8, 12)},
            "all_exact": {"buckets": lambda x: (-x).clamp(0, 7)},
        },
    ),
    "key_heads": (
        ATTENTION,
        2,
        {},
        {
            "tiled": {"order": "tiled", "value_order": "tiled"},
            "one_for_each_query": {"n_kv_heads": 4},
            "only_one": {"n_kv_heads": 1},
            "values_tiled": {"value_order": "tiled"},
            "tiled_in_one_layer": {"order": ("consecutive", "tiled")},
        },
    ),
    "embedding_scale": (
        LAYERS,
        ROOT,
        {"embedding_scale": ROOT},
        {
            "missing": {"embedding_scale": 1.0},
            "applied_twice": {"embedding_scale": ROOT**2},
            "of_another_width": {"embedding_scale": 64**0.5},
        },
    ),
    "residual_scale": (
        LAYERS,
        0.5,
        {"attention_scale": 0.5, "mlp_scale": 0.5},
        {
            "missing": {"attention_scale": 1.0, "mlp_scale": 1.0},
            "applied_twice": {"attention_scale": 0.25, "mlp_scale": 0.25},
            "missing_after_the_mlp": {"mlp_scale": 1.0},
            "missing_in_one_layer": {"attention_scale": (0.5, 1.0)},
        },
    ),
    "logit_scale": (
        LAYERS,
        0.25,
        {"after_head": 0.25},
        {
            "missing": {"after_head": 1.0},
            "inverted": {"after_head": 4.0},
            "applied_before_and_after": {"before_head": 0.25},
            "of_another_width": {"after_head": 0.125},
        },
    ),
    "logit_cap": (
        LAYERS,
        3.0,
        {"logit_caps": 1},
        {"missing": {"logit_caps": 0}, "applied_twice": {"logit_caps": 2}, "another_one": {"logit_cap": 5.0}},
    ),
    "position_offset": (
        LAYERS,
        2,
        {"offset": 2},
        {"missing": {"offset": 0}, "applied_twice": {"offset": 4}, "off_by_one": {"offset": 1}},
    ),
    "windows": (
        ATTENTION,
        (5, None),
        {"windows": (5, None)},
        {
            "in_reverse_order": {"windows": (None, 5)},
            "missing": {"windows": (None, None)},
            "in_every_layer": {"windows": (5, 5)},
            "one_too_narrow": {"windows": (4, None)},
            "one_too_wide": {"windows": (6, None)},
        },
    ),
    "embedding_dropout": (
        LAYERS,
        0.2,
        {"embedding_rate": 0.2},
        {
            "missing": {"embedding_rate": 0.0},
            "applied_twice": {"times_dropped": 2},
            "not_rescaled": {"is_rescaled": False},
        },
    ),
    "attention_dropout": (
        ATTENTION,
        0.2,
        {"weight_rate": 0.2},
        {
            "missing": {"weight_rate": 0.0},
            "applied_twice": {"times_dropped": 2},
            "of_another_site": {"weight_rate": 0.1},
            "missing_in_one_layer": {"weight_rate": (0.2, 0.0)},
            "not_rescaled": {"is_rescaled": False},
        },
    ),
    "residual_dropout": (
        LAYERS,
        0.2,
        {"attention_rate": 0.2, "mlp_rate": 0.2},
        {
            "missing": {"attention_rate": 0.0, "mlp_rate": 0.0},
            "missing_after_the_mlp": {"mlp_rate": 0.0},
            "applied_twice": {"times_dropped": 2},
            "missing_in_one_layer": {"attention_rate": (0.2, 0.0)},
        },
    ),
    "initial_std": (
        INITIAL,
        {"*.q.weight": 0.05, "layers.*.out.weight": 0.02},
        {},
        {
            "doubled": {"q_std": 0.1},
            "not_smaller_with_depth": {"out_std": 0.04},
            "variance": {"q_std": 0.05**2},
            "wrong_in_one_layer": {"out_std": (0.02, 0.023)},
        },
    ),
    "norm_eps": (
        LAYERS,
        1e-5,
        {},
        {
            "of_another_library": {"eps": 1e-6, "last_eps": 1e-6},
            "of_the_last_norm": {"last_eps": 1e-6},
            "wrong_in_one_layer": {"eps": (1e-5, 1e-3)},
        },
    ),
    "qk_norm_eps": (
        LAYERS,
        1e-5,
        {"q_eps": 1e-5, "k_eps": 1e-5},
        {
            "of_another_library": {"q_eps": 1e-3, "k_eps": 1e-3},
            "of_keys": {"k_eps": 1e-3},
            "of_queries": {"q_eps": 1e-3},
        },
    ),
    "block_weights": (
        LAYERS,
        (0, 0),
        {"layer_order": (0, 0)},
        {
            "separate": {"layer_order": (0, 1)},
            "of_every_second_layer": {"layer_order": (0, 1, 0, 1), "windows": (None,) * 4},
            "of_one_more_layer": {"layer_order": (0, 1, 0), "windows": (None,) * 3},
        },
    ),
    "experts_per_token": (
        LAYERS,
        2,
        {},
        {"one": {"n_chosen": 1}, "three": {"n_chosen": 3}, "all": {"n_chosen": 4, "n_experts": 5}},
    ),
    "routing_sum": (
        LAYERS,
        1.0,
        {},
        {
            "not_normalised": {"is_normalised": False},
            "scaled": {"routing_scale": 2.5},
            "halved": {"routing_scale": 0.5},
        },
    ),
    "router_loss": (
        LAYERS,
        0.1,
        {},
        {
            "missing": {"coefficient": 0.0},
            "applied_twice": {"coefficient": 0.01},
            "doubled": {"coefficient": 0.2},
        },
    ),
}


def enter_all() -> None:
    for fact, (family, value, knobs, wrong) in STATED.items():
        facts = Facts(**{fact: value})
        twin = made(fact, facts, knobs)
        twin.__name__ = f"stated_{fact}"
        for problem, changed in wrong.items():
            make = made(fact, facts, knobs | changed)
            make.__name__ = f"{fact}_{problem}"
            make.__doc__ = f"Error in the {fact.replace('_', ' ')}: {problem.replace('_', ' ')}."
            mutant("facts", twin=twin, family=family, source="classic", observable=observed)(make)


enter_all()
