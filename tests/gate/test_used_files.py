"""Files outside of its tree that a side uses."""

import shutil
import subprocess
import sys

import pytest

from tests.gate.small_repository import write

PROGRAM = """
import ctypes, importlib.util, os, sqlite3, subprocess, sys
from stackwise.gate.side.used_files import UsedFiles
os.chdir({root!r} + "/tree")
used = UsedFiles([{root!r} + "/tree"], [{root!r} + "/project"], hook={hook}, has_tree={has_tree})
project, data = {root!r} + "/project", {root!r} + "/data"
{work}
print(used.new())
"""
MODULE = "spec = importlib.util.spec_from_file_location('x', project + '/x.py')\n"
MODULE += "spec.loader.exec_module(importlib.util.module_from_spec(spec))"
MAPPED = "import mmap\nwith open(project + '/mapped.bin') as f: m = mmap.mmap(f.fileno(), 0, prot=1)"
WAIT = "child = subprocess.Popen({}, stdin=subprocess.PIPE)\nused.look()\nchild.communicate()"


@pytest.fixture
def used(tmp_path):
    """Runs lines of a program; returns what was used, without the folder that everything is in."""
    names = [
        "tree/x.py",
        "tree/__pycache__/x.cpython-311.pyc",
        "tree/run.sh",
        "project/x.py",
        "project/run.sh",
        "project/.venv/x.py",
    ]
    names += ["project/site-packages/x.py", "project/a.egg-info/x", "project2/x"]
    names += ["data/x", "data/__pycache__/x.pyc", "project/__pycache__/x.cpython-311.pyc"]
    write(tmp_path, dict.fromkeys(names, "") | {"project/mapped.bin": "x" * 9000})
    (tmp_path / "project" / "run.sh").write_text("#!/bin/sh\n")
    (tmp_path / "project" / "run.sh").chmod(0o755)
    (tmp_path / "tree" / "link.py").symlink_to(tmp_path / "project" / "x.py")

    def of(work, hook=True, has_tree=False):
        program = PROGRAM.format(root=str(tmp_path), work=work, hook=hook, has_tree=has_tree)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        found = eval(done.stdout)
        if has_tree:
            return found["tree"]
        root = f"{tmp_path}/"
        inside = {what: [p for p in paths if p.startswith(root)] for what, paths in found.items()}
        return {what: [p.removeprefix(root) for p in paths] for what, paths in inside.items() if paths}

    return of


@pytest.mark.parametrize(
    ("work", "file"),
    [
        ("open(project + '/x.py')", "x.py"),
        ("open('../project/x.py')", "x.py"),
        ("open('link.py')", "x.py"),
        ("open(project + '/__pycache__/x.cpython-311.pyc')", "x.py"),
        ("os.close(os.open(project + '/x.py', os.O_RDWR))", "x.py"),
        (MODULE, "x.py"),
        ("try: ctypes.CDLL(project + '/x.py')\nexcept OSError: pass", "x.py"),
        ("subprocess.run(['sh', project + '/run.sh'])", "run.sh"),
        ("subprocess.run(['sh', 'run.sh'], cwd=project)", "run.sh"),
        ("subprocess.run(f'true --config={project}/x.py', shell=True)", "x.py"),
        ("os.system(f'sh {project}/run.sh')", "run.sh"),
        ("os.environ['PATH'] += ':' + project\nsubprocess.run(['run.sh'])", "run.sh"),
        ("subprocess.run(['run.sh'], env={'PATH': project})", "run.sh"),
        ("os.waitpid(os.posix_spawn('/bin/sh', ['sh', project + '/run.sh'], {}), 0)", "run.sh"),
    ],
)
def test_foreign_files_that_are_read_or_run_are_heard(work, file, used):
    assert f"project/{file}" in used(work)["foreign"]


