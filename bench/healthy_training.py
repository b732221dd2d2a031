"""Healthy training runs of many kinds: small models on generated data, for `bench.false_alarms`.

Each kind is a function `(steps) -> Healthy`. The caller seeds torch first, so a seed fixes a whole run. No
run contains a fault. Kinds in `HELD_OUT` were written after the detection rule was fixed.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import StudentT
from torch.nn import functional as F

from stackwise.training.muon import Muon

__all__ = ["HELD_OUT", "KINDS", "Healthy"]

Batch = Any


@dataclass
class Healthy:
    """A training run without faults.

    Attributes:
        model: the trained module.
        optimizer: its optimizer.
        batches: one batch per micro-step. A batch may depend on the weights, as the episodes of a policy do.
        loss_of: loss of (model, batch), one element.
        scheduler: advanced once per update.
        accumulation: micro-batches per update.
        before_loss: called with each batch before its loss, for example to update a discriminator.
        after_update: called after each update, for example to update a target network.
        scaler: gradient scaler of float16 training.
        others: further objects with state, for the guard.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterator[Batch]
    loss_of: Callable[[nn.Module, Batch], Tensor]
    scheduler: Any = None
    accumulation: int = 1
    before_loss: Callable[[Batch], None] = lambda _batch: None
    after_update: Callable[[], None] = lambda: None
    scaler: torch.amp.GradScaler | None = None
    others: dict[str, Any] = field(default_factory=dict)


def mlp(*widths: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])


def squared_error(model: nn.Module, batch: Batch) -> Tensor:
    inputs, targets = batch
    return F.mse_loss(model(inputs), targets)


