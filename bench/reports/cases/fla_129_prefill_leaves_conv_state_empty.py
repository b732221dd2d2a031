"""flash-linear-attention#129 (fla-org): the prefill of Mamba-2 does not store the state of its convolution.

Only the state of the recurrence is stored, so the convolutions of the next three tokens read zeros.
"""

from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

VOCAB, DIM, HEADS, HEAD_DIM, STATE, KERNEL, LAYERS = 64, 32, 4, 16, 8, 4, 2
INNER, CONV = HEADS * HEAD_DIM, HEADS * HEAD_DIM + 2 * STATE


class Mamba2Cache:
    """States of the convolution and of the recurrence of each layer."""

    def __init__(self, embeddings: Tensor) -> None:
        batch, self.seqlen_offset = len(embeddings), 0
        self.conv_states = [embeddings.new_zeros(batch, CONV, KERNEL - 1)] * LAYERS
        self.ssm_states = [embeddings.new_zeros(batch, HEADS, HEAD_DIM, STATE)] * LAYERS


Opt, Past = Tensor | None, Mamba2Cache | None


class Mamba2Mixer(nn.Module):
    """Convolution, selective recurrence with a scalar decay per head, and a gated norm."""

    def __init__(self, layer_idx: int, stores_conv: bool) -> None:
        super().__init__()
        self.layer_idx, self.stores_conv = layer_idx, stores_conv
        self.conv1d = nn.Conv1d(CONV, CONV, KERNEL, groups=CONV)
        dt = torch.exp(torch.empty(HEADS).uniform_(-6.9, -2.3))
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))  # softplus gives dt
        self.A_log = nn.Parameter(torch.empty(HEADS).uniform_(1, 16).log())
        self.D, self.norm = nn.Parameter(torch.ones(HEADS)), nn.RMSNorm(INNER, 1e-5)
        self.in_proj = nn.Linear(DIM, INNER + CONV + HEADS, bias=False)
        self.out_proj = nn.Linear(INNER, DIM, bias=False)

    def forward(self, hidden_states: Tensor, cache: Mamba2Cache, keep: Tensor) -> Tensor:
        gate, xBC, dt = self.in_proj(hidden_states * keep).split([INNER, CONV, HEADS], dim=-1)
        xBC = torch.cat([cache.conv_states[self.layer_idx], xBC.mT], dim=-1)
        if self.stores_conv or cache.seqlen_offset > 0:
            cache.conv_states[self.layer_idx] = xBC[..., 1 - KERNEL :]
        x, B, C = (F.silu(self.conv1d(xBC)).mT * keep).split([INNER, STATE, STATE], dim=-1)
        x, dt, ys = x.unflatten(-1, (HEADS, HEAD_DIM)), F.softplus(dt + self.dt_bias), []
        state, decay = cache.ssm_states[self.layer_idx], (-dt * self.A_log.exp()).exp()
        for t, dx in enumerate((dt[..., None] * x).unbind(dim=1)):
            state = state * decay[:, t, :, None, None] + dx[..., None] * B[:, t, None, None]
            ys.append((state * C[:, t, None, None]).sum(dim=-1) + self.D[:, None] * x[:, t])
        cache.ssm_states[self.layer_idx] = state
        return self.out_proj(self.norm(torch.stack(ys, dim=1).flatten(2) * F.silu(gate)))


class Mamba2ForCausalLM(nn.Module):
    """Language model whose layers are mixers behind norms."""

    def __init__(self, *, stores_conv: bool) -> None:
        super().__init__()
        self.embeddings, self.norm_f = nn.Embedding(VOCAB, DIM), nn.RMSNorm(DIM, 1e-5)
        self.norms = nn.ModuleList(nn.RMSNorm(DIM, 1e-5) for _ in range(LAYERS))
        self.mixers = nn.ModuleList(Mamba2Mixer(i, stores_conv) for i in range(LAYERS))
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(
        self, input_ids: Tensor, attention_mask: Opt = None, cache_params: Past = None, use_cache: bool = True
    ) -> SimpleNamespace:
        x = self.embeddings(input_ids)
        cache = Mamba2Cache(x) if cache_params is None else cache_params
        keep = torch.ones_like(input_ids) if attention_mask is None else attention_mask[:, -x.shape[1] :]
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            x = x + mixer(norm(x), cache, keep[..., None].to(x.dtype))
        cache.seqlen_offset += x.shape[1]
        return SimpleNamespace(logits=self.lm_head(self.norm_f(x)), cache_params=cache if use_cache else None)


def buggy() -> nn.Module:
    return Mamba2ForCausalLM(stores_conv=False)


def healthy() -> nn.Module:
    return Mamba2ForCausalLM(stores_conv=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    return ModelSpec.of(make, causal=True, padding_sides=("left",))


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Logits of six tokens that follow a prompt in the cache, less those of one pass (first entries)."""
    ids = torch.arange(3, 15)[None]
    cache = model(ids[:, :6]).cache_params
    steps = [model(token, cache_params=cache).logits for token in ids[:, 6:].split(1, dim=1)]
    return (torch.cat(steps, dim=1) - model(ids).logits[:, 6:])[0, :, :3]
