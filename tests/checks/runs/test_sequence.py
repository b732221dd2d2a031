"""Sequences: runs with operations between their steps, compared with runs that only make the steps."""

import copy
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from stackwise.checks import TrainerSubject, compare_runs
from stackwise.checks.runs.sequence import INTERRUPTIONS, OPERATIONS, STEP, Finding, Sequences
from stackwise.subject.trainer_spec import TrainerSpec
from tests.zoo.gpt import GPT
from tests.zoo.loop import Loop, bare_step, loop, loop_spec_of
from tests.zoo.runs import Averaged, averaged, warm_up_of_the_average_restarts
from tests.zoo.schedule_free import EvaluatesTheAverage, schedule_free


def sequences_of(subject):
    return Sequences(TrainerSubject(TrainerSpec.of(subject), torch.device("cpu"), 0))


class EvaluatesInEvalMode(Loop):
    """Remains in eval mode after the first evaluation."""

    def __init__(self):
        super().__init__()
        self.is_evaluated = False

    def train_mode(self):
        self.model.train(not self.is_evaluated)

    def evaluate(self, batches):
        self.is_evaluated = True
        return super().evaluate(batches)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_correct_run_does_not_differ(operation):
    assert compare_runs(averaged(), [STEP, STEP, operation, STEP, STEP]) == ""


def test_steps_alone_do_not_differ():
    assert compare_runs(loop(), [STEP, STEP]) == ""
    assert compare_runs(loop(), []) == ""


def test_difference_of_the_loss_is_reported():
    difference = compare_runs(loop_spec_of(EvaluatesInEvalMode), [STEP, "evaluate", STEP])

    assert difference.startswith("the loss of step 1: ")


def test_difference_of_the_average_is_reported():
    difference = compare_runs(warm_up_of_the_average_restarts(), [STEP, "resume", STEP])

    assert difference.startswith("the average average.")


def test_schedule_that_is_not_loaded_is_reported():
    class Restarting(Loop):
        def restore(self, state):
            super().restore(state | {"scheduler": self.scheduler.state_dict()})

    difference = compare_runs(loop_spec_of(Restarting), [STEP, STEP, "resume", STEP])

    assert difference == "scheduler.last_epoch after loading: it was 2, and is 0"


def test_difference_of_the_data_is_reported():
    class FromTheStart(Loop):
        def restore(self, state):
            super().restore(state)
            self.batch_number = 0

    assert compare_runs(loop_spec_of(FromTheStart), [STEP, "resume", STEP]) == "batch 1"


def test_difference_of_the_number_of_steps_is_reported():
    class OneEpoch(Loop):
        """Reads no further epoch after a resume."""

        ended = False

        def restore(self, state):
            super().restore(state)
            self.ended = True

        def epoch(self, number):
            batches = list(super().epoch(number))
            yield from batches[:3] if self.ended else batches

    with pytest.raises(ValueError, match="has no batch 3"):
        compare_runs(loop_spec_of(OneEpoch), [STEP, "resume", STEP, STEP, STEP])


def test_difference_of_the_evaluation_is_reported():
    class Biased(Loop):
        bias = 0.0

        def evaluate(self, batches):
            return super().evaluate(batches) + self.bias

        def restore(self, state):
            super().restore(state)
            self.bias = 1.0

    difference = compare_runs(loop_spec_of(Biased), [STEP, "resume", STEP])

    assert difference.startswith("the result of evaluate(batches): ")


def test_unknown_operation_is_refused():
    with pytest.raises(ValueError, match="sequence") as error:
        compare_runs(loop(), [STEP, "pause", STEP])

    assert "'pause'" in str(error.value)
    assert all(repr(each) in str(error.value) for each in (STEP, *OPERATIONS))


def test_operation_that_the_run_lacks_is_refused():
    spec = TrainerSpec.from_function(bare_step, GPT)
    silent = loop_spec_of(type("Silent", (Loop,), {"load": None}))

    with pytest.raises(ValueError, match="'evaluate'"):
        compare_runs(spec, [STEP, "evaluate"])
    with pytest.raises(ValueError, match="'rewind'") as error:
        compare_runs(silent, [STEP, "rewind"])

    assert "evaluate, save" in str(error.value)


