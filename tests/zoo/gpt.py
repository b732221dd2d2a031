"""GPT: a sound transformer written out by hand, of which a mutant overrides the one method that it breaks.

Shapes: B batch, T queries, S keys, C model width, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise.subject.spec import ModelSpec

__all__ = ["GPT", "Encoder", "Placed", "Windowed", "encoder", "gpt", "placed", "spec_of", "windowed"]


class GPT(nn.Module):
    """Grouped queries, rotary positions, RMSNorm, SwiGLU, padding, documents, cache, window, own loss."""

    vocab_size, width, n_heads, n_kv_heads, n_layers, d_ff = 61, 32, 4, 2, 2, 64
    window: int | None = None
    tied = True
    dropout = 0.1

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = self.width // self.n_heads
        self.embedding = nn.Embedding(self.vocab_size, self.width)
        self.layers = nn.ModuleList(self.layer() for _ in range(self.n_layers))
        self.norm = nn.RMSNorm(self.width)
        self.head = nn.Linear(self.width, self.vocab_size, bias=False)
        self.initialize()
        self.tie()

    def layer(self) -> nn.Module:
        kv_width = self.n_kv_heads * self.head_dim
        return nn.ModuleDict(
            {
                "attention_norm": nn.RMSNorm(self.width),
                "q": nn.Linear(self.width, self.width, bias=False),
                "k": nn.Linear(self.width, kv_width, bias=False),
                "v": nn.Linear(self.width, kv_width, bias=False),
                "out": nn.Linear(self.width, self.width, bias=False),
                "mlp_norm": nn.RMSNorm(self.width),
                "gate": nn.Linear(self.width, self.d_ff, bias=False),
                "up": nn.Linear(self.width, self.d_ff, bias=False),
                "down": nn.Linear(self.d_ff, self.width, bias=False),
            }
        )

    def initialize(self) -> None:
        for name, p in self.named_parameters():
            if p.ndim == 2:
                std = 0.02 if "embedding" in name or name.startswith("head") else self.width**-0.5
                if name.endswith(("out.weight", "down.weight")):
                    std /= math.sqrt(2 * self.n_layers)
                nn.init.normal_(p, std=std)

    def tie(self) -> None:
        if self.tied:
            self.head.weight = self.embedding.weight

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        cache: list[tuple[Tensor, Tensor]] | None = None,
        documents: Tensor | None = None,
        use_cache: bool = False,
    ) -> Any:
        past = 0 if cache is None else cache[0][0].shape[2]
        positions = self.positions(input_ids, past, attention_mask, documents)
        visible = self.visible(input_ids.shape[1], past, attention_mask, documents)
        x, kept = self.embed(input_ids), []
        for index, layer in enumerate(self.layers):
            y, now = self.attend(
                layer, layer["attention_norm"](x), positions, visible, cache[index] if cache else None
            )
            x = x + self.drop(y)
            x = x + self.drop(self.mlp(layer, layer["mlp_norm"](x)))
            kept.append(now)
        logits = self.head(self.norm(x))
        loss = None if labels is None else self.loss(logits, labels)
        return SimpleNamespace(logits=logits, loss=loss, cache=kept if use_cache else None)

    def embed(self, input_ids: Tensor) -> Tensor:
        return self.embedding(input_ids)

    def drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)

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
            return (keep.long().cumsum(dim=1) - 1).clamp(min=0)[:, -T:]
        return torch.arange(past, past + T).expand(B, T)

    def visible(self, T: int, past: int, keep: Tensor | None, documents: Tensor | None) -> Tensor:
        """(B or 1, 1, T, S): who sees whom."""
        query, key = torch.arange(past, past + T)[:, None], torch.arange(past + T)[None]
        visible = key <= query
        if self.window is not None:
            visible = visible & (key > query - self.window)
        visible = visible[None]
        if keep is not None:
            # A padded query sees itself, so that no row of the softmax is empty.
            visible = visible & (keep.bool()[:, None] | (key == query))
        if documents is not None:
            visible = visible & (documents[:, :, None] == documents[:, None])
        return visible[:, None]

    def attend(
        self,
        layer: nn.Module,
        x: Tensor,
        positions: Tensor,
        visible: Tensor,
        cache: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q = self.rotate(self.split(layer["q"](x)), positions)
        k = self.rotate(self.split(layer["k"](x)), positions)
        v = self.split(layer["v"](x))
        if cache is not None:
            k, v = torch.cat((cache[0], k), dim=2), torch.cat((cache[1], v), dim=2)
        scores = q @ self.repeat(k).transpose(-2, -1) * self.scale()
        weights = self.softmax(scores.masked_fill(~visible, -torch.inf))
        y = self.merge(self.drop(weights) @ self.repeat(v))
        return layer["out"](y), (k, v)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def merge(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(2)

    def repeat(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.n_heads // self.n_kv_heads, dim=1)

    def scale(self) -> float:
        return self.head_dim**-0.5

    def softmax(self, scores: Tensor) -> Tensor:
        return scores.softmax(dim=-1)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        frequencies = 10000.0 ** (-torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim)
        angles = positions[:, None, :, None] * frequencies
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        one, two = x.chunk(2, dim=-1)
        return torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1)

    def mlp(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer["down"](F.silu(layer["gate"](x)) * layer["up"](x))

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Of labels that are not shifted; 0 where none is to be predicted."""
        targets = labels[:, 1:].flatten()
        total = F.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), targets, ignore_index=-100, reduction="sum"
        )
        return total / (targets != -100).sum().clamp(min=1)


