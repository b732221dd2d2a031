"""Tasks: tasks of lm-evaluation-harness from a folder, from files and from rows."""

import json
import os
import random

import numpy as np
import pytest

pytest.importorskip("lm_eval")

from stackwise.quality import Scorer, Tasks, row_task
from stackwise.quality.tasks import TaskResult, cut_notes

ROWS = [
    {"context": f"{i} and one is", "choices": ["a lot", "little", "much more than that"], "answer": i % 3}
    for i in range(5)
]
MEAN = "aggregation: mean, higher_is_better: true"
TASKS = {
    "own_choice": f"""
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc, {MEAN}}}, {{metric: acc_norm, {MEAN}}}]
""",
    "own_texts": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{context}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    "own_written": f"""
output_type: generate_until
doc_to_text: "{{{{context}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 4, num_beams: 1}}
metric_list: [{{metric: exact_match, {MEAN}}}]
""",
    "own_beams": f"""
output_type: generate_until
doc_to_text: "{{{{context}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], num_beams: 4}}
metric_list: [{{metric: exact_match, {MEAN}}}]
""",
    "own_long": f"""
output_type: generate_until
doc_to_text: "{{{{context}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"]}}
metric_list: [{{metric: exact_match, {MEAN}}}]
""",
    "own_ends": """
output_type: loglikelihood
doc_to_text: "{{context}}"
doc_to_target: " {{choices[0]}}"
metric_list: [{metric: perplexity, aggregation: perplexity, higher_is_better: false}]
""",
}


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder of task files, with a group of two of them."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    write_lines(tmp_path / "rows.jsonl", ROWS)
    files = f"{{data_files: {{test: {tmp_path}/rows.jsonl}}}}"
    shared = f"dataset_path: json\ntest_split: test\ndataset_kwargs: {files}"
    for name, text in {**TASKS, "own_other": TASKS["own_choice"]}.items():
        (tmp_path / f"{name}.yaml").write_text(f"task: {name}\n{shared}{text}")
    group = "group: own_group\ntask: [own_choice, own_other]\naggregate_metric_list: [{metric: acc}]\n"
    (tmp_path / "group.yaml").write_text(group)
    return tmp_path


def test_tasks_of_a_folder(llama, byte_tokenizer, folder, monkeypatch):
    monkeypatch.delenv("DISABLE_MULTIPROC", raising=False)
    scorer = Scorer(llama, byte_tokenizer)
    tasks = Tasks(["own_choice", "own_texts", "own_written", "own_ends"], include=folder)
    metrics = {name: (task.metric, task.less_is_better) for name, task in tasks.each.items()}
    assert metrics == {
        "own_choice": ("acc", False),
        "own_texts": ("bits_per_byte", True),
        "own_written": ("exact_match", False),
        "own_ends": (None, False),
    }
    state = random.getstate()
    found = tasks.run(scorer)
    assert random.getstate() == state and "DISABLE_MULTIPROC" not in os.environ
    # The same requests, scored without the harness.
    wanted = scorer.score([(row["context"], f" {choice}") for row in ROWS for choice in row["choices"]])
    answers = [each[0][0] for sample in found["samples"]["own_choice"] for each in sample["resps"]]
    assert answers == pytest.approx([score.log_probability for score in wanted], abs=1e-4)
    # Without a formula it is of resamples; five texts that cost about the same leave it small.
    ends = found["results"]["own_ends"]
    assert 0 < ends["perplexity_stderr,none"] < ends["perplexity,none"]
    assert all(isinstance(s["resps"][0][0], str) for s in found["samples"]["own_written"])
    with pytest.raises(ValueError, match=r"metric of own_ends: got .*; allowed: bits_per_byte, or a mean"):
        tasks.results(scorer)


def test_results_are_those_of_the_harness(llama, byte_tokenizer, folder):
    scorer = Scorer(llama, byte_tokenizer)
    tasks = Tasks(["own_group", "own_texts"], include=folder, metric="acc_norm")
    found, results = tasks.run(scorer)["results"], tasks.results(scorer)
    group, texts = results["own_group"], results["own_texts"]
    assert (group.metric, len(group.examples), tasks.each["own_group"].parts) == (
        "acc_norm",
        10,
        ("own_choice", "own_other"),
    )
    assert group.value == found["own_choice"]["acc_norm,none"] == found["own_other"]["acc_norm,none"]
    assert texts.value == pytest.approx(found["own_texts"]["bits_per_byte,none"])
    [part] = Tasks(["own_choice"], include=folder, metric="acc_norm").results(scorer).values()
    assert part.standard_error == pytest.approx(found["own_choice"]["acc_norm_stderr,none"])
    assert str(group.difference(group)).startswith("+0.0000 [-0.")


