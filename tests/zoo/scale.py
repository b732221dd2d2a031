"""Bugs of scale: activations, scores and gradients that are too large, or change with depth or width."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.forward import logits
from tests.zoo.gpt import GPT, gpt, spec_of
from tests.zoo.mutant import mutant


class Deep(GPT):
    n_layers = 12


def deep():
    return spec_of(Deep)


@mutant("scale-residual", twin=deep, family="depth", source="classic", observable=logits)
def residual_added_twice():
    """Each feed-forward layer adds its input once more: the stream doubles from layer to layer."""

    class Mutant(Deep):
        def layer(self):
            layer = super().layer()
            layer["mlp_norm"].register_forward_pre_hook(self.keep)
            return layer

        def keep(self, norm, args):
            self.stream = args[0]

        def mlp(self, layer, x):
            return super().mlp(layer, x) + self.stream

    return spec_of(Mutant)


class NoNorms(Deep):
    """Without norms in the layers, and with weights small enough for that."""

    def layer(self):
        layer = super().layer()
        layer["attention_norm"], layer["mlp_norm"] = nn.Identity(), nn.Identity()
        return layer


@mutant("scale-norm", twin=deep, family="depth", source="classic", observable=logits)
def norms_left_out():
    """Layers lost their norms, and their weights are large: activations grow without bound."""

    class Mutant(NoNorms):
        def initialize(self):
            super().initialize()
            for name, p in self.named_parameters():
                if name.endswith(("v.weight", "out.weight")):
                    nn.init.normal_(p, std=2 * self.width**-0.5)

    return spec_of(Mutant)


@mutant("scale-attention", twin=gpt, family="attention", source="classic", observable=logits)
def scores_not_scaled():
    """Scores are not divided by the root of the head size."""

    class Mutant(GPT):
        def scale(self):
            return 1.0

    return spec_of(Mutant)


class Kernel(GPT):
    """The same by torch's own attention."""

    def attend(self, layer, x, positions, visible, cache):
        q = self.rotate(self.split(layer["q"](x)), positions)
        k = self.rotate(self.split(layer["k"](x)), positions)
        v = self.split(layer["v"](x))
        if cache is not None:
            k, v = torch.cat((cache[0], k), dim=2), torch.cat((cache[1], v), dim=2)
        q = self.query(q)
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(
            q, self.repeat(k), self.repeat(v), attn_mask=visible, dropout_p=p, scale=self.scale()
        )
        return layer["out"](self.merge(y)), (k, v)

    def query(self, q):
        return q


def kernel():
    return spec_of(Kernel)


@mutant("scale-attention", twin=kernel, family="attention", source="classic", observable=logits)
def scores_multiplied():
    """scale= of torch's attention is given the root of the head size, not its inverse."""

    class Mutant(Kernel):
        def scale(self):
            return math.sqrt(self.head_dim)

    return spec_of(Mutant)


@mutant("scale-axis", twin=gpt, family="attention", source="classic", observable=logits)
def softmax_over_queries():
    """The softmax of attention runs over the queries: dim=-2."""

    class Mutant(GPT):
        def softmax(self, scores):
            return scores.softmax(dim=-2)

    return spec_of(Mutant)


@mutant("scale-queries", twin=gpt, family="attention", source="classic", observable=logits)
def queries_and_keys_from_unit_normal():
    """Weights of queries and keys from N(0, 1): attention starts as a hard choice."""

    class Mutant(GPT):
        def initialize(self):
            super().initialize()
            for name, p in self.named_parameters():
                if name.endswith(("q.weight", "k.weight")):
                    nn.init.normal_(p)

    return spec_of(Mutant)


@mutant(
    "scale-nan", twin=kernel, family="finiteness", source="classic", observable=lambda spec: _queries(spec)
)
def nan_swallowed_by_the_kernel():
    """The query of the first position is 0 / 0, and nothing shows in the output."""

    class Mutant(Kernel):
        def merge(self, x):
            return super().merge(x).nan_to_num()

        def split(self, x):
            return super().split(x)

        def layer(self):
            layer = super().layer()
            layer["q"].register_forward_hook(
                lambda module, args, output: torch.cat((output[:, :1] / 0 * 0, output[:, 1:]), dim=1)
            )
            return layer

    return spec_of(Mutant)


def _queries(spec):
    """Whether each layer's queries are finite."""
    model, found = spec.create().eval(), []
    for layer in model.layers:
        layer["q"].register_forward_hook(
            lambda module, args, output: found.append(bool(output.isfinite().all()))
        )
    with torch.no_grad():
        spec.logits(model, spec.batch(2, 12))
    return found


class Mu(GPT):
    """muP of Yang et al. (arXiv 2203.03466), table 8: what depends on the width is set by a factor."""

    factor = 1
    dropout = 0.0
    n_layers = 1

    def initialize(self):
        for name, p in self.named_parameters():
            if "embedding" in name or name.startswith("head"):
                nn.init.normal_(p, std=0.1)
            elif p.ndim == 2:
                nn.init.normal_(p, std=self.hidden_std(p.shape[1]))
                p.width_factor = self.factor

    def hidden_std(self, fan_in):
        return fan_in**-0.5

    def scale(self):
        return math.sqrt(8) / self.head_dim

    def tie(self):
        super().tie()
        self.head.register_forward_hook(lambda module, args, output: output / self.factor)


def _at_width(build):
    def widen(factor):
        sizes = {"factor": factor, "width": build.width * factor, "d_ff": build.d_ff * factor}
        return type(build.__name__, (build,), sizes)()

    return widen


def _adam(parameters):
    by_factor = {}
    for p in parameters:
        by_factor.setdefault(getattr(p, "width_factor", 1), []).append(p)
    groups = [{"params": ps, "lr": 3e-3 / factor} for factor, ps in by_factor.items()]
    return torch.optim.Adam(groups, eps=1e-12)


def mu_spec(build):
    return spec_of(build, at_width=_at_width(build), optimizer=_adam)


def mu():
    return mu_spec(Mu)


def activations(spec):
    """The RMS of the queries of models of two widths."""
    found = []
    for factor in (1, 4):
        torch.manual_seed(0)
        model = spec.at_width(factor).eval()
        with torch.no_grad():
            found.append(model.layers[0]["q"](torch.ones(model.width)).square().mean().sqrt())
    return found


@mutant(
    "53",
    twin=mu,
    family="width",
    source="EleutherAI/gpt-neox#1087, #1061",
    observable=activations,
)
def init_divided_by_the_width():
    """The std of hidden weights is divided by the width factor, not by its root."""

    class Mutant(Mu):
        def hidden_std(self, fan_in):
            return Mu.width**-0.5 / self.factor

    return mu_spec(Mutant)


@mutant("53", twin=mu, family="width", source="EleutherAI/gpt-neox#956", observable=lambda spec: _moved(spec))
def width_factor_never_arrives():
    """The optimizer does not see the width: hidden weights learn at the rate of the narrow model."""

    class Mutant(Mu):
        def initialize(self):
            super().initialize()
            for p in self.parameters():
                p.width_factor = 1

    return mu_spec(Mutant)


def _moved(spec):
    torch.manual_seed(0)
    model = spec.at_width(4)
    ids = spec.batch(2, 12)
    optimizer = spec.optimizer(model.parameters())
    spec.loss_of(model, ids).backward()
    optimizer.step()
    return list(model.parameters())
