"""A GPT, its engine and its training loop in the style of nanochat (https://github.com/karpathy/nanochat).

RMS norm without weights, rotary embeddings as buffers outside the state dict, normalized queries and keys,
grouped queries, squared ReLU, an untied head, capped logits, value embeddings, and learned scalars on the
residual stream. Muon trains the matrices, AdamW the rest.

Shapes: B batch, T new positions, S all positions, H query heads, K key and value heads, D head size, C width.
"""

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec, TrainerSpec
from tests.popular import nanogpt


@dataclass
class GPTConfig:
    sequence_len: int = 32
    vocab_size: int = 60
    n_layer: int = 4
    n_head: int = 4
    n_kv_head: int = 2
    n_embd: int = 32
    window_pattern: str = "SL"
    smear: bool = True


def norm(x):
    return F.rms_norm(x, (x.size(-1),))


def has_ve(layer_idx, n_layer):
    """Return True if the layer has a value embedding: every second layer, and the last one."""
    return layer_idx % 2 == (n_layer - 1) % 2


def apply_rotary_emb(x, cos, sin):
    x1, x2 = x.chunk(2, dim=3)
    return torch.cat([x1 * cos + x2 * sin, x2 * cos - x1 * sin], dim=3)


class Linear(nn.Linear):
    """Linear layer that casts its weight to the dtype of its input."""

    def forward(self, x):
        return F.linear(x, self.weight.to(dtype=x.dtype))


class KVCache:
    """Keys and values of all layers (layers, B, S, K, D), allocated for `seq_len` positions."""

    def __init__(self, batch_size, num_heads, seq_len, head_dim, num_layers, device, dtype):
        shape = (num_layers, batch_size, seq_len, num_heads, head_dim)
        self.batch_size, self.n_layers = batch_size, num_layers
        self.k_cache = torch.zeros(shape, device=device, dtype=dtype)
        self.v_cache = torch.zeros(shape, device=device, dtype=dtype)
        self.cache_seqlens = torch.zeros(batch_size, dtype=torch.int32, device=device)
        self.prev_embedding = None

    def get_pos(self):
        return int(self.cache_seqlens[0])

    def advance(self, num_tokens):
        self.cache_seqlens += num_tokens

    def insert(self, layer_idx, k, v):
        """Store k and v (B, T, K, D) and return those of all positions so far."""
        start = self.get_pos()
        end = start + k.size(1)
        self.k_cache[layer_idx, :, start:end] = k
        self.v_cache[layer_idx, :, start:end] = v
        return self.k_cache[layer_idx, :, :end], self.v_cache[layer_idx, :, :end]

    def prefill(self, other):
        """Copy the one row of `other` to every row."""
        pos = other.get_pos()
        self.k_cache[:, :, :pos] = other.k_cache[:, :, :pos]
        self.v_cache[:, :, :pos] = other.v_cache[:, :, :pos]
        self.cache_seqlens.fill_(pos)
        if other.prev_embedding is not None:
            self.prev_embedding = other.prev_embedding.expand(self.batch_size, -1, -1).clone()


class CausalSelfAttention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.layer_idx, self.n_head, self.n_kv_head = layer_idx, config.n_head, config.n_kv_head
        self.head_dim = config.n_embd // config.n_head
        kv_dim = self.n_kv_head * self.head_dim
        self.c_q = Linear(config.n_embd, config.n_embd, bias=False)
        self.c_k = Linear(config.n_embd, kv_dim, bias=False)
        self.c_v = Linear(config.n_embd, kv_dim, bias=False)
        self.c_proj = Linear(config.n_embd, config.n_embd, bias=False)
        self.ve_gate = Linear(12, self.n_kv_head, bias=False) if has_ve(layer_idx, config.n_layer) else None

    def forward(self, x, ve, cos_sin, window, kv_cache):
        B, T, C = x.size()
        q = self.c_q(x).view(B, T, self.n_head, self.head_dim)
        k = self.c_k(x).view(B, T, self.n_kv_head, self.head_dim)
        v = self.c_v(x).view(B, T, self.n_kv_head, self.head_dim)
        if ve is not None:
            gate = 3 * torch.sigmoid(self.ve_gate(x[..., :12]))
            v = v + gate.unsqueeze(-1) * ve.view(B, T, self.n_kv_head, self.head_dim)
        q, k = self.position(q, k, *cos_sin)
        if kv_cache is not None:
            k, v = kv_cache.insert(self.layer_idx, k, v)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=self.mask(T, k.size(1), window, x.device),
            enable_gqa=self.n_head != self.n_kv_head,
        )
        if kv_cache is not None and self.layer_idx == kv_cache.n_layers - 1:
            kv_cache.advance(T)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))

    def position(self, q, k, cos, sin):
        q, k = norm(apply_rotary_emb(q, cos, sin)), norm(apply_rotary_emb(k, cos, sin))
        return q * 1.2, k * 1.2

    def mask(self, T, S, window, device):
        """Return the mask (T, S): each query sees itself and `window` positions before it."""
        rows = torch.arange(S - T, S, device=device)[:, None]
        columns = torch.arange(S, device=device)
        return (columns <= rows) & (rows - columns <= window)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.c_proj = Linear(4 * config.n_embd, config.n_embd, bias=False)

    def forward(self, x):
        return self.c_proj(F.relu(self.c_fc(x)).square())


