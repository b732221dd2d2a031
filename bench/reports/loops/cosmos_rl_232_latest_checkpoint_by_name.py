"""cosmos-rl#232 (nvidia-cosmos/cosmos-rl): training resumes from an old checkpoint.

The folders of checkpoints are sorted by name, so step_500 counts as later than step_2500.
"""

import tempfile
from pathlib import Path

import torch
from torch import nn


class Policy(nn.Module):
    """A recurrent next-token model."""

    def __init__(self, vocab: int = 50, width: int = 28) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.lm_head = nn.Linear(width, vocab)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits for every position."""
        return self.lm_head(self.lstm(self.embed(input_ids))[0])


class CheckpointManager:
    """Writes one folder per saved step and finds the last one."""

    @staticmethod
    def step_of(name: str) -> int:
        """The step in the name of a folder."""
        return int(name.rsplit("_", 1)[1])

    def order(self, names: list[str]) -> list[str]:
        """The folders from the first to the last."""
        return sorted(names, key=self.step_of)

    def path(self, root: str | Path, step: int) -> Path:
        """The folder of a step."""
        return Path(root) / f"step_{step}"

    def last(self, root: str | Path) -> Path | None:
        """The folder to resume from."""
        names = [path.name for path in Path(root).glob("step_*")]
        return Path(root) / self.order(names)[-1] if names else None


class NameOrder(CheckpointManager):
    """Trusts the order of the names."""

    def order(self, names: list[str]) -> list[str]:
        """The folders from the first to the last."""
        return sorted(names)


class SFTTrainer:
    """Supervised fine-tuning with periodic checkpoints."""

    def __init__(self, manager: CheckpointManager) -> None:
        self.manager = manager
        self.model = Policy()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.01)
        self.train_step = 0

    def step(self, batch: dict) -> torch.Tensor:
        """One update."""
        self.optimizer.zero_grad()
        logits = self.model(batch["input_ids"])[:, :-1]
        target = batch["labels"][:, 1:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100)
        loss.backward()
        self.optimizer.step()
        self.train_step += 1
        return loss.detach()

    def save(self, folder: str | Path) -> None:
        """Write the state of the run into a folder."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.train_step,
        }
        torch.save(state, Path(folder) / "state.pth")

    def load(self, folder: str | Path) -> None:
        """Read the state of a run from a folder."""
        state = torch.load(Path(folder) / "state.pth")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.train_step = state["step"]

    def checkpoint(self, folder: str | Path, step: int) -> Path:
        """Save under a step number."""
        path = self.manager.path(folder, step)
        path.mkdir(exist_ok=True)
        self.save(path)
        return path

    def latest(self, folder: str | Path) -> Path | None:
        """The checkpoint from which a run resumes."""
        return self.manager.last(folder)


def buggy() -> SFTTrainer:
    """Folders in the order of their names."""
    return SFTTrainer(NameOrder())


def healthy() -> SFTTrainer:
    """Folders in the order of their steps."""
    return SFTTrainer(CheckpointManager())


def _lost_steps(run: SFTTrainer) -> float:
    with tempfile.TemporaryDirectory() as folder:
        for step in (500, 1000, 1500, 2000, 2500):
            run.checkpoint(folder, step)
        return 2500.0 - CheckpointManager.step_of(run.latest(folder).name)


def prove() -> tuple[float, float]:
    """Steps that are lost by resuming from the latest checkpoint."""
    return _lost_steps(buggy()), _lost_steps(healthy())
