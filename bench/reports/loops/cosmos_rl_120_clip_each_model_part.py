"""cosmos-rl#120 (nvidia-cosmos/cosmos-rl): gradients are clipped for each model part by its own norm.

Parts with large gradients are scaled and the others are not, and the total norm exceeds the limit.
"""

import torch
import torch.nn.functional as F
from torch import nn

import stackwise

OPTM_GRAD_NORM_CLIP = 0.2


class FirstStage(nn.Module):
    """Embedding and a causal convolution."""

    def __init__(self, vocab: int, dim: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.conv = nn.Conv1d(dim, dim, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Hidden states of the first part."""
        x = self.embed_tokens(ids)
        past = self.conv(F.pad(x.mT, (1, 0))).mT
        return x + F.gelu(past)


class LastStage(nn.Module):
    """Feed-forward layer, norm and head."""

    def __init__(self, vocab: int, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        return self.lm_head(self.norm(x + self.down(F.gelu(self.up(x)))))


class PolicyTrainer:
    """SFT over model parts, each with its own optimizer."""

    def __init__(self, global_norm: bool, vocab: int = 64, dim: int = 32) -> None:
        self.global_norm = global_norm
        self.model_parts = [FirstStage(vocab, dim), LastStage(vocab, dim)]
        self.model = nn.Sequential(*self.model_parts)
        self.optimizer = [torch.optim.AdamW(part.parameters(), lr=2e-3) for part in self.model_parts]

    def clip(self) -> None:
        """Limit the gradients before the update."""
        if self.global_norm:
            all_params = [p for part in self.model_parts for p in part.parameters()]
            nn.utils.clip_grad_norm_(all_params, OPTM_GRAD_NORM_CLIP)
            return
        for part in self.model_parts:
            nn.utils.clip_grad_norm_(list(part.parameters()), OPTM_GRAD_NORM_CLIP)

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        """One update of all parts."""
        for optimizer in self.optimizer:
            optimizer.zero_grad()
        logits = self.model(batch["input_ids"])
        targets = batch["labels"][:, 1:]
        loss = F.cross_entropy(logits[:, :-1].mT, targets, ignore_index=-100)
        loss.backward()
        self.clip()
        for optimizer in self.optimizer:
            optimizer.step()
        return loss.item()


def buggy() -> PolicyTrainer:
    """A norm for each part."""
    return PolicyTrainer(global_norm=False)


def healthy() -> PolicyTrainer:
    """One norm over all parts."""
    return PolicyTrainer(global_norm=True)


def buggy_declared() -> stackwise.TrainerSpec:
    """The mistake, with the configured limit."""
    return stackwise.TrainerSpec.of(buggy, max_norm=OPTM_GRAD_NORM_CLIP)


def healthy_declared() -> stackwise.TrainerSpec:
    """The fix, with the configured limit."""
    return stackwise.TrainerSpec.of(healthy, max_norm=OPTM_GRAD_NORM_CLIP)


def _excess(trainer: PolicyTrainer) -> float:
    ids = torch.randint(0, 64, (4, 16))
    trainer.step({"input_ids": ids, "labels": ids})
    total = torch.stack([p.grad.norm() for p in trainer.model.parameters()]).norm()
    return total.item() / OPTM_GRAD_NORM_CLIP


def prove() -> tuple[float, float]:
    """Norm of all gradients after clipping, in units of the limit; must not exceed 1."""
    return _excess(buggy()), _excess(healthy())
