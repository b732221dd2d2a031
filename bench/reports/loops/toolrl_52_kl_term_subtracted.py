"""ToolRL#52 (qiancheng0/ToolRL): the KL term of the GRPO actor loss is subtracted instead of added.

Every update drives the policy away from its reference, whatever the rewards are, until training collapses.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

VOCAB = 48


class Policy(nn.Module):
    """A small causal network over token ids."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCAB, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.lm_head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Log-probability of each next token."""
        hidden, _ = self.rnn(self.wte(input_ids))
        logp = F.log_softmax(self.lm_head(hidden[:, :-1]), dim=-1)
        return logp.gather(-1, input_ids[:, 1:, None]).squeeze(-1)


def rule_reward(input_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Share of even tokens in each response."""
    even = (input_ids[:, 1:] % 2 == 0).float()
    return (even * mask).sum(1) / mask.sum(1).clamp(min=1)


class DataParallelActor:
    """Updates the policy on groups of sampled responses."""

    def __init__(self, kl_sign: float) -> None:
        self.kl_sign = kl_sign
        self.kl_loss_coef = 0.1
        self.clip_ratio = 0.2
        self.model = Policy()
        self.ref_model = copy.deepcopy(self.model).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3, weight_decay=0.0)

    def low_var_kl(self, logp: torch.Tensor, ref_logp: torch.Tensor) -> torch.Tensor:
        """The estimator of KL that is never negative."""
        diff = ref_logp - logp
        return diff.exp() - diff - 1

    def loss(self, batch: dict) -> torch.Tensor:
        """The policy-gradient loss with its KL term."""
        ids = batch["input_ids"]
        mask = (batch["labels"][:, 1:] != -100).float()
        reward = rule_reward(ids, mask)
        advantage = ((reward - reward.mean()) / (reward.std(unbiased=False) + 1e-6))[:, None]
        logp = self.model(ids)
        with torch.no_grad():
            ref_logp = self.ref_model(ids)
        ratio = (logp - logp.detach()).exp()
        clipped = ratio.clamp(1 - self.clip_ratio, 1 + self.clip_ratio)
        tokens = mask.sum().clamp(min=1)
        pg_loss = (torch.maximum(-advantage * ratio, -advantage * clipped) * mask).sum() / tokens
        kl_loss = (self.low_var_kl(logp, ref_logp) * mask).sum() / tokens
        return pg_loss + self.kl_sign * self.kl_loss_coef * kl_loss

    def step(self, batch: dict) -> torch.Tensor:
        """One update from one group."""
        self.optimizer.zero_grad()
        loss = self.loss(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()


def buggy() -> DataParallelActor:
    """Maximises the KL from the reference."""
    return DataParallelActor(kl_sign=-1.0)


def healthy() -> DataParallelActor:
    """Penalises the KL from the reference."""
    return DataParallelActor(kl_sign=1.0)


def _drift(actor: DataParallelActor) -> float:
    with torch.no_grad():
        for p in actor.model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    ids = torch.randint(VOCAB, (4, 16))
    ids = ids[:1].repeat(4, 1)  # equal rewards, so that only the KL term moves the policy
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}

    def kl() -> float:
        with torch.no_grad():
            return actor.low_var_kl(actor.model(ids), actor.ref_model(ids)).mean().item()

    before = kl()
    for _ in range(20):
        actor.step(batch)
    return kl() / before


def prove() -> tuple[float, float]:
    """The KL after 20 updates without a reward signal, as a multiple of the KL before them."""
    return _drift(buggy()), _drift(healthy())
