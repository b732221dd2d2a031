"""`python -m bench.detection`: bugs that the checks find, failures on correct models, and cost.

The bugs are those of `tests/zoo`, public reports, and random mutants. If three other tools are installed
(`make rivals`), they check the same bugs. The checks of a subject run in a separate process. The figures of
each subject are written at once, and `--resume` continues with those in the file.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from bench import rivals, third_party
from bench.claim import Bar, Claim
from bench.isolated import all_isolated, isolated
from bench.mutations import measure_mutations, mutation_bars
from bench.reports import SAMPLES, forms, measure_reports, modules, report_bars
from bench.source_mutants.measure import measure_source_mutants, source_mutant_bars
from stackwise.benchmark.memory.peak import process_status
from stackwise.checks import CheckResult
from stackwise.checks.check import select_checks
from stackwise.checks.run import broken_off
from stackwise.subject.spec import ModelSpec
from stackwise.subject.trainer_spec import TrainerSpec

ROOT = Path(__file__).parent.parent
PARTS = ("catalogue", "rivals", "third_party", "reports", "cost", "mutations", "source_mutants")
SECONDS = 240.0  # of one subject
# FAILs of designs on purpose: (families, reason, models). A name includes all heads of the same kind.
_DESIGNS: tuple[tuple[tuple[str, ...], str, tuple[str, ...]], ...] = (
    (
        ("causality", "equivalence", "generation", "attention"),
        "a prefix model, in which all input tokens see each other",
        ("transformers/cpmant",),
    ),
    (
        ("initialization",),
        "weights of the head have a standard deviation of about 1",
        ("transformers/cpmant", "transformers/funnel", "transformers/mt5"),
    ),
    (
        ("padding",),
        "convolutions, landmarks, hashing or means over all positions read padding",
        (
            *("transformers/canine", "transformers/convbert", "transformers/funnel", "transformers/imagegpt"),
            *("transformers/mobilebert", "transformers/nystromformer", "transformers/yoso"),
        ),
    ),
    (
        ("gradient",),
        "the backward pass of the hashed attention is an approximation",
        ("transformers/yoso",),
    ),
    (
        ("norm",),
        "norms of a new model have a gain of 2: 1 is added to weights that start at 1 (transformers#40796)",
        (
            *("transformers/nemotron", "litgpt/Gemma-2b", "litgpt/Gemma-2-2b", "litgpt/Gemma-3-1b-it"),
            "litgpt/Gemma-3-4b-it",
        ),
    ),
    (
        ("gradient", "sensitivity"),
        "attention in blocks of 32 positions gives 0 for shorter inputs",
        ("transformers/mra",),
    ),
    (
        ("equivalence",),
        "without ids there are no per-layer embeddings",
        ("transformers/gemma3n_text",),
    ),
    (
        ("equivalence",),
        "without ids, a classifier does not know which positions are padding, and warns",
        ("transformers/mistral4",),
    ),
    (
        ("equivalence",),
        "without ids, embeddings are not scaled for masked tokens (token_dropout)",
        ("transformers/esm",),
    ),
    (
        ("precision",),
        "a norm follows attention, whose small outputs have a large relative error",
        ("transformers/t5gemma",),
    ),
    (
        ("layer_facts",),
        "the norm in lightning attention has an eps of its own",
        ("transformers/minimax",),
    ),
    (
        ("cache",),
        "the cache does not contain the previous token, which the next one needs",
        ("x-transformers/decoder shifted tokens",),
    ),
)
# FAILs of bugs in the libraries, found by reading their code or by calls without the checks.
_BUGS: tuple[tuple[tuple[str, ...], str, tuple[str, ...]], ...] = (
    (
        ("tying",),
        "the configuration ties the head by default, and the class does not",
        ("transformers/bigbird_pegasus",),
    ),
    (
        ("cache", "padding", "equivalence", "generation"),
        "decoding with a mask adds columns for an image to the mask, without an image",
        ("transformers/git",),
    ),
    (
        ("causality", "equivalence", "cache", "generation"),
        "relative positions of the n-gram stream are read in another order than they are written",
        ("transformers/prophetnet",),
    ),
    (
        ("cross_attention",),
        "in float64, an encoder_attention_mask of ones gives NaN",
        ("transformers/prophetnet",),
    ),
    (
        ("state", "equivalence"),
        "inputs_embeds are scaled or added to in place",
        ("transformers/ctrl", "transformers/git"),
    ),
    (
        ("equivalence", "attention"),
        "with output_attentions and sdpa, a boolean mask is added to the scores",
        ("transformers/falcon",),
    ),
    (
        ("generation",),
        "generate() counts positions from 0, and forward from the padding id",
        (
            *("transformers/camembert", "transformers/data2vec-text", "transformers/roberta"),
            *("transformers/roberta-prelayernorm", "transformers/xlm-roberta", "transformers/xlm-roberta-xl"),
        ),
    ),
    (
        ("cache", "generation"),
        "with a cache, the state of a row depends on the other rows",
        ("transformers/rwkv",),
    ),
    (
        ("attention_facts", "dropout"),
        "attention_probs_dropout_prob has no effect: the dropout of the attention is never called",
        ("transformers/mra", "transformers/nystromformer", "transformers/yoso"),
    ),
    (
        ("dropout",),
        "the dropout of the embeddings is never called, although hidden_dropout_prob includes it",
        ("transformers/esm",),
    ),
    (
        ("layer_facts",),
        "norms have the default eps of torch, and layer_norm_eps of the configuration has no effect",
        ("transformers/biogpt",),
    ),
    (
        ("cache",),
        "a layer uses its cached state for single tokens only (transformers#45513)",
        ("transformers/mamba", "transformers/falcon_mamba", "transformers/jamba"),
    ),
    (
        ("cache",),
        "reorder_cache does not reorder the states of lightning attention",
        ("transformers/minimax",),
    ),
    (
        ("equivalence",),
        "positions of inputs_embeds start again with each part (create_position_ids_from_inputs_embeds)",
        (
            *("transformers/camembert", "transformers/data2vec-text", "transformers/roberta"),
            *("transformers/roberta-prelayernorm", "transformers/xlm-roberta", "transformers/xlm-roberta-xl"),
        ),
    ),
    (
        ("causality", "equivalence", "cache"),
        "with use_cache, which is the default, there is no causal mask",
        ("transformers/fsmt",),
    ),
    (
        ("equivalence",),
        "labels replace decoder_inputs_embeds, because decoder_input_ids are None",
        ("transformers/nllb-moe",),
    ),
    (
        ("equivalence", "padding"),
        "positions separate packed documents only if no mask is passed (transformers#46634)",
        ("transformers/gemma4", "transformers/moshi"),
    ),
    (
        ("sensitivity",),
        "the padding mask has no effect",
        ("transformers/cpmant", "transformers/rwkv"),
    ),
    (
        ("recompute",),
        "gradients of the windowed attention differ with activation checkpointing",
        ("transformers/led", "transformers/longformer"),
    ),
    (
        ("precision",),
        "sinusoids are computed in bfloat16",
        ("transformers/pegasus_x",),
    ),
    (
        ("padding",),
        "the classifier pools the position after the last token, which a row without padding does not have",
        ("transformers/t5gemma",),
    ),
    (
        ("cache",),
        "the boolean mask of the cache is added to the scores, which hides nothing",
        ("litgpt/Gemma-2-2b",),
    ),
    (
        ("cache",),
        "if several tokens exceed the ring buffer, the mask belongs to other positions",
        (
            *("litgpt/Gemma-3-1b-it", "litgpt/Gemma-3-4b-it", "litgpt/Phi-3-mini-4k-instruct"),
            *("litgpt/Phi-3-mini-128k-instruct", "litgpt/Phi-4-mini-instruct", "litgpt/Mathstral-7B-v0.1"),
        ),
    ),
)
_HEADS = (" is_decoder", " masked", " seq2seq", " classifier", " images", " audio")
# Model -> family -> reason.
EXPLAINED: dict[str, dict[str, str]] = {}
for _families, _reason, _names in (*_DESIGNS, *_BUGS):
    for _name in _names:
        EXPLAINED.setdefault(_name, {}).update(dict.fromkeys(_families, _reason))


def without_head(name: str) -> str:
    """Return the name of a subject without the kind of its head, as in `EXPLAINED`."""
    return next((name.removesuffix(head) for head in _HEADS if name.endswith(head)), name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few subjects, another file")
    parser.add_argument("--resume", action="store_true", help="keep the figures that the file has")
    parser.add_argument("--parts", default=",".join(PARTS), help="which of %(default)s")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="subjects asked at a time")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # of this process, which is forked for each subject
    claim = Claim("detection", arguments.quick)
    if arguments.resume:
        claim.resume()
    parts = arguments.parts.split(",")
    if "catalogue" in parts:
        catalogue(claim, arguments.jobs)
    if "rivals" in parts:
        before_rivals(claim)
    if "third_party" in parts:
        third_parties(claim, arguments.jobs)
    if "reports" in parts:
        measure_reports(claim, arguments.jobs, answers)
    if "cost" in parts:
        cost(claim)
        cost_of_loops(claim, arguments.jobs)
    if "mutations" in parts:
        mutations(claim, arguments.jobs)
    if "source_mutants" in parts:
        measure_source_mutants(claim, arguments.jobs, functools.partial(answers, suite="fast"))
    claim.bars = bars(claim.figures)
    return claim.conclude()


def _cpu_seconds() -> float:
    """Return the seconds that this process and its ended children have used a core."""
    return sum(os.times()[:4])


def answers(
    make: Callable[[], Any], suite: str = "full", families: Collection[str] = (), first: Sequence[str] = ()
) -> Iterator[dict[str, Any]]:
    """Yield the kind and notes of the subject, then the result of each check, as plain values.

    Args:
        make: returns the subject.
        suite: "fast" or "full".
        families: families whose checks of the full suite also run.
        first: names of the checks that run before all others, in their order.
    """
    made = make()
    if callable(made) and not isinstance(made, nn.Module):
        made()  # imports the code of the model, whose time is not that of the checks
    start = _cpu_seconds()
    is_trainer = isinstance(made, TrainerSpec)
    spec = TrainerSpec.of(made) if is_trainer else ModelSpec.of(made)
    asks = "trainer" if is_trainer else "model"
    yield {"asks": asks, "notes": spec.notes, "cpu_seconds": _cpu_seconds() - start}
    chosen = {each.name for each in select_checks(suite=suite, asks=asks)}
    every = select_checks(suite="full", asks=asks)
    for each in sorted(every, key=lambda each: first.index(each.name) if each.name in first else len(first)):
        if each.name not in chosen and each.family not in families:
            continue
        start = _cpu_seconds()
        try:
            result = each.run(spec, device="cpu", seed=0)
        except Exception as error:
            result = broken_off(each.name, spec.name, error)
        yield _plain(result) | {"family": each.family, "seconds": round(_cpu_seconds() - start, 3)}


def _plain(result: CheckResult) -> dict[str, Any]:
    """Return a result for JSON: without empty values, and with relative paths."""
    return {
        key: _anywhere(str(value) if isinstance(value, float) and not math.isfinite(value) else value)
        for key, value in result.to_dict().items()
        if value not in ("", None) and key != "model"
    }


def _anywhere(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return re.sub(r"\S*/site-packages/", "", value.replace(f"{ROOT}/", ""))


# The catalogue


def zoo() -> dict[str, Any]:
    """Return every mutant by name."""
    sys.path.insert(0, str(ROOT))
    for path in sorted((ROOT / "tests" / "zoo").glob("*.py")):
        if not path.stem.startswith("test_"):
            importlib.import_module(f"tests.zoo.{path.stem}")
    from tests.zoo.mutant import MUTANTS

    return MUTANTS


def catalogue(claim: Claim, jobs: int) -> None:
    """Run the fast suite, and all checks of the expected families, on each mutant and each twin."""
    mutants = zoo()
    names = sorted(mutants)[: 3 if claim.quick else None]
    figures = claim.figures.setdefault("catalogue", {"mutants": {}, "twins": {}})
    twins = {mutants[name].twin_name: mutants[name].twin for name in names}
    families = {
        twin: {family for each in mutants.values() if each.twin_name == twin for family in each.family}
        for twin in twins
    }
    new = {name: functools.partial(answers, make, "fast", families[name]) for name, make in twins.items()}
    for name, ended in all_isolated(_without(new, figures["twins"]), jobs=jobs, seconds=SECONDS):
        figures["twins"][name] = _summary(ended)
        _say(claim, f"twin {name}", figures["twins"][name])
    new = {
        name: functools.partial(answers, mutants[name].make, "fast", mutants[name].family) for name in names
    }
    for name, ended in all_isolated(_without(new, figures["mutants"]), jobs=jobs, seconds=SECONDS):
        mutant, summary = mutants[name], _summary(ended)
        found = {each["family"] for each in summary["others"] if each["status"] == "failed"}
        figures["mutants"][name] = {
            "id": mutant.id,
            "source": mutant.source,
            "summary": mutant.summary,
            "family": list(mutant.family),
            "twin": mutant.twin_name,
            "caught": bool(found & set(mutant.family)),
            "caught_by": sorted(found),
            **summary,
        }
        _say(claim, f"mutant {name}", figures["mutants"][name])
    figures["families"] = by_family(figures["mutants"])


def before_rivals(claim: Claim) -> None:
    """Run the other tools on the same mutants and twins."""
    mutants = zoo()
    names = sorted(mutants)[: 3 if claim.quick else None]
    figures = claim.figures.setdefault("rivals", {"versions": rivals.versions(), "mutants": {}, "twins": {}})
    makes = {("twins", mutants[name].twin_name): mutants[name].twin for name in names}
    makes |= {("mutants", name): mutants[name].make for name in names}
    for (kind, name), make in makes.items():
        if name not in figures[kind]:
            figures[kind][name] = rivals.ask_all(make)
            claim.write()
            print(f"rivals on {name}: {figures[kind][name]}", flush=True)
    twin_of = {name: mutants[name].twin_name for name in names}
    figures["table"] = by_rival(figures, twin_of)


def by_family(mutants: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Of the first family that each mutant expects: how many, how many caught by it, and by any."""
    table: dict[str, Counter[str]] = {}
    for mutant in mutants.values():
        row = table.setdefault(mutant["family"][0], Counter(mutants=0, caught=0, by_any=0))
        row.update(mutants=1, caught=mutant["caught"], by_any=bool(mutant["caught_by"]))
    return {family: dict(row) for family, row in sorted(table.items())}


