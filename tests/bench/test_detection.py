"""What bench.detection counts, on subjects whose answers are known."""

import os
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from bench import detection, detection_table, marked_tables, rivals, third_party
from bench import isolated as isolated_module
from bench.claim import Claim
from bench.isolated import all_isolated, isolated
from stackwise.checks import CheckResult
from stackwise.checks.check import select_checks
from stackwise.subject.spec import ModelSpec
from tests.forked import HANG_SECONDS


def test_what_a_process_yields_comes_back_in_order():
    ended = isolated(lambda: iter([1, {"two": 2}, None]))
    assert (ended.values, ended.error) == ([1, {"two": 2}, None], None)


def test_a_process_changes_nothing_here():
    seen = []

    def change():
        seen.append(os.getpid())
        print("not shown")
        yield os.getpid()

    ended = isolated(change)
    assert seen == []
    assert ended.values != [os.getpid()]


def test_what_came_before_an_exception_is_kept():
    def raises():
        yield "before"
        raise LookupError("no such thing")

    ended = isolated(raises)
    assert ended.values == ["before"]
    assert ended.error.startswith("LookupError: no such thing (test_detection.py:")


def test_isolated_kills_a_process_that_takes_too_long(monkeypatch):
    """The time is over at the second reading, after the first value."""

    def stays():
        yield os.getpid()
        time.sleep(10 * HANG_SECONDS)

    readings = iter([0.0, 0.0, HANG_SECONDS, HANG_SECONDS])
    monkeypatch.setattr(isolated_module, "time", SimpleNamespace(monotonic=readings.__next__))
    ended = isolated(stays, seconds=HANG_SECONDS)
    assert ended.error == f"took longer than {HANG_SECONDS} s"
    assert ended.seconds == HANG_SECONDS
    with pytest.raises(ProcessLookupError):
        os.kill(ended.values[0], 0)


def test_a_process_that_grows_is_refused():
    def grows():
        yield torch.ones(2**20).sum().item()
        yield torch.ones(2**30).sum().item()

    ended = isolated(grows, gigabytes=1.0)
    assert len(ended.values) == 1
    assert ended.error is not None
    assert "memory" in ended.error.lower() or "ended with" in ended.error


def test_a_process_that_dies_says_so():
    def dies():
        yield 1
        os._exit(7)

    ended = isolated(dies)
    assert (ended.values, ended.error) == ([1], "its process ended with 7")


def test_every_size_is_set_in_nested_configurations_too():
    from transformers import Gemma3Config, LlamaConfig

    config = third_party.tiny_config(LlamaConfig, third_party.sizes(width=48, heads=4, layers=3))
    assert (config.hidden_size, config.head_dim, config.num_hidden_layers) == (48, 12, 3)
    config = third_party.tiny_config(Gemma3Config, third_party.sizes())
    assert config.text_config.hidden_size == third_party.WIDTH


def test_names_of_models_are_unique_and_many():
    names = [name for name, _ in third_party.subjects()]
    assert len(names) == len(set(names)) > 200


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_models_of_a_size(kind):
    model = third_party.of_size(kind, width=64, layers=2)()
    assert model.config.hidden_size == 64
    spec = ModelSpec.of(model)
    assert (spec.width, spec.causal) == (512, True)


class LeakyLM(nn.Module):
    """Each output reads the next token too."""

    def __init__(self, leaks=True):
        super().__init__()
        self.embedding, self.head = nn.Embedding(61, 16), nn.Linear(16, 61, bias=False)
        nn.init.normal_(self.head.weight, std=0.05)
        self.leaks = leaks

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        x = x + x.cumsum(dim=1) / 4
        return self.head(x + self.leaks * x.roll(-1, dims=1))


def test_answers_are_plain_values():
    first, *results = detection.answers(LeakyLM, "fast")
    assert first["asks"] == "model"
    by_check = {result["check"]: result for result in results}
    assert by_check["causality"]["status"] == "failed"
    assert by_check["causality"]["family"] == "causality"
    assert by_check["determinism"]["status"] == "passed"
    assert all(result["seconds"] >= 0 for result in results)


def mutant(family, caught_by):
    return {"family": [family], "caught": family in caught_by, "caught_by": caught_by, "error": None}


def test_table_of_families():
    mutants = {"a": mutant("loss", ["loss"]), "b": mutant("loss", ["cache"]), "c": mutant("cache", [])}
    families = detection.by_family(mutants)
    assert families == {
        "cache": {"mutants": 1, "caught": 0, "by_any": 0},
        "loss": {"mutants": 2, "caught": 1, "by_any": 2},
    }
    record = {"figures": {"catalogue": {"families": families}}}
    assert detection_table.families(record).endswith("| all | 3 | 1 | 2 |")


def test_a_report_without_a_new_measurement_is_not_shown_as_missed():
    rows = detection_table.reports({"figures": {"reports": {}}}).splitlines()[2:]
    assert rows and all(row.endswith("| not measured |") for row in rows)


