"""The gate in projects whose tests, layout or settings are unusual."""

import os
import re
import shutil

import pytest

pytestmark = [
    pytest.mark.skipif(shutil.which("git") is None, reason="needs git"),
    pytest.mark.slow,  # each run of the gate takes seconds
]

ONE_ROUND = "--stackwise-gate-seconds=0.001"
WORK = "def one(): return sum(range(1000))\n"
BENCH = "import work\ndef test_it(benchmark): benchmark(work.one)\n"


def test_frozen_clocks_do_not_stop_the_measurement(repository, run_apart):
    """As freezegun does it: in all loaded modules, also of the user's run."""
    conftest = """
import sys, time
names = ["monotonic", "perf_counter", "perf_counter_ns", "process_time", "thread_time", "time"]
def pytest_collection_finish():
    frozen = {id(getattr(time, name)): name for name in names}
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in frozen:
                setattr(module, name, lambda: 1)
"""
    base = {"work.py": WORK, "bench/test_work.py": BENCH, "conftest.py": conftest}
    repository(base, {"work.py": "\n" + WORK})
    result = run_apart("--stackwise-against=base", ONE_ROUND, "-s")
    result.stdout.fnmatch_lines(["INCONCLUSIVE * bench/test_work.py::test_it * time *, limit 2%"])


def test_benchmark_that_only_head_skips_is_no_pass(repository, run_apart):
    bench = """
import pytest, work
def test_it(benchmark): benchmark(work.one)
@pytest.mark.skipif(not hasattr(work, "fast"), reason="no fast path")
def test_fast(benchmark): benchmark(work.fast)
"""
    repository({"work.py": WORK + "fast = one\n", "bench/test_work.py": bench}, {"work.py": WORK})
    result = run_apart("--stackwise-against=base", ONE_ROUND, "-k", "fast")
    assert result.ret == 5
    result.stdout.fnmatch_lines(["skipped on head * no fast path; the base runs it"])


PACKAGE = {"src/pkg/__init__.py": WORK, "bench/test_work.py": BENCH.replace("work", "pkg")}
SOURCES = {"pytest.ini": "[pytest]\npythonpath = src\ntestpaths = bench\n"}
VERSIONED = {
    "src/pkg/__init__.py": "from pkg._version import version\n" + WORK,
    ".gitignore": "_version.py\n",
}


def command_of(result):
    """The option that a set-up error names."""
    option = re.search(r"--stackwise-build=([\"'])(.*?)\1", str(result.stdout))
    return f"--stackwise-build={option[2]}"


@pytest.mark.parametrize("conftest", ["", "import pkg\n"], ids=["test file", "conftest"])
def test_file_that_git_ignores_is_named_with_the_command(repository, run_apart, pytester, conftest):
    base = {
        **PACKAGE,
        **SOURCES,
        **VERSIONED,
        "src/pkg/_version.py": "version = 1\n",
        "conftest.py": conftest,
    }
    repository(base, {"src/pkg/other.py": ""})
    result = run_apart("--stackwise-against=base", ONE_ROUND)
    assert result.ret == 4
    result.stdout.fnmatch_lines(
        ["set-up error * src/pkg/_version.py is a file or folder that git ignores*", "ERROR: working tree *"]
    )
    assert run_apart("--stackwise-against=base", ONE_ROUND, command_of(result)).ret == 7


def test_submodule_is_named_with_the_command(repository, run_apart, pytester):
    git = repository({"pytest.ini": "[pytest]\npythonpath = . lib\n"}, {})
    library = pytester.path / "lib"
    library.mkdir()
    (library / "helper.py").write_text("number = 3\n")
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "1"]):
        git("-C", "lib", *arguments)
    (pytester.path / ".gitmodules").write_text('[submodule "lib"]\n\tpath = lib\n\turl = ./lib\n')
    (pytester.path / "bench").mkdir()
    (pytester.path / "bench" / "test_work.py").write_text("import helper\n" + BENCH)
    (pytester.path / "work.py").write_text(WORK)
    git("add", "-A")
    git("commit", "-qm", "2")
    git("tag", "-f", "base")
    (pytester.path / "work.py").write_text("\n" + WORK)
    result = run_apart("--stackwise-against=base", ONE_ROUND)
    assert result.ret == 4
    result.stdout.fnmatch_lines(["set-up error * lib is a submodule, which is in no tree*"])
    assert run_apart("--stackwise-against=base", ONE_ROUND, command_of(result)).ret == 7


