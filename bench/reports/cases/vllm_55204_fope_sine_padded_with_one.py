"""vllm#55204 (vllm-project/vllm): Fourier rotary embeddings fill the unused part of the sine table with 1.

Channels beyond the kept frequencies should pass unchanged, but the other half of the head is mixed into them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DECLARATION = "only the first `num_inv_freq` channel pairs of a head are rotated, the others pass unchanged"


class FourierRotaryEmbedding(nn.Module):
    """Rotary angles whose cosines and sines are mixed over frequencies, for each head on its own."""

    def __init__(self, head_size: int, heads: int, num_inv_freq: int, max_len: int, sin_pad: float) -> None:
        super().__init__()
        self.head_size, self.max_len, self.sin_pad = head_size, max_len, sin_pad
        self.inv_freq = [10000.0 ** (-2 * i / head_size) for i in range(num_inv_freq)]
        mix = torch.eye(num_inv_freq).expand(heads, -1, -1)
        self.cos_coef = nn.Parameter(mix + 0.1 * torch.randn(mix.shape), requires_grad=False)
        self.sin_coef = nn.Parameter(mix + 0.1 * torch.randn(mix.shape), requires_grad=False)

    def cos_sin(self) -> tuple[Tensor, Tensor]:
        """(positions, heads, head_size) each; the sine has a minus in its first half."""
        at = torch.arange(self.max_len, device=self.cos_coef.device)
        freqs = at[:, None] * torch.tensor(self.inv_freq, device=at.device)
        sin = torch.einsum("tD,hDd->thd", freqs.sin().to(self.sin_coef), self.sin_coef)
        cos = torch.einsum("tD,hDd->thd", freqs.cos().to(self.cos_coef), self.cos_coef)
        missing = (0, self.head_size // 2 - sin.shape[-1])
        sin, cos = F.pad(sin, missing, value=self.sin_pad), F.pad(cos, missing, value=1.0)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)

    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Both are (batch, time, heads, head_size)."""
        cos, sin = (table[positions] for table in self.cos_sin())
        return tuple(x * cos + x.roll(self.head_size // 2, -1) * sin for x in (query, key))


class DecoderLayer(nn.Module):
    """Causal attention and a feed-forward layer."""

    def __init__(self, dim: int, num_heads: int, **rope: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv_proj, self.o_proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.rotary_emb = FourierRotaryEmbedding(dim // num_heads, num_heads, **rope)
        self.mlp = nn.Sequential(nn.Linear(dim, 64), nn.SiLU(), nn.Linear(64, dim))
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(dim), nn.RMSNorm(dim)

    def forward(self, positions: Tensor, x: Tensor) -> Tensor:
        """`x` is (batch, time, dim)."""
        qkv = self.qkv_proj(self.input_layernorm(x)).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.unbind(-3)
        q, k = self.rotary_emb(positions, q, k)
        y = F.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v)), is_causal=True)
        x = x + self.o_proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))


class InternS1ProForCausalLM(nn.Module):
    """Text part in small; returns logits."""

    def __init__(self, vocab_size: int = 67, dim: int = 32, *, sin_pad: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, dim)
        rope = {"num_inv_freq": 5, "max_len": 128, "sin_pad": sin_pad}
        self.layers = nn.ModuleList(DecoderLayer(dim, 2, **rope) for _ in range(2))
        self.norm, self.lm_head = nn.RMSNorm(dim), nn.Linear(dim, vocab_size, bias=False)

    def forward(self, input_ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Both are (batch, time)."""
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(positions, x)
        return self.lm_head(self.norm(x))


def buggy() -> nn.Module:
    """Sine is 1 where nothing should turn."""
    return InternS1ProForCausalLM(sin_pad=1.0)


def healthy() -> nn.Module:
    """Sine is 0 where nothing should turn."""
    return InternS1ProForCausalLM(sin_pad=0.0)


def observe(model: nn.Module) -> Tensor:
    """Logits minus those with only the first five channel pairs of each head turned, one by one."""
    ids = torch.randint(0, 67, (2, 9), generator=torch.Generator().manual_seed(1))
    rates = torch.tensor([10000 ** (-i / 8) for i in range(5)])

    def by_hand(rope: FourierRotaryEmbedding, args: tuple, _out: tuple) -> tuple:
        angles, both = args[0][..., None] * rates, (args[1].clone(), args[2].clone())
        for x, i in ((x, i) for x in both for i in range(5)):
            cos, sin = angles.cos() @ rope.cos_coef[:, :, i].T, angles.sin() @ rope.sin_coef[:, :, i].T
            a, b = x[..., i].clone(), x[..., i + 8].clone()
            x[..., i], x[..., i + 8] = a * cos - b * sin, b * cos + a * sin
        return both

    with torch.no_grad():
        plain = model.eval()(ids)
        hooks = [layer.rotary_emb.register_forward_hook(by_hand) for layer in model.layers]
        expected = model(ids)
    for hook in hooks:
        hook.remove()
    return plain - expected
