"""Bugs of conversions: a reference with other parameter names gets wrong weights, or its code differs."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from stackwise.subject.output import logits_of
from stackwise.subject.spec import ModelSpec
from tests.zoo.gpt import GPT, spec_of
from tests.zoo.mutant import mutant

H, D, C, V, LENGTH = 4, 8, 32, 61, 64


def observed(spec: ModelSpec) -> list[Tensor]:
    """Outputs and gradients of the model and of its reference in eval mode, for random weights."""
    model, reference, inputs = spec.create(), spec.reference(), spec.batch(2, 12)
    with torch.no_grad():
        for index, p in enumerate((*model.parameters(), *model.buffers())):
            if p.is_floating_point():
                p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(index)))
    reference.load_state_dict(spec.to_reference(model.state_dict()), strict=False)
    found = []
    for each in (model.eval(), reference.eval()):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            output = logits_of(each(inputs))
        loss = output.square().mean() if each is reference else spec.loss_of(each, inputs)
        if each is model and spec.labelled_loss is not None:
            loss = spec.labelled_loss(model, inputs, inputs)
        loss.backward()
        found += [output.detach(), *(p.grad for p in each.parameters() if p.grad is not None)]
    return found


# A GPT, and a reference with fused projections, rotary pairs of neighbours, and gains stored as 1 + weight.


class Gain(nn.Module):
    """RMSNorm with a gain of 1 + weight."""

    def __init__(self, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(C)), eps

    def forward(self, x):
        return F.rms_norm(x, (C,), 1 + self.weight, self.eps)


class Fused(nn.Module):
    """The function of GPT, in other code."""

    tied, eps, n_kv, scale = True, None, 2, C**0.5

    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(V, C)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "ln1": Gain(self.eps),
                    "wqkv": nn.Linear(C, (H + 2 * self.n_kv) * D, bias=False),
                    "wo": nn.Linear(C, C, bias=False),
                    "ln2": Gain(self.eps),
                    "w13": nn.Linear(C, 128, bias=False),
                    "w2": nn.Linear(64, C, bias=False),
                }
            )
            for _ in range(2)
        )
        self.ln = Gain(self.eps)
        self.out = nn.Linear(C, V, bias=False)
        if self.tied:
            self.out.weight = self.tok.weight

    def forward(self, tokens, labels=None):
        x = self.tok(tokens) * self.scale
        for block in self.blocks:
            x = x + block["wo"](self.attend(block["wqkv"](block["ln1"](x))))
            gate, up = block["w13"](block["ln2"](x)).chunk(2, dim=-1)
            x = x + block["w2"](F.silu(gate) * up)
        logits = self.out(self.ln(x) * self.scale)
        if labels is None:
            return logits
        return logits, F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    def attend(self, qkv):
        q, k, v = qkv.unflatten(-1, (-1, D)).transpose(1, 2).split((H, self.n_kv, self.n_kv), dim=1)
        q, k = self.rotated(q), self.rotated(k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return y.transpose(1, 2).flatten(2)

    def rotated(self, x):
        angles = torch.arange(x.shape[2])[:, None] * 10000.0 ** (-torch.arange(0, D, 2).double() / D)
        cos, sin = angles.cos().to(x), angles.sin().to(x)
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


def to_neighbours(weight: Tensor) -> Tensor:
    """Rows (heads, 2, pairs) of a projection as (heads, pairs, 2)."""
    return weight.unflatten(0, (-1, 2, D // 2)).transpose(1, 2).flatten(0, 2)


def to_fused(state: dict[str, Tensor], bug: str = "") -> dict[str, Tensor]:
    """Weights of a GPT as those of the reference."""
    scale = 1 if bug == "scale" else Fused.scale
    embedding, head = state["embedding.weight"] / scale, state["head.weight"] / scale
    found = {"tok.weight": embedding, "out.weight": head.roll(1, 0) if bug == "rows" else head}
    found["ln.weight"] = state["norm.weight"] - 1
    for index in range(2):
        source = f"layers.{1 - index if bug == 'layers' else index}."
        part = {name.removeprefix(source): p for name, p in state.items() if name.startswith(source)}
        q, k, v = (part[f"{name}.weight"] for name in "qkv")
        if bug != "halves":
            q, k = to_neighbours(q), to_neighbours(k)
        qkv = torch.cat((q, v, k) if bug == "order" else (q, k, v))
        if bug == "groups":  # per key: its queries, the key, the value
            parts = (each.unflatten(0, (2, -1)) for each in (q, k, v))
            qkv = torch.cat(tuple(parts), dim=1).flatten(0, 1)
        gate, up = part["gate.weight"], part["up.weight"]
        norms = part["attention_norm.weight"], part["mlp_norm.weight"]
        one, two = reversed(norms) if bug == "norms" else norms
        weights = {
            "ln1": one if bug == "gain" else one - 1,
            "wqkv": qkv,
            "wo": part["out.weight"].T if bug == "transposed" else part["out.weight"],
            "ln2": two - 1,
            "w13": torch.cat((up, gate) if bug == "gate" else (gate, up)),
            "w2": part["down.weight"],
        }
        if bug == "forgotten" and index == 1:
            del weights["w2"]
        found |= {f"blocks.{index}.{name}.weight": p for name, p in weights.items()}
    if bug == "narrow":
        return {name: p.bfloat16().to(p) for name, p in found.items()}
    return found


def fused_spec(bug: str = "", model: type[GPT] = GPT, reference: Any = Fused, **declared: Any) -> ModelSpec:
    return spec_of(model, reference=reference, to_reference=partial(to_fused, bug=bug), **declared)


def gpt_to_fused():
    """The clean twin."""
    return fused_spec()


fused_mutant = partial(
    mutant, twin=gpt_to_fused, family="parity", source="classic conversion", observable=observed
)


@fused_mutant("C1")
def halves_not_permuted():
    """Rows of q and k stay in the order of halves, but the reference rotates neighbours."""
    return fused_spec("halves")


@fused_mutant("C2")
def qkv_in_another_order():
    """The fused projection has the order q, v, k instead of q, k, v."""
    return fused_spec("order")


@fused_mutant("C3")
def qkv_grouped_by_key():
    """The fused projection is interleaved by key head, but the reference expects all of q first."""
    return fused_spec("groups")


@fused_mutant("C4")
def gain_without_the_one():
    """The gain of a norm is copied unchanged, but the reference adds 1 to it."""
    return fused_spec("gain")


@fused_mutant("C5")
def gate_and_up_exchanged():
    """The fused matrix of the MLP contains the up projection before the gate."""
    return fused_spec("gate")


@fused_mutant("C6")
def embedding_not_scaled():
    """The reference multiplies embeddings by sqrt(width), but the conversion does not divide them by it."""
    return fused_spec("scale")


@fused_mutant("C7")
def head_rows_shifted():
    """The rows of the head are shifted by one token. The reference ties head and embedding."""
    return fused_spec("rows")


@fused_mutant("C8")
def layers_reversed():
    """The layers are converted in reverse order."""
    return fused_spec("layers")


@fused_mutant("C9")
def norms_exchanged():
    """The two norms of a layer are exchanged."""
    return fused_spec("norms")


@fused_mutant("C10")
def square_matrix_transposed():
    """The output projection is transposed."""
    return fused_spec("transposed")


@fused_mutant("C11")
def weight_forgotten():
    """The last matrix is not converted and stays random."""
    return fused_spec("forgotten")


@fused_mutant("C12")
def weights_rounded_to_bfloat16():
    """The conversion rounds the weights to bfloat16."""
    return fused_spec("narrow")


@fused_mutant("C13")
def stale_weights():
    """The conversion ignores its argument and reads the weights of another model."""
    state = GPT().state_dict()
    spec = fused_spec()
    return ModelSpec.of(spec, to_reference=lambda _: to_fused(state))


@fused_mutant("C14")
def head_tied_in_the_reference_only():
    """The model has a separate head, but the reference ties the head to the embedding."""

    class Mutant(GPT):
        tied = False

    return fused_spec(model=Mutant)


@fused_mutant("C15")
def epsilon_of_the_reference():
    """The norms of the reference have another epsilon, 1e-5."""

    class Mutant(Fused):
        eps = 1e-5

    return fused_spec(reference=Mutant)


@fused_mutant("C16")
def attention_without_scale():
    """The scores of the model are not divided by the root of the head size."""

    class Mutant(GPT):
        def scale(self):
            return 1.0

    return fused_spec(model=Mutant)


@fused_mutant("C17")
def rotation_of_half_the_head():
    """The reference rotates the first half of each head only."""

    class Mutant(Fused):
        def rotated(self, x):
            return torch.cat((super().rotated(x)[..., : D // 2], x[..., D // 2 :]), dim=-1)

    return fused_spec(reference=Mutant)


@fused_mutant("C18")
def loss_of_the_token_after_next():
    """The model's loss shifts the labels twice."""

    class Mutant(GPT):
        def loss(self, logits, labels):
            return super().loss(logits[:, :-1], torch.cat((labels[:, :1], labels[:, 2:]), dim=1))

    return fused_spec(model=Mutant)


