"""Coordinate check: whether activations, and what training changes in them, have one size at every width."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from stackwise.checks.model.width import training_at_width
from stackwise.checks.probe.coordinate import (
    LIMIT,
    UNUSUAL,
    Slope,
    Training,
    coordinates_of,
    first_of,
    slopes_of,
    worst_of,
)
from stackwise.checks.subject import Subject
from stackwise.config import OptimizerConfig, StackWiseConfig
from stackwise.model.backend import using
from stackwise.model.build import create_rack_from_config
from stackwise.model.rack import Rack
from stackwise.prototype.coordinate_plot import coordinate_svg
from stackwise.prototype.widen import Parametrization, as_mup, as_standard, widened
from stackwise.report.plot import write_svg
from stackwise.subject.spec import ModelSpec
from stackwise.support.arguments import check_choice, check_number, check_sizes, require
from stackwise.support.random_state import choose_seeds, seeded
from stackwise.training.objective import Objective
from stackwise.training.optimizer import create_optimizer
from stackwise.training.phase_model import PhaseModel
from stackwise.training.step import MicroBatch, TrainStep

__all__ = ["CoordinateCheck", "Verdict", "coordinate_check"]

Verdict = Literal["width-independent", "unclear", "not width-independent", "not finite"]
Make = Callable[[int], StackWiseConfig | nn.Module]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]

_SEQ_LEN = 16


@dataclass(frozen=True)
class CoordinateCheck:
    """Slopes of sizes and changes over the width, and what they say.

    Attributes:
        name: of what was checked.
        parametrization: "mup" or "standard", as it was said to be.
        widths: how many times as wide as the subject.
        steps: optimizer steps.
        seeds: how many at each width.
        slopes: of every module's size at steps 0 to `steps` and change at steps 1 to `steps`.
    """

    name: str
    parametrization: Parametrization
    widths: tuple[int, ...]
    steps: int
    seeds: int
    slopes: tuple[Slope, ...]

    @property
    def worst(self) -> Slope:
        """The slope farthest from what is expected: of sizes at the start, and of all changes."""
        worst = worst_of(self.slopes)
        assert worst is not None, "refused by coordinate_check"
        return worst

    @property
    def first(self) -> Slope | None:
        """The first slope beyond the limit, by step and then in the order of modules: where to look first.

        What follows takes over what is wrong before it. None: there is none.
        """
        return first_of(self.slopes)

    @property
    def verdict(self) -> Verdict:
        """What the worst slope says.

        "width-independent" where it is within 0.25 of what is expected, "not width-independent" beyond 0.35,
        "unclear" between: wider models and more seeds decide. A sum over the width that is scaled wrongly
        is off by a power of 1/2 or more, and 0.25 is half-way to that. "not finite" where a size is not:
        such a run says nothing of the width, and is expected of no parametrisation.
        """
        return _verdict(self.worst)

    @property
    def as_expected(self) -> bool:
        """Whether that is so of its kind: muP is independent of the width, the standard one is not."""
        wanted = "width-independent" if self.parametrization == "mup" else "not width-independent"
        return self.verdict == wanted

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; what is not finite is None."""
        return {
            "name": self.name,
            "parametrization": self.parametrization,
            "widths": list(self.widths),
            "steps": self.steps,
            "seeds": self.seeds,
            "limits": {"width-independent": UNUSUAL, "not width-independent": LIMIT},
            "verdict": self.verdict,
            "as_expected": self.as_expected,
            "worst": _plain(self.worst),
            "first": None if self.first is None else _plain(self.first),
            "slopes": [_plain(slope) for slope in self.slopes],
        }

    def plot(self, path: str | Path) -> Path:
        """Draw sizes over width, a panel a step and a line a module, to a new SVG; the same file each time.

        Raises:
            ValueError: another ending than .svg.
            ImportError: matplotlib is not installed.
        """
        title = f"{self.name}, {self.parametrization}: {self.verdict}"
        return write_svg(path, coordinate_svg(self.slopes, self.widths, self.worst, title))

    def __str__(self) -> str:
        held = f"{'' if self.as_expected else 'not '}as expected of {self.parametrization}"
        widths = ", ".join(map(str, self.widths))
        lines = [f"{self.name}: {self.verdict}, {held}; {widths} times as wide, {self.seeds} seeds"]
        lines.append(f"  worst: {_told(self.worst)}; independent within {UNUSUAL}, not beyond {LIMIT}")
        if self.first is not None and self.first != self.worst:
            lines.append(f"  first: {_told(self.first)}")
        by_key = {(slope.module, str(slope.kind), slope.step): slope for slope in self.slopes}
        columns = [("size", 0), *(("change", step) for step in range(1, self.steps + 1))]
        rows = [["module", "size at the start", *(f"change at {step}" for _, step in columns[1:])]]
        for module, where in {slope.module: slope.where for slope in self.slopes}.items():
            rows.append([where, *(_cell(by_key.get((module, *column))) for column in columns)])
        sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for name, *cells in rows:
            padded = [cell.rjust(size) for cell, size in zip(cells, sizes[1:], strict=True)]
            lines.append("  " + "  ".join([name.ljust(sizes[0]), *padded]).rstrip())
        return "\n".join(lines)