def class_loss(model: nn.Module, batch: Batch) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Next-token cross-entropy of ids (B, T + 1)."""
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def adamw(model: nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, fused=True)


def warmup_cosine(optimizer: torch.optim.Optimizer, steps: int, warmup: int = 50) -> Any:
    schedulers = torch.optim.lr_scheduler
    rise = schedulers.LinearLR(optimizer, 0.02, total_iters=warmup)
    fall = schedulers.CosineAnnealingLR(optimizer, max(1, steps - warmup))
    return schedulers.SequentialLR(optimizer, [rise, fall], [warmup])


def mlp_regression(steps: int) -> Healthy:
    """A smooth function without noise, AdamW at a learning rate of 1e-2: the loss falls far and bounces."""
    model = mlp(8, 32, 1, activation=nn.Tanh)
    weights = torch.randn(8, 1)

    def batches() -> Iterator[Batch]:
        for _ in range(steps):
            inputs = torch.randn(32, 8)
            yield inputs, torch.sin(inputs @ weights / 3)

    return Healthy(model, adamw(model, 1e-2), batches(), squared_error)


def sparse_reward_reinforce(steps: int) -> Healthy:
    """REINFORCE with a running baseline. One episode in about 150 has a reward."""
    policy = mlp(8, 32, 8)
    keys, baseline = torch.randn(8, 8), torch.zeros(())

    def batches() -> Iterator[Batch]:
        for _ in range(steps):
            states = torch.randn(16, 8)
            with torch.no_grad():
                actions = torch.multinomial(policy(states).softmax(-1), 1)[:, 0]
            right = actions == (states @ keys).argmax(-1)
            rewards = (right & (torch.rand(16) < 0.05)).float()
            yield states, actions, rewards - baseline
            baseline.lerp_(rewards.mean(), 0.05)

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        states, actions, advantages = batch
        log_chances = model(states).log_softmax(-1)
        chosen = log_chances.gather(1, actions[:, None])[:, 0]
        entropy = -(log_chances.exp() * log_chances).sum(-1).mean()
        return -(chosen * advantages).mean() - 1e-3 * entropy

    return Healthy(policy, adamw(policy), batches(), loss_of)


def rare_class(steps: int) -> Healthy:
    """A class that is in one batch of 50 only, and fills that batch."""
    model = mlp(16, 32, 5)
    centers = 2 * torch.randn(5, 16)

    def batches() -> Iterator[Batch]:
        for _ in range(steps):
            labels = torch.full((32,), 4) if torch.rand(()) < 0.02 else torch.randint(4, (32,))
            yield centers[labels] + torch.randn(32, 16), labels

    return Healthy(model, adamw(model), batches(), class_loss)


def heavy_tailed_targets(steps: int) -> Healthy:
    """Targets with Student-t(2) noise, whose variance is infinite; squared error, SGD with momentum."""
    model = mlp(8, 32, 1)
    weights, noise = torch.randn(8, 1), StudentT(2.0)

    def batches() -> Iterator[Batch]:
        for _ in range(steps):
            inputs = torch.randn(32, 8)
            yield inputs, inputs @ weights + noise.sample((32, 1))

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    return Healthy(model, optimizer, batches(), squared_error)


def small_cnn(steps: int) -> Healthy:
    """Convolutions with BatchNorm on noisy images of eight patterns, SGD with a cosine schedule."""
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 16, 8),
    )
    patterns = torch.randn(8, 1, 8, 8)

    def batches() -> Iterator[Batch]:
        for _ in range(steps):
            labels = torch.randint(8, (16,))
            yield patterns[labels] + torch.randn(16, 1, 8, 8), labels

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return Healthy(model, optimizer, batches(), class_loss, warmup_cosine(optimizer, steps))


def curriculum(steps: int) -> Healthy:
    """Four tasks of growing amplitude, one after the other."""
    model = mlp(8, 32, 1, activation=nn.Tanh)
    tasks = [(amplitude, torch.randn(8, 1)) for amplitude in (1.0, 2.0, 4.0, 8.0)]

    def batches() -> Iterator[Batch]:
        for step in range(steps):
            amplitude, weights = tasks[4 * step // steps]
            inputs = torch.randn(32, 8)
            yield inputs, amplitude * torch.tanh(inputs @ weights)

    return Healthy(model, adamw(model, 3e-3), batches(), squared_error)


def noisy_labels(steps: int) -> Healthy:
    """A classifier on labels of which a tenth is wrong, 20 passes over one data set, SGD with momentum."""
    model = mlp(16, 64, 10)
    centers = 2 * torch.randn(10, 16)
    labels = torch.randint(10, (max(1, steps // 20) * 32,))
    inputs = centers[labels] + torch.randn(len(labels), 16)
    labels = torch.where(torch.rand(len(labels)) < 0.1, torch.randint(10, (len(labels),)), labels)

    def batches() -> Iterator[Batch]:
        for _ in range(steps):
            rows = torch.randint(len(labels), (32,))
            yield inputs[rows], labels[rows]

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Healthy(model, optimizer, batches(), class_loss)


class TinyGPT(nn.Module):
    """One Transformer layer over tokens (B, T), logits (B, T, V)."""

    def __init__(self, vocabulary: int = 32, width: int = 32, length: int = 16) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layer = nn.TransformerEncoderLayer(
            width, 2, 64, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.tokens(ids) + self.places(torch.arange(length))
        return self.head(self.layer(hidden, src_mask=mask, is_causal=True))


def markov_tokens(vocabulary: int, tail: float) -> Callable[[int, int], Tensor]:
    """Sampler (batch, length) -> ids of a random Markov chain; a larger `tail` makes tokens rarer."""
    chance = torch.softmax(tail * torch.randn(vocabulary, vocabulary), dim=-1)

    def sample(batch: int, length: int) -> Tensor:
        ids = torch.randint(vocabulary, (batch, 1))
        while ids.shape[1] < length:
            ids = torch.cat([ids, torch.multinomial(chance[ids[:, -1]], 1)], dim=1)
        return ids

    return sample


def tiny_gpt(steps: int) -> Healthy:
    """A Transformer on Markov text, AdamW with warm-up and cosine decay."""
    model, sample = TinyGPT(), markov_tokens(32, 2.0)
    optimizer = adamw(model, 3e-3)
    text = sample(64, max(steps, 128) // 4)

    def batches() -> Iterator[Batch]:
        for _ in range(steps):
            start = int(torch.randint(text.shape[1] - 16, ()))
            yield text[torch.randint(64, (8,)), start : start + 17]

    return Healthy(model, optimizer, batches(), token_loss, warmup_cosine(optimizer, steps))


class TinyViT(nn.Module):
    """One Transformer layer over 16 patches of an image (B, 1, 8, 8), logits (B, 8)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.places = nn.Parameter(0.02 * torch.randn(1, 16, width))
        self.layer = nn.TransformerEncoderLayer(
            width, 2, 64, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.head = nn.Linear(width, 8)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.patches(images).flatten(2).transpose(1, 2) + self.places
        return self.head(self.layer(hidden).mean(1))


def vit_muon_accumulation(steps: int) -> Healthy:
    """A vision Transformer, Muon for matrices and AdamW for the rest, two micro-batches a step."""
    model, patterns = TinyViT(), torch.randn(8, 1, 8, 8)
    matrices = [p for p in model.layer.parameters() if p.ndim == 2]
    ids = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in ids]
    optimizer = Muon([{"params": matrices, "lr": 0.01}, {"params": rest, "kind": "adamw", "lr": 1e-3}])

    def batches() -> Iterator[Batch]:
        for _ in range(2 * steps):
            labels = torch.randint(8, (8,))
            yield patterns[labels] + torch.randn(8, 1, 8, 8), labels

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return class_loss(model, batch) / 2

    return Healthy(model, optimizer, batches(), loss_of, accumulation=2)


