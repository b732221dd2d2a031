"""Molecule-Generator#22 (DaoyuanLi2816/Molecule-Generator): attention runs across the molecules of a batch.

The transformer layers are made without batch_first but get (batch, sequence, width), so each position attends
to the same position of the other molecules and never to its own molecule; padding is not masked either.
"""

import torch
import torch.nn.functional as F
from torch import nn

PAD = 4


class BetaTCVAE(nn.Module):
    """Variational autoencoder on SMILES tokens; one latent vector per position."""

    def __init__(
        self,
        *,
        batch_first: bool,
        vocab_size: int = 6,
        embedding_dim: int = 16,
        hidden_dim: int = 64,
        latent_dim: int = 16,
        nhead: int = 4,
        num_layers: int = 2,
    ) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.embedding = nn.Embedding(vocab_size, embedding_dim, padding_idx=PAD)
        self.position = nn.Embedding(32, embedding_dim)
        sizes = (embedding_dim, nhead, hidden_dim)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(*sizes, batch_first=batch_first),
            num_layers,
            enable_nested_tensor=False,
        )
        self.mu = nn.Linear(embedding_dim, latent_dim)
        self.log_var = nn.Linear(embedding_dim, latent_dim)
        self.decoder = nn.TransformerDecoder(
            nn.TransformerDecoderLayer(*sizes, batch_first=batch_first), num_layers
        )
        self.fc_out = nn.Linear(embedding_dim, vocab_size)

    def reparameterize(self, mu: torch.Tensor, log_var: torch.Tensor) -> torch.Tensor:
        """Sample while training, the mean otherwise."""
        return mu + torch.randn_like(mu) * (0.5 * log_var).exp() if self.training else mu

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return logits, means and log variances for token ids (B, T)."""
        embedded = self.embedding(x) + self.position(torch.arange(x.shape[1]))
        # The masks belong to the same change as batch_first.
        pad = x == PAD if self.batch_first else None
        encoded = self.encoder(embedded, src_key_padding_mask=pad)
        mu, log_var = self.mu(encoded), self.log_var(encoded)
        z = self.reparameterize(mu, log_var)
        decoded = self.decoder(z, encoded, tgt_key_padding_mask=pad, memory_key_padding_mask=pad)
        return self.fc_out(decoded), mu, log_var


def loss_function(
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor], x: torch.Tensor, beta: float = 1.0
) -> torch.Tensor:
    """Reconstruction and divergence from the prior."""
    logits, mu, log_var = out
    divergence = -0.5 * torch.mean(1 + log_var - mu.pow(2) - log_var.exp())
    return F.cross_entropy(logits.flatten(0, 1), x.flatten(), ignore_index=PAD) + beta * divergence


def buggy() -> nn.Module:
    """Layers take the batch for the sequence."""
    return BetaTCVAE(batch_first=False)


def healthy() -> nn.Module:
    """Layers are told that the batch comes first."""
    return BetaTCVAE(batch_first=True)


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Difference between a molecule encoded with another one and alone."""
    model = model.double().eval()
    batch = torch.tensor([[0, 0, 1, 2, 0, 3, 0, 1], [0, 2, 1, 0, 3, 0, 0, 0]])
    return model(batch)[0][:1] - model(batch[:1])[0]
