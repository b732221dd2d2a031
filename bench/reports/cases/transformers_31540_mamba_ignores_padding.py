"""transformers#31540 (huggingface/transformers): Mamba takes an attention mask and ignores it.

With left padding the pad tokens run through the convolution and the scan into the state, so a row of a
padded batch gets other logits than the same row alone.
"""

from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec


class MambaMixer(nn.Module):
    """Selective state space layer, sequential form."""

    def __init__(self, hidden_size: int, state_size: int, conv_kernel: int, mask_padding: bool) -> None:
        super().__init__()
        inner = 2 * hidden_size
        self.state_size, self.time_step_rank = state_size, hidden_size // 16
        self.mask_padding = mask_padding
        self.in_proj = nn.Linear(hidden_size, 2 * inner, bias=False)
        self.conv1d = nn.Conv1d(inner, inner, conv_kernel, groups=inner, padding=conv_kernel - 1)
        self.x_proj = nn.Linear(inner, self.time_step_rank + 2 * state_size, bias=False)
        self.dt_proj = nn.Linear(self.time_step_rank, inner)
        self.A_log = nn.Parameter(torch.arange(1.0, state_size + 1).log().repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner))
        self.out_proj = nn.Linear(inner, hidden_size, bias=False)

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """Mix (batch, length, hidden) along the length."""
        seq_len, mask = hidden_states.shape[1], None
        if attention_mask is not None and self.mask_padding:
            mask = attention_mask[:, None, :].to(hidden_states.dtype)
        hidden, gate = self.in_proj(hidden_states).transpose(1, 2).chunk(2, dim=1)
        if mask is not None:
            hidden = hidden * mask
        hidden = F.silu(self.conv1d(hidden)[..., :seq_len])
        if mask is not None:
            # the bias of the convolution fills the padding again
            hidden = hidden * mask

        sizes = [self.time_step_rank, self.state_size, self.state_size]
        time_step, B, C = self.x_proj(hidden.transpose(1, 2)).split(sizes, dim=-1)
        dt = F.softplus(self.dt_proj(time_step)).transpose(1, 2)
        A = -torch.exp(self.A_log)
        discrete_A = torch.exp(A[None, :, None, :] * dt[..., None])
        deltaB_u = dt[..., None] * B[:, None] * hidden[..., None]
        state, outputs = torch.zeros_like(deltaB_u[:, :, 0]), []
        for i in range(seq_len):
            state = discrete_A[:, :, i] * state + deltaB_u[:, :, i]
            outputs.append((state * C[:, i, None]).sum(-1))
        scan = torch.stack(outputs, dim=-1) + hidden * self.D[None, :, None]
        return self.out_proj((scan * F.silu(gate)).transpose(1, 2))


class MambaForCausalLM(nn.Module):
    """Mamba language model with tied embeddings."""

    def __init__(self, vocab_size: int = 48, hidden_size: int = 32, mask_padding: bool = True) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(vocab_size, hidden_size)
        self.norms = nn.ModuleList(nn.RMSNorm(hidden_size, eps=1e-5) for _ in range(2))
        self.mixers = nn.ModuleList(MambaMixer(hidden_size, 8, 4, mask_padding) for _ in range(2))
        self.norm_f = nn.RMSNorm(hidden_size, eps=1e-5)
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)
        self.lm_head.weight = self.embeddings.weight

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> SimpleNamespace:
        """Logits, and the loss of the next tokens."""
        hidden_states = self.embeddings(input_ids)
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            hidden_states = hidden_states + mixer(norm(hidden_states), attention_mask)
        logits = self.lm_head(self.norm_f(hidden_states))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(loss=loss, logits=logits)


def buggy() -> nn.Module:
    """The mask is not used."""
    return MambaForCausalLM(mask_padding=False)


def healthy() -> nn.Module:
    """Padding is zero before and behind the convolution."""
    return MambaForCausalLM(mask_padding=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """Padding is on the left."""
    return ModelSpec.of(make, padding_sides=("left",))


def observe(model: nn.Module) -> torch.Tensor:
    """Logits of a left-padded row, less those of the same row alone."""
    ids = torch.randint(1, 48, (2, 10), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    ids[0, :4], mask[0, :4] = 0, 0
    with torch.no_grad():
        return model(ids, attention_mask=mask).logits[0, 4:] - model(ids[:1, 4:]).logits[0]
