"""SASRec.pytorch#47 (pmixer/SASRec.pytorch): the layer norm before attention is applied to the queries only.

Keys and values are not normalised, and the residual connection adds the normalised queries instead of the
input of the layer. https://github.com/pmixer/SASRec.pytorch/issues/47
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec


class SASRec(nn.Module):
    """Sequential recommender; item 0 is padding, on the left."""

    def __init__(self, pre_norm: bool, item_num: int = 50, dim: int = 32, maxlen: int = 64) -> None:
        super().__init__()
        self.pre_norm = pre_norm
        self.item_emb = nn.Embedding(item_num + 1, dim, padding_idx=0)
        self.pos_emb = nn.Embedding(maxlen + 1, dim, padding_idx=0)
        self.attention_layernorms = nn.ModuleList(nn.LayerNorm(dim, eps=1e-8) for _ in range(2))
        self.attention_layers = nn.ModuleList(
            nn.MultiheadAttention(dim, 2, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.forward_layernorms = nn.ModuleList(nn.LayerNorm(dim, eps=1e-8) for _ in range(2))
        self.forward_layers = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim)) for _ in range(2)
        )
        self.last_layernorm = nn.LayerNorm(dim, eps=1e-8)
        # As the training script of the repository does.
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_normal_(parameter)
        for table in (self.item_emb, self.pos_emb):
            nn.init.zeros_(table.weight[0])

    def log2feats(self, log_seqs: Tensor) -> Tensor:
        """Features of each position of the histories."""
        length = log_seqs.shape[1]
        # Positions count from the first item, so that padding on the left shifts nothing.
        positions = (log_seqs != 0).long().cumsum(dim=1)
        seqs = self.item_emb(log_seqs) * self.item_emb.embedding_dim**0.5 + self.pos_emb(positions)
        later = torch.ones(length, length, dtype=torch.bool, device=seqs.device).triu(1)
        itself = torch.eye(length, dtype=torch.bool, device=seqs.device)
        mask = (later | ((log_seqs == 0)[:, None] & ~itself)).repeat_interleave(2, dim=0)
        for i, attention in enumerate(self.attention_layers):
            normed = self.attention_layernorms[i](seqs)
            if self.pre_norm:
                seqs = seqs + attention(normed, normed, normed, attn_mask=mask, need_weights=False)[0]
            else:
                seqs = normed + attention(normed, seqs, seqs, attn_mask=mask, need_weights=False)[0]
            seqs = seqs + self.forward_layers[i](self.forward_layernorms[i](seqs))
        return self.last_layernorm(seqs)

    def forward(
        self, user_ids: Tensor, log_seqs: Tensor, pos_seqs: Tensor, neg_seqs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Scores of the next items and of sampled other items."""
        del user_ids  # Nothing is learned about single users.
        feats = self.log2feats(log_seqs)
        return (feats * self.item_emb(pos_seqs)).sum(-1), (feats * self.item_emb(neg_seqs)).sum(-1)


def buggy() -> nn.Module:
    """As published."""
    return SASRec(pre_norm=False)


def healthy() -> nn.Module:
    """Pre-norm, as in the paper."""
    return SASRec(pre_norm=True)


def _scores(model: nn.Module, ids: Tensor) -> Tensor:
    return model.log2feats(ids) @ model.item_emb.weight.T


def _loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Cross-entropy of the next item against one sampled item."""
    positive, negative = model(None, ids[:, :-1], ids[:, 1:], (ids[:, 1:] * 7 + 3) % 50 + 1)
    return F.softplus(-positive).mean() + F.softplus(negative).mean()


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """Histories have padding on the left; the loss compares the next item with another one."""

    def make_batch(batch_size: int, length: int, generator: torch.Generator) -> Tensor:
        return torch.randint(1, 51, (batch_size, length), generator=generator)

    return ModelSpec.of(
        make,
        inputs="tokens",
        width=51,
        causal=True,
        forward=_scores,
        loss=_loss,
        make_batch=make_batch,
        padding_sides=("left",),
        masked=lambda model, ids, keep: _scores(model, ids * keep),
    )


def observe(model: nn.Module) -> Tensor:
    """Change of the first layer's attention when all items are ten times as long, which a norm hides."""
    attention, seen = model.attention_layers[0], []
    hook = attention.register_forward_hook(lambda _m, _i, out: seen.append(out[0]))
    ids = torch.randint(1, 51, (2, 8), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model.pos_emb.weight.zero_()
        model.log2feats(ids)
        model.item_emb.weight.mul_(10.0)
        model.log2feats(ids)
        model.item_emb.weight.div_(10.0)
    hook.remove()
    return seen[1] - seen[0]
