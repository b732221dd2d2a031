"""keras-io#1964 (keras-team/keras-io): cross-attention masks the source with the padding of the target.

The mask of the decoder, which also holds its causal mask, is passed to the attention to the encoder output.
Padded source tokens are visible, and a target token sees no source token after its own position.
"""

from collections.abc import Callable

import torch
from torch import nn

from stackwise import ModelSpec


class MultiHeadAttention(nn.Module):
    """Attention with a mask that is True for visible keys."""

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value, self.out = (nn.Linear(embed_dim, embed_dim) for _ in range(4))

    def forward(self, query: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """`attention_mask` is (batch or 1, 1 or queries, keys)."""
        q, k, v = (
            proj(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for proj, x in ((self.query, query), (self.key, value), (self.value, value))
        )
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~attention_mask[:, None], -1e9)
        return self.out((scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2))


class PositionalEmbedding(nn.Module):
    """Sum of the embeddings of token and position."""

    def __init__(self, sequence_length: int, vocab_size: int, embed_dim: int) -> None:
        super().__init__()
        self.token_embeddings = nn.Embedding(vocab_size, embed_dim)
        self.position_embeddings = nn.Embedding(sequence_length, embed_dim)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return (batch, time, embed_dim)."""
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        return self.token_embeddings(inputs) + self.position_embeddings(positions)


def dense_proj(embed_dim: int) -> nn.Module:
    """Return the feed-forward layer."""
    return nn.Sequential(nn.Linear(embed_dim, 2 * embed_dim), nn.ReLU(), nn.Linear(2 * embed_dim, embed_dim))


class TransformerEncoder(nn.Module):
    """Post-norm encoder layer."""

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.attention, self.dense_proj = MultiHeadAttention(embed_dim, num_heads), dense_proj(embed_dim)
        self.layernorm_1, self.layernorm_2 = nn.LayerNorm(embed_dim), nn.LayerNorm(embed_dim)

    def forward(self, inputs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """`mask` is True for tokens, (batch, time)."""
        x = self.layernorm_1(inputs + self.attention(inputs, inputs, mask[:, None]))
        return self.layernorm_2(x + self.dense_proj(x))


class TransformerDecoder(nn.Module):
    """Post-norm decoder layer."""

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.attention_1 = MultiHeadAttention(embed_dim, num_heads)
        self.attention_2 = MultiHeadAttention(embed_dim, num_heads)
        self.dense_proj = dense_proj(embed_dim)
        self.layernorm_1, self.layernorm_2, self.layernorm_3 = (nn.LayerNorm(embed_dim) for _ in range(3))

    def forward(
        self, inputs: torch.Tensor, encoder_outputs: torch.Tensor, causal: torch.Tensor, padding: torch.Tensor
    ) -> torch.Tensor:
        """`causal` is the mask of the self-attention, `padding` that of the cross-attention."""
        x = self.layernorm_1(inputs + self.attention_1(inputs, inputs, causal))
        x = self.layernorm_2(x + self.attention_2(x, encoder_outputs, padding))
        return self.layernorm_3(x + self.dense_proj(x))


class Transformer(nn.Module):
    """Translates a source; 0 is padding, and both sequences are padded to one length."""

    def __init__(self, *, source_mask: bool, vocab_size: int = 50, embed_dim: int = 32) -> None:
        super().__init__()
        self.source_mask = source_mask
        self.encoder_embedding = PositionalEmbedding(64, vocab_size, embed_dim)
        self.decoder_embedding = PositionalEmbedding(64, vocab_size, embed_dim)
        self.encoder, self.decoder = TransformerEncoder(embed_dim, 4), TransformerDecoder(embed_dim, 4)
        self.dense = nn.Linear(embed_dim, vocab_size)

    def forward(self, encoder_inputs: torch.Tensor, decoder_inputs: torch.Tensor) -> torch.Tensor:
        """Return logits (batch, time of the target, vocabulary)."""
        source, target = encoder_inputs != 0, decoder_inputs != 0
        length = decoder_inputs.shape[1]
        causal = torch.ones(1, length, length, dtype=torch.bool, device=target.device).tril()
        encoder_outputs = self.encoder(self.encoder_embedding(encoder_inputs), source)
        padding = source[:, None] if self.source_mask else target[:, None] & causal
        return self.dense(
            self.decoder(self.decoder_embedding(decoder_inputs), encoder_outputs, causal, padding)
        )


def buggy() -> nn.Module:
    """Cross-attention with the mask of the target."""
    return Transformer(source_mask=False)


def healthy() -> nn.Module:
    """Cross-attention with the mask of the source."""
    return Transformer(source_mask=True)


def _forward(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Translate one source of six tokens, padded to the length of the targets, into each of them."""
    index = torch.arange(tokens.shape[1], device=tokens.device)
    source = (index * 7 % 49 + 1) * (index < 6)
    return model(source.expand_as(tokens), tokens)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """The decoder is causal, and its padding is 0."""
    return ModelSpec.of(
        make,
        inputs="tokens",
        width=50,
        causal=True,
        max_length=64,
        forward=_forward,
        make_batch=lambda rows, length, generator: torch.randint(1, 50, (rows, length), generator=generator),
        masked=lambda model, tokens, keep: _forward(model, tokens * keep),
    )


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Change of the logits if the embedding of source padding changes; 0 is right."""
    model = model.double().eval()
    source = torch.tensor([[5, 17, 0, 0, 0], [8, 8, 41, 33, 0]])
    target = torch.tensor([[4, 12, 30, 31, 7], [4, 6, 9, 22, 13]])
    before = model(source, target)
    model.encoder_embedding.token_embeddings.weight[0] += torch.arange(32.0) / 16
    return model(source, target) - before
