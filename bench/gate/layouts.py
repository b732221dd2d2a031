"""Layouts: small projects of many kinds, as people lay them out, for `bench.gate --only adoption`.

Each project has one benchmark of about a millisecond in the file `code`. The head adds a comment to that
file, or makes the benchmark 30 % slower.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["LAYOUTS", "Layout", "site_packages"]

WORK = """def work(n={n}):
    total = 0
    for i in range(n):
        total += i * i
    return total
"""
BASE, SLOWER = WORK.format(n=20_000), WORK.format(n=26_000)
FLAT = "import work\n\n\ndef test_work(benchmark):\n    benchmark(work.work)\n"
INI = "[pytest]\npythonpath = .\ntestpaths = bench\n"
Files = Mapping[str, str]
EMPTY: Files = {}


@dataclass(frozen=True)
class Layout:
    """A project and how its benchmarks are run.

    Attributes:
        name: short name.
        files: text of each file of the first commit, but for `code`, by its path.
        code: path of the file that the head changes.
        options: options of pytest.
        plugins: modules of pytest plugins that are installed in the project, beside stackwise's and
            pytest-benchmark's.
        command: command line that runs the gate, with "{options}" where its options belong; None: pytest.
        prepare: what to do in the folder before the first commit.
        install: what to do with the folder and the folder of site-packages before the run.
        place: folder to run in, relative to the project.
        base: text of `code` in the first commit; `slower` is that of the slower head.
        slower: see `base`.
        refusal: a part of the output if the gate may refuse the project. It has to contain the remedy.
    """

    name: str
    files: Mapping[str, str] = field(default_factory=dict)
    code: str = "work.py"
    options: Sequence[str] = ()
    plugins: Sequence[str] = ()
    command: Sequence[str] | None = None
    prepare: Callable[[Path], None] | None = None
    install: Callable[[Path, Path], None] | None = None
    place: str = "."
    base: str = BASE
    slower: str = SLOWER
    refusal: str | None = None


def site_packages(venv: Path) -> Path:
    """Return the folder of site-packages of a virtual environment."""
    return venv / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def _editable(*folders: str) -> Callable[[Path, Path], None]:
    """Install folders as `pip install -e` does with setuptools: a .pth file names them."""

    def install(project: Path, packages: Path) -> None:
        lines = "".join(f"{project / folder}\n" for folder in folders)
        (packages / "__editable__.project.pth").write_text(lines)

    return install


def _copied(folder: str) -> Callable[[Path, Path], None]:
    """Install the packages of a folder as `pip install .` does: as copies."""

    def install(project: Path, packages: Path) -> None:
        shutil.copytree(project / folder, packages, dirs_exist_ok=True)

    return install


def _built(command: str) -> Callable[[Path, Path], None]:
    """Run a build step, whose output git ignores."""

    def install(project: Path, _: Path) -> None:
        subprocess.run(command, shell=True, cwd=project, check=True, capture_output=True)

    return install


def _git(folder: Path, *arguments: str) -> None:
    command = ["git", "-c", "protocol.file.allow=always", "-C", str(folder), *arguments]
    subprocess.run(command, check=True, capture_output=True)


def _submodule(project: Path) -> None:
    """Add the submodule `lib` with the module `helper`."""
    library = project.with_name(f"{project.name}-library")
    library.mkdir()
    (library / "helper.py").write_text("X = 1\n")
    _git(library, "init", "-q")
    _git(library, "add", "-A")
    _git(library, "-c", "user.name=bench", "-c", "user.email=bench@bench.invalid", "commit", "-qm", "library")
    _git(project, "submodule", "add", "-q", str(library), "lib")


def _large_file(project: Path) -> None:
    """Keep a data file as git-lfs does: the repository has a pointer, the working tree has the data."""
    pointer = "version https://git-lfs.github.com/spec/v1\\noid sha256:0\\nsize 9\\n"
    _git(project, "config", "filter.lfs.clean", f"cat >/dev/null; printf '{pointer}'")
    (project / "data.bin").write_bytes(b"data" * 10_000)


def _line_endings(project: Path) -> None:
    _git(project, "config", "core.autocrlf", "true")


def _link(project: Path) -> None:
    (project / "engine").symlink_to("sources/engine")


def _tests(module: str) -> str:
    return f"from {module} import work\n\n\ndef test_work(benchmark):\n    benchmark(work)\n"


def _flat(name: str, tests: str = FLAT, ini: str = "", files: Files = EMPTY, **given: Any) -> Layout:
    """Return a project with `work.py` beside the folder `bench`: its tests, and more lines of pytest.ini."""
    return Layout(name, {"pytest.ini": INI + ini, "bench/test_work.py": tests, **files}, **given)


def _package(name: str, files: Files = EMPTY, *, module: str = "engine.work", **given: Any) -> Layout:
    """Return a project whose benchmark calls a function of a module, beside the folder `bench`."""
    test = {"bench/test_work.py": _tests(module)}
    return Layout(name, {"engine/__init__.py": "", **test, **files}, **{"code": "engine/work.py", **given})


def _config(path: str, section: str, path_list: str = ".") -> dict[str, str]:
    return {path: f"{section}\npythonpath = {path_list}\n", "bench/test_work.py": FLAT}


PARAMETRIZED = """import pytest
import work


