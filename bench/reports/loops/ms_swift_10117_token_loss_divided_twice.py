"""ms-swift#10117 (modelscope/ms-swift): the DAPO loss is also divided by the number of micro-batches.

The sum over tokens is already divided by the tokens of the whole accumulation window; the trainer then
divides every micro-batch by the number of micro-batches, as for losses that are means.
"""

import torch
from torch import nn

import stackwise

V = 60


class Block(nn.Module):
    """Pre-norm feed-forward block over a causal running mean."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.up = nn.Linear(2 * d, 3 * d)
        self.down = nn.Linear(3 * d, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mixes each position with the mean of those before it."""
        h = self.norm(x)
        seen = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        return x + self.down(torch.relu(self.up(torch.cat([h, h.cumsum(1) / seen], -1))))


class CausalLM(nn.Module):
    """Two blocks between an embedding and its head."""

    def __init__(self, d: int = 24) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(V, d)
        self.layers = nn.Sequential(Block(d), Block(d))
        self.lm_head = nn.Linear(d, V)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits."""
        return self.lm_head(self.layers(self.embed_tokens(ids)))


class GRPOTrainer:
    """GRPO with loss_type dapo; the advantages come with the rollouts."""

    def __init__(self, trainer_scales_loss: bool) -> None:
        self.trainer_scales_loss = trainer_scales_loss
        self.model = CausalLM()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, betas=(0.9, 0.95))
        self.grad_norm = 0.0

    def compute_loss(self, inputs: dict, num_items_in_batch: torch.Tensor) -> torch.Tensor:
        """Clipped objective of one micro-batch over the tokens of its window."""
        ids, mask = inputs["input_ids"], (inputs["labels"][:, 1:] != -100).float()
        logps = self.model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        ratio = torch.exp(logps - logps.detach())
        advantages = inputs["advantages"][:, None]
        per_token_loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
        return (per_token_loss * mask).sum() / num_items_in_batch

    def loss(self, batch: dict) -> torch.Tensor:
        """The loss of a window of one micro-batch."""
        return self.compute_loss(batch, self.count([batch]))

    def count(self, window: list[dict]) -> torch.Tensor:
        """Completion tokens of a window."""
        return torch.stack([(b["labels"][:, 1:] != -100).sum() for b in window]).sum().clamp(min=1)

    def accumulate(self, batches: list[dict]) -> float:
        """One update from a window of micro-batches."""
        num_items_in_batch = self.count(batches)
        self.optimizer.zero_grad()
        total = 0.0
        for micro_batch in batches:
            loss = self.compute_loss(micro_batch, num_items_in_batch)
            if self.trainer_scales_loss:
                loss = loss / len(batches)
            loss.backward()
            total += loss.item()
        self.grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0).item()
        self.optimizer.step()
        return total

    def step(self, batch: dict) -> float:
        """One update without accumulation."""
        return self.accumulate([batch])


def make_batch(batch_size: int, seq_len: int, generator: torch.Generator) -> dict:
    """Random rollouts with a prompt of random length and random advantages."""
    ids = torch.randint(V, (batch_size, seq_len), generator=generator)
    prompt = torch.randint(1, max(2, seq_len // 2), (batch_size, 1), generator=generator)
    labels = ids.masked_fill(torch.arange(seq_len) < prompt, -100)
    advantages = torch.randn(batch_size, generator=generator)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": labels,
        "advantages": advantages,
    }


def buggy() -> stackwise.TrainerSpec:
    """The trainer scales the loss too."""
    return stackwise.TrainerSpec.of(lambda: GRPOTrainer(True), make_batch=make_batch, vocab_size=V)


def healthy() -> stackwise.TrainerSpec:
    """The loss is already normalised over the window."""
    return stackwise.TrainerSpec.of(lambda: GRPOTrainer(False), make_batch=make_batch, vocab_size=V)


def _ratio(scales: bool) -> float:
    run, batch = GRPOTrainer(scales), make_batch(4, 16, torch.Generator().manual_seed(0))
    torch.autograd.backward(run.loss(batch))
    whole = torch.cat([p.grad.flatten() for p in run.model.parameters()]).norm().item()
    run.accumulate([{key: value[i : i + 1] for key, value in batch.items()} for i in range(4)])
    return abs(1 - run.grad_norm / whole)


def prove() -> tuple[float, float]:
    """Relative error of the gradient norm when four rows come as four micro-batches."""
    return _ratio(True), _ratio(False)
