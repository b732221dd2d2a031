"""Evaluation: modes, state, and the mean over targets."""

import math

import pytest
import torch
import torch.nn.functional as F

from stackwise.checks import check_trainer
from stackwise.subject.trainer_spec import TrainerSpec
from tests.zoo.gpt import GPT
from tests.zoo.loop import Loop, loop, loop_spec_of
from tests.zoo.schedule_free import EvaluatesTheAverage, optimizer_stays_in_train_mode, schedule_free


def ask(subject, check, **declared):
    [result] = check_trainer(TrainerSpec.of(subject, **declared), checks=[check])
    return result


def test_sound():
    result = ask(loop(), "evaluation_exact")
    assert result.status == "passed" and result.value <= result.limit
    spec = TrainerSpec.from_function(lambda model, optimizer, batch: None, GPT)
    assert ask(spec, "evaluation_exact").meaning == "needs evaluate(batches)"


def test_the_exact_value():
    """The check's reference against one written out row by row."""

    class Half(Loop):
        def evaluate(self, batches):
            return super().evaluate(batches) / 2

    result = ask(loop_spec_of(Half), "evaluation_exact")
    assert (result.status, result.value) == ("failed", pytest.approx(0.5, rel=1e-5))
    spec = loop()
    run, batch = spec.create(), spec.batch()
    run.model.eval()
    total, count = 0.0, 0
    for ids in batch["input_ids"]:
        with torch.no_grad():
            log_p = F.log_softmax(run.model(ids[None]).logits[0].double(), dim=-1)
        total -= sum(float(log_p[t, ids[t + 1]]) for t in range(len(ids) - 1))
        count += len(ids) - 1
    assert run.evaluate([batch]) == pytest.approx(total / count, rel=1e-6)


def test_dropout_in_evaluation():
    class Training(Loop):
        @torch.no_grad()
        def evaluate(self, batches):
            total = sum(self.loss(batch).item() * self.targets(batch) for batch in batches)
            return total / sum(self.targets(batch) for batch in batches)

    assert ask(loop_spec_of(Training), "evaluation_exact").status == "failed"

    class NoDropout(Training):
        def create_model(self):
            model = GPT()
            model.dropout = 0.0
            return model

    assert ask(loop_spec_of(NoDropout), "evaluation_exact").status == "passed"


def test_narrow_runs_are_given_their_rounding():
    class Autocast(Loop):
        def loss(self, batch):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().loss(batch)

    result = ask(loop_spec_of(Autocast), "evaluation_exact")
    assert (result.status, result.limit) == ("passed", 1e-2)


def test_models_without_logits():
    class Hidden(GPT):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            return (output.loss,)

    class Loss(Loop):
        def create_model(self):
            return Hidden()

        def loss(self, batch):
            return self.model(**batch)[0]

        def targets(self, batch):
            return 1 if self.unequal and not self.model.training else super().targets(batch)

        unequal = False

    assert ask(loop_spec_of(Loss), "evaluation_exact").status == "passed"
    unequal = type("Unequal", (Loss,), {"unequal": True})
    for ignored, status in ((-100, "failed"), (None, "warned")):
        assert ask(loop_spec_of(unequal, ignored_label=ignored), "evaluation_exact").status == status


def reporting(function, **attributes):
    return loop_spec_of(type("Reporting", (Loop,), {"perplexity": function, **attributes}))


def test_a_perplexity_is_exp_of_the_mean():
    result = ask(reporting(lambda run, batches: math.exp(run.evaluate(batches))), "perplexity_exact")
    assert result.status == "passed" and result.value < 1e-6
    assert "needs perplexity(batches)" in ask(loop(), "perplexity_exact").meaning


@pytest.mark.parametrize(
    "function, said",
    [
        (lambda run, b: sum(math.exp(run.evaluate([x])) for x in b) / len(b), "mean of the perplexities"),
        (
            lambda run, b: math.exp(sum(run.evaluate([x]) for x in b) / len(b)),
            "exp of the mean of the losses of batches",
        ),
        (lambda run, b: 2 ** run.evaluate(b), "2 to the power"),
        (lambda run, b: run.evaluate(b), "the loss itself"),
        (lambda run, b: 17.0, "exp of the mean over all targets"),
    ],
)
def test_other_perplexities(function, said):
    result = ask(reporting(function), "perplexity_exact")
    assert result.status == "failed" and said in result.meaning


def test_a_perplexity_where_a_loss_is_wanted():
    class Exponential(Loop):
        def evaluate(self, batches):
            return math.exp(super().evaluate(batches))

    result = ask(loop_spec_of(Exponential), "evaluation_exact")
    assert result.status == "failed" and "evaluation loss is exp of this mean" in result.meaning


@pytest.mark.parametrize("averages", [False, True])
def test_a_loss_that_is_divided_by_the_number_of_labels(averages):
    """As transformers 5.23 divides it for GPT2LMHeadModel, whose loss_type is None (pull request 46204)."""

    class ByLabels(Loop):
        averages_batches = ("evaluate",) if averages else ()

        def evaluate(self, batches):
            counts = [float((batch["labels"] != -100).sum()) for batch in batches]
            targets = [float((batch["labels"][:, 1:] != -100).sum()) for batch in batches]
            means = [Loop.evaluate(self, [batch]) for batch in batches]
            sums = [mean * n for mean, n in zip(means, targets, strict=True)]
            if averages:
                return sum(total / n for total, n in zip(sums, counts, strict=True)) / len(sums)
            return sum(sums) / sum(counts)

    result = ask(loop_spec_of(ByLabels), "evaluation_exact")
    assert result.status == "failed" and "divided by the number of labels" in result.meaning


