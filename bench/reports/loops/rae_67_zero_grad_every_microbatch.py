"""RAE#67 (bytetriper/RAE): gradients are cleared before every micro-batch of a window.

Only the last micro-batch of a window reaches the update, with its loss still divided as one of several.
"""

import torch
import torch.nn.functional as F
from torch import nn

import stackwise

GRAD_ACCUM_STEPS, CLIP_GRAD, LR, WARMUP_STEPS = 2, 1.0, 2e-3, 5


def lr_scale(step: int) -> float:
    """Linear warmup to the base learning rate."""
    return min(1.0, (step + 1) / WARMUP_STEPS)


class DDT(nn.Module):
    """Embedding, causal attention and head over latent codes."""

    def __init__(self, codes: int = 90, width: int = 32) -> None:
        super().__init__()
        self.s_embedder = nn.Embedding(codes, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm = nn.RMSNorm(width)
        self.final_layer = nn.Linear(width, codes)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """Logits of the next code."""
        x = self.s_embedder(codes)
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        return self.final_layer(x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


class Trainer:
    """Splits each batch into micro-batches and updates after the last one."""

    def __init__(self, clear_once: bool) -> None:
        self.clear_once = clear_once
        self.model = DDT()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lr_scale)

    def step(self, batch: dict) -> float:
        """One optimizer step from the micro-batches of a batch."""
        parts = [batch[key].chunk(GRAD_ACCUM_STEPS) for key in ("input_ids", "labels")]
        return self.accumulate([{"input_ids": x, "labels": y} for x, y in zip(*parts, strict=True)])

    def accumulate(self, batches: list[dict]) -> float:
        """One optimizer step from given micro-batches."""
        count = max(sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches), 1)
        running_loss = 0.0
        self.optimizer.zero_grad(set_to_none=True)
        for batch in batches:
            if not self.clear_once:
                self.optimizer.zero_grad(set_to_none=True)
            logits = self.model(batch["input_ids"])[:, :-1]
            target = batch["labels"][:, 1:]
            loss = F.cross_entropy(logits.mT, target, ignore_index=-100, reduction="sum") / count
            loss.backward()
            running_loss += loss.item()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_GRAD)
        self.optimizer.step()
        self.scheduler.step()
        return running_loss


def buggy() -> Trainer:
    """Clears before each micro-batch."""
    return Trainer(clear_once=False)


def healthy() -> Trainer:
    """Clears before each window."""
    return Trainer(clear_once=True)


def declared(factory: object) -> stackwise.TrainerSpec:
    """The fix, with the configured clipping and schedule."""
    return stackwise.TrainerSpec.of(factory, max_norm=CLIP_GRAD, learning_rate=lambda n: LR * lr_scale(n))


def _lost(run: Trainer) -> float:
    ids = torch.arange(64).view(4, 16)
    run.step({"input_ids": ids, "labels": ids})
    moments = run.optimizer.state[run.model.s_embedder.weight]["exp_avg"]
    # The last id of each row has no target after it.
    seen = ids[:, :-1].flatten()
    return float((moments[seen].abs().sum(1) == 0).sum())


def prove() -> tuple[float, float]:
    """How many of the 60 input codes of a batch had no gradient."""
    return _lost(buggy()), _lost(healthy())
