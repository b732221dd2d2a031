"""Random data that is the same on both sides of a round."""

import json

import pytest

from tests.forked import printed

# In a process of its own: what is seeded stays so.
PROGRAM = """
import json, random, sys
if sys.argv[2] == "early":
    import numpy
from stackwise.gate.side.seeds import Seeds
seeds = Seeds(int(sys.argv[1]))
import numpy, torch
drawn = {}
for name in ("a", "b", "a"):
    seeds.start(name)
    draws = [random.random(), numpy.random.rand(), numpy.random.default_rng().random(), torch.rand(1).item()]
    drawn.setdefault(name, []).append(draws)
print(json.dumps(drawn))
"""


@pytest.fixture(scope="module")
def drawn():
    """What processes draw, by seed and by when NumPy is imported."""
    cases = [("1", "early"), ("1", "late"), ("2", "late")]
    return {case: json.loads(printed(PROGRAM, *case)) for case in cases}


def test_same_name_draws_the_same(drawn):
    for names in drawn.values():
        assert names["a"][0] == names["a"][1]


def test_processes_of_a_round_draw_the_same(drawn):
    assert drawn["1", "early"] == drawn["1", "late"]


def test_other_names_and_rounds_draw_something_else(drawn):
    one, other = drawn["1", "late"], drawn["2", "late"]
    for place in range(4):
        assert len({one["a"][0][place], one["b"][0][place], other["a"][0][place]}) == 3
