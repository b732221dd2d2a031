"""Loading: who runs no stackwise test pays nothing for the plugin, and nobody waits for torch in vain."""

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

HEAVY = {"torch", "numpy", "pydantic", "rich", "scipy"}
WATCH = """
import os, pathlib, sys
def pytest_unconfigure():
    pathlib.Path(f"modules-{os.getpid()}.txt").write_text("\\n".join(sys.modules))
"""
PROBE = """
import sys, time
import pytest
before = set(sys.modules)
start = time.perf_counter()
import pytest_stackwise.plugin
print(time.perf_counter() - start, *sorted(set(sys.modules) - before))
"""
WRITES_POLICY = """
import os, pathlib, pytest
{lines}
def test_it({fixture}):
    pathlib.Path("policy").write_text(str(os.environ.get("OMP_WAIT_POLICY")))
"""
LATE = """
import sys
import pytest_stackwise as plugin
assert plugin.__all__ == ["StackwiseWarning", "parametrize_with_checks"]
assert plugin.parametrize_with_checks.__module__ == "pytest_stackwise.checks"
assert "torch" not in sys.modules
try:
    plugin.nothing
except AttributeError as error:
    print(error)
"""


def without_others():
    """Arguments that leave out other plugins that are installed: they may load anything."""
    needed = {"stackwise", "pytest-xdist", "pytest-benchmark"}
    others = [point.name for point in entry_points(group="pytest11") if point.dist.name not in needed]
    return [argument for name in others for argument in ("-p", f"no:{name}")]


def loaded(folder):
    """The modules that each process of the nested run had at its end."""
    return [set(path.read_text().splitlines()) for path in folder.glob("modules-*.txt")]


def heavy(modules):
    # The wait policy has to be set before anything loads torch, and loads nothing itself.
    allowed = {"stackwise.support", "stackwise.support.wait_policy"}
    ours = {name for name in modules if name.startswith("stackwise.")} - allowed
    return ours | (HEAVY & modules)


@pytest.mark.parametrize(
    ("arguments", "processes"),
    [
        (["--help"], 1),
        pytest.param(["--markers"], 1, marks=pytest.mark.slow),
        (["--collect-only", "-q"], 1),
        ([], 1),
        (["-n", "1"], 2),
        (["-m", "not stability", "--stackwise-device=cpu", "--stackwise-seed=1"], 1),
        (["-o", "stackwise_checks=causality", "-o", "stackwise_suite=full"], 1),
    ],
    ids=["help", "markers", "collect-only", "run", "xdist", "options", "ini"],
)
def test_nothing_heavy_is_loaded_without_need(pytester, folder, run_apart, every_check, arguments, processes):
    pytester.makeconftest(WATCH)
    pytester.makepyfile(
        test_plain="import pytest\n@pytest.mark.gpu\ndef test_gpu(): pass\ndef test_it(): pass"
    )
    result = run_apart(*without_others(), *arguments)
    assert result.ret == 0, result.stdout.str()
    seen = loaded(folder)
    assert len(seen) == processes
    for modules in seen:
        assert "pytest_stackwise.plugin" in modules
        assert not heavy(modules)


@pytest.mark.slow
def test_watch_sees_torch_where_a_test_needs_it(pytester, folder, run_apart):
    pytester.makeconftest(WATCH)
    pytester.makepyfile(
        "import models\ndef test_it(stability_run): assert stability_run(models.plain, steps=1)"
    )
    run_apart().assert_outcomes(passed=1)
    (modules,) = loaded(folder)
    assert heavy(modules) >= {"torch", "stackwise.subject.spec", "stackwise.stability"}


def test_plugin_import_adds_only_the_plugin():
    runs = []
    for _ in range(3):
        command = [sys.executable, "-c", PROBE]
        seconds, *modules = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        runs.append((float(seconds), modules))
    print(f"import of pytest_stackwise.plugin: {min(runs)[0] * 1e3:.1f} ms, best of {len(runs)}")
    modules = runs[0][1]
    assert "pytest_stackwise.plugin" in modules
    assert {name.partition(".")[0] for name in modules} - sys.stdlib_module_names == {"pytest_stackwise"}
    # Of the standard library contextvars and ctypes, with their parts.
    assert len([name for name in modules if not name.startswith("pytest_stackwise")]) <= 5


@pytest.mark.parametrize(
    ("test", "conftest", "arguments", "policy"),
    [
        ({}, "", [], "None"),
        ({"lines": "# throughput: see quality", "fixture": "tmp_path"}, "", [], "None"),
        ({"lines": "@pytest.mark.gpu\ndef test_gpu(): pass"}, "", [], "None"),
        ({"fixture": "tmp_path, peak_memory"}, "", [], "PASSIVE"),
        ({"fixture": "tmp_path, peak_memory"}, "import torch", [], "None"),
        ({"lines": "import stackwise"}, "", [], "PASSIVE"),
        ({"lines": "@pytest.mark.max_memory('64 GiB')"}, "", [], "PASSIVE"),
        ({}, "import torch", ["--stackwise-seed=1"], "PASSIVE"),
        ({}, "import torch", ["-o", "stackwise_suite=full"], "PASSIVE"),
    ],
)
def test_wait_policy_is_set_only_for_runs_that_use_the_plugin(
    pytester, folder, run_apart, every_check, monkeypatch, test, conftest, arguments, policy
):
    pytester.makeconftest(conftest)
    pytester.makepyfile(WRITES_POLICY.format(**{"lines": "", "fixture": ""} | test))
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    run_apart(*without_others(), *arguments)
    assert (folder / "policy").read_text() == policy


def test_public_name_is_handed_on_late():
    done = subprocess.run(
        [sys.executable, "-c", LATE], check=True, capture_output=True, text=True, cwd=Path(__file__).parent
    )
    assert done.stdout.strip() == "module 'pytest_stackwise' has no attribute 'nothing'"


def test_help_lists_the_options_in_their_group(run):
    result = run("--help")
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [
            "stackwise: check, stress and measure PyTorch models and training loops*",
            "  --stackwise-device=DEVICE*",
            "  --stackwise-seed=N*",
            "  --stackwise-model=MODULE:FACTORY*",
            "  --stackwise-trainer=MODULE:FACTORY*",
            "  --stackwise-checks=NAMES*",
            "  --stackwise-suite=SUITE*",
            "  --stackwise-report=PATH*",
            "  --gpu *",
        ]
    )
    result.stdout.fnmatch_lines([f"  stackwise_{key} (*" for key in ("gpu", "device", "seed")])
    result.stdout.fnmatch_lines([f"  stackwise_{key} (*" for key in ("model", "trainer")])
    result.stdout.fnmatch_lines([f"  stackwise_{key} (*" for key in ("checks", "suite", "report")])
