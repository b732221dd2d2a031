"""Example pages: one of each kind of report, from real runs of tiny models and the records' classes."""

import math
import random

import torch

from stackwise.benchmark import measure, measure_generation, model_workload
from stackwise.benchmark.table import ComparisonTable
from stackwise.checks import check_model
from stackwise.config import StackWiseConfig
from stackwise.gate.limit import Limits
from stackwise.gate.page import gate_page
from stackwise.gate.result import GateResult, TestResult, TrialResult
from stackwise.gate.sequential import Rule
from stackwise.prototype.search import SearchResult, SearchTrial
from stackwise.prototype.search.objective import read_objectives
from stackwise.quality.comparison import ModelComparison, QualityRow
from stackwise.quality.paired import PairedDifference
from stackwise.quality.quality_report import QualityReport
from stackwise.quality.requirement import Judgement
from stackwise.report import Report
from stackwise.report.html import report_page
from stackwise.stability import GradientExplosion, NanInjection, stability_run
from stackwise.subject.spec import ModelSpec
from tests.subjects import TinyLM

ENVIRONMENT = {
    "cpu": "Example CPU",
    "cpu_count": 8,
    "gpu": {"name": "Example GPU", "memory_bytes": 80 * 2**30, "capability": "9.0", "driver": None},
    "system": "Linux x86_64",
    "python": "3.12.1",
    "torch": "2.13.0",
}
CREATED = "2026-01-31T12:00:00+00:00"
LONG_NAME = (
    "tests/models/test_language_model.py::TestDecoder::test_stays_stable_after_an_exploding_gradient"
    "[layers-12-heads-16-bfloat16]"
)


class LeakyLM(TinyLM):
    """Each position sees one token of the future."""

    def visible(self, seq_len):
        return torch.ones(seq_len, seq_len, dtype=torch.bool).tril(1)


def example_report():
    """Return a report with every kind of record."""
    report = Report(environment=ENVIRONMENT, created=CREATED, training=_training())
    for spec in (ModelSpec.of(LeakyLM, name="leaky_gpt", causal=True), ModelSpec.of(TinyLM, name="gpt")):
        for result in check_model(spec):
            test = f"tests/test_models.py::test_model[{spec.name}-{result.check}]"
            report.add("checks", test=test, **result.to_dict())
            if not result.ok:
                report.failed_tests.append(test)
    _add_runs(report)
    _add_throughput(report)
    peak = {"kind": "peak", "limit": 2**28, "peaks": {"by this process": 2**28 + 2**24}}
    report.add("memory", test="tests/test_memory.py::test_generation", verdict="beyond", **peak)
    growth = {"kind": "growth", "bytes_per_step": 0.0, "steps": 60, "reasons": [], "types": []}
    report.add("memory", test="tests/test_memory.py::test_step", verdict="flat", **growth)
    judgement = Judgement("inconclusive", "acc 0.41, at least 0.4 with 120 examples", "acc", 0.41, 120)
    report.add("quality", test="tests/test_quality.py::test_knows", task="quiz", **judgement.to_dict())
    report.failed_tests += ["tests/test_memory.py::test_generation", "tests/test_speed.py::test_decode"]
    message = "ThroughputError: min_tokens_per_second: 812 tokens/s were measured; wanted: at least 1,000"
    report.errors["tests/test_speed.py::test_decode"] = {
        "where": "tests/test_speed.py:12",
        "message": message,
    }
    names = [*report.failed_tests, *(report.name_of(row) for _, row in report.findings())]
    report.commands = {name: f"pytest '{name}' --stackwise-seed=0" for name in names}
    return report


def _training():
    steps = range(400)
    noise = random.Random(0)
    losses = [2.0 + 3.5 * math.exp(-step / 90) + noise.gauss(0, 0.03) for step in steps]
    records = [
        {
            "step": step,
            "loss": loss,
            "grad_norm": 0.4 * loss + noise.random() / 4,
            "lr": 3e-4,
            "skipped": False,
        }
        for step, loss in zip(steps, losses, strict=True)
    ]
    return {
        "parameters": 1_234_567,
        "num_batches": 400,
        "seconds": 41.2,
        "tokens_per_second": 54_321.0,
        "first_loss": losses[0],
        "final_loss": losses[-1],
        "validation_loss": 2.02,
        "records": records,
        "alarms": [],
    }


def _add_runs(report):
    spec = ModelSpec.of(TinyLM, name="gpt")
    for name, faults in (
        (LONG_NAME, [GradientExplosion(step=8, factor=10)]),
        ("tests/test_stability.py::test_nan", [NanInjection(step=9)]),
        ("tests/test_stability.py::test_healthy", []),
    ):
        report.add("stability", test=name, **stability_run(spec, steps=16, faults=faults).to_dict())
    fast = ModelSpec.of(
        TinyLM, name="gpt_fast", optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e6)
    )
    report.add(
        "stability", test="tests/test_stability.py::test_fast", **stability_run(fast, steps=16).to_dict()
    )