def by_rival(figures: Mapping[str, Any], twin_of: Mapping[str, str]) -> dict[str, dict[str, int]]:
    """How many mutants each tool caught, missed or was not asked; what it says of twins too is no catch."""
    table = {}
    for tool in rivals.TOOLS:
        row = Counter({"caught": 0, "missed": 0, "cannot be asked": 0, "alarms on clean twins": 0})
        for name, twin in twin_of.items():
            said, of_twin = figures["mutants"][name][tool], figures["twins"][twin][tool]
            if said["reason"] is not None:
                row["cannot be asked"] += 1
            else:
                row["caught" if set(said["failed"]) - set(of_twin["failed"]) else "missed"] += 1
        row["alarms on clean twins"] = sum(bool(said[tool]["failed"]) for said in figures["twins"].values())
        table[tool] = dict(row)
    return table


def _summary(ended: Any) -> dict[str, Any]:
    """Return the summary of one subject, with all findings and errors."""
    first, results = (ended.values[0], ended.values[1:]) if ended.values else ({}, [])
    statuses = Counter(each["status"] for each in results)
    return {
        **first,
        "error": ended.error,
        "seconds": round(ended.seconds, 2),
        "cpu_seconds": round(first.get("cpu_seconds", 0.0) + sum(each["seconds"] for each in results), 2),
        "statuses": dict(statuses),
        "slowest": [
            [each["check"], each["seconds"]] for each in sorted(results, key=lambda e: -e["seconds"])[:2]
        ],
        "others": [each for each in results if each["status"] not in ("passed", "not applicable")],
    }


