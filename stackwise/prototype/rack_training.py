"""RackTraining: training of a Rack from a configuration, with the parts of the trainer."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import islice

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from stackwise.config import StackWiseConfig
from stackwise.data.create import create_data
from stackwise.model.build import create_rack_from_config
from stackwise.prototype.observation import Observation, observe
from stackwise.prototype.prototype_training import Data, StepBatches, Update, shape_of
from stackwise.support.device import resolve_device
from stackwise.training.master import MasterAdamW
from stackwise.training.objective import Objective
from stackwise.training.optimizer import FusedOptimizer
from stackwise.training.phase_model import PhaseModel
from stackwise.training.precision import autocast, float8_layers
from stackwise.training.recompute import recomputing
from stackwise.training.step import MicroBatch, TrainStep
from stackwise.training.targets import IGNORED, Targets
from stackwise.training.trainer import ArchitectureTrainer

__all__ = ["RackTraining"]

_PROBE_TOKENS = 4096  # for several rows; a single row may be longer
_HEAD_POSITIONS = 1024
_VALIDATION_BATCHES = 50  # on a complete text, evaluation would take longer than a short run


class RackTraining:
    """Implementation of `PrototypeTraining` for a Rack. Updates are bit-identical to `ArchitectureTrainer`.

    Create it, and run its updates, inside `seeded(config.training.seed, device)`.

    Args:
        config: model, data and training. `max_steps` is the length of the run.
        data: data instead of the configured data: a dataloader for the trainer, or step -> batch of the
            entire update. None: `create_data(config)`.

    Raises:
        ValueError: attention that is incompatible with the objective; in `update`, data that is exhausted.
    """

    def __init__(self, config: StackWiseConfig, data: Data | None = None) -> None:
        settings = config.training
        self.config, self.device = config, resolve_device(settings.device)
        self.notes: list[str] = []
        self._trainer = ArchitectureTrainer(config, progress=False)
        with torch.random.fork_rng([]):  # creating weights does not advance the random state of the training
            torch.manual_seed(settings.seed)
            self.model = create_rack_from_config(config)
        model = config.model
        self.name = (
            f"{model.attention_type} rack, d_model {model.d_model}, "
            f"{model.architecture.n_stacks} x {model.architecture.blocks_per_stack} blocks"
        )
        self._objective = Objective(settings.objective, config.model.vocab_size)
        self._objective.check(self.model)
        self._validation = None
        if data is None:
            data, self._validation = create_data(config)
        if settings.objective.z_loss and self._validation is None:
            self.notes.append(
                "training.objective.z_loss is part of the losses: no validation data leave it out"
            )
        self._batches = StepBatches(data, settings.accumulation_steps, settings.batch_size)
        self.model.to(self.device).train()
        self._cleanup = ExitStack()
        if settings.precision == "float8":
            self._cleanup.enter_context(float8_layers(self.model))
        phase = PhaseModel(self.model, self._objective)
        self._step = TrainStep(phase, settings, self.model)
        self._cleanup.enter_context(recomputing(self.model, settings.recompute, layers=list(phase.blocks)))
        self._next: tuple[int, tuple[int, int], list[Targets]] | None = None
        self._probe: Targets | None = None

    def update(self, step: int) -> Update:
        """Train on the batches of `step`; see `PrototypeTraining`."""
        (rows, row_length), targets = self._of(step)
        self._next = None
        lr = self._trainer.learning_rate(step)
        # Read before the step, which lowers the scale.
        exhausted = None if self._step.loss_scale is None else self._step.loss_scale.exhausted()
        outcome = self._step([MicroBatch(each.sent(self.device)) for each in targets], lr)
        answered = None if exhausted is None else outcome.skipped & outcome.loss.isfinite() & ~exhausted
        tokens = sum(each.input_ids.numel() for each in targets)
        empty = torch.stack([(each.labels == IGNORED).all() for each in targets]).all()
        return Update(outcome.loss, outcome.grad_norm, lr, tokens, rows, row_length, empty, answered)

    def observe(self, step: int) -> Observation:
        """Observe the weights on the first rows of the first batch; see `PrototypeTraining`."""
        if self._probe is None:
            first = self._of(step)[1][0]
            rows = max(1, _PROBE_TOKENS // first.input_ids.shape[1])
            self._probe = tree_map_only(Tensor, lambda x: x[:rows] if x.dim() else x, first).to(self.device)
        probe = self._probe

        def call() -> Tensor:
            with autocast(self.config.training.precision, self.device):
                x_BTC = self.model.hidden(probe.input_ids, probe.attention_mask, probe.document_ids)
                parts = torch.split(x_BTC, _HEAD_POSITIONS, dim=1)
                return torch.stack([self.model.head(part).abs().amax().float() for part in parts])

        return observe(self.model, call, device=self.device)

    def validation_loss(self) -> float | None:
        """Return the loss over `training.eval_batches` or at most 50 batches; see `PrototypeTraining`."""
        if self._validation is None:
            return None
        self._finish()
        settings = self.config.training
        count = _VALIDATION_BATCHES if settings.eval_interval is None else settings.eval_batches
        self._validation.set_epoch(0)
        return self._trainer.evaluate(self.model, islice(self._validation, count))

    @property
    def in_nats(self) -> bool:
        """True: losses are in nats; see `PrototypeTraining`."""
        return True

    @property
    def optimizer(self) -> FusedOptimizer:
        """Optimizer of the model; see `PrototypeTraining`."""
        return self._step.optimizer

    @property
    def passes(self) -> int | None:
        """Number of started passes; see `PrototypeTraining`."""
        return self._batches.passes

    def close(self) -> None:
        """Restore everything that was changed; see `PrototypeTraining`."""
        self._finish()
        self._cleanup.close()

    def _finish(self) -> None:
        if isinstance(self._step.optimizer, MasterAdamW):
            self._step.optimizer.finish()

    def _of(self, step: int) -> tuple[tuple[int, int], list[Targets]]:
        """Return shape and targets of the batches of a step.

        Store them until the update, because data is read once.
        """
        if self._next is None:
            seed, batches = self.config.training.seed, self._batches.of(step)
            made = [
                self._objective.targets(batch, (seed, step, place)) for place, batch in enumerate(batches)
            ]
            self._next = step, shape_of(batches), made
        assert self._next[0] == step, "one after the other"
        return self._next[1:]
