"""The plan for 70 billion parameters, by hand, and the page that shows it."""

import re
from pathlib import Path

import pytest
import torch

from bench import claim
from bench.plan_70b import SHAPE, WAYS, main, planned, recorded, table
from stackwise.config import StackWiseConfig
from stackwise.config.yaml import load_yaml

ROOT = Path(__file__).parents[2]
WIDTH, INNER, VOCAB, HEAD = 8192, 28672, 128256, 128
BLOCK = WIDTH * HEAD * (64 + 8 + 8) + 64 * HEAD * WIDTH + 3 * WIDTH * INNER + 2 * WIDTH
END = VOCAB * WIDTH


def test_table_of_the_page_is_what_was_planned():
    assert table(recorded()) in (ROOT / "docs/reference/memory.md").read_text()


def test_page_does_what_it_says():
    page = (ROOT / "docs/reference/memory.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(code, "docs/reference/memory.md", "exec"), {})
    (text,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    StackWiseConfig.from_dict(load_yaml(text.encode()))
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page):
        assert (ROOT / "docs/reference" / target).exists(), target


def test_bar_is_met_as_planned():
    bars = {bar["name"]: bar for bar in recorded()["bars"]}
    assert len(bars) == 3
    for name, bar in bars.items():
        assert bar["limit"] == 141.0
        assert bar["verdict"] == ("NOT MEASURED" if name == "GB, as trained" else "PASS")


@pytest.mark.parametrize("way", [name for name in WAYS if name.startswith("blockwise")])
def test_plan_by_hand(way):
    found = planned(WAYS[way], SHAPE)
    if recorded()["machine"]["torch"] == torch.__version__ and not torch.cuda.is_available():
        assert found == recorded()["figures"]["planned"][way]
    tokens = 24415 * 4096
    assert found["tokens"] == tokens
    blocks, prefix = 80 * BLOCK * 4, tokens * WIDTH * 4
    on_disk = way.endswith("disk")
    assert found["host_bytes"] == (0 if on_disk else blocks)
    assert found["disk_bytes"] == prefix + (blocks if on_disk else 0)
    first, later, last = found["phases"]
    # Of the first phase the embedding trains too; later it is there in float32.
    unit = BLOCK + WIDTH + END  # with final norm and head
    for phase, trained, frozen in ((first, unit + END, 0), (later, unit, END), (last, unit, END)):
        assert phase["weights"] == 2 * trained + 4 * frozen
        assert phase["masters"] == 4 * trained
        n_tensors = 7 + 2 + (not frozen)  # each with a count of steps
        assert phase["optimizer"] == 8 * trained + 4 * n_tensors
        assert phase["gradients"] == 2 * trained
    assert later["in_flight"] == last["in_flight"] == 2 * 4 * BLOCK


def test_flops_a_token_by_hand():
    found = recorded()["figures"]["planned"]
    # Per token two for each weight of a matrix, and four for each pair of positions and each of 8192 numbers.
    attention = 4 * 4096 * WIDTH
    block, head = 2 * (BLOCK - 2 * WIDTH) + attention, 2 * END
    backward = 2 * block + attention // 2  # attention's weights are computed again
    # A Block: forwards, backwards, and in the prefix of those behind it.
    kept = 80 * (block + backward + 3 * head) + 79 * block
    again = 80 * (block + backward + 3 * head) + block * 79 * 80 // 2
    for way in list(WAYS)[:2]:
        assert found[way]["flops_per_token"] == pytest.approx(kept, rel=1e-12)
        assert found[way]["flops_per_token_nothing_kept"] == pytest.approx(again, rel=1e-12)
    # Of a Block that is computed again the last product is not.
    at_once = 80 * (2 * block - 2 * WIDTH * INNER + backward) + 3 * head
    assert found["rackwise, all recomputed"]["flops_per_token"] == pytest.approx(at_once, rel=1e-12)


def test_quick(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(claim, "RESULTS", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--quick", "--train"]) == 0
    printed = capsys.readouterr().out
    assert "NOT MEASURED" in printed and printed.count("not judged") == 2
    assert list(tmp_path.rglob("plan_70b-quick.json"))
