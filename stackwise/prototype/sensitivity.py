"""Sensitivity: how much the final loss depends on the learning rate, measured over widths."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from stackwise.config import StackWiseConfig
from stackwise.prototype.prototype import with_learning_rate
from stackwise.prototype.prototype_training import Data, check_data
from stackwise.prototype.sweep_result import LearningRateSweep
from stackwise.prototype.sweep_run import PlannedRun, SweepRun, name_of
from stackwise.prototype.sweep_store import SweepStore
from stackwise.prototype.widen import Parametrization, as_mup, as_standard, widened
from stackwise.subject.spec import ModelSpec
from stackwise.support.arguments import check_choice, check_number, check_sizes, require
from stackwise.support.random_state import choose_seeds

__all__ = ["LEARNING_RATES", "learning_rate_sweep", "plan_sweep"]

LEARNING_RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
"""Of Wortsman et al. 2023 (arXiv:2309.14322), section 2.2: for AdamW, two to a decade, three decades."""

Make = Callable[[int, float], StackWiseConfig | ModelSpec]


def learning_rate_sweep(
    subject: StackWiseConfig | ModelSpec | Make,
    learning_rates: Sequence[float] | None = None,
    widths: Sequence[int] = (1, 2, 4),
    *,
    steps: int,
    seeds: int | Sequence[int] = (0, 1, 2),
    parametrization: Parametrization | None = None,
    warmup: float | None = None,
    seq_len: int | None = None,
    batch_size: int | None = None,
    effective_batch: int | None = None,
    data: Data | None = None,
    device: torch.device | str | None = None,
    data_name: str | None = None,
    jobs: int = 1,
    store: str | Path | None = None,
    on_run: Callable[[SweepRun], None] | None = None,
) -> LearningRateSweep:
    """Train at every width, learning rate and seed, and compare the losses at the end.

    Says how sensitive the loss is to the learning rate (Wortsman et al. 2023, arXiv:2309.14322), which is
    best at each width, and whether that of a narrow model holds for wider ones. A run that stops being
    finite has no loss of its own: it counts with that at initialisation, as the definition says; and so does
    one that ends above it.

    Args:
        subject: a configuration, which is widened by heads: `n_heads`, `n_kv_heads`, `d_ff` and the ranks of
            latents grow with `d_model`, the size of a head stays; or a ModelSpec, with `at_width` for widths
            other than 1, which its own optimizer trains at a constant learning rate; or a function
            (width, learning rate) -> a configuration or a ModelSpec.
        learning_rates: of the peak of the schedule; None: `LEARNING_RATES`.
        widths: how many times as wide as the subject.
        steps: optimizer steps of each run.
        seeds: of weights and data, the same ones at every width and learning rate: how many, from 0 on; or
            which.
        parametrization: for a configuration. "mup" has the narrowest of `widths` as its base; "standard" has
            none, and is `initialization="normal"` where the configuration had "mup"; None: as it is.
        warmup: for a configuration, the share of `steps` over which the learning rate rises; None: as the
            configured one is of `max_steps`.
        seq_len: as of `ArchitecturePrototype`, and so are the next four.
        batch_size: rows computed at one time.
        effective_batch: rows of an update.
        data: what to train on instead of the configured; an iterator, whose batches would go to one run
            after the other, is refused.
        device: where to run.
        data_name: what `data` is called in the store, which does not see what is in it.
        jobs: processes at a time; with several, `subject` has to be picklable. Each run has one thread, so
            that the number of processes changes no result.
        store: a file of JSON lines that each run is kept in as it ends, and that runs are read from instead
            of being made again. What is no configuration is known there by its name alone, and `data` by
            `data_name`, which it wants.
        on_run: called with each run as it ends, in the order of their ends, not with those that were read.

    Raises:
        ValueError: an empty or repeated list, a value out of range, a width that the subject cannot have, a
            subject that cannot be sent to other processes, or `data` in a store without a `data_name`.
        ConfigError: a learning rate or width that the configuration refuses.
        TypeError: a subject of another kind.
    """
    check_sizes(jobs=jobs)
    if store is not None and data is not None:
        require(data_name is not None, "data_name", data_name, "a name that the store knows data by")
    plans = plan_sweep(
        subject,
        learning_rates,
        widths,
        steps=steps,
        seeds=seeds,
        parametrization=parametrization,
        warmup=warmup,
        seq_len=seq_len,
        batch_size=batch_size,
        effective_batch=effective_batch,
        data=data,
        device=device,
        data_name=data_name,
    )
    kept = None if store is None else SweepStore(store)
    known = {} if kept is None else kept.read()
    found = [known[plan.key] for plan in plans if plan.key in known]
    missing = [plan for plan in plans if plan.key not in known]
    if jobs > 1:
        _check_picklable(missing, jobs)
    for plan, run in _made(missing, jobs):
        if kept is not None:
            kept.keep(plan, run)
        found.append(run)
        if on_run is not None:
            on_run(run)
    found.sort(key=lambda run: (run.width, run.learning_rate, run.seed))
    return LearningRateSweep(_name(subject), parametrization or "own", steps, tuple(found))


def plan_sweep(
    subject: StackWiseConfig | ModelSpec | Make,
    learning_rates: Sequence[float] | None = None,
    widths: Sequence[int] = (1, 2, 4),
    *,
    steps: int,
    seeds: int | Sequence[int] = (0, 1, 2),
    parametrization: Parametrization | None = None,
    warmup: float | None = None,
    seq_len: int | None = None,
    batch_size: int | None = None,
    effective_batch: int | None = None,
    data: Data | None = None,
    device: torch.device | str | None = None,
    data_name: str | None = None,
) -> list[PlannedRun]:
    """The runs of `learning_rate_sweep`, the widest first: for who wants to make them elsewhere.

    Each has `train()`, which gives a `SweepRun`, and a `key` to know it by; `LearningRateSweep` is made of
    all that came of them. Args and Raises as of `learning_rate_sweep`.
    """
    learning_rates = LEARNING_RATES if learning_rates is None else tuple(learning_rates)
    widths, chosen = tuple(widths), choose_seeds(seeds)
    check_data(data)
    if data_name is not None:
        require(data is not None, "data_name", data_name, "None without data")
    _check(learning_rates, widths, steps, parametrization, warmup)
    sizes = {"seq_len": seq_len, "batch_size": batch_size, "effective_batch": effective_batch}
    given: dict[str, Any] = sizes | {"data": data, "device": device}
    options = {key: value for key, value in given.items() if value is not None}
    check_sizes(**{key: options[key] for key in sizes if key in options})
    plans = []
    for width in sorted(widths, reverse=True):
        for learning_rate in learning_rates:
            made = _subject(subject, width, learning_rate, min(widths), parametrization, warmup)
            for seed in chosen:
                of_seed = made
                if isinstance(made, StackWiseConfig):
                    of_seed = _configured(made, steps, seed, warmup)
                sets = isinstance(subject, ModelSpec)
                plans.append(
                    PlannedRun(of_seed, width, learning_rate, seed, steps, sets, dict(options), data_name)
                )
    return plans


def _check(
    learning_rates: Sequence[float],
    widths: Sequence[int],
    steps: int,
    parametrization: Parametrization | None,
    warmup: float | None,
) -> None:
    check_sizes(steps=steps)
    for key, values in (("learning_rates", learning_rates), ("widths", widths)):
        require(len(values) > 0, key, list(values), "one or more")
        require(len(set(values)) == len(values), key, list(values), "each one once")
    for learning_rate in learning_rates:
        check_number("learning_rates", learning_rate, "numbers above 0", lambda number: number > 0)
    for width in widths:
        check_sizes(widths=width)
    if parametrization is not None:
        check_choice("parametrization", parametrization, get_args(Parametrization))
    if warmup is not None:
        check_number("warmup", warmup, "a share of the steps, from 0 to 1", lambda share: 0 <= share <= 1)


def _subject(
    subject: Any,
    width: int,
    learning_rate: float,
    base: int,
    parametrization: Parametrization | None,
    warmup: float | None,
) -> StackWiseConfig | ModelSpec:
    """What is trained at `width`; a configuration with the learning rate in it."""
    if isinstance(subject, StackWiseConfig):
        wide = widened(subject, width)
        if parametrization == "mup":
            wide = as_mup(wide, base * subject.model.d_model)
        elif parametrization == "standard":
            wide = as_standard(wide)
        return with_learning_rate(wide, learning_rate)
    require(parametrization is None, "parametrization", parametrization, "None, but for a StackWiseConfig")
    if isinstance(subject, ModelSpec):
        require(warmup is None, "warmup", warmup, "None, but for a StackWiseConfig")
        if width == 1:
            return subject
        at_width = subject.at_width
        if at_width is None:
            raise ValueError(f"widths: got {width}; allowed: 1, since {subject.name} declares no at_width")
        return replace(subject, build=partial(at_width, width))
    if not callable(subject) or isinstance(subject, nn.Module):
        raise TypeError(
            f"subject: got {type(subject).__name__}; wanted a StackWiseConfig, a ModelSpec, or a function "
            "(width, learning rate) -> one of them"
        )
    made = subject(width, learning_rate)
    if not isinstance(made, StackWiseConfig | ModelSpec):
        kind = type(made).__name__
        raise TypeError(f"subject: its function returned {kind}; wanted a StackWiseConfig or a ModelSpec")
    return made


def _configured(config: StackWiseConfig, steps: int, seed: int, warmup: float | None) -> StackWiseConfig:
    changed = config.to_dict()
    training = changed["training"]
    configured = training["schedule"]["warmup_steps"]
    if warmup is not None:
        training["schedule"]["warmup_steps"] = round(warmup * steps)
    elif configured is not None:
        # As `ArchitecturePrototype` has it for a run of another length.
        training["schedule"]["warmup_steps"] = configured * steps // training["max_steps"]
    training |= {"max_steps": steps, "seed": seed}
    return StackWiseConfig.from_dict(changed)


def _name(subject: Any) -> str:
    if isinstance(subject, StackWiseConfig):
        model = subject.model
        return f"{model.attention_type} of d_model {model.d_model}"
    return name_of(subject)


def _made(plans: Sequence[PlannedRun], jobs: int) -> Iterator[tuple[PlannedRun, SweepRun]]:
    """Every plan with its run, as it ends."""
    if jobs == 1:
        for plan in plans:
            with _one_thread(), _named(plan):
                run = plan.train()
            yield plan, run
        return
    # A fork of a process in which torch has computed with several threads may never end.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin_worker)
    try:
        waiting = {pool.submit(plan.train): plan for plan in plans}
        failed: tuple[PlannedRun, BaseException] | None = None
        while waiting:
            done, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                plan, error = waiting.pop(future), future.exception()
                if error is None:
                    yield plan, future.result()
                    continue
                failed = failed or (plan, error)
                # What runs is trained to its end in any case, and is kept, whatever became of another.
                waiting = {other: its for other, its in waiting.items() if not other.cancel()}
        if failed is not None:
            with _named(failed[0]):
                raise failed[1]
    finally:
        pool.shutdown(cancel_futures=True)


def _begin_worker() -> None:
    """One thread; and no life beyond that of the process that reads its results."""
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _named(plan: PlannedRun) -> Iterator[None]:
    """What is raised within says which run it was."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in the run of {plan.name}")
        raise


def _check_picklable(plans: Sequence[PlannedRun], jobs: int) -> None:
    for plan in plans:
        try:
            pickle.dumps(plan)
        except Exception as error:
            kind = type(plan.subject).__name__
            raise ValueError(
                f"jobs: got {jobs}; allowed: 1, since this {kind} cannot be sent to a process: {error}"
            ) from error
