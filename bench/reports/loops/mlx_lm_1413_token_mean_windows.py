"""mlx-lm#1413 (ml-explore/mlx-lm): micro-batch token means are averaged with equal weights in a window.

With completions of different lengths the accumulated update leans towards the short ones.
"""

import torch
import torch.nn.functional as F
from torch import nn

Batch = dict[str, torch.Tensor]


class TinyLM(nn.Module):
    """Embedding, one recurrent layer and a head."""

    def __init__(self, vocab_size: int = 96, dims: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, dims)
        self.rnn = nn.GRU(dims, dims, batch_first=True)
        self.head = nn.Linear(dims, vocab_size, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return next-token logits."""
        hidden, _ = self.rnn(self.embed(input_ids))
        return self.head(hidden)


def default_loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
    """Mean cross entropy of the trained tokens, and how many there are."""
    logits = model(batch["input_ids"])[:, :-1]
    targets = batch["labels"][:, 1:]
    ntoks = int((targets != -100).sum())
    ce = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    return ce / max(ntoks, 1), ntoks


class Trainer:
    """Fine-tunes with windows of several micro-batches."""

    def __init__(self, *, weight_by_tokens: bool) -> None:
        self.model = TinyLM()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.01)
        self.weight_by_tokens = weight_by_tokens

    def step(self, batch: Batch) -> float:
        """Train on one batch."""
        return self.accumulate([batch])

    def accumulate(self, batches: list[Batch]) -> float:
        """Train once on a window of micro-batches and return its loss."""
        self.optimizer.zero_grad()
        total, tokens = 0.0, 0
        grads: list[torch.Tensor] = []
        params = list(self.model.parameters())
        for batch in batches:
            loss, ntoks = default_loss(self.model, batch)
            new = torch.autograd.grad(loss, params)
            share = float(ntoks) if self.weight_by_tokens else 1.0
            if grads:
                grads = [old + share * g for old, g in zip(grads, new, strict=True)]
            else:
                grads = [share * g for g in new]
            total += loss.item() * ntoks
            tokens += ntoks
        scale = float(max(tokens, 1)) if self.weight_by_tokens else float(len(batches))
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad / scale
        self.optimizer.step()
        return total / max(tokens, 1)


def buggy() -> Trainer:
    """Every micro-batch counts the same."""
    return Trainer(weight_by_tokens=False)


def healthy() -> Trainer:
    """Every token counts the same."""
    return Trainer(weight_by_tokens=True)


def _completion(rows: int, length: int, trained: int) -> Batch:
    ids = torch.randint(0, 96, (rows, length))
    labels = ids.clone()
    labels[:, : length - trained] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def _distance(trainer: Trainer) -> float:
    window = [_completion(2, 16, 15), _completion(2, 16, 2)]
    whole = {key: torch.cat([batch[key] for batch in window]) for key in window[0]}
    other = Trainer(weight_by_tokens=True)
    other.model.load_state_dict(trainer.model.state_dict())
    trainer.accumulate(window)
    other.step(whole)
    pairs = zip(trainer.model.parameters(), other.model.parameters(), strict=True)
    return max((a.grad - b.grad).abs().max().item() for a, b in pairs)


def prove() -> tuple[float, float]:
    """Largest difference of the window's gradient from that of the same rows in one batch; must be 0."""
    return _distance(buggy()), _distance(healthy())
