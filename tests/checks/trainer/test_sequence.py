"""Sequence: runs that are interrupted or disturbed end like an uninterrupted run."""

from pathlib import Path

import pytest
import torch

from stackwise.checks import check_trainer, compare_runs
from stackwise.checks.runs.sequence import STEP
from stackwise.subject.trainer_spec import TrainerSpec
from tests.optimizer_kinds import Contained
from tests.zoo.checkpoint import Frozen, Keeping, Scaled
from tests.zoo.evaluation import trained_once
from tests.zoo.gpt import GPT
from tests.zoo.loop import Loop, bare_step, loop_spec_of
from tests.zoo.runs import (
    Averaged,
    resumed_epoch_has_the_order_of_the_first,
    used_batches_are_skipped_in_every_epoch,
)


def ask(subject, check, **declared):
    [result] = check_trainer(TrainerSpec.of(subject, **declared), checks=[check])
    return result


class Short(Loop):
    """Has no own data, so that its sequences have six steps."""

    epoch = None


class ShortAveraged(Averaged):
    epoch = None


class Distilled(Short):
    """Learns from a frozen teacher outside the model, which is created from the seed and not saved."""

    def __init__(self):
        super().__init__()
        self.teacher = self.create_model().requires_grad_(False)

    def loss(self, batch):
        gap = self.model(batch["input_ids"]).logits - self.teacher(batch["input_ids"]).logits
        return super().loss(batch) + gap.square().mean()


class Rounds(Short):
    """A load multiplies the weights by a number near 1."""

    scale = 1

    def create_model(self):
        model = super().create_model()
        model.dropout = 0.0
        return model

    def restore(self, state):
        super().restore(state)
        with torch.no_grad():
            for p in self.model.parameters():
                p.mul_(1 + self.scale * torch.finfo(p.dtype).eps)


class NoRandomState(Short):
    def restore_random_state(self, state):
        pass


class WithoutDropout(NoRandomState):
    def create_model(self):
        model = super().create_model()
        model.dropout = 0.0
        return model


class Paths(Short):
    def save(self, folder):
        assert isinstance(folder, Path)
        super().save(folder)

    def load(self, folder):
        assert isinstance(folder, Path)
        super().load(folder)


class TrainsAfterEvaluation(Short):
    def evaluate(self, batches):
        mean = super().evaluate(batches)
        self.model.train()
        return mean


class LeftInEval(Short):
    """Each step sets the train mode itself."""

    def evaluate(self, batches):
        mean = super().evaluate(batches)
        self.model.eval()
        return mean


SOUND = [
    *(ShortAveraged, Distilled, Rounds, WithoutDropout, Paths, TrainsAfterEvaluation, LeftInEval),
    *(type("Short", (build,), {"epoch": None}) for build in (Scaled, Frozen, Keeping)),
]


@pytest.mark.parametrize("check", ["interrupted_run", "undisturbed_run"])
@pytest.mark.parametrize("build", SOUND)
def test_sound(build, check):
    result = ask(loop_spec_of(build), check)

    assert result.status == "passed", result


def test_pretrained_weights_outside_the_checkpoint_pass():
    class Pretrained(Short):
        """The first layer comes from a file, is frozen, and is not in the checkpoint."""

        def create_model(self):
            model = super().create_model()
            with torch.no_grad():
                for p in model.layers[0].requires_grad_(False).parameters():
                    p.copy_(torch.linspace(-0.1, 0.1, p.numel()).view_as(p))
            return model

        def state(self):
            state = super().state()
            return state | {"model": {k: w for k, w in state["model"].items() if "layers.0." not in k}}

        def restore(self, state):
            super().restore(state | {"model": self.model.state_dict() | state["model"]})

    spec = loop_spec_of(Pretrained, frozen=("layers.0",))

    assert ask(spec, "interrupted_run").status == "passed"


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


def test_frozen_prefixes_in_a_list():
    assert ask(loop_spec_of(Short, frozen=["teacher"]), "interrupted_run").status == "passed"


class LosesOneWeight(Short):
    def restore(self, state):
        kept = self.model.layers[1]["up"].weight.detach().clone()
        super().restore(state)
        with torch.no_grad():
            self.model.layers[1]["up"].weight.copy_(kept)


class LosesMoments(Short):
    def restore(self, state):
        super().restore(state | {"optimizer": self.optimizer.state_dict()})


class LosesSchedule(Short):
    def restore(self, state):
        super().restore(state | {"scheduler": self.scheduler.state_dict()})


class LosesPosition(Loop):
    n_rows = 16

    def restore(self, state):
        super().restore(state | {"position": (0, 0, 0)})


class Merges(Short):
    """Loading retains the moments of the run."""

    def restore(self, state):
        moments = {p: dict(kept) for p, kept in self.optimizer.state.items()}
        super().restore(state)
        self.optimizer.state.update(moments)


class LosesContainedMoments(Short):
    def __init__(self):
        super().__init__()
        self.optimizer = Contained(self.optimizer)


class CountsSteps(Short):
    """The step depends on a number that is not saved."""

    count = 0

    def step(self, batch):
        self.count += 1
        with torch.no_grad():
            self.model.norm.weight.mul_(1 + 0.1 / self.count)
        return super().step(batch)


class RateOfTheStep(Short):
    """Computes the learning rate from a number of steps that is not saved."""

    position = None

    def create_scheduler(self):
        methods = {name: lambda *_: {} for name in ("step", "state_dict", "load_state_dict")}
        return type("Constant", (), methods)()

    def accumulate(self, batches):
        for group in self.optimizer.param_groups:
            group["lr"] = self.base_lr * self.factor(self.number)
        return super().accumulate(batches)

    def restore(self, state):
        super().restore(state | {"position": (0, 0, 0)})


