"""The Rack: our own answer to "right, stable and fast", as Block, Stack and Rack."""

from stackwise.model.block import Block
from stackwise.model.build import (
    create_block_spec,
    create_rack_from_config,
    create_rack_from_specs,
    create_simple_rack,
    create_stack_from_spec,
)
from stackwise.model.rack import Rack
from stackwise.model.stack import Stack

__all__ = [
    "Block",
    "Rack",
    "Stack",
    "create_block_spec",
    "create_rack_from_config",
    "create_rack_from_specs",
    "create_simple_rack",
    "create_stack_from_spec",
]
