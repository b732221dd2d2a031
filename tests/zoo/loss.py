"""Bugs of a model's own loss, and of routers' losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from stackwise.subject.spec import ModelSpec
from tests.zoo.gpt import GPT, gpt, spec_of
from tests.zoo.mutant import mutant


def _labelled(spec: ModelSpec) -> tuple[Tensor, Tensor]:
    """A batch and its labels: of two rows, one half ignored."""
    inputs = spec.batch(2, 12)
    labels = spec.batch(2, 12, seed=1)
    labels[1, 6:] = -100
    labels[0, 3] = 0
    return inputs, labels


def loss(spec: ModelSpec) -> Tensor:
    """In eval mode."""
    with torch.no_grad():
        return spec.labelled_loss(spec.create().eval(), *_labelled(spec))


def empty_gradient(spec: ModelSpec) -> int:
    """How many parameters turn to NaN after a batch without targets."""
    model = spec.create().eval()
    inputs = spec.batch(2, 12)
    spec.labelled_loss(model, inputs, torch.full_like(inputs, -100)).backward()
    return sum(bool(p.grad.isnan().any()) for p in model.parameters() if p.grad is not None)


def loss_beside_empty_row(spec: ModelSpec) -> Tensor:
    """Where one of two rows has no targets."""
    inputs = spec.batch(2, 12)
    labels = inputs.clone()
    labels[1] = -100
    with torch.no_grad():
        return spec.labelled_loss(spec.create().eval(), inputs, labels)


def tiny_llama(loss_function=None) -> ModelSpec:
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}

    def build():
        config = LlamaConfig(
            **sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64
        )
        model = LlamaForCausalLM(config)
        if loss_function is not None:
            model.loss_function = loss_function
        return model

    return ModelSpec.of(build, name="llama")


def tiny_gpt2(loss_function=None) -> ModelSpec:
    def build():
        config = GPT2Config(
            vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0
        )
        model = GPT2LMHeadModel(config)
        if loss_function is not None:
            model.loss_function = loss_function
        return model

    return ModelSpec.of(build, name="gpt2")


def llama():
    """The clean twin, and its own reference."""
    spec = tiny_llama()
    return ModelSpec.of(spec, reference=spec.build)


def gpt2_with_loss():
    """The clean twin."""
    return tiny_gpt2()


@mutant("60", twin=gpt, family="loss", source="huggingface/transformers#47394", observable=loss)
def labels_shifted_twice():
    """The data shifts the labels, and the loss does again."""

    class Mutant(GPT):
        def loss(self, logits, labels):
            return super().loss(logits, F.pad(labels[:, 1:], (0, 1), value=-100))

    return spec_of(Mutant)


@mutant("60", twin=llama, family="loss", source="huggingface/transformers#37830", observable=loss)
def labels_shifted_twice_in_llama():
    """Labels that a collator has shifted are shifted again by the model."""

    def twice(logits, labels, vocab_size, **_):
        labels = F.pad(labels[:, 2:], (0, 2), value=-100)
        return F.cross_entropy(logits.float().view(-1, vocab_size), labels.flatten())

    return tiny_llama(twice)


@mutant("61", twin=gpt, family="loss", source="pytorch/pretraining#64", observable=loss)
def labels_not_shifted():
    """Each position is to predict the token that it has just read."""

    class Mutant(GPT):
        def loss(self, logits, labels):
            return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    return spec_of(Mutant)


@mutant("61", twin=gpt2_with_loss, family="loss", source="pretraining#64", observable=loss)
def labels_not_shifted_in_gpt2():
    """The same, in a model of another library."""

    def unshifted(logits, labels, vocab_size, **_):
        return F.cross_entropy(logits.float().view(-1, vocab_size), labels.flatten())

    return tiny_gpt2(unshifted)


@mutant("62", twin=gpt, family="loss", source="pytorch/pytorch#116349", observable=empty_gradient)
def nothing_over_nothing():
    """A batch without targets divides 0 by 0, and every weight turns to NaN."""

    class Mutant(GPT):
        def loss(self, logits, labels):
            targets = labels[:, 1:]
            scores = logits[:, :-1].float().log_softmax(dim=-1)
            nll = -scores.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
            return (nll * (targets != -100)).sum() / (targets != -100).sum()

    return spec_of(Mutant)


@mutant("62", twin=gpt, family="loss", source="allenai/OLMo-core#657", observable=loss_beside_empty_row)
def one_row_of_nothing():
    """Each row's mean is taken before the batch's: one row without targets is 0 / 0."""

    class Mutant(GPT):
        def loss(self, logits, labels):
            targets = labels[:, 1:]
            nll = F.cross_entropy(logits[:, :-1].transpose(1, 2).float(), targets, reduction="none")
            return (nll.sum(dim=1) / (targets != -100).sum(dim=1)).mean()

    return spec_of(Mutant)


@mutant("63", twin=gpt, family="loss", source="classic", observable=loss)
def softmax_before_cross_entropy():
    """The softmax is taken twice."""

    class Mutant(GPT):
        def loss(self, logits, labels):
            return super().loss(logits.softmax(dim=-1), labels)

    return spec_of(Mutant)


@mutant("63", twin=llama, family="loss", source="classic", observable=loss)
def likelihood_without_log():
    """nll_loss of a softmax, where log_softmax is meant."""

    def probabilities(logits, labels, vocab_size, **_):
        p = logits[:, :-1].float().softmax(dim=-1).reshape(-1, vocab_size)
        return F.nll_loss(p, labels[:, 1:].flatten())

    return tiny_llama(probabilities)


@mutant("64", twin=gpt, family="loss", source="huggingface/transformers#11780", observable=loss)
def column_times_row():
    """A loss (N, 1) times a mask (N,) is (N, N): every pair counts."""

    class Mutant(GPT):
        def loss(self, logits, labels):
            targets = labels[:, 1:].flatten()
            scores = logits[:, :-1].flatten(0, 1).float().log_softmax(dim=-1)
            nll, keep = -scores.gather(-1, targets.clamp(min=0)[:, None]), (targets != -100).float()
            return (nll * keep).mean() / keep.mean()

    return spec_of(Mutant)


@mutant("L1", twin=gpt2_with_loss, family="loss", source="classic", observable=loss)
def summed_loss():
    """A sum over targets: the gradient grows with the batch."""

    def summed(logits, labels, vocab_size, **_):
        scores = logits[:, :-1].float().reshape(-1, vocab_size)
        return F.cross_entropy(scores, labels[:, 1:].flatten(), reduction="sum")

    return tiny_gpt2(summed)


@mutant("L2", twin=gpt, family="loss", source="classic", observable=loss)
def mean_over_ignored():
    """The divisor counts ignored positions."""

    class Mutant(GPT):
        def loss(self, logits, labels):
            targets = labels[:, 1:]
            return F.cross_entropy(logits[:, :-1].transpose(1, 2).float(), targets, reduction="none").mean()

    return spec_of(Mutant)


@mutant("L3", twin=llama, family="loss", source="classic", observable=loss)
def loss_in_bfloat16():
    """The logits are narrowed before the cross-entropy."""

    def narrow(logits, labels, vocab_size, **_):
        scores = logits[:, :-1].bfloat16().reshape(-1, vocab_size)
        return F.cross_entropy(scores, labels[:, 1:].flatten()).float()

    return tiny_llama(narrow)


@mutant("L4", twin=gpt, family="loss", source="classic", observable=loss)
def smoothing_of_ignored():
    """The uniform part of label smoothing is averaged over every position."""

    class Mutant(GPT):
        def loss(self, logits, labels):
            uniform = -logits[:, :-1].float().log_softmax(dim=-1).mean(dim=-1)
            return 0.9 * super().loss(logits, labels) + 0.1 * uniform.mean()

    return spec_of(Mutant)


@mutant("L5", twin=gpt, family="loss", source="classic", observable=loss)
def token_0_ignored():
    """0 is taken for padding, and is a token."""

    class Mutant(GPT):
        def loss(self, logits, labels):
            return super().loss(logits, labels.masked_fill(labels == 0, -100))

    return spec_of(Mutant)


@mutant("L6", twin=gpt2_with_loss, family="loss", source="classic", observable=loss)
def logits_shifted():
    """The logits are shifted instead of the labels: the token before is predicted."""

    def backward(logits, labels, vocab_size, **_):
        scores = logits[:, 1:].float().reshape(-1, vocab_size)
        return F.cross_entropy(scores, labels[:, :-1].flatten())

    return tiny_gpt2(backward)


@mutant("L7", twin=gpt, family="loss", source="huggingface/transformers#34191", observable=loss)
def divided_by_labels_before_the_shift():
    """The number of targets is taken before the shift, and counts the first label of each row."""

    class Mutant(GPT):
        def loss(self, logits, labels):
            targets = labels[:, 1:].flatten()
            total = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets, reduction="sum")
            return total / (labels != -100).sum().clamp(min=1)

    return spec_of(Mutant)


@mutant("L8", twin=llama, family="loss", source="classic", observable=loss)
def padding_predicted():
    """Ignored labels are clamped to 0, and predicted."""

    def clamped(logits, labels, vocab_size, **_):
        scores = logits[:, :-1].float().reshape(-1, vocab_size)
        return F.cross_entropy(scores, labels[:, 1:].flatten().clamp(min=0))

    return tiny_llama(clamped)


@mutant("L9", twin=gpt, family="loss", source="classic", observable=loss)
def shift_under_a_z_loss():
    """Labels are not shifted, and a z-loss hides the number."""

    class Mutant(GPT):
        def loss(self, logits, labels):
            z = logits.float().logsumexp(dim=-1).square().mean()
            return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()) + 1e-3 * z

    return spec_of(Mutant)


class Mixtral(MixtralForCausalLM):
    """A router in every layer, whose loss is part of the model's own."""

    def forward(
        self, input_ids=None, attention_mask=None, labels=None, output_router_logits=None, **arguments
    ):
        return super().forward(
            input_ids,
            attention_mask=attention_mask,
            labels=labels,
            output_router_logits=output_router_logits,
            **arguments,
        )


