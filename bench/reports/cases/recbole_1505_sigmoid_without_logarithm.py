"""RecBole#1505 (RUCAIBox/RecBole): the loss of LINE is the mean of sigmoids, without their logarithm.

Negative sampling minimises `-log(sigmoid(sign * score))`. The code leaves out the logarithm. A pair with a
very wrong score then has almost no gradient. The report doubles the recall with `F.logsigmoid`.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

N_USERS = N_ITEMS = 60


class NegSamplingLoss(nn.Module):
    """Loss of scores of true pairs (sign 1) and random pairs (sign -1)."""

    def __init__(self, *, logarithm: bool) -> None:
        super().__init__()
        self.logarithm = logarithm

    def forward(self, score: Tensor, sign: int) -> Tensor:
        """Return the mean over the pairs."""
        if self.logarithm:
            return -F.logsigmoid(sign * score).mean()
        return -torch.mean(torch.sigmoid(sign * score))


class LINE(nn.Module):
    """Embeddings of a graph of users and items, for neighbours and for neighbours in common."""

    def __init__(
        self, *, logarithm: bool, embedding_size: int = 32, second_order_loss_weight: float = 1.0
    ) -> None:
        super().__init__()
        self.second_order_loss_weight = second_order_loss_weight
        self.user_embedding = nn.Embedding(N_USERS, embedding_size)
        self.item_embedding = nn.Embedding(N_ITEMS, embedding_size)
        self.item_context_embedding = nn.Embedding(N_ITEMS, embedding_size)
        self.loss_fct = NegSamplingLoss(logarithm=logarithm)
        for embedding in (self.user_embedding, self.item_embedding, self.item_context_embedding):
            nn.init.xavier_normal_(embedding.weight)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        """Return scores (batch,)."""
        return torch.sum(self.user_embedding(user).mul(self.item_embedding(item)), dim=1)

    def context_forward(self, user: Tensor, item: Tensor) -> Tensor:
        """Return scores (batch,) of items as the context of users."""
        return torch.sum(self.user_embedding(user).mul(self.item_context_embedding(item)), dim=1)

    def calculate_loss(self, user: Tensor, pos_item: Tensor, neg_item: Tensor) -> Tensor:
        """Return the loss of both orders."""
        first = self.loss_fct(self.forward(user, pos_item), 1) + self.loss_fct(
            self.forward(user, neg_item), -1
        )
        second = self.loss_fct(self.context_forward(user, pos_item), 1) + self.loss_fct(
            self.context_forward(user, neg_item), -1
        )
        return first + self.second_order_loss_weight * second

    def full_sort_predict(self, user: Tensor) -> Tensor:
        """Return scores (batch, items) of all items."""
        return self.user_embedding(user) @ self.item_embedding.weight.t()


def buggy() -> nn.Module:
    """Mean of sigmoids."""
    return LINE(logarithm=False)


def healthy() -> nn.Module:
    """Mean of logarithms of sigmoids."""
    return LINE(logarithm=True)


def _make_batch(batch_size: int, _: int, generator: torch.Generator) -> Tensor:
    """Return a user, an item of the user, and a random item in each row."""
    return torch.randint(0, N_ITEMS, (batch_size, 3), generator=generator)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State triples of a user, an item of the user and a random item, and the model's own loss."""
    return ModelSpec.of(
        make,
        inputs="tokens",
        width=N_ITEMS,
        per_position=False,
        causal=False,
        seq_len=3,
        max_length=3,
        make_batch=_make_batch,
        forward=lambda model, triples: model.full_sort_predict(triples[:, 0]),
        loss=lambda model, triples: model.calculate_loss(*triples.unbind(dim=1)),
    )


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Return the loss of a true pair with the score -10, minus its negative log-likelihood."""
    score = torch.tensor([-10.0])
    return model.loss_fct(score, 1) + F.logsigmoid(score).mean()
