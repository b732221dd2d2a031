"""YAML files: numbers of YAML 1.2.2 (section 10.3.2), documents that are refused, and round trips."""

import contextlib
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stackwise.config import ConfigError, StackWiseConfig
from stackwise.config.yaml import dump_yaml, load_yaml, read_yaml

SCALARS = {
    "12": 12,
    "-3": -3,
    "010": 10,
    "1e-4": 1e-4,
    "3E+2": 300.0,
    ".1e-3": 1e-4,
    "+1.e-4": 1e-4,
    "-1.": -1.0,
    ".inf": math.inf,
    "-.inf": -math.inf,
    "1e999": math.inf,
    "true": True,
    "null": None,
    "": None,
    "'1e-4'": "1e-4",
    **{text: text for text in ["1:30", "1_000", "0x10", "1e", "e-4", "1e-4x", "--1e-4", "1e-4.0", "1_0e-4"]},
}
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
SYNTAX = st.text("[]{}&*a:<!|>-?0. \n\"'", max_size=60).map(str.encode)


def repeated(row, first):
    """Return a document of which each line repeats the line before nine times: 9**12 values."""
    lines = [f"a0: &a0 {first}"]
    lines += [f"a{i}: &a{i} {row.format(','.join([f'*a{i - 1}'] * 9))}" for i in range(1, 13)]
    return "\n".join(lines)


def chain(length):
    return "- &c0 [1]\n" + "".join(f"- &c{i + 1} [*c{i}]\n" for i in range(length))


REFUSED = {
    "repeated key": ("x: 1\na: 1\na: 2", "key 'a' is given twice, line 3"),
    "aliases": (repeated("[{}]", "x"), "expands to more than 10,000 values, line 6"),
    "merge keys": (repeated("{{<<: [{}]}}", "{k: 1}"), "expands to more than 10,000 values, line 5"),
    "values": (f"\n\n\n[{'1,' * 10_000}]", "expands to more than 10,000 values, line 4"),
    "depth": ("\n\n\n" + "[" * 51 + "]" * 51, "nested deeper than 50 levels, line 4"),
    "open brackets": ("[" * 20_000, "nested deeper than 50 levels, line 1"),
    "chain of aliases": (chain(48), "nested deeper than 50 levels, line 1"),
    "list in itself": ("\n\n\n&a [*a]", "a value contains itself, line 4"),
    "mapping in itself": ("&a {x: *a}", "a value contains itself, line 1"),
    "digits": ("x: 1\n\n\na: " + "9" * 301, "number of more than 300 characters, line 4"),
    "key of digits": ("? " + "9" * 5000 + "\n: 1", "number of more than 300 characters, line 1"),
    "NUL": ('x: 1\n\n\na: "x\\0y"', "text with a NUL character, line 4"),
    "bytes": ("a: " + "x" * 999_998, "longer than 1,000,000 bytes"),
    "timestamp": ("x: 1\n\n\na: !!timestamp foo", "line 4: got 'foo'; allowed: a value of type timestamp"),
    "date": ("a: 2026-99-99", "line 1: got '2026-99-99'; allowed: a value of type timestamp"),
    "integer": ("a: !!int b", "line 1: got 'b'; allowed: a value of type int"),
    "empty integer": ("a: !!int ''", "line 1: got ''; allowed: a value of type int"),
    "boolean": ("a: !!bool maybe", "line 1: got 'maybe'; allowed: a value of type bool"),
    "number": ("a: !!float b", "line 1: got 'b'; allowed: a value of type float"),
    "code": ("a: !!python/object/apply:os.system ['touch executed']", "python/object/apply", "line 1"),
    "tag": ("a: !mine {}", "!mine", "line 1"),
    "tab": ("a:\n\tb: 64", "line 2"),
    "two documents": ("---\na: {}\n---\na: {}\n", "line 3"),
    "alias": ("a: *nowhere", "nowhere", "line 1"),
    "list as a key": ("? [1, 2]\n: 3", "line 1"),
}


