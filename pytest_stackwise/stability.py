"""Stability tests: fixtures that train a model with the faults of the markers, or at several lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from pytest_stackwise import markers, options, records
from pytest_stackwise.faults import declared_faults

if TYPE_CHECKING:
    from stackwise.stability import StabilityRun
    from stackwise.stability.lengths import FirstUnstable, LengthSweep
    from stackwise.stability.lengths.point import LengthPoint
    from stackwise.stability.recovery import Recovery

__all__ = ["RecoveryFailedError", "StabilityFixtures", "parametrize_lengths"]


class RecoveryFailedError(AssertionError):
    """A run with faults did not recover. The message has the reasons and the steps.

    Attributes:
        recovery: the run with faults, the reference run without faults, and the conditions for recovery.
    """

    def __init__(self, recovery: Recovery) -> None:
        self.recovery = recovery
        super().__init__(str(recovery))


class StabilityFixtures:
    """Fixtures of stability tests."""

    @pytest.fixture
    def seq_len(self) -> int | None:
        """Sequence length of the test, from the marker `seq_lengths` or a parametrization; otherwise None."""
        return None

    @pytest.fixture
    def stability_run(
        self, request: pytest.FixtureRequest, seq_len: int | None
    ) -> Callable[..., StabilityRun]:
        """Train a model or run a training loop for a few steps, and inject the faults of the test's markers.

            @pytest.mark.recovers(within=4, loss_tolerance=0.1)
            @pytest.mark.gradient_explosion(step=8, factor=10)
            def test_explosion(stability_run):
                stability_run(spec, steps=16)

        Call it with anything that `ModelSpec.of` understands, a TrainerSpec or a function that returns a
        training run, and the keyword arguments of `stackwise.stability.stability_run`. The result is a
        StabilityRun. With the marker `recovers`, a reference run without faults is made as well. If the
        conditions of the marker are not met, RecoveryFailedError is raised.
        """
        item = request.node
        faults = declared_faults(request)
        recovers = markers.recovery_of(item)
        if recovers:
            records.owe(item, "recovers", "the test declares recovers but never called stability_run")

        def run(model: Any, **arguments: Any) -> StabilityRun:
            __tracebackhide__ = True
            records.pay(item, "faults")
            records.pay(item, "recovers")
            from stackwise.stability import stability_run
            from stackwise.stability.recovery import recovery_run

            markers.refuse_other_length(seq_len, arguments)
            if "faults" in arguments:
                arguments["faults"] = [*faults, *arguments["faults"]]
            defaults: dict[str, Any] = {
                "faults": faults,
                "seq_len": seq_len,
                "device": options.device_name(item.config),
                "seed": options.seed(item.config),
            }
            subject, arguments = _subject(model), defaults | arguments
            if not recovers:
                result = stability_run(subject, **arguments)
                records.add(item, "stability", {"test": item.nodeid, **result.to_dict()})
                return result
            recovery = recovery_run(subject, **recovers, **arguments)
            records.add(item, "stability", {"test": item.nodeid, **recovery.to_dict()})
            if not recovery.ok:
                raise RecoveryFailedError(recovery)
            return recovery.run

        return run

    @pytest.fixture
    def length_sweep(self, request: pytest.FixtureRequest) -> Callable[..., LengthSweep]:
        """Compare loss, attention logits and memory of a model at several sequence lengths.

            @pytest.mark.seq_lengths(64, 256, 1024)
            def test_lengths(length_sweep):
                assert length_sweep(spec, trained_length=256).problems == []

        Call it with anything that `ModelSpec.of` understands and the keyword arguments of
        `stackwise.stability.lengths.length_sweep`. By default, `lengths` are those of the marker. The result
        is a LengthSweep, which compares the lengths. Its `problems` lists every problem that was found,
        including lengths for which memory was too small. Memory is measured as well.
        """
        item = request.node
        marked = markers.lengths_of(item)
        if marked:
            records.owe(item, "length_sweep", "the test declares seq_lengths but never called length_sweep")

        def run(model: Any, lengths: Sequence[int] | None = None, **arguments: Any) -> LengthSweep:
            records.pay(item, "length_sweep")
            from stackwise.stability.lengths import length_sweep
            from stackwise.subject.spec import ModelSpec

            chosen = marked if lengths is None else lengths
            sweep = length_sweep(ModelSpec.of(model), chosen, **(_defaults(item) | arguments))
            _record_lengths(item, sweep.points)
            return sweep

        return run

    @pytest.fixture
    def first_unstable_length(self, request: pytest.FixtureRequest) -> Callable[..., FirstUnstable]:
        """Search for the shortest sequence length at which training is unstable.

            def test_stable_up_to_4096(first_unstable_length):
                found = first_unstable_length(spec, 512, 4096, step=64, tokens_per_step=4096)
                assert found.verdict == "stable"

        Call it with anything that `ModelSpec.of` understands, the shortest and the longest length, and the
        keyword arguments of `stackwise.stability.lengths.first_unstable_length`. The result is a
        FirstUnstable. Its `first` is None if no unstable length was found, even if memory was too small for
        some lengths. Memory is measured as well.
        """
        item = request.node

        def run(model: Any, low: int, high: int, **arguments: Any) -> FirstUnstable:
            from stackwise.stability.lengths import first_unstable_length
            from stackwise.subject.spec import ModelSpec

            found = first_unstable_length(ModelSpec.of(model), low, high, **(_defaults(item) | arguments))
            _record_lengths(item, found.points)
            return found

        return run


def _defaults(item: pytest.Item) -> dict[str, Any]:
    """Return the device and the seed of the run, as defaults for measurements at several lengths."""
    return {"device": options.device_name(item.config), "seed": options.seed(item.config)}


def _record_lengths(item: pytest.Item, points: Sequence[LengthPoint]) -> None:
    """Add one record per length."""
    for point in points:
        records.add(item, "stability", {"test": item.nodeid, **point.to_dict()})


def _subject(model: Any) -> Any:
    """Return a ModelSpec or a TrainerSpec. For a function, its return value decides."""
    from stackwise.subject.spec import ModelSpec
    from stackwise.subject.trainer_spec import TrainerSpec

    if isinstance(model, TrainerSpec):
        return model
    try:
        return ModelSpec.of(model)
    except TypeError as error:
        if not callable(model):
            raise
        try:
            return TrainerSpec.of(model)
        except TypeError:
            raise error from None


def parametrize_lengths(metafunc: pytest.Metafunc) -> None:
    """Turn the marker seq_lengths into one test per length."""
    marker = metafunc.definition.get_closest_marker("seq_lengths")
    if marker and "seq_len" in metafunc.fixturenames:
        try:
            lengths = markers.check_lengths(metafunc.definition.nodeid, marker)
        except pytest.UsageError:  # the validation of markers reports the error
            return
        metafunc.parametrize("seq_len", lengths, ids=[f"T{length}" for length in lengths])
