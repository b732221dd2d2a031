"""Loop: a sound training loop written out by hand; a mutant overrides the one piece that it breaks."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stackwise.subject.trainer_spec import TrainerSpec
from tests.zoo.gpt import GPT

__all__ = ["Loop", "loop", "loop_spec_of"]

Batch = dict[str, Tensor]


class Loop:
    """AdamW with decay on matrices, warm-up and cosine, global clipping, accumulation, data, checkpoints."""

    base_lr, weight_decay, max_norm = 1e-2, 0.1, 1.0
    warmup_steps, total_steps = 4, 16
    batch_size, seq_len, n_rows = 4, 16, 24
    init_scale: float | None = None

    def __init__(self) -> None:
        self.model = self.create_model()
        self.optimizer = self.create_optimizer()
        self.scheduler = self.create_scheduler()
        self.scaler = self.create_scaler()
        self.number = self.epoch_number = self.batch_number = 0

    # What is trained, and by what

    def create_model(self) -> nn.Module:
        return GPT()

    def create_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.groups(), lr=self.base_lr, betas=(0.9, 0.95))

    def groups(self) -> list[dict[str, Any]]:
        trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        return [
            {"params": [p for name, p in trained if self.decays(name, p)], "weight_decay": self.weight_decay},
            {"params": [p for name, p in trained if not self.decays(name, p)], "weight_decay": 0.0},
        ]

    def decays(self, name: str, p: nn.Parameter) -> bool:
        return p.ndim >= 2 and "embedding" not in name

    def create_scheduler(self) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.factor)

    @classmethod
    def factor(cls, step: int) -> float:
        """Of the learning rate at `step`, counted from 0."""
        if step < cls.warmup_steps:
            return (step + 1) / cls.warmup_steps
        progress = min(1.0, (step - cls.warmup_steps) / (cls.total_steps - cls.warmup_steps))
        return 0.5 * (1 + math.cos(math.pi * progress))

    def create_scaler(self) -> Any:
        if self.init_scale is None:
            return None
        return torch.amp.GradScaler("cpu", init_scale=self.init_scale)

    # One step

    def step(self, batch: Batch) -> float:
        return self.accumulate([batch])

    def accumulate(self, batches: list[Batch]) -> float:
        """One optimizer step of several micro-batches: the mean over all their targets together."""
        self.train_mode()
        total = sum(self.targets(batch) for batch in batches)
        mean = 0.0
        for batch in batches:
            loss = self.loss(batch) * self.weight(batch, batches, total)
            self.backward(loss)
            mean += loss.item()
        self.update()
        self.advance()
        return mean

    def train_mode(self) -> None:
        self.model.train()

    def weight(self, batch: Batch, batches: list[Batch], total: int) -> float:
        """Of a micro-batch's mean in the mean of the whole."""
        return self.targets(batch) / max(total, 1)

    def targets(self, batch: Batch) -> int:
        return int((batch["labels"][:, 1:] != -100).sum())

    def loss(self, batch: Batch) -> Tensor:
        """The mean over the batch's targets."""
        return self.model(**batch).loss

    def backward(self, loss: Tensor) -> None:
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def update(self) -> None:
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        self.clip()
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.scheduler.step()
        self.zero_grad()

    def clip(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    # Data: where the next batch is

    def advance(self) -> None:
        self.number += 1
        self.batch_number += 1
        if self.batch_number == self.n_rows // self.batch_size:
            self.epoch_number, self.batch_number = self.epoch_number + 1, 0

    def position(self) -> tuple[int, int]:
        """(epoch, number in it) of the batch that comes next."""
        return self.epoch_number, self.batch_number

    def epoch(self, number: int) -> Iterator[Batch]:
        rows, order = self.rows(), self.order(number)
        for start in range(0, len(order), self.batch_size):
            yield self.collate([rows[i] for i in order[start : start + self.batch_size]])

    def rows(self) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randint(GPT.vocab_size, (self.n_rows, self.seq_len), generator=generator)

    def order(self, number: int) -> list[int]:
        return torch.randperm(self.n_rows, generator=torch.Generator().manual_seed(100 + number)).tolist()

    def collate(self, rows: list[Tensor]) -> Batch:
        ids = torch.stack(rows)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}

    def fit(self) -> None:
        """A whole training, from where the run is."""
        while self.number < self.total_steps:
            epoch, start = self.position()
            for batch in list(self.epoch(epoch))[start:]:
                if self.number < self.total_steps:
                    self.step(batch)

    # Evaluation

    @torch.no_grad()
    def evaluate(self, batches: list[Batch]) -> float:
        """The mean over all targets of all batches."""
        was_training = self.model.training
        self.model.eval()
        total, count = 0.0, 0
        for batch in batches:
            total += self.loss(batch).item() * self.targets(batch)
            count += self.targets(batch)
        self.model.train(was_training)
        return total / max(count, 1)

    # Checkpoints

    def save(self, folder: Any) -> None:
        torch.save(self.state(), Path(folder) / "run.pt")

    def load(self, folder: Any) -> None:
        self.restore(torch.load(Path(folder) / "run.pt", weights_only=False))

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "random": self.random_state(),
            "position": (self.number, self.epoch_number, self.batch_number),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        self.restore_random_state(state["random"])
        self.number, self.epoch_number, self.batch_number = state["position"]

    def random_state(self) -> dict[str, Any]:
        return {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}  # noqa: NPY002

    def restore_random_state(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])  # noqa: NPY002


def loop_spec_of(build: type[Loop] = Loop, **declared: Any) -> TrainerSpec:
    """Everything that can be asked of a Loop."""
    attributes: dict[str, Any] = {
        "build": build,
        "name": build.__name__,
        "vocab_size": GPT.vocab_size,
        "max_norm": build.max_norm,
        "frozen": (),
        "decayed": lambda name, p: p.ndim >= 2 and "embedding" not in name,
        "total_steps": build.total_steps,
        "learning_rate": lambda step: build.base_lr * Loop.factor.__func__(build, step),
    }
    return TrainerSpec(**(attributes | declared))


def loop() -> TrainerSpec:
    """The clean twin."""
    return loop_spec_of()


def bare_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> Tensor:
    """Make a step with the model's own loss."""
    loss: Tensor = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
