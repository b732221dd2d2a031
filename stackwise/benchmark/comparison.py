"""Interleaved comparison of several architectures on the same work, relative to a baseline."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from stackwise.benchmark.generation import GenerationMeasurement, measure_generation
from stackwise.benchmark.memory.peak import peak_memory_bytes
from stackwise.benchmark.table import ComparisonTable
from stackwise.benchmark.timing.cache_state import CACHE_STATES
from stackwise.benchmark.timing.clock import CLOCKS
from stackwise.benchmark.timing.interleaved import Interleaved, interleave
from stackwise.benchmark.timing.measurement import Measurement, measure
from stackwise.benchmark.token_stream import ALL_AGAIN, LOOPS
from stackwise.benchmark.workload import PEAKS, Workload, check_shape, model_workload
from stackwise.subject.spec import ModelSpec
from stackwise.support.arguments import check_choice, check_number, check_sizes, require
from stackwise.support.device import fingerprint, resolve_device

__all__ = ["ArchitectureBenchmark", "Case", "ComparisonConfig", "compare_architectures"]


@dataclass(frozen=True)
class Case:
    """One kind of work that every architecture does.

    Attributes:
        mode: "forward", "train", "prefill", "decode" or "generate"; see `model_workload`.
        batch_size: number of rows.
        seq_len: positions per row. For "decode", the positions in the cache; for "generate", the prompt.
        new_tokens: number of new tokens per row, for "generate".
    """

    mode: str = "forward"
    batch_size: int = 1
    seq_len: int = 128
    new_tokens: int = 32

    def __post_init__(self) -> None:
        check_shape(**asdict(self))

    def __str__(self) -> str:
        shape = f"{self.mode} {self.batch_size} x {self.seq_len}"
        return f"{shape} + {self.new_tokens}" if self.mode == "generate" else shape


@dataclass(frozen=True)
class ComparisonConfig:
    """Cases and settings of a comparison.

    Attributes:
        cases: kinds of work to measure.
        device: "auto", "cpu", "cuda" or "cuda:N".
        dtype: name of the dtype of weights and inputs. None: the dtype of each model.
        compile: as in `model_workload`. Generation is compiled only with `loop="own"`; otherwise a note is
            added.
        loop: loop of a generation: "common" or "own".
        rounds: number of rounds. Every architecture is measured once per round.
        turn_seconds: seconds of samples per architecture and round.
        warmup_seconds: time after the first window of a warm-up in which further windows may start, per
            architecture.
        clock: "host" or "device".
        cache: "warm" or "cold".
        peak: peak rates that MFU and MBU refer to: "published" by the manufacturer, or "measured" on this
            machine. A CPU has only measured rates.
        seed: seed of weights, inputs and the order of the architectures in a round.
    """

    cases: tuple[Case, ...] = (
        Case("forward", 1, 128),
        Case("train", 4, 128),
        Case("prefill", 1, 128),
        Case("decode", 1, 128),
        Case("generate", 1, 128, 16),
    )
    device: str = "cpu"
    dtype: str | None = None
    compile: bool | str = False
    loop: str = "common"
    rounds: int = 32
    turn_seconds: float = 0.02
    warmup_seconds: float = 2.0
    clock: str = "host"
    cache: str = "warm"
    peak: str = "published"
    seed: int = 0

    def __post_init__(self) -> None:
        require(bool(self.cases), "cases", self.cases, "one or more")
        for case in self.cases:
            check_shape(
                **asdict(case), dtype=self.dtype, compile=self._compile(case), loop=self.loop, seed=self.seed
            )
        check_sizes(rounds=self.rounds)
        check_number("turn_seconds", self.turn_seconds, "a number > 0", lambda value: value > 0)
        check_number("warmup_seconds", self.warmup_seconds, "a number >= 0", lambda value: value >= 0)
        check_choice("loop", self.loop, LOOPS)
        check_choice("clock", self.clock, CLOCKS)
        check_choice("cache", self.cache, CACHE_STATES)
        check_choice("peak", self.peak, PEAKS)

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> ComparisonConfig:
        """Return a config from plain values. `cases` is a list of mappings.

        Raises:
            ValueError: unknown key, or a value outside its range.
        """
        known = _known(cls, settings, "config")
        cases = known.pop("cases", None)
        if cases is not None:
            sound = isinstance(cases, Sequence) and all(isinstance(case, Case | Mapping) for case in cases)
            require(sound, "cases", cases, "a list of mappings, such as {'mode': 'train', 'seq_len': 128}")
            known["cases"] = tuple(
                case if isinstance(case, Case) else Case(**_known(Case, case, f"cases[{place}]"))
                for place, case in enumerate(cases)
            )
        return cls(**known)

    def workload(self, spec: ModelSpec, case: Case) -> Workload:
        """Return the workload of one architecture."""
        return model_workload(
            spec,
            **asdict(case),
            device=resolve_device(self.device),
            dtype=self.dtype,
            compile=self._compile(case),
            loop=self.loop,
            seed=self.seed,
        )

    def _compile(self, case: Case) -> bool | str:
        # In the common loop of a generation, the input grows by a token at each step, so it is not compiled.
        common = case.mode == "generate" and self.loop == "common"
        return False if common else self.compile

    def notes(self, case: Case) -> tuple[str, ...]:
        """Return notes on the settings that do not apply to a case."""
        if self._compile(case) == self.compile:
            return ()
        return ("not compiled: the common loop grows by a token at each step",)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


class ArchitectureBenchmark:
    """Speed and memory measurements of one architecture.

    Each measurement builds a new model with the same seed, so that no measurement depends on an earlier one.

    Args:
        model: model to measure; anything that `ModelSpec.of` accepts.
        device: "auto", "cpu", "cuda" or "cuda:N".
        dtype: name of the dtype of weights and inputs. None: unchanged.
        compile: as in `model_workload`.
        seed: seed of weights and inputs.

    Attributes:
        spec: spec of the model.

    Raises:
        ValueError: a device that this machine does not have, or an invalid dtype, compile mode or seed.
    """

    def __init__(
        self,
        model: Any,
        *,
        device: str = "cpu",
        dtype: str | None = None,
        compile: bool | str = False,  # noqa: A002  # the name in PyTorch
        seed: int = 0,
    ) -> None:
        check_shape(dtype=dtype, compile=compile, seed=seed)
        self.spec = ModelSpec.of(model)
        self.device, self.dtype, self.compile, self.seed = resolve_device(device), dtype, compile, seed

    @property
    def n_parameters(self) -> int:
        """Number of parameters of the architecture. A tied weight counts once."""
        return sum(p.numel() for p in self.spec.create(seed=self.seed).parameters())

    def benchmark_batch_throughput(self, batch_size: int, seq_len: int, **how: Any) -> Measurement:
        """Measure forward passes over a batch. `how`: keywords of `measure`."""
        return measure(self.workload("forward", batch_size=batch_size, seq_len=seq_len), **how)

    def benchmark_training(self, batch_size: int, seq_len: int, **how: Any) -> Measurement:
        """Measure training steps on a batch. `how`: keywords of `measure`."""
        return measure(self.workload("train", batch_size=batch_size, seq_len=seq_len), **how)

    def benchmark_prefill(self, batch_size: int, seq_len: int, **how: Any) -> Measurement:
        """Measure prompts into an empty cache. `how`: keywords of `measure`."""
        return measure(self.workload("prefill", batch_size=batch_size, seq_len=seq_len), **how)

    def benchmark_decode(self, batch_size: int, context: int, **how: Any) -> Measurement:
        """Measure one new token per row after `context` tokens. Each call starts from the same context.

        `how`: keywords of `measure`.
        """
        return measure(self.workload("decode", batch_size=batch_size, seq_len=context), **how)

    def benchmark_generation(
        self,
        prompt_tokens: int,
        generation_length: int,
        *,
        batch_size: int = 1,
        loop: str = "common",
        **how: Any,
    ) -> GenerationMeasurement:
        """Measure complete generations, token by token. `how`: keywords of `measure_generation`."""
        workload = self.workload(
            "generate", batch_size=batch_size, seq_len=prompt_tokens, new_tokens=generation_length, loop=loop
        )
        return measure_generation(workload, **how)

    def workload(self, mode: str, *, batch_size: int, seq_len: int, **more: Any) -> Workload:
        """Return a workload of the architecture. `more`: `new_tokens` and `loop` of `model_workload`.

        Garbage is collected first, so that an earlier model is freed and two models are never in memory at
        once.
        """
        gc.collect()
        return model_workload(
            self.spec,
            mode,
            batch_size=batch_size,
            seq_len=seq_len,
            device=self.device,
            dtype=self.dtype,
            compile=self.compile,
            seed=self.seed,
            **more,
        )


def compare_architectures(
    architectures: Mapping[str, Any],
    config: ComparisonConfig | Mapping[str, Any] | None = None,
    *,
    baseline: str | None = None,
) -> ComparisonTable:
    """Measure architectures on the same work, interleaved, and compare each with a baseline.

    For each case, all architectures are in memory at once. In each round, every architecture is measured, so
    that a disturbance of the machine affects all of them. The models of a case are freed before the next
    case.

    Memory is measured first, for each architecture separately. A discarded pass before it loads everything
    that the process retains, such as libraries, so that it is not attributed to an architecture.

    Compare models of equal size: a smaller model that is faster than a larger one does not prove a better
    architecture. `llama_baseline(model)` is a Llama of the model's size.

    Args:
        architectures: mapping of names to models; anything that `ModelSpec.of` accepts.
        config: a ComparisonConfig or a mapping of its keys. None: defaults.
        baseline: name of the architecture that all are compared with. None: the first one.

    Returns:
        One row for each case and architecture.

        - `speed_up` is the median over rounds of the baseline's time divided by the architecture's time. It
          is above 1 if the architecture is faster. `speed_up_low` and `speed_up_high` are its 95 % confidence
          interval. It is None, with a note, if a GPU was throttled in too many rounds, or if the architecture
          or the baseline seems to have a cache but decodes without it.
        - `memory_bytes` is the peak memory of the model and one call, above that of the process without them.
          On the CPU, it is the resident memory, but at least the size of weights, buffers, gradients and
          optimizer state. A note reports if this minimum is used.
        - `execution` describes the execution of the work.
        - `floor_seconds` is the minimum time of decoding a token, and `bound` is the limiting resource.
        - A note reports if only one of the architecture and the baseline is causal.

    Raises:
        ValueError: no architectures, an unknown baseline, or settings outside their range.
        TypeError: architectures or settings that are not a mapping.
    """
    if not isinstance(architectures, Mapping):
        raise TypeError(
            f"architectures: got {type(architectures).__name__}; wanted a mapping of names to models, such "
            "as {'llama': ..., 'rack': ...}"
        )
    require(bool(architectures), "architectures", dict(architectures), "one or more, by name")
    for name in architectures:
        require(isinstance(name, str), "architectures: name", name, "a string")
    if not isinstance(config, ComparisonConfig | Mapping | None):
        raise TypeError(
            f"config: got {type(config).__name__}; wanted a ComparisonConfig, a mapping of its keys, or None"
        )
    if not isinstance(config, ComparisonConfig):
        config = ComparisonConfig.from_dict({} if config is None else config)
    baseline = next(iter(architectures)) if baseline is None else baseline
    check_choice("baseline", baseline, architectures)
    specs = {name: ModelSpec.of(each, name=name) for name, each in architectures.items()}
    counts = {
        name: sum(p.numel() for p in spec.create(seed=config.seed).parameters())
        for name, spec in specs.items()
    }
    rows = [row for case in config.cases for row in _rows(config, case, specs, counts, baseline)]
    machine = fingerprint(resolve_device(config.device))
    return ComparisonTable(tuple(rows), baseline, config.to_dict(), machine)


def _rows(
    config: ComparisonConfig,
    case: Case,
    specs: Mapping[str, ModelSpec],
    counts: Mapping[str, int],
    baseline: str,
) -> list[dict[str, Any]]:
    """Return the rows of all architectures for one case. Their models are freed when the call returns."""
    memory = {name: _memory_alone(config, spec, case) for name, spec in specs.items()}
    gc.collect()
    workloads = {name: config.workload(spec, case) for name, spec in specs.items()}
    found = interleave(
        workloads,
        rounds=config.rounds,
        turn_seconds=config.turn_seconds,
        warmup_seconds=config.warmup_seconds,
        seed=config.seed,
        clock=config.clock,
        cache=config.cache,
    )
    return [
        _Row(
            config,
            case,
            name,
            baseline,
            workload,
            found,
            notes=_unlike(specs[name], specs[baseline]),
            handicaps=[
                handicap
                for each in dict.fromkeys((baseline, name))
                if (handicap := _handicap(config, case, specs[each])) is not None
            ],
        ).values(counts[name], *memory[name])
        for name, workload in workloads.items()
    ]


def _handicap(config: ComparisonConfig, case: Case, spec: ModelSpec) -> str | None:
    """Return the reason why a model's time is no measure of its architecture. None: it is one."""
    by_itself = case.mode == "generate" and config.loop == "own"
    if case.mode not in ("decode", "generate") or by_itself or spec.decode is not None:
        return None
    if not spec.cache_problem:
        return None
    return (
        f"no speed-up: {spec.name} computes all tokens again ({spec.cache_problem}); declare decode= in "
        "ModelSpec.of(factory, ...), or decode=None if it keeps no cache"
    )


