"""Models that tests in several folders share."""

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def subjects():
    # Under --import-mode=importlib no test folder is on sys.path, so the file is loaded by its place.
    spec = importlib.util.spec_from_file_location(
        "stackwise_test_subjects", Path(__file__).parent / "subjects.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
