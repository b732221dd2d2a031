"""A search without training: what configurations are said to do, and a process that searches."""

import json
import math
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from stackwise.prototype.search import TrialOutcome
from tests.forked import HANG_SECONDS

SPACE = {
    "space": {
        "model.n_heads": {"low": 1, "high": 6},
        "model.head_dim": [16, 32, 64],
        "n_layers": {"low": 1, "high": 8},
    }
}
FEW = {"space": {"model.n_heads": [2, 4], "n_layers": [1, 2, 3]}}


def depth_of(config):
    return config.model.architecture.n_stacks * config.model.architecture.blocks_per_stack


def bowl(config, seed, report):
    """Best at a width of 128 and a depth of 5; the loss falls to there."""
    loss = 1 + abs(math.log2(config.model.d_model / 128)) + abs(depth_of(config) - 5) / 5
    for step in range(32):
        report((step + 1) / 32, loss + (32 - step) / 32)
    return TrialOutcome(
        "success", loss + seed / 1000, 1e6 / config.model.d_model, config.model.d_model * 1024
    )


def moody(config, seed, report):
    """As `bowl`, but for some that fail in each of the ways there are."""
    match config.model.n_heads:
        case 1:
            return TrialOutcome("nan", math.inf, 1e3, reason="nan at step 3")
        case 2:
            return TrialOutcome("spiky", 0.5, 1e3, 2**20, reason="spiky at step 7")
        case 3:
            raise RuntimeError("out of memory\nand more lines")
        case 4:
            return TrialOutcome("diverged", math.inf, 1e3, 2**20, reason="diverged at step 9")
    return bowl(config, seed, report)


PROGRAM = """
import json, os, sys, time
from pathlib import Path
from stackwise.prototype.search import TrialOutcome, search_architecture_space

def evaluate(config, seed, report):
    with open(sys.argv[3], "a") as log:
        model = config.model
        log.write(json.dumps([os.getpid(), model.d_model, model.n_heads, str(model.architecture)]) + "\\n")
    time.sleep(float(sys.argv[4]))
    {inside}
    return TrialOutcome("success", config.model.d_model / 100, 1.0, 1)

if __name__ == "__main__":
    result = search_architecture_space(json.loads(sys.argv[1]), int(sys.argv[5]), storage=sys.argv[2],
                                       evaluate=evaluate, sampler="random", name="shared", stale_seconds=3)
    print(len(result.trials))
"""


def start_search(folder, storage, budget, *, seconds=0.2, inside="", space=SPACE):
    """A process of its own that searches; it writes a line in `log` when it begins to train."""
    path = Path(folder) / "program.py"
    path.write_text(textwrap.dedent(PROGRAM).replace("{inside}", inside))
    arguments = [json.dumps(space), str(storage), str(Path(folder) / "log"), str(seconds), str(budget)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(path), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def lines_of(folder):
    path = Path(folder) / "log"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(condition, seconds=HANG_SECONDS):
    """Until it holds; fails where that takes too long."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited too long"
        time.sleep(0.02)
