"""What rounds on file say by the rule as it is."""

import math

from bench.gate.replay import changed, replayed
from bench.gate.tools import OURS
from bench.gate.tools.tool import Outcome
from tests.bench.gate.made_runs import run_of, theirs

QUIET = [0.001, -0.002, 0.0005, 0.0015, -0.001]


def outcome(verdict, differences, reason):
    kept = {"order_bias": 0.01, "balance": 0.5, "rounds": 4, "seconds": 20.0, "others": {"memory": "PASS"}}
    raw = {**kept, "differences": differences, "base": [1e-3] * len(differences), "reason": reason}
    return Outcome({"gate": verdict, "flagged": verdict}, {"gate": -math.inf, "flagged": 0.0}, raw)


def runs(verdict, differences, reason="open after 4 rounds; the time is up"):
    return [run_of(0, OURS, "same", {"gemm": outcome(verdict, differences, reason)})]


def test_what_was_open_for_a_stray_round_is_told():
    on_file = runs("INCONCLUSIVE", [0.3, *QUIET, *QUIET])
    [run] = after = replayed(on_file)
    found = run.outcomes["gemm"]
    assert found.verdicts == {"gate": "PASS", "flagged": "PASS"}
    assert found.raw["rounds"] == len(found.raw["differences"]) == len(found.raw["base"]) == 8
    assert found.raw["others"] == {"memory": "PASS"} and found.raw["balance"] == 0.5
    assert changed(on_file, after) == {"decisions": 1, "INCONCLUSIVE to PASS": 1}


def test_twice_is_as_once():
    once = replayed(runs("INCONCLUSIVE", [0.3, *QUIET, *QUIET]))
    assert replayed(once) == once


def test_a_slowdown_is_flagged_and_found():
    [run] = replayed(runs("INCONCLUSIVE", [0.05 + each for each in (*QUIET, *QUIET)], "decided"))
    found = run.outcomes["gemm"]
    assert found.verdicts == {"gate": "REGRESSED", "flagged": "REGRESSED"}
    assert 0.04 < found.estimates["gate"] < found.estimates["flagged"] < 0.06


def test_what_wants_more_rounds_than_were_made_is_inconclusive():
    # All rounds together may confirm a flag where the time was up, and not where rounds are merely lacking.
    rounds = [0.03 + each for each in (*QUIET, *QUIET)[:6]]
    said = {
        why: replayed(runs("REGRESSED", rounds, why))[0].outcomes["gemm"].verdicts["gate"]
        for why in ("open; the time is up", "surely costs more")
    }
    assert said == {"open; the time is up": "REGRESSED", "surely costs more": "INCONCLUSIVE"}


def test_others_and_what_was_not_begun_stay_as_they_are():
    raw = {"reason": "no time", "others": {}, "balance": None}
    not_begun = Outcome({"gate": "INCONCLUSIVE", "flagged": "INCONCLUSIVE"}, {"gate": -math.inf}, raw)
    on_file = [
        run_of(0, "asv", "same", {"gemm": theirs(0.1)}),
        run_of(0, OURS, "same", {"gemm": not_begun}),
        run_of(1, OURS, "same", {}, error="it crashed"),
    ]
    assert replayed(on_file) == on_file
    assert changed(on_file, on_file) == {"decisions": 1}
