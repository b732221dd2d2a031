"""`python -m bench.prototype.search_worker STORAGE LOG BUDGET SECONDS`: a search that can be killed.

Every evaluation writes a line into the log as it begins and another as it ends, so that it is known from
outside of the search what was computed how often.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stackwise import StackWiseConfig
from stackwise.prototype.search import TrialOutcome, search_architecture_space

__all__ = ["SPACE", "EvaluationLog", "LoggedEvaluation", "main"]

SPACE: dict[str, Any] = {
    "base": {"model": {"d_model": 16, "n_heads": 1, "n_kv_heads": None, "attention_type": "mha", "d_ff": 16}},
    "space": {
        "model.n_heads": {"low": 1, "high": 8},
        "n_layers": {"low": 1, "high": 8},
        "d_ff_ratio": [1, 2, 3, 4],
        "training.optimizer.lr": [1e-4, 3e-4, 1e-3, 3e-3],
    },
}


@dataclass(frozen=True)
class EvaluationLog:
    """A file with a line a beginning and a line an end of an evaluation, of several processes."""

    path: Path

    def write(self, event: str, config: StackWiseConfig) -> None:
        """One line; short enough that no other process writes into it."""
        text = json.dumps(config.to_dict(), sort_keys=True)
        line = f"{event} {hashlib.sha256(text.encode()).hexdigest()} {os.getpid()}\n"
        with self.path.open("a") as file:
            file.write(line)

    def counts(self, event: str) -> Counter[str]:
        """How often each configuration was begun, or ended."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return Counter(line.split()[1] for line in lines if line.startswith(f"{event} "))


@dataclass(frozen=True)
class LoggedEvaluation:
    """Takes its time, and says the same of the same configuration."""

    path: str
    seconds: float

    def __call__(
        self,
        config: StackWiseConfig,
        seed: int,  # noqa: ARG002
        report: Callable[[float, float], None],  # noqa: ARG002
    ) -> TrialOutcome:
        log = EvaluationLog(Path(self.path))
        log.write("begin", config)
        time.sleep(self.seconds)
        model = config.model
        loss = 3.0 + 1.0 / model.d_model + 0.1 * model.architecture.blocks_per_stack
        log.write("end", config)
        return TrialOutcome("success", loss, 1000.0 / model.d_model, 2**20 * model.d_model)


def main(arguments: list[str] | None = None) -> int:
    storage, log, budget, seconds = sys.argv[1:] if arguments is None else arguments
    search_architecture_space(
        SPACE,
        int(budget),
        objective="loss",
        sampler="tpe",
        storage=storage,
        name="bench",
        evaluate=LoggedEvaluation(log, float(seconds)),
        stale_seconds=5,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
