"""`python -m bench.growth`: whether the leak check is silent on sound training, and names what leaks.

Every model of others that can be built here is trained as its own loss asks, by AdamW, and looked at with the
defaults of `memory_growth`: no loop here was there when the check was made. Then each of some families is
trained by a loop that keeps something of every step. Every run is a process of its own.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench import third_party
from bench.claim import Bar, Claim
from bench.isolated import all_isolated
from stackwise.benchmark.memory import memory_growth
from stackwise.subject.spec import ModelSpec

SECONDS = 900.0
SOUND = "sound"
# What is kept, and what has to be named: the beginning of a type's name.
LEAKS = {
    "a list keeps activations": "torch.Tensor",
    "loss += keeps the graph": "autograd",
    "a hook accumulates": "torch.Tensor",
    "a hook for each step": "function",
    "an optimizer for each step": "torch.optim",
}
LEAKY = 10  # models that are broken, evenly chosen
QUICK = ("transformers/gpt2", "torch/LSTM")


class Loop:
    """Training of a model of others, on another batch in each step."""

    def __init__(self, make: Callable[[], Any], leak: str) -> None:
        self.spec, self.leak = ModelSpec.of(make()), leak
        self.model = self.spec.create(torch.device("cpu"), 0).train()
        self.optimizer = self.spec.optimizer(self.model.parameters())
        self.number = 0
        self.kept: list[Any] = []
        self.total = torch.zeros(())
        if leak == "a hook accumulates":
            modules = [m for m in self.model.modules() if isinstance(m, torch.nn.Linear | torch.nn.Embedding)]
            (modules or [self.model])[-1].register_forward_hook(self._keep)
        self.last = list(self.model.modules())[-1]

    def __call__(self) -> None:
        self.number += 1
        inputs = self.spec.batch(2, 16, device=torch.device("cpu"), seed=self.number)
        loss = self.spec.loss_of(self.model, inputs)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.leak == "a list keeps activations":
            self._keep(None, None, self.spec.logits(self.model, inputs).detach())
        elif self.leak == "loss += keeps the graph":
            self.total = self.total + loss
        elif self.leak == "a hook for each step":
            self.kept.append(self.last.register_forward_hook(_hook()))
        elif self.leak == "an optimizer for each step":
            self.kept.append(self.spec.optimizer(self.model.parameters()))

    def _keep(self, _module: Any, _arguments: Any, output: Any) -> None:
        self.kept.append(output[0] if isinstance(output, tuple) else output)


def _hook() -> Callable[..., None]:
    """One that does nothing, and is no other step's."""

    def hook(*_: Any) -> None:
        pass

    return hook


def look(make: Callable[[], Any], leak: str) -> Iterator[dict[str, Any]]:
    """For `all_isolated`: the verdict over one loop."""
    torch.set_num_threads(1)
    growth = memory_growth(Loop(make, leak))
    yield {
        "verdict": growth.verdict,
        "bytes_per_step": growth.bytes_per_step,
        "reasons": growth.reasons,
        "types": [each.name for each in growth.types],
    }


def jobs_of(quick: bool) -> dict[str, Callable[[], Iterator[Any]]]:
    subjects = dict(third_party.subjects())
    if quick:
        subjects = {name: subjects[name] for name in QUICK}
    leaky = list(subjects)[:: max(1, len(subjects) // LEAKY)][:LEAKY]
    jobs = {f"{name}; {SOUND}": partial(look, _made(name, make), SOUND) for name, make in subjects.items()}
    for name in leaky:
        jobs |= {f"{name}; {leak}": partial(look, _made(name, subjects[name]), leak) for leak in LEAKS}
    return jobs


def _made(name: str, make: Callable[[], Any]) -> Callable[[], Any]:
    """What gives the factory; of transformers that is `make` itself, which may refuse."""
    return make if name.startswith("transformers/") else lambda: make


def bars(runs: dict[str, Any]) -> list[Bar]:
    done = {name: run for name, run in runs.items() if run["error"] is None}
    sound = [run for name, run in done.items() if name.endswith(f"; {SOUND}")]
    leaks = [(name.partition("; ")[2], run) for name, run in done.items() if not name.endswith(f"; {SOUND}")]
    caught = [run["verdict"] == "grows" for _, run in leaks]
    named = [any(each.startswith(LEAKS[leak]) for each in run["types"]) for leak, run in leaks]
    return [
        Bar("sound loops", float(len(sound)), 20.0, full_size=True),
        Bar("alarms at sound loops", float(sum(r["verdict"] != "flat" for r in sound)), 0.0, at_most=True),
        Bar("leaks caught", sum(caught) / len(caught) if caught else None, 1.0),
        Bar("leaks named", sum(named) / len(named) if named else None, 1.0),
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.growth", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two models: proves nothing")
    parser.add_argument("--resume", action="store_true", help="keep the runs that the result file has")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)  # of this process, which is forked for each run
    claim = Claim("growth", options.quick)
    if options.resume:
        claim.resume()
    runs: dict[str, Any] = claim.figures.get("runs", {})
    claim.figures = {"versions": third_party.versions(), "runs": runs}
    missing = {name: job for name, job in jobs_of(options.quick).items() if name not in runs}
    for name, ended in all_isolated(missing, jobs=options.jobs, seconds=SECONDS):
        runs[name] = {**(ended.values[0] if ended.values else {}), "error": ended.error}
        print(name, runs[name].get("verdict"), ended.error or "", flush=True)
        claim.write()
    claim.bars = bars(runs)
    shown = Table("loop", "verdict", "bytes a step", "grows")
    for name, run in runs.items():
        if run["error"] is None and (run["verdict"] == "flat") != name.endswith(f"; {SOUND}"):
            shown.add_row(name, run["verdict"], f"{run['bytes_per_step']:,.0f}", ", ".join(run["types"][:3]))
    Console(width=140).print("where the verdict is wrong:", shown)
    errors = sum(run["error"] is not None for run in runs.values())
    print(f"{errors} loops could not be run, which the result file names")
    return claim.conclude()


if __name__ == "__main__":
    sys.exit(main())
