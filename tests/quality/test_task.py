"""Tasks: their data in the published formats, on disk or from Hugging Face, and files of one's own."""

import json
from pathlib import Path

import pytest

from stackwise.quality import Scorer, load_task, load_tasks
from stackwise.quality.task_file import read_rows

MMLU = [
    {"question": f"What is {i}?", "choices": ["a", "b", "c", "d"], "answer": i % 4, "subject": subject}
    for subject in ("anatomy", "virology")
    for i in range(3)
]
HELLASWAG = [
    {
        "activity_label": "A",
        "ctx_a": f"Text {i}.",
        "ctx_b": "then",
        "endings": list("wxyz"),
        "label": str(i % 4),
    }
    for i in range(3)
]


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_parquet(path, rows):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


@pytest.fixture
def folder(tmp_path):
    write_lines(tmp_path / "mmlu/mmlu_test.jsonl", MMLU)
    write_lines(tmp_path / "mmlu/mmlu_dev.jsonl", MMLU)
    write_lines(tmp_path / "hellaswag/hellaswag_val.jsonl", HELLASWAG)
    return tmp_path


def test_both_formats_give_the_same_questions(folder, tmp_path):
    other = tmp_path / "parquet"
    # As Hugging Face has them: all subjects together, and each by itself beside them.
    write_parquet(other / "mmlu/all/test-00000-of-00001.parquet", MMLU)
    write_parquet(other / "mmlu/all/dev-00000-of-00001.parquet", MMLU)
    write_parquet(other / "mmlu/anatomy/test-00000-of-00001.parquet", MMLU[:3])
    write_parquet(other / "hellaswag/data/validation-00000-of-00001.parquet", HELLASWAG)
    assert read_rows(other / "mmlu/all/test-00000-of-00001.parquet") == MMLU
    for name, count in (("mmlu", 6), ("hellaswag", 3)):
        shots = {"shots": 2} if name == "mmlu" else {}
        one, two = (load_task(name, place, **shots) for place in (folder, other))
        assert one.examples == two.examples == count


def test_results_by_task(folder, llama, byte_tokenizer):
    scorer = Scorer(llama, byte_tokenizer, max_length=250)
    mmlu = load_task("mmlu", folder, shots=0).run(scorer)
    assert {name: each.count for name, each in mmlu.by_group().items()} == {"stem": 3, "other": 3}
    assert mmlu.metric == "acc"
    hellaswag = load_task("hellaswag", folder).run(scorer)
    assert hellaswag.metric == "acc_norm" and hellaswag.figure.count == 3


def test_a_limit_is_of_each_subject(folder):
    assert load_task("mmlu", folder, shots=1, limit=2).examples == 4
    assert load_task("hellaswag", folder, limit=2).examples == 2
    with pytest.raises(ValueError, match="limit: got 0"):
        load_task("mmlu", folder, limit=0)


def test_files_of_ones_own(tmp_path, llama, byte_tokenizer):
    write_lines(
        tmp_path / "choice.jsonl", [{"context": "q", "choices": ["a", "b"], "answer": 1, "subject": "s"}]
    )
    write_lines(tmp_path / "cloze.jsonl", [{"context": "q", "continuation": " a"}])
    write_parquet(tmp_path / "text.parquet", [{"text": "some text"}, {"text": "more"}])
    scorer = Scorer(llama, byte_tokenizer)
    names = [str(tmp_path / name) for name in ("choice.jsonl", "cloze.jsonl", "text.parquet")]
    tasks = load_tasks(names)
    assert [(task.name, task.examples) for task in tasks] == [("choice", 1), ("cloze", 1), ("text", 2)]
    choice, cloze, text = (task.run(scorer) for task in tasks)
    assert choice.by_subject().keys() == {"s"}
    assert cloze.scores == tuple(scorer.score([("q", " a")]))
    assert [each.tokens for each in text.texts] == [9, 4]


def test_a_space_that_choices_begin_with_is_the_one_between(tmp_path, llama, byte_tokenizer):
    scorer, found = Scorer(llama, byte_tokenizer), []
    for begin in ("", " "):
        write_lines(
            tmp_path / "own.jsonl", [{"context": "q", "choices": [begin + "ab", begin + "c"], "answer": 0}]
        )
        [question] = load_task(str(tmp_path / "own.jsonl")).run(scorer).log_probabilities
        found.append(question)
    asked = [score.log_probability for score in scorer.score([("q", " ab"), ("q", " c")])]
    assert list(found[0]) == list(found[1]) == pytest.approx(asked)


def test_files_of_one_name_are_called_by_their_paths(tmp_path):
    names = [str(tmp_path / f"{place}.jsonl") for place in ("one/quiz", "two/quiz", "two/other")]
    for name in names:
        write_lines(Path(name), [{"text": name}])
    assert [task.name for task in load_tasks(names)] == [*names[:2], "other"]
    assert [task.name for task in load_tasks(names[1:])] == ["quiz", "other"]


def test_shots_are_of_mmlu_alone(folder):
    assert [task.examples for task in load_tasks(["mmlu", "hellaswag"], folder, shots=1, limit=2)] == [4, 2]
    with pytest.raises(ValueError, match="shots: got 1; allowed: none, since only mmlu has examples"):
        load_tasks(["hellaswag"], folder, shots=1)


