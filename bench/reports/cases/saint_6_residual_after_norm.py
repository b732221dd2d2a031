"""Knowledge-Tracing-SAINT#6 (shivanandmn/Knowledge-Tracing-SAINT): residual connections start after the norm.

Each sublayer adds its update to the normalised input, so no path skips the norms, and what was added before
is normalised again at every sublayer.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec


class Sublayer(nn.Module):
    """Pre-norm residual connection."""

    def __init__(self, n_dim: int, *, skip_normed: bool) -> None:
        super().__init__()
        self.layer_norm, self.skip_normed = nn.LayerNorm(n_dim), skip_normed

    def forward(self, out: torch.Tensor, update: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return the skipped input plus the update of the normalised one."""
        skip_out, out = out, self.layer_norm(out)
        return (out if self.skip_normed else skip_out) + update(out)


class Block(nn.Module):
    """Causal self-attention, causal attention to the encoder if it is given, and feed-forward layer."""

    def __init__(self, n_dim: int, heads: int, *, cross: bool, skip_normed: bool) -> None:
        super().__init__()
        self.multi = nn.MultiheadAttention(n_dim, heads, batch_first=True)
        self.cross = nn.MultiheadAttention(n_dim, heads, batch_first=True) if cross else None
        self.ffn = nn.Sequential(nn.Linear(n_dim, 2 * n_dim), nn.ReLU(), nn.Linear(2 * n_dim, n_dim))
        self.sublayers = nn.ModuleList(Sublayer(n_dim, skip_normed=skip_normed) for _ in range(2 + cross))

    def forward(self, out: torch.Tensor, en_out: torch.Tensor | None = None) -> torch.Tensor:
        """All tensors are (batch, time, n_dim)."""
        mask = torch.ones(out.shape[1], out.shape[1], dtype=torch.bool, device=out.device).triu(1)
        sublayers = iter(self.sublayers)
        out = next(sublayers)(out, lambda x: self.multi(x, x, x, attn_mask=mask, need_weights=False)[0])
        if self.cross is not None:
            attend = self.cross
            out = next(sublayers)(
                out, lambda x: attend(x, en_out, en_out, attn_mask=mask, need_weights=False)[0]
            )
        return next(sublayers)(out, self.ffn)


class SAINT(nn.Module):
    """Predicts whether the answer to each exercise is right, from the exercises and the earlier answers."""

    START = 2

    def __init__(self, *, skip_normed: bool, total_ex: int = 30, n_dim: int = 32, max_len: int = 64) -> None:
        super().__init__()
        self.embd_ex, self.embd_res = nn.Embedding(total_ex, n_dim), nn.Embedding(3, n_dim)
        self.embd_pos_en, self.embd_pos_de = nn.Embedding(max_len, n_dim), nn.Embedding(max_len, n_dim)
        self.encoder = nn.ModuleList(Block(n_dim, 4, cross=False, skip_normed=skip_normed) for _ in range(2))
        self.decoder = nn.ModuleList(Block(n_dim, 4, cross=True, skip_normed=skip_normed) for _ in range(2))
        self.norm_en, self.norm_de = nn.LayerNorm(n_dim), nn.LayerNorm(n_dim)
        self.out = nn.Linear(n_dim, 1)

    def forward(self, in_ex: torch.Tensor, in_res: torch.Tensor) -> torch.Tensor:
        """Return logits (batch, time, 1); `in_res` is 0 or 1, and is shifted here."""
        in_de = F.pad(in_res[:, :-1], (1, 0), value=self.START)
        positions = torch.arange(in_ex.shape[1], device=in_ex.device)
        en_out = self.embd_ex(in_ex) + self.embd_pos_en(positions)
        for block in self.encoder:
            en_out = block(en_out)
        en_out = self.norm_en(en_out)
        out = self.embd_res(in_de) + self.embd_pos_de(positions)
        for block in self.decoder:
            out = block(out, en_out)
        return self.out(self.norm_de(out))


def buggy() -> nn.Module:
    """The residual connection takes the normalised input."""
    return SAINT(skip_normed=True)


def healthy() -> nn.Module:
    """The residual connection takes the input before the norm."""
    return SAINT(skip_normed=False)


def _forward(model: nn.Module, interactions: torch.Tensor) -> torch.Tensor:
    return model(interactions // 2, interactions % 2)


def _loss(model: nn.Module, interactions: torch.Tensor) -> torch.Tensor:
    logits = _forward(model, interactions).squeeze(-1)
    return F.binary_cross_entropy_with_logits(logits, (interactions % 2).to(logits.dtype))


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """An interaction is twice the exercise plus the answer."""
    return ModelSpec.of(
        make, inputs="tokens", width=60, causal=True, max_length=64, forward=_forward, loss=_loss
    )


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Output of a block whose updates are zero minus its input; 0 is right."""
    block = model.encoder[0].eval()
    for parameter in (*block.multi.out_proj.parameters(), *block.ffn[2].parameters()):
        parameter.zero_()
    x = 3 * torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))
    return block(x) - x
