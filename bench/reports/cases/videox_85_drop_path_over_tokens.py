"""VideoX#85 (microsoft/VideoX): X-CLIP's stochastic depth drops token positions of the whole batch.

DropPath draws one number per entry of the first axis, but the blocks work on (tokens, batch, width), so a
token position loses the branch for every video at once and no video ever skips a whole branch.
"""

import torch
from torch import nn

DECLARATION = "drop_path_rate is stochastic depth: in training each sample skips a whole branch or none of it"


class DropPath(nn.Module):
    """Stochastic depth: drops a residual branch and scales up what is kept."""

    def __init__(self, p: float, axis: int) -> None:
        super().__init__()
        self.p, self.axis = p, axis

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Drop along `axis` while training."""
        if not self.training or self.p == 0:
            return x
        shape = [n if i == self.axis else 1 for i, n in enumerate(x.shape)]
        return x * x.new_empty(shape).bernoulli_(1 - self.p) / (1 - self.p)


class CrossFrameBlock(nn.Module):
    """Frames exchange a message token, then attend within themselves."""

    def __init__(self, d: int, heads: int, frames: int, drop_path: DropPath) -> None:
        super().__init__()
        self.T = frames
        self.message_fc, self.message_ln = nn.Linear(d, d), nn.LayerNorm(d)
        self.message_attn = nn.MultiheadAttention(d, heads)
        self.attn = nn.MultiheadAttention(d, heads)
        self.ln_1, self.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))
        self.drop_path = drop_path

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run on (tokens, videos * frames, d)."""
        tokens, d = x.shape[0], x.shape[2]
        msg = self.message_fc(x[0]).view(-1, self.T, d).transpose(0, 1)
        m = self.message_ln(msg)
        msg = msg + self.drop_path(self.message_attn(m, m, m, need_weights=False)[0])
        x = torch.cat([x, msg.transpose(0, 1).reshape(1, -1, d)])
        h = self.ln_1(x)
        x = (x + self.drop_path(self.attn(h, h, h, need_weights=False)[0]))[:tokens]
        return x + self.drop_path(self.mlp(self.ln_2(x)))


class VideoEncoder(nn.Module):
    """Vision tower for short clips of 16x16 frames."""

    def __init__(
        self, *, drop_axis: int, d: int = 32, layers: int = 3, frames: int = 4, rate: float = 0.5
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, d, 8, 8, bias=False)
        self.class_embedding = nn.Parameter(d**-0.5 * torch.randn(d))
        self.positional_embedding = nn.Parameter(d**-0.5 * torch.randn(5, d))
        self.temporal_embedding = nn.Parameter(d**-0.5 * torch.randn(frames, d))
        rates = torch.linspace(0, rate, layers + 1)[1:].tolist()
        self.blocks = nn.Sequential(*(CrossFrameBlock(d, 4, frames, DropPath(p, drop_axis)) for p in rates))
        self.ln_post, self.head = nn.LayerNorm(d), nn.Linear(d, 10)

    def forward(self, video: torch.Tensor) -> torch.Tensor:
        """Logits of clips (B, frames, 3, 16, 16)."""
        b, t = video.shape[:2]
        x = self.conv1(video.flatten(0, 1)).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_embedding.expand(b * t, 1, -1), x], 1) + self.positional_embedding
        x = (x.unflatten(0, (b, t)) + self.temporal_embedding[:, None]).flatten(0, 1)
        x = self.blocks(x.transpose(0, 1))
        return self.head(self.ln_post(x[0]).view(b, t, -1).mean(1))


def buggy() -> nn.Module:
    """Drops along the axis of the tokens."""
    return VideoEncoder(drop_axis=0)


def healthy() -> nn.Module:
    """Drops along the axis of the batch."""
    return VideoEncoder(drop_axis=1)


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Which of 32 equal clips in a training batch have the first one's output: all if drops are shared."""
    model = model.double().train()
    clip = torch.randn(1, 4, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    torch.manual_seed(6)
    out = model(clip.expand(32, -1, -1, -1, -1))
    return ((out[1:] - out[:1]).abs().amax(-1) < 1e-9).double()
