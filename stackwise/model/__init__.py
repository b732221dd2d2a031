"""Reference transformer of StackWise: Block, Stack and Rack."""

from stackwise.model.block import Block
from stackwise.model.build import (
    create_block_spec,
    create_rack_from_config,
    create_rack_from_specs,
    create_simple_rack,
    create_stack_from_spec,
)
from stackwise.model.quantization import QuantizationReport, quantize_stack
from stackwise.model.rack import Rack
from stackwise.model.stack import Stack
from stackwise.model.stack_cache import StackCache, StackCacheStatistics
from stackwise.model.surgery import (
    append_stack,
    fuse_stacks,
    insert_stack,
    prepend_stack,
    remove_stack,
    set_identity,
    split_stack,
    unfreeze_stack,
)

__all__ = [
    "Block",
    "QuantizationReport",
    "Rack",
    "Stack",
    "StackCache",
    "StackCacheStatistics",
    "append_stack",
    "create_block_spec",
    "create_rack_from_config",
    "create_rack_from_specs",
    "create_simple_rack",
    "create_stack_from_spec",
    "fuse_stacks",
    "insert_stack",
    "prepend_stack",
    "quantize_stack",
    "remove_stack",
    "set_identity",
    "split_stack",
    "unfreeze_stack",
]
