"""Trained models asked the same, each against a baseline."""

import csv
import io
import json
import math

import pytest
import torch

from stackwise import StackWiseConfig, create_rack_from_config
from stackwise.benchmark.table import ComparisonTable
from stackwise.data.tokenizer import ByteTokenizer
from stackwise.quality.cloze import ClozeResult
from stackwise.quality.comparison import ModelComparison, compare_quality, paired_difference
from stackwise.quality.multiple_choice import MultipleChoiceResult, Question, score_questions
from stackwise.quality.paired import difference_of_means, difference_of_shares
from stackwise.quality.perplexity import PerplexityResult, TextScore, score_texts
from stackwise.quality.request import Request, Score
from stackwise.quality.task import Task

QUESTIONS = tuple(Question(f"question {i}", ("aaa", "b"), i % 2) for i in range(8))


def chosen(right, norm="sum"):
    """A result with these answers right."""
    scores = [
        (-1.0, -9.0) if (q.answer == 0) == good else (-9.0, -1.0)
        for q, good in zip(QUESTIONS, right, strict=True)
    ]
    return MultipleChoiceResult(QUESTIONS, tuple(scores), norm=norm)


def texts(*log_probabilities, sizes=(10, 20, 30)):
    return PerplexityResult(
        tuple(TextScore(p, n, n, n, 3) for p, n in zip(log_probabilities, sizes, strict=False))
    )


def test_difference_of_choices_is_of_the_same_questions():
    one, two = [True] * 6 + [False] * 2, [True] * 4 + [False] * 3 + [True]
    assert paired_difference(chosen(one), chosen(two)) == difference_of_shares(one, two)
    assert paired_difference(chosen(one), chosen(two), level=0.8) == difference_of_shares(one, two, level=0.8)


def test_the_task_says_by_what_choices_are_ranked():
    # By characters the first choice, three times as long, is the likelier one.
    scores = tuple((-2.0, -1.0) for _ in QUESTIONS)
    parted = {}
    for norm in ("sum", "characters"):
        first = chosen([q.answer == 0 for q in QUESTIONS], norm=norm)
        found = paired_difference(MultipleChoiceResult(QUESTIONS, scores, norm=norm), first)
        parted[norm] = found.wins, found.losses
    assert parted == {"sum": (4, 4), "characters": (0, 0)}


def test_difference_of_texts_is_in_bits_per_byte():
    one, two = texts(-10.0, -30.0, -30.0), texts(-20.0, -20.0, -60.0)
    found = paired_difference(one, two)
    assert found.difference == pytest.approx(one.bits_per_byte - two.bits_per_byte)
    bits = [
        [p / n / math.log(2) for p, n in zip(ps, (10, 20, 30), strict=True)]
        for ps in ((10, 30, 30), (20, 20, 60))
    ]
    wanted = difference_of_means(*bits, [10, 20, 30], less_is_better=True)
    assert (found.wins, found.losses) == (2, 1)  # fewer bits are better
    assert (found.low, found.high, found.wins, found.losses) == pytest.approx(
        (wanted.low, wanted.high, wanted.wins, wanted.losses)
    )


def test_difference_of_cloze():
    def result(*greedy):
        return ClozeResult(
            tuple(Request("a", str(i)) for i in range(len(greedy))),
            tuple(Score(-1.0, each, 1) for each in greedy),
        )

    assert paired_difference(result(True, True), result(True, False)).wins == 1


@pytest.mark.parametrize(
    ("one", "two", "message"),
    [
        (chosen([True] * 8), texts(-1.0), "result: got 'PerplexityResult'; allowed: MultipleChoiceResult"),
        (texts(-1.0), texts(-1.0, sizes=(11,)), "texts: got '1 others'"),
        (
            chosen([True] * 8),
            MultipleChoiceResult(QUESTIONS[::-1], chosen([True] * 8).log_probabilities),
            "questions: got 'others'; allowed: the same",
        ),
        (
            chosen([True] * 8),
            chosen([True] * 8, norm="characters"),
            "norm: got 'characters'; allowed: 'sum'",
        ),
        (
            texts(-1.0),
            PerplexityResult((TextScore(-1.0, 10, 9, 10, 3),)),
            "texts: got '1 others'; allowed: the same 1",
        ),
        (
            ClozeResult((Request("a", "b"),), (Score(-1.0, True, 1),)),
            ClozeResult((Request("a", "c"),), (Score(-1.0, True, 1),)),
            "requests: got 'others'; allowed: the same",
        ),
    ],
)
def test_of_other_examples_there_is_no_difference(one, two, message):
    with pytest.raises(ValueError, match=message):
        paired_difference(one, two)


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
def tasks():
    return [
        Task("letters", 8, lambda scorer: score_questions(scorer, QUESTIONS)),
        Task("texts", 3, lambda scorer: score_texts(scorer, ["aaaa", "some words", "été"])),
    ]


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
    own = {name: tasks[1].run(_scorer(rack)).bits_per_byte for name, rack in racks.items()}
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
    long = [Question("a long context " * 10, ("one", "two"), 0)]
    asked = [Task("long", 1, lambda scorer: score_questions(scorer, long))]
    found = compare_quality(racks, asked, ByteTokenizer(["bos", "eos"]))
    # Bytes: the space at the end goes to the choices, which then have 5; 65 fit, the last one unread.
    cut = 2 * (149 + 5 - 65)
    note = f"long: {cut} tokens at the beginning of contexts were left out, for want of room"
    assert [n for n in found.notes if "left out" in n] == [f"plain: {note}", f"fond of a: {note}"]
    assert f"- fond of a: {note}" in found.to_markdown().splitlines()


def test_of_one_text_the_table_has_no_ends(racks, tmp_path):
    asked = [Task("text", 1, lambda scorer: score_texts(scorer, ["some words"]))]
    found = compare_quality(racks, asked, ByteTokenizer(["bos", "eos"]))
    assert "[-inf, +inf]" in found.to_markdown()
    row = json.loads(found.to_json())["quality"][1]
    assert (row["difference_low"], row["difference_high"]) == ("-inf", "inf")
    pytest.importorskip("matplotlib")
    assert found.plot(tmp_path / "one.png").stat().st_size > 1000


def test_another_baseline(racks, tasks):
    found = compare_quality(racks, tasks[:1], ByteTokenizer(["bos", "eos"]), baseline="fond of a")
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
        ({"tasks": []}, r"tasks: got \[\]"),
        ({"tasks": ["letters", "letters"]}, "each once"),
        ({"baseline": "other"}, "baseline: got 'other'"),
        ({"level": 95, "tasks": [Task("never run", 1, None)]}, "level: got 95; allowed: a number above 0"),
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
    given["tasks"] = [tasks[0] if each == "letters" else each for each in given["tasks"]]
    with pytest.raises(ValueError, match=message):
        compare_quality(**given)
