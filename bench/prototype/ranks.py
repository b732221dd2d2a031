"""Ranks: whether small variants of architectures come in the order of the architectures themselves.

Every architecture is trained at its full size and as each shrink makes it, from the same seeds, on as many
tokens of the same text, each with its own learning rate at each size: from the middle of a grid on, for as
long as validation loss falls, seed 0. Beside that it is told what comes of one learning rate for all
architectures of a size, the base's best: the order is then of which of them bear it. The speed of a training
step is measured apart, all architectures of a size in turns; small ones with four times the rows, so that the
activations of a Block take as much as at full size and not the calls themselves are timed. Spearman's rho is
between the small and the full size, over architectures; losses are means over seeds, speeds medians over the
measurements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.table import Table

from bench.claim import Bar
from bench.prototype.architectures import ARCHITECTURES, BASE, architecture_config
from bench.prototype.part import Part, Work
from bench.prototype.rank_correlation import RankCorrelation, rank_correlation, stepped_up
from bench.prototype.runs import digest
from bench.prototype.shrinks import CHAPTER, FACTOR, OURS, QUARTER, SHRINKS
from bench.prototype.training import train
from stackwise import ConfigError, StackWiseConfig
from stackwise.prototype import create_small_variant

__all__ = ["FULL_SIZE", "Found", "Plan", "draw", "measure", "rows"]

FULL_SIZE = "full size"
LEAST_RHO = 0.8


@dataclass(frozen=True)
class Plan:
    """What is trained and measured.

    Attributes:
        architectures: names of them.
        seeds: of weights and batches.
        steps: of each training.
        batch_size: rows of a step.
        seq_len: T.
        learning_rates: the grid, in rising order.
        measurements: of speed, each in a process of its own.
        rounds: of each measurement, in which every architecture has a turn.
    """

    architectures: tuple[str, ...] = tuple(ARCHITECTURES)
    seeds: tuple[int, ...] = (0, 1)
    steps: int = 400
    batch_size: int = 8
    seq_len: int = 128
    learning_rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3, 8e-3, 16e-3)
    measurements: int = 2
    rounds: int = 12

    def config(self, name: str, size: str, learning_rate: float, seed: int) -> StackWiseConfig:
        """An architecture at a size.

        Raises:
            ConfigError: the shrink makes no model of it.
        """
        full = architecture_config(
            name,
            batch_size=self.batch_size,
            seq_len=self.seq_len,
            steps=self.steps,
            learning_rate=learning_rate,
            seed=seed,
        )
        return full if size == FULL_SIZE else SHRINKS[size](full)


QUICK = Plan(("gqa", "mqa", "kernel", "two heads of 64", "d_ff / 4"), (0,), 8, 4, 32, (2e-3, 8e-3), 1, 2)
SIZES = (FULL_SIZE, *SHRINKS)


@dataclass(frozen=True)
class Found:
    """What was found, by size and architecture.

    Attributes:
        learning_rates: by size and architecture: learning rate -> validation loss, first seed.
        best: by size and architecture: the learning rate that was taken.
        losses: by size and architecture: validation loss by seed.
        losses_at_one_rate: the same at the base's learning rate of that size, of full size and ours.
        speeds: by size and architecture: tokens per second by measurement.
        errors: by size and architecture: why there is no such model.
        sizes: by size and architecture: how many parameters there are.
        notes: by architecture: what our variant could not keep of it.
    """

    learning_rates: Mapping[str, Mapping[str, Mapping[float, float]]]
    best: Mapping[str, Mapping[str, float]]
    losses: Mapping[str, Mapping[str, Sequence[float]]]
    losses_at_one_rate: Mapping[str, Mapping[str, Sequence[float]]]
    speeds: Mapping[str, Mapping[str, Sequence[float]]]
    errors: Mapping[str, Mapping[str, str]]
    sizes: Mapping[str, Mapping[str, int]]
    notes: Mapping[str, Sequence[str]]

    def loss_pairs(self, size: str, names: Sequence[str] | None = None) -> dict[str, tuple[float, float]]:
        """By architecture: mean loss over seeds, of the size and of the full size."""
        return _pairs(self.losses[size], self.losses[FULL_SIZE], mean, names)

    def pairs_at_one_rate(self) -> dict[str, tuple[float, float]]:
        """By architecture: mean loss over seeds at the base's learning rate, of our size and the full one."""
        small, full = (self.losses_at_one_rate[size] for size in (OURS, FULL_SIZE))
        return _pairs(small, full, mean, None)

    def speed_pairs(self, size: str, names: Sequence[str] | None = None) -> dict[str, tuple[float, float]]:
        """By architecture: median tokens per second over measurements, of the size and of the full size."""
        return _pairs(self.speeds[size], self.speeds[FULL_SIZE], median, names)

    def regret(self, size: str) -> float | None:
        """How much worse at full size, in nats, the size's best architecture is than the best one of all.

        Of several that are the best at that size, one is as good a choice as another: the mean over them.
        """
        pairs = self.loss_pairs(size).values()
        if not pairs:
            return None
        best = min(small for small, _ in pairs)
        chosen = mean(full for small, full in pairs if small == best)
        return chosen - min(mean(losses) for losses in self.losses[FULL_SIZE].values())

    def between_seeds(self, size: str = FULL_SIZE) -> RankCorrelation:
        """One seed against one other, at one size: how far the order is that of the architectures.

        It is of one run each. The losses that sizes are compared by are means over the seeds, whose order is
        more reliable; `stepped_up` says of two of them by how much.
        """
        return _first_two(self.losses[size])

    def between_measurements(self) -> RankCorrelation:
        """One measurement of speed against another, at full size."""
        return _first_two(self.speeds[FULL_SIZE])


