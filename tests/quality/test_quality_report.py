"""The report: figures as text, Markdown and JSON."""

import json
import math

import numpy as np

from stackwise.quality.multiple_choice import MultipleChoiceResult, Question
from stackwise.quality.perplexity import PerplexityResult, TextScore
from stackwise.quality.quality_report import QualityReport


def filled():
    report = QualityReport("tiny", ["a note"])
    questions = tuple(Question("q", ("a", "bb"), answer, "s") for answer in (0, 1, 1))
    scores = ((-1.0, -1.5),) * 3
    report.add("quiz", MultipleChoiceResult(questions, scores, subjects_of=(("all", ("s",)),)))
    report.add("text", PerplexityResult((TextScore(-8 * math.log(2), 2, 4, 4, 1),)))
    return report


def test_lines_and_markdown():
    report = filled()
    lines = list(report.lines())
    assert lines[:2] == ["tiny", "  a note"]
    assert [line.split() for line in lines[3:6]] == [
        ["quiz", "acc", "0.3333", "0.3333", "3"],
        ["quiz", "acc_norm", "0.6667", "0.3333", "3"],
        ["quiz/all", "acc", "0.3333", "0.3333", "3"],
    ]
    assert ["text", "bits_per_byte", "2.0000", "1"] in [line.split() for line in lines]
    assert "| quiz | acc | 0.3333 | 0.3333 | 3 |" in report.markdown().splitlines()
    assert "| text | token_perplexity | 16.0000 |  | 1 |" in report.markdown().splitlines()


def test_json_has_numbers_that_json_has():
    report = filled()
    report.add("worse", PerplexityResult((TextScore(-1e6, 2, 4, 4, 1),)))
    report.add_harness(
        {
            "results": {"task": {"alias": "task", "acc,none": np.float64(0.5), "acc_stderr,none": 0.1}},
            "groups": {"group": {"alias": "group", "acc,none": 0.25, "acc_stderr,none": "N/A"}},
            "n-samples": {"task": {"original": 9, "effective": 4}},
        }
    )
    found = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert found["results"]["worse"]["word_perplexity"] == "inf"
    assert found["results"]["task"]["acc,none"] == 0.5
    rows = [line.split() for line in report.lines()]
    assert ["task", "acc", "0.5000", "0.1000", "4"] in rows and ["group", "acc", "0.2500"] in rows
