"""transformers#47478 (huggingface/transformers): CLVP's depth-scaled init of `c_proj` is never applied.

The initialiser compares the fully qualified parameter name with "c_proj.weight", which never matches, so the
residual projections keep std 0.02 instead of 0.02 / sqrt(2 * layers).
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import Facts, ModelSpec

LAYERS = 4
INITIALIZER_RANGE = 0.02
DECLARATION = "c_proj weights are drawn with std initializer_range / sqrt(2 * num_hidden_layers), as in GPT-2"


class ClvpDecoderMLP(nn.Module):
    """Feed-forward layer whose `c_proj` writes to the residual stream."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Two projections with a GELU."""
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class ClvpDecoderLayer(nn.Module):
    """Pre-norm causal layer."""

    def __init__(self, d: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.mlp = num_heads, ClvpDecoderMLP(d)
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(d), nn.LayerNorm(d)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(d, d, bias=False) for _ in range(3))
        self.out_proj = nn.Linear(d, d)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """One layer; `mask` is True where attention is allowed."""
        h = self.input_layernorm(x)
        heads = (p(h).unflatten(-1, (self.num_heads, -1)) for p in (self.q_proj, self.k_proj, self.v_proj))
        a = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in heads), attn_mask=mask)
        x = x + self.out_proj(a.transpose(1, 2).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))


class ClvpForCausalLM(nn.Module):
    """Decoder that turns text tokens into speech tokens."""

    def __init__(self, match_suffix: bool, hidden_size: int = 48, vocab_size: int = 64) -> None:
        super().__init__()
        self.match_suffix = match_suffix
        self.input_embeds_layer = nn.Embedding(vocab_size, hidden_size)
        self.position_embeds_layer = nn.Embedding(64, hidden_size)
        self.layers = nn.ModuleList(ClvpDecoderLayer(hidden_size, 4) for _ in range(LAYERS))
        self.final_norm = nn.LayerNorm(hidden_size)
        self.lm_head = nn.Linear(hidden_size, vocab_size)
        self.apply(self._init_weights)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=INITIALIZER_RANGE)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, ClvpForCausalLM):
            for name, p in module.named_parameters():
                if name == "c_proj.weight" or (self.match_suffix and name.endswith(".c_proj.weight")):
                    nn.init.normal_(p, std=INITIALIZER_RANGE / math.sqrt(2 * LAYERS))

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """(logits,) or (loss, logits)."""
        columns = torch.arange(input_ids.shape[1], device=input_ids.device)
        position_ids = columns[None] if position_ids is None else position_ids
        x = self.input_embeds_layer(input_ids) + self.position_embeds_layer(position_ids)
        mask = (columns[:, None] >= columns)[None, None]
        if attention_mask is not None:
            # Padding may look at itself, or its softmax would have no entry.
            mask = mask & (attention_mask.bool()[:, None, None] | (columns[:, None] == columns))
        for layer in self.layers:
            x = layer(x, mask)
        logits = self.lm_head(self.final_norm(x))
        if labels is None:
            return (logits,)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits


def buggy() -> nn.Module:
    """As reported."""
    return ClvpForCausalLM(match_suffix=False)


def healthy() -> nn.Module:
    """As fixed."""
    return ClvpForCausalLM(match_suffix=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State the standard deviation of new `c_proj` weights."""
    std = INITIALIZER_RANGE / math.sqrt(2 * LAYERS)
    return ModelSpec.of(make, causal=True, facts=Facts(initial_std={"*.c_proj.weight": std}))


def observe(model: nn.Module) -> torch.Tensor:
    """Relative excess of the std of each `c_proj` over the stated one (sampling error below 0.03)."""
    target = INITIALIZER_RANGE / math.sqrt(2 * len(model.layers))
    return torch.stack([layer.mlp.c_proj.weight.std() / target - 1 for layer in model.layers]).detach()
