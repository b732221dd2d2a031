"""A GPT and its training loop in the style of nanoGPT (https://github.com/karpathy/nanoGPT).

Tied embedding and head, learned positions, dropout. `forward(idx, targets=None)` returns logits and loss.
Without targets it returns the logits of the last position only. Target -1 is ignored.

Shapes: B batch, T positions, C width, H heads, V vocabulary.
"""

import contextlib
import math
from dataclasses import asdict, dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from stackwise import TrainerSpec


@dataclass
class GPTConfig:
    block_size: int = 32
    vocab_size: int = 65
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 32
    dropout: float = 0.1
    bias: bool = True


class LayerNorm(nn.Module):
    """Layer norm with an optional bias."""

    def __init__(self, width, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head, self.n_embd, self.dropout = config.n_head, config.n_embd, config.dropout

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (y.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for y in (q, k, v))
        y = self.attend(q, k, v).transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))

    def attend(self, q, k, v):
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)


class ManualAttention(CausalSelfAttention):
    """Attention of torch versions without a fused kernel: the mask is a buffer of block_size x block_size."""

    def __init__(self, config):
        super().__init__(config)
        self.attn_dropout = nn.Dropout(config.dropout)
        mask = torch.tril(torch.ones(config.block_size, config.block_size))
        self.register_buffer("bias", mask.view(1, 1, config.block_size, config.block_size))

    def attend(self, q, k, v):
        T = q.size(2)
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        scores = scores.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        return self.attn_dropout(F.softmax(scores, dim=-1)) @ v


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, config, attention):
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, config.bias)
        self.attn = attention(config)
        self.ln_2 = LayerNorm(config.n_embd, config.bias)
        self.mlp = MLP(config)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    attention = CausalSelfAttention

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "drop": nn.Dropout(config.dropout),
                "h": nn.ModuleList(Block(config, self.attention) for _ in range(config.n_layer)),
                "ln_f": LayerNorm(config.n_embd, config.bias),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.n_layer))

    def _init_weights(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, idx, targets=None):
        T = idx.size(1)
        assert self.config.block_size >= T, (
            f"sequence of length {T}, but block size is {self.config.block_size}"
        )
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(T, device=idx.device))
        x = self.transformer.drop(x)
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, self.loss(logits, targets)

    def loss(self, logits, targets):
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)

    def crop_block_size(self, block_size):
        assert block_size <= self.config.block_size
        self.config.block_size = block_size
        self.transformer.wpe.weight = nn.Parameter(self.transformer.wpe.weight[:block_size])
        for block in self.transformer.h:
            if hasattr(block.attn, "bias"):
                block.attn.bias = block.attn.bias[:, :, :block_size, :block_size]

    def configure_optimizers(self, weight_decay, learning_rate, betas):
        parameters = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas)

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        for _ in range(max_new_tokens):
            logits, _ = self(idx[:, -self.config.block_size :])
            logits = logits[:, -1, :] / temperature
            if top_k is not None:
                largest, _ = torch.topk(logits, min(top_k, logits.size(-1)))
                logits[logits < largest[:, [-1]]] = -float("inf")
            probabilities = F.softmax(logits, dim=-1)
            idx = torch.cat((idx, torch.multinomial(probabilities, num_samples=1)), dim=1)
        return idx


class ManualGPT(GPT):
    attention = ManualAttention


def tiny():
    return GPT(GPTConfig())


def manual():
    return ManualGPT(GPTConfig(dropout=0.0, bias=False))


def cropped():
    """A model built for 64 positions and cropped to 32."""
    model = ManualGPT(GPTConfig(block_size=64))
    model.crop_block_size(32)
    return model


def text(n_tokens=4096, vocab_size=60, seed=0):
    """Return n_tokens uint16 tokens of a noisy cycle, so that there is something to learn."""
    rng = np.random.default_rng(seed)
    noise = rng.random(n_tokens) < 0.2
    return np.where(noise, rng.integers(0, vocab_size, n_tokens), np.arange(n_tokens) % 17).astype(np.uint16)


