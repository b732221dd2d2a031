"""TransformerLens#1609 (TransformerLensOrg/TransformerLens): left-padded tensors get wrong positions.

TransformerBridge.forward derives position_ids from the mask only for list input, so tensors count padding.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec


class Block(nn.Module):
    """GPT-2 block."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.ln1, self.ln2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.qkv, self.o = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        self.mlp = nn.Sequential(nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model))

    def forward(self, resid: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Attention and MLP into the residual stream."""
        b, pos, d = resid.shape
        q, k, v = self.qkv(self.ln1(resid)).view(b, pos, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        resid = resid + self.o(z.transpose(1, 2).reshape(b, pos, d))
        return resid + self.mlp(self.ln2(resid))


class HFModel(nn.Module):
    """The wrapped GPT-2: learned absolute positions, 0, 1, 2, ... unless position_ids say otherwise."""

    def __init__(self, d_vocab: int = 50, d_model: int = 32, n_ctx: int = 64) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(d_vocab, d_model), nn.Embedding(n_ctx, d_model)
        self.h = nn.ModuleList(Block(d_model, 4) for _ in range(2))
        self.ln_f = nn.LayerNorm(d_model)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor | None
    ) -> torch.Tensor:
        """Return logits."""
        length = input_ids.shape[1]
        if position_ids is None:
            position_ids = torch.arange(length)[None]
        x = self.wte(input_ids) + self.wpe(position_ids)
        mask = torch.ones(length, length, dtype=torch.bool).tril() & attention_mask.bool()[:, None, None, :]
        mask = mask | torch.eye(length, dtype=torch.bool)  # rows of padding need a key
        for block in self.h:
            x = block(x, mask)
        return F.linear(self.ln_f(x), self.wte.weight)


class TransformerBridge(nn.Module):
    """Wraps a model; takes tokens as a padded tensor or as a list of lists, which it pads left."""

    def __init__(self, only_lists: bool) -> None:
        super().__init__()
        self.only_lists = only_lists
        self.original_model = HFModel()

    def to_tokens(self, batch: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Left-pad with 0."""
        longest = max(map(len, batch))
        tokens = torch.tensor([[0] * (longest - len(row)) + row for row in batch])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in batch])
        return tokens, mask

    def forward(
        self,
        input: torch.Tensor | list[list[int]],  # noqa: A002 - the project's name
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        return_type: str = "logits",
    ) -> torch.Tensor:
        """Return logits, or the mean next-token loss over what is not padding."""
        is_list = isinstance(input, list)
        tokens, attention_mask = self.to_tokens(input) if is_list else (input, attention_mask)
        if attention_mask is None:
            attention_mask = torch.ones_like(tokens)
        if position_ids is None and (is_list or not self.only_lists):
            position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        logits = self.original_model(tokens, attention_mask, position_ids)
        if return_type == "logits":
            return logits
        known = (attention_mask[:, 1:] * attention_mask[:, :-1]).bool()
        return F.cross_entropy(logits[:, :-1][known], tokens[:, 1:][known])


def buggy() -> nn.Module:
    """Positions from the mask for lists only."""
    return TransformerBridge(only_lists=True)


def healthy() -> nn.Module:
    """Positions from the mask for every input."""
    return TransformerBridge(only_lists=False)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """Padding may be on both sides."""
    return ModelSpec.of(
        make,
        padding_sides=("left", "right"),
        masked=lambda model, tokens, keep: model(tokens, attention_mask=keep.long()),
    )


def observe(model: nn.Module) -> torch.Tensor:
    """Logits of a left-padded, masked prompt minus those of the prompt alone; 0 is right."""
    model, tokens = model.double().eval(), torch.arange(1, 8)[None]
    padded, mask = F.pad(tokens, (3, 0)), F.pad(torch.ones_like(tokens), (3, 0))
    with torch.no_grad():
        return model(padded, attention_mask=mask)[:, 3:] - model(tokens)
