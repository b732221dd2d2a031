"""Bugs of several ranks together. `InProcess` stands for the ranks where observables are taken: two threads.

Shapes: C model width, F hidden width of the MLP, of which each rank has half in a Parallel model.
"""

from __future__ import annotations

import math
import threading
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
import torch.distributed
import torch.nn.functional as F

from stackwise.support.random_state import seeded
from tests.forked import HANG_SECONDS
from tests.zoo.gpt import GPT
from tests.zoo.loop import Loop, loop_spec_of
from tests.zoo.mutant import mutant


class Processes:
    """The ranks of torch.distributed."""

    drawing = nullcontext

    @property
    def rank(self):
        return torch.distributed.get_rank()

    def all_reduce(self, x):
        torch.distributed.all_reduce(x)

    def all_to_all(self, x):
        torch.distributed.all_gather([torch.empty_like(x) for _ in range(2)], x)

    def broadcast(self, x):
        torch.distributed.broadcast(x, 0)


class InProcess:
    """Two ranks that are threads."""

    def __init__(self):
        self.barrier, self.parts, self.local = (
            threading.Barrier(2, timeout=HANG_SECONDS),
            [None, None],
            threading.local(),
        )
        self.lock = threading.Lock()

    @contextmanager
    def drawing(self):
        """Both draw the same weights, one after the other."""
        with self.lock:
            torch.manual_seed(0)
            yield

    @property
    def rank(self):
        return self.local.rank

    def exchange(self, x):
        self.parts[self.rank] = x.detach().clone()
        self.barrier.wait()
        parts = list(self.parts)
        self.barrier.wait()
        return parts

    def all_reduce(self, x):
        one, two = self.exchange(x)
        x.copy_(one + two)

    def all_to_all(self, x):
        self.exchange(x)

    def broadcast(self, x):
        x.copy_(self.exchange(x)[0])


class QuietGPT(GPT):
    dropout = 0.0


class Replicas(Loop):
    """Each rank has the whole model and its part of the batch; gradients are averaged."""

    def __init__(self, ranks=None):
        self.ranks = ranks or Processes()
        with self.ranks.drawing():
            super().__init__()
        with torch.no_grad():
            for p in self.model.parameters():
                self.broadcast(p)
        self.wrap()

    def create_model(self):
        return QuietGPT()

    def wrap(self):
        """Each gradient is averaged as soon as it is there, as DistributedDataParallel does it."""
        for p in self.model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: self.average(p.grad))

    def average(self, gradient):
        self.all_reduce(gradient)
        gradient /= 2

    def all_reduce(self, x):
        self.ranks.all_reduce(x)

    def broadcast(self, x):
        self.ranks.broadcast(x)

    def clip(self):
        self.grad_norm = self.norm()
        scale = min(1.0, self.max_norm / self.grad_norm)
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad *= scale

    def norm(self):
        return self.squares(p for p in self.model.parameters()).sqrt().item()

    def squares(self, parameters):
        return sum((p.grad.square().sum() for p in parameters if p.grad is not None), torch.zeros(()))


class _Copy(torch.autograd.Function):
    """The same on all ranks; their gradients are summed."""

    @staticmethod
    def forward(context, x, ranks):
        context.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        gradient = gradient.clone()
        context.ranks.all_reduce(gradient)
        return gradient, None


class _Sum(torch.autograd.Function):
    """The ranks' parts are summed; each gets the gradient of the sum."""

    @staticmethod
    def forward(context, x, ranks):
        x = x.clone()
        ranks.all_reduce(x)
        return x

    @staticmethod
    def backward(context, gradient):
        return gradient, None


