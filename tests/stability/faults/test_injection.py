"""A hand-written loop is broken at the steps that are said, and at no other, and nothing of it stays."""

import json
import types
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from stackwise.stability.faults import (
    BitFlip,
    CorruptSample,
    EmbeddingExplosion,
    Fault,
    GradientExplosion,
    GradientScale,
    HalfOverflow,
    LabelCorruption,
    LogitGrowth,
    LossSpike,
    NanInjection,
    OutOfMemory,
    TargetNotReachedError,
    broken,
)
from tests.optimizer_kinds import Contained
from tests.stability.faults.conftest import Training, differing, hooks_of, same

# Whether the step itself shows it, before its update.
FAULTS = [
    (NanInjection(step=2), True),
    (NanInjection(step=2, target="activation:layers.0.qkv", kind="inf", seed=5), True),
    (NanInjection(step=2, target="gradient"), True),
    (NanInjection(step=2, target="gradient:*head*", kind="inf"), True),
    (NanInjection(step=2, target="loss"), True),
    (NanInjection(step=2, target="weight:layers.1.mlp.1.bias"), True),
    (NanInjection(step=2, target="optimizer_state:*.exp_avg_sq"), False),
    (GradientExplosion(step=2), True),
    (GradientScale(step=2, factor=0.5, target="layers.0.*"), True),
    (LossSpike(step=2), True),
    (LogitGrowth(step=2, factor=8.0), True),
    (EmbeddingExplosion(step=2, target="places"), True),
    (LabelCorruption(step=2, fraction=0.25), True),
    (BitFlip(step=2, seed=1), True),
    (BitFlip(step=2, target="activation:norm", bit=20), True),
    (BitFlip(step=2, target="gradient"), True),
    (BitFlip(step=2, target="optimizer_state:*.exp_avg", seed=3), False),
    (HalfOverflow(step=2), True),
    (HalfOverflow(step=2, target="gradient"), True),
    (CorruptSample(step=2), True),
]


def patched_places():
    return torch.autograd.backward, nn.Module.zero_grad, torch.optim.Optimizer.zero_grad


@pytest.mark.parametrize("fault, at_once", FAULTS, ids=[str(fault) for fault, _ in FAULTS])
def test_the_step_differs_and_those_before_do_not(train, fault, at_once):
    before = patched_places()
    clean, _ = train([])
    training, injection = train([fault])
    assert injection.fired == [2]
    assert [step for step, _ in injection.acted] == [2]
    different = differing(clean.seen, training.seen)
    assert different[0] == 2
    # Loss and gradients of the step itself, or only what its update made of the weights.
    assert same(clean.seen[2][:2], training.seen[2][:2]) != at_once
    assert patched_places() == before


@pytest.mark.parametrize("fault, _at_once", FAULTS, ids=[str(fault) for fault, _ in FAULTS])
def test_it_is_a_function_of_its_seed(train, fault, _at_once):
    runs = [train([fault])[0].seen for _ in range(2)]
    assert same(*runs)


TRANSIENT = [fault for fault, _ in FAULTS if not fault.damages]


def test_what_stays_is_what_is_written_into_weights_and_optimizer():
    assert {fault.target.partition(":")[0] for fault, _ in FAULTS if fault.damages} == {
        "weight",
        "optimizer_state",
        "places",
    }


@pytest.mark.parametrize("fault", TRANSIENT, ids=str)
def test_nothing_is_left_of_what_is_not_written_into_the_model(train, subjects, fault):
    class Still(subjects.TinyLM):
        """Its weights are put back before each pass, so that only hooks could make a step another one."""

        def forward(self, ids):
            if not hasattr(self, "first"):
                self.first = {name: p.detach().clone() for name, p in self.named_parameters()}
            with torch.no_grad():
                for name, parameter in self.named_parameters():
                    parameter.copy_(self.first[name])
            return super().forward(ids)

    runs = [[step[:2] for step in train(faults, make=Still)[0].seen] for faults in ([], [fault])]
    assert differing(*runs) == [2]