def _say(claim: Claim, name: str, summary: Mapping[str, Any]) -> None:
    claim.write()
    print(f"{name}: {summary['statuses']} {summary['seconds']} s {summary['error'] or ''}", flush=True)
    for each in summary["others"]:
        if each["status"] in ("failed", "error") and "caught" not in summary:
            print("  ", each["status"], each["check"], each.get("value"), each.get("where", ""), flush=True)
            print("    ", each.get("meaning", ""), flush=True)


# Models of others


def third_parties(claim: Claim, jobs: int) -> None:
    """Run the fast suite on each third-party model that can be built here."""
    figures = claim.figures.setdefault("third_party", {"versions": third_party.versions(), "models": {}})
    figures["not_built"] = figures.get("not_built", {})
    figures["explained"] = EXPLAINED
    subjects = list(third_party.subjects())[:: 20 if claim.quick else 1]
    new = {name: functools.partial(_of_another, make) for name, make in subjects}
    known = {**figures["models"], **figures["not_built"]}
    for name, ended in all_isolated(_without(new, known), jobs=jobs, seconds=SECONDS):
        if not ended.values:
            figures["not_built"][name] = ended.error
            print(f"{name}: not built: {ended.error}", flush=True)
            continue
        del ended.values[0]
        figures["models"][name] = _summary(ended)
        _say(claim, name, figures["models"][name])


