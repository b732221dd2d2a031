"""Reasons why a side has not measured its own code on its own data."""

import os
import shutil
import time

import pytest

from stackwise.gate.mixing import Used, why_mixed, written_by_both
from tests.gate.small_repository import FAST, SLOW, commit, run_gate

NOW = time.time()


def used(**files):
    found = Used()
    found.add("", {"foreign": [], "read": [], "written": []} | files)
    return found


def write(path, text, age=0.0):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    os.utime(path, (NOW - age, NOW - age))
    return str(path)


def test_nothing_used_is_nothing_mixed():
    assert why_mixed({"base": used(), "head": used()}, NOW, NOW) == ""


@pytest.mark.parametrize("role", ["base", "head"])
def test_foreign_files_and_modules_are_named_with_their_side(role):
    sides = {"base": used(), "head": used()}
    sides[role].add("", {"foreign": ["/b", "/a"], "read": [], "written": []})
    assert why_mixed(sides, NOW, NOW).startswith(f"{role} used /a, which belongs to the working tree or")
    sides[role].add("/c.py", {"foreign": [], "read": [], "written": []})
    sides[role].add("", {"foreign": [], "read": [], "written": []})
    assert why_mixed(sides, NOW, NOW).startswith(f"{role} imported /c.py, so the gate would measure")


@pytest.mark.parametrize(
    ("base", "head", "mixed"),
    [
        (("read",), ("read",), True),  # a child or a library may have written it
        (("written",), ("read",), True),
        (("read",), ("written",), True),
        (("read", "written"), ("read", "written"), True),
        (("written",), ("written",), False),
        (("read", "written"), (), False),
    ],
)
def test_a_changed_file_that_both_sides_use_is_shared_if_one_reads_it(base, head, mixed, tmp_path):
    path = write(tmp_path / "data", "x")
    sides = {"base": used(**{how: [path] for how in base}), "head": used(**{how: [path] for how in head})}
    assert why_mixed(sides, NOW, NOW).startswith(f"base and head used {path}") == mixed
    assert written_by_both(sides) == ([path] if "written" in base and "written" in head else [])


@pytest.mark.parametrize(
    ("name", "text", "age", "mixed"),
    [
        ("data", "x", 5, True),  # made by the import of the tests in the user's run
        ("data", "x", 20, False),
        ("lock", "", 0, False),
        (".cache/fonts", "x", 5, False),
        (".cache/fonts", "x", 0, True),
    ],
)
def test_a_file_is_shared_if_it_changed_during_the_run(name, text, age, mixed, tmp_path):
    path = write(tmp_path / name, text, age)
    sides = {"base": used(read=[path]), "head": used(read=[path])}
    assert bool(why_mixed(sides, NOW - 10, NOW - 1)) == mixed


@pytest.mark.parametrize("written", [True, False])
def test_a_file_that_is_gone_is_shared_if_a_side_wrote_it(written, tmp_path):
    path = str(tmp_path / "gone")
    sides = {"base": used(read=[path]), "head": used(read=[path], written=[path] if written else [])}
    assert bool(why_mixed(sides, NOW, NOW)) == written


LIBRARY, SCRIPT, SHARED = "library", "script", "shared"
WORK = {
    LIBRARY: """
import importlib.util
spec = importlib.util.spec_from_file_location("library", "{root}/library.py")
library = importlib.util.module_from_spec(spec)
spec.loader.exec_module(library)
work = library.work
""",
    SCRIPT: """
import subprocess
def work(): subprocess.run(["sh", "{root}/script.sh"], check=True)
""",
    SHARED: """
import pathlib
data = pathlib.Path("{root}").parent / "data.txt"
if not data.exists(): data.write_text("{size}")
def work(): return sum(range(int(data.read_text())))
""",
}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (LIBRARY, "base used {root}/library.py, which belongs to the working tree"),
        (SCRIPT, "base used {root}/script.sh, which belongs to the working tree"),
        (SHARED, "base and head used {data}, which changed during the run"),
    ],
)
def test_a_slowdown_that_both_sides_share_is_inconclusive(kind, reason, tmp_path):
    root, data = tmp_path / "project", tmp_path / "data.txt"
    tests = "import engine\ndef test_it(benchmark): benchmark(engine.work)\n"
    files = {"pytest.ini": "[pytest]\npythonpath = .\n", "bench/test_it.py": tests}
    base, head = (WORK[kind].replace("{root}", str(root)).replace("{size}", n) for n in ("1000", "9000"))
    commit(root, files | {"engine.py": base, "library.py": FAST, "script.sh": "true\n"}, "base")
    commit(root, {"engine.py": f"{head}\n# slower", "library.py": SLOW, "script.sh": "sleep 0.1\n"})
    code, result, output = run_gate(root)
    assert (code, result["verdict"]) == (7, "INCONCLUSIVE"), output
    assert any(note.startswith(reason.format(root=root, data=data)) for note in result["notes"]), output