def mixtral_of(kind: type[Mixtral] = Mixtral) -> ModelSpec:
    def build():
        return kind(
            MixtralConfig(
                vocab_size=61,
                hidden_size=32,
                intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=64,
                num_local_experts=4,
                num_experts_per_tok=2,
                output_router_logits=True,
                router_aux_loss_coef=0.01,
            )
        )

    return ModelSpec.of(build, name=kind.__name__)


def mixtral():
    """The clean twin."""
    return mixtral_of()


def _router_gradient(spec: ModelSpec, loss_of) -> Tensor:
    model = spec.create().eval()
    value = loss_of(model, spec.batch(2, 12))
    router = model.model.layers[0].mlp.gate.weight
    if not value.requires_grad:
        return torch.zeros_like(router)
    [gradient] = torch.autograd.grad(value, [router], allow_unused=True)
    return torch.zeros_like(router) if gradient is None else gradient


def router_gradient(spec: ModelSpec) -> Tensor:
    """Of the auxiliary loss."""
    return _router_gradient(spec, lambda model, ids: spec.auxiliary_loss(model, ids, None))


def router_gradient_of_the_loss(spec: ModelSpec) -> Tensor:
    """Of the loss that a training step minimises."""
    return _router_gradient(spec, lambda model, ids: spec.labelled_loss(model, ids, ids))


