"""APPFL#198 (APPFL/APPFL): the local trainer clips the gradients after the optimizer has used them."""

import torch
import torch.nn.functional as F
from torch import nn

import stackwise

CLIP_VALUE, CLIP_NORM, LR = 0.5, 2.0, 0.3


class CharLSTM(nn.Module):
    """Embedding, LSTM and output of a next-character model."""

    def __init__(self, n_chars: int = 80, embed_dim: int = 16, hidden: int = 32) -> None:
        super().__init__()
        self.encoder = nn.Embedding(n_chars, embed_dim)
        self.rnn = nn.LSTM(embed_dim, hidden, batch_first=True)
        self.decoder = nn.Linear(hidden, n_chars)

    def forward(self, chars: torch.Tensor) -> torch.Tensor:
        """Logits of the next character."""
        return self.decoder(self.rnn(self.encoder(chars))[0])


class VanillaTrainer:
    """Local training of a federated client."""

    def __init__(self, clip_before_step: bool) -> None:
        self.clip_before_step = clip_before_step
        self.model = CharLSTM()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)

    def loss_fn(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Mean loss of the known targets."""
        total = F.cross_entropy(output.mT, target, ignore_index=-100, reduction="sum")
        return total / (target != -100).sum().clamp(min=1)

    def _clip_grad(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_VALUE, norm_type=CLIP_NORM)

    def step(self, batch: dict) -> float:
        """One batch of local training."""
        self.model.train()
        data, target = batch["input_ids"], batch["labels"][:, 1:]
        self.optimizer.zero_grad()
        output = self.model(data)[:, :-1]
        loss = self.loss_fn(output, target)
        loss.backward()
        if self.clip_before_step:
            self._clip_grad()
        self.optimizer.step()
        if not self.clip_before_step:
            self._clip_grad()
        return loss.item()

    @torch.no_grad()
    def evaluate(self, batches: list[dict]) -> float:
        """Validation loss per target."""
        self.model.eval()
        total, count = 0.0, 0
        for batch in batches:
            target = batch["labels"][:, 1:]
            present = int((target != -100).sum())
            total += self.loss_fn(self.model(batch["input_ids"])[:, :-1], target).item() * present
            count += present
        self.model.train()
        return total / max(count, 1)


def buggy() -> VanillaTrainer:
    """Clips after the update."""
    return VanillaTrainer(clip_before_step=False)


def healthy() -> VanillaTrainer:
    """Clips before the update."""
    return VanillaTrainer(clip_before_step=True)


def buggy_declared() -> stackwise.TrainerSpec:
    """The mistake, with the configured clipping and learning rate."""
    return stackwise.TrainerSpec.of(buggy, max_norm=CLIP_VALUE, learning_rate=lambda _: LR)


def healthy_declared() -> stackwise.TrainerSpec:
    """The fix, with the configured clipping and learning rate."""
    return stackwise.TrainerSpec.of(healthy, max_norm=CLIP_VALUE, learning_rate=lambda _: LR)


def _excess(run: VanillaTrainer) -> float:
    with torch.no_grad():
        run.model.decoder.weight.mul_(20)
    ids = torch.randint(80, (4, 16))
    before = nn.utils.parameters_to_vector(run.model.parameters()).detach().clone()
    run.step({"input_ids": ids, "labels": ids})
    update = nn.utils.parameters_to_vector(run.model.parameters()) - before
    return max(0.0, update.norm().item() / LR - 1.001 * CLIP_VALUE)


def prove() -> tuple[float, float]:
    """By how much the norm of the applied gradient exceeds the limit, for a model with large outputs."""
    return _excess(buggy()), _excess(healthy())
