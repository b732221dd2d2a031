"""pytest-codspeed in bench.gate: its result files."""

import pytest

from bench.gate.repository import BASE
from bench.gate.tools.codspeed import Codspeed
from tests.bench.gate.tools.answers import NAMES, option, write


def test_codspeed(repository, commands):
    def answer(line):
        folder = repository.tree(BASE if not asked[1:] else "up10") / ".codspeed"
        folder.mkdir()
        slower = 1.12 if asked[1:] else 1.0
        names = [f"bench/test_speed.py::test_speed[{name}]" for name in NAMES]
        stats = {"min_ns": 1e6 * slower, "mean_ns": 2e6}
        write(folder / "results_1.json", {"benchmarks": [{"name": name, "stats": stats} for name in names]})

    asked = commands(answer)
    found = Codspeed().compare(repository, "up10", NAMES, 1.5, 90.0)
    assert found["memory"].verdicts == {
        "min:10%": "REGRESSED",
        "min:5%": "REGRESSED",
        "mean:10%": "PASS",
        "mean:5%": "PASS",
    }
    assert found["memory"].raw["head"]["min"] == pytest.approx(1.12e-3)
    assert option(asked[0], "--codspeed-max-time") == "1.5"
    assert option(asked[0], "--codspeed-warmup-time") == "0.5"
