"""The report: figures as text, Markdown and JSON."""

import json
import math

import numpy as np
import pytest

from stackwise.quality.cloze import ClozeResult
from stackwise.quality.multiple_choice import MultipleChoiceResult, Question
from stackwise.quality.perplexity import PerplexityResult, TextScore
from stackwise.quality.quality_report import QualityReport
from stackwise.quality.request import Request, Score


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


def test_ends_are_told_with_the_perplexity_that_they_have():
    report = QualityReport("tiny")
    ends = ClozeResult((Request("a", "b"),) * 2, (Score(-1.0, True, 1), Score(-2.0, False, 1)))
    report.add("ends", ends)
    rows = [line.split() for line in report.lines()]
    assert ["ends", "acc", "0.5000", "0.5000", "2"] in rows
    assert ["ends", "perplexity", "4.4817", "2"] in rows


def test_cells_stay_cells():
    report = QualityReport("tiny")
    report.add("a|b", ClozeResult((Request("a", "b"),), (Score(-1.0, True, 1),)))
    assert "| a\\|b | acc | 1.0000 |  | 1 |" in report.markdown().splitlines()


def test_cut_contexts_are_told():
    report = filled()
    requests = (Request("a", "b"), Request("c", "d"))
    report.add("ends", ClozeResult(requests, (Score(-1.0, True, 1, cut=1200), Score(-1.0, False, 1, cut=34))))
    note = "ends: 1,234 tokens at the beginning of contexts were left out, for want of room"
    assert report.notes == ["a note", note]
    assert f"  {note}" in report.lines() and f"- {note}" in report.markdown().splitlines()
    assert report.to_dict()["results"]["ends"]["cut_tokens"] == 1234


def test_a_cloze_that_surprises_beyond_numbers():
    found = ClozeResult((Request("a", "b"),), (Score(-1e6, False, 1),))
    assert found.perplexity == math.inf and found.cut == 0
    report = QualityReport("tiny")
    report.add("ends", found)
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["results"]["ends"]["perplexity"] == "inf"
    likely = ClozeResult((Request("a", "b"),) * 2, (Score(-1.0, True, 1), Score(-2.0, False, 1)))
    assert likely.perplexity == pytest.approx(4.4816890703)


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


def test_page_has_the_figures_and_the_notes():
    page = filled().page()
    assert (page.title, page.verdict) == ("Quality of tiny", "MEASURED")
    [section] = page.sections
    assert section.notes == ["a note"]
    assert list(section.tables[0].rows[0].cells) == ["quiz", "acc", "0.3333", "0.3333", "3"]


@pytest.mark.parametrize("ending, begin", [(".md", "# tiny"), (".json", "{"), (".html", "<!doctype html>")])
def test_file_has_the_form_of_its_ending(tmp_path, ending, begin):
    filled().write(tmp_path / f"r{ending}")
    assert (tmp_path / f"r{ending}").read_text().startswith(begin)
