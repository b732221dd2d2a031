"""Searches without training: samplers, pruners, failures as results, and a budget that is the study's."""

import importlib
import json
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import optuna
import pytest
import torch

from stackwise.config import StackWiseConfig
from stackwise.prototype.search import (
    ScoreWeights,
    SearchTrial,
    Space,
    TrialOutcome,
    load_search,
    processes,
    search_architecture_space,
    study,
    worker,
)
from stackwise.prototype.search.objective import read_objectives
from stackwise.prototype.search.record import requeue
from stackwise.prototype.search.storage import open_storage, place_of, quiet_optuna
from tests.forked import HANG_SECONDS
from tests.prototype.search.searches import (
    FEW,
    SPACE,
    bowl,
    depth_of,
    lines_of,
    moody,
    start_search,
    wait_for,
)

PLAIN = {"sampler": "random", "evaluate": bowl}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shifted(config, seed, report, by):
    found = bowl(config, seed, report)
    return replace(found, loss=found.loss + by)


@dataclass(frozen=True)
class Shifted:
    by: float

    def __call__(self, config, seed, report):
        return shifted(config, seed, report, self.by)

    def twice(self, config, seed, report):
        return shifted(config, seed, report, 2 * self.by)


def configs_of(result):
    return [trial.config for trial in result.trials]


