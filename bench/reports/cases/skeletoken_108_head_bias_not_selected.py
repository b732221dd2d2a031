"""skeletoken#108 (stephantul/skeletoken): after tokens are removed, head biases belong to other tokens.

The embedding keeps the rows of the tokens that stay. The bias of the output head is cut to the new length, so
that entry i is the bias of the old token i. https://github.com/stephantul/skeletoken/issues/108
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from stackwise import ModelSpec

VOCAB = 48
KEPT = [0, 1, *range(4, 12), *range(15, 45, 2)]


class BertForMaskedLM(nn.Module):
    """Encoder with a tied head that has a bias."""

    def __init__(self, vocab_size: int = VOCAB, dim: int = 32) -> None:
        super().__init__()
        self.word_embeddings, self.position_embeddings = nn.Embedding(vocab_size, dim), nn.Embedding(64, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.transform = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.LayerNorm(dim))
        self.decoder = nn.Linear(dim, vocab_size)
        nn.init.normal_(self.word_embeddings.weight, std=0.02)
        self.decoder.weight = self.word_embeddings.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Logits."""
        x = self.word_embeddings(input_ids) + self.position_embeddings.weight[: input_ids.shape[1]]
        padding = None if attention_mask is None else ~attention_mask.bool()
        return self.decoder(self.transform(self.encoder(x, src_key_padding_mask=padding)))


@torch.no_grad()
def reshape_embeddings(model: BertForMaskedLM, kept: list[int], select_bias: bool) -> BertForMaskedLM:
    """Give the model the vocabulary of the trimmed tokenizer."""
    weight = nn.Parameter(model.word_embeddings.weight[kept].clone())
    bias = model.decoder.bias[kept] if select_bias else model.decoder.bias[: len(kept)]
    model.word_embeddings = nn.Embedding(len(kept), weight.shape[1], _weight=weight)
    model.decoder = nn.Linear(weight.shape[1], len(kept))
    model.word_embeddings.weight = model.decoder.weight = weight
    model.decoder.bias = nn.Parameter(bias.clone())
    model.select_bias = select_bias
    return model


def _pretrained() -> BertForMaskedLM:
    """A model whose head bias contains the frequencies of tokens, as training leaves it."""
    model = BertForMaskedLM()
    nn.init.normal_(model.decoder.bias)
    return model


def buggy() -> nn.Module:
    """Cut bias."""
    return reshape_embeddings(_pretrained(), KEPT, select_bias=False)


def healthy() -> nn.Module:
    """Selected bias."""
    return reshape_embeddings(_pretrained(), KEPT, select_bias=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """A trained, bidirectional model with a tied head."""
    return ModelSpec.of(
        make,
        inputs="tokens",
        width=len(KEPT),
        causal=False,
        tied=True,
        trained=True,
        padding_sides=("right",),
    )


def observe(model: nn.Module) -> Tensor:
    """Logits of a trimmed model, less those of the full model for the tokens that stay (same weights)."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        full = _pretrained().eval()
        torch.manual_seed(1)
        trimmed = reshape_embeddings(_pretrained(), KEPT, model.select_bias).eval()
    ids = torch.randint(0, len(KEPT), (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return trimmed(ids) - full(torch.tensor(KEPT)[ids])[..., KEPT]
