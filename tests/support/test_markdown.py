"""Markdown: tables of escaped cells."""

import pytest

from stackwise.support.markdown import markdown_table


@pytest.mark.parametrize(
    "header, rows, lines",
    [
        (["a"], [], ["| a |", "| --- |"]),
        (
            ["name", "size"],
            [["a", "1"], ["", "20"]],
            ["| name | size |", "| --- | ---: |", "| a | 1 |", "|  | 20 |"],
        ),
        (
            ["a|b"],
            [["one\ntwo\t three"], ["x | y"]],
            ["| a\\|b |", "| --- |", "| one two three |", "| x \\| y |"],
        ),
    ],
    ids=["empty", "aligned", "escaped"],
)
def test_table_has_a_line_for_each_row(header, rows, lines):
    assert markdown_table(header, rows, right=("size", "other")) == "\n".join(lines)
