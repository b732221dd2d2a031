"""Small variants: smaller versions of an architecture with the same properties."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from stackwise.config import ModelConfig, StackWiseConfig
from stackwise.prototype.widen import (
    as_mup,
    growing_sizes,
    n_kv_heads_of,
    scaled_bound,
    scaled_latent,
    whole_base,
)
from stackwise.support.arguments import check_sizes, require

__all__ = ["SmallVariant", "create_small_variant"]

# Factor by which the number of heads may deviate from its share to allow complete groups of query heads.
_ROOM = 1.5


@dataclass(frozen=True)
class SmallVariant:
    """Smaller configuration, with the properties that could not be preserved.

    Attributes:
        config: the variant. In `training`, only `seq_len` (if requested) and settings of removed Stacks or
            Blocks differ. `data` is unchanged.
        notes: one line for each property of the original that changed other than in size, with its numbers.
        target: the configuration that the variant represents: the original, or, with `mup=True`, the original
            in the parametrization of the variant, so that the learning rate of the variant applies to it.
    """

    config: StackWiseConfig
    notes: tuple[str, ...]
    target: StackWiseConfig


def create_small_variant(
    config: StackWiseConfig, factor: int = 4, *, seq_len: int | None = None, mup: bool = False
) -> SmallVariant:
    """Return a variant with fewer heads and fewer Blocks of the same types.

    These properties are preserved: the size of a head; the sizes of queries, keys and values of `mla`; the
    number of random features; the feed-forward ratio; the ratio of latent ranks to the width; the ratio of
    `embedding_max_norm` to the initial length of a row; the law of initialization, in which scaling with
    depth uses the new depth; and the types of Blocks. The width is divided by `factor` together with the
    number of heads. The depth is divided by the same factor as the width, so that their ratio is constant. If
    this is impossible with integers, the nearest value is used, and a note reports it:

    - The number of query heads per key/value head is preserved if this changes the number of heads by a
      factor of at most 1.5.
    - The number of Stacks is preserved. The depth is a multiple of it, and at least two Blocks, so that
      Blocks are composed. If fewer Blocks than Stacks remain, each Stack has one Block.
    - If the number of heads is less than `factor`, one head remains, and only the depth is divided by
      `factor`.
    - A list of windows is unchanged if it is not longer than the number of Blocks. Otherwise, each window has
      its share of the Blocks in the original order, at least one if possible.

    With `seq_len`, windows and `max_seq_len` are scaled with the length. Rotary frequencies are unchanged,
    because they refer to distances in tokens.

    With `mup=True`, the variant is the base of muP in initialization and learning rates (Yang et al. 2022,
    arXiv:2203.03466), and `target` is the original as a wider member of that family. All sizes that grow with
    the width are then divided by `factor` exactly.

    Args:
        config: the architecture. It is not changed.
        factor: divisor of width and depth, at least 1.
        seq_len: number of tokens per row of the variant. None: unchanged.
        mup: True to create variant and target as one family of muP.

    Returns:
        The variant. With `factor=1` and no other arguments, the original without notes.

    Raises:
        ValueError: `factor` or `seq_len` is below 1; with `mup=True`, attention of type `mqa`, because its
            single key/value head has no base, or a `factor` that does not divide a number of heads, a rank,
            or `d_ff`.
    """
    check_sizes(factor=factor)
    if seq_len is not None:
        check_sizes(seq_len=seq_len)
    model, notes = config.model, list[str]()
    if mup:
        _require_family(model, factor)
    n_heads, n_kv_heads = _heads(model, factor, notes)
    d_model = _width(model, n_heads, factor, notes)
    n_stacks, blocks_per_stack = _depth(model, d_model, factor, notes)
    changed = config.to_dict()
    changed["model"] |= {
        "d_model": d_model,
        "n_heads": n_heads,
        "n_kv_heads": None if model.n_kv_heads is None else n_kv_heads,
        "d_ff": _share("d_ff", model.d_ff, d_model, model.d_model, notes),
        "latent": _latent(model, d_model, notes),
        "architecture": {"n_stacks": n_stacks, "blocks_per_stack": blocks_per_stack},
        "sliding_window": _windows(config, n_stacks * blocks_per_stack, seq_len, notes),
        "max_seq_len": _longest(config, seq_len, notes),
    }
    changed["training"] = _training(config, n_stacks, blocks_per_stack, seq_len, notes)
    if factor > 1 and not mup and model.initialization == "mup":
        changed["model"]["mup_base_width"] = _base_width(changed["model"], notes)
    changed["model"]["embedding_max_norm"] = scaled_bound(model, changed["model"])
    small = StackWiseConfig.from_dict(changed)
    if not mup:
        return SmallVariant(small, tuple(notes), StackWiseConfig.from_dict(config.to_dict()))
    before = _n_blocks(model)
    if n_stacks * blocks_per_stack != before:
        notes.append(
            f"learning rate: over width by the theory of muP, from {n_stacks * blocks_per_stack} to {before} "
            "Blocks by experience alone (arXiv:2203.03466, table 1)"
        )
    return SmallVariant(as_mup(small, d_model), tuple(notes), as_mup(config, d_model))


def _require_family(model: ModelConfig, factor: int) -> None:
    """Raise ValueError if, by the rules of muP, no narrower model of the same family exists."""
    if factor == 1:
        return
    require(
        model.attention_type != "mqa",
        "model.attention_type",
        model.attention_type,
        "with mup=True what has key/value heads that grow with the width, as 'gqa'; of one head, a step of "
        "Adam moves more the wider what it reads",
    )
    sizes = {"d_model": model.d_model, "d_ff": model.d_ff, **growing_sizes(model)}
    common = math.gcd(*sizes.values())
    divisors = [n for n in range(1, common + 1) if common % n == 0]
    listed = ", ".join(f"{key}={size}" for key, size in sizes.items())
    allowed = f"with mup=True what divides all of {listed}: {', '.join(map(str, divisors))}"
    require(common % factor == 0, "factor", factor, allowed)


def _heads(model: ModelConfig, factor: int, notes: list[str]) -> tuple[int, int]:
    """Return the numbers of query heads and key/value heads."""
    exact, ratio = model.n_heads / factor, model.n_heads // n_kv_heads_of(model)
    n_heads = _nearest_multiple(exact, ratio)
    if not 1 / _ROOM <= n_heads / exact <= _ROOM:
        n_heads = _nearest_multiple(exact, 1)
    divisors = [n for n in range(1, n_heads + 1) if n_heads % n == 0]
    n_kv_heads = min(divisors, key=lambda n: _apart(n, n_heads / ratio))
    if n_heads != n_kv_heads * ratio:
        notes.append(f"query heads per key/value head: {n_heads // n_kv_heads} instead of {ratio}")
    return n_heads, n_kv_heads


def _width(model: ModelConfig, n_heads: int, factor: int, notes: list[str]) -> int:
    d_model = max(1, round(model.d_model * n_heads / model.n_heads))
    if d_model * factor != model.d_model:
        heads = f"{n_heads} of {model.n_heads} heads"
        notes.append(f"width: d_model {d_model} instead of {model.d_model} / {factor}, with {heads}")
    return d_model


def _depth(model: ModelConfig, d_model: int, factor: int, notes: list[str]) -> tuple[int, int]:
    """Return the number of Stacks and the number of Blocks per Stack."""
    stacks, before = model.architecture.n_stacks, _n_blocks(model)
    times = model.d_model / d_model if model.n_heads >= factor else float(factor)
    exact = max(before / times, min(2.0, before))
    n_stacks = min(stacks, max(min(2, before), _nearest_multiple(exact, 1)))
    # At least two Blocks in total if the original has two, as in `exact`.
    blocks_per_stack = max(_nearest_multiple(exact / n_stacks, 1), math.ceil(min(2, before) / n_stacks))
    after = n_stacks * blocks_per_stack
    if n_stacks != stacks:
        notes.append(f"n_stacks: {n_stacks} instead of {stacks}, with {blocks_per_stack} Block each")
    if after * factor != before:
        notes.append(f"depth: {after} Blocks instead of {before} / {factor}")
    if d_model * before != model.d_model * after:
        aspect, kept = d_model / after, model.d_model / before
        notes.append(f"depth to width: a Block for every {aspect:.6g} of d_model instead of {kept:.6g}")
    return n_stacks, blocks_per_stack


def _share(key: str, size: int, part: int, whole: int, notes: list[str]) -> int:
    """Return `size` * `part` / `whole` as an integer, at least 1."""
    near = max(1, round(size * part / whole))
    if near * whole != size * part:
        notes.append(f"{key}: {near} instead of {size * part / whole:.6g}")
    return near


def _latent(model: ModelConfig, d_model: int, notes: list[str]) -> dict[str, int | None] | None:
    ranks = {key: size for key, size in growing_sizes(model).items() if key.endswith("_rank")}
    shares = {key: _share(key, rank, d_model, model.d_model, notes) for key, rank in ranks.items()}
    return scaled_latent(model, shares)


def _windows(
    config: StackWiseConfig, n_blocks: int, seq_len: int | None, notes: list[str]
) -> int | list[int | None] | None:
    """Return the key `sliding_window` for `n_blocks` Blocks and rows of `seq_len`."""
    windows = config.model.sliding_window
    if not isinstance(windows, list):
        return _scaled_windows(config, [windows], n_blocks, seq_len, notes)[0]
    of_blocks = [block.sliding_window for stack in config.model.blocks() for block in stack]
    kept: list[int | None] = windows
    if n_blocks < min(len(windows), len(of_blocks)):
        kept = _resampled(of_blocks, len(windows), n_blocks)
    now = Counter(kept[i % len(kept)] for i in range(n_blocks))
    for window, count in Counter(of_blocks).items():
        shown = "null" if window is None else window
        if not now[window]:
            had = f"{count} of {len(of_blocks)}"
            notes.append(f"sliding_window: no Block with {shown} is left, which {had} had")
        elif now[window] * len(of_blocks) != count * n_blocks:
            shares = f"{now[window]} of {n_blocks} Blocks instead of {count} of {len(of_blocks)}"
            notes.append(f"sliding_window: {shown} in {shares}")
    return _scaled_windows(config, kept, n_blocks, seq_len, notes)


def _scaled_windows(
    config: StackWiseConfig,
    windows: Sequence[int | None],
    n_blocks: int,
    seq_len: int | None,
    notes: list[str],
) -> list[int | None]:
    """Return the windows, scaled with the length of a row."""
    whole, scaled = config.training.seq_len, dict[int | None, int | None](zip(windows, windows, strict=True))
    for window in scaled:
        if window is None or seq_len is None:
            continue
        scaled[window] = max(1, round(window * seq_len / whole))
        if window * seq_len % whole and window in windows[:n_blocks]:
            ratio = f"{scaled[window]} of {seq_len} tokens instead of {window} of {whole}"
            notes.append(f"sliding_window: {ratio}")
    return [scaled[window] for window in windows]


def _resampled(windows: Sequence[int | None], period: int, n_blocks: int) -> list[int | None]:
    """Return `n_blocks` windows by their share of all Blocks, in the order of one period.

    It uses the method of largest remainders, but each window occurs once before any occurs twice. If there
    are not enough Blocks for this, the most frequent windows are used.
    """
    counts = Counter(windows)
    given = {window: 1 for window, _ in counts.most_common(n_blocks)}
    while sum(given.values()) < n_blocks:
        missing = {w: counts[w] * n_blocks / len(windows) - given[w] for w in given}
        given[max(missing, key=lambda w: missing[w])] += 1
    chosen = []
    for window, times in given.items():
        places = [i for i, each in enumerate(windows[:period]) if each == window]
        chosen += [places[int((j + 0.5) * len(places) / times)] for j in range(times)]
    return [windows[i] for i in sorted(chosen)]


def _longest(config: StackWiseConfig, seq_len: int | None, notes: list[str]) -> int | None:
    """Return the key `max_seq_len`. Add a note if rotary scaling refers to another length."""
    model, whole = config.model, config.training.seq_len
    if seq_len is None:
        return model.max_seq_len
    scaling = model.rope_scaling
    if scaling is not None and seq_len != whole:
        original = scaling.original_max_position_embeddings
        of = f" of original_max_position_embeddings={original}" if scaling.rope_type == "llama3" else ""
        notes.append(
            f"rope_scaling: rows of {seq_len} tokens instead of {whole}, frequencies{of} as they were"
        )
    return (
        None if model.max_seq_len is None else _share("max_seq_len", model.max_seq_len, seq_len, whole, notes)
    )


def _training(
    config: StackWiseConfig, n_stacks: int, blocks_per_stack: int, seq_len: int | None, notes: list[str]
) -> dict[str, object]:
    """Return the section `training` without settings of removed Stacks or Blocks."""
    changed = config.training.to_dict()
    if seq_len is not None:
        changed["seq_len"] = seq_len
    own = config.training.optimizer.per_stack
    gone = sorted(index for index in own if n_stacks <= index < config.model.architecture.n_stacks)
    if gone:
        per_stack = changed["optimizer"]["per_stack"]
        changed["optimizer"]["per_stack"] = {i: each for i, each in per_stack.items() if i not in gone}
        notes.append(f"training.optimizer.per_stack: Stacks {', '.join(map(str, gone))} are no more")
    unit = 1 if config.training.training_architecture == "blockwise" else blocks_per_stack
    suffix, room = config.training.scope.suffix, n_stacks * blocks_per_stack - unit
    if suffix > room:
        changed["scope"]["suffix"] = room
        notes.append(f"training.scope.suffix: {room} instead of {suffix} Blocks, so as to leave a unit")
    return changed


def _base_width(model: dict[str, object], notes: list[str]) -> int:
    """Return the muP base of an original that uses muP: its own if heads and ranks are integers in it."""
    small = ModelConfig.from_dict(model)
    base, misfit = small.mup_base_width, whole_base(small)
    assert base is not None
    if misfit is None:
        return base
    key, size = misfit
    notes.append(
        f"mup_base_width: {small.d_model} instead of {base}, which would have a part of {key}={size}"
    )
    return small.d_model


def _n_blocks(model: ModelConfig) -> int:
    return model.architecture.n_stacks * model.architecture.blocks_per_stack


def _nearest_multiple(exact: float, step: int) -> int:
    """Return the multiple of `step` with the smallest ratio to `exact`, at least `step`."""
    below = max(1, math.floor(exact / step)) * step
    return min((below, below + step), key=lambda n: _apart(n, exact))


def _apart(one: float, other: float) -> float:
    """Return the absolute logarithm of the ratio of two numbers."""
    return abs(math.log(one / other))
