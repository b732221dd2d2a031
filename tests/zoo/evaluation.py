"""Bugs of evaluation."""

from __future__ import annotations

import math

import torch

from stackwise.subject.trainer_spec import TrainerSpec
from tests.zoo.loop import Loop, loop, loop_spec_of
from tests.zoo.mutant import mutant


def loss(spec: TrainerSpec) -> float:
    """Of two batches, the second with two targets a row."""
    run = spec.create()
    torch.manual_seed(0)
    second = spec.batch(seed=1)
    second["labels"][:, :-2] = -100
    return run.evaluate([spec.batch(), second])


def modes(spec: TrainerSpec) -> list:
    """After an evaluation in the middle of training."""
    run = spec.create()
    run.step(spec.batch())
    run.evaluate([spec.batch()])
    return [module.training for module in run.model.modules()]


def weights_after(spec: TrainerSpec) -> list:
    """After an evaluation and one more step."""
    run = spec.create()
    torch.manual_seed(0)
    run.evaluate([spec.batch()])
    torch.manual_seed(0)
    run.step(spec.batch(seed=1))
    return [p.detach().clone() for p in run.model.parameters()]


@mutant("99", twin=loop, family="evaluation", source="classic", observable=loss)
def eval_mode_not_set():
    """Evaluation runs in train mode, with dropout."""

    class Mutant(Loop):
        @torch.no_grad()
        def evaluate(self, batches):
            total = sum(self.loss(batch).item() * self.targets(batch) for batch in batches)
            return total / sum(self.targets(batch) for batch in batches)

    return loop_spec_of(Mutant)


class _TrainedOnce(Loop):
    """Put into train mode when it is set up, all but the first layer, and never again."""

    def create_model(self):
        model = super().create_model().train()
        model.layers[0].eval()
        return model

    def train_mode(self):
        pass

    def evaluate(self, batches):
        modes = [(module, module.training) for module in self.model.modules()]
        mean = super().evaluate(batches)
        for module, training in modes:
            module.training = training
        return mean


def trained_once():
    """The clean twin that relies on modes staying as they are."""
    return loop_spec_of(_TrainedOnce)


@mutant("99", twin=trained_once, family="sequence", source="classic", observable=modes)
def train_mode_not_restored():
    """After evaluation the model stays in eval mode: dropout is off from then on."""

    class Mutant(_TrainedOnce):
        def evaluate(self, batches):
            mean = super().evaluate(batches)
            self.model.eval()
            return mean

    return loop_spec_of(Mutant)


@mutant("99", twin=trained_once, family="sequence", source="classic", observable=modes)
def all_put_into_train_mode():
    """Evaluation sets every module to train mode at its end, also modules that were in eval mode."""

    class Mutant(_TrainedOnce):
        def evaluate(self, batches):
            mean = super().evaluate(batches)
            self.model.train()
            return mean

    return loop_spec_of(Mutant)


@mutant("99", twin=loop, family="sequence", source="classic", observable=weights_after)
def evaluation_leaves_gradients():
    """Evaluation computes gradients and leaves them for the next step."""

    class Mutant(Loop):
        def evaluate(self, batches):
            for batch in batches:
                self.loss(batch).backward()
            return super().evaluate(batches)

    return loop_spec_of(Mutant)


@mutant("96", twin=loop, family="evaluation", source="transformers#34138", observable=loss)
def mean_of_batch_means():
    """The perplexity is that of the mean of the batches' means."""

    class Mutant(Loop):
        def targets(self, batch):
            return 1 if not self.model.training else super().targets(batch)

    return loop_spec_of(Mutant)


@mutant("96", twin=loop, family="evaluation", source="transformers#30975", observable=loss)
def divided_by_tokens():
    """The sum is divided by T tokens of a row, of which T - 1 are predicted."""

    class Mutant(Loop):
        def evaluate(self, batches):
            predicted = sum(self.targets(batch) for batch in batches)
            return (
                super().evaluate(batches) * predicted / sum(int((b["labels"] != -100).sum()) for b in batches)
            )

    return loop_spec_of(Mutant)


@mutant("96", twin=loop, family="evaluation", source="transformers#34138", observable=loss)
def strided_windows_overlap():
    """Tokens that overlapping windows share are counted in both."""

    class Mutant(Loop):
        def evaluate(self, batches):
            windows = []
            for batch in batches:
                half = batch["input_ids"].shape[1] // 2
                windows += [batch, {key: value[:, half:] for key, value in batch.items()}]
            return super().evaluate(windows)

    return loop_spec_of(Mutant)


@mutant("96", twin=loop, family="evaluation", source="classic", observable=loss)
def last_batch_left_out():
    """The last batch, which may be smaller, is left out."""

    class Mutant(Loop):
        def evaluate(self, batches):
            batches = list(batches)
            return super().evaluate(batches[:-1] if len(batches) > 1 else batches)

    return loop_spec_of(Mutant)


class _Reporting(Loop):
    def perplexity(self, batches):
        return math.exp(self.evaluate(batches))


def reporting():
    """The clean twin that reports its perplexity."""
    return loop_spec_of(_Reporting)


def perplexity(spec: TrainerSpec) -> float:
    """Of two batches, the second with two targets a row."""
    run = spec.create()
    second = spec.batch(seed=1)
    second["labels"][:, :-2] = -100
    return run.perplexity([spec.batch(), second])


@mutant("96", twin=reporting, family="evaluation", source="classic", observable=perplexity)
def mean_of_perplexities():
    """The perplexity is the mean of the perplexities of batches, which is too high."""

    class Mutant(_Reporting):
        def perplexity(self, batches):
            return sum(math.exp(self.evaluate([batch])) for batch in batches) / len(batches)

    return loop_spec_of(Mutant)


@mutant("96", twin=reporting, family="evaluation", source="classic", observable=perplexity)
def perplexity_of_mean_of_means():
    """The loss is exact, and the perplexity that of the mean of the batches' means."""

    class Mutant(_Reporting):
        def perplexity(self, batches):
            return math.exp(sum(self.evaluate([batch]) for batch in batches) / len(batches))

    return loop_spec_of(Mutant)


@mutant("96", twin=reporting, family="evaluation", source="classic", observable=perplexity)
def perplexity_to_base_two():
    """2 is raised to a loss in nats."""

    class Mutant(_Reporting):
        def perplexity(self, batches):
            return 2 ** self.evaluate(batches)

    return loop_spec_of(Mutant)
