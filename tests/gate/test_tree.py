"""The trees of both sides: what is in them, and that the repository is left as it was."""

import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from stackwise.gate.tree import NOTHING_DIFFERS, Renamed, both_trees, repository_of, revision_name

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def git(folder, *arguments):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    done = subprocess.run(
        ["git", "-c", "user.name=n", "-c", "user.email=e@x", "-C", str(folder), *arguments],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    return done.stdout


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def commit(root, files):
    write(root, files)
    git(root, "add", "-A")
    git(root, "commit", "-qm", "x")


@pytest.fixture
def repository(tmp_path):
    root = tmp_path / "project"
    root.mkdir()
    git(root, "init", "-q", "-b", "main")
    commit(
        root,
        {
            ".gitignore": "*.log\n",
            "engine/__init__.py": "OLD = 1\n",
            "bench/test_work.py": "def test_old(benchmark):\n    benchmark(int)\n",
            "bench/sizes.py": "OLD = 1\n",
            "conftest.py": "OLD = 1\n",
        },
    )
    git(root, "tag", "base")
    commit(
        root,
        {
            "engine/__init__.py": "NEW = 1\n",
            "bench/test_work.py": "def test_new(benchmark):\n    benchmark(int)\n",
            "bench/sizes.py": "NEW = 1\n",
        },
    )
    return root


def read(tree):
    return {str(p.relative_to(tree.folder)): p.read_text() for p in tree.folder.rglob("*") if p.is_file()}


def trees(root, against="base", tests=("bench/test_work.py",), **given):
    return both_trees(against, root=root, tests=[root / test for test in tests], **given)


def test_of_a_revision(repository):
    with trees(repository) as (base, head, renamed):
        old, new = read(base), read(head)
        assert len(str(base.folder)) == len(str(head.folder))
        assert base.commit == revision_name(repository, "base")
        assert head.commit == revision_name(repository, "HEAD")
        assert base.name == f"base ({base.commit[:9]})"
    assert old["engine/__init__.py"] == "OLD = 1\n"
    assert new["engine/__init__.py"] == "NEW = 1\n"
    # The head's tests on both sides, with what lies beside them.
    for name in ("bench/test_work.py", "bench/sizes.py", "conftest.py"):
        assert old[name] == new[name] == (repository / name).read_text()
    assert renamed == [Renamed("bench/test_work.py::test_old", "bench/test_work.py::test_new")]
    assert not base.folder.exists()
    assert not head.folder.exists()


def test_three_dots_name_the_merge_base(repository):
    git(repository, "checkout", "-qb", "other", "base")
    write(repository, {"engine/__init__.py": "OTHER = 1\n"})
    git(repository, "commit", "-qam", "other")
    git(repository, "checkout", "-q", "main")
    for against, head in (("other...", None), ("other...main", None), ("main...", "other")):
        with trees(repository, against, head=head) as (base, _, _):
            assert base.commit == revision_name(repository, "base")
            assert base.name == f"{against} ({base.commit[:9]})"
            assert not any("ancestor" in note for note in base.notes)


def test_base_that_is_no_ancestor_is_noted(repository):
    git(repository, "checkout", "-qb", "other", "base")
    write(repository, {"engine/__init__.py": "OTHER = 1\n"})
    git(repository, "commit", "-qam", "other")
    git(repository, "checkout", "-q", "main")
    with trees(repository, "other") as (base, _, _):
        [note] = base.notes
    assert note.startswith(
        "other is not an ancestor of the head: its commits that the head lacks (1) are compared too"
    )
    assert note.endswith(": other...")
    with trees(repository, "base") as (base, _, _):
        assert not base.notes


def test_merge_base_of_unrelated_commits_is_refused(repository):
    git(repository, "checkout", "-q", "--orphan", "unrelated")
    git(repository, "commit", "-qm", "unrelated")
    with pytest.raises(ValueError, match="common ancestor, and main and HEAD have none"):
        trees(repository, "main...").__enter__()


def test_the_head_is_the_files_as_they_are(repository):
    write(repository, {"engine/__init__.py": "CHANGED = 1\n", "engine/more.py": "", "run.log": ""})
    (repository / "bench" / "sizes.py").unlink()
    with trees(repository) as (base, head, _):
        assert set(read(head)) == {
            ".gitignore",
            "engine/__init__.py",
            "engine/more.py",
            "bench/test_work.py",
            "conftest.py",
        }
        assert read(head)["engine/__init__.py"] == "CHANGED = 1\n"
        assert "bench/sizes.py" not in read(base)
        assert head.commit is None
        assert head.name.endswith("with changes")


def test_the_head_as_a_revision(repository):
    write(repository, {"engine/__init__.py": "CHANGED = 1\n"})
    with trees(repository, head="main") as (_, head, _):
        assert read(head)["engine/__init__.py"] == "NEW = 1\n"


def test_nothing_of_the_repository_is_touched(repository):
    write(repository, {"engine/__init__.py": "CHANGED = 1\n", "staged.py": ""})
    git(repository, "add", "staged.py")

    def state():
        return {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in repository.rglob("*") if p.is_file()}

    before = state()
    with trees(repository):
        pass
    assert state() == before


def test_gone_though_the_body_fails(repository):
    with pytest.raises(KeyboardInterrupt), trees(repository) as (base, _, _):
        raise KeyboardInterrupt
    assert not base.folder.parent.exists()


def test_inside_of_a_hook_of_git(repository, monkeypatch, tmp_path):
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "index"))
    with trees(repository) as (base, _, _):
        assert read(base)["engine/__init__.py"] == "OLD = 1\n"


