"""transformers#46612 (huggingface/transformers): beam search does not reorder the state of Mamba.

The cache is reordered only under the name `past_key_values`. Mamba calls it `cache_params`, so after a step
a beam continues from the state of another beam.
"""

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec

ALL_CACHE_NAMES = ("past_key_values", "cache_params", "state")
KERNEL, STATE = 3, 4


class MambaCache:
    """Last inputs of the convolution, and state of the recurrence, for each layer."""

    def __init__(self, layers: int, rows: int, dim: int, dtype: torch.dtype) -> None:
        self.conv_states = [torch.zeros(rows, KERNEL - 1, dim, dtype=dtype) for _ in range(layers)]
        self.ssm_states = [torch.zeros(rows, dim, STATE, dtype=dtype) for _ in range(layers)]

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Give each row the state of the chosen row."""
        self.conv_states = [state[beam_idx] for state in self.conv_states]
        self.ssm_states = [state[beam_idx] for state in self.ssm_states]


class MambaMixer(nn.Module):
    """Causal convolution and selective recurrence."""

    def __init__(self, hidden_size: int, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.in_proj = nn.Linear(hidden_size, 2 * hidden_size, bias=False)
        self.conv1d = nn.Conv1d(hidden_size, hidden_size, KERNEL, groups=hidden_size)
        self.dt_proj = nn.Linear(hidden_size, hidden_size)
        nn.init.constant_(self.dt_proj.bias, -2.0)  # steps of about 0.1
        self.x_proj = nn.Linear(hidden_size, 2 * STATE, bias=False)
        self.A_log = nn.Parameter(torch.arange(1.0, STATE + 1).log().repeat(hidden_size, 1))
        self.D = nn.Parameter(torch.ones(hidden_size))
        self.out_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, hidden_states: torch.Tensor, cache: MambaCache) -> torch.Tensor:
        """`hidden_states` is (batch, time, hidden_size); the cache is updated."""
        x, gate = self.in_proj(hidden_states).chunk(2, dim=-1)
        x = torch.cat([cache.conv_states[self.layer_idx], x], dim=1)
        cache.conv_states[self.layer_idx] = x[:, 1 - KERNEL :]
        x = F.silu(self.conv1d(x.transpose(1, 2)).transpose(1, 2))
        dt, (b, c) = F.softplus(self.dt_proj(x)), self.x_proj(x).chunk(2, dim=-1)
        decay = (dt[..., None] * -self.A_log.exp()).exp()
        update = (dt * x)[..., None] * b[:, :, None]
        state, outputs = cache.ssm_states[self.layer_idx], []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + update[:, t]
            outputs.append((state @ c[:, t, :, None]).squeeze(-1))
        cache.ssm_states[self.layer_idx] = state
        return self.out_proj((torch.stack(outputs, dim=1) + self.D * x) * F.silu(gate))


class MambaForCausalLM(nn.Module):
    """Mamba language model with greedy and beam search."""

    def __init__(self, *, every_name: bool, vocab_size: int = 60, hidden_size: int = 32) -> None:
        super().__init__()
        self.every_name = every_name
        self.embeddings = nn.Embedding(vocab_size, hidden_size)
        self.norms = nn.ModuleList(nn.RMSNorm(hidden_size) for _ in range(2))
        self.mixers = nn.ModuleList(MambaMixer(hidden_size, i) for i in range(2))
        self.norm_f, self.lm_head = nn.RMSNorm(hidden_size), nn.Linear(hidden_size, vocab_size, bias=False)

    def make_cache(self, rows: int) -> MambaCache:
        """Return the state before the first token."""
        weight = self.embeddings.weight
        return MambaCache(len(self.mixers), rows, weight.shape[1], weight.dtype)

    def forward(self, input_ids: torch.Tensor, cache_params: MambaCache | None = None) -> torch.Tensor:
        """Return logits of the new tokens; `cache_params` is updated."""
        cache = self.make_cache(len(input_ids)) if cache_params is None else cache_params
        x = self.embeddings(input_ids)
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            x = x + mixer(norm(x), cache)
        return self.lm_head(self.norm_f(x))

    @torch.no_grad()
    def generate(
        self,
        input_ids: torch.Tensor,
        max_new_tokens: int,
        num_beams: int = 1,
        return_dict_in_generate: bool = False,
    ) -> torch.Tensor | SimpleNamespace:
        """Return the best sequence of each prompt, or also the log-probability of its new tokens."""
        rows, vocab = len(input_ids), self.lm_head.out_features
        sequences = input_ids.repeat_interleave(num_beams, dim=0)
        model_kwargs: dict[str, Any] = {"cache_params": self.make_cache(len(sequences))}
        scores = torch.full((rows, num_beams), -torch.inf, dtype=self.embeddings.weight.dtype)
        scores[:, 0] = 0  # the beams of a prompt are equal before the first step
        new = sequences
        for _ in range(max_new_tokens):
            log_probs = self(new, **model_kwargs)[:, -1].log_softmax(dim=-1).view(rows, num_beams, vocab)
            scores, best = (scores[..., None] + log_probs).flatten(1).topk(num_beams, dim=-1)
            beam_idx = (best // vocab + torch.arange(rows)[:, None] * num_beams).flatten()
            new = (best % vocab).view(-1, 1)
            sequences = torch.cat([sequences[beam_idx], new], dim=1)
            for name in ALL_CACHE_NAMES if self.every_name else ALL_CACHE_NAMES[:1]:
                if model_kwargs.get(name) is not None:
                    model_kwargs[name].reorder_cache(beam_idx)
        sequences = sequences.view(rows, num_beams, -1)[:, 0]
        if return_dict_in_generate:
            return SimpleNamespace(sequences=sequences, sequences_scores=scores[:, 0])
        return sequences


def buggy() -> nn.Module:
    """Reorders `past_key_values` only."""
    return MambaForCausalLM(every_name=False)


def healthy() -> nn.Module:
    """Reorders the cache under each known name."""
    return MambaForCausalLM(every_name=True)


def _decode(
    model: nn.Module, tokens: torch.Tensor, cache: MambaCache | None
) -> tuple[torch.Tensor, MambaCache]:
    cache = model.make_cache(len(tokens)) if cache is None else cache
    return model(tokens, cache_params=cache), cache


def buggy_declared() -> ModelSpec:
    """The model is causal and decodes with its state."""
    return ModelSpec.of(buggy, causal=True, decode=_decode)


def healthy_declared() -> ModelSpec:
    """The model is causal and decodes with its state."""
    return ModelSpec.of(healthy, causal=True, decode=_decode)


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Scores that beam search returns minus the log-probabilities of the sequences in one pass."""
    model = model.double().eval()
    prompts = torch.randint(0, 60, (3, 4), generator=torch.Generator().manual_seed(1))
    found = model.generate(prompts, max_new_tokens=6, num_beams=4, return_dict_in_generate=True)
    log_probs = model(found.sequences[:, :-1]).log_softmax(dim=-1)
    chosen = log_probs.gather(-1, found.sequences[:, 1:, None]).squeeze(-1)
    return found.sequences_scores - chosen[:, 3:].sum(dim=-1)
