"""OLMo-core#828 (allenai/OLMo-core): recomputed blocks take the gradient under other dropout masks.

Activation checkpointing does not preserve the random state, so the recomputation draws new masks.
"""

from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """Pre-norm attention and feed-forward with dropout on both residual branches."""

    def __init__(self, d_model: int, n_heads: int, dropout: float) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.attention_norm = nn.LayerNorm(d_model)
        self.w_qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.w_out = nn.Linear(d_model, d_model, bias=False)
        self.feed_forward_norm = nn.LayerNorm(d_model)
        self.w1 = nn.Linear(d_model, 2 * d_model, bias=False)
        self.w2 = nn.Linear(2 * d_model, d_model, bias=False)
        self.residual_dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output."""
        b, t, d = x.shape
        q, k, v = self.w_qkv(self.attention_norm(x)).view(b, t, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.residual_dropout(self.w_out(attended))
        return x + self.residual_dropout(self.w2(F.silu(self.w1(self.feed_forward_norm(x)))))


class Transformer(nn.Module):
    """A small decoder that can recompute its blocks."""

    def __init__(self, vocab_size: int = 96, d_model: int = 32, dropout: float = 0.1) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(vocab_size, d_model)
        self.blocks = nn.ModuleList(Block(d_model, 4, dropout) for _ in range(2))
        self.norm = nn.LayerNorm(d_model)
        self.lm_head = nn.Linear(d_model, vocab_size, bias=False)
        self.recompute = False
        self.preserve_rng_state = True

    def apply_activation_checkpointing(self, preserve_rng_state: bool) -> None:
        """Recompute the blocks in backward from now on."""
        self.recompute = True
        self.preserve_rng_state = preserve_rng_state

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits for every position."""
        h = self.embeddings(input_ids)
        for block in self.blocks:
            if self.recompute and self.training:
                h = checkpoint(block, h, use_reentrant=False, preserve_rng_state=self.preserve_rng_state)
            else:
                h = block(h)
        return self.lm_head(self.norm(h))


class TrainModule:
    """The model with its optimizer."""

    def __init__(self, preserve_rng_state: bool) -> None:
        self.model = Transformer()
        self.model.apply_activation_checkpointing(preserve_rng_state)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, betas=(0.9, 0.95))

    def loss(self, batch: dict) -> torch.Tensor:
        """Cross entropy of the next tokens."""
        logits = self.model(batch["input_ids"])[:, :-1]
        labels = batch["labels"][:, 1:]
        total = F.cross_entropy(
            logits.reshape(-1, logits.size(-1)), labels.reshape(-1), ignore_index=-100, reduction="sum"
        )
        return total / (labels != -100).sum().clamp(min=1)

    def step(self, batch: dict) -> torch.Tensor:
        """One update."""
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(batch)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def buggy() -> TrainModule:
    """Random state is never preserved."""
    return TrainModule(preserve_rng_state=False)


def healthy() -> TrainModule:
    """Random state is preserved because dropout is active."""
    return TrainModule(preserve_rng_state=True)


def _gradient(run: TrainModule, batch: dict, recompute: bool) -> torch.Tensor:
    run.model.recompute = recompute
    torch.manual_seed(1)
    gradients = torch.autograd.grad(run.loss(batch), list(run.model.parameters()))
    return torch.cat([g.flatten() for g in gradients])


def _error(factory: Callable) -> float:
    ids = torch.randint(96, (4, 16))
    run, batch = factory(), {"input_ids": ids, "labels": ids}
    plain = _gradient(run, batch, recompute=False)
    return ((_gradient(run, batch, recompute=True) - plain).norm() / plain.norm()).item()


def prove() -> tuple[float, float]:
    """Relative difference of the gradient with and without recomputation under the same masks."""
    return _error(buggy), _error(healthy)
