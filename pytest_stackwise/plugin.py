"""Hooks of the plugin. Each hook calls the modules for its subjects."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from pytest_stackwise import (
    checks,
    device,
    exit_guard,
    faults,
    findings,
    gate,
    markers,
    memory,
    options,
    quality,
    records,
    stability,
    summary,
    throughput,
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the command line and of the configuration file."""
    options.add_options(parser)


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(
    early_config: pytest.Config, parser: pytest.Parser
) -> Generator[None, object, object]:
    """Let idle threads sleep if an option of the plugin is set, and add `--gpu` after the conftests.

    A conftest may load torch, and OpenMP then reads its wait policy.
    """
    if options.are_set(early_config):
        _let_idle_threads_sleep()
    device.take_a_device(early_config)  # before a conftest can call CUDA
    if options.is_gated(early_config):
        importlib.import_module("stackwise.gate.side.clock")  # before a conftest can freeze the clocks
        exit_guard.guard_exit(early_config)
        with exit_guard.no_success():
            result = yield
    else:
        result = yield
    options.add_gpu_option(parser)
    return result


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers, the fixtures, the summary of all records and, if requested, the gate."""
    options.release_gpu_option(config)
    device.take_a_device(config)
    markers.register(config)
    config.pluginmanager.register(faults.FaultFixtures(), "stackwise-faults")
    config.pluginmanager.register(stability.StabilityFixtures(), "stackwise-stability")
    config.pluginmanager.register(memory.MemoryFixtures(), "stackwise-memory")
    config.pluginmanager.register(throughput.fixtures(config), "stackwise-throughput")
    config.pluginmanager.register(quality.QualityFixtures(), "stackwise-quality")
    config.pluginmanager.register(summary.Summary(config), "stackwise-summary")
    if asked := gate.create(config):
        config.pluginmanager.register(asked, "stackwise-gate")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Stop the run if an option is invalid, or if it requests something that is not available."""
    config = session.config
    if not records.is_worker(config):
        device.require_what_was_asked(config)
        options.seed(config)
        options.suite(config)
        options.report_paths(config)
        checks.require_targets(config)


def pytest_pycollect_makemodule(module_path: Path) -> None:
    """Let idle threads sleep before a test file that uses the plugin is imported and loads torch."""
    if "torch" not in sys.modules and markers.are_used_in(module_path):
        _let_idle_threads_sleep()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test per length of `seq_lengths`, and per check that the options of the run select."""
    stability.parametrize_lengths(metafunc)
    checks.choose(metafunc)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Add the checks without a test file, validate markers and skip GPU tests, before any deselection."""
    try:
        items.extend(checks.zero_code_items(session, config))
    except pytest.UsageError as error:
        if not records.is_worker(config):
            raise
        # An exception would end an xdist worker without a message, so it is reported as a collection error.
        items.clear()
        config.hook.pytest_collectreport(report=pytest.CollectReport("stackwise", "failed", str(error), []))
    items[:] = markers.take_validated(config, items)
    device.skip_without_gpu(config, items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Delete the records of earlier runs of a test, for a rerun, and warn about its labels."""
    records.reset(item)
    markers.warn_of_labels(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Set the current test. If it passes, require the calls that it must make, and report its findings."""
    try:
        with records.current(item), memory.limited(item):
            checks.hand_over(item)
            result = yield
    except pytest.skip.Exception:
        findings.report(item)
        raise
    records.collect_debts(item)
    findings.report(item)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attach the records of a test to its report. xdist transfers the report between processes."""
    report = yield
    records.attach(item, report)
    return report


def _let_idle_threads_sleep() -> None:
    from stackwise.support.wait_policy import default_wait_policy

    default_wait_policy()