@fused_mutant("C19")
def gate_without_gradient_on_one_side():
    """The gate of the MLP is detached in the model."""

    class Mutant(GPT):
        def mlp(self, layer, x):
            return layer["down"](F.silu(layer["gate"](x).detach()) * layer["up"](x))

    return fused_spec(model=Mutant)


@fused_mutant("C20")
def dropout_in_eval_mode():
    """The model applies dropout in eval mode too."""

    class Mutant(GPT):
        def drop(self, x):
            return F.dropout(x, self.dropout)

    return fused_spec(model=Mutant)


def train_logits(spec: ModelSpec) -> Tensor:
    """In train mode, of one batch."""
    torch.manual_seed(0)
    return spec.logits(spec.create().train(), spec.batch(2, 12)).detach()


@mutant("C21", twin=gpt_to_fused, family="parity", source="classic conversion", observable=train_logits)
def scores_clamped_in_train_mode():
    """The model clamps its attention scores in train mode only."""

    class Mutant(GPT):
        def softmax(self, scores):
            return super().softmax(scores.clamp(max=0.05) if self.training else scores)

    return fused_spec(model=Mutant)


# A GPT-2 of linear layers, and that of transformers.


class Nano(nn.Module):
    """GPT-2 with learned positions, biases and a head that is the embedding."""

    approximate, eps = "tanh", 1e-5

    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(V, C), nn.Embedding(LENGTH, C)
        nn.init.normal_(self.wte.weight, std=0.02)
        self.h = nn.ModuleList(
            nn.ModuleDict(
                {
                    "ln_1": nn.LayerNorm(C, self.eps),
                    "qkv": nn.Linear(C, 3 * C),
                    "proj": nn.Linear(C, C),
                    "ln_2": nn.LayerNorm(C, self.eps),
                    "fc": nn.Linear(C, 4 * C),
                    "out": nn.Linear(4 * C, C),
                }
            )
            for _ in range(2)
        )
        self.ln_f = nn.LayerNorm(C, self.eps)

    def forward(self, ids, targets=None):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.h:
            q, k, v = block["qkv"](block["ln_1"](x)).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + block["proj"](y.transpose(1, 2).flatten(2))
            x = x + block["out"](F.gelu(block["fc"](block["ln_2"](x)), approximate=self.approximate))
        logits = F.linear(self.ln_f(x), self.wte.weight)
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        return logits, loss