class TinyLSTM(nn.Module):
    def __init__(self, vocabulary: int = 16, width: int = 24) -> None:
        super().__init__()
        self.tokens, self.cell = nn.Embedding(vocabulary, width), nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.cell(self.tokens(ids))[0])


def lstm_variable_length(steps: int) -> Healthy:
    """An LSTM on sequences of 2 to 24 tokens, Adam at 1e-2 without clipping."""
    model, sample = TinyLSTM(), markov_tokens(16, 2.0)
    text = sample(64, 200)

    def batches() -> Iterator[Batch]:
        for _ in range(steps):
            length, start = int(torch.randint(2, 25, ())), int(torch.randint(175, ()))
            yield text[torch.randint(64, (4,)), start : start + length + 1]

    return Healthy(model, torch.optim.Adam(model.parameters(), lr=1e-2), batches(), token_loss)


def gan(steps: int) -> Healthy:
    """The generator of a GAN on a ring of eight points. The discriminator is updated once per batch."""
    generator, discriminator = mlp(4, 32, 2), mlp(2, 32, 1)
    optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    rival = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))

    def batches() -> Iterator[Batch]:
        for _ in range(steps):
            angle = torch.randint(8, (32,)) * (torch.pi / 4)
            real = torch.stack([angle.cos(), angle.sin()], dim=1) + 0.05 * torch.randn(32, 2)
            yield real, torch.randn(32, 4), torch.randn(32, 4)

    def update_discriminator(batch: Batch) -> None:
        real, noise, _ = batch
        with torch.no_grad():
            fake = generator(noise)
        loss = F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(fake)).mean()
        rival.zero_grad()
        loss.backward()
        rival.step()

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return F.softplus(-discriminator(model(batch[2]))).mean()

    others = {"discriminator": discriminator, "rival": rival}
    return Healthy(generator, optimizer, batches(), loss_of, before_loss=update_discriminator, others=others)


class TinyVAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(16, 32, 8), mlp(4, 32, 16)

    def forward(self, inputs: Tensor) -> Tensor:
        mean, log_variance = self.encoder(inputs).chunk(2, dim=-1)
        code = mean + (log_variance / 2).exp() * torch.randn_like(mean)
        error = (self.decoder(code) - inputs).square().sum(-1).mean()
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum(-1).mean() / 2
        return error + divergence


