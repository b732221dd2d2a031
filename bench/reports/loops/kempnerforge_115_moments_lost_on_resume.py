"""KempnerForge#115 (KempnerInstitute/KempnerForge): the moments of AdamW are zero after a resume.

A distributed checkpoint is read into the tensors of the state that already exist. A new optimizer has none
for its parameters yet, so only its groups are restored.
"""

import math
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn

import stackwise

LR, WARMUP_STEPS, MAX_STEPS, MAX_NORM = 3e-3, 4, 60, 1.0


def lr_scale(step: int) -> float:
    """Linear warmup and cosine decay to a tenth."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    progress = min(1.0, (step - WARMUP_STEPS) / (MAX_STEPS - WARMUP_STEPS))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


class Transformer(nn.Module):
    """Embedding, one pre-norm SwiGLU block and output."""

    def __init__(self, vocab_size: int = 92, dim: int = 32) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocab_size, dim)
        self.norm = nn.RMSNorm(dim)
        self.gate_proj, self.up_proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.down_proj = nn.Linear(dim, dim, bias=False)
        self.output_head = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the next token."""
        h = self.token_embedding(tokens)
        x = self.norm(h)
        return self.output_head(h + self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class Trainer:
    """Training with distributed checkpoints."""

    def __init__(self, allocates_state: bool) -> None:
        self.allocates_state = allocates_state
        self.model = Transformer()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, betas=(0.9, 0.95))
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lr_scale)
        self.train_step = 0

    def step(self, batch: dict) -> float:
        """One update."""
        target = batch["labels"][:, 1:]
        logits = self.model(batch["input_ids"])[:, :-1]
        total = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100, reduction="sum")
        loss = total / (target != -100).sum().clamp(min=1)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.scheduler.step()
        self.train_step += 1
        return loss.item()

    def _allocate_state(self) -> None:
        for p in self.model.parameters():
            if p not in self.optimizer.state:
                zeros = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                self.optimizer.state[p] = {"step": torch.tensor(0.0), **zeros}

    def _state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def save(self, folder: str | Path) -> None:
        """Write the checkpoint."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a single process
            dcp.save(self._state(), checkpoint_id=str(Path(folder) / "dcp"))
        torch.save((self.train_step, self.scheduler.state_dict()), Path(folder) / "train_state.pt")

    def load(self, folder: str | Path) -> None:
        """Read the checkpoint."""
        if self.allocates_state:
            self._allocate_state()
        state = self._state()
        # A checkpoint of a run without a step has no moments.
        planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(state, checkpoint_id=str(Path(folder) / "dcp"), planner=planner)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.train_step, scheduler = torch.load(Path(folder) / "train_state.pt")
        self.scheduler.load_state_dict(scheduler)


def buggy() -> Trainer:
    """Reads into the state of a new optimizer."""
    return Trainer(allocates_state=False)


def healthy() -> Trainer:
    """Reads into allocated moments."""
    return Trainer(allocates_state=True)


def declared(factory: object) -> stackwise.TrainerSpec:
    """The fix, with the schedule and the clipping."""
    return stackwise.TrainerSpec.of(factory, learning_rate=lambda n: LR * lr_scale(n), max_norm=MAX_NORM)


def _lost(factory: Callable[[], Trainer]) -> float:
    run, resumed = factory(), factory()
    for _ in range(6):
        ids = torch.randint(92, (4, 16))
        run.step({"input_ids": ids, "labels": ids})
    with tempfile.TemporaryDirectory() as folder:
        run.save(folder)
        resumed.load(folder)
    run.step({"input_ids": ids, "labels": ids})
    resumed.step({"input_ids": ids, "labels": ids})
    moments = [r.optimizer.state[r.model.output_head.weight]["exp_avg_sq"] for r in (run, resumed)]
    return ((moments[0] - moments[1]).norm() / moments[0].norm()).item()


def prove() -> tuple[float, float]:
    """Relative error of the second moments one step after a resume."""
    return _lost(buggy), _lost(healthy)
