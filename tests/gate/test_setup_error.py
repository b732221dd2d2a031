"""Set-up errors: failures that are due to the copies of the project."""

import subprocess
from pathlib import Path

import pytest

from stackwise.gate.round import Ended
from stackwise.gate.setup_error import SetupErrors

ERRORS = {
    "module": "ModuleNotFoundError: No module named 'pkg._version'",
    "name": "ImportError: cannot import name '_version' from 'pkg' (/x/pkg/__init__.py)",
    "absolute": "FileNotFoundError: [Errno 2] No such file or directory: '{tree}/data/in.bin'",
    "relative": "FileNotFoundError: [Errno 2] No such file or directory: 'data/in.bin'",
    "submodule": "ModuleNotFoundError: No module named 'lib.helper'",
    "extension": "ModuleNotFoundError: No module named 'pkg._fast'",
}


@pytest.fixture
def setup(tmp_path):
    """A repository, and trees that have its tracked files alone; `new.txt` and `fast.py` are head's only."""
    for name in ("root", "base", "head"):
        for file in ("src/pkg/__init__.py", "tracked.txt"):
            place = tmp_path / name / file
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch()
        (tmp_path / name / "src" / "lib").mkdir()  # of a submodule
    ignored = ["src/pkg/_version.py", "data/in.bin", "src/lib/.git", "src/lib/helper.py"]
    for file in [*ignored, "src/pkg/_fast.cpython-311-x86_64-linux-gnu.so"]:
        place = tmp_path / "root" / file
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
    (tmp_path / "root" / ".gitignore").write_text("_version.py\n*.so\n/data\n")
    subprocess.run(["git", "init", "-q", tmp_path / "root"], check=True)
    for name in ("root", "head"):
        for file in ("src/pkg/fast.py", "new.txt"):
            (tmp_path / name / file).touch()
    trees = {role: tmp_path / role for role in ("base", "head")}
    return SetupErrors(tmp_path / "root", trees, imports=(Path("src"),))


@pytest.mark.parametrize("role", ["base", "head"])
@pytest.mark.parametrize(
    ("error", "advice"),
    [
        ("module", "src/pkg/_version.py is a file or folder that git ignores*mkdir -p src/pkg && cp -R *"),
        ("name", "src/pkg/_version.py is a file or folder that git ignores*"),
        ("absolute", "data is a file or folder that git ignores*cp -R {root}/data ./*"),
        ("relative", "data is a file or folder that git ignores*"),
        ("submodule", "src/lib is a submodule*cp -R {root}/src/lib src/*"),
        ("extension", "src/pkg/_fast.*.so is in no tree*build_ext --inplace*"),
    ],
)
def test_file_that_a_tree_lacks_is_named_with_a_command(setup, role, error, advice):
    detail = ERRORS[error].format(tree=setup.trees[role])
    found = setup.explained(Ended({role: "failed"}, {role: detail}, 3.0))
    assert (found.how, found.seconds) == ({role: "refused"}, 3.0)
    wanted = f"*; {advice.format(root=setup.root)}"
    assert Path(found.detail[role].replace("/", "|")).match(wanted.replace("/", "|")), found.detail


@pytest.mark.parametrize(
    "detail",
    [
        "ZeroDivisionError: division by zero (test_work.py:9)",
        "ModuleNotFoundError: No module named 'not_installed'",
        "FileNotFoundError: [Errno 2] No such file or directory: 'tracked.txt'",
        "FileNotFoundError: [Errno 2] No such file or directory: '/etc/nothing'",
        "ValueError: got '..'; allowed: '.'",
        "KeyError: 'data'",
        "KeyError: 'data/in.bin'",
        "ValueError: 'data' is no number",
        "OSError: 'data' is locked",
        "AssertionError: assert 'No such file: data' == 'data'\n  - data/in.bin: No such file: 'data'",
        f"FileNotFoundError: [Errno 2] No such file or directory: '{'x' * 5000}'",
        f"ModuleNotFoundError: No module named '{'x' * 300}.y'",
        "ImportError: No module named '.'",
    ],
)
def test_failure_of_the_code_stays_one(setup, detail):
    ended = Ended({"head": "failed"}, {"head": detail})
    assert setup.explained(ended) == ended


@pytest.mark.parametrize("word", ["not collected", "not started", "missing"])
def test_own_files_that_the_user_could_collect_are_no_failure(setup, word):
    ended = Ended({"head": word}, {"head": "RuntimeError: no server"})
    assert setup.explained(ended) == ended, "a revision may be broken"
    own = SetupErrors(setup.root, setup.trees, own_head=True)
    assert own.explained(ended).how == {"head": "refused"}
    assert own.explained(Ended({"base": word}, {"base": "RuntimeError"})).how == {"base": word}


@pytest.mark.parametrize("word", ["failed", "not collected", "not started"])
@pytest.mark.parametrize(
    "detail",
    [
        "ModuleNotFoundError: No module named 'pkg.fast'",
        "FileNotFoundError: [Errno 2] No such file or directory: 'new.txt' (test_work.py:9)",
        "FileNotFoundError: [Errno 2] No such file or directory: '{tree}/new.txt'",
    ],
)
def test_file_that_only_the_base_lacks_is_missing_there(setup, word, detail):
    detail = detail.format(tree=setup.trees["base"])
    assert setup.explained(Ended({"base": word}, {"base": detail})).how == {"base": "missing"}


def test_same_failure_on_both_sides_is_of_the_copies(setup):
    message = "FileExistsError: {tree}/out at 0x{role} (work.py:{line})"
    texts = {
        "base": message.format(tree=setup.trees["base"], role="ba5e", line=9),
        "head": message.format(tree=setup.trees["head"], role="4ead", line=10),
    }
    ended = Ended(dict.fromkeys(texts, "failed"), texts)
    found = setup.explained(ended, first=True)
    assert set(found.how.values()) == {"refused"}
    assert found.detail["head"].startswith(f"{texts['base']}; it fails on both sides, in the gate's copies")
    assert setup.explained(ended) == ended, "after measured rounds"
    other = Ended(ended.how, {**texts, "head": "ValueError: 3"})
    assert setup.explained(other, first=True) == other
    same_files = SetupErrors(setup.root, dict.fromkeys(texts, setup.root))
    assert same_files.explained(ended, first=True) == ended


@pytest.mark.parametrize(
    ("detail", "is_named"), [("Command '['git', 'log']' returned 128", True), ("digits differ", False)]
)
def test_same_failure_of_git_names_the_cause(setup, detail, is_named):
    ended = Ended(dict.fromkeys(setup.trees, "failed"), dict.fromkeys(setup.trees, detail))
    found = setup.explained(ended, first=True)
    assert ("the trees are no git repositories" in found.detail["head"]) == is_named
