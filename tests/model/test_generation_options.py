"""Options of generation are spelled out in one place, and what else is spelled like them agrees."""

import dataclasses
import re
from fractions import Fraction
from typing import get_type_hints

import numpy as np
import pytest
import torch

from stackwise.model import Rack
from stackwise.model.generate import generate, stream
from stackwise.model.generation_options import GenerationKeywords, GenerationOptions


def test_keywords_are_those_of_the_options():
    assert get_type_hints(GenerationKeywords) == get_type_hints(GenerationOptions)


@pytest.mark.parametrize("function", [generate, stream, Rack.generate, Rack.stream])
def test_editors_see_the_keywords(function):
    assert function.__annotations__["options"] == "Unpack[GenerationKeywords]"


@pytest.mark.parametrize("option", dataclasses.fields(GenerationOptions), ids=lambda option: option.name)
def test_every_option_and_its_default_is_documented(option):
    entry = re.search(rf"^ {{8}}{option.name}: (.*?)\n( {{8}}\S|\n)", Rack.generate.__doc__, re.M | re.S)[1]
    if option.default is dataclasses.MISSING:
        assert "Must be given" in entry
    else:
        default = "none" if option.default == () else str(option.default).removesuffix(".0")
        assert "default" in entry.lower() and default in entry


def test_integers_may_be_of_any_kind():
    plain = {"max_new_tokens": 3, "temperature": 1.0, "top_k": 2, "seed": 2**64 - 1, "prefill_chunk": 4}
    given = {"max_new_tokens": np.int64(3), "top_k": np.uint8(2), "seed": np.uint64(2**64 - 1)}
    options = GenerationOptions(**{**plain, **given, "prefill_chunk": torch.tensor(4)})
    assert options == GenerationOptions(**plain) and type(options.max_new_tokens) is int
    for wrong in (True, np.float64(3), torch.tensor(3.0), torch.tensor([3, 3]), np.int64(0)):
        with pytest.raises(ValueError, match="max_new_tokens: got "):
            GenerationOptions(max_new_tokens=wrong)


def test_numbers_may_be_of_any_kind():
    for number in (np.float32(0.5), np.float16(0.5), np.float64(0.5), Fraction(1, 2)):
        options = GenerationOptions(max_new_tokens=3, temperature=number, top_p=number)
        assert options == GenerationOptions(max_new_tokens=3, temperature=0.5, top_p=0.5)
        assert type(options.temperature) is type(options.top_p) is float
    for wrong in (True, np.float32("nan"), np.float32(-1), np.complex64(1), torch.tensor(1.0), "1"):
        with pytest.raises(ValueError, match="temperature: got "):
            GenerationOptions(max_new_tokens=3, temperature=wrong)


def test_options_do_not_change():
    options = GenerationOptions(max_new_tokens=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.seed = 3
