"""transformers#47394 (huggingface/transformers): GIT shifts labels by hand and its loss shifts them again.

Position t is trained on token t + 2, and because the labels are flat the last target of each row comes from
the next row of the batch.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

VOCAB = 60
DECLARATION = (
    "the text logits at position t are trained to predict the label at position t + 1 of the same row"
)


def for_causal_lm_loss(
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    vocab_size: int,
    shift_labels: torch.Tensor | None = None,
) -> torch.Tensor:
    """Loss that all causal models share: shifts the labels unless the caller has done it."""
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.reshape(-1, vocab_size).float(), shift_labels.reshape(-1))


class GitLayer(nn.Module):
    """Post-norm encoder layer as in BERT."""

    def __init__(self, d: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value, self.output = (nn.Linear(d, d) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """One layer; `mask` is True where attention is allowed."""
        heads = (p(x).unflatten(-1, (self.num_heads, -1)) for p in (self.query, self.key, self.value))
        a = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in heads), attn_mask=mask)
        x = self.norm1(x + self.output(a.transpose(1, 2).flatten(2)))
        return self.norm2(x + self.mlp(x))


class GitForCausalLM(nn.Module):
    """Caption decoder: image patches in front, text behind them."""

    def __init__(self, double_shift: bool, hidden_size: int = 32, num_layers: int = 2) -> None:
        super().__init__()
        self.double_shift = double_shift
        self.patch_embed = nn.Conv2d(3, hidden_size, 4, stride=4)
        self.word_embeddings = nn.Embedding(VOCAB, hidden_size)
        self.position_embeddings = nn.Embedding(64, hidden_size)
        self.layer = nn.ModuleList(GitLayer(hidden_size, 4) for _ in range(num_layers))
        self.output = nn.Linear(hidden_size, VOCAB)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> SimpleNamespace:
        """Logits over patches and text, and the loss over the text."""
        T, n_image = input_ids.shape[1], 0
        positions = torch.arange(T, device=input_ids.device)[None] if position_ids is None else position_ids
        x = self.word_embeddings(input_ids) + self.position_embeddings(positions)
        if pixel_values is not None:
            patches = self.patch_embed(pixel_values).flatten(2).transpose(1, 2)
            n_image = patches.shape[1]
            x = torch.cat((patches, x), dim=1)
        allowed = torch.ones(n_image + T, n_image + T, dtype=torch.bool, device=x.device).tril()
        allowed[:n_image, :n_image] = True
        allowed = allowed[None, None]
        if attention_mask is not None:
            # Padding may look at itself, or its softmax would have no entry.
            real = F.pad(attention_mask.bool(), (n_image, 0), value=True)[:, None, None]
            allowed = allowed & (real | torch.eye(n_image + T, dtype=torch.bool, device=x.device))
        for layer in self.layer:
            x = layer(x, allowed)
        logits, loss = self.output(x), None
        if labels is not None:
            shifted, labels = logits[:, n_image:-1].contiguous(), labels[:, 1:].contiguous()
            if self.double_shift:
                loss = for_causal_lm_loss(shifted.view(-1, VOCAB), labels.view(-1), VOCAB)
            else:
                loss = for_causal_lm_loss(shifted, None, VOCAB, shift_labels=labels)
        return SimpleNamespace(loss=loss, logits=logits)


def buggy() -> nn.Module:
    """As reported."""
    return GitForCausalLM(double_shift=True)


def healthy() -> nn.Module:
    """As fixed."""
    return GitForCausalLM(double_shift=False)


def observe(model: nn.Module) -> torch.Tensor:
    """Loss of the model minus the next-token loss of its own logits."""
    ids = torch.randint(0, VOCAB, (3, 9), generator=torch.Generator().manual_seed(1))
    out = model(ids, pixel_values=torch.linspace(-1, 1, 576).view(3, 3, 8, 8), labels=ids)
    return out.loss - F.cross_entropy(out.logits[:, -9:-1].flatten(0, 1), ids[:, 1:].flatten())
