"""Bugs of calls that change more than their result: arguments, modes, settings, seeds, and memory.

Shapes: B batch, T positions, E experts.
"""

from __future__ import annotations

import gc
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stackwise.subject.spec import ModelSpec
from stackwise.support.random_state import seeded
from tests.zoo.gpt import GPT, gpt, spec_of
from tests.zoo.loop import Loop, loop, loop_spec_of
from tests.zoo.mutant import mutant

# Arguments


def arguments_after(spec: ModelSpec) -> list[Tensor]:
    """Return the ids, the mask and the labels after a call."""
    ids = spec.batch(2, 12)
    keep, labels = torch.ones_like(ids), ids.clone()
    keep[:, :2], labels[:, :4] = 0, -100
    spec.create()(ids, attention_mask=keep, labels=labels)
    return [ids, keep, labels]


@mutant("E1", twin=gpt, family="state", source="classic", observable=arguments_after)
def ids_replaced_in_place():
    """Rare ids become the unknown id in the caller's tensor."""

    class Mutant(GPT):
        def embed(self, input_ids):
            input_ids[input_ids > 50] = 0
            return super().embed(input_ids)

    return spec_of(Mutant)


@mutant("E1", twin=gpt, family="state", source="classic", observable=arguments_after)
def mask_changed_in_place():
    """The first position becomes visible in the caller's mask."""

    class Mutant(GPT):
        def visible(self, T, past, keep, documents):
            if keep is not None:
                keep[:, 0] = True
            return super().visible(T, past, keep, documents)

    return spec_of(Mutant)


@mutant("E1", twin=gpt, family="state", source="classic", observable=arguments_after)
def labels_changed_in_place():
    """Ignored labels become a valid id in the caller's tensor, before the ignored positions are masked."""

    class Mutant(GPT):
        def loss(self, logits, labels):
            ignored = labels == -100
            labels[ignored] = 0
            return super().loss(logits, labels.masked_fill(ignored, -100))

    return spec_of(Mutant)


class Embedded(GPT):
    """Takes vectors in place of ids."""

    scaled_in_place = False

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(self, input_ids=None, attention_mask=None, inputs_embeds=None, **arguments: Any) -> Any:
        self.vectors = inputs_embeds
        if input_ids is None:
            input_ids = torch.zeros(inputs_embeds.shape[:2], dtype=torch.long)
        return super().forward(input_ids, attention_mask, **arguments)

    def embed(self, input_ids: Tensor) -> Tensor:
        x, self.vectors = self.vectors, None
        if x is None:
            x = super().embed(input_ids)
        return x.mul_(4.0) if self.scaled_in_place else x * 4.0


def embedded(build: type[GPT] = Embedded) -> ModelSpec:
    return spec_of(build)


def vectors_after(spec: ModelSpec) -> Tensor:
    """Return inputs_embeds after a call."""
    model = spec.create()
    with torch.no_grad():
        vectors = model.get_input_embeddings()(spec.batch(2, 12))
        model(inputs_embeds=vectors)
    return vectors


@mutant("E1", twin=embedded, family="state", source="CTRL of transformers", observable=vectors_after)
def vectors_scaled_in_place():
    """inputs_embeds are multiplied in place."""

    class Mutant(Embedded):
        scaled_in_place = True

    return embedded(Mutant)


# Modes, settings, seeds


def after_call(spec: ModelSpec) -> list[Any]:
    """Return the modes of all modules, global settings, and the next random numbers, after a call."""
    model, ids = spec.create().eval(), spec.batch(2, 12)
    threads, flash = torch.get_num_threads(), torch.backends.cuda.flash_sdp_enabled()
    try:
        with seeded(5), torch.no_grad():
            model(ids)
            numbers = [torch.rand(()).item(), np.random.rand(), random.random()]  # noqa: NPY002
            settings = [torch.is_grad_enabled(), torch.get_num_threads() - threads]
            settings += [torch.backends.cuda.flash_sdp_enabled()]
    finally:
        torch.set_num_threads(threads)
        torch.backends.cuda.enable_flash_sdp(flash)
    return [*numbers, *settings, [module.training for module in model.modules()]]


