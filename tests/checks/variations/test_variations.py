"""Each variation finds a bug of its own, and is silent on the model without the bug."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

from stackwise.checks import check_model
from stackwise.checks.engine.exploration import Explorer, compare
from stackwise.checks.subject import Subject
from stackwise.checks.variations import known_variations
from stackwise.subject.spec import ModelSpec
from tests.zoo.cache import Fused, position_is_counted_by_the_model
from tests.zoo.gpt import GPT, Encoder, Placed, encoder, placed, spec_of

CPU = torch.device("cpu")


class RowsMixed(GPT):
    """Each row of three or more reads a little of the others."""

    def embed(self, input_ids):
        x = super().embed(input_ids)
        return x + 0.1 * x.mean(dim=0, keepdim=True) if len(x) > 2 else x


class DocumentsIgnored(GPT):
    def visible(self, T, past, keep, documents):
        return super().visible(T, past, keep, None)


class NextTokenRead(GPT):
    def embed(self, input_ids):
        x = super().embed(input_ids)
        return x + F.pad(x[:, 1:], (0, 0, 0, 1))


class LossDetached(GPT):
    """The value of the loss is right, and a part of its gradient is missing."""

    def loss(self, logits, labels):
        right = super().loss(logits, labels)
        return right + 0.5 * (right.detach() - right)


class ChunksRestart(GPT):
    """A chunk of several tokens counts positions from 0, as a prompt does."""

    def positions(self, input_ids, past, keep, documents):
        return super().positions(input_ids, past if input_ids.shape[1] == 1 else 0, keep, documents)


class MaskReplacesDocuments(GPT):
    def visible(self, T, past, keep, documents):
        return super().visible(T, past, keep, documents if keep is None else None)


class PaddingRead(GPT):
    def visible(self, T, past, keep, documents):
        return super().visible(T, past, None, documents)


class ScaledInTraining(GPT):
    def scale(self):
        return super().scale() * (1.1 if self.training else 1.0)


class FirstMaskKept(GPT):
    """The mask of the first call is used for all calls of its length and shorter."""

    def visible(self, T, past, keep, documents):
        if past or keep is not None or documents is not None:
            return super().visible(T, past, keep, documents)
        if not hasattr(self, "kept"):
            self.kept = super().visible(T, past, keep, documents)
            self.kept[..., T - 1, 0] = False
        if self.kept.shape[-1] < T:
            return super().visible(T, past, keep, documents)
        return self.kept[..., :T, :T]


class PaddingKept(GPT):
    """The padding of the last call with a mask is hidden in later chunks as well."""

    kept = None

    def visible(self, T, past, keep, documents):
        self.kept = self.kept if keep is None else keep
        visible = super().visible(T, past, keep, documents)
        if past and keep is None and self.kept is not None:
            n = min(visible.shape[-1], self.kept.shape[-1])
            visible[..., :n] &= self.kept[-1, :n]
        return visible


class TableNotSaved(GPT):
    """A random table is a plain attribute, so that state_dict does not contain it."""

    def __init__(self):
        super().__init__()
        self.table = torch.randn(self.width)

    def embed(self, input_ids):
        return super().embed(input_ids) * (1 + self.table.to(self.embedding.weight.dtype))


class Checkpointed(GPT):
    """Its switch recomputes the feed-forward part."""

    recomputes = False
    factor = 1.0

    def gradient_checkpointing_enable(self):
        self.recomputes = True

    def mlp(self, layer, x):
        self.factor = 1.0
        if not self.recomputes:
            return self.scaled(layer, x)
        y = checkpoint(self.scaled, layer, x, use_reentrant=False)
        self.after()
        return y

    def scaled(self, layer, x):
        return GPT.mlp(self, layer, x * self.factor)

    def after(self):
        pass


class FactorForgotten(Checkpointed):
    """The recomputed part reads an attribute that has changed since."""

    def after(self):
        self.factor = 0.5


class WithArguments(GPT):
    """Takes positions, vectors in place of ids, and a switch for hidden states."""

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        labels=None,
        cache=None,
        documents=None,
        use_cache=False,
        position_ids=None,
        inputs_embeds=None,
        output_hidden_states=False,
        logits_to_keep=0,
    ):
        self.given, self.vectors, self.wants_states = position_ids, inputs_embeds, output_hidden_states
        ids = input_ids if inputs_embeds is None else inputs_embeds[..., 0].long()
        output = super().forward(ids, attention_mask, labels, cache, documents, use_cache)
        output.logits = self.kept(output.logits, logits_to_keep)
        return output

    def kept(self, logits, count):
        return logits[:, -count:]

    def get_input_embeddings(self):
        return self.embedding

    def positions(self, *arguments):
        return super().positions(*arguments) if self.given is None else self.given

    def embed(self, input_ids):
        return super().embed(input_ids) if self.vectors is None else self.vectors


class PositionsMisused(WithArguments):
    """Vectors are larger if positions are given. A shift would be invisible to rotations."""

    def embed(self, input_ids):
        return super().embed(input_ids) * (1.0 if self.given is None else 1.1)


class VectorsNotScaled(WithArguments):
    """The embedding of ids is scaled, and vectors that are given are not."""

    def embed(self, input_ids):
        return super().embed(input_ids) * (2.0 if self.vectors is None else 1.0)


class OtherAttentionForStates(WithArguments):
    """Another attention function, with another scale, if hidden states are wanted."""

    def scale(self):
        return super().scale() * (1.1 if self.wants_states else 1.0)


class FirstLogitsKept(WithArguments):
    def kept(self, logits, count):
        return logits[:, :count] if count else logits


class OtherScaleInMath(Fused):
    """Another scale if the fused kernel is switched off."""

    def scale(self):
        return 1.0 if torch.backends.cuda.flash_sdp_enabled() else 1.1

    def fused(self, q, k, v, visible):
        return super().fused(q * self.scale(), k, v, visible)


class Prefix(GPT):
    """The first four tokens see each other."""

    shown = 4

    def visible(self, T, past, keep, documents):
        visible = super().visible(T, past, keep, documents)
        visible[..., : self.shown, : self.shown] = True
        return visible


class PrefixTooLong(Prefix):
    shown = 6


def prefix_spec(build):
    def visible(inputs):
        seen = torch.ones(inputs.shape[1], inputs.shape[1], dtype=torch.bool).tril()
        seen[: Prefix.shown, : Prefix.shown] = True
        return seen

    return spec_of(build, causal=None, visible=visible, decode=None, packed=None, masked=None)


class EmptyRowScales(GPT):
    """An empty row changes the scale of all rows."""

    def visible(self, T, past, keep, documents):
        self.has_empty_row = keep is not None and not keep.any(dim=1).all()
        return super().visible(T, past, keep, documents)

    def scale(self):
        return super().scale() * (1.1 if self.has_empty_row else 1.0)


class LowestNumber(GPT):
    """Hidden scores get the lowest float32, which is -inf in half precision. Padded queries see nothing."""

    def visible(self, T, past, keep, documents):
        visible = super().visible(T, past, None, documents)
        return visible if keep is None else visible & (keep[:, None, None] & keep[:, None, -T:, None])

    def softmax(self, scores):
        lowest = torch.tensor(torch.finfo(torch.float32).min).to(scores)
        return super().softmax(torch.where(scores.isneginf(), lowest, scores))


class Adapted(GPT):
    """The embedding has a scale that can be merged into its weight."""

    tied = False
    scale_of_ids, merged_scale = 2.0, 2.0

    def embed(self, input_ids):
        return super().embed(input_ids) * self.scale_of_ids

    @torch.no_grad()
    def merge_adapter(self):
        self.embedding.weight.mul_(self.merged_scale)
        self.scale_of_ids = 1.0

    @torch.no_grad()
    def unmerge_adapter(self):
        self.embedding.weight.div_(self.merged_scale)
        self.scale_of_ids = 2.0


class OtherScaleMerged(Adapted):
    merged_scale = 3.0


class PositionsRestartInStaticCache(transformers.LlamaForCausalLM):
    def forward(self, input_ids=None, past_key_values=None, position_ids=None, **more):
        if isinstance(past_key_values, transformers.StaticCache):
            position_ids = torch.arange(input_ids.shape[1])[None]
        return super().forward(input_ids, past_key_values=past_key_values, position_ids=position_ids, **more)


class Cache(list):
    """Keys and values of each layer, and the number of tokens."""

    def __init__(self, pairs, count):
        super().__init__(pairs)
        self.count = count

    def __deepcopy__(self, memo):
        return type(self)([(k.clone(), v.clone()) for k, v in self], self.count.clone())

    def each(self, change):
        self[:] = [(change(k), change(v)) for k, v in self]

    def crop(self, count):
        self.each(lambda x: x[:, :, :count])
        self.count += count

    def reorder_cache(self, order):
        self.each(lambda x: x[order])

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats):
        self.each(lambda x: x.repeat_interleave(repeats, dim=0))

    def reset(self):
        self.clear()
        self.count.zero_()


class WithCache(Placed):
    """Takes the positions of new tokens from its cache."""

    cache_type = Cache

    def forward(self, input_ids, *arguments, cache=None, use_cache=False, **named):
        cache = self.cache_type([], torch.tensor(0)) if cache is None else cache
        self.past = int(cache.count)
        output = super().forward(input_ids, *arguments, cache=cache or None, use_cache=True, **named)
        cache.count += input_ids.shape[1]
        output.cache = self.cache_type(output.cache, cache.count)
        return output

    def place(self, input_ids, past, keep, documents):
        return super().place(input_ids, self.past, keep, documents)


def with_cache(**methods):
    """Return a model whose cache has other methods."""
    cache_type = type("BrokenCache", (Cache,), methods)
    return type("WithBrokenCache", (WithCache,), {"cache_type": cache_type})


def keys_alone(cache, change):
    cache[:] = [(change(k), v) for k, v in cache]


CACHE_BUGS = {
    "copy": with_cache(__deepcopy__=lambda cache, memo: type(cache)(cache, cache.count)),
    "crop": with_cache(crop=lambda cache, count: cache.each(lambda x: x[:, :, :count])),
    "reorder_cache": with_cache(reorder_cache=lambda cache, order: keys_alone(cache, lambda x: x[order])),
    "batch_repeat_interleave": with_cache(
        batch_repeat_interleave=lambda cache, n: cache.each(lambda x: torch.cat([x] * n))
    ),
    "reset": with_cache(reset=lambda cache: cache.clear()),
}


class IntegerMaskIgnored(Encoder):
    def visible(self, T, past, keep, documents):
        return super().visible(T, past, keep if keep is None or keep.dtype == torch.bool else None, documents)


class WholeMasks(GPT):
    """Takes masks (B, 1, T, S) as well, boolean or additive."""

    def positions(self, input_ids, past, keep, documents):
        return super().positions(input_ids, past, None if self.is_whole(keep) else keep, documents)

    def visible(self, T, past, keep, documents):
        if not self.is_whole(keep):
            return super().visible(T, past, keep, documents)
        return self.shown(keep if keep.dtype == torch.bool else keep == 0, past)

    def is_whole(self, keep):
        return keep is not None and keep.ndim == 4

    def shown(self, visible, past):
        return visible


class LastRowOfMask(WholeMasks):
    """In a chunk, every token gets the mask of the last one."""

    def shown(self, visible, past):
        return visible[:, :, -1:] if past else visible


class PromptPaddingNotCounted(GPT):
    """After a prompt, only padding on its left is subtracted from the positions."""

    def positions(self, input_ids, past, keep, documents):
        if keep is None or not past:
            return super().positions(input_ids, past, keep, documents)
        n_left = (keep.long().cumsum(dim=1) == 0).sum(dim=1, keepdim=True)
        return super().positions(input_ids, past, None, None) - n_left


class PositionsCountedWithCache(WithArguments):
    """With a cache, position_ids are ignored."""

    def positions(self, input_ids, past, keep, documents):
        self.given = None if past else self.given
        return super().positions(input_ids, past, keep, documents)


class FirstTokenCountedTwice(WithArguments):
    """Positions that are counted from the mask start with 0, 0, 1."""

    def positions(self, input_ids, past, keep, documents):
        counted = super().positions(input_ids, past, keep, documents)
        return counted if keep is None or self.given is not None else (counted - 1).clamp(min=0)


def positions_passed(build):
    """Return a spec whose `masked` passes position_ids."""

    def masked(model, inputs, keep):
        positions = (keep.long().cumsum(dim=1) - 1).clamp(min=0)
        return model(inputs, attention_mask=keep, position_ids=positions)

    return spec_of(build, masked=masked, decode=None)


class MaskDroppedByTheCompiler(Encoder):
    """Under the compiler, a padding mask is assumed to hide nothing."""

    def visible(self, T, past, keep, documents):
        return super().visible(T, past, None if torch.compiler.is_compiling() else keep, documents)


BUGS = {
    "compiled": (MaskDroppedByTheCompiler, Encoder),
    "cache_operations": (CACHE_BUGS["reorder_cache"], WithCache),
    "mask_forms": (IntegerMaskIgnored, Encoder),
    "mask_without_positions": (
        partial(positions_passed, FirstTokenCountedTwice),
        partial(positions_passed, WithArguments),
    ),
    "shifted_positions": (PositionsCountedWithCache, WithArguments),
    "static_cache": (PositionsRestartInStaticCache, transformers.LlamaForCausalLM),
    "hidden_tokens": (PrefixTooLong, Prefix),
    "batch": (RowsMixed, GPT),
    "documents": (DocumentsIgnored, GPT),
    "later_tokens": (NextTokenRead, GPT),
    "labels": (LossDetached, GPT),
    "cache_parts": (ChunksRestart, GPT),
    "mask_of_ones": (MaskReplacesDocuments, GPT),
    "padded_rows": (PaddingRead, GPT),
    "padded_prompt": (PromptPaddingNotCounted, GPT),
    "positions": (PositionsMisused, WithArguments),
    "embeddings": (VectorsNotScaled, WithArguments),
    "extra_outputs": (OtherAttentionForStates, WithArguments),
    "logits_to_keep": (FirstLogitsKept, WithArguments),
    "attention_backend": (OtherScaleInMath, Fused),
    "train_mode": (ScaledInTraining, GPT),
    "history": (FirstMaskKept, GPT),
    "copies": (TableNotSaved, GPT),
    "recomputation": (FactorForgotten, Checkpointed),
    "empty_row": (EmptyRowScales, GPT),
    "half_precision": (LowestNumber, GPT),
    "merged": (OtherScaleMerged, Adapted),
    "turns": (position_is_counted_by_the_model, placed),
}
# Variations that show their bug only together with another one: the other one, and the one that reports.
TOGETHER = {
    "compiled": ("padded_rows", "compiled"),
    "mask_of_ones": ("documents", "mask_of_ones"),
    "half_precision": ("padded_rows", "half_precision"),
    "mask_forms": ("padded_rows", "mask_forms"),
    "shifted_positions": ("cache_parts", "shifted_positions"),
}


def explored(build, names):
    return Explorer(Subject(spec_for(build), CPU), names, count=0).explore()


def spec_for(build):
    if not isinstance(build, type):
        return build()
    if issubclass(build, Prefix):
        return prefix_spec(build)
    if issubclass(build, Encoder):
        return encoder(build)
    return llama_spec(build) if issubclass(build, transformers.PreTrainedModel) else spec_of(build)


def llama_spec(build):
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    return ModelSpec.of(lambda: build(config))


def test_every_variation_has_a_bug():
    assert set(BUGS) == set(known_variations())


@pytest.mark.parametrize("name", BUGS)
def test_variation_finds_its_bug(name):
    bug, healthy = BUGS[name]
    other, reporter = TOGETHER.get(name, (name, name))
    names = sorted({name, other})
    findings = explored(bug, names).findings
    assert {each.variation for each in findings} == {reporter}
    # A bug of `history` may need no earlier call: the call itself changes the next one.
    assert {each.composition.names for each in findings} <= {frozenset(names), frozenset()}
    assert not explored(healthy, names).findings


class StaysScaled(GPT):
    """After a call of more than 40 positions, the embeddings stay scaled."""

    factor = 1.0

    def embed(self, input_ids):
        if input_ids.shape[1] > 40:
            self.factor = 0.5
        return super().embed(input_ids) * self.factor


class GrowingTable(GPT):
    """A table for longer sequences is computed in the dtype of the weights. The first one is in float32."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", 100 * self.angles(32, torch.float32).sin())

    def angles(self, length, dtype):
        return torch.arange(length, dtype=dtype)[:, None] / torch.arange(1, 33, dtype=dtype) ** 1.5

    def embed(self, input_ids):
        x = super().embed(input_ids)
        if x.shape[1] > len(self.table):
            self.table = 100 * self.angles(x.shape[1], x.dtype).sin()
        return x + self.table[: x.shape[1]]