def test_tests_beside_the_modules_of_a_package(repository):
    commit(repository, {"engine/test_inside.py": "NEW = 1\n", "engine/helper.py": "NEW = 1\n"})
    with trees(repository, tests=("engine/test_inside.py",)) as (base, head, _):
        old = read(base)
        # The test alone, else the new package would be compared with itself.
        assert old["engine/__init__.py"] == "OLD = 1\n"
        assert old["engine/test_inside.py"] == read(head)["engine/test_inside.py"]
        assert "engine/helper.py" not in old
        assert old["bench/sizes.py"] == "OLD = 1\n"


def test_of_a_folder(repository, tmp_path):
    other = tmp_path / "other"
    write(other, {"engine/__init__.py": "OTHER = 1\n", ".venv/lib/x.py": ""})
    with trees(repository, "./other", start=tmp_path) as (base, _, renamed):
        assert read(base)["engine/__init__.py"] == "OTHER = 1\n"
        assert read(base)["bench/sizes.py"] == "NEW = 1\n"
        assert not (base.folder / ".venv").exists()
        assert renamed == []


def test_a_revision_comes_before_a_folder_of_its_name(repository):
    write(repository, {"base/engine/__init__.py": "FOLDER = 1\n"})
    with trees(repository, "base", start=repository) as (base, _, _):
        assert read(base)["engine/__init__.py"] == "OLD = 1\n"
    with trees(repository, "./base", start=repository) as (base, _, _):
        assert read(base)["engine/__init__.py"] == "FOLDER = 1\n"


def test_where_temporary_files_lie_in_the_project(tmp_path, monkeypatch):
    write(tmp_path / "project", {"engine.py": "NEW = 1\n", "test_it.py": "", "tmp/own.txt": ""})
    write(tmp_path / "project" / "old", {"engine.py": "OLD = 1\n"})
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "project" / "tmp"))
    root = tmp_path / "project"
    with both_trees("./old", root=root, tests=[root / "test_it.py"], start=root) as (base, head, _):
        assert (base.folder / "engine.py").read_text() == "OLD = 1\n"
        assert (head.folder / "engine.py").read_text() == "NEW = 1\n"
        assert [path.name for path in (head.folder / "tmp").iterdir()] == ["own.txt"]
    assert [path.name for path in (root / "tmp").iterdir()] == ["own.txt"]


def test_without_a_repository(tmp_path):
    write(tmp_path / "old", {"engine.py": "OLD = 1\n"})
    new = tmp_path / "new"
    write(new, {"engine.py": "NEW = 1\n", "tests/test_work.py": ""})
    assert repository_of(new) is None
    with trees(new, "../old", tests=("tests/test_work.py",), start=new) as (base, head, _):
        assert (read(base)["engine.py"], read(head)["engine.py"]) == ("OLD = 1\n", "NEW = 1\n")
        assert (base.folder / "tests" / "test_work.py").exists()
    with (
        pytest.raises(ValueError, match="no git repository"),
        trees(new, "main", tests=("tests/test_work.py",)),
    ):
        pass