@pytest.mark.parametrize("step, duration", [(0, 1), (0, 6), (3, 2), (5, 1), (4, 50)])
@pytest.mark.parametrize("target", ["activation", "gradient", "loss"])
def test_steps_and_duration(train, target, step, duration):
    _, injection = train([NanInjection(step=step, duration=duration, target=target)])
    assert injection.fired == [s for s in range(step, step + duration) if s < 6]
    assert injection.step == 6


def test_faults_are_composed(train):
    clean, _ = train([])
    spikes = [
        GradientExplosion(step=2, factor=2.0),
        LossSpike(step=2, factor=3.0),
        LossSpike(step=4, factor=5.0),
    ]
    training, injection = train(spikes)
    assert injection.fired == [2, 4]
    assert [(step, type(f)) for step, f in injection.acted] == [
        (2, LossSpike),
        (2, GradientExplosion),
        (4, LossSpike),
    ]
    assert training.seen[2][0] == pytest.approx(3 * clean.seen[2][0], rel=1e-6)
    assert training.seen[2][1] == pytest.approx(6 * clean.seen[2][1], rel=1e-5)


def test_two_equal_faults_both_act(train):
    clean, _ = train([])
    training, injection = train([GradientExplosion(step=1, factor=2.0)] * 2)
    assert len(injection.acted) == 2
    assert training.seen[1][1] == pytest.approx(4 * clean.seen[1][1], rel=1e-5)


def test_blocks_within_blocks(train, subjects):
    before = patched_places()
    clean, _ = train([])
    torch.manual_seed(0)
    training = Training(subjects.tiny())
    subject = (training.model, training.optimizer)
    with broken(subject, [GradientExplosion(step=3)]) as outer:
        training.run(1)
        with broken(subject, [LossSpike(step=1)]) as inner:
            training.batches = lambda steps, all_of=training.batches: list(all_of(6))[1 : 1 + steps]
            training.run(3)
    assert (outer.fired, inner.fired) == ([3], [1])
    assert training.seen[2][0] == pytest.approx(10 * clean.seen[2][0], rel=1e-6)
    assert same(training.seen[:2], clean.seen[:2])
    assert patched_places() == before


@pytest.mark.parametrize("micro", [2, 3])
def test_gradients_of_all_micro_batches_are_broken_once(train, micro):
    clean, _ = train([], micro=micro)
    training, injection = train([GradientExplosion(step=2, factor=4.0)], micro=micro)
    assert (injection.fired, injection.step) == ([2], 6)
    # A power of two: without rounding.
    assert training.seen[2][1] == pytest.approx(4 * clean.seen[2][1], rel=1e-12)
    assert differing([s[1] for s in clean.seen], [s[1] for s in training.seen])[0] == 2


def test_micro_batches_of_a_broken_step_are_all_broken(train):
    clean, _ = train([], micro=2)
    training, _ = train([LossSpike(step=2, factor=4.0)], micro=2)
    assert training.seen[2][:2] == pytest.approx([4 * value for value in clean.seen[2][:2]], rel=1e-6)


def test_an_update_that_is_left_out_ends_its_step(train):
    fault = GradientExplosion(step=2, duration=2)
    clean, _ = train([], skipped=(2, 3))
    training, injection = train([fault], skipped=(2, 3))
    assert (injection.fired, injection.step) == ([2, 3], 6)
    assert differing(clean.seen, training.seen) == [2, 3]


def test_a_loop_that_drops_gradients_by_hand_says_when_a_step_is_over(subjects):
    training = Training(subjects.tiny())
    fired = []
    for says in (False, True):
        with broken(training.model, [NanInjection(step=1, target="gradient", duration=9)]) as injection:
            for batch in training.batches(4):
                training.loss(batch).backward()
                for parameter in training.model.parameters():
                    parameter.grad = None
                if says:
                    injection.end_step()
            if not says:
                injection.end_step()
                training.loss(batch).backward()
        fired.append(injection.fired)
    assert fired == [[1], [1, 2, 3]]


def test_the_order_of_backward_and_zero_grad_does_not_matter(subjects):
    model = subjects.tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    training = Training(model, optimizer)
    norms = []
    with broken(model, [GradientExplosion(step=2, factor=1e6)]) as injection:
        for batch in training.batches(5):
            loss = training.loss(batch)
            model.zero_grad()
            loss.backward()
            norms.append(model.head.weight.grad.norm().item())
            optimizer.step()
    assert injection.step == 5
    assert [norm > 1e3 for norm in norms] == [False, False, True, False, False]


