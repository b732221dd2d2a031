"""MMLU: how a question is put, which examples come before it, and what subjects there are."""

import numpy as np
import pytest

from stackwise.quality import Question, mmlu_questions
from stackwise.quality.mmlu import SUBJECTS


def row(question, answer=2, subject="high_school_physics"):
    return {"question": question, "choices": ["p", "q", "r", "s"], "answer": answer, "subject": subject}


def test_a_question_as_it_is_put():
    examples = [row("Other?", 0, "anatomy"), row(" First? ", 1), row("Second?", "D"), row("Third?", 0)]
    [question] = mmlu_questions([row("Which?")], examples, shots=2)
    assert question == Question(
        "The following are multiple choice questions (with answers) about high school physics.\n\n"
        "First?\nA. p\nB. q\nC. r\nD. s\nAnswer: B\n\n"
        "Second?\nA. p\nB. q\nC. r\nD. s\nAnswer: D\n\n"
        "Which?\nA. p\nB. q\nC. r\nD. s\nAnswer:",
        ("A", "B", "C", "D"),
        2,
        "high_school_physics",
    )
    assert [request.continuation for request in question.requests] == [" A", " B", " C", " D"]


@pytest.mark.parametrize("choices", [np.array(list("pqrs")), np.array(list("pqrs"), object)], ids=["U", "O"])
@pytest.mark.parametrize("answer", [np.int64(2), np.str_("C"), np.array(2)], ids=["int64", "str", "array"])
def test_rows_of_arrays(choices, answer):
    """As pandas has those of Parquet."""
    [question] = mmlu_questions([row("Which?", answer) | {"choices": choices}], shots=0)
    assert question == mmlu_questions([row("Which?")], shots=0)[0]
    assert type(question.answer) is int


def test_without_examples():
    [question] = mmlu_questions([row("Which?", "2")], shots=0)
    assert "Answer:" in question.context and question.context.count("Answer") == 1
    assert question.answer == 2


@pytest.mark.parametrize(
    "rows, options, message",
    [
        ([{"question": "?"}], {"shots": 0}, "row: got .*one with 'choices'"),
        (
            [row("?")],
            {"shots": 1},
            "shots: got 1; allowed: at most 0, as many as the split dev has",
        ),
        ([row("?", 4)], {"shots": 0}, "answer: got 4; allowed: 0 to 3"),
        ([row("?", "E")], {"shots": 0}, "answer: got 'E'; allowed: A to D"),
        ([row("?") | {"choices": ["a"]}], {"shots": 0}, "choices: got 1; allowed: 4"),
        ([row("?"), row("Why?", None)], {"shots": 0}, r"rows\[1\], 'Why\?': answer: got None; allowed: an"),
        ([row("?", 1.7)], {"shots": 0}, "answer: got 1.7; allowed: an integer"),
        ([row("?", float("nan"))], {"shots": 0}, "answer: got nan; allowed: an integer"),
        ([row("?", True)], {"shots": 0}, "answer: got True; allowed: an integer"),
        ([row("?", np.True_)], {"shots": 0}, "answer: got np.True_; allowed: an integer"),
        ([row("?", -1)], {"shots": 0}, "answer: got -1; allowed: 0 to 3"),
        ([row("?") | {"choices": "ABCD"}], {"shots": 0}, "choices: got 'ABCD'; allowed: a list of texts"),
        ([row("?") | {"choices": None}], {"shots": 0}, "choices: got None; allowed: a list of texts"),
        ([row("?") | {"choices": {*"ABCD"}}], {"shots": 0}, "choices: got {.*}; allowed: a list of texts"),
        ([row("?") | {"choices": np.arange(4)}], {"shots": 0}, "choices: got array.*; allowed: a list of te"),
        (
            [row("?") | {"choices": dict.fromkeys("ABCD")}],
            {"shots": 0},
            "choices: got {.*}; allowed: a list of texts",
        ),
        ([row(None)], {"shots": 0}, r"rows\[0\], None: question: got None; allowed: a text"),
        ([row("?", subject=None)], {"shots": 0}, "subject: got None; allowed: a text"),
        ([row("half \ud800")], {"shots": 0}, r"question: got 'half \\ud800'; allowed: a text that UTF-8"),
    ],
)
def test_what_is_no_question(rows, options, message):
    with pytest.raises(ValueError, match=message):
        mmlu_questions(rows, **options)


def test_an_example_that_is_damaged_is_named():
    with pytest.raises(ValueError, match=r"examples\[1\], 'Who\?': answer: got None"):
        mmlu_questions([row("?")], [row("?"), row("Who?", None)], shots=1)


def test_there_are_57_subjects_in_four_groups():
    assert sum(map(len, SUBJECTS.values())) == 57 == len({s for some in SUBJECTS.values() for s in some})


def test_groups_are_those_of_the_harness():
    lm_eval = pytest.importorskip("lm_eval")
    from pathlib import Path

    import yaml

    folder = Path(lm_eval.__file__).parent / "tasks/mmlu/default"
    found = {}
    for file in sorted(folder.glob("mmlu_*.yaml")):
        said = yaml.safe_load(file.read_text())
        group = said["tag"].removeprefix("mmlu_").removesuffix("_tasks")
        found.setdefault(group, []).append(said["dataset_name"])
        subject = said["dataset_name"].replace("_", " ")
        [question] = mmlu_questions([row("?", subject=said["dataset_name"])], shots=0)
        assert question.context.startswith(said["description"]) and subject in said["description"]
    assert {group: tuple(subjects) for group, subjects in found.items()} == SUBJECTS
