"""Sweeps that are really trained: what is planned, what comes of it, and what is kept."""

import math
import os
import pickle
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from stackwise.config import ConfigError, StackWiseConfig
from stackwise.prototype import (
    LEARNING_RATES,
    ArchitecturePrototype,
    learning_rate_sweep,
    plan_sweep,
    sensitivity,
)
from stackwise.prototype.sweep_run import PlannedRun, SweepRun, SweepStore
from stackwise.subject.spec import ModelSpec
from tests.forked import HANG_SECONDS

STEPS = 20


def config_of(training=None, **model):
    return StackWiseConfig.from_dict(
        {
            "model": {
                "vocab_size": 16,
                "d_model": 16,
                "d_ff": 32,
                "n_heads": 2,
                "n_kv_heads": 1,
                "architecture": {"n_stacks": 1, "blocks_per_stack": 1},
                **model,
            },
            "training": {
                "batch_size": 2,
                "seq_len": 8,
                "precision": "fp32",
                "device": "cpu",
                "schedule": {"warmup_steps": 0},
                **(training or {}),
            },
            "data": {"task": "markov"},
        }
    )


class Quadratic(nn.Module):
    """One number x, from 1; its loss is 2 + curvature * x^2 / 2, whatever it is given."""

    def __init__(self, curvature):
        super().__init__()
        self.curvature = curvature
        self.x = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, inputs):
        return inputs * self.x


def quadratic(curvature=1.0):
    return ModelSpec(
        build=lambda: Quadratic(curvature),
        name="quadratic",
        inputs="vectors",
        width=1,
        seq_len=2,
        loss=lambda model, inputs: 2 + model.curvature * model.x.square().sum() / 2,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        at_width=lambda width: Quadratic(curvature * width),
    )


def closed_form(rate, curvature, step):
    """Gradient descent multiplies x by 1 - rate * curvature. The loss before the update of `step`."""
    return 2 + curvature * (1 - rate * curvature) ** (2 * step) / 2


def test_a_sweep_of_a_quadratic_is_its_closed_form():
    rates = [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2]
    sweep = learning_rate_sweep(quadratic(), rates, (1, 2, 4), steps=4, seeds=(0, 1))
    for width in (1, 2, 4):
        initial = 2 + width / 2
        losses = [closed_form(rate, width, step=3) for rate in rates]
        assert losses[-1] > initial  # too large a step diverges
        found = [values[0] for values in sweep.losses(width).values()]
        assert found == pytest.approx(np.minimum(losses, initial), rel=1e-5)
        excess = np.mean(np.minimum(losses, initial)) - np.min(losses)
        assert sweep.sensitivity(width).value == pytest.approx(excess, rel=1e-4)
        assert sweep.initial_loss(width) == pytest.approx(initial)
    # The best is one over the curvature, which grows as the width; the grid has it within half a step.
    assert [sweep.best(width).learning_rate for width in (1, 2, 4)] == [0.8, 0.4, 0.2]
    assert sweep.drift().slope.value == pytest.approx(-1, abs=0.01)
    assert not sweep.transfers()


def test_a_function_of_width_and_learning_rate_makes_what_is_trained():
    asked = []

    def make(width, rate):
        asked.append((width, rate))
        # As a parametrisation does whose learning rate transfers.
        return ModelSpec.of(
            quadratic(width), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate / width)
        )

    rates = [0.2, 0.4, 0.8, 1.6]
    sweep = learning_rate_sweep(make, rates, (1, 2, 4), steps=4, seeds=(0,))
    assert sorted(asked) == [(width, rate) for width in (1, 2, 4) for rate in rates]
    assert [sweep.best(width).learning_rate for width in (1, 2, 4)] == [0.8, 0.8, 0.8]
    assert sweep.transfers(within=0)
    assert sweep.drift().slope.value == pytest.approx(0, abs=1e-6)


def test_a_run_of_a_configuration_is_that_of_the_prototype():
    config = config_of()
    sweep = learning_rate_sweep(config, [0.01, 0.1], (1,), steps=STEPS, seeds=(3,))
    for run in sweep.runs:
        alone = ArchitecturePrototype(config, learning_rate=run.learning_rate, seed=3).run(STEPS)
        assert run.loss == alone.validation_loss
        assert run.initial_loss == alone.losses[0]
        assert run.status == alone.status
        assert run.logit_max == alone.logit_max[-1][1]
        assert run.attention_logit_max == max(alone.attention_logit_max[-1][1].values())


