"""video-prediction-policy#15 (roboterax/video-prediction-policy): a denoiser learns to predict its own loss.

The policy expects the target and the output of the denoiser, and takes their mean square error. The method
that it calls returns the loss and the output. All actions are regressed to one number, which is the loss.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

ACTION, STATE, GOAL, STATES, HORIZON = 7, 12, 10, 3, 16


class Block(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        """`x` is (batch, tokens, dim)."""
        q, k, v = self.qkv(self.ln_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class DiffusionTransformer(nn.Module):
    """Tokens of the noise level, the goal, the states and the actions."""

    def __init__(self, dim: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.tok_emb, self.goal_emb, self.action_emb = (nn.Linear(n, dim) for n in (STATE, GOAL, ACTION))
        self.sigma_emb = nn.Sequential(nn.Linear(1, dim), nn.GELU(), nn.Linear(dim, dim))
        self.pos_emb = nn.Parameter(torch.randn(2 + STATES + HORIZON, dim) * 0.1)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(2))
        self.ln_f, self.action_pred = nn.LayerNorm(dim), nn.Linear(dim, ACTION)

    def forward(self, states: Tensor, actions: Tensor, goals: Tensor, sigma: Tensor) -> Tensor:
        """Return (batch, horizon, ACTION)."""
        x = torch.cat(
            [
                self.sigma_emb(sigma.log()[:, None] / 4)[:, None],
                self.goal_emb(goals)[:, None],
                self.tok_emb(states),
                self.action_emb(actions),
            ],
            dim=1,
        )
        x = x + self.pos_emb[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.action_pred(self.ln_f(x[:, -actions.shape[1] :]))


class GCDenoiser(nn.Module):
    """Preconditioning of arXiv:2206.00364."""

    def __init__(self, *, returns_target: bool, sigma_data: float = 0.5) -> None:
        super().__init__()
        self.returns_target, self.sigma_data = returns_target, sigma_data
        self.inner_model = DiffusionTransformer()

    def get_scalings(self, sigma: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the factors of the input, of the output, and of the input of the network."""
        total = sigma.square() + self.sigma_data**2
        c_skip, c_out, c_in = (
            self.sigma_data**2 / total,
            sigma * self.sigma_data / total.sqrt(),
            total.rsqrt(),
        )
        return c_skip[:, None, None], c_out[:, None, None], c_in[:, None, None]

    def loss(
        self, state: Tensor, action: Tensor, goal: Tensor, noise: Tensor, sigma: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return what the caller takes for the target, and the output."""
        c_skip, c_out, c_in = self.get_scalings(sigma)
        noised_input = action + noise * sigma[:, None, None]
        model_output = self.inner_model(state, noised_input * c_in, goal, sigma)
        target = (action - c_skip * noised_input) / c_out
        if self.returns_target:
            return target, model_output
        return (model_output - target).square().flatten(1).mean(), model_output

    def forward(self, state: Tensor, action: Tensor, goal: Tensor, sigma: Tensor) -> Tensor:
        """Return the denoised actions."""
        c_skip, c_out, c_in = self.get_scalings(sigma)
        return self.inner_model(state, action * c_in, goal, sigma) * c_out + action * c_skip


class VPPPolicy(nn.Module):
    """Policy that denoises the actions."""

    def __init__(self, *, returns_target: bool) -> None:
        super().__init__()
        self.model = GCDenoiser(returns_target=returns_target)

    def diffusion_loss(self, perceptual_emb: Tensor, goal: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the result of the denoiser at random noise levels around 0.5."""
        sigmas = (torch.randn_like(actions[:, 0, 0]) - 0.7).exp()
        return self.model.loss(perceptual_emb, actions, goal, torch.randn_like(actions), sigmas)

    def training_step(self, perceptual_emb: Tensor, goal: Tensor, actions: Tensor) -> Tensor:
        """Return the loss of the actions."""
        target, model_output = self.diffusion_loss(perceptual_emb, goal, actions)
        return (model_output - target).square().mean()

    def forward(self, perceptual_emb: Tensor, goal: Tensor, actions: Tensor, sigma: Tensor) -> Tensor:
        """Return the denoised actions."""
        return self.model(perceptual_emb, actions, goal, sigma)


def buggy() -> nn.Module:
    """Return the loss."""
    return VPPPolicy(returns_target=False)


def healthy() -> nn.Module:
    """Return the target."""
    return VPPPolicy(returns_target=True)


def _condition(actions: Tensor) -> tuple[Tensor, Tensor]:
    """Return states and a goal."""
    states = torch.linspace(-1, 1, STATES * STATE).to(actions).view(STATES, STATE)
    return states.expand(len(actions), -1, -1), torch.linspace(1, -1, GOAL).to(actions).expand(
        len(actions), -1
    )


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State actions, denoised together, and the loss of a training step."""
    return ModelSpec.of(
        make,
        inputs="vectors",
        width=ACTION,
        causal=False,
        max_length=HORIZON,
        forward=lambda model, actions: model(
            *_condition(actions), actions, torch.full_like(actions[:, 0, 0], 0.4)
        ),
        loss=lambda model, actions: model.training_step(*_condition(actions), actions),
    )


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Return how many numbers of the output have no target of their own."""
    actions = torch.randn(3, 8, ACTION, generator=torch.Generator().manual_seed(1))
    target, model_output = model.diffusion_loss(*_condition(actions), actions)
    return torch.tensor(model_output.numel() - target.numel())
