"""transformers#48154 (huggingface/transformers): the encoder of a loaded T5 embeds its input with the head.

If a checkpoint has no `shared.weight`, absent tied weights get the first tied weight that it has. That is
`lm_head.weight`, although the head is not tied, instead of the embedding of the decoder.
https://github.com/huggingface/transformers/issues/48154
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

EMBEDDINGS = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


@dataclass
class Seq2SeqLMOutput:
    """Loss (with labels) and logits."""

    loss: Tensor | None
    logits: Tensor


class T5Attention(nn.Module):
    """Attention without scaling. `mask` is True for visible keys, `bias` is (heads, queries, keys)."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        nn.init.normal_(self.q.weight, std=dim**-0.5 * (dim // heads) ** -0.5)

    def forward(self, x: Tensor, source: Tensor, mask: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x` asks, `source` answers."""
        q, k, v = (
            proj(t).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for proj, t in ((self.q, x), (self.k, source), (self.v, source))
        )
        scores = q @ k.transpose(-1, -2) + (0.0 if bias is None else bias)
        weights = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(dim=-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


class T5Stack(nn.Module):
    """Encoder, or decoder with attention to the encoder. The relative bias is that of the first layer."""

    def __init__(self, vocab_size: int, dim: int, heads: int, *, is_decoder: bool) -> None:
        super().__init__()
        self.is_decoder, self.most = is_decoder, 8
        self.embed_tokens = nn.Embedding(vocab_size, dim)
        self.relative_attention_bias = nn.Embedding(self.most * (2 - is_decoder) + 1, heads)
        self.self_attn, self.cross_attn = (
            nn.ModuleList(T5Attention(dim, heads) for _ in range(count)) for count in (2, 2 * is_decoder)
        )
        self.wi = nn.ModuleList(nn.Linear(dim, 2 * dim, bias=False) for _ in range(2))
        self.wo = nn.ModuleList(nn.Linear(2 * dim, dim, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.RMSNorm(dim, eps=1e-6) for _ in range(2 * (2 + is_decoder)))
        self.final_layer_norm = nn.RMSNorm(dim, eps=1e-6)

    def forward(self, ids: Tensor, keep: Tensor, source: Tensor | None, source_keep: Tensor | None) -> Tensor:
        """`keep` and `source_keep` are 0 for padding."""
        x, norms = self.embed_tokens(ids), iter(self.norms)
        steps = torch.arange(ids.shape[1], device=ids.device)
        distance = (steps - steps[:, None]).clamp(-self.most, 0 if self.is_decoder else self.most)
        bias = self.relative_attention_bias(distance + self.most).permute(2, 0, 1)
        mask = keep.bool()[:, None, None].expand(-1, 1, len(steps), -1)
        if self.is_decoder:
            mask = mask & (steps <= steps[:, None])
        for i in range(2):
            h = next(norms)(x)
            x = x + self.self_attn[i](h, h, mask, bias)
            if source is not None and source_keep is not None:
                x = x + self.cross_attn[i](next(norms)(x), source, source_keep.bool()[:, None, None])
            x = x + self.wo[i](F.relu(self.wi[i](next(norms)(x))))
        return self.final_layer_norm(x)


class T5ForConditionalGeneration(nn.Module):
    """T5 with tie_word_embeddings=False. Id 0 starts the decoder. `load` ties the embeddings."""

    def __init__(self, vocab_size: int = 64, dim: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.shared = nn.Embedding(vocab_size, dim)
        self.encoder = T5Stack(vocab_size, dim, heads, is_decoder=False)
        self.decoder = T5Stack(vocab_size, dim, heads, is_decoder=True)
        self.lm_head = nn.Linear(dim, vocab_size, bias=False)

    def load(self, state: dict[str, Tensor], tied_weights_keys: tuple[str, ...]) -> None:
        """Load a checkpoint. Without the shared weight, absent tied weights get the first one present."""
        self.load_state_dict(state, strict=False)
        tied = ("shared.weight", *tied_weights_keys)
        source = self.get_parameter(next(key for key in tied if key in state))
        for key in tied:
            if key not in state:
                self.get_submodule(key.removesuffix(".weight")).weight = source

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Seq2SeqLMOutput:
        """Predict the labels, which are shifted to the right for the decoder."""
        if decoder_input_ids is None:
            if labels is None:
                raise ValueError("decoder_input_ids or labels are required")
            decoder_input_ids = F.pad(labels[:, :-1].clamp(min=0), (1, 0))
        keep = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if decoder_attention_mask is None:
            decoder_attention_mask = torch.ones_like(decoder_input_ids)
        encoded = self.encoder(input_ids, keep, None, None)
        logits = self.lm_head(self.decoder(decoder_input_ids, decoder_attention_mask, encoded, keep))
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return Seq2SeqLMOutput(loss, logits)


def _loaded(tied_weights_keys: tuple[str, ...]) -> nn.Module:
    """Return a model with the weights of a checkpoint that has no shared weight."""
    model = T5ForConditionalGeneration()
    with torch.random.fork_rng():
        torch.manual_seed(7)
        state = T5ForConditionalGeneration().state_dict()
    del state["shared.weight"], state["encoder.embed_tokens.weight"]
    model.load(state, tied_weights_keys)
    return model


def buggy() -> nn.Module:
    """Tied to the head."""
    return _loaded(("lm_head.weight", *EMBEDDINGS))


def healthy() -> nn.Module:
    """Tied to the embedding of the decoder."""
    return _loaded((*EMBEDDINGS, "lm_head.weight"))


def _forward(model: nn.Module, ids: Tensor, keep: Tensor | None = None) -> Tensor:
    """Decode `ids` after one source of five tokens."""
    source = torch.tensor([[5, 17, 40, 8, 1]], device=ids.device).expand(len(ids), -1)
    return model(source, decoder_input_ids=ids, decoder_attention_mask=keep).logits


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State a trained, causal decoder whose head is not tied to an embedding."""
    return ModelSpec.of(make, causal=True, trained=True, tied=False, forward=_forward, masked=_forward)


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Embedding of the encoder minus that of the decoder, which the checkpoint shares."""
    return model.encoder.embed_tokens.weight - model.decoder.embed_tokens.weight
