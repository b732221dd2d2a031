"""HumanEval: generated programs and their correctness (Chen et al. 2021, arXiv:2107.03374)."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stackwise.quality.continuation import Sampling, continue_texts
from stackwise.quality.pass_at_k import PassAtK, estimate_pass_at_k
from stackwise.quality.sandbox import Execution, Sandbox
from stackwise.quality.scoring import Scorer
from stackwise.support.arguments import check_sizes, require
from stackwise.support.files import parse_json

__all__ = [
    "STOPS",
    "HumanEvalResult",
    "Problem",
    "complete_problems",
    "evaluate_completions",
    "generate_completions",
    "load_problems",
]

# Text that starts something new after the function (section 3.3 of the paper).
STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
_KEYS = ("task_id", "prompt", "entry_point", "test")


@dataclass(frozen=True)
class Problem:
    """Function to be written.

    Attributes:
        task_id: name of the problem.
        prompt: imports, helpers, and the function up to the end of its docstring.
        entry_point: name of the function.
        test: code that defines `check(candidate)`, which raises an error if the function is wrong.
        canonical_solution: rest of the function by its author. "": unknown.
    """

    task_id: str
    prompt: str
    entry_point: str
    test: str
    canonical_solution: str = ""

    def run(self, completion: str, sandbox: Sandbox) -> Execution:
        """Run the checks on the prompt with this completion."""
        checks = f"{self.test}\ncheck({self.entry_point})\n"
        return sandbox.run(
            self.prompt + completion, checks, functions=[self.entry_point], setup=_helpers(self.prompt)
        )


@dataclass(frozen=True)
class HumanEvalResult:
    """Results of the completions.

    Attributes:
        executions: executions of all completions, by the name of the problem.
        pass_at: results by k.
    """

    executions: Mapping[str, Sequence[Execution]]
    pass_at: Mapping[int, PassAtK]

    @property
    def timed_out(self) -> int:
        """Number of completions that timed out."""
        return sum(each.status == "timed out" for row in self.executions.values() for each in row)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "pass_at": {str(k): found.to_dict() for k, found in self.pass_at.items()},
            "executions": {name: [each.to_dict() for each in row] for name, row in self.executions.items()},
        }

    def __str__(self) -> str:
        lines = [str(found) for found in self.pass_at.values()]
        if self.timed_out:
            lines.append(f"{self.timed_out} completions were not through in time")
        return "\n".join(lines)


def load_problems(path: Path | str) -> list[Problem]:
    """Return the problems of a file in the published format: JSON Lines, optionally compressed (.gz).

    The file is available at https://github.com/openai/human-eval (data/HumanEval.jsonl.gz).

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is not a problem, or a name is repeated.
    """
    path = Path(path)
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rt", encoding="utf-8") as file:
                text = file.read()
        else:
            text = path.read_text(encoding="utf-8")
    except (EOFError, UnicodeDecodeError, zlib.error) as error:
        raise ValueError(f"{path}: no text in UTF-8, or cut off: {error}") from None
    found: dict[str, Problem] = {}
    # `splitlines` would also split at characters that may occur in a JSON string.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            values = parse_json(line)
        except ValueError as error:
            raise ValueError(f"{where}: no JSON: {error}") from None
        if not isinstance(values, dict):
            raise ValueError(
                f"{where}: got a {type(values).__name__}; wanted an object with {', '.join(_KEYS)}"
            )
        for key in _KEYS:
            if not isinstance(values.get(key), str):
                raise ValueError(f"{where}: {key}: got {values.get(key)!r:.50}; wanted a text")
        problem = Problem(
            **{key: values[key] for key in _KEYS},
            canonical_solution=str(values.get("canonical_solution", "")),
        )
        require(
            problem.entry_point.isidentifier(),
            f"{where}: entry_point",
            problem.entry_point,
            "a function's name",
        )
        require(
            problem.task_id not in found, f"{where}: task_id", problem.task_id, "a name that is there once"
        )
        found[problem.task_id] = problem
    require(bool(found), str(path), "no problem", "one or more")
    return list(found.values())


def complete_problems(
    complete: Callable[[str, int], Sequence[str]],
    problems: Sequence[Problem],
    n: int,
    *,
    stops: Sequence[str] = STOPS,
) -> dict[str, list[str]]:
    """Return completions of each problem, cut at the first stop sequence.

    Args:
        complete: function (prompt, n) -> n continuations of the prompt.
        problems: problems. Their names are the keys of the result.
        n: number of completions per problem.
        stops: stop sequences.

    Raises:
        ValueError: `complete` returns a number of texts other than n.
    """
    check_sizes(n=n)
    found = {}
    for problem in problems:
        texts = list(complete(problem.prompt, n))
        require(len(texts) == n, f"{problem.task_id}: complete gave", len(texts), f"n={n} texts")
        found[problem.task_id] = [_cut(text, stops) for text in texts]
    return found


def generate_completions(
    scorer: Scorer,
    problems: Sequence[Problem],
    n: int,
    *,
    temperature: float = 0.8,
    top_p: float = 0.95,
    max_new_tokens: int = 512,
    seed: int = 0,
    stops: Sequence[str] = STOPS,
) -> dict[str, list[str]]:
    """Return completions of each problem, generated by a model and cut at the first stop sequence.

    Each completion has its own seed, derived from `seed`, the name of the problem and the index of the
    completion. A completion does not depend on the rest, except for rounding differences between batch sizes.

    Args:
        scorer: scorer with a tokenizer. At most its `batch_size` completions are generated at once.
        problems: problems. Their names are the keys of the result.
        n: number of completions per problem. Must be 1 if `temperature` is 0.
        temperature, top_p: parameters of `Sampling`.
        max_new_tokens: maximum number of tokens of a completion.
        seed: seed from which all seeds are derived.
        stops: stop sequences.

    Raises:
        ValueError: no problems, options out of range, several completions that would be equal, a prompt that
            is too long, or an error of `continue_texts`.
    """
    check_sizes(n=n)
    check_sizes(0, seed=seed)
    sampling = Sampling(temperature, top_p=top_p)
    require(temperature > 0 or n == 1, "n", n, "1 where temperature is 0, since all would be the same")
    require(bool(problems), "problems", list(problems), "one or more")
    check_sizes(max_new_tokens=max_new_tokens)
    limit = scorer.model.max_length
    if limit is not None:
        # A prompt whose start is cut would be another problem.
        longest = max(len(scorer.texts.encode(problem.prompt)) for problem in problems)
        allowed = (
            f"at most {limit - longest}: the model reads {limit} tokens, the longest prompt has {longest}"
        )
        require(longest + max_new_tokens <= limit, "max_new_tokens", max_new_tokens, allowed)
    places = [(problem, i) for problem in problems for i in range(n)]
    texts = continue_texts(
        scorer,
        [problem.prompt for problem, _ in places],
        max_new_tokens=max_new_tokens,
        until=stops,
        sampling=sampling,
        seeds=[_seed_of(seed, problem.task_id, i) for problem, i in places],
        joined=True,  # the leading space of a body is part of the program
    )
    found: dict[str, list[str]] = {}
    for (problem, _), text in zip(places, texts, strict=True):
        found.setdefault(problem.task_id, []).append(text)
    return found


def evaluate_completions(
    problems: Sequence[Problem],
    completions: Mapping[str, Sequence[str]],
    *,
    k: Sequence[int] = (1,),
    execute_generated_code: bool = False,
    sandbox: Sandbox | None = None,
    jobs: int = 2,
    on_execution: Callable[[str, int, Execution], None] | None = None,
) -> HumanEvalResult:
    """Run every completion of every problem with its checks.

    Args:
        problems: problems with completions.
        completions: completions by the name of the problem.
        k: values of k for pass@k. Each problem needs at least k completions.
        execute_generated_code: must be True, as an explicit permission.
        sandbox: sandbox of the runs. None: a sandbox with default limits.
        jobs: number of concurrent runs.
        on_execution: called after each run with the name of the problem, the index of the completion and the
            execution.

    Raises:
        ValueError: `execute_generated_code` is not True, a problem has no or too few completions, or
            completions have no problem.
        stackwise.quality.sandbox.SandboxError: no sandbox can be created on this machine.
    """
    if execute_generated_code is not True:
        raise ValueError(
            f"execute_generated_code: got {execute_generated_code!r}; allowed: True, since programs that "
            "nobody has read are run, in a sandbox"
        )
    check_sizes(jobs=jobs)
    require(bool(k), "k", tuple(k), "one number or more")
    names = [problem.task_id for problem in problems]
    require(bool(names), "problems", names, "one or more")
    other = sorted(set(completions) - set(names))
    require(not other, "completions", other, "names of problems")
    most = max(k)
    check_sizes(k=min(k))
    for name in names:
        n = len(completions.get(name, ()))
        require(n >= most, f"completions[{name!r}]", f"{n} of them", f"at least k={most}")
    held = sandbox or Sandbox()
    work = [(problem, i, text) for problem in problems for i, text in enumerate(completions[problem.task_id])]

    def run(item: tuple[Problem, int, str]) -> Execution:
        problem, place, text = item
        done = problem.run(text, held)
        if on_execution is not None:
            on_execution(problem.task_id, place, done)
        return done

    # Threads suffice, because the work is in other processes.
    with ThreadPoolExecutor(jobs) as pool:
        done = list(pool.map(run, work))
    executions: dict[str, list[Execution]] = {name: [] for name in names}
    for (problem, _, _), each in zip(work, done, strict=True):
        executions[problem.task_id].append(each)
    right = {name: [each.passed for each in row] for name, row in executions.items()}
    return HumanEvalResult(executions, {each: estimate_pass_at_k(right, each) for each in sorted(set(k))})


def _seed_of(seed: int, task_id: str, place: int) -> int:
    digest = hashlib.sha256(f"{seed} {place} {task_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # torch's seeds have 63 bits


def _cut(text: str, stops: Sequence[str]) -> str:
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(places, default=len(text))]


def _helpers(prompt: str) -> str:
    """Return the prompt as valid code.

    If its last function has no body, `pass` is added.
    """
    try:
        compile(prompt, "prompt", "exec", dont_inherit=True)
    except SyntaxError:
        return prompt + "    pass\n"
    return prompt