def coordinate_check(
    subject: StackWiseConfig | ModelSpec | Make,
    widths: Sequence[int] = (1, 2, 4, 8),
    *,
    steps: int = 4,
    seeds: int | Sequence[int] = 3,
    parametrization: Parametrization = "mup",
    learning_rate: float | None = None,
    optimizer: MakeOptimizer | None = None,
    batch_size: int = 2,
    seq_len: int | None = None,
    device: str | torch.device = "cpu",
    seed: int = 0,
) -> CoordinateCheck:
    """Train models of several widths for a few steps, and see how activations go with the width.

    The coordinate check of Yang et al. 2022 (arXiv:2203.03466, appendix D.1): the mean absolute value of what
    each module gives, before the first step and after each one, and of its change since the start, on a
    batch that stays the same. Where a parametrisation is that of muP, neither goes with the width; in the
    standard one changes grow, and a learning rate that is right for a narrow model is too high for a wide
    one. Scores of attention, which no module gives, are seen as well.

    A slope is that of the logarithm of the size over the logarithm of the width, by least squares for each
    seed. Expected is 0; of what the readout reads -1, where muP's multiplier of the logits stands before it;
    of the output, and of scores of attention, 0 or less, since what random weights make of them is smaller,
    the wider what they read.

    Args:
        subject: a configuration, widened by `widened` and trained as the trainer would, in float32 with the
            learning rate constant; a ModelSpec with `at_width`; or a function of the factor that gives a
            configuration, trained likewise, or a model.
        widths: how many times as wide as the subject; two at least.
        steps: optimizer steps.
        seeds: of weights, at each width: how many, from `seed` on; or which.
        parametrization: what the result is held to. A configuration is made so: "mup" has the narrowest as
            its base unless it has one; "standard" is `initialization="normal"` in place of "mup".
        learning_rate: at the width of the base; None: `training.optimizer.lr` of a configuration.
        optimizer: (model) -> optimizer, of models; None: that of the spec; for a Rack that a function gives,
            the trainer's, for other models AdamW at 1e-3.
        batch_size: rows of the batch, of random tokens. Few tokens see more: what a step changes adds up over
            the width for the tokens that it was made for, and only as noise for many others.
        seq_len: tokens that the model sees of a row; None: as configured, 16 at most; of a spec its own.
        device: where they train.
        seed: the first of `seeds`, and that of the batch.

    Raises:
        ValueError: fewer than two widths, a value out of range, an argument that the subject has no use for,
            a configuration that has no base in muP, or a spec without `at_width`; or no module gives anything
            but 0.
        TypeError: a subject of another kind.
    """
    check_sizes(steps=steps, batch_size=batch_size, **({} if seq_len is None else {"seq_len": seq_len}))
    check_sizes(minimum=0, seed=seed)
    chosen = choose_seeds(seeds, seed)
    check_choice("parametrization", parametrization, get_args(Parametrization))
    for width in widths:
        check_sizes(widths=width)
    require(len(set(widths)) == len(widths) >= 2, "widths", list(widths), "two or more, each once")
    if learning_rate is not None:
        check_number("learning_rate", learning_rate, "a number above 0", lambda rate: rate > 0)
    widths = tuple(sorted(widths))
    settings = _Settings(learning_rate, optimizer, batch_size, seq_len, torch.device(device), seed)
    name, training = _trainings(subject, widths, parametrization, settings)
    found = [[coordinates_of(training(width, each), steps) for each in chosen] for width in widths]
    slopes = slopes_of(widths, found)
    require(worst_of(slopes) is not None, "subject", name, "a model whose modules give more than 0")
    return CoordinateCheck(name, parametrization, widths, steps, len(chosen), slopes)


