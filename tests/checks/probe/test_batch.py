"""Batches of any make: their tensors, their rows, and several put together again."""

from dataclasses import make_dataclass

import pytest
import torch

from stackwise.checks.probe.batch import joined, mapped, named_tensors, rows_of, tensors_in

IDS, SCALE = torch.arange(12).view(4, 3), torch.tensor(2.0)
BATCHES = {
    "tensor": IDS,
    "mapping": {"ids": IDS, "scale": SCALE, "text": "abc"},
    "nested": [{"ids": IDS}, (IDS + 1, [SCALE])],
}


def same(a, b):
    """Whether two batches have the same tensors in the same places."""
    one, two = dict(named_tensors(a)), dict(named_tensors(b))
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_names_are_paths():
    assert [name for name, _ in named_tensors(BATCHES["nested"])] == [
        "batch[0].ids",
        "batch[1][0]",
        "batch[1][1][0]",
    ]
    assert [name for name, _ in named_tensors(BATCHES["mapping"])] == ["ids", "scale"]
    assert list(named_tensors("abc")) == list(tensors_in(None)) == []


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_a_batch_is_its_rows_put_together(batch):
    one, three = rows_of(batch, 4, slice(0, 1)), rows_of(batch, 4, slice(1, 4))
    assert not same(one, three)
    assert same(joined([three, three], 3), rows_of(batch, 4, torch.tensor([1, 2, 3, 1, 2, 3])))
    assert same(joined([rows_of(batch, 4, slice(i, i + 1)) for i in range(4)], 1), batch)


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_tensors_are_mapped_in_their_places(batch):
    assert same(mapped(torch.add, batch, batch), mapped(lambda tensor: 2 * tensor, batch))
    assert type(mapped(torch.neg, batch)) is type(batch)


def test_what_is_no_tensor_is_kept():
    assert mapped(torch.neg, BATCHES["mapping"])["text"] == "abc"
    assert torch.equal(rows_of(BATCHES["mapping"], 4, slice(0, 2))["scale"], SCALE)


class Plain:
    def __init__(self, logits, value):
        self.logits, self.value = logits, value


class Slots:
    __slots__ = ("logits", "value")

    def __init__(self, logits, value):
        self.logits, self.value = logits, value


SlottedData = make_dataclass("SlottedData", ["logits", "value"], slots=True)


@pytest.mark.parametrize("output", [Plain, Slots, SlottedData, make_dataclass("Data", ["logits", "value"])])
def test_outputs_of_a_class_of_the_model(output):
    found = dict(named_tensors(output(IDS, [SCALE]), "output"))
    assert found.keys() == {"output.logits", "output.value[0]"}
