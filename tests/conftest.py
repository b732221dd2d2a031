"""What tests in several folders share: models, and a configuration small enough to train within a test."""

import copy
import gc
import importlib.util
import os
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from tests.forked import HANG_SECONDS
from tests.long_tests import listed

SMALL = {
    "model": {
        "vocab_size": 23,
        "d_model": 16,
        "n_heads": 2,
        "n_kv_heads": 1,
        "d_ff": 32,
        "architecture": {"n_stacks": 2, "blocks_per_stack": 1},
    },
    "training": {
        "batch_size": 2,
        "seq_len": 8,
        "max_steps": 4,
        "device": "cpu",
        "precision": "fp32",
        "log_interval": 1,
        "optimizer": {"lr": 1e-2},
        "schedule": {"kind": "constant", "warmup_steps": 0},
    },
    "data": {},
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark the tests that tests/long_tests.txt lists."""
    long = listed()
    for item in items:
        if item.nodeid in long:
            item.add_marker("long")


@pytest.fixture(scope="module", autouse=True)
def _set_aside():
    """What is there by now is no garbage: thousands of tests and all that they import.

    Measurements and the ends of nested runs collect garbage, and would look through it each time.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _forgotten(tmp_path_factory):
    """Modules that tests wrote and imported: other tests write others under the same names."""
    yield
    written = str(tmp_path_factory.getbasetemp())
    for name, module in list(sys.modules.items()):
        # Its own attributes: modules that load lazily import something when asked.
        if str(getattr(module, "__dict__", {}).get("__file__")).startswith(written):
            del sys.modules[name]


@pytest.fixture(scope="module", autouse=True)
def _compiled_anew():
    """The compiler keeps few graphs of a function, and tests of many modules fill them."""
    yield
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()


@pytest.fixture(scope="session")
def subjects():
    # Under --import-mode=importlib no test folder is on sys.path, so the file is loaded by its place.
    spec = importlib.util.spec_from_file_location(
        "stackwise_test_subjects", Path(__file__).parent / "subjects.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def few_compositions(monkeypatch):
    """Skip the random compositions of the engine."""
    from stackwise.checks.model import equivalence

    monkeypatch.setattr(equivalence, "_MANY", 0)
    monkeypatch.setattr(equivalence, "Explorer", partial(equivalence.Explorer, count=0))


@pytest.fixture
def only_variations(few_compositions, monkeypatch):
    """Return a function that removes all variations of the engine except the named ones."""
    from stackwise.checks.model import equivalence

    explorer = equivalence.Explorer

    def leave(names):
        def explore_some(subject, variations, **more):
            return explorer(subject, [name for name in variations if name in names], **more)

        monkeypatch.setattr(equivalence, "Explorer", explore_some)

    return leave


@pytest.fixture(scope="session")
def ends():
    """Whether a process of this number ends within some seconds."""

    def ends(pid, seconds=HANG_SECONDS):
        deadline = time.monotonic() + seconds
        while (there := _runs(pid)) and time.monotonic() < deadline:
            time.sleep(0.01)
        return not there

    return ends


def _runs(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # What is left of one that has ended, until somebody takes note of it, is none.
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return not stat.parent.parent.exists()  # a system without proc(5), or it has ended by now


def merged(base, changes):
    result = copy.deepcopy(base)
    for key, value in changes.items():
        result[key] = merged(result[key], value) if isinstance(result.get(key), dict) else value
    return result


@pytest.fixture(scope="session")
def make_config():
    """Sections are merged into the small configuration key by key."""
    from stackwise.config import StackWiseConfig

    def make(**sections):
        return StackWiseConfig.from_dict(merged(SMALL, sections))

    return make


@pytest.fixture(scope="session")
def make_rack():
    """The Rack of a configuration; equal calls give equal weights."""
    import torch

    from stackwise.model import create_rack_from_config

    def make(config):
        torch.manual_seed(7)
        return create_rack_from_config(config)

    return make


@pytest.fixture(scope="session")
def make_batches():
    """`count` batches of random ids, a function of `seed` alone."""
    import torch

    def make(config, count=4, seed=0):
        settings = config.training
        generator = torch.Generator().manual_seed(seed)
        shape = (count, settings.batch_size, settings.seq_len + 1)
        return list(torch.randint(config.model.vocab_size, shape, generator=generator))

    return make