def test_a_file_and_a_folder_are_the_same_task(llama, byte_tokenizer, folder):
    scorer = Scorer(llama, byte_tokenizer)
    names = ["own_choice", str(folder / "own_other.yaml"), str(folder / "rows.jsonl")]
    values = [list(result.values) for result in Tasks(names, include=folder).results(scorer).values()]
    assert values[0] == values[1] == values[2]


def test_unsupported_generation_is_refused_before_the_run(llama, byte_tokenizer, folder):
    scorer = Scorer(llama, byte_tokenizer)
    read = scorer.tokens_read
    with pytest.raises(ValueError, match=r"generation_kwargs: got \{'own_beams': \{'num_beams': 4\}\}"):
        Tasks(["own_choice", "own_beams"], include=folder)
    with pytest.raises(ValueError, match=r"max_gen_toks: got \{'own_long': 256\}; allowed: below 256"):
        Tasks(["own_choice", "own_long"], include=folder).run(scorer)
    assert scorer.tokens_read == read


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        ([], {}, r"tasks: got \[\]; allowed: at least one"),
        (["own_choice"] * 2, {}, r"tasks: got \['own_choice'\]; allowed: each once"),
        (["own_group", "own_choice"], {}, r"tasks: got \['own_choice'\]; allowed: each once"),
        (["own_choice"], {"shots": -1}, "shots: got -1; allowed: an integer >= 0"),
        (["own_choice"], {"limit": 0}, "limit: got 0; allowed: an integer >= 1"),
        (["own_choice"], {"metric": "f1"}, "metric: got 'f1'; allowed: .* such as acc"),
        ([row_task("own", [{"text": "a"}])], {"shots": 2}, "shots: got 2; allowed: none for own"),
        ([{"task": "own", "output_type": "other"}], {}, "task own: ValueError: Got invalid output_type"),
    ],
)
def test_refused(names, options, message, folder):
    with pytest.raises(ValueError, match=message):
        Tasks(names, include=folder, **options)


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl: no such file"):
        Tasks([str(tmp_path / "none.jsonl")])
    with pytest.raises(ValueError, match=r"include: got '.*nowhere'; allowed: a folder of task files"):
        Tasks(["own"], include=tmp_path / "nowhere")


@pytest.mark.slow  # the harness reads all its tasks
def test_tasks_of_the_harness_are_found_by_name(folder, monkeypatch):
    datasets = pytest.importorskip("datasets")

    def load_dataset(*, path, **_):
        raise ConnectionError(f"no route to {path}")

    with pytest.raises(
        ValueError, match="tasks: got 'no_such'; allowed: a task of lm-evaluation-harness or "
    ):
        Tasks(["no_such"], include=folder)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for name in ("mmlu", "hellaswag"):
        with pytest.raises(ValueError, match=f"task {name}: ConnectionError: no route .*; without a network"):
            Tasks([name])


def test_cut_contexts_are_counted(llama, byte_tokenizer):
    scorer = Scorer(llama, byte_tokenizer, max_length=64)
    assert cut_notes(scorer) == []
    long = row_task("long", [{"context": "a long context " * 10, "choices": ["one", "two"], "answer": 0}])
    Tasks([long]).run(scorer)
    # The space at the end of the context goes to the choices, which then have 5 bytes.
    cut = 2 * (149 + 5 - 65)
    assert cut_notes(scorer) == [
        f"{cut} tokens at the beginning of contexts were cut, because sequences were too long"
    ]


def result(values, weights=None, examples=None, metric="acc"):
    examples = examples or tuple(map(str, range(len(values))))
    weights = None if weights is None else np.array(weights)
    return TaskResult("task", metric, weights is not None, examples, np.array(values, dtype=float), weights)


def test_differences_are_of_the_same_examples():
    assert result([1, 1, 0, 0]).difference(result([1, 0, 0, 0])).wins == 1
    costs = result([1.0, 3.0], [10, 30]).difference(result([2.0, 2.0], [10, 30]))
    assert (costs.difference, costs.wins, costs.losses) == (0.5, 1, 1)
    with pytest.raises(ValueError, match="examples: got 'others'; allowed: the same"):
        result([1, 0]).difference(result([1, 0], examples=("a", "b")))
    with pytest.raises(ValueError, match="metric: got 'f1'; allowed: 'acc'"):
        result([1, 0]).difference(result([1, 0], metric="f1"))
