"""native-sparse-attention-pytorch#20 (lucidrains/native-sparse-attention-pytorch): cached logits differ.

The learned memory key / values of the compressed branch are prepended in the full forward, but the decoding
step with a cache attends to the compressed cache alone, so logits with and without cache differ.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Plain attention; the product is zeros where there are no keys."""
    sim = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if mask is not None:
        sim = sim.masked_fill(~mask, float("-inf"))
    return sim.softmax(dim=-1) @ v


class SparseAttention(nn.Module):
    """Attention to compressed blocks and to a sliding window, mixed by gates."""

    def __init__(self, dim: int, heads: int, dim_head: int, block: int, window: int, mem: bool) -> None:
        super().__init__()
        self.heads, self.block, self.window, self.mem_at_inference = heads, block, window, mem
        self.norm = nn.RMSNorm(dim)
        self.to_qkv = nn.Linear(dim, heads * dim_head * 3, bias=False)
        self.compress_mem_kv = nn.Parameter(torch.randn(2, heads, 1, dim_head))
        self.intrablock_pos = nn.Parameter(torch.randn(2, heads, block, dim_head) * 0.1)
        self.k_compress, self.v_compress = (nn.Linear(block * dim_head, dim_head) for _ in range(2))
        self.to_gates = nn.Linear(dim, 2 * heads)
        self.to_out = nn.Linear(heads * dim_head, dim, bias=False)

    def compress(self, kv: Tensor) -> Tensor:
        """One key and value for each full block of (2, batch, heads, length, dim_head)."""
        length = kv.shape[-2] // self.block * self.block
        kv = kv[..., :length, :].unflatten(-2, (length // self.block, self.block))
        k, v = (kv + self.intrablock_pos[:, None, :, None]).flatten(-2)
        return torch.stack((self.k_compress(k), self.v_compress(v)))

    def forward(self, x: Tensor, cache: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The whole sequence without a cache, or its next token with one."""
        x, (b, n, _) = self.norm(x), x.shape
        q, *kv = self.to_qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        near, cmask, smask = (run_kv := torch.stack(kv)), None, None
        if cache is None:
            ckv = next_ckv = self.compress(run_kv)
            i, j = torch.arange(n)[:, None], torch.arange(n)
            block_end = (torch.arange(ckv.shape[-2]) + 1) * self.block - 1
            cmask = F.pad(i > block_end, (1, 0), value=True)
            smask = (j <= i) & (i - j < self.window)
        else:
            run_kv, ckv = torch.cat((cache[0], run_kv), dim=-2), cache[1]
            near, next_ckv = run_kv[..., -self.window :, :], ckv
            if run_kv.shape[-2] % self.block == 0:
                next_ckv = torch.cat((ckv, self.compress(run_kv[..., -self.block :, :])), dim=-2)
        if cache is None or self.mem_at_inference:
            ckv = torch.cat((self.compress_mem_kv[:, None].expand(-1, b, -1, -1, -1), ckv), dim=-2)
        branches = torch.stack((attend(q, *ckv, cmask), attend(q, *near, smask)))
        gates = self.to_gates(x).sigmoid().view(b, n, 2, self.heads, 1).permute(2, 0, 3, 1, 4)
        out = (branches * gates).sum(dim=0).transpose(1, 2).flatten(-2)
        return self.to_out(out), (run_kv, next_ckv)


class Transformer(nn.Module):
    """Language model whose forward takes all ids and, with a cache, computes the last of them."""

    def __init__(self, num_tokens: int = 40, dim: int = 32, depth: int = 2, mem: bool = True) -> None:
        super().__init__()
        self.token_emb = nn.Embedding(num_tokens, dim)
        self.layers = nn.ModuleList(SparseAttention(dim, 2, 16, 4, 3, mem) for _ in range(depth))
        ffs = ((nn.RMSNorm(dim), nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, dim)) for _ in range(depth))
        self.ffs = nn.ModuleList(nn.Sequential(*ff) for ff in ffs)
        self.norm, self.to_logits = nn.RMSNorm(dim), nn.Linear(dim, num_tokens, bias=False)

    def forward(
        self, ids: Tensor, cache: list[tuple[Tensor, Tensor]] | None = None, return_cache: bool = False
    ) -> Tensor | tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Logits, and the cache where it is asked for."""
        x = self.token_emb(ids if cache is None else ids[:, -1:])
        next_cache = []
        for attn, ff, layer_cache in zip(self.layers, self.ffs, cache or [None] * 2, strict=True):
            out, layer_next = attn(x, layer_cache)
            next_cache.append(layer_next)
            x = x + out
            x = x + ff(x)
        logits = self.to_logits(self.norm(x))
        return (logits, next_cache) if return_cache else logits


def buggy() -> nn.Module:
    """The memory is missing from decoding."""
    return Transformer(mem=False)


def healthy() -> nn.Module:
    """The memory is attended to in both paths."""
    return Transformer(mem=True)


def observe(model: nn.Module) -> Tensor:
    """Logits of decoding with a cache, less those of the full forward."""
    ids = torch.randint(0, 40, (2, 14), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        difference = model(ids)
        _, cache = model(ids[:, :6], return_cache=True)
        for t in range(6, 14):
            logits, cache = model(ids[:, : t + 1], cache=cache, return_cache=True)
            difference[:, t] -= logits[:, 0]
    return difference[:, 6:]