def measure(work: Work) -> Part:
    """Train and time all that is missing, and compare the orders."""
    plan = QUICK if work.quick else Plan()
    found = _found(work, plan, *_tuned(work, plan))
    return Part(figures(found, plan), bars(found, plan), table(found), tuple(work.missing))


Rates = dict[str, dict[str, dict[float, float]]]


def _tuned(work: Work, plan: Plan) -> tuple[Rates, dict[str, dict[str, str]]]:
    """By size and architecture: learning rate -> loss, with what is beside the best; why there is none."""
    grid, middle = plan.learning_rates, len(plan.learning_rates) // 2
    found: Rates = {size: {} for size in SIZES}
    errors: dict[str, dict[str, str]] = {size: {} for size in SIZES}
    asked = {
        (size, name): set(grid[max(0, middle - 1) : middle + 2])
        for size in SIZES
        for name in plan.architectures
    }
    while asked:
        configs: dict[tuple[str, str, float], StackWiseConfig] = {}
        for (size, name), rates in asked.items():
            try:
                of_rates = {(size, name, r): plan.config(name, size, r, plan.seeds[0]) for r in sorted(rates)}
            except ConfigError as error:
                errors[size][name] = " ".join(str(error).split())
            else:
                configs |= of_rates
        names = {key: _name(key[0], key[1], config) for key, config in configs.items()}
        made = _train(work, {names[key]: config for key, config in configs.items()})
        for (size, name, rate), run in names.items():
            if run in made:
                found[size].setdefault(name, {})[rate] = _loss(made[run])
        asked = {
            key: wanted
            for key, rates in asked.items()
            if (losses := found[key[0]].get(key[1], {})).keys() >= rates
            and (wanted := _beside_best(losses, grid) - losses.keys())
        }
    return found, errors


def _beside_best(losses: Mapping[float, float], grid: Sequence[float]) -> set[float]:
    place = grid.index(min(losses, key=losses.__getitem__))
    return set(grid[max(0, place - 1) : place + 2])