class Block(nn.Module):
    def __init__(self, config, layer_idx, attention):
        super().__init__()
        self.attn, self.mlp = attention(config, layer_idx), MLP(config)

    def forward(self, x, ve, cos_sin, window, kv_cache):
        x = x + self.attn(norm(x), ve, cos_sin, window, kv_cache)
        return x + self.mlp(norm(x))


class GPT(nn.Module):
    attention = CausalSelfAttention

    def __init__(self, config, pad_vocab_size_to=64):
        super().__init__()
        self.config = config
        padded = -(-config.vocab_size // pad_vocab_size_to) * pad_vocab_size_to
        layers = range(config.n_layer)
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(padded, config.n_embd),
                "h": nn.ModuleList(Block(config, i, self.attention) for i in layers),
            }
        )
        self.lm_head = Linear(config.n_embd, padded, bias=False)
        self.resid_lambdas = nn.Parameter(torch.ones(config.n_layer))
        self.x0_lambdas = nn.Parameter(torch.zeros(config.n_layer))
        if config.smear:
            self.smear_gate = Linear(24, 1, bias=False)
            self.smear_lambda = nn.Parameter(torch.zeros(1))
        self.head_dim = config.n_embd // config.n_head
        kv_dim = config.n_kv_head * self.head_dim
        self.value_embeds = nn.ModuleDict(
            {str(i): nn.Embedding(padded, kv_dim) for i in layers if has_ve(i, config.n_layer)}
        )
        self.windows = self._compute_windows(config)
        self.init_rotary()

    def init_rotary(self):
        frequencies = 100000 ** -(torch.arange(0, self.head_dim, 2) / self.head_dim)
        angles = torch.outer(torch.arange(10 * self.config.sequence_len).float(), frequencies)
        self.register_buffer("cos", angles.cos()[None, :, None], persistent=False)
        self.register_buffer("sin", angles.sin()[None, :, None], persistent=False)

    @staticmethod
    def _compute_windows(config):
        sizes = {"L": config.sequence_len, "S": config.sequence_len // 4}
        pattern = (config.window_pattern * config.n_layer)[: config.n_layer - 1]
        return [*(sizes[kind] for kind in pattern), config.sequence_len]

    @torch.no_grad()
    def init_weights(self):
        nn.init.normal_(self.transformer.wte.weight, std=0.8)
        nn.init.normal_(self.lm_head.weight, std=0.001)
        s = (3 / self.config.n_embd) ** 0.5
        for block in self.transformer.h:
            for linear in (block.attn.c_q, block.attn.c_k, block.attn.c_v):
                nn.init.uniform_(linear.weight, -s, s)
            nn.init.zeros_(block.attn.c_proj.weight)
            nn.init.uniform_(block.mlp.c_fc.weight, -0.4 * s, 0.4 * s)
            nn.init.zeros_(block.mlp.c_proj.weight)
            if block.attn.ve_gate is not None:
                nn.init.uniform_(block.attn.ve_gate.weight, 0.0, 0.02)
        for embedding in self.value_embeds.values():
            nn.init.uniform_(embedding.weight, -s, s)
        if self.config.smear:
            nn.init.uniform_(self.smear_gate.weight, 0.0, 0.02)

    def get_device(self):
        return self.transformer.wte.weight.device

    def forward(self, idx, targets=None, kv_cache=None, loss_reduction="mean"):
        T = idx.size(1)
        start = 0 if kv_cache is None else kv_cache.get_pos()
        cos_sin = self.rotary(start, start + T)
        x = norm(self.transformer.wte(idx))
        x = self.smear(x, kv_cache) if self.config.smear else x
        x0 = x
        for i, block in enumerate(self.transformer.h):
            x = self.resid_lambdas[i] * x + self.x0_lambdas[i] * x0
            ve = self.value_embeds[str(i)](idx) if str(i) in self.value_embeds else None
            x = block(x, ve, cos_sin, self.windows[i], kv_cache)
        logits = self.lm_head(norm(x))[..., : self.config.vocab_size].float()
        logits = 15 * torch.tanh(logits / 15)
        if targets is None:
            return logits
        return F.cross_entropy(
            logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1, reduction=loss_reduction
        )

    def rotary(self, start, end):
        assert end <= self.cos.size(1), f"position {end} is beyond {self.cos.size(1)} rotary embeddings"
        return self.cos[:, start:end], self.sin[:, start:end]

    def smear(self, x, kv_cache):
        """Add a share of the previous token's embedding."""
        before = None if kv_cache is None else kv_cache.prev_embedding
        if before is None:
            before = torch.zeros_like(x[:, :1])
        if kv_cache is not None:
            kv_cache.prev_embedding = x[:, -1:]
        gate = self.smear_lambda * torch.sigmoid(self.smear_gate(x[..., :24]))
        return x + gate * torch.cat([before, x[:, :-1]], dim=1)

    def setup_optimizers(self, unembedding_lr=0.004, embedding_lr=0.2, matrix_lr=0.02, scalar_lr=0.5):
        """Return AdamW for embeddings, head and scalars, and Muon for matrices."""
        scale = (self.config.n_embd / 768) ** -0.5
        scalars = [self.resid_lambdas, self.x0_lambdas]
        if self.config.smear:
            scalars += [self.smear_gate.weight, self.smear_lambda]
        adamw = torch.optim.AdamW(
            [
                {"params": list(self.lm_head.parameters()), "lr": unembedding_lr * scale},
                {"params": list(self.transformer.wte.parameters()), "lr": embedding_lr * scale},
                {"params": list(self.value_embeds.parameters()), "lr": embedding_lr * scale},
                {"params": scalars, "lr": scalar_lr * 0.01},
            ],
            betas=(0.8, 0.95),
            eps=1e-10,
            weight_decay=0.0,
        )
        muon = Muon(list(self.transformer.h.parameters()), lr=matrix_lr, momentum=0.95)
        for optimizer in (adamw, muon):
            for group in optimizer.param_groups:
                group["initial_lr"] = group["lr"]
        return [adamw, muon]

    @torch.inference_mode()
    def generate(self, tokens, max_tokens, temperature=1.0, top_k=None, seed=42):
        """Yield one token at a time, without a cache."""
        rng = torch.Generator(device=self.get_device()).manual_seed(seed)
        ids = torch.tensor([tokens], device=self.get_device())
        for _ in range(max_tokens):
            next_ids = sample_next_token(self(ids)[:, -1], rng, temperature, top_k)
            ids = torch.cat([ids, next_ids], dim=1)
            yield int(next_ids)


@torch.inference_mode()
def sample_next_token(logits, rng, temperature=1.0, top_k=None):
    if temperature == 0.0:
        return logits.argmax(dim=-1, keepdim=True)
    values, indices = torch.topk(logits, top_k or logits.size(-1), dim=-1)
    choice = torch.multinomial(F.softmax(values / temperature, dim=-1), num_samples=1, generator=rng)
    return indices.gather(1, choice)


def cache_of(model, batch_size, seq_len):
    config, weight = model.config, model.lm_head.weight
    sizes = {"num_heads": config.n_kv_head, "head_dim": model.head_dim, "num_layers": config.n_layer}
    return KVCache(batch_size, seq_len=seq_len, **sizes, device=weight.device, dtype=weight.dtype)


class Engine:
    """Generate several rows from one prompt: one prefill, then one token at a time through a cache."""

    def __init__(self, model):
        self.model = model

    @torch.inference_mode()
    def generate(self, tokens, num_samples=1, max_tokens=8, temperature=1.0, top_k=None, seed=42):
        rng = torch.Generator(device=self.model.get_device()).manual_seed(seed)
        prompt = cache_of(self.model, 1, len(tokens))
        ids = torch.tensor([tokens], device=self.model.get_device())
        logits = self.model(ids, kv_cache=prompt)[:, -1].expand(num_samples, -1)
        cache = cache_of(self.model, num_samples, len(tokens) + max_tokens)
        cache.prefill(prompt)
        for _ in range(max_tokens):
            ids = sample_next_token(logits, rng, temperature, top_k)
            yield ids[:, 0].tolist()
            logits = self.model(ids, kv_cache=cache)[:, -1]


def orthogonalized(G, steps=5):
    """Return G (rows, columns) with singular values near 1, by a quintic Newton-Schulz iteration."""
    a, b, c = 3.4445, -4.7750, 2.0315
    X = G.mT if G.size(0) > G.size(1) else G
    X = X / (X.norm() + 1e-7)
    for _ in range(steps):
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return X.mT if G.size(0) > G.size(1) else X


class Muon(torch.optim.Optimizer):
    """Momentum, whose update of each matrix is orthogonalized. One group for each shape."""

    def __init__(self, params, lr=0.02, momentum=0.95, nesterov=True, ns_steps=5):
        shapes = sorted({p.shape for p in params})
        groups = [{"params": [p for p in params if p.shape == shape]} for shape in shapes]
        super().__init__(groups, {"lr": lr, "momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p.grad)
                buffer = state["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
                update = orthogonalized(update, group["ns_steps"])
                p.add_(update, alpha=-group["lr"] * max(1.0, p.size(0) / p.size(1)) ** 0.5)


def tiny():
    model = GPT(GPTConfig())
    model.init_weights()
    return model


def no_smear():
    """The first version of the model, whose layers all see the whole sequence."""
    model = GPT(GPTConfig(smear=False, window_pattern="L"))
    model.init_weights()
    return model


def decode(model, ids, cache):
    """Return the logits of tokens (B, T) that follow those in the cache, and the cache."""
    if cache is None:
        cache = cache_of(model, ids.size(0), 10 * model.config.sequence_len)
    return model(ids, kv_cache=cache), cache


class Loop:
    """The loop of base_train.py: two optimizers, whose rates and momentum follow the step number.

    Gradient accumulation weighs all micro-batches the same, as `averages_batches` says.
    """

    averages_batches = ("accumulate",)
    num_iterations, warmup_iters, warmdown_ratio, final_lr_frac = 300, 5, 0.4, 0.05

    def __init__(self):
        self.model = self.create_model()
        self.optimizer = self.create_optimizers()
        self.iteration = 0

    def create_model(self):
        return tiny()

    def create_optimizers(self):
        return self.model.setup_optimizers()

    @classmethod
    def get_lr_multiplier(cls, it):
        warmdown = round(cls.warmdown_ratio * cls.num_iterations)
        if it < cls.warmup_iters:
            return (it + 1) / cls.warmup_iters
        if it <= cls.num_iterations - warmdown:
            return 1.0
        progress = max(0.0, (cls.num_iterations - it) / warmdown)
        return progress + (1 - progress) * cls.final_lr_frac

    @staticmethod
    def get_muon_momentum(it):
        share = min(it / 40, 1.0)
        return (1 - share) * 0.85 + share * 0.95

    def update(self):
        for optimizer in self.optimizer:
            optimizer.step()

    def set_schedule(self, it):
        for optimizer in self.optimizer:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * self.get_lr_multiplier(it)
                if "momentum" in group:
                    group["momentum"] = self.get_muon_momentum(it)

    def loss(self, batch):
        return self.model(*batch)

    def step(self, batch):
        return self.accumulate([batch])

    def accumulate(self, batches):
        total = 0.0
        for batch in batches:
            loss = self.loss(batch) / len(batches)
            loss.backward()
            total = total + loss.detach()
        self.set_schedule(self.iteration)
        self.update()
        self.model.zero_grad(set_to_none=True)
        self.iteration += 1
        return total

    @torch.no_grad()
    def evaluate(self, batches):
        """Return the mean loss of all targets in nats, from the loss of each target."""
        self.model.eval()
        total, count = 0.0, 0
        for idx, targets in batches:
            total += float(self.model(idx, targets, loss_reduction="sum"))
            count += int((targets != -1).sum())
        self.model.train()
        return total / count

    def save(self, folder):
        torch.save(self.model.state_dict(), folder / "model.pt")
        torch.save([optimizer.state_dict() for optimizer in self.optimizer], folder / "optim.pt")
        meta = {"iteration": self.iteration, "model_config": asdict(self.model.config)}
        torch.save({**meta, "rng": torch.get_rng_state()}, folder / "meta.pt")

    def load(self, folder):
        meta = torch.load(folder / "meta.pt", weights_only=True)
        self.model.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
        states = torch.load(folder / "optim.pt", weights_only=True)
        for optimizer, state in zip(self.optimizer, states, strict=True):
            optimizer.load_state_dict(state)
        self.iteration = meta["iteration"]
        torch.set_rng_state(meta["rng"])


def matrix_lr(it):
    """Return the learning rate of Muon at a step."""
    return 0.02 * Loop.get_lr_multiplier(it)


def trainer(loop=Loop):
    """Return the loop with all that it claims."""
    claims = {"learning_rate": matrix_lr, "frozen": (), "ignored_label": -1}
    return TrainerSpec.of(loop, make_batch=nanogpt.make_batch, **claims)


class Optimizers:
    """Several optimizers behind the methods of one, as many projects write it."""

    def __init__(self, optimizers):
        self.optimizers = optimizers

    def __iter__(self):
        return iter(self.optimizers)

    @property
    def param_groups(self):
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none=True):
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def state_dict(self):
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state):
        for optimizer, one in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(one)


class ContainerLoop(Loop):
    def create_optimizers(self):
        return Optimizers(super().create_optimizers())


def cached():
    """Return the model with its cache, which is an object that the model changes."""
    return ModelSpec.of(tiny, decode=decode)
