"""Encoder-decoder: a model that is called as its decoder, while the encoder reads a fixed text.

Shapes: B batch, T positions of the decoder, S positions of the encoder, V vocabulary, C width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise.subject.call_form import attempt, can_generate, forward_parameters

__all__ = ["Decoder", "is_encoder_decoder"]

_SOURCE_LENGTH = 6


def is_encoder_decoder(model: nn.Module) -> bool:
    """Return True if a model generates text from the ids of an encoder and of a decoder, such as T5."""
    try:
        names = forward_parameters(model)
    except (TypeError, ValueError):  # no signature
        return False
    takes_both = {"input_ids", "decoder_input_ids"} <= names.keys()
    return takes_both and can_generate(model) is True and _vocabulary(model) is not None


def _vocabulary(model: nn.Module) -> int | None:
    """Return the number of ids of the encoder. None: its embedding is unknown."""
    get: Any = getattr(model, "get_input_embeddings", None)
    embedding = None if get is None else attempt(get)
    return getattr(embedding, "num_embeddings", None)


class Decoder(nn.Module):
    """Encoder-decoder of transformers, called like a causal language model.

    Args:
        model: an encoder-decoder.

    Attributes:
        model: this model.
        config: its configuration.
        source: ids that the encoder reads for each row, (1, S).
        source_mask: mask of these ids, (1, S). None: it is not passed.
    """

    is_causal = True
    source: Tensor
    source_mask: Tensor | None = None

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.config = model.config
        generator = torch.Generator().manual_seed(0)
        n_ids = _vocabulary(model)
        assert n_ids is not None
        ids = torch.randint(n_ids, (1, _SOURCE_LENGTH), generator=generator)
        padding = getattr(model.config, "pad_token_id", None)
        ids = torch.where(ids == (-1 if padding is None else padding), (ids + 1) % n_ids, ids)
        self.register_buffer("source", ids, persistent=False)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> Any:
        """Return the output of the model, with logits (B, T, V).

        Args:
            input_ids: ids of the decoder, (B, T).
            attention_mask: mask of these ids, and of those in the cache.
            inputs_embeds: vectors of the decoder in place of ids, (B, T, C).
            past_key_values: cache of the model.
            use_cache: return the cache.
            labels: ids that are not shifted, (B, T). The model takes the target of each output, so they are
                shifted here.
            output_hidden_states: return all hidden states.
            output_attentions: return attention weights.
        """
        given = inputs_embeds if input_ids is None else input_ids
        assert given is not None
        optional = {
            "decoder_input_ids": input_ids,
            "decoder_inputs_embeds": inputs_embeds,
            "decoder_attention_mask": attention_mask,
            "past_key_values": past_key_values,
            "use_cache": use_cache,
            "labels": None if labels is None else F.pad(labels[:, 1:], (0, 1), value=-100),
            "output_hidden_states": output_hidden_states,
            "output_attentions": output_attentions,
        }
        for name, ids in (("input_ids", self.source), ("attention_mask", self.source_mask)):
            optional[name] = None if ids is None else ids.expand(len(given), -1)
        return self.model(**{name: value for name, value in optional.items() if value is not None})

    def can_generate(self) -> bool:
        """Return True: the decoder is causal."""
        return True

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding of the decoder, or that of the model if both share it."""
        decoder: Any = attempt(getattr(self.model, "get_decoder", lambda: None))
        get: Any = getattr(decoder, "get_input_embeddings", None)
        module: nn.Module | None = None if get is None else attempt(get)
        shared: nn.Module = self.model.get_input_embeddings()
        return shared if module is None else module

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the head of the model."""
        module: nn.Module | None = self.model.get_output_embeddings()
        return module

    def gradient_checkpointing_enable(self) -> None:
        """Switch recomputation on."""
        self.model.gradient_checkpointing_enable()

    def set_attn_implementation(self, name: str) -> None:
        """Choose the implementation of attention."""
        self.model.set_attn_implementation(name)
