"""CodonTransformer#19 (Adibvafa/CodonTransformer): each sampled sequence applies the temperature again.

`logits /= temperature` runs in the loop over the sequences and changes the logits in place, so the n-th
sequence is drawn with the n-th power of the temperature.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

VOCAB, PAD, MAX_LENGTH = 48, 0, 64


class BertLayer(nn.Module):
    """Attention in both directions and a feed-forward network, each with a norm after it."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.dense = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.intermediate, self.output = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """`mask` (batch, time) is True at tokens."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None])
        x = self.norm1(x + self.dropout(self.dense(y.transpose(1, 2).flatten(2))))
        return self.norm2(x + self.dropout(self.output(F.gelu(self.intermediate(x)))))


class CodonTransformer(nn.Module):
    """Amino acids, as masked codons -> logits of the codons at the same positions."""

    def __init__(self, *, in_place: bool, dim: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.in_place = in_place
        self.word_embeddings = nn.Embedding(VOCAB, dim, padding_idx=PAD)
        self.position_embeddings, self.norm = nn.Embedding(MAX_LENGTH, dim), nn.LayerNorm(dim)
        self.layer = nn.ModuleList(BertLayer(dim, heads) for _ in range(2))
        self.decoder = nn.Linear(dim, VOCAB)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return logits (batch, time, VOCAB)."""
        mask = input_ids != PAD if attention_mask is None else attention_mask.bool()
        x = self.word_embeddings(input_ids) + self.position_embeddings.weight[: input_ids.shape[1]]
        x = self.norm(x)
        for layer in self.layer:
            x = layer(x, mask)
        return self.decoder(x)

    @torch.no_grad()
    def predict_dna_sequence(
        self, input_ids: Tensor, *, temperature: float = 0.2, num_sequences: int = 1, seed: int = 0
    ) -> list[Tensor]:
        """Return sampled codons (batch, time), for each sequence."""
        generator = torch.Generator(device=input_ids.device).manual_seed(seed)
        return self.sample_non_deterministic(self(input_ids), temperature, num_sequences, generator)

    def sample_non_deterministic(
        self, logits: Tensor, temperature: float, num_sequences: int, generator: torch.Generator
    ) -> list[Tensor]:
        """Draw codons from logits."""
        sequences = []
        for _ in range(num_sequences):
            if self.in_place:
                logits /= temperature
                probs = logits.softmax(dim=-1)
            else:
                probs = (logits / temperature).softmax(dim=-1)
            drawn = torch.multinomial(probs.flatten(0, 1), 1, generator=generator)
            sequences.append(drawn.view(logits.shape[:2]))
        return sequences


def buggy() -> nn.Module:
    """Divide the logits in place, in the loop."""
    return CodonTransformer(in_place=True)


def healthy() -> nn.Module:
    """Divide the logits for the softmax only."""
    return CodonTransformer(in_place=False)


def _make_batch(batch_size: int, seq_len: int, generator: torch.Generator) -> Tensor:
    return torch.randint(1, VOCAB, (batch_size, seq_len), generator=generator)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State a bidirectional model with padding on the right."""
    return ModelSpec.of(
        make,
        inputs="tokens",
        width=VOCAB,
        make_batch=_make_batch,
        causal=False,
        max_length=MAX_LENGTH,
        padding_sides=("right",),
        masked=lambda model, ids, keep: model(ids, attention_mask=keep),
    )


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Return the share of the likeliest codon in a fourth sequence, if it is far from that in the first."""
    logits = torch.tensor([1.0, 0.5, 0.0]).expand(1, 4000, 3).clone()
    drawn = model.sample_non_deterministic(logits, 0.5, 4, torch.Generator().manual_seed(1))
    first, last = ((codons == 0).double().mean() for codons in (drawn[0], drawn[-1]))
    return torch.where((last - first).abs() < 0.05, 0.0, last - first)
