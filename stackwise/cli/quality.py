"""Quality: the command that evaluates a trained model on tasks."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

if TYPE_CHECKING:
    from stackwise.quality.quality_report import QualityReport
    from stackwise.quality.scoring import Scorer

__all__ = ["Quality"]


@dataclass(frozen=True)
class Quality:
    """Evaluate a trained model on tasks of lm-evaluation-harness, your own rows, and HumanEval."""

    model: tyro.conf.Positional[str]
    """A folder with config.json and weights, or MODULE:FACTORY, or path/to/file.py:FACTORY; FACTORY() returns
    the model or a ModelSpec."""
    tasks: tuple[str, ...] = ()
    """Tasks of lm-evaluation-harness such as mmlu, task files (.yaml), and files of rows (.jsonl, .parquet),
    by spaces or commas."""
    tokenizer: str | None = None
    """byte, the path of a tokenizer.json, or a folder with a transformers tokenizer; default: the model's
    folder."""
    include: Path | None = None
    """Folder of your own task files (.yaml)."""
    shots: int | None = None
    """Number of examples before each question; default: that of the task."""
    human_eval: Path | None = None
    """HumanEval.jsonl or .jsonl.gz: generate programs for its problems and run their tests."""
    samples: int = 1
    """With --human-eval: programs per problem; pass@k is reported for k = 1, 10, 100 up to this number."""
    temperature: float = 0.8
    """With --human-eval: sampling temperature; 0: the most likely program."""
    max_new_tokens: int = 512
    """With --human-eval: maximum number of new tokens."""
    execute_generated_code: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """With --human-eval: allow generated programs to run, in a sandbox."""
    limit: int | None = None
    """Maximum number of examples per task, or of problems; default: all."""
    batch_size: int = 32
    """Maximum number of sequences in a batch."""
    max_length: int | None = None
    """Maximum number of tokens in a sequence; default: the limit of the model."""
    prefix_token_id: int | None = None
    """Token before a text without context; default: that of the tokenizer."""
    eos_token_id: tuple[int, ...] = ()
    """Tokens that end a generated text; default: those of the tokenizer and the model."""
    device: str = "cpu"
    """auto, cpu, cuda or cuda:N."""
    no_reuse: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Compute each sequence as a whole, without reuse of shared prefixes."""
    report: Path | None = None
    """Write the results to this file: .md, .json, .html, or all three if the name has no suffix."""

    def run(self) -> int:
        """Evaluate the model, print all results and write the report."""
        from stackwise.quality.quality_report import QualityReport
        from stackwise.quality.scoring import Scorer
        from stackwise.quality.tasks import cut_notes
        from stackwise.report import report_files
        from stackwise.support.device import resolve_device, threads_for
        from stackwise.support.progress import ProgressLine

        names = [name for some in self.tasks for name in some.split(",") if name]
        self._check_options(names)
        files = report_files(self.report) if self.report else []
        runs = [self._tasks(names)] if names else []
        if self.human_eval is not None:
            runs.append(self._programs(self.human_eval))
        model, tokenizer = self._load()
        progress = ProgressLine("scoring tokens")
        scorer = Scorer(
            model,
            tokenizer,
            batch_size=self.batch_size,
            device=resolve_device(self.device),
            max_length=self.max_length,
            reuse=not self.no_reuse,
            prefix_token_id=self.prefix_token_id,
            eos_token_id=self.eos_token_id or None,
            on_progress=progress.update,
        )
        report = QualityReport(self.model)
        with closing(progress), threads_for(sum(p.numel() for p in scorer.model.model.parameters())):
            for run in runs:
                run(scorer, report)
        report.notes += [f"prefixes: {scorer.model.reuse_note}", *cut_notes(scorer)]
        for line in report.lines():
            print(line)
        for file in files:
            report.write(file)
            print(f"report: {file}")
        return 0

    def _check_options(self, names: list[str]) -> None:
        """Raise ValueError for options that have no effect without another option."""
        from stackwise.support.arguments import require

        programs = self.human_eval is not None
        asked = bool(names) or (programs and not self.tasks)
        require(asked, "tasks", list(self.tasks), "at least one, or --human-eval FILE")
        require(bool(names) or self.include is None, "include", self.include, "none without --tasks")
        require(bool(names) or self.shots is None, "shots", self.shots, "none without --tasks")
        require(programs or self.samples == 1, "samples", self.samples, "1 without --human-eval")

    def _tasks(self, names: list[str]) -> Any:
        """Return a function that runs the tasks. Data is read before the model is loaded."""
        from stackwise.quality.tasks import Tasks

        tasks = Tasks(names, include=self.include, shots=self.shots, limit=self.limit)

        def run(scorer: Scorer, report: QualityReport) -> None:
            report.add_tasks(tasks.run(scorer))

        return run

    def _programs(self, file: Path) -> Any:
        """Return a function that runs HumanEval.

        The problems are read and the sandbox is created before the model is loaded.

        Raises:
            ValueError: generated programs are not allowed to run, or a number is out of range.
            stackwise.quality.sandbox.SandboxError: this system cannot create a sandbox.
        """
        from stackwise.quality.human_eval import evaluate_completions, generate_completions, load_problems
        from stackwise.quality.sandbox import Sandbox
        from stackwise.support.arguments import check_sizes, require

        require(
            self.execute_generated_code,
            "execute_generated_code",
            self.execute_generated_code,
            "--execute-generated-code, since --human-eval runs programs that a model wrote and nobody has "
            "read, in a sandbox without files and network",
        )
        check_sizes(samples=self.samples)
        require(
            self.temperature > 0 or self.samples == 1,
            "samples",
            self.samples,
            "1 with --temperature 0, since all would be the same",
        )
        if self.limit is not None:
            check_sizes(limit=self.limit)
        problems, sandbox = load_problems(file)[: self.limit], Sandbox()

        def run(scorer: Scorer, report: QualityReport) -> None:
            completions = generate_completions(
                scorer,
                problems,
                self.samples,
                temperature=self.temperature,
                max_new_tokens=self.max_new_tokens,
            )
            result = evaluate_completions(
                problems,
                completions,
                k=[k for k in (1, 10, 100) if k <= self.samples],
                execute_generated_code=self.execute_generated_code,
                sandbox=sandbox,
            )
            report.add_human_eval(result)

        return run

    def _load(self) -> tuple[Any, Any]:
        """Return the model and its tokenizer.

        Raises:
            ValueError: the model is neither a folder nor MODULE:FACTORY, or it is MODULE:FACTORY without a
                tokenizer.
        """
        from stackwise.subject.factory import load_factory
        from stackwise.support.arguments import require

        folder = Path(self.model)
        if folder.is_dir():
            return _model_in(folder), _tokenizer_of(self.tokenizer or folder)
        named = ":" in self.model
        require(named, "model", self.model, "a folder that there is, MODULE:FACTORY, or FILE.py:FACTORY")
        if self.tokenizer is None:
            raise ValueError("tokenizer: got none; allowed: byte, a tokenizer.json, or a folder with one")
        return load_factory(self.model, search=Path.cwd()), _tokenizer_of(self.tokenizer)


def _model_in(folder: Path) -> Any:
    """Return the model of a folder: a Rack if stackwise saved it, otherwise a model of transformers."""
    from stackwise.model import Rack
    from stackwise.model.weight_folder import read_config

    if read_config(folder).get("model_type") == "stackwise":
        return Rack.from_pretrained(folder)
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise ImportError(f"{folder}: pip install 'stackwise[hf]' ({error})") from error
    return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)


def _tokenizer_of(name: str | Path) -> Any:
    """Return the tokenizer of a folder or a file, or the byte tokenizer for the name "byte".

    If the folder has a tokenizer_config.json, transformers loads the tokenizer, because this file also
    defines the tokens at the beginning of a text. Otherwise tokenizer.json is read directly, which needs
    neither transformers nor the code of a tokenizer.
    """
    from stackwise.data.tokenizer import create_tokenizer

    if not (Path(name) / "tokenizer_config.json").is_file():
        return create_tokenizer(name)
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ImportError(f"{name}: pip install 'stackwise[hf]' ({error})") from error
    return AutoTokenizer.from_pretrained(name, local_files_only=True)