def test_non_finite_run_counts_with_the_initial_loss():
    config = config_of({"grad_clip": None, "optimizer": {"weight_decay": 0.0}})
    sweep = learning_rate_sweep(config, [1e-3, 1e30], (1,), steps=5, seeds=(0, 1))
    broken = [run for run in sweep.runs if run.learning_rate == 1e30]
    assert [run.status for run in broken] == ["nan", "nan"]
    assert [run.loss for run in broken] == [math.inf, math.inf]
    # What was observed is of before the first update, and says nothing of the end.
    assert [(run.logit_max, run.attention_logit_max) for run in broken] == [(None, None)] * 2
    assert all(run.logit_max is not None for run in sweep.runs if run.learning_rate == 1e-3)
    assert all(0 < run.step <= 2 for run in broken)
    assert sweep.losses(1)[1e30] == tuple(run.initial_loss for run in broken)
    assert sweep.failed(1) == 2
    assert sweep.initial_loss(1) == pytest.approx(math.log(16), abs=0.1)


def test_widths_grow_by_heads_and_the_narrowest_is_the_base_of_mup():
    plans = plan_sweep(config_of(), [0.01], (2, 4), steps=STEPS, seeds=(0,), parametrization="mup")
    assert [plan.width for plan in plans] == [4, 2]
    sizes = [
        (
            model.d_model,
            model.n_heads,
            model.n_kv_heads,
            model.d_ff,
            model.initialization,
            model.mup_base_width,
        )
        for model in (plan.subject.model for plan in plans)
    ]
    assert sizes == [(64, 8, 4, 128, "mup", 32), (32, 4, 2, 64, "mup", 32)]


@pytest.mark.parametrize(
    ("asked", "own", "expected"),
    [
        (None, {}, ("normal", None)),
        ("standard", {}, ("normal", None)),
        ("standard", {"initialization": "xavier"}, ("xavier", None)),
        ("standard", {"initialization": "mup", "mup_base_width": 8}, ("normal", None)),
        (None, {"initialization": "mup", "mup_base_width": 8}, ("mup", 8)),
        ("mup", {"initialization": "mup", "mup_base_width": 8}, ("mup", 16)),
    ],
    ids=["own", "standard", "standard of xavier", "standard of mup", "own mup", "mup of mup"],
)
def test_a_parametrization_is_as_asked_for(asked, own, expected):
    [plan] = plan_sweep(config_of(**own), [0.01], (1,), steps=STEPS, seeds=(0,), parametrization=asked)
    model = plan.subject.model
    assert (model.initialization, model.mup_base_width) == expected


def test_learning_rate_seed_steps_and_warmup_are_in_the_configuration():
    own = {"optimizer": {"lr": 0.1, "per_stack": {0: {"lr": 0.05}}}}
    plans = plan_sweep(config_of(own), [0.01, 0.02], (1,), steps=40, seeds=(5, 6), warmup=0.25)
    for plan, (rate, seed) in zip(plans, [(0.01, 5), (0.01, 6), (0.02, 5), (0.02, 6)], strict=True):
        training = plan.subject.training
        assert (training.optimizer.lr, training.seed, training.max_steps) == (rate, seed, 40)
        assert training.optimizer.per_stack[0].lr == pytest.approx(rate / 2)
        assert training.schedule.warmup_steps == 10
        assert not plan.sets_learning_rate


@pytest.mark.parametrize(("configured", "expected"), [(30, 12), (None, None), (0, 0), (1, 0)])
def test_a_warm_up_that_is_not_asked_for_has_its_share_of_the_steps(configured, expected):
    own = {"max_steps": 100, "schedule": {"warmup_steps": configured}}
    [plan] = plan_sweep(config_of(own), [0.01], (1,), steps=40, seeds=(0,))
    assert plan.subject.training.schedule.warmup_steps == expected
    assert plan.subject.training.max_steps == 40


def test_data_that_can_be_gone_through_once_is_refused():
    """Each run would be trained on other batches than the one that it is compared with."""
    batches = (torch.ones(2, 9).long() for _ in range(100))
    for jobs in (1, 2):
        with pytest.raises(ValueError, match="data: got 'generator'; allowed: what gives its batches again"):
            learning_rate_sweep(config_of(), [1e-3, 1e-2], (1,), steps=2, data=batches, jobs=jobs)


