"""Nested runs: a folder with models in it, and pytest in this process."""

import gc
import importlib
import importlib.util
import json
import os
import subprocess
import warnings

import pytest

from pytest_stackwise import StackwiseWarning
from tests.forked import HANG_SECONDS

# What nested runs ask unless they say otherwise: every check would take minutes, and their number grows.
CORE = "determinism,batch_invariance,causality,finite_gradients,finite_logits,initial_loss"

MODELS = """
import torch
from torch import nn

QUICK = {"min_seconds": 0.0, "min_calls": 3, "warmup_seconds": 0.0}

class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11)

    def forward(self, ids):
        return self.head(self.embedding(ids))

class ConvLM(nn.Module):
    def __init__(self, padding):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.conv = nn.Conv1d(8, 8, 3)
        self.head = nn.Linear(8, 11)
        self.padding = padding

    def forward(self, ids):
        x = nn.functional.pad(self.embedding(ids).transpose(1, 2), self.padding)
        return self.head(self.conv(x).transpose(1, 2))

class Vectors(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x):
        return self.mix(x)

class EvalOnly(Plain):
    def forward(self, ids):
        if self.training:
            raise KeyError("only in eval mode")
        return super().forward(ids)

def plain():
    return Plain()

def conv():
    return ConvLM((2, 0))

def leaky():
    return ConvLM((1, 1))

def vectors():
    return Vectors()

def eval_only():
    return EvalOnly()

def rack():
    from stackwise import create_simple_rack
    return create_simple_rack(1, 2, d_model=16, d_ff=32, n_heads=2, vocab_size=11)

def broken():
    raise RuntimeError("the weights are gone")

def offline():
    import socket
    socket.create_connection(("127.0.0.1", 9), timeout=5)

def number():
    return 3

def needy(width):
    return Plain()

class Loop:
    def __init__(self, model=None):
        self.model = model or Plain()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, batch):
        logits, labels = self.model(batch["input_ids"])[:, :-1], batch["labels"][:, 1:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

class Piling(Loop):
    def step(self, batch):
        self.optimizer.zero_grad = lambda *_, **__: None
        return super().step(batch)

def loop():
    return Loop()

def piling():
    return Piling()

def loop_spec():
    from stackwise.subject.trainer_spec import TrainerSpec
    return TrainerSpec.of(loop, batch_size=2)
"""


@pytest.fixture(scope="session")
def _warm():
    """Whatever a nested run imports first is forgotten at its end, and torch bears no second import."""
    of_the_compiler = ("torch._dynamo.repro.after_dynamo", "torch._inductor.compile_fx")
    of_libraries = [name for name in ("datasets", "sqlalchemy") if importlib.util.find_spec(name)]
    if "sqlalchemy" in of_libraries:
        of_libraries.append("sqlalchemy.dialects.postgresql")  # Optuna's storage imports it too
    for name in (*of_the_compiler, *of_libraries):
        importlib.import_module(name)
    import stackwise.cli  # noqa: F401
    from stackwise import ModelSpec, Report, check_model, create_simple_rack, measure, stability_run
    from stackwise.benchmark import model_workload

    spec = ModelSpec.of(lambda: create_simple_rack(1, 1, d_model=8, d_ff=8, n_heads=1, vocab_size=7))
    check_model(spec)
    stability_run(spec, steps=1)
    workload = model_workload(spec, "train", batch_size=1, seq_len=4)
    measure(workload, min_seconds=0.0, min_calls=1, warmup_seconds=0.0)
    Report().markdown()
    # A nested run collects garbage several times at its end: what is loaded by now is none.
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _machine_without_gpu(request, monkeypatch):
    """A nested run finds the same machine wherever, and however parallel, the outer run is."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("COLUMNS", "200")
    if request.node.get_closest_marker("gpu"):
        return
    import torch

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.fixture(autouse=True)
def folder(pytester, monkeypatch, _machine_without_gpu, few_compositions):
    """The folder of the nested run: `models.py` can be imported from it and from its tests."""
    monkeypatch.setenv("PYTEST_ADDOPTS", f"--stackwise-checks={CORE}")
    pytester.makepyfile(models=MODELS)
    pytester.syspathinsert()
    return pytester.path


@pytest.fixture
def every_check(folder, monkeypatch):
    """The nested run asks what its own options say."""
    monkeypatch.delenv("PYTEST_ADDOPTS")


@pytest.fixture
def run(pytester, _warm):
    """pytest in this process: run(*arguments) -> RunResult."""

    def run(*arguments):
        with warnings.catch_warnings():
            # The filters of the outer run, which make warnings errors, would apply to the nested run too.
            warnings.filterwarnings("always", category=StackwiseWarning)
            return pytester.runpytest_inprocess("-p", "no:cacheprovider", *map(str, arguments))

    return run


@pytest.fixture
def run_apart(pytester):
    """pytest in a process of its own: run_apart(*arguments) -> RunResult."""

    def run(*arguments):
        return pytester.runpytest_subprocess(
            "-p", "no:cacheprovider", *map(str, arguments), timeout=HANG_SECONDS
        )

    return run


@pytest.fixture
def report(folder):
    """The JSON report of the nested run: report(name) -> dict."""

    def report(name="out.json"):
        return json.loads((folder / name).read_text(encoding="utf-8"))

    return report


@pytest.fixture
def driven(monkeypatch):
    """Device and seed of every model that a nested run in this process makes."""
    from stackwise import ModelSpec

    made, create = [], ModelSpec.create

    def recording(self, device="cpu", seed=0):
        made.append((str(device), seed))
        return create(self, device, seed)

    monkeypatch.setattr(ModelSpec, "create", recording)
    return made


@pytest.fixture
def repository(pytester, monkeypatch):
    """A git repository: repository(base, head) commits the files of both; the first commit is tagged `base`.

    Files are texts by path. A head keeps the files of the base that it does not name.
    """
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "PYTEST_ADDOPTS"):
        monkeypatch.delenv(name, raising=False)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}

    def git(*arguments):
        command = ["git", "-c", "user.name=n", "-c", "user.email=e@x", *arguments]
        return subprocess.run(
            command, cwd=pytester.path, check=True, capture_output=True, text=True, env=environment
        ).stdout

    def write(files):
        for path, text in files.items():
            place = pytester.path / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
        git("add", "-A")
        git("commit", "-qm", "change", "--allow-empty")

    def of(base, head):
        git("init", "-q", "-b", "main")
        write({"pytest.ini": "[pytest]\npythonpath = .\ntestpaths = bench\n", **base})
        git("tag", "base")
        write(head)
        return git

    return of
