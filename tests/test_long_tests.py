"""The list of long tests is read from the durations that pytest prints."""

from tests.long_tests import longer

PRINTED = """
============= slowest durations =============
0.70s setup    tests/test_a.py::test_one[x y]
0.40s call     tests/test_a.py::test_one[x y]
0.90s call     tests/test_a.py::test_two
12.00s call     tests/test_b.py::TestC::test_three
"""


def test_setup_and_call_of_a_test_are_added():
    assert longer([PRINTED]) == ["tests/test_a.py::test_one[x y]", "tests/test_b.py::TestC::test_three"]
    assert longer([PRINTED], seconds=5) == ["tests/test_b.py::TestC::test_three"]
