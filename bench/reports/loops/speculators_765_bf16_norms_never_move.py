"""speculators#765 (vllm-project/speculators): all parameters are held in bf16, so norm weights stay at 1.

An update smaller than the spacing of bf16 next to 1.0 is rounded away in every step.
"""

import torch
import torch.nn.functional as F
from torch import nn

Batch = dict[str, torch.Tensor]


class DraftLayer(nn.Module):
    """Attention and MLP with a norm before each."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(hidden)
        self.gate_up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down_proj = nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One layer of the stream."""
        q, k, v = self.qkv(self.input_layernorm(x)).chunk(3, dim=-1)
        x = x + self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        gate, up = self.gate_up(self.post_attention_layernorm(x)).chunk(2, dim=-1)
        return x + self.down_proj(F.silu(gate) * up)


class DraftModel(nn.Module):
    """A small draft model."""

    def __init__(self, vocab_size: int = 64, hidden: int = 32) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, hidden)
        self.layers = nn.ModuleList([DraftLayer(hidden)])
        self.norm = nn.RMSNorm(hidden)
        self.lm_head = nn.Linear(hidden, vocab_size, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits of the next token."""
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


class Trainer:
    """Trains in bf16: either the parameters themselves or only the computation."""

    def __init__(self, model: nn.Module, lr: float = 1e-4, *, cast_model: bool = False) -> None:
        self.model = model.to(torch.bfloat16) if cast_model else model
        self.autocast = not cast_model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=0.01)

    def loss(self, batch: Batch) -> torch.Tensor:
        """Cross entropy in float32 over bf16 logits."""
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast):
            logits = self.model(batch["input_ids"])
        targets = batch["labels"][:, 1:].flatten()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets, ignore_index=-100)

    def step(self, batch: Batch) -> torch.Tensor:
        """One optimizer step."""
        self.optimizer.zero_grad()
        loss = self.loss(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        return loss.detach()


def buggy() -> Trainer:
    """Parameters in bf16 and no float32 copy."""
    return Trainer(DraftModel(), cast_model=True)


def healthy() -> Trainer:
    """Parameters in float32, bf16 for the computation only."""
    return Trainer(DraftModel())


def _moved(trainer: Trainer) -> float:
    for _ in range(15):
        ids = torch.randint(0, 64, (4, 16))
        trainer.step({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids})
    norms = [p for name, p in trainer.model.named_parameters() if "norm" in name]
    return max((p.float() - 1.0).abs().max().item() for p in norms)


def prove() -> tuple[float, float]:
    """Largest distance of a norm's weight from 1 after 15 steps; 0 if it cannot move."""
    return _moved(buggy()), _moved(healthy())