class TestSamplers:
    @pytest.mark.parametrize("sampler", ["random", "tpe", "gp"])
    def test_of_one_objective(self, sampler):
        result = search_architecture_space(
            SPACE, 9, objective="loss", sampler=sampler, evaluate=bowl, storage="memory"
        )
        assert len(result.trials) == len(result.succeeded) == 9
        assert result.best.loss == min(trial.loss for trial in result.trials)
        assert result.ranked[0] is result.best

    @pytest.mark.parametrize("sampler", ["random", "tpe", "nsga2"])
    def test_of_several(self, sampler):
        result = search_architecture_space(
            SPACE,
            12,
            objective=("loss", "tokens_per_second", "peak_bytes"),
            sampler=sampler,
            evaluate=bowl,
            storage="memory",
        )
        assert len(result.trials) == 12
        for trial in result.front:
            for other in result.trials:
                better = (
                    other.loss < trial.loss,
                    other.tokens_per_second > trial.tokens_per_second,
                    other.peak_bytes < trial.peak_bytes,
                )
                worse = (
                    other.loss > trial.loss,
                    other.tokens_per_second < trial.tokens_per_second,
                    other.peak_bytes > trial.peak_bytes,
                )
                assert not any(better) or any(worse)

    def test_of_ones_own(self):
        sampler = optuna.samplers.TPESampler(seed=1, n_startup_trials=2)
        result = search_architecture_space(SPACE, 4, sampler=sampler, evaluate=bowl, storage="memory")
        assert len(result.trials) == 4

    @pytest.mark.slow
    def test_tpe_finds_more_than_chance(self):
        budget, losses = 40, {}
        for sampler in ("tpe", "random"):
            found = [
                search_architecture_space(
                    SPACE,
                    budget,
                    objective="loss",
                    sampler=sampler,
                    evaluate=bowl,
                    storage="memory",
                    seed=seed,
                )
                for seed in range(2)
            ]
            losses[sampler] = [sorted(t.loss for t in each.trials)[budget // 2] for each in found]
        assert sum(losses["tpe"]) < sum(losses["random"])

    def test_what_is_none_is_refused(self):
        with pytest.raises(ValueError, match="sampler: got 'grid'; allowed: 'tpe', 'random', 'gp', 'nsga2'"):
            search_architecture_space(SPACE, 4, sampler="grid", evaluate=bowl, storage="memory")


class TestDraws:
    def test_are_of_the_seed(self):
        one, again, other = (
            search_architecture_space(SPACE, 6, storage="memory", seed=seed, **PLAIN) for seed in (3, 3, 4)
        )
        assert configs_of(one) == configs_of(again) != configs_of(other)

    @pytest.mark.parametrize("sampler", ["random", "tpe"])
    def test_of_a_resumed_search_are_those_of_a_whole_one(self, sampler, folder):
        asked = {"sampler": sampler, "evaluate": bowl, "name": "one"}
        whole = search_architecture_space(SPACE, 15, storage=folder / "whole", **asked)
        for budget in (4, 9, 15):
            result = search_architecture_space(SPACE, budget, storage=folder / "parts", **asked)
            assert len(result.trials) == budget
        if sampler == "random":  # TPE takes its startup from the budget
            assert configs_of(result) == configs_of(whole)

    def test_nothing_is_left_to_do(self, folder):
        search_architecture_space(SPACE, 5, **PLAIN)
        assert (folder / "search.db").is_file()
        seen = []
        result = search_architecture_space(SPACE, 5, sampler="random", evaluate=bowl, on_trial=seen.append)
        assert len(result.trials) == 5 and seen == []


class TestDuplicates:
    def test_each_configuration_is_trained_once(self):
        trained = []

        def evaluate(config, seed, report):
            trained.append(config.to_dict()["model"])
            return bowl(config, seed, report)

        result = search_architecture_space(FEW, 6, sampler="tpe", evaluate=evaluate, storage="memory")
        assert len(trained) == len(result.trials) == 6
        assert all(trained.count(each) == 1 for each in trained)

    def test_a_space_without_more_ends_the_search(self):
        result = search_architecture_space(FEW, 50, storage="memory", **PLAIN)
        assert len(result.trials) == 6
        assert result.notes == ("6 of 50 trials: the space holds no further configuration",)

    def test_small_variants_that_are_one_are_trained_once(self):
        trained = []

        def evaluate(config, seed, report):
            trained.append(config)
            return bowl(config, seed, report)

        result = search_architecture_space(
            {"space": {"n_layers": [8, 16]}},
            9,
            sampler="random",
            evaluate=evaluate,
            storage="memory",
            small_factor=8,
        )
        assert [trial.parameters for trial in result.trials] != []
        assert len(trained) == len(result.trials) == len({str(config) for config in trained})
        assert all(config.model.n_heads == 1 for config in trained)
        assert any("8 times fewer heads" in note for note in result.notes)


class TestFailures:
    @pytest.mark.parametrize(
        "objective, sampler",
        [
            ("loss", "tpe"),
            ("score", "tpe"),
            pytest.param("score", "gp", marks=pytest.mark.slow),
            (("loss", "tokens_per_second"), "nsga2"),
            (("loss", "tokens_per_second"), "tpe"),
        ],
    )
    def test_are_results_behind_all_others(self, objective, sampler):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = search_architecture_space(
                SPACE, 24, objective=objective, sampler=sampler, evaluate=moody, storage="memory"
            )
        kinds = {trial.status for trial in result.trials}
        assert kinds >= {"success", "error"} and len(kinds) >= 3
        assert len(result.trials) == 24
        reasons = {trial.status: trial.reason for trial in result.trials}
        expected = {
            "nan": "nan at step 3",
            "spiky": "spiky at step 7",
            "diverged": "diverged at step 9",
            "error": "RuntimeError: out of memory",
            "success": "",
        }
        assert reasons == {key: value for key, value in expected.items() if key in reasons}
        statuses = [trial.status for trial in result.ranked]
        assert statuses == ["success"] * statuses.count("success") + [s for s in statuses if s != "success"]
        assert all(trial.status == "success" for trial in result.front)
        assert all(trial.score is None for trial in result.trials if trial.status != "success")

    def test_a_sampler_is_told_the_worst_success_and_that_it_is_infeasible(self, folder):
        def evaluate(config, seed, report):
            if config.model.architecture.blocks_per_stack == 1:
                return TrialOutcome("nan", math.inf)
            return TrialOutcome("success", float(config.model.d_model), 1.0, 1)

        space = {
            "base": {"model": {"architecture": {"n_stacks": 1}}},
            "space": {"n_layers": [1, 2], "model.n_heads": [2, 4]},
        }
        search_architecture_space(
            space, 4, objective="loss", sampler="random", evaluate=evaluate, storage=folder / "j", name="s"
        )
        with open_storage(place_of(folder / "j")) as storage:
            trials = optuna.load_study(study_name="s", storage=storage).trials
        done = [t for t in trials if t.state == optuna.trial.TrialState.COMPLETE]
        worst = 2 * math.log(256)  # before any success
        for trial in done:
            if trial.constraints["infeasible"]:
                assert trial.value == worst
            else:
                value = trial.value
                worst = value if worst == 2 * math.log(256) else max(worst, value)
        assert sorted(trial.constraints["infeasible"] for trial in done) == [0.0, 0.0, 1.0, 1.0]

    def test_what_was_asked_for_and_not_measured_is_an_error(self):
        def evaluate(config, seed, report):
            return TrialOutcome("success", 1.0)

        result = search_architecture_space(
            FEW, 2, objective=("loss", "tokens_per_second"), evaluate=evaluate, storage="memory"
        )
        assert [trial.reason for trial in result.trials] == ["not measured: tokens_per_second"] * 2
        result = search_architecture_space(FEW, 2, objective="score", evaluate=evaluate, storage="memory")
        assert {trial.reason for trial in result.trials} == {"not measured: score"}
        result = search_architecture_space(FEW, 2, objective="loss", evaluate=evaluate, storage="memory")
        assert len(result.succeeded) == 2
        free = ScoreWeights(time=0.0, memory=0.0)
        result = search_architecture_space(
            FEW, 2, objective="score", evaluate=evaluate, storage="memory", weights=free
        )
        assert [trial.score for trial in result.trials] == [-1.0, -1.0]

    @pytest.mark.parametrize("loss, seeds", [(1.0, 1), (None, 2)])
    def test_what_is_no_outcome_ends_the_search_and_is_no_result(self, folder, loss, seeds):
        right = []

        def evaluate(config, seed, report):
            return TrialOutcome("success", 1.0) if right else loss

        asked = {"objective": "loss", "name": "s", "evaluate": evaluate, "seeds": seeds}
        kind = type(loss).__name__
        with pytest.raises(TypeError, match=f"evaluate: returned {kind}, {loss}; wanted a TrialOutcome"):
            search_architecture_space(FEW, 2, **asked)
        right.append(True)  # as it is called again
        assert len(search_architecture_space(FEW, 2, **asked).succeeded) == 2

    def test_numbers_of_numpy_are_kept_and_read_again(self, folder):
        def evaluate(config, seed, report):
            return TrialOutcome("success", np.float32(0.5), np.float32(3), np.int64(5))

        asked = {"objective": "score", "name": "s", "evaluate": evaluate}
        result = search_architecture_space(FEW, 2, **asked)
        [one, _] = result.trials
        assert (one.loss, one.tokens_per_second, one.peak_bytes) == (0.5, 3.0, 5)
        assert {type(each) for each in (one.loss, one.tokens_per_second)} == {float}
        assert type(one.peak_bytes) is int
        assert result.save(folder / "out")

    def test_a_speed_that_is_no_number_is_an_error(self, folder):
        def evaluate(config, seed, report):
            return TrialOutcome("success", 1.0, math.nan if config.model.n_heads == 2 else 1.0, 1)

        result = search_architecture_space(
            FEW, 6, objective="tokens_per_second", evaluate=evaluate, storage="memory"
        )
        told = "ValueError: tokens_per_second: got nan; allowed: a finite number"
        assert {trial.reason for trial in result.trials} == {"", told}
        assert len(result.succeeded) == 3
        assert "tokens_per_second" in str(result) and result.save(folder / "out")


DEPTHS = {"space": {"n_layers": [1, 2, 3, 4]}}


class TestMachine:
    """What the machine is to blame for, and no configuration."""

    @pytest.mark.parametrize("error", [FileNotFoundError("no such text"), ImportError("no such library")])
    def test_what_is_missing_ends_the_search_and_is_no_result(self, folder, error):
        there = []

        def evaluate(config, seed, report):
            if not there:
                raise error
            return bowl(config, seed, report)

        asked = {"sampler": "random", "name": "s", "evaluate": evaluate}
        for _ in range(2):
            with pytest.raises(type(error), match="no such"):
                search_architecture_space(FEW, 3, **asked)
        there.append(True)
        assert len(search_architecture_space(FEW, 3, **asked).succeeded) == 3

    def test_configuration_missing_a_file_three_times_becomes_an_error(self, folder):
        def evaluate(config, seed, report):
            if depth_of(config) == 3:
                raise FileNotFoundError("no such text")
            return bowl(config, seed, report)

        asked = {"sampler": "random", "name": "s", "evaluate": evaluate}
        for _ in range(3):
            with pytest.raises(FileNotFoundError):
                search_architecture_space(DEPTHS, 4, **asked)
        result = search_architecture_space(DEPTHS, 4, **asked)
        assert len(result.succeeded) == 3
        assert result.ranked[-1].reason == "FileNotFoundError: no such text, 3 times"

    def test_a_run_that_takes_too_long_is_a_result(self):
        def evaluate(config, seed, report):
            if depth_of(config) == 3:
                raise TimeoutError("too slow")
            return bowl(config, seed, report)

        result = search_architecture_space(DEPTHS, 4, evaluate=evaluate, storage="memory")
        assert len(result.succeeded) == 3
        assert result.ranked[-1].reason == "TimeoutError: too slow"

    @pytest.mark.parametrize("reports", [True, False])
    def test_what_a_later_seed_misses_is_its_error(self, reports):
        def evaluate(config, seed, report):
            if seed:
                raise FileNotFoundError("gone")
            if reports:
                report(0.5, 1.0)
            return bowl(config, seed, report)

        result = search_architecture_space(FEW, 1, evaluate=evaluate, seeds=2, storage="memory")
        assert [trial.reason for trial in result.trials] == ["FileNotFoundError: gone"]

    def test_what_is_lost_in_a_training_is_its_error(self):
        def evaluate(config, seed, report):
            report(0.1, 1.0)
            raise ConnectionResetError("gone")

        result = search_architecture_space(FEW, 1, evaluate=evaluate, storage="memory")
        assert [trial.reason for trial in result.trials] == ["ConnectionResetError: gone"]

    def test_a_device_that_is_lost_ends_the_process_and_counts_as_its_end(self, folder):
        broken = [True]

        def evaluate(config, seed, report):
            if broken:
                raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
            return bowl(config, seed, report)

        asked = {"sampler": "random", "name": "s", "evaluate": evaluate}
        for _ in range(2):
            with pytest.raises(torch.AcceleratorError):
                search_architecture_space(FEW, 3, **asked)
        broken.clear()
        assert len(search_architecture_space(FEW, 3, **asked).succeeded) == 3
        broken.append(True)
        for _ in range(3):
            with pytest.raises(torch.AcceleratorError):
                search_architecture_space(FEW, 4, **asked)
        broken.clear()
        result = search_architecture_space(FEW, 4, **asked)
        assert result.ranked[-1].reason == "its process ended, 3 times"

    def test_memory_that_is_too_small_is_a_result(self):
        def evaluate(config, seed, report):
            raise torch.AcceleratorError("CUDA error: out of memory")

        result = search_architecture_space(FEW, 1, evaluate=evaluate, storage="memory")
        assert [trial.status for trial in result.trials] == ["error"]

    def test_worker_whose_device_is_lost_exits_with_a_code(self, monkeypatch):
        def run(self):
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")

        monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
        monkeypatch.setattr(worker.Worker, "run", run)
        monkeypatch.setattr(pickle, "loads", lambda _: SimpleNamespace(open_study=nullcontext))
        with pytest.raises(SystemExit) as caught:
            processes._work_apart(0, b"")
        assert caught.value.code == processes._DEVICE_LOST


def test_a_trial_that_ends_reads_no_configuration_but_its_own(monkeypatch):
    read, reads = StackWiseConfig.from_json, []

    def from_json(*given, **options):
        reads.append(given)
        return read(*given, **options)

    asked = {"objective": ("loss", "tokens_per_second"), "storage": "memory", "sampler": "nsga2"}
    monkeypatch.setattr(StackWiseConfig, "from_json", from_json)
    result = search_architecture_space(SPACE, 12, evaluate=moody, **asked)
    assert any(trial.status == "error" for trial in result.trials)
    assert len(reads) <= 2 * 12 + 1  # as it ends, and for the result


class TestSeeds:
    def test_loss_is_their_mean_and_the_worst_status_counts(self):
        def evaluate(config, seed, report):
            if config.model.n_heads == 4 and seed == 12:
                return TrialOutcome("spiky", 9.0, 3.0, 5, "spiky at step 1")
            return TrialOutcome("success", float(seed), float(seed), seed)

        result = search_architecture_space(
            FEW, 6, objective="loss", seeds=3, seed=10, evaluate=evaluate, storage="memory"
        )
        for trial in result.trials:
            if trial.values["model.n_heads"] == 2:
                assert (trial.status, trial.losses, trial.loss) == ("success", (10.0, 11.0, 12.0), 11.0)
                assert (trial.tokens_per_second, trial.peak_bytes) == (11.0, 12)
            else:
                assert (trial.status, trial.loss) == ("spiky", 10.0)

    def test_which_ones_may_be_said(self):
        def evaluate(config, seed, report):
            return TrialOutcome("success", float(seed), 1.0, 1)

        asked = {"objective": "loss", "seed": 10, "evaluate": evaluate, "storage": "memory"}
        [trial] = search_architecture_space(FEW, 1, seeds=[7, 3], **asked).trials
        assert trial.losses == (7.0, 3.0)
        names = {search_architecture_space(FEW, 1, seeds=seeds, **asked).name for seeds in (2, [7, 3])}
        assert len(names) == 2  # other runs, another study
        with pytest.raises(ValueError, match="seeds: got 2; allowed: 5 or more"):
            search_architecture_space(FEW, 1, seeds=[7, 3], pruner="wilcoxon", **asked)

    def test_no_further_seed_where_one_broke(self):
        seen = []

        def evaluate(config, seed, report):
            seen.append(seed)
            return TrialOutcome("nan", math.inf)

        search_architecture_space(FEW, 1, seeds=5, evaluate=evaluate, storage="memory")
        assert seen == [0]


class TestPruners:
    def staircase(self, config, seed, report):
        """Each trial is worse than all before it, from its first step on."""
        self.level += 1
        for step in range(64):
            report((step + 1) / 64, self.level + (64 - step) / 640)
            self.steps += 1
        return TrialOutcome("success", float(self.level), 1.0, 1)

    @pytest.mark.parametrize("objective", ["loss", "score"])
    @pytest.mark.parametrize("pruner", ["median", "hyperband"])
    def test_ends_what_is_worse(self, pruner, objective):
        self.level = self.steps = 0
        result = search_architecture_space(
            SPACE,
            14,
            objective=objective,
            sampler="random",
            pruner=pruner,
            evaluate=self.staircase,
            storage="memory",
        )
        pruned = [trial for trial in result.trials if trial.status == "pruned"]
        assert pruned and self.steps < 14 * 64
        assert result.trials[0].status == "success" and result.best.number == result.trials[0].number
        assert all(trial.loss > result.best.loss and trial.losses == () for trial in pruned)

    @pytest.mark.parametrize("seeds", [5, 8])
    def test_wilcoxon_compares_seeds(self, seeds):
        runs = []

        def evaluate(config, seed, report):
            runs.append(seed)
            return TrialOutcome("success", config.model.d_model + seed / 10, 1.0, 1)

        result = search_architecture_space(
            SPACE,
            8,
            objective="loss",
            sampler="random",
            pruner="wilcoxon",
            seeds=seeds,
            evaluate=evaluate,
            storage="memory",
        )
        pruned = [trial for trial in result.trials if trial.status == "pruned"]
        assert pruned and len(runs) < 8 * seeds
        assert all(4 <= len(trial.losses) < seeds for trial in pruned)

    def test_of_ones_own(self):
        self.level = self.steps = 0
        pruner = optuna.pruners.ThresholdPruner(upper=3.5)
        result = search_architecture_space(
            SPACE,
            6,
            objective="loss",
            sampler="random",
            pruner=pruner,
            evaluate=self.staircase,
            storage="memory",
        )
        assert [trial.status for trial in result.trials] == ["success"] * 3 + ["pruned"] * 3

    @pytest.mark.parametrize(
        "asked, said",
        [
            ({"pruner": "best"}, "pruner: got 'best'; allowed: None, 'hyperband', 'median', 'wilcoxon'"),
            ({"pruner": "wilcoxon", "seeds": 4}, "seeds: got 4; allowed: 5 or more"),
            (
                {"pruner": "median", "objective": ("loss", "parameters")},
                "pruner: got 'median'; allowed: None with several objectives",
            ),
            (
                {"pruner": "median", "objective": "tokens_per_second"},
                "objective: got 'tokens_per_second'; allowed: 'loss' or 'score' with pruner='median', which",
            ),
        ],
        ids=["name", "seeds", "objectives", "no loss"],
    )
    def test_what_cannot_be_is_refused(self, asked, said):
        with pytest.raises(ValueError) as caught:
            search_architecture_space(SPACE, 4, evaluate=bowl, storage="memory", **asked)
        assert said in str(caught.value)


class TestStorage:
    def test_sqlite(self, folder):
        url = f"sqlite:///{folder}/search.db"
        search_architecture_space(SPACE, 3, storage=url, **PLAIN)
        result = search_architecture_space(SPACE, 5, storage=url, **PLAIN)
        assert len(result.trials) == 5
        assert load_search(url).trials == result.trials

    def test_a_folder_and_what_optuna_made(self, folder):
        (folder / "runs").mkdir()
        search_architecture_space(SPACE, 3, storage=folder / "runs", **PLAIN)
        assert (folder / "runs/search.db").is_file()
        storage = optuna.storages.InMemoryStorage()
        search_architecture_space(SPACE, 3, storage=storage, **PLAIN)
        assert len(load_search(storage).trials) == 3

    def test_searches_that_differ_are_other_studies(self, folder):
        one = search_architecture_space(SPACE, 2, **PLAIN)
        two = search_architecture_space(SPACE, 2, steps=77, **PLAIN)
        assert one.name != two.name
        with pytest.raises(ValueError, match=f"name: got None; allowed: .*{one.name}"):
            load_search(folder)
        assert load_search(folder, one.name) == one

    def test_functions_of_a_module_are_told_apart_by_their_names(self):
        names = [search_architecture_space(FEW, 1, evaluate=way).name for way in (bowl, moody, bowl)]
        assert names[0] == names[2] != names[1]

    @pytest.mark.parametrize("kind", ["object", "partial", "method", "closure", "lambda", "script"])
    def test_other_evaluations_require_a_name(self, kind):
        def closure(config, seed, report):
            return bowl(config, seed, report)

        script = {"__name__": "__main__", "bowl": bowl}
        exec("def evaluate(*given):\n    return bowl(*given)\n", script)
        way = {
            "closure": closure,
            "lambda": lambda config, seed, report: bowl(config, seed, report),
            "object": Shifted(1.0),
            "partial": partial(shifted, by=1.0),
            "method": Shifted(1.0).twice,
            "script": script["evaluate"],
        }[kind]
        with pytest.raises(ValueError, match="name: got None; allowed: a name of the study, because eval"):
            search_architecture_space(FEW, 1, evaluate=way)
        assert len(search_architecture_space(FEW, 1, evaluate=way, name="mine").trials) == 1
        assert len(search_architecture_space(FEW, 1, evaluate=way, storage="memory").trials) == 1

    def test_what_trials_run_on_is_of_the_study(self, monkeypatch):
        space = Space.from_dict(FEW)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert study._device_type(space, None) == study._device_type(space, "cpu") == "cpu"
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        assert study._device_type(space, None) == "cuda"
        searched = Space.from_dict({"space": {"training.device": ["cpu", "cuda"]}})
        assert study._device_type(searched, None) is None
        assert search_architecture_space(FEW, 1, **PLAIN).definition["device"] is None

    def test_a_study_is_of_one_kind(self):
        search_architecture_space(SPACE, 2, name="mine", **PLAIN)
        with pytest.raises(ValueError, match="steps: study 'mine' was begun with 1000; allowed: the same"):
            search_architecture_space(SPACE, 4, name="mine", steps=50, **PLAIN)
        with pytest.raises(ValueError, match="space: study 'mine' was begun with another one"):
            search_architecture_space(FEW, 4, name="mine", **PLAIN)
        assert len(search_architecture_space(SPACE, 3, name="mine", **PLAIN).trials) == 3

    def test_file_that_is_no_database_is_refused_unchanged(self, folder):
        (folder / "other").write_text("no database" * 100)
        with pytest.raises(OSError, match=r"other: .*not a database"):
            search_architecture_space(SPACE, 2, storage=folder / "other", **PLAIN)
        with pytest.raises(OSError, match=r"other: .*not a database"):
            load_search(folder / "other")
        assert (folder / "other").read_text() == "no database" * 100

    def test_settings_of_stacks_are_read_again(self, folder):
        base = {"training": {"optimizer": {"per_stack": {0: {"lr": 1e-2}, 1: {"weight_decay": 0.5}}}}}
        space = FEW | {"base": base}
        result = search_architecture_space(space, 2, storage=folder / "j", **PLAIN)
        stored = load_search(folder / "j")
        assert stored.trials == result.trials
        assert Space.from_dict(stored.definition["space"]) == Space.from_dict(space)
        for trial in result.succeeded:
            own = trial.config.training.optimizer.per_stack
            assert (own[0].lr, own[1].weight_decay) == (1e-2, 0.5)
            assert SearchTrial.from_dict(json.loads(json.dumps(trial.to_dict()))) == trial
        assert len(result.succeeded) == 2

    def test_what_is_not_there_is_not_shown(self, folder):
        with pytest.raises(ValueError, match=r"storage: got .*none\.db'; allowed: a database"):
            load_search(folder / "none.db")
        with pytest.raises(ValueError, match=r"storage: got 'sqlite:///none\.db'; allowed: a database"):
            load_search("sqlite:///none.db")
        assert not (folder / "none.db").exists()


@pytest.mark.parametrize(
    "asked, said",
    [
        ({"budget": 0}, "budget: got 0; allowed: an integer >= 1"),
        ({"jobs": 0}, "jobs: got 0"),
        ({"seeds": True}, "seeds: got True"),
        ({"objective": "accuracy"}, "objective: got 'accuracy'; allowed: 'loss', 'score'"),
        ({"objective": ("loss", "loss")}, "objective: got ('loss', 'loss')"),
        ({"objective": ()}, "objective: got (); allowed: one or more"),
        ({"storage": 3}, "storage: got 3"),
        ({"storage": "memory", "jobs": 2}, "jobs: got 2; allowed: 1 with a storage"),
        (
            {"jobs": 2, "evaluate": lambda config, seed, report: None, "name": "one"},
            "jobs: got 2; allowed: 1 with what",
        ),
        ({"evaluate": 3}, "evaluate: got 3"),
        ({"stale_seconds": 1}, "stale_seconds: got 1; allowed: an integer >= 2"),
    ],
    ids=[
        "budget",
        "jobs",
        "seeds",
        "objective",
        "twice",
        "none",
        "storage",
        "memory",
        "lambda",
        "evaluate",
        "stale",
    ],
)
def test_arguments_are_checked(asked, said):
    with pytest.raises(ValueError) as caught:
        search_architecture_space(SPACE, **({"budget": 3, "evaluate": bowl} | asked))
    assert said in str(caught.value)


class TestInterrupt:
    def test_gives_the_trial_back(self, folder):
        seen = []

        def evaluate(config, seed, report):
            seen.append(config)
            if len(seen) == 3:
                raise KeyboardInterrupt
            return bowl(config, seed, report)

        asked = {"sampler": "random", "evaluate": evaluate, "storage": folder / "j", "name": "one"}
        with pytest.raises(KeyboardInterrupt):
            search_architecture_space(SPACE, 5, **asked)
        assert [trial.status for trial in load_search(folder / "j").trials] == ["success"] * 2
        result = search_architecture_space(SPACE, 5, **asked)
        assert len(result.succeeded) == 5
        assert seen[3] == seen[2]  # that which was given back is done first
        assert len({str(config) for config in seen}) == 5

    def test_error_while_storing_requeues_the_trial(self, folder, monkeypatch):
        def full(*arguments):
            raise ValueError("no space left")

        with monkeypatch.context() as patch:
            patch.setattr(worker, "store_outcome", full)
            with pytest.raises(ValueError, match="no space left"):
                search_architecture_space(FEW, 1, storage=folder / "j", **PLAIN)
        assert len(search_architecture_space(FEW, 1, storage=folder / "j", **PLAIN).succeeded) == 1


def test_trial_that_another_process_repeated_is_left_to_it(folder):
    configs, seen = [], []

    def evaluate(config, seed, report):
        configs.append(config)
        if len(configs) == 1:
            time.sleep(2.2)  # longer than the other process waits for a heartbeat
            on_stale = partial(requeue, read_objectives("loss"))
            with open_storage(place_of(folder / "j"), 1, on_stale) as storage, quiet_optuna():
                optuna.storages.fail_stale_trials(optuna.load_study(study_name="s", storage=storage))
        return bowl(config, seed, report)

    result = search_architecture_space(
        FEW,
        3,
        sampler="random",
        evaluate=evaluate,
        storage=folder / "j",
        name="s",
        on_trial=seen.append,
    )
    assert [trial.number for trial in result.succeeded] == [trial.number for trial in seen] == [1, 2, 3]
    assert len(configs) == 4 and configs[1] == configs[0]


def test_process_that_died_before_its_sample_is_not_waited_for(folder):
    asked = {"storage": folder / "j", "name": "s", **PLAIN}
    search_architecture_space(FEW, 1, **asked)
    with open_storage(place_of(folder / "j")) as storage:
        storage.create_new_trial(storage.get_study_id_from_name("s"))
    result = search_architecture_space(FEW, 3, stale_seconds=2, **asked)
    assert [trial.number for trial in result.succeeded] == [0, 2, 3]


def test_sampled_trial_has_a_heartbeat(folder, monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", lambda thread: None)  # that of Optuna is late
    monkeypatch.setattr(threading.Thread, "join", lambda thread: None)
    monkeypatch.setattr(worker.Worker, "_requeue_running", lambda *_: None)  # as a process that is killed

    class Killed(BaseException):
        pass

    def evaluate(config, seed, report):
        if not killed:
            killed.append(config)
            raise Killed
        return bowl(config, seed, report)

    killed, asked = [], {"sampler": "random", "evaluate": evaluate, "name": "s", "stale_seconds": 2}
    with pytest.raises(Killed):
        search_architecture_space(FEW, 2, storage=folder / "j", **asked)
    result = search_architecture_space(FEW, 2, storage=folder / "j", **asked)
    assert len(result.succeeded) == 2 and killed[0] in configs_of(result)


def test_storage_without_a_heartbeat_is_not_waited_for():
    storage = optuna.storages.InMemoryStorage()
    asked = {"storage": storage, "name": "s", **PLAIN}
    search_architecture_space(FEW, 1, **asked)
    storage.create_new_trial(storage.get_study_id_from_name("s"))
    assert len(search_architecture_space(FEW, 3, **asked).succeeded) == 2


def test_error_of_on_trial_leaves_a_result(folder):
    def full(trial):
        raise OSError("no space left")

    asked = {"storage": folder / "j", "name": "s", **PLAIN}
    with pytest.raises(OSError, match="no space left"):
        search_architecture_space(FEW, 2, on_trial=full, **asked)
    assert [trial.status for trial in load_search(folder / "j").trials] == ["success"]


class TestWorkersThatEnd:
    """Processes that do nothing but end: they are not begun again for ever."""

    @pytest.fixture
    def ending(self, folder, monkeypatch):
        (folder / "ending.py").write_text(
            "import os\n"
            "def at_once(index, pickled):\n"
            "    os._exit(7)\n"
            "def killed(index, pickled):\n"
            "    os.kill(os.getpid(), 9)\n"
        )
        monkeypatch.syspath_prepend(str(folder))
        return importlib.import_module("ending")

    def test_before_they_begin(self, ending, monkeypatch):
        monkeypatch.setattr(processes, "_work_apart", ending.at_once)
        with pytest.raises(RuntimeError, match=r"ended with exit code 7; .*__main__"):
            search_architecture_space(FEW, 3, jobs=2, **PLAIN)

    def test_again_and_again(self, ending, monkeypatch):
        monkeypatch.setattr(processes, "_work_apart", ending.killed)
        said = "7 workers were killed without a result in between"
        with pytest.raises(RuntimeError, match=said):
            search_architecture_space(FEW, 3, jobs=2, **PLAIN)

    def test_error_of_a_worker_is_raised_with_its_text(self):
        class Unreadable:
            def __call__(self, config, seed, report):
                return bowl(config, seed, report)

            def __reduce__(self):
                return int, ("no number",)

        with pytest.raises(RuntimeError, match="a worker failed: ValueError: invalid literal for int"):
            search_architecture_space(FEW, 3, jobs=2, evaluate=Unreadable(), name="s")


@pytest.mark.slow
class TestProcesses:
    """Real processes that meet in a storage and nowhere else."""

    def finished(self, process, seconds=HANG_SECONDS):
        out, err = process.communicate(timeout=seconds)
        assert process.returncode == 0, err
        return int(out)

    def test_two_do_no_trial_twice(self, folder):
        place = folder / "j"
        processes = [start_search(folder, place, 24, seconds=0.1) for _ in range(2)]
        assert [self.finished(process) for process in processes] == [24, 24]
        lines = lines_of(folder)
        assert len(lines) == 24
        assert len({tuple(line[1:]) for line in lines}) == 24
        result = load_search(place)
        assert len(result.succeeded) == 24

    def test_two_share_the_last_of_a_finite_space(self, folder):
        processes = [start_search(folder, folder / "j", 50, seconds=0.2, space=FEW) for _ in range(2)]
        assert [self.finished(process) for process in processes] == [6, 6]
        assert len({tuple(line[1:]) for line in lines_of(folder)}) == len(lines_of(folder)) == 6

    def test_sigkill_loses_no_more_than_what_ran(self, folder):
        process = start_search(folder, folder / "j", 12, seconds=0.5)
        wait_for(lambda: len(lines_of(folder)) >= 4)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        before = lines_of(folder)
        stored = load_search(folder / "j")
        assert len(stored.succeeded) >= len(before) - 1
        again = start_search(folder, folder / "j", 12, seconds=0.01)
        assert self.finished(again) == 12
        result = load_search(folder / "j")
        assert len(result.succeeded) == 12
        # What was finished is not done again; what ran is.
        assert len(lines_of(folder)) in (12, 13)
        kept = {trial.number: trial for trial in result.trials}
        assert all(kept[trial.number] == trial for trial in stored.succeeded)

    def test_what_a_neighbour_was_at_is_taken_over(self, folder):
        first = start_search(folder, folder / "j", 6, seconds=3.0)
        second = start_search(folder, folder / "j", 6, seconds=0.2)
        wait_for(lambda: any(line[0] == first.pid for line in lines_of(folder)))
        first.send_signal(signal.SIGKILL)
        first.communicate()
        assert self.finished(second) == 6
        assert len(load_search(folder / "j").succeeded) == 6

    def test_workers(self, folder):
        seen = []
        result = search_architecture_space(
            SPACE, 10, sampler="random", evaluate=bowl, storage=folder / "j", jobs=2, on_trial=seen.append
        )
        assert len(result.succeeded) == 10
        assert sorted(trial.number for trial in seen) == [trial.number for trial in result.trials]
        assert 1 <= len({trial.worker for trial in result.trials}) <= 2

    def test_a_worker_that_is_killed_is_replaced(self, folder):
        inside = "if config.model.n_heads == 2: os.kill(os.getpid(), 9)"
        program = start_search(folder, folder / "unused", 1)  # writes the program
        program.kill()
        program.communicate()
        text = (folder / "program.py").read_text().replace("sys.argv[3]", repr(str(folder / "log")))
        text = text.split("if __name__")[0].replace("float(sys.argv[4])", "0.05")
        text = text.replace(
            '    return TrialOutcome("success"', f'    {inside}\n    return TrialOutcome("success"'
        )
        (folder / "log").unlink(missing_ok=True)
        (folder / "killing.py").write_text(text)
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(folder))
            from killing import evaluate

            space = {"space": {"model.n_heads": [2, 4], "n_layers": [1, 2]}}
            result = search_architecture_space(
                space,
                4,
                sampler="random",
                evaluate=evaluate,
                storage=folder / "j",
                jobs=2,
                stale_seconds=3,
            )
        assert sorted(trial.status for trial in result.trials) == ["error", "error", "success", "success"]
        assert {trial.reason for trial in result.trials} == {"", "its process ended, 3 times"}
        assert os.getpid() not in {line[0] for line in lines_of(folder)}

    def test_a_script_without_a_guard_is_told(self, folder):
        (folder / "script.py").write_text(
            "from stackwise.prototype.search import search_architecture_space\n"
            "from tests.prototype.search.searches import FEW, bowl\n"
            "search_architecture_space(FEW, 2, sampler='random', evaluate=bowl, storage='j', jobs=2)\n"
        )
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[3])}
        done = subprocess.run(
            [sys.executable, "script.py"],
            capture_output=True,
            text=True,
            env=environment,
            timeout=HANG_SECONDS,
        )
        assert done.returncode == 1
        assert "RuntimeError: a worker ended with exit code 1; a script that searches" in done.stderr
