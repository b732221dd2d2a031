"""Search: the command that searches a space for good architectures, resumes a search and shows results."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

if TYPE_CHECKING:
    from stackwise.prototype.search import SearchResult, SearchTrial

__all__ = ["Search"]

_ROWS = 20  # rows of the printed table; the files have all rows


@dataclass(frozen=True)
class Search:
    """Search for good architectures. The same command resumes a stopped search."""

    space: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="[FILE]")] = None
    """YAML with `base`, a configuration, and `space`, choices and ranges for its keys."""
    budget: int = 20
    """Number of trials in the study, including failed ones."""
    objective: tuple[str, ...] = ("score",)
    """loss, score, tokens_per_second, peak_bytes, parameters; several for a Pareto front."""
    sampler: Literal["tpe", "random", "gp", "nsga2"] = "tpe"
    """Method that proposes configurations."""
    pruner: Literal["none", "hyperband", "median", "wilcoxon"] = "none"
    """Method that ends trials early; wilcoxon needs 5 seeds or more."""
    steps: int = 1000
    """Updates per run; a verdict on stability needs 1000."""
    seeds: int = 1
    """Runs per configuration."""
    seed: int = 0
    """Seed of the proposals and of the first run."""
    storage: str | None = None
    """SQLite file, or an Optuna URL such as postgresql+psycopg://...; default: search.db."""
    name: str | None = None
    """Name of the study; default: derived from the settings."""
    jobs: int = 1
    """Processes on this machine; others can join with the same command."""
    device: str | None = None
    """Device to train on; default: as configured."""
    small_factor: int = 1
    """Train smaller variants, with this many times fewer heads and Blocks."""
    output: Path | None = None
    """Folder for report.html, trials.md, trials.csv, search.json, best.yaml and front.svg."""
    show: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the results of a stored study (`name`, or the only one) without searching."""
    progress: Literal["on", "off"] = "on"
    """Report each trial on standard error."""

    def run(self) -> int:
        """Search, and print a table of the trials, the best first.

        Returns:
            0; 1 if no trial succeeded; 130 if the search was interrupted.
        """
        from stackwise.support.arguments import require

        if self.show:
            from stackwise.prototype.search import load_search

            return self._told(load_search(self.storage, self.name))
        require(self.space is not None, "FILE", self.space, "a YAML file, or --show")
        assert self.space is not None
        from stackwise.prototype.search import search_architecture_space

        try:
            result = search_architecture_space(
                self.space,
                self.budget,
                objective=self.objective,
                sampler=self.sampler,
                pruner=None if self.pruner == "none" else self.pruner,
                steps=self.steps,
                seeds=self.seeds,
                storage=self.storage,
                name=self.name,
                jobs=self.jobs,
                seed=self.seed,
                device=self.device,
                small_factor=self.small_factor,
                on_trial=self._tell if self.progress == "on" else None,
            )
        except KeyboardInterrupt:
            told = f"stackwise: interrupted; what is done is stored. To go on: {self._command()}"
            print(told, file=sys.stderr)
            return 130
        return self._told(result)

    def _tell(self, trial: SearchTrial) -> None:
        value = getattr(trial, self.objective[0])
        told = f"{trial.status}: {trial.reason}"
        if trial.status == "success":
            told = f"{self.objective[0]} {value:.5g}"
        values = ", ".join(f"{key}={value}" for key, value in trial.values.items())
        print(f"trial {trial.number}: {told} ({values})", file=sys.stderr, flush=True)

    def _command(self) -> str:
        """Return the command line with the same settings, but without the password of a storage."""
        from stackwise.prototype.search.storage import shown_place

        words = ["stackwise", "search", str(self.space)]
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "space" and value != field.default:
                words.append(f"--{field.name.replace('_', '-')}")
                words += map(str, value) if isinstance(value, tuple) else [shown_place(str(value))]
        return shlex.join(words)

    def _told(self, result: SearchResult) -> int:
        from rich.console import Console

        # The files are written before the output, because a closed pipe may end the process.
        written = [] if self.output is None else result.save(self.output)
        print(result)
        console = Console(highlight=False)
        if console.is_terminal:
            console.print(result.table(last=_ROWS))
        else:
            print(result.to_markdown(last=_ROWS))
        if len(result.trials) > _ROWS:
            print(f"and {len(result.trials) - _ROWS} more; --output writes all of them")
        for path in written:
            print(f"written: {path}")
        if self.output is not None and result.front and self.output / "front.svg" not in written:
            print("no front.svg: it needs matplotlib: pip install 'stackwise[report]'")
        if not result.succeeded:
            print(f"stackwise: none of {len(result.trials)} trials succeeded", file=sys.stderr)
            return 1
        return 0
