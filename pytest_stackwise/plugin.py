"""The plugin's hooks. Each hands on to the file about its noun."""

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
    """Enter the options and their ini twins."""
    options.add_options(parser)


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(
    early_config: pytest.Config, parser: pytest.Parser
) -> Generator[None, object, object]:
    """Let idle threads sleep if an option of the plugin is set; add `--gpu` after the conftests.

    A conftest may load torch, and OpenMP reads its wait policy then.
    """
    if options.are_set(early_config):
        _let_idle_threads_sleep()
    device.take_a_device(early_config)  # before a conftest asks torch for devices
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
    """Enter markers, fixtures and the collector of records."""
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
    """Stop the run at once where something is asked for that cannot be had."""
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
    """One test per length of `seq_lengths`, and per check that the run's options ask for."""
    stability.parametrize_lengths(metafunc)
    checks.choose(metafunc)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Add the zero-code checks, validate markers, skip what needs a GPU: before anything deselects."""
    try:
        items.extend(checks.zero_code_items(session, config))
    except pytest.UsageError as error:
        if not records.is_worker(config):
            raise
        # An exception here would end an xdist worker without a word: report it as a collection error.
        items.clear()
        config.hook.pytest_collectreport(report=pytest.CollectReport("stackwise", "failed", str(error), []))
    items[:] = markers.take_validated(config, items)
    device.skip_without_gpu(config, items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Start each run of a test, a rerun too, without what an earlier one left; warn of its labels."""
    records.reset(item)
    markers.warn_of_labels(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Make the test known to its fixtures. If it passes, check its duties and report its findings."""
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
    """Attach the test's records to its report, which carries them across processes."""
    report = yield
    records.attach(item, report)
    return report


def _let_idle_threads_sleep() -> None:
    from stackwise.support.wait_policy import default_wait_policy

    default_wait_policy()
