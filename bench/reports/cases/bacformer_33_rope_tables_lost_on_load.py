"""bacformer#33 (macwiatrak/Bacformer): `from_pretrained` leaves the rotary tables filled with stray memory.

The tables are non-persistent buffers that only `__init__` computes; loading builds the model on the meta
device and `_init_weights` does not restore them, so the loaded model gives other outputs than the saved one.
"""

import tempfile

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput as Output

DECLARATION = "a model that is saved and loaded again gives the same outputs"


def precompute_freqs_cis(dim: int, end: int, theta: float = 10000.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine for `end` positions."""
    freqs = torch.outer(torch.arange(end).float(), 1.0 / theta ** (torch.arange(0, dim, 2).float() / dim))
    return freqs.cos(), freqs.sin()


def apply_rotary_emb(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of neighbours of (B, T, heads, head_dim)."""
    real, imag = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((real * cos - imag * sin, real * sin + imag * cos), dim=-1).flatten(3)


class BacformerConfig(PretrainedConfig):
    """Sizes."""

    model_type = "bacformer_tiny"

    def __init__(self, hidden_size: int = 32, restore_tables: bool = False, **kwargs: object) -> None:
        self.hidden_size, self.num_hidden_layers, self.restore_tables = hidden_size, 2, restore_tables
        self.num_attention_heads, self.max_position_embeddings, self.initializer_range = 4, 64, 0.02
        super().__init__(**kwargs)


class BacformerLayer(nn.Module):
    """Post-norm encoder layer."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.att_proj = heads, nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.fc1, self.fc2 = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None, *freqs: torch.Tensor) -> torch.Tensor:
        """Attention over the genome, then the MLP."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (apply_rotary_emb(q, *freqs), apply_rotary_emb(k, *freqs), v))
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = self.norm1(x + self.att_proj(a.transpose(1, 2).flatten(2)))
        return self.norm2(x + self.fc2(F.gelu(self.fc1(x))))


class BacformerModel(PreTrainedModel):
    """Encoder over the protein embeddings of a genome, in order."""

    config_class, base_model_prefix = BacformerConfig, "bacformer"

    def __init__(self, config: BacformerConfig) -> None:
        super().__init__(config)
        d, heads = config.hidden_size, config.num_attention_heads
        self.linear = nn.Linear(d, d)
        self.layers = nn.ModuleList(BacformerLayer(d, heads) for _ in range(config.num_hidden_layers))
        cos, sin = precompute_freqs_cis(d // heads, int(config.max_position_embeddings * 1.5))
        self.register_buffer("freqs_cos", cos, persistent=False)
        self.register_buffer("freqs_sin", sin, persistent=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
            nn.init.zeros_(module.bias)
        elif self.config.restore_tables and isinstance(module, BacformerModel):
            cos, sin = precompute_freqs_cis(module.freqs_cos.shape[1] * 2, module.freqs_cos.shape[0])
            module.freqs_cos.copy_(cos)
            module.freqs_sin.copy_(sin)

    def forward(self, protein_embeddings: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Output:
        """Contextual embeddings of (B, T, hidden); the mask is 1 at real proteins."""
        T = protein_embeddings.shape[1]
        mask = None if attention_mask is None else attention_mask.bool()[:, None, None]
        x = self.linear(protein_embeddings)
        for layer in self.layers:
            x = layer(x, mask, self.freqs_cos[:T, None], self.freqs_sin[:T, None])
        return Output(last_hidden_state=x)


def buggy() -> nn.Module:
    """As reported."""
    return BacformerModel(BacformerConfig())


def healthy() -> nn.Module:
    """As fixed."""
    return BacformerModel(BacformerConfig(restore_tables=True))


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Output after saving and loading minus output before; a nan is a difference too."""
    x = torch.randn(2, 10, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = type(model).from_pretrained(folder)
    return loaded(x).last_hidden_state - model.eval()(x).last_hidden_state
