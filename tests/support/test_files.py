"""Files: an atomic write leaves the new file or the old one, and nothing else."""

from pathlib import Path

import pytest

from stackwise.support.files import parse_json, write_whole


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_written_as_utf_8_in_a_folder_that_is_made(tmp_path):
    path = tmp_path / "a" / "b" / "r.md"
    write_whole(path, "größer\n")
    assert path.read_bytes() == b"gr\xc3\xb6\xc3\x9fer\n"
    assert names_in(path.parent) == ["r.md"]


def test_what_was_there_is_replaced(tmp_path):
    path = tmp_path / "r.json"
    write_whole(path, "old " * 100)
    write_whole(path, "new")
    assert path.read_text() == "new"
    assert names_in(tmp_path) == ["r.json"]


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
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


def test_a_reader_never_sees_half_a_file(tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    path.write_text("old")
    seen = []
    replace = Path.replace

    def look(self, target):
        seen.append((path.read_text(), self.read_text()))
        assert self.parent == path.parent, "a rename is atomic within one folder only"
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", look)
    write_whole(path, "new")
    assert seen == [("old", "new")]
    assert path.read_text() == "new"


def test_a_folder_in_the_place_of_the_file(tmp_path):
    (tmp_path / "r.md").mkdir()
    with pytest.raises(OSError, match=r"r\.md"):
        write_whole(tmp_path / "r.md", "new")
    assert names_in(tmp_path) == ["r.md"]


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
def test_json_that_cannot_be_used_is_a_value_error(content, message):
    with pytest.raises(ValueError, match=message):
        parse_json(content)


def test_json_is_parsed():
    assert parse_json(b'{"a": [1, 2.5, null, "\xc3\xb6"]}') == parse_json('{"a": [1, 2.5, null, "\u00f6"]}')
    assert parse_json("9" * 300) == 10**300 - 1