def test_table_may_be_computed_again_in_another_dtype():
    assert not explored(GrowingTable, ["history"]).findings


def test_call_after_a_long_call_is_compared():
    [finding] = explored(StaysScaled, ["history"]).findings
    assert finding.variation == "history"
    assert finding.composition.values["history"] == [["plain", 80]]


class SingleTokenScaled(GPT):
    """A call of one token takes the branch of decoding."""

    def embed(self, input_ids):
        return super().embed(input_ids) * (2 if input_ids.shape[1] == 1 else 1)


def test_plain_call_of_one_token_is_compared():
    [finding] = explored(SingleTokenScaled, ["later_tokens"]).findings
    assert finding.variation == "later_tokens"
    assert finding.composition.values == {"later_tokens": ("append", 23)}


class AllLogitsKept(WithArguments):
    """logits_to_keep has no effect."""

    def kept(self, logits, count):
        return logits


def test_number_of_logits_without_an_effect_is_found():
    assert not outputs_agree(AllLogitsKept, {"logits_to_keep": 2})
    assert outputs_agree(WithArguments, {"logits_to_keep": 2})
    assert outputs_agree(WithArguments, {"logits_to_keep": 20})


class ChunksOfTwoAndMore(GPT):
    """Only single tokens read the cache."""

    def visible(self, T, past, keep, documents):
        visible = super().visible(T, past, keep, documents)
        return visible & (torch.arange(visible.shape[-1]) >= past) if past and T > 1 else visible


