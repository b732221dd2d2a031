"""Tests of more than a second, as listed in long_tests.txt: `make test` leaves them to `make test-long`.

To write the list again, on an idle machine:

    make test PYTEST_ADDOPTS="--durations=0 -vv" > short.log
    make test-long PYTEST_ADDOPTS="--durations=0 -vv" > long.log
    python -m tests.long_tests short.log long.log
"""

import re
import sys
from collections import defaultdict
from pathlib import Path

LIST = Path(__file__).with_suffix(".txt")
_DURATION = re.compile(r"^([\d.]+)s (?:setup|call|teardown) +(\S.*)$", re.MULTILINE)


def listed():
    """Node ids of the long tests."""
    return frozenset(LIST.read_text().splitlines())


def longer(logs, seconds=1.0):
    """Node ids of the tests that took longer, by the durations that pytest printed."""
    total = defaultdict(float)
    for text in logs:
        for duration, nodeid in _DURATION.findall(text):
            total[nodeid.strip()] += float(duration)
    return sorted(nodeid for nodeid, taken in total.items() if taken > seconds)


if __name__ == "__main__":
    LIST.write_text(
        "".join(f"{nodeid}\n" for nodeid in longer(Path(log).read_text() for log in sys.argv[1:]))
    )
