"""peft#3774 (huggingface/peft): LoRA on nn.MultiheadAttention adds the delta of out_proj twice.

Merging adds dW by hand and then lets out_proj merge itself; each forward pass merges, so it is wrong too.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn


class LoraWeight(nn.Module):
    """Low-rank update of one weight matrix."""

    def __init__(self, rows: int, cols: int, rank: int = 4, alpha: float = 8.0) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(torch.randn(rank, cols) * cols**-0.5)
        self.lora_B = nn.Parameter(torch.randn(rows, rank) * 0.1)  # as after some training
        self.scaling = alpha / rank

    def merge(self, weight: torch.Tensor, sign: int) -> torch.Tensor:
        """The weight with the update added (1) or taken out (-1)."""
        return weight + sign * self.scaling * self.lora_B @ self.lora_A


class LoraMultiheadAttention(nn.Module):
    """Adapter around a frozen nn.MultiheadAttention; merges for each call, as torch reads raw weights."""

    def __init__(self, base: nn.MultiheadAttention, *, merges_by_hand: bool) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.in_proj_lora = LoraWeight(3 * base.embed_dim, base.embed_dim)
        self.out_proj_lora = LoraWeight(base.embed_dim, base.embed_dim)
        self.merges_by_hand, self.merged = merges_by_hand, False

    def _weights(self, sign: int) -> tuple[torch.Tensor, torch.Tensor]:
        lora, w_out = self.out_proj_lora, self.base_layer.out_proj.weight
        if self.merges_by_hand:
            w_out = w_out + sign * lora.scaling * lora.lora_B @ lora.lora_A
        return self.in_proj_lora.merge(self.base_layer.in_proj_weight, sign), lora.merge(w_out, sign)

    @torch.no_grad()
    def set_merged(self, merged: bool) -> None:
        """Write the updates into the base weights, or take them out."""
        if merged != self.merged:
            w_in, w_out = self._weights(1 if merged else -1)
            self.base_layer.in_proj_weight.copy_(w_in)
            self.base_layer.out_proj.weight.copy_(w_out)
            self.merged = merged

    def forward(self, x: torch.Tensor, attn_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Self-attention on (T, B, width)."""
        base = self.base_layer
        w_in, w_out = (base.in_proj_weight, base.out_proj.weight) if self.merged else self._weights(1)
        args = (w_in, base.in_proj_bias, None, None, False, 0.0, w_out, base.out_proj.bias, self.training)
        sizes = base.embed_dim, base.num_heads
        return F.multi_head_attention_forward(x, x, x, *sizes, *args, None, False, attn_mask)[0]


class TextTransformer(nn.Module):
    """Text tower in the way of open_clip: the end-of-text token, with the highest id, is pooled."""

    def __init__(self, *, merges_by_hand: bool, vocab: int = 80, width: int = 32) -> None:
        super().__init__()
        self.token_embedding, self.text_projection = nn.Embedding(vocab, width), nn.Linear(width, 24)
        self.positional_embedding = nn.Parameter(torch.randn(16, width) * 0.1)
        attns = [nn.MultiheadAttention(width, 4) for _ in range(2)]
        self.attns = nn.ModuleList(LoraMultiheadAttention(a, merges_by_hand=merges_by_hand) for a in attns)
        mlps = [(nn.LayerNorm(width), nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width)) for _ in attns]
        self.mlps = nn.ModuleList(nn.Sequential(*mlp) for mlp in mlps)
        self.norms, self.ln_final = nn.ModuleList(nn.LayerNorm(width) for _ in attns), nn.LayerNorm(width)

    def merge_adapter(self, merged: bool = True) -> None:
        """Merge all adapters, or undo it."""
        for attn in self.attns:
            attn.set_merged(merged)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return one vector for each row of token ids (B, T)."""
        x = (self.token_embedding(text) + self.positional_embedding[: text.shape[1]]).transpose(0, 1)
        mask = torch.full((len(x), len(x)), -torch.inf, dtype=x.dtype).triu(1)
        for norm, attn, mlp in zip(self.norms, self.attns, self.mlps, strict=True):
            x = x + attn(norm(x), mask)
            x = x + mlp(x)
        return self.text_projection(self.ln_final(x)[text.argmax(-1), torch.arange(len(text))])


def buggy() -> nn.Module:
    """out_proj is merged by hand and by itself."""
    return TextTransformer(merges_by_hand=True)


def healthy() -> nn.Module:
    """out_proj merges itself, once."""
    return TextTransformer(merges_by_hand=False)


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Difference from a model without adapters, whose weights are W + dW."""
    model = model.double().eval()
    plain = copy.deepcopy(model)
    for attn in plain.attns:
        weights = attn.base_layer.in_proj_weight, attn.base_layer.out_proj.weight
        for weight, lora in zip(weights, (attn.in_proj_lora, attn.out_proj_lora), strict=True):
            weight += lora.scaling * lora.lora_B @ lora.lora_A
            lora.lora_B.zero_()
    text = torch.tensor([[3, 17, 9, 42, 79, 0], [5, 5, 61, 79, 0, 0]])
    return model(text) - plain(text)
