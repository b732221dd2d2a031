"""Popular training loops through `check_trainer`: no failure, and only the warnings that are listed here."""

import pytest

from stackwise import check_trainer
from tests.popular import nanochat, nanogpt, vit

# All batches weigh the same, as the loop says.
EQUAL_WEIGHT = {"accumulation_ragged", "evaluation_exact"}
LOOPS = {
    "nanogpt": (nanogpt.trainer, nanogpt.Loop, EQUAL_WEIGHT),
    "nanogpt-float16": (nanogpt.trainer, nanogpt.HalfLoop, {"accumulation_ragged"}),
    "nanochat": (nanochat.trainer, nanochat.Loop, {"accumulation_ragged"}),
    "nanochat-container": (nanochat.trainer, nanochat.ContainerLoop, {"accumulation_ragged"}),
    # The average reads its counter from the device.
    "vit": (vit.trainer, vit.Loop, {"step_waits"}),
    "vit-convolutional": (vit.trainer, vit.ConvolutionalLoop, {"step_waits"}),
}
SLOW = ("nanogpt-float16", "nanochat-container", "vit-convolutional")
# Asked of every loop.
ASKED = {"parameters_change", "interrupted_run", "undisturbed_run"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in LOOPS]
)
def test_healthy_loop_has_only_known_warnings(name):
    trainer, loop, warnings = LOOPS[name]

    results = {result.check: result for result in check_trainer(trainer(loop))}

    found = {n: r.status for n, r in results.items() if r.status not in ("passed", "not applicable")}
    assert found == dict.fromkeys(warnings, "warned"), [str(results[n]) for n in found]
    assert {name for name, result in results.items() if result.status == "passed"} >= ASKED
