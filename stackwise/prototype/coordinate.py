"""Coordinate check: size of activations, and of their changes in training, as a function of the width."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

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
from stackwise.prototype.widen import Parametrization, as_mup, as_standard, widened
from stackwise.report.plot import BAD, MUTED, svg_plot, write_svg
from stackwise.subject.spec import ModelSpec
from stackwise.support.arguments import check_choice, check_number, check_sizes, require
from stackwise.support.random_state import choose_seeds, seeded
from stackwise.training.objective import Objective
from stackwise.training.optimizer import create_optimizer
from stackwise.training.phase_model import PhaseModel
from stackwise.training.step import MicroBatch, TrainStep

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["CoordinateCheck", "Verdict", "coordinate_check"]

Verdict = Literal["width-independent", "unclear", "not width-independent", "not finite"]
Make = Callable[[int], StackWiseConfig | nn.Module]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]

_SEQ_LEN = 16


@dataclass(frozen=True)
class CoordinateCheck:
    """Slopes of activation sizes and changes over the width, with a verdict.

    Attributes:
        name: name of the checked model.
        parametrization: declared parametrization, "mup" or "standard".
        widths: width factors relative to the subject.
        steps: number of optimizer steps.
        seeds: number of seeds per width.
        slopes: for every module, slopes of its size at steps 0 to `steps` and of its change at steps 1 to
            `steps`.
    """

    name: str
    parametrization: Parametrization
    widths: tuple[int, ...]
    steps: int
    seeds: int
    slopes: tuple[Slope, ...]

    @property
    def worst(self) -> Slope:
        """Slope with the largest distance from its expected value, of sizes at the start and all changes."""
        worst = worst_of(self.slopes)
        assert worst is not None, "refused by coordinate_check"
        return worst

    @property
    def first(self) -> Slope | None:
        """First slope beyond the limit, by step and then by order of modules. None: no such slope.

        Start an investigation with it, because later slopes are affected by earlier errors.
        """
        return first_of(self.slopes)

    @property
    def verdict(self) -> Verdict:
        """Verdict of the worst slope.

        - "width-independent": within 0.25 of the expected value.
        - "not width-independent": beyond 0.35.
        - "unclear": between 0.25 and 0.35. Use wider models or more seeds.
        - "not finite": a size is not finite. The run is no evidence about the width, and no parametrization
          has this verdict as its expected one.

        A wrongly scaled sum over the width changes the exponent by 1/2 or more, and 0.25 is half of that.
        """
        return _verdict(self.worst)

    @property
    def as_expected(self) -> bool:
        """True if the verdict is the expected one: width-independent for muP, the opposite for standard."""
        wanted = "width-independent" if self.parametrization == "mup" else "not width-independent"
        return self.verdict == wanted

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON. Values that are not finite are None."""
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
        """Draw sizes over width as a new SVG, with a panel per step and a line per module.

        The file is deterministic.

        Raises:
            ValueError: another file extension than .svg.
            ImportError: matplotlib is not installed.
        """
        title = f"{self.name}, {self.parametrization}: {self.verdict}"
        return write_svg(path, _svg(self.slopes, self.widths, self.worst, title))

    def __str__(self) -> str:
        held = f"{'' if self.as_expected else 'not '}as expected of {self.parametrization}"
        widths = ", ".join(map(str, self.widths))
        lines = [f"{self.name}: {self.verdict}, {held}; {widths} times as wide, {self.seeds} seeds"]
        lines.append(f"  worst: {_slope_text(self.worst)}; independent within {UNUSUAL}, not beyond {LIMIT}")
        if self.first is not None and self.first != self.worst:
            lines.append(f"  first: {_slope_text(self.first)}")
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
    """Train models of several widths for a few steps, and measure activations as a function of the width.

    This is the coordinate check of Yang et al. 2022 (arXiv:2203.03466, appendix D.1). On a fixed batch, it
    measures the mean absolute value of each module's output before the first step and after each step, and of
    its change since the start. In muP, both are independent of the width. In the standard parametrization,
    changes grow with the width, and a learning rate that suits a narrow model is too high for a wide one.
    Attention scores are measured too, although no module returns them.

    A slope is that of the logarithm of the size over the logarithm of the width, by least squares for each
    seed. The expected slope is 0. For the input of the readout, it is -1 if muP's multiplier of the logits is
    before it. For the output and for attention scores, it is 0 or less, because sums with random weights
    shrink with the width.

    Args:
        subject: a configuration, widened by `widened` and trained like the trainer does, in float32 at a
            constant learning rate; a ModelSpec with `at_width`; or a function of the width factor that
            returns a configuration, trained in the same way, or a model.
        widths: width factors relative to the subject, at least two.
        steps: number of optimizer steps.
        seeds: seeds of the weights at each width: their number, starting at `seed`, or a list.
        parametrization: expected parametrization. A configuration is converted to it: "mup" uses the
            narrowest width as its base unless it has one; "standard" is `initialization="normal"` instead of
            "mup".
        learning_rate: learning rate at the base width. None: `training.optimizer.lr` of a configuration.
        optimizer: (model) -> optimizer, for models. None: that of the spec. For a Rack that a function
            returns, that of the trainer; for other models, AdamW at 1e-3.
        batch_size: number of rows of the batch of random tokens. A small batch is more sensitive: the effect
            of a step adds up over the width for the tokens of that step, but only as noise for many other
            tokens.
        seq_len: number of tokens per row that the model sees. None: the configured length, at most 16; for a
            spec, its own length.
        device: device of the training.
        seed: first of `seeds`, and seed of the batch.

    Raises:
        ValueError: fewer than two widths; a value out of range; an argument that the subject does not use; a
            configuration without a base in muP; a spec without `at_width`; or a model in which every module
            returns 0.
        TypeError: a subject of another type.
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
    """Arguments that are equal for every width and seed."""

    learning_rate: float | None
    optimizer: MakeOptimizer | None
    batch_size: int
    seq_len: int | None
    device: torch.device
    seed: int


def _trainings(
    subject: object, widths: tuple[int, ...], parametrization: Parametrization, settings: _Settings
) -> tuple[str, Callable[[int, int], Training]]:
    """Return the name of the subject, and a function (width, seed) -> training."""
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
    """Return a function from a factor to the widened configuration in this parametrization."""
    model = config.model
    if parametrization == "mup":
        allowed = "with parametrization='mup' what has key/value heads that grow with the width, as 'gqa'"
        require(model.attention_type != "mqa", "model.attention_type", model.attention_type, allowed)
        base = model.mup_base_width or widths[0] * model.d_model
        return lambda width: as_mup(widened(config, width), base)
    return partial(widened, as_standard(config))


def _of_config(config: StackWiseConfig, seed: int, settings: _Settings) -> Training:
    """Return a training of a Rack: the trainer's own step on one batch."""
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
        # Use a backend with visible scores. A soft cap has none.
        with torch.no_grad(), using("sdpa"):
            logits: Tensor = rack(targets.input_ids)
            return logits

    def update() -> None:
        with torch.enable_grad(), seeded(settings.seed, settings.device):
            step([MicroBatch(targets)], rate)

    return Training(rack, forward, update)