def _unlike(spec: ModelSpec, baseline: ModelSpec) -> list[str]:
    """Return a note if one of the two models is causal and the other is not, because their work differs."""
    if None in (spec.causal, baseline.causal) or spec.causal == baseline.causal:
        return []
    return [f"{'causal' if spec.causal else 'not causal'}, unlike {baseline.name}"]


@dataclass(frozen=True)
class _Row:
    """Results of one architecture in one case."""

    config: ComparisonConfig
    case: Case
    name: str
    baseline: str
    workload: Workload
    found: Interleaved
    notes: list[str] = field(default_factory=list)
    handicaps: list[str] = field(default_factory=list)

    def values(self, n_parameters: int, memory: int | None, memory_note: str | None) -> dict[str, Any]:
        """Return the values of the row by column."""
        measured = self.found.measurements[self.name]
        low = high = ratio = None
        if self.found.inconclusive:
            self.notes.append(
                f"{len(self.found.discarded)} of {self.found.n_rounds} rounds were throttled: inconclusive"
            )
        elif not self.handicaps:
            speed_up = self.found.speed_up(self.name, self.baseline)
            ratio, low, high = speed_up.median, speed_up.low, speed_up.high
        self.notes.extend(self.handicaps)
        if not measured.steady:
            self.notes.append(f"not steady: {measured.warmup.reason}")
        self.notes.extend(self.config.notes(self.case))
        execution = "; ".join(f"{key}: {value}" for key, value in measured.execution.items())
        if ALL_AGAIN in execution and not self.handicaps:
            self.notes.append(f"{ALL_AGAIN}: the model keeps no cache")
        if memory_note is not None:
            self.notes.append(memory_note)
        used = self.workload.utilization(measured.median, self.config.peak)
        floor = self.workload.floor(self.config.peak)
        return {
            "architecture": self.name,
            "workload": str(self.case),
            "mode": self.case.mode,
            "batch_size": self.case.batch_size,
            "seq_len": self.case.seq_len,
            "new_tokens": self.case.new_tokens if self.case.mode == "generate" else None,
            "parameters": n_parameters,
            "tokens_per_second": measured.tokens_per_second,
            "speed_up": ratio,
            "speed_up_low": low,
            "speed_up_high": high,
            "median_seconds": measured.median,
            "p50_seconds": measured.p50.value,
            "p95_seconds": measured.p95.value,
            "p99_seconds": measured.p99.value,
            "samples": len(measured.seconds),
            **self._latencies(),
            "memory_bytes": memory,
            "mfu": used and used.mfu,
            "hfu": used and used.hfu,
            "mbu": used and used.mbu,
            "floor_seconds": floor and floor.seconds,
            "bound": floor and floor.bound,
            "execution": execution,
            "note": "; ".join((*self.notes, *measured.notes)) or None,
        }

    def _latencies(self) -> dict[str, float | None]:
        """Return the token latencies of a generation, measured in a separate pass."""
        names = ("ttft_seconds", "tpot_seconds", "itl_p50_seconds", "itl_p95_seconds", "itl_p99_seconds")
        if self.case.mode != "generate":
            return dict.fromkeys(names)
        measured = measure_generation(
            self.workload,
            min_seconds=self.config.rounds * self.config.turn_seconds,
            warmup_seconds=0.0,
            clock=self.config.clock,
        )
        middle = [measured.percentile(50, of) for of in ("ttft", "tpot")]
        gaps = [measured.percentile(q, "itl") for q in (50, 95, 99)]
        found = [None if each is None else each.value for each in (*middle, *gaps)]
        return dict(zip(names, found, strict=True))