@pytest.mark.parametrize("n", [1, 2], ids=["a b", "c/d"])
def test_work(benchmark, n):
    benchmark(work.work)
"""
COROUTINE = """import work


async def job():
    work.work()


def test_work(benchmark):
    benchmark(job)
"""
PEDANTIC = """import work


def test_work(benchmark):
    benchmark.pedantic(work.work, rounds=3, iterations=2)
"""
FIXTURES = """import pytest
import work


@pytest.fixture(scope="session")
def rows(tmp_path_factory):
    return tmp_path_factory.mktemp("x")


def test_work(benchmark, rows, tmp_path, monkeypatch):
    benchmark(work.work)
"""
FROZEN = """import freezegun
import pytest
import work


@pytest.fixture(autouse=True)
def frozen():
    with freezegun.freeze_time("2020-01-01"):
        yield


def test_work(benchmark):
    benchmark(work.work)
"""
FLAKY = """import flaky
import work


@flaky.flaky
def test_work(benchmark):
    benchmark(work.work)
"""
ORDERED = """import pytest
import work


@pytest.mark.order(1)
def test_work(benchmark):
    benchmark(work.work)
"""
MOCKED = """import work


def test_work(benchmark, mocker):
    benchmark(work.work)
"""
SIZED = """import work


def test_work(benchmark, size):
    benchmark(work.work)
"""
PROPERTY = """import hypothesis
import work
from hypothesis import strategies as st


def test_work(benchmark):
    benchmark(work.work)


@hypothesis.given(st.integers())
def test_other(n):
    assert work.work(3) == 5
"""
TALKING = """import work


def test_work(benchmark):
    print("x" * 9999)
    benchmark(work.work)
"""
DATA = """import pathlib

import work

DATA = (pathlib.Path(__file__).parents[1] / "data.bin").read_bytes()


def test_work(benchmark):
    benchmark(work.work)
"""
HELPER = """import sys

import work

sys.path.insert(0, "lib")
import helper


def test_work(benchmark):
    assert helper.X
    benchmark(work.work)
"""
C_CODE = """#define N {n}
long work(void) {{
    volatile long total = 0;
    for (long i = 0; i < N; i++) total += i * i;
    return total;
}}
"""
C_BASE, C_SLOWER = C_CODE.format(n=400_000), C_CODE.format(n=520_000)
COMPILE = "gcc -O1 -shared -fPIC -o libwork.so work.c"
LOAD = """import ctypes
import pathlib

import engine

library = ctypes.CDLL(str(pathlib.Path(__file__).parents[1] / "libwork.so"))


def test_work(benchmark):
    benchmark(library.work)