def gpt2():
    sizes = {"vocab_size": V, "n_embd": C, "n_head": H, "n_layer": 2, "n_positions": LENGTH}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


NANO_PARTS = {"qkv": "attn.c_attn", "proj": "attn.c_proj", "fc": "mlp.c_fc", "out": "mlp.c_proj"}


def to_gpt2(state: dict[str, Tensor], bug: str = "") -> dict[str, Tensor]:
    """Weights of a Nano as those of transformers, whose matrices are transposed."""
    found = {f"transformer.{name}": p for name, p in state.items() if not name.startswith("h.")}
    found["lm_head.weight"] = state["wte.weight"]
    for name, p in state.items():
        if not name.startswith("h."):
            continue
        _, index, part, kind = name.split(".")
        if part in NANO_PARTS and kind == "weight" and not (bug == "square" and part == "proj"):
            p = p.T
        if bug == "bias" and part == "fc" and kind == "bias":
            continue
        if bug == "zeros" and part == "qkv" and kind == "bias":
            p = torch.zeros_like(p)
        if bug == "norm" and part == "ln_2":
            kind = {"weight": "bias", "bias": "weight"}[kind]
        found[f"transformer.h.{index}.{NANO_PARTS.get(part, part)}.{kind}"] = p
    if bug == "positions":
        found["transformer.wpe.weight"] = state["wpe.weight"].roll(2, 0)
    return found


def nano_spec(bug: str = "", model: type[nn.Module] = Nano) -> ModelSpec:
    return ModelSpec.of(model, reference=gpt2, to_reference=partial(to_gpt2, bug=bug), max_length=LENGTH)


def nano_to_gpt2():
    """The clean twin."""
    return nano_spec()


nano_mutant = partial(
    mutant, twin=nano_to_gpt2, family="parity", source="karpathy/nanoGPT", observable=observed
)


@nano_mutant("C22")
def transpose_missing():
    """A square matrix of a Conv1D is not transposed."""
    return nano_spec("square")


@nano_mutant("C23")
def bias_forgotten():
    """A bias is not converted and stays at zero."""
    return nano_spec("bias")


@nano_mutant("C24")
def bias_set_to_zero():
    """The conversion sets a bias to zero, although the model has this bias."""
    return nano_spec("zeros")


@nano_mutant("C25")
def gain_and_bias_exchanged():
    """Weight and bias of a norm are exchanged."""
    return nano_spec("norm")


