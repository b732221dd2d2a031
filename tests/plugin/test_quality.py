"""The marker and the fixture quality."""

import json

import pytest

pytest.importorskip("lm_eval.evaluator")

# A nested run forgets what it imported first, and these bear no second import.
import datasets  # noqa: F401

import stackwise.checks.model.equivalence
import stackwise.quality.harness  # noqa: F401

MODELS = """
import torch
from torch import nn
from stackwise.data.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer(["bos", "eos"])

class Fond(nn.Module):
    '''Finds one letter the likeliest after anything.'''
    def __init__(self, letter):
        super().__init__()
        self.embedding = nn.Embedding(258, 4)
        self.register_buffer("logits", torch.zeros(258))
        self.logits[ord(letter)] = 3.0
    def forward(self, input_ids):
        return self.embedding(input_ids).sum(-1, keepdim=True) * 0 + self.logits

def fond_of(letter):
    return Fond(letter)
"""
ROWS = [{"context": f"question {i}", "choices": ["a", "b"], "answer": int(i % 4 == 0)} for i in range(40)]


@pytest.fixture
def project(pytester):
    pytester.makepyfile(models=MODELS)
    folder = pytester.path / "tests"
    folder.mkdir()
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (folder / "texts.jsonl").write_text("\n".join(json.dumps({"text": "aaab" * 5}) for _ in range(6)))

    def write(marker, call):
        (folder / "test_quality.py").write_text(
            f"""
import pytest
from models import TOKENIZER, fond_of

@pytest.mark.quality({marker})
def test_it(quality):
    {call}
"""
        )

    pytester.syspathinsert()
    pytester.write = write
    return pytester


def run(project, *options):
    return project.runpytest("-p", "no:cacheprovider", "-p", "no:xdist", *options)


@pytest.mark.parametrize(
    ("marker", "call", "outcome", "line"),
    [
        (
            "task='questions.jsonl', at_least=0.7",
            "quality(fond_of('a'), TOKENIZER)",
            "passed",
            "*met * questions: acc 0.7500, at least 0.7 is asked",
        ),
        (
            "task='questions.jsonl', at_least=0.7",
            "quality(fond_of('b'), TOKENIZER)",
            "failed",
            "*QualityError: acc 0.2500, at least 0.7 is asked",
        ),
        (
            "task='questions.jsonl', within_of_baseline=0.1",
            "quality(fond_of('b'), TOKENIZER, baseline=fond_of('a'))",
            "failed",
            "*surely worse by more than 0.1",
        ),
        (
            "task='questions.jsonl', within_of_baseline=0.1",
            "assert quality(fond_of('a'), TOKENIZER, baseline=fond_of('a')).verdict == 'met'",
            "passed",
            "*surely not worse by more than 0.1",
        ),
        (
            "task='texts.jsonl', at_most=12.0",
            "assert quality(fond_of('a'), TOKENIZER, max_length=16).metric == 'bits_per_byte'",
            "passed",
            "*bits_per_byte *, at most 12 is asked",
        ),
    ],
)
def test_judged(project, marker, call, outcome, line):
    project.write(marker, call)
    result = run(project)
    result.assert_outcomes(**{outcome: 1})
    result.stdout.fnmatch_lines([line])


def test_too_few_examples_are_inconclusive_with_an_exit_code_of_its_own(project):
    project.write(
        "task='questions.jsonl', within_of_baseline=0.02, limit=10",
        "quality(fond_of('a'), TOKENIZER, baseline=fond_of('a'))",
    )
    result = run(project, "-rs", "--stackwise-report=out.json")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*INCONCLUSIVE: acc +0.0000 *too few examples to tell*"])
    assert result.ret == 7
    report = json.loads((project.path / "out.json").read_text())
    [record] = report["quality"]
    assert (record["verdict"], record["examples"], report["verdict"]) == ("inconclusive", 10, "WARN")
    assert record["difference"]["wins"] == record["difference"]["losses"] == 0


def test_a_test_that_never_asks_fails(project):
    project.write("task='questions.jsonl', at_least=0.1", "pass")
    result = run(project)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*marked quality but never called quality"])


def test_a_baseline_that_is_missing_is_missed_before_the_model_is_asked(project):
    project.write("task='questions.jsonl', within_of_baseline=0.1", "quality(None, TOKENIZER)")
    result = run(project)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*ValueError: baseline: got None; allowed: a model, for within_of_baseline"])


@pytest.mark.parametrize(
    ("marker", "line"),
    [
        ("task='questions.jsonl', at_most=12.0", "*ValueError: at_most: got 12.0; * use at_least"),
        ("task='texts.jsonl', at_least=0.5", "*ValueError: at_least: got 0.5; * use at_most"),
    ],
)
def test_a_limit_that_the_task_has_not_is_missed_before_the_model_is_asked(project, marker, line):
    project.write(marker, "quality(None, TOKENIZER)")
    result = run(project)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([line])


def test_a_model_that_gives_no_numbers_fails(project):
    with (project.path / "models.py").open("a") as file:
        file.write(
            """
class Broken(Fond):
    # Gives NaN for each question.
    def forward(self, input_ids):
        broken = ((input_ids == ord("q")).cumsum(-1) > 0)[..., None]
        return super().forward(input_ids).masked_fill(broken, torch.nan)
"""
        )
    project.write(
        "task='questions.jsonl', at_least=0.1", "quality(__import__('models').Broken('a'), TOKENIZER)"
    )
    result = run(project)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*log-probabilities of Broken: got 'NaN for 80 of 80 requests'*"])


def test_asked_twice(project):
    project.write(
        "task='questions.jsonl', at_least=0.1",
        "[quality(fond_of('a'), TOKENIZER) for _ in range(2)]",
    )
    result = run(project)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*quality: call it once in a test*"])


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ("task='questions.jsonl'", "*marker quality: requirement: got *"),
        ("at_least=0.5", "*marker quality: *task*"),
        ("task='', at_least=0.5", "*marker quality: task: got ''*"),
        ("task='a.jsonl', at_least=2", "*marker quality: at_least: got 2*"),
        ("task='a.jsonl', at_leest=2", "*marker quality: *at_leest*"),
        ("'a.jsonl'", "*marker quality takes keyword arguments only"),
    ],
)
def test_bad_arguments_stop_the_run(project, marker, message):
    project.write(marker, "pass")
    result = run(project)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines([message])


def test_a_marker_that_nothing_reads(project):
    (project.path / "tests" / "test_other.py").write_text(
        "import pytest\n@pytest.mark.quality(task='a.jsonl', at_least=0.1)\ndef test_it(): pass\n"
    )
    result = run(project)
    result.stdout.fnmatch_lines(["*marker quality does nothing here: the test does not use quality"])


def test_the_fixture_without_its_marker(project):
    (project.path / "tests" / "test_other.py").write_text("def test_it(quality): pass\n")
    result = run(project)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*the fixture quality needs the marker quality*"])
