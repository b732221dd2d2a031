"""Checkpoints: what is lost, disturbed or wrongly chosen is named, and sound loops are left alone."""

import random
import shutil
from pathlib import Path

import pytest
import torch

from stackwise.checks import check_trainer
from stackwise.checks.probe.another_process import Recipe, run_in_processes
from stackwise.checks.probe.run_state import different, next_batches, state_of
from stackwise.subject.trainer_spec import TrainerSpec
from tests.optimizer_kinds import Contained
from tests.zoo.checkpoint import Frozen, Keeping, Remembering, Scaled
from tests.zoo.loop import Loop, loop, loop_spec_of
from tests.zoo.runs import (
    folder_of_an_earlier_run_removes_the_new_checkpoint,
    resumed_epoch_has_the_order_of_the_first,
)

IN_PROCESS = [
    "checkpoint_round_trip",
    "resume",
    "saving_disturbs_nothing",
    "newest_checkpoint",
    "damaged_checkpoint",
]


def ask(subject, check, **declared):
    [result] = check_trainer(TrainerSpec.of(subject, **declared), checks=[check])
    return result


@pytest.mark.parametrize("build", [Loop, Scaled, Frozen, Keeping])
def test_sound(build):
    for check in IN_PROCESS:
        result = ask(loop_spec_of(build), check)
        if check == "newest_checkpoint" and build is not Keeping:
            assert result.meaning == "needs checkpoint(folder, step) and latest(folder)"
        else:
            assert result.status == "passed" and result.value <= result.limit, result


def test_folders_are_paths():
    class Divides(Loop):
        def save(self, folder):
            assert isinstance(folder, Path)
            super().save(folder)

        def load(self, folder):
            assert isinstance(folder, Path)
            super().load(folder)

    for check in IN_PROCESS[:3]:
        assert ask(loop_spec_of(Divides), check).status == "passed"
    assert ask(loop_spec_of(Divides), "data_resumes").status == "passed"


@pytest.mark.parametrize("lacking", ["save", "load"])
def test_what_it_needs(lacking):
    bare = type("Bare", (Loop,), {lacking: None})
    for check in ("checkpoint_round_trip", "resume", "resume_in_new_process", "damaged_checkpoint"):
        result = ask(loop_spec_of(bare), check)
        assert (result.status, result.meaning) == (
            "not applicable",
            "needs save(folder) and load(folder)",
        )


def test_global_state_is_left_alone():
    torch.manual_seed(5)
    random.seed(5)
    before = torch.get_rng_state(), random.getstate()
    for check in IN_PROCESS:
        ask(loop_spec_of(Keeping), check)
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()


def test_one_weight_that_is_lost_is_named():
    class Lossy(Loop):
        def restore(self, state):
            kept = self.model.layers[1]["up"].weight.detach().clone()
            super().restore(state)
            with torch.no_grad():
                self.model.layers[1]["up"].weight.copy_(kept)

    result = ask(loop_spec_of(Lossy), "checkpoint_round_trip")
    assert (result.status, result.value, result.limit) == ("failed", 1.0, 0.0)
    assert result.where == "model.layers.1.up.weight"
    assert result.meaning.startswith("100% of the elements of model.layers.1.up.weight")


@pytest.mark.parametrize(
    "lost, where, advice",
    [
        ("optimizer", "optimizer.embedding.weight.", "optimizer's state_dict"),
        ("scheduler", "scheduler.last_epoch", "scheduler's state_dict"),
        ("position", "position().1", "position in the data"),
    ],
)
def test_what_is_lost_is_named(lost, where, advice):
    class Lossy(Loop):
        def restore(self, state):
            super().restore(state | {lost: self.state()[lost]})

    result = ask(loop_spec_of(Lossy), "checkpoint_round_trip")
    assert result.status == "failed"
    assert where.split(".")[0] in result.where and advice in result.advice


def test_what_is_kept_from_before():
    class Merging(Loop):
        """Moments that are there already are kept."""

        def restore(self, state):
            moments = {p: dict(kept) for p, kept in self.optimizer.state.items()}
            super().restore(state)
            self.optimizer.state.update(moments)

    result = ask(loop_spec_of(Merging), "checkpoint_round_trip")
    assert result.status == "failed"
    assert result.where.endswith("loaded into a run that had made a step")