class Windowed(GPT):
    """Each layer sees five positions, its own included."""

    window = 5


class Placed(GPT):
    """Learned positions, added to the embedding, in place of rotations."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(64, self.width)
        nn.init.normal_(self.places.weight, std=0.02)

    def positions(self, *arguments: Any) -> Tensor:
        self.at = self.place(*arguments)
        return self.at

    def place(self, input_ids: Tensor, past: int, keep: Tensor | None, documents: Tensor | None) -> Tensor:
        return super().positions(input_ids, past, keep, documents)

    def embed(self, input_ids: Tensor) -> Tensor:
        return super().embed(input_ids) + self.places(self.at)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        return x


class Encoder(GPT):
    """Bidirectional: each layer sees two positions before its own and two after it."""

    before, after = 2, 2

    def visible(self, T: int, past: int, keep: Tensor | None, documents: Tensor | None) -> Tensor:
        query, key = torch.arange(T)[:, None], torch.arange(T)[None]
        visible = ((query - key <= self.before) & (key - query <= self.after))[None]
        if keep is not None:
            visible = visible & (keep.bool()[:, None] | (key == query))
        if documents is not None:
            visible = visible & (documents[:, :, None] == documents[:, None])
        return visible[:, None]


def spec_of(build: type[GPT] = GPT, **declared: Any) -> ModelSpec:
    """Everything that can be asked of a GPT."""
    attributes: dict[str, Any] = {
        "build": build,
        "name": build.__name__,
        "inputs": "tokens",
        "width": build.vocab_size,
        "causal": True,
        "masked": lambda model, ids, keep: model(ids, attention_mask=keep),
        "padding_sides": ("right", "left"),
        "packed": lambda model, ids, documents: model(ids, documents=documents),
        "decode": _decode,
        "labelled_loss": lambda model, ids, labels: model(ids, labels=labels).loss,
        "window": build.window,
        "tied": build.tied,
    }
    return ModelSpec(**(attributes | declared))


def _decode(model: nn.Module, ids: Tensor, cache: Any, keep: Tensor | None = None) -> tuple[Any, Any]:
    """`keep` (B, S) is of all tokens so far."""
    output = model(ids, attention_mask=keep, cache=cache, use_cache=True)
    return output, output.cache


def gpt() -> ModelSpec:
    """The clean twin."""
    return spec_of()


def windowed() -> ModelSpec:
    """The clean twin with a sliding window."""
    return spec_of(Windowed)


def placed() -> ModelSpec:
    """The clean twin with learned positions."""
    return spec_of(Placed, max_length=64)


def encoder(build: type[GPT] = Encoder) -> ModelSpec:
    """The clean twin that sees both sides."""
    return spec_of(build, causal=False, decode=None, labelled_loss=None, window=(2, 2))