class ParallelGPT(QuietGPT):
    """Each rank has half of the hidden units of every MLP."""

    def split_over(self, ranks):
        self.ranks, half = ranks, self.d_ff // 2
        mine = slice(ranks.rank * half, (ranks.rank + 1) * half)
        for layer in self.layers:
            for name in ("gate", "up"):
                layer[name].weight = torch.nn.Parameter(layer[name].weight.detach()[mine].clone())
            layer["down"].weight = torch.nn.Parameter(layer["down"].weight.detach()[:, mine].clone())
        return self

    def mlp(self, layer, x):
        x = _Copy.apply(x, self.ranks)
        return _Sum.apply(layer["down"](F.silu(layer["gate"](x)) * layer["up"](x)), self.ranks)


class Parallel(Replicas):
    """Each rank has part of every MLP, the rest of the model, and the whole batch."""

    def create_model(self):
        return ParallelGPT().split_over(self.ranks)

    def data_part(self):
        return 0, 1

    def broadcast(self, x):
        pass

    def wrap(self):
        pass

    def is_part(self, name):
        return any(f".{part}." in f".{name}" for part in ("gate", "up", "down"))

    def norm(self):
        named = dict(self.model.named_parameters())
        parts = self.squares(p for name, p in named.items() if self.is_part(name))
        self.ranks.all_reduce(parts)
        return (parts + self.squares(p for name, p in named.items() if not self.is_part(name))).sqrt().item()


class Alone(Loop):
    """In one process."""

    def create_model(self):
        return QuietGPT()


def ranked(build):
    return replace(loop_spec_of(Alone), name=build.__name__, distributed=build)


def replicas():
    return ranked(Replicas)


def parallel():
    return ranked(Parallel)