def get_batch(data, batch_size, block_size, generator=None):
    """Return x and y (B, T): rows of an array of tokens, and the same one token later."""
    starts = torch.randint(len(data) - block_size, (batch_size,), generator=generator)
    x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in starts])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in starts])
    return x, y


def make_batch(batch_size, seq_len, generator):
    return get_batch(text(), batch_size, seq_len, generator)


class Loop:
    """The loop of train.py. `accumulate` is one update.

    Gradient accumulation and estimate_loss weigh all batches the same: `averages_batches` says so.
    """

    averages_batches = ("accumulate", "evaluate")

    learning_rate, min_lr = 1e-2, 1e-3
    warmup_iters, lr_decay_iters = 4, 300
    weight_decay, betas, grad_clip = 0.1, (0.9, 0.95), 1.0

    def __init__(self, dtype="float32"):
        self.model = self.create_model()
        self.optimizer = self.create_optimizer()
        self.context = (
            contextlib.nullcontext() if dtype == "float32" else torch.autocast("cpu", getattr(torch, dtype))
        )
        self.scaler = torch.amp.GradScaler("cpu", enabled=dtype == "float16")
        self.iter_num = 0

    def create_model(self):
        return tiny()

    def create_optimizer(self):
        return self.model.configure_optimizers(self.weight_decay, self.learning_rate, self.betas)

    @classmethod
    def get_lr(cls, it):
        if it < cls.warmup_iters:
            return cls.learning_rate * (it + 1) / (cls.warmup_iters + 1)
        if it > cls.lr_decay_iters:
            return cls.min_lr
        ratio = (it - cls.warmup_iters) / (cls.lr_decay_iters - cls.warmup_iters)
        return cls.min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (cls.learning_rate - cls.min_lr)

    def loss(self, batch):
        with self.context:
            return self.model(*batch)[1]

    def micro_loss(self, batch, n_batches):
        return self.loss(batch) / n_batches

    def set_lr(self, it):
        for group in self.optimizer.param_groups:
            group["lr"] = self.get_lr(it)

    def step(self, batch):
        return self.accumulate([batch])

    def accumulate(self, batches):
        self.set_lr(self.iter_num)
        total = 0.0
        for batch in batches:
            loss = self.micro_loss(batch, len(batches))
            self.scaler.scale(loss).backward()
            total = total + loss.detach()
        self.clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.iter_num += 1
        return total

    def clip(self):
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.grad_clip)

    @torch.no_grad()
    def evaluate(self, batches):
        self.model.eval()
        losses = torch.tensor([self.loss(batch).item() for batch in batches])
        self.model.train()
        return losses.mean().item()

    def save(self, folder):
        checkpoint = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "model_args": asdict(self.model.config),
            "iter_num": self.iter_num,
            "rng": torch.get_rng_state(),
        }
        torch.save(checkpoint, folder / "ckpt.pt")

    def load(self, folder):
        checkpoint = torch.load(folder / "ckpt.pt", weights_only=True)
        self.model = GPT(GPTConfig(**checkpoint["model_args"]))
        self.model.load_state_dict(checkpoint["model"])
        self.optimizer = self.create_optimizer()
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.scaler.load_state_dict(checkpoint["scaler"])
        self.iter_num = checkpoint["iter_num"]
        torch.set_rng_state(checkpoint["rng"])


class HalfLoop(Loop):
    """The same in float16, which needs the gradient scaler."""

    def __init__(self):
        super().__init__("float16")


def decayed(name, parameter):
    return parameter.dim() >= 2


def trainer(loop=Loop):
    """Return the loop with all that it claims."""
    claims = {"max_norm": loop.grad_clip, "learning_rate": loop.get_lr, "decayed": decayed, "frozen": ()}
    return TrainerSpec.of(loop, make_batch=make_batch, ignored_label=-1, **claims)
