"""Multiple choice: what counts as chosen, by which length, of which subjects."""

import math

import numpy as np
import pytest

from stackwise.quality import Proportion, Question, Scorer, score_questions
from stackwise.quality.multiple_choice import MultipleChoiceResult

# Log-probabilities, and which choice is likeliest as a whole, by character and by byte.
QUESTIONS = (
    Question("q", ("ab", "abcdefgh"), 1, "x"),  # -4 and -8: 0 as a whole, 1 by character (-2, -1)
    Question("q", ("éé", "abc"), 0, "x"),  # -4 and -5: 0; by character -2, -1.67: 1; by byte -1, -1.67: 0
    Question("q", ("a", "b"), 1, "y"),  # a tie, of which the first is taken
)
SCORES = ((-4.0, -8.0), (-4.0, -5.0), (-1.0, -1.0))


def result(**options):
    return MultipleChoiceResult(QUESTIONS, SCORES, **options)


def test_by_hand():
    assert result().correct().tolist() == [False, True, False]
    assert result().correct("characters").tolist() == [True, False, False]
    assert result().correct("bytes").tolist() == [True, True, False]
    assert result(norm="bytes").figure == Proportion(2, 3)


def test_subjects_weigh_what_their_size_is():
    found = result(subjects_of=(("both", ("x", "y")), ("one", ("y",)), ("none", ("z",))))
    assert found.by_subject() == {"x": Proportion(1, 2), "y": Proportion(0, 1)}
    # Not the mean of 1/2 and 0.
    assert found.by_group() == {"both": Proportion(1, 3), "one": Proportion(0, 1)}
    shown = found.to_dict()
    assert shown["acc"]["value"] == pytest.approx(1 / 3)
    assert shown["groups"]["both"]["examples"] == 3 and shown["subjects"]["x"]["value"] == 0.5


def test_standard_error_is_that_of_a_mean():
    hits = np.array([True, False, True, True, False])
    found = Proportion.of(hits)
    assert found.standard_error == pytest.approx(np.std(hits, ddof=1) / math.sqrt(5))
    assert Proportion(1, 1).standard_error is None
    assert str(Proportion(1, 2)) == "0.5000 ± 0.5000"
    with pytest.raises(ValueError, match="examples: got 0"):
        Proportion.of(hits[:0])


def test_a_model_is_asked_for_each_choice(llama, byte_tokenizer):
    questions = [
        Question("One and one is", ("two", "three", "four"), 0),
        Question("", ("a", "b"), 1, separator=""),
    ]
    scorer = Scorer(llama, byte_tokenizer)
    found = score_questions(scorer, questions)
    requests = [
        request
        for question in questions
        for request in scorer.score([(question.context, question.separator + c) for c in question.choices])
    ]
    flat = [score for scores in found.log_probabilities for score in scores]
    assert flat == pytest.approx([score.log_probability for score in requests], abs=1e-5)
    assert [len(scores) for scores in found.log_probabilities] == [3, 2]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"choices": ("a",)}, "choices: got"),
        ({"choices": ("a", "")}, "choices: got"),
        ({"answer": 2}, "answer: got 2; allowed: 0 to 1"),
        ({"answer": -1}, "answer: got -1"),
        ({"answer": "0"}, "answer: got '0'"),
    ],
    ids=str,
)
def test_what_is_no_question(changes, message):
    with pytest.raises(ValueError, match=message):
        Question(**{"context": "q", "choices": ("a", "b"), "answer": 0, **changes})


def test_errors(llama, byte_tokenizer):
    with pytest.raises(ValueError, match="questions: got 0"):
        score_questions(Scorer(llama, byte_tokenizer), [])
    with pytest.raises(ValueError, match="norm: got 'tokens'; allowed: 'sum', 'characters', 'bytes'"):
        result().correct("tokens")
