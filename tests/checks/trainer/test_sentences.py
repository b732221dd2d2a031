"""What checks of a training step say: whole sentences, as those of a model do."""

import ast
from pathlib import Path

import pytest

from stackwise.checks import trainer

FILES = sorted(Path(trainer.__path__[0]).glob("[a-z]*.py"))


def texts(node):
    """The literal texts of an expression, each whole, with a stand-in for what is filled in."""
    if isinstance(node, ast.IfExp):
        return [*texts(node.body), *texts(node.orelse)]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        return ["".join(str(part.value) if isinstance(part, ast.Constant) else "0" for part in node.values)]
    if isinstance(node, ast.BinOp):
        return [one + other for one in texts(node.left) for other in texts(node.right)]
    return []


def said(tree):
    for node in ast.walk(tree):
        pairs = []
        if isinstance(node, ast.Call):
            pairs = [(each.arg, each.value) for each in node.keywords]
        elif isinstance(node, ast.Dict):
            keys = [each.value if isinstance(each, ast.Constant) else None for each in node.keys]
            pairs = list(zip(keys, node.values, strict=True))
        for name, value in pairs:
            if name in ("meaning", "advice"):
                yield from texts(value)


def test_it_finds_what_is_no_sentence():
    tree = ast.parse("f(meaning='a' + ('.' if x else f', {y}'), advice='Look.', where='here')")
    assert sorted(said(tree)) == ["Look.", "a, 0", "a."]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_whole_sentences(path):
    found = [text for text in said(ast.parse(path.read_text())) if text]
    assert found
    # An error, which says what it says, may come last.
    ends = (".", "?", ": 0")
    assert not [text for text in found if text[0].islower() or not text.endswith(ends)]
