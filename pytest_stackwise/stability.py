"""Stability as tests: the `stability_run` fixture, broken as the markers say."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from pytest_stackwise import markers, options, records

if TYPE_CHECKING:
    from stackwise.stability import StabilityRun

__all__ = ["StabilityFixtures", "parametrize_lengths"]


class StabilityFixtures:
    """Fixtures of stability tests."""

    @pytest.fixture
    def seq_len(self) -> int | None:
        """The sequence length that `seq_lengths`, or a parametrization of the test, gives; else None."""
        return None

    @pytest.fixture
    def stability_run(
        self, request: pytest.FixtureRequest, seq_len: int | None
    ) -> Callable[..., StabilityRun]:
        """Train a model for a few steps under the faults of the test's markers.

            @pytest.mark.gradient_explosion(step=8, factor=10)
            def test_explosion(stability_run):
                run = stability_run(spec, steps=16)
                assert run.alarm_steps == [8]

        Call it with anything that `ModelSpec.of` understands and the keyword arguments of
        `stackwise.stability.stability_run`; returns its StabilityRun.
        """
        item = request.node
        faults = markers.faults_of(item)
        if faults:
            records.owe(item, "stability_run", "the test declares faults but never called stability_run")

        def run(model: Any, **arguments: Any) -> StabilityRun:
            records.pay(item, "stability_run")
            from stackwise.spec import ModelSpec
            from stackwise.stability import stability_run

            markers.refuse_other_length(seq_len, arguments)
            if "faults" in arguments:
                arguments["faults"] = [*faults, *arguments["faults"]]
            defaults: dict[str, Any] = {
                "faults": faults,
                "seq_len": seq_len,
                "device": options.device_name(item.config),
                "seed": options.seed(item.config),
            }
            result = stability_run(ModelSpec.of(model), **(defaults | arguments))
            records.add(item, "stability", {"test": item.nodeid, **result.to_dict()})
            return result

        return run


def parametrize_lengths(metafunc: pytest.Metafunc) -> None:
    """Turn the marker seq_lengths into one test per length."""
    marker = metafunc.definition.get_closest_marker("seq_lengths")
    if marker and "seq_len" in metafunc.fixturenames:
        try:
            lengths = markers.check_lengths(metafunc.definition.nodeid, marker)
        except pytest.UsageError:  # told once, by the validation of all markers
            return
        metafunc.parametrize("seq_len", lengths, ids=[f"T{length}" for length in lengths])
