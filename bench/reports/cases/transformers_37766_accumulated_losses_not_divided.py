"""transformers#37766 (huggingface/transformers): losses add up if a model takes no loss arguments.

The trainer leaves the division to the model. A model without `**kwargs` takes the mean of each micro-batch.
"""

import inspect
from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

VOCAB, DIM, HEADS, MAX_LENGTH = 64, 32, 4, 64
Opt, Out = Tensor | None, SimpleNamespace


def causal_lm_loss(logits: Tensor, labels: Tensor, num_items_in_batch: Opt = None) -> Tensor:
    total = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return total / (labels[:, 1:].ne(-100).sum() if num_items_in_batch is None else num_items_in_batch)


class DecoderLayer(nn.Module):
    """Causal attention and an MLP, each after its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.c_attn, self.c_proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        qkv = self.c_attn(self.ln_1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.c_proj(F.scaled_dot_product_attention(*qkv, attn_mask=mask).transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class LMHeadModel(nn.Module):
    """Language model whose loss is the mean over the labels of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, DIM), nn.Embedding(MAX_LENGTH, DIM)
        self.h = nn.ModuleList(DecoderLayer() for _ in range(2))
        self.ln_f, self.lm_head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, input_ids: Tensor, attention_mask: Opt = None, labels: Opt = None) -> Out:
        index = torch.arange(input_ids.shape[1], device=input_ids.device)
        keep = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        mask = (index <= index[:, None]) & keep[:, None, None].bool() | (index == index[:, None])
        x = self.wte(input_ids) + self.wpe(index)
        for layer in self.h:
            x = layer(x, mask)
        logits = self.lm_head(self.ln_f(x))
        return Out(loss=None if labels is None else causal_lm_loss(logits, labels), logits=logits)


class LMHeadModelWithLossKwargs(LMHeadModel):
    """Language model that passes further arguments to its loss."""

    def forward(self, input_ids: Tensor, attention_mask: Opt = None, labels: Opt = None, **kw: Opt) -> Out:
        logits = super().forward(input_ids, attention_mask).logits
        return Out(loss=None if labels is None else causal_lm_loss(logits, labels, **kw), logits=logits)


def accumulated_loss(model: nn.Module, batch_samples: list[dict[str, Tensor]]) -> Tensor:
    """Sum of the losses that the trainer passes to backward before a step of the optimizer."""
    num_items = torch.stack([each["labels"][:, 1:].ne(-100).sum() for each in batch_samples]).sum()
    parameters = inspect.signature(model.forward).parameters.values()
    accepts_kwargs = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    kwargs = {"num_items_in_batch": num_items} if accepts_kwargs else {}
    return torch.stack([model(**inputs, **kwargs).loss for inputs in batch_samples]).sum()


def buggy() -> nn.Module:
    return LMHeadModel()


def healthy() -> nn.Module:
    return LMHeadModelWithLossKwargs()


def _step(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    """Loss of a step of the trainer, with one row in each micro-batch."""
    rows = zip(ids[:, None], labels[:, None], strict=True)
    return accumulated_loss(model, [{"input_ids": row, "labels": label} for row, label in rows])


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    return ModelSpec.of(make, causal=True, max_length=MAX_LENGTH, labelled_loss=_step)


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Loss of a step with four micro-batches, less that of one batch."""
    ids = torch.arange(48).view(4, 12)
    labels = ids.where(ids % 12 >= torch.tensor([[2], [9], [4], [7]]), -100)
    return _step(model, ids, labels) - accumulated_loss(model, [{"input_ids": ids, "labels": labels}])
