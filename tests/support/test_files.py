"""Files: an atomic write leaves the new file or the old one, and nothing else."""

from pathlib import Path

import pytest

from stackwise.support.files import parse_json, write_whole


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


class TestWriteWhole:
    @pytest.mark.parametrize("old", [None, "old " * 100])
    @pytest.mark.parametrize(
        "text, content", [("größer\n", b"gr\xc3\xb6\xc3\x9fer\n"), ("half \ud800", b"half \\ud800")]
    )
    def test_new_content_in_utf_8_is_all_that_is_left(self, tmp_path, old, text, content):
        path = tmp_path / "a" / "b" / "r.md"
        if old is not None:
            write_whole(path, old)
        write_whole(path, text)
        assert path.read_bytes() == content
        assert names_in(path.parent) == ["r.md"]

    def test_full_disk_leaves_the_old_file(self, tmp_path, monkeypatch):
        path = tmp_path / "r.json"
        path.write_text("old")
        write_text = Path.write_text

        def full_disk(self, text, *arguments, **keywords):
            write_text(self, text[:1], *arguments, **keywords)
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_text", full_disk)
            with pytest.raises(OSError, match="No space left"):
                write_whole(path, "new")
        assert path.read_text() == "old"
        assert names_in(tmp_path) == ["r.json"]

    def test_reader_never_sees_a_part_of_a_file(self, tmp_path, monkeypatch):
        path = tmp_path / "r.json"
        path.write_text("old")
        seen = []
        replace = Path.replace

        def observed(self, target):
            seen.append((path.read_text(), self.read_text()))
            assert self.parent == path.parent, "a rename is atomic within one folder only"
            return replace(self, target)

        monkeypatch.setattr(Path, "replace", observed)
        write_whole(path, "new")
        assert seen == [("old", "new")]
        assert path.read_text() == "new"

    def test_folder_of_the_same_name_is_refused(self, tmp_path):
        (tmp_path / "r.md").mkdir()
        with pytest.raises(OSError, match=r"r\.md"):
            write_whole(tmp_path / "r.md", "new")
        assert names_in(tmp_path) == ["r.md"]


@pytest.mark.parametrize(
    "content, value",
    [
        (b'{"a": [1, 2.5, null, "\xc3\xb6"]}', {"a": [1, 2.5, None, "\u00f6"]}),
        ('{"a": "\u00f6"}', {"a": "\u00f6"}),
        ("9" * 300, 10**300 - 1),
    ],
)
def test_json_is_parsed(content, value):
    assert parse_json(content) == value


@pytest.mark.parametrize(
    "content, message",
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 301 + b"}", "an integer of 301 digits; allowed: 300"),
        (b'{"a": ' + b"9" * 5000 + b"}", "an integer of 5000 digits; allowed: 300"),
        (b"\xff\xfe", "utf-8"),
        (b"\0\0\0\0", "Expecting value"),
        (b"", "Expecting value"),
    ],
)
def test_json_that_cannot_be_used_is_refused(content, message):
    with pytest.raises(ValueError, match=message):
        parse_json(content)