def calling(act: Any) -> ModelSpec:
    """Return a model that acts in each call."""

    class Mutant(GPT):
        def embed(self, input_ids):
            act(self)
            return super().embed(input_ids)

    return spec_of(Mutant)


@mutant("E2", twin=gpt, family="state", source="classic", observable=after_call)
def torch_seeded_in_each_call():
    """A call seeds torch, so that each training step has the same dropout."""
    return calling(lambda model: torch.manual_seed(0))


@mutant("E2", twin=gpt, family="state", source="classic", observable=after_call)
def numpy_seeded_in_each_call():
    """A call seeds NumPy, so that the data loader repeats its augmentations."""
    return calling(lambda model: np.random.seed(0))  # noqa: NPY002


@mutant("E3", twin=gpt, family="state", source="classic", observable=after_call)
def threads_set_in_each_call():
    """A call sets the number of threads of the process."""
    return calling(lambda model: torch.set_num_threads(torch.get_num_threads() + 1))


@mutant("E3", twin=gpt, family="state", source="classic", observable=after_call)
def flash_attention_switched_off():
    """A call disables flash attention for the whole process instead of inside a context manager."""
    return calling(lambda model: torch.backends.cuda.enable_flash_sdp(False))


@mutant("E3", twin=gpt, family="state", source="classic", observable=after_call)
def gradients_switched_on():
    """A call enables gradients, also under no_grad."""
    return calling(lambda model: torch.set_grad_enabled(True))


@mutant("E4", twin=gpt, family="state", source="classic", observable=after_call)
def layer_set_to_train_mode():
    """A call in eval mode sets a layer to train mode."""
    return calling(lambda model: model.layers[0].train())


# Memory


def left_by(call: Any) -> tuple[int, int]:
    """Return the number of tensors, and of hooks and autograd nodes, that three calls leave."""

    def count() -> tuple[int, int]:
        gc.collect()
        objects = gc.get_objects()
        tensors = [each for each in objects if type(each) in (Tensor, nn.Parameter)]
        hooks = sum(len(each._forward_hooks) for each in objects if type(each) is nn.Linear)
        nodes, waiting = set(), [each.grad_fn for each in tensors if each.grad_fn is not None]
        while waiting:
            node = waiting.pop()
            if node not in nodes:
                nodes.add(node)
                waiting += [each for each, _ in node.next_functions if each is not None]
        return len(tensors), hooks + len(nodes)

    call()
    before = count()
    for _ in range(3):
        call()
    after = count()
    return after[0] - before[0], after[1] - before[1]


def left_by_calls(spec: ModelSpec) -> tuple[int, int]:
    model, ids = spec.create().eval(), spec.batch(2, 12)

    def call() -> None:
        model(ids)

    return left_by(call)


