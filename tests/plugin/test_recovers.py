"""`recovers`: what is broken is held against a clean twin, and the test fails with the reasons."""

import pytest

LOOPS = """
import torch
from models import Loop, Plain
from stackwise import Guard

class Guarded(Loop):
    def __init__(self):
        super().__init__()
        self.guard = Guard(self.model, self.optimizer)
    def step(self, batch):
        logits, labels = self.model(batch["input_ids"])[:, :-1], batch["labels"][:, 1:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        self.guard.step(loss)
        return loss.detach()

class Deaf(Guarded):
    def __init__(self):
        super().__init__()
        from stackwise.stability.guard import GuardPolicy
        policy = GuardPolicy(factor=1e9, suspect_factor=None, proven_factor=1e9, loss_factor=None)
        self.guard = Guard(self.model, self.optimizer, policy=policy)

class Silent(Loop):
    def step(self, batch):
        super().step(batch)

class Raising(Loop):
    def step(self, batch):
        loss = super().step(batch)
        if not loss.isfinite():
            raise ArithmeticError("the loss is gone")
        return loss
"""


@pytest.fixture
def outcome(pytester, run, report):
    """Run one test under its markers: (RunResult, its record)."""
    pytester.makepyfile(loops=LOOPS)

    def outcome(body, *markers, marker="recovers(within=4, loss_tolerance=0.1)"):
        lines = "\n".join(f"@pytest.mark.{each}" for each in (marker, *markers))
        pytester.makepyfile(
            test_it=f"import loops, models, pytest\nfrom stackwise import TrainerSpec\n{lines}\n"
            f"def test_it(stability_run): {body}\n"
        )
        result = run("--stackwise-report=out.json")
        (record,) = report()["stability"] or [None]
        return result, record

    return outcome


@pytest.mark.parametrize(
    "subject", ["models.plain", "models.rack", "loops.Guarded", "TrainerSpec.of(loops.Guarded)"]
)
@pytest.mark.parametrize("fault", ["nan_injection(step=6)", "gradient_explosion(step=6, factor=1e3)"])
def test_guarded_training_recovers(outcome, subject, fault):
    result, record = outcome(f"assert stability_run({subject}).alarm_steps == [6]", fault)
    result.assert_outcomes(passed=1)
    assert (record["verdict"], record["fired"]) == ("caught", [6])
    assert record["recovery"]["problems"] == []
    assert record["recovery"]["after"] == 1
    assert 0 <= record["recovery"]["last_gap"] <= record["recovery"]["largest_gap"] <= 0.1
    assert len(record["recovery"]["twin"]) == 16


@pytest.mark.parametrize(
    "subject, fault, verdict, said",
    [
        ("models.plain", "gradient_explosion(step=6, factor=1.2)", "missed", "step 6 is broken: no alarm"),
        ("loops.Deaf", "gradient_explosion(step=6, factor=1e3)", "missed", "step 6 is broken: no alarm"),
        (
            "models.plain",
            "nan_injection(step=6, target='optimizer_state')",
            "missed",
            "step 6 is broken: no alarm; the first after it is at step 7",
        ),
        ("models.loop", "nan_injection(step=6)", "not recovered", "weights or buffers are not finite"),
        (
            "loops.Raising",
            "nan_injection(step=6)",
            "not recovered",
            "training ended at step 6: ArithmeticError: the loss is gone",
        ),
        (
            "models.loop",
            "out_of_memory(step=6)",
            "not recovered",
            "training ended at step 6: OutOfMemoryError: *",
        ),
    ],
)
def test_reasons(outcome, subject, fault, verdict, said):
    result, record = outcome(f"stability_run({subject})", fault)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E *RecoveryFailedError: *: not recovered", f"E *{said}*"])
    assert record["verdict"] == verdict
    assert record["recovery"]["problems"]


def test_a_loop_that_tells_of_no_alarms_recovers_without_any(outcome):
    result, record = outcome("stability_run(models.loop)", "gradient_explosion(step=6, factor=1.5)")
    result.assert_outcomes(passed=1)
    assert (record["verdict"], record["alarms"]) == ("recovered", [])


@pytest.mark.parametrize(
    "marker, body, said",
    [
        (
            "recovers(within=10, loss_tolerance=0.1)",
            "stability_run(models.plain)",
            "recovers: within: got 10; allowed: at most 9: the last broken step is 6, and the run has 16*",
        ),
        (
            "recovers(within=1, loss_tolerance=0.1)",
            "stability_run(models.plain, steps=7)",
            "recovers: within: got 1; allowed: none: the last broken step is 6*wanted more steps",
        ),
        (
            "recovers(within=1, loss_tolerance=0.1)",
            "stability_run(models.loop, policy=3)",
            "policy: got 3; allowed: None*",
        ),
    ],
)
def test_what_cannot_be_judged_fails(pytester, outcome, run, marker, body, said):
    pytester.makepyfile(
        test_it=f"import models, pytest\n@pytest.mark.{marker}\n@pytest.mark.nan_injection(step=6)\n"
        f"def test_it(stability_run): {body}\n"
    )
    result = run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"E *ValueError: {said}*"])


def test_no_faults_fail_it(pytester, run):
    pytester.makepyfile(
        """
        import models, pytest
        @pytest.mark.recovers(within=1, loss_tolerance=0.1)
        def test_it(stability_run): stability_run(models.plain)
        @pytest.mark.recovers(within=1, loss_tolerance=0.1)
        def test_never(stability_run): pass
        """
    )
    result = run()
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        [
            "E *recovers: faults: got 'none'; allowed: at least one",
            "*declares recovers but never called stability_run",
        ]
    )


def test_neither_model_nor_loop(pytester, run):
    pytester.makepyfile("import models\ndef test_it(stability_run): stability_run(models.number)")
    result = run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E *TypeError: model: got int; wanted an nn.Module*"])
