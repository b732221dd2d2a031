"""Optimizer: groups, rounding, and memory layouts."""

import pytest
import torch

from stackwise.checks import check_trainer
from stackwise.subject.trainer_spec import TrainerSpec
from tests.zoo.gpt import GPT
from tests.zoo.loop import Loop, loop, loop_spec_of
from tests.zoo.optimizer import Masters, narrow_loop, strided_loop


def ask(subject, check, **declared):
    [result] = check_trainer(TrainerSpec.of(subject, **declared), checks=[check])
    return result


def step(model, optimizer, batch):
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.0),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True, weight_decay=0.0),
    "foreach": lambda p: torch.optim.Adam(p, lr=1e-3, foreach=True, amsgrad=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "rprop": lambda p: torch.optim.Rprop(p),
    "nadam": lambda p: torch.optim.NAdam(p),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sound_optimizers(name):
    spec = TrainerSpec.from_function(step, GPT, lambda model: OPTIMIZERS[name](model.parameters()))
    for result in check_trainer(spec, checks=["optimizer", "step"]):
        assert result.status in ("passed", "not applicable"), result


def test_sound_loop():
    for result in check_trainer(loop(), checks=["optimizer"]):
        assert result.status == "passed" or result.check == "updates_survive_rounding", result


def test_a_second_optimizer_covers_the_rest():
    class Two(Loop):
        def create_optimizer(self):
            vectors = [p for p in self.model.parameters() if p.ndim < 2]
            self.second = torch.optim.SGD(vectors, lr=1e-2)
            return torch.optim.AdamW([p for p in self.model.parameters() if p.ndim >= 2], lr=1e-2)

        def zero_grad(self):
            self.second.step()
            self.model.zero_grad()

    assert ask(loop_spec_of(Two), "parameters_change").status == "passed"


def test_masters_in_the_groups_stand_for_their_weights():
    class Apex(Loop):
        base_lr = 1e-3

        def create_model(self):
            return GPT().bfloat16()

        def create_optimizer(self):
            self.masters = [p.detach().float().requires_grad_() for p in self.model.parameters()]
            return torch.optim.AdamW(self.masters, lr=self.base_lr)

        def update(self):
            weights = list(self.model.parameters())
            for master, p in zip(self.masters, weights, strict=True):
                master.grad = p.grad.float()
            self.optimizer.step()
            with torch.no_grad():
                for master, p in zip(self.masters, weights, strict=True):
                    p.copy_(master)
            self.scheduler.step()
            self.model.zero_grad()

    spec = loop_spec_of(Apex, max_norm=None)
    assert ask(spec, "updates_survive_rounding").status == "passed"
    assert ask(spec, "parameters_change").status == "passed"


def test_decay_of_norms():
    class All(Loop):
        def decays(self, name, p):
            return True

    result = ask(loop_spec_of(All), "weight_decay_groups")
    assert result.status == "failed" and "weight decay that is not declared: 6" in result.meaning
    result = ask(loop_spec_of(All, decayed=None), "weight_decay_groups")
    assert (result.status, result.value) == ("warned", 5)
    assert ask(loop_spec_of(All, decayed=lambda name, p: True), "weight_decay_groups").status == "passed"
    spec = TrainerSpec.from_function(step, GPT, lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
    assert ask(spec, "weight_decay_groups").meaning == "No parameter has weight decay."


def test_updates_of_narrow_weights():
    assert ask(loop(), "updates_survive_rounding").status == "not applicable"
    assert "master weights" in ask(narrow_loop(), "updates_survive_rounding").meaning

    def pure(lr):
        return TrainerSpec.from_function(
            step, lambda: GPT().bfloat16(), lambda m: torch.optim.AdamW(m.parameters(), lr=lr)
        )

    result = ask(pure(1e-4), "updates_survive_rounding")
    assert (result.status, result.value) == ("failed", 0.0)
    assert "norm" in result.where
    # One over 128 is the next number above 1: such updates arrive.
    assert ask(pure(2e-2), "updates_survive_rounding").status == "passed"


def test_stochastic_rounding_needs_no_masters():
    class Stochastic(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        with torch.no_grad():
                            wide = p.float() - group["lr"] * p.grad.float().sign()
                            noise = torch.randint(2**16, p.shape, dtype=torch.int32)
                            bits = (wide.view(torch.int32) + noise) & -(2**16)
                            p.copy_(bits.view(torch.float32))

    spec = TrainerSpec.from_function(
        step, lambda: GPT().bfloat16(), lambda m: Stochastic(m.parameters(), lr=1e-5)
    )
    assert ask(spec, "updates_survive_rounding").status == "passed"


def test_layouts():
    assert ask(loop(), "strided_updates").status == "passed"
    assert ask(strided_loop(), "strided_updates").status == "passed"

    class Copies(Masters):
        """The update goes into the contiguous copy that a kernel asks for."""

        narrow = ()

        def step(self, closure=None):
            kept = {p: p.detach().clone() for g in self.param_groups for p in g["params"]}
            super().step()
            with torch.no_grad():
                for p, value in kept.items():
                    if not p.is_contiguous():
                        p.copy_(value)

    class Lost(Loop):
        def create_optimizer(self):
            return Copies(self.groups(), lr=self.base_lr)

    result = ask(loop_spec_of(Lost), "strided_updates")
    assert (result.status, result.value) == ("failed", pytest.approx(1.0))
    assert "0 times as large" in result.meaning


def test_a_model_whose_weights_may_not_be_strided():
    class Viewing(GPT):
        def embed(self, input_ids):
            return self.embedding.weight.view(-1).view(self.vocab_size, -1)[input_ids]

    result = ask(TrainerSpec.from_function(step, Viewing), "strided_updates")
    assert result.status == "not applicable" and "may be non-contiguous" in result.meaning