class NoChunks(GPT):
    """No call reads the cache."""

    def visible(self, T, past, keep, documents):
        visible = super().visible(T, past, keep, documents)
        return visible & (torch.arange(visible.shape[-1]) >= past) if past else visible


@pytest.mark.parametrize("build, single", [(ChunksOfTwoAndMore, False), (NoChunks, True)])
def test_single_tokens_are_the_simplest_parts(build, single):
    [finding] = explored(build, ["cache_parts"]).findings
    assert (finding.composition.values == {"cache_parts": [1]}) == single


def outputs_agree(build, values):
    [output, *_] = compare(lambda: spec_for(build), values, length=9)
    return not output.is_real


@pytest.mark.parametrize("operation", CACHE_BUGS)
def test_cache_operation_finds_its_bug(operation):
    values = {"cache_operations": [operation]}
    assert not outputs_agree(CACHE_BUGS[operation], values)
    assert outputs_agree(WithCache, values)


@pytest.mark.parametrize("operation", CACHE_BUGS)
def test_llama_passes_cache_operation(operation):
    assert outputs_agree(
        transformers.LlamaForCausalLM, {"cache_operations": [operation], "cache_parts": [3, 2]}
    )


@pytest.mark.parametrize("form", ["4d bool", "4d additive"])
def test_whole_mask_finds_a_bug_of_chunks(form):
    values = {"mask_forms": form, "cache_parts": [3, 2]}
    assert not outputs_agree(LastRowOfMask, values)
    assert outputs_agree(WholeMasks, values)


