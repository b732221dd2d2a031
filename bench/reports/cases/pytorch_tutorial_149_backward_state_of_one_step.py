"""pytorch-tutorial#149 (yunjey/pytorch-tutorial): the classifier reads a backward state after one step.

The bidirectional LSTM is read at the last position. There, the forward state has seen all rows of the image,
but the backward state has seen the last row only. The backward state of the first position is the final one.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

INPUT_SIZE, CLASSES = 12, 2


class BiRNN(nn.Module):
    """Bidirectional LSTM over the rows of an image."""

    def __init__(self, *, final_states: bool, hidden_size: int = 32, num_layers: int = 2) -> None:
        super().__init__()
        self.final_states, self.hidden_size, self.num_layers = final_states, hidden_size, num_layers
        self.lstm = nn.LSTM(INPUT_SIZE, hidden_size, num_layers, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(hidden_size * 2, CLASSES)

    def features(self, x: Tensor) -> Tensor:
        """Return the states (batch, 2 * hidden_size) that the classifier reads."""
        h0 = x.new_zeros(self.num_layers * 2, len(x), self.hidden_size)
        out, _ = self.lstm(x, (h0, torch.zeros_like(h0)))
        if self.final_states:
            return torch.cat([out[:, -1, : self.hidden_size], out[:, 0, self.hidden_size :]], dim=1)
        return out[:, -1]

    def forward(self, x: Tensor) -> Tensor:
        """`x` is (batch, rows, INPUT_SIZE)."""
        return self.fc(self.features(x))


def buggy() -> nn.Module:
    """Read both directions at the last position."""
    return BiRNN(final_states=False)


def healthy() -> nn.Module:
    """Read the final state of each direction."""
    return BiRNN(final_states=True)


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x), (x.sum(dim=(1, 2)) > 0).long())


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State images as rows, one output for each image, and the loss."""
    return ModelSpec.of(make, inputs="vectors", width=INPUT_SIZE, per_position=False, loss=_loss)


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Return the states that the classifier reads minus the final states of both directions."""
    x = torch.randn(3, 9, INPUT_SIZE, generator=torch.Generator().manual_seed(1))
    _, (h_n, _) = model.lstm(x)
    return model.features(x) - torch.cat([h_n[-2], h_n[-1]], dim=1)
