"""modalities#357 (Modalities/modalities): weight tying is lost when the model is built on the meta device.

Materialising with `to_empty` gives the embedding and the LM head a parameter each, and the initialiser then
fills both with different random numbers.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

DECLARATION = "use_weight_tying=True: the token embedding and the LM head are one and the same parameter"


class GPT2Block(nn.Module):
    """Pre-norm block."""

    def __init__(self, n_embd: int, n_head_q: int, ffn_hidden: int) -> None:
        super().__init__()
        self.n_head_q = n_head_q
        self.attention_norm = nn.LayerNorm(n_embd)
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.ffn_norm = nn.LayerNorm(n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, ffn_hidden), nn.GELU(), nn.Linear(ffn_hidden, n_embd))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Causal attention, then the MLP."""
        qkv = self.c_attn(self.attention_norm(x)).unflatten(-1, (3, self.n_head_q, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ffn_norm(x))


class GPT2LLM(nn.Module):
    """GPT-2 that reads a dict and answers with a dict, or reads and answers with a tensor."""

    def __init__(self, use_weight_tying: bool, vocab_size: int = 96, n_embd: int = 32) -> None:
        super().__init__()
        self.use_weight_tying = use_weight_tying
        self.sample_key, self.prediction_key = "input_ids", "logits"
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocab_size, n_embd),
                "wpe": nn.Embedding(64, n_embd),
                "h": nn.ModuleDict({str(i): GPT2Block(n_embd, 4, 2 * n_embd) for i in range(2)}),
                "lm_head_norm": nn.LayerNorm(n_embd),
                "lm_head": nn.Linear(n_embd, vocab_size, bias=False),
            }
        )
        self.tie_weights()

    def tie_weights(self) -> None:
        """Let the embedding use the weight of the LM head."""
        if self.use_weight_tying:
            self.transformer.wte.weight = self.transformer.lm_head.weight

    def forward(
        self, inputs: dict[str, torch.Tensor] | torch.Tensor
    ) -> dict[str, torch.Tensor] | torch.Tensor:
        """Logits for token ids."""
        if isinstance(inputs, dict):
            return {self.prediction_key: self(inputs[self.sample_key])}
        h = self.transformer.wte(inputs) + self.transformer.wpe.weight[: inputs.shape[1]]
        for block in self.transformer.h.values():
            h = block(h)
        return self.transformer.lm_head(self.transformer.lm_head_norm(h))


def get_weight_initialized_model(model: GPT2LLM, retie: bool, std: float = 0.02) -> GPT2LLM:
    """Materialise on the CPU and draw the weights in place."""
    model = model.to_empty(device="cpu")
    if retie:
        model.tie_weights()
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        for name, p in model.named_parameters():
            if "norm" not in name:
                scaled = std / math.sqrt(2 * len(model.transformer.h)) if "c_proj" in name else std
                nn.init.zeros_(p) if name.endswith("bias") else nn.init.normal_(p, std=scaled)
    return model


def _build(retie: bool) -> nn.Module:
    with torch.device("meta"):
        model = GPT2LLM(use_weight_tying=True)
    return get_weight_initialized_model(model, retie)


def buggy() -> nn.Module:
    """As reported."""
    return _build(retie=False)


def healthy() -> nn.Module:
    """Tied again after the weights exist."""
    return _build(retie=True)


def observe(model: nn.Module) -> torch.Tensor:
    """Logits minus the final hidden state times the embedding matrix."""
    hidden: list[torch.Tensor] = []
    hook = model.transformer.lm_head_norm.register_forward_hook(lambda _m, _i, out: hidden.append(out))
    logits = model({"input_ids": torch.arange(20).view(2, 10)})["logits"]
    hook.remove()
    return logits - hidden[0] @ model.transformer.wte.weight.T
