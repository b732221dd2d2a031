"""Masking: which tokens of a batch are hidden and predicted, for the objectives that look both ways.

Shapes: B batch, T positions.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from stackwise.training.targets import IGNORED, Targets, check_shapes

__all__ = ["EARLIEST", "NoiseSchedule", "mask_diffusion_targets", "masked_share", "masked_token_targets"]

NoiseSchedule = Literal["linear", "cosine"]
EARLIEST = 1e-3  # the time before which diffusion has one last step, so that no weight exceeds 1 / EARLIEST


def masked_token_targets(
    batch: Mapping[str, Tensor],
    noise: tuple[int, ...],
    *,
    vocab_size: int,
    mask_token_id: int,
    mask_fraction: float,
    random_fraction: float = 0.0,
    same_fraction: float = 0.0,
) -> Targets:
    """Hide some tokens of each row and predict them (Devlin et al. 2019, arXiv:1810.04805).

    Of n tokens that may be predicted in a row, k are: `n * mask_fraction` rounded up or down at random
    so that its expectation is exact, but at least one. Each of the n is as likely as any other: with
    probability `mask_fraction`, and 1 / n in rows where that is more.

    Args:
        batch: `input_ids` (B, T); optionally `attention_mask` (B, T), nonzero at real tokens,
            `document_ids` (B, T), and `labels` (B, T), -100 at tokens that are never hidden (default:
            `input_ids`). Padding is neither hidden nor predicted.
        noise: what the choice depends on, beside the shape and which tokens may be predicted.
        vocab_size: random tokens are drawn from 0 to this, evenly, without `mask_token_id`.
        mask_token_id: what a hidden token is replaced by.
        mask_fraction: of the tokens that may be predicted.
        random_fraction: of the predicted tokens, replaced by random ones instead.
        same_fraction: of the predicted tokens, left as they are instead.

    Returns:
        `count` is the number of predicted tokens.

    Raises:
        ValueError: as of `mask_diffusion_targets`.
    """
    input_ids, labels, open_BT = _maskable(batch, mask_token_id)
    draw = _Draw(noise, input_ids.device)
    number_B = open_BT.sum(1)
    wanted_B = (number_B.double() * mask_fraction + draw.uniform(len(input_ids))).floor().long()
    keys_BT = draw.integers(2**62, input_ids.shape).masked_fill(~open_BT, 2**62)
    # At least the first key is taken; `open_BT` rules it out where there is nothing to choose from.
    last_B = (wanted_B.minimum(number_B) - 1).clamp(min=0)
    last_B1 = keys_BT.sort(1).values.gather(1, last_B[:, None])
    chosen_BT = open_BT & (keys_BT <= last_B1)
    replaced = input_ids.masked_fill(chosen_BT, mask_token_id)
    if random_fraction or same_fraction:
        kind_BT = draw.uniform(*input_ids.shape)
        random_BT = draw.integers(vocab_size - 1, input_ids.shape)
        random_BT = random_BT + (random_BT >= mask_token_id).long()
        swapped_BT = chosen_BT & (kind_BT < random_fraction)
        same_BT = chosen_BT & ~swapped_BT & (kind_BT < random_fraction + same_fraction)
        replaced = torch.where(swapped_BT, random_BT, torch.where(same_BT, input_ids, replaced))
    return Targets(
        replaced,
        labels.masked_fill(~chosen_BT, IGNORED),
        chosen_BT.sum().float(),
        attention_mask=batch.get("attention_mask"),
        document_ids=batch.get("document_ids"),
    )


def mask_diffusion_targets(
    batch: Mapping[str, Tensor],
    noise: tuple[int, ...],
    *,
    mask_token_id: int,
    noise_schedule: NoiseSchedule,
) -> Targets:
    """Hide each token of a row with the probability of a time drawn for it, and weigh its loss accordingly.

    With these weights the expected total bounds the negative log-likelihood of the rows from above (Sahoo et
    al. 2024, arXiv:2406.07524, eq. 10; Nie et al. 2025, arXiv:2502.09992, eq. 3). The times of a batch
    are `(u + i / B) mod 1` for one u drawn evenly from [0, 1): each is uniform, and together they cover
    the unit interval evenly, which lowers the variance and changes no expectation.

    Args:
        batch: as of `masked_token_targets`. Tokens whose label is -100 are what the others are
            predicted from.
        noise: what the choice depends on, beside the shape and which tokens may be predicted.
        mask_token_id: what a hidden token is replaced by.
        noise_schedule: see `masked_share`.

    Returns:
        `weights` as `masked_share` says; `count` is the number of tokens that may be predicted, whether
        hidden or not.

    Raises:
        ValueError: parts of the batch differ in shape, or it holds `mask_token_id` at a real token.
            Looked for where the batch is on the CPU; elsewhere the host would wait for the answer.
    """
    input_ids, labels, open_BT = _maskable(batch, mask_token_id)
    draw = _Draw(noise, input_ids.device)
    batch_size = len(input_ids)
    time_B = (draw.uniform(1) + torch.arange(batch_size, device=input_ids.device) / batch_size) % 1.0
    share_B, weight_B = masked_share(time_B, noise_schedule)
    hidden_BT = open_BT & (draw.uniform(*input_ids.shape) < share_B[:, None])
    return Targets(
        input_ids.masked_fill(hidden_BT, mask_token_id),
        labels.masked_fill(~hidden_BT, IGNORED),
        open_BT.sum().float(),
        weights=(hidden_BT * weight_B[:, None]).float(),
        attention_mask=batch.get("attention_mask"),
        document_ids=batch.get("document_ids"),
    )


def masked_share(time: Tensor, schedule: NoiseSchedule) -> tuple[Tensor, Tensor]:
    """The share m of tokens that are masked at a time in [0, 1), and the weight of each one's loss.

    `linear` is m(t) = t, `cosine` m(t) = cos(pi/2 (1 - t)). The weight is m'(t) / m(t), which grows
    like 1/t; so times before `EARLIEST` = e count as one last step, with share m(e) and weight 1/e.
    That is no approximation of the bound: it is the bound of a process that reveals what is left at e
    in one step, above that of the continuous one by at most m(e) times what a token's loss at share m(e)
    is above that at share 0.

    Returns:
        (share, weight), both in the shape and dtype of `time`.
    """
    late = time.clamp(min=EARLIEST)
    if schedule == "linear":
        return late, 1 / late
    angle = late * (math.pi / 2)
    return angle.sin(), torch.where(time < EARLIEST, 1 / EARLIEST, math.pi / 2 / angle.tan())


def _maskable(batch: Mapping[str, Tensor], mask_token_id: int) -> tuple[Tensor, Tensor, Tensor]:
    """`input_ids`, `labels`, and which tokens may be hidden and predicted."""
    check_shapes(batch)
    input_ids = batch["input_ids"].long()
    labels = batch.get("labels", input_ids).long()
    open_BT, mask = labels != IGNORED, batch.get("attention_mask")
    real_BT = torch.ones_like(open_BT) if mask is None else mask != 0
    open_BT = open_BT & real_BT
    for key, values, where in (("input_ids", input_ids, real_BT), ("labels", labels, open_BT)):
        found = where & (values == mask_token_id)
        if found.device.type == "cpu" and found.any():
            row, position = found.nonzero()[0].tolist()
            raise ValueError(
                f"{key}: got mask_token_id={mask_token_id} in row {row} at position {position}; allowed: "
                "tokens of the data, of which the mask is none"
            )
    return input_ids, labels, open_BT


class _Draw:
    """Random numbers that depend on integers alone, drawn on the CPU so that they are the same everywhere."""

    def __init__(self, noise: tuple[int, ...], device: torch.device) -> None:
        digest = hashlib.sha256(repr(tuple(map(int, noise))).encode()).digest()
        # torch seeds its CPU generator with 32 bits.
        self._generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))
        self._device = device

    def uniform(self, *shape: int) -> Tensor:
        """float64 in [0, 1)."""
        drawn = torch.rand(shape, dtype=torch.float64, generator=self._generator)
        return drawn.to(self._device, non_blocking=True)

    def integers(self, high: int, shape: torch.Size) -> Tensor:
        """int64 in [0, high)."""
        return torch.randint(high, shape, generator=self._generator).to(self._device, non_blocking=True)
