"""Rack: the whole language model, from token ids to logits.

Shapes: B batch, T positions, C model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from stackwise.argument import check_range, check_sizes
from stackwise.model.initialization import initialize_embedding, initialize_head
from stackwise.model.layout import Layout
from stackwise.model.stack import Stack

__all__ = ["Rack"]


class Rack(nn.Module):
    """Token embedding, Stacks, final norm and head.

    The Stacks keep the weights they come with; embedding and head are initialised here so that the
    first loss is ln(vocab_size).

    Args:
        stacks: at least one, of width `d_model`.
        vocab_size: V.
        d_model: C.
        tie_embeddings: the head is the embedding's own weight, counted and saved once.
    """

    def __init__(
        self, stacks: Iterable[Stack], vocab_size: int, d_model: int, tie_embeddings: bool = True
    ) -> None:
        super().__init__()
        self.stacks = nn.ModuleList(stacks)
        if not self.stacks:
            raise ValueError("stacks: got none; a Rack needs at least one Stack")
        check_sizes(vocab_size=vocab_size, d_model=d_model)
        for stack in map(self.get_stack, range(len(self.stacks))):
            for i in range(stack.num_blocks):
                width = stack.get_block(i).attention.out.out_features
                if width != d_model:
                    raise ValueError(f"d_model: got {d_model}, but stack {stack.stack_id} has width {width}")
        self.vocab_size, self.d_model, self.tie_embeddings = vocab_size, d_model, tie_embeddings
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.final_norm = _like(self.get_stack(-1).get_block(-1).attention_norm)
        self.lm_head = nn.Linear(d_model, vocab_size, bias=False)
        initialize_embedding(self.embedding, tied=tie_embeddings)
        if tie_embeddings:
            self.lm_head.weight = self.embedding.weight
        else:
            initialize_head(self.lm_head)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Logits for every position.

        Args:
            input_ids: integer (B, T).
            attention_mask: bool or integer (B, T), nonzero at real tokens.

        Returns:
            (B, T, V).
        """
        return self.head(self.forward_from_stack(self.embed(input_ids), 0, None, attention_mask))

    def embed(self, input_ids: Tensor) -> Tensor:
        """Token ids (B, T) to the hidden states (B, T, C) that enter the first Stack."""
        if input_ids.ndim != 2:
            raise ValueError(f"input_ids: got shape {tuple(input_ids.shape)}; allowed: (batch, positions)")
        x_BTC: Tensor = self.embedding(input_ids)
        return x_BTC

    def forward_from_stack(
        self, x_BTC: Tensor, start: int, end: int | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        """Run Stacks `start` to `end` (exclusive; None: the last) on hidden states.

        (B, T, C) -> (B, T, C). `head` turns the result of the last Stack into logits:
        `rack(ids) == rack.head(rack.forward_from_stack(rack.embed(ids), 0))`.
        """
        check_range("stack", start, end, len(self.stacks))
        layout = Layout(x_BTC, attention_mask)
        for stack in self.stacks[start:end]:
            x_BTC = stack(x_BTC, layout=layout)
        return x_BTC

    def head(self, x_BTC: Tensor) -> Tensor:
        """Final norm and head: hidden states (B, T, C) to logits (B, T, V)."""
        logits_BTV: Tensor = self.lm_head(self.final_norm(x_BTC))
        return logits_BTV

    @property
    def is_causal(self) -> bool:
        """Whether no logit depends on a later token: every Stack is causal."""
        return all(self.get_stack(i).is_causal for i in range(len(self.stacks)))

    def get_stack(self, index: int) -> Stack:
        """The Stack at `index`; IndexError where there is none."""
        stack = self.stacks[index]
        assert isinstance(stack, Stack)
        return stack

    def get_embedding_layer(self) -> nn.Embedding:
        """The token embedding."""
        return self.embedding

    def get_lm_head(self) -> nn.Linear:
        """The head; its weight is the embedding's own where they are tied."""
        return self.lm_head

    def freeze(self) -> None:
        """Stop training every parameter."""
        self.requires_grad_(False)

    def unfreeze(self) -> None:
        """Train every parameter again; frozen up-projections stay frozen."""
        self.requires_grad_(True)
        for i in range(len(self.stacks)):
            self.get_stack(i).unfreeze()

    def get_parameter_count(self) -> int:
        """Number of parameters; a tied weight counts once."""
        return sum(p.numel() for p in self.parameters())

    def get_trainable_parameter_count(self) -> int:
        """Number of parameters that train; a tied weight counts once."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad)


def _like(norm: nn.Module) -> nn.Module:
    if isinstance(norm, nn.RMSNorm):
        return nn.RMSNorm(norm.normalized_shape, eps=norm.eps)
    assert isinstance(norm, nn.LayerNorm)
    return nn.LayerNorm(norm.normalized_shape, eps=norm.eps, bias=norm.bias is not None)
