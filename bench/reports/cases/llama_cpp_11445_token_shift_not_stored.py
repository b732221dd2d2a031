"""llama.cpp#11445 (ggml-org/llama.cpp): RWKV6Qwen2 does not store the token-shift state after a call.

The recurrent state is written back and the last token's activation is not, so each later call mixes its first
token with zeros; one call over the whole prompt is right.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from stackwise import ModelSpec

State = list[tuple[torch.Tensor, torch.Tensor]]


class TimeMix(nn.Module):
    """RWKV-6 time mixing with data-dependent decay, as in the converted Qwen2 models."""

    def __init__(self, n_embd: int, head_size: int, store_shift: bool) -> None:
        super().__init__()
        self.head_size, self.n_head, self.store_shift = head_size, n_embd // head_size, store_shift
        self.time_maa = nn.Parameter(torch.rand(5, n_embd))
        self.time_decay = nn.Parameter(torch.linspace(-3, 1, n_embd))
        self.time_decay_w1 = nn.Parameter(torch.randn(n_embd, 8) * 0.2)
        self.time_decay_w2 = nn.Parameter(torch.randn(8, n_embd) * 0.2)
        self.receptance, self.key, self.value = (nn.Linear(n_embd, n_embd) for _ in range(3))
        self.gate, self.output = (nn.Linear(n_embd, n_embd, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, shift: torch.Tensor, wkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Output and the two states after it."""
        n_seqs, n_seq_tokens, n_embd = x.shape
        x_prev = torch.cat([shift[:, None], x[:, :-1]], dim=1)
        xw, xk, xv, xr, xg = x + (x_prev - x) * self.time_maa[:, None, None]
        heads = (n_seqs, n_seq_tokens, self.n_head, self.head_size)
        r, k, v = self.receptance(xr).view(heads), self.key(xk).view(heads), self.value(xv).view(heads)
        decay = self.time_decay + torch.tanh(xw @ self.time_decay_w1) @ self.time_decay_w2
        w = torch.exp(-torch.exp(decay)).view(heads)
        k = k * (1 - w)
        outs = []
        for t in range(n_seq_tokens):
            wkv = wkv * w[:, t, :, :, None] + k[:, t, :, :, None] * v[:, t, :, None]
            outs.append((r[:, t, :, :, None] * wkv).sum(-2))
        out = torch.stack(outs, dim=1).view(n_seqs, n_seq_tokens, n_embd)
        out = self.output(out * torch.sigmoid(self.gate(xg)))
        return out, x[:, -1] if self.store_shift else shift, wkv


class Layer(nn.Module):
    """Time mixing and the feed-forward of Qwen2, which has no token shift."""

    def __init__(self, n_embd: int, head_size: int, store_shift: bool) -> None:
        super().__init__()
        self.attn_norm, self.ffn_norm = nn.RMSNorm(n_embd), nn.RMSNorm(n_embd)
        self.time_mix = TimeMix(n_embd, head_size, store_shift)
        self.ffn_gate, self.ffn_up = (nn.Linear(n_embd, 2 * n_embd, bias=False) for _ in range(2))
        self.ffn_down = nn.Linear(2 * n_embd, n_embd, bias=False)


class RWKV6Qwen2(nn.Module):
    """`forward(tokens, state)` gives the logits and the state to continue from."""

    def __init__(self, n_vocab: int, n_embd: int, n_layer: int, head_size: int, store_shift: bool) -> None:
        super().__init__()
        self.n_embd, self.head_size = n_embd, head_size
        self.tok_embd = nn.Embedding(n_vocab, n_embd)
        self.layers = nn.ModuleList([Layer(n_embd, head_size, store_shift) for _ in range(n_layer)])
        self.output_norm = nn.RMSNorm(n_embd)
        self.output = nn.Linear(n_embd, n_vocab, bias=False)

    def init_state(self, n_seqs: int) -> State:
        """State before the first token."""
        weight = self.tok_embd.weight
        wkv = weight.new_zeros(n_seqs, self.n_embd // self.head_size, self.head_size, self.head_size)
        return [(weight.new_zeros(n_seqs, self.n_embd), wkv) for _ in self.layers]

    def forward(self, tokens: torch.Tensor, state: State | None = None) -> tuple[torch.Tensor, State]:
        """Logits of `tokens`, (sequences, tokens)."""
        if state is None:
            state = self.init_state(len(tokens))
        x = self.tok_embd(tokens)
        new_state: State = []
        for layer, (shift, wkv) in zip(self.layers, state, strict=True):
            out, shift, wkv = layer.time_mix(layer.attn_norm(x), shift, wkv)
            new_state.append((shift, wkv))
            x = x + out
            normed = layer.ffn_norm(x)
            x = x + layer.ffn_down(F.silu(layer.ffn_gate(normed)) * layer.ffn_up(normed))
        return self.output(self.output_norm(x)), new_state


def buggy() -> nn.Module:
    """The shift state stays at zero."""
    return RWKV6Qwen2(40, 32, 2, 8, store_shift=False)


def healthy() -> nn.Module:
    """The shift state is the last token's activation."""
    return RWKV6Qwen2(40, 32, 2, 8, store_shift=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """The state continues a sequence."""
    return ModelSpec.of(make, decode=lambda model, tokens, state: model(tokens, state))


def observe(model: nn.Module) -> torch.Tensor:
    """Logits of a prompt and four single tokens, less those of one call."""
    tokens = torch.randint(0, 40, (2, 10), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole, _ = model(tokens)
        logits, state = model(tokens[:, :6])
        parts = [logits]
        for t in range(6, 10):
            logits, state = model(tokens[:, t : t + 1], state)
            parts.append(logits)
    return torch.cat(parts, dim=1) - whole
