"""transformers#45591 (huggingface/transformers): loading NemotronH draws weights again that were just loaded.

`_init_weights` also runs after a checkpoint is loaded. It writes to `dt_bias` and `out_proj.weight` without
asking if they come from the checkpoint, so the loaded model differs from the saved one.
"""

import math
import tempfile

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from stackwise import ModelSpec

HEADS, STATE, KERNEL = 4, 8, 4


class NemotronHConfig(PretrainedConfig):
    """Sizes, and ranges of the time step."""

    model_type = "nemotron_h_tiny"

    def __init__(self, hidden_size: int = 32, asks_first: bool = False, **kwargs: object) -> None:
        self.hidden_size, self.asks_first = hidden_size, asks_first
        self.vocab_size, self.num_hidden_layers, self.initializer_range = 80, 2, 0.02
        self.time_step_min, self.time_step_max, self.time_step_floor = 0.001, 0.1, 1e-4
        kwargs.setdefault("tie_word_embeddings", False)
        super().__init__(**kwargs)


class NemotronHMamba2Mixer(nn.Module):
    """Causal convolution, and a recurrence with one decay for each head."""

    def __init__(self, config: NemotronHConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.width, self.conv_dim = width, width + 2 * STATE
        self.in_proj = nn.Linear(width, width + self.conv_dim + HEADS, bias=False)
        self.conv1d = nn.Conv1d(self.conv_dim, self.conv_dim, KERNEL, groups=self.conv_dim)
        self.dt_bias = nn.Parameter(torch.ones(HEADS))
        self.A_log = nn.Parameter(torch.arange(1.0, HEADS + 1).log())
        self.D = nn.Parameter(torch.ones(HEADS))
        self.register_buffer("time_step_limit", torch.tensor([0.0, 10.0]), persistent=False)
        self.norm, self.out_proj = nn.RMSNorm(width), nn.Linear(width, width, bias=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Apply the mixer to (batch, time, hidden_size)."""
        gate, x, dt = self.in_proj(hidden_states).split([self.width, self.conv_dim, HEADS], dim=-1)
        x = F.silu(self.conv1d(F.pad(x.transpose(1, 2), (KERNEL - 1, 0))).transpose(1, 2))
        x, b, c = x.split([self.width, STATE, STATE], dim=-1)
        x = x.unflatten(-1, (HEADS, -1))
        dt = F.softplus(dt + self.dt_bias).clamp(self.time_step_limit[0], self.time_step_limit[1])
        decay = (-self.A_log.exp() * dt).exp()
        update = (dt[..., None] * x)[..., None] * b[:, :, None, None]
        state, outputs = torch.zeros_like(update[:, 0]), []
        for t in range(x.shape[1]):
            state = decay[:, t, :, None, None] * state + update[:, t]
            outputs.append((state * c[:, t, None, None]).sum(dim=-1))
        y = (torch.stack(outputs, dim=1) + self.D[:, None] * x).flatten(2)
        return self.out_proj(self.norm(y * F.silu(gate)))


class NemotronHForCausalLM(PreTrainedModel):
    """Language model of Mamba-2 layers."""

    config_class, base_model_prefix = NemotronHConfig, "model"

    def __init__(self, config: NemotronHConfig) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.norms = nn.ModuleList(nn.RMSNorm(config.hidden_size) for _ in range(config.num_hidden_layers))
        self.mixers = nn.ModuleList(NemotronHMamba2Mixer(config) for _ in range(config.num_hidden_layers))
        self.norm_f = nn.RMSNorm(config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _is_loaded(self, parameter: nn.Parameter) -> bool:
        return self.config.asks_first and getattr(parameter, "_is_hf_initialized", False)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        if not isinstance(module, NemotronHMamba2Mixer):
            return
        module.time_step_limit.copy_(torch.tensor([0.0, 10.0]))
        if not self._is_loaded(module.dt_bias):
            low, high = math.log(self.config.time_step_min), math.log(self.config.time_step_max)
            dt = (torch.rand(HEADS) * (high - low) + low).exp().clamp(min=self.config.time_step_floor)
            module.dt_bias.copy_(dt + (-torch.expm1(-dt)).log())  # inverse of softplus
        weight = module.out_proj.weight
        if not self._is_loaded(weight):
            bound = (weight.shape[1] * self.config.num_hidden_layers) ** -0.5
            weight.copy_((2 * torch.rand(weight.shape) - 1) * bound)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> CausalLMOutput:
        """Return logits, and the loss of the next token if there are labels."""
        x = self.embeddings(input_ids)
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            x = x + mixer(norm(x))
        logits, loss = self.lm_head(self.norm_f(x)), None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)


def buggy() -> nn.Module:
    """Write to the weights in each case."""
    return NemotronHForCausalLM(NemotronHConfig())


def healthy() -> nn.Module:
    """Leave weights of a checkpoint."""
    return NemotronHForCausalLM(NemotronHConfig(asks_first=True))


def buggy_declared() -> ModelSpec:
    """State a causal model."""
    return ModelSpec.of(buggy, causal=True)


def healthy_declared() -> ModelSpec:
    """State a causal model."""
    return ModelSpec.of(healthy, causal=True)


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Return the logits after saving and loading minus those before."""
    ids = torch.randint(0, 80, (2, 9), generator=torch.Generator().manual_seed(1))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = type(model).from_pretrained(folder)
    return loaded(ids).logits - model.eval()(ids).logits
