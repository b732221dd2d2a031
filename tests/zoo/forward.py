"""Bugs of the forward pass: masks, windows, padding, packing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import create_simple_rack
from stackwise.model.attention import Attention
from stackwise.subject.spec import ModelSpec
from stackwise.support.random_state import seeded
from tests.zoo.cache import Fused, fused
from tests.zoo.gpt import GPT, Encoder, Placed, Windowed, encoder, gpt, placed, spec_of, windowed
from tests.zoo.mutant import mutant


@torch.no_grad()
def logits(spec: ModelSpec) -> Tensor:
    """In eval mode, of one batch."""
    return spec.logits(spec.create().eval(), spec.batch(2, 12))


@torch.no_grad()
def row_alone(spec: ModelSpec) -> bool:
    """Whether a row computes alone what it computes beside another."""
    model, inputs = spec.create().eval(), spec.batch(2, 12)
    return torch.allclose(spec.logits(model, inputs)[:1], spec.logits(model, inputs[:1]), atol=1e-4)


@torch.no_grad()
def twice(spec: ModelSpec) -> bool:
    """Whether two calls in eval mode agree."""
    model, inputs = spec.create().eval(), spec.batch(2, 12)
    return torch.equal(spec.logits(model, inputs), spec.logits(model, inputs))


@torch.no_grad()
def padded_left(spec: ModelSpec) -> Tensor:
    """The last output of a row behind four paddings."""
    inputs, keep = spec.batch(1, 12), torch.arange(12)[None] >= 4
    return spec.masked(spec.create().eval(), inputs, keep).logits[:, -1]


@torch.no_grad()
def padded_right(spec: ModelSpec) -> Tensor:
    """The first output of a row before four paddings."""
    inputs, keep = spec.batch(1, 12), torch.arange(12)[None] < 8
    return spec.masked(spec.create().eval(), inputs, keep).logits[:, 0]


@torch.no_grad()
def padded_finite(spec: ModelSpec) -> bool:
    """Whether the real outputs behind four paddings are finite, in float16."""
    inputs, keep = spec.batch(2, 12), torch.arange(12).expand(2, 12) >= 4
    return bool(spec.masked(spec.create().eval().half(), inputs, keep).logits[keep].isfinite().all())


def empty_row_gradient(spec: ModelSpec) -> bool:
    """Whether the gradients of a full row are finite beside an empty one."""
    model, inputs = spec.create().eval(), spec.batch(2, 12)
    keep = torch.ones(2, 12, dtype=torch.bool)
    keep[1] = False
    spec.masked(model, inputs, keep).logits[0].sum().backward()
    return all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


@torch.no_grad()
def packed(spec: ModelSpec) -> Tensor:
    """Of two documents in a row."""
    documents = (torch.arange(12)[None] >= 5).long()
    return spec.packed(spec.create().eval(), spec.batch(1, 12), documents).logits


# Who sees whom


@mutant("21", twin=gpt, family="causality", source="classic", observable=logits)
def mask_one_too_wide():
    """Each position sees the next token: tril(diagonal=1)."""

    class Mutant(GPT):
        def visible(self, T, past, keep, documents):
            query, key = torch.arange(past, past + T)[:, None], torch.arange(past + T)[None]
            return (key <= query + 1)[None, None]

    return spec_of(Mutant)


@mutant("22", twin=gpt, family="causality", source="ShiYu-OSS/Kronos#199", observable=logits)
def causal_in_training_only():
    """is_causal=self.training: in eval mode every position sees the future."""

    class Mutant(GPT):
        def visible(self, T, past, keep, documents):
            visible = super().visible(T, past, keep, documents)
            return visible if self.training else torch.ones_like(visible)

    return spec_of(Mutant)


@mutant("44", twin=gpt, family="causality", source="classic", observable=logits)
def heads_by_view():
    """view() where transpose() is meant: heads mix positions."""

    class Mutant(GPT):
        def split(self, x):
            B, T, _ = x.shape
            return x.reshape(B, -1, T, self.head_dim)

        def merge(self, x):
            return x.reshape(x.shape[0], x.shape[2], -1)

    return spec_of(Mutant)


@mutant("mean-over-positions", twin=gpt, family="causality", source="classic", observable=logits)
def mean_over_positions():
    """The embeddings are centred over all positions, later ones included."""

    class Mutant(GPT):
        def embed(self, input_ids):
            x = super().embed(input_ids)
            return x - x.mean(dim=1, keepdim=True)

    return spec_of(Mutant)


@mutant("positions-from-the-end", twin=placed, family="causality", source="classic", observable=logits)
def positions_from_the_end():
    """Positions are counted from the last token."""

    class Mutant(Placed):
        def place(self, *arguments):
            positions = super().place(*arguments)
            return positions.amax(dim=1, keepdim=True) - positions

    return spec_of(Mutant, max_length=64)


@mutant("norm-over-positions", twin=gpt, family="causality", source="classic", observable=logits)
def norm_over_positions():
    """A norm takes its statistics over the positions instead of the channels."""

    class Mutant(GPT):
        def embed(self, input_ids):
            x = super().embed(input_ids)
            return F.layer_norm(x.transpose(1, 2), x.shape[1:2]).transpose(1, 2)

    return spec_of(Mutant)


@mutant("softmax-over-rows", twin=gpt, family="invariance", source="classic", observable=row_alone)
def softmax_over_rows():
    """The attention weights are normalised over the batch."""

    class Mutant(GPT):
        def softmax(self, scores):
            weights = scores.softmax(dim=-1)
            return weights / weights.sum(dim=0, keepdim=True).clamp(min=1e-9)

    return spec_of(Mutant)


@mutant(
    "42", twin=gpt, family="determinism", source="huggingface/pytorch-image-models#1978", observable=twice
)
def attention_dropout_in_eval():
    """dropout_p goes to attention whatever the mode is."""

    class Mutant(GPT):
        def softmax(self, scores):
            return F.dropout(super().softmax(scores), self.dropout, training=True)

    return spec_of(Mutant)


@mutant("T16", twin=fused, family="determinism", source="huggingface/transformers#33844", observable=twice)
def fused_dropout_in_eval():
    """The fused backend gets the dropout of training in eval mode too; the other one does not."""

    class Mutant(Fused):
        def fused(self, q, k, v, visible):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, dropout_p=self.dropout)

    return spec_of(Mutant)


# Windows


@mutant("25", twin=windowed, family="horizon", source="huggingface/transformers#39408", observable=logits)
def window_one_too_wide():
    """key >= query - window: a window of W sees W + 1 positions."""

    class Mutant(Windowed):
        def visible(self, T, past, keep, documents):
            query, key = torch.arange(past, past + T)[:, None], torch.arange(past + T)[None]
            return ((key <= query) & (key >= query - self.window))[None, None]

    return spec_of(Mutant)


@mutant("25", twin=windowed, family="horizon", source="huggingface/transformers#29623", observable=logits)
def window_one_too_narrow():
    """A window of W sees W - 1 positions."""

    class Mutant(Windowed):
        def visible(self, T, past, keep, documents):
            query, key = torch.arange(past, past + T)[:, None], torch.arange(past + T)[None]
            return ((key <= query) & (key > query - self.window + 1))[None, None]

    return spec_of(Mutant)


@mutant("26", twin=windowed, family="horizon", source="unslothai/unsloth#8253", observable=logits)
def window_never_reaches_attention():
    """The setting is there, but attention sees everything before."""

    class Mutant(Windowed):
        def visible(self, T, past, keep, documents):
            self.window, window = None, self.window
            visible = super().visible(T, past, keep, documents)
            self.window = window
            return visible

    return spec_of(Mutant)


@mutant("26", twin=windowed, family="horizon", source="unslothai/unsloth#8253", observable=logits)
def window_of_zero():
    """A window of 0 hides all but the position itself."""

    class Mutant(Windowed):
        def visible(self, T, past, keep, documents):
            return torch.arange(past, past + T)[:, None] == torch.arange(past + T)[None]

    return spec_of(Mutant)


@mutant("27", twin=encoder, family="horizon", source="huggingface/transformers#40700", observable=logits)
def window_lopsided():
    """A bidirectional window reaches W - 1 before and W // 2 after, instead of W // 2 on both sides."""

    class Mutant(Encoder):
        before = 4

    return encoder(Mutant)