@nano_mutant("C26")
def positions_shifted():
    """The table of positions is shifted by two rows."""
    return nano_spec("positions")


@nano_mutant("C27")
def gelu_of_another_kind():
    """The model computes the exact GELU, and the reference computes its tanh approximation."""

    class Mutant(Nano):
        approximate = "none"

    return nano_spec(model=Mutant)


# Experts in one tensor, and as a list.


class Experts(nn.Module):
    """A router with a correction buffer, and the weights of all experts in one tensor."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(V, C), nn.LayerNorm(C)
        self.router = nn.Linear(C, 4, bias=False)
        self.register_buffer("correction", torch.zeros(4))
        self.experts = nn.Parameter(torch.randn(4, C, C) / C**0.5)
        self.head = nn.Linear(C, V)

    def forward(self, ids):
        x = self.embedding(ids)
        scores = (self.router(x) + self.correction).softmax(dim=-1)
        return self.head(self.norm(x + torch.einsum("btc,edc,bte->btd", x, self.experts, scores)))


class ExpertList(nn.Module):
    """The same function, with a module for each expert."""

    def __init__(self):
        super().__init__()
        self.tok, self.norm, self.gate = nn.Embedding(V, C), nn.LayerNorm(C), nn.Linear(C, 4, bias=False)
        self.gate.register_buffer("bias_of_experts", torch.zeros(4))
        self.ffn = nn.ModuleList(nn.Linear(C, C, bias=False) for _ in range(4))
        self.out = nn.Linear(C, V)

    def forward(self, ids):
        x = self.tok(ids)
        scores = (self.gate(x) + self.gate.bias_of_experts).softmax(dim=-1)
        parts = (scores[..., i, None] * expert(x) for i, expert in enumerate(self.ffn))
        return self.out(self.norm(x + sum(parts)))


def to_list(state: dict[str, Tensor], bug: str = "") -> dict[str, Tensor]:
    order = [1, 0, 2, 3] if bug == "order" else range(4)
    found = {f"ffn.{i}.weight": state["experts"][j] for i, j in enumerate(order)}
    names = {"tok": "embedding", "norm": "norm", "gate": "router", "out": "head"}
    for new, old in names.items():
        found |= {f"{new}.{k}": state[f"{old}.{k}"] for k in ("weight", "bias") if f"{old}.{k}" in state}
    if bug != "buffer":
        found["gate.bias_of_experts"] = state["correction"]
    return found


def experts_spec(bug: str = "") -> ModelSpec:
    return ModelSpec.of(Experts, reference=ExpertList, to_reference=partial(to_list, bug=bug))


def experts_to_list():
    """The clean twin."""
    return experts_spec()


experts_mutant = partial(mutant, twin=experts_to_list, family="parity", source="classic", observable=observed)


@experts_mutant("C28")
def experts_in_another_order():
    """Two experts are exchanged, but their rows in the router are not."""
    return experts_spec("order")


@experts_mutant("C29")
def correction_not_copied():
    """The buffer of the router is not converted, and stays at zero."""
    return experts_spec("buffer")


# A convolution with a batch norm, and one whose weights include the norm, for inference.


class Normed(nn.Module):
    eps = 1e-3

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8, eps=self.eps)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.norm(self.conv(x)).relu().mean(dim=(2, 3)))


class Folded(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.conv(x).relu().mean(dim=(2, 3)))


def to_folded(state: dict[str, Tensor], bug: str = "") -> dict[str, Tensor]:
    eps = 1e-5 if bug == "epsilon" else Normed.eps
    factor = state["norm.weight"] / (state["norm.running_var"] + eps).sqrt()
    mean = 0 if bug == "mean" else state["norm.running_mean"]
    return {
        "conv.weight": state["conv.weight"] * factor[:, None, None, None],
        "conv.bias": state["norm.bias"] - mean * factor,
        "head.weight": state["head.weight"],
        "head.bias": state["head.bias"],
    }


def folded_spec(bug: str = "") -> ModelSpec:
    return ModelSpec.of(
        Normed,
        reference=Folded,
        to_reference=partial(to_folded, bug=bug),
        make_batch=lambda n, _, generator: torch.randn(n, 3, 8, 8, generator=generator),
    )


def normed_to_folded():
    """The clean twin."""
    return folded_spec()


folded_mutant = partial(mutant, twin=normed_to_folded, family="parity", source="classic", observable=observed)


@folded_mutant("C30")
def epsilon_of_the_folded_norm():
    """The variance is folded with another epsilon."""
    return folded_spec("epsilon")


@folded_mutant("C31")
def mean_not_folded():
    """The running mean is not part of the folded bias."""
    return folded_spec("mean")