def test_exception_is_a_finding():
    class Full(Loop):
        epoch = None

        def save(self, folder):
            raise OSError("no space")

    finding, _ = sequences_of(loop_spec_of(Full)).find(INTERRUPTIONS)
    assert finding.difference == "the sequence raises OSError: no space"
    with pytest.raises(OSError, match="no space"):
        compare_runs(loop_spec_of(Full), [STEP, "save", STEP])


def test_possible_operations():
    assert sequences_of(loop()).possible == list(OPERATIONS)
    assert sequences_of(TrainerSpec.from_function(bare_step, GPT)).possible == []
    silent = type("Silent", (Loop,), {"position": None, "load": None})
    assert sequences_of(loop_spec_of(silent)).possible == ["evaluate", "save"]


@pytest.mark.parametrize(
    ("attributes", "epoch_length", "n_steps"),
    [({}, 6, 10), ({"n_rows": 4 * 24}, 24, 28), ({"n_rows": 4 * 25}, None, 6), ({"epoch": None}, None, 6)],
    ids=["short", "longest", "too-long", "no-data"],
)
def test_steps_go_beyond_the_end_of_a_short_epoch(attributes, epoch_length, n_steps):
    sequences = sequences_of(loop_spec_of(type("Variant", (Loop,), attributes), total_steps=None))

    assert (sequences.epoch_length, sequences.n_steps) == (epoch_length, n_steps)


def test_finding_in_words_and_code():
    finding = Finding((STEP, "evaluate", STEP, "resume", STEP), "a difference")

    assert finding.text == (
        "after 1 step the run is evaluated and "
        "after 2 steps the run is saved, and a new run loads the checkpoint and continues"
    )
    assert finding.code == "compare_runs(trainer, ['step', 'evaluate', 'step', 'resume', 'step'])"


class SavingDisturbs(Loop):
    """Saving changes a weight first."""

    epoch = None

    def save(self, folder):
        with torch.no_grad():
            self.model.norm.weight.mul_(1.1)
        super().save(folder)


class RewindsTooFar(Loop):
    """A run that has made more steps than the checkpoint contains keeps its moments."""

    epoch = None

    def restore(self, state):
        moments = self.optimizer.state_dict()
        is_later = self.number > state["position"][0]
        super().restore(state | ({"optimizer": moments} if is_later else {}))


@pytest.mark.parametrize(
    ("subject", "shortest"),
    [
        (warm_up_of_the_average_restarts, (STEP, "resume", STEP)),
        (lambda: loop_spec_of(SavingDisturbs), (STEP, "save", STEP)),
        (lambda: loop_spec_of(RewindsTooFar), (STEP, "rewind", STEP)),
    ],
    ids=["resume", "save", "rewind"],
)
def test_shortest_sequence_is_found(subject, shortest):
    finding, _ = sequences_of(subject()).find(INTERRUPTIONS)

    assert finding.sequence == shortest
    assert finding.difference == compare_runs(subject(), list(shortest)) != ""


class CannotLoadLater(Loop):
    """Loading raises in a run that has made more than two steps."""

    epoch = None

    def restore(self, state):
        if self.number > 2:
            raise KeyError("exp_avg")
        super().restore(state)


def test_sequence_that_raises_is_found():
    finding, _ = sequences_of(loop_spec_of(CannotLoadLater)).find(INTERRUPTIONS)

    assert set(finding.sequence) == {STEP, "rewind"}
    assert finding.difference == "the sequence raises KeyError: 'exp_avg'"


def test_schedule_that_ends_limits_the_steps():
    class OneCycle(Loop):
        epoch = None

        def create_scheduler(self):
            return torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.1, total_steps=7)

    sequences = sequences_of(loop_spec_of(OneCycle, learning_rate=None, total_steps=None))

    assert sequences.n_steps == 3
    assert sequences.find(INTERRUPTIONS)[0] is None


def test_average_that_changes_little_and_is_not_saved_is_found():
    class Slow(Averaged):
        epoch = None

        def update(self):
            Loop.update(self)
            with torch.no_grad():
                for mean, p in zip(self.average.parameters(), self.model.parameters(), strict=True):
                    mean.lerp_(p, 1e-4)

        def restore(self, state):
            super().restore(state | {"average": self.average.state_dict()})

    difference = compare_runs(loop_spec_of(Slow), [STEP, "resume", STEP])

    assert difference.startswith("the average average.")


