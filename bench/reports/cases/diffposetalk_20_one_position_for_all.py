"""DiffPoseTalk#20 (DiffPoseTalk/DiffPoseTalk): all frames of a motion get the encoding of one position.

`self.pe[:, x.shape[1], :]` is the single row at the index of the length, where the rows before it,
`self.pe[:, :x.shape[1]]`, are meant. The encoder cannot tell the order of the frames.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from stackwise import ModelSpec

MOTION_COEF_DIM, MAX_LEN = 10, 64


class PositionalEncoding(nn.Module):
    """Sines and cosines of the position."""

    def __init__(self, d_model: int, *, each_row: bool, dropout: float = 0.1) -> None:
        super().__init__()
        self.each_row, self.dropout = each_row, nn.Dropout(dropout)
        position = torch.arange(MAX_LEN + 1)[:, None]
        div_term = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
        pe = torch.zeros(1, MAX_LEN + 1, d_model)
        pe[0, :, 0::2], pe[0, :, 1::2] = torch.sin(position * div_term), torch.cos(position * div_term)
        self.register_buffer("pe", pe, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """`x` is (batch, length, d_model)."""
        length = x.shape[1]
        x = x + (self.pe[:, :length] if self.each_row else self.pe[:, length, :])
        return self.dropout(x)


class StyleEncoder(nn.Module):
    """Motion of a head -> vector of the speaking style."""

    def __init__(self, *, each_row: bool, feature_dim: int = 32, n_heads: int = 4, n_layers: int = 2) -> None:
        super().__init__()
        self.PE = PositionalEncoding(feature_dim, each_row=each_row)
        layer = nn.TransformerEncoderLayer(
            feature_dim, n_heads, 2 * feature_dim, activation="gelu", batch_first=True
        )
        self.encoder = nn.ModuleDict(
            {
                "motion_proj": nn.Linear(MOTION_COEF_DIM, feature_dim),
                "transformer": nn.TransformerEncoder(layer, n_layers, enable_nested_tensor=False),
            }
        )

    def forward(self, motion_coef: Tensor) -> Tensor:
        """`motion_coef` is (batch, length, coefficients); the result is (batch, feature_dim)."""
        feat = self.PE(self.encoder["motion_proj"](motion_coef))
        return self.encoder["transformer"](feat).mean(dim=1)


def buggy() -> nn.Module:
    """Add the row at the index of the length."""
    return StyleEncoder(each_row=False)


def healthy() -> nn.Module:
    """Add a row for each frame."""
    return StyleEncoder(each_row=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State a motion of up to 64 frames, with one vector for each."""
    return ModelSpec.of(
        make,
        inputs="vectors",
        width=MOTION_COEF_DIM,
        per_position=False,
        causal=False,
        max_length=MAX_LEN,
    )


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Return the number of frames, of 8, that share their encoding with another frame."""
    added = model.eval().PE(torch.zeros(1, 8, 32))[0]
    return 8 - torch.tensor(len(added.unique(dim=0)))
