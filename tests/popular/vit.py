"""A vision transformer and its training loop, in the style of vit-pytorch and timm.

Images (B, 3, H, W) to class logits (B, classes): patches, a class token, learned positions, pre-norm blocks,
dropout. The loop uses mixup, label smoothing, AdamW, a cosine schedule and an exponential moving average of
the weights.

Shapes: B batch, N tokens, C width, H heads.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from stackwise import ModelSpec, TrainerSpec

IMAGE_SIZE, CLASSES = 16, 10


class Attention(nn.Module):
    def __init__(self, dim, heads, dropout):
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.to_out = nn.Sequential(nn.Linear(dim, dim), nn.Dropout(dropout))

    def forward(self, x):
        q, k, v = (self.split(y) for y in self.to_qkv(x).chunk(3, dim=-1))
        weights = self.dropout((q @ k.transpose(-1, -2) * self.scale).softmax(dim=-1))
        return self.to_out((weights @ v).transpose(1, 2).flatten(2))

    def split(self, x):
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)


class Block(nn.Module):
    def __init__(self, dim, heads, mlp_dim, dropout):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim, heads, dropout)
        self.mlp = nn.Sequential(
            nn.Linear(dim, mlp_dim),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(mlp_dim, dim),
            nn.Dropout(dropout),
        )

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(
        self,
        image_size=IMAGE_SIZE,
        patch_size=4,
        num_classes=CLASSES,
        dim=32,
        depth=2,
        heads=4,
        mlp_dim=64,
        dropout=0.1,
        convolutional_stem=False,
    ):
        super().__init__()
        n_patches = (image_size // patch_size) ** 2
        self.patch_embed = self.stem(dim) if convolutional_stem else nn.Conv2d(3, dim, patch_size, patch_size)
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        self.pos_embed = nn.Parameter(torch.randn(1, n_patches + 1, dim) * 0.02)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dim, heads, mlp_dim, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)
        nn.init.zeros_(self.head.bias)
        nn.init.normal_(self.head.weight, std=0.02)

    def stem(self, dim):
        """Two convolutions of stride 2 with batch norm in place of one of stride 4."""
        return nn.Sequential(
            nn.Conv2d(3, dim // 2, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(dim // 2),
            nn.ReLU(),
            nn.Conv2d(dim // 2, dim, 3, stride=2, padding=1),
        )

    def patches(self, img):
        """Return (B, N, C)."""
        return self.patch_embed(img).flatten(2).transpose(1, 2)

    def forward(self, img):
        x = self.patches(img)
        x = torch.cat((self.cls_token.expand(len(x), -1, -1), x), dim=1)
        x = self.dropout(x + self.pos_embed[:, : x.size(1)])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


def tiny():
    return ViT()


def convolutional():
    return ViT(convolutional_stem=True)


def images(batch_size, generator=None, width=IMAGE_SIZE):
    """Return images (B, 3, 16, width) and labels (B,). A class is a frequency of vertical stripes."""
    labels = torch.randint(CLASSES, (batch_size,), generator=generator)
    columns = torch.arange(width) / IMAGE_SIZE
    stripes = torch.sin(torch.pi * (labels[:, None] + 1) * columns)
    noise = torch.randn(batch_size, 3, IMAGE_SIZE, width, generator=generator)
    return stripes[:, None, None, :] + 0.5 * noise, labels


class Loop:
    """Mixup and label smoothing, AdamW without decay of vectors, cosine schedule, clipping and an average."""

    learning_rate, weight_decay, grad_clip, smoothing, mixup_alpha, steps = 1e-3, 0.05, 1.0, 0.1, 0.2, 200
    saved = ("model", "optimizer", "scheduler", "ema")

    def __init__(self):
        self.model = self.create_model()
        decayed = [p for p in self.model.parameters() if p.ndim > 1]
        others = [p for p in self.model.parameters() if p.ndim <= 1]
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=self.learning_rate, weight_decay=self.weight_decay)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, self.steps)
        self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.99), use_buffers=True)

    def create_model(self):
        return tiny()

    def loss(self, batch):
        img, labels = batch
        targets = F.one_hot(labels, CLASSES).float()
        share = float(np.random.beta(self.mixup_alpha, self.mixup_alpha))  # noqa: NPY002  as timm does
        order = torch.arange(len(img) - 1, -1, -1)
        img, targets = torch.lerp(img[order], img, share), torch.lerp(targets[order], targets, share)
        return F.cross_entropy(self.model(img), targets, label_smoothing=self.smoothing)

    def step(self, batch):
        loss = self.loss(batch)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.grad_clip)
        self.update()
        self.ema.update_parameters(self.model)
        return loss.detach()

    def update(self):
        self.optimizer.step()
        self.scheduler.step()

    @torch.no_grad()
    def evaluate(self, batches):
        """Return the mean cross-entropy of all images."""
        self.model.eval()
        total, count = 0.0, 0
        for img, labels in batches:
            total += float(F.cross_entropy(self.model(img), labels, reduction="sum"))
            count += len(labels)
        self.model.train()
        return total / count

    def save(self, folder):
        parts = {name: getattr(self, name).state_dict() for name in self.saved}
        numpy_state = np.random.get_state()  # noqa: NPY002
        torch.save({**parts, "torch": torch.get_rng_state(), "numpy": numpy_state}, folder / "last.pt")

    def load(self, folder):
        checkpoint = torch.load(folder / "last.pt", weights_only=False)
        for name in self.saved:
            getattr(self, name).load_state_dict(checkpoint[name])
        torch.set_rng_state(checkpoint["torch"])
        np.random.set_state(checkpoint["numpy"])  # noqa: NPY002


def make_images(batch_size, seq_len, generator):
    """Return images of `seq_len` patches: four rows of them, and as many columns as it takes."""
    return images(batch_size, generator, width=seq_len)[0]


def classification_loss(model, img):
    """Return the cross-entropy of arbitrary labels, so that a batch is images alone."""
    return F.cross_entropy(model(img), torch.arange(len(img), device=img.device) % CLASSES)


def classifier(build=tiny):
    """Return the model as an image classifier."""
    return ModelSpec.of(build, make_batch=make_images, loss=classification_loss)


def convolutional_classifier():
    return classifier(convolutional)


def decayed(name, parameter):
    return parameter.ndim > 1


def trainer(loop=None):
    """Return the loop with all that it claims."""
    claims = {"max_norm": Loop.grad_clip, "decayed": decayed, "frozen": ()}

    def make_batch(batch_size, seq_len, generator):
        return images(batch_size, generator)

    return TrainerSpec.of(loop or Loop, make_batch=make_batch, **claims)


class ConvolutionalLoop(Loop):
    def create_model(self):
        return convolutional()
