"""Builders of Blocks, Stacks and Racks from plain values or a configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stackwise.config import AttentionMode, AttentionType, BlockConfig, ModelConfig, StackWiseConfig
from stackwise.model.block import Block
from stackwise.model.initialization import initialize_block
from stackwise.model.rack import Rack
from stackwise.model.stack import Stack
from stackwise.support.arguments import check_sizes, require

__all__ = [
    "create_block_spec",
    "create_rack_from_config",
    "create_rack_from_specs",
    "create_simple_rack",
    "create_stack_from_spec",
]

_STACK_KEYS = ("stack_id", "n_blocks", "block_spec", "freeze_blocks")


def create_block_spec(
    d_model: int, d_ff: int | None = None, n_heads: int | None = None, **block: Any
) -> dict[str, Any]:
    """Return the arguments of a Block as a dict, which can be changed, stored or reused.

    Args:
        d_model: model width.
        d_ff: feed-forward width; default 4 * d_model.
        n_heads: number of query heads; default: heads of size 64, or one head if d_model is smaller.
        **block: any other key of `BlockConfig`.

    Raises:
        ValueError: an argument that Block does not have, or a d_model without a default for n_heads.
    """
    check_sizes(d_model=d_model)
    if n_heads is None:
        if d_model > 64 and d_model % 64:
            raise ValueError(
                f"n_heads: got None; d_model={d_model} is no multiple of 64, so say how many heads"
            )
        n_heads = max(1, d_model // 64)
    spec = {"d_model": d_model, "d_ff": 4 * d_model if d_ff is None else d_ff, "n_heads": n_heads, **block}
    _check_keys("block_spec", spec, tuple(BlockConfig.model_fields))
    return spec


def create_stack_from_spec(
    stack_id: int,
    n_blocks: int,
    block_spec: Mapping[str, Any],
    freeze_blocks: bool = False,
    *,
    model_blocks: int | None = None,
) -> Stack:
    """Return a Stack of `n_blocks` equal Blocks.

    Args:
        stack_id: name of the Stack.
        n_blocks: number of Blocks, at least 1.
        block_spec: result of `create_block_spec`.
        freeze_blocks: freeze the Blocks.
        model_blocks: number of Blocks in the model that the Stack will be part of, which scales the
            initialisation; None: the Stack is the complete model.
    """
    check_sizes(n_blocks=n_blocks)
    config = BlockConfig.from_dict(block_spec, source="block_spec")
    blocks = [create_block(config, model_blocks or n_blocks) for _ in range(n_blocks)]
    return Stack(blocks, stack_id, freeze_blocks)


def create_rack_from_specs(
    vocab_size: int,
    d_model: int,
    stack_specs: Sequence[Mapping[str, Any]],
    tie_embeddings: bool = True,
    **options: Any,
) -> Rack:
    """Return a Rack from one spec per Stack.

    Args:
        vocab_size: vocabulary size.
        d_model: model width, equal in all Stacks.
        stack_specs: one mapping per Stack with `n_blocks`, `block_spec` and optionally `stack_id` (default:
            its index) and `freeze_blocks`.
        tie_embeddings: share the weight of embedding and head.
        **options: any other argument of `Rack`.

    Raises:
        ValueError: an unknown or missing key, or a Stack of another width.
    """
    for i, spec in enumerate(stack_specs):
        where = f"stack_specs[{i}]"
        _check_keys(where, spec, _STACK_KEYS, needed=("n_blocks", "block_spec"))
        check_sizes(**{f"{where}.n_blocks": spec["n_blocks"]})
        width = BlockConfig.from_dict(spec["block_spec"], source=f"{where}.block_spec").d_model
        require(width == d_model, f"{where}.block_spec.d_model", width, f"the Rack's d_model={d_model}")
    depth = sum(spec["n_blocks"] for spec in stack_specs)
    stacks = [
        create_stack_from_spec(
            spec.get("stack_id", i),
            spec["n_blocks"],
            spec["block_spec"],
            spec.get("freeze_blocks", False),
            model_blocks=depth,
        )
        for i, spec in enumerate(stack_specs)
    ]
    return Rack(stacks, vocab_size, d_model, tie_embeddings, **options)


def create_simple_rack(
    n_stacks: int,
    blocks_per_stack: int,
    d_model: int,
    d_ff: int,
    n_heads: int,
    vocab_size: int,
    n_kv_heads: int | None = None,
    attention_type: AttentionType | None = None,
    attention_mode: AttentionMode = "causal",
    tie_embeddings: bool = True,
    **options: Any,
) -> Rack:
    """Return a Rack of `n_stacks` equal Stacks with `blocks_per_stack` Blocks each.

    `attention_type=None` is "gqa" if `n_kv_heads` is less than `n_heads`, otherwise "mha". Further keyword
    arguments are the keys of `ModelConfig`; a list of windows is repeated over the Blocks.

    Raises:
        ConfigError: names every invalid key and value.
    """
    if attention_type is None:
        attention_type = "mha" if n_kv_heads in (None, n_heads) else "gqa"
    model = {
        "vocab_size": vocab_size,
        "d_model": d_model,
        "d_ff": d_ff,
        "n_heads": n_heads,
        "n_kv_heads": n_kv_heads,
        "attention_type": attention_type,
        "attention_mode": attention_mode,
        "tie_embeddings": tie_embeddings,
        "architecture": {"n_stacks": n_stacks, "blocks_per_stack": blocks_per_stack},
        **options,
    }
    return create_rack_from_config(StackWiseConfig(model=ModelConfig.from_dict(model, source="Rack")))


def create_rack_from_config(
    config: StackWiseConfig | Mapping[str, Any], place: Callable[[Block], Block] = lambda block: block
) -> Rack:
    """Return the Rack that a configuration, or its dict, describes.

    Args:
        config: configuration.
        place: called with each new Block; returns the Block to use. For example, `block_writer` moves it to
            disk.

    Raises:
        ConfigError: names every invalid key and value.
    """
    if not isinstance(config, StackWiseConfig):
        config = StackWiseConfig.from_dict(config)
    config.validate()
    model = config.model
    blocks = model.blocks()
    stacks = [
        Stack([place(create_block(block, sum(map(len, blocks)))) for block in stack], i)
        for i, stack in enumerate(blocks)
    ]
    return Rack(
        stacks,
        model.vocab_size,
        model.d_model,
        model.tie_embeddings,
        model.max_seq_len,
        model.embedding_max_norm,
    )


def create_block(config: BlockConfig, model_blocks: int) -> Block:
    """Return a Block, initialised for a model of `model_blocks` Blocks."""
    block = Block(**config.to_dict())
    initialize_block(block, model_blocks, config.initialization)
    return block


def _check_keys(where: str, given: Any, allowed: Sequence[str], needed: Sequence[str] = ()) -> None:
    require(isinstance(given, Mapping), where, given, f"a mapping of {', '.join(allowed)}")
    unknown = [key for key in given if key not in allowed]
    if unknown:
        raise ValueError(f"{where}: unknown {', '.join(map(repr, unknown))}; allowed: {', '.join(allowed)}")
    missing = [key for key in needed if key not in given]
    if missing:
        raise ValueError(f"{where}: {', '.join(missing)} missing; allowed: {', '.join(allowed)}")
