"""minimind#853 (jingyaogong/minimind): the ranks of the RL trainers train on their own gradients.

The policy is wrapped in DistributedDataParallel, but the forward pass of the loss runs on the module inside
it. The wrapper then never reduces the gradients, and the replicas drift apart.
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

GRAD_CLIP, LR = 1.0, 1e-3


class Policy(nn.Module):
    """Embedding, one causal attention block and the output layer."""

    def __init__(self, vocab_size: int = 68, hidden: int = 32) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, hidden)
        self.norm = nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.lm_head = nn.Linear(hidden, vocab_size, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of the next token."""
        h = self.embed_tokens(ids)
        q, k, v = self.qkv(self.norm(h)).chunk(3, dim=-1)
        return self.lm_head(h + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


class PolicyTrainer:
    """Raises the log-probability of the sampled tokens, on one rank or on several."""

    def __init__(self, uses_wrapper: bool) -> None:
        self.uses_wrapper = uses_wrapper
        self.model = Policy()
        self.is_distributed = dist.is_initialized()
        self.wrapped = DistributedDataParallel(self.model) if self.is_distributed else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR)

    def _over_ranks(self, value: torch.Tensor) -> torch.Tensor:
        if self.is_distributed:
            dist.all_reduce(value)
        return value

    def accumulate(self, batches: list[dict[str, torch.Tensor]]) -> float:
        """One update from the micro-batches of each rank."""
        own = sum((batch["labels"][:, 1:] != -100).sum() for batch in batches)
        tokens = self._over_ranks(torch.as_tensor(own, dtype=torch.float32)).clamp(min=1)
        ranks = dist.get_world_size() if self.is_distributed else 1
        policy = self.wrapped if self.uses_wrapper else getattr(self.wrapped, "module", self.wrapped)
        total = torch.zeros(())
        self.optimizer.zero_grad()
        for batch in batches:
            logits = policy(batch["input_ids"])[:, :-1]
            loss = F.cross_entropy(logits.mT, batch["labels"][:, 1:], ignore_index=-100, reduction="sum")
            # The wrapper takes a mean of the gradients of the ranks.
            (loss * ranks / tokens).backward()
            total += loss.detach()
        mean = self._over_ranks(total) / tokens
        nn.utils.clip_grad_norm_(self.model.parameters(), GRAD_CLIP)
        self.optimizer.step()
        return mean.item()

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        """One update from a batch of each rank."""
        return self.accumulate([batch])


def buggy() -> PolicyTrainer:
    """Calls the module inside the wrapper."""
    return PolicyTrainer(uses_wrapper=False)


def healthy() -> PolicyTrainer:
    """Calls the wrapper."""
    return PolicyTrainer(uses_wrapper=True)


def declared(factory: Callable[[], PolicyTrainer]) -> stackwise.TrainerSpec:
    """The same run on each rank, with the clipping and the learning rate."""
    return stackwise.TrainerSpec.of(
        factory, distributed=factory, max_norm=GRAD_CLIP, learning_rate=lambda _: LR, frozen=()
    )


def _rank(rank: int, factory: Callable[[], PolicyTrainer], folder: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    run, ids = factory(), torch.randint(68, (8, 16))
    mine = ids[4 * rank : 4 * rank + 4]
    for _ in range(3):
        run.step({"input_ids": mine, "labels": mine})
    torch.save(torch.cat([p.detach().flatten() for p in run.model.parameters()]), folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _drift(factory: Callable[[], PolicyTrainer]) -> float:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.multiprocessing.start_processes(_rank, (factory, folder), nprocs=2, start_method="fork")
        weights = [torch.load(folder / f"{rank}.pt") for rank in range(2)]
        return (weights[0] - weights[1]).abs().max().item()


def prove() -> tuple[float, float]:
    """Largest difference of the weights of two ranks after three updates."""
    return _drift(buggy), _drift(healthy)
