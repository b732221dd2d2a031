"""slime#1546 (THUDM/slime): the learning-rate schedule counts its steps twice after a resume.

Loading the checkpoint puts the scheduler at its saved number of samples. The set-up then steps it by that
number once more, so a run that stopped at a quarter of its schedule goes on at half of it.
"""

import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import stackwise

GLOBAL_BATCH_SIZE, WARMUP_SAMPLES, DECAY_SAMPLES = 4, 20, 240
INIT_LR, MAX_LR, MIN_LR = 2e-4, 2e-3, 1e-4


def lr_at(num_steps: int) -> float:
    """Linear warmup and cosine decay over the number of samples."""
    if num_steps <= WARMUP_SAMPLES:
        return INIT_LR + (MAX_LR - INIT_LR) * num_steps / WARMUP_SAMPLES
    ratio = min(1.0, (num_steps - WARMUP_SAMPLES) / (DECAY_SAMPLES - WARMUP_SAMPLES))
    return MIN_LR + 0.5 * (math.cos(math.pi * ratio) + 1.0) * (MAX_LR - MIN_LR)


class OptimizerParamScheduler:
    """Sets the learning rate of an optimizer from the number of consumed samples."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.num_steps = 0
        self.step(increment=0)

    def step(self, increment: int) -> None:
        """Move on by some samples."""
        self.num_steps += increment
        for group in self.optimizer.param_groups:
            group["lr"] = lr_at(self.num_steps)

    def state_dict(self) -> dict:
        """What a checkpoint keeps."""
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: dict) -> None:
        """Move to the saved number of samples."""
        self.num_steps = 0
        self.step(increment=state["num_steps"])


class GPTModel(nn.Module):
    """Embedding, one residual MLP and the output layer."""

    def __init__(self, vocab: int = 76, hidden: int = 32) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab, hidden)
        self.linear_fc1 = nn.Linear(hidden, 2 * hidden)
        self.linear_fc2 = nn.Linear(2 * hidden, hidden)
        self.output_layer = nn.Linear(hidden, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the next token."""
        x = self.word_embeddings(tokens)
        return self.output_layer(x + self.linear_fc2(F.silu(self.linear_fc1(x))))


class TrainRayActor:
    """Trains a policy on token batches and saves after a rollout."""

    def __init__(self, step_after_load: bool) -> None:
        self.step_after_load = step_after_load
        self.iteration = 0
        self.model = GPTModel()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=MAX_LR, betas=(0.9, 0.98))
        self.opt_param_scheduler = OptimizerParamScheduler(self.optimizer)

    def step(self, batch: dict) -> float:
        """One training step."""
        target = batch["labels"][:, 1:]
        logits = self.model(batch["input_ids"])[:, :-1]
        total = F.cross_entropy(logits.mT, target, ignore_index=-100, reduction="sum")
        loss = total / (target != -100).sum().clamp(min=1)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.opt_param_scheduler.step(increment=GLOBAL_BATCH_SIZE)
        self.iteration += 1
        return loss.item()

    def save(self, folder: str | Path) -> None:
        """Write the checkpoint of this iteration."""
        parts = (self.model, self.optimizer, self.opt_param_scheduler)
        torch.save((self.iteration, *(part.state_dict() for part in parts)), Path(folder) / "iter.pt")

    def load(self, folder: str | Path) -> None:
        """Initialise all parts from a checkpoint."""
        self.iteration, *states = torch.load(Path(folder) / "iter.pt")
        for part, state in zip((self.model, self.optimizer, self.opt_param_scheduler), states, strict=True):
            part.load_state_dict(state)
        if self.step_after_load:
            self.opt_param_scheduler.step(increment=self.iteration * GLOBAL_BATCH_SIZE)


def buggy() -> TrainRayActor:
    """Steps the restored scheduler."""
    return TrainRayActor(step_after_load=True)


def healthy() -> TrainRayActor:
    """Leaves the restored scheduler where it is."""
    return TrainRayActor(step_after_load=False)


def _planned(step: int) -> float:
    return lr_at(step * GLOBAL_BATCH_SIZE)


def buggy_declared() -> stackwise.TrainerSpec:
    """The mistake, with the configured schedule and clipping."""
    return stackwise.TrainerSpec.of(buggy, learning_rate=_planned, max_norm=1.0)


def healthy_declared() -> stackwise.TrainerSpec:
    """The fix, with the configured schedule and clipping."""
    return stackwise.TrainerSpec.of(healthy, learning_rate=_planned, max_norm=1.0)


def _error(factory: Callable[[], TrainRayActor]) -> float:
    run, resumed = factory(), factory()
    for _ in range(15):
        ids = torch.randint(76, (4, 16))
        run.step({"input_ids": ids, "labels": ids})
    with tempfile.TemporaryDirectory() as folder:
        run.save(folder)
        resumed.load(folder)
    return abs(resumed.optimizer.param_groups[0]["lr"] / run.optimizer.param_groups[0]["lr"] - 1)


def prove() -> tuple[float, float]:
    """Relative change of the learning rate from before saving to after loading."""
    return _error(buggy), _error(healthy)