def test_mask_of_an_earlier_call_is_found_in_later_chunks():
    values = {"history": [["padded", 8]], "cache_parts": [3, 2]}
    assert not outputs_agree(PaddingKept, values)
    assert outputs_agree(GPT, values)


@pytest.mark.parametrize("padding", [{"padded_rows": {"side": "left", "amount": 3}}, {"padded_prompt": 3}])
def test_padded_prompt_continues_with_cache(padding):
    values = {**padding, "cache_parts": [3, 2], "batch": [5]}
    assert outputs_agree(GPT, values)
    assert outputs_agree(transformers.LlamaForCausalLM, values)
    assert outputs_agree(PromptPaddingNotCounted, values) == ("padded_rows" in padding)


class MergedByEval(GPT):
    """eval() merges an adapter into the embedding. The state_dict contains the merged weight."""

    tied = False
    saves_state = False

    def __init__(self):
        super().__init__()
        self.adapter = nn.Parameter(torch.randn_like(self.embedding.weight))
        self.register_buffer("is_merged", torch.tensor(False), persistent=self.saves_state)

    def train(self, mode=True):
        super().train(mode)
        if bool(self.is_merged) == mode:
            self.embedding.weight.data += -self.adapter.data if mode else self.adapter.data
            self.is_merged.fill_(not mode)
        return self

    def embed(self, input_ids):
        return super().embed(input_ids) + (0 if self.is_merged else self.adapter[input_ids])


