"""Sequence: runs that are interrupted, disturbed or averaged end like the straight run."""

import copy

import pytest
import torch

from stackwise.checks import check_trainer, compare_runs
from stackwise.checks.runs.sequence import STEP
from stackwise.subject.trainer_spec import TrainerSpec
from tests.zoo.gpt import GPT
from tests.zoo.loop import Loop, loop_spec_of
from tests.zoo.runs import Averaged, averaged, used_batches_are_skipped_in_every_epoch


def ask(subject, check, **declared):
    [result] = check_trainer(TrainerSpec.of(subject, **declared), checks=[check])
    return result


def bare_step(model, optimizer, batch):
    optimizer.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    return loss.item()


class Short(Loop):
    """Has no own data, so that its sequences have six steps."""

    epoch = None


class ShortAveraged(Averaged):
    epoch = None


@pytest.mark.parametrize("check", ["interrupted_run", "undisturbed_run", "average_follows"])
def test_sound(check):
    result = ask(loop_spec_of(ShortAveraged), check)

    assert result.status == "passed", result


def test_number_of_sequences_is_reported():
    result = ask(loop_spec_of(Short), "interrupted_run")

    assert (
        result.meaning == "18 sequences of 6 steps."
    )  # three operations at two places, nine pairs, and three at random


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
        "A run does not end like the straight run if after 1 step it is saved, and a new run loads the "
        "checkpoint and continues."
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
    assert result.meaning.count("it is evaluated") == 2
    assert compare_runs(loop_spec_of(Shared), [STEP, "evaluate", STEP]) == ""


@pytest.mark.parametrize(
    ("check", "reason"),
    [
        ("interrupted_run", "needs one of the methods load, save"),
        ("undisturbed_run", "needs one of the methods evaluate, save"),
        ("average_follows", "needs a copy of the weights in an attribute of the run"),
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
        assert result.status == "not applicable" and "repeats itself" in result.meaning


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
    assert result.status == "not applicable" and result.meaning.endswith(f"see {simple}")


def test_average_that_never_moves_is_a_warning():
    class Decays(Averaged):
        """A decay of 1."""

        def update(self):
            average = copy.deepcopy(self.average.state_dict())
            super().update()
            self.average.load_state_dict(average)

    result = ask(loop_spec_of(Decays), "average_follows")

    assert result.status == "warned"
    assert result.where.startswith("average.")
    assert "it is a reference model" in str(result)


def test_average_of_a_model_that_does_not_train_is_not_compared():
    class Still(Averaged):
        base_lr = 0.0

    result = ask(loop_spec_of(Still, learning_rate=None), "average_follows")

    assert (result.status, result.meaning) == ("not applicable", "needs a weight that 12 steps change")


def test_average_that_is_created_in_training_is_not_compared():
    class Late(Loop):
        average = None

        def update(self):
            super().update()
            self.average = [p.detach().clone() for p in self.model.parameters()]

    assert ask(loop_spec_of(Late), "average_follows").status == "not applicable"


def test_averages_of_a_list_of_tensors():
    class Listed(Loop):
        def __init__(self):
            super().__init__()
            self.average = [p.detach().clone() for p in self.model.parameters()]

        def update(self):
            super().update()
            for mean, p in zip(self.average, self.model.parameters(), strict=True):
                mean.lerp_(p.detach(), self.share)

        share = 0.1

    assert ask(loop_spec_of(Listed), "average_follows").status == "passed"
    still = type("Still", (Listed,), {"share": 0.0})
    assert ask(loop_spec_of(still), "average_follows").status == "warned"


def test_average_of_the_same_run_passes():
    assert ask(averaged(), "average_follows").status == "passed"


def test_frozen_prefixes_in_a_list():
    assert ask(loop_spec_of(Short, frozen=["teacher"]), "interrupted_run").status == "passed"


def test_counter_beside_an_average_that_never_moves():
    class Counting(Averaged):
        def __init__(self):
            super().__init__()
            self.average.register_buffer("n_updates", torch.zeros(()))

        def update(self):
            average = copy.deepcopy(self.average.state_dict())
            super().update()
            self.average.load_state_dict(average)
            self.average.n_updates += 1

    assert ask(loop_spec_of(Counting), "average_follows").status == "warned"