def test_both_formats_in_one_folder_are_refused(folder):
    (folder / "hellaswag/validation-00000-of-00001.parquet").write_bytes(b"")
    with pytest.raises(ValueError, match=r"files of the split validation: got .*\.parquet") as caught:
        load_task("hellaswag", folder)
    assert "hellaswag_val.jsonl" in str(caught.value)


@pytest.mark.parametrize(
    "content, message",
    [
        ('{"question": "?"}', "got rows with 'question'; allowed: context, choices and answer; context and"),
        ('{"context": "q", "choices": ["a", "b"], "answer": 7}', "answer: got 7; allowed: 0 to 1"),
        ('{"continuation": "q"}', "own.jsonl, row 1: context: got None; allowed: a text"),
        (
            '{"context": "q", "choices": ["a", "b"], "answer": 0}\n\n{"context": "q", "choices": "ab"}',
            "own.jsonl, row 2: choices: got 'ab'; allowed: a list of texts",
        ),
        ('{"context": "q", "choices": ["a", 2], "answer": 0}', r"row 1: choices: got \['a', 2\]"),
        ('{"context": "q", "choices": ["a", "b"], "answer": "1"}', "row 1: answer: got '1'; allowed: an"),
        ('{"context": null, "choices": ["a", "b"], "answer": 1}', "row 1: context: got None"),
        ('{"context": "q", "continuation": null}', "row 1: continuation: got None"),
        ('{"context": "q", "continuation": ""}', "row 1: continuation: got ''; allowed: a text that is not"),
        ('{"text": "a"}\n{"text": null}', "own.jsonl, row 2: text: got None; allowed: a text"),
        ('{"text": "a"}\n{"text": ""}', "own.jsonl, row 2: text: got ''; allowed: a text that is not empty"),
        ('{"text": "\\ud800"}', "own.jsonl, row 1: text: got .*; allowed: a text that UTF-8 can write"),
        ("{", "own.jsonl:1: no JSON"),
        ("[1]", "own.jsonl:1: got .*a JSON object"),
        ("", "no row"),
    ],
    ids=[
        "keys",
        "answer",
        "context",
        "choices as text",
        "a choice",
        "answer as text",
        "no context",
        "no continuation",
        "empty continuation",
        "no text",
        "empty text",
        "half a character",
        "damaged",
        "list",
        "empty",
    ],
)
def test_files_that_are_none(tmp_path, content, message):
    (tmp_path / "own.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        load_task(str(tmp_path / "own.jsonl"))


def test_a_file_of_other_letters_is_named(tmp_path):
    (tmp_path / "own.jsonl").write_bytes('{"text": "été"}'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"own\.jsonl: no UTF-8: 'utf-8' codec"):
        load_task(str(tmp_path / "own.jsonl"))


def test_a_row_is_named_by_its_place_in_the_file(tmp_path):
    rows = [{"text": "a"}, {"text": "b"}, {"text": 3, "subject": "other"}]
    write_lines(tmp_path / "own.jsonl", rows)
    with pytest.raises(ValueError, match=r"own\.jsonl, row 3: text: got 3"):
        load_task(str(tmp_path / "own.jsonl"), limit=1)


def test_the_same_rows_do_not_count_twice(folder):
    write_lines(folder / "mmlu/old/test.jsonl", MMLU)
    with pytest.raises(ValueError, match=r"files of the split test: got '.*each once: both have the same"):
        load_task("mmlu", folder, shots=0)
    write_lines(folder / "mmlu/old/test.jsonl", MMLU[:2])  # parts of a whole may well be
    assert load_task("mmlu", folder, shots=0).examples == 8


def test_no_such_task_or_file(tmp_path):
    with pytest.raises(ValueError, match=r"task: got 'arc'; allowed: 'mmlu', 'hellaswag', or a \.jsonl"):
        load_task("arc")
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl: no such file"):
        load_task(str(tmp_path / "none.jsonl"))
    with pytest.raises(ValueError, match=r"tasks: got .*each once"):
        load_tasks(["mmlu", "mmlu"], tmp_path)
    with pytest.raises(ValueError, match="shots of hellaswag: got 2"):
        load_task("hellaswag", tmp_path, shots=2)
    (tmp_path / "bad.parquet").write_bytes(b"no")
    pytest.importorskip("pyarrow")
    with pytest.raises(ValueError, match=r"bad\.parquet: no Parquet file"):
        load_task(str(tmp_path / "bad.parquet"))


def test_missing_files_are_named_with_what_to_download(folder):
    (folder / "mmlu/mmlu_dev.jsonl").unlink()
    with pytest.raises(FileNotFoundError) as caught:
        load_task("mmlu", folder)
    for part in (
        "no file of the split dev",
        "huggingface.co/datasets/cais/mmlu",
        "all/*dev*.parquet",
        str(folder),
    ):
        assert part in str(caught.value)


def test_offline_is_told_with_what_to_download(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def load_dataset(*arguments, split):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(FileNotFoundError) as caught:
        load_task("hellaswag")
    for part in ("no route to host", "Rowan/hellaswag", "*validation*.parquet", "--data FOLDER"):
        assert part in str(caught.value)


def test_online_the_published_repositories_are_asked(monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(*arguments, split):
        asked.append((*arguments, split))
        return MMLU if "cais/mmlu" in arguments else HELLASWAG

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_task("mmlu", shots=3).examples == 6
    assert load_task("hellaswag").examples == 3
    assert asked == [
        ("cais/mmlu", "all", "test"),
        ("cais/mmlu", "all", "dev"),
        ("Rowan/hellaswag", "validation"),
    ]
