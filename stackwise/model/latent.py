"""LatentAttention: multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

Shapes: B batch, T positions, S positions with the cached ones, C model width, H heads,
N and P the parts of a head without and with position, V value size, R rank of the shared latent.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise.config import BlockConfig, LatentConfig
from stackwise.model.attention import rotary_of
from stackwise.model.backend import attend
from stackwise.model.cache import BlockCache, SlotCache
from stackwise.model.layout import Layout
from stackwise.model.norm import RMSNorm
from stackwise.model.rotary import rotate
from stackwise.model.sliced import sliced_attention

__all__ = ["LatentAttention"]


class LatentAttention(nn.Module):
    """Multi-head latent attention: keys and values of all heads are linear in one latent of size R.

    Positions are in a rotated key that all heads share. Only the latent and the rotated key are cached: R + P
    numbers per token. Decoding never expands them: the projections from the latent are absorbed into queries
    and output, so that all heads read the same latent, as in multi-query attention.

    Args:
        config: configuration of the Block; `latent` has the sizes, with the defaults of `LatentConfig`.
    """

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        latent = config.latent or LatentConfig()
        self.n_heads, self.rank = config.n_heads, latent.kv_lora_rank
        self.nope_dim, self.rope_dim = latent.qk_nope_head_dim, latent.qk_rope_head_dim
        self.value_dim = latent.v_head_dim
        self.head_dim = self.nope_dim + self.rope_dim
        self.causal, self.sliding_window = config.attention_mode == "causal", config.sliding_window
        self.softcap, self.dropout = config.softcap, config.dropout
        self.backend: str | None = None  # backend of the last forward pass
        self.rotary = rotary_of(config, self.rope_dim)
        self.q_down: nn.Linear | None = None
        queries_from = config.d_model
        if latent.q_lora_rank is not None:
            queries_from = latent.q_lora_rank
            self.q_down = nn.Linear(config.d_model, queries_from, bias=False)
            self.q_norm = RMSNorm(queries_from, eps=config.norm_eps)
        self.q_up = nn.Linear(queries_from, self.n_heads * self.head_dim, bias=False)
        self.kv_down = nn.Linear(config.d_model, self.rank + self.rope_dim, bias=False)
        self.kv_norm = RMSNorm(self.rank, eps=config.norm_eps)
        self.kv_up = nn.Linear(self.rank, self.n_heads * (self.nope_dim + self.value_dim), bias=False)
        self.out = nn.Linear(self.n_heads * self.value_dim, config.d_model, bias=False)

    def forward(self, x_BTC: Tensor, layout: Layout, cache: BlockCache | None = None) -> Tensor:
        """(B, T, C) -> (B, T, C). With a cache, the T tokens follow the cached ones."""
        q_BHTN, q_BHTP = self._queries(x_BTC, layout)
        latent_B1TL = self._latent(x_BTC, layout)
        keys = None
        if cache is not None:
            assert isinstance(cache, SlotCache)
            (latent_B1TL,), keys = cache.append(layout, latent_B1TL)
        dropout = self.dropout if self.training else 0.0
        mask = layout.mask(causal=self.causal, window=self.sliding_window, keys=keys)
        if keys is None:
            k_BHTD, v_BHTV = self._expand(latent_B1TL)
            q_BHTD = torch.cat((q_BHTN, q_BHTP), dim=-1)
            y_BHTV, self.backend = attend(q_BHTD, k_BHTD, v_BHTV, mask, softcap=self.softcap, dropout=dropout)
        else:
            up_HNR, up_HVR = self._up()
            self.backend = "sliced"
            y_BHTR = sliced_attention(
                torch.cat((q_BHTN @ up_HNR, q_BHTP), dim=-1),
                latent_B1TL,
                latent_B1TL[..., : self.rank],
                mask,
                scale=self.head_dim**-0.5,
                softcap=self.softcap,
                dropout=dropout,
            )
            y_BHTV = y_BHTR @ up_HVR.transpose(1, 2)
        y_BTC = self.out(y_BHTV.transpose(1, 2).flatten(2))
        return F.dropout(y_BTC, self.dropout, self.training)

    def _queries(self, x_BTC: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        if self.q_down is not None:
            x_BTC = self.q_norm(self.q_down(x_BTC))
        q_BHTD = self.q_up(x_BTC).unflatten(-1, (self.n_heads, self.head_dim)).transpose(1, 2)
        q_BHTN, q_BHTP = q_BHTD.split((self.nope_dim, self.rope_dim), dim=-1)
        return q_BHTN, self._rotate(q_BHTP, layout)

    def _latent(self, x_BTC: Tensor, layout: Layout) -> Tensor:
        """Return the latent, followed by the rotated key: (B, 1, T, R + P)."""
        latent_BTR, k_BTP = self.kv_down(x_BTC).split((self.rank, self.rope_dim), dim=-1)
        k_B1TP = self._rotate(k_BTP[:, None], layout)
        return torch.cat((self.kv_norm(latent_BTR)[:, None], k_B1TP), dim=-1)

    def _rotate(self, x_BHTP: Tensor, layout: Layout) -> Tensor:
        return x_BHTP if self.rotary is None else rotate(x_BHTP, *layout.rotary(self.rotary))

    def _expand(self, latent_B1TL: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys (B, H, T, N + P) and values (B, H, T, V) of every head."""
        latent_BTR, k_B1TP = latent_B1TL[:, 0, :, : self.rank], latent_B1TL[..., self.rank :]
        up = self.kv_up(latent_BTR).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
        k_BHTN, v_BHTV = up.split((self.nope_dim, self.value_dim), dim=-1)
        return torch.cat((k_BHTN, k_B1TP.expand(-1, self.n_heads, -1, -1)), dim=-1), v_BHTV

    def _up(self) -> tuple[Tensor, Tensor]:
        """Return the parts of `kv_up` for keys (H, N, R) and for values (H, V, R)."""
        up_HDR = self.kv_up.weight.view(self.n_heads, -1, self.rank)
        return up_HDR[:, : self.nope_dim], up_HDR[:, self.nope_dim :]

    def new_cache(
        self, batch_size: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> BlockCache:
        """Return a cache for `capacity` tokens of R + P numbers each, or for one window if it is smaller."""
        sizes = [(1, self.rank + self.rope_dim)]
        return SlotCache(batch_size, capacity, self.sliding_window, sizes, dtype, device)

    def extra_repr(self) -> str:  # noqa: D102
        return (
            f"n_heads={self.n_heads}, nope_dim={self.nope_dim}, rope_dim={self.rope_dim}, "
            f"value_dim={self.value_dim}, rank={self.rank}, causal={self.causal}, "
            f"sliding_window={self.sliding_window}, rotary={self.rotary}"
        )
