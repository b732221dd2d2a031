"""medical-coding-reproducibility#13 (JoakimEdin): the attention mask of PLM-ICD is padded with ones.

The collate function pads the masks like the ids, with the id of the padding token, which is 1 in RoBERTa.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

PAD, VOCAB, DIM, HEADS, CLASSES, CHUNK = 1, 60, 32, 4, 7, 8


class RobertaLayer(nn.Module):
    """Bidirectional attention and an MLP, with a norm after each sum."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 64), nn.GELU(), nn.Linear(64, DIM))
        self.attention_norm, self.output_norm = nn.LayerNorm(DIM), nn.LayerNorm(DIM)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv, attn_mask=mask).transpose(1, 2).flatten(2)
        x = self.attention_norm(x + self.out(y))
        return self.output_norm(x + self.mlp(x))


class LabelAttention(nn.Module):
    """One attention distribution over the document for each code."""

    def __init__(self) -> None:
        super().__init__()
        self.first_linear, self.third_linear = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, CLASSES)
        self.second_linear = nn.Linear(DIM, CLASSES, bias=False)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        scores = self.second_linear(torch.tanh(self.first_linear(x)))
        weights = scores.masked_fill(~keep[..., None], -torch.inf).softmax(dim=1).transpose(1, 2)
        return (self.third_linear.weight * (weights @ x)).sum(dim=2) + self.third_linear.bias


class PLMICD(nn.Module):
    """RoBERTa over the chunks of a document, and a classifier with several labels."""

    def __init__(self, *, mask_padding: int) -> None:
        super().__init__()
        self.mask_padding = mask_padding
        self.word_embeddings = nn.Embedding(VOCAB, DIM, padding_idx=PAD)
        self.position_embeddings = nn.Embedding(CHUNK + PAD + 1, DIM, padding_idx=PAD)
        self.embedding_norm = nn.LayerNorm(DIM)
        self.layers = nn.ModuleList(RobertaLayer() for _ in range(2))
        self.attention = LabelAttention()

    def collate_fn(self, token_ids: list[Tensor]) -> dict[str, Tensor]:
        """Pad documents and masks to chunks (batch, chunks, chunk_size)."""
        length = -(-max(len(ids) for ids in token_ids) // CHUNK) * CHUNK
        ids = [F.pad(row, (0, length - len(row)), value=PAD) for row in token_ids]
        masks = [F.pad(row * 0 + 1, (0, length - len(row)), value=self.mask_padding) for row in token_ids]
        data, attention_mask = (torch.stack(rows).unflatten(1, (-1, CHUNK)) for rows in (ids, masks))
        return {"input_ids": data, "attention_mask": attention_mask}

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        keep = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        ids = input_ids.flatten(0, 1)
        positions = ids.ne(PAD).cumsum(dim=1) * ids.ne(PAD) + PAD
        x = self.embedding_norm(self.word_embeddings(ids) + self.position_embeddings(positions))
        mask = (1 - keep.flatten(0, 1)[:, None, None].to(x.dtype)) * torch.finfo(x.dtype).min
        for layer in self.layers:
            x = layer(x, mask)
        return self.attention(x.view(len(input_ids), -1, DIM), keep.flatten(1).bool())


def buggy() -> nn.Module:
    return PLMICD(mask_padding=PAD)


def healthy() -> nn.Module:
    return PLMICD(mask_padding=0)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """Documents are collated as in the dataset."""

    def run(model: nn.Module, ids: Tensor, keep: Tensor | None = None) -> Tensor:
        keep = torch.ones_like(ids) if keep is None else keep
        return model(**model.collate_fn([r[k] for r, k in zip(ids, keep.bool(), strict=True)]))

    return ModelSpec.of(make, inputs="tokens", width=VOCAB, per_position=False, forward=run, masked=run)


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Logits of a short document next to a long one, less those of the document alone."""
    long, short = torch.arange(2, 34), torch.arange(2, 7)
    return model(**model.collate_fn([short, long]))[0] - model(**model.collate_fn([short]))[0]
