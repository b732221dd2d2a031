"""OLMo-core#828 (allenai/OLMo-core): activation checkpointing is hard wired to preserve_rng_state=False.

Once residual dropout is on, the recomputation in the backward pass draws new masks, so the gradients belong
to another sample of the network than the loss.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

DECLARATION = "activation checkpointing changes memory use only, never the gradients"


def masked_dropout(x: torch.Tensor, response_mask: torch.Tensor, p: float) -> torch.Tensor:
    """Dropout only where `response_mask` marks a response token."""
    drop = (torch.rand_like(x) < p) & response_mask.unsqueeze(-1)
    scale = torch.where(response_mask, 1.0 / (1.0 - p), 1.0).unsqueeze(-1).to(x.dtype)
    return x.masked_fill(drop, 0.0) * scale


class TransformerBlock(nn.Module):
    """Reordered-norm block of OLMo 2."""

    def __init__(self, d_model: int, n_heads: int, dropout: float) -> None:
        super().__init__()
        self.n_heads, self.dropout = n_heads, dropout
        self.w_qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.w_out = nn.Linear(d_model, d_model, bias=False)
        self.attention_norm = nn.RMSNorm(d_model, eps=1e-6)
        self.w1 = nn.Linear(d_model, 2 * d_model, bias=False)
        self.w2 = nn.Linear(2 * d_model, d_model, bias=False)
        self.w3 = nn.Linear(d_model, 2 * d_model, bias=False)
        self.feed_forward_norm = nn.RMSNorm(d_model, eps=1e-6)

    def forward(self, x: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
        """Attention and SwiGLU, each normed before it is added."""
        q, k, v = self.w_qkv(x).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self._drop(self.attention_norm(self.w_out(h)), response_mask)
        h = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return x + self._drop(self.feed_forward_norm(h), response_mask)

    def _drop(self, x: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
        return masked_dropout(x, response_mask, self.dropout) if self.training and self.dropout else x


class Transformer(nn.Module):
    """Decoder with optional activation checkpointing."""

    def __init__(self, d_model: int = 32, vocab_size: int = 64, dropout: float = 0.1) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(vocab_size, d_model)
        self.position_embeddings = nn.Embedding(64, d_model)
        self.blocks = nn.ModuleDict({str(i): TransformerBlock(d_model, 4, dropout) for i in range(3)})
        self.norm = nn.RMSNorm(d_model, eps=1e-6)
        self.w_out = nn.Linear(d_model, vocab_size, bias=False)
        self.activation_checkpointing, self.preserve_rng_state = False, True

    def apply_activation_checkpointing(self, preserve_rng_state: bool) -> None:
        """Recompute every block in the backward pass."""
        self.activation_checkpointing, self.preserve_rng_state = True, preserve_rng_state

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        response_mask: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Logits, or logits and loss with labels that are already shifted."""
        if response_mask is None:
            response_mask = torch.ones_like(input_ids, dtype=torch.bool) if labels is None else labels != -100
        h = self.embeddings(input_ids) + self.position_embeddings.weight[: input_ids.shape[1]]
        for block in self.blocks.values():
            if self.activation_checkpointing and torch.is_grad_enabled():
                keep = self.preserve_rng_state
                h = checkpoint(block, h, response_mask, use_reentrant=False, preserve_rng_state=keep)
            else:
                h = block(h, response_mask)
        logits = self.w_out(self.norm(h))
        if labels is None:
            return logits
        return logits, F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def buggy() -> nn.Module:
    """As reported."""
    model = Transformer()
    model.apply_activation_checkpointing(preserve_rng_state=False)
    return model


def healthy() -> nn.Module:
    """As fixed."""
    model = Transformer()
    model.apply_activation_checkpointing(preserve_rng_state=True)
    return model


def observe(model: nn.Module) -> torch.Tensor:
    """Gradients with checkpointing minus gradients without, both from the same seed."""
    ids = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    grads = []
    for on in (True, False):
        model.train().activation_checkpointing = on
        torch.manual_seed(2)
        loss = model(ids[:, :-1], labels=ids[:, 1:])[1]
        grads.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))
    model.activation_checkpointing = True
    return grads[0] - grads[1]