@pytest.mark.skipif(sys.platform != "linux", reason="the system has no /proc")
@pytest.mark.parametrize(
    ("work", "file"),
    [
        (MAPPED, "mapped.bin"),
        ("f = open(project + '/x.py')", "x.py"),
        (WAIT.format("['cat', '-', project + '/x.py']"), "x.py"),
        (WAIT.format("['sh', '-c', f'cat; : {project}/x.py']"), "x.py"),
        (WAIT.format("['cat'], cwd=project"), ""),
    ],
    ids=["mapped", "open", "argument", "shell", "folder"],
)
def test_foreign_files_in_use_are_seen_without_the_hook(work, file, used):
    found = used(f"{work}\nused.look()", hook=False)
    assert found["foreign"] == [f"project/{file}".rstrip("/")]


@pytest.mark.parametrize(
    "work",
    [
        "open('x.py'); subprocess.run(['sh', 'run.sh'])",
        "open(project + '/.venv/x.py')",
        "open(project + '/site-packages/x.py')",
        "open(project + '/a.egg-info/x')",
        "os.listdir(project); os.path.exists(project + '/x.py')",
        "subprocess.run(['true', project + '2'])",
        "subprocess.run(['true', project + '/none'])",
        "open('/dev/null'); open('/proc/self/stat')",
        "open(data + '/__pycache__/x.pyc', 'r+')",
        "sqlite3.connect(':memory:')",
        "with used.paused(): open(project + '/x.py')",
        "open(sys.executable, 'rb'); import json.tool",
        "subprocess.run(['true', 'x' * 300])",
        "try: open('x' * 300)\nexcept OSError: pass",
    ],
)
def test_own_and_installed_files_are_not_told(work, used):
    assert used(work) == {}


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        ("open(data + '/x')", {"read": ["data/x"]}),
        ("open(data + '/new', 'w')", {"written": ["data/new"]}),
        ("open(data + '/x', 'a')", {"written": ["data/x"]}),
        ("open(data + '/x', 'r+')", {"read": ["data/x"], "written": ["data/x"]}),
        ("os.rename(data + '/x', data + '/new')", {"written": ["data/new"]}),
        ("sqlite3.connect(data + '/db').close()", {"read": ["data/db"], "written": ["data/db"]}),
        ("open(project + '/log', 'w')", {"written": ["project/log"]}),
        ("open(data + '/x'); used.new(); open(data + '/x')", {}),
    ],
)
def test_files_elsewhere_are_read_or_written(work, expected, used):
    assert used(work) == expected


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a compiler")
def test_a_library_that_a_name_leads_to_is_seen(used, tmp_path):
    (tmp_path / "x.c").write_text("int x(void) { return 1; }\n")
    library = tmp_path / "project" / "libx.so"
    subprocess.run(["gcc", "-shared", "-o", str(library), str(tmp_path / "x.c")], check=True)
    work = f"ctypes.CDLL({str(library)!r})\nused.look()"
    assert used(work, hook=False) == {"foreign": ["project/libx.so"]}


@pytest.mark.parametrize(
    ("work", "hook", "expected"),
    [
        ("for n in range(1000): id(n)", True, True),
        ("for n in range(1000): n + 1", True, False),
        ("for n in range(1000): id(n)", False, False),
    ],
)
def test_times_are_disturbed_by_events_that_the_hook_hears(work, hook, expected, tmp_path):
    timed = (
        f"with used.timed(noting=False):\n    {work}\nprint([used.disturbed(), used.disturbed()])\nused.new()"
    )
    program = PROGRAM.format(root=str(tmp_path), work=timed, hook=hook, has_tree=False)
    (tmp_path / "tree").mkdir()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == str([expected, False])


def test_files_of_timed_calls_are_noted_if_asked_for(used):
    assert used("with used.timed(noting=False): open(project + '/x.py')") == {}
    assert used("with used.timed(noting=True): open(project + '/x.py')") == {"foreign": ["project/x.py"]}


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        ("open('x.py')", ["x.py"]),
        ("open('__pycache__/x.cpython-311.pyc')", ["x.py"]),
        ("subprocess.run(['sh', 'run.sh'])", ["run.sh"]),
        ("open('new', 'w')", []),
        ("open(project + '/x.py'); open(data + '/x')", []),
    ],
)
def test_files_of_the_tree_are_told_relative_to_it(work, expected, used):
    assert [file for file in used(work, has_tree=True) if file != "."] == expected
