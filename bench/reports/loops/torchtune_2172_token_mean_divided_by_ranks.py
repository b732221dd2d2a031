"""torchtune#2172 (meta-pytorch/torchtune): gradients are too small by the number of ranks.

The summed losses are divided by the number of tokens of all ranks. The reduction over the ranks takes a mean
of the gradients, which divides them once more.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import stackwise

CLIP_GRAD_NORM, LR = 1.0, 2e-4


class TransformerDecoder(nn.Module):
    """Embedding, two causal attention layers and output."""

    def __init__(self, vocab_size: int = 82, embed_dim: int = 32) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab_size, embed_dim)
        self.qkv = nn.ModuleList(nn.Linear(embed_dim, 3 * embed_dim, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.RMSNorm(embed_dim) for _ in range(2))
        self.output = nn.Linear(embed_dim, vocab_size, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the next token."""
        h = self.tok_embeddings(tokens)
        for qkv, norm in zip(self.qkv, self.norms, strict=True):
            q, k, v = qkv(norm(h)).chunk(3, dim=-1)
            h = h + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(h)


class FullFinetuneRecipeDistributed:
    """Data-parallel fine-tuning with a loss per token."""

    def __init__(self, undo_mean: bool) -> None:
        self.undo_mean = undo_mean
        self.model = TransformerDecoder()
        ranks = dist.is_initialized()
        self.world_size = dist.get_world_size() if ranks else 1
        self.parallel = DistributedDataParallel(self.model) if ranks else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR)
        self.grad_norm = 0.0

    def _summed(self, value: torch.Tensor) -> torch.Tensor:
        if self.world_size > 1:
            dist.all_reduce(value)
        return value

    def step(self, batch: dict) -> float:
        """One update from a batch of each rank."""
        return self.accumulate([batch])

    def accumulate(self, batches: list[dict]) -> float:
        """One update from the micro-batches of each rank."""
        num_tokens, running_loss = torch.zeros(()), torch.zeros(())
        for batch in batches:
            labels = batch["labels"][:, 1:]
            logits = self.parallel(batch["input_ids"])[:, :-1]
            loss = F.cross_entropy(logits.mT, labels, ignore_index=-100, reduction="sum")
            loss.backward()
            num_tokens += (labels != -100).sum()
            running_loss += loss.detach()
        num_tokens = self._summed(num_tokens).clamp(min=1)
        self._summed(running_loss)
        scaler = (self.world_size if self.undo_mean else 1) / num_tokens
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad.mul_(scaler)
        self.grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_GRAD_NORM).item()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return (running_loss / num_tokens).item()


def buggy() -> FullFinetuneRecipeDistributed:
    """Divides by the tokens of all ranks only."""
    return FullFinetuneRecipeDistributed(undo_mean=False)


def healthy() -> FullFinetuneRecipeDistributed:
    """Also undoes the mean over the ranks."""
    return FullFinetuneRecipeDistributed(undo_mean=True)


def declared(factory: object) -> stackwise.TrainerSpec:
    """The same run on each rank, with the clipping and the learning rate."""
    return stackwise.TrainerSpec.of(
        factory, distributed=factory, max_norm=CLIP_GRAD_NORM, learning_rate=lambda _: LR, frozen=()
    )


def _rank(rank: int, factory: Callable, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    run, ids = factory(), torch.randint(82, (8, 16))
    loss = F.cross_entropy(run.model(ids)[:, :-1].mT, ids[:, 1:])
    grads = torch.autograd.grad(loss, list(run.model.parameters()))
    expected = torch.stack([grad.norm() for grad in grads]).norm().item()
    mine = ids[4 * rank : 4 * rank + 4]
    run.step({"input_ids": mine, "labels": mine})
    torch.save(abs(run.grad_norm / expected - 1), folder / f"{rank}.pt")
    dist.destroy_process_group()


def _error(factory: Callable) -> float:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.multiprocessing.start_processes(_rank, (factory, folder), nprocs=2, start_method="fork")
        return round(max(torch.load(folder / f"{rank}.pt") for rank in range(2)), 5)


def prove() -> tuple[float, float]:
    """Relative error of the gradient norm on two ranks, with five decimals."""
    return _error(buggy), _error(healthy)
