"""The benchmark of quality: the same data each time, and a claim that says what was found."""

import json
import random

import pytest

pytest.importorskip("lm_eval")

from bench import claim as claim_module
from bench import quality
from bench.quality import QUICK, Scores, compare, hellaswag_rows, requests_of, write_data


def test_data_are_the_same_each_time_and_sound(tmp_path):
    for name in ("one", "two"):
        write_data(tmp_path / name, QUICK)
    files = [path.name for path in (tmp_path / "one").glob("*.jsonl")]
    assert len(files) == 4 * 2 + 2
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    requests = requests_of("mmlu", tmp_path / "one")
    assert len(requests) == 4 * 4 * QUICK.questions
    assert {request.args[1] for request in requests} == {" A", " B", " C", " D"}
    assert all(request.args[0].count("Answer:") == 6 for request in requests)
    assert len(requests_of("hellaswag", tmp_path / "one")) == 4 * 4 * QUICK.questions


def test_the_right_ending_is_the_one_that_follows():
    sentences = [f"The {i}th sentence of this page ends here ({i})." for i in range(20)]
    for row in hellaswag_rows(random.Random(0), sentences, 10):
        number = next(i for i, each in enumerate(sentences) if row["ctx_a"].startswith(each))
        assert row["ctx_a"].endswith(sentences[number + 1])
        assert sentences[number + 2] == f"{row['ctx_b']} {row['endings'][int(row['label'])]}"


def test_the_bars_see_what_is_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(claim_module, "RESULTS", tmp_path)
    hf = Scores({"own_hellaswag": [[-1.0, -2.0]], "own_pages": [[-1005.0]]}, {"own_hellaswag": 0.5})
    apart = Scores({"own_hellaswag": [[-1.0, -2.5]], "own_pages": [[-1010.0]]}, {"own_hellaswag": 0.25})
    claim = claim_module.Claim("quality", quick=True)
    pages = Scores({"own_pages": [[-1000.0]]}, {})
    compare(claim, "random", {"ours": apart, "hf": hf, "hf, pages alone": pages})
    values = {bar.name: (bar.value, bar.verdict) for bar in claim.bars}
    assert values["random: ours against hf, choices"] == (0.5, "SHORT")
    assert values["random: ours against hf, pages"] == (pytest.approx(0.01), "SHORT")
    assert values["random: ours, other accuracies"] == (1, "SHORT")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_quick_run_agrees(tmp_path, monkeypatch):
    monkeypatch.setattr(claim_module, "RESULTS", tmp_path)
    monkeypatch.setattr(
        quality, "interleave", lambda calls, rounds: {n: [c() and 1.0] * 3 for n, c in calls.items()}
    )
    quality.main(["--quick"])
    [file] = tmp_path.rglob("quality-quick.json")
    bars = json.loads(file.read_text())["bars"]
    agreement = [bar for bar in bars if "examples/s" not in bar["name"]]
    assert len(agreement) == 6 and all(bar["verdict"] == "PASS" for bar in agreement)
    assert sum("examples/s" in bar["name"] for bar in bars) == 2
