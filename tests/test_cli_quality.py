"""`stackwise quality`: what is asked, and what is printed and written."""

import json
import shutil

import pytest

pytest.importorskip("lm_eval")

from stackwise.cli import main
from stackwise.quality import isolation_problem

MODEL = """
import torch
from stackwise.model import create_simple_rack

def build():
    torch.manual_seed(0)
    return create_simple_rack(1, 1, 16, 32, 2, 256, max_seq_len=128)
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_model.py").write_text(MODEL)
    rows = [{"context": "One is", "choices": ["less", "more"], "answer": i % 2} for i in range(4)]
    (tmp_path / "quiz.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "Some text. " * 30}) + "\n")
    return tmp_path


def run(*arguments):
    return main(["quality", "own_model.py:build", "--tokenizer", "byte", "--tasks", *arguments])


def test_files_of_ones_own(place, capsys):
    options = ["--prefix-token-id", "0", "--batch-size", "2", "--report", "out/quality"]
    assert run("quiz.jsonl,text.jsonl", *options) == 0
    printed = capsys.readouterr().out
    assert "prefixes: " in printed
    rows = [line.split() for line in printed.splitlines()]
    assert ["quiz", "acc", "0.5000", "0.2887", "4"] in rows
    found = json.loads((place / "out/quality.json").read_text())
    assert found["results"]["quiz"]["acc,none"] == 0.5
    assert found["results"]["text"]["bits_per_byte,none"] > 0
    assert "| quiz | acc | 0.5000 | 0.2887 | 4 |" in (place / "out/quality.md").read_text()
    assert ">0.2887</td>" in (place / "out/quality.html").read_text()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["quiz.jsonl", "--include", "nowhere"], "include: got 'nowhere'; allowed: a folder"),
        (["quiz.jsonl", "--eos-token-id", "5", "-6"], "eos_token_id: got -6; allowed: an integer >= 0"),
        (["quiz.jsonl", "--shots", "2"], "shots: got 2; allowed: none for quiz"),
        (["text.jsonl"], "prefix_token_id: got None"),
        (["quiz.jsonl", "--report", "a.txt"], "report: got"),
        ([","], "tasks: got [',']; allowed: at least one, or --human-eval FILE"),
        (["quiz.jsonl", "--samples", "2"], "samples: got 2; allowed: 1 without --human-eval"),
        (
            ["quiz.jsonl", "--human-eval", "sums.jsonl"],
            "execute_generated_code: got False; allowed: --execute-gen",
        ),
    ],
    ids=[
        "file",
        "include",
        "end",
        "shots",
        "prefix",
        "report",
        "comma",
        "samples",
        "programs",
    ],
)
def test_errors_in_one_line(place, capsys, arguments, message):
    assert run(*arguments) == 2
    error = capsys.readouterr().err.splitlines()[-1]  # after progress bars of the harness
    assert error.startswith("stackwise: ") and message in error


def test_a_folder_that_is_mistyped(place, capsys):
    assert main(["quality", "wieghts", "--tasks", "quiz.jsonl"]) == 2
    assert "model: got 'wieghts'; allowed: a folder that there is, MODULE:FACTORY" in capsys.readouterr().err


def test_a_tokenizer_is_wanted(place, capsys):
    assert main(["quality", "own_model.py:build", "--tasks", "quiz.jsonl"]) == 2
    assert "tokenizer: got none; allowed: byte" in capsys.readouterr().err


def test_a_folder_and_the_file_in_it_are_one_tokenizer(place):
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["<s>", "[UNK]", "One", "is", "more"]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>").save_pretrained("whole")
    (place / "alone").mkdir()
    shutil.copy("whole/tokenizer.json", "alone")
    (place / "cloze.jsonl").write_text(json.dumps({"context": "One is", "continuation": " more"}) + "\n")
    (place / "text.jsonl").write_text(json.dumps({"text": "One is more"}) + "\n")
    found = []
    for name in ("whole", "whole/tokenizer.json", "alone"):
        options = ["--tokenizer", name, "--tasks", "cloze.jsonl,text.jsonl", "--report", "out.json"]
        assert main(["quality", "own_model.py:build", *options]) == 0
        found.append(json.loads((place / "out.json").read_text())["results"])
    assert found[0] == found[1] == found[2]


def test_a_tokenizer_json_is_read_as_it_is(place, monkeypatch):
    """Not by transformers, whatever is beside it."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    inner = Tokenizer(models.WordLevel({"<s>": 0, "[UNK]": 1}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    (place / "own").mkdir()
    inner.save("own/tokenizer.json")
    config = {"bos_token": "<s>", "auto_map": {"AutoTokenizer": ["code.OwnTokenizer", None]}}
    (place / "own/tokenizer_config.json").write_text(json.dumps(config))
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", pytest.fail)
    options = ["--tokenizer", "own/tokenizer.json", "--tasks", "text.jsonl", "--report", "out.json"]
    assert main(["quality", "own_model.py:build", *options]) == 0
    assert json.loads((place / "out.json").read_text())["results"]["text"]["bits_per_byte,none"] > 0