class RenamesWeights(Short):
    def state(self):
        state = super().state()
        return state | {"model": {f"module.{name}": w for name, w in state["model"].items()}}


@pytest.mark.parametrize(
    ("build", "where", "advice"),
    [
        (LosesOneWeight, "model.layers.1.up.weight after loading: 100% of", "strict=False"),
        (LosesMoments, "optimizer.", "optimizer's state_dict"),
        (LosesSchedule, "scheduler.last_epoch after loading", "scheduler's state_dict"),
        (LosesPosition, "batch 1", "position in the data"),
        (Merges, "optimizer.", "state of the earlier training remains"),
        (LosesContainedMoments, "optimizer.layers.0.q.weight.", "optimizer's state_dict"),
        (CountsSteps, "the loss of step ", "counters"),
        (RateOfTheStep, "the learning rate after step ", "the step number"),
        (NoRandomState, "the loss of step ", "torch.get_rng_state"),
        (RenamesWeights, "the sequence raises RuntimeError: Error(s) in loading", "names that a wrapper"),
        (type("RoundsMore", (Rounds,), {"scale": 10000}), "model.", "copy that is older"),
        (resumed_epoch_has_the_order_of_the_first, "batch 6", "set_epoch"),
    ],
)
def test_lost_state_and_its_cause_are_named(build, where, advice):
    result = ask(loop_spec_of(build) if isinstance(build, type) else build(), "interrupted_run")

    assert result.status == "failed"
    assert result.where.startswith(where) and advice in result.advice, result


class ChangesAWeight(Short):
    def evaluate(self, batches):
        with torch.no_grad():
            self.model.norm.weight.mul_(1.1)
        return super().evaluate(batches)


class LeavesGradientsOff(Short):
    def evaluate(self, batches):
        mean = super().evaluate(batches)
        torch.set_grad_enabled(False)
        return mean


class DrawsASample(Short):
    def save(self, folder):
        super().save(folder)
        torch.rand(1)


@pytest.mark.parametrize(
    ("build", "where"),
    [
        (ChangesAWeight, "the loss of step 1"),
        (LeavesGradientsOff, "the sequence raises RuntimeError: element 0 of tensors does not require grad"),
        (DrawsASample, "the loss of step 1"),
    ],
)
def test_operation_that_disturbs_a_run_is_found(build, where):
    result = ask(loop_spec_of(build), "undisturbed_run")

    assert torch.is_grad_enabled()
    assert result.status == "failed" and result.where.startswith(where), result


def test_mode_that_evaluation_changes_is_named():
    class LeavesEvalMode(type(trained_once().build())):
        epoch = None

        def evaluate(self, batches):
            mean = Loop.evaluate(self, batches)
            self.model.layers[1].eval()
            return mean

    result = ask(loop_spec_of(LeavesEvalMode), "undisturbed_run")

    assert result.status == "failed"


def test_save_that_disturbs_is_reported_once():
    class Disturbs(Short):
        def save(self, folder):
            super().save(folder)
            with torch.no_grad():
                self.model.norm.weight.mul_(1.1)

    spec = loop_spec_of(Disturbs)

    assert ask(spec, "undisturbed_run").status == "failed"
    assert ask(spec, "interrupted_run").meaning == "needs a run that passes undisturbed_run"


def test_position_without_a_batch_is_an_error():
    result = ask(loop_spec_of(type("Beyond", (Loop,), {"position": lambda self: (0, 6)})), "interrupted_run")

    assert result.status == "error" and "has no batch 6" in result.meaning


@pytest.mark.parametrize("former", ["resume", "checkpoint_round_trip", "data_resumes"])
def test_former_names_select_the_check(former):
    assert ask(loop_spec_of(Short), former).check == "interrupted_run"
    [result] = check_trainer(
        loop_spec_of(LosesMoments), checks=[former], expected_failures={former: "not saved on purpose"}
    )
    assert result.status == "expected failure"


class PositionOfTheFolder(Loop):
    """The position of each checkpoint is in the memory of the process, not in its folder."""

    positions = {}  # noqa: RUF012

    def save(self, folder):
        self.positions[str(folder)] = (self.number, self.epoch_number, self.batch_number)
        super().save(folder)

    def load(self, folder):
        super().load(folder)
        self.number, self.epoch_number, self.batch_number = self.positions.get(str(folder), (0, 0, 0))


class FailsElsewhere(Loop):
    """The first load of a process raises if the process did not save before."""

    def save(self, folder):
        PositionOfTheFolder.positions["saved"] = True
        super().save(folder)

    def load(self, folder):
        assert "saved" in PositionOfTheFolder.positions, "no earlier save"
        super().load(folder)


def test_run_that_continues_in_a_new_process_is_compared():
    result = ask(loop_spec_of(Loop), "resume_in_new_process")
    assert result.status == "passed", result

    assert ask(loop_spec_of(PositionOfTheFolder), "interrupted_run").status == "passed"
    result = ask(loop_spec_of(PositionOfTheFolder), "resume_in_new_process")
    assert result.status == "failed" and result.where.startswith("batch"), result

    result = ask(loop_spec_of(FailsElsewhere), "resume_in_new_process")
    assert result.status == "failed" and "no earlier save" in result.where, result


def test_new_process_needs_instructions_to_build_the_run(tmp_path):
    class Local(Loop):
        pass

    result = ask(loop_spec_of(Local), "resume_in_new_process")
    assert result.status == "not applicable" and "TrainerSpec.factory" in result.meaning

    result = ask(loop_spec_of(Local, factory=str(tmp_path / "none.py") + ":loop"), "resume_in_new_process")
    assert result.status == "not applicable" and "cannot import" in result.meaning
