"""Tensor tree: tensors of nested containers, and nothing else that is in them."""

from collections import OrderedDict

import torch

from stackwise.support.tensor_tree import tensors_of


def test_tensors_are_found_in_their_order():
    one, two, three = torch.zeros(2), torch.ones(()), torch.nn.Parameter(torch.zeros(1))
    found = tensors_of([one, {"a": (1, two, None)}, OrderedDict(b=[three, "text"])])
    assert [id(tensor) for tensor in found] == [id(one), id(two), id(three)]
    assert tensors_of(one) == [one]
    assert tensors_of({"a": 1}) == []