def test_what_is_carried_beside_what_is_compared():
    class Averaging(Loop):
        """The step depends on a number that is not saved."""

        count = 0

        def step(self, batch):
            self.count += 1
            with torch.no_grad():
                self.model.norm.weight.mul_(1 + 0.1 / self.count)
            return super().step(batch)

    result = ask(loop_spec_of(Averaging), "checkpoint_round_trip")
    assert result.status == "failed" and result.where.startswith("the loss of step 0")
    assert ask(loop_spec_of(Averaging), "resume").status == "failed"


def test_a_run_that_does_not_repeat_itself_is_not_judged():
    generator = torch.Generator()
    generator.seed()

    class Noisy(Loop):
        def loss(self, batch):
            return super().loss(batch) * (1 + torch.rand((), generator=generator))

    for check in ("resume", "saving_disturbs_nothing"):
        result = ask(loop_spec_of(Noisy), check)
        assert result.status == "not applicable" and "deterministic step" in result.meaning
    result = ask(loop_spec_of(Noisy), "checkpoint_round_trip")
    assert result.status == "passed" and "Only the saved state" in result.meaning


def test_random_state_is_told_from_other_losses():
    class Forgetful(Loop):
        def restore_random_state(self, state):
            pass

    result = ask(loop_spec_of(Forgetful), "resume")
    assert result.status == "failed" and "torch.get_rng_state" in result.advice
    # Without dropout nothing is drawn, and nothing is lost.
    quiet = type(
        "Quiet",
        (Forgetful,),
        {"create_model": lambda self: _without_dropout(Loop.create_model(self))},
    )
    assert ask(loop_spec_of(quiet), "resume").status == "passed"


def _without_dropout(model):
    model.dropout = 0.0
    return model


def test_a_checkpoint_that_cannot_be_loaded():
    class Renaming(Loop):
        def state(self):
            state = super().state()
            return state | {"model": {f"module.{name}": w for name, w in state["model"].items()}}

    for check in ("checkpoint_round_trip", "resume"):
        result = ask(loop_spec_of(Renaming), check)
        assert (result.status, result.where) == ("failed", "load(folder)")
        assert "Missing key" in result.meaning or "Error(s) in loading" in result.meaning


def test_batches_are_given_where_the_run_does_not_say():
    for missing in ({"epoch": None, "position": None}, {"epoch": None}, {"position": None}):
        result = ask(loop_spec_of(type("Silent", (Loop,), missing)), "resume")
        assert result.status == "passed" and "on random batches" in result.meaning


def test_newest_by_time_is_unusual():
    class ByTime(Keeping):
        keep_last = 5

        def latest(self, folder):
            return max(folder.iterdir(), key=lambda path: (path.stat().st_mtime, path.name))

    result = ask(loop_spec_of(ByTime), "newest_checkpoint")
    # Five saves within one tick of the clock are told apart by name alone, which is wrong here too.
    assert result.status in ("warned", "failed")


def test_a_file_that_may_be_missing_is_unusual():
    class Optional(Loop):
        def save(self, folder):
            state = self.state()
            torch.save(state.pop("optimizer"), Path(folder) / "optimizer.pt")
            torch.save(state, Path(folder) / "run.pt")

        def load(self, folder):
            state = torch.load(Path(folder) / "run.pt", weights_only=False)
            path = Path(folder) / "optimizer.pt"
            state["optimizer"] = torch.load(path) if path.exists() else self.optimizer.state_dict()
            self.restore(state)

    result = ask(loop_spec_of(Optional), "damaged_checkpoint")
    assert result.status == "warned" and result.where.startswith("without optimizer.pt: optimizer.")
    assert ask(loop_spec_of(Optional), "checkpoint_round_trip").status == "passed"


def test_state_of_two_runs():
    one, two = loop().create(), loop().create()
    assert different(state_of(one), state_of(two)) == []
    with torch.no_grad():
        one.model.norm.weight[3] = torch.nan
        two.model.norm.weight[3] = torch.nan
    assert different(state_of(one), state_of(two)) == []
    two.model.norm.weight.requires_grad_(False)
    assert different(state_of(one), state_of(two)) == ["model.norm.weight takes gradients"]


def test_next_batches_go_on_over_epochs():
    run = Loop()
    wanted = [batch["input_ids"] for number in (0, 1) for batch in run.epoch(number)]
    run.batch_number = 2
    own = next_batches(run)
    for index in range(2, 9):
        assert torch.equal(next(own)["input_ids"], wanted[index])
        run.advance()


# In another process


def halve(build, number):
    if not isinstance(number, torch.Tensor):
        raise ArithmeticError("no number")
    return number / 2, type(build()).__name__


def waits(build):
    import time

    time.sleep(600)


