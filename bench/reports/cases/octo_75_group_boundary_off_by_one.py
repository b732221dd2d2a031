"""octo#75 (octo-models/octo): the first token of a group takes the attention rules of the group before it.

The first readout token counts as an observation, and observations attend to it. Readouts may only read.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec

DECLARATION = "no task or observation token sees a readout token, and no readout sees another readout"


class Block(nn.Module):
    """Pre-norm attention under a boolean mask, then a feed-forward layer."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """`mask` is (batch, 1, tokens, tokens), True where a token may look."""
        qkv = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        y = F.scaled_dot_product_attention(
            *(y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in qkv), attn_mask=mask
        )
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class OctoTransformer(nn.Module):
    """Task tokens, then the observation tokens and learned readout tokens of each timestep."""

    def __init__(self, sizes: dict[str, int], width: int = 8, dim: int = 32, *, right: bool) -> None:
        super().__init__()
        self.sizes, self.right = sizes, right
        self.positions = nn.ParameterDict(
            {n: 0.02 * torch.randn(1 if n.startswith("task") else 4, size, dim) for n, size in sizes.items()}
        )
        self.projections = nn.ModuleDict({n: nn.Linear(width, dim) for n in sizes if "readout" not in n})
        self.blocks = nn.ModuleList(Block(dim, 4) for _ in range(2))

    @staticmethod
    def sees(name: str, other: str) -> bool:
        """Whether a group attends to another (up to its own timestep)."""
        kinds = {"task": ("task",), "obs": ("task", "obs"), "readout": ("task", "obs")}
        return other.split("_")[0] in kinds[name.split("_")[0]] or (name == other and "readout" in name)

    def owners(self, groups: list[str]) -> list[str]:
        """The group of each token."""
        ends = torch.tensor([self.sizes[n] for n in groups]).cumsum(0)
        return [groups[i] for i in torch.searchsorted(ends, torch.arange(int(ends[-1])), right=self.right)]

    def forward(
        self, observations: dict, tasks: dict, timestep_pad_mask: torch.Tensor, readouts: tuple | None = None
    ) -> dict[str, torch.Tensor]:
        """Takes (batch, horizon, tokens, width) and (batch, tokens, width) by name; embeddings by group."""
        batch, horizon = timestep_pad_mask.shape
        prefix, step = [f"task_{n}" for n in tasks], [f"obs_{n}" for n in observations]
        inputs = dict(zip(prefix + step, [*tasks.values(), *observations.values()], strict=True))
        x = {n: self.projections[n](v) + self.positions[n][:horizon] for n, v in inputs.items()}
        step += [n for n in self.sizes if "readout" in n and (readouts is None or n[8:] in readouts)]
        there = []
        for name in step:
            if "readout" in name:
                x[name] = self.positions[name][:horizon].expand(batch, -1, -1, -1)
            keep = torch.ones_like(timestep_pad_mask) if "readout" in name else timestep_pad_mask
            there.append(keep[..., None].expand(-1, -1, self.sizes[name]))
        tokens = torch.cat([*(x[n] for n in prefix), torch.cat([x[n] for n in step], 2).flatten(1, 2)], dim=1)
        there = F.pad(torch.cat(there, dim=2).flatten(1), (sum(self.sizes[n] for n in prefix), 0), value=True)
        table = [(n, -1) for n in self.owners(prefix)]
        table += [(n, t) for t in range(horizon) for n in self.owners(step)]
        rules = torch.tensor([[s <= t and self.sees(a, b) for b, s in table] for a, t in table])
        mask = rules.to(there.device) & there[:, None, None]
        for block in self.blocks:
            tokens = block(tokens, mask)
        sizes = [self.sizes[n] for n in prefix]
        *parts, rest = tokens.split([*sizes, tokens.shape[1] - sum(sizes)], dim=1)
        steps = rest.unflatten(1, (horizon, -1)).split([self.sizes[n] for n in step], dim=2)
        return dict(zip(prefix + step, [*parts, *steps], strict=True))


SIZES = {"task_language": 3, "obs_primary": 4, "obs_wrist": 2, "readout_action": 2, "readout_value": 1}


def buggy() -> nn.Module:
    """`searchsorted` with the default side."""
    return OctoTransformer(SIZES, right=False)


def healthy() -> nn.Module:
    """A token at the end of a group belongs to the next."""
    return OctoTransformer(SIZES, right=True)


def _call(model: nn.Module, tokens: torch.Tensor, readouts: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Call the model with tokens (batch, 3 + 3 * 6, width) of a task and of three timesteps."""
    steps = tokens[:, 3:].unflatten(1, (3, 6))
    observations = {"primary": steps[:, :, :4], "wrist": steps[:, :, 4:]}
    there = torch.ones(len(tokens), 3, dtype=torch.bool, device=tokens.device)
    return model(observations, {"language": tokens[:, :3]}, there, readouts=readouts)


def _joined(embeddings: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([embeddings[name].flatten(1) for name in SIZES], dim=1)


def _together(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return _joined(_call(model, tokens, ("action", "value")))


def _apart(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the embeddings of tasks and observations without readouts, and of each readout alone."""
    action, value, none = (_call(model, tokens, readouts) for readouts in (("action",), ("value",), ()))
    return _joined({**action, **value, **none})


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State that no other token sees a readout: a call without it returns the same for the others."""

    def make_batch(batch_size: int, _length: int, generator: torch.Generator) -> torch.Tensor:
        return torch.randn(batch_size, 21, 8, generator=generator)

    apart = ModelSpec.of(make, make_batch=make_batch, forward=_apart, per_position=False)
    return ModelSpec.of(apart, forward=_together, reference=apart)


def observe(model: nn.Module) -> torch.Tensor:
    """Observation embeddings with both readouts minus those without any."""
    model.eval()
    gen = torch.Generator().manual_seed(1)
    tasks = {"language": torch.randn(2, 3, 8, generator=gen)}
    observations = {n: torch.randn(2, 3, s, 8, generator=gen) for n, s in (("primary", 4), ("wrist", 2))}
    there = torch.tensor([[True, True, True], [False, True, True]])
    with torch.no_grad():
        both, none = (model(observations, tasks, there, readouts=r) for r in (None, ()))
    return torch.cat([(both[n] - none[n]).flatten() for n in ("obs_primary", "obs_wrist")])
