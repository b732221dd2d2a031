"""Setup errors: failures for want of something that the trees lack."""

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
    """A project, and trees that have the tracked files alone."""
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
