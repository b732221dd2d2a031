"""Megatron-LM#5682 (NVIDIA/Megatron-LM): the loss of packed sequences compares outputs with their own inputs.

The packing of mlite concatenates the labels as they are. The model does not shift its labels, so its loss is
not that of the next token. https://github.com/NVIDIA/Megatron-LM/pull/5682
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

IGNORED, DIM, HEADS = -100, 32, 4


@dataclass
class PackedSeqParams:
    """Where the sequences of a packed row start, and where the last one ends."""

    cu_seqlens_q: Tensor

    def documents(self, length: int) -> Tensor:
        """Return the index of the sequence of each token."""
        index = torch.arange(length, device=self.cu_seqlens_q.device)
        return torch.searchsorted(self.cu_seqlens_q, index, right=True) - 1


def apply_rotary(x: Tensor, position_ids: Tensor) -> Tensor:
    """Rotate `x` (batch, heads, time, dim) by its positions (batch, time)."""
    half = x.shape[-1] // 2
    inv_freq = 1e4 ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angles = position_ids[:, None, :, None].double() * inv_freq
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class TransformerLayer(nn.Module):
    """Attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_qkv, self.linear_proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.input_layernorm, self.pre_mlp_layernorm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: Tensor, mask: Tensor, position_ids: Tensor) -> Tensor:
        """One layer; `mask` is True for visible keys."""
        qkv = self.linear_qkv(self.input_layernorm(x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = (each.transpose(1, 2) for each in qkv.unbind(2))
        q, k = apply_rotary(q, position_ids), apply_rotary(k, position_ids)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.linear_proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.pre_mlp_layernorm(x))


class GPTModel(nn.Module):
    """Causal language model. It packs sequences of a batch into one row for fine-tuning."""

    def __init__(self, *, shifts_labels: bool, vocab_size: int = 64) -> None:
        super().__init__()
        self.shifts_labels = shifts_labels
        self.embedding = nn.Embedding(vocab_size, DIM)
        self.layers = nn.ModuleList(TransformerLayer() for _ in range(2))
        self.final_layernorm = nn.RMSNorm(DIM)
        self.output_layer = nn.Linear(DIM, vocab_size, bias=False)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Logits, or the loss of each token if `labels` has the target of each output."""
        length = input_ids.shape[1]
        index = torch.arange(length, device=input_ids.device)
        position_ids = index[None] if position_ids is None else position_ids
        mask = index[:, None] >= index
        if packed_seq_params is not None:
            document = packed_seq_params.documents(length)
            mask = mask & (document[:, None] == document)
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x, mask, position_ids)
        logits = self.output_layer(self.final_layernorm(x))
        if labels is None:
            return logits
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32)).transpose(1, 2)
        return F.cross_entropy(scores, labels, ignore_index=IGNORED, reduction="none")

    def sft_loss(self, sequences: list[Tensor], labels: list[Tensor]) -> Tensor:
        """Return the mean loss of fine-tuning. Each sequence has labels of its own tokens, or `IGNORED`."""
        lengths = [len(each) for each in sequences]
        starts = torch.tensor([0, *lengths], device=sequences[0].device).cumsum(0)
        if self.shifts_labels:
            labels = [F.pad(each[1:], (0, 1), value=IGNORED) for each in labels]
        row, targets = torch.cat(list(sequences))[None], torch.cat(list(labels))[None]
        positions = torch.cat([torch.arange(n, device=row.device) for n in lengths])[None]
        losses = self(row, positions, targets, PackedSeqParams(starts))
        return losses.sum() / (targets != IGNORED).sum().clamp(min=1)


def buggy() -> nn.Module:
    """Packs the labels as they are."""
    return GPTModel(shifts_labels=False)


def healthy() -> nn.Module:
    """Shifts the labels of each sequence."""
    return GPTModel(shifts_labels=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """The model is causal, and its loss is that of fine-tuning, with labels that are not shifted."""
    return ModelSpec.of(
        make,
        causal=True,
        loss=lambda model, ids: model.sft_loss(list(ids), list(ids)),
        labelled_loss=lambda model, ids, labels: model.sft_loss(list(ids), list(labels)),
    )


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Loss of two packed sequences, whose prompts are ignored, minus that of the next tokens of each one."""
    model = model.double().eval()
    ids = torch.randint(64, (18,), generator=torch.Generator().manual_seed(1)).split([7, 11])
    labels = [F.pad(each[3:], (3, 0), value=IGNORED) for each in ids]
    log_probs = [model(each[None])[0, :-1].log_softmax(-1).gather(-1, each[1:, None])[2:] for each in ids]
    return model.sft_loss(list(ids), labels) + torch.cat(log_probs).mean()
