"""alphafold3-pytorch#113 (lucidrains/alphafold3-pytorch): diffusion transformer without residuals.

The output of a block is the sum of its attention and its transition, as in the pseudocode of the paper, and
the representation that they read is dropped.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

DIM_SINGLE, DIM_PAIR, COORDINATES = 16, 8, 3


class AdaptiveLayerNorm(nn.Module):
    """Norm whose gain and shift depend on the condition."""

    def __init__(self, dim: int, dim_cond: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)
        self.norm_cond = nn.LayerNorm(dim_cond, bias=False)
        self.to_gamma, self.to_beta = nn.Linear(dim_cond, dim), nn.Linear(dim_cond, dim, bias=False)

    def forward(self, x: Tensor, cond: Tensor) -> Tensor:
        """`x` is (b, n, dim), `cond` is (b, n, dim_cond)."""
        cond = self.norm_cond(cond)
        return self.norm(x) * self.to_gamma(cond).sigmoid() + self.to_beta(cond)


class AttentionPairBias(nn.Module):
    """Gated attention whose scores have a bias from the pair representation."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q, self.to_kv = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim, bias=False)
        self.to_gates, self.to_out = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.to_bias = nn.Sequential(nn.LayerNorm(DIM_PAIR), nn.Linear(DIM_PAIR, heads, bias=False))

    def forward(self, x: Tensor, pairwise_repr: Tensor, mask: Tensor | None) -> Tensor:
        """`mask` (b, n) is true where there is a token."""
        bias = self.to_bias(pairwise_repr).permute(0, 3, 1, 2)
        if mask is not None:
            bias = bias.masked_fill(~mask[:, None, None], torch.finfo(bias.dtype).min)
        projected = (self.to_q(x), *self.to_kv(x).chunk(2, dim=-1))
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in projected)
        out = F.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2).flatten(2)
        return self.to_out(out * self.to_gates(x).sigmoid())


class Transition(nn.Module):
    """Feed-forward network with a SwiGLU."""

    def __init__(self, dim: int, expansion: int = 2) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 2 * expansion * dim, bias=False)
        self.down = nn.Linear(expansion * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`x` is (b, n, dim)."""
        x, gate = self.up(x).chunk(2, dim=-1)
        return self.down(x * F.silu(gate))


class ConditionWrapper(nn.Module):
    """Conditions the input of a branch, and gates its output by the condition."""

    def __init__(self, branch: nn.Module, dim: int) -> None:
        super().__init__()
        self.branch, self.adaptive_norm = branch, AdaptiveLayerNorm(dim, DIM_SINGLE)
        self.to_gamma = nn.Linear(DIM_SINGLE, dim)
        nn.init.zeros_(self.to_gamma.weight)
        nn.init.constant_(self.to_gamma.bias, -2.0)

    def forward(self, x: Tensor, cond: Tensor, *args: Tensor | None) -> Tensor:
        """`x` is (b, n, dim), `cond` is (b, n, DIM_SINGLE)."""
        return self.branch(self.adaptive_norm(x, cond), *args) * self.to_gamma(cond).sigmoid()


class DiffusionTransformer(nn.Module):
    """Blocks of attention and transition in parallel."""

    def __init__(self, dim: int, depth: int, heads: int, *, residual: bool) -> None:
        super().__init__()
        self.residual = residual
        pairs = [(AttentionPairBias(dim, heads), Transition(dim)) for _ in range(depth)]
        self.attns = nn.ModuleList(ConditionWrapper(attn, dim) for attn, _ in pairs)
        self.transitions = nn.ModuleList(ConditionWrapper(transition, dim) for _, transition in pairs)

    def forward(
        self, noised_repr: Tensor, *, single_repr: Tensor, pairwise_repr: Tensor, mask: Tensor | None
    ) -> Tensor:
        """`noised_repr` is (b, n, dim)."""
        for attn, transition in zip(self.attns, self.transitions, strict=True):
            attn_out = attn(noised_repr, single_repr, pairwise_repr, mask)
            ff_out = transition(noised_repr, single_repr)
            noised_repr = ff_out + attn_out + (noised_repr if self.residual else 0.0)
        return noised_repr


class DiffusionModule(nn.Module):
    """Denoises the coordinates of the tokens of a molecule."""

    def __init__(self, *, residual: bool, dim: int = 32) -> None:
        super().__init__()
        self.to_repr = nn.Linear(COORDINATES, dim, bias=False)
        self.transformer = DiffusionTransformer(dim, 3, 4, residual=residual)
        self.to_update = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, COORDINATES, bias=False))

    def forward(
        self, noised: Tensor, single_repr: Tensor, pairwise_repr: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """`noised` is (b, n, COORDINATES), `pairwise_repr` is (b, n, n, DIM_PAIR)."""
        conditions = {"single_repr": single_repr, "pairwise_repr": pairwise_repr, "mask": mask}
        return self.to_update(self.transformer(self.to_repr(noised), **conditions))


def buggy() -> nn.Module:
    """Attention plus transition."""
    return DiffusionModule(residual=False)


def healthy() -> nn.Module:
    """Attention plus transition plus their input."""
    return DiffusionModule(residual=True)


def _conditions(noised: Tensor) -> tuple[Tensor, Tensor]:
    """Single and pair representations of one molecule, of as many tokens as there are."""
    index = torch.arange(noised.shape[1], device=noised.device).to(noised.dtype)
    single = (index[:, None] * torch.linspace(0.1, 1.5, DIM_SINGLE).to(noised)).sin()
    offsets = (index[:, None] - index)[..., None]
    pair = (offsets * torch.linspace(0.05, 1, DIM_PAIR).to(noised) + 1).sin()
    return single.expand(len(noised), -1, -1), pair.expand(len(noised), -1, -1, -1)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """Coordinates of tokens that all see each other, and a padding mask."""
    return ModelSpec.of(
        make,
        inputs="vectors",
        width=COORDINATES,
        causal=False,
        forward=lambda model, noised: model(noised, *_conditions(noised)),
        masked=lambda model, noised, keep: model(noised, *_conditions(noised), keep),
    )


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Output of the transformer, less its input, if the gates of all branches are closed."""
    for wrapper in (*model.transformer.attns, *model.transformer.transitions):
        wrapper.to_gamma.bias.fill_(-1e4)
    noised = torch.randn(2, 6, COORDINATES, generator=torch.Generator().manual_seed(1))
    single, pair = _conditions(noised)
    x = model.to_repr(noised)
    return model.transformer(x, single_repr=single, pairwise_repr=pair, mask=None) - x
