"""A search on a real PostgreSQL server: the one that the tests of the gate's history have."""

import pytest

from stackwise.prototype.search import load_search
from tests.forked import HANG_SECONDS
from tests.gate.history.test_postgresql import database, server  # noqa: F401  fixtures
from tests.prototype.search.searches import FEW, lines_of, start_search

pytestmark = pytest.mark.slow


def test_two_processes_share_a_study(database, tmp_path):  # noqa: F811
    url = database.replace("postgresql://", "postgresql+psycopg://")
    processes = [start_search(tmp_path, url, 6, seconds=0.1, space=FEW) for _ in range(2)]
    for process in processes:
        out, err = process.communicate(timeout=HANG_SECONDS)
        assert (process.returncode, out) == (0, "6\n"), err
    assert len({tuple(line[1:]) for line in lines_of(tmp_path)}) == len(lines_of(tmp_path)) == 6
    assert len(load_search(url).succeeded) == 6
