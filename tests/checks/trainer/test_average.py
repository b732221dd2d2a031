"""Average: copies of the weights that follow all weights equally, and by the declared decay."""

import copy

import pytest
import torch

from stackwise.checks import check_trainer
from stackwise.checks.runs.averages import followers
from stackwise.subject.trainer_spec import TrainerSpec
from tests.zoo.gpt import GPT
from tests.zoo.loop import Loop, bare_step, loop_spec_of
from tests.zoo.runs import (
    Averaged,
    Ema,
    average_in_bfloat16,
    average_of_tied_weights_moves_twice,
    average_skips_layers,
    averaged,
)


def ask(subject, check, **declared):
    [result] = check_trainer(TrainerSpec.of(subject, **declared), checks=[check])
    return result


def test_run_without_an_average():
    result = ask(TrainerSpec.from_function(bare_step, GPT), "average_share")

    assert result.status == "not applicable"
    assert result.meaning.startswith("needs a copy of the weights")


@pytest.mark.parametrize("counts", [False, True])
def test_average_that_never_moves_is_a_warning(counts):
    class Still(Ema):
        decay = 1.0

        def __init__(self):
            super().__init__()
            self.average.register_buffer("n_updates", torch.zeros(()))

        def average_weights(self):
            super().average_weights()
            self.average.n_updates += counts

    result = ask(loop_spec_of(Still), "average_share")

    assert result.status == "warned"
    assert result.where.startswith("average.")
    assert "reference model" in str(result)


def test_average_of_a_model_that_does_not_train_is_not_compared():
    result = ask(loop_spec_of(variant(base_lr=0.0), learning_rate=None), "average_share")

    assert (result.status, result.meaning) == ("not applicable", "needs a weight that 12 steps change")


def test_average_that_is_created_in_training_is_not_compared():
    class Late(Loop):
        average = None

        def update(self):
            super().update()
            self.average = [p.detach().clone() for p in self.model.parameters()]

    assert ask(loop_spec_of(Late), "average_share").status == "not applicable"


class Swa(Loop):
    """The average of torch, in which each update has the same weight."""

    def __init__(self):
        super().__init__()
        self.average = torch.optim.swa_utils.AveragedModel(self.model)

    def update(self):
        super().update()
        self.average.update_parameters(self.model)


class Wrapped(Loop):
    """The module that averages contains the model and its average."""

    def __init__(self):
        super().__init__()
        self.ema = torch.nn.ModuleDict({"online": self.model, "average": copy.deepcopy(self.model)})

    def update(self):
        super().update()
        with torch.no_grad():
            for mean, p in zip(self.ema["average"].parameters(), self.model.parameters(), strict=True):
                mean.lerp_(p, 0.1)


class Listed(Loop):
    """The tensors of the average are in a list, in the order of the parameters."""

    def __init__(self):
        super().__init__()
        self.average = [p.detach().clone() for p in self.model.parameters()]

    def update(self):
        super().update()
        torch._foreach_lerp_(self.average, [p.detach() for p in self.model.parameters()], 0.05)


class Saved(Loop):
    """The average is a state dict, which contains tied weights twice."""

    def __init__(self):
        super().__init__()
        self.average = {name: value.clone() for name, value in self.model.state_dict().items()}

    def update(self):
        super().update()
        for name, value in self.model.state_dict().items():
            self.average[name].mul_(0.9).add_(value, alpha=0.1)


def variant(**attributes):
    return type("Variant", (Ema,), attributes)


@pytest.mark.parametrize(
    "build",
    [
        Averaged,
        Ema,
        Swa,
        Listed,
        Saved,
        Wrapped,
        variant(decay=0.0),
        variant(decay=0.9999),
        variant(decay=0.99999),
        variant(every=4),
        variant(dtype=torch.bfloat16),
    ],
    ids=[
        "mean",
        "ema",
        "swa",
        "list",
        "state-dict",
        "wrapped",
        "copy",
        "slow",
        "slower",
        "every-fourth",
        "bfloat16",
    ],
)
def test_correct_averages_pass(build):
    assert ask(loop_spec_of(build), "average_share").status == "passed"


def test_weights_that_are_skipped_fail():
    result = ask(average_skips_layers(), "average_share")

    assert result.status == "failed"
    assert result.where.startswith("average.layers.0.")
    assert result.meaning == "These tensors of the average never move, but the other tensors do."


