"""sentence-transformers#3879 (huggingface/sentence-transformers): flattened batches get shifted positions.

The collator numbers the tokens of each text from 0, but RoBERTa numbers them from `padding_idx` + 1. Every
token reads the embedding of an earlier position, and the first ones read rows that are reserved for padding.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec

PAD = 1


class RobertaLayer(nn.Module):
    """Post-norm layer with bidirectional attention."""

    def __init__(self, hidden_size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.dense = nn.Linear(hidden_size, 3 * hidden_size), nn.Linear(hidden_size, hidden_size)
        self.intermediate = nn.Linear(hidden_size, 2 * hidden_size)
        self.output = nn.Linear(2 * hidden_size, hidden_size)
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden_size), nn.LayerNorm(hidden_size)

    def forward(self, x: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        """`visible` is bool and broadcasts to (batch, heads, time, time)."""
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible).transpose(1, 2).flatten(2)
        x = self.norm_1(x + self.dense(y))
        return self.norm_2(x + self.output(F.gelu(self.intermediate(x))))


class RobertaModel(nn.Module):
    """Encoder whose n-th token, from 0, has position `PAD` + 1 + n."""

    def __init__(
        self, vocab_size: int = 80, hidden_size: int = 32, max_position_embeddings: int = 66
    ) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab_size, hidden_size, padding_idx=PAD)
        self.position_embeddings = nn.Embedding(max_position_embeddings, hidden_size, padding_idx=PAD)
        self.norm = nn.LayerNorm(hidden_size)
        self.layers = nn.ModuleList(RobertaLayer(hidden_size, 4) for _ in range(2))

    def forward(
        self, input_ids: torch.Tensor, visible: torch.Tensor, position_ids: torch.Tensor
    ) -> torch.Tensor:
        """Return hidden states."""
        x = self.norm(self.word_embeddings(input_ids) + self.position_embeddings(position_ids))
        for layer in self.layers:
            x = layer(x, visible)
        return x


class SentenceTransformer(nn.Module):
    """Mean of the hidden states of a text; flash attention processes a batch as one row without padding."""

    def __init__(self, *, offset: int, attn_implementation: str = "flash_attention_2") -> None:
        super().__init__()
        self.offset, self.attn_implementation = offset, attn_implementation
        self.auto_model = RobertaModel()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return one embedding for each row."""
        keep = input_ids != PAD if attention_mask is None else attention_mask.bool()
        count = keep.cumsum(dim=1)
        if self.attn_implementation == "flash_attention_2":
            text = keep.nonzero()[:, 0]
            hidden = self.auto_model(
                input_ids[keep][None], text[:, None] == text, (count[keep] - 1 + self.offset)[None]
            )[0]
            total = hidden.new_zeros(len(input_ids), hidden.shape[-1]).index_add(0, text, hidden)
        else:
            position_ids = torch.where(keep, count + PAD, PAD)
            visible = keep[:, None, None] | torch.eye(keep.shape[1], dtype=torch.bool, device=keep.device)
            total = (self.auto_model(input_ids, visible, position_ids) * keep[..., None]).sum(dim=1)
        return total / count[:, -1:].clamp(min=1)


def buggy() -> nn.Module:
    """Positions of flattened texts start at 0."""
    return SentenceTransformer(offset=0)


def healthy() -> nn.Module:
    """Positions of flattened texts start at `PAD` + 1."""
    return SentenceTransformer(offset=PAD + 1)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """The padded batch gives the same embeddings."""
    return ModelSpec.of(
        make,
        inputs="tokens",
        width=80,
        per_position=False,
        max_length=64,
        masked=lambda model, tokens, keep: model(tokens, attention_mask=keep.long()),
        reference=lambda: SentenceTransformer(offset=PAD + 1, attn_implementation="sdpa"),
    )


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Embeddings of the flattened batch minus those of the padded batch."""
    model = model.double().eval()
    ids = torch.tensor([[5, 17, 9, 33, 60, 2], [8, 8, 41, PAD, PAD, PAD]])
    flattened = model(ids)
    model.attn_implementation = "sdpa"
    return flattened - model(ids)
