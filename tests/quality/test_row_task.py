"""Row task: what rows may be, and which requests they become."""

import json

import numpy as np
import pytest

pytest.importorskip("lm_eval")

from stackwise.quality import Scorer, Tasks, row_task

CHOICE = {"context": "q", "choices": ["a", "bb"], "answer": 1}


def requests(task):
    """Return the context and the continuation of each request of a task."""
    task.set_config("num_fewshot", 0)
    task.build_all_requests()
    return [instance.args for instance in task.instances]


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ([CHOICE | {"other": 1}], [("q", " a"), ("q", " bb")]),
        ([CHOICE | {"choices": [" a", " bb"]}], [("q", " a"), ("q", " bb")]),
        ([CHOICE | {"choices": (" a", "bb"), "answer": np.int64(1)}], [("q", "  a"), ("q", " bb")]),
        ([CHOICE | {"context": ""}], [("", " a"), ("", " bb")]),
        ([CHOICE | {"context": "{{a}}\n"}], [("{{a}}\n", " a"), ("{{a}}\n", " bb")]),
        ([{"context": "q", "continuation": " a"}], [("q", " a")]),
        ([{"text": "one"}, {"text": "[1]"}], [("one",), ("[1]",)]),
    ],
    ids=["choices", "spaces", "one space", "no context", "braces", "continuation", "texts"],
)
def test_requests(rows, wanted):
    assert requests(row_task("own", rows)) == wanted


def test_settings_are_those_of_task_files():
    rows = [CHOICE | {"choices": [" a", " bb"]}]
    assert requests(row_task("own", rows, target_delimiter="")) == [("q", " a"), ("q", " bb")]


def test_metrics(llama, byte_tokenizer):
    rows = {
        "choices": [CHOICE, CHOICE | {"answer": 0}],
        "ends": [{"context": "The end of a ", "continuation": "story"}] * 2,
        "texts": [{"text": "Café au lait"}],
    }
    tasks = Tasks(row_task(name, some) for name, some in rows.items())
    found = tasks.run(Scorer(llama, byte_tokenizer))["results"]
    assert found["choices"]["acc,none"] == found["choices"]["acc_bytes,none"] == 0.5
    [score] = Scorer(llama, byte_tokenizer).score([("The end of a ", "story")])
    assert found["ends"]["perplexity,none"] == pytest.approx(np.exp(-score.log_probability), rel=1e-4)
    texts = found["texts"]
    assert 2 ** texts["bits_per_byte,none"] == pytest.approx(texts["byte_perplexity,none"])


def test_a_surprise_beyond_numbers_is_infinite(llama, byte_tokenizer):
    # Random weights need more than 709 nats for it.
    ends = row_task("ends", [{"context": "a", "continuation": "xq" * 110}])
    assert Tasks([ends]).run(Scorer(llama, byte_tokenizer))["results"]["ends"]["perplexity,none"] == np.inf


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "rows: got 0; allowed: at least one"),
        ([5], "row 1: got 5; allowed: an object with choices, context, answer; or cont"),
        ([{"question": "a"}], r"row 1: got \{'question': 'a'\}; allowed: an object with"),
        ([CHOICE, 5], "row 2: got 5"),
        ([CHOICE | {"choices": ["a"]}], "row 1: choices: got .*at least two texts"),
        ([CHOICE | {"choices": ["a", ""]}], "row 1: choices: got"),
        ([CHOICE | {"choices": "ab"}], "row 1: choices: got 'ab'"),
        ([CHOICE | {"answer": 2}], "row 1: answer: got 2; allowed: an integer, 0 to 1"),
        ([CHOICE | {"answer": True}], "row 1: answer: got True"),
        ([CHOICE, CHOICE | {"answer": "1"}], "row 2: answer: got '1'"),
        ([{"context": None, "continuation": "a"}], "row 1: context: got None; allowed: a text"),
        ([{"context": "a", "continuation": ""}], "row 1: continuation: got ''; allowed: a text that is not"),
        ([{"text": "half \ud800"}], "surrogates not allowed"),
    ],
)
def test_refused(rows, message):
    with pytest.raises(ValueError, match=message):
        row_task("own", rows)


def test_files_of_both_formats(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    (tmp_path / "one.jsonl").write_text(json.dumps(CHOICE) + "\n\n" + json.dumps(CHOICE))
    parquet.write_table(pyarrow.Table.from_pylist([CHOICE] * 2), tmp_path / "two.parquet")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/one.jsonl").write_text(json.dumps(CHOICE))
    names = [str(tmp_path / name) for name in ("one.jsonl", "two.parquet", "other/one.jsonl")]
    tasks = Tasks(names)
    assert list(tasks.each) == [names[0], "two", names[2]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\n{"text": ""}', r"own\.jsonl: row 2: text: got ''"),
        (b'{"text": "a"}\n{', r"own\.jsonl: line 2: no JSON"),
        ('{"text": "été"}'.encode("latin-1"), r"own\.jsonl: 'utf-8' codec"),
    ],
)
def test_damaged_files_are_named(content, message, tmp_path):
    (tmp_path / "own.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        Tasks([str(tmp_path / "own.jsonl")])
    (tmp_path / "own.parquet").write_bytes(content)
    with pytest.raises(ValueError, match=r"own\.parquet: .*Parquet"):
        Tasks([str(tmp_path / "own.parquet")])