def test_any_iterable_is_a_grid():
    plans = plan_sweep(config_of(), (rate for rate in (1e-3, 1e-2)), iter((1, 2)), steps=2, seeds=1)
    assert [(plan.width, plan.learning_rate) for plan in plans] == [
        (2, 1e-3),
        (2, 1e-2),
        (1, 1e-3),
        (1, 1e-2),
    ]


def test_by_default_the_grid_is_that_of_the_paper():
    plans = plan_sweep(config_of(), steps=STEPS)
    assert {plan.learning_rate for plan in plans} == set(LEARNING_RATES)
    assert {plan.width for plan in plans} == {1, 2, 4}
    assert len(plans) == 7 * 3 * 3


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"learning_rates": []}, "learning_rates: got []; allowed: one or more"),
        ({"learning_rates": [0.1, 0.1]}, "learning_rates: got [0.1, 0.1]; allowed: each one once"),
        ({"learning_rates": [0.0]}, "learning_rates: got 0.0; allowed: numbers above 0"),
        ({"widths": (0,)}, "widths: got 0"),
        ({"widths": ()}, "widths: got []"),
        ({"steps": 0}, "steps: got 0"),
        ({"seeds": (-1,)}, "seeds: got -1"),
        ({"seeds": (1, 1)}, "seeds: got (1, 1)"),
        ({"seeds": 0}, "seeds: got 0"),
        ({"parametrization": "ntk"}, "parametrization: got 'ntk'; allowed: 'mup', 'standard'"),
        ({"warmup": 1.5}, "warmup: got 1.5"),
        ({"jobs": 0}, "jobs: got 0"),
        ({"seq_len": 0}, "seq_len: got 0"),
        ({"batch_size": 1.5}, "batch_size: got 1.5"),
        ({"effective_batch": True}, "effective_batch: got True"),
    ],
    ids=lambda value: None if isinstance(value, str) else next(iter(value)),
)
def test_a_value_out_of_range_is_refused(asked, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        learning_rate_sweep(config_of(), **{"steps": STEPS, **asked})


@pytest.mark.parametrize("key", ["seed", "learning_rate", "observe_every"])
@pytest.mark.parametrize("sweep", [learning_rate_sweep, plan_sweep])
def test_an_argument_that_there_is_not_is_refused_at_once(sweep, key):
    def make(width, rate):
        raise AssertionError("too late")

    with pytest.raises(TypeError, match=rf"{sweep.__name__}\(\) got an unexpected keyword argument '{key}'"):
        sweep(make, steps=STEPS, **{key: 1})


def test_arguments_of_the_prototype_are_those_of_each_run():
    asked = {"seq_len": 4, "effective_batch": 6, "device": "cpu"}
    [plan] = plan_sweep(config_of(), [0.01], (1,), steps=STEPS, seeds=1, **asked)
    assert plan.options == asked
    [other] = plan_sweep(config_of(), [0.01], (1,), steps=STEPS, seeds=1, batch_size=None)
    assert other.options == {}
    [run] = learning_rate_sweep(config_of(), [0.01], (1,), steps=2, seeds=1, **asked).runs
    alone = ArchitecturePrototype(config_of(), learning_rate=0.01, seed=0, **asked).run(2)
    assert run.initial_loss == alone.losses[0]


def test_a_number_of_seeds_is_the_first_ones():
    plans = plan_sweep(config_of(), [0.01], (1,), steps=STEPS, seeds=3)
    assert [plan.seed for plan in plans] == [0, 1, 2]
    assert [plan.key for plan in plans] == [
        plan.key for plan in plan_sweep(config_of(), [0.01], (1,), steps=STEPS)
    ]


@pytest.mark.parametrize(
    ("subject", "asked", "error", "message"),
    [
        (quadratic(), {"parametrization": "mup"}, ValueError, "parametrization: got 'mup'"),
        (quadratic(), {"warmup": 0.1}, ValueError, "warmup: got 0.1"),
        (
            ModelSpec.of(quadratic(), at_width=None),
            {},
            ValueError,
            "widths: got 4; allowed: 1, since quadratic",
        ),
        (nn.Linear(1, 1), {}, TypeError, "subject: got Linear"),
        ("a model", {}, TypeError, "subject: got str"),
        (lambda width, rate: nn.Linear(1, 1), {}, TypeError, "its function returned Linear"),
        (config_of(attention_type="mqa"), {"parametrization": "mup"}, ValueError, "base_width: got 16"),
    ],
    ids=["mup of a spec", "warmup of a spec", "no at_width", "module", "text", "other", "mqa"],
)
def test_a_subject_that_cannot_be_swept_is_refused(subject, asked, error, message):
    with pytest.raises(error, match=re.escape(message)):
        plan_sweep(subject, [0.01], steps=STEPS, **asked)


def test_a_configuration_refuses_a_learning_rate_by_its_key():
    with pytest.raises(ConfigError, match=r"schedule\.min_lr"):
        plan_sweep(config_of({"optimizer": {"lr": 0.1}, "schedule": {"min_lr": 0.05}}), [0.01], (1,), steps=9)


def test_the_first_refusal_comes_before_the_first_run(tmp_path):
    path = tmp_path / "sweep.jsonl"
    with pytest.raises(ValueError, match="jobs: got 2; allowed: 1, since this ModelSpec"):
        learning_rate_sweep(quadratic(), [0.1], (1,), steps=STEPS, jobs=2, store=path)
    assert not path.exists()


def test_an_error_says_in_which_run_it_was():
    def breaks(model, inputs):
        raise RuntimeError("no loss today")

    spec = ModelSpec.of(quadratic(), loss=breaks)
    with pytest.raises(RuntimeError, match="no loss today") as caught:
        learning_rate_sweep(spec, [0.1], (1,), steps=STEPS, seeds=(7,))
    assert caught.value.__notes__ == ["in the run of width 1, learning rate 0.1, seed 7"]


def test_sweep_keeps_runs_that_were_running_at_an_error(tmp_path, monkeypatch):
    """Threads stand for the processes. A run that has begun ends after all others are cancelled."""
    second_runs, all_cancelled, begun = threading.Event(), threading.Event(), []

    class Pool(ThreadPoolExecutor):
        def submit(self, train):
            future = super().submit(train)
            cancel = future.cancel

            def cancel_and_tell():
                is_cancelled = cancel()
                if train.__self__.seed == 39:
                    all_cancelled.set()
                return is_cancelled

            future.cancel = cancel_and_tell
            return future

    def train(plan):
        begun.append(plan.seed)
        if plan.seed == 0:
            assert second_runs.wait(HANG_SECONDS)
            raise RuntimeError("no loss today")
        second_runs.set()
        assert all_cancelled.wait(HANG_SECONDS)
        return SweepRun(plan.width, plan.learning_rate, plan.seed, 1.0, 2.0, "success", None, 0.3)

    monkeypatch.setattr(sensitivity, "ProcessPoolExecutor", lambda jobs, **_: Pool(jobs))
    monkeypatch.setattr(PlannedRun, "train", train)
    path, ended = tmp_path / "sweep.jsonl", []
    asked = {"steps": STEPS, "seeds": 40, "jobs": 2, "store": path, "on_run": ended.append}
    with pytest.raises(RuntimeError, match="no loss today") as caught:
        learning_rate_sweep(config_of(), [0.1], (1,), **asked)
    assert caught.value.__notes__ == ["in the run of width 1, learning rate 0.1, seed 0"]
    kept = [run.seed for run in SweepStore(path).read().values()]
    assert sorted(kept) == sorted(run.seed for run in ended) == sorted(set(begun) - {0})
    assert 1 <= len(kept) <= 2  # of 40. The thread of the error may begin one more.


def test_non_finite_initial_loss_is_refused(tmp_path):
    spec = ModelSpec.of(quadratic(), loss=lambda model, inputs: model.x.sum() * math.nan)
    with pytest.raises(ValueError, match="loss at initialisation: got nan"):
        learning_rate_sweep(spec, [0.1], (1,), steps=STEPS, seeds=(7,), store=tmp_path / "sweep.jsonl")
    assert not (tmp_path / "sweep.jsonl").exists()


def test_stored_runs_are_not_repeated(tmp_path):
    path, ended = tmp_path / "sweep.jsonl", []
    asked = {"steps": STEPS, "seeds": (0, 1), "store": path, "on_run": ended.append}
    first = learning_rate_sweep(quadratic(), [0.1, 0.2], (1,), **asked)
    assert sorted(ended, key=lambda run: (run.learning_rate, run.seed)) == list(first.runs)
    ended.clear()
    again = learning_rate_sweep(quadratic(), [0.1, 0.2, 0.4], (1,), **asked)
    assert [run.learning_rate for run in ended] == [0.4, 0.4]
    assert set(first.runs) < set(again.runs)
    ended.clear()
    learning_rate_sweep(quadratic(), [0.1], (1,), **{**asked, "steps": STEPS + 1})
    assert len(ended) == 2  # runs of other steps are not these


def test_rates_that_hardly_differ_are_not_one_run(tmp_path):
    ended = []
    rates = [0.1, 0.1000000001]
    asked = {"steps": STEPS, "seeds": 1, "store": tmp_path / "sweep.jsonl", "on_run": ended.append}
    first = learning_rate_sweep(quadratic(), rates, (1,), **asked)
    assert [run.learning_rate for run in ended] == rates
    assert learning_rate_sweep(quadratic(), rates, (1,), **asked).runs == first.runs
    assert len(ended) == 2


def test_data_in_a_store_have_a_name(tmp_path):
    data = {name: [torch.full((2, 9), token)] for token, name in enumerate(("zeros", "ones"))}
    asked = {"steps": 3, "seeds": 1, "store": tmp_path / "sweep.jsonl"}
    with pytest.raises(ValueError, match="data_name: got None; allowed: a name that the store knows data by"):
        learning_rate_sweep(config_of(), [0.1], (1,), data=data["zeros"], **asked)
    with pytest.raises(ValueError, match="data_name: got 'zeros'; allowed: None without data"):
        learning_rate_sweep(config_of(), [0.1], (1,), data_name="zeros", **asked)
    made = []
    for name in ("zeros", "ones", "zeros"):
        learning_rate_sweep(
            config_of(), [0.1], (1,), data=data[name], data_name=name, on_run=made.append, **asked
        )
    assert len(made) == 2


def test_the_callers_threads_and_random_state_are_as_they_were():
    before, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(2)
    try:
        learning_rate_sweep(quadratic(), [0.1], (1,), steps=STEPS, seeds=(0,))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert torch.equal(torch.get_rng_state(), state)


def test_plans_of_configurations_can_be_sent_to_processes():
    [plan] = plan_sweep(config_of(), [0.01], (1,), steps=2, seeds=(0,))
    assert pickle.loads(pickle.dumps(plan)) == plan


@pytest.mark.slow
def test_the_number_of_processes_changes_no_result(tmp_path):
    asked = {"steps": STEPS, "seeds": (0,), "parametrization": "mup"}
    alone = learning_rate_sweep(config_of(), [0.01, 0.1], (1, 2), **asked)
    both = learning_rate_sweep(config_of(), [0.01, 0.1], (1, 2), jobs=2, store=tmp_path / "s.jsonl", **asked)
    for one, other in zip(alone.runs, both.runs, strict=True):
        assert {**one.to_dict(), "seconds": 0} == {**other.to_dict(), "seconds": 0}
    assert len(SweepStore(tmp_path / "s.jsonl").read()) == 4


KILLED = """
    import sys

    from stackwise.config import StackWiseConfig
    from stackwise.prototype import learning_rate_sweep

    if __name__ == "__main__":
        config = StackWiseConfig.from_yaml(sys.argv[1])
        learning_rate_sweep(config, [1e-3, 4e-3], (1,), steps=40, seeds=range(6), jobs=2, store=sys.argv[2])
"""


@pytest.mark.slow
def test_a_killed_sweep_leaves_no_process_and_goes_on(tmp_path):
    config = config_of()
    config.to_yaml(tmp_path / "config.yaml")
    script, path = tmp_path / "sweep.py", tmp_path / "sweep.jsonl"
    script.write_text(textwrap.dedent(KILLED))
    command = [sys.executable, str(script), str(tmp_path / "config.yaml"), str(path)]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        until = time.monotonic() + HANG_SECONDS
        while not (path.exists() and path.read_bytes().count(b"\n") >= 2):
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert len(children) >= 2
    until = time.monotonic() + HANG_SECONDS
    while any(is_alive(child) for child in children):
        assert time.monotonic() < until
        time.sleep(0.05)
    kept = SweepStore(path).read()
    assert 2 <= len(kept) < 12
    ended = []
    asked = {"steps": 40, "seeds": range(6), "store": path, "on_run": ended.append}
    sweep = learning_rate_sweep(config, [1e-3, 4e-3], (1,), **asked)
    assert len(ended) == 12 - len(kept)
    assert set(kept.values()) <= set(sweep.runs)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
