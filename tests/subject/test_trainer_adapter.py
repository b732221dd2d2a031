"""Several optimizers of a run, seen as one."""

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from stackwise.checks import check_trainer
from stackwise.subject.trainer_adapter import JoinedOptimizers, JoinedRun, members_of, with_one_optimizer
from stackwise.subject.trainer_spec import TrainerSpec
from tests.zoo.loop import Loop, loop_spec_of


class Holder:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


def parameters(n):
    return [nn.Parameter(torch.ones(2)) for _ in range(n)]


SGD = torch.optim.SGD(parameters(1), lr=1.0, momentum=0.9)
ADAM = torch.optim.AdamW([{"params": parameters(2)}, {"params": parameters(1), "lr": 0.5}], lr=0.1)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (SGD, [SGD]),
        ([SGD, ADAM], [SGD, ADAM]),
        ((SGD, SGD), [SGD]),
        ({"matrices": SGD, "rest": ADAM}, [SGD, ADAM]),
        (Holder(optimizers=[SGD, ADAM]), [SGD, ADAM]),
        (Holder(muon=SGD, adam=ADAM, name="both"), [SGD, ADAM]),
        (Holder(name="none"), []),
        (None, []),
    ],
    ids=["one", "list", "same-twice", "dict", "object-with-list", "object", "object-without", "none"],
)
def test_optimizers_are_found(given, found):
    assert members_of(given) == found


def test_joined_groups_are_those_of_the_members():
    joined = JoinedOptimizers([SGD, ADAM])

    assert [group["lr"] for group in joined.param_groups] == [1.0, 0.1, 0.5]
    assert joined.param_groups[0] is SGD.param_groups[0]


def test_joined_state_dict_numbers_parameters_consecutively():
    first, second = parameters(1), parameters(2)
    optimizers = [torch.optim.SGD(first, lr=1.0, momentum=0.9), torch.optim.SGD(second, lr=1.0, momentum=0.9)]
    for number, parameter in enumerate([*first, *second]):
        parameter.grad = torch.full((2,), float(number))
    for optimizer in optimizers:
        optimizer.step()

    saved = JoinedOptimizers(optimizers).state_dict()

    assert [group["params"] for group in saved["param_groups"]] == [[0], [1, 2]]
    momenta = {number: state["momentum_buffer"][0].item() for number, state in saved["state"].items()}
    assert momenta == {0: 0.0, 1: 1.0, 2: 2.0}


def test_run_with_one_optimizer_is_returned_as_it_is():
    run = Holder(model=nn.Linear(1, 1), optimizer=SGD, step=float)

    assert with_one_optimizer(run, "run") is run


def test_view_of_several_optimizers_follows_the_run():
    run = Holder(
        model=nn.Linear(1, 1), optimizer=[SGD, ADAM], step=lambda batch: batch + 1, position=lambda: 7
    )

    joined = with_one_optimizer(run, "run")
    run.optimizer = [ADAM, SGD]

    assert joined.optimizer.members == [ADAM, SGD]
    assert (joined.step(1), joined.position(), joined.model) == (2, 7, run.model)
    assert not hasattr(joined, "evaluate")


def test_run_without_an_optimizer_is_refused():
    with pytest.raises(TypeError, match="trainer: mine: optimizer: got NoneType; allowed: "):
        with_one_optimizer(Holder(optimizer=None), "mine")


def test_optimizer_of_accelerate_is_found_without_its_wrapper():
    accelerator = Accelerator(cpu=True)
    wrapped = accelerator.prepare_optimizer(torch.optim.SGD(parameters(1), lr=1.0))

    assert isinstance(wrapped, torch.optim.Optimizer) and wrapped is not wrapped.optimizer
    assert members_of(wrapped) == [wrapped.optimizer]
    assert set(members_of([wrapped, ADAM])) == {wrapped.optimizer, ADAM}
    assert members_of({"inner": wrapped.optimizer, "outer": wrapped}) == [wrapped.optimizer]


class Accelerated(Loop):
    """Loop whose optimizer and scheduler are prepared by accelerate."""

    def create_optimizer(self):
        self.accelerator = Accelerator(cpu=True)
        return self.accelerator.prepare_optimizer(super().create_optimizer())

    def create_scheduler(self):
        inner = torch.optim.lr_scheduler.LambdaLR(self.optimizer.optimizer, self.factor)
        return self.accelerator.prepare_scheduler(inner)


def test_run_with_an_optimizer_of_accelerate_is_checked():
    spec = loop_spec_of(Accelerated)
    names = [
        "parameters_change",
        "learning_rate",
        "separate_updates",
        "interrupted_run",
    ]

    assert isinstance(spec.create(), JoinedRun)
    results = check_trainer(TrainerSpec.of(spec), checks=names)
    assert {result.check: result.status for result in results} == dict.fromkeys(names, "passed")