def test_two_optimizers_make_one_step(subjects):
    training = Training(subjects.tiny())
    parameters = list(training.model.parameters())
    optimizers = [torch.optim.SGD(parameters[:3], lr=0.1), torch.optim.AdamW(parameters[3:])]
    with broken(training.model, [NanInjection(step=3, target="gradient")]) as injection:
        for batch in training.batches(4):
            training.loss(batch).backward()
            for optimizer in optimizers:
                optimizer.step()
            training.model.zero_grad()
    assert (injection.fired, injection.step) == ([3], 4)


def test_an_optimizer_that_is_found_by_its_first_update(subjects):
    training = Training(subjects.tiny())
    with broken(training.model, [NanInjection(step=1, target="optimizer_state")]) as injection:
        training.run(3)
    [(step, fault)] = injection.acted
    assert step == 1
    name, _, key = fault.target.removeprefix("optimizer_state:").rpartition(".")
    assert key in ("exp_avg", "exp_avg_sq")
    assert training.model.get_parameter(name).isnan().any()


def test_an_optimizer_that_is_not_of_torch(subjects):
    training = Training(subjects.tiny())

    class Plain:
        def __init__(self, parameters):
            self.parameters, self.updates = list(parameters), 0

        def step(self):
            self.updates += 1

        def zero_grad(self):
            for parameter in self.parameters:
                parameter.grad = None

    training.optimizer = optimizer = Plain(training.model.parameters())
    training.skipped = (1,)
    with broken((training.model, optimizer), [NanInjection(step=2, target="loss")]) as injection:
        training.run(4)
    assert (injection.fired, injection.step, optimizer.updates) == ([2], 4, 3)
    assert set(vars(optimizer)) == {"parameters", "updates"}


def test_other_models_are_left_alone(subjects):
    ours, other = Training(subjects.tiny()), Training(subjects.gru(), vocab_size=50)
    twin = Training(subjects.gru(), vocab_size=50)
    twin.model.load_state_dict(other.model.state_dict())
    twin.run(3)
    with broken(ours.model, [LossSpike(step=0), GradientExplosion(step=0, duration=9)]) as injection:
        other.run(3)
        assert injection.step == 0
        ours.run(2)
    assert injection.fired == [0, 1]
    assert same(other.seen, twin.seen)


def test_evaluation_between_steps_is_not_broken(subjects):
    training = Training(subjects.tiny())
    ids = torch.arange(6)[None]
    outputs = []

    def evaluate(_step):
        with torch.no_grad():
            outputs.append(training.model.eval()(ids))
        training.model.train()

    training.before = evaluate
    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.0)
    with broken(training.model, [LogitGrowth(step=1, duration=2)]) as injection:
        training.run(4)
    assert injection.fired == [1, 2]
    assert len(outputs) == 4
    assert all(torch.equal(outputs[0], output) for output in outputs)


def test_a_replay_before_the_step_is_over_is_broken_again(subjects):
    training = Training(subjects.tiny())
    replayed = []
    with broken(training.model, [NanInjection(step=1)]) as injection:
        for batch in training.batches(3):
            training.loss(batch).backward()
            with torch.no_grad():
                replayed.append(bool(training.loss(batch).isnan()))
            training.optimizer.zero_grad()
    assert replayed == [False, True, False]
    assert injection.acted == [(1, NanInjection(step=1, target="activation:layers.1.norm"))]


def test_a_recomputed_module(subjects):
    class Recomputed(subjects.TinyLM):
        def forward(self, ids):
            x = self.tokens(ids)
            for layer in self.layers:
                x = checkpoint(layer["mlp"], x, use_reentrant=False)
            return self.head(x)

    training = Training(Recomputed())
    fault = NanInjection(step=1, target="activation:layers.1.mlp.1", kind="inf")
    with broken(training.model, [fault]) as injection:
        training.run(3)
    assert injection.acted == [(1, fault)]
    assert not hooks_of(training.model)