def _found(work: Work, plan: Plan, rates: Rates, errors: dict[str, dict[str, str]]) -> Found:
    best = {
        size: {
            name: min(losses, key=losses.__getitem__)
            for name, losses in of.items()
            if losses.keys() >= _beside_best(losses, plan.learning_rates)
        }
        for size, of in rates.items()
    }
    own = {
        (size, name, seed): plan.config(name, size, rate, seed)
        for size, of in best.items()
        for name, rate in of.items()
        for seed in plan.seeds
    }
    shared = {
        (size, name, seed): plan.config(name, size, best[size][BASE], seed)
        for size in (FULL_SIZE, OURS)
        for name in (best[size] if BASE in best[size] else ())
        for seed in plan.seeds
    }
    configs = [*own.items(), *shared.items()]
    made = _train(work, {_name(key[0], key[1], config): config for key, config in configs})
    losses, at_one_rate = _losses(own, made), _losses(shared, made)
    sizes: dict[str, dict[str, int]] = {size: {} for size in SIZES}
    for (size, name, _), config in own.items():
        if (run := _name(size, name, config)) in made:
            sizes[size][name] = made[run]["parameters"]
    once = {(size, name): config for (size, name, seed), config in own.items() if seed == plan.seeds[0]}
    notes = {name: _notes(plan, name) for name in plan.architectures}
    speeds = _speeds(work, plan, once)
    return Found(rates, best, losses, at_one_rate, speeds, errors, sizes, notes)


def _losses(
    configs: Mapping[tuple[str, str, int], StackWiseConfig], made: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, list[float]]]:
    losses: dict[str, dict[str, list[float]]] = {size: {} for size in SIZES}
    for (size, name, _), config in configs.items():
        if (run := _name(size, name, config)) in made:
            losses[size].setdefault(name, []).append(_loss(made[run]))
    return losses


def _notes(plan: Plan, name: str) -> tuple[str, ...]:
    full = plan.config(name, FULL_SIZE, plan.learning_rates[0], plan.seeds[0])
    return create_small_variant(full, FACTOR).notes


def _train(work: Work, configs: Mapping[str, StackWiseConfig]) -> dict[str, dict[str, Any]]:
    runs = {name: partial(train, config) for name, config in configs.items()}
    # The long ones first, so that no process waits for another at the end.
    order = sorted(runs, key=lambda name: not name.startswith(FULL_SIZE))
    return work.complete({name: runs[name] for name in order}, {"what": "training"})


def _name(size: str, architecture: str, config: StackWiseConfig) -> str:
    """With a digest of the whole configuration: a run is of it and not of what it was made from.

    What the chapter's recipe makes of most architectures is one model, which is trained once.
    """
    of = "" if size == CHAPTER else f"{architecture}; "
    return f"{size}; {of}seed {config.training.seed}; {digest(config.to_dict())}"


def _loss(run: Mapping[str, Any]) -> float:
    """In nats; what was lost is worse than anything."""
    loss = run["validation_loss"]
    return math.inf if loss is None or math.isnan(loss) else float(loss)


def _speeds(
    work: Work, plan: Plan, configs: Mapping[tuple[str, str], StackWiseConfig]
) -> dict[str, dict[str, list[float]]]:
    """Tokens per second of training steps. One process at a time, with nothing beside it."""
    found: dict[str, dict[str, list[float]]] = {size: {} for size in SIZES}
    runs: dict[str, Callable[[], Iterator[Mapping[str, Any]]]] = {}
    for number in range(plan.measurements):
        for size in SIZES:
            of = {name: config for (each, name), config in configs.items() if each == size}
            if of:
                told = digest({name: config.to_dict() for name, config in of.items()})
                more_rows = 1 if size == FULL_SIZE else FACTOR
                timed = partial(speeds, of, plan.rounds, number, more_rows)
                runs[f"{size}; speed {number}; {told}"] = timed
    settings = {"what": "speed", "rounds": plan.rounds, "more_rows": FACTOR}
    for run, values in work.complete(runs, settings, jobs=1, gigabytes=8.0).items():
        for name, each in values.items():
            found[run.partition(";")[0]].setdefault(name, []).append(each)
    return found


