"""Learning-rate sensitivity: dependence of the final loss on the learning rate, measured over widths."""

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
from stackwise.prototype.sweep_run import PlannedRun, SweepRun, SweepStore, name_of
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
    """Train at every width, learning rate and seed, and compare the final losses.

    The result shows the sensitivity of the loss to the learning rate (Wortsman et al. 2023,
    arXiv:2309.14322), the best learning rate at each width, and its transfer from a narrow model to wider
    ones. By definition, a run that becomes non-finite counts with the loss at initialization, and so does a
    run with a higher final loss.

    Args:
        subject: a configuration, which is widened by heads: `n_heads`, `n_kv_heads`, `d_ff` and the ranks of
            latents grow with `d_model`, and the size of a head is constant; a ModelSpec, with `at_width` for
            widths other than 1, trained by its own optimizer at a constant learning rate; or a function
            (width, learning rate) -> a configuration or a ModelSpec.
        learning_rates: peak learning rates of the schedule. None: `LEARNING_RATES`.
        widths: width factors relative to the subject.
        steps: number of optimizer steps per run.
        seeds: seeds of weights and data, equal for every width and learning rate: their number, from 0, or a
            list.
        parametrization: parametrization of a configuration. "mup" has the narrowest of `widths` as its base.
            "standard" has no base, and is `initialization="normal"` if the configuration had "mup". None:
            unchanged.
        warmup: for a configuration, share of `steps` in which the learning rate rises. None: the configured
            share of `max_steps`.
        seq_len: as in `ArchitecturePrototype`.
        batch_size: number of rows per micro-batch.
        effective_batch: number of rows per update.
        data: data for training instead of the configured data. An iterator is refused, because the runs would
            consume its batches one after the other.
        device: device to run on.
        data_name: name of `data` in the store, which does not inspect the data.
        jobs: number of simultaneous processes. With several, `subject` must be picklable. Each run has one
            thread, so that the number of processes does not affect the results.
        store: file of JSON lines to which each finished run is added, and from which existing runs are read
            instead of being repeated. A subject that is not a configuration is identified only by its name,
            and `data` by `data_name`, which is required.
        on_run: called with each finished run, in order of completion. Runs from the store are excluded.

    Raises:
        ValueError: an empty or repeated list, a value out of range, a width that the subject does not
            support, a subject that cannot be sent to other processes, or `data` in a store without a
            `data_name`.
        ConfigError: a learning rate or width that the configuration refuses.
        TypeError: a subject of another type.
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
    """Return the runs of `learning_rate_sweep`, widest first, for example to run them on other machines.

    Each has a method `train()`, which returns a `SweepRun`, and an identifier `key`. A `LearningRateSweep` is
    created from all results. Arguments and errors are those of `learning_rate_sweep`.
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
    """Return the subject at `width`. A configuration also has the learning rate."""
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
        # Same rule as in `ArchitecturePrototype` for a run of another length.
        training["schedule"]["warmup_steps"] = configured * steps // training["max_steps"]
    training |= {"max_steps": steps, "seed": seed}
    return StackWiseConfig.from_dict(changed)


def _name(subject: Any) -> str:
    if isinstance(subject, StackWiseConfig):
        model = subject.model
        return f"{model.attention_type} of d_model {model.d_model}"
    return name_of(subject)


def _made(plans: Sequence[PlannedRun], jobs: int) -> Iterator[tuple[PlannedRun, SweepRun]]:
    """Yield every plan with its run, in order of completion."""
    if jobs == 1:
        for plan in plans:
            with _one_thread(), _named(plan):
                run = plan.train()
            yield plan, run
        return
    # If torch has used several threads in this process, a fork may hang.
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
                # Running plans finish and are stored, even if another one failed.
                waiting = {other: its for other, its in waiting.items() if not other.cancel()}
        if failed is not None:
            with _named(failed[0]):
                raise failed[1]
    finally:
        pool.shutdown(cancel_futures=True)


def _begin_worker() -> None:
    """Use one thread, and exit with the process that reads the results."""
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
    """Context that adds the name of the run to exceptions."""
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