def test_functions_in_new_processes():
    recipe = Recipe.of(loop())
    arguments = [{"number": torch.ones(2)}, {"number": None}]
    done, failed = run_in_processes(f"{__name__}:halve", recipe, arguments)
    assert torch.equal(done.value[0], torch.full((2,), 0.5))
    assert done.value[1] == "Loop" and not done.error
    assert failed.error.startswith("ArithmeticError: no number (test_checkpoint.py:") and failed.built
    [stopped] = run_in_processes(f"{__name__}:waits", recipe, [{}], stop=lambda: True)
    assert stopped.error == "the process was stopped"


def test_recipes(tmp_path):
    class Local(Loop):
        pass

    assert Recipe.of(loop_spec_of(Local)) is None
    result = ask(loop_spec_of(Local), "resume_in_new_process")
    assert result.status == "not applicable" and "TrainerSpec.factory" in result.meaning
    recipe = Recipe.of(loop_spec_of(Local, factory="tests.zoo.loop:loop"))
    assert recipe.pickled is None and recipe.build() is Loop
    unknown = loop_spec_of(Local, factory=str(tmp_path / "none.py") + ":loop")
    result = ask(unknown, "resume_in_new_process")
    assert result.status == "not applicable" and "cannot import" in result.meaning


def test_resume_in_a_new_process():
    result = ask(loop(), "resume_in_new_process")
    assert result.status == "passed", result
    assert ask(loop_spec_of(Remembering), "resume").status == "passed"
    result = ask(loop_spec_of(Remembering), "resume_in_new_process")
    assert result.status == "failed" and "position()" in result.meaning


def test_the_advice_names_what_is_lost():
    class NoRandomState(Loop):
        def restore_random_state(self, state):
            pass

    result = ask(loop_spec_of(NoRandomState), "resume")
    assert result.status == "failed" and "Save and load the random states" in result.advice

    class ByHand(Loop):
        """Its learning rate comes from a count of its own."""

        def create_scheduler(self):
            methods = {name: lambda *_: {} for name in ("step", "state_dict", "load_state_dict")}
            return type("Constant", (), methods)()

        def accumulate(self, batches):
            for group in self.optimizer.param_groups:
                group["lr"] = self.base_lr * self.factor(self.number)
            return super().accumulate(batches)

        position = None

        def restore(self, state):
            super().restore({**state, "position": (0, 0, 0)})

    result = ask(loop_spec_of(ByHand), "resume")
    assert result.status == "failed" and "the number of the step" in result.advice
    assert "random" not in result.advice

    class Stale(Loop):
        def zero_grad(self):
            if self.number == 0:
                super().zero_grad()

    result = ask(loop_spec_of(Stale), "resume")
    assert result.status == "failed" and "gradients of earlier steps" in result.advice


def test_moments_within_a_container_that_are_lost_are_named():
    class Lossy(Loop):
        def __init__(self, *arguments, **settings):
            super().__init__(*arguments, **settings)
            self.optimizer = Contained(self.optimizer)

    result = ask(loop_spec_of(Lossy), "checkpoint_round_trip")
    assert result.status == "failed"
    assert result.where.startswith("optimizer.layers.0.q.weight.")


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


def test_order_of_the_first_epoch_after_a_resume_in_the_second_fails():
    spec = resumed_epoch_has_the_order_of_the_first()

    result = ask(spec, "resume")

    assert result.status == "failed" and result.where.startswith("batch 0")
    assert "set_epoch" in result.advice
    assert ask(spec, "checkpoint_round_trip").status == "passed"


def _rounding(scale):
    class Rounding(Loop):
        """A load multiplies the weights by a number near 1."""

        def create_model(self):
            return _without_dropout(super().create_model())

        def restore(self, state):
            super().restore(state)
            with torch.no_grad():
                for p in self.model.parameters():
                    p.mul_(1 + scale * torch.finfo(p.dtype).eps)

    return loop_spec_of(Rounding)


def test_resume_that_rounds_passes():
    result = ask(_rounding(1), "resume")

    assert (result.status, result.meaning) == ("passed", "Equal up to rounding.")
    assert ask(_rounding(10000), "resume").status == "failed"


def test_frozen_teacher_that_is_created_from_the_seed_needs_no_checkpoint():
    class Distilled(Loop):
        def __init__(self):
            super().__init__()
            self.teacher = self.create_model().requires_grad_(False)

        def loss(self, batch):
            gap = self.model(batch["input_ids"]).logits - self.teacher(batch["input_ids"]).logits
            return super().loss(batch) + gap.square().mean()

    assert ask(loop_spec_of(Distilled), "checkpoint_round_trip").status == "passed"