# Feed-forward networks, positions and modes


class TwoMatrices(GPT):
    """With a feed-forward network without a gate."""

    def layer(self) -> nn.Module:
        layer = super().layer()
        del layer["gate"]
        return layer

    def mlp(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer["down"](F.silu(layer["up"](x)))


def two_matrices(build: type[GPT] = TwoMatrices) -> ModelSpec:
    return spec_of(build)


@mutant("activation", twin=two_matrices, family="feed_forward", source="classic", observable=logits)
def activation_after_both_matrices():
    """The activation follows the second matrix of the feed-forward network."""

    class Mutant(TwoMatrices):
        def mlp(self, layer, x):
            return F.silu(layer["down"](layer["up"](x)))

    return two_matrices(Mutant)


class Learned(Placed):
    """With the name that GPT-2 gives to the table of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.wpe = self.places
        del self.places

    def embed(self, input_ids: Tensor) -> Tensor:
        return self.embedding(input_ids) + self.wpe(self.at)


def learned(build: type[GPT] = Learned) -> ModelSpec:
    return spec_of(build, max_length=64)


@mutant("one-position", twin=learned, family="position", source="pytorch/examples#1178", observable=logits)
def one_row_of_positions_for_all_tokens():
    """All tokens get the first row of the table of positions."""

    class Mutant(Learned):
        def place(self, *arguments):
            return torch.zeros_like(super().place(*arguments))

    return learned(Mutant)


@mutant(
    "modes",
    twin=gpt,
    family="modes",
    source="NVIDIA/Megatron-LM#411",
    observable=lambda spec: train_after_eval(spec),
)
def dropout_lost_after_evaluation():
    """A call in eval mode sets the dropout rate to 0."""

    class Mutant(GPT):
        def drop(self, x):
            if not self.training:
                self.dropout = 0.0
            return super().drop(x)

    return spec_of(Mutant)


def train_after_eval(spec: ModelSpec) -> Tensor:
    """Logits in train mode, after a call in eval mode."""
    model, inputs = spec.create(), spec.batch(2, 12)
    spec.logits(model.eval(), inputs)
    with seeded(0):
        return spec.logits(model.train(), inputs).detach()


# Padding


@mutant("31", twin=gpt, family="padding", source="classic", observable=padded_left)
def padding_mask_ignored():
    """Attention never gets the padding mask."""

    class Mutant(GPT):
        def visible(self, T, past, keep, documents):
            return super().visible(T, past, None, documents)

    return spec_of(Mutant)


@mutant("discarded", twin=gpt, family="sensitivity", source="classic", observable=padded_left)
def mask_in_a_copy_that_is_discarded():
    """The padding mask is combined with the causal mask in a new tensor that nothing stores."""

    class Mutant(GPT):
        def visible(self, T, past, keep, documents):
            visible = super().visible(T, past, None, documents)
            if keep is not None:
                visible.logical_and(keep[:, None, None])
            return visible

    return spec_of(Mutant)


def weights_dropped() -> ModelSpec:
    """Applies a dropout module to the attention weights."""
    return spec_of(WeightsDropped)


class WeightsDropped(GPT):
    """The dropout of attention weights is a module of each layer."""

    def layer(self):
        layer = super().layer()
        layer["weights_dropout"] = nn.Dropout(0.2)
        return layer

    def attend(self, layer, x, positions, visible, cache):
        self.drop_weights = self.dropout_of(layer)
        return super().attend(layer, x, positions, visible, cache)

    def dropout_of(self, layer):
        return layer["weights_dropout"]

    def softmax(self, scores):
        return self.drop_weights(super().softmax(scores))


@torch.no_grad()
def draws_for_weights(spec: ModelSpec) -> bool:
    """Return True if two calls in train mode differ without the dropout of the residual stream."""
    model, inputs = spec.create().train(), spec.batch(2, 12)
    model.dropout = 0.0
    return not torch.equal(spec.logits(model, inputs), spec.logits(model, inputs))


@mutant(
    "dropout",
    twin=weights_dropped,
    family="dropout",
    source="zhouhaoyi/Informer2020#97",
    observable=draws_for_weights,
)
def dropout_of_weights_never_applied():
    """The dropout module of the attention weights is created, and never called."""

    class Mutant(WeightsDropped):
        def dropout_of(self, layer):
            return nn.Identity()

    return spec_of(Mutant)


@mutant("31", twin=encoder, family="padding", source="classic", observable=padded_right)
def padding_mask_inverted():
    """True at padding is taken for true at tokens."""

    class Mutant(Encoder):
        def visible(self, T, past, keep, documents):
            return super().visible(T, past, None if keep is None else ~keep.bool(), documents)

    return encoder(Mutant)


@mutant("padded-positions", twin=placed, family="padding", source="classic", observable=padded_left)
def padding_is_counted():
    """Positions are counted from the first column, padded or not."""

    class Mutant(Placed):
        def place(self, input_ids, past, keep, documents):
            return super().place(input_ids, past, None, documents)

    return spec_of(Mutant, max_length=64)


@mutant("padded-mean", twin=encoder, family="padding", source="classic", observable=padded_right)
def padding_in_mean():
    """What is subtracted from each position is the mean over the row, padding included."""

    class Mutant(Encoder):
        def embed(self, input_ids):
            x = super().embed(input_ids)
            return x - x.mean(dim=1, keepdim=True)

    return encoder(Mutant)


class Additive(GPT):
    """Masks are added to the scores: the lowest number of the dtype where something is hidden."""

    def forward(self, input_ids, attention_mask=None, **rest):
        self.keep = attention_mask
        return super().forward(input_ids, attention_mask=attention_mask, **rest)

    def visible(self, T, past, keep, documents):
        return super().visible(T, past, None, documents)

    def softmax(self, scores):
        future = scores.isneginf()
        hidden = [future]
        if self.keep is not None:
            keep = self.keep.bool()[:, None]
            # Of padding, both what it says and what it asks.
            hidden += [~keep[:, :, None], ~keep[..., -scores.shape[2] :, None]]
        lowest = torch.finfo(scores.dtype).min
        planes = [torch.zeros_like(scores).masked_fill(plane, lowest) for plane in hidden]
        return (scores.masked_fill(future, 0.0) + self.together(planes)).softmax(dim=-1)

    def together(self, planes):
        return torch.stack(planes).amin(dim=0)


def additive() -> ModelSpec:
    """The clean twin with masks that are added."""
    return spec_of(Additive)


@mutant(
    "29", twin=additive, family="padding", source="huggingface/transformers#17306", observable=padded_finite
)
def masks_that_add_up_to_infinity():
    """Several planes of the lowest number are added: -inf, and NaN where a query sees nothing."""

    class Mutant(Additive):
        def together(self, planes):
            return torch.stack(planes).sum(dim=0)

    return spec_of(Mutant)


def padded_on_the_right() -> ModelSpec:
    """The clean twin that is never padded on the left."""
    return spec_of(padding_sides=("right",))


@mutant(
    "30",
    twin=padded_on_the_right,
    family="padding",
    source="pytorch/pytorch#131060",
    observable=empty_row_gradient,
)
def empty_row_poisons_gradients():
    """A padded query does not see itself: beside an empty row, every gradient is NaN."""

    class Mutant(GPT):
        def visible(self, T, past, keep, documents):
            visible = super().visible(T, past, None, documents)
            return visible if keep is None else visible & keep.bool()[:, None, None]

    return spec_of(Mutant, padding_sides=("right",))


@mutant("30", twin=gpt, family="padding", source="pytorch/pytorch#131060", observable=padded_finite)
def padded_query_sees_nothing():
    """A query padded on the left sees nothing: its NaN reaches real positions in the next layer."""

    class Mutant(GPT):
        def visible(self, T, past, keep, documents):
            visible = super().visible(T, past, None, documents)
            return visible if keep is None else visible & keep.bool()[:, None, None]

    return spec_of(Mutant)


# Packing


@mutant("33", twin=placed, family="packing", source="hiyouga/LLaMA-Factory#7318", observable=packed)
def packed_positions_go_on():
    """The positions of a packed row do not start again at each document."""

    class Mutant(Placed):
        def place(self, input_ids, past, keep, documents):
            return super().place(input_ids, past, keep, None)

    return spec_of(Mutant, max_length=64)


@mutant("33", twin=gpt, family="packing", source="hiyouga/LLaMA-Factory#7318", observable=packed)
def packed_documents_see_each_other():
    """Positions start again, but attention crosses the borders of documents."""

    class Mutant(GPT):
        def visible(self, T, past, keep, documents):
            return super().visible(T, past, keep, None)

    return spec_of(Mutant)


# On our own Rack


def _rack_spec(change=None, **declared):
    def build():
        made = create_simple_rack(2, 2, 32, 48, 4, vocab_size=61, n_kv_heads=2, sliding_window=5)
        if change is not None:
            for module in made.modules():
                if isinstance(module, Attention):
                    change(module)
        return made

    return ModelSpec.of(build, name="Rack", **declared)


def rack() -> ModelSpec:
    """The clean twin: a Rack with a window."""
    return _rack_spec()


@mutant("22", twin=rack, family="causality", source="ShiYu-OSS/Kronos#199", observable=logits)
def rack_causal_in_training_only():
    """A Rack whose attention is causal while it trains."""

    def change(attention):
        attention.register_forward_pre_hook(lambda module, _: setattr(module, "causal", module.training))

    return _rack_spec(change, causal=True)


@mutant("26", twin=rack, family="horizon", source="unslothai/unsloth#8253", observable=logits)
def rack_window_never_reaches_attention():
    """A Rack that says a window, and attention that does not know it."""
    return _rack_spec(lambda attention: setattr(attention, "sliding_window", None), window=5)


@mutant("25", twin=rack, family="horizon", source="vllm-project/vllm#3385", observable=logits)
def rack_window_one_too_wide():
    """In one Block of a Rack the window is one wider than in the others."""
    changed = []

    def change(attention):
        changed.append(attention)
        attention.sliding_window += len(changed) % 4 == 3

    return _rack_spec(change, window=5)


# On transformers


def _llama_spec(change=None, **sizes):
    def build():
        from transformers import MistralConfig, MistralForCausalLM

        config = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
        made = MistralForCausalLM(MistralConfig(**config | {"sliding_window": None} | sizes))
        if change is not None:
            change(made)
        return made

    return build


def llama() -> ModelSpec:
    """The clean twin: a Llama without a window (a Mistral) of transformers."""
    return ModelSpec.of(_llama_spec(), name="llama")


def mistral() -> ModelSpec:
    """The clean twin: a Mistral of transformers, with its window."""
    return ModelSpec.of(_llama_spec(sliding_window=5), name="mistral")


@mutant("31", twin=llama, family=("padding", "sensitivity"), source="classic", observable=padded_left)
def llama_padding_mask_ignored():
    """A Llama whose attention mask is lost on the way."""

    def change(model):
        inner = model.model.forward
        model.model.forward = lambda *args, attention_mask=None, **rest: inner(*args, **rest)

    return ModelSpec.of(_llama_spec(change), name="llama")


@mutant("22", twin=llama, family="causality", source="ShiYu-OSS/Kronos#199", observable=logits)
def llama_causal_in_training_only():
    """A Llama whose attention is causal while it trains."""

    def change(model):
        for layer in model.model.layers:
            layer.self_attn.register_forward_pre_hook(
                lambda module, _: setattr(module, "is_causal", module.training)
            )

    return ModelSpec.of(_llama_spec(change), name="llama")


@mutant("25", twin=mistral, family="horizon", source="huggingface/transformers#39408", observable=logits)
def mistral_window_one_too_wide():
    """A Mistral whose mask is made for a window one wider than its setting."""
    return ModelSpec.of(_llama_spec(sliding_window=6), name="mistral", window=5)


@mutant("26", twin=mistral, family="horizon", source="unslothai/unsloth#8253", observable=logits)
def mistral_window_never_reaches_attention():
    """A Mistral whose window is not in the mask that attention gets."""
    return ModelSpec.of(_llama_spec(), name="mistral", window=5)


class Tagger(Encoder):
    """A model that sees both sides, known by its signature alone."""

    before, after = 12, 12

    def forward(self, input_ids, attention_mask=None):
        return super().forward(input_ids, attention_mask=attention_mask)


def tagger(build: type[GPT] = Tagger) -> ModelSpec:
    """The clean twin."""
    return ModelSpec.of(build, causal=False)


@mutant("29", twin=tagger, family="padding", source="classic", observable=lambda spec: beside_padding(spec))
def mask_that_an_encoder_ignores():
    """An encoder takes attention_mask, and hands it on to no layer."""

    class Mutant(Tagger):
        def forward(self, input_ids, attention_mask=None):
            return super().forward(input_ids)

    return tagger(Mutant)


@torch.no_grad()
def beside_padding(spec: ModelSpec) -> bool:
    """Whether the real outputs before four paddings are the same with other tokens in these."""
    model, inputs, keep = spec.create().eval(), spec.batch(1, 12), torch.arange(12)[None] < 8
    other = torch.where(keep, inputs, (inputs + 1) % spec.width)
    one, two = (model(ids, attention_mask=keep.long()).logits[keep] for ids in (inputs, other))
    return torch.equal(one, two)