class MergedByEvalSaved(MergedByEval):
    saves_state = True


@pytest.mark.parametrize("build, status", [(MergedByEval, "warned"), (MergedByEvalSaved, "passed")])
def test_state_dict_of_eval_mode_is_loaded_into_train_mode(build, status, only_variations):
    """It is only a warning: loralib merges in eval mode too, and is saved in train mode."""
    assert outputs_agree(build, {"copies": "state_dict"})
    assert outputs_agree(build, {"copies": "train mode"}) == (status == "passed")
    only_variations({"copies", "batch", "later_tokens"})
    [result] = check_model(spec_of(build), checks=["copies"])
    assert result.status == status


@pytest.mark.parametrize("precision", ["bfloat16", "float16", "autocast"])
def test_infinite_mask_is_found_in_each_half_precision(precision):
    values = {"half_precision": precision, "padded_rows": {"side": "left", "amount": 3}}
    assert not outputs_agree(LowestNumber, values)
    assert outputs_agree(GPT, values)


class Decaying(nn.Module):
    """Recurrent model: a state that decays and sums the embeddings of real tokens."""

    skips_padding = True

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(61, 16), nn.Linear(16, 61)

    def forward(self, input_ids, attention_mask=None, past_key_values=None, use_cache=False):
        x = self.embedding(input_ids)
        keep = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        keep = keep[:, -input_ids.shape[1] :, None].to(x.dtype)
        state = torch.zeros_like(x[:, 0]) if past_key_values is None else past_key_values
        states = []
        for t in range(x.shape[1]):
            decay = 0.5 ** keep[:, t] if self.skips_padding else 0.5
            state = decay * state + keep[:, t] * x[:, t]
            states.append(state)
        logits = self.head(torch.stack(states, dim=1).sin())
        return SimpleNamespace(logits=logits, past_key_values=state if use_cache else None)