def test_what_git_refuses_to_read(repository, tmp_path, monkeypatch):
    """As it does a checkout of another owner, in a container: its own words say what to do."""
    (tmp_path / "git").write_text("#!/bin/sh\necho fatal: detected dubious ownership >&2\nexit 128\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    below = repository / "bench"  # which is then all that is known of
    assert repository_of(below) is None
    for root, head in ((below, None), (repository, "main")):
        with (
            pytest.raises(ValueError, match=r"against: got .*; git says: fatal: detected dubious ownership"),
            trees(root, "main", tests=("test_work.py",), head=head),
        ):
            pass
    monkeypatch.setenv("PATH", "")
    with (
        pytest.raises(ValueError, match="no git repository; git is not installed"),
        trees(below, "main", tests=("test_work.py",)),
    ):
        pass


def wheel(folder, files):
    path = folder / "engine-1.0-py3-none-any.whl"
    about = "engine-1.0.dist-info"
    files = {
        **files,
        f"{about}/METADATA": "Metadata-Version: 2.1\nName: engine\nVersion: 1.0\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        archive.writestr(f"{about}/RECORD", "".join(f"{name},,\n" for name in [*files, f"{about}/RECORD"]))
    return path


def test_of_a_wheel(repository, tmp_path):
    path = wheel(tmp_path, {"engine/__init__.py": "WHEEL = 1\n", "engine/part.py": ""})
    with trees(repository, str(path)) as (base, head, _):
        assert read(base)["engine/__init__.py"] == "WHEEL = 1\n"
        assert set(read(base)) == {*read(head), "engine/part.py"}
        assert base.name == path.name


def test_of_a_wheel_that_has_tests(repository, tmp_path):
    commit(repository, {"engine/tests/test_it.py": "NEW = 1\n"})
    files = {"engine/__init__.py": "WHEEL = 1\n", "engine/tests/test_it.py": "OLD = 1\n"}
    with trees(repository, str(wheel(tmp_path, files)), tests=("engine/tests/test_it.py",)) as (base, _, _):
        assert read(base)["engine/__init__.py"] == "WHEEL = 1\n"
        assert read(base)["engine/tests/test_it.py"] == "NEW = 1\n"


def test_of_a_wheel_of_something_else(repository, tmp_path):
    path = wheel(tmp_path, {"other/__init__.py": ""})
    with (
        pytest.raises(ValueError, match="a wheel of a package that lies in this folder"),
        trees(repository, str(path)),
    ):
        pass
    with pytest.raises(ValueError, match="a wheel that exists"), trees(repository, "none.whl"):
        pass


def test_unknown_revision(repository):
    with (
        pytest.raises(ValueError, match=r"against: got 'nowhere'; allowed: a revision of .*project"),
        trees(repository, "nowhere"),
    ):
        pass


def test_a_name_is_never_an_option_of_git(repository):
    with pytest.raises(ValueError, match="against: got '--help'"), trees(repository, "--help"):
        pass


def test_what_is_built_is_built_by_its_own_files(repository):
    commit(repository, {"bench/sizes.py": "NEWER = 1\n"})
    with trees(repository, build="cat bench/sizes.py > built.txt") as (base, head, _):
        assert (read(base)["built.txt"], read(head)["built.txt"]) == ("OLD = 1\n", "NEWER = 1\n")
        assert read(base)["bench/sizes.py"] == "NEWER = 1\n"
    with pytest.raises(ValueError, match=r"build: 'false' ended with 1"), trees(repository, build="false"):
        pass


def test_what_is_built_beside_tests_stays(repository):
    with trees(repository, build="cp engine/__init__.py bench/built.txt") as (base, head, _):
        assert (read(base)["bench/built.txt"], read(head)["bench/built.txt"]) == ("OLD = 1\n", "NEW = 1\n")
        assert read(base)["bench/sizes.py"] == "NEW = 1\n"


def test_hidden_changes_are_those_of_modules_beside_tests(repository):
    with trees(repository) as (base, _, _):
        assert base.hidden == (Path("bench/sizes.py"),)


def test_the_same_code_is_said_to_be_the_same(repository):
    with trees(repository) as (base, _, _):
        assert base.notes == ()
    commit(repository, {"bench/test_work.py": "def test_newer(benchmark):\n    benchmark(str)\n"})
    with trees(repository, "HEAD~1") as (base, _, _):
        assert base.notes == (NOTHING_DIFFERS,)


def test_a_lost_test_that_two_are_like(repository):
    body = "(benchmark):\n    benchmark(int)\n"
    write(repository, {"bench/test_work.py": f"def test_a{body}def test_b{body}"})
    with trees(repository) as (_, _, renamed):
        assert renamed == [Renamed("bench/test_work.py::test_old", None)]


def test_submodules_are_told_of(repository, tmp_path):
    other = tmp_path / "module"
    other.mkdir()
    git(other, "init", "-q")
    commit(other, {"x.py": ""})
    git(repository, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(other), "part")
    git(repository, "commit", "-qm", "with a part")
    with trees(repository, "HEAD") as (base, head, _):
        assert not (head.folder / "part" / "x.py").exists()
        assert any("submodules" in note for note in base.notes)


def test_links_stay_links(repository):
    (repository / "link.py").symlink_to("engine/__init__.py")
    git(repository, "add", "-A")
    git(repository, "commit", "-qm", "link")
    with trees(repository, "HEAD") as (base, head, _):
        assert (base.folder / "link.py").readlink() == Path("engine/__init__.py")
        assert (head.folder / "link.py").is_symlink()


def test_file_name_that_is_not_utf_8_is_copied(repository):
    names = [os.fsdecode(name) for name in (b"caf\xe9.txt", b"engine/caf\xe9_new.txt")]
    try:
        write(repository, {names[0]: "old"})
    except OSError:
        pytest.skip("the file system takes UTF-8 only")
    commit(repository, {"engine/__init__.py": "NEWER = 1\n"})
    write(repository, {names[0]: "new", names[1]: ""})
    with trees(repository, "HEAD") as (base, head, _):
        assert (base.folder / names[0]).read_text() == "old"
        assert (head.folder / names[0]).read_text() == "new"
        assert (head.folder / names[1]).exists()


def test_output_of_a_build_that_is_not_utf_8_is_told(repository):
    build = "printf 'caf\\351 failed'; false"
    with (
        pytest.raises(ValueError, match="caf\N{REPLACEMENT CHARACTER} failed"),
        trees(repository, build=build),
    ):
        pass


def test_git_is_configured_by_the_environment_of_the_user(repository, monkeypatch, tmp_path):
    """A filter, as of git-lfs, that is known from the environment alone, and what it reads there."""
    commit(repository, {".gitattributes": "*.dat filter=upper\n", "engine/data.dat": "pointer"})
    write(repository, {"engine/data.dat": "changed"})
    settings = {"filter.upper.smudge": f"env > {tmp_path}/seen; tr a-z A-Z", "filter.upper.required": "true"}
    settings["filter.upper.clean"] = "tr A-Z a-z"
    monkeypatch.setenv("GIT_CONFIG_COUNT", str(len(settings)))
    for number, (key, value) in enumerate(settings.items()):
        monkeypatch.setenv(f"GIT_CONFIG_KEY_{number}", key)
        monkeypatch.setenv(f"GIT_CONFIG_VALUE_{number}", value)
    for name in ("GIT_SSH_COMMAND", "GIT_LFS_SKIP_SMUDGE", "GIT_WORK_TREE", "GIT_OBJECT_DIRECTORY"):
        monkeypatch.setenv(name, f"/users/{name}")
    with trees(repository, "HEAD") as (base, _, _):
        assert (base.folder / "engine" / "data.dat").read_text() == "POINTER"
    seen = (tmp_path / "seen").read_text()
    assert "GIT_SSH_COMMAND=/users/" in seen
    assert "GIT_LFS_SKIP_SMUDGE=/users/" in seen
    assert "GIT_WORK_TREE=/users/" not in seen
    assert "GIT_OBJECT_DIRECTORY=/users/" not in seen


def test_repository_of_somebody_else_is_read_if_the_user_calls_it_safe(repository, monkeypatch):
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    assert repository_of(repository) is None
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "safe.directory")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "*")
    assert repository_of(repository) == repository


