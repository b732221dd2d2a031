"""The report: figures as text, Markdown and JSON."""

import json
import math

import numpy as np
import pytest

from stackwise.quality.quality_report import QualityReport

FOUND = {
    "results": {
        "quiz": {
            "alias": "quiz",
            "acc,none": np.float64(1 / 3),
            "acc_stderr,none": 1 / 3,
            "acc_norm,none": 0.5,
        },
        "part": {"alias": "part", "acc,none": 0.25, "acc_stderr,none": 0.1},
        "group": {"alias": "group", "acc,none": 0.25, "acc_stderr,none": "N/A"},
        "text": {"alias": "text", "bits_per_byte,none": 2.0, "word_perplexity,none": math.inf},
    },
    "groups": {"group": {"alias": "group", "acc,none": 0.25, "acc_stderr,none": "N/A"}},
    "group_subtasks": {"group": ["part"]},
    "n-samples": {"quiz": {"original": 9, "effective": 3}, "text": {"original": 1, "effective": 1}},
}


def filled():
    report = QualityReport("tiny", ["a note"])
    report.add_tasks(FOUND)
    return report


def test_lines_and_markdown():
    report = filled()
    lines = list(report.lines())
    assert lines[:2] == ["tiny", "  a note"]
    assert [line.split() for line in lines[3:]] == [
        ["quiz", "acc", "0.3333", "0.3333", "3"],
        ["quiz", "acc_norm", "0.5000", "3"],
        ["group", "acc", "0.2500"],
        ["text", "bits_per_byte", "2.0000", "1"],
        ["text", "word_perplexity", "inf", "1"],
    ]
    assert "| quiz | acc | 0.3333 | 0.3333 | 3 |" in report.markdown().splitlines()
    assert "| text | bits_per_byte | 2.0000 |  | 1 |" in report.markdown().splitlines()


def test_cells_stay_cells():
    report = QualityReport("tiny")
    report.add_tasks({"results": {"a|b": {"acc,none": 1.0}}})
    assert "| a\\|b | acc | 1.0000 |  |  |" in report.markdown().splitlines()


def test_json_has_numbers_that_json_has():
    found = json.loads(json.dumps(filled().to_dict(), allow_nan=False))["results"]
    assert found["text"]["word_perplexity,none"] == "inf"
    assert found["part"]["acc,none"] == 0.25
    assert found["quiz"]["acc,none"] == pytest.approx(1 / 3)


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
