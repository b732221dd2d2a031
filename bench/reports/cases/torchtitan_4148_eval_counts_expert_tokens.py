"""torchtitan#4148 (pytorch/torchtitan): an evaluation pass is counted into the experts' token counter.

The forward adds to the buffer in eval mode too (under no_grad as well), and the next update of the expert
bias is made from training and validation tokens together, so validation changes the training routing.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MoE(nn.Module):
    """Experts whose load is balanced by a bias, not by a loss."""

    def __init__(self, dim: int, num_experts: int, top_k: int, count_in_eval: bool) -> None:
        super().__init__()
        self.top_k, self.count_in_eval = top_k, count_in_eval
        self.gate = nn.Linear(dim, num_experts, bias=False)
        weights = (torch.randn(num_experts, dim, dim) * dim**-0.5 for _ in range(3))
        self.w1_EFD, self.w2_EDF, self.w3_EFD = (nn.Parameter(weight) for weight in weights)
        self.register_buffer("expert_bias_E", torch.zeros(num_experts), persistent=True)
        self.register_buffer("tokens_per_expert_E", torch.zeros(num_experts), persistent=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Output in the shape of the input."""
        x_TD = x_BLD.flatten(0, 1)
        scores_TE = torch.sigmoid(self.gate(x_TD))
        chosen_TK = torch.topk(scores_TE + self.expert_bias_E, k=self.top_k, dim=-1).indices
        routing_map_TE = torch.zeros_like(scores_TE).scatter_(1, chosen_TK, 1.0)
        weights_TE = F.normalize(scores_TE * routing_map_TE, p=1, dim=-1)
        if self.training or self.count_in_eval:
            with torch.no_grad():
                self.tokens_per_expert_E.add_(routing_map_TE.sum(dim=0))
        h_TEF = F.silu(torch.einsum("td,efd->tef", x_TD, self.w1_EFD))
        h_TEF = h_TEF * torch.einsum("td,efd->tef", x_TD, self.w3_EFD)
        return torch.einsum("tef,edf,te->td", h_TEF, self.w2_EDF, weights_TE).view_as(x_BLD)


class TransformerBlock(nn.Module):
    """Causal attention, then experts."""

    def __init__(self, dim: int, n_heads: int, count_in_eval: bool) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.moe = MoE(dim, 6, 2, count_in_eval)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Hidden states."""
        normed = self.attention_norm(x_BLD)
        projected = (w(normed).unflatten(-1, (self.n_heads, -1)) for w in (self.wq, self.wk, self.wv))
        out_BHLK = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in projected), is_causal=True)
        x_BLD = x_BLD + self.wo(out_BHLK.transpose(1, 2).flatten(2))
        return x_BLD + self.moe(self.ffn_norm(x_BLD))


class Decoder(nn.Module):
    """Language model; the trainer calls `update_expert_bias` before each optimizer step."""

    def __init__(self, vocab_size: int = 48, dim: int = 32, count_in_eval: bool = False) -> None:
        super().__init__()
        self.tok_embeddings, self.pos_embeddings = nn.Embedding(vocab_size, dim), nn.Embedding(64, dim)
        self.layers = nn.ModuleList(TransformerBlock(dim, 4, count_in_eval) for _ in range(2))
        self.norm, self.output = nn.RMSNorm(dim), nn.Linear(dim, vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        h_BLD = self.tok_embeddings(tokens) + self.pos_embeddings.weight[: tokens.shape[1]]
        for layer in self.layers:
            h_BLD = layer(h_BLD)
        return self.output(self.norm(h_BLD))

    @torch.no_grad()
    def update_expert_bias(self, load_balance_coeff: float = 0.05) -> None:
        """Raise the bias of experts with few tokens, lower the others, and start counting again."""
        for moe in (layer.moe for layer in self.layers):
            counts_E = moe.tokens_per_expert_E
            delta_E = load_balance_coeff * torch.sign(counts_E.mean() - counts_E)
            moe.expert_bias_E.add_(delta_E - delta_E.mean())
            counts_E.zero_()


def buggy() -> nn.Module:
    """Counts in every mode."""
    return Decoder(count_in_eval=True)


def healthy() -> nn.Module:
    """Counts in training mode only."""
    return Decoder(count_in_eval=False)


def observe(model: nn.Module) -> Tensor:
    """Expert counts and biases of a step with a validation pass, less those without it."""
    generator, seen = torch.Generator().manual_seed(1), []
    train = torch.randint(0, 48, (2, 6), generator=generator)
    validation = torch.randint(0, 48, (6, 12), generator=generator)
    for validate in (True, False):
        run = copy.deepcopy(model).train()
        with torch.no_grad():
            run(train)
            if validate:
                run.eval()(validation)
        counts = torch.cat([layer.moe.tokens_per_expert_E for layer in run.layers])
        run.update_expert_bias()
        seen.append(torch.cat([counts, *(layer.moe.expert_bias_E for layer in run.layers)]))
    return seen[0] - seen[1]