def both_ranks(spec, spoiled=False):
    """Return the weights and gradient norms of the ranks after two steps, and the number of ranks that hang.

    If `spoiled`, the embeddings of the second rank are NaN in the second step.
    """
    ranks, seen, stuck = InProcess(), [[], []], []

    def work(rank):
        ranks.local.rank = rank
        try:
            run = spec.distributed(ranks)
            index, count = run.data_part() if hasattr(run, "data_part") else (rank, 2)
            part = slice(index * 8 // count, (index + 1) * 8 // count)
            for number in range(2):
                if spoiled and rank == number == 1:
                    run.model.embedding.register_forward_hook(lambda _, __, output: output * math.nan)
                run.step({key: value[part] for key, value in spec.batch(8, seed=number).items()})
            ranks.all_reduce(torch.ones(()))
        except (threading.BrokenBarrierError, RuntimeError):
            stuck.append(rank)
            return
        seen[rank] = [p.detach().clone() for p in run.model.parameters()] + [run.grad_norm]

    with seeded(0):
        threads = [threading.Thread(target=work, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return seen, len(stuck)


def lossy(x):
    """Every hundredth element, and one at least, arrives as zero."""
    x.view(-1)[::100] = 0


def bug(id, source, twin=replicas):  # noqa: A002
    return mutant(id, twin=twin, family="distributed", source=source, observable=both_ranks)


class _LosesOnArrival(Replicas):
    def all_reduce(self, x):
        super().all_reduce(x)
        if self.ranks.rank == 1:
            lossy(x)


@bug("T01", "baichuan-inc/Baichuan2#86")
def reduction_loses_data_on_one_rank():
    """One percent of what the second rank receives is lost: its weights are others from then on."""
    return ranked(_LosesOnArrival)


class _LosesOnTheWay(Replicas):
    def all_reduce(self, x):
        if self.ranks.rank == 1:
            lossy(x)
        super().all_reduce(x)


@bug("T07", "pytorch/pytorch#84803")
def reduction_loses_data_for_all():
    """One percent of what the second rank sends is lost: all ranks agree on a wrong gradient."""
    return ranked(_LosesOnTheWay)


class _LosesInBroadcast(Replicas):
    def broadcast(self, x):
        super().broadcast(x)
        if self.ranks.rank == 1:
            lossy(x)


@bug("T08", "pytorch/pytorch#96600")
def broadcast_loses_data():
    """The weights that the second rank starts from lack one percent."""
    return ranked(_LosesInBroadcast)


class _ClipsOnFirst(Replicas):
    def clip(self):
        super().clip() if self.ranks.rank == 0 else setattr(self, "grad_norm", self.norm())


@bug("T02", "microsoft/DeepSpeed#1801")
def clipped_on_the_first_rank_alone():
    """Only rank 0 clips, and what is replicated comes apart."""
    return ranked(_ClipsOnFirst)


class _UnevenCalls(Replicas):
    def loss(self, batch):
        # An expert that no token of this rank chose is passed over, and its exchange with it.
        if self.ranks.rank == 0 or not self.model.training:
            self.ranks.all_to_all(torch.ones(4))
        return super().loss(batch)


@bug("T03", "microsoft/DeepSpeed#5794")
def experts_are_not_exchanged_by_all():
    """A rank whose tokens chose no expert leaves out the exchange that the others wait in."""
    return ranked(_UnevenCalls)


class _LosesHooks(Replicas):
    def wrap(self):
        super().wrap()
        # As a trip to another device and back does: new parameters, without the hooks of the old ones.
        self.model.head.weight = self.model.embedding.weight = torch.nn.Parameter(
            self.model.embedding.weight.detach().clone()
        )
        self.optimizer = self.create_optimizer()
        self.scheduler = self.create_scheduler()


@bug("T09", "pytorch/pytorch#104336")
def hooks_lost_with_the_parameters():
    """Parameters were made anew after wrapping: their gradients stay on their rank."""
    return ranked(_LosesHooks)


class _Bypassed(Replicas):
    def wrap(self):
        pass


@bug("dist-bypassed", "classic")
def model_called_past_its_wrapper():
    """The bare model is trained, not the wrapper that reduces: each rank trains on its own."""
    return ranked(_Bypassed)


class _Summed(Replicas):
    def average(self, gradient):
        self.all_reduce(gradient)


@bug("dist-summed", "classic")
def gradients_summed_over_ranks():
    """Gradients are summed where they were to be averaged: they grow with the number of ranks."""
    return ranked(_Summed)


class _CountsReplicas(Parallel):
    def norm(self):
        squares = self.squares(self.model.parameters())
        self.ranks.all_reduce(squares)
        return squares.sqrt().item()


@bug("89", "NVIDIA-NeMo/RL#3788", twin=parallel)
def replicated_gradients_counted_by_each_rank():
    """The norm counts what is replicated once for each rank, and clips too much."""
    return ranked(_CountsReplicas)


class _LeavesOut(Parallel):
    def norm(self):
        left_out = [p for name, p in self.model.named_parameters() if name.endswith("norm.weight")]
        whole = torch.tensor(super().norm()).square()
        return (
            (whole - self.squares(left_out) - self.model.embedding.weight.grad.square().sum()).sqrt().item()
        )


@bug("91", "NVIDIA/Megatron-LM#7452", twin=parallel)
def parameters_left_out_of_the_norm():
    """Some parameters are not in the norm that all are clipped by."""
    return ranked(_LeavesOut)


class _SkipsAlone(Replicas):
    """A rank whose own loss is not finite makes no update."""

    def accumulate(self, batches):
        self.skips = not math.isfinite(self.loss(batches[0]))
        return super().accumulate(batches)

    def update(self):
        if self.skips:
            self.zero_grad()
        else:
            super().update()


class _SkipsTheBackwardPass(_SkipsAlone):
    def backward(self, loss):
        if not self.skips:
            super().backward(loss)


def nan_on_one_rank(spec):
    return both_ranks(spec, spoiled=True)


@mutant("distributed", twin=replicas, family="distributed", source="classic", observable=nan_on_one_rank)
def one_rank_skips_the_update():
    """If the loss of one rank is NaN, this rank makes no update and the others do."""
    return ranked(_SkipsAlone)


@mutant("distributed", twin=replicas, family="distributed", source="classic", observable=nan_on_one_rank)
def one_rank_skips_the_backward_pass():
    """If the loss of one rank is NaN, this rank calls no collective of the backward pass."""
    return ranked(_SkipsTheBackwardPass)