def test_finding_on_the_twin_is_no_catch():
    def said(failed=(), reason=None):
        return {tool: {"failed": list(failed), "reason": reason} for tool in rivals.TOOLS}

    figures = {
        "twins": {"clean": said(["noisy"])},
        "mutants": {"a": said(["noisy"]), "b": said(["noisy", "causal"]), "c": said(reason="cannot")},
    }
    table = detection.by_rival(figures, dict.fromkeys("abc", "clean"))
    expected = {"caught": 1, "missed": 1, "cannot be asked": 1, "alarms on clean twins": 1}
    assert table == dict.fromkeys(rivals.TOOLS, expected)
    twins = {"clean": {"statuses": {"passed": 3}}}
    catalogue = {"mutants": {"a": mutant("loss", ["loss"])}, "twins": twins}
    others = {"table": table, "twins": figures["twins"]}
    shown = detection_table.rivals({"figures": {"catalogue": catalogue, "rivals": others}})
    assert "| stackwise | 1 | 0 | 0 | 0 of 1 |" in shown
    assert "| torchtest2 | 1 | 1 | 1 | 1 of 1 |" in shown


def test_tools_that_are_not_there_say_so(monkeypatch):
    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr("importlib.import_module", missing)
    for said in rivals.ask_all(LeakyLM).values():
        assert said["failed"] == []
        assert said["reason"].startswith("not installed: No module named")


def test_bars_count_failures_errors_and_what_did_not_end():
    def of(*others, error=None):
        each = [{"status": status, "family": "causality"} for status in others]
        return {"others": each, "error": error, "cpu_seconds": 6.0}

    models = {
        "transformers/a": of("warned", "not applicable"),
        "transformers/b": of("failed"),
        "transformers/cpmant is_decoder": of("failed"),
        "x": of(error="late"),
    }
    figures = {
        "catalogue": {
            "mutants": {
                "a": mutant("loss", ["loss"]) | {"id": "60"},
                "b": mutant("loss", []) | {"id": "61"},
            },
            "twins": {"clean": of()},
        },
        "third_party": {"models": models},
        "cost": {"llama": {"median": 4.0}},
    }
    found = {bar.name: (bar.value, bar.verdict) for bar in detection.bars(figures)}
    assert found == {
        "mutants": (2.0, "SHORT"),
        "caught by the family expected": (0.5, "SHORT"),
        "mutants of declared facts": (0.0, "SHORT"),
        "mutants of inferred facts": (0.0, "SHORT"),
        "mutants of generation": (0.0, "SHORT"),
        "mutants of conversions": (0.0, "SHORT"),
        "FAILs on clean twins": (0.0, "PASS"),
        "third-party models": (4.0, "SHORT"),
        "unexplained FAILs on third-party models": (2.0, "SHORT"),
        "WARNs per third-party model": (0.25, "PASS"),
        "fast suite, median of third-party models, s": (6.0, "SHORT"),
        "fast suite, llama, s": (4.0, "PASS"),
    }
    claim = Claim("detection", quick=True)
    claim.bars = detection.bars(figures)
    shown = marked_tables.bar_rows({"bars": [bar.to_dict() for bar in claim.bars]})
    assert "| fast suite, llama, s | 4 | at most 5 |" in shown
    assert "| mutants | 2 | at least 75, short |" in shown
    nearly = {"name": "exact", "value": 0.9998, "limit": 1.0, "at_most": False, "verdict": "SHORT"}
    assert "| exact | 0.9998 | at least 1, short |" in marked_tables.bar_rows({"bars": [nearly]})


@pytest.mark.parametrize(
    ("name", "least", "share", "ids"),
    [
        ("declared facts", 60, 0.9, ["facts", "rotary"]),
        ("inferred facts", 60, 0.8, ["inferred facts"]),
        ("generation", 25, 0.9, ["generate-rows", "generate-top-k"]),
        ("conversions", 20, 0.95, ["C1", "C31"]),
    ],
)
def test_groups_of_mutants_have_bars(name, least, share, ids):
    mutants = {each: mutant("loss", ["loss"]) | {"id": each} for each in ids}
    mutants |= {each: mutant("loss", []) | {"id": each} for each in ("61", "P1")}
    mutants["missed"] = mutant("loss", []) | {"id": ids[0]}
    found = {bar.name: bar for bar in detection.bars({"catalogue": {"mutants": mutants, "twins": {}}})}
    number, caught = found[f"mutants of {name}"], found[f"caught, {name}"]

    assert (number.value, number.limit) == (len(ids) + 1, least)
    assert (caught.value, caught.limit) == (len(ids) / (len(ids) + 1), share)


def test_processes_at_a_time():
    def of(value):
        def yields():
            yield value
            if value == 2:
                os._exit(3)

        return yields

    ended = dict(all_isolated({str(n): of(n) for n in range(5)}, jobs=2))
    assert {name: each.values for name, each in ended.items()} == {str(n): [n] for n in range(5)}
    assert {name for name, each in ended.items() if each.error} == {"2"}


def test_every_check_runs_separately_even_if_a_family_has_its_name(few_compositions):
    asked = [each["check"] for each in list(detection.answers(LeakyLM, "full"))[1:]]
    assert asked == [each.name for each in select_checks(suite="full", asks="model")]


def test_places_are_told_without_those_of_the_machine():
    place = f"x in {detection.ROOT}/tests/zoo/gpt.py:3; y in /a/b/lib/site-packages/torch/nn/functional.py:5"
    result = CheckResult("causality", "m", "failed", 1.0, float("inf"), where=place)
    plain = detection._plain(result)
    assert plain["where"] == "x in tests/zoo/gpt.py:3; y in torch/nn/functional.py:5"
    assert plain["limit"] == "inf"
