"""Files that stand for data of git-lfs and git-annex."""

import shutil

import pytest

from stackwise.gate.tree import is_pointer
from tests.gate.small_repository import commit, git, run_gate

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
CLEAN = f"cat >/dev/null; printf '{POINTER.decode()}'"  # as that of git-lfs, without its store
TEST = """
import pathlib, pytest, engine
DATA = pathlib.Path(__file__).parents[1] / "data.bin"

@pytest.mark.gate(time=None, memory_floor="1 KiB")
def test_it(benchmark): benchmark(DATA.read_bytes)
"""


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (POINTER, True),
        (b"/annex/objects/SHA256E-s9--0.bin\n", True),
        (POINTER * 100, False),
        (b"data", False),
        (b"", False),
    ],
)
def test_pointer_is_a_small_file_with_a_first_line_of_its_own(content, expected, tmp_path):
    (tmp_path / "data.bin").write_bytes(content)
    (tmp_path / "link.bin").symlink_to("data.bin")
    assert is_pointer(tmp_path / "data.bin") == expected
    assert not is_pointer(tmp_path / "link.bin")
    assert not is_pointer(tmp_path / "none.bin")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_change_of_a_comment_beside_data_of_lfs_is_no_change(tmp_path):
    root = tmp_path / "project"
    commit(root, {"pytest.ini": "[pytest]\npythonpath = .\n", "engine.py": "", "bench/test_it.py": TEST})
    git(root, "config", "filter.lfs.clean", CLEAN)
    commit(root, {".gitattributes": "*.bin filter=lfs\n", "data.bin": b"data" * 100_000}, "base")
    commit(root, {"engine.py": "# comment\n"})
    code, result, output = run_gate(root)
    assert (code, result["verdict"]) == (0, "PASS"), output
    assert result["tests"][0]["trials"]["memory"]["base"][0] > 400_000