@pytest.mark.parametrize("kind", ["hf", "stackwise"])
def test_a_folder_of_weights(place, capsys, kind):
    import torch

    from stackwise.model import create_simple_rack

    torch.manual_seed(0)
    rack = create_simple_rack(1, 1, 16, 32, 2, 256, max_seq_len=128, tie_embeddings=False)
    rack.save_pretrained(place / "weights", format=kind)
    assert main(["quality", "weights", "--tokenizer", "byte", "--tasks", "quiz.jsonl"]) == 0
    assert "quiz  acc" in capsys.readouterr().out


def test_files_of_one_name(place, capsys):
    (place / "other").mkdir()
    (place / "other/quiz.jsonl").write_text((place / "quiz.jsonl").read_text())
    assert run("quiz.jsonl", "other/quiz.jsonl", "--report", "out.json") == 0
    assert json.loads((place / "out.json").read_text())["results"].keys() == {
        "quiz.jsonl",
        "other/quiz.jsonl",
    }


def write_problem(place):
    # Whatever is written, but for a new line, is a comment.
    prompt = "def double(x):\n    '''Twice x.'''\n    return 2 * x  #"
    check = "def check(f):\n    assert f(2) == 4\n"
    row = {"task_id": "own/0", "prompt": prompt, "entry_point": "double", "test": check}
    (place / "sums.jsonl").write_text(json.dumps(row) + "\n")


@pytest.mark.skipif(isolation_problem() is not None, reason=str(isolation_problem()))
def test_programs(place, capsys):
    write_problem(place)
    options = [
        "--human-eval",
        "sums.jsonl",
        "--samples",
        "10",
        "--temperature",
        "0.5",
        "--max-new-tokens",
        "2",
    ]
    arguments = ["quality", "own_model.py:build", "--tokenizer", "byte", *options]
    assert main([*arguments, "--execute-generated-code", "--report", "out/programs"]) == 0
    rows = {
        row[1]: row for row in (line.split() for line in capsys.readouterr().out.splitlines()) if len(row) > 2
    }
    found = json.loads((place / "out/programs.json").read_text())["results"]["human_eval"]
    assert found["pass_at"].keys() == {"1", "10"} and len(found["executions"]["own/0"]) == 10
    passed = sum(each["status"] == "passed" for each in found["executions"]["own/0"])
    assert passed >= 5
    assert rows["pass@1"] == ["human_eval", "pass@1", f"{passed / 10:.4f}", "1"]
    assert rows["pass@10"][2] == "1.0000"
    assert (
        "pass@100" not in rows and "[0.0%, 100.0%] of 1 problems" in (place / "out/programs.md").read_text()
    )


def test_programs_of_one_temperature_are_one(place, capsys):
    write_problem(place)
    arguments = ["quality", "own_model.py:build", "--tokenizer", "byte", "--human-eval", "sums.jsonl"]
    more = ["--execute-generated-code", "--temperature", "0", "--samples", "2"]
    assert main([*arguments, *more]) == 2
    assert "samples: got 2; allowed: 1 with --temperature 0" in capsys.readouterr().err


def test_own_task_files(place, capsys):
    task = f"""task: own_quiz
dataset_path: json
dataset_kwargs: {{data_files: {{test: {place}/quiz.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
    (place / "tasks").mkdir()
    (place / "tasks/own.yaml").write_text(task)
    assert run("own_quiz", "--include", "tasks", "--report", "out.json") == 0
    assert json.loads((place / "out.json").read_text())["results"]["own_quiz"]["acc,none"] == 0.5
