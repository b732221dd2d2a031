"""GNTPP#4 (EDAPINENUT/GNTPP): each event gets the divergence of the whole batch in place of its own.

The sum in the KL term of the variational decoder has no `dim`. It runs over all events and rows, and the
result, one number, is multiplied by the mask of events. The term should be the sum over the latent channels.
With the bug, its weight against the reconstruction grows with the number of events in the batch.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

EVENT_TYPES, MAX_LENGTH = 10, 64


class HistoryEncoder(nn.Module):
    """Causal attention over events -> an embedding for each event type."""

    def __init__(self, embed_size: int, heads: int) -> None:
        super().__init__()
        self.type_emb = nn.Embedding(EVENT_TYPES, embed_size)
        self.time_emb = nn.Linear(1, embed_size)
        self.position_emb = nn.Embedding(MAX_LENGTH, embed_size)
        layer = nn.TransformerEncoderLayer(
            embed_size, heads, 2 * embed_size, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(
            layer, 2, norm=nn.LayerNorm(embed_size), enable_nested_tensor=False
        )
        self.event_emb = nn.Parameter(torch.randn(EVENT_TYPES, embed_size) * 0.1)

    def forward(self, seq_dts: Tensor, seq_types: Tensor) -> Tensor:
        """Return (batch, length, EVENT_TYPES, embed_size)."""
        length = seq_types.shape[1]
        x = self.type_emb(seq_types) + self.time_emb(seq_dts[..., None]) + self.position_emb.weight[:length]
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        return self.layers(x, mask=mask)[:, :, None] + self.event_emb


class EncoderModule(nn.Module):
    """Interval and history -> mean and log variance of the latent vector."""

    def __init__(self, embed_size: int) -> None:
        super().__init__()
        self.network_t, self.network_h = nn.Linear(1, embed_size), nn.Linear(embed_size, embed_size)
        self.network = nn.Sequential(nn.GELU(), nn.Linear(embed_size, embed_size), nn.GELU())
        self.mean_network = nn.Linear(embed_size, embed_size)
        self.var_network = nn.Linear(embed_size, embed_size)

    def forward(self, t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """`t` is (...), `h` is (..., embed_size)."""
        hidden = self.network(self.network_t(t[..., None]) + self.network_h(h))
        return self.mean_network(hidden), self.var_network(hidden)


class DecoderModule(nn.Module):
    """Latent vector and history -> interval."""

    def __init__(self, embed_size: int) -> None:
        super().__init__()
        self.network_z, self.network_h = (nn.Linear(embed_size, embed_size) for _ in range(2))
        self.network = nn.Sequential(
            nn.GELU(), nn.Linear(embed_size, embed_size), nn.GELU(), nn.Linear(embed_size, 1)
        )

    def forward(self, z: Tensor, h: Tensor) -> Tensor:
        """`z` and `h` are (..., embed_size)."""
        return self.network(self.network_z(z) + self.network_h(h))[..., 0]


class VAEDecoder(nn.Module):
    """Variational autoencoder of the next interval, and logits of the next type."""

    def __init__(self, embed_size: int, *, per_event: bool) -> None:
        super().__init__()
        self.per_event = per_event
        self.encoder, self.decoder = EncoderModule(embed_size), DecoderModule(embed_size)
        self.mark_logits = nn.Linear(embed_size, 1)

    def kl_loss(self, mean: Tensor, log_var: Tensor, seq_onehots: Tensor) -> Tensor:
        """Return (batch, length, EVENT_TYPES)."""
        terms = 1 + log_var - mean.square() - log_var.exp()
        return -0.5 * (terms.sum(dim=-1) if self.per_event else terms.sum()) * seq_onehots

    def forward(self, seq_dts: Tensor, seq_onehots: Tensor, history_embedding: Tensor) -> Tensor:
        """Return the mean loss of the intervals of all events."""
        t = seq_dts[..., None].expand_as(seq_onehots)
        mean, log_var = self.encoder(t, history_embedding)
        z = mean + (0.5 * log_var).exp() * torch.randn_like(mean)
        rec_loss = (t - self.decoder(z, history_embedding)).square() * seq_onehots
        return (rec_loss + self.kl_loss(mean, log_var, seq_onehots)).sum() / seq_onehots.sum()


class TPPWarper(nn.Module):
    """Temporal point process: events -> logits of the type of the next event."""

    def __init__(self, *, per_event: bool, embed_size: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.hist_encoder = HistoryEncoder(embed_size, heads)
        self.prob_decoder = VAEDecoder(embed_size, per_event=per_event)

    def forward(self, seq_dts: Tensor, seq_types: Tensor) -> Tensor:
        """Both are (batch, length). `seq_dts` are the normalised logs of the intervals."""
        return self.prob_decoder.mark_logits(self.hist_encoder(seq_dts, seq_types))[..., 0]

    def loss(self, seq_dts: Tensor, seq_types: Tensor) -> Tensor:
        """Return the loss of the next intervals and types."""
        history = self.hist_encoder(seq_dts, seq_types)[:, :-1]
        onehots = F.one_hot(seq_types[:, 1:], EVENT_TYPES).to(seq_dts)
        time_loss = self.prob_decoder(seq_dts[:, 1:], onehots, history)
        logits = self.prob_decoder.mark_logits(history)[..., 0]
        return time_loss + F.cross_entropy(logits.flatten(0, 1), seq_types[:, 1:].flatten())


def buggy() -> nn.Module:
    """Sum over the batch."""
    return TPPWarper(per_event=False)


def healthy() -> nn.Module:
    """Sum over the latent channels."""
    return TPPWarper(per_event=True)


def _dts(model: nn.Module, types: Tensor) -> Tensor:
    """Return intervals that depend on the event only."""
    return (types * 1.7).double().sin().to(model.prob_decoder.mark_logits.weight.dtype)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State event types, of which each sees the past, and the loss."""
    return ModelSpec.of(
        make,
        inputs="tokens",
        width=EVENT_TYPES,
        causal=True,
        max_length=MAX_LENGTH,
        forward=lambda model, types: model(_dts(model, types), types),
        loss=lambda model, types: model.loss(_dts(model, types), types),
    )


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Return the divergence of three rows at once minus the sum of that of each row alone."""
    generator = torch.Generator().manual_seed(1)
    mean, log_var = torch.randn(2, 3, 4, EVENT_TYPES, 8, generator=generator)
    onehots = F.one_hot(torch.arange(12).view(3, 4) % EVENT_TYPES, EVENT_TYPES)
    rows = [model.prob_decoder.kl_loss(*(t[i : i + 1] for t in (mean, log_var, onehots))) for i in range(3)]
    return model.prob_decoder.kl_loss(mean, log_var, onehots).sum() - torch.cat(rows).sum()