# Filters of git: the bytes on disk are not those of the blob.

DATA = b"data\r\n" * 2000
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
FILTERS = {
    # As git-lfs does where it puts the data there only if it is asked to.
    "lfs": ("*.bin filter=lfs", {"filter.lfs.clean": f"cat >/dev/null; printf '{POINTER.decode()}'"}),
    "strip": ("*.bin filter=strip", {"filter.strip.clean": "head -c 100"}),
    "line endings": ("*.bin text", {"core.eol": "lf"}),
}


@pytest.fixture(params=FILTERS)
def filtered(repository, request):
    attributes, settings = FILTERS[request.param]
    for key, value in settings.items():
        git(repository, "config", key, value)
    (repository / "same.bin").write_bytes(DATA)
    commit(repository, {".gitattributes": attributes + "\n"})
    git(repository, "tag", "--force", "base")
    commit(repository, {"engine/__init__.py": "NEWER = 1\n"})
    return repository


def test_unmodified_files_have_the_same_bytes_on_both_sides(filtered):
    with trees(filtered) as (base, head, _):
        for tree in (base, head):
            assert (tree.folder / "same.bin").read_bytes() == DATA


def test_modified_files_are_as_git_writes_them(repository):
    git(repository, "config", "filter.strip.clean", "head -c 100")
    (repository / "same.bin").write_bytes(DATA)
    commit(repository, {".gitattributes": "*.bin filter=strip\n"})
    (repository / "same.bin").write_bytes(b"more" + DATA)
    with trees(repository, "HEAD") as (base, head, _):
        assert (base.folder / "same.bin").read_bytes() == DATA[:100]
        assert (head.folder / "same.bin").read_bytes() == b"more" + DATA


