"""Trained models asked the same, each against a baseline."""

import csv
import io
import json

import pytest
import torch

from stackwise import StackWiseConfig, create_rack_from_config
from stackwise.benchmark.table import ComparisonTable
from stackwise.data.tokenizer import ByteTokenizer
from stackwise.quality import ModelComparison, Tasks, compare_quality, row_task

pytest.importorskip("lm_eval")

QUESTIONS = [{"context": f"question {i}", "choices": ["aaa", "b"], "answer": i % 2} for i in range(8)]


@pytest.fixture(scope="module")
def racks():
    """Two models of bytes, of which one has been made sure of the letter a."""
    model = {
        "vocab_size": 258,
        "d_model": 16,
        "d_ff": 32,
        "n_heads": 2,
        "n_kv_heads": 2,
        "attention_type": "mha",
        "tie_embeddings": False,
        "max_seq_len": 64,
        "architecture": {"n_stacks": 1, "blocks_per_stack": 1},
    }
    made = {}
    for name in ("plain", "fond of a"):
        torch.manual_seed(0)
        made[name] = create_rack_from_config(StackWiseConfig.from_dict({"model": model})).eval()
    with torch.no_grad():
        # Logits of a rise with the first number of the hidden state, which is made 1.
        norm, head = made["fond of a"].final_norm, made["fond of a"].lm_head
        norm.weight.zero_()
        norm.weight[0] = 1.0
        head.weight[ord("a"), 0] = 0.0
        head.weight[ord("a")] = made["fond of a"].lm_head.weight[ord("b")]
    return made


@pytest.fixture(scope="module")
def letters():
    return row_task("letters", QUESTIONS)


@pytest.fixture(scope="module")
def tasks(letters):
    return Tasks([letters, row_task("texts", [{"text": text} for text in ("aaaa", "some words", "été")])])


def speed(*names, baseline):
    rows = tuple(
        {
            "architecture": name,
            "workload": "forward 1 x 8",
            "tokens_per_second": 1000.0 * (i + 1),
            "speed_up": 1.0 + i,
            "speed_up_low": 0.9 + i,
            "speed_up_high": 1.1 + i,
        }
        for i, name in enumerate(names)
    )
    return ComparisonTable(rows, baseline)


def test_compared(racks, tasks, tmp_path):
    table = speed("plain", "fond of a", baseline="plain")
    found = compare_quality(racks, tasks, ByteTokenizer(["bos", "eos"]), speed=table, batch_size=4)
    assert found.architectures == ["plain", "fond of a"]
    assert found.tasks == ["letters", "texts"]
    assert found.row("plain", "letters").difference is None
    own = {name: tasks.results(_scorer(rack))["texts"].value for name, rack in racks.items()}
    for name in racks:
        assert found.row(name, "texts").value == pytest.approx(own[name])
    row = found.row("fond of a", "texts")
    assert row.less_is_better
    assert row.difference.difference == pytest.approx(own["fond of a"] - own["plain"])
    assert row.difference.examples == 3
    markdown = found.to_markdown().splitlines()
    assert markdown[0] == (
        "| architecture | forward 1 x 8, tokens/s | speed-up | letters, acc | difference "
        "| texts, bits_per_byte | difference |"
    )
    assert markdown[2].startswith("| plain | 1,000 | baseline | ")
    assert markdown[3].startswith("| fond of a | 2,000 | 2.000 [1.900, 2.100] | ")
    assert str(row.difference) in markdown[3]
    lines = list(csv.DictReader(io.StringIO(found.to_csv(tmp_path / "out" / "table.csv"))))
    assert len(lines) == 4 + 2
    assert lines[3]["difference"] == str(row.difference.difference)
    assert (tmp_path / "out" / "table.csv").exists()
    values = json.loads(found.to_json())
    assert [each["task"] for each in values["quality"]] == ["letters", "letters", "texts", "texts"]
    assert values["speed"]["baseline"] == "plain"
    pytest.importorskip("matplotlib")
    assert "letters (acc)" in _text(found.plot(tmp_path / "plot.svg"))
    page = found.page()
    assert (page.title, page.summary) == ("Comparison with plain", "2 models, 2 tasks, baseline plain")
    assert "letters (acc)" in _text(found.page().write(tmp_path / "page.html"))
    without = ModelComparison(found.quality, "plain")
    assert "speed-up" not in without.to_markdown()
    assert without.plot(tmp_path / "alone.png").stat().st_size > 1000


def _text(path):
    # Letters are drawn as paths, with the text in a comment.
    return path.read_text()


def _scorer(rack):
    from stackwise.quality.scoring import Scorer

    return Scorer(rack, ByteTokenizer(["bos", "eos"]))


def test_cut_contexts_are_told(racks):
    long = row_task("long", [{"context": "a long context " * 10, "choices": ["one", "two"], "answer": 0}])
    found = compare_quality(racks, Tasks([long]), ByteTokenizer(["bos", "eos"]))
    # Bytes: the space at the end goes to the choices, which then have 5; 65 fit, the last one unread.
    cut = 2 * (149 + 5 - 65)
    note = f"{cut} tokens at the beginning of contexts were cut, because sequences were too long"
    assert [n for n in found.notes if "cut" in n] == [f"plain: {note}", f"fond of a: {note}"]
    assert f"- fond of a: {note}" in found.to_markdown().splitlines()


def test_of_one_text_the_table_has_no_ends(racks, tmp_path):
    asked = Tasks([row_task("text", [{"text": "some words"}])])
    found = compare_quality(racks, asked, ByteTokenizer(["bos", "eos"]))
    assert "[-inf, +inf]" in found.to_markdown()
    row = json.loads(found.to_json())["quality"][1]
    assert (row["difference_low"], row["difference_high"]) == ("-inf", "inf")
    pytest.importorskip("matplotlib")
    assert found.plot(tmp_path / "one.png").stat().st_size > 1000


def test_another_baseline(racks, letters):
    found = compare_quality(racks, Tasks([letters]), ByteTokenizer(["bos", "eos"]), baseline="fond of a")
    assert found.architectures[0] == "fond of a"
    assert found.row("plain", "letters").difference is not None


def test_a_model_is_no_better_than_itself(racks, tasks):
    twice = {"one": racks["plain"], "two": racks["plain"]}
    found = compare_quality(
        twice, tasks, {"one": ByteTokenizer(["bos", "eos"]), "two": ByteTokenizer(["bos", "eos"])}
    )
    for task in found.tasks:
        assert found.row("two", task).difference.difference == 0.0
        assert found.row("two", task).difference.standing(0.5) == "not worse"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"models": {}}, "models: got {}"),
        ({"baseline": "other"}, "baseline: got 'other'"),
        ({"level": 95}, "level: got 95; allowed: a number above 0"),
        ({"tokenizer": {"plain": ByteTokenizer(["bos", "eos"])}}, r"tokenizer: got \['fond of a'\]"),
        ({"speed": speed("plain", "fond of a", baseline="fond of a")}, "speed.baseline: got 'fond of a'"),
        (
            {"speed": speed("plain", "x", baseline="plain")},
            r"architectures of the speed table: got \['fond of a', 'x'\]",
        ),
    ],
)
def test_refused(change, message, racks, tasks):
    given = {"models": racks, "tasks": tasks, "tokenizer": ByteTokenizer(["bos", "eos"])} | change
    with pytest.raises(ValueError, match=message):
        compare_quality(**given)
