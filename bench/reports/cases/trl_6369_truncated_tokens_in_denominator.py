"""trl#6369 (huggingface/trl): the divisor of the GRPO loss counts tokens that the loss excludes.

With `mask_truncated_completions` the tokens of truncated completions are not in the sum of the loss, but in
the number that divides it. https://github.com/huggingface/trl/issues/6369
"""

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from stackwise import ModelSpec

EOS = 1


class Policy(nn.Module):
    """Causal language model with the DAPO form of the GRPO loss."""

    def __init__(self, counts_kept: bool, vocab_size: int = 48, dim: int = 32) -> None:
        super().__init__()
        self.counts_kept, self.epsilon = counts_kept, 0.2
        self.embed_tokens, self.positions = nn.Embedding(vocab_size, dim), nn.Embedding(64, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(dim), enable_nested_tensor=False)
        self.lm_head = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> SimpleNamespace:
        """Logits."""
        length = input_ids.shape[1]
        x = self.embed_tokens(input_ids) + self.positions.weight[:length]
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)[None]
        if attention_mask is not None:
            hidden = ~attention_mask.bool()[:, None] & ~torch.eye(length, dtype=torch.bool, device=x.device)
            mask = (mask | hidden).repeat_interleave(4, dim=0)
        return SimpleNamespace(logits=self.lm_head(self.layers(x, mask if len(mask) > 1 else mask[0])))

    def token_log_probs(self, input_ids: Tensor) -> Tensor:
        """Log-probability of each token after the first."""
        logits = self(input_ids).logits[:, :-1]
        return logits.log_softmax(-1).gather(-1, input_ids[:, 1:, None])[..., 0]

    def grpo_loss(
        self,
        input_ids: Tensor,
        completion_mask: Tensor,
        advantages: Tensor,
        old_log_probs: Tensor | None = None,
        mask_truncated_completions: bool = True,
    ) -> Tensor:
        """Clipped policy loss; a completion without an end token is truncated."""
        mask = completion_mask[:, 1:].to(advantages.dtype)
        num_items = mask.sum()
        if mask_truncated_completions:
            ended = ((input_ids == EOS) & completion_mask.bool()).any(dim=1)
            mask = mask * ended[:, None]
        if self.counts_kept:
            num_items = mask.sum()
        log_probs = self.token_log_probs(input_ids)
        ratio = (log_probs - (log_probs.detach() if old_log_probs is None else old_log_probs)).exp()
        clipped = ratio.clamp(1 - self.epsilon, 1 + self.epsilon)
        per_token = -torch.min(ratio * advantages[:, None], clipped * advantages[:, None])
        return (per_token * mask).sum() / num_items.clamp(min=1)


def buggy() -> nn.Module:
    """Counts all completion tokens."""
    return Policy(counts_kept=False)


def healthy() -> nn.Module:
    """Counts the tokens in the sum."""
    return Policy(counts_kept=True)


def _loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Half of a row is its prompt."""
    completion = (torch.arange(ids.shape[1], device=ids.device) >= ids.shape[1] // 2).expand_as(ids)
    rewards = ids.to(model.lm_head.weight.dtype).mean(dim=1)
    return model.grpo_loss(ids, completion, (rewards - rewards.mean()) / (rewards.std() + 1e-4))


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """The loss of training; one completion of two is truncated."""

    def make_batch(batch_size: int, length: int, generator: torch.Generator) -> Tensor:
        ids = torch.randint(2, 48, (batch_size, length), generator=generator)
        ids[::2, -1] = EOS
        return ids

    return ModelSpec.of(make, inputs="tokens", width=48, causal=True, loss=_loss, make_batch=make_batch)


def observe(model: nn.Module) -> Tensor:
    """Loss of a complete and a truncated completion, less that of the complete one."""
    ids = torch.randint(2, 48, (2, 12), generator=torch.Generator().manual_seed(1))
    ids[0, -1] = EOS
    completion, advantages = (torch.arange(12) >= 4).expand_as(ids), torch.tensor([1.0, -1.0])
    with torch.no_grad():
        return model.grpo_loss(ids, completion, advantages) - model.grpo_loss(
            ids[:1], completion[:1], advantages[:1]
        )