def _of_another(make: Callable[[], Any]) -> Iterator[Any]:
    made = make()  # a factory, or a model: what it costs to find one that builds is not asked again
    yield "built"
    yield from answers(lambda: make if isinstance(made, torch.nn.Module) else made, "fast")


# Cost


def cost(claim: Claim) -> None:
    """Measure the median seconds and the memory of the fast suite for models of several sizes."""
    figures = claim.figures.setdefault("cost", {})
    rounds = 3 if claim.quick else 5
    for name, changes in COSTS.items():
        if name in figures:
            continue
        ended = isolated(lambda: _seconds(changes, rounds), seconds=1200.0)  # noqa: B023
        if ended.error:
            print(f"cost {name}: {ended.error}")
            continue
        figures[name] = ended.values[0]
        claim.write()
        print(f"cost {name}: {figures[name]['median']:.2f} s", flush=True)


SMALL = {"kind": "llama", "width": 64, "layers": 2, "seq_len": 16}
COSTS: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "gpt2": SMALL | {"kind": "gpt2"},
    "llama, d 128": SMALL | {"width": 128},
    "llama, d 256": SMALL | {"width": 256},
    "llama, 4 layers": SMALL | {"layers": 4},
    "llama, 8 layers": SMALL | {"layers": 8},
    "llama, 32 positions": SMALL | {"seq_len": 32},
    "llama, 64 positions": SMALL | {"seq_len": 64},
}