class DecaysOverPadding(Decaying):
    skips_padding = False


@pytest.mark.parametrize(
    "build, declared, status",
    [
        (Decaying, {}, "passed"),
        (DecaysOverPadding, {}, "warned"),
        (DecaysOverPadding, {"padding_sides": ("right",)}, "failed"),
        (DecaysOverPadding, {"padding_sides": ("left",)}, "not applicable"),
    ],
)
def test_recurrent_state_skips_the_padding_of_a_prompt(build, declared, status, only_variations):
    only_variations({"padded_prompt", "cache_parts", "later_tokens"})
    [result] = check_model(ModelSpec.of(build, **declared), checks=["padded_prompt"])
    assert result.status == status, result


# Every way that puts tokens after others shows that they are read, and every call shows traces of it. A mask
# of ones is also passed in other forms, and a copy of a cache is used in turns with its original.
SHOWN_BY_OTHERS = {"later_tokens", "history", "mask_of_ones", "turns"}


@pytest.mark.slow
@pytest.mark.parametrize("name", BUGS)
def test_bug_is_missed_without_its_variation(name):
    others = [each for each in known_variations("fast") if each != name]
    findings = explored(BUGS[name][0], others).findings
    assert bool(findings) == (name in SHOWN_BY_OTHERS)


@pytest.mark.parametrize("pad_token_id", [1, 4])
def test_positions_that_start_after_the_padding_id(pad_token_id):
    """RoBERTa counts from padding_idx + 1, and expects position_ids that do the same."""
    config = transformers.RobertaConfig(
        vocab_size=37,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        is_decoder=True,
        pad_token_id=pad_token_id,
    )
    spec = ModelSpec.of(partial(transformers.RobertaForCausalLM, config), max_length=40)
    [result] = check_model(spec, checks=["positions"])
    assert result.status == "passed"


class FirstTokenNotCached(GPT):
    """A first call of one token returns an empty cache (flash-linear-attention#1246)."""

    def attend(self, layer, x, positions, visible, cache):
        y, (k, v) = super().attend(layer, x, positions, visible, cache)
        if cache is None and x.shape[1] == 1:
            k, v = torch.zeros_like(k), torch.zeros_like(v)
        return y, (k, v)


@pytest.mark.parametrize("seed", [5, 12])
def test_single_tokens_from_the_start_are_always_decoded(seed):
    """With these seeds, no drawn composition has a first part of one token."""
    [result] = check_model(spec_of(FirstTokenNotCached), checks=["cache_decoding"], seed=seed)
    assert result.status == "failed"
