"""torchtitan#3438 (pytorch/torchtitan): LoRA training also trains the norms and embeddings of the base model.

The converter walks only the linear layers: it freezes them or gives them adapters. All other parameters keep
requires_grad, and the optimizer takes each parameter that has it.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

import stackwise

LR, TARGETS = 5e-3, ("wq", "wv")
NORMS = ("attention_norm", "ffn_norm", "norm")
BASE = (*NORMS, "tok_embeddings", "wq.weight", "wk", "wv.weight", "wo", "w1", "w2", "output")


class LoRALinear(nn.Module):
    """A frozen linear layer with a trainable low-rank adapter."""

    def __init__(self, base: nn.Linear, rank: int = 4, alpha: float = 8.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(base.weight.detach().clone(), requires_grad=False)
        self.lora_a = nn.Parameter(torch.empty(rank, base.in_features))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scaling = alpha / rank
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Output of the layer and of the adapter."""
        return F.linear(x, self.weight) + self.scaling * F.linear(F.linear(x, self.lora_a), self.lora_b)


class Llama(nn.Module):
    """Embedding, one transformer block and the output layer."""

    def __init__(self, vocab: int = 78, dim: int = 32) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.attention_norm, self.ffn_norm, self.norm = (nn.RMSNorm(dim) for _ in range(3))
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.w1, self.w2 = nn.Linear(dim, 64, bias=False), nn.Linear(64, dim, bias=False)
        self.output = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the next token."""
        h = self.tok_embeddings(tokens)
        x = self.attention_norm(h)
        h = h + self.wo(F.scaled_dot_product_attention(self.wq(x), self.wk(x), self.wv(x), is_causal=True))
        h = h + self.w2(F.silu(self.w1(self.ffn_norm(h))))
        return self.output(self.norm(h))


def convert(model: Llama, freezes_all: bool) -> None:
    """Freeze the linear layers, or all parameters, and put adapters on the targets."""
    if freezes_all:
        model.requires_grad_(False)
    linears = {name: child for name, child in model.named_children() if isinstance(child, nn.Linear)}
    for name, linear in linears.items():
        if name in TARGETS:
            setattr(model, name, LoRALinear(linear))
        else:
            linear.requires_grad_(False)


class Finetuning:
    """LoRA fine-tuning of a model."""

    def __init__(self, freezes_all: bool) -> None:
        self.model = Llama()
        convert(self.model, freezes_all)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0.1)

    def accumulate(self, batches: list[dict[str, torch.Tensor]]) -> float:
        """One update from some micro-batches."""
        targets = max(1, sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches))
        self.optimizer.zero_grad()
        mean = 0.0
        for batch in batches:
            logits = self.model(batch["input_ids"])[:, :-1]
            total = F.cross_entropy(logits.mT, batch["labels"][:, 1:], ignore_index=-100, reduction="sum")
            loss = total / targets
            loss.backward()
            mean += loss.item()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return mean

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        """One update from one batch."""
        return self.accumulate([batch])


def buggy() -> Finetuning:
    """Freezes linear layers only."""
    return Finetuning(freezes_all=False)


def healthy() -> Finetuning:
    """Freezes the whole base model."""
    return Finetuning(freezes_all=True)


def declared(factory: Callable[[], Finetuning]) -> stackwise.TrainerSpec:
    """The parameters of the base model, which do not train, the clipping and the learning rate."""
    return stackwise.TrainerSpec.of(factory, frozen=BASE, max_norm=1.0, learning_rate=lambda _: LR)


def _moved(run: Finetuning) -> float:
    base = {name: p for name, p in run.model.named_parameters() if ".lora_" not in name}
    before = {name: p.detach().clone() for name, p in base.items()}
    for _ in range(3):
        ids = torch.randint(78, (4, 16))
        run.step({"input_ids": ids, "labels": ids})
    return max((p.detach() - before[name]).abs().max().item() for name, p in base.items())


def prove() -> tuple[float, float]:
    """Largest change of a parameter of the base model in three updates."""
    return _moved(buggy()), _moved(healthy())
