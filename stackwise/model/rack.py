"""Rack: the whole language model, from token ids to logits.

Shapes: B batch, T positions, C model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stackwise.model.block import Block
from stackwise.model.cache import BlockCache, RackCache
from stackwise.model.embedding import BoundedEmbedding, TokenEmbedding
from stackwise.model.generate import generate as generate_tokens
from stackwise.model.generate import stream as stream_tokens
from stackwise.model.initialization import initialize_ends
from stackwise.model.layout import Layout
from stackwise.model.linear import Linear
from stackwise.model.norm import create_norm
from stackwise.model.stack import Stack
from stackwise.support.arguments import check_range, check_sizes, require

__all__ = ["Rack"]


class Rack(nn.Module):
    """Transformer model: token embedding, Stacks, final norm and head.

    The Stacks keep the weights they come with; embedding and head are initialised here so that the
    first loss is ln(vocab_size), as the last Block's `initialization` says.

    Args:
        stacks: at least one, of width `d_model`.
        vocab_size: V.
        d_model: C.
        tie_embeddings: the head is the embedding's own weight, counted and saved once.
        max_seq_len: the longest sequence that generation may reach; None: any.
        embedding_max_norm: see `BoundedEmbedding`; None: no bound.

    Attributes:
        mup_base_width: d_model of the base where the Rack is initialised by `mup`, else None.
        hf_origin: what config.json of the transformers model that the Rack came from says beyond the
            Rack; empty where it came from none. Saving writes it again.
    """

    padding_sides = ("right", "left")  # where a padded row computes as it does alone

    def __init__(
        self,
        stacks: Iterable[Stack],
        vocab_size: int,
        d_model: int,
        tie_embeddings: bool = True,
        max_seq_len: int | None = None,
        embedding_max_norm: float | None = None,
    ) -> None:
        super().__init__()
        self.stacks = nn.ModuleList(stacks)
        if not self.stacks:
            raise ValueError("stacks: got none; a Rack needs at least one Stack")
        check_sizes(vocab_size=vocab_size, d_model=d_model)
        if max_seq_len is not None:
            check_sizes(max_seq_len=max_seq_len)
        last = self.get_stack(-1).get_block(-1).config
        for stack in map(self.get_stack, range(len(self.stacks))):
            for i in range(stack.num_blocks):
                config = stack.get_block(i).config
                if config.d_model != d_model:
                    raise ValueError(
                        f"d_model: got {d_model}, but stack {stack.stack_id} has width {config.d_model}"
                    )
                require(
                    config.mup_base_width == last.mup_base_width,
                    f"mup_base_width of stack {stack.stack_id}",
                    config.mup_base_width,
                    f"{last.mup_base_width}, as in the last Block",
                )
        self.vocab_size, self.d_model, self.tie_embeddings = vocab_size, d_model, tie_embeddings
        self.max_seq_len = max_seq_len
        self.mup_base_width = last.mup_base_width
        self.hf_origin: dict[str, Any] = {}
        self.embedding: TokenEmbedding
        if embedding_max_norm is None:
            self.embedding = TokenEmbedding(vocab_size, d_model)
        else:
            self.embedding = BoundedEmbedding(vocab_size, d_model, embedding_max_norm)
        self.final_norm = create_norm(last.norm, d_model, last.norm_eps)
        self.lm_head = Linear(d_model, vocab_size, bias=False)
        if tie_embeddings:
            self.lm_head.weight = self.embedding.weight
        initialize_ends(self, last.initialization, last.mup_base_width)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: RackCache | None = None,
    ) -> Tensor:
        """Logits for every position.

        Args:
            input_ids: integer (B, T).
            attention_mask: bool or integer (B, T), nonzero at real tokens.
            document_ids: integer (B, T), equal within a document, for rows packed of several. A token
                sees its own document only, and positions start again at each.
            cache: of `new_cache`; the tokens follow those already in it, and are added to it.

        Returns:
            (B, T, V).

        Raises:
            ValueError: a mask of another shape or kind; a cache that is full, has documents, or was made for
                other Blocks than the Rack has now.
        """
        return self.head(self.hidden(input_ids, attention_mask, document_ids, cache))

    def hidden(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: RackCache | None = None,
    ) -> Tensor:
        """What `head` reads, (B, T, C). Arguments and errors as in `forward`."""
        x_BTC = self.embed(input_ids)
        if cache is None:
            return self.forward_from_stack(x_BTC, 0, None, attention_mask, document_ids)
        require(document_ids is None, "document_ids", "some", "None beside a cache")
        self.check_cache(cache)
        x_BTC = self.follow(x_BTC, cache.layout(x_BTC, attention_mask), cache.blocks)
        cache.advance(input_ids.shape[1])
        return x_BTC

    def follow(self, x_BTC: Tensor, layout: Layout, caches: Sequence[Sequence[BlockCache]]) -> Tensor:
        """Run all Stacks on the embeddings (B, T, C) of tokens that follow those in `caches`.

        Raises:
            ValueError: the Rack has other Stacks than when the caches were made.
        """
        self._check_numbers(caches)
        for stack, of_blocks in zip(self.stacks, caches, strict=True):
            x_BTC = stack(x_BTC, layout=layout, caches=of_blocks)
        return x_BTC

    def check_cache(self, cache: RackCache) -> None:
        """Refuse a cache that holds what other Blocks have computed.

        Raises:
            ValueError: the Rack has other Stacks, or other Blocks in them, than when the cache was made.
        """
        self._check_numbers(cache.blocks)
        if not cache.is_for(self._blocks()):
            raise ValueError(
                "cache: got one for Blocks of which some were exchanged; allowed: one of `new_cache` now"
            )

    def _check_numbers(self, caches: Sequence[Sequence[BlockCache]]) -> None:
        held = [len(of_blocks) for of_blocks in caches]
        wanted = [stack.num_blocks for stack in map(self.get_stack, range(len(self.stacks)))]
        if held != wanted:
            raise ValueError(
                f"cache: got one for Stacks of {held} Blocks; allowed: one of `new_cache` now, for {wanted}"
            )

    def _blocks(self) -> list[nn.Module]:
        return [block for i in range(len(self.stacks)) for block in self.get_stack(i).blocks]

    # Methods with a file of their own, where self is called `rack`.
    generate = generate_tokens
    stream = stream_tokens

    def new_cache(self, batch_size: int, capacity: int, dtype: torch.dtype | None = None) -> RackCache:
        """Room for `capacity` tokens in each of `batch_size` rows, taken at once.

        Args:
            batch_size: rows.
            capacity: tokens of prompt and continuation together.
            dtype: of keys and values; None: that of the weights.

        Raises:
            ValueError: a bidirectional Rack, whose earlier outputs depend on later tokens; a dtype that is
                not of floating-point numbers.
        """
        check_sizes(batch_size=batch_size, capacity=capacity)
        kept = dtype is None or dtype.is_floating_point
        require(kept, "dtype", dtype, "a floating-point dtype, or None for that of the weights")
        if not self.is_causal:
            raise ValueError("cache: a bidirectional Stack changes what it said with every later token")
        weight = self.embedding.weight
        blocks = [
            [
                stack.get_block(i).attention.new_cache(
                    batch_size, capacity, dtype or weight.dtype, weight.device
                )
                for i in range(stack.num_blocks)
            ]
            for stack in map(self.get_stack, range(len(self.stacks)))
        ]
        cache = RackCache(blocks, batch_size, capacity, weight.device)
        cache.bind(self._blocks())
        return cache

    def execution(self) -> dict[str, str]:
        """Which attention backends computed the last pass."""
        blocks = (m for m in self.modules() if isinstance(m, Block))
        return {"attention": ", ".join(sorted({block.attention.backend or "none yet" for block in blocks}))}

    def embed(self, input_ids: Tensor) -> Tensor:
        """Token ids (B, T) to the hidden states (B, T, C) that enter the first Stack."""
        if input_ids.ndim != 2:
            raise ValueError(f"input_ids: got shape {tuple(input_ids.shape)}; allowed: (batch, positions)")
        x_BTC: Tensor = self.embedding(input_ids)
        return x_BTC

    def forward_from_stack(
        self,
        x_BTC: Tensor,
        start: int,
        end: int | None = None,
        attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """Run Stacks `start` to `end` (exclusive; None: the last) on hidden states.

        (B, T, C) -> (B, T, C). `head` turns the result of the last Stack into logits:
        `rack(ids) == rack.head(rack.forward_from_stack(rack.embed(ids), 0))`.
        """
        check_range("stack", start, end, len(self.stacks))
        layout = Layout(x_BTC, attention_mask, document_ids)
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

    @classmethod
    def from_pretrained(cls, source: str | PathLike[str] | nn.Module, **options: Any) -> Rack:
        """The Rack in a folder of weights, or one that computes what a live transformers model does.

        Arguments and errors as in `stackwise.model.interop.load_pretrained`.
        """
        from stackwise.model.interop import load_pretrained

        return load_pretrained(source, **options)

    def save_pretrained(self, path: str | PathLike[str], format: str = "hf", **options: Any) -> Path:  # noqa: A002
        """Write a folder that transformers ("hf") or `from_pretrained` ("stackwise", any Rack) loads.

        Arguments and errors as in `stackwise.model.interop.save_pretrained`.
        """
        from stackwise.model.interop import save_pretrained

        return save_pretrained(self, path, format, **options)

    def get_parameter_count(self) -> int:
        """Number of parameters; a tied weight counts once."""
        return sum(p.numel() for p in self.parameters())

    def get_trainable_parameter_count(self) -> int:
        """Number of parameters that train; a tied weight counts once."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad)
