"""Bugs of caches."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from stackwise.subject.spec import ModelSpec
from tests.zoo.gpt import GPT, Placed, Windowed, gpt, placed, spec_of
from tests.zoo.mutant import mutant


@torch.no_grad()
def _continued(spec: ModelSpec, sizes, keep=None):
    model, ids = spec.create().eval(), spec.batch(2, 16)
    cache, end, outputs = None, 0, []
    for size in sizes:
        start, end = end, end + size
        extra = () if keep is None else (keep[:, :end],)
        output, cache = spec.decode(model, ids[:, start:end], cache, *extra)
        outputs.append(output.logits)
    return torch.cat(outputs, dim=1)


def continued(spec: ModelSpec) -> Tensor:
    """A prompt of eight, then single tokens."""
    return _continued(spec, (8, *(1,) * 8))


def in_parts(spec: ModelSpec) -> Tensor:
    """A prompt in parts of four."""
    return _continued(spec, (4, 4, 4, 4))


def continued_behind_padding(spec: ModelSpec) -> Tensor:
    """The last output of a row behind three paddings."""
    keep = torch.ones(2, 16, dtype=torch.bool)
    keep[1, :3] = False
    return _continued(spec, (8, *(1,) * 8), keep)[1, -1]


@torch.no_grad()
def after_another(spec: ModelSpec) -> bool:
    """Whether a continuation is the same once another sequence came in between."""
    model, ids = spec.create().eval(), spec.batch(2, 9)
    outputs = []
    for between in (0, 1):
        _, cache = spec.decode(model, ids[:1, :8], None)
        for _ in range(between):
            spec.decode(model, ids[1:, :5], None)
        outputs.append(spec.decode(model, ids[:1, 8:], cache)[0].logits)
    return torch.equal(*outputs)


@torch.no_grad()
def at_the_end(spec: ModelSpec) -> Tensor:
    """The last output of the longest sequence."""
    model, ids = spec.create().eval(), spec.batch(1, 64)
    _, cache = spec.decode(model, ids[:, :63], None)
    return spec.decode(model, ids[:, 63:], cache)[0].logits


class Fused(GPT):
    """Attention by scaled_dot_product_attention, with is_causal where there is nothing else to hide."""

    def attend(self, layer, x, positions, visible, cache):
        q = self.rotate(self.split(layer["q"](x)), positions)
        k = self.rotate(self.split(layer["k"](x)), positions)
        v = self.split(layer["v"](x))
        if cache is not None:
            k, v = torch.cat((cache[0], k), dim=2), torch.cat((cache[1], v), dim=2)
        y = self.fused(q, self.repeat(k), self.repeat(v), visible)
        return layer["out"](self.merge(y)), (k, v)

    def visible(self, T, past, keep, documents):
        self.has_mask = keep is not None or documents is not None
        return super().visible(T, past, keep, documents)

    def fused(self, q, k, v, visible):
        plain = not self.has_mask and q.shape[2] == k.shape[2]
        mask = None if plain else visible
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=plain)


def fused() -> ModelSpec:
    """The clean twin with fused attention."""
    return spec_of(Fused)


@mutant("24", twin=fused, family="cache", source="pytorch/pytorch#144858", observable=continued)
def causal_from_the_first_key():
    """is_causal with fewer queries than keys is aligned with the first key, not with the last."""

    class Mutant(Fused):
        def fused(self, q, k, v, visible):
            if visible.shape[0] > 1:
                return super().fused(q, k, v, visible)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return spec_of(Mutant)


@mutant("24", twin=fused, family="cache", source="lucidrains/x-transformers#187", observable=in_parts)
def parts_without_causality():
    """With a cache causality is switched off, which is right for one token and wrong for several."""

    class Mutant(Fused):
        def fused(self, q, k, v, visible):
            if visible.shape[0] > 1 or q.shape[2] == k.shape[2]:
                return super().fused(q, k, v, visible)
            return F.scaled_dot_product_attention(q, k, v)

    return spec_of(Mutant)


@mutant("92", twin=gpt, family="cache", source="skyzh/tiny-llm#46", observable=continued)
def offset_grows_by_the_prompt():
    """Each step moves the position on by the length of the prompt."""

    class Mutant(GPT):
        def positions(self, input_ids, past, keep, documents):
            if past:
                past += 8 * (past - 8) if past >= 8 else 0
            return super().positions(input_ids, past, keep, documents)

    return spec_of(Mutant)


@mutant("92", twin=placed, family="cache", source="skyzh/tiny-llm#46", observable=continued)
def position_is_not_moved_on():
    """Continued tokens all stand at position 0."""

    class Mutant(Placed):
        def place(self, input_ids, past, keep, documents):
            return super().place(input_ids, 0, keep, documents)

    return spec_of(Mutant, max_length=64)


@mutant(
    "93", twin=placed, family="padding", source="unslothai/unsloth#3699", observable=continued_behind_padding
)
def padded_rows_share_a_position():
    """While decoding, every row is at the length of the cache, however much of it is padding."""

    class Mutant(Placed):
        def place(self, input_ids, past, keep, documents):
            return super().place(input_ids, past, None if past else keep, documents)

    return spec_of(Mutant, max_length=64)


@mutant("93", twin=gpt, family="padding", source="ndif-team/nnsight#673", observable=continued_behind_padding)
def padding_is_seen_from_the_cache():
    """The mask hides padding among the new tokens, not in the cache."""

    class Mutant(GPT):
        def visible(self, T, past, keep, documents):
            return super().visible(T, past, None if past else keep, documents)

    return spec_of(Mutant)


@mutant("95", twin=placed, family="cache", source="huggingface/transformers#47597", observable=after_another)
def position_is_counted_by_the_model():
    """A counter on the model gives the positions, whichever cache comes with the tokens."""

    class Mutant(Placed):
        def place(self, input_ids, past, keep, documents):
            past = self.counted if past else 0
            self.counted = past + input_ids.shape[1]
            return super().place(input_ids, past, keep, documents)

    return spec_of(Mutant, max_length=64)


class Rolling(Windowed):
    """Keeps the keys of its window alone, and counts what came before."""

    kept = 4  # beside the new one

    def forward(self, input_ids, attention_mask=None, cache=None, **rest):
        self.seen = 0 if cache is None else cache[0][2]
        return super().forward(input_ids, attention_mask=attention_mask, cache=cache, **rest)

    def positions(self, input_ids, past, keep, documents):
        return super().positions(input_ids, self.seen, keep, documents)

    def attend(self, layer, x, positions, visible, cache):
        y, (k, v) = super().attend(layer, x, positions, visible, cache)
        return y, (k[:, :, -self.kept :], v[:, :, -self.kept :], self.seen + x.shape[1])


def rolling() -> ModelSpec:
    """The clean twin with a cache that rolls; it takes no padding."""
    return spec_of(Rolling, masked=None, padding_sides=())


@mutant("rolling", twin=rolling, family="cache", source="classic", observable=continued)
def rolling_cache_one_too_short():
    """A rolling cache forgets the oldest token that the window still sees."""

    class Mutant(Rolling):
        kept = 3

    return spec_of(Mutant, masked=None, padding_sides=())


@mutant("limit", twin=placed, family="cache", source="classic", observable=at_the_end)
def positions_are_clamped():
    """While decoding, positions stop one below the last."""

    class Mutant(Placed):
        def place(self, input_ids, past, keep, documents):
            positions = super().place(input_ids, past, keep, documents)
            return positions.clamp(max=62) if past else positions

    return spec_of(Mutant, max_length=64)


class Renamed(Placed):
    """Takes and returns its cache as `store_cache`. No declaration says so."""

    def forward(self, input_ids, store_cache=None, use_cache=False):
        output = super().forward(input_ids, cache=store_cache, use_cache=use_cache)
        return SimpleNamespace(logits=output.logits, store_cache=output.cache)


def renamed() -> ModelSpec:
    """The clean twin whose cache has a name that no library uses."""
    return ModelSpec.of(Renamed)


@mutant("92", twin=renamed, family="cache", source="classic", observable=continued)
def renamed_cache_starts_again_at_zero():
    """A cache with a name that no library uses; continued tokens all stand at position 0."""

    class Mutant(Renamed):
        def place(self, input_ids, past, keep, documents):
            return super().place(input_ids, 0, keep, documents)

    return ModelSpec.of(Mutant)
