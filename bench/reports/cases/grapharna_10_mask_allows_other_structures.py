"""GraphaRNA#10 (mjustynaPhD/GraphaRNA): atoms attend to the other structures of the batch, not to their own.

The mask of the transformer is True for pairs of the same structure. PyTorch blocks such pairs. A batch of one
structure had an exception, and was right. https://github.com/mjustynaPhD/GraphaRNA/pull/10
"""

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from stackwise import ModelSpec


class SinusoidalPositionEmbeddings(nn.Module):
    """Sines and cosines of the time of each atom."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, time: Tensor) -> Tensor:
        angles = time[:, None] * 10000 ** torch.linspace(0, -1, self.dim // 2, device=time.device)
        return torch.cat((angles.sin(), angles.cos()), dim=-1)


class SequenceStructureModule(nn.Module):
    """Transformer over all atoms of a batch."""

    def __init__(self, dim: int, n_layers: int, *, allow_same: bool) -> None:
        super().__init__()
        self.allow_same = allow_same
        layers = (nn.TransformerEncoderLayer(dim, 4, 2 * dim, batch_first=True) for _ in range(n_layers))
        self.layers, self.norm = nn.ModuleList(layers), nn.LayerNorm(dim)

    def forward(self, seq_emb: Tensor, x_struct: Tensor, batch: Tensor) -> Tensor:
        out = torch.cat((seq_emb, x_struct), dim=1)[None]
        same = batch[:, None] == batch[None, :]
        attn_mask = ~same if self.allow_same or batch.sum() == 0 else same
        for layer in self.layers:
            out = layer(out, src_mask=attn_mask)
        return self.norm(out)[0]


class PAMNet(nn.Module):
    """Denoiser of atoms: message passing within a structure, then the transformer."""

    def __init__(self, *, allow_same: bool, dim: int = 16, time_dim: int = 16, atom_types: int = 4) -> None:
        super().__init__()
        total_dim = 2 * dim + time_dim + atom_types
        self.init_linear = nn.Sequential(nn.Linear(3, dim), nn.SiLU())
        self.sequence_module = nn.Embedding(4, dim)
        mlp = (nn.Linear(dim, time_dim), nn.GELU(), nn.Linear(time_dim, time_dim))
        self.time_mlp = nn.Sequential(SinusoidalPositionEmbeddings(dim), *mlp)
        self.global_layer, self.struct_emb = nn.Linear(total_dim, total_dim), nn.Linear(total_dim, dim)
        self.seq_struct_module = SequenceStructureModule(2 * dim, 2, allow_same=allow_same)
        self.out_linear = nn.Linear(2 * dim + total_dim, 3 + atom_types)

    def forward(self, data: SimpleNamespace, seqs: Tensor, t: Tensor) -> Tensor:
        """data.x (atoms, 3 + types), data.batch, nucleotides and times (atoms,) to noise like data.x."""
        pos, seq_emb = data.x[:, :3], self.sequence_module(seqs)
        x = torch.cat([self.init_linear(pos), data.x[:, 3:], seq_emb, self.time_mlp(t.to(pos))], dim=1)
        distance = (pos[:, None] - pos).square().sum(dim=-1)
        near = torch.exp(-distance) * (data.batch[:, None] == data.batch)
        x = x + nn.functional.silu(self.global_layer(near @ x / near.sum(dim=1, keepdim=True)))
        out = self.seq_struct_module(seq_emb, self.struct_emb(x), data.batch)
        return self.out_linear(torch.cat((x, out), dim=1))


def buggy() -> nn.Module:
    """Pairs of the same structure are blocked."""
    return PAMNet(allow_same=False)


def healthy() -> nn.Module:
    """Pairs of different structures are blocked."""
    return PAMNet(allow_same=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """Each row is a structure. All structures are one batch."""

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        rows, atoms, _ = x.shape
        batch = torch.arange(rows, device=x.device).repeat_interleave(atoms)
        data, seqs = SimpleNamespace(x=x.flatten(0, 1), batch=batch), torch.zeros_like(batch)
        return model(data, seqs, torch.full_like(batch, 300)).unflatten(0, (rows, atoms))

    return ModelSpec.of(make, inputs="vectors", width=7, forward=forward)


@torch.no_grad()
def observe(model: nn.Module) -> list[float]:
    """Effects of an atom of the same structure, and of another one, on the second atom in the transformer."""
    x, batch = torch.randn(20, 32, generator=torch.Generator().manual_seed(1)), torch.arange(20) // 10
    moved = [x + 3 * torch.eye(20)[atom, :, None] * x for atom in (0, 10)]
    plain, *others = (model.eval().seq_struct_module(y[:, :16], y[:, 16:], batch)[1] for y in (x, *moved))
    return [(other - plain).abs().max().item() for other in others]
