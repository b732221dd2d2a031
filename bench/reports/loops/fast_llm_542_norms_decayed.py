"""Fast-LLM#542 (ServiceNow/Fast-LLM): after a refactor the weights and biases of norms are decayed.

They are created without `weight_decay=False` and so fall into the optimizer's decayed group.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import stackwise

LR = 3e-3
DECAY = 0.1


@dataclass
class ParameterConfig:
    """How a layer's parameter starts."""

    init: str = "normal"
    scale: float = 0.05

    def get_parameter(self, *shape: int, weight_decay: bool = True) -> nn.Parameter:
        """Create the parameter and note whether it decays."""
        value = {"normal": torch.randn, "ones": torch.ones, "zeros": torch.zeros}[self.init](*shape)
        if self.init == "normal":
            value = value * self.scale
        parameter = nn.Parameter(value)
        parameter.param_weight_decay = weight_decay
        return parameter


class LayerNorm(nn.Module):
    """Layer norm with gain and bias."""

    def __init__(self, dims: int, options: dict[str, bool]) -> None:
        super().__init__()
        self.weight = ParameterConfig("ones").get_parameter(dims, **options)
        self.bias = ParameterConfig("zeros").get_parameter(dims, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last axis."""
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias)


class Decoder(nn.Module):
    """One attention layer and one MLP, without biases."""

    def __init__(self, norm_options: dict[str, bool], vocab_size: int = 64, dims: int = 32) -> None:
        super().__init__()
        linear = ParameterConfig()
        self.embedding = nn.Embedding(vocab_size, dims, _weight=linear.get_parameter(vocab_size, dims).data)
        self.norm_1 = LayerNorm(dims, norm_options)
        self.qkv = linear.get_parameter(3 * dims, dims)
        self.dense = linear.get_parameter(dims, dims)
        self.norm_2 = LayerNorm(dims, norm_options)
        self.layer_1 = linear.get_parameter(2 * dims, dims)
        self.layer_2 = linear.get_parameter(dims, 2 * dims)
        self.final_norm = LayerNorm(dims, norm_options)
        self.output_weights = linear.get_parameter(vocab_size, dims)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of the next token."""
        x = self.embedding(ids)
        q, k, v = F.linear(self.norm_1(x), self.qkv).chunk(3, dim=-1)
        x = x + F.linear(F.scaled_dot_product_attention(q, k, v, is_causal=True), self.dense)
        x = x + F.linear(F.gelu(F.linear(self.norm_2(x), self.layer_1)), self.layer_2)
        return F.linear(self.final_norm(x), self.output_weights)


class Run:
    """AdamW with one decayed and one plain group."""

    def __init__(self, norm_options: dict[str, bool]) -> None:
        self.model = Decoder(norm_options)
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for parameter in self.model.parameters():
            groups[getattr(parameter, "param_weight_decay", True)].append(parameter)
        settings = [
            {"params": params, "weight_decay": DECAY if decays else 0.0}
            for decays, params in groups.items()
            if params
        ]
        self.optimizer = torch.optim.AdamW(settings, lr=LR, betas=(0.9, 0.95))

    def step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """One update."""
        logits = self.model(batch["input_ids"])[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def buggy() -> Run:
    """Norms take the default, which decays."""
    return Run({})


def healthy() -> Run:
    """Norms opt out of the decay."""
    return Run({"weight_decay": False})


def buggy_declared() -> stackwise.TrainerSpec:
    """The mistake, with the parameters that should decay."""
    return stackwise.TrainerSpec.of(buggy, decayed=lambda name, _: "norm" not in name)


def healthy_declared() -> stackwise.TrainerSpec:
    """The fix, with the parameters that should decay."""
    return stackwise.TrainerSpec.of(healthy, decayed=lambda name, _: "norm" not in name)


def _decay_of_norms(run: Run) -> float:
    plain = Run({"weight_decay": False})
    plain.model.load_state_dict(run.model.state_dict())
    ids = torch.randint(0, 64, (4, 16))
    for trained in (run, plain):
        trained.step({"input_ids": ids, "labels": ids})
    return (run.model.final_norm.weight - plain.model.final_norm.weight).abs().max().item()


def prove() -> tuple[float, float]:
    """How far one step moves the final norm's gain beyond the undecayed update; must be 0."""
    return _decay_of_norms(buggy()), _decay_of_norms(healthy())
