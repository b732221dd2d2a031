"""transformers#47946 (huggingface/transformers): GPT2Model throws encoder_attention_mask away.

With cross-attention the padding of encoder_hidden_states is attended although the caller masks it.
"""

import torch
import torch.nn.functional as F
from torch import nn


class GPT2Attention(nn.Module):
    """Self-attention, or cross-attention if `is_cross_attention`."""

    def __init__(self, n_embd: int, n_head: int, is_cross_attention: bool = False) -> None:
        super().__init__()
        self.n_head, self.is_cross_attention = n_head, is_cross_attention
        if is_cross_attention:
            self.q_attn = nn.Linear(n_embd, n_embd)
            self.c_attn = nn.Linear(n_embd, 2 * n_embd)
        else:
            self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None, encoder_hidden_states: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attend to `x` or to the encoder."""
        if self.is_cross_attention:
            q, (k, v) = self.q_attn(x), self.c_attn(encoder_hidden_states).chunk(2, dim=-1)
        else:
            q, k, v = self.c_attn(x).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class GPT2Block(nn.Module):
    """Pre-norm block with cross-attention."""

    def __init__(self, n_embd: int, n_head: int) -> None:
        super().__init__()
        self.ln_1, self.ln_cross_attn, self.ln_2 = (nn.LayerNorm(n_embd) for _ in range(3))
        self.attn = GPT2Attention(n_embd, n_head)
        self.crossattention = GPT2Attention(n_embd, n_head, is_cross_attention=True)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None,
        encoder_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Self-attention, cross-attention, MLP."""
        x = x + self.attn(self.ln_1(x), mask)
        if encoder_hidden_states is not None:
            x = x + self.crossattention(self.ln_cross_attn(x), encoder_mask, encoder_hidden_states)
        return x + self.mlp(self.ln_2(x))


class GPT2LMHeadModel(nn.Module):
    """GPT-2 with add_cross_attention=True."""

    def __init__(self, discard_mask: bool, vocab_size: int = 50, n_embd: int = 32) -> None:
        super().__init__()
        self.discard_mask = discard_mask
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(64, n_embd)
        self.h = nn.ModuleList(GPT2Block(n_embd, 4) for _ in range(2))
        self.ln_f = nn.LayerNorm(n_embd)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return logits."""
        length = input_ids.shape[1]
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        x = self.wte(input_ids) + self.wpe((attention_mask.long().cumsum(-1) - 1).clamp(min=0))
        mask = torch.ones(length, length, dtype=torch.bool).tril() & attention_mask.bool()[:, None, None, :]
        if self.discard_mask:
            encoder_attention_mask = None
        if encoder_attention_mask is not None:
            encoder_attention_mask = encoder_attention_mask.bool()[:, None, None, :]
        for block in self.h:
            x = block(x, mask, encoder_hidden_states, encoder_attention_mask)
        return F.linear(self.ln_f(x), self.wte.weight)


def buggy() -> nn.Module:
    """The mask is set to None before it is used."""
    return GPT2LMHeadModel(discard_mask=True)


def healthy() -> nn.Module:
    """The mask is used."""
    return GPT2LMHeadModel(discard_mask=False)


def observe(model: nn.Module) -> torch.Tensor:
    """Logits with a padded, masked encoder output minus those with it cut to its length; 0 is right."""
    model, ids = model.double().eval(), torch.arange(7)[None]
    encoded = torch.linspace(-1, 1, 9 * 32, dtype=torch.float64).mul(40).sin().view(1, 9, 32)
    mask = (torch.arange(9) < 6).long()[None]
    with torch.no_grad():
        padded = model(ids, encoder_hidden_states=encoded, encoder_attention_mask=mask)
        return padded - model(ids, encoder_hidden_states=encoded[:, :6])
