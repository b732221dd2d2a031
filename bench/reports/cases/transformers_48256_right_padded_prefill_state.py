"""transformers#48256 (huggingface/transformers): a right-padded prefill leaves a corrupted Mamba cache.

The convolution state keeps the last (zeroed) padding positions in place of the row's last tokens, and the
time step is not masked, so the state decays over the padding; the row continues from a wrong state.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec


def apply_mask_to_padding_states(states: Tensor, mask: Tensor | None) -> Tensor:
    """Zeros where the mask (batch, length) is 0."""
    return states if mask is None else states * mask[:, :, None].to(states.dtype)


class NemotronHMamba2Mixer(nn.Module):
    """Mamba-2 layer with one group, sequential form."""

    def __init__(self, hidden_size: int, heads: int, state_size: int, kernel: int, mask_aware: bool) -> None:
        super().__init__()
        self.num_heads, self.state_size, self.kernel = heads, state_size, kernel
        self.mask_aware, self.inner, conv_dim = mask_aware, 2 * hidden_size, 2 * hidden_size + 2 * state_size
        self.in_proj = nn.Linear(hidden_size, self.inner + conv_dim + heads, bias=False)
        self.conv1d = nn.Conv1d(conv_dim, conv_dim, kernel, groups=conv_dim)
        self.dt_bias, self.D = nn.Parameter(torch.linspace(-2, 1, heads)), nn.Parameter(torch.ones(heads))
        self.A_log = nn.Parameter(torch.log(torch.arange(1, heads + 1.0)))
        self.norm, self.out_proj = nn.RMSNorm(self.inner), nn.Linear(self.inner, hidden_size, bias=False)

    def conv_state(self, inputs: Tensor, mask: Tensor | None) -> Tensor:
        """The inputs that the next call's convolution reaches back to."""
        if mask is None or not self.mask_aware:
            return inputs[..., 1 - self.kernel :]
        end = (mask * torch.arange(1, mask.shape[1] + 1)).amax(dim=1)
        index = end[:, None, None] + torch.arange(self.kernel - 1)
        return inputs.gather(2, index.expand(-1, inputs.shape[1], -1))

    def forward(self, hidden_states: Tensor, cache: tuple | None, mask: Tensor | None) -> tuple:
        """Output and the two states after it."""
        batch_size, seq_len, _ = hidden_states.shape
        projected = self.in_proj(apply_mask_to_padding_states(hidden_states, mask))
        gate, xBC, dt = projected.split([self.inner, self.conv1d.in_channels, self.num_heads], dim=-1)
        if cache is None:
            head_dim = self.inner // self.num_heads
            conv_cache = xBC.new_zeros(batch_size, xBC.shape[-1], self.kernel - 1)
            cache = conv_cache, xBC.new_zeros(batch_size, self.num_heads, head_dim, self.state_size)
        conv_inputs = torch.cat([cache[0], xBC.transpose(1, 2)], dim=-1)
        xBC = apply_mask_to_padding_states(F.silu(self.conv1d(conv_inputs)).transpose(1, 2), mask)
        x, B, C = xBC.split([self.inner, self.state_size, self.state_size], dim=-1)
        x = x.unflatten(-1, (self.num_heads, -1))
        dt = apply_mask_to_padding_states(F.softplus(dt + self.dt_bias), mask if self.mask_aware else None)
        decay = torch.exp(-torch.exp(self.A_log) * dt)
        ssm_state, outputs = cache[1], []
        for t in range(seq_len):
            update = (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, None, None]
            ssm_state = ssm_state * decay[:, t, :, None, None] + update
            outputs.append((ssm_state * C[:, t, None, None]).sum(-1) + self.D[:, None] * x[:, t])
        out = self.norm(torch.stack(outputs, dim=1).flatten(2) * F.silu(gate))
        return self.out_proj(out), (self.conv_state(conv_inputs, mask), ssm_state)


class NemotronHForCausalLM(nn.Module):
    """Language model of Mamba-2 layers."""

    def __init__(self, vocab_size: int = 48, hidden_size: int = 32, mask_aware: bool = True) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(vocab_size, hidden_size)
        self.norms = nn.ModuleList(nn.RMSNorm(hidden_size) for _ in range(2))
        self.mixers = nn.ModuleList(NemotronHMamba2Mixer(hidden_size, 4, 8, 4, mask_aware) for _ in range(2))
        self.norm_f, self.lm_head = nn.RMSNorm(hidden_size), nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: list[tuple] | None = None,
        use_cache: bool = True,
    ) -> SimpleNamespace:
        """Logits of `input_ids`; the mask may be as long as all tokens up to now."""
        mask = None if attention_mask is None else attention_mask[:, -input_ids.shape[1] :]
        hidden_states, new_cache = self.embeddings(input_ids), []
        for norm, mixer, cache in zip(self.norms, self.mixers, past_key_values or [None] * 2, strict=True):
            out, layer_cache = mixer(norm(hidden_states), cache, mask)
            hidden_states = hidden_states + out
            new_cache.append(layer_cache)
        logits = self.lm_head(self.norm_f(hidden_states))
        return SimpleNamespace(logits=logits, past_key_values=new_cache if use_cache else None)


def buggy() -> nn.Module:
    """States of the padded end."""
    return NemotronHForCausalLM(mask_aware=False)


def healthy() -> nn.Module:
    """States of the last real token."""
    return NemotronHForCausalLM(mask_aware=True)


def buggy_declared() -> ModelSpec:
    """Prompts may have padding on the right."""
    return ModelSpec.of(buggy, padding_sides=("right",))


def healthy_declared() -> ModelSpec:
    """Prompts may have padding on the right."""
    return ModelSpec.of(healthy, padding_sides=("right",))


def observe(model: nn.Module) -> Tensor:
    """Logits of two tokens after a right-padded prefill, less those after an unpadded one."""
    ids = torch.randint(1, 48, (2, 11), generator=torch.Generator().manual_seed(1))
    prompt, new, mask = ids[:, :9].clone(), ids[:, 9:], torch.ones(2, 9, dtype=torch.long)
    prompt[0, 5:], mask[0, 5:] = 0, 0
    with torch.no_grad():
        cache = model(prompt, attention_mask=mask).past_key_values
        logits = model(new, attention_mask=F.pad(mask, (0, 2), value=1), past_key_values=cache).logits[0]
        return logits - model(new[:1], past_key_values=model(prompt[:1, :5]).past_key_values).logits[0]