def test_tied_weights_that_move_twice_fail():
    result = ask(average_of_tied_weights_moves_twice(), "average_share")

    assert (result.status, result.where) == ("failed", "average.embedding.weight, step 0")


def test_updates_below_the_rounding_of_bfloat16_fail():
    result = ask(average_in_bfloat16(), "average_share")

    assert result.status == "failed"
    assert "below the rounding" in result.meaning


def test_average_that_is_one_step_late_passes():
    class Late(Ema):
        def update(self):
            self.average_weights()
            Loop.update(self)

    result = ask(loop_spec_of(Late), "average_share")

    assert result.status == "passed"


@pytest.mark.parametrize(("decay", "status"), [(0.9, "passed"), (0.91, "failed"), (0.99, "failed")])
def test_declared_decay(decay, status):
    result = ask(loop_spec_of(Ema), "average_share", average_decay=lambda number: decay)

    assert result.status == status


def test_declared_decay_of_a_mean():
    def decay(number):
        return 1 - 1 / (number + 2)

    assert ask(averaged(), "average_share", average_decay=decay).status == "passed"
    result = ask(averaged(), "average_share", average_decay=lambda number: decay(number + 1))
    assert result.status == "failed"
    assert "declared 0.66" in result.where


def test_decay_that_is_no_function_is_refused():
    with pytest.raises(ValueError, match=r"average_decay: got 0\.9"):
        TrainerSpec.of(averaged(), average_decay=0.9)


def test_tensors_of_an_average_belong_to_parameters():
    names = [name for name, _ in GPT().named_parameters()]

    [(path, paths)] = followers(Averaged()).items()
    assert (path, list(paths)) == ("average", names)
    [(path, paths)] = followers(Swa()).items()
    assert (path, paths[names[0]]) == ("average.module", f"average.module.{names[0]}")
    [(path, paths)] = followers(Listed()).items()
    assert paths == {name: f"average.{place}" for place, name in enumerate(names)}
    run = Averaged()
    run.other = copy.deepcopy(run.model)
    assert set(followers(run)) == {"average", "other"}


class WithoutDots(Loop):
    """The average has buffers, whose names may not contain dots."""

    def __init__(self):
        super().__init__()
        self.average = torch.nn.Module()
        for name, p in self.model.named_parameters():
            self.average.register_buffer(name.replace(".", ""), p.detach().clone())

    def update(self):
        super().update()
        for name, p in self.model.named_parameters():
            getattr(self.average, name.replace(".", "")).lerp_(p.detach(), 0.1)


class Target(Loop):
    """The model is an encoder with a predictor, as in BYOL. The target is a copy of the encoder."""

    def create_model(self):
        model = torch.nn.Module()
        model.encoder = GPT()
        model.predictor = torch.nn.Linear(4, 4)
        model.forward = lambda **batch: model.encoder(**batch)
        return model

    def __init__(self):
        super().__init__()
        self.target = copy.deepcopy(self.model.encoder)

    def update(self):
        super().update()
        for mean, p in zip(self.target.parameters(), self.model.encoder.parameters(), strict=True):
            mean.data.lerp_(p.detach(), 0.1)


class Adapters(Loop):
    """Only two matrices train, and only these are averaged."""

    def create_model(self):
        model = super().create_model()
        for name, p in model.named_parameters():
            p.requires_grad_(name.startswith(("layers.0.q", "layers.1.v")))
        return model

    def __init__(self):
        super().__init__()
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.average = {name: p.detach().clone() for name, p in trained.items()}

    def update(self):
        super().update()
        for name, mean in self.average.items():
            mean.lerp_(self.model.get_parameter(name).detach(), 0.1)


@pytest.mark.parametrize(
    ("build", "path", "pair"),
    [
        (WithoutDots, "average", ("layers.0.q.weight", "average.layers0qweight")),
        (Target, "target", ("encoder.layers.0.q.weight", "target.layers.0.q.weight")),
        (Adapters, "average", ("layers.0.q.weight", "average.layers.0.q.weight")),
    ],
)
def test_averages_with_other_names_or_of_a_part_are_checked(build, path, pair):
    [(found, paths)] = followers(build()).items()
    result = ask(loop_spec_of(build), "average_share")

    assert (found, paths[pair[0]]) == (path, pair[1])
    assert result.status == "passed" and "0.1 to 0.1" in result.meaning, result


