"""Sensitivity: what qk-norm and z-loss do to the sensitivity to the learning rate.

The learning rates, the definition and the two remedies are those of Wortsman et al. 2023 (arXiv:2309.14322):
where the learning rate is high, the logits of attention grow, which a norm of queries and keys bounds, and
those of the output, which a penalty on the softmax's denominator holds. What counts is the validation loss at
the end, without that penalty, on the documentation that every CPython carries, in 1024 byte pairs: the logits
of so few tokens as there are bytes do not grow away. A reduction is a difference
seed by seed, and its interval Student's t over the seeds: of qk-norm to the plain model, and of z-loss, as in
section 3.1 of the paper, to that with qk-norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.byte_pairs import byte_pairs
from bench.claim import Bar
from bench.prototype.part import Part, Work
from bench.prototype.sweeps import SweepPlan, complete, plotted
from stackwise import StackWiseConfig
from stackwise.prototype.estimate import Estimate
from stackwise.prototype.sensitivity import LEARNING_RATES
from stackwise.prototype.sweep_result import LearningRateSweep

__all__ = ["draw", "measure", "rows"]

PLAIN, QK_NORM, Z_LOSS, BOTH = "plain", "qk-norm", "z-loss", "qk-norm and z-loss"
# Name: (keys of the model, keys of the objective). The weight of the z-loss is the paper's.
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    PLAIN: ({}, {}),
    QK_NORM: ({"qk_norm": "head"}, {}),
    Z_LOSS: ({}, {"z_loss": 1e-4}),
    BOTH: ({"qk_norm": "head"}, {"z_loss": 1e-4}),
}
# What each is compared with.
BASES = {QK_NORM: PLAIN, Z_LOSS: PLAIN, BOTH: QK_NORM}


@dataclass(frozen=True)
class Plan:
    """What is swept.

    Attributes:
        learning_rates: the paper's.
        steps: of each run.
        seeds: of weights and batches.
        batch_size: rows of 64 tokens.
        vocab_size: tokens that there are; 256: bytes.
    """

    learning_rates: tuple[float, ...] = LEARNING_RATES
    steps: int = 500
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    batch_size: int = 16
    vocab_size: int = 1024

    def sweep(self, variant: str) -> SweepPlan:
        return SweepPlan(
            subject=config_of(variant, self),
            learning_rates=self.learning_rates,
            widths=(1,),
            steps=self.steps,
            seeds=self.seeds,
            warmup=0.05,
        )


QUICK = Plan((1e-2, 1e-1), 20, (0,), 4, 256)
TOKENIZERS = Path("build/prototype")


def config_of(variant: str, plan: Plan) -> StackWiseConfig:
    """As in section 2.1 of the paper: LayerNorm before branches, rotary positions, the head apart, AdamW.

    The gradient is clipped at 1, the learning rate follows a cosine after a warm-up of a twentieth. Weight
    decay, which the paper makes small and independent of the learning rate, is left out.
    """
    model, objective = VARIANTS[variant]
    return StackWiseConfig.from_dict(
        {
            "model": {
                "vocab_size": plan.vocab_size,
                "d_model": 64,
                "d_ff": 256,
                "n_heads": 4,
                "n_kv_heads": 4,
                "attention_type": "mha",
                "norm": "layernorm",
                "tie_embeddings": False,
                "architecture": {"n_stacks": 1, "blocks_per_stack": 2},
                **model,
            },
            "training": {
                "batch_size": plan.batch_size,
                "seq_len": 64,
                "precision": "fp32",
                "device": "cpu",
                "optimizer": {"weight_decay": 0.0},
                "objective": objective,
            },
            "data": {"tokenizer": tokenizer_of(plan.vocab_size)},
        }
    )


def tokenizer_of(vocab_size: int) -> str:
    """The file of one, which is made where it is missing."""
    if vocab_size == 256:
        return "byte"
    path = TOKENIZERS / f"byte-pairs-{vocab_size}.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        byte_pairs(vocab_size).save(str(path))
    return str(path)


def measure(work: Work) -> Part:
    """Sweep what is missing, and compare each remedy with the plain model."""
    plan = QUICK if work.quick else Plan()
    sweeps = complete(work, {name: plan.sweep(name) for name in VARIANTS})
    return Part(figures_of(sweeps), bars(sweeps), table(sweeps), tuple(work.missing))


def figures_of(sweeps: Mapping[str, LearningRateSweep]) -> dict[str, Any]:
    figures: dict[str, Any] = {name: sweep.to_dict() for name, sweep in sweeps.items()}
    figures["reductions"] = {name: of.to_dict() for name, of in reductions(sweeps).items()}
    return figures


def reductions(sweeps: Mapping[str, LearningRateSweep]) -> dict[str, Estimate]:
    """By variant: by how much it is less sensitive than its base."""
    return {
        name: sweeps[name].reduction(sweeps[base], 1)
        for name, base in BASES.items()
        if name in sweeps and base in sweeps
    }


def bars(sweeps: Mapping[str, LearningRateSweep]) -> tuple[Bar, ...]:
    """The low end of the reduction's interval, in nats: above 0 it is reproduced."""
    found = reductions(sweeps)
    lows = {name: found[name].low if name in found else None for name in (QK_NORM, BOTH)}
    return (
        Bar("sensitivity: reduction by qk-norm", lows[QK_NORM], 0.0, full_size=True),
        Bar("sensitivity: by z-loss beside it", lows[BOTH], 0.0, full_size=True),
    )


def table(sweeps: Mapping[str, LearningRateSweep]) -> Table:
    found = reductions(sweeps)
    shown = Table("variant", "sensitivity, nats", "reduction", "best loss", "largest attention logit")
    for name, sweep in sweeps.items():
        reduction = f"{found[name]} of {BASES[name]}" if name in found else "-"
        best = sweep.best(1)
        shown.add_row(
            name, str(sweep.sensitivity(1)), reduction, f"{best.loss:.3f}", _largest(sweep.to_dict())
        )
    return shown


def rows(figures: Mapping[str, Any]) -> str:
    """The sensitivities as a Markdown table."""
    lines = [
        "| variant | sensitivity, nats | reduction | best loss, nats | largest attention logit |",
        "|---|---|---|---|---|",
    ]
    for name in VARIANTS:
        if name in figures:
            width = figures[name]["widths"]["1"]
            reduction = figures["reductions"].get(name)
            cells = [
                _interval(width["sensitivity"]),
                "-" if reduction is None else f"{_interval(reduction)} of {BASES[name]}",
                f"{width['best']['loss']:.3f} at {width['best']['learning_rate']:g}",
                _largest(figures[name]),
            ]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def draw(figures: Mapping[str, Any], path: Path) -> None:
    """The four curves as an SVG."""
    plotted({name: figures[name] for name in VARIANTS if name in figures}, path)


def _interval(estimate: Mapping[str, Any]) -> str:
    text = f"{estimate['value']:.3f}"
    return text if estimate["low"] is None else f"{text} [{estimate['low']:.3f}, {estimate['high']:.3f}]"


def _largest(sweep: Mapping[str, Any]) -> str:
    """Of the attention, at the end of the runs with the highest learning rate."""
    highest = max(sweep["learning_rates"])
    runs = [run["attention_logit_max"] for run in sweep["runs"] if run["learning_rate"] == highest]
    return "not finite" if None in runs else f"{max(runs):.0f}"