@pytest.mark.parametrize("text, value", SCALARS.items())
def test_plain_scalar(text, value):
    found = load_yaml(text.encode())
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize("text, parts", [(text, parts) for text, *parts in REFUSED.values()], ids=REFUSED)
def test_document_is_refused_in_one_line(text, parts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as caught:
        load_yaml(text.encode())
    assert all(part in str(caught.value) for part in parts)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 2000
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"\xff\xfe", b"\0" * 64, "caf\u00e9".encode("latin-1"), b"a: \x01"])
def test_bytes_that_are_not_text_are_refused(content):
    with pytest.raises(ValueError):
        load_yaml(content)


@pytest.mark.parametrize(
    "text",
    [
        f"[{'1,' * 9_999}]",
        "[" * 50 + "]" * 50,
        chain(47),
        "9" * 300,
        '"' + "9" * 5000 + '"',
        "#" * 1_000_000,
        "{a: {a: 1}, b: {a: 1}}",
        "[&a [1], *a, *a]",
    ],
    ids=["values", "depth", "chain", "digits", "text", "bytes", "same key twice", "alias twice"],
)
def test_document_within_the_limits_is_accepted(text):
    load_yaml(text.encode())


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
        max_leaves=8,
    )
)
def test_round_trip(value):
    assert load_yaml(dump_yaml(value).encode()) == value


@pytest.mark.parametrize("text", [*SCALARS, "no", "2001-01-01", "a: b", "#x", " x ", "\n", "\ud800"])
def test_text_stays_text(text):
    assert load_yaml(dump_yaml({"a": text}).encode()) == {"a": text}


def test_mapping_keeps_its_order():
    assert dump_yaml({"b": 1, "a": 2}) == "b: 1\na: 2\n"


@given(st.binary(max_size=60) | SYNTAX)
def test_any_content_is_a_configuration_or_a_config_error(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_bytes(content)
    with contextlib.suppress(ConfigError):
        StackWiseConfig.from_yaml(path)


def test_file_is_not_read_beyond_the_limit(tmp_path):
    (tmp_path / "long.yaml").write_bytes(b"#" * 1_000_001)
    for path in (tmp_path / "long.yaml", Path("/dev/zero")):
        with pytest.raises(ValueError, match="longer than"):
            read_yaml(path)


class TestConfiguration:
    @pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n", "---\n", "null\n", "{}", "\ufeff"])
    def test_empty_file_has_the_defaults(self, tmp_path, text):
        (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
        assert StackWiseConfig.from_yaml(tmp_path / "run.yaml") == StackWiseConfig()

    def test_file_is_read_and_written(self, tmp_path):
        text = (
            "model: {d_model: &n 256, d_ff: *n}\ntraining: {optimizer: {lr: 1e-3, per_stack: {3: {lr: 1}}}}\n"
        )
        (tmp_path / "run.yaml").write_text(text)
        config = StackWiseConfig.from_yaml(str(tmp_path / "run.yaml"))
        assert (config.model.d_ff, config.training.optimizer.lr) == (256, 1e-3)
        assert config.training.optimizer.per_stack[3].lr == 1
        config.to_yaml(tmp_path / "again.yaml")
        assert StackWiseConfig.from_yaml(tmp_path / "again.yaml") == config

    @pytest.mark.parametrize(
        "text", ["model: {", "a: 1\na: 2", "- model", "3", "model: {d_ff: 0, d_model: x}"]
    )
    def test_error_names_the_file(self, tmp_path, text):
        path = tmp_path / "run.yaml"
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            StackWiseConfig.from_yaml(path)
        assert str(caught.value).startswith(f"{path}: ")

    def test_missing_file_is_not_a_config_error(self, tmp_path):
        with pytest.raises(FileNotFoundError):
            StackWiseConfig.from_yaml(tmp_path / "none.yaml")

    def test_interrupted_write_leaves_the_file_unchanged(self, tmp_path, monkeypatch):
        path = tmp_path / "run.yaml"
        StackWiseConfig().to_yaml(path)
        write = Path.write_text

        def write_half(self, text, **options):
            write(self, text[: len(text) // 2], **options)
            raise OSError("the disk is full")

        monkeypatch.setattr(Path, "write_text", write_half)
        with pytest.raises(OSError, match="full"):
            StackWiseConfig.from_dict({"model": {"d_model": 1024}}).to_yaml(path)
        assert StackWiseConfig.from_yaml(path) == StackWiseConfig() and [*tmp_path.iterdir()] == [path]
