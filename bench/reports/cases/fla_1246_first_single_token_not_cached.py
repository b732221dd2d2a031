"""flash-linear-attention#1246 (fla-org): a first call of one token does not write the cache of a token shift.

The branch for a single token updates a given cache. Without one, it returns the new cache as it was
allocated, usually zeros. The second token is then mixed with zeros instead of the first token.
https://github.com/fla-org/flash-linear-attention/pull/1246
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM, HEADS = 32, 4
LayerCache = dict[str, Tensor]


def token_shift(x: Tensor, cache: Tensor | None, *, writes_first: bool) -> tuple[Tensor, Tensor]:
    """Return the previous token minus each token, and the last token (batch, dim) for the next call."""
    previous = torch.zeros_like(x[:, 0]) if cache is None else cache
    delta = torch.cat([previous[:, None], x[:, :-1]], dim=1) - x
    if x.shape[1] == 1 and cache is None and not writes_first:
        return delta, torch.zeros_like(x[:, 0])
    return delta, x[:, -1]


class RWKV6Attention(nn.Module):
    """Recurrence with a decay that depends on the token, and a bonus for the current token."""

    def __init__(self, *, writes_first: bool) -> None:
        super().__init__()
        self.writes_first = writes_first
        self.mu = nn.Parameter(torch.linspace(0.2, 0.8, 5 * DIM).view(5, DIM))
        self.r_proj, self.k_proj, self.v_proj, self.g_proj, self.o_proj = (
            nn.Linear(DIM, DIM, bias=False) for _ in range(5)
        )
        self.w_proj = nn.Linear(DIM, DIM)
        self.bonus = nn.Parameter(torch.linspace(-0.5, 0.5, DIM).view(HEADS, -1))
        self.g_norm = nn.LayerNorm(DIM // HEADS)

    def forward(self, x: Tensor, cache: LayerCache | None) -> tuple[Tensor, LayerCache]:
        """Output of `x` (batch, time, DIM), and the cache after it."""
        shift = None if cache is None else cache["attn_shift"]
        delta, shift = token_shift(x, shift, writes_first=self.writes_first)
        r, k, v, g, w = (
            proj(x + delta * mu)
            for proj, mu in zip(
                (self.r_proj, self.k_proj, self.v_proj, self.g_proj, self.w_proj), self.mu, strict=True
            )
        )
        r, k, v, w = (each.unflatten(-1, (HEADS, -1)) for each in (r, k, v, -torch.exp(w)))
        size = DIM // HEADS
        state = x.new_zeros(len(x), HEADS, size, size) if cache is None else cache["state"]
        outputs = []
        for t in range(x.shape[1]):
            update = k[:, t, :, :, None] * v[:, t, :, None]
            seen = state + self.bonus[..., None] * update
            outputs.append((r[:, t, :, :, None] * seen).sum(dim=2))
            state = state * w[:, t, :, :, None].exp() + update
        y = self.g_norm(torch.stack(outputs, dim=1)).flatten(2)
        return self.o_proj(y * F.silu(g)), {"attn_shift": shift, "state": state}


class RWKV6FeedForward(nn.Module):
    """MLP of each token mixed with the previous one."""

    def __init__(self, *, writes_first: bool) -> None:
        super().__init__()
        self.writes_first = writes_first
        self.mu = nn.Parameter(torch.linspace(0.3, 0.7, 2 * DIM).view(2, DIM))
        self.key, self.value = nn.Linear(DIM, 2 * DIM, bias=False), nn.Linear(2 * DIM, DIM, bias=False)
        self.receptance = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: Tensor, cache: LayerCache | None) -> tuple[Tensor, LayerCache]:
        """Output of `x` (batch, time, DIM), and the cache after it."""
        shift = None if cache is None else cache["ffn_shift"]
        delta, shift = token_shift(x, shift, writes_first=self.writes_first)
        value = self.value(F.relu(self.key(x + delta * self.mu[0])).square())
        return self.receptance(x + delta * self.mu[1]).sigmoid() * value, {"ffn_shift": shift}


class RWKV6Block(nn.Module):
    """Attention and MLP."""

    def __init__(self, *, writes_first: bool) -> None:
        super().__init__()
        self.attn_norm, self.ffn_norm = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attn = RWKV6Attention(writes_first=writes_first)
        self.ffn = RWKV6FeedForward(writes_first=writes_first)

    def forward(self, x: Tensor, cache: LayerCache | None) -> tuple[Tensor, LayerCache]:
        """Output, and the cache after it."""
        y, attn_cache = self.attn(self.attn_norm(x), cache)
        x = x + y
        y, ffn_cache = self.ffn(self.ffn_norm(x), cache)
        return x + y, attn_cache | ffn_cache


class RWKV6ForCausalLM(nn.Module):
    """Recurrent language model."""

    def __init__(self, *, writes_first: bool, vocab_size: int = 60) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(vocab_size, DIM)
        self.layers = nn.ModuleList(RWKV6Block(writes_first=writes_first) for _ in range(2))
        self.norm, self.lm_head = nn.LayerNorm(DIM), nn.Linear(DIM, vocab_size, bias=False)

    def forward(
        self,
        input_ids: Tensor,
        past_key_values: list[LayerCache] | None = None,
        use_cache: bool = True,
        labels: Tensor | None = None,
    ) -> SimpleNamespace:
        """Logits of new tokens, the mean loss of the next tokens, and the cache after them."""
        x, new_cache = self.embeddings(input_ids), []
        for layer, cache in zip(self.layers, past_key_values or [None] * len(self.layers), strict=True):
            x, layer_cache = layer(x, cache)
            new_cache.append(layer_cache)
        logits, loss = self.lm_head(self.norm(x)), None
        if labels is not None:
            scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
            loss = F.cross_entropy(scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(loss=loss, logits=logits, past_key_values=new_cache if use_cache else None)


def buggy() -> nn.Module:
    """Returns a cache that is not written."""
    return RWKV6ForCausalLM(writes_first=False)


def healthy() -> nn.Module:
    """Returns the token."""
    return RWKV6ForCausalLM(writes_first=True)


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Logits of tokens decoded one by one from the first, minus those of one call."""
    model = model.double().eval()
    ids = torch.randint(60, (2, 9), generator=torch.Generator().manual_seed(1))
    cache, steps = None, []
    for token in ids.split(1, dim=1):
        output = model(token, past_key_values=cache)
        cache = output.past_key_values
        steps.append(output.logits)
    return torch.cat(steps, dim=1) - model(ids).logits
