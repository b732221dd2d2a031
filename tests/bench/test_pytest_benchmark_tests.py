"""What bench.pytest_benchmark_tests reads, and what it calls broken."""

from bench.pytest_benchmark_tests import figures, read_outcomes

JUNIT = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="test_one"/>
<testcase classname="tests.test_a" name="test_two"><failure/></testcase>
<testcase classname="tests.test_a" name="test_three"><skipped/></testcase>
<testcase classname="tests.test_a" name="test_four"><properties/></testcase>
<testcase classname="tests.test_a" name="test_five"><error/></testcase>
</testsuite></testsuites>"""


def test_outcomes(tmp_path):
    (tmp_path / "report.xml").write_text(JUNIT)
    assert read_outcomes(tmp_path / "report.xml") == {
        "tests.test_a::test_one": "passed",
        "tests.test_a::test_two": "failure",
        "tests.test_a::test_three": "skipped",
        "tests.test_a::test_four": "passed",
        "tests.test_a::test_five": "error",
    }


def test_what_the_plugin_breaks():
    """A test that fails beside it and not without it; those that fail either way are none of it."""
    beside = {"a": "passed", "b": "failure", "c": "error", "d": "failure", "e": "skipped", "f": "failure"}
    found = figures(beside, {"b": "passed", "c": "skipped", "d": "failure"})
    assert found["failed"] == ["b", "c", "d", "f"]
    assert found["broken"] == ["b", "c", "f"]
    assert found["passed"] == ["a"]
    assert found["skipped"] == ["e"]