def padded_auxiliary_loss(spec: ModelSpec) -> Tensor:
    """With 4 of 12 positions padding."""
    keep = torch.arange(12).expand(2, 12) < 8
    with torch.no_grad():
        return spec.auxiliary_loss(spec.create().eval(), spec.batch(2, 12), keep)


@mutant(
    "46",
    twin=mixtral,
    family="auxiliary",
    source="huggingface/transformers#44242",
    observable=router_gradient_of_the_loss,
)
def auxiliary_loss_only_on_request():
    """The router's loss is added only where the caller asks for router logits, whatever the configuration."""

    class Mutant(Mixtral):
        def forward(
            self, input_ids=None, attention_mask=None, labels=None, output_router_logits=None, **arguments
        ):
            return super().forward(input_ids, attention_mask, labels, bool(output_router_logits), **arguments)

    return mixtral_of(Mutant)


@mutant("46", twin=mixtral, family="auxiliary", source="classic", observable=router_gradient)
def auxiliary_loss_cut_off():
    """The router's loss is made of detached logits, and trains nothing."""

    class Mutant(Mixtral):
        def forward(
            self, input_ids=None, attention_mask=None, labels=None, output_router_logits=None, **arguments
        ):
            output = super().forward(input_ids, attention_mask, labels, output_router_logits, **arguments)
            if output.aux_loss is not None:
                output.aux_loss = output.aux_loss.detach()
            return output

    return mixtral_of(Mutant)


@mutant(
    "48",
    twin=mixtral,
    family="auxiliary",
    source="huggingface/transformers#28505",
    observable=padded_auxiliary_loss,
)
def auxiliary_loss_counts_padding():
    """The router's loss sees no mask."""

    class Mutant(Mixtral):
        def forward(
            self, input_ids=None, attention_mask=None, labels=None, output_router_logits=None, **arguments
        ):
            output = super().forward(input_ids, attention_mask, labels, output_router_logits, **arguments)
            if output.router_logits is not None:
                output.aux_loss = load_balancing_loss_func(
                    output.router_logits, self.num_experts, self.num_experts_per_tok
                )
            return output

    return mixtral_of(Mutant)


@mutant("loss-mixed", twin=gpt, family="loss", source="classic", observable=loss)
def positions_and_vocabulary_mixed_up():
    """Logits are transposed as for cross_entropy's (B, V, T), and then flattened to (B T, V) all the same."""

    class Mutant(GPT):
        def loss(self, logits, labels):
            mixed = logits[:, :-1].transpose(1, 2).reshape(-1, logits.shape[-1])
            targets = labels[:, 1:].flatten()
            total = F.cross_entropy(mixed, targets, ignore_index=-100, reduction="sum")
            return total / (targets != -100).sum().clamp(min=1)

    return spec_of(Mutant)
