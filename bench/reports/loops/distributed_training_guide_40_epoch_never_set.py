"""distributed-training-guide#40 (LambdaLabsML/distributed-training-guide): all epochs have the same order.

The loop never tells the distributed sampler its epoch, so the permutation of the first epoch is used again.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import stackwise

VOCAB, LENGTH, SAMPLES, BATCH_SIZE, NUM_EPOCHS = 86, 16, 48, 4, 3
LR, T_MAX = 1e-3, 100
PLACES = torch.arange(LENGTH)
TRAIN_DATA = [(n + PLACES * (1 + n % 7) + PLACES**2) % VOCAB for n in range(SAMPLES)]


class LlamaForCausalLM(nn.Module):
    """Embedding, causal attention, SwiGLU and output."""

    def __init__(self, hidden_size: int = 32) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, hidden_size)
        self.qkv_proj = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.gate_up_proj = nn.Linear(hidden_size, 2 * hidden_size, bias=False)
        self.norm = nn.RMSNorm(hidden_size)
        self.lm_head = nn.Linear(hidden_size, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of the next token."""
        x = self.embed_tokens(ids)
        q, k, v = self.qkv_proj(x).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        gate, up = self.gate_up_proj(self.norm(x)).chunk(2, dim=-1)
        return self.lm_head(x + F.silu(gate) * up)


class Trainer:
    """Data-parallel training of a causal language model."""

    shuffles = True
    n_examples = SAMPLES

    def __init__(self, sets_epoch: bool) -> None:
        self.sets_epoch = sets_epoch
        ranks = dist.is_initialized()
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if ranks else (0, 1)
        self.model = LlamaForCausalLM()
        self.ddp = DistributedDataParallel(self.model) if ranks else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR)
        self.lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
            self.optimizer, T_max=T_MAX, eta_min=LR * 1e-2
        )
        self.sampler = DistributedSampler(
            TRAIN_DATA, num_replicas=self.world_size, rank=self.rank, shuffle=True, drop_last=True
        )
        self.dataloader = DataLoader(TRAIN_DATA, batch_size=BATCH_SIZE, sampler=self.sampler, drop_last=True)
        self.state = {"epoch": 0, "global_step": 0, "epoch_step": 0}

    def epoch(self, number: int) -> Iterator[dict]:
        """The batches of an epoch for the own rank."""
        if self.sets_epoch:
            self.sampler.set_epoch(number)
        for ids in self.dataloader:
            yield {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}

    def position(self) -> tuple[int, int]:
        """The epoch and its next batch."""
        return self.state["epoch"], self.state["epoch_step"]

    def _summed(self, value: torch.Tensor) -> torch.Tensor:
        if self.world_size > 1:
            dist.all_reduce(value)
        return value

    def step(self, batch: dict) -> float:
        """One update from the batches of all ranks."""
        target = batch["labels"][:, 1:]
        logits = self.ddp(batch["input_ids"])[:, :-1]
        total = F.cross_entropy(logits.mT, target, ignore_index=-100, reduction="sum")
        count = self._summed((target != -100).sum()).clamp(min=1)
        self.optimizer.zero_grad(set_to_none=True)
        (total * self.world_size / count).backward()  # DDP takes the mean over the ranks
        self.optimizer.step()
        self.lr_scheduler.step()
        self.state["global_step"] += 1
        self.state["epoch_step"] += 1
        if self.state["epoch_step"] == len(self.dataloader):
            self.state |= {"epoch": self.state["epoch"] + 1, "epoch_step": 0}
        return (self._summed(total.detach().clone()) / count).item()

    def fit(self) -> None:
        """All epochs."""
        while self.state["epoch"] < NUM_EPOCHS:
            for batch in self.epoch(self.state["epoch"]):
                self.step(batch)

    def save(self, folder: str | Path) -> None:
        """Rank 0 writes the checkpoint."""
        if self.rank == 0:
            parts = (self.model, self.optimizer, self.lr_scheduler)
            torch.save((self.state, *(part.state_dict() for part in parts)), Path(folder) / "state.pt")
        if self.world_size > 1:
            dist.barrier()

    def load(self, folder: str | Path) -> None:
        """All ranks read the checkpoint."""
        self.state, *states = torch.load(Path(folder) / "state.pt")
        for part, state in zip((self.model, self.optimizer, self.lr_scheduler), states, strict=True):
            part.load_state_dict(state)


def buggy() -> Trainer:
    """The sampler stays at epoch 0."""
    return Trainer(sets_epoch=False)


def healthy() -> Trainer:
    """The sampler is told the epoch."""
    return Trainer(sets_epoch=True)


def _planned(step: int) -> float:
    return LR * (0.01 + 0.99 * (1 + math.cos(math.pi * step / T_MAX)) / 2)


def declared(factory: object) -> stackwise.TrainerSpec:
    """The same run on each rank, with the schedule and the length."""
    steps = NUM_EPOCHS * SAMPLES // BATCH_SIZE
    return stackwise.TrainerSpec.of(factory, distributed=factory, learning_rate=_planned, total_steps=steps)


def _same(run: Trainer) -> float:
    first, second = (torch.cat([batch["input_ids"] for batch in run.epoch(number)]) for number in range(2))
    return (first == second).all(dim=1).float().mean().item()


def prove() -> tuple[float, float]:
    """Fraction of the samples that have the same place in the first two epochs."""
    return _same(buggy()), _same(healthy())
