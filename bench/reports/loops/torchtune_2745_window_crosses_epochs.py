"""torchtune#2745 (meta-pytorch/torchtune): a last incomplete window's gradients stay for the next epoch.

If the batches of an epoch do not divide by the accumulation steps, its first update mixes both.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn


class Transformer(nn.Module):
    """One layer of causal attention."""

    def __init__(self, vocab_size: int = 64, embed_dim: int = 32) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab_size, embed_dim)
        self.sa_norm = nn.RMSNorm(embed_dim)
        self.qkv_proj = nn.Linear(embed_dim, 3 * embed_dim, bias=False)
        self.output_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.output = nn.Linear(embed_dim, vocab_size, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the next token."""
        h = self.tok_embeddings(tokens)
        q, k, v = self.qkv_proj(self.sa_norm(h)).chunk(3, dim=-1)
        h = h + self.output_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return self.output(h)


class FullFinetuneRecipe:
    """Fine-tunes on its own small data set."""

    total_epochs = 2
    gradient_accumulation_steps = 2

    def __init__(self, num_batches: int = 5, flush_last_window: bool = True) -> None:
        self.model = Transformer()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.flush_last_window = flush_last_window
        self.samples = torch.randint(0, 64, (num_batches * 4, 16))
        self.updates: list[int] = []
        self.micro_batches = 0
        self.num_tokens = 0

    def epoch(self, number: int) -> Iterator[dict[str, torch.Tensor]]:
        """The shuffled batches of an epoch."""
        order = torch.randperm(len(self.samples), generator=torch.Generator().manual_seed(number))
        for rows in order.split(4):
            tokens = self.samples[rows]
            yield {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}

    def _forward_backward(self, batch: dict[str, torch.Tensor]) -> float:
        labels = batch["labels"][:, 1:]
        logits = self.model(batch["input_ids"])[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        loss.backward()
        self.num_tokens += int((labels != -100).sum())
        self.micro_batches += 1
        return loss.item()

    def _update(self) -> None:
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad.div_(max(self.num_tokens, 1))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.updates.append(self.micro_batches)
        self.micro_batches = self.num_tokens = 0

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        """A window of one batch."""
        return self.accumulate([batch])

    def accumulate(self, batches: list[dict[str, torch.Tensor]]) -> float:
        """One update from one window."""
        running_loss = sum(self._forward_backward(batch) for batch in batches)
        tokens = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
        self._update()
        return running_loss / max(tokens, 1)

    def fit(self) -> None:
        """All epochs."""
        for number in range(self.total_epochs):
            for idx, batch in enumerate(self.epoch(number)):
                self._forward_backward(batch)
                if (idx + 1) % self.gradient_accumulation_steps == 0:
                    self._update()
            if self.micro_batches and self.flush_last_window:
                self._update()


def buggy() -> FullFinetuneRecipe:
    """Leaves the incomplete window for the next epoch."""
    return FullFinetuneRecipe(flush_last_window=False)


def healthy() -> FullFinetuneRecipe:
    """Updates from the incomplete window at the end of its epoch."""
    return FullFinetuneRecipe()


def prove() -> tuple[float, float]:
    """Micro-batches in the largest window of two epochs; the configuration says 2."""
    wrong, right = buggy(), healthy()
    wrong.fit()
    right.fit()
    return float(max(wrong.updates)), float(max(right.updates))
