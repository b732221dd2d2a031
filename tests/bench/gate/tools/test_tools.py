"""The tools as a whole: their names and their pins."""

from bench.gate.tools import TOOLS, missing_tools
from bench.marked_tables import ROOT


def test_tools_by_their_names():
    assert len({tool.name for tool in TOOLS}) == len(TOOLS)
    assert "stackwise" not in missing_tools()


def test_pins_are_of_the_tools():
    pins = (ROOT / "bench" / "gate" / "rivals.txt").read_text().lower()
    for tool in TOOLS[2:]:
        for package in tool.packages:
            assert f"\n{package}==" in pins