def vae(steps: int) -> Healthy:
    """A variational autoencoder that samples its code in each forward pass."""
    model, mixing = TinyVAE(), torch.randn(4, 16)

    def batches() -> Iterator[Batch]:
        for _ in range(steps):
            yield torch.tanh(torch.randn(32, 4) @ mixing) + 0.1 * torch.randn(32, 16)

    return Healthy(model, adamw(model, 2e-3), batches(), lambda model, batch: model(batch))


def dqn(steps: int) -> Healthy:
    """Q-learning from a replay buffer with sparse rewards, and a target network."""
    model = mlp(8, 32, 4)
    target, moves = copy.deepcopy(model), 0.3 * torch.randn(4, 8, 8)
    states = torch.randn(2000, 8)
    actions = torch.randint(4, (2000,))
    following = torch.tanh(torch.einsum("nij,nj->ni", moves[actions], states)) + 0.1 * torch.randn(2000, 8)
    rewards = 10.0 * (following[:, 0] > 0.9).float()
    updates = 0

    def batches() -> Iterator[Batch]:
        for _ in range(steps):
            rows = torch.randint(2000, (32,))
            yield states[rows], actions[rows], rewards[rows], following[rows]

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        before, action, reward, after = batch
        with torch.no_grad():
            wanted = reward + 0.95 * target(after).amax(-1)
        return F.smooth_l1_loss(model(before).gather(1, action[:, None])[:, 0], wanted)

    def renew_target() -> None:
        nonlocal updates
        updates += 1
        if updates % 100 == 0:
            target.load_state_dict(model.state_dict())

    return Healthy(
        model, torch.optim.Adam(model.parameters(), lr=1e-3), batches(), loss_of, after_update=renew_target
    )


