"""Rack: complete language model, from token ids to logits.

Shapes: B batch, T positions, C model width, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stackwise.model.block import Block, Part
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


class Rack(Part):
    """Transformer model: token embedding, Stacks, final norm and head.

    The weights of the Stacks are unchanged. Embedding and head are initialised for a first loss of
    ln(vocab_size), by the `initialization` of the last Block.

    Args:
        stacks: at least one, of width `d_model`.
        vocab_size: V.
        d_model: C.
        tie_embeddings: the head shares the weight of the embedding, which is counted and saved once.
        max_seq_len: maximum length of a sequence in generation; None: no maximum.
        embedding_max_norm: see `BoundedEmbedding`; None: no bound.

    Attributes:
        mup_base_width: d_model of the base if the Rack is initialised by `mup`, otherwise None.
        hf_origin: keys of the original config.json of a transformers model that do not affect the Rack;
            empty for other Racks. Saving writes them.
    """

    padding_sides = ("right", "left")  # sides on which padding does not change the result of a row

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
        for stack in self.get_stacks():
            for config in (block.config for block in stack.get_blocks()):
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
        """Return the logits of every position.

        Args:
            input_ids: integer (B, T).
            attention_mask: bool or integer (B, T), nonzero at real tokens.
            document_ids: integer (B, T), equal within a document, for rows with several packed documents. A
                token sees only its own document, and positions restart in each.
            cache: result of `new_cache`; the tokens follow the cached ones, and are added to the cache.

        Returns:
            (B, T, V).

        Raises:
            ValueError: a mask of another shape or dtype; a cache that is full, is combined with documents, or
                was created for other Blocks than the current ones.
        """
        return self.head(self.hidden(input_ids, attention_mask, document_ids, cache))

    def hidden(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: RackCache | None = None,
    ) -> Tensor:
        """Return the input of `head`, (B, T, C). Arguments and errors as in `forward`."""
        x_BTC = self.embed(input_ids)
        if cache is None:
            return self.forward_from_stack(x_BTC, 0, None, attention_mask, document_ids)
        require(document_ids is None, "document_ids", "some", "None beside a cache")
        self.check_cache(cache)
        x_BTC = self.follow(x_BTC, cache.layout(x_BTC, attention_mask), cache.blocks)
        cache.advance(input_ids.shape[1])
        return x_BTC

    def follow(self, x_BTC: Tensor, layout: Layout, caches: Sequence[Sequence[BlockCache]]) -> Tensor:
        """Run all Stacks on the embeddings (B, T, C) of tokens that follow the ones in `caches`.

        Raises:
            ValueError: the numbers of Stacks or Blocks differ from the caches.
        """
        self._check_numbers(caches)
        for stack, of_blocks in zip(self.stacks, caches, strict=True):
            x_BTC = stack(x_BTC, layout=layout, caches=of_blocks)
        return x_BTC

    def check_cache(self, cache: RackCache) -> None:
        """Raise if a cache contains results of other Blocks.

        Raises:
            ValueError: Stacks, or Blocks in them, have changed since the cache was created.
        """
        self._check_numbers(cache.blocks)
        if not cache.is_for(self.get_blocks()):
            raise ValueError(
                "cache: got one for Blocks of which some were exchanged; allowed: one of `new_cache` now"
            )

    def _check_numbers(self, caches: Sequence[Sequence[BlockCache]]) -> None:
        held = [len(of_blocks) for of_blocks in caches]
        wanted = self.blocks_per_stack
        if held != wanted:
            raise ValueError(
                f"cache: got one for Stacks of {held} Blocks; allowed: one of `new_cache` now, for {wanted}"
            )

    # Methods from another file, in which self is named `rack`.
    generate = generate_tokens
    stream = stream_tokens

    def new_cache(self, batch_size: int, capacity: int, dtype: torch.dtype | None = None) -> RackCache:
        """Return a cache with `capacity` tokens for each of `batch_size` rows. Memory is allocated at once.

        Args:
            batch_size: number of rows.
            capacity: number of tokens, prompt and continuation together.
            dtype: dtype of keys and values; None: dtype of the weights.

        Raises:
            ValueError: a bidirectional Rack, in which earlier outputs depend on later tokens; a dtype that is
                not a floating-point dtype.
        """
        check_sizes(batch_size=batch_size, capacity=capacity)
        kept = dtype is None or dtype.is_floating_point
        require(kept, "dtype", dtype, "a floating-point dtype, or None for that of the weights")
        if not self.is_causal:
            raise ValueError("cache: a bidirectional Stack changes what it said with every later token")
        weight = self.embedding.weight
        sizes = (batch_size, capacity, dtype or weight.dtype, weight.device)
        blocks = [
            [block.attention.new_cache(*sizes) for block in stack.get_blocks()] for stack in self.get_stacks()
        ]
        cache = RackCache(blocks, batch_size, capacity, weight.device)
        cache.bind(self.get_blocks())
        return cache

    def execution(self) -> dict[str, str]:
        """Return the attention backends of the last forward pass."""
        used = {block.attention.backend or "none yet" for block in self.get_blocks()}
        return {"attention": ", ".join(sorted(used))}

    def embed(self, input_ids: Tensor) -> Tensor:
        """Token ids (B, T) to the input (B, T, C) of the first Stack."""
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

        (B, T, C) -> (B, T, C). `head` maps the output of the last Stack to logits:
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
        """True if no logit depends on a later token: every Stack is causal."""
        return all(stack.is_causal for stack in self.get_stacks())

    def get_stack(self, index: int) -> Stack:
        """Return the Stack at `index`. Raise IndexError if it does not exist."""
        stack = self.stacks[index]
        assert isinstance(stack, Stack)
        return stack

    def get_stacks(self) -> list[Stack]:
        """Return all Stacks, from the first to the last."""
        return [self.get_stack(i) for i in range(len(self.stacks))]

    def get_blocks(self) -> list[Block]:
        """Return the Blocks of all Stacks, from the first to the last."""
        return [block for stack in self.get_stacks() for block in stack.get_blocks()]

    @property
    def blocks_per_stack(self) -> list[int]:
        """Number of Blocks of each Stack."""
        return [stack.num_blocks for stack in self.get_stacks()]

    def unfreeze(self) -> None:
        """Unfreeze every parameter, except up-projections that the configuration freezes."""
        self.requires_grad_(True)
        for stack in self.get_stacks():
            stack.unfreeze()

    @classmethod
    def from_pretrained(cls, source: str | PathLike[str] | nn.Module, **options: Any) -> Rack:
        """Return a Rack from a folder of weights, or converted from a loaded transformers model.

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
