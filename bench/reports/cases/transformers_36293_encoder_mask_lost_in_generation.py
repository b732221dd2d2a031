"""transformers#36293 (huggingface/transformers): T5 generates without the attention mask of its source.

The inputs of a step get a mask only for the decoder, so the cross-attention reads the padding of the source.
"""

from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

VOCAB, DIM, HEADS, FAR = 48, 32, 4, 8
Opt = Tensor | None


class T5Stack(nn.Module):
    """Blocks with a shared bias of relative positions."""

    def __init__(self, is_decoder: bool) -> None:
        super().__init__()
        self.is_decoder, self.final_layer_norm = is_decoder, nn.LayerNorm(DIM, bias=False)
        self.relative_attention_bias = nn.Parameter(torch.randn(2 * FAR + 1, HEADS))
        layer = nn.TransformerDecoderLayer if is_decoder else nn.TransformerEncoderLayer
        options = {"activation": F.silu, "batch_first": True, "norm_first": True, "bias": False}
        self.blocks = nn.ModuleList(layer(DIM, HEADS, 64, 0.0, **options) for _ in range(2))

    def forward(self, x: Tensor, mask: Opt = None, encoder: Opt = None, encoder_mask: Opt = None) -> Tensor:
        index = torch.arange(x.shape[1], device=x.device)
        distance = index - index[:, None]
        bias = self.relative_attention_bias[distance.clamp(-FAR, FAR) + FAR].permute(2, 0, 1)
        hidden = ((distance > 0) & self.is_decoder).expand(len(x), 1, -1, -1)
        if mask is not None:
            hidden = hidden | ~mask[:, None, None].bool() & (distance != 0)
        if encoder_mask is not None:  # True for hidden keys, (batch * heads, time, keys)
            hidden_keys = ~encoder_mask[:, None].bool().expand(-1, len(index), -1)
            encoder_mask = hidden_keys.repeat_interleave(HEADS, dim=0)
        bias = bias.masked_fill(hidden, -torch.inf).flatten(0, 1)
        for block in self.blocks:
            x = block(x, encoder, bias, encoder_mask) if self.is_decoder else block(x, bias)
        return self.final_layer_norm(x)


class T5ForConditionalGeneration(nn.Module):
    """Encoder and decoder with shared embeddings."""

    def __init__(self, *, passes_mask: bool) -> None:
        super().__init__()
        self.passes_mask, self.shared = passes_mask, nn.Embedding(VOCAB, DIM)
        self.encoder, self.decoder = T5Stack(is_decoder=False), T5Stack(is_decoder=True)
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(
        self, input_ids: Opt, attention_mask: Opt, decoder_input_ids: Tensor, encoder_outputs: Opt = None
    ) -> SimpleNamespace:
        if encoder_outputs is None:
            encoder_outputs = self.encoder(self.shared(input_ids), attention_mask)
        x = self.decoder(self.shared(decoder_input_ids), None, encoder_outputs, attention_mask)
        return SimpleNamespace(logits=self.lm_head(x), encoder_outputs=encoder_outputs)

    @torch.no_grad()
    def generate(self, input_ids: Tensor, mask: Tensor, decoder_input_ids: Tensor, length: int) -> Tensor:
        encoder_outputs, ids = self.encoder(self.shared(input_ids), mask), decoder_input_ids
        for _ in range(length):
            logits = self(None, mask if self.passes_mask else None, ids, encoder_outputs).logits
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
        return ids


def buggy() -> nn.Module:
    return T5ForConditionalGeneration(passes_mask=False)


def healthy() -> nn.Module:
    return T5ForConditionalGeneration(passes_mask=True)


def _source(ids: Tensor) -> tuple[Tensor, Tensor]:
    """The same padded source for each row, and its mask."""
    source = torch.tensor([5, 9, 21, 30, 0, 0, 0, 0], device=ids.device).expand(len(ids), -1)
    return source, source.ne(0)


def _generate(model: nn.Module, prompts: list[Tensor], *, max_new_tokens: int) -> list[Tensor]:
    rows = [model.generate(*_source(prompt[None]), prompt[None], max_new_tokens)[0] for prompt in prompts]
    return [row[-max_new_tokens:] for row in rows]


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    given = {"causal": True, "forward": lambda model, ids: model(*_source(ids), ids), "generate": _generate}
    return ModelSpec.of(make, inputs="tokens", width=VOCAB, **given)


def observe(model: nn.Module) -> Tensor:
    """Number of tokens after each start that differ from those without padding in the source."""
    ids = torch.arange(VOCAB)[:, None]
    alone = model.generate(*(each[:, :4] for each in _source(ids)), ids, 6)
    return (model.generate(*_source(ids), ids, 6) != alone).sum(dim=1)