@pytest.mark.parametrize(
    ("new", "bench", "lack"),
    [
        (
            {"pkg/new.py": ""},
            "import work\nimport pkg.new\n",
            "ModuleNotFoundError: No module named 'pkg.new'",
        ),
        ({"data/table.txt": ""}, "import work\nopen('data/table.txt').close()\n", "FileNotFoundError: *"),
    ],
    ids=["module", "data"],
)
def test_new_module_with_its_benchmark_is_missing_on_base(repository, run_apart, new, bench, lack):
    old = {"work.py": WORK, "pkg/__init__.py": "", "bench/test_work.py": BENCH}
    repository(old, {**new, "bench/test_new.py": bench + "def test_it(benchmark): benchmark(work.one)\n"})
    result = run_apart("--stackwise-against=base", ONE_ROUND, "-W", "ignore", "bench/test_new.py")
    assert result.ret == 5
    result.stdout.fnmatch_lines([f"missing on base * missing: {lack}"])


def test_benchmark_that_asks_git_is_a_set_up_error(repository, run_apart):
    bench = BENCH.replace("def", "import subprocess\ndef").replace(
        "benchmark(work", "subprocess.run(['git', 'rev-parse'], check=True); benchmark(work"
    )
    repository({"work.py": WORK, "bench/test_work.py": bench}, {"work.py": "\n" + WORK})
    result = run_apart("--stackwise-against=base", ONE_ROUND)
    assert result.ret == 4
    result.stdout.fnmatch_lines(
        ["set-up error * it fails on both sides* the trees are no git repositories; run it with pytest*"]
    )


def test_installed_package_is_a_set_up_error(repository, run_apart, pytester, monkeypatch, tmp_path):
    """A copy of the package of a src layout in site-packages, as `pip install .` makes it."""
    repository({**PACKAGE, "pytest.ini": "[pytest]\n"}, {"src/pkg/other.py": ""})
    installed = tmp_path / "site-packages"
    shutil.copytree(pytester.path / "src", installed)
    monkeypatch.setenv("PYTHONPATH", str(installed), prepend=os.pathsep)
    result = run_apart("--stackwise-against=base", ONE_ROUND)
    assert result.ret == 4
    result.stdout.fnmatch_lines(["set-up error * pkg from * although its tree has*pip install -e .*"])
    assert run_apart("--stackwise-against=base", ONE_ROUND, "-o", "pythonpath=src").ret == 7


def test_installed_package_of_a_monorepo_is_no_pass(repository, run_apart, pytester, monkeypatch, tmp_path):
    """A copy of one of its packages in site-packages, besides code that the sides import from their trees."""
    project = {
        "libs/core/pyproject.toml": "[project]\nname = 'core'\n",
        "libs/core/src/core/__init__.py": WORK,
    }
    app = {"app/__init__.py": "from core import one\n", "bench/test_work.py": BENCH.replace("work", "app")}
    slower = {"libs/core/src/core/__init__.py": WORK.replace("1000", "9000")}
    repository({**project, **app}, slower)
    installed = tmp_path / "site-packages"
    shutil.copytree(pytester.path / "libs/core/src", installed)
    monkeypatch.setenv("PYTHONPATH", str(installed), prepend=os.pathsep)
    result = run_apart("--stackwise-against=base", ONE_ROUND)
    assert result.ret == 7
    result.stdout.fnmatch_lines(["INCONCLUSIVE *", "*core from *site-packages*, although its tree *"])


def test_configuration_above_the_repository_compares_the_repository(repository, run_apart, pytester):
    (pytester.path.parent / "pytest.ini").write_text("[pytest]\n")
    git = repository({"work.py": WORK, "bench/test_work.py": BENCH, "conftest.py": ""}, {})
    git("rm", "-q", "pytest.ini")
    (pytester.path / "work.py").write_text("\n" + WORK)
    result = run_apart("bench", "--stackwise-against=base", ONE_ROUND)
    assert result.ret == 7
    result.stdout.fnmatch_lines(
        [f"rootdir: {pytester.path.parent}", "INCONCLUSIVE * bench/test_work.py::test_it * time *, limit 2%"]
    )


def test_file_outside_of_rootdir_is_compared_if_it_is_in_the_repository(repository, run_apart):
    base = {"work.py": WORK, "bench/test_work.py": BENCH, "svc/pytest.ini": "[pytest]\npythonpath = ..\n"}
    repository(base, {"work.py": "\n" + WORK})
    result = run_apart("-c", "svc/pytest.ini", "bench", "--stackwise-against=base", ONE_ROUND)
    assert result.ret == 7
    result.stdout.fnmatch_lines(["INCONCLUSIVE * bench/test_work.py::test_it * time *, limit 2%"])


