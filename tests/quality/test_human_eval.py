"""HumanEval with problems of our own in its format."""

import gzip
import json

import pytest
import torch
from torch.nn.functional import one_hot

from stackwise.data.tokenizer import ByteTokenizer
from stackwise.quality import Scorer
from stackwise.quality.human_eval import (
    Problem,
    complete_problems,
    evaluate_completions,
    generate_completions,
    load_problems,
)
from stackwise.quality.sandbox import Sandbox, SandboxLimits, isolation_problem
from tests.forked import HANG_SECONDS

needs_jail = pytest.mark.skipif(isolation_problem() is not None, reason=str(isolation_problem()))

DOUBLE = {
    "task_id": "Own/0",
    "prompt": """from typing import List


def double(x: List[int]) -> List[int]:
    '''Each twice.
    >>> double([1])
    [2]
    '''
""",
    "entry_point": "double",
    "canonical_solution": "    return [2 * each for each in x]\n",
    "test": """METADATA = {}


def check(candidate):
    assert candidate([1, 2]) == [2, 4]
    assert candidate([]) == []
""",
}
# As HumanEval/38: the checks use a function of the prompt.
DECODE = {
    "task_id": "Own/1",
    "prompt": "def encode(s: str):\n    return s[::-1]\n\n\ndef decode(s: str):\n    '''Undo encode.'''\n",
    "entry_point": "decode",
    "canonical_solution": "    return s[::-1]\n",
    "test": "def check(candidate):\n    assert candidate(encode('abc')) == 'abc'\n",
}


