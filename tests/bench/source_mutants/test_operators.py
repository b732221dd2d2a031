"""Operators plant one small mistake, under a name from which it can be built again."""

import ast

import pytest

from bench.source_mutants.operators import Mutant, mutants, mutate

SOURCE = '''
class Layer:
    def __init__(self, size):
        self.size = size + 1

    def forward(self, x, mask=None):
        """Text."""
        y = self.norm(x[:, 1:]).float()
        z = y * 2
        if mask is not None:
            z = z + mask
        if z.ndim < 2:
            raise ValueError(f"{z + 1}")
        z = z[:, None, :].expand(z.shape[0], self.size, -1)
        return torch.cat((y, z.transpose(1, 2)), dim=-1), rearrange(z, "b n (h d) -> b h n d")
'''
EVERY = mutants(SOURCE, range(100))


def changes(operator, line):
    """Return the changed statement of each mutant of a line, on one line."""
    return {
        "; ".join(
            set(ast.unparse(mutate(SOURCE, mutant)).splitlines())
            - set(ast.unparse(ast.parse(SOURCE)).splitlines())
        )
        for mutant in EVERY
        if (mutant.operator, mutant.line) == (operator, line)
    }


@pytest.mark.parametrize(
    ("operator", "line", "expected"),
    [
        ("off_by_one", 8, "y = self.norm(x[:, 2:]).float()"),
        ("off_by_one", 12, "if z.ndim <= 2:"),
        ("wrong_dtype", 8, "y = self.norm(x[:, 1:])"),
        ("wrong_dtype", 8, "y = self.norm(x[:, 1:]).to(torch.bfloat16)"),
        ("shared_buffer", 9, "z = y.mul_(2)"),
        ("ignored_in_branch", 10, "z = z + torch.zeros_like(mask)"),
        ("wrong_group", 14, "z = z[None, :, :].expand(self.size, z.shape[0], -1)"),
        ("dropped_argument", 15, "torch.cat((y, z.transpose(1, 2)))"),
        ("swapped_order", 15, "z.transpose(2, 1)"),
        ("wrong_group", 15, "z.reshape(z.transpose(1, 2).shape)"),
        ("wrong_group", 15, "b n (d h) -> b h n d"),
        ("kept_state", 9, "self._kept_9 = y * 2"),
    ],
)
def test_operator_plants_its_mistake(operator, line, expected):
    assert any(expected in " ".join(change.split()) for change in changes(operator, line))


def test_statements_swap_only_if_their_order_matters():
    source = "def f(a):\n    b = a + 1\n    c = a + 2\n    c = c * b\n    return c\n"
    swaps = [mutant.line for mutant in mutants(source, range(9)) if mutant.variant.endswith("statements")]
    assert swaps == [3]


def test_names_are_unique_and_every_mutant_differs_from_the_source():
    assert len(set(EVERY)) == len(EVERY) > 40
    sources = [ast.unparse(mutate(SOURCE, mutant)) for mutant in EVERY]
    assert ast.unparse(ast.parse(SOURCE)) not in sources


def test_constructors_errors_and_docstrings_stay():
    assert {mutant.line for mutant in EVERY}.isdisjoint({4, 7, 13})


def test_only_executed_lines_are_mutated():
    assert {mutant.line for mutant in mutants(SOURCE, {9})} == {9}


def test_unknown_mutant_is_refused():
    with pytest.raises(ValueError, match="does not exist in this source"):
        mutate(SOURCE, Mutant("off_by_one", "Layer.forward", 8, "99-99: +1"))