def test_file_outside_of_the_repository_is_refused(repository, run_apart, tmp_path):
    repository({"work.py": WORK, "bench/test_work.py": BENCH}, {"work.py": "\n" + WORK})
    outside = tmp_path / "test_outside.py"
    outside.write_text(BENCH)
    result = run_apart("--rootdir=.", "bench", outside, "--stackwise-against=base", ONE_ROUND)
    assert result.ret == 4
    result.stderr.fnmatch_lines([f"ERROR: --stackwise-against: tests: got {outside}; allowed: a file in *"])


BY_PLUGIN = {"tests/conftest.py": "pytest_plugins = ['more_options']\n"}


@pytest.mark.parametrize(
    ("place", "options"),
    [("conftest", ["--runslow"]), ("conftest", []), ("plugin", ["--runslow"])],
    ids=["given", "read", "plugin"],
)
def test_option_of_a_conftest_beside_the_benchmarks_is_known(repository, run_apart, place, options):
    """`--strict-config` refuses a setting that nobody has declared."""
    ini = "[pytest]\npythonpath = .\ntestpaths = tests bench\naddopts = --strict-config\nmarked = yes\n"
    old = "import work\ndef pytest_addoption(parser):\n    parser.addini('marked', '')\n"
    new = old + "    parser.addoption('--runslow', action='store_true')\n"
    bench = "import work\ndef test_it(benchmark, pytestconfig):\n    pytestconfig.getoption('--runslow')\n"
    base = {
        "pytest.ini": ini,
        "work.py": WORK,
        "tests/conftest.py": old,
        "tests/test_other.py": "def test_other(): pass\n",
        "bench/test_work.py": bench + "    benchmark(work.one)\n",
    }
    head = {"tests/conftest.py": new} if place == "conftest" else BY_PLUGIN | {"tests/more_options.py": new}
    repository(base, {"work.py": "\n" + WORK, **head})
    result = run_apart("--stackwise-against=base", ONE_ROUND, *options)
    assert result.ret == 7
    result.stdout.fnmatch_lines(["INCONCLUSIVE * bench/test_work.py::test_it * time *, limit 2%"])


def test_configuration_that_only_head_has_is_used_on_both_sides(repository, run_apart):
    base = {"work.py": WORK, "bench/test_work.py": BENCH}
    repository(base, {"ci/bench.ini": "[pytest]\npythonpath = ..\n", "other.py": ""})
    result = run_apart("-c", "ci/bench.ini", "--rootdir=.", "bench", "--stackwise-against=base", ONE_ROUND)
    assert result.ret == 7
    result.stdout.fnmatch_lines(["INCONCLUSIVE * bench/test_work.py::test_it * time *, limit 2%"])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("benchmark(lambda: (i for i in range(9)))", "generator, which has not run*lambda: list(...)*"),
        ("sys.setprofile(print); benchmark(work.one)", "(sys.setprofile) is active when the measured call*"),
    ],
    ids=["generator", "tracer"],
)
def test_refused_test_is_no_regression(repository, run_apart, lines, message):
    bench = f"import sys, work\ndef test_it(benchmark): {lines}\n"
    repository({"work.py": WORK, "bench/test_work.py": bench}, {"work.py": "\n" + WORK})
    result = run_apart("--stackwise-against=base", ONE_ROUND)
    assert result.ret == 4
    result.stdout.fnmatch_lines([f"set-up error * {message}", "ERROR: * nothing was compared: *"])
    result.stdout.no_fnmatch_line("*REGRESSED*")


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["-x", "-k", "(refused and not too) or crashes"], 1),
        (["-x", "-k", "refused"], 4),
        (["-k", "expected"], 4),
        (["-k", "refused or ordinary"], 1),
    ],
    ids=["crash after -x", "two with -x", "xfail", "another failure"],
)
def test_exit_code_of_set_up_errors(repository, run_apart, options, code):
    bench = """
import pytest, work
def test_refused(benchmark): benchmark(lambda: (i for i in range(9)))
def test_refused_too(benchmark): benchmark(lambda: (i for i in range(9)))
@pytest.mark.xfail
def test_expected(benchmark): benchmark(lambda: (i for i in range(9)))
def test_crashes(benchmark): benchmark(work.one)
def test_ordinary(): assert False
"""
    repository(
        {"work.py": WORK, "bench/test_work.py": bench}, {"work.py": WORK.replace("range(1000)", "None")}
    )
    assert run_apart("--stackwise-against=base", ONE_ROUND, *options).ret == code


