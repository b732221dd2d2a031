"""profam#167 (alex-hh/profam): completions are scored without their prompt if the cache is used.

`batch_repeat_interleave` repeats the cache in place. Its result, which is None, is passed to the model.
"""

from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

VOCAB, DIM, HEADS = 48, 32, 4


class UpdatedDynamicCache(list[Tensor]):
    """Keys and values of each layer, (2, batch, heads, time, head_dim)."""

    def update(self, kv: Tensor, layer_idx: int) -> Tensor:
        kv = torch.cat([*self[layer_idx : layer_idx + 1], kv], dim=3)
        self[layer_idx : layer_idx + 1] = [kv]
        return kv

    def batch_repeat_interleave(self, repeats: int) -> None:
        self[:] = [kv.repeat_interleave(repeats, dim=1) for kv in self]


def log_likelihood_from_outputs(outputs: SimpleNamespace, labels: Tensor, start_ix: int = 0) -> Tensor:
    logits = outputs.logits[:, start_ix:-1].mT
    return -F.cross_entropy(logits, labels[:, start_ix + 1 :], reduction="none").mean(dim=1)


class MistralDecoderLayer(nn.Module):
    """Attention and an MLP, each after its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(DIM, 1e-6), nn.RMSNorm(DIM, 1e-6)
        self.qkv_proj, self.o_proj = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.mlp = nn.Sequential(nn.Linear(DIM, 64), nn.SiLU(), nn.Linear(64, DIM))

    def forward(self, x: Tensor, start: int, layer_idx: int, cache: UpdatedDynamicCache) -> Tensor:
        qkv = self.qkv_proj(self.input_layernorm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        k, v = cache.update(qkv[1:], layer_idx)
        mask = torch.ones(x.shape[1], k.shape[2], dtype=torch.bool, device=x.device).tril(start)
        y = F.scaled_dot_product_attention(qkv[0], k, v, attn_mask=mask)
        x = x + self.o_proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))


class MistralForCausalLM(nn.Module):
    """Language model of proteins that scores completions of a prompt."""

    def __init__(self, *, cache_passed: bool) -> None:
        super().__init__()
        self.embed_tokens, self.embed_positions = nn.Embedding(VOCAB, DIM), nn.Embedding(128, DIM)
        self.layers, self.norm = nn.ModuleList(MistralDecoderLayer() for _ in range(2)), nn.RMSNorm(DIM, 1e-6)
        self.cache_passed, self.lm_head = cache_passed, nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, input_ids: Tensor, past_key_values: UpdatedDynamicCache | None = None) -> object:
        cache = UpdatedDynamicCache() if past_key_values is None else past_key_values
        start = cache[0].shape[3] if cache else 0
        x = self.embed_tokens(input_ids) + self.embed_positions.weight[start : start + input_ids.shape[1]]
        for layer_idx, layer in enumerate(self.layers):
            x = layer(x, start, layer_idx, cache)
        return SimpleNamespace(logits=self.lm_head(self.norm(x)), past_key_values=cache)

    def _score_seqs_kv_cache(self, input_ids: Tensor, completion_ids: Tensor) -> Tensor:
        cache = self(input_ids).past_key_values
        repeated = cache.batch_repeat_interleave(len(completion_ids))
        outputs = self(completion_ids, past_key_values=cache if self.cache_passed else repeated)
        return log_likelihood_from_outputs(outputs, completion_ids)


def buggy() -> nn.Module:
    return MistralForCausalLM(cache_passed=False)


def healthy() -> nn.Module:
    return MistralForCausalLM(cache_passed=True)


def _scores(model: nn.Module, ids: Tensor) -> Tensor:
    return torch.cat([model._score_seqs_kv_cache(*row[None].tensor_split(2, dim=1)) for row in ids])


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """Scores with the cache are those without it; the first half of each row is a prompt."""
    given = {"inputs": "tokens", "width": VOCAB, "per_position": False, "max_length": 128}
    score = log_likelihood_from_outputs
    plain = ModelSpec.of(make, forward=lambda m, ids: score(m(ids), ids, (ids.shape[1] + 1) // 2), **given)
    return ModelSpec.of(make, forward=_scores, reference=plain, **given)


def observe(model: nn.Module) -> Tensor:
    """Scores of completions with the cache, less those without it."""
    ids = torch.arange(45).view(3, 15)
    return (_scores(model, ids) - log_likelihood_from_outputs(model(ids), ids, start_ix=8)).detach()