"""
EXTENSION = """#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include "work.c"
static PyObject *run(PyObject *self, PyObject *none) { return PyLong_FromLong(work()); }
static PyMethodDef methods[] = {{"work", run, METH_NOARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "fast", NULL, -1, methods};
PyMODINIT_FUNC PyInit_fast(void) { return PyModule_Create(&module); }
"""
SETUP = (
    "from setuptools import Extension, setup\n"
    "setup(name='fast', ext_modules=[Extension('fast', ['fast.c'], depends=['work.c'])], py_modules=[])\n"
)
BUILD_EXTENSION = f"{sys.executable} setup.py -q build_ext --inplace"
UNITTEST = """import unittest

import pytest

import work


class TestWork(unittest.TestCase):
    @pytest.fixture(autouse=True)
    def _with_benchmark(self, benchmark):
        self.benchmark = benchmark

    def setUp(self):
        self.n = 1

    def test_plain(self):
        self.assertEqual(self.n, 1)

    def test_work(self):
        self.benchmark(work.work)
"""
DEPENDENT = """import work


class TestWork:
    state = None

    def test_prepare(self, benchmark):
        TestWork.state = 1
        benchmark(sum, range(20_000))

    def test_work(self, benchmark):
        assert TestWork.state == 1
        benchmark(work.work)
"""
ASYNC = """import asyncio

import pytest

import work


async def job():
    return work.work()


def test_work(benchmark):
    benchmark(lambda: asyncio.run(job()))


@pytest.mark.asyncio
async def test_other():
    assert await job()
"""
RANDOM = """import random

import numpy
import work


def test_work(benchmark):
    rows = [random.random() for _ in range(numpy.random.randint(10, 20))]
    benchmark(lambda: work.work() + len(sorted(rows)))
"""
PORT = """import os
import socket

import pytest
import work


@pytest.fixture
def server():
    with socket.create_server(("127.0.0.1", PORT)) as made:
        yield made


def test_work(benchmark, server):
    benchmark(work.work)
"""
TORCH = """import torch

from engine.model import Model


def test_work(benchmark):
    model, x = Model(), torch.ones(8, 64)
    benchmark(model, x)
"""
MODEL = """import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x
"""
OPTIONS = """import pytest


def pytest_addoption(parser):
    parser.addoption("--sizes", nargs="+", type=int, default=[1])


def pytest_generate_tests(metafunc):
    if "size" in metafunc.fixturenames:
        metafunc.parametrize("size", metafunc.config.getoption("sizes"))
"""
TOX = """[tox]
skipsdist = true
[testenv]
pass_env = *
commands = {env:VIRTUAL_ENV}/bin/python -m pytest {posargs}
[pytest]
pythonpath = .
testpaths = bench
"""
NOX = """import nox


@nox.session(venv_backend="none")
def bench(session):
    session.run("python", "-m", "pytest", *session.posargs)
"""
BENCHMARK_PACKAGE = """[project]
name = "benchmark"
version = "1"
[tool.setuptools]
packages = ["benchmark"]
[tool.pytest.ini_options]
pythonpath = ["."]
"""
WORKSPACE = """[project]
name = "all"
version = "1"
[tool.uv.workspace]
members = ["packages/*"]
"""
OTHER = """import NAME.other


def test_other(benchmark):
    benchmark(sorted, range(9999))
"""
MEMBER = {
    "pyproject.toml": "[project]\nname = 'NAME'\nversion = '1'\n",
    "src/NAME/__init__.py": "",
    "src/NAME/other.py": "",
    "benchmarks/test_NAME.py": OTHER,
}
MONOREPO = {
    f"packages/{name}/{path}".replace("NAME", name): text.replace("NAME", name)
    for name in ("one", "two")
    for path, text in MEMBER.items()
}
MONOREPO_INSTALL = _editable("packages/one/src", "packages/two/src")
IMPORTLIB = "[pytest]\naddopts = --import-mode=importlib\n"
SRC = {"src/pkg/__init__.py": "", "bench/test_work.py": _tests("pkg.work")}
GENERATED = {
    "pytest.ini": INI,
    ".gitignore": "_version.py\n",
    "engine/__init__.py": "from engine._version import V\n",
}
GENERATE = "echo V = 1 > engine/_version.py"
IN_C = {"code": "work.c", "base": C_BASE, "slower": C_SLOWER}

LAYOUTS: tuple[Layout, ...] = (
    # Where the code and the tests are.
    _flat("flat modules"),
    Layout("tests beside modules", {"conftest.py": "", "test_work.py": FLAT}),
    Layout("src, pythonpath", {**SRC, "pytest.ini": "[pytest]\npythonpath = src\n"}, "src/pkg/work.py"),
    Layout(
        "src, editable install", {**SRC, "pyproject.toml": ""}, "src/pkg/work.py", install=_editable("src")
    ),
    Layout(
        "src, installed copy",
        {**SRC, "pyproject.toml": ""},
        "src/pkg/work.py",
        install=_copied("src"),
        refusal="pip install -e .",
    ),
    _package("package, editable install", {"pyproject.toml": ""}, install=_editable(".")),
    Layout(
        "tests in the package",
        {
            "pytest.ini": "[pytest]\n",
            "engine/__init__.py": "",
            "engine/tests/__init__.py": "",
            "engine/tests/test_work.py": _tests("engine.work"),
        },
        "engine/work.py",
    ),
    Layout(
        "package called perf, with tests",
        {"pytest.ini": "[pytest]\n", "perf/__init__.py": "", "perf/test_work.py": _tests("perf.work")},
        "perf/work.py",
        refusal="name it in pyproject.toml",
    ),
    Layout(
        "installed package called benchmark",
        {
            "pyproject.toml": BENCHMARK_PACKAGE,
            "benchmark/__init__.py": "",
            "tests/test_work.py": _tests("benchmark.work"),
        },
        "benchmark/work.py",
    ),
    Layout(
        "namespace package",
        {"pytest.ini": "[pytest]\npythonpath = src\n", "tests/test_work.py": _tests("space.part.work")},
        "src/space/part/work.py",
    ),
    _package("import mode importlib", {"pytest.ini": f"{IMPORTLIB}pythonpath = .\n"}),
    Layout(
        "monorepo, from its root",
        {**MONOREPO, "pytest.ini": IMPORTLIB, "packages/one/benchmarks/test_work.py": _tests("one.work")},
        "packages/one/src/one/work.py",
        options=["packages/one/benchmarks/test_work.py"],
        install=MONOREPO_INSTALL,
    ),
    Layout(
        "monorepo, from a package",
        {
            **MONOREPO,
            "packages/one/benchmarks/test_work.py": _tests("one.work"),
            "packages/one/pytest.ini": "[pytest]\n",
        },
        "packages/one/src/one/work.py",
        place="packages/one",
        options=["benchmarks/test_work.py"],
        install=MONOREPO_INSTALL,
    ),
    Layout(
        "uv workspace",
        {**MONOREPO, "pyproject.toml": WORKSPACE, "packages/two/benchmarks/test_work.py": _tests("one.work")},
        "packages/one/src/one/work.py",
        options=["packages/two/benchmarks/test_work.py"],
        install=MONOREPO_INSTALL,
    ),
    Layout(
        "linked package",
        {"pytest.ini": INI, "sources/engine/__init__.py": "", "bench/test_work.py": _tests("engine.work")},
        "sources/engine/work.py",
        prepare=_link,
    ),
    _flat("spaces and umlauts in paths", files={"bench/größe und so/test_more.py": FLAT}),
    # Where the configuration is.
    Layout("setup.cfg", _config("setup.cfg", "[tool:pytest]")),
    Layout("pyproject.toml", _config("pyproject.toml", "[tool.pytest.ini_options]", "['.']")),
    Layout("pyproject.toml, native", _config("pyproject.toml", "[tool.pytest]", "['.']")),
    Layout("tox.ini", {"tox.ini": TOX, "bench/test_work.py": FLAT}),
    Layout(
        "tox",
        {"tox.ini": TOX, "bench/test_work.py": FLAT},
        command=["{python}", "-m", "tox", "--current-env", "-q", "--", "{options}"],
    ),
    Layout(
        "nox",
        {"pytest.ini": INI, "noxfile.py": NOX, "bench/test_work.py": FLAT},
        command=["{python}", "-m", "nox", "-s", "bench", "--", "{options}"],
    ),
    Layout(
        "configuration in a folder",
        _config("ci/pytest.ini", "[pytest]", ".."),
        options=["-c", "ci/pytest.ini", "--rootdir=.", "bench"],
    ),
    _flat("strict", ini="addopts = --strict-config --strict-markers\nxfail_strict = true\n"),
    _flat("warnings are errors", ini="filterwarnings = error\n"),
    _flat("no cache, other base temp", options=["-p", "no:cacheprovider", "--basetemp=build/tmp"]),
    _flat("logging and output", TALKING, "log_cli = true\nlog_level = DEBUG\n", options=["-s"]),
    _flat("options of a conftest", SIZED, "addopts = --sizes 3\n", {"conftest.py": OPTIONS}),
    _flat("doctests", options=["--doctest-modules"]),
    # Files that are not Python, or not in git.
    _flat("data file", DATA, files={"data.bin": "x"}),
    _flat("git-lfs", DATA, files={".gitattributes": "*.bin filter=lfs\n"}, prepare=_large_file),
    _flat("line endings", files={".gitattributes": "*.txt text\n", "some.txt": "a\n"}, prepare=_line_endings),
    _flat("submodule", HELPER, prepare=_submodule, refusal="--stackwise-build"),
    _flat(
        "submodule, built",
        HELPER,
        prepare=_submodule,
        options=["--stackwise-build=mkdir -p lib && echo X = 1 > lib/helper.py"],
    ),
    _package("generated module", GENERATED, install=_built(GENERATE), refusal="--stackwise-build"),
    _package(
        "generated module, built",
        GENERATED,
        install=_built(GENERATE),
        options=[f"--stackwise-build={GENERATE}"],
    ),
    Layout(
        "C library",
        {"pytest.ini": INI, ".gitignore": "*.so\n", "engine.py": "", "bench/test_work.py": LOAD},
        install=_built(COMPILE),
        options=[f"--stackwise-build={COMPILE}"],
        **IN_C,
    ),
    Layout(
        "C extension",
        {
            "pytest.ini": INI,
            ".gitignore": "*.so\nbuild/\n",
            "setup.py": SETUP,
            "fast.c": EXTENSION,
            "bench/test_work.py": _tests("fast"),
        },
        install=_built(BUILD_EXTENSION),
        options=[f"--stackwise-build={BUILD_EXTENSION}"],
        **IN_C,
    ),
    # Kinds of tests.
    _flat("unittest", UNITTEST),
    _flat("tests that need earlier ones", DEPENDENT),
    _flat("parametrized", PARAMETRIZED),
    _flat("async", ASYNC, plugins=["pytest_asyncio.plugin"]),
    _flat("coroutine function", COROUTINE, refusal="asyncio.run"),
    _flat("pedantic", PEDANTIC),
    _flat("fixtures", FIXTURES),
    _flat("unseeded random data", RANDOM),
    _flat("frozen clock", FROZEN),
    _flat("fixed port", PORT.replace("PORT", "38417"), refusal="STACKWISE_SIDE"),
    _flat("port of each side", PORT.replace("PORT", "38418 + (os.environ.get('STACKWISE_SIDE') == 'head')")),
    _package(
        "torch model",
        {"pytest.ini": INI, "bench/test_work.py": TORCH},
        code="engine/model.py",
        base=MODEL.replace("LAYERS", "20"),
        slower=MODEL.replace("LAYERS", "28"),
    ),
    # Plugins.
    _flat("xdist", plugins=["xdist.plugin"], options=["-n", "2"], refusal="-n 0"),
    _flat("xdist, -n 0", plugins=["xdist.plugin"], ini="addopts = -n 2\n", options=["-n", "0"]),
    _flat("randomly", RANDOM, plugins=["pytest_randomly"]),
    _flat("rerunfailures", plugins=["pytest_rerunfailures"], options=["--reruns", "2"]),
    _flat("retry", plugins=["pytest_retry.retry_plugin"], options=["--retries", "2"]),
    _flat("flaky", FLAKY, plugins=["flaky.flaky_pytest_plugin"]),
    _flat("pytest-cov", plugins=["pytest_cov.plugin"], options=["--cov=work", "--cov-fail-under=90"]),
    _flat(
        "coverage of subprocesses",
        files={".coveragerc": "[run]\npatch = subprocess\n"},
        plugins=["pytest_cov.plugin"],
        options=["--cov=work"],
    ),
    _flat("memray", plugins=["pytest_memray.plugin"], options=["--memray"]),
    _flat("timeout", plugins=["pytest_timeout"], options=["--timeout=5"]),
    _flat("mock", MOCKED, plugins=["pytest_mock"]),
    _flat("order", ORDERED, plugins=["pytest_order.plugin"]),
    _flat("sugar", plugins=["pytest_sugar"]),
    _flat("env", ini="env =\n    NAME=value\n", plugins=["pytest_env.plugin"]),
    _flat("hypothesis", PROPERTY, plugins=["_hypothesis_pytestplugin"]),
    _flat("files of pytest-benchmark", options=["--benchmark-json=out.json", "--benchmark-autosave"]),
)
