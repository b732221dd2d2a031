"""pytorch_geometric#1354 (pyg-team/pytorch_geometric): the softmax over neighbours is always uniform.

The function computes the maximum of each group of edges, but does not subtract it from the scores. It goes on
with the maximum in place of the scores. All edges of a node get the same weight.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

FEATURES, CLASSES = 12, 5


def softmax(src: Tensor, index: Tensor, num_nodes: int, *, subtract: bool) -> Tensor:
    """Return the softmax of `src` (edges, heads) over the edges with the same entry in `index`."""
    groups = index[:, None].expand_as(src)
    zeros = src.new_zeros(num_nodes, src.shape[1])
    out = zeros.scatter_reduce(0, groups, src, "amax", include_self=False)[index]
    if subtract:
        out = src - out
    out = out.exp()
    return out / (zeros.index_add(0, index, out)[index] + 1e-16)


class GATConv(nn.Module):
    """Graph attention (arXiv:1710.10903). Messages flow from `edge_index[0]` to `edge_index[1]`."""

    def __init__(self, in_channels: int, out_channels: int, heads: int, *, subtract: bool) -> None:
        super().__init__()
        self.heads, self.out_channels, self.subtract = heads, out_channels, subtract
        self.weight = nn.Parameter(torch.empty(in_channels, heads * out_channels))
        self.att_i = nn.Parameter(torch.empty(1, heads, out_channels))
        self.att_j = nn.Parameter(torch.empty(1, heads, out_channels))
        self.bias = nn.Parameter(torch.zeros(heads * out_channels))
        for parameter in (self.weight, self.att_i, self.att_j):
            nn.init.xavier_uniform_(parameter)

    def attention(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return the weights (edges, heads) of messages `x` (nodes, heads, channels)."""
        source, target = edge_index
        scores = (x * self.att_i).sum(dim=-1)[target] + (x * self.att_j).sum(dim=-1)[source]
        return softmax(F.leaky_relu(scores, 0.2), target, len(x), subtract=self.subtract)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """`x` is (nodes, in_channels), `edge_index` (2, edges) with self-loops."""
        x = (x @ self.weight).view(-1, self.heads, self.out_channels)
        source, target = edge_index
        messages = self.attention(x, edge_index)[..., None] * x[source]
        return torch.zeros_like(x).index_add(0, target, messages).flatten(1) + self.bias


class Net(nn.Module):
    """Two layers of graph attention, and a classifier of the nodes."""

    def __init__(self, *, subtract: bool, channels: int = 8, heads: int = 4) -> None:
        super().__init__()
        self.conv1 = GATConv(FEATURES, channels, heads, subtract=subtract)
        self.conv2 = GATConv(heads * channels, channels, heads, subtract=subtract)
        self.lin = nn.Linear(heads * channels, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """`x` is (nodes, FEATURES)."""
        x = F.elu(self.conv1(x, edge_index))
        return self.lin(F.elu(self.conv2(x, edge_index)))


def buggy() -> nn.Module:
    """Go on with the maximum."""
    return Net(subtract=False)


def healthy() -> nn.Module:
    """Subtract the maximum."""
    return Net(subtract=True)


def _near(n_nodes: int, steps: int, device: torch.device) -> Tensor:
    """Return which nodes of a chain are at most `steps` apart."""
    at = torch.arange(n_nodes, device=device)
    return (at[:, None] - at).abs() <= steps


def _edge_index(n_graphs: int, n_nodes: int, device: torch.device) -> Tensor:
    """Return the edges of chains, each node with its neighbours and itself."""
    edges = _near(n_nodes, 1, device).nonzero().T
    first = n_nodes * torch.arange(n_graphs, device=device)
    return (edges[:, None] + first[None, :, None]).flatten(1)


def _forward(model: nn.Module, x: Tensor) -> Tensor:
    return model(x.flatten(0, 1), _edge_index(*x.shape[:2], x.device)).unflatten(0, x.shape[:2])


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State nodes in a chain, of which each reads two nodes on both sides."""
    return ModelSpec.of(
        make,
        inputs="vectors",
        width=FEATURES,
        forward=_forward,
        # Two layers read neighbours of neighbours.
        visible=lambda x: _near(x.shape[1], 2, x.device),
    )


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Return the weights of the messages to one node minus the softmax of their scores."""
    conv, x = model.conv1, torch.randn(5, 4, 8, generator=torch.Generator().manual_seed(1))
    edge_index = torch.stack([torch.arange(5), torch.zeros(5, dtype=torch.long)])
    scores = (x[:1] * conv.att_i).sum(dim=-1) + (x * conv.att_j).sum(dim=-1)
    return conv.attention(x, edge_index) - F.leaky_relu(scores, 0.2).softmax(dim=0)
