"""SpecTraining: training of any model with a ModelSpec, by its own optimizer and loss.

Shapes: B batch, T positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise.data.batches import IGNORED
from stackwise.data.tasks import TaskBatches, create_task
from stackwise.data.text import documentation_text
from stackwise.data.windows import TokenWindows
from stackwise.prototype.observation import Observation, observe
from stackwise.prototype.prototype_training import Data, StepBatches, Update, shape_of
from stackwise.stability.telemetry import global_norm, gradient_norms
from stackwise.subject.inference import logits_of
from stackwise.subject.spec import ModelSpec
from stackwise.support.arguments import require

__all__ = ["SpecTraining"]

_BYTES = 256
_PROBE_POSITIONS = 2048
_PROBE_TOKENS = 4096


class SpecTraining:
    """Implementation of `PrototypeTraining` for a ModelSpec.

    Gradients of micro-batches are summed, each weighted by its share of the targets of the step, so that the
    gradient is that of the mean over the entire batch. If the spec has its own loss, the targets it averages
    over are unknown. They are assumed to be the predicted positions.

    Create it, and run its updates, inside `seeded(seed, device)`.

    Args:
        spec: spec of the model.
        seq_len: T of generated data.
        batch_size: number of rows per micro-batch.
        accumulation_steps: number of micro-batches per step.
        learning_rate: learning rate of the optimizer's first group. Other groups are scaled by the same
            factor. None: unchanged.
        data: micro-batches, or step -> batch of the entire update: inputs (B, T), or a mapping with the key
            `input_ids`. For tokens, it may have `labels` (B, T), not shifted, with -100 for positions that
            are not predicted, and `attention_mask` (B, T), nonzero at real tokens, for a spec with `masked`.
            None: default of `ArchitecturePrototype`.
        device: device of the training.
        seed: seed of weights and data.

    Raises:
        ValueError: no trainable parameter, or a learning rate for an optimizer without one. In `update`:
            labels or a mask if the spec has its own loss, a mask for a model that does not accept one, or an
            unknown key.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        seq_len: int,
        batch_size: int,
        accumulation_steps: int = 1,
        learning_rate: float | None = None,
        data: Data | None = None,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        self.spec, self.name, self.device = spec, spec.name, torch.device(device)
        self.notes: list[str] = []
        self.model: nn.Module = spec.create(self.device, seed).train()
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        require(bool(trainable), "model", spec.name, "a model with a parameter that trains")
        self._trainable = trainable
        self.optimizer = spec.optimizer(trainable)
        if learning_rate is not None:
            first = float(self.optimizer.param_groups[0]["lr"])
            require(first > 0, "learning_rate", learning_rate, "None: the optimizer's own is 0")
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate * (group["lr"] / first)
        if data is None:
            data = self._own_data(seq_len, batch_size, accumulation_steps, seed)
        self._batches = StepBatches(data, accumulation_steps, batch_size)
        self._next: tuple[int, Sequence[Mapping[str, Tensor]]] | None = None
        self._probe: Tensor | None = None
        self._is_narrow = False

    def update(self, step: int) -> Update:
        """Train on the batches of `step`; see `PrototypeTraining`."""
        batches = [self._with_labels(batch) for batch in self._of(step)]
        self._next = None
        counts = [self._sent(self._count(batch)) for batch in batches]
        total = torch.stack(counts).sum()
        whole = total.clamp(min=1)
        loss = torch.zeros((), device=self.device)
        for batch, count in zip(batches, counts, strict=True):
            sent = {key: self._sent(each) for key, each in batch.items()}
            share = self._share(sent, count, whole)
            share.backward()  # type: ignore[no-untyped-call]
            loss = loss + share.detach()
        norm = global_norm(gradient_norms(self._trainable))
        lr = float(self.optimizer.param_groups[0]["lr"])
        self.optimizer.step()
        self.optimizer.zero_grad()
        tokens = sum(batch["input_ids"].shape[:2].numel() for batch in batches)
        return Update(loss, norm, lr, tokens, *shape_of(batches), total == 0)

    def observe(self, step: int) -> Observation:
        """Observe the weights on the first rows of the first batch; see `PrototypeTraining`."""
        if self._probe is None:
            inputs = self._of(step)[0]["input_ids"]
            if inputs.shape[1] > _PROBE_POSITIONS:
                inputs = inputs[:, :_PROBE_POSITIONS]
                self.notes.append(f"observed on the first {_PROBE_POSITIONS} positions of a row")
            rows = max(1, _PROBE_TOKENS // inputs.shape[1])
            self._probe = inputs[:rows].to(self.device)
        probe = self._probe

        def call() -> Tensor:
            output = self.spec.logits(self.model, probe)
            if self.spec.loss is None and self.spec.inputs == "tokens":  # other outputs may have any shape
                self._is_narrow = output.shape[-1] < self.spec.width
            return output

        return observe(self.model, call, device=self.device)

    @property
    def in_nats(self) -> bool:
        """True if losses are in nats; see `PrototypeTraining`. False for the own loss of a spec."""
        return self.spec.loss is None and self.spec.inputs == "tokens" and not self._is_narrow

    def validation_loss(self) -> float | None:
        """Return None: a spec has no validation data."""
        return None

    @property
    def passes(self) -> int | None:
        """Number of started passes; see `PrototypeTraining`."""
        return self._batches.passes

    def close(self) -> None:
        """Do nothing, because the training changed no global state."""

    def _of(self, step: int) -> Sequence[Mapping[str, Tensor]]:
        if self._next is None:
            self._next = step, self._batches.of(step)
        assert self._next[0] == step, "one after the other"
        return self._next[1]

    def _with_labels(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the batch, with labels if some of its tokens are not predicted."""
        known = ("input_ids", "labels", "attention_mask")
        unknown = sorted(batch.keys() - set(known))
        require(not unknown, "data: keys of a batch", unknown, ", ".join(known))
        if batch.keys() == {"input_ids"}:
            return batch
        spec = self.spec
        own = "input_ids alone: the spec has a loss of its own, or takes vectors"
        require(spec.loss is None and spec.inputs == "tokens", "data: keys of a batch", sorted(batch), own)
        labels = batch.get("labels", batch["input_ids"])
        if (mask := batch.get("attention_mask")) is not None:
            allowed = f"no attention_mask: {spec.name} takes none"
            require(spec.masked is not None, "data: keys of a batch", sorted(batch), allowed)
            labels = labels.masked_fill(mask == 0, IGNORED)
            if spec.causal:  # a token after padding has no preceding token to be predicted from
                labels = torch.where(F.pad(mask[:, :-1], (1, 0)) == 0, IGNORED, labels)
        return {**batch, "labels": labels}

    def _count(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the number of predicted positions of a micro-batch, on the device of its data."""
        inputs, labels = batch["input_ids"], batch.get("labels")
        shifted = self.spec.inputs == "tokens" and bool(self.spec.causal)
        if labels is None:
            return torch.tensor(inputs.shape[0] * (inputs.shape[1] - shifted), dtype=torch.float64)
        return (labels[:, 1 if shifted else 0 :] != IGNORED).sum().double()

    def _share(self, batch: Mapping[str, Tensor], count: Tensor, whole: Tensor) -> Tensor:
        """Return the part of a micro-batch in the mean loss. It has `count` of all `whole` targets."""
        inputs, labels = batch["input_ids"], batch.get("labels")
        if labels is None:
            mean = self.spec.loss_of(self.model, inputs)
            return mean * (count / whole).to(mean.dtype)
        mask = batch.get("attention_mask")
        if mask is None:
            output = self.spec.logits(self.model, inputs)
        else:
            assert self.spec.masked is not None
            output = logits_of(self.spec.masked(self.model, inputs, mask != 0))
        if self.spec.causal:
            output, labels = output[:, :-1], labels[:, 1:]
        wide = output.flatten(0, 1).to(torch.promote_types(output.dtype, torch.float32))
        total = F.cross_entropy(wide, labels.flatten().long(), ignore_index=IGNORED, reduction="sum")
        return total / whole.to(total.dtype)

    def _sent(self, tensor: Tensor) -> Tensor:
        """Return the tensor on the device. For CUDA, use pinned memory, so that the host does not wait."""
        if self.device.type != "cuda" or tensor.is_cuda:
            return tensor.to(self.device)
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def _own_data(self, seq_len: int, batch_size: int, accumulation_steps: int, seed: int) -> Data:
        """Return data of the spec's `make_batch`, if it exists; otherwise real text or a learnable task."""
        spec, rows = self.spec, batch_size * accumulation_steps

        def made(step: int) -> Tensor:
            return spec.batch(rows, seq_len, seed=seed + 1 + step)

        if spec.make_batch is not None:
            self.notes.append("data: batches of the spec's own make_batch")
            return made
        if spec.inputs == "vectors":
            self.notes.append("data: random vectors, of which there is nothing to learn but their scale")
            return made
        if spec.width >= _BYTES:
            text = torch.frombuffer(bytearray(documentation_text().encode()), dtype=torch.uint8)
            return TokenWindows(text, batch_size, seq_len, row_length=seq_len, seed=seed)
        self.notes.append(
            f"data: a Markov chain over {spec.width} tokens: too few for the bytes of a text ({_BYTES})"
        )
        return TaskBatches(create_task("markov", spec.width, seq_len, seed=seed), batch_size, labels=False)
