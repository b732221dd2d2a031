"""What bench.gate does in which order, with tools that answer at once."""

import contextlib

import pytest
import torch

from bench import claim as claim_module
from bench.claim import Claim
from bench.gate import __main__ as command
from bench.gate.__main__ import main
from bench.gate.ablation import DESIGNS
from bench.gate.effects import EFFECTS, SAME
from bench.gate.findings import bars
from bench.gate.plan import Plan
from bench.gate.runs import RunLog
from bench.gate.tools import OURS, TOOLS
from bench.gate.tools.tool import ToolFailedError
from tests.bench.gate.made_runs import ours, theirs


def small_plan(effect, *conditions):
    return Plan(conditions, (effect,), 1, (SAME, effect), ("python",), 8.0, 0.5)


class TestMain:
    """With tools that answer at once."""

    @pytest.fixture
    def tools(self, monkeypatch, tmp_path):
        asked = []

        class Made:
            packages, effort, least_effort = (), 1.0, 0.1

            def __init__(self, name):
                self.name = name

            def prepare(self, repository):
                asked.append(("prepare", self.name))

            def compare(self, repository, head, names, effort, seconds):
                asked.append((self.name, head))
                assert repository.tree(head).is_dir()
                if self.name == "pyperf" and head == "up10":
                    raise ToolFailedError("it crashed")
                if self.name == OURS:
                    return {name: ours("PASS" if head == SAME else "REGRESSED", 0.1) for name in names}
                return {name: theirs(0.0) for name in names}

        made = tuple(Made(tool.name) for tool in TOOLS)
        effects = {
            branch: {"iterations": 0, "sleep_seconds": 0.0, "change": effect.share}
            for branch, effect in EFFECTS.items()
        }
        monkeypatch.setattr(claim_module, "RESULTS", tmp_path / "results")
        monkeypatch.setattr(command, "TOOLS", made)
        monkeypatch.setattr(command, "missing_tools", list)
        monkeypatch.setattr(command, "calibrate", lambda name, seconds: {"effects": effects})
        monkeypatch.setattr(command, "QUICK", small_plan("up10", "idle"))
        threads = torch.get_num_threads()
        yield asked
        torch.set_num_threads(threads)

    def test_quick_is_resumed_where_it_was(self, tools, tmp_path, capsys):
        folder = ["--folder", str(tmp_path / "repository")]
        main(["--quick", "--blocks", "1", *folder])
        first = [each for each in tools if each[0] != "prepare"]
        assert sorted(name for name, _ in first) == sorted(tool.name for tool in TOOLS)
        tools.clear()
        main(["--quick", "--resume", "--blocks", "1", *folder])
        second = [each for each in tools if each[0] != "prepare"]
        assert len(second) == len(TOOLS)
        assert {head for _, head in first} | {head for _, head in second} == {SAME, "up10"}
        claim = Claim("gate", quick=True)
        claim.resume()
        assert {bar.name: bar for bar in claim.bars}["found, 10%"].value == 1.0
        [log] = (tmp_path / "results").rglob("gate-quick-runs.jsonl")
        assert len(log.read_text().splitlines()) == 2 * len(TOOLS)
        assert "it crashed" in log.read_text()
        assert "pyperf" in capsys.readouterr().out

    def test_runs_on_file_are_not_thrown_away(self, tools, tmp_path, capsys):
        folder = ["--folder", str(tmp_path / "repository")]
        main(["--blocks", "1", *folder])
        with pytest.raises(SystemExit):
            main(["--blocks", "1", *folder])
        assert "--resume" in capsys.readouterr().err

    def test_no_block_begins_that_would_end_too_late(self, tools, tmp_path):
        main(["--quick", "--minutes", "0.01", "--folder", str(tmp_path / "repository")])
        assert [each for each in tools if each[0] != "prepare"] == []

    def test_ablations_go_on_where_they_were(self, tools, tmp_path, monkeypatch):
        made = []

        def series(repository, names, condition, number):
            made.append((condition, number))
            return {design: {"python": [0.0, 0.001] * 5} for design in DESIGNS}

        monkeypatch.setattr(command, "series", series)
        folder = ["--folder", str(tmp_path / "repository")]
        assert main(["--quick", "--resume", "--ablations", "1", *folder]) == 0
        assert main(["--quick", "--resume", "--ablations", "2", *folder]) == 0
        assert made == [("idle", 0), ("idle", 1)]
        claim = Claim("gate", quick=True)
        claim.resume()
        found = claim.figures["ablations"]["idle"]
        assert found["series"] == 2
        assert set(found["designs"]) == set(DESIGNS)
        assert len(found["designs"]["in turns"]["differences"]["python"]) == 20
        assert found["designs"]["in turns"]["calls"]["python"]["rounds"] == 20

    def test_instructions_of_each_call(self, tools, tmp_path, monkeypatch):
        asked = []

        def count(name, iterations):
            asked.append((name, iterations))
            return {"call": 1000.0, "added": 100.0, "share": 0.1}

        monkeypatch.setattr(command, "count_instructions", count)
        arguments = ["--quick", "--count-instructions", "--folder", str(tmp_path / "repository")]
        assert main(arguments) == 0
        assert asked == [("python", 0)]
        monkeypatch.setattr(command, "count_instructions", lambda name, iterations: None)
        assert main(arguments) == 1

    def test_own_history_has_to_regress(self, tools, monkeypatch):
        monkeypatch.setattr(command, "compare_own_history", lambda: {"verdict": "REGRESSED"})
        assert main(["--quick", "--own-history"]) == 0
        claim = Claim("gate", quick=True)
        claim.resume()
        [bar] = claim.bars
        assert bar.verdict == "PASS"
        assert bars([], claim.figures)[-1] == bar
        monkeypatch.setattr(command, "compare_own_history", lambda: {"verdict": "INCONCLUSIVE"})
        assert main(["--quick", "--own-history"]) == 1

    def test_another_machine_is_refused(self, tools, tmp_path, monkeypatch):
        folder = ["--folder", str(tmp_path / "repository")]
        main(["--quick", "--blocks", "1", *folder])
        monkeypatch.setattr(command, "fingerprint", lambda: {"cpu": "another"})
        with pytest.raises(RuntimeError, match="of another machine"):
            main(["--quick", "--resume", *folder])

    def test_another_plan_is_refused(self, tools, tmp_path, monkeypatch):
        folder = ["--folder", str(tmp_path / "repository")]
        main(["--quick", "--blocks", "2", *folder])
        monkeypatch.setattr(command, "QUICK", small_plan("up05", "idle"))
        with pytest.raises(RuntimeError, match="runs of another plan"):
            main(["--quick", "--resume", *folder])

    def test_only_some_conditions_and_the_others_later(self, tools, tmp_path, monkeypatch):
        monkeypatch.setattr(command, "QUICK", small_plan("up10", "idle", "phases"))
        monkeypatch.setattr(command, "noise", lambda condition, seed: contextlib.nullcontext())
        folder = ["--folder", str(tmp_path / "repository")]
        main(["--quick", "--conditions", "phases", "--blocks", "2", *folder])
        [path] = (tmp_path / "results").rglob("gate-quick-runs.jsonl")
        assert {run.condition for run in RunLog(path).read()} == {"phases"}
        main(["--quick", "--resume", "--blocks", "2", *folder])
        runs = RunLog(path).read()
        assert {run.block for run in runs} == {0, 1, 2, 3}
        assert {(run.condition, run.effect) for run in runs} == {
            (condition, effect) for condition in ("idle", "phases") for effect in (SAME, "up10")
        }

    def test_selected_effects_run_first_and_resume_adds_the_rest(self, tools, tmp_path):
        folder = ["--folder", str(tmp_path / "repository")]
        main(["--quick", "--effects", "up10", "--blocks", "1", *folder])
        [path] = (tmp_path / "results").rglob("gate-quick-runs.jsonl")
        assert {run.effect for run in RunLog(path).read()} == {"up10"}
        main(["--quick", "--resume", "--blocks", "1", *folder])
        assert {run.effect for run in RunLog(path).read()} == {SAME, "up10"}

    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            (["--conditions", "idle,storm"], "got storm; allowed: idle, bursts, phases"),
            (["--effects", "up10,storm"], "got storm; allowed: same, up01, up02"),
            (["--seconds", "0"], "got 0.0; allowed: a number > 0"),
            (["--rivals-every", "0"], "got 0; allowed: an integer >= 1"),
        ],
        ids=["conditions", "effects", "seconds", "rivals"],
    )
    def test_arguments_are_checked(self, tools, arguments, told, capsys):
        with pytest.raises(SystemExit):
            main(arguments)
        assert told in capsys.readouterr().err

    def test_what_is_not_installed_is_told(self, tools, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(command, "missing_tools", lambda: ["asv"])
        with pytest.raises(SystemExit):
            main(["--quick", "--folder", str(tmp_path / "repository")])
        assert "make gate-rivals" in capsys.readouterr().err
