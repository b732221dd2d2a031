"""Architectures: a grammar of small transformers, each written out in plain torch and sound.

Shapes: B batch, T queries, S keys, C model width, H query heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from stackwise.subject.spec import ModelSpec

VOCAB_SIZE, MAX_LENGTH = 61, 64


@dataclass(frozen=True)
class Architecture:
    """A small transformer, as the grammar makes them; the first choice of each is where shrinking ends."""

    depth: int = 1
    n_heads: int = 1
    n_kv_heads: int = 1
    head_dim: int = 4
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_position: Literal["pre", "post"] = "pre"
    positions: Literal["none", "learned", "rope"] = "none"
    mlp: Literal["gelu", "relu", "swiglu"] = "gelu"
    window: int | None = None
    tied: bool = False
    qk_norm: bool = False
    dropout: float = 0.0

    @property
    def width(self) -> int:
        return self.n_heads * self.head_dim


@st.composite
def architectures(draw: st.DrawFn) -> Architecture:
    n_heads = draw(st.sampled_from((1, 2, 4)))
    return Architecture(
        depth=draw(st.integers(1, 3)),
        n_heads=n_heads,
        n_kv_heads=draw(st.sampled_from([n for n in (1, 2, 4) if n <= n_heads])),
        head_dim=draw(st.sampled_from((4, 8))),
        norm=draw(st.sampled_from(("rmsnorm", "layernorm"))),
        norm_position=draw(st.sampled_from(("pre", "post"))),
        positions=draw(st.sampled_from(("none", "learned", "rope"))),
        mlp=draw(st.sampled_from(("gelu", "relu", "swiglu"))),
        window=draw(st.sampled_from((None, 3, 5))),
        tied=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        dropout=draw(st.sampled_from((0.0, 0.1))),
    )


class Model(nn.Module):
    """What an Architecture says, written out; a mutation overrides the method that it breaks."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.architecture = a = architecture
        self.embedding = nn.Embedding(VOCAB_SIZE, a.width)
        if a.positions == "learned":
            self.places = nn.Embedding(MAX_LENGTH, a.width)
        self.layers = nn.ModuleList(nn.ModuleDict(self.layer()) for _ in range(a.depth))
        self.norm = self.make_norm(a.width)
        self.head = nn.Linear(a.width, VOCAB_SIZE, bias=False)
        self.initialize()
        if a.tied:
            self.tie()

    def layer(self) -> dict[str, nn.Module]:
        a = self.architecture
        kv_width, d_ff = a.n_kv_heads * a.head_dim, 2 * a.width
        return {
            "attention_norm": self.make_norm(a.width),
            "q": nn.Linear(a.width, a.width, bias=False),
            "k": nn.Linear(a.width, kv_width, bias=False),
            "v": nn.Linear(a.width, kv_width, bias=False),
            "out": nn.Linear(a.width, a.width, bias=False),
            "mlp_norm": self.make_norm(a.width),
            "up": nn.Linear(a.width, d_ff, bias=False),
            "down": nn.Linear(d_ff, a.width, bias=False),
            **({"gate": nn.Linear(a.width, d_ff, bias=False)} if a.mlp == "swiglu" else {}),
            **({"q_norm": nn.RMSNorm(a.head_dim), "k_norm": nn.RMSNorm(a.head_dim)} if a.qk_norm else {}),
        }

    def make_norm(self, width: int) -> nn.Module:
        return nn.RMSNorm(width) if self.architecture.norm == "rmsnorm" else nn.LayerNorm(width)

    def initialize(self) -> None:
        for name, p in self.named_parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=self.std(name))

    def std(self, name: str) -> float:
        a = self.architecture
        if name.startswith(("embedding", "places", "head")):
            return 0.02
        branch = name.endswith(("out.weight", "down.weight"))
        return a.width**-0.5 / (math.sqrt(2 * a.depth) if branch else 1.0)

    def tie(self) -> None:
        self.head.weight = self.embedding.weight

    def forward(
        self,
        input_ids: Tensor,
        keep: Tensor | None = None,
        documents: Tensor | None = None,
        labels: Tensor | None = None,
        cache: list[tuple[Tensor, Tensor]] | None = None,
    ) -> Any:
        a = self.architecture
        past = 0 if cache is None else cache[0][0].shape[2]
        positions = self.positions(input_ids, past, keep, documents)
        visible = self.visible(input_ids.shape[1], past, keep, documents)
        x, kept = self.embed(input_ids), []
        if a.positions == "learned":
            x = x + self.places(positions)
        for index, layer in enumerate(self.layers):

            def attend(y: Tensor, layer: Any = layer, index: int = index) -> Tensor:
                y, now = self.attend(layer, y, positions, visible, cache[index] if cache else None)
                kept.append(now)
                return y

            x = self.branch(x, layer["attention_norm"], attend)
            x = self.branch(x, layer["mlp_norm"], partial(self.mlp, layer))
        logits = self.logits(self.normalize(self.norm, x))
        loss = None if labels is None else self.loss(logits, labels)
        return SimpleNamespace(logits=logits, loss=loss, cache=kept)

    def embed(self, input_ids: Tensor) -> Tensor:
        return self.embedding(input_ids)

    def branch(self, x: Tensor, norm: nn.Module, function: Callable[[Tensor], Tensor]) -> Tensor:
        if self.architecture.norm_position == "pre":
            return self.add(x, self.drop(function(self.normalize(norm, x))))
        return self.add(x, self.drop(self.normalize(norm, function(x))))

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def normalize(self, norm: nn.Module, x: Tensor) -> Tensor:
        return norm(x)

    def drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.architecture.dropout, self.training)

    def logits(self, x: Tensor) -> Tensor:
        return self.head(x)

    def positions(
        self, input_ids: Tensor, past: int, keep: Tensor | None, documents: Tensor | None
    ) -> Tensor:
        """(B, T): real tokens are counted, and each document from 0."""
        B, T = input_ids.shape
        if documents is not None:
            index = torch.arange(T).expand(B, T)
            starts = torch.ones_like(documents, dtype=torch.bool)
            starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
            return index - (index * starts).cummax(dim=1).values
        if keep is not None:
            return (keep.long().cumsum(dim=1) - 1).clamp(min=0)
        return torch.arange(past, past + T).expand(B, T)

    def visible(self, T: int, past: int, keep: Tensor | None, documents: Tensor | None) -> Tensor:
        """(B or 1, 1, T, S): who sees whom."""
        query, key = torch.arange(past, past + T)[:, None], torch.arange(past + T)[None]
        visible = self.causal(query, key)
        window = self.window()
        if window is not None:
            visible = visible & (key > query - window)
        visible = visible[None]
        if keep is not None:
            visible = self.hide_padding(visible, keep.bool(), query, key)
        if documents is not None:
            visible = visible & (documents[:, :, None] == documents[:, None])
        return visible[:, None]

    def causal(self, query: Tensor, key: Tensor) -> Tensor:
        return key <= query

    def window(self) -> int | None:
        return self.architecture.window

    def hide_padding(self, visible: Tensor, keep: Tensor, query: Tensor, key: Tensor) -> Tensor:
        # A padded query sees itself, so that no row of the softmax is empty.
        return visible & (keep[:, None] | (key == query))

    def attend(
        self,
        layer: Any,
        x: Tensor,
        positions: Tensor,
        visible: Tensor,
        cache: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q, k, v = (self.split(layer[name](x)) for name in ("q", "k", "v"))
        if self.architecture.qk_norm:
            q, k = layer["q_norm"](q), layer["k_norm"](k)
        if self.architecture.positions == "rope":
            q, k = self.rotate(q, positions), self.rotate(k, positions)
        if cache is not None:
            k, v = self.append(cache, k, v)
        scores = q @ self.repeat(k).transpose(-2, -1) * self.scale()
        weights = self.softmax(scores.masked_fill(~visible, -torch.inf))
        y = self.merge(self.drop(weights) @ self.repeat(v))
        return layer["out"](y), (k, v)

    def append(self, cache: tuple[Tensor, Tensor], k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat((cache[0], k), dim=2), torch.cat((cache[1], v), dim=2)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.architecture.head_dim)).transpose(1, 2)

    def merge(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(2)

    def repeat(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.architecture.n_heads // self.architecture.n_kv_heads, dim=1)

    def scale(self) -> float:
        return self.architecture.head_dim**-0.5

    def softmax(self, scores: Tensor) -> Tensor:
        return scores.softmax(dim=-1)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        D = self.architecture.head_dim
        frequencies = 100.0 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
        angles = self.angles(positions[:, None, :, None], frequencies)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        one, two = x.chunk(2, dim=-1)
        return torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1)

    def angles(self, positions: Tensor, frequencies: Tensor) -> Tensor:
        return positions * frequencies

    def mlp(self, layer: Any, x: Tensor) -> Tensor:
        up = layer["up"](x)
        match self.architecture.mlp:
            case "gelu":
                hidden = F.gelu(up)
            case "relu":
                hidden = F.relu(up)
            case _:
                hidden = F.silu(layer["gate"](x)) * up
        return layer["down"](hidden)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Of labels that are not shifted; 0 where none is to be predicted."""
        return self.reduce(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    def reduce(self, logits: Tensor, targets: Tensor) -> Tensor:
        total = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
        return total / (targets != -100).sum().clamp(min=1)


def spec_of(build: type[Model], architecture: Architecture, name: str) -> ModelSpec:
    """What a user who knows the model declares of it."""
    return ModelSpec(
        build=partial(build, architecture),
        name=name,
        inputs="tokens",
        width=VOCAB_SIZE,
        causal=True,
        max_length=MAX_LENGTH,
        masked=lambda model, ids, keep: model(ids, keep=keep),
        padding_sides=("right", "left"),
        packed=lambda model, ids, documents: model(ids, documents=documents),
        decode=_decode,
        labelled_loss=lambda model, ids, labels: model(ids, labels=labels).loss,
        window=architecture.window,
        tied=architecture.tied,
        positionless=False,
    )


def _decode(model: nn.Module, ids: Tensor, cache: Any) -> tuple[Any, Any]:
    output = model(ids, cache=cache)
    return output, output.cache