class TinyMoE(nn.Module):
    """Four experts, of which the best one per token is used, with a load-balancing loss."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.experts = nn.ModuleList(mlp(16, 16, 8) for _ in range(4))

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.router(inputs).softmax(-1)
        best, chosen = weights.max(-1)
        outputs = torch.stack([expert(inputs) for expert in self.experts], dim=1)
        share = F.one_hot(chosen, 4).float().mean(0)
        balance = 4 * (share * weights.mean(0)).sum()
        return best[:, None] * outputs[torch.arange(len(inputs)), chosen], balance


def mixture_of_experts(steps: int) -> Healthy:
    """Top-1 routing with a load-balancing loss, AdamW."""
    model, centers = TinyMoE(), 2 * torch.randn(8, 16)

    def batches() -> Iterator[Batch]:
        for _ in range(steps):
            labels = torch.randint(8, (32,))
            yield centers[labels] + torch.randn(32, 16), labels

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        inputs, labels = batch
        logits, balance = model(inputs)
        return F.cross_entropy(logits, labels) + 0.01 * balance

    return Healthy(model, adamw(model, 3e-3), batches(), loss_of)


def rare_tokens(steps: int) -> Healthy:
    """A bag-of-words classifier with a sparse embedding on Zipf-distributed tokens, AdaGrad."""
    model = nn.Sequential(nn.EmbeddingBag(2000, 16), nn.Linear(16, 4))
    chance = 1.0 / torch.arange(1, 2001).float()
    topic = torch.randint(4, (2000,))

    def batches() -> Iterator[Batch]:
        for _ in range(steps):
            ids = torch.multinomial(chance, 8 * 16, replacement=True).view(16, 8)
            yield ids, topic[ids.amax(-1)]

    return Healthy(model, torch.optim.Adagrad(model.parameters(), lr=0.1), batches(), class_loss)


def warm_restarts(steps: int) -> Healthy:
    """Regression with a cosine schedule that restarts every 200 updates, SGD with momentum."""
    model, weights = mlp(8, 32, 1), torch.randn(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def batches() -> Iterator[Batch]:
        for _ in range(steps):
            inputs = torch.randn(16, 8)
            yield inputs, torch.sin(inputs @ weights)

    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 200)
    return Healthy(model, optimizer, batches(), squared_error, scheduler)


def batch_size_one(steps: int) -> Healthy:
    """One example a step: an easy one has a loss near 0, a hard one a loss of 5. Plain SGD."""
    model, centers = mlp(16, 32, 8), 1.5 * torch.randn(8, 16)

    def batches() -> Iterator[Batch]:
        for _ in range(steps):
            label = torch.randint(8, (1,))
            yield centers[label] + torch.randn(1, 16), label

    return Healthy(model, torch.optim.SGD(model.parameters(), lr=0.02), batches(), class_loss)


def alternating_tasks(steps: int) -> Healthy:
    """A regression with large targets and a classification share a trunk, in blocks of ten steps."""
    model = nn.ModuleDict({"trunk": mlp(8, 32, 32), "value": nn.Linear(32, 1), "label": nn.Linear(32, 4)})
    weights = torch.randn(8, 4)

    def batches() -> Iterator[Batch]:
        for step in range(steps):
            inputs = torch.randn(32, 8)
            scores = inputs @ weights
            yield inputs, (10 * scores[:, :1].sin() if step // 10 % 2 else scores.argmax(-1))

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch
        hidden = F.relu(model["trunk"](inputs))
        if targets.ndim == 2:
            return F.mse_loss(model["value"](hidden), targets)
        return F.cross_entropy(model["label"](hidden), targets)

    return Healthy(model, adamw(model), batches(), loss_of)


def denoiser_with_own_generator(steps: int) -> Healthy:
    """Denoiser with the weights of EDM (arXiv:2206.00364), whose loss draws from a generator of its own.

    A recomputation of its loss draws other noise.
    """
    model = mlp(9, 64, 8, activation=nn.SiLU)
    generator = torch.Generator().manual_seed(torch.initial_seed())

    def loss_of(model: nn.Module, clean: Tensor) -> Tensor:
        level = (1.2 * torch.randn(len(clean), 1, generator=generator) - 1.2).exp()
        noisy = clean + level * torch.randn(clean.shape, generator=generator)
        weight = (level.square() + 0.25) / (0.5 * level).square()
        return (weight * (model(torch.cat([noisy, level.log()], dim=1)) - clean).square()).mean()

    batches = (torch.randn(32, 8) for _ in range(steps))
    return Healthy(model, adamw(model), batches, loss_of)


# The following kinds were written after the detection rule was fixed.


class ActorCritic(nn.Module):
    """Logits of four actions and a value, from states (B, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.policy, self.value = mlp(8, 32, 32), nn.Linear(32, 4), nn.Linear(32, 1)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.trunk(states))
        return self.policy(hidden).log_softmax(-1), self.value(hidden)[:, 0]


def ppo_heavy_tailed_rewards(steps: int) -> Healthy:
    """PPO with a value loss, four updates per roll-out, and rewards with Student-t(2) noise."""
    model, weights, noise = ActorCritic(), torch.randn(8, 4), StudentT(2.0)

    def batches() -> Iterator[Batch]:
        for step in range(steps):
            if step % 4 == 0:
                states = torch.randn(32, 8)
                with torch.no_grad():
                    log_chances, values = model(states)
                actions = torch.multinomial(log_chances.exp(), 1)
                rewards = (states @ weights).gather(1, actions)[:, 0] + noise.sample((32,))
                old = log_chances.gather(1, actions)[:, 0]
            yield states, actions, rewards, rewards - values, old

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        states, actions, rewards, advantages, old = batch
        log_chances, values = model(states)
        ratio = (log_chances.gather(1, actions)[:, 0] - old).exp()
        gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        entropy = -(log_chances.exp() * log_chances).sum(-1).mean()
        return 0.5 * F.mse_loss(values, rewards) - gain - 0.01 * entropy

    return Healthy(model, adamw(model), batches(), loss_of)


