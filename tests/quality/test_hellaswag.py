"""HellaSwag: how its texts are cleaned and put together."""

import numpy as np
import pytest

from stackwise.quality import Question, hellaswag_questions
from stackwise.quality.hellaswag import clean_text

ROW = {
    "activity_label": "Baking",
    "ctx_a": "[header] How to bake [title] Take flour.",
    "ctx_b": "then the Cook",
    "endings": ["stirs  it.", "sings [laughs] loud.", "leaves", "waits"],
    "label": "1",
}


def test_a_question_as_it_is_put():
    assert hellaswag_questions([ROW, ROW | {"label": 3}]) == [
        Question(
            "Baking: How to bake. Take flour. Then the cook",
            ("stirs it.", "sings loud.", "leaves", "waits"),
            answer,
        )
        for answer in (1, 3)
    ]


def test_rows_of_arrays():
    """As pandas has those of Parquet."""
    own = {"endings": np.array(ROW["endings"], object), "label": np.int64(1)}
    assert hellaswag_questions([ROW | own]) == hellaswag_questions([ROW])


@pytest.mark.parametrize(
    "text, cleaned",
    [(" a [title] b ", "a. b"), ("a [x] [y] b", "a  b"), ("a   b", "a  b"), ("a  b", "a b"), ("[", "[")],
    ids=["title", "brackets", "three spaces", "two spaces", "open"],
)
def test_cleaning(text, cleaned):
    assert clean_text(text) == cleaned


def test_cleaning_is_that_of_the_harness():
    pytest.importorskip("lm_eval")
    from lm_eval.tasks.hellaswag.utils import preprocess

    for text in (
        ROW["ctx_a"],
        *ROW["endings"],
        "a [title] b [step] c",
        "  x   y  ",
        "a [[b] c] d",
        "[title]",
    ):
        assert clean_text(text) == preprocess(text)


def test_what_is_no_question():
    with pytest.raises(ValueError, match=r"row: got .*one with 'endings'"):
        hellaswag_questions([{key: value for key, value in ROW.items() if key != "endings"}])
    with pytest.raises(
        ValueError, match="label: got ''; allowed: the number of an ending; the split test has"
    ):
        hellaswag_questions([ROW | {"label": ""}])
    with pytest.raises(ValueError, match="label: got 4"):
        hellaswag_questions([ROW | {"label": 4}])


@pytest.mark.parametrize(
    "damage, message",
    [
        ({"ctx_b": None}, "ctx_b: got None; allowed: a text"),
        ({"endings": "wxyz"}, "endings: got 'wxyz'; allowed: a list of texts"),
        ({"endings": ["[title]", "x", "y", "z"]}, "choices: got .*; allowed: no empty one"),
        ({"ctx_b": "\ud800"}, "ctx_b: got .*; allowed: a text that UTF-8 can write"),
    ],
    ids=["none", "a text", "empty", "half a character"],
)
def test_a_row_that_is_damaged_is_named(damage, message):
    with pytest.raises(ValueError, match=rf"rows\[1\], '\[header\] How to bake .*': {message}"):
        hellaswag_questions([ROW, ROW | damage])