def test_name_that_differs_by_process_is_a_set_up_error(repository, run_apart):
    bench = """
import os, pytest, work
@pytest.mark.parametrize("process", [os.getpid()])
def test_it(benchmark, process): benchmark(work.one)
"""
    repository({"work.py": WORK, "bench/test_work.py": bench}, {"work.py": "\n" + WORK})
    result = run_apart("--stackwise-against=base", ONE_ROUND)
    assert result.ret == 4
    result.stdout.fnmatch_lines(["set-up error * *its name may differ between processes*id=NAME*"])


def test_new_benchmark_warns_where_warnings_are_errors(repository, run_apart):
    ini = "[pytest]\npythonpath = .\ntestpaths = bench\nfilterwarnings = error\n"
    bench = BENCH + "def test_new(benchmark): benchmark(work.new)\n"
    repository(
        {"pytest.ini": ini, "work.py": WORK, "bench/test_work.py": BENCH},
        {"work.py": WORK + "new = one\n", "bench/test_work.py": bench},
    )
    result = run_apart("--stackwise-against=base", ONE_ROUND, "-k", "new")
    result.assert_outcomes(passed=1, warnings=1)
    result.stdout.fnmatch_lines(["*GateWarning: missing on base: *"])


def test_merge_base_leaves_out_later_commits_of_main(repository, run_apart, pytester):
    git = repository({"work.py": WORK, "bench/test_work.py": BENCH}, {"other.py": ""})
    git("checkout", "-qb", "feature", "base")
    (pytester.path / "work.py").write_text("\n" + WORK)
    result = run_apart("--stackwise-against=main", ONE_ROUND)
    result.stdout.fnmatch_lines(["main is not an ancestor of the head: *: main..."])
    result = run_apart("--stackwise-against=main...", ONE_ROUND)
    result.stdout.fnmatch_lines(["INCONCLUSIVE: working tree at * against main... (*"])
    result.stdout.no_fnmatch_line("*ancestor*")


def test_requested_benchmark_is_gated_or_noted(repository, run_apart):
    bench = """
import work
def helper(request): return request.getfixturevalue("benchmark")
def test_it(request): request.getfixturevalue("benchmark")(work.one)
def test_hidden(request): helper(request)(work.one)
"""
    repository({"work.py": WORK, "bench/test_work.py": bench}, {"work.py": "\n" + WORK})
    result = run_apart("--stackwise-against=base", ONE_ROUND)
    result.stdout.fnmatch_lines(
        [
            "INCONCLUSIVE * bench/test_work.py::test_it * limit 2%",
            "*::test_hidden: not gated, since it requests *",
        ]
    )


def test_unseeded_data_is_the_same_on_both_sides(repository, run_apart, pytester, monkeypatch):
    """The head draws more than the base in its module, before the data of the test is drawn."""
    monkeypatch.setenv("DRAWN", str(pytester.path / "drawn"))
    bench = """
import os, random, numpy, pytest, work
AT_IMPORT = [random.random(), numpy.random.rand(), numpy.random.default_rng().random()]
@pytest.fixture
def data(): return random.random()
def test_it(benchmark, data):
    drawn = [*AT_IMPORT, data, random.random(), numpy.random.rand(), numpy.random.default_rng().random()]
    with open(os.environ["DRAWN"], "a") as file:
        print(os.environ["STACKWISE_SIDE"], *drawn, file=file)
    benchmark(work.one)
"""
    draws = "import random, numpy\nrandom.random(); numpy.random.rand()\n" + WORK
    repository({"work.py": WORK, "bench/test_work.py": bench}, {"work.py": draws})
    run_apart("--stackwise-against=base", ONE_ROUND)
    lines = sorted((pytester.path / "drawn").read_text().splitlines())
    base, head = (line.split() for line in lines)
    assert (base[0], head[0]) == ("base", "head")
    assert base[1:4] != head[1:4], "the module of the head has drawn before"
    assert base[4:] == head[4:]


def test_lazy_module_that_raises_does_not_end_the_run(repository, run_apart):
    """As a package does it whose optional dependency is missing."""
    lazy = """
import sys, types
class Lazy(types.ModuleType):
    def __getattr__(self, name):
        raise ImportError("optional dependency is not installed")
sys.modules["optional"] = Lazy("optional")
"""
    repository({"work.py": lazy + WORK, "bench/test_work.py": BENCH}, {"work.py": f"{lazy}\n{WORK}"})
    result = run_apart("--stackwise-against=base", ONE_ROUND)
    assert result.ret == 7
    result.stdout.fnmatch_lines(["INCONCLUSIVE * bench/test_work.py::test_it * limit 2%"])
