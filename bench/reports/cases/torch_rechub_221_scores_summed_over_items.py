"""torch-rechub#221 (datawhalechina/torch-rechub): MIND sums its scores over the items, not over the channels.

The best interest of a user is multiplied by the embeddings of the positive item and the negative items. The
sum runs over the items and leaves one number per channel. The softmax loss then takes the first channel as
the positive item. The sum over the channels gives one score per item.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

N_ITEMS, MAX_LENGTH = 70, 32
NEGATIVES = (11, 23, 31, 43)


class CapsuleNetwork(nn.Module):
    """Dynamic routing of the items of a history to interests. The first routing logits are a fixed draw."""

    def __init__(self, embedding_dim: int, seq_len: int, interest_num: int, routing_times: int = 3) -> None:
        super().__init__()
        self.routing_times = routing_times
        self.linear = nn.Linear(embedding_dim, embedding_dim, bias=False)
        self.register_buffer("capsule_weight", torch.randn(1, interest_num, seq_len))

    def forward(self, item_eb: Tensor, mask: Tensor) -> Tensor:
        """Return interests (batch, interest_num, dim) of (batch, items, dim)."""
        item_eb_hat = self.linear(item_eb)
        logits = self.capsule_weight[..., : item_eb.shape[1]].to(item_eb.dtype)
        for i in range(self.routing_times):
            weight = logits.softmax(dim=1) * mask[:, None].to(item_eb.dtype)
            z = weight @ item_eb_hat
            length = z.square().sum(dim=-1, keepdim=True)
            interest_capsule = length / (1 + length) * z / (length + 1e-9).sqrt()
            if i < self.routing_times - 1:
                logits = logits + interest_capsule.detach() @ item_eb_hat.detach().transpose(1, 2)
        return interest_capsule


class MIND(nn.Module):
    """History and candidates -> scores of the candidates, of which the first is the positive item."""

    def __init__(self, *, over_channels: bool, embed_dim: int = 32, interest_num: int = 4) -> None:
        super().__init__()
        self.over_channels = over_channels
        self.embedding = nn.Embedding(N_ITEMS, embed_dim, padding_idx=0)
        self.capsule = CapsuleNetwork(embed_dim, MAX_LENGTH, interest_num)
        self.convert_user = nn.Linear(embed_dim, embed_dim)

    def user_tower(self, history: Tensor) -> Tensor:
        """Return interests (batch, interest_num, dim) of length 1."""
        interests = self.capsule(self.embedding(history), history > 0)
        return F.normalize(self.convert_user(interests), dim=-1)

    def item_tower(self, items: Tensor) -> Tensor:
        """Return vectors of length 1."""
        return F.normalize(self.embedding(items), dim=-1)

    def forward(self, history: Tensor, items: Tensor) -> Tensor:
        """`history` is (batch, items), padded with 0. `items` is (batch, 1 + n_neg_items)."""
        user_embedding, item_embedding = self.user_tower(history), self.item_tower(items)
        dot_res = torch.bmm(user_embedding, item_embedding[:, 0, :, None])
        k_index = dot_res.argmax(dim=1).squeeze(-1)
        rows = torch.arange(len(history), device=history.device)
        best_interest_emb = user_embedding[rows, k_index].unsqueeze(1)
        return torch.mul(best_interest_emb, item_embedding).sum(dim=-1 if self.over_channels else 1)


def buggy() -> nn.Module:
    """Sum over the items."""
    return MIND(over_channels=False)


def healthy() -> nn.Module:
    """Sum over the channels."""
    return MIND(over_channels=True)


def _scores(model: nn.Module, history: Tensor, positive: Tensor) -> Tensor:
    negatives = torch.tensor(NEGATIVES, device=history.device).expand(len(history), -1)
    return model(history, torch.cat([positive[:, None], negatives], dim=1))


def _called(model: nn.Module, history: Tensor) -> Tensor:
    return _scores(model, history, torch.full_like(history[:, 0], 7))


def _loss(model: nn.Module, history: Tensor) -> Tensor:
    """Softmax loss in which the first item is positive."""
    scores = _scores(model, history, 1 + history.sum(dim=1) % (N_ITEMS - 1))
    return F.cross_entropy(scores, torch.zeros_like(history[:, 0]))


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State histories padded with 0, five candidates, and the softmax loss."""
    return ModelSpec.of(
        make,
        inputs="tokens",
        width=N_ITEMS,
        per_position=False,
        causal=False,
        max_length=MAX_LENGTH,
        forward=_called,
        loss=_loss,
        make_batch=lambda rows, length, generator: torch.randint(
            1, N_ITEMS, (rows, length), generator=generator
        ),
        padding_sides=("right",),
        masked=lambda model, history, keep: _called(model, history * keep),
    )


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Return the number of scores of a row minus the number of its candidates."""
    items = torch.tensor([[7, 11, 23, 31, 43]])
    return torch.tensor(model(torch.tensor([[5, 33, 61]]), items).shape[1] - items.shape[1])