def contrastive(steps: int) -> Healthy:
    """InfoNCE with a learned temperature on pairs of noisy views, AdamW."""
    model = mlp(16, 32, 16)
    model.register_parameter("scale", nn.Parameter(torch.tensor(2.0)))

    def batches() -> Iterator[Batch]:
        for _ in range(steps):
            items = torch.randn(32, 16)
            yield items + 0.3 * torch.randn(32, 16), items + 0.3 * torch.randn(32, 16)

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        left, right = (F.normalize(model(view), dim=-1) for view in batch)
        return F.cross_entropy(model.scale.exp() * left @ right.T, torch.arange(len(left)))

    return Healthy(model, adamw(model), batches(), loss_of)


def diffusion(steps: int) -> Healthy:
    """Prediction of the noise that was added to points on a spiral, at a random noise level, AdamW."""
    model = mlp(3, 64, 2)

    def batches() -> Iterator[Batch]:
        for _ in range(steps):
            angle, level = 6 * torch.rand(32, 1), torch.rand(32, 1)
            noise = torch.randn(32, 2)
            points = angle / 3 * torch.cat([angle.cos(), angle.sin()], dim=1)
            signal = (torch.pi / 2 * level).cos() * points + (torch.pi / 2 * level).sin() * noise
            yield torch.cat([signal, level], dim=1), noise

    return Healthy(model, adamw(model, 2e-3), batches(), squared_error)


def float16_loss_scaling(steps: int) -> Healthy:
    """A classifier in float16 autocast with a gradient scaler that starts too high, SGD with momentum."""
    model, centers = mlp(16, 32, 8), 2 * torch.randn(8, 16)

    def batches() -> Iterator[Batch]:
        for _ in range(steps):
            labels = torch.randint(8, (32,))
            yield centers[labels] + torch.randn(32, 16), labels

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return class_loss(model, batch)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=200)
    return Healthy(model, optimizer, batches(), loss_of, scaler=scaler)


def mostly_zero_loss(steps: int) -> Healthy:
    """Triplet loss with a margin: most batches soon have a loss and a gradient of exactly 0."""
    model, centers = mlp(16, 32, 8), torch.randn(6, 16)

    def batches() -> Iterator[Batch]:
        for _ in range(steps):
            labels = torch.randint(6, (8,))
            others = (labels + torch.randint(1, 6, (8,))) % 6
            yield tuple(centers[each] + 0.5 * torch.randn(8, 16) for each in (labels, labels, others))

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return F.triplet_margin_loss(*map(model, batch), margin=0.5)

    return Healthy(model, adamw(model), batches(), loss_of)


def loss_falls_by_a_million(steps: int) -> Healthy:
    """Linear regression without noise, SGD with momentum: the loss falls to rounding error."""
    model, truth = nn.Linear(8, 4), 10 * torch.randn(8, 4)

    def batches() -> Iterator[Batch]:
        for _ in range(steps):
            inputs = torch.randn(16, 8)
            yield inputs, inputs @ truth

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return Healthy(model, optimizer, batches(), squared_error)


_HELD_OUT = (
    ppo_heavy_tailed_rewards,
    contrastive,
    diffusion,
    float16_loss_scaling,
    mostly_zero_loss,
    loss_falls_by_a_million,
)
KINDS: dict[str, Callable[[int], Healthy]] = {
    kind.__name__.replace("_", " "): kind
    for kind in (
        mlp_regression,
        sparse_reward_reinforce,
        rare_class,
        heavy_tailed_targets,
        small_cnn,
        curriculum,
        noisy_labels,
        tiny_gpt,
        vit_muon_accumulation,
        lstm_variable_length,
        gan,
        vae,
        dqn,
        mixture_of_experts,
        rare_tokens,
        warm_restarts,
        batch_size_one,
        alternating_tasks,
        denoiser_with_own_generator,
        *_HELD_OUT,
    )
}
HELD_OUT = tuple(list(KINDS)[-len(_HELD_OUT) :])