@dataclass(frozen=True)
class _Settings:
    """What of the arguments is the same at every width and seed."""

    learning_rate: float | None
    optimizer: MakeOptimizer | None
    batch_size: int
    seq_len: int | None
    device: torch.device
    seed: int


def _trainings(
    subject: object, widths: tuple[int, ...], parametrization: Parametrization, settings: _Settings
) -> tuple[str, Callable[[int, int], Training]]:
    """What the subject is called, and (width, seed) -> a training."""
    if isinstance(subject, StackWiseConfig):
        family = _family(subject, widths, parametrization)
        return "Rack", lambda width, seed: _of_config(family(width), seed, settings)
    if isinstance(subject, ModelSpec):
        allowed = "a ModelSpec with at_width=, which makes it wider"
        require(subject.at_width is not None, "subject", subject.name, allowed)
        return subject.name, _of_spec(subject, settings)
    if not callable(subject) or isinstance(subject, nn.Module | type):
        raise TypeError(
            f"subject: got {type(subject).__name__}; wanted a StackWiseConfig, a ModelSpec with at_width, or "
            "a function of the factor that gives a StackWiseConfig or an nn.Module"
        )
    first = subject(widths[0])
    if isinstance(first, StackWiseConfig):
        return _name_of(subject, "Rack"), lambda width, seed: _of_config(subject(width), seed, settings)
    if not isinstance(first, nn.Module):
        got = type(first).__name__
        raise TypeError(f"subject: the function gave {got}; wanted a StackWiseConfig or an nn.Module")
    if isinstance(first, Rack) and settings.optimizer is None:
        config = OptimizerConfig(lr=settings.learning_rate or 1e-3)
        trainers: Any = partial(create_optimizer, config=config)
        settings = replace(settings, optimizer=trainers, learning_rate=None)
    spec = ModelSpec.of(lambda: subject(widths[0]), at_width=subject)
    return _name_of(subject, spec.name), _of_spec(spec, settings)


def _family(
    config: StackWiseConfig, widths: tuple[int, ...], parametrization: Parametrization
) -> Callable[[int], StackWiseConfig]:
    """Factor -> the configuration so many times as wide, in this parametrisation."""
    model = config.model
    if parametrization == "mup":
        allowed = "with parametrization='mup' what has key/value heads that grow with the width, as 'gqa'"
        require(model.attention_type != "mqa", "model.attention_type", model.attention_type, allowed)
        base = model.mup_base_width or widths[0] * model.d_model
        return lambda width: as_mup(widened(config, width), base)
    return partial(widened, as_standard(config))


