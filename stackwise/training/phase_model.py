"""PhaseModel: what one phase computes with gradients, from token ids or hidden states to the loss.

Shapes: B batch, T positions, C model width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from stackwise.model.block import Block
from stackwise.model.layout import Layout
from stackwise.model.rack import Rack
from stackwise.training.objective import Objective
from stackwise.training.scope import Phase
from stackwise.training.targets import Targets

__all__ = ["PhaseModel", "blocks_of", "only_training"]


class PhaseModel(nn.Module):
    """The Blocks of a phase from the first that trains to the last of its path, and the head behind them.

    Modules are shared with the Rack, not copied.

    Args:
        rack: whose modules.
        objective: what it learns.
        phase: which of them; None: all.
    """

    def __init__(self, rack: Rack, objective: Objective, phase: Phase | None = None) -> None:
        super().__init__()
        blocks = blocks_of(rack)
        path = range(len(blocks)) if phase is None else phase.path[phase.n_prefix :]
        self.embedding = rack.embedding if phase is None or not phase.n_prefix else None
        self.blocks = nn.ModuleList(blocks[i] for i in path)
        self.final_norm, self.lm_head = rack.final_norm, rack.lm_head
        self.objective = objective

    def forward(
        self, targets: Targets, hidden_BTC: Tensor | None = None, objective: Objective | None = None
    ) -> Tensor:
        """The objective's total over a batch, in nats, not yet divided by how much is predicted.

        Args:
            targets: of the batch.
            hidden_BTC: what the Blocks before these say of it; None where the first is the Rack's first.
            objective: another than what the Rack learns.

        Returns:
            a float32 scalar.
        """
        asked, hidden_BTC = objective or self.objective, self.hidden(targets, hidden_BTC)
        return asked.total(self.final_norm, self.lm_head, hidden_BTC, targets)

    def hidden(self, targets: Targets, hidden_BTC: Tensor | None = None) -> Tensor:
        """What the head reads, (B, T, C). Arguments as in `forward`."""
        if self.embedding is not None:
            assert hidden_BTC is None, "these begin with the embedding"
            x_BTC: Tensor = self.embedding(targets.input_ids)
        else:
            assert hidden_BTC is not None, "these begin behind other Blocks"
            # A prefix computes in float32 or as autocast says, and weights may be bfloat16.
            x_BTC = hidden_BTC.to(self.final_norm.weight.dtype)
        layout = Layout(x_BTC, targets.attention_mask, targets.document_ids)
        for block in self.blocks:
            x_BTC = block(x_BTC, layout=layout)
        return x_BTC


@contextmanager
def only_training(rack: Rack, phase: Phase) -> Iterator[None]:
    """Freeze meanwhile what the phase computes with gradients and does not train.

    What was frozen stays so. Blocks before and behind are not touched: no gradient reaches them.
    """
    blocks = blocks_of(rack)
    parts: list[nn.Module] = [blocks[i] for i in phase.path[phase.n_prefix :] if i not in phase.trained]
    if not phase.trains_head:
        parts.append(rack.final_norm)
    if not (phase.trains_embedding if rack.tie_embeddings else phase.trains_head):
        parts.append(rack.lm_head)
    frozen = [p for part in parts for p in part.parameters() if p.requires_grad]
    for p in frozen:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in frozen:
            p.requires_grad_(True)


def blocks_of(rack: Rack) -> list[Block]:
    """The Blocks of all Stacks, from the first to the last."""
    stacks = map(rack.get_stack, range(len(rack.stacks)))
    return [stack.get_block(i) for stack in stacks for i in range(stack.num_blocks)]
