"""x-lstm#2 (myscience/x-lstm): a stack of mLSTM and sLSTM layers has only mLSTM layers.

The list of layer kinds is repeated instead of its items, so the condition that selects the class of a layer
sees a list, which is not empty and therefore true.
"""

from collections.abc import Callable
from itertools import cycle, repeat

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

VOCAB_SIZE, SIGNATURE = 48, (1, 1)
Hidden = list[tuple[Tensor, ...]]


class BlockLinear(nn.Module):
    """One matrix for each head."""

    def __init__(self, head_num: int, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(head_num, head_dim, head_dim) * head_dim**-0.5)

    def forward(self, h: Tensor) -> Tensor:
        """`h` is (batch, heads * head_dim)."""
        return torch.einsum("bhd,hde->bhe", h.unflatten(-1, self.weight.shape[:2]), self.weight).flatten(1)


class SLSTM(nn.Module):
    """Scalar memory with exponential gates, and memory mixing within each head."""

    def __init__(self, inp_dim: int, head_dim: int, head_num: int, p_factor: float = 4 / 3) -> None:
        super().__init__()
        hid_dim, proj_dim = head_num * head_dim, int(p_factor * head_num * head_dim)
        self.hid_dim = hid_dim
        self.inp_norm, self.hid_norm = nn.LayerNorm(inp_dim), nn.GroupNorm(head_num, hid_dim)
        self.W_z, self.W_i, self.W_o, self.W_f = (nn.Linear(inp_dim, hid_dim) for _ in range(4))
        self.R_z, self.R_i, self.R_o, self.R_f = (BlockLinear(head_num, head_dim) for _ in range(4))
        self.up_proj, self.down_proj = nn.Linear(hid_dim, 2 * proj_dim), nn.Linear(proj_dim, inp_dim)

    def init_hidden(self, seq: Tensor) -> tuple[Tensor, ...]:
        """Cell, normaliser, hidden and stabiliser state of a batch."""
        return tuple(seq.new_zeros(seq.shape[0], self.hid_dim) for _ in range(4))

    def forward(self, seq: Tensor, hid: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One step; `seq` is (batch, inp_dim)."""
        c, n, h, m = hid
        x = self.inp_norm(seq)
        log_i, log_f = self.W_i(x) + self.R_i(h), F.logsigmoid(self.W_f(x) + self.R_f(h))
        z, o = (self.W_z(x) + self.R_z(h)).tanh(), (self.W_o(x) + self.R_o(h)).sigmoid()
        new_m = torch.maximum(log_f + m, log_i)
        i, f = (log_i - new_m).exp(), (log_f + m - new_m).exp()
        c, n = f * c + i * z, f * n + i
        h = o * c / n
        out, gate = self.up_proj(self.hid_norm(h)).chunk(2, dim=-1)
        return seq + self.down_proj(out * F.gelu(gate)), (c, n, h, new_m)


class MLSTM(nn.Module):
    """Matrix memory, with a causal convolution for queries and keys."""

    def __init__(self, inp_dim: int, head_dim: int, head_num: int, p_factor: int = 2, ker: int = 4) -> None:
        super().__init__()
        up_dim, hid_dim = p_factor * inp_dim, head_num * head_dim
        self.heads, self.kept = (head_num, head_dim), (ker - 1, up_dim)
        self.inp_norm, self.hid_norm = nn.LayerNorm(inp_dim), nn.GroupNorm(head_num, hid_dim)
        self.up_l_proj, self.up_r_proj = nn.Linear(inp_dim, up_dim), nn.Linear(inp_dim, hid_dim)
        self.down_proj, self.skip = nn.Linear(hid_dim, inp_dim), nn.Linear(up_dim, hid_dim, bias=False)
        self.causal_conv = nn.Conv1d(up_dim, up_dim, ker, groups=up_dim)
        self.W_i, self.W_f = nn.Linear(up_dim, head_num), nn.Linear(up_dim, head_num)
        self.W_o, self.W_q, self.W_k, self.W_v = (nn.Linear(up_dim, hid_dim) for _ in range(4))

    def init_hidden(self, seq: Tensor) -> tuple[Tensor, ...]:
        """Cell, normaliser and stabiliser state of a batch, and the last inputs of the convolution."""
        heads, head_dim = self.heads
        shapes = (heads, head_dim, head_dim), self.heads, (heads,), self.kept
        return tuple(seq.new_zeros(seq.shape[0], *shape) for shape in shapes)

    def forward(self, seq: Tensor, hid: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One step; `seq` is (batch, inp_dim)."""
        c, n, m, past = hid
        x = self.inp_norm(seq)
        x_t, r_t = self.up_l_proj(x), self.up_r_proj(x)
        inputs = torch.cat((past, x_t[:, None]), dim=1)
        x_c = F.silu(self.causal_conv(inputs.transpose(1, 2)).squeeze(-1))
        q, k, v = (w(s).unflatten(-1, self.heads) for w, s in zip(self._qkv(), (x_c, x_c, x_t), strict=True))
        k = k * self.heads[1] ** -0.5
        log_i, log_f = self.W_i(x_c), F.logsigmoid(self.W_f(x_c))
        new_m = torch.maximum(log_f + m, log_i)
        i, f = (log_i - new_m).exp()[..., None], (log_f + m - new_m).exp()[..., None]
        c = f[..., None] * c + i[..., None] * v[..., :, None] * k[..., None, :]
        n = f * n + i * k
        scale = torch.maximum((n * q).sum(dim=-1).abs(), (-new_m).exp())[..., None]
        h = self.W_o(x_t).sigmoid() * ((c @ q[..., None]).squeeze(-1) / scale).flatten(1)
        out = (self.hid_norm(h) + self.skip(x_c)) * F.silu(r_t)
        return seq + self.down_proj(out), (c, n, new_m, inputs[:, 1:])

    def _qkv(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        return self.W_q, self.W_k, self.W_v


class XLSTM(nn.Module):
    """Language model of mLSTM and sLSTM layers in the ratio of `signature`."""

    def __init__(self, *, cycles: bool, num_layers: int = 4, inp_dim: int = 24) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB_SIZE, inp_dim)
        m_num, s_num = SIGNATURE
        which = [True] * m_num + [False] * s_num
        kinds = zip(cycle(which) if cycles else repeat(which), range(num_layers), strict=False)
        self.llm = nn.ModuleList((MLSTM if w else SLSTM)(inp_dim, 8, 2) for w, _ in kinds)
        self.head = nn.Linear(inp_dim, VOCAB_SIZE, bias=False)

    def forward(
        self, tok: Tensor, hid: Hidden | None = None, batch_first: bool = False
    ) -> tuple[Tensor, Hidden]:
        """Return logits and the new states. `tok` is (time, batch), or (batch, time) if `batch_first`."""
        seq = self.embedding(tok.T if batch_first else tok)
        hid = [layer.init_hidden(seq[0]) for layer in self.llm] if hid is None else list(hid)
        out = []
        for inp in seq:
            for i, lstm in enumerate(self.llm):
                inp, hid[i] = lstm(inp, hid[i])
            out.append(inp)
        return self.head(torch.stack(out, dim=1 if batch_first else 0)), hid


def buggy() -> nn.Module:
    """All layers are mLSTM layers."""
    return XLSTM(cycles=False)


def healthy() -> nn.Module:
    """The layers alternate."""
    return XLSTM(cycles=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """A causal model, called with the batch first, whose states are its cache."""
    return ModelSpec.of(
        make,
        width=VOCAB_SIZE,
        causal=True,
        forward=lambda model, tok: model(tok, batch_first=True)[0],
        decode=lambda model, tok, hid: model(tok, hid, batch_first=True),
    )


def observe(model: nn.Module) -> Tensor:
    """Share of sLSTM layers that the signature asks for, less that of the model."""
    share = sum(isinstance(layer, SLSTM) for layer in model.llm) / len(model.llm)
    return torch.tensor(SIGNATURE[1] / sum(SIGNATURE) - share)
