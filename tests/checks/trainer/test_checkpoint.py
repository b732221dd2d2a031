"""Checkpoints: the newest one is kept and found, and an incomplete one is refused."""

import random
import shutil

import pytest
import torch

from stackwise.checks import check_trainer
from stackwise.subject.trainer_spec import TrainerSpec
from tests.zoo.checkpoint import Keeping
from tests.zoo.loop import Loop, loop_spec_of
from tests.zoo.runs import folder_of_an_earlier_run_removes_the_new_checkpoint


def ask(subject, check, **declared):
    [result] = check_trainer(TrainerSpec.of(subject, **declared), checks=[check])
    return result


@pytest.mark.parametrize("check", ["newest_checkpoint", "damaged_checkpoint"])
def test_sound(check):
    torch.manual_seed(5)
    random.seed(5)
    before = torch.get_rng_state(), random.getstate()

    assert ask(loop_spec_of(Keeping), check).status == "passed"

    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()


@pytest.mark.parametrize(
    ("check", "lacking", "reason"),
    [
        ("newest_checkpoint", "latest", "needs checkpoint(folder, step) and latest(folder)"),
        ("damaged_checkpoint", "load", "needs save(folder) and load(folder)"),
        ("damaged_checkpoint", "save", "needs save(folder) and load(folder)"),
    ],
)
def test_needed_methods(check, lacking, reason):
    result = ask(loop_spec_of(type("Bare", (Keeping,), {lacking: None})), check)

    assert (result.status, result.meaning) == ("not applicable", reason)


def test_first_checkpoint_in_a_used_folder_that_is_removed_fails():
    result = ask(folder_of_an_earlier_run_removes_the_new_checkpoint(), "newest_checkpoint")

    assert (result.status, result.where) == (
        "failed",
        "checkpoint 100, written last, after those of an earlier run",
    )
    assert ask(loop_spec_of(Keeping), "newest_checkpoint").status == "passed"


def test_checkpoints_of_an_earlier_run_may_be_removed():
    class Clearing(Keeping):
        """A new run removes the checkpoints of others."""

        def __init__(self):
            super().__init__()
            self.written = []

        def checkpoint(self, folder, step):
            for path in self.kept(folder):
                if path not in self.written:
                    shutil.rmtree(path)
            self.written.append(super().checkpoint(folder, step))
            return self.written[-1]

    assert ask(loop_spec_of(Clearing), "newest_checkpoint").status == "passed"


def test_folder_of_an_earlier_run_that_is_refused():
    class Refusing(Keeping):
        """A new run writes into no used folder."""

        folder = None

        def checkpoint(self, folder, step):
            if folder != self.folder and any(folder.glob("step-*")):
                raise FileExistsError(f"{folder} contains checkpoints of another run")
            self.folder = folder
            return super().checkpoint(folder, step)

    assert ask(loop_spec_of(Refusing), "newest_checkpoint").status == "passed"


class CheckpointException(BaseException):
    """Like that of torch.distributed.checkpoint, which is no Exception."""


def test_a_checkpoint_exception_refuses_a_damaged_file():
    class Distributed(Loop):
        def load(self, folder):
            try:
                super().load(folder)
            except Exception as error:
                raise CheckpointException from error

    [result] = check_trainer(loop_spec_of(Distributed), checks=["damaged_checkpoint"])
    assert result.status == "passed"


def test_a_checkpoint_exception_is_an_error_of_one_check():
    class Broken(Loop):
        def step(self, batch):
            raise CheckpointException("lost")

    results = check_trainer(loop_spec_of(Broken), checks=["parameters_change", "step_counters"])
    assert {result.status for result in results} == {"error"}
