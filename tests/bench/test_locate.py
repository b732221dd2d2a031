"""What bench.locate counts, on a model whose answers are known."""

import math

import pytest
import torch
from torch import nn

from bench import locate as bench_locate
from bench.locate import Fault, answers, bars, subjects, summary


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 4), nn.Linear(4, 11)

    def forward(self, ids):
        return self.head(self.embedding(ids))


def test_every_module_has_every_fault():
    values = list(answers(lambda: Tiny))
    assert [value["found"] for value in values if value["sound"]] == [None] * 3
    faults = [tuple(value["fault"]) for value in values if not value["sound"]]
    assert len(faults) == len(set(faults)) == 3 * 2 * 3
    found = summary(values, None)
    assert (found["modules"], found["faults"], found["exact"], found["wrong"]) == (3, 18, 18, [])


def test_a_wrong_name_is_counted(monkeypatch):
    plain = bench_locate.locate

    def wrong(model, run, **options):
        location = plain(model, run, **options)
        return None if location is None or location.module == "head" else location

    monkeypatch.setattr(bench_locate, "locate", wrong)
    found = summary(list(answers(lambda: Tiny)), None)

    assert found["exact"] == 12
    assert (len(found["wrong"]), found["harmless"]) == (6, 0)
    of_others, unfinished = (
        bars({"a": found | {"error": "too long"}})[1],
        bars({"a": found | {"error": "x"}})[3],
    )
    assert of_others.verdict == "SHORT" and of_others.value < 1.0
    assert unfinished.verdict == "SHORT"


def test_bars_without_subjects_are_not_measured():
    assert [bar.verdict for bar in bars({})[:2]] == ["NOT MEASURED"] * 2
    assert bars({})[2].verdict == "SHORT"


@pytest.mark.parametrize("pack", [lambda x: x, lambda x: (x, 1), lambda x: {"a": x, "b": 1}])
def test_faults_reach_the_first_tensor(pack):
    x = torch.ones(2, 3, requires_grad=True)
    forward, backward = Fault("forward", "inf"), Fault("backward", "x10")
    y = forward(nn.Identity(), (), pack(x))
    y = y["a"] if isinstance(y, dict) else y[0] if isinstance(y, tuple) else y
    assert forward.acted and y.flatten().tolist() == [math.inf] + [1.0] * 5
    z = backward(nn.Identity(), (), pack(x))
    z = z["a"] if isinstance(z, dict) else z[0] if isinstance(z, tuple) else z
    assert not backward.acted
    z.sum().backward()
    assert backward.acted and x.grad.tolist() == [[10.0] * 3] * 2
    assert Fault("forward", "nan")(nn.Identity(), (), torch.ones(1, dtype=torch.long)) is None


def test_all_kinds_of_attention_and_three_others():
    names = subjects()
    assert {
        "rack/latent",
        "rack/kernel favor",
        "rack/grouped",
        "rack/one kv head",
        "rack/full",
    } <= names.keys()
    assert set(bench_locate.QUICK) <= names.keys()
    assert set(bench_locate.OTHERS) <= names.keys()
