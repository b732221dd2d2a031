"""What every test of the project shares."""

import os

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["pytester"]

settings.register_profile(
    "stackwise", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
# For `make test`; `make test-all` tries as many examples as Hypothesis does by default.
settings.register_profile("stackwise-quick", settings.get_profile("stackwise"), max_examples=40)
settings.load_profile("stackwise")


@pytest.fixture(autouse=True)
def _seeded():
    import torch

    # torch.manual_seed writes the stack down for each kind of device that is not there.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)
    if os.environ.get("PYTEST_XDIST_WORKER"):
        torch.set_num_threads(1)