def _tokens(config: StackWiseConfig, objective: Objective, settings: _Settings) -> Tensor:
    """Return random ids (B, N), equal for every width and without the id of the mask."""
    n_ids, mask = config.model.vocab_size, config.training.objective.mask_token_id
    seq_len = settings.seq_len or min(config.training.seq_len, _SEQ_LEN)
    shape = (settings.batch_size, objective.row_length(seq_len))
    ids = torch.randint(n_ids, shape, generator=torch.Generator().manual_seed(settings.seed))
    return ids if mask is None else torch.where(ids == mask, (ids + 1) % n_ids, ids)


def _of_spec(spec: ModelSpec, settings: _Settings) -> Callable[[int, int], Training]:
    """Return a function (width, seed) -> training of a spec, with its own optimizer by default."""
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


def _slope_text(slope: Slope) -> str:
    expected = f"{slope.expected:g}" if slope.exact else f"{slope.expected:g} or less"
    return f"{slope.what} of {slope.where}, width to the power {_shown(slope)}, expected {expected}"


def _shown(slope: Slope) -> str:
    error = "" if slope.standard_error is None else f" ± {slope.standard_error:.2f}"
    return f"{slope.value:+.2f}{error}"


def _cell(slope: Slope | None) -> str:
    """Return a slope as text, with a mark if it is not the expected one."""
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


def _svg(slopes: Sequence[Slope], widths: Sequence[int], worst: Slope, title: str) -> str:
    """Return an SVG of sizes at the start and changes after each step over the width, on logarithmic axes.

    The text is deterministic. A line is the geometric mean over seeds of one module. Colours from light to
    dark show the order in which modules run, and the module of `worst` is red. Values that are not finite are
    not drawn.

    Args:
        slopes: slopes of the modules.
        widths: widths of the sizes.
        worst: one of the slopes.
        title: title above all panels.

    Raises:
        ImportError: matplotlib is not installed.
    """
    judged = [slope for slope in slopes if slope.judged]
    modules = list(dict.fromkeys(slope.module for slope in slopes))
    steps = sorted({slope.step for slope in judged})

    def draw(figure: Figure) -> None:
        colours = _colours(modules) | {worst.module: BAD}
        lines: dict[str, Any] = {}
        for panel, step in zip(figure.subplots(1, len(steps), squeeze=False)[0], steps, strict=True):
            shown = [slope for slope in judged if slope.step == step]
            for slope in shown:
                sizes = [size if math.isfinite(size) else math.nan for size in slope.sizes]
                width, front = (2.2, 3) if slope.module == worst.module else (1.0, 2)
                style = {"color": colours[slope.module], "lw": width, "zorder": front}
                (line,) = panel.plot(widths, sizes, "o-", ms=2.5, **style)
                lines.setdefault(slope.where, line)
            panel.set_title(shown[0].what, loc="left", fontsize="medium")
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            panel.set_xticks(list(widths), [str(width) for width in widths], minor=False)
            panel.set_xlabel("times as wide")
            panel.grid(color=MUTED, lw=0.3, alpha=0.5)
            panel.spines[["top", "right"]].set_visible(False)
        figure.axes[0].set_ylabel("mean absolute value")
        figure.suptitle(title, x=0.01, ha="left", parse_math=False)
        figure.legend(list(lines.values()), list(lines), loc="outside right upper", frameon=False, fontsize=6)

    return svg_plot((2.3 * len(steps) + 3.4, max(3.2, 0.17 * len(modules) + 0.8)), draw, font_size=8)


def _colours(modules: Sequence[str]) -> dict[str, Any]:
    """Return a colour for each module, from light to dark."""
    import matplotlib as mpl

    shade = mpl.colormaps["viridis_r"]
    return {module: shade(0.1 + 0.85 * i / max(1, len(modules) - 1)) for i, module in enumerate(modules)}