class Routed(GPT):
    """Its loss has a part that is none of targets, and does not add up over batches."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.aux_loss = 0.01 + output.logits.mean(dim=(0, 1)).square().sum()
        if output.loss is not None:
            output.loss = output.loss + output.aux_loss
        return output


class RoutedLoop(Loop):
    def create_model(self):
        return Routed()


def test_an_auxiliary_loss_is_told_and_no_fault():
    result = ask(loop_spec_of(RoutedLoop), "evaluation_exact")
    assert (result.status, "auxiliary loss" in result.advice) == ("warned", True), result

    class Half(RoutedLoop):
        def evaluate(self, batches):
            return super().evaluate(batches) / 2

    assert ask(loop_spec_of(Half), "evaluation_exact").status == "failed"


class MeanOfMeans(Loop):
    """Gives each batch the same weight."""

    @torch.no_grad()
    def evaluate(self, batches):
        self.model.eval()
        losses = [self.loss(batch).item() for batch in batches]
        self.model.train()
        return sum(losses) / len(losses)


def test_mean_of_batches_is_a_warning_if_it_is_declared():
    assert ask(loop_spec_of(MeanOfMeans), "evaluation_exact").status == "failed"
    declared = type("Declared", (MeanOfMeans,), {"averages_batches": ("evaluate",)})
    assert ask(loop_spec_of(declared), "evaluation_exact").status == "warned"


class Masked(GPT):
    """Sees all positions, and its labels are those of the same position, as in BERT."""

    def forward(self, input_ids, attention_mask=None, labels=None):
        output = super().forward(input_ids, attention_mask)
        output.logits = output.logits + output.logits.mean(dim=1, keepdim=True)
        if labels is not None:
            output.loss = F.cross_entropy(output.logits.flatten(0, 1), labels.flatten())
        return output


class MaskedLoop(Loop):
    def create_model(self):
        return Masked()

    @torch.no_grad()
    def evaluate(self, batches):
        self.model.eval()
        losses = [(self.loss(batch).item(), int((batch["labels"] != -100).sum())) for batch in batches]
        self.model.train()
        return sum(loss * n for loss, n in losses) / sum(n for _, n in losses)


def test_masked_model_is_not_compared_with_shifted_labels():
    assert ask(loop_spec_of(MaskedLoop), "evaluation_exact").status == "passed"


def test_masked_model_with_a_wrong_mean():
    class Half(MaskedLoop):
        def evaluate(self, batches):
            return sum(super(Half, self).evaluate([batch]) for batch in batches) / len(batches)

    assert ask(loop_spec_of(Half), "evaluation_exact").status == "failed"


class RandomMasks(MaskedLoop):
    """Its loss masks random tokens, and takes the loss of these."""

    def loss(self, batch):
        ids = batch["input_ids"]
        is_masked = torch.rand(ids.shape) < 0.5
        is_masked[:, 0] = True
        logits = self.model(ids.masked_fill(is_masked, 0)).logits
        labels = batch["labels"].masked_fill(~is_masked, -100)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_random_masks_are_no_finding():
    result = ask(loop_spec_of(RandomMasks), "evaluation_exact")
    assert (result.status, "masks no random tokens" in result.meaning) == ("not applicable", True)


def test_masked_model_without_a_loss_method():
    class WithoutLoss(MaskedLoop):
        loss = None

        def step(self, batch):
            self.loss_of(batch).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

        def loss_of(self, batch):
            return self.model(**batch).loss

        @torch.no_grad()
        def evaluate(self, batches):
            self.model.eval()
            losses = [(self.loss_of(batch).item(), int((batch["labels"] != -100).sum())) for batch in batches]
            self.model.train()
            return sum(loss * n for loss, n in losses) / sum(n for _, n in losses)

    assert ask(loop_spec_of(WithoutLoss), "evaluation_exact").status == "passed"


def test_weights_of_a_schedule_free_optimizer():
    result = ask(schedule_free(), "evaluation_weights")
    assert result.status == "passed" and result.value < 1e-4
    result = ask(optimizer_stays_in_train_mode(), "evaluation_weights")
    assert result.status == "failed" and result.value == pytest.approx(1, rel=1e-4)


def test_weights_of_some_calls_of_an_evaluation():
    """A run may log the loss of both kinds of weights, so this is only a warning."""

    class Both(EvaluatesTheAverage):
        def evaluate(self, batches):
            Loop.evaluate(self, batches)
            return super().evaluate(batches)

    result = ask(loop_spec_of(Both, learning_rate=None, decayed=None), "evaluation_weights")
    assert result.status == "warned"


def test_weights_of_an_optimizer_without_modes():
    assert "train() and eval()" in ask(loop(), "evaluation_weights").meaning


def test_weights_of_modes_that_change_nothing():
    """A wrapper such as accelerate's has the methods for each optimizer."""

    class Wrapped(torch.optim.SGD):
        def train(self):
            pass

        def eval(self):
            pass

    class Plain(Loop):
        def create_optimizer(self):
            return Wrapped(self.model.parameters(), lr=0.1)

    assert "changes the weights" in ask(loop_spec_of(Plain), "evaluation_weights").meaning