class SavesInAThread(Loop):
    """`save` returns a future. The state is copied first if `copies`."""

    epoch, copies = None, True
    executor = ThreadPoolExecutor(1)

    def save(self, folder):
        state = copy.deepcopy(self.state()) if self.copies else self.state()

        def write():
            time.sleep(0.1)
            torch.save(state, Path(folder) / "state.pt")

        return self.executor.submit(write)

    def load(self, folder):
        self.restore(torch.load(Path(folder) / "state.pt", weights_only=False))


class SavesInParts(SavesInAThread):
    def save(self, folder):
        return [super().save(folder), self.executor.submit(int)]


@pytest.mark.parametrize("build", [SavesInAThread, SavesInParts])
@pytest.mark.parametrize("operation", ["save", *INTERRUPTIONS])
def test_asynchronous_save_is_awaited(build, operation):
    assert compare_runs(loop_spec_of(build), [STEP, operation, STEP]) == ""


def test_asynchronous_save_without_a_copy_is_found():
    class Shares(SavesInAThread):
        copies = False

    spec = loop_spec_of(Shares)

    assert compare_runs(spec, [STEP, "resume", STEP]) == ""
    assert compare_runs(spec, [STEP, "resume later", STEP]) != ""


def test_second_save_into_the_buffers_of_the_first_is_found():
    class Reuses(Loop):
        """A checkpoint is a link to the newest state."""

        epoch, newest = None, {}

        def save(self, folder):
            self.newest["state"] = copy.deepcopy(self.state())

        def load(self, folder):
            self.restore(copy.deepcopy(self.newest["state"]))

    spec = loop_spec_of(Reuses)

    assert compare_runs(spec, [STEP, "resume", STEP]) == ""
    assert compare_runs(spec, [STEP, "resume later", STEP]) != ""


def test_single_operation_is_found_for_a_bug_of_the_second_epoch():
    class Restarts(Averaged):
        """Continues at the same place in each later epoch after a resume."""

        n_rows, skipped = 12, 0

        def restore(self, state):
            super().restore(state)
            self.skipped = self.batch_number

        def advance(self):
            super().advance()
            self.batch_number = self.batch_number or self.skipped

    spec = loop_spec_of(Restarts)
    finding, _ = sequences_of(spec).find(INTERRUPTIONS)

    assert finding.sequence.count("resume") == 1
    assert set(finding.sequence) == {STEP, "resume"}
    assert finding.sequence.count(STEP) == 3  # the first epoch
    assert finding.difference == "position().1 after the last step"
    assert finding.difference == compare_runs(spec, list(finding.sequence))


def test_same_sequences_are_drawn_again():
    one, other = (sequences_of(loop()) for _ in range(2))

    assert list(one._planned(["save", "evaluate"])) == list(other._planned(["save", "evaluate"]))


def test_run_that_does_not_repeat_itself_is_recognised():
    generator = torch.Generator()
    generator.seed()

    class Noisy(Loop):
        def loss(self, batch):
            return super().loss(batch) * (1 + torch.rand((), generator=generator))

    assert sequences_of(loop()).repeats
    assert not sequences_of(loop_spec_of(Noisy)).repeats


@pytest.mark.parametrize("operation", ["evaluate", "save", "resume", "rewind"])
def test_interpolation_that_rounds_is_no_difference(operation):
    assert compare_runs(schedule_free(), [STEP, STEP, operation, STEP, STEP]) == ""


def test_interpolation_rounds():
    spec = schedule_free()
    run = spec.create()
    for number in range(3):
        run.step(spec.batch(seed=number))
    before = [p.detach().clone() for p in run.model.parameters()]

    run.evaluate([spec.batch()])

    assert not all(torch.equal(p, old) for p, old in zip(run.model.parameters(), before, strict=True))


def test_interpolation_that_is_not_undone_is_a_difference():
    class StaysInEvalMode(EvaluatesTheAverage):
        def evaluate(self, batches):
            self.optimizer.eval()
            return Loop.evaluate(self, batches)

        def accumulate(self, batches):
            return Loop.accumulate(self, batches)

    spec = loop_spec_of(StaysInEvalMode, learning_rate=None, decayed=None)

    assert compare_runs(spec, [STEP, STEP, "evaluate", STEP]) != ""


def test_random_state_outside_is_unchanged():
    state = torch.get_rng_state()

    compare_runs(loop(), [STEP, "resume", STEP, "evaluate", STEP])

    assert torch.equal(state, torch.get_rng_state())
