"""Tables in Markdown: what a reader of them sees as cells."""

from stackwise.support.markdown import markdown_table


def test_by_hand():
    text = markdown_table(["name", "size"], [["a", "1"], ["", "20"]], right=("size", "other"))
    assert text == "| name | size |\n| --- | ---: |\n| a | 1 |\n|  | 20 |"
    assert markdown_table(["a"], []) == "| a |\n| --- |"


def test_a_cell_stays_one_cell():
    text = markdown_table(["a|b"], [["one\ntwo\t three"], ["x | y"]])
    assert text.splitlines() == ["| a\\|b |", "| --- |", "| one two three |", "| x \\| y |"]
