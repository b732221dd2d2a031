"""nanoVLM#201 (huggingface/nanoVLM): samples of a packed row see each other, and their positions go on.

The data set packs samples without their borders. The language model then numbers the whole row from 0, and
its attention is causal over the row. https://github.com/huggingface/nanoVLM/pull/204
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

VOCAB, DIM, HEADS, KV_HEADS = 64, 32, 4, 2
Opt, Cache = Tensor | None, list[Tensor | None] | None


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate (batch, heads, time, width) by positions (batch, time)."""
    dtype, half = torch.promote_types(x.dtype, torch.float32), x.shape[-1] // 2
    frequencies = 10000 ** -(torch.arange(half, device=x.device, dtype=dtype) / half)
    angles = positions[:, None, :, None] * frequencies
    (a, b), cos, sin = x.chunk(2, dim=-1), angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class LanguageModelBlock(nn.Module):
    """Grouped-query attention and a gated MLP, each after its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(DIM, 1e-5), nn.RMSNorm(DIM, 1e-5)
        self.q_proj, self.out_proj = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.kv_proj = nn.Linear(DIM, 2 * KV_HEADS * DIM // HEADS, bias=False)
        self.gate_up_proj, self.down_proj = nn.Linear(DIM, 128, bias=False), nn.Linear(64, DIM, bias=False)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor, cache: Opt) -> tuple[Tensor, Tensor]:
        y = self.norm1(x)
        q = self.q_proj(y).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = self.kv_proj(y).unflatten(-1, (2, KV_HEADS, -1)).permute(2, 0, 3, 1, 4)
        kv = torch.stack([rotate(k, positions), v])
        kv = kv if cache is None else torch.cat([cache, kv], dim=3)
        y = F.scaled_dot_product_attention(rotate(q, positions), *kv, attn_mask=mask, enable_gqa=True)
        x = x + self.out_proj(y.transpose(1, 2).flatten(2))
        gate, up = self.gate_up_proj(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down_proj(F.silu(gate) * up), kv


class LanguageModel(nn.Module):
    """Decoder with a tied head. `documents` are numbers of samples in a packed row."""

    def __init__(self, *, packs_documents: bool) -> None:
        super().__init__()
        self.packs_documents, self.token_embedding = packs_documents, nn.Embedding(VOCAB, DIM)
        self.blocks, self.norm = nn.ModuleList(LanguageModelBlock() for _ in range(2)), nn.RMSNorm(DIM, 1e-5)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)
        self.token_embedding.weight = self.head.weight

    def forward(
        self, x: Tensor, attention_mask: Opt = None, kv_cache: Cache = None, document_ids: Opt = None
    ) -> tuple[Tensor, Cache]:
        caches = list(kv_cache or [None, None])
        start = 0 if caches[0] is None else caches[0].shape[3]
        index = torch.arange(start + x.shape[1], device=x.device)
        mask, positions = (index <= index[start:, None])[None, None], index[None, start:].expand_as(x)
        if attention_mask is not None:
            mask = mask & attention_mask[:, None, None].bool() | (index == index[start:, None])
        if document_ids is not None:
            same = document_ids[:, :, None] == document_ids[:, None]
            mask, positions = mask & same[:, None], (same & (index < index[:, None])).sum(dim=2)
        x = self.token_embedding(x)
        for i, block in enumerate(self.blocks):
            x, caches[i] = block(x, positions, mask, caches[i])
        return self.head(self.norm(x)), caches

    def collate(self, ids: Tensor, document_ids: Tensor) -> dict[str, Tensor]:
        return {"x": ids, "document_ids": document_ids} if self.packs_documents else {"x": ids}


def buggy() -> nn.Module:
    return LanguageModel(packs_documents=False)


def healthy() -> nn.Module:
    return LanguageModel(packs_documents=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """Rows of several documents are those of the data set."""
    return ModelSpec.of(make, causal=True, tied=True, packed=lambda m, *rows: m(**m.collate(*rows))[0])


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Last logits of a sample behind another one, less those of the sample alone."""
    ids, documents = torch.arange(3, 21)[None], torch.tensor([[0] * 11 + [1] * 7])
    return (model(**model.collate(ids, documents))[0][0, -1] - model(ids[:, 11:])[0][0, -1])[:8]
