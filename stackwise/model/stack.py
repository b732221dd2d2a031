"""Stack: group of Blocks that is frozen, trained and moved as a unit.

Shapes: B batch, T positions, C model width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from stackwise.model.block import Block, Part
from stackwise.model.cache import BlockCache
from stackwise.model.layout import Layout
from stackwise.support.arguments import check_range, require

__all__ = ["Stack"]


class Stack(Part):
    """Sequence of Blocks.

    Args:
        blocks: at least one.
        stack_id: name of the Stack in messages and results.
        freeze_blocks: freeze the Blocks.
    """

    def __init__(self, blocks: Iterable[Block], stack_id: int = 0, freeze_blocks: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.stack_id = stack_id
        if not self.blocks:
            raise ValueError("blocks: got none; a Stack needs at least one Block")
        if freeze_blocks:
            self.freeze()

    def forward(
        self,
        x_BTC: Tensor,
        attention_mask: Tensor | None = None,
        layout: Layout | None = None,
        caches: Sequence[BlockCache] | None = None,
    ) -> Tensor:
        """(B, T, C) -> (B, T, C). Arguments as in `Block.forward`; one cache per Block."""
        return self.forward_from_block(x_BTC, 0, None, attention_mask, layout, caches)

    def forward_from_block(
        self,
        x_BTC: Tensor,
        start: int,
        end: int | None = None,
        attention_mask: Tensor | None = None,
        layout: Layout | None = None,
        caches: Sequence[BlockCache] | None = None,
    ) -> Tensor:
        """Run only Blocks `start` to `end` (exclusive; None: the last). (B, T, C) -> (B, T, C)."""
        check_range("block", start, end, self.num_blocks)
        if layout is None:
            require(caches is None, "caches", "some without a layout", "those beside RackCache.layout")
            layout = Layout(x_BTC, attention_mask)
        for i, block in enumerate(self.blocks[start:end], start):
            x_BTC = block(x_BTC, layout=layout, cache=None if caches is None else caches[i])
        return x_BTC

    def get_block(self, index: int) -> Block:
        """Return the Block at `index`. Raise IndexError if it does not exist."""
        block = self.blocks[index]
        assert isinstance(block, Block)
        return block

    def get_blocks(self) -> list[Block]:
        """Return all Blocks, from the first to the last."""
        return [self.get_block(i) for i in range(self.num_blocks)]

    @property
    def num_blocks(self) -> int:
        """Number of Blocks."""
        return len(self.blocks)

    @property
    def is_causal(self) -> bool:
        """True if every Block is causal."""
        return all(block.is_causal for block in self.get_blocks())

    def unfreeze(self) -> None:
        """Unfreeze every Block, except up-projections that the configuration freezes."""
        for block in self.get_blocks():
            block.unfreeze()