def _seconds(size: Mapping[str, Any], rounds: int) -> Iterator[dict[str, Any]]:
    build = third_party.of_size(size["kind"], width=size["width"], layers=size["layers"])
    n_parameters = sum(p.numel() for p in build().parameters())
    before = process_status("VmRSS")  # with the code of the model and of the checks
    totals, by_check = [], Counter[str]()
    for _ in range(rounds + 1):  # the first also imports and compiles
        start = _cpu_seconds()
        spec = ModelSpec.of(build, seq_len=size["seq_len"])
        for each in select_checks(asks="model"):
            begun = _cpu_seconds()
            each.run(spec, device="cpu", seed=0)
            by_check[each.name] += _cpu_seconds() - begun
        totals.append(_cpu_seconds() - start)
    peak = process_status("VmHWM")
    yield {
        **size,
        "parameters": n_parameters,
        "megabytes": None if peak is None or before is None else (peak - before) / 2**20,
        "first": totals[0],
        "seconds": totals[1:],
        "median": median(totals[1:]),
        "slowest": [[name, total / len(totals)] for name, total in by_check.most_common(5)],
    }


def cost_of_loops(claim: Claim, jobs: int) -> None:
    """Measure both suites on the correct training loops of the last sample of reports."""
    figures, cases = claim.figures.setdefault("cost_of_loops", {}), modules()
    sample = json.loads(SAMPLES["third sample of training loops"].read_text())
    names = sorted({name.partition(":")[0] for name in sample})[: 2 if claim.quick else None]
    new = {
        f"{name}, {suite}": functools.partial(answers, forms(cases[name])["healthy_declared"], suite)
        for name in names
        for suite in ("fast", "full")
    }
    for name, ended in all_isolated(_without(new, figures), jobs=jobs, seconds=SECONDS):
        summary = _summary(ended)
        figures[name] = {key: summary[key] for key in ("cpu_seconds", "seconds", "slowest", "error")}
        claim.write()
        print(f"cost {name}: {figures[name]}", flush=True)


