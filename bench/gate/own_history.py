"""Own history: a commit of this project that made something faster, taken back, before the gate.

Commit f48a9cb computes the limits of one history of losses once, where its parent computed them for each of
the questions that the guard asks in a step. The parent is taken for the new code and the commit for the old
one: a slowdown that happened, in the opposite direction. The gate that judges is that of today; both sides
are trees of then.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.gate import command
from bench.marked_tables import ROOT

__all__ = ["FAST", "SLOW", "compare_own_history"]

FAST, SLOW = "f48a9cb", "f48a9cb^"
# The current gate reads it too, and has no DeviceDetector. So the test itself imports it, from an old tree.
_TEST = '''\
"""The detector's limits as the guard asks for them in a step."""

import torch


def test_limits_of_a_step(benchmark):
    from stackwise.stability.detector import DeviceDetector

    torch.manual_seed(0)
    detector = DeviceDetector(device=torch.device("cpu"))
    sound = torch.tensor(True)
    for value in torch.rand(128) + 1:
        detector.accept(value, sound)
    value = torch.tensor(1.5)

    def step():
        limits = detector.limit(), detector.limit(factor=10.0), detector.level()
        detector.accept(value, sound)
        return limits

    benchmark(step)
'''

# The folder of then comes last: what judges is installed, and found before. The sides have their trees first,
# in the place of each folder that this process could import from.
_PROGRAM = "import sys, pytest; sys.path.append('.'); sys.exit(pytest.main(sys.argv[1:]))"
_TEST_FILE = Path("gate_own_history") / "test_detector.py"
_CODES = (0, 1, 7)  # of pytest: passed, regressed, inconclusive


def compare_own_history(repository: Path = ROOT, seconds: float = 600.0) -> dict[str, Any]:
    """The gate's word on `SLOW` against `FAST`, from a fresh clone.

    Args:
        repository: to be cloned; it needs the history of the project.
        seconds: after which the gate begins no new round.

    Returns:
        `base`, `head`, `verdict`, `estimate` (relative change of the time), `low`, `high`, `rounds`,
        `confirmed`, `seconds` and `exit_code`, which is 1 where a test regressed.

    Raises:
        RuntimeError: the commits are not there, or the gate did not compare.
    """
    with tempfile.TemporaryDirectory() as folder:
        clone, report = Path(folder) / "clone", Path(folder) / "report.json"
        command.run(["git", "clone", "--quiet", "--no-checkout", str(repository), str(clone)], Path(folder))
        command.run(["git", "checkout", "--quiet", "--detach", SLOW], clone)
        test = clone / _TEST_FILE
        test.parent.mkdir()
        test.write_text(_TEST)
        arguments = [
            str(_TEST_FILE),
            "-q",
            f"--stackwise-against={FAST}",
            f"--stackwise-gate-report={report}",
            f"--stackwise-gate-seconds={seconds}",
        ]
        line = [sys.executable, "-P", "-c", _PROGRAM, *arguments]
        printed = command.run(line, clone, codes=_CODES)
        if not report.exists():
            raise RuntimeError(f"the gate wrote no report: {command.tail(printed)}")
        result = json.loads(report.read_text())
    [found] = result["tests"]
    if found["status"] != "measured":
        raise RuntimeError(f"{found['nodeid']}: {found['status']}: {found['detail']}")
    decision = found["trials"]["time"]["decision"]
    kept = ("verdict", "estimate", "low", "high", "rounds", "confirmed")
    return {
        "base": FAST,
        "head": SLOW,
        **{key: decision[key] for key in kept},
        "seconds": result["seconds"],
        "exit_code": result["exit_code"],
    }
