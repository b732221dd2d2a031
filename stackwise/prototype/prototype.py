"""ArchitecturePrototype: trial run of an architecture at its production length, long enough for a verdict."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from contextlib import closing, nullcontext
from typing import Any

import torch
from torch import nn

from stackwise.benchmark.memory.peak import watch_peak
from stackwise.benchmark.timing.measurement import measure
from stackwise.benchmark.workload import model_workload
from stackwise.config import StackWiseConfig
from stackwise.model.build import create_rack_from_config
from stackwise.prototype.loss_verdict import DivergenceRule, SpikeRule
from stackwise.prototype.prototype_run import ForwardPass, PrototypeRun
from stackwise.prototype.prototype_training import Data, PrototypeTraining, check_data
from stackwise.prototype.rack_training import RackTraining
from stackwise.prototype.spec_training import SpecTraining
from stackwise.prototype.trial import ENOUGH, OnStep, Trial
from stackwise.stability.faults import Fault, broken
from stackwise.stability.run import shortest_length
from stackwise.subject.spec import ModelSpec
from stackwise.support.arguments import check_number, check_sizes, require
from stackwise.support.device import resolve_device
from stackwise.support.random_state import keep_random_states, seeded
from stackwise.training.precision import autocast, check_precision, float8_layers

__all__ = ["ArchitecturePrototype", "with_learning_rate"]

_BATCH_SIZE = 8


class ArchitecturePrototype:
    """Architecture with the data and settings of its trial runs.

    Args:
        subject: a configuration, with its Rack, data, objective, optimizer, schedule and clipping; or
            anything that `ModelSpec.of` accepts, with its own optimizer and loss.
        seq_len: number of positions, as in production. None: the length of the configuration or spec.
        batch_size: number of rows per micro-batch. None: the configured number, or 8. With `effective_batch`,
            its largest divisor up to that number.
        effective_batch: number of rows per update, a multiple of `batch_size`. Micro-batches are weighted by
            their number of targets, so that the update is that of the full batch. None: the configured
            number, or `batch_size`.
        learning_rate: peak learning rate. Separate learning rates of Stacks are scaled by the same factor.
            None: the configured one, or that of the optimizer.
        data: data for training instead of the configured data: an iterable of micro-batches as for the
            trainer, which is restarted for each run and when it is exhausted (an iterator is refused), or a
            function step -> batch of the entire update. A note reports a number or length of rows that
            differs from the requested one. None: the configured data. For a spec, batches of its
            `make_batch`, if it has one; otherwise the bytes of a text that is part of CPython, or, for a
            vocabulary below 256, a Markov chain.
        device: device to run on. None: the configured one, or the CPU.
        seed: seed of weights, data and dropout. None: the configured one, or 0.

    Raises:
        ValueError: sizes that are not positive integers or do not divide; training of parts of a Rack or with
            several processes; a length that the model does not support; an iterator as data.
        TypeError: a subject of another type.
    """

    def __init__(
        self,
        subject: Any,
        *,
        seq_len: int | None = None,
        batch_size: int | None = None,
        effective_batch: int | None = None,
        learning_rate: float | None = None,
        data: Data | None = None,
        device: torch.device | str | None = None,
        seed: int | None = None,
    ) -> None:
        given = {"seq_len": seq_len, "batch_size": batch_size, "effective_batch": effective_batch}
        check_sizes(**{key: value for key, value in given.items() if value is not None})
        if learning_rate is not None:
            check_number("learning_rate", learning_rate, "a finite number > 0", lambda lr: lr > 0)
        if seed is not None:
            check_sizes(0, seed=seed)
        check_data(data)
        self._data, self._learning_rate = data, learning_rate
        self._config: StackWiseConfig | None = None
        self._spec = None if isinstance(subject, StackWiseConfig) else ModelSpec.of(subject)
        self._notes: list[str] = []
        if self._spec is None:
            own = subject.training
            own_batch, own_effective = own.batch_size, own.batch_size * own.accumulation_steps
            own_length, own_seed, own_device = own.seq_len, own.seed, own.device
        else:
            own_batch = own_effective = _BATCH_SIZE
            own_length, own_seed, own_device = self._spec.seq_len, 0, "cpu"
        self.seed = own_seed if seed is None else seed
        self.device = resolve_device(str(device or own_device))
        self.seq_len = own_length if seq_len is None else seq_len
        self.batch_size, self.effective_batch = _batches(
            batch_size, effective_batch, own_batch, own_effective
        )
        self._asked_rows: int | None = self.effective_batch
        self._asked_length: int | None = self.seq_len
        if self._spec is None:
            self._config = self._configured(subject, is_length_seen=seq_len is not None or data is None)
        else:
            self._check_length(self._spec, is_asked=seq_len is not None or data is not None)
            # Without a request, no difference can be reported.
            self._asked_rows = self.effective_batch if batch_size or effective_batch else None
            self._asked_length = seq_len

    def run(
        self,
        steps: int = ENOUGH,
        *,
        observe_every: int | None = None,
        spike: SpikeRule | None = None,
        divergence: DivergenceRule | None = None,
        faults: Iterable[Fault] = (),
        on_step: OnStep | None = None,
    ) -> PrototypeRun:
        """Train for `steps` updates from new weights. Return the run with its verdict; see `loss_verdict`.

        Loss and gradient norm stay on the device and are read every 10 steps. If one is not finite, the run
        stops then. The schedule is that of a run of `steps`, with the configured share of warm-up. The
        caller's random state is unchanged, and two calls return bit-identical losses.

        Args:
            steps: number of updates. A note reports fewer than 1000.
            observe_every: number of steps between two observations of logits and attention, which do not
                affect the training. None: a fiftieth of the run. The last step is always observed.
            spike: rule for spikes. None: `SpikeRule()`. If the loss may not be in nats, such as the own loss
                of a spec, and starts below 1, the limits are relative to that value, and a note reports it;
                see `loss_verdict`.
            divergence: rule for divergence. None: `DivergenceRule()`, with the same scaling.
            faults: faults from `stackwise.stability.faults` that act on the model, gradients or weights, to
                test that a run detects them.
            on_step: called with (step, loss), in order, when the loss is on the host. Its exceptions stop the
                run and are passed on.

        Raises:
            ValueError: sizes that are not positive integers; data without a batch or without a target; a
                fault that did not act.
        """
        check_sizes(steps=steps)
        every = max(1, steps // 50) if observe_every is None else observe_every
        check_sizes(observe_every=every)
        with keep_random_states(), seeded(self.seed, self.device), torch.enable_grad():
            with watch_peak(self.device) as making:
                training = self._training(steps)
            with closing(training):
                run = Trial(training, steps, every, self.device, on_step)
                with broken((training.model, training.optimizer), faults):
                    run.train()
                return run.result(making.peak, spike, divergence, [*self._notes, *self._arrived(run)])

    def run_training_step(self, iterations: int = 10) -> PrototypeRun:
        """Run a few updates. They show that the model trains and the cost of an update, but are no verdict.

        Raises:
            ValueError: as in `run`.
        """
        return self.run(iterations)

    def run_forward_pass(
        self,
        *,
        min_seconds: float = 1.0,
        min_calls: int = 5,
        warmup_seconds: float = 2.0,
    ) -> ForwardPass:
        """Measure a forward pass of `batch_size` rows, in eval mode and without gradients.

        A Rack uses the precision of its training: with "bf16_weights", its weights are bfloat16, and with
        "float8", its layers multiply in float8.

        Args:
            min_seconds: as in `stackwise.benchmark.measure`, which warms up until the time is steady.
            min_calls: as in `stackwise.benchmark.measure`.
            warmup_seconds: as in `stackwise.benchmark.measure`.

        Raises:
            ValueError: numbers out of range, or a precision that the device does not support.
            ImportError: "float8" without torchao.
        """
        precision = "fp32" if self._config is None else self._config.training.precision
        check_precision(precision, self.device)
        spec = self._spec if self._config is None else _spec_of(self._config)
        assert spec is not None
        workload = model_workload(
            spec,
            "forward",
            batch_size=self.batch_size,
            seq_len=self.seq_len,
            device=self.device,
            seed=self.seed,
        )
        assert workload.model is not None
        with float8_layers(workload.model) if precision == "float8" else nullcontext():
            found = measure(
                workload, min_seconds=min_seconds, min_calls=min_calls, warmup_seconds=warmup_seconds
            )
        parameters = sum(p.numel() for p in workload.model.parameters())
        return ForwardPass(spec.name, self.batch_size, self.seq_len, found, parameters)

    def _check_length(self, spec: ModelSpec, *, is_asked: bool) -> None:
        """Raise ValueError for a length that a spec does not support.

        Add a note if it is shorter than possible.
        """
        check_sizes(shortest_length(spec), seq_len=self.seq_len)
        limit = spec.max_length
        if limit is not None:
            require(self.seq_len <= limit, "seq_len", self.seq_len, f"at most {limit} for {spec.name}")
        if limit is not None and self.seq_len < limit:
            taken = f"{self.seq_len} of the {limit} that the model takes"
            self._notes.append(f"seq_len: {taken}; nothing is said of longer ones")
        elif limit is None and not is_asked:
            taken = f"{self.seq_len}, as in checks of the model, since none was given"
            self._notes.append(f"seq_len: {taken}; nothing is said of longer ones")

    def _arrived(self, run: Trial) -> Iterator[str]:
        """Yield notes if the rows of the median update differ from the requested ones."""
        rows, length = statistics.median_low(run.rows), statistics.median_low(run.row_lengths)
        if self._asked_rows is not None and rows != self._asked_rows:
            yield f"data: {rows} rows of an update, of the {self._asked_rows} asked for"
        if self._asked_length is not None and length < self._asked_length:
            told = f"data: rows of {length} positions, of the {self._asked_length} asked for"
            yield f"{told}; nothing is said of longer ones"

    def _configured(self, config: StackWiseConfig, *, is_length_seen: bool) -> StackWiseConfig:
        """Return the configuration with the requested settings. Add notes for settings that are impossible.

        Args:
            config: configuration of the subject.
            is_length_seen: True if rows have the length `seq_len`. User-defined data may have another length.
        """
        settings = config.training
        architecture = settings.training_architecture
        require(
            architecture == "rackwise" and not settings.scope.growth,
            "training.training_architecture",
            architecture + (" with scope.growth" if settings.scope.growth else ""),
            "'rackwise' without growth: a verdict is of one curve of losses",
        )
        strategy = settings.distributed.strategy
        require(strategy == "none", "training.distributed.strategy", strategy, "'none': one process")
        limit = config.model.max_seq_len
        if limit is not None and is_length_seen:
            require(self.seq_len <= limit, "seq_len", self.seq_len, f"at most model.max_seq_len={limit}")
        if settings.guard is not None:
            self._notes.append("training.guard is left out: it would hide what is looked for")
        for name, seen, own in (
            ("seq_len", self.seq_len, settings.seq_len),
            ("rows of an update", self.effective_batch, settings.batch_size * settings.accumulation_steps),
        ):
            if seen < own:
                self._notes.append(f"{name}: {seen} of the {own} configured; nothing is said of longer ones")
        changed = config.to_dict()
        training = changed["training"]
        training |= {
            "seq_len": self.seq_len,
            "batch_size": self.batch_size,
            "accumulation_steps": self.effective_batch // self.batch_size,
            "seed": self.seed,
            "device": str(self.device),
            "guard": None,
        }
        for key in ("checkpoint_dir", "resume", "save_interval", "checkpoint", "telemetry"):
            training.pop(key, None)
        made = StackWiseConfig.from_dict(changed)
        return made if self._learning_rate is None else with_learning_rate(made, self._learning_rate)

    def _training(self, steps: int) -> PrototypeTraining:
        if self._config is None:
            assert self._spec is not None
            return SpecTraining(
                self._spec,
                seq_len=self.seq_len,
                batch_size=self.batch_size,
                accumulation_steps=self.effective_batch // self.batch_size,
                learning_rate=self._learning_rate,
                data=self._data,
                device=self.device,
                seed=self.seed,
            )
        changed = self._config.to_dict()
        training = changed["training"]
        warmup = training["schedule"]["warmup_steps"]
        if warmup is not None:
            training["schedule"]["warmup_steps"] = warmup * steps // training["max_steps"]
        training["max_steps"] = steps
        return RackTraining(StackWiseConfig.from_dict(changed), self._data)


def with_learning_rate(config: StackWiseConfig, learning_rate: float) -> StackWiseConfig:
    """Return the configuration with another learning rate. Separate ones of Stacks are scaled too."""
    changed = config.to_dict()
    optimizer = changed["training"]["optimizer"]
    for own in optimizer["per_stack"].values():
        if own["lr"] is not None:
            own["lr"] *= learning_rate / optimizer["lr"]
    optimizer["lr"] = float(learning_rate)
    return StackWiseConfig.from_dict(changed)


def _batches(
    batch_size: int | None, effective_batch: int | None, own_batch: int, own_effective: int
) -> tuple[int, int]:
    """Return the rows per micro-batch and per update."""
    if effective_batch is None:
        if batch_size is None:
            return own_batch, own_effective
        return batch_size, batch_size * (own_effective // own_batch)
    if batch_size is None:
        batch_size = max(n for n in range(1, own_batch + 1) if effective_batch % n == 0)
    fits = effective_batch % batch_size == 0
    require(fits, "effective_batch", effective_batch, f"a multiple of batch_size={batch_size}")
    return batch_size, effective_batch


def _spec_of(config: StackWiseConfig) -> ModelSpec:
    """Return a spec of a configuration's Rack in the precision of its training, without float8 layers."""
    precision, limit = config.training.precision, config.model.max_seq_len
    device = torch.device(config.training.device)

    def build() -> nn.Module:
        rack = create_rack_from_config(config)
        if precision == "bf16_weights":  # like the optimizer, convert parameters but not buffers
            for parameter in rack.parameters():
                parameter.data = parameter.data.bfloat16()
        return rack

    def forward(model: nn.Module, inputs: torch.Tensor) -> Any:
        with autocast(precision, device):
            return model(inputs)

    return ModelSpec(
        build=build,
        name=f"{config.model.attention_type} rack, d_model {config.model.d_model}",
        inputs="tokens",
        width=config.model.vocab_size,
        causal=config.model.attention_mode == "causal",
        max_length=limit,
        forward=forward,
    )
