"""SkyRL#2056 (NovaSky-AI/SkyRL): the Mamba state flows from one packed document into the next.

Labels of documents are derived from the boundaries only if `total_tokens` is given. Packing leaves it None.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec

KERNEL, STATE = 3, 4


@dataclass
class PackedSeqParams:
    """Boundaries of the documents in a packed row; `seq_idx` is the document of each token."""

    cu_seqlens: torch.Tensor
    total_tokens: int | None = None
    seq_idx: torch.Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.total_tokens is not None:
            tokens = torch.arange(self.total_tokens, device=self.cu_seqlens.device)
            self.seq_idx = torch.searchsorted(self.cu_seqlens, tokens, right=True)[None]


class MambaMixer(nn.Module):
    """Causal convolution and selective recurrence, both reset at the start of a document."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.in_proj = nn.Linear(hidden_size, 2 * hidden_size, bias=False)
        self.conv_weight = nn.Parameter(torch.rand(KERNEL, hidden_size) - 0.5)
        self.dt_proj = nn.Linear(hidden_size, hidden_size)
        nn.init.constant_(self.dt_proj.bias, -2.0)  # steps of about 0.1
        self.x_proj = nn.Linear(hidden_size, 2 * STATE, bias=False)
        self.A_log = nn.Parameter(torch.arange(1.0, STATE + 1).log().repeat(hidden_size, 1))
        self.D = nn.Parameter(torch.ones(hidden_size))
        self.out_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def conv(self, x: torch.Tensor, seq_idx: torch.Tensor | None) -> torch.Tensor:
        """Depthwise causal convolution within documents."""
        y = x * self.conv_weight[0]
        for tap in range(1, min(KERNEL, x.shape[1])):
            past = x[:, :-tap]
            if seq_idx is not None:
                past = past * (seq_idx[:, tap:] == seq_idx[:, :-tap])[..., None]
            y = y + F.pad(past, (0, 0, tap, 0)) * self.conv_weight[tap]
        return F.silu(y)

    def forward(self, hidden_states: torch.Tensor, seq_idx: torch.Tensor | None) -> torch.Tensor:
        """`hidden_states` is (batch, time, hidden_size)."""
        x, gate = self.in_proj(hidden_states).chunk(2, dim=-1)
        x = self.conv(x, seq_idx)
        dt, (b, c) = F.softplus(self.dt_proj(x)), self.x_proj(x).chunk(2, dim=-1)
        decay = (dt[..., None] * -self.A_log.exp()).exp()
        if seq_idx is not None:
            same = F.pad(seq_idx[:, 1:] == seq_idx[:, :-1], (1, 0))
            decay = decay * same[..., None, None]
        update = (dt * x)[..., None] * b[:, :, None]
        state, outputs = torch.zeros_like(update[:, 0]), []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + update[:, t]
            outputs.append((state @ c[:, t, :, None]).squeeze(-1))
        return self.out_proj((torch.stack(outputs, dim=1) + self.D * x) * F.silu(gate))


class MambaModel(nn.Module):
    """Language model that takes a batch, or one packed row with its boundaries."""

    def __init__(self, vocab_size: int = 64, hidden_size: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, hidden_size)
        self.norms = nn.ModuleList(nn.RMSNorm(hidden_size) for _ in range(2))
        self.mixers = nn.ModuleList(MambaMixer(hidden_size) for _ in range(2))
        self.final_norm = nn.RMSNorm(hidden_size)
        self.output_layer = nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(
        self, input_ids: torch.Tensor, packed_seq_params: PackedSeqParams | None = None
    ) -> torch.Tensor:
        """Return logits."""
        seq_idx = None if packed_seq_params is None else packed_seq_params.seq_idx
        x = self.embedding(input_ids)
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            x = x + mixer(norm(x), seq_idx)
        return self.output_layer(self.final_norm(x))


class MegatronModelWrapper(nn.Module):
    """Joins the documents of a batch to one packed row for the model."""

    def __init__(self, *, total: bool) -> None:
        super().__init__()
        self.total, self.model = total, MambaModel()

    def preprocess_packed_seqs(self, document_ids: torch.Tensor) -> PackedSeqParams:
        """Return the boundaries of documents; each row of the batch starts a document."""
        starts = F.pad(document_ids[:, 1:] != document_ids[:, :-1], (1, 0), value=True).flatten()
        total = starts.numel()
        cu_seqlens = torch.cat([starts.nonzero().flatten(), torch.tensor([total], device=starts.device)])
        return PackedSeqParams(cu_seqlens, total_tokens=total if self.total else None)

    def forward(self, input_ids: torch.Tensor, document_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits (batch, time, vocabulary); with documents, the batch is packed."""
        if document_ids is None:
            return self.model(input_ids)
        params = self.preprocess_packed_seqs(document_ids)
        return self.model(input_ids.reshape(1, -1), params).view(*input_ids.shape, -1)


def buggy() -> nn.Module:
    """`total_tokens` is None."""
    return MegatronModelWrapper(total=False)


def healthy() -> nn.Module:
    """`total_tokens` is the length of the packed row."""
    return MegatronModelWrapper(total=True)


def _packed(model: nn.Module, inputs: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    return model(inputs, document_ids=documents)


def buggy_declared() -> ModelSpec:
    """The model is causal, and rows may hold several documents."""
    return ModelSpec.of(buggy, causal=True, packed=_packed)


def healthy_declared() -> ModelSpec:
    """The model is causal, and rows may hold several documents."""
    return ModelSpec.of(healthy, causal=True, packed=_packed)


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Logits of the second document of a packed row minus those of the document in its own row."""
    model = model.double().eval()
    ids = torch.randint(0, 64, (1, 11), generator=torch.Generator().manual_seed(1))
    documents = torch.tensor([[0] * 6 + [1] * 5])
    return model(ids, document_ids=documents)[:, 6:] - model(ids[:, 6:])
