"""mlx-examples#591 (ml-explore/mlx-examples): T5 scales its logits if the head is not tied.

The original T5 divides the output of the decoder by the root of its width if the head is the embedding. The
condition is the wrong way round. A tied model then has logits that are sqrt(d_model) times too large.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import Facts, ModelSpec

NUM_BUCKETS, MAX_DISTANCE, HEADS, D_MODEL, D_FF = 16, 32, 4, 32, 64


def relative_position_bucket(relative_position: Tensor, bidirectional: bool) -> Tensor:
    """Return the bucket of key position minus query position."""
    buckets, n = NUM_BUCKETS, -relative_position
    offset = torch.zeros_like(n)
    if bidirectional:
        buckets //= 2
        offset, n = (n < 0).long() * buckets, n.abs()
    else:
        n = n.clamp(min=0)
    exact = buckets // 2
    large = (n.clamp(min=1) / exact).log() / math.log(MAX_DISTANCE / exact) * (buckets - exact)
    return offset + torch.where(n < exact, n, (exact + large.long()).clamp(max=buckets - 1))


class RelativePositionBias(nn.Module):
    """Bias of each head for each bucket."""

    def __init__(self, bidirectional: bool) -> None:
        super().__init__()
        self.bidirectional, self.embeddings = bidirectional, nn.Embedding(NUM_BUCKETS, HEADS)
        nn.init.normal_(self.embeddings.weight, std=D_MODEL**-0.5)

    def forward(self, length: int) -> Tensor:
        """Return (heads, length, length)."""
        t = torch.arange(length, device=self.embeddings.weight.device)
        buckets = relative_position_bucket(t - t[:, None], self.bidirectional)
        return self.embeddings(buckets).permute(2, 0, 1)


class MultiHeadAttention(nn.Module):
    """Attention without a scale, as its initialisation contains it."""

    def __init__(self) -> None:
        super().__init__()
        self.query_proj, self.key_proj, self.value_proj, self.out_proj = (
            nn.Linear(D_MODEL, D_MODEL, bias=False) for _ in range(4)
        )
        for proj in (self.key_proj, self.value_proj, self.out_proj):
            nn.init.normal_(proj.weight, std=D_MODEL**-0.5)
        nn.init.normal_(self.query_proj.weight, std=(D_MODEL * (D_MODEL // HEADS)) ** -0.5)

    def forward(self, queries: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor:
        """Return (batch, queries, d_model). `mask` is added to the scores."""
        q = self.query_proj(queries).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = (p(keys).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.key_proj, self.value_proj))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)
        return self.out_proj(y.transpose(1, 2).flatten(2))


class DenseActivation(nn.Module):
    """Feed-forward network with ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.wi, self.wo = nn.Linear(D_MODEL, D_FF, bias=False), nn.Linear(D_FF, D_MODEL, bias=False)
        nn.init.normal_(self.wi.weight, std=D_MODEL**-0.5)
        nn.init.normal_(self.wo.weight, std=D_FF**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the network to the last dimension."""
        return self.wo(F.relu(self.wi(x)))


class TransformerEncoderLayer(nn.Module):
    """Attention and feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.dense = MultiHeadAttention(), DenseActivation()
        self.ln1, self.ln2 = nn.RMSNorm(D_MODEL, eps=1e-6), nn.RMSNorm(D_MODEL, eps=1e-6)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Apply the layer to (batch, time, d_model)."""
        y = self.ln1(x)
        x = x + self.attention(y, y, mask)
        return x + self.dense(self.ln2(x))


class TransformerDecoderLayer(nn.Module):
    """Causal attention, attention to the encoder, and feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attention, self.cross_attention = MultiHeadAttention(), MultiHeadAttention()
        self.dense = DenseActivation()
        self.ln1, self.ln2, self.ln3 = (nn.RMSNorm(D_MODEL, eps=1e-6) for _ in range(3))

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        """Apply the layer to (batch, time, d_model)."""
        y = self.ln1(x)
        x = x + self.self_attention(y, y, mask)
        x = x + self.cross_attention(self.ln2(x), memory, None)
        return x + self.dense(self.ln3(x))


class T5(nn.Module):
    """Encoder and decoder with one embedding."""

    def __init__(
        self, *, scale_if_tied: bool, tie_word_embeddings: bool = True, vocab_size: int = 50
    ) -> None:
        super().__init__()
        self.scale_if_tied, self.tie_word_embeddings = scale_if_tied, tie_word_embeddings
        self.wte = nn.Embedding(vocab_size, D_MODEL)
        self.encoder_bias, self.decoder_bias = RelativePositionBias(True), RelativePositionBias(False)
        self.encoder = nn.ModuleList(TransformerEncoderLayer() for _ in range(2))
        self.decoder = nn.ModuleList(TransformerDecoderLayer() for _ in range(2))
        self.encoder_ln, self.decoder_ln = nn.RMSNorm(D_MODEL, eps=1e-6), nn.RMSNorm(D_MODEL, eps=1e-6)
        self.lm_head = None if tie_word_embeddings else nn.Linear(D_MODEL, vocab_size, bias=False)

    def encode(self, inputs: Tensor) -> Tensor:
        """Return the states of the encoder."""
        x, bias = self.wte(inputs), self.encoder_bias(inputs.shape[1])
        for layer in self.encoder:
            x = layer(x, bias)
        return self.encoder_ln(x)

    def hidden(self, inputs: Tensor, memory: Tensor) -> Tensor:
        """Return the states of the decoder."""
        t = inputs.shape[1]
        future = torch.ones(t, t, dtype=torch.bool, device=inputs.device).triu(1)
        x, bias = self.wte(inputs), self.decoder_bias(t).masked_fill(future, -torch.inf)
        for layer in self.decoder:
            x = layer(x, memory, bias)
        return self.decoder_ln(x)

    def decode(self, inputs: Tensor, memory: Tensor) -> Tensor:
        """Return logits."""
        y = self.hidden(inputs, memory)
        if self.tie_word_embeddings == self.scale_if_tied:
            y = y * D_MODEL**-0.5
        return F.linear(y, self.wte.weight) if self.lm_head is None else self.lm_head(y)

    def forward(self, inputs: Tensor, decoder_inputs: Tensor) -> Tensor:
        """Return logits of the decoder."""
        return self.decode(decoder_inputs, self.encode(inputs))


def buggy() -> nn.Module:
    """Scale if the head is not tied."""
    return T5(scale_if_tied=False)


def healthy() -> nn.Module:
    """Scale if the head is tied."""
    return T5(scale_if_tied=True)


def _forward(model: nn.Module, ids: Tensor) -> Tensor:
    return model(torch.arange(3, 10, device=ids.device).expand(len(ids), -1), ids)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State a tied decoder with a fixed source, and the constants of T5."""
    facts = Facts(
        attention_scale=1.0, relative_buckets=(NUM_BUCKETS, MAX_DISTANCE), logit_scale=D_MODEL**-0.5
    )
    return ModelSpec.of(
        make, inputs="tokens", width=50, causal=True, tied=True, forward=_forward, facts=facts
    )


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Return the logits minus the products with the embedding, divided by the root of the width."""
    model = model.double().eval()
    memory, ids = model.encode(torch.tensor([[3, 4, 5, 6]])), torch.tensor([[7, 8, 9]])
    return model.decode(ids, memory) - model.hidden(ids, memory) @ model.wte.weight.t() * D_MODEL**-0.5
