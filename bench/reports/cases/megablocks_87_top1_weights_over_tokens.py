"""megablocks#87 (databricks/megablocks): with top-1 routing expert weights are normalised over the tokens.

For one expert per token the router returns weights of shape (tokens,) and not (tokens, 1), and the norm over
the last dimension then spans all tokens of the batch, so each token's output depends on all others.
"""

from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F


@dataclass
class Arguments:
    """Sizes and choices of the mixture of experts."""

    hidden_size: int = 32
    moe_num_experts: int = 4
    moe_normalize_expert_weights: float = 1.0
    keepdim: bool = True


class LearnedRouter(nn.Module):
    """Softmax scores, and the best of them: the router for `moe_top_k=1`."""

    def __init__(self, args: Arguments) -> None:
        super().__init__()
        self.args = args
        self.layer = nn.Linear(args.hidden_size, args.moe_num_experts, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Scores of all experts; weights and indices of the chosen ones."""
        scores = self.layer(x).softmax(dim=-1)
        weights, indices = scores.max(dim=-1, keepdim=self.args.keepdim)
        norm = torch.norm(weights, p=self.args.moe_normalize_expert_weights, dim=-1, keepdim=True)
        return scores, weights / norm, indices


class Block(nn.Module):
    """Pre-norm attention and experts without a limit to their capacity."""

    def __init__(self, args: Arguments) -> None:
        super().__init__()
        self.args = args
        h, e = args.hidden_size, args.moe_num_experts
        self.ln_1, self.ln_2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.c_attn, self.c_proj = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.router = LearnedRouter(args)
        self.w1, self.w2 = (nn.Parameter(torch.randn(e, h, h) * h**-0.5) for _ in range(2))

    def moe(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and load-balancing loss."""
        tokens = x.flatten(0, 1)
        scores, weights, indices = self.router(tokens)
        weights, indices, out = weights.flatten(), indices.flatten(), torch.zeros_like(tokens)
        for expert in range(self.args.moe_num_experts):
            mine = torch.where(indices == expert)[0]
            result = F.gelu(tokens[mine] @ self.w1[expert]) @ self.w2[expert]
            out = out.index_add(0, mine, result * weights[mine, None])
        fraction = torch.bincount(indices, minlength=self.args.moe_num_experts) / len(indices)
        return out.view_as(x), self.args.moe_num_experts * (fraction * scores.mean(0)).sum()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states and load-balancing loss."""
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.c_attn(self.ln_1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).flatten(-2))
        out, loss = self.moe(self.ln_2(x))
        return x + out, loss


class MoEGPT(nn.Module):
    """GPT with a mixture of experts in each block."""

    def __init__(self, args: Arguments) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(40, args.hidden_size), nn.Embedding(32, args.hidden_size)
        self.h = nn.ModuleList([Block(args) for _ in range(2)])
        self.ln_f = nn.LayerNorm(args.hidden_size)
        self.lm_head = nn.Linear(args.hidden_size, 40, bias=False)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> tuple:
        """Logits, and the loss where (shifted) targets are given."""
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        balance = x.new_zeros(())
        for block in self.h:
            x, block_loss = block(x)
            balance = balance + block_loss
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + 0.05 * balance


def buggy() -> nn.Module:
    """Weights of shape (tokens,)."""
    return MoEGPT(Arguments(keepdim=False))


def healthy() -> nn.Module:
    """Weights of shape (tokens, 1)."""
    return MoEGPT(Arguments(keepdim=True))


def observe(model: nn.Module) -> torch.Tensor:
    """Logits of a batch, less those of its rows alone."""
    idx = torch.randint(0, 40, (3, 8), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(idx)[0] - torch.cat([model(row[None])[0] for row in idx])