def speeds(
    configs: Mapping[str, StackWiseConfig], rounds: int, seed: int, more_rows: int
) -> Iterator[dict[str, float]]:
    """Tokens per second of a training step of each, measured in turns in this process, with one thread."""
    import torch

    from stackwise import ModelSpec, create_rack_from_config
    from stackwise.benchmark import interleave, model_workload

    torch.set_num_threads(1)
    workloads = {
        name: model_workload(
            ModelSpec.of(partial(create_rack_from_config, config), name=name),
            "train",
            batch_size=more_rows * config.training.batch_size,
            seq_len=config.training.seq_len,
        )
        for name, config in configs.items()
    }
    measured = interleave(workloads, rounds=rounds, turn_seconds=0.05, warmup_seconds=1.0, seed=seed)
    yield {name: float(of.tokens_per_second or 0.0) for name, of in measured.measurements.items()}


def correlations(found: Found) -> dict[str, dict[str, Any]]:
    """By shrink: rho of loss and of speed, of all that it builds.

    Beside it our own over the same architectures, and the shrink's over those of which ours notes nothing.
    """
    said = {}
    unnoted = [name for name, notes in found.notes.items() if not notes]
    for size in SHRINKS:
        built = sorted(found.losses[size])
        said[size] = {
            "loss": rank_correlation(list(found.loss_pairs(size).values())).to_dict(),
            "speed": rank_correlation(list(found.speed_pairs(size).values())).to_dict(),
            "ours_on_these": {
                "loss": rank_correlation(list(found.loss_pairs(OURS, built).values())).to_dict(),
                "speed": rank_correlation(list(found.speed_pairs(OURS, built).values())).to_dict(),
            },
            "without_notes": {
                "loss": rank_correlation(list(found.loss_pairs(size, unnoted).values())).to_dict(),
                "speed": rank_correlation(list(found.speed_pairs(size, unnoted).values())).to_dict(),
            },
            "regret": found.regret(size),
            "errors": dict(found.errors[size]),
        }
    return said


def figures(found: Found, plan: Plan) -> dict[str, Any]:
    """As JSON has them."""
    return {
        "plan": asdict(plan),
        "tokens": plan.steps * plan.batch_size * plan.seq_len,
        "learning_rates": {
            size: {
                name: {f"{rate:g}": _plain(losses[rate]) for rate in sorted(losses)}
                for name, losses in of.items()
            }
            for size, of in found.learning_rates.items()
        },
        "best_learning_rate": {size: dict(of) for size, of in found.best.items()},
        "parameters": found.sizes,
        "losses": {
            size: {name: [_plain(loss) for loss in losses] for name, losses in of.items()}
            for size, of in found.losses.items()
        },
        "tokens_per_second": found.speeds,
        "notes": {name: list(notes) for name, notes in found.notes.items() if notes},
        "at_one_rate": rank_correlation(list(found.pairs_at_one_rate().values())).to_dict(),
        "between_seeds": found.between_seeds().to_dict(),
        "between_seeds_of_ours": found.between_seeds(OURS).to_dict(),
        "between_seeds_stepped_up": stepped_up(found.between_seeds().rho),
        "between_measurements": found.between_measurements().to_dict(),
        "shrinks": correlations(found),
    }


def bars(found: Found, plan: Plan) -> tuple[Bar, ...]:
    """None of them before all runs are there."""
    whole = all(
        len(found.losses[size].get(name, ())) == len(plan.seeds)
        and len(found.speeds[size].get(name, ())) == plan.measurements
        for size in (FULL_SIZE, OURS)
        for name in plan.architectures
    )
    said = correlations(found)[OURS]
    loss, speed = (said[kind]["rho"] if whole else None for kind in ("loss", "speed"))
    return (
        Bar("ranks: Spearman of loss", loss, LEAST_RHO, full_size=True),
        Bar("ranks: Spearman of tokens/s", speed, LEAST_RHO, full_size=True),
    )


def table(found: Found) -> Table:
    """One row an architecture: parameters, loss and speed at each size."""
    shown = Table("architecture", *(f"{size}: parameters, loss, tokens/s" for size in SIZES))
    for name in found.losses[FULL_SIZE]:
        shown.add_row(name, *(_cell(found, size, name) for size in SIZES))
    for what in ("loss", "speed"):
        cells = [str(RankCorrelation(**of[what])) for of in correlations(found).values()]
        shown.add_row(f"Spearman, {what}", "", *cells)
    return shown


