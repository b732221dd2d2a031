"""mlx-lm#1153 (ml-explore/mlx-lm): the fused decode step of Mamba adds the bias of the time step twice.

`dt_proj` has added its bias already when the kernel gets the time step, and the kernel adds the same bias
again. Texts of several tokens take another path, which adds it once.
"""

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec


class ArraysCache:
    """State of a layer: the last inputs of the convolution, and the state of the recurrence."""

    def __init__(self) -> None:
        self.cache: list[torch.Tensor | None] = [None, None]


class MambaBlock(nn.Module):
    """Causal convolution and selective recurrence."""

    def __init__(self, hidden_size: int, state_size: int, conv_kernel: int, *, adds_again: bool) -> None:
        super().__init__()
        inner, self.time_step_rank = 2 * hidden_size, hidden_size // 8
        self.state_size, self.conv_kernel, self.adds_again = state_size, conv_kernel, adds_again
        self.in_proj = nn.Linear(hidden_size, 2 * inner, bias=False)
        self.conv1d = nn.Conv1d(inner, inner, conv_kernel, groups=inner)
        self.x_proj = nn.Linear(inner, self.time_step_rank + 2 * state_size, bias=False)
        self.dt_proj = nn.Linear(self.time_step_rank, inner)
        self.A_log = nn.Parameter(torch.arange(1.0, state_size + 1).log().repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner))
        self.out_proj = nn.Linear(inner, hidden_size, bias=False)
        dt = 0.001 * 100 ** torch.rand(inner)  # from 0.001 to 0.1
        with torch.no_grad():
            self.dt_proj.bias.copy_(dt + (-torch.expm1(-dt)).log())  # inverse of softplus

    def ssm_step(
        self, x: torch.Tensor, delta: torch.Tensor, b: torch.Tensor, c: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output of one token and the next state."""
        delta = F.softplus(delta)
        decay = (delta[..., None] * -self.A_log.exp()).exp()
        state = decay * state + (delta * x)[..., None] * b[:, None]
        return (state * c[:, None]).sum(dim=-1) + self.D * x, state

    def fused_step(
        self, x: torch.Tensor, delta: torch.Tensor, b: torch.Tensor, c: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Step of the decode kernel, which adds the bias itself."""
        raw = delta if self.adds_again else delta - self.dt_proj.bias
        return self.ssm_step(x, raw + self.dt_proj.bias, b, c, state)

    def forward(self, x: torch.Tensor, cache: ArraysCache | None = None) -> torch.Tensor:
        """Apply the block to (batch, time, hidden_size); the cache is updated."""
        x, z = self.in_proj(x).chunk(2, dim=-1)
        conv_state, state = cache.cache if cache is not None else (None, None)
        decodes = state is not None and x.shape[1] == 1
        if conv_state is None:
            conv_state = x.new_zeros(len(x), self.conv_kernel - 1, x.shape[2])
        if state is None:
            state = x.new_zeros(len(x), x.shape[2], self.state_size)
        full = torch.cat([conv_state, x], dim=1)
        x = F.silu(self.conv1d(full.transpose(1, 2)).transpose(1, 2))
        sizes = [self.time_step_rank, self.state_size, self.state_size]
        delta, b, c = self.x_proj(x).split(sizes, dim=-1)
        delta, step, outputs = self.dt_proj(delta), self.fused_step if decodes else self.ssm_step, []
        for t in range(x.shape[1]):
            y, state = step(x[:, t], delta[:, t], b[:, t], c[:, t], state)
            outputs.append(y)
        if cache is not None:
            cache.cache = [full[:, 1 - self.conv_kernel :], state]
        return self.out_proj(torch.stack(outputs, dim=1) * F.silu(z))


class Model(nn.Module):
    """Mamba language model with a tied head."""

    def __init__(self, *, adds_again: bool, vocab_size: int = 72, hidden_size: int = 32) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(vocab_size, hidden_size)
        nn.init.normal_(self.embeddings.weight, std=0.02)
        self.norms = nn.ModuleList(nn.RMSNorm(hidden_size, eps=1e-5) for _ in range(2))
        self.mixers = nn.ModuleList(MambaBlock(hidden_size, 8, 4, adds_again=adds_again) for _ in range(2))
        self.norm_f = nn.RMSNorm(hidden_size, eps=1e-5)

    def make_cache(self) -> list[ArraysCache]:
        """Return the state before the first token."""
        return [ArraysCache() for _ in self.mixers]

    def forward(self, inputs: torch.Tensor, cache: list[ArraysCache] | None = None) -> torch.Tensor:
        """Return logits of the new tokens; the cache is updated."""
        x = self.embeddings(inputs)
        for i, (norm, mixer) in enumerate(zip(self.norms, self.mixers, strict=True)):
            x = x + mixer(norm(x), cache[i] if cache is not None else None)
        return F.linear(self.norm_f(x), self.embeddings.weight)


def buggy() -> nn.Module:
    """The kernel gets a time step with its bias."""
    return Model(adds_again=True)


def healthy() -> nn.Module:
    """The kernel gets a time step without its bias."""
    return Model(adds_again=False)


def _decode(
    model: nn.Module, tokens: torch.Tensor, cache: list[ArraysCache] | None
) -> tuple[torch.Tensor, list[ArraysCache]]:
    cache = model.make_cache() if cache is None else cache
    return model(tokens, cache=cache), cache


def buggy_declared() -> ModelSpec:
    """State a causal model with a state and a tied head."""
    return ModelSpec.of(buggy, causal=True, tied=True, decode=_decode)


def healthy_declared() -> ModelSpec:
    """State a causal model with a state and a tied head."""
    return ModelSpec.of(healthy, causal=True, tied=True, decode=_decode)


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Return the logits of four tokens and single steps after them minus those of one call."""
    ids = torch.randint(0, 72, (2, 9), generator=torch.Generator().manual_seed(1))
    cache = model.make_cache()
    outputs = [model(ids[:, :4], cache), *(model(ids[:, i : i + 1], cache) for i in range(4, 9))]
    return torch.cat(outputs, dim=1) - model(ids)