def test_average_that_moves_in_each_micro_batch_fails():
    class EachMicroBatch(Ema):
        def accumulate(self, batches):
            result = super().accumulate(batches)
            for _ in batches[1:]:
                self.average_weights()
            return result

    result = ask(loop_spec_of(EachMicroBatch), "average_share")

    assert (result.status, result.where) == ("failed", "accumulate() of 3 micro-batches")


def test_weights_with_a_decay_of_their_own_are_a_warning():
    class Own(Ema):
        @torch.no_grad()
        def average_weights(self):
            weights = dict(self.model.named_parameters())
            for name, mean in self.average.named_parameters():
                mean.lerp_(weights[name], 0.3 if "norm" in name else 0.1)

    result = ask(loop_spec_of(Own), "average_share")

    assert result.status == "warned"
    assert "these weights have a decay of their own" in str(result)


def test_tensors_in_another_order_fail():
    class Exchanged(Ema):
        """Keys and values of the first layer are exchanged in the average."""

        @torch.no_grad()
        def average_weights(self):
            weights = dict(self.model.named_parameters())
            layer = self.model.layers[0]
            weights |= {"layers.0.k.weight": layer["v"].weight, "layers.0.v.weight": layer["k"].weight}
            for name, mean in self.average.named_parameters():
                mean.lerp_(weights[name], 0.1)

    result = ask(loop_spec_of(Exchanged), "average_share")

    assert result.status == "failed"
    assert result.where.startswith("average.layers.0.k.weight, average.layers.0.v.weight")


def test_weights_that_are_changed_after_the_average_pass():
    class Projected(Ema):
        def update(self):
            super().update()
            with torch.no_grad():
                self.model.embedding.weight.div_(self.model.embedding.weight.norm(dim=-1, keepdim=True))

    assert ask(loop_spec_of(Projected), "average_share").status == "passed"


def test_averaged_vector_of_spectral_norm_fails():
    class Normed(GPT):
        def __init__(self):
            super().__init__()
            self.register_buffer("direction", torch.nn.functional.normalize(torch.ones(8), dim=0))

    class Turning(Ema):
        """Turns a unit vector in each step. The average copies it if `copies`, and averages it otherwise."""

        copies = True

        def create_model(self):
            return Normed()

        def average_weights(self):
            super().average_weights()
            turned = self.model.direction * torch.tensor([-1.0, *[1.0] * 7])
            self.model.direction.copy_(torch.nn.functional.normalize(turned.roll(1), dim=0))
            self.average.direction.lerp_(self.model.direction, 1.0 if self.copies else 0.1)

    assert ask(loop_spec_of(Turning), "average_share").status == "passed"
    averages = type("Averages", (Turning,), {"copies": False})
    result = ask(loop_spec_of(averages), "average_share")
    assert (result.status, result.where) == ("failed", "average.direction")


def test_declared_decay_of_one_of_two_averages():
    class Two(Ema):
        def __init__(self):
            super().__init__()
            self.slow = copy.deepcopy(self.average)

        def average_weights(self):
            super().average_weights()
            with torch.no_grad():
                for mean, p in zip(self.slow.parameters(), self.model.parameters(), strict=True):
                    mean.lerp_(p, 0.01)

    for decay, status in ((0.9, "passed"), (0.99, "passed"), (0.5, "failed")):
        result = ask(loop_spec_of(Two), "average_share", average_decay=lambda _, decay=decay: decay)
        assert result.status == status


def test_copy_that_is_no_average_does_not_hide_another_one():
    class Noisy(Ema):
        """The first copy of the weights receives noise, and the second one skips a layer."""

        def __init__(self):
            super().__init__()
            self.average, self.slow = copy.deepcopy(self.average), self.average

        @torch.no_grad()
        def average_weights(self):
            weights = dict(self.model.named_parameters())
            for noisy in self.average.parameters():
                noisy.add_(torch.randn(noisy.shape, generator=torch.Generator().manual_seed(0)))
            for name, mean in self.slow.named_parameters():
                if not name.startswith("layers.0."):
                    mean.lerp_(weights[name], 0.1)

    result = ask(loop_spec_of(Noisy), "average_share")

    assert result.status == "failed"
    assert result.where.startswith("slow.layers.0.")