def _cell(found: Found, size: str, name: str) -> str:
    if name in found.errors[size]:
        return "no such model"
    losses, of_speed = found.losses[size].get(name), found.speeds[size].get(name)
    loss = f"{mean(losses):.3f}" if losses else "-"
    speed = f"{median(of_speed):,.0f}" if of_speed else "-"
    return f"{found.sizes[size].get(name, 0):,}, {loss}, {speed}"


def rows(figures: Mapping[str, Any]) -> str:
    """A Markdown table for the documentation: one row a shrink."""
    names = {
        OURS: "`create_small_variant(config, factor=4)`",
        QUARTER: "a quarter of every size, other keys kept",
        CHAPTER: "a quarter of four sizes, plain attention",
    }
    total = len(figures["plan"]["architectures"])
    lines = [
        "| | builds | Spearman of loss | Spearman of tokens/s | regret, nats |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for size, of in figures["shrinks"].items():
        regret = "-" if of["regret"] is None else f"{of['regret']:.3f}"
        cells = [f"{total - len(of['errors'])} of {total}"]
        cells += [str(RankCorrelation(**of[what])) for what in ("loss", "speed")]
        lines.append(f"| {names[size]} | {' | '.join([*cells, regret])} |")
    whole = figures["shrinks"][OURS]["without_notes"]
    cells = [f"{total - len(figures['notes'])} of {total}"]
    cells += [str(RankCorrelation(**whole[what])) for what in ("loss", "speed")]
    lines.append(f"| the first, of what it has no note about | {' | '.join(cells)} | |")
    at_one_rate = RankCorrelation(**figures["at_one_rate"])
    lines.append(f"| the first, with one learning rate for all of a size | | {at_one_rate} | | |")
    again = [RankCorrelation(**figures[key]) for key in ("between_seeds", "between_measurements")]
    cells = [str(each) for each in again]
    of_two = stepped_up(again[0].rho)
    if of_two is not None:
        cells[0] += f"; for the mean of two {of_two:.2f}"
    lines.append(f"| full size, one run against another | | {' | '.join(cells)} | |")
    small = RankCorrelation(**figures["between_seeds_of_ours"])
    lines.append(f"| the first, one run against another | | {small} | | |")
    return "\n".join(lines)


def draw(figures: Mapping[str, Any], path: Path) -> None:
    """Loss and speed of every architecture, small against full size, as an SVG that is the same again."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "prototype", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(9.0, 4.2), layout="constrained")
        for place, (key, what, center) in enumerate(
            (("losses", "validation loss, nats", mean), ("tokens_per_second", "tokens/s", median))
        ):
            axes = figure.add_subplot(1, 2, place + 1)
            for size, marker in ((OURS, "o"), (QUARTER, "x"), (CHAPTER, "+")):
                small, full = figures[key][size], figures[key][FULL_SIZE]
                names = [name for name in small if name in full and None not in (*small[name], *full[name])]
                x, y = ([center(of[name]) for name in names] for of in (small, full))
                axes.scatter(x, y, marker=marker, s=22, label=size, zorder=3 if size == OURS else 2)
                if size == OURS:
                    for name, left, up in zip(names, x, y, strict=True):
                        axes.annotate(name, (left, up), (3, 3), textcoords="offset points", fontsize=6)
            if key == "tokens_per_second":
                axes.set(xscale="log", yscale="log")
            axes.set(xlabel=f"{what}, small", ylabel=f"{what}, full size")
            axes.legend(loc="upper left", fontsize=7)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def _pairs(
    small: Mapping[str, Sequence[float]],
    full: Mapping[str, Sequence[float]],
    center: Callable[[Sequence[float]], float],
    names: Sequence[str] | None,
) -> dict[str, tuple[float, float]]:
    both = [name for name in full if name in small and (names is None or name in names)]
    return {name: (center(small[name]), center(full[name])) for name in both}


def _first_two(values: Mapping[str, Sequence[float]]) -> RankCorrelation:
    return rank_correlation([(each[0], each[1]) for each in values.values() if len(each) > 1])


def _plain(number: float) -> float | None:
    return number if math.isfinite(number) else None
