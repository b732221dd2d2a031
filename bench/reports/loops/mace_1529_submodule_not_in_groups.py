"""mace#1529 (ACEsuit/mace): submodules that the list of parameter groups does not name are never trained.

The groups are written out by name, and newer parts of the model stay at their initialisation.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Interaction(nn.Module):
    """Exchange of a position with its past."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.linear_up = nn.Linear(channels, channels)
        self.message = nn.Linear(channels, channels)

    def forward(self, feats: torch.Tensor) -> torch.Tensor:
        """Messages from earlier positions."""
        length = feats.shape[1]
        weights = torch.ones(length, length, device=feats.device).tril()
        weights = weights / weights.sum(-1, keepdim=True)
        return self.message(F.silu(weights @ self.linear_up(feats)))


class PolarModel(nn.Module):
    """Interactions and products, with source maps that later versions added."""

    def __init__(self, elements: int = 56, channels: int = 32) -> None:
        super().__init__()
        self.node_embedding = nn.Embedding(elements, channels)
        self.interactions = nn.ModuleList(Interaction(channels) for _ in range(2))
        self.products = nn.ModuleList(nn.Linear(channels, channels) for _ in range(2))
        self.lr_source_maps = nn.ModuleList(nn.Linear(channels, channels) for _ in range(2))
        self.fukui_source_map = nn.Linear(channels, channels)
        self.readouts = nn.Linear(channels, elements)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits for the next token."""
        feats = self.node_embedding(ids)
        charges = torch.zeros_like(feats)
        for interact, product, source in zip(
            self.interactions, self.products, self.lr_source_maps, strict=True
        ):
            feats = feats + product(interact(feats))
            charges = charges + source(feats)
        return self.readouts(feats + self.fukui_source_map(torch.tanh(charges)))


def get_params_options(model: PolarModel, lr: float, decay: float) -> list[dict[str, Any]]:
    """The parameter groups of the optimizer."""
    return [
        {"name": "embedding", "params": list(model.node_embedding.parameters()), "weight_decay": 0.0},
        {"name": "interactions", "params": list(model.interactions.parameters()), "weight_decay": decay},
        {"name": "products", "params": list(model.products.parameters()), "weight_decay": decay},
        {"name": "readouts", "params": list(model.readouts.parameters()), "weight_decay": 0.0, "lr": lr},
    ]


def get_all_params_options(model: PolarModel, lr: float, decay: float) -> list[dict[str, Any]]:
    """The same groups and those of the optional submodules."""
    options = get_params_options(model, lr, decay)
    for name in ("lr_source_maps", "fukui_source_map"):
        module = getattr(model, name)
        options.append({"name": name, "params": list(module.parameters()), "weight_decay": 0.0})
    claimed = {id(p) for group in options for p in group["params"]}
    missing = [name for name, p in model.named_parameters() if id(p) not in claimed]
    if missing:
        raise ValueError(f"no group holds {missing}")
    return options


class Trainer:
    """Adam over the groups."""

    params_options = staticmethod(get_all_params_options)

    def __init__(self, lr: float = 5e-3, decay: float = 5e-7) -> None:
        self.model = PolarModel()
        self.optimizer = torch.optim.Adam(self.params_options(self.model, lr, decay), lr=lr, amsgrad=True)

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        """Take one step."""
        self.optimizer.zero_grad(set_to_none=True)
        output = self.model(batch["input_ids"])[:, :-1]
        target = batch["labels"][:, 1:]
        loss = F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-100)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=10.0)
        self.optimizer.step()
        return loss.item()


class ListedTrainer(Trainer):
    """Knows the submodules of the first version only."""

    params_options = staticmethod(get_params_options)


def buggy() -> Trainer:
    """Newer submodules are in no group."""
    return ListedTrainer()


def healthy() -> Trainer:
    """Every parameter is in a group."""
    return Trainer()


def _movement(trainer: Trainer) -> float:
    before = trainer.model.fukui_source_map.weight.clone()
    for _ in range(3):
        ids = torch.randint(0, 56, (4, 16))
        trainer.step({"input_ids": ids, "labels": ids})
    return (trainer.model.fukui_source_map.weight - before).abs().max().item()


def prove() -> tuple[float, float]:
    """Largest change of a source map's weight in 3 steps; 0 if it is not trained."""
    return _movement(buggy()), _movement(healthy())
