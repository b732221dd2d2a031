"""HistoCell#3 (recolyce/HistoCell): without concatenated heads, graph attention returns its input.

With `concat=False`, as in the cell model, `forward` ends with `return h` where `h_prime`, the mean of the
neighbours, is meant. Cells see no neighbours, and the weights of the layer get no gradient.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

FEATURES, K_CLASS, DIM = 12, 5, 32


class GraphAttentionLayer(nn.Module):
    """Graph attention (arXiv:1710.10903) with one head."""

    def __init__(self, dim: int, *, alpha: float = 0.2, dropout: float = 0.1, returns_input: bool) -> None:
        super().__init__()
        self.returns_input = returns_input
        self.W, self.a = nn.Parameter(torch.empty(dim, dim)), nn.Parameter(torch.empty(2 * dim, 1))
        nn.init.xavier_uniform_(self.W, gain=1.414)
        nn.init.xavier_uniform_(self.a, gain=1.414)
        self.leakyrelu, self.dropout = nn.LeakyReLU(alpha), nn.Dropout(dropout)

    def forward(self, h: Tensor, adj: Tensor) -> Tensor:
        """`h` is (batch, cells, dim), `adj` is (batch, cells, cells), above 0 for neighbours."""
        Wh = h @ self.W
        target, source = self.a.chunk(2)
        e = self.leakyrelu(Wh @ target + (Wh @ source).transpose(1, 2))
        attention = torch.where(adj > 0, e, -9e15).softmax(dim=-1)
        h_prime = self.dropout(attention) @ Wh
        return h if self.returns_input else h_prime


class HistoCell(nn.Module):
    """Features of cells and of their tissue -> logits of the type of each cell."""

    def __init__(self, *, returns_input: bool) -> None:
        super().__init__()
        self.cell_encoder = nn.Sequential(nn.Linear(FEATURES, DIM), nn.ReLU(), nn.Linear(DIM, DIM))
        self.tissue_encoder = nn.Sequential(nn.Linear(FEATURES, DIM), nn.ReLU(), nn.Linear(DIM, DIM))
        self.size_embed = nn.Sequential(nn.Linear(2, 16), nn.ReLU())
        self.merge = nn.Linear(DIM + 16, DIM)
        self.gat = GraphAttentionLayer(DIM, returns_input=returns_input)
        self.out = nn.LSTM(DIM, DIM, batch_first=True)
        self.predict = nn.Linear(DIM, K_CLASS)

    def forward(self, cells: Tensor, cell_size: Tensor, tissue: Tensor, adj: Tensor) -> Tensor:
        """`cells` is (batch, cells, FEATURES), `cell_size` (batch, cells, 2), `tissue` (batch, FEATURES)."""
        feats = torch.cat([self.cell_encoder(cells), self.size_embed(cell_size)], dim=-1)
        graph_feats = self.gat(self.merge(feats), adj)
        global_feats = self.tissue_encoder(tissue)[:, None].expand_as(graph_feats)
        seq_feats = torch.stack([global_feats, graph_feats], dim=2)
        out_feats, _ = self.out(seq_feats.flatten(0, 1))
        return self.predict(out_feats[:, 1]).unflatten(0, cells.shape[:2])


def buggy() -> nn.Module:
    """Return the input."""
    return HistoCell(returns_input=True)


def healthy() -> nn.Module:
    """Return the mean of the neighbours."""
    return HistoCell(returns_input=False)


def _chain(n_cells: int) -> Tensor:
    """Return the neighbours of cells in a row, each with itself."""
    at = torch.arange(n_cells)
    return ((at[:, None] - at).abs() <= 1).float()


def _forward(model: nn.Module, x: Tensor) -> Tensor:
    tissue = torch.linspace(-1, 1, FEATURES).to(x).expand(len(x), -1)
    adj = _chain(x.shape[1]).to(x).expand(len(x), -1, -1)
    return model(x[..., :FEATURES], x[..., FEATURES:], tissue, adj)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State features and sizes of cells in a row, which see their neighbours."""
    return ModelSpec.of(
        make,
        inputs="vectors",
        width=FEATURES + 2,
        forward=_forward,
        visible=lambda x: (_chain(x.shape[1]) > 0).to(x.device),
    )


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Return the output of the layer minus the weighted mean of the neighbours, cell by cell."""
    layer, h = model.eval().gat, torch.randn(1, 5, DIM, generator=torch.Generator().manual_seed(1))
    rows, wanted = h[0] @ layer.W, []
    for i in range(5):
        near = rows[max(i - 1, 0) : i + 2]
        scores = F.leaky_relu(rows[i] @ layer.a[:DIM] + near @ layer.a[DIM:], 0.2)
        wanted.append((scores.softmax(dim=0) * near).sum(dim=0))
    return layer(h, _chain(5)[None])[0] - torch.stack(wanted)