def _of_config(config: StackWiseConfig, seed: int, settings: _Settings) -> Training:
    """A Rack, and the trainer's own step on one batch."""
    allowed = "None for a configuration, which describes its own"
    require(settings.optimizer is None, "optimizer", settings.optimizer, allowed)
    changed = config.to_dict()
    changed["training"] |= {"precision": "fp32", "compile": False}
    config = StackWiseConfig.from_dict(changed)
    with seeded(seed, settings.device):
        rack = create_rack_from_config(config).to(settings.device).eval()
    objective = Objective(config.training.objective, rack.vocab_size)
    objective.check(rack)
    targets = objective.targets({"input_ids": _tokens(config, objective, settings)}, (settings.seed,))
    targets = targets.to(settings.device)
    step = TrainStep(PhaseModel(rack, objective), config.training, rack)
    rate = config.training.optimizer.lr if settings.learning_rate is None else settings.learning_rate

    def forward() -> Tensor:
        # Of the backends one whose scores can be seen; a soft cap has none.
        with torch.no_grad(), using("sdpa"):
            logits: Tensor = rack(targets.input_ids)
            return logits

    def update() -> None:
        with torch.enable_grad(), seeded(settings.seed, settings.device):
            step([MicroBatch(targets)], rate)

    return Training(rack, forward, update)


def _tokens(config: StackWiseConfig, objective: Objective, settings: _Settings) -> Tensor:
    """Random ids (B, N), the same ones at every width; none of them the mask's."""
    n_ids, mask = config.model.vocab_size, config.training.objective.mask_token_id
    seq_len = settings.seq_len or min(config.training.seq_len, _SEQ_LEN)
    shape = (settings.batch_size, objective.row_length(seq_len))
    ids = torch.randint(n_ids, shape, generator=torch.Generator().manual_seed(settings.seed))
    return ids if mask is None else torch.where(ids == mask, (ids + 1) % n_ids, ids)


def _of_spec(spec: ModelSpec, settings: _Settings) -> Callable[[int, int], Training]:
    """Models of a spec, with its own optimizer where no other is given."""
    allowed = "None for a model, whose optimizer knows its own; give optimizer= in its place"
    require(settings.learning_rate is None, "learning_rate", settings.learning_rate, allowed)
    if settings.seq_len is not None:
        spec = replace(spec, seq_len=settings.seq_len)
    subject = Subject(spec, settings.device, settings.seed)
    return partial(training_at_width, subject, rows=settings.batch_size, optimizer=settings.optimizer)


def _name_of(function: object, otherwise: str) -> str:
    name = getattr(function, "__name__", otherwise)
    return otherwise if name == "<lambda>" else str(name)


def _verdict(slope: Slope) -> Verdict:
    if not math.isfinite(slope.value):
        return "not finite"
    if slope.distance <= UNUSUAL:
        return "width-independent"
    return "unclear" if slope.distance <= LIMIT else "not width-independent"


def _told(slope: Slope) -> str:
    expected = f"{slope.expected:g}" if slope.exact else f"{slope.expected:g} or less"
    return f"{slope.what} of {slope.where}, width to the power {_shown(slope)}, expected {expected}"


def _shown(slope: Slope) -> str:
    error = "" if slope.standard_error is None else f" ± {slope.standard_error:.2f}"
    return f"{slope.value:+.2f}{error}"


def _cell(slope: Slope | None) -> str:
    """With a mark where it is not what is expected."""
    if slope is None:
        return "-"
    mark = {"width-independent": "  ", "unclear": " ?"}.get(_verdict(slope), " !")
    return f"{_shown(slope)}{mark}"


def _plain(slope: Slope) -> dict[str, Any]:
    def finite(value: float | None) -> float | None:
        return value if value is not None and math.isfinite(value) else None

    return {
        "module": slope.where,
        "kind": slope.kind,
        "step": slope.step,
        "sizes": [finite(size) for size in slope.sizes],
        "slope": finite(slope.value),
        "standard_error": finite(slope.standard_error),
        "expected": slope.expected,
        "distance": finite(slope.distance),
    }