def _add_throughput(report):
    spec = ModelSpec.of(TinyLM, name="gpt")
    quick = {"min_seconds": 0.0, "warmup_seconds": 0.0}
    shape = {"mode": "forward", "batch_size": 2, "seq_len": 16}
    found = measure(model_workload(spec, **shape), min_calls=220, **quick)
    same = {"model": "gpt", "device": "cpu", "measured": True}
    report.add("throughput", test="tests/test_speed.py::test_forward", **same, **shape, **found.to_dict())
    shape = {"mode": "generate", "batch_size": 1, "seq_len": 8, "new_tokens": 8}
    found = measure_generation(model_workload(spec, **shape), min_calls=30, **quick)
    row = {**shape, **found.to_dict(), **same}
    report.add("throughput", test="tests/test_speed.py::test_decode", **row)


def example_gate():
    """Return a gate with each verdict, decided by the gate's own rule, and tests that were not measured."""
    noise = random.Random(1)
    tests = []
    for name, change, spread in (
        ("test_step", 0.06, 0.006),
        ("test_prefill", 0.001, 0.004),
        ("test_decode[batch-1-context-32768-with-a-long-parameter-name]", 0.0, 0.06),
        ("test_load", -0.08, 0.005),
    ):
        differences = tuple(noise.gauss(math.log1p(change), spread) for _ in range(25))
        tests.append(_gated(f"bench/test_speed.py::{name}", differences))
    detail = "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x8 and 16x4)"
    tests.append(TestResult("bench/test_speed.py::test_export", "crashed on head", detail=detail))
    tests.append(TestResult("bench/test_speed.py::test_new", "missing on base"))
    notes = ("numpy is 2.4.6 on both sides",)
    return GateResult(
        "main (0123abcde)",
        "feature (4567cdefa)",
        tuple(tests),
        312.0,
        25,
        "warn",
        ENVIRONMENT,
        3,
        0.004,
        0.5,
        notes,
    )


def _gated(nodeid, differences):
    limit = Limits().time
    rule = Rule()
    for rounds in rule.looks:
        decision = rule.look(differences[:rounds], *limit.at(0.0021))
        if decision is not None:
            break
    base = tuple(0.0021 for _ in range(rounds))
    head = tuple(0.0021 * math.exp(difference) for difference in differences[:rounds])
    trial = TrialResult(decision, "s", limit.tolerance, limit.tolerance / 2, differences[:rounds], base, head)
    return TestResult(nodeid, trials={"time": trial}, file="bench/test_speed.py", line=12)


def example_comparison():
    """Return a comparison of three architectures at two workloads."""
    rows = []
    for workload, ratios in (("train 4 x 128", (1.0, 1.31, 0.92)), ("decode 1 x 128", (1.0, 1.04, 1.55))):
        for name, ratio in zip(("llama", "mla", "sliding_window"), ratios, strict=True):
            rows.append(
                {
                    "architecture": name,
                    "workload": workload,
                    "parameters": 12_345_678,
                    "tokens_per_second": 40_960.4 * ratio,
                    "speed_up": ratio,
                    "speed_up_low": ratio - 0.03 * (ratio != 1),
                    "speed_up_high": ratio + 0.04 * (ratio != 1),
                    "p50_seconds": 0.0125 / ratio,
                    "memory_bytes": 3 * 2**20,
                    "note": None,
                }
            )
    return ComparisonTable(tuple(rows), "llama", {"rounds": 4, "seconds": 1.0}, ENVIRONMENT)


def example_search():
    """Return a search with trials that succeeded, failed and were pruned."""
    trials = []
    for number, (loss, rate, status) in enumerate(
        (
            (3.0, 900.0, "success"),
            (2.4, 600.0, "success"),
            (2.6, 500.0, "success"),
            (None, None, "error"),
            (2.9, 800.0, "pruned"),
        )
    ):
        config = StackWiseConfig.from_dict({"training": {"seed": number}})
        reason = "" if status == "success" else f"{status} at step 3"
        losses = () if loss is None else (loss,)
        values = {"model.n_layers": 2 + number, "training.optimizer.lr": 3e-4}
        trials.append(SearchTrial(number, values, config, status, reason, loss, losses, rate, 2**20, 1000))
    return SearchResult("depth", "search.db", read_objectives("loss"), tuple(trials))


def example_quality():
    """Return the results of a model at a quiz."""
    report = QualityReport("models/gpt", ["prefixes: 3 of 4 computed once"])
    results = {
        "acc,none": 1 / 3,
        "acc_stderr,none": 1 / 3,
        "acc_norm,none": 2 / 3,
        "acc_norm_stderr,none": 1 / 3,
    }
    report.add_tasks({"results": {"quiz": results}, "n-samples": {"quiz": {"effective": 3}}})
    return report


def example_models():
    """Return a comparison of the quality and the speed of three models."""
    rows = []
    for task, metric, less in (("quiz", "acc", False), ("text", "bits_per_byte", True)):
        for number, name in enumerate(("llama", "mla", "sliding_window")):
            change = 0.02 * number
            difference = PairedDifference(change, change - 0.03, change + 0.03, 0.95, 400, 12, 9)
            rows.append(
                QualityRow(name, task, metric, less, 0.5 + change, 0.02, 400, difference if number else None)
            )
    speed = example_comparison().where(workload="train 4 x 128")
    return ModelComparison(tuple(rows), "llama", speed, notes=("llama: prefixes: 3 of 4 computed once",))


def example_pages():
    """Return each page by the name of its file, without the ending."""
    return {
        "report": report_page(example_report()),
        "gate": gate_page(example_gate()),
        "comparison": example_comparison().page(),
        "search": example_search().page(),
        "quality": example_quality().page(),
        "models": example_models().page(),
    }
