"""Command lines of tools that are not called, and a repository to call them in."""

import pytest

from bench.gate import command
from bench.gate.repository import Added, Repository
from tests.bench.gate.tools.answers import NAMES


@pytest.fixture(scope="package")
def repository(tmp_path_factory):
    added = {"up10": Added({"python": 20_000})}  # as much again
    return Repository.create(tmp_path_factory.mktemp("gate") / "repository", added, NAMES)


@pytest.fixture
def commands(monkeypatch):
    """What is asked of command lines; what they answer is made by a function of the command."""
    asked = []

    def answer_by(make):
        def run(line, folder, **limits):
            asked.append(line)
            return make(line) or ""

        monkeypatch.setattr(command, "run", run)
        return asked

    return answer_by
