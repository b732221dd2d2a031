"""Options of generation are spelled out in one place, and what else is spelled like them agrees."""

import dataclasses
import re
from typing import get_type_hints

import pytest

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


def test_options_do_not_change():
    options = GenerationOptions(max_new_tokens=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.seed = 3