@pytest.mark.parametrize("in_place", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_compiled_model(subjects, in_place):
    torch.manual_seed(0)
    model = subjects.tiny()
    calls = []

    def backend(graph, _inputs):
        def run(*arguments):
            calls.append(1)
            return graph.forward(*arguments)

        return run

    compiled = model
    if in_place:
        model.compile(backend=backend)
    else:
        compiled = torch.compile(model, backend=backend)
    training = Training(compiled, torch.optim.SGD(model.parameters(), lr=0.0))
    training.loss(next(training.batches(1))).backward()
    calls.clear()
    clean = list(training.run(4))
    training.seen.clear()
    fault = BitFlip(step=2, target="activation:layers.0.mlp", bit=20)
    calls.clear()
    with broken((compiled, training.optimizer), [fault]) as injection:
        training.run(4)
    assert injection.acted == [(2, fault)]
    assert differing(clean, training.seen) == [2]
    assert len(calls) >= 3, "the other steps run compiled"
    assert not hooks_of(model)


def test_a_model_that_computes_its_loss(subjects):
    class WithLoss(subjects.TinyLM):
        def forward(self, input_ids, labels):
            logits = super().forward(input_ids)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            return types.SimpleNamespace(loss=loss, logits=logits)

    seen = []
    for faults in ([], [LossSpike(step=1, factor=2.0)], [LabelCorruption(step=1)], [CorruptSample(step=1)]):
        torch.manual_seed(0)
        training = Training(WithLoss())
        losses = []
        with broken(training.model, faults) as injection:
            for batch in training.batches(3):
                # Before the backward pass: what a loop logs.
                loss = training.model(**batch).loss
                losses.append(loss.item())
                loss.backward()
                training.optimizer.zero_grad()
        assert injection.fired == ([1] if faults else [])
        seen.append(losses)
    clean, spike, labels, sample = seen
    assert spike == [clean[0], 2 * clean[1], clean[2]]
    for other in (labels, sample):
        assert differing(clean, other) == [1]


def test_scaled_losses(subjects):
    training = Training(subjects.tiny())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    steps = []
    with broken(training.model, [NanInjection(step=1, target="loss")]) as injection:
        for batch in training.batches(3):
            scaler.scale(training.loss(batch)).backward()
            scaler.step(training.optimizer)
            scaler.update()
            training.optimizer.zero_grad()
            steps.append(scaler.get_scale())
    # The scaler leaves the update out by itself, and the step is over all the same.
    assert (injection.fired, injection.step) == ([1], 3)
    assert steps == [8.0, 4.0, 4.0]


@pytest.mark.parametrize(
    "fault, key",
    [
        (NanInjection(step=0, target="activation:nope"), "target"),
        (NanInjection(step=0, target="gradient:nope"), "target"),
        (NanInjection(step=0, target="weight:nope"), "target"),
        (GradientExplosion(step=0, target="nope.*"), "target"),
        (EmbeddingExplosion(step=0, target="head"), "target"),
        (LogitGrowth(step=0, target="nope"), "target"),
        (OutOfMemory(step=0, target="nope"), "target"),
        (BitFlip(step=0, target="weight:nope"), "target"),
        (HalfOverflow(step=0, target="activation:nope"), "target"),
    ],
    ids=str,
)
def test_what_has_no_target_is_refused_before_anything_runs(subjects, fault, key):
    model = subjects.tiny()
    before = patched_places()
    refused = pytest.raises(ValueError, match=rf"^{fault.name}: {key}: got .*which matches nothing; ")
    with refused, broken(model, [fault]):
        raise AssertionError("it began")
    assert patched_places() == before
    assert not hooks_of(model)


def test_a_target_that_is_not_reached(subjects):
    class Idle(subjects.TinyLM):
        def __init__(self):
            super().__init__()
            self.idle = nn.Linear(2, 2)

    training = Training(Idle())
    with (
        pytest.raises(ValueError, match=r"idle'\): it did not act at step 1: its target was not reached"),
        broken(training.model, [NanInjection(step=1, target="activation:idle")]),
    ):
        training.run(3)
    assert not hooks_of(training.model)
    assert len(training.seen) == 1


class Zeros(nn.Module):
    """All of `first` is multiplied by 0, and so are its gradients; the table is one of zeros."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 4)
        nn.init.zeros_(self.table.weight)
        self.first, self.q_proj, self.last = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 1)

    def forward(self, ids):
        x = self.table(ids)
        return self.last(self.first(x) * 0 + self.q_proj(x)).square().mean()


def of_zeros(fault, *, loss_factor=1.0, steps=3):
    """A training of Zeros: (weights at the end, steps at which the fault acted)."""
    torch.manual_seed(0)
    model = Zeros()
    model.table.weight.requires_grad_(fault.name == "bit_flip")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with broken((model, optimizer), [fault] if fault else []) as injection:
        for _ in range(steps):
            (model(torch.arange(6)) * loss_factor).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach() for p in model.parameters()], injection.fired


@pytest.mark.parametrize(
    "fault, loss_factor",
    [
        (GradientExplosion(step=1, target="first.*", factor=1000.0), 1.0),
        (GradientScale(step=1, target="first.*", factor=0.5), 1.0),
        (HalfOverflow(step=1, target="gradient:first.weight"), 1.0),
        (HalfOverflow(step=1, target="activation:q_proj"), 1.0),
        (EmbeddingExplosion(step=1), 1.0),
        (LogitGrowth(step=1), 1.0),
        (LossSpike(step=1), 0.0),
    ],
    ids=str,
)
def test_what_changes_nothing_has_not_acted(fault, loss_factor):
    with pytest.raises(TargetNotReachedError, match=r"did not act at step 1: .* or cannot be changed by it"):
        of_zeros(fault, loss_factor=loss_factor)


@pytest.mark.parametrize(
    "fault",
    [
        GradientExplosion(step=1, target="last.*"),
        GradientExplosion(step=1),  # of which some are zeros
        BitFlip(step=1, target="gradient:first.weight", bit=31),  # of a zero, to -0
        HalfOverflow(step=1, target="gradient:last.bias"),
        NanInjection(step=1, duration=2, target="weight:last.weight"),  # at its second step it is there
        GradientExplosion(step=1, duration=2, target="last.*", factor=1e38),  # infinite at the second
        LossSpike(step=1),
    ],
    ids=str,
)
def test_what_changes_a_bit_or_is_no_number_has_acted(fault):
    assert of_zeros(fault)[1] == list(fault.steps)


@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_the_query_of_attention(scale):
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x):
            return self.attention(x * scale, x, value=x)[0].sum()

    model = Attends()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    refused = pytest.raises(TargetNotReachedError) if scale == 0 else nullcontext()
    with refused, broken((model, optimizer), [LogitGrowth(step=0)]) as injection:
        model(torch.ones(1, 2, 4)).backward()
        optimizer.step()
    assert injection.fired == ([] if scale == 0 else [0])


def test_sparse_gradients():
    table = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    before = table.weight.detach().clone()
    with broken((table, optimizer), [GradientExplosion(step=0, factor=8.0)]) as injection:
        table(torch.tensor([1, 1, 3])).sum().backward()
        optimizer.step()
    assert injection.fired == [0]
    moved = (before - table.weight.detach())[:, 0]
    assert moved.tolist() == pytest.approx([0, 16, 0, 8, 0])


@pytest.mark.parametrize("fault", [NanInjection(step=4), LabelCorruption(step=9)], ids=str)
def test_a_training_that_is_too_short(subjects, fault):
    training = Training(subjects.tiny())
    with (
        pytest.raises(ValueError, match=r"it did not act; the training had 3 steps"),
        broken(training.model, [fault]) as injection,
    ):
        training.run(3, injection.batches(training.batches(3)))


@pytest.mark.parametrize("fault", [LabelCorruption(step=1), CorruptSample(step=1)], ids=str)
def test_batches_that_are_not_seen(subjects, fault):
    class Words(subjects.TinyLM):
        def forward(self, words):
            return super().forward(words.ids)

    training = Training(Words())
    training.loss = lambda batch: training.model(types.SimpleNamespace(ids=batch["input_ids"])).mean()
    with pytest.raises(ValueError, match=r"labels|rows"), broken(training.model, [fault]):
        training.run(3)


def test_batches_with_no_labels_of_their_own(train):
    with pytest.raises(
        ValueError, match=r"label_corruption: needs a batch with labels.*it has a tensor \(int64\)"
    ):
        train([LabelCorruption(step=1)], through_loader=False)


def test_an_error_of_the_training_is_not_covered_and_leaves_nothing(subjects):
    training = Training(subjects.tiny())
    before = patched_places()

    def fail(step):
        if step == 2:
            raise KeyError("of the loop")

    training.before = fail
    with pytest.raises(KeyError, match="of the loop"), broken(training.model, [NanInjection(step=5)]):
        training.run(4)
    assert patched_places() == before
    assert not hooks_of(training.model)


def test_an_error_in_the_middle_of_a_broken_step_leaves_nothing(subjects):
    training = Training(subjects.tiny())
    before = patched_places()

    def loss(batch):
        training.model(batch["input_ids"])
        assert hooks_of(training.model)
        raise KeyError("of the loop")

    training.loss = loss
    with pytest.raises(KeyError, match="of the loop"), broken(training.model, [NanInjection(step=0)]):
        training.run(1)
    assert patched_places() == before
    assert not hooks_of(training.model)


def test_a_fault_that_fails_leaves_nothing(subjects):
    class Fails(Fault):
        name = "fails"

        def before_step(self, model, optimizer, acted):
            raise RuntimeError("as it acts")

    training = Training(subjects.tiny())
    with (
        pytest.raises(RuntimeError, match="as it acts"),
        broken(training.model, [NanInjection(step=0), Fails(0)]),
    ):
        training.run(1)
    assert not hooks_of(training.model)


def test_the_journal_has_each_action(train, subjects, tmp_path):
    training = Training(subjects.tiny())
    faults = [NanInjection(step=1, target="loss", duration=2), GradientExplosion(step=2)]
    with broken(training.model, faults, journal=tmp_path / "journal") as injection:
        training.run(4)
    lines = [json.loads(line) for line in (tmp_path / "journal").read_text().splitlines()]
    assert [(line["step"], line["fault"]) for line in lines] == [(s, str(f)) for s, f in injection.acted]
    assert [(line["step"], line["number"]) for line in lines] == [(1, 0), (2, 0), (2, 1)]


@pytest.mark.parametrize(
    "subject", [None, "model", (1, 2), [nn.Linear(1, 1)], (nn.Linear(1, 1), "optimizer")]
)
def test_subjects_that_are_refused(subject):
    refused = pytest.raises(TypeError, match=r"^broken: got (NoneType|str|tuple|list); wanted a module")
    with refused, broken(subject, []):
        pass


def test_a_loader_is_a_loader_still(subjects):
    rows = [{"input_ids": torch.arange(8) + i, "labels": torch.arange(8) + i} for i in range(8)]
    loader = torch.utils.data.DataLoader(rows, batch_size=4)
    training = Training(subjects.tiny())
    epochs = []
    with broken(training.model, [CorruptSample(step=1, duration=2)]) as injection:
        wrapped = injection.loader(loader)
        assert (len(wrapped), wrapped.batch_size, wrapped.dataset) == (2, 4, rows)
        for _ in range(2):
            epochs.append([])
            for batch in wrapped:
                epochs[-1].append(batch["input_ids"])
                training.loss(batch).backward()
                training.optimizer.step()
                training.optimizer.zero_grad()
    clean = [batch["input_ids"] for batch in loader]
    changed = [not torch.equal(a, b) for epoch in epochs for a, b in zip(epoch, clean, strict=True)]
    assert changed == [False, True, True, False]
    assert injection.fired == [1, 2]


def test_states_within_a_container_are_reached(subjects):
    training = Training(subjects.tiny())
    training.optimizer = Contained(training.optimizer)
    fault = NanInjection(step=2, target="optimizer_state:*.exp_avg")
    with broken((training.model, training.optimizer), [fault]) as injection:
        training.run(4)
    assert injection.fired == [2]
    assert any(p.isnan().any() for p in training.model.parameters())