@pytest.fixture
def problems(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text("\n".join(map(json.dumps, (DOUBLE, DECODE))) + "\n\n")
    return load_problems(path)


def test_loaded(problems, tmp_path):
    assert problems == [Problem(**DOUBLE), Problem(**DECODE)]
    packed = tmp_path / "problems.jsonl.gz"
    with gzip.open(packed, "wt") as file:
        file.write(json.dumps(DECODE))
    assert load_problems(str(packed)) == [Problem(**DECODE)]
    # What else ends a line of text is one of a text's letters here.
    odd = DECODE | {"prompt": "# \u2028\u2029\x85\n" + DECODE["prompt"]}
    text = json.dumps(odd, ensure_ascii=False)
    packed.with_suffix("").write_text(text, encoding="utf-8")
    assert load_problems(packed.with_suffix("")) == [Problem(**odd)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1: no JSON"),
        ("[]", "line 1: got a list; wanted an object with task_id, prompt"),
        (json.dumps(DOUBLE | {"test": 1}), "line 1: test: got 1; wanted a text"),
        (json.dumps(DOUBLE | {"entry_point": "a b"}), "line 1: entry_point: got 'a b'"),
        (f"{json.dumps(DOUBLE)}\n{json.dumps(DOUBLE)}", "line 2: task_id: got 'Own/0'"),
        ("", "got 'no problem'"),
    ],
)
def test_a_file_that_is_damaged(text, message, tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_problems(path)


@needs_jail
def test_evaluated(problems):
    wrong, endless = "    return x\n", "    while True: pass\n"
    completions = {
        "Own/0": [DOUBLE["canonical_solution"], wrong, "    import os; os._exit(0)\n", endless],
        "Own/1": [DECODE["canonical_solution"]] * 2 + ["    return (\n", "    return s\n"],
    }
    seen = []
    result = evaluate_completions(
        problems,
        completions,
        k=(1, 4),
        execute_generated_code=True,
        sandbox=Sandbox(SandboxLimits(seconds=HANG_SECONDS, cpu_seconds=1.0)),
        on_execution=lambda *what: seen.append(what[:2]),
    )
    passed = {name: [each.passed for each in row] for name, row in result.executions.items()}
    assert passed == {"Own/0": [True, False, False, False], "Own/1": [True, True, False, False]}
    assert result.pass_at[1].estimate == pytest.approx((1 / 4 + 1 / 2) / 2)
    assert result.pass_at[4].estimate == 1.0
    assert sorted(seen) == [(name, i) for name in completions for i in range(4)]
    assert json.loads(json.dumps(result.to_dict()))["pass_at"]["4"]["estimate"] == 1.0
    assert "SyntaxError" in result.executions["Own/1"][2].reason
    assert str(result).startswith("pass@1 37.5%")


def test_nothing_is_run_unless_told_so(problems):
    completions = {problem.task_id: ["    pass\n"] for problem in problems}
    for said in (False, 1, "yes"):
        with pytest.raises(ValueError, match=r"execute_generated_code: got .*; allowed: True"):
            evaluate_completions(problems, completions, execute_generated_code=said)


@pytest.mark.parametrize(
    ("completions", "k", "message"),
    [
        (
            {"Own/0": ["a"], "Own/1": ["a"]},
            (1, 2),
            r"completions\['Own/0'\]: got '1 of them'; allowed: at least k=2",
        ),
        ({"Own/0": ["a"]}, (1,), r"completions\['Own/1'\]: got '0 of them'"),
        ({"Own/0": ["a"], "Own/1": ["a"], "Own/2": ["a"]}, (1,), r"completions: got \['Own/2'\]"),
        ({"Own/0": ["a"], "Own/1": ["a"]}, (), r"k: got \(\)"),
        ({"Own/0": ["a"], "Own/1": ["a"]}, (0, 1), "k: got 0"),
    ],
)
def test_completions_that_are_too_few(problems, completions, k, message):
    with pytest.raises(ValueError, match=message):
        evaluate_completions(problems, completions, k=k, execute_generated_code=True)


def test_completed_up_to_what_is_new(problems):
    def complete(prompt, n):
        assert prompt in (DOUBLE["prompt"], DECODE["prompt"])
        return [f"    return {i}\n    # kept\n\ndef other(): pass\nprint(1)" for i in range(n)]

    found = complete_problems(complete, problems, 2)
    assert found == {name: [f"    return {i}\n    # kept\n" for i in range(2)] for name in ("Own/0", "Own/1")}
    assert complete_problems(lambda *_: ["a\nif b"], problems[:1], 1, stops=())["Own/0"] == ["a\nif b"]
    with pytest.raises(ValueError, match=r"Own/0: complete gave: got 2; allowed: n=1 texts"):
        complete_problems(lambda *_: ["a", "b"], problems, 1)


def test_generated_each_by_its_own_seed(problems, llama, byte_tokenizer):
    scorer = Scorer(llama, byte_tokenizer)
    found = generate_completions(scorer, problems, 3, max_new_tokens=8, stops=())
    assert {name: len(set(row)) for name, row in found.items()} == {"Own/0": 3, "Own/1": 3}
    alone = generate_completions(
        Scorer(llama, byte_tokenizer, batch_size=1), problems[1:], 2, max_new_tokens=8, stops=()
    )
    assert alone == {"Own/1": found["Own/1"][:2]}
    other = generate_completions(scorer, problems[1:], 2, max_new_tokens=8, stops=(), seed=1)
    assert other["Own/1"] != alone["Own/1"]


class Writer(torch.nn.Module):
    """Says the bytes of a text by their places, whatever it has read, and then ends."""

    def __init__(self, text):
        super().__init__()
        self.embedding = torch.nn.Embedding(258, 1)
        self.script = torch.tensor([*text.encode()[1:], 257])

    def forward(self, ids):
        places = torch.arange(ids.shape[1]).clamp(max=len(self.script) - 1)
        return 9.0 * one_hot(self.script[places], 258).float().expand(len(ids), -1, -1)


class Stripping(ByteTokenizer):
    """As that of Llama 2: a space at the beginning is taken for the mark of a word, and left out."""

    def decode(self, ids):
        return super().decode(ids).removeprefix(" ")


@needs_jail
@pytest.mark.parametrize("tokenizer", [ByteTokenizer, Stripping])
def test_what_a_model_writes_is_run(problems, tokenizer):
    body = DOUBLE["canonical_solution"]
    model = Writer(DOUBLE["prompt"] + body + "\n\ndef other():\n    pass\n")
    scorer = Scorer(model, tokenizer(["bos", "eos"]))
    completions = generate_completions(scorer, problems[:1], 1, temperature=0, max_new_tokens=60)
    assert completions == {"Own/0": [body + "\n"]}
    assert (
        evaluate_completions(problems[:1], completions, execute_generated_code=True).pass_at[1].estimate == 1
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n: got 0"),
        ({"n": 2, "temperature": 0}, "n: got 2; allowed: 1 where temperature is 0"),
        ({"n": 1, "temperature": -1}, "temperature: got -1"),
        ({"n": 1, "top_p": 0}, "top_p: got 0"),
        ({"n": 1, "seed": -1}, "seed: got -1"),
        ({"n": 1, "max_new_tokens": 0}, "max_new_tokens: got 0"),
        (
            {"n": 1, "max_new_tokens": 256},
            r"max_new_tokens: got 256; allowed: at most \d+: the model reads 256",
        ),
        ({"n": 1, "problems": []}, r"problems: got \[\]"),
    ],
)
def test_generation_that_is_refused(options, message, problems, llama, byte_tokenizer):
    with pytest.raises(ValueError, match=message):
        generate_completions(Scorer(llama, byte_tokenizer), **({"problems": problems} | options))