@pytest.mark.parametrize("flag", ["--assume-unchanged", "--skip-worktree"])
def test_modified_files_that_git_ignores_are_as_git_writes_them(repository, flag):
    git(repository, "update-index", flag, "engine/__init__.py")
    write(repository, {"engine/__init__.py": "NEWER = 1\n"})
    with trees(repository, "HEAD") as (base, head, _):
        assert read(base)["engine/__init__.py"] == "NEW = 1\n"
        assert read(head)["engine/__init__.py"] == "NEWER = 1\n"
        assert head.commit is None


def test_untracked_files_are_changes_whatever_git_shows(repository):
    git(repository, "config", "status.showUntrackedFiles", "no")
    write(repository, {"engine/new.py": ""})
    with trees(repository) as (_, head, _):
        assert head.commit is None


def test_files_that_are_not_checked_out_are_on_neither_side(repository):
    commit(repository, {"data/large.bin": "data"})
    git(repository, "tag", "--force", "base")
    git(repository, "sparse-checkout", "set", "engine", "bench")
    with trees(repository) as (base, head, _):
        assert not (base.folder / "data").exists()
        assert not (head.folder / "data").exists()


def test_a_pointer_in_one_tree_is_refused(repository):
    (repository / "data.bin").write_bytes(POINTER)
    commit(repository, {})
    (repository / "data.bin").write_bytes(DATA)
    message = (
        r"data.bin is a pointer of git-lfs in the tree of HEAD \(.*\) and data in the other; run `git lfs"
    )
    with pytest.raises(ValueError, match=message), trees(repository, "HEAD"):
        pass


@pytest.mark.parametrize("pointer", [POINTER, b"/annex/objects/SHA256E-s9--0.bin\n"], ids=["lfs", "annex"])
def test_pointers_in_both_trees_are_told(pointer, repository):
    for number in range(5):
        (repository / f"{number}.bin").write_bytes(pointer)
    commit(repository, {})
    with trees(repository, "HEAD") as (base, _, _):
        assert any("0.bin, 1.bin, 2.bin and 2 more" in note for note in base.notes)
