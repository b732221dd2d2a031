"""KernelAttention: attention weights from a kernel, in time linear in the number of tokens.

Shapes: B batch, T positions, L positions of a chunk, C model width, H query heads, K key/value heads,
G = H/K, D head size, M features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stackwise.config import BlockConfig, KernelConfig
from stackwise.model.attention import Attention
from stackwise.model.cache import BlockCache, StateCache
from stackwise.model.feature_map import FeatureMap, Features
from stackwise.model.layout import Layout

__all__ = ["KernelAttention", "PrefixSums"]

CHUNK = 128
_NOTHING = -1e30  # log of a zero weight; finite, so that the difference of two is not NaN
_PADDING = -1e29  # log weight of padding: negligible next to any real token, and ignored by the scale


class KernelAttention(Attention):
    """y_t = sum_s kernel(q_t, k_s) v_s / sum_s kernel(q_t, k_s), by features of queries and keys.

    With kernel(q, k) = phi(q) . phi(k), both sums are phi(q_t) times a running sum over the keys: prefix sums
    over chunks in the causal case (Katharopoulos et al. 2020, arXiv:2006.16236), one sum over all keys in the
    bidirectional case. The computation is in float32, or float64 for float64 input.

    If features may be negative (random Fourier features), an estimate of the denominator may be negative as
    well. It is clamped to at least 1 / sqrt(M), the standard error of one term, below which it is noise.

    Args:
        config: configuration of the Block; `kernel` selects the kernel, with the defaults of `KernelConfig`.
    """

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config)
        kernel = config.kernel or KernelConfig()
        self.feature_map = FeatureMap(
            kernel.feature_map, self.n_kv_heads, self.head_dim, kernel.n_features, kernel.bandwidth
        )
        self.floor = 0.0 if self.feature_map.is_positive else self.feature_map.n_features**-0.5

    def forward(self, x_BTC: Tensor, layout: Layout, cache: BlockCache | None = None) -> Tensor:
        """(B, T, C) -> (B, T, C). With a cache, the T tokens follow the cached ones."""
        if not x_BTC.numel():
            return x_BTC  # an empty input has no largest scale
        self.backend = f"{self.feature_map.kind} features"
        q_BHTD, k_BKTD, v_BKTD = self.project(x_BTC, layout)
        with torch.autocast(x_BTC.device.type, enabled=False):
            B, _, T, D = q_BHTD.shape
            q_BKGTD = q_BHTD.reshape(B, self.n_kv_heads, -1, T, D)
            v_BKTD = v_BKTD.to(torch.promote_types(v_BKTD.dtype, torch.float32))
            if self.causal:
                assert cache is None or isinstance(cache, StateCache)
                y_BKGTD = self._causal(q_BKGTD, k_BKTD, v_BKTD, layout, cache)
            else:
                y_BKGTD = self._bidirectional(q_BKGTD, k_BKTD, v_BKTD, layout)
        y_BTC = self.out(y_BKGTD.flatten(1, 2).transpose(1, 2).flatten(2).to(x_BTC.dtype))
        return F.dropout(y_BTC, self.dropout, self.training)

    def _causal(
        self,
        q_BKGTD: Tensor,
        k_BKTD: Tensor,
        v_BKTD: Tensor,
        layout: Layout,
        cache: StateCache | None,
    ) -> Tensor:
        sums = PrefixSums.empty(v_BKTD, self.feature_map.n_features)
        if cache:
            copied = torch.is_grad_enabled()  # a graph may need the sums that are overwritten below
            sums = PrefixSums(*(each.to(v_BKTD.dtype, copy=copied) for each in cache.sums))
        outputs = []
        for start in range(0, q_BKGTD.shape[3], CHUNK):
            part = slice(start, start + CHUNK)
            documents = None
            if layout.documents_BT is not None:
                documents = layout.documents_BT[:, part]
                previous = layout.documents_BT[:, max(start - 1, 0)]
                documents = torch.cat((previous[:, None], documents), dim=1)
            # Features of one chunk fit into the processor's caches; features of all tokens would not.
            y, sums = sums.advance(
                self.feature_map(q_BKGTD[..., part, :]).value_BKTM,
                self._key_features(k_BKTD, layout, part),
                v_BKTD[..., part, :],
                self.floor,
                documents,
            )
            outputs.append(y)
        if cache:
            for kept, new in zip(cache.sums, sums, strict=True):
                kept.copy_(new.detach())
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=3)

    def _key_features(self, k_BKTD: Tensor, layout: Layout, part: slice) -> Features:
        k: Features = self.feature_map(k_BKTD[..., part, :])
        if layout.keep_BT is None:
            return k
        hidden = ~layout.keep_BT[:, None, part]
        return Features(k.value_BKTM, k.log_scale_BKT.masked_fill(hidden, _PADDING))

    def _bidirectional(self, q_BKGTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, layout: Layout) -> Tensor:
        if layout.documents_BT is not None:
            raise ValueError(
                "document_ids: bidirectional kernel attention sums over the whole row; allowed: None"
            )
        q_BKGTM = self.feature_map(q_BKGTD).value_BKTM
        k = self._key_features(k_BKTD, layout, slice(None))
        relative_BKT = k.log_scale_BKT - k.log_scale_BKT.amax(-1, keepdim=True)
        weighted_BKTM = k.value_BKTM * relative_BKT.exp()[..., None]
        sums_BKMD = weighted_BKTM.transpose(-1, -2) @ v_BKTD
        total_BKM = weighted_BKTM.sum(-2)
        numerator = q_BKGTM @ sums_BKMD[:, :, None]
        denominator = q_BKGTM @ total_BKM[:, :, None, :, None]
        y_BKGTD: Tensor = numerator / denominator.clamp(min=self.floor)
        return y_BKGTD

    def new_cache(
        self,
        batch_size: int,
        capacity: int,  # noqa: ARG002  # same signature for every kind of attention
        dtype: torch.dtype,
        device: torch.device,
    ) -> BlockCache:
        """Return a cache of the running sums, in float32. Its size is independent of the number of tokens."""
        dtype = torch.promote_types(dtype, torch.float32)
        v_BKTD = torch.empty(batch_size, self.n_kv_heads, 0, self.head_dim, dtype=dtype, device=device)
        return StateCache(PrefixSums.empty(v_BKTD, self.feature_map.n_features))


class PrefixSums(NamedTuple):
    """Sums over the keys and values so far, divided by exp of the largest log-scale so far.

    Attributes:
        values_BKMD: sum of phi(k) v^T, float32.
        weights_BKM: sum of phi(k), float32.
        log_scale_BK: largest log-scale, float32.
    """

    values_BKMD: Tensor
    weights_BKM: Tensor
    log_scale_BK: Tensor

    @classmethod
    def empty(cls, v_BKTD: Tensor, n_features: int) -> PrefixSums:
        """Return the sums over no keys, for values like `v_BKTD`."""
        B, K, _, D = v_BKTD.shape
        return cls(
            v_BKTD.new_zeros(B, K, n_features, D),
            v_BKTD.new_zeros(B, K, n_features),
            v_BKTD.new_full((B, K), _NOTHING),
        )

    def advance(
        self,
        q_BKGLM: Tensor,
        k: Features,
        v_BKLD: Tensor,
        floor: float,
        documents_BL: Tensor | None = None,
    ) -> tuple[Tensor, PrefixSums]:
        """Return the outputs (B, K, G, L, D) of a chunk of L tokens, and the sums including the chunk.

        L = 1 is the recurrent form, L = T the quadratic one.

        Args:
            q_BKGLM: features of the queries; their scale does not matter.
            k: features of the keys.
            v_BKLD: values.
            floor: minimum of the denominator.
            documents_BL: document of the token before the chunk, then documents of its L tokens.
        """
        values_BKMD, weights_BKM, before_BK = self
        L = v_BKLD.shape[2]
        time_L = torch.arange(L, device=v_BKLD.device)
        visible_BLL = (time_L <= time_L[:, None])[None]
        continues_BL = visible_BLL[:, :, 0]  # the sums of the past are visible from the first token on
        if documents_BL is not None:
            visible_BLL = visible_BLL & (documents_BL[:, 1:, None] == documents_BL[:, None, 1:])
            continues_BL = documents_BL[:, 1:] == documents_BL[:, :1]

        # As in an online softmax: each query divides by exp of the largest log-scale that it sees.
        log_BKLL = k.log_scale_BKT[:, :, None].masked_fill(~visible_BLL[:, None], _NOTHING)
        past_log_BKL = before_BK[..., None].masked_fill(~continues_BL[:, None], _NOTHING)
        highest_BKL = torch.maximum(log_BKLL.amax(-1), past_log_BKL)
        scale_BKLL = (log_BKLL - highest_BKL[..., None]).exp()
        past_BKL = (past_log_BKL - highest_BKL).exp()

        inside = (q_BKGLM @ k.value_BKTM.transpose(-1, -2)[:, :, None]) * scale_BKLL[:, :, None]
        q_past = q_BKGLM * past_BKL[:, :, None, :, None]
        numerator = inside @ v_BKLD[:, :, None] + q_past @ values_BKMD[:, :, None]
        denominator = inside.sum(-1, keepdim=True) + q_past @ weights_BKM[:, :, None, :, None]
        weighted_BKLM = k.value_BKTM * scale_BKLL[:, :, -1, :, None]
        after = PrefixSums(
            values_BKMD * past_BKL[..., -1:, None] + weighted_BKLM.transpose(-1, -2) @ v_BKLD,
            weights_BKM * past_BKL[..., -1:] + weighted_BKLM.sum(-2),
            highest_BKL[..., -1],
        )
        return numerator / denominator.clamp(min=floor), after