class Collecting(GPT):
    """Collects nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.collected: Any = []

    def embed(self, input_ids: Tensor) -> Tensor:
        x = super().embed(input_ids)
        self.collect(x)
        return x

    def collect(self, x: Tensor) -> None:
        """Keep something of a call."""


@mutant("E5", twin=gpt, family="state", source="classic", observable=left_by_calls)
def activations_appended():
    """The activations of each call are appended to a list for a plot."""

    class Mutant(Collecting):
        def collect(self, x):
            self.collected.append(x.detach())

    return spec_of(Mutant)


@mutant("E5", twin=gpt, family="state", source="classic", observable=left_by_calls)
def hook_registered_in_each_call():
    """Each call registers a hook, and removes none."""

    class Mutant(Collecting):
        def collect(self, x):
            self.layers[0]["q"].register_forward_hook(lambda *call: None)

    return spec_of(Mutant)


@mutant("E5", twin=gpt, family="state", source="classic", observable=left_by_calls)
def penalty_summed_with_its_graph():
    """A penalty is summed over calls, and the sum retains the graph of each call."""

    class Mutant(Collecting):
        def collect(self, x):
            self.collected = x.square().mean() + (self.collected if self.collected != [] else 0.0)

    return spec_of(Mutant)


def left_by_steps(spec: Any) -> tuple[int, int]:
    run, batch = spec.create(), spec.batch()

    def step() -> None:
        run.step(batch)

    return left_by(step)


@mutant("E6", twin=loop, family="step", source="classic", observable=left_by_steps)
def losses_summed_with_their_graph():
    """`total += loss` without detach() retains the graph of each step."""

    class Mutant(Loop):
        total: Any = 0.0

        def loss(self, batch):
            loss = super().loss(batch)
            self.total = self.total + loss
            return loss

    return loop_spec_of(Mutant)


@mutant("E6", twin=loop, family="step", source="classic", observable=left_by_steps)
def logits_of_each_step_appended():
    """The logits of each step are appended to a list, for a metric that is computed at the end."""

    class Mutant(Loop):
        def __init__(self) -> None:
            super().__init__()
            self.logits: list[Tensor] = []

        def loss(self, batch):
            output = self.model(**batch)
            self.logits.append(output.logits.detach())
            return output.loss

    return loop_spec_of(Mutant)


# Selection of experts


class Routed(GPT):
    """Two of eight experts in one of two groups, selected by sigmoid scores with a bias for balance."""

    n_experts, n_groups, n_chosen = 8, 2, 2
    excluded = -torch.inf
    weights_have_bias = False

    def layer(self) -> nn.Module:
        layer = super().layer()
        layer["router"] = nn.Linear(self.width, self.n_experts, bias=False)
        layer["router"].register_buffer("e_score_correction_bias", torch.linspace(0.0, 0.4, self.n_experts))
        layer["experts"] = nn.Linear(self.width, self.n_experts * self.width, bias=False)
        return layer

    def mlp(self, layer: nn.Module, x: Tensor) -> Tensor:
        scores = layer["router"](x).sigmoid()
        biased = scores + layer["router"].e_score_correction_bias
        groups = biased.unflatten(-1, (self.n_groups, -1))
        best = groups.topk(2, dim=-1).values.sum(dim=-1).argmax(dim=-1, keepdim=True)
        others = torch.arange(self.n_groups) != best
        chosen = groups.masked_fill(others[..., None], self.excluded).flatten(-2).topk(self.n_chosen).indices
        weights = (biased if self.weights_have_bias else scores).gather(-1, chosen)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        each = layer["experts"](x).unflatten(-1, (self.n_experts, self.width))
        picked = each.gather(-2, chosen[..., None].expand(*chosen.shape, self.width))
        return (weights[..., None] * picked).sum(dim=-2)


def routed(build: type[GPT] = Routed) -> ModelSpec:
    unused = (
        "layers.0.gate",
        "layers.0.up",
        "layers.0.down",
        "layers.1.gate",
        "layers.1.up",
        "layers.1.down",
    )
    return spec_of(build, unused=unused)


def logits_with_bias(spec: ModelSpec) -> Tensor:
    """Return the logits with biases that are lower by 1, and so negative scores."""
    model = spec.create().eval()
    with torch.no_grad():
        for layer in model.layers:
            layer["router"].e_score_correction_bias.sub_(1.0)
        return model(spec.batch(2, 12)).logits


@mutant("E7", twin=routed, family="router", source="vllm-project/vllm#12002", observable=logits_with_bias)
def experts_weighted_with_their_bias():
    """The bias that selects experts is also a part of their weights."""

    class Mutant(Routed):
        weights_have_bias = True

    return routed(Mutant)


@mutant("E7", twin=routed, family="router", source="vllm-project/vllm#13474", observable=logits_with_bias)
def other_groups_have_score_zero():
    """Experts of groups that are not selected get score 0, which is larger than negative scores."""

    class Mutant(Routed):
        excluded = 0.0

    return routed(Mutant)