# Random mutations


def mutations(claim: Claim, jobs: int) -> None:
    """Random architectures with a random mutation."""
    if not claim.figures.get("mutations"):
        measure_mutations(claim, 6 if claim.quick else 400, jobs=jobs)


# Bars

# (name, pattern of ids of mutants, smallest number of them, smallest share that is caught)
_GROUPS = (
    ("declared facts", r"facts|rotary", 60, 0.90),
    ("inferred facts", r"inferred facts", 60, 0.80),
    ("generation", r"generate-.*", 25, 0.90),
    ("conversions", r"C\d+", 20, 0.95),
)


def bars(figures: Mapping[str, Any]) -> list[Bar]:
    """Return the bars of the figures."""
    found = []
    if mutants := figures.get("catalogue", {}).get("mutants"):
        caught = sum(mutant["caught"] for mutant in mutants.values()) / len(mutants)
        found.append(Bar("mutants", float(len(mutants)), 75.0, full_size=True))
        found.append(Bar("caught by the family expected", caught, 0.95))
        found.append(Bar("FAILs on clean twins", _failures(figures["catalogue"]["twins"]), 0.0, at_most=True))
        found += [bar for group in _GROUPS for bar in _bars_of_group(mutants, *group)]
    if models := figures.get("third_party", {}).get("models"):
        n_warned = sum(each["status"] == "warned" for model in models.values() for each in model["others"])
        seconds = median(model["cpu_seconds"] for model in models.values())
        found += [
            Bar("third-party models", float(len(models)), 300.0, full_size=True),
            Bar("unexplained FAILs on third-party models", _failures(models, EXPLAINED), 0.0, at_most=True),
            Bar("WARNs per third-party model", n_warned / len(models), 0.25, at_most=True),
            Bar("fast suite, median of third-party models, s", seconds, 5.0, at_most=True, full_size=True),
        ]
    found += [
        Bar(f"fast suite, {name}, s", figures["cost"][name]["median"], 5.0, at_most=True)
        for name in ("llama", "gpt2")
        if name in figures.get("cost", {})
    ]
    if sizes := [row["megabytes"] for row in figures.get("cost", {}).values() if row.get("megabytes")]:
        found.append(Bar("fast suite, memory beyond the model, MB", max(sizes), 500.0, at_most=True))
    for suite, limit in (("fast", 10.0), ("full", 60.0)) if figures.get("cost_of_loops") else ():
        rows = [row for name, row in figures["cost_of_loops"].items() if name.endswith(suite)]
        seconds = median(row["cpu_seconds"] for row in rows)
        found.append(Bar(f"{suite} suite, median of training loops, s", seconds, limit, at_most=True))
    found += report_bars(figures.get("reports", {})) + mutation_bars(figures.get("mutations", {}))
    return found + source_mutant_bars(figures.get("source_mutants", {}))


def _bars_of_group(mutants: Mapping[str, Any], name: str, ids: str, least: int, share: float) -> list[Bar]:
    caught = [mutant["caught"] for mutant in mutants.values() if re.fullmatch(ids, mutant["id"])]
    number = Bar(f"mutants of {name}", float(len(caught)), float(least), full_size=True)
    return [number, Bar(f"caught, {name}", sum(caught) / len(caught), share)] if caught else [number]


def _without(new: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in new.items() if name not in known}


def _failures(
    summaries: Mapping[str, Any], explained: Mapping[str, Mapping[str, str]] | None = None
) -> float:
    """Return the number of unexplained FAILs, errors and unfinished subjects."""
    total = 0
    for name, summary in summaries.items():
        bad = [each for each in summary["others"] if each["status"] in ("failed", "error")]
        known = (explained or {}).get(without_head(name), {})
        total += sum(each["family"] not in known for each in bad)
        total += summary["error"] is not None
    return float(total)


if __name__ == "__main__":
    sys.exit(main())
