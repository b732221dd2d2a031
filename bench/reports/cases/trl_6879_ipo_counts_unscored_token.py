"""trl#6879 (huggingface/trl): the IPO loss divides by a count that includes a token without a score.

The first token of a row has no log-probability. If it belongs to the completion, as after truncation from the
left, it is not in the summed score, but in the length. https://github.com/huggingface/trl/issues/6879
"""

import math
from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

VOCAB, DIM, HEADS = 48, 32, 4


class Block(nn.Module):
    """Attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """One layer; `mask` is True for visible keys."""
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class Policy(nn.Module):
    """Causal language model with the IPO loss of pairs of completions."""

    def __init__(self, *, counts_scored: bool) -> None:
        super().__init__()
        self.counts_scored, self.beta = counts_scored, 0.1
        self.embed_tokens, self.positions = nn.Embedding(VOCAB, DIM), nn.Embedding(64, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.lm_head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> SimpleNamespace:
        """Logits. Positions count the tokens that are no padding."""
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        keep = attention_mask.long()
        x = self.embed_tokens(input_ids) + self.positions((keep.cumsum(dim=1) - 1).clamp(min=0))
        index = torch.arange(input_ids.shape[1], device=input_ids.device)
        mask = (index[:, None] >= index) & keep[:, None, None].bool() | (index[:, None] == index)
        for layer in self.layers:
            x = layer(x, mask)
        return SimpleNamespace(logits=self.lm_head(self.norm(x)))

    def sequence_log_probs(
        self, input_ids: Tensor, attention_mask: Tensor, completion_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the log-probability of each completion, and the length that divides it."""
        logits = self(input_ids, attention_mask).logits[:, :-1]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scored = completion_mask[:, 1:].to(logits.dtype)
        log_probs = logits.log_softmax(-1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)
        lengths = scored.sum(dim=1) if self.counts_scored else completion_mask.to(logits.dtype).sum(dim=1)
        return (log_probs * scored).sum(dim=1), lengths.clamp(min=1)

    def ipo_loss(
        self, input_ids: Tensor, attention_mask: Tensor, completion_mask: Tensor, ref_log_probs: Tensor
    ) -> Tensor:
        """Return the loss. The chosen rows come first, then the rejected ones in the same order.

        `ref_log_probs` has the summed log-probability of each completion under the reference model.
        """
        log_probs, lengths = self.sequence_log_probs(input_ids, attention_mask, completion_mask)
        chosen, rejected = ((log_probs - ref_log_probs) / lengths).chunk(2)
        return (chosen - rejected - 1 / (2 * self.beta)).square().mean()


def buggy() -> nn.Module:
    """Counts all tokens of the completion."""
    return Policy(counts_scored=False)


def healthy() -> nn.Module:
    """Counts the tokens that have a score."""
    return Policy(counts_scored=True)


def _loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Each row is a chosen completion without a prompt. Half of the rejected row is its prompt.

    The reference model is uniform.
    """
    rejected = ids.clone()
    half = max(ids.shape[1] // 2, 1)
    rejected[:, half:] = (ids[:, half:] + 1) % VOCAB
    completion = torch.ones(2 * len(ids), ids.shape[1], dtype=torch.bool, device=ids.device)
    completion[len(ids) :, :half] = False
    reference = -math.log(VOCAB) * completion[:, 1:].sum(dim=1)
    return model.ipo_loss(torch.cat([ids, rejected]), torch.ones_like(completion), completion, reference)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """The loss of training; prompts of the chosen rows were truncated."""
    return ModelSpec.of(
        make,
        inputs="tokens",
        width=VOCAB,
        causal=True,
        max_length=64,
        loss=_loss,
        padding_sides=("left", "right"),
    )


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Loss of a pair, whose chosen row has no prompt, minus that of the mean scores."""
    model = model.double().eval()
    ids = torch.randint(VOCAB, (2, 10), generator=torch.Generator().manual_seed(1))
    completion, attention = torch.ones(2, 10, dtype=torch.bool), torch.ones(2, 10, dtype=torch.long)
    completion[1, :4] = completion[1, 8:] = False
    attention[1, 8:] = 0
    chosen, rejected = model(ids, attention).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])
    margin = chosen.mean() - rejected[3:7].mean()
    loss = model.ipo_loss(ids, attention, completion, torch.zeros(2, dtype=torch.float64))
    return loss - (margin - 5).square()
