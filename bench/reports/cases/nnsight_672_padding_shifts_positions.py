"""nnsight#672 (ndif-team/nnsight): prompts of a batch are padded on the left, without position ids.

GPT-2 then counts its learned positions from the padding on, so that every prompt but the longest gets wrong
activations and logits. https://github.com/ndif-team/nnsight/issues/672
"""

from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

VOCAB, DIM, HEADS, MAX_LENGTH = 64, 32, 4, 64


class GPT2Block(nn.Module):
    """Causal attention and an MLP, each after its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.c_attn, self.c_proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU("tanh"), nn.Linear(4 * DIM, DIM))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        qkv = self.c_attn(self.ln_1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.c_proj(F.scaled_dot_product_attention(*qkv, attn_mask=mask).transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class GPT2LMHeadModel(nn.Module):
    """Language model with learned positions, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, DIM), nn.Embedding(MAX_LENGTH, DIM)
        self.h, self.ln_f = nn.ModuleList(GPT2Block() for _ in range(2)), nn.LayerNorm(DIM)
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)
        self.lm_head.weight = self.wte.weight
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02 / (2 if "c_proj" in name or "mlp.2" in name else 1))

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> SimpleNamespace:
        """By default, positions are counted from the first column."""
        index = torch.arange(input_ids.shape[1], device=input_ids.device)
        keep = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        mask = (index <= index[:, None]) & keep[:, None, None].bool() | (index == index[:, None])
        x = self.wte(input_ids) + self.wpe(index if position_ids is None else position_ids)
        for block in self.h:
            x = block(x, mask)
        return SimpleNamespace(logits=self.lm_head(self.ln_f(x)))


class LanguageModel(nn.Module):
    """Wrapper that runs several prompts in one batch."""

    def __init__(self, model: GPT2LMHeadModel, *, supply_position_ids: bool) -> None:
        super().__init__()
        self._model, self.supply_position_ids = model, supply_position_ids

    def _batch(self, prompts: list[Tensor]) -> dict[str, Tensor]:
        """Pad prompts on the left."""
        ids = nn.utils.rnn.pad_sequence(prompts, batch_first=True, padding_value=-1, padding_side="left")
        return {"input_ids": ids.clamp(min=0), "attention_mask": ids.ge(0).long()}

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> SimpleNamespace:
        """Run the model on padded prompts."""
        position_ids = None
        if self.supply_position_ids and attention_mask is not None:
            position_ids = (attention_mask.long().cumsum(dim=-1) - 1).clamp(min=0)
        return self._model(input_ids, attention_mask, position_ids)

    def trace(self, *prompts: Tensor) -> SimpleNamespace:
        """Run the model on prompts of several lengths."""
        return self(**self._batch([*prompts]))


def buggy() -> nn.Module:
    return LanguageModel(GPT2LMHeadModel(), supply_position_ids=False)


def healthy() -> nn.Module:
    return LanguageModel(GPT2LMHeadModel(), supply_position_ids=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    return ModelSpec.of(make, causal=True, tied=True, max_length=MAX_LENGTH, padding_sides=("left",))


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Last logits of a prompt next to a longer one, less those of the prompt alone."""
    short, long = torch.arange(5, 9), torch.arange(20, 32)
    return (model.trace(short, long).logits[0, -1] - model.trace(short).logits[0, -1])[:8]
