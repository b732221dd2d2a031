"""Shrinking: a small variant of an architecture that is still that architecture."""

from __future__ import annotations

from dataclasses import dataclass

from stackwise.argument import check_sizes
from stackwise.config import StackWiseConfig

__all__ = ["SmallVariant", "create_small_variant"]


@dataclass(frozen=True)
class SmallVariant:
    """A smaller configuration, and what it could not keep.

    Attributes:
        config: the variant; `training` and `data` are as they were.
        notes: one line per property of the original that changed more than its size.
    """

    config: StackWiseConfig
    notes: tuple[str, ...]


def create_small_variant(config: StackWiseConfig, factor: int = 4) -> SmallVariant:
    """Fewer heads and fewer blocks, of the same kind.

    The size of a head, the feed-forward ratio, the windows and, as far as whole numbers allow, the
    ratio of query to key/value heads stay: they are the architecture. Width shrinks with the number
    of heads, `factor` times; depth as much, in blocks per Stack first. Nothing reaches zero.

    Args:
        config: the architecture.
        factor: how many times fewer heads and blocks, at least 1.

    Raises:
        ValueError: `factor` is below 1.
    """
    check_sizes(factor=factor)
    model = config.model
    n_heads = max(1, model.n_heads // factor)
    d_model = max(1, round(model.d_model / model.n_heads * n_heads))
    notes = []
    kv_heads = 1 if model.attention_type == "mqa" else model.n_kv_heads or model.n_heads
    ratio = model.n_heads // kv_heads
    n_kv_heads = next(k for k in range(max(1, n_heads // ratio), 0, -1) if n_heads % k == 0)
    if n_heads != n_kv_heads * ratio:
        notes.append(f"query heads per key/value head: {n_heads // n_kv_heads} instead of {ratio}")
    if model.n_heads < factor:
        notes.append(f"width: {model.n_heads} heads cannot be {factor} times fewer; one is left")
    depth = model.architecture.n_stacks * model.architecture.blocks_per_stack
    wanted = max(2 if depth > 1 else 1, round(depth / factor))
    n_stacks = min(model.architecture.n_stacks, wanted)
    blocks_per_stack = max(1, round(wanted / n_stacks))
    if n_stacks * blocks_per_stack * factor != depth:
        notes.append(f"depth: {n_stacks * blocks_per_stack} blocks instead of {depth} / {factor}")

    exact_d_ff = model.d_ff / model.d_model * d_model
    if exact_d_ff < 0.5:
        notes.append(f"d_ff: 1 instead of {exact_d_ff:.2g}")

    changed = config.to_dict()
    changed["model"] |= {
        "d_model": d_model,
        "n_heads": n_heads,
        "n_kv_heads": None if model.attention_type == "mha" or model.n_kv_heads is None else n_kv_heads,
        "d_ff": max(1, round(exact_d_ff)),
        "architecture": {"n_stacks": n_stacks, "blocks_per_stack": blocks_per_stack},
    }
    small = StackWiseConfig.from_dict(changed)
    lost = _windows(config) - _windows(small)
    if lost:
        shown = ", ".join("null" if window is None else str(window) for window in sorted(lost, key=str))
        notes.append(f"sliding_window: no block with {shown} is left")
    return SmallVariant(small, tuple(notes))


def _windows(config: StackWiseConfig) -> set[int | None]:
    return {block.sliding_window for stack in config.model.blocks() for block in stack}
