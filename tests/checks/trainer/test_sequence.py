"""Sequence: runs that are interrupted or disturbed end like an uninterrupted run."""

import pytest
import torch

from stackwise.checks import check_trainer, compare_runs
from stackwise.checks.runs.sequence import STEP
from stackwise.subject.trainer_spec import TrainerSpec
from tests.zoo.gpt import GPT
from tests.zoo.loop import Loop, bare_step, loop_spec_of
from tests.zoo.runs import Averaged, used_batches_are_skipped_in_every_epoch


def ask(subject, check, **declared):
    [result] = check_trainer(TrainerSpec.of(subject, **declared), checks=[check])
    return result


class Short(Loop):
    """Has no own data, so that its sequences have six steps."""

    epoch = None


class ShortAveraged(Averaged):
    epoch = None


@pytest.mark.parametrize("check", ["interrupted_run", "undisturbed_run"])
def test_sound(check):
    result = ask(loop_spec_of(ShortAveraged), check)

    assert result.status == "passed", result


def test_number_of_sequences_is_reported():
    result = ask(loop_spec_of(Short), "interrupted_run")

    # Four with one operation, six with two, and two with three.
    assert result.meaning == "12 sequences of 6 steps."


def test_interrupted_run_names_the_shortest_sequence_and_its_code():
    class Restarting(ShortAveraged):
        def restore(self, state):
            super().restore(state)
            self.n_averaged = 0

    spec = loop_spec_of(Restarting)
    result = ask(spec, "interrupted_run")

    assert result.status == "failed"
    assert result.where.startswith("the average average.")
    assert result.meaning == (
        "A run does not end like an uninterrupted run if after 1 step the run is saved, and a new run loads "
        "the checkpoint and continues."
    )
    code = result.advice.partition("To repeat it: ")[2]
    assert code == "compare_runs(trainer, ['step', 'resume', 'step'])"
    found = eval(code, {"compare_runs": compare_runs, "trainer": spec})
    assert found == result.where
    sound = loop_spec_of(ShortAveraged)
    assert eval(code, {"compare_runs": compare_runs, "trainer": sound}) == ""


def test_bug_of_the_second_epoch_is_found():
    result = ask(used_batches_are_skipped_in_every_epoch(), "interrupted_run")

    assert result.status == "failed"
    assert "resume" in result.advice


def test_undisturbed_run_finds_state_that_evaluation_shares():
    class Shared(Short):
        """Each second evaluation leaves the model in eval mode."""

        n_evaluated = 0

        def evaluate(self, batches):
            result = super().evaluate(batches)
            self.n_evaluated += 1
            self.is_disturbed = self.n_evaluated % 2 == 0
            return result

        is_disturbed = False

        def train_mode(self):
            self.model.train(not self.is_disturbed)

    result = ask(loop_spec_of(Shared), "undisturbed_run")

    assert result.status == "failed"
    assert result.where.startswith("the loss of step ")
    assert result.meaning.count("the run is evaluated") == 2
    assert compare_runs(loop_spec_of(Shared), [STEP, "evaluate", STEP]) == ""


@pytest.mark.parametrize(
    ("check", "reason"),
    [
        ("interrupted_run", "needs one of the methods load, save"),
        ("undisturbed_run", "needs one of the methods evaluate, save"),
    ],
)
def test_needed_methods(check, reason):
    result = ask(TrainerSpec.from_function(bare_step, GPT), check)

    assert (result.status, result.meaning) == ("not applicable", reason)


def test_run_that_does_not_repeat_itself_is_not_compared():
    generator = torch.Generator()
    generator.seed()

    class Noisy(Short):
        def loss(self, batch):
            return super().loss(batch) * (1 + torch.rand((), generator=generator))

    for check in ("interrupted_run", "undisturbed_run"):
        result = ask(loop_spec_of(Noisy), check)
        assert result.status == "not applicable" and "deterministic step" in result.meaning


@pytest.mark.parametrize(
    ("check", "simple", "method"),
    [
        ("interrupted_run", "checkpoint_round_trip", "restore"),
        ("undisturbed_run", "saving_disturbs_nothing", "save"),
    ],
)
def test_failure_of_a_simple_check_is_reported_once(check, simple, method):
    class NoMoments(Short):
        def restore(self, state):
            super().restore(state | {"optimizer": self.optimizer.state_dict()})

    class Disturbing(Short):
        def save(self, folder):
            super().save(folder)
            torch.rand(1)
            with torch.no_grad():
                self.model.norm.weight.mul_(1.1)

    spec = loop_spec_of({"restore": NoMoments, "save": Disturbing}[method])
    result = ask(spec, check)

    assert ask(spec, simple).status == "failed"
    assert result.status == "not applicable" and result.meaning.endswith(f"passes {simple}")


def test_frozen_prefixes_in_a_list():
    assert ask(loop_spec_of(Short, frozen=["teacher"]), "interrupted_run").status == "passed"
