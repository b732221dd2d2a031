"""Throughput as tests: our own measurement, replayed into pytest-benchmark through its public face.

pytest-benchmark's loop cannot wait for a GPU and does not warm up. So the samples are taken by
`stackwise.benchmark.measure`, and its `pedantic` then runs one round per sample on a clock that
advances by just that sample: saving, comparing, JSON, groups and --benchmark-only all work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from pytest_stackwise import markers, options, records

if TYPE_CHECKING:
    from stackwise.benchmark import Measurement

__all__ = ["fixtures"]


def fixtures(config: pytest.Config) -> object:
    """The fixtures: with pytest-benchmark where it is loaded, alone where it is not."""
    return WithBenchmark() if config.pluginmanager.hasplugin("benchmark") else Alone()


class ReplayClock:
    """A timer that stands still until `advance` moves it by the next sample."""

    __name__ = "replayed_samples"

    def __init__(self) -> None:
        self.now = 0.0
        self.samples: Iterator[float] = iter(())

    def __call__(self) -> float:
        return self.now

    def advance(self) -> None:
        """Take the next sample's time."""
        self.now += next(self.samples)


class WithBenchmark:
    """Fixtures that hand every sample to pytest-benchmark."""

    @pytest.fixture
    def stackwise_clock(self, request: pytest.FixtureRequest) -> ReplayClock:
        """The clock of pytest-benchmark in this test; its other settings stay as the test has them."""
        clock = ReplayClock()
        marker = request.node.get_closest_marker("benchmark")
        settings = dict(marker.kwargs) if marker else {}
        request.node.add_marker(pytest.mark.benchmark(**settings | {"timer": clock}), append=False)
        return clock

    @pytest.fixture
    def throughput(
        self,
        request: pytest.FixtureRequest,
        stackwise_clock: ReplayClock,
        benchmark: Any,
        seq_len: int | None,
    ) -> Callable[..., Measurement]:
        """Measure a model's forward pass or training step.

            @pytest.mark.throughput(mode="train", batch_size=4, seq_len=128)
            def test_training_speed(throughput):
                throughput(spec)

        Call it once with anything that `ModelSpec.of` understands; `mode`, `batch_size`, `seq_len`
        given here win over the marker's, further keyword arguments are those of
        `stackwise.benchmark.measure`. Returns the Measurement. Where benchmarks are disabled
        (--benchmark-disable, xdist) one call is made and timed, without warm-up.
        """
        _owe(request.node)

        def run(model: Any, **arguments: Any) -> Measurement:
            measurement, record = _measure(request.node, model, seq_len, benchmark.disabled, arguments)
            stackwise_clock.samples = iter(measurement.seconds)
            benchmark.extra_info.update(record)
            benchmark.pedantic(stackwise_clock.advance, rounds=len(measurement.seconds))
            return measurement

        return run


class Alone:
    """The same without pytest-benchmark: measured and summarised, not saved."""

    @pytest.fixture
    def throughput(self, request: pytest.FixtureRequest, seq_len: int | None) -> Callable[..., Measurement]:
        """Measure a model's forward pass or training step; see the fixture of the same name above."""
        _owe(request.node)

        def run(model: Any, **arguments: Any) -> Measurement:
            return _measure(request.node, model, seq_len, False, arguments)[0]

        return run


def _owe(item: pytest.Item) -> None:
    if item.get_closest_marker("throughput"):
        records.owe(item, "throughput", "the test is marked throughput but never called throughput")


def _measure(
    item: pytest.Item, model: Any, seq_len: int | None, disabled: bool, arguments: dict[str, Any]
) -> tuple[Measurement, dict[str, Any]]:
    from stackwise.benchmark import call_once, measure, model_workload
    from stackwise.spec import ModelSpec

    if not records.first_time(item, "throughput"):
        raise RuntimeError("throughput: call it once in a test; parametrize the test for more")
    records.pay(item, "throughput")
    markers.refuse_other_length(seq_len, arguments)
    spec = ModelSpec.of(model)
    shape: dict[str, Any] = {
        "mode": "forward",
        "batch_size": 1,
        "seq_len": min(128, spec.max_length or 128),
        "device": options.device_name(item.config),
    }
    shape |= markers.throughput_of(item) | ({"seq_len": seq_len} if seq_len else {})
    shape |= {key: arguments.pop(key) for key in tuple(arguments) if key in shape}
    workload = model_workload(spec, seed=options.seed(item.config), **shape)
    measurement = call_once(workload) if disabled else measure(workload, **arguments)
    shape["device"] = str(shape["device"])
    record = {"model": spec.name, **shape, **measurement.to_dict(), "measured": not disabled}
    records.add(item, "throughput", {"test": item.nodeid, **record})
    return measurement, record
