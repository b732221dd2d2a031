"""physical-ai-studio#873 (open-edge-platform/physical-ai-studio): SmolVLA trains on padded actions.

The loss looks for the padding mask under the key "extra.actions_id_pad". The data has "extra.action_is_pad",
so that no action is masked. https://github.com/open-edge-platform/physical-ai-studio/pull/873
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from stackwise import ModelSpec

DIM, ACTION_DIM = 32, 6
Batch = dict[str, Tensor]


class VLAFlowMatching(nn.Module):
    """Velocity of noisy actions (B, steps, 6), given images, an instruction and the state of the robot."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_image, self.embed_language = nn.Conv2d(3, DIM, 8, stride=8), nn.Embedding(40, DIM)
        self.state_proj, self.action_in_proj = nn.Linear(ACTION_DIM, DIM), nn.Linear(ACTION_DIM, DIM)
        self.action_time_mlp = nn.Sequential(nn.Linear(2 * DIM, DIM), nn.SiLU(), nn.Linear(DIM, DIM))
        self.positions = nn.Parameter(0.1 * torch.randn(64, DIM))
        sizes = {"dim_feedforward": 64, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(DIM, 4, **sizes) for _ in range(2))
        self.norm, self.action_out_proj = nn.LayerNorm(DIM), nn.Linear(DIM, ACTION_DIM)

    def forward(self, batch: Batch, x_t: Tensor, time: Tensor) -> Tensor:
        images, state = self.embed_image(batch["images"]).flatten(2).mT, self.state_proj(batch["state"])
        prefix = torch.cat([images, self.embed_language(batch["tokens"]), state[:, None]], dim=1)
        period = 4e-3 * 1000 ** torch.linspace(0, 1, DIM // 2, device=time.device)
        angles = 2 * math.pi * time[:, None, None].expand(-1, x_t.shape[1], -1) / period
        suffix = torch.cat([self.action_in_proj(x_t), angles.sin(), angles.cos()], dim=2)
        x = torch.cat([prefix, self.action_time_mlp(suffix)], dim=1)
        seen = nn.functional.pad(batch["token_masks"], (images.shape[1], 1 + x_t.shape[1]), value=True)
        block = (torch.arange(x.shape[1], device=x.device) - prefix.shape[1] + 2).clamp(min=0)
        x = x + self.positions[: x.shape[1]]
        for layer in self.layers:  # the state and each action see what is before them
            x = layer(x, src_mask=block > block[:, None], src_key_padding_mask=~seen)
        return self.action_out_proj(self.norm(x[:, prefix.shape[1] :]))


class SmolVLAModel(nn.Module):
    """Loss of a batch in training, and chunks of 8 actions otherwise."""

    def __init__(self, *, pad_key: str) -> None:
        super().__init__()
        self.pad_key, self._model = pad_key, VLAFlowMatching()

    def forward(self, batch: Batch) -> Tensor | tuple[Tensor, dict[str, float]]:
        return self.compute_loss(batch) if self.training else self.predict_action_chunk(batch)

    def compute_loss(self, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        actions, actions_is_pad = batch["action"], batch.get(self.pad_key)
        noise, time = torch.randn_like(actions), torch.rand_like(actions[:, 0, 0]) * 0.999 + 0.001
        x_t = time[:, None, None] * noise + (1 - time[:, None, None]) * actions
        losses = (noise - actions - self._model(batch, x_t, time)).square()
        loss = losses.mean() if actions_is_pad is None else losses[~actions_is_pad].mean()
        return loss, {"loss": loss.item()}

    @torch.no_grad()
    def predict_action_chunk(self, batch: Batch, num_steps: int = 10) -> Tensor:
        x_t = torch.randn(len(batch["state"]), 8, ACTION_DIM).to(batch["state"])
        for step in range(num_steps):
            time = torch.full_like(x_t[:, 0, 0], 1 - step / num_steps)
            x_t = x_t - self._model(batch, x_t, time) / num_steps
        return x_t


def buggy() -> nn.Module:
    """A key that no batch has."""
    return SmolVLAModel(pad_key="extra.actions_id_pad")


def healthy() -> nn.Module:
    """The key of the data."""
    return SmolVLAModel(pad_key="extra.action_is_pad")


def batch_of(actions: Tensor) -> Batch:
    """Fixed observations. The last 3 actions are padding."""
    rows, steps = actions.shape[:2]
    is_pad = (torch.arange(steps, device=actions.device) >= max(steps - 3, 1)).expand(rows, -1)
    batch = {"images": actions.new_ones(rows, 3, 16, 16), "state": actions.new_ones(rows, 6)}
    batch["token_masks"] = actions.new_ones(rows, 5).bool()
    return batch | {"tokens": batch["token_masks"].long(), "action": actions, "extra.action_is_pad": is_pad}


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """Velocity of noisy actions, and the loss of a batch whose last actions are padding."""

    def forward(model: nn.Module, x_t: Tensor) -> Tensor:
        return model._model(batch_of(x_t), x_t, torch.full_like(x_t[:, 0, 0], 0.5))

    calls = {"forward": forward, "loss": lambda model, actions: model.compute_loss(batch_of(actions))[0]}
    return ModelSpec.of(make, inputs="vectors", width=6, seq_len=8, max_length=50, **calls)


def observe(model: nn.Module) -> float:
    """Change of the loss if the padded actions change."""
    losses = []
    for value in (1.0, 5.0):
        torch.manual_seed(1)
        actions = nn.functional.pad(torch.ones(2, 5, 6), (0, 0, 0, 3), value=value)
        losses.append(model.compute_loss(batch_of(actions))[0].item())
    return losses[1] - losses[0]
