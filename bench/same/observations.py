"""Observations: values that a refactor must not change, in groups.

Each group is a function that returns its observations by name. An observation is a generator function. It
runs in a process of its own and yields dictionaries of JSON values. Two revisions behave the same if all
values are equal.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import detection, recovery, third_party

__all__ = ["GROUPS", "Observation"]

Observation = Callable[[], Iterator[dict[str, Any]]]

ROOT = Path(__file__).parents[2]
HEALTHY = 60  # third-party models
FULL_EVERY = 3  # every third of them is checked with the full suite, without two families
# Sizes at which 50 steps of every file in examples/ take seconds.
EXAMPLE_KEYS = {
    "model.d_model": 32,
    "model.d_ff": 48,
    "model.n_heads": 2,
    "model.n_kv_heads": 1,
    "training.batch_size": 2,
    "training.seq_len": 32,
    "training.max_steps": 50,
    "training.device": "cpu",
    "training.schedule.warmup_steps": 1,
    "data.validation_fraction": 0.003,
}
EXTRA_KEYS = {
    "bf16_weights": {"training.compile": "false", "training.recompute.kind": "none"},
    "task": {"model.n_kv_heads": 2},
}
# The variables that torchrun sets for a single process.
ONE_RANK = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "0",
}


def examples() -> dict[str, Observation]:
    """Loss of each of 50 steps and final weights, for each file of `examples/`."""
    return {path.stem: partial(_train, path) for path in sorted((ROOT / "examples").glob("*.yaml"))}


def _train(path: Path) -> Iterator[dict[str, Any]]:
    from stackwise.cli.overrides import load_configuration, split_overrides
    from stackwise.data import Prefetched, create_data
    from stackwise.data.shards import write_shards
    from stackwise.data.text import documentation_pages
    from stackwise.model import create_rack_from_config
    from stackwise.training import ArchitectureTrainer
    from stackwise.training.block_store import block_writer
    from stackwise.training.processes import Processes

    keys = EXAMPLE_KEYS | EXTRA_KEYS.get(path.stem, {})
    _, overrides = split_overrides([f"--{key}={value}" for key, value in keys.items()])
    config = load_configuration(path, overrides)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        if path.stem == "token_shards":
            pages = [list(page.encode()) for page in islice(documentation_pages(), 20)]
            write_shards(Path(config.data.dataset_path), pages, vocab_size=256)
        if path.stem in ("ddp", "fsdp"):
            os.environ |= ONE_RANK
        with Processes.from_environment(config.training) as processes:
            training, validation = create_data(config, processes.rank, processes.world_size)
            trainer = ArchitectureTrainer(config, progress=False, processes=processes)
            torch.manual_seed(config.training.seed)
            writer = [] if trainer.offload_dir is None else [block_writer(trainer.offload_dir)]
            rack = create_rack_from_config(config, *writer)
            with closing(Prefetched(training)) as batches:
                result = trainer.train_architecture(rack, batches, validation)
            loss = None if validation is None else trainer.evaluate(rack, validation).hex()
            records = [float(record.loss).hex() for record in result["records"]]
            weights = {name: _whole(weight) for name, weight in rack.state_dict().items()}
            yield {"losses": records, "validation": loss, "weights": _digest(weights)}


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of names, dtypes, shapes and bits."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def logits() -> dict[str, Observation]:
    """Logits of each model family that a Rack can be loaded from, and of each kind of own Rack."""
    from tests.model.test_interop import CASES, OWN_RACKS, hf_model, own_rack

    def of_family(case: str) -> Iterator[dict[str, Any]]:
        from stackwise.model import Rack

        torch.manual_seed(0)
        yield {"logits": _logits(Rack.from_pretrained(hf_model(case)))}

    def of_own(name: str) -> Iterator[dict[str, Any]]:
        torch.manual_seed(0)
        yield {"logits": _logits(own_rack(**OWN_RACKS[name]))}

    return {case: partial(of_family, case) for case in CASES} | {
        f"own {name}": partial(of_own, name) for name in OWN_RACKS
    }


@torch.no_grad()
def _logits(rack: torch.nn.Module) -> str:
    ids = torch.randint(0, 61, (2, 24), generator=torch.Generator().manual_seed(1))
    output = rack(ids)
    return _digest({"logits": output if isinstance(output, Tensor) else output.logits})


def zoo() -> dict[str, Observation]:
    """Status of most checks on the clean models and loops of the zoo, and of the fast suite on the mutants.

    A mutant also gets the checks of the full suite in the family that has to catch it.
    """
    mutants = detection.zoo()
    twins = {mutant.twin_name: mutant.twin for mutant in mutants.values()}
    found = {f"twin {name}": partial(_statuses, make, "fast", _families()) for name, make in twins.items()}
    return found | {
        name: partial(_statuses, mutant.make, "fast", tuple(mutant.family))
        for name, mutant in mutants.items()
    }


def healthy() -> dict[str, Observation]:
    """Status of the checks on third-party models: most checks on every third, the fast suite on the rest."""
    models = [(name, make) for name, make in third_party.subjects() if not name.startswith("litgpt")]
    chosen = models[:: len(models) // HEALTHY]

    def ask(make: Callable[[], Any], families: tuple[str, ...]) -> Iterator[dict[str, Any]]:
        torch.manual_seed(0)  # some libraries return a model instead of a factory
        try:
            made = make()
        except Exception as error:
            yield {"not built": type(error).__name__}
            return
        yield from _statuses(lambda: made, "fast", families)

    return {
        name: partial(ask, make, () if number % FULL_EVERY else _families())
        for number, (name, make) in enumerate(chosen)
    }


def _families() -> tuple[str, ...]:
    """Return all families except two, whose checks of the full suite take minutes."""
    from stackwise.checks.check import select_checks

    every = {each.family for asks in ("model", "trainer") for each in select_checks(suite="full", asks=asks)}
    return tuple(sorted(every - {"equivalence", "compilation"}))


def _statuses(
    make: Callable[[], Any], suite: str, families: tuple[str, ...] = ()
) -> Iterator[dict[str, Any]]:
    for answer in detection.answers(make, suite, families):
        if "check" in answer:
            yield {answer["check"]: answer["status"]}
        else:
            yield answer


def guard() -> dict[str, Observation]:
    """Alarms and actions of the guard, and final weights, for each fault and control of `bench.recovery`."""
    plan = {"steps": 112, "at": (50,), "seeds": (0,)}

    def plain(job: Observation) -> Iterator[dict[str, Any]]:
        for run in job():
            losses = {str(step): float(loss).hex() for step, loss in run.pop("losses").items()}
            yield {key: str(value) for key, value in run.items()} | {"losses": losses}

    return {name: partial(plain, job) for name, job in recovery.runs_of(plan, (recovery.OURS,)).items()}


def gate() -> dict[str, Observation]:
    """Verdict of the gate for every recorded series of rounds."""

    def replay() -> Iterator[dict[str, Any]]:
        from bench.gate.replay import replayed
        from bench.gate.runs import RunLog
        from bench.gate.tools import OURS

        runs = RunLog(ROOT / "bench/results/cpu/gate-runs.jsonl").read()
        for run in replayed([run for run in runs if run.tool == OURS]):
            for test, outcome in run.outcomes.items():
                yield {f"{run.block} {test}": outcome.verdicts}

    return {"recorded rounds": replay}


def names() -> dict[str, Observation]:
    """Public names of the packages, and the markers, options, fixtures and commands."""
    return {
        "public": _public_names,
        "markers": partial(_listed, "--markers", r"@pytest\.mark\.(\w+)"),
        "options": partial(_listed, "--help", r"^ +(--(?:stackwise|gpu)[\w-]*|stackwise_\w+)"),
        "fixtures": partial(_listed, "--fixtures", r"^(\w+)(?: \[.*\])? -- .*pytest_stackwise"),
        "commands": _commands,
    }


def _public_names() -> Iterator[dict[str, Any]]:
    import stackwise

    packages = [stackwise.__name__] + [
        module.name for module in pkgutil.walk_packages(stackwise.__path__, "stackwise.") if module.ispkg
    ]
    for package in sorted(packages):
        for name in getattr(import_module(package), "__all__", ()):
            value = getattr(import_module(package), name)
            kind = "class" if inspect.isclass(value) else "function" if callable(value) else "value"
            yield {f"{package}.{name}": kind}


def _listed(option: str, pattern: str) -> Iterator[dict[str, Any]]:
    """Yield the names that `pytest OPTION` lists and that this project defines."""
    plain, ours = (_pytest(option, *extra) for extra in (("-p", "no:stackwise"), ()))
    known = set(re.findall(pattern, plain, re.MULTILINE))
    for name in re.findall(pattern, ours, re.MULTILINE):
        if name not in known:
            yield {name: "present"}


def _pytest(*arguments: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "--rootdir", folder, *arguments]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


def _commands() -> Iterator[dict[str, Any]]:
    def options_of(*words: str) -> tuple[str, list[str]]:
        command = [sys.executable, "-m", "stackwise.cli", *words, "--help"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return text, sorted(set(re.findall(r"--[a-z][\w.-]*", text)))

    text, _ = options_of()
    for command in re.findall(r"^\W+([a-z]+) {2,}", text, re.MULTILINE):
        yield {command: options_of(command)[1]}


GROUPS = {each.__name__: each for each in (names, logits, gate, guard, examples, healthy, zoo)}
