"""PhaseModel: the part of a Rack that a phase computes with gradients, up to the loss.

Shapes: B batch, T positions, C model width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from stackwise.model.layout import Layout
from stackwise.model.rack import Rack
from stackwise.training.objective import Objective
from stackwise.training.scope import Phase
from stackwise.training.targets import Targets

__all__ = ["PhaseModel", "only_training"]


class PhaseModel(nn.Module):
    """Blocks of a phase, from the first trained one to the last of its path, followed by the head.

    Modules are shared with the Rack, not copied.

    Args:
        rack: Rack that contains the modules.
        objective: training objective.
        phase: phase that selects the Blocks; None: all Blocks.
    """

    def __init__(self, rack: Rack, objective: Objective, phase: Phase | None = None) -> None:
        super().__init__()
        blocks = rack.get_blocks()
        path = range(len(blocks)) if phase is None else phase.path[phase.n_prefix :]
        self.embedding = rack.embedding if phase is None or not phase.n_prefix else None
        self.blocks = nn.ModuleList(blocks[i] for i in path)
        self.final_norm, self.lm_head = rack.final_norm, rack.lm_head
        self.objective = objective

    def forward(
        self, targets: Targets, hidden_BTC: Tensor | None = None, objective: Objective | None = None
    ) -> Tensor:
        """Return the objective's sum over a batch, in nats, not divided by the number of targets.

        Args:
            targets: targets of the batch.
            hidden_BTC: output of the Blocks before these; None if the first Block is the Rack's first.
            objective: replaces the training objective.

        Returns:
            A float32 scalar.
        """
        asked, hidden_BTC = objective or self.objective, self.hidden(targets, hidden_BTC)
        return asked.total(self.final_norm, self.lm_head, hidden_BTC, targets)

    def hidden(self, targets: Targets, hidden_BTC: Tensor | None = None) -> Tensor:
        """Return the input of the head, (B, T, C). Arguments as in `forward`."""
        if self.embedding is not None:
            assert hidden_BTC is None, "these begin with the embedding"
            x_BTC: Tensor = self.embedding(targets.input_ids)
        else:
            assert hidden_BTC is not None, "these begin behind other Blocks"
            # A prefix is computed in float32 or under autocast, and weights may be bfloat16.
            x_BTC = hidden_BTC.to(self.final_norm.weight.dtype)
        layout = Layout(x_BTC, targets.attention_mask, targets.document_ids)
        for block in self.blocks:
            x_BTC = block(x_BTC, layout=layout)
        return x_BTC


@contextmanager
def only_training(rack: Rack, phase: Phase) -> Iterator[None]:
    """Freeze, in this context, modules that the phase computes with gradients but does not train.

    Frozen parameters stay frozen. Blocks before and after the path are unchanged: no gradient reaches them.
    """
    blocks = rack.get_blocks()
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
