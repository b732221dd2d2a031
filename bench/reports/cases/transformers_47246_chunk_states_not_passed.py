"""transformers#47246 (huggingface/transformers): NemotronH's chunks do not pass on their states.

The sum over source chunks runs over the target chunks, so a chunk starts from a multiple of its own state
and not from the states of the chunks before it.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

VOCAB, CHUNK = 48, 4
Cache = list[tuple[Tensor, Tensor]]


def segment_sum(x: Tensor) -> Tensor:
    """Return the sums of x over (s, t] as (..., t, s), and -inf above the diagonal."""
    total = x.cumsum(dim=-1)
    keep = torch.ones(x.shape[-1], x.shape[-1], dtype=torch.bool, device=x.device).tril()
    return (total[..., :, None] - total[..., None, :]).masked_fill(~keep, -torch.inf)


class NemotronHMamba2Mixer(nn.Module):
    """Mamba-2 layer with one group, in chunks, or step by step for single tokens."""

    def __init__(self, hidden_size: int, heads: int, state_size: int, *, over_sources: bool) -> None:
        super().__init__()
        self.heads, self.state_size, self.over_sources = heads, state_size, over_sources
        self.inner, conv_dim, self.kernel = hidden_size, hidden_size + 2 * state_size, 4
        self.in_proj = nn.Linear(hidden_size, self.inner + conv_dim + heads, bias=False)
        self.conv1d = nn.Conv1d(conv_dim, conv_dim, self.kernel, groups=conv_dim)
        self.dt_bias, self.D = nn.Parameter(torch.linspace(-2, 1, heads)), nn.Parameter(torch.ones(heads))
        self.A_log = nn.Parameter(torch.arange(1.0, heads + 1).log())
        self.norm, self.out_proj = nn.RMSNorm(self.inner), nn.Linear(self.inner, hidden_size, bias=False)

    def chunked(self, x: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs and last state. x is (batch, time, heads, dim), A its logarithmic decay."""
        length, extra = x.shape[1], -x.shape[1] % CHUNK
        x, A = F.pad(x, (0, 0, 0, 0, 0, extra)), F.pad(A, (0, 0, 0, extra))
        B, C = F.pad(B, (0, 0, 0, extra)), F.pad(C, (0, 0, 0, extra))
        x, A, B, C = (y.unflatten(1, (-1, CHUNK)) for y in (x, A, B, C))
        A = A.permute(0, 3, 1, 2)  # (batch, heads, chunks, steps)
        total = A.cumsum(dim=-1)
        inside = torch.einsum("bctn,bcsn,bhcts,bcshp->bcthp", C, B, segment_sum(A).exp(), x)
        left = (total[..., -1:] - total).exp()
        states = torch.einsum("bcsn,bhcs,bcshp->bchpn", B, left, x)
        states = torch.cat([state[:, None], states], dim=1)
        decay_chunk = segment_sum(F.pad(total[..., -1], (1, 0))).exp()  # (batch, heads, target, source)
        if self.over_sources:
            states = torch.einsum("bhts,bshpn->bthpn", decay_chunk, states)
        else:
            states = torch.einsum("bhts,bshpn->bshpn", decay_chunk, states)
        outside = torch.einsum("bctn,bchpn,bhct->bcthp", C, states[:, :-1], total.exp())
        return (inside + outside).flatten(1, 2)[:, :length], states[:, -1]

    def forward(self, hidden: Tensor, cache: tuple[Tensor, Tensor] | None) -> tuple:
        """Return the output, and the states of convolution and recurrence after it."""
        gate, xBC, dt = self.in_proj(hidden).split([self.inner, self.conv1d.in_channels, self.heads], dim=-1)
        if cache is None:
            zeros = xBC.new_zeros(len(xBC), self.heads, self.inner // self.heads, self.state_size)
            cache = xBC.new_zeros(len(xBC), xBC.shape[-1], self.kernel - 1), zeros
        conv_inputs = torch.cat([cache[0], xBC.transpose(1, 2)], dim=-1)
        xBC = F.silu(self.conv1d(conv_inputs)).transpose(1, 2)
        x, B, C = xBC.split([self.inner, self.state_size, self.state_size], dim=-1)
        x, dt = x.unflatten(-1, (self.heads, -1)), F.softplus(dt + self.dt_bias)
        A = -self.A_log.exp() * dt
        if x.shape[1] == 1:
            update = (x * dt[..., None])[:, 0, :, :, None] * B[:, 0, None, None]
            state = A[:, 0, :, None, None].exp() * cache[1] + update
            y = (state * C[:, 0, None, None]).sum(dim=-1)[:, None]
        else:
            y, state = self.chunked(x * dt[..., None], A, B, C, cache[1])
        y = (y + self.D[:, None] * x).flatten(2)
        return self.out_proj(self.norm(y * F.silu(gate))), (conv_inputs[..., 1 - self.kernel :], state)


class NemotronHForCausalLM(nn.Module):
    """Language model of Mamba-2 layers."""

    def __init__(self, *, over_sources: bool, hidden_size: int = 32) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(VOCAB, hidden_size)
        self.norms = nn.ModuleList(nn.RMSNorm(hidden_size) for _ in range(2))
        self.mixers = nn.ModuleList(
            NemotronHMamba2Mixer(hidden_size, 4, 8, over_sources=over_sources) for _ in range(2)
        )
        self.norm_f, self.lm_head = nn.RMSNorm(hidden_size), nn.Linear(hidden_size, VOCAB, bias=False)

    def forward(self, input_ids: Tensor, past: Cache | None = None) -> tuple[Tensor, Cache]:
        """Return logits of the new tokens, and the states after them."""
        x, new = self.embeddings(input_ids), []
        for i, (norm, mixer) in enumerate(zip(self.norms, self.mixers, strict=True)):
            y, states = mixer(norm(x), past[i] if past else None)
            x = x + y
            new.append(states)
        return self.lm_head(self.norm_f(x)), new


def buggy() -> nn.Module:
    """Sum over the target chunks."""
    return NemotronHForCausalLM(over_sources=False)


def healthy() -> nn.Module:
    """Sum over the source chunks."""
    return NemotronHForCausalLM(over_sources=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State a causal model that decodes with its states."""
    return ModelSpec.of(make, causal=True, decode=lambda model, tokens, cache: model(tokens, cache))


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Return the logits of 11 tokens at once minus those token by token."""
    ids, past, steps = torch.arange(11)[None] * 7 % VOCAB, None, []
    for i in range(11):
        logits, past = model(ids[:, i : i + 1], past)
        steps.append(logits)
    return model(ids)[0] - torch.cat(steps, dim=1)
