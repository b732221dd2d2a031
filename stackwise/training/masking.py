"""Masking: selection of the masked and predicted tokens of a batch, for bidirectional objectives.

Shapes: B batch, T positions.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from stackwise.config.training import ObjectiveConfig
from stackwise.training.targets import IGNORED, Targets, check_shapes

__all__ = ["EARLIEST", "NoiseSchedule", "mask_diffusion_targets", "masked_share", "masked_token_targets"]

NoiseSchedule = Literal["linear", "cosine"]
EARLIEST = 1e-3  # diffusion reveals the rest in one last step before this time: no weight is > 1 / EARLIEST


def masked_token_targets(
    batch: Mapping[str, Tensor], config: ObjectiveConfig, vocab_size: int, noise: tuple[int, ...]
) -> Targets:
    """Mask some tokens of each row and predict them (Devlin et al. 2019, arXiv:1810.04805).

    A row with n predictable tokens gets k masked ones: `n * mask_fraction` rounded up or down at random, so
    that its expectation is exact, but at least one. All n are equally likely: with probability
    `mask_fraction`, or 1 / n in rows in which that is larger.

    Args:
        batch: `input_ids` (B, T); optionally `attention_mask` (B, T), nonzero at real tokens,
            `document_ids` (B, T), and `labels` (B, T), -100 at tokens that are never masked (default:
            `input_ids`). Padding is neither masked nor predicted.
        config: mask token and fractions.
        vocab_size: random tokens are drawn uniformly from 0 to vocab_size - 1, without `mask_token_id`.
        noise: seed of the selection, together with the shape and the positions of predictable tokens.

    Returns:
        Targets; `count` is the number of predicted tokens.

    Raises:
        ValueError: see `mask_diffusion_targets`.
    """
    mask_token_id, random_fraction = config.mask_token_id, config.random_fraction
    assert mask_token_id is not None, "the configuration requires one"
    input_ids, labels, open_BT = _maskable(batch, mask_token_id)
    draw = _Draw(noise, input_ids.device)
    number_B = open_BT.sum(1)
    wanted_B = (number_B.double() * config.mask_fraction + draw.uniform(len(input_ids))).floor().long()
    keys_BT = draw.integers(2**62, input_ids.shape).masked_fill(~open_BT, 2**62)
    # At least the first key is selected; `open_BT` excludes it in rows without a predictable token.
    last_B = (wanted_B.minimum(number_B) - 1).clamp(min=0)
    last_B1 = keys_BT.sort(1).values.gather(1, last_B[:, None])
    chosen_BT = open_BT & (keys_BT <= last_B1)
    replaced = input_ids.masked_fill(chosen_BT, mask_token_id)
    if random_fraction or config.same_fraction:
        kind_BT = draw.uniform(*input_ids.shape)
        random_BT = draw.integers(vocab_size - 1, input_ids.shape)
        random_BT = random_BT + (random_BT >= mask_token_id).long()
        swapped_BT = chosen_BT & (kind_BT < random_fraction)
        same_BT = chosen_BT & ~swapped_BT & (kind_BT < random_fraction + config.same_fraction)
        replaced = torch.where(swapped_BT, random_BT, torch.where(same_BT, input_ids, replaced))
    return Targets(
        replaced,
        labels.masked_fill(~chosen_BT, IGNORED),
        chosen_BT.sum().float(),
        attention_mask=batch.get("attention_mask"),
        document_ids=batch.get("document_ids"),
    )


def mask_diffusion_targets(
    batch: Mapping[str, Tensor], config: ObjectiveConfig, noise: tuple[int, ...]
) -> Targets:
    """Mask each token of a row with the probability of a time drawn for the row, and weight its loss.

    With these weights the expected total is an upper bound of the rows' negative log-likelihood (Sahoo et al.
    2024, arXiv:2406.07524, eq. 10; Nie et al. 2025, arXiv:2502.09992, eq. 3). The times of a batch are
    `(u + i / B) mod 1` for one u drawn uniformly from [0, 1). Each is uniform, and together they cover the
    unit interval evenly. This lowers the variance and changes no expectation.

    Args:
        batch: see `masked_token_targets`. Tokens with label -100 are never masked; they are the context.
        config: mask token and noise schedule, see `masked_share`.
        noise: seed of the selection, together with the shape and the positions of predictable tokens.

    Returns:
        Targets; `weights` as in `masked_share`; `count` is the number of predictable tokens, masked or not.

    Raises:
        ValueError: parts of the batch differ in shape, or `mask_token_id` occurs at a real token. Tokens are
            checked only on the CPU; on another device the check would synchronise the host.
    """
    mask_token_id = config.mask_token_id
    assert mask_token_id is not None, "the configuration requires one"
    input_ids, labels, open_BT = _maskable(batch, mask_token_id)
    draw = _Draw(noise, input_ids.device)
    batch_size = len(input_ids)
    time_B = (draw.uniform(1) + torch.arange(batch_size, device=input_ids.device) / batch_size) % 1.0
    share_B, weight_B = masked_share(time_B, config.noise_schedule)
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
    """Return the fraction m of tokens that are masked at a time in [0, 1), and the loss weight of each.

    `linear` is m(t) = t, `cosine` is m(t) = cos(pi/2 (1 - t)). The weight is m'(t) / m(t), which grows like
    1/t. So times before `EARLIEST` = e are treated as one last step, with fraction m(e) and weight 1/e. This
    is not an approximation: it is the exact bound of a process that reveals the remaining tokens at e in one
    step. It exceeds the bound of the continuous process by at most m(e) times the difference between a
    token's loss at fraction m(e) and at fraction 0.

    Returns:
        (fraction, weight), both in the shape and dtype of `time`.
    """
    late = time.clamp(min=EARLIEST)
    if schedule == "linear":
        return late, 1 / late
    angle = late * (math.pi / 2)
    return angle.sin(), torch.where(time < EARLIEST, 1 / EARLIEST, math.pi / 2 / angle.tan())


def _maskable(batch: Mapping[str, Tensor], mask_token_id: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return `input_ids`, `labels`, and a mask of the tokens that may be masked and predicted."""
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
    """Random numbers that depend only on integers. They are drawn on the CPU: equal on every device."""

    def __init__(self, noise: tuple[int, ...], device: torch.device) -> None:
        digest = hashlib.sha256(repr(tuple(map(int, noise))).encode()).digest()
        # torch seeds its CPU generator with 32 bits.
        self._generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))
        self._device = device

    def uniform(self, *shape: int) -> Tensor:
        """Return float64 numbers in [0, 1)."""
        drawn = torch.rand(shape, dtype=torch.float64, generator=self._generator)
        return drawn.to(self._device, non_blocking=True)

    def integers(self, high: int, shape: torch.Size) -> Tensor:
        """Return int64 numbers in [0, high)."""
        return torch.randint(high, shape, generator=self._generator).to(self._device, non_blocking=True)