def _memory_alone(config: ComparisonConfig, spec: ModelSpec, case: Case) -> tuple[int | None, str | None]:
    """Return the peak memory of a model and one call of it, above that of the process before, and a note.

    A discarded model is run first. Memory that the process retains after a model is freed, such as libraries,
    workspaces and tables, is therefore in the baseline. The first call of the measured model is not measured
    either, because it creates the optimizer state.

    On the CPU, the resident memory grows by less than the size of the model if the C library still held freed
    pages. The result is therefore at least the size of the model's weights and state.
    """
    device = resolve_device(config.device)
    _call(config.workload(spec, case))
    before = peak_memory_bytes(lambda: None, device)
    workload = config.workload(spec, case)
    _call(workload)
    prepare = workload.prepare_alone or workload.prepare
    if prepare is not None:
        prepare()
    peak = peak_memory_bytes(workload.call, device)
    if before is None or peak is None:
        return None, None
    held, added = workload.held_bytes(), peak - before
    if added >= max(1, held):
        return added, None
    return held or None, "memory: that of weights and what belongs to them, as what is resident rose by less"


def _call(workload: Workload) -> None:
    if workload.prepare is not None:
        workload.prepare()
    workload.call()


def _known(kind: type, given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the mapping as a dict. Raise ValueError if a key is not a field of the dataclass."""
    names = [each.name for each in fields(kind)]
    for key in given:
        require(key in names, f"{where}: key", key, ", ".join(map(repr, names)))
    return dict(given)
