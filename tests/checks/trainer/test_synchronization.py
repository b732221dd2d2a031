"""A step that waits: how often, where, and what is no wait."""

import pytest
import torch

from stackwise.checks import check_trainer
from stackwise.subject.trainer_spec import TrainerSpec
from tests.zoo.gpt import GPT
from tests.zoo.loop import bare_step, loop, loop_spec_of
from tests.zoo.optimizer import Masters
from tests.zoo.synchronization import _Waitless, waitless


def ask(subject, **declared):
    [result] = check_trainer(TrainerSpec.of(subject, **declared), checks=["step_waits"])
    return result


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.AdamW,
        lambda p, lr: torch.optim.AdamW(p, lr=lr, fused=True),
        lambda p, lr: torch.optim.AdamW(p, lr=lr, foreach=True),
        lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9),
        torch.optim.RMSprop,
        torch.optim.Adagrad,
        torch.optim.NAdam,
        lambda p, lr: Masters([{"params": list(p)}], lr=lr),
    ],
)
def test_optimizers_of_torch_do_not_wait(optimizer):
    spec = TrainerSpec.from_function(
        bare_step, GPT, lambda model: optimizer(model.parameters(), lr=1e-3), never_waits=True
    )
    result = ask(spec)
    assert (result.status, result.value, result.limit) == ("passed", 0.0, 0.0), result


def test_a_claim_is_kept():
    assert ask(waitless()).status == "passed"

    class Reads(_Waitless):
        def step(self, batch):
            return super().step(batch).item()

    result = ask(loop_spec_of(Reads, never_waits=True))
    assert (result.status, result.value, result.limit) == ("failed", 1.0, 0.0)
    assert "test_synchronization.py" in result.where and ".item()" in result.where
    # One is usual where nothing is claimed.
    result = ask(loop_spec_of(Reads))
    assert (result.status, result.value, result.limit) == ("passed", 1.0, 1.0)


def test_more_than_usual_warns():
    result = ask(loop())
    assert (result.status, result.value) == ("warned", 3.0), "two counts of targets and a loss"
    assert "loop.py" in result.where


def test_a_scaler_reads_once():
    class Scaled(_Waitless):
        init_scale = 2.0**10

    result = ask(loop_spec_of(Scaled))
    assert (result.status, result.value, result.limit) == ("passed", 1.0, 2.0)


def test_what_only_the_first_step_does():
    class Caches(_Waitless):
        first = None

        def step(self, batch):
            loss = super().step(batch)
            if self.first is None:
                self.first = loss.item()
            return loss

    assert ask(loop_spec_of(Caches, never_waits=True)).status == "passed"


def test_copies_to_the_host():
    class Copies(_Waitless):
        def step(self, batch):
            return super().step(batch).cpu()

    result = ask(loop_spec_of(Copies, never_waits=True))
    assert (result.status, result.value) == ("failed", 1.0) and ".cpu()" in result.where


@pytest.mark.parametrize(("arguments", "waits"), [((), True), ((64,), False)], ids=["counted", "given"])
def test_one_hot_waits_only_to_count_classes(arguments, waits):
    def step(model, optimizer, batch):
        torch.nn.functional.one_hot(batch["labels"], *arguments)
        return bare_step(model, optimizer, batch)

    spec = TrainerSpec.from_function(step, GPT, never_waits=True)
    [result] = check_trainer(spec, checks=["step_waits"])

    assert (result.value > 0) is waits, result
