"""distillKitPlus#5 (agokrani/distillKitPlus): the losses of the micro-batches of an update are added up.

The loss of a micro-batch is not normalised for the accumulation, so that the reported loss and the gradient
grow with the number of micro-batches.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

import stackwise

TEMPERATURE, ALPHA, MAX_GRAD_NORM, LR = 2.0, 0.5, 1.0, 1e-3


class CausalLM(nn.Module):
    """Embedding, a recurrent layer and the output layer."""

    def __init__(self, vocab: int = 64, width: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.lm_head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of the next token."""
        return self.lm_head(self.rnn(self.embed(ids))[0])


def pretrained_teacher() -> nn.Module:
    """The fixed teacher, the same one in every run."""
    with torch.random.fork_rng():
        torch.manual_seed(1234)
        return CausalLM().eval().requires_grad_(False)


class LogitsTrainer:
    """Distils the logits of a teacher into a student."""

    def __init__(self, normalizes: bool) -> None:
        self.normalizes = normalizes
        self.teacher = pretrained_teacher()
        self.model = CausalLM()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, weight_decay=0.0)
        self.grad_norm = 0.0

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Divergence from the teacher and loss of the labels, as a mean over the targets."""
        target = batch["labels"][:, 1:]
        valid = target != -100
        student = self.model(batch["input_ids"])[:, :-1]
        with torch.no_grad():
            teacher = self.teacher(batch["input_ids"])[:, :-1]
        logs = [F.log_softmax(logits / TEMPERATURE, dim=-1) for logits in (student, teacher)]
        divergence = F.kl_div(*logs, reduction="none", log_target=True).sum(-1) * TEMPERATURE**2
        hard = F.cross_entropy(student.mT, target, ignore_index=-100, reduction="none")
        per_target = ALPHA * divergence + (1.0 - ALPHA) * hard
        return (per_target * valid).sum() / valid.sum().clamp(min=1)

    def accumulate(self, batches: list[dict[str, torch.Tensor]]) -> float:
        """One update from the micro-batches of a window."""
        counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]
        targets = max(1, sum(counts))
        self.optimizer.zero_grad()
        logged = 0.0
        for batch, count in zip(batches, counts, strict=True):
            loss = self.loss(batch)
            if self.normalizes:
                loss = loss * (count / targets)
            loss.backward()
            logged += loss.item()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self.grad_norm = norm.item()
        self.optimizer.step()
        return logged

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        """One update from one batch."""
        return self.accumulate([batch])


def buggy() -> LogitsTrainer:
    """Adds the mean losses of the micro-batches."""
    return LogitsTrainer(normalizes=False)


def healthy() -> LogitsTrainer:
    """Weighs each micro-batch by its share of the targets."""
    return LogitsTrainer(normalizes=True)


def declared(factory: Callable[[], LogitsTrainer]) -> stackwise.TrainerSpec:
    """The configured clipping and learning rate."""
    return stackwise.TrainerSpec.of(
        factory, max_norm=MAX_GRAD_NORM, learning_rate=lambda _: LR, decayed=lambda *_: False, frozen=()
    )


def _growth(factory: Callable[[], LogitsTrainer]) -> float:
    run = factory()
    ids = torch.randint(64, (4, 16))
    batches = [{"input_ids": row, "labels": row} for row in ids.split(1)]
    whole = run.loss({"input_ids": ids, "labels": ids}).item()
    return abs(run.accumulate(batches) / whole - 1.0)


def prove() -> tuple[float, float]:
    """Relative difference of the loss of four micro-batches from that of the whole batch."""
    return _growth(buggy), _growth(healthy)
