"""ArchitecturePrototype on models of others, against training loops written out by hand."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stackwise.data import documentation_text
from stackwise.prototype import ArchitecturePrototype, DivergenceRule, SpikeRule
from stackwise.prototype.spec_training import SpecTraining
from stackwise.stability.faults import GradientExplosion, NanInjection
from stackwise.subject.spec import ModelSpec
from stackwise.support.random_state import seeded


@pytest.fixture
def tiny(subjects):
    def make(vocab_size=29, **declared):
        return ModelSpec.of(
            lambda: subjects.TinyLM(vocab_size=vocab_size), name="tiny", **{"causal": True} | declared
        )

    return make


def batches_of(count, rows=4, length=12, vocab_size=29, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (rows, length), generator=generator) for _ in range(count)]


def norm_of(parameters):
    return math.sqrt(sum(p.grad.double().square().sum().item() for p in parameters))


def by_hand(spec, batches, loss_of, optimizer_of):
    model = spec.create(seed=0).train()
    optimizer = optimizer_of(model.parameters())
    losses, norms = [], []
    with seeded(0):
        for batch in batches:
            loss = loss_of(model, batch)
            loss.backward()
            losses.append(loss.item())
            norms.append(norm_of(model.parameters()))
            optimizer.step()
            optimizer.zero_grad()
    return losses, norms


def test_a_run_is_a_loop_written_out(tiny):
    spec, batches = tiny(), batches_of(6)

    def loss_of(model, ids):
        return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    losses, norms = by_hand(spec, batches, loss_of, lambda p: torch.optim.AdamW(p, lr=1e-3))
    run = ArchitecturePrototype(spec, data=batches).run(6)
    assert run.losses == pytest.approx(losses, rel=1e-6)
    assert run.gradient_norms == pytest.approx(norms, rel=1e-5)
    assert run.learning_rates == (1e-3,) * 6
    assert run.tokens == 6 * 4 * 12
    assert run.validation_loss is None
    assert set(dict(run.attention_entropy)[5]) == {""}  # written out in the model's own forward


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 6])
def test_micro_batches_make_the_update_of_the_full_batch_in_float64(tiny, subjects, batch_size):
    """Rows with one label, with all, and with none."""
    generator = torch.Generator().manual_seed(0)

    def data(step):
        ids = torch.randint(29, (6, 12), generator=torch.Generator().manual_seed(step))
        keep = torch.rand(6, 12, generator=generator) < torch.tensor([0.05, 1.0, 0.5, 0.0, 0.9, 0.2])[:, None]
        keep[0, 5] = True
        return {"input_ids": ids, "labels": ids.masked_fill(~keep, -100)}

    def loss_of(model, batch):
        labels = batch["labels"][:, 1:].flatten()
        return F.cross_entropy(model(batch["input_ids"])[:, :-1].flatten(0, 1), labels, ignore_index=-100)

    steps = [data(step) for step in range(5)]
    spec = tiny(build=lambda: subjects.TinyLM(vocab_size=29).double())
    losses, norms = by_hand(spec, steps, loss_of, spec.optimizer)
    prototype = ArchitecturePrototype(
        spec, batch_size=batch_size, effective_batch=batch_size, data=lambda step: steps[step]
    )
    training = prototype._training(5)
    for step in range(5):
        update = training.update(step)
        assert update.loss.dtype == torch.float64
        assert update.loss.item() == pytest.approx(losses[step], rel=1e-12)
        assert update.grad_norm.item() == pytest.approx(norms[step], rel=1e-6)  # told in float32


def test_padding_is_neither_seen_nor_predicted(tiny, subjects):
    def masked(model, ids, keep):
        return model(ids.masked_fill(~keep, 0))

    ids = batches_of(1, rows=2)[0]
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    run = ArchitecturePrototype(tiny(masked=masked), data=[{"input_ids": ids, "attention_mask": mask}]).run(1)
    model = tiny().create(seed=0)
    with torch.no_grad():
        whole = F.cross_entropy(model(ids[:1])[0, :-1], ids[0, 1:], reduction="sum")
        part = F.cross_entropy(model(ids[1:, :7])[0, :-1], ids[1, 1:7], reduction="sum")
    assert run.losses == (pytest.approx(((whole + part) / (11 + 6)).item(), rel=1e-6),)


def test_a_bidirectional_model_predicts_labels_where_they_are(tiny):
    ids = batches_of(1)[0]
    labels = ids.masked_fill(torch.arange(12) % 4 > 0, -100)
    run = ArchitecturePrototype(tiny(causal=False), data=[{"input_ids": ids, "labels": labels}]).run(1)
    with torch.no_grad():
        logits = tiny().create(seed=0)(ids)
    wanted = F.cross_entropy(logits[:, ::4].flatten(0, 1), ids[:, ::4].flatten())
    assert run.losses == (pytest.approx(wanted.item(), rel=1e-6),)


def test_the_learning_rate_keeps_the_ratio_of_groups(tiny):
    def optimizer(parameters):
        first, *others = parameters
        return torch.optim.SGD([{"params": [first], "lr": 0.2}, {"params": others, "lr": 0.05}])

    prototype = ArchitecturePrototype(tiny(optimizer=optimizer), learning_rate=0.4, data=batches_of(2))
    assert prototype.run(2).learning_rates == (0.4, 0.4)
    groups = prototype._training(2).optimizer.param_groups
    assert [group["lr"] for group in groups] == pytest.approx([0.4, 0.1])


def test_text_is_what_a_vocabulary_of_bytes_is_trained_on(tiny):
    prototype = ArchitecturePrototype(tiny(vocab_size=256), seq_len=24, batch_size=3, effective_batch=6)
    text = documentation_text().encode()
    training = prototype._training(2)
    seen = [bytes(row.tolist()) for batch in training._of(0) for row in batch["input_ids"]]
    assert len(seen) == 6 and all(len(row) == 24 and row in text for row in seen)
    assert not any("random" in note or "Markov" in note for note in prototype.run(2).notes)


def test_a_small_vocabulary_is_trained_on_a_chain_with_a_note(tiny):
    run = ArchitecturePrototype(tiny()).run(3)
    assert any("Markov chain over 29 tokens" in note for note in run.notes)


def test_random_inputs_are_never_taken_without_a_word(tiny):
    own = tiny(
        make_batch=lambda rows, length, generator: torch.randint(5, (rows, length), generator=generator)
    )
    assert "data: batches of the spec's own make_batch" in ArchitecturePrototype(own).run(2).notes
    vectors = ModelSpec.of(nn.Linear(8, 8))
    notes = ArchitecturePrototype(vectors).run(2).notes
    assert any(note.startswith("data: random vectors") for note in notes)
    assert "attention_entropy: no softmax over keys was seen" in notes


def counting(rows=8, length=12, vocab_size=29, wrong=()):
    """Each token is the one before it plus one; in wrong steps it is minus one."""

    def data(step):
        first = torch.randint(vocab_size, (rows, 1), generator=torch.Generator().manual_seed(step))
        return (first + (-1 if step in wrong else 1) * torch.arange(length)) % vocab_size

    return data


def test_a_planted_nan_ends_the_run_at_its_step(tiny):
    run = ArchitecturePrototype(tiny(), data=counting()).run(60, faults=[NanInjection(step=23)])
    assert (run.status, run.step, len(run.losses)) == ("nan", 23, 24)


def test_wrong_labels_are_a_spike_at_their_steps(tiny):
    spec = tiny(optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
    run = ArchitecturePrototype(spec, data=counting(wrong=(120, 160))).run(200, observe_every=200)
    assert (run.status, run.step, run.spikes) == ("spiky", 120, (120, 160))
    assert run.final_loss < 0.5
    assert ArchitecturePrototype(spec, data=counting()).run(200, observe_every=200).status == "success"


def test_exploding_gradients_are_a_spike_right_behind_them(tiny):
    spec = tiny(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5))
    sound = ArchitecturePrototype(spec, data=counting()).run(250, observe_every=250)
    assert sound.status == "success"
    explosion = GradientExplosion(step=150, factor=300.0)
    run = ArchitecturePrototype(spec, data=counting()).run(250, faults=[explosion], observe_every=250)
    assert run.losses[:151] == sound.losses[:151]
    assert run.gradient_norms[150] == pytest.approx(300 * sound.gradient_norms[150], rel=1e-5)
    assert run.status in ("spiky", "diverged")
    assert run.step == 151


def test_a_transformers_configuration_is_trained_and_seen():
    transformers = pytest.importorskip("transformers")
    settings = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    run = ArchitecturePrototype(settings, seq_len=32, batch_size=2, effective_batch=4).run(
        12, observe_every=4
    )
    assert run.status == "success"
    assert run.losses[-1] < run.losses[0]
    assert [step for step, _ in run.attention_entropy] == [0, 4, 8, 11]
    assert list(run.attention_entropy[0][1]) == [f"model.layers.{i}.self_attn" for i in range(2)]
    assert all(0.9 < value <= 1 for value in run.attention_entropy[0][1].values())  # fresh: nearly uniform


def test_of_long_rows_the_beginning_is_looked_at(tiny, monkeypatch):
    monkeypatch.setattr("stackwise.prototype.spec_training._PROBE_POSITIONS", 8)
    monkeypatch.setattr("stackwise.prototype.spec_training._PROBE_TOKENS", 16)
    ids = batches_of(1)[0]
    run = ArchitecturePrototype(tiny(), data=[ids]).run(1)
    assert "observed on the first 8 positions of a row" in run.notes
    with torch.no_grad():
        logits = tiny().create(seed=0)(ids[:2, :8])
    assert run.logit_max == ((0, pytest.approx(logits.abs().max().item(), rel=1e-6)),)


def test_statistics_of_micro_batches_are_told():
    model = nn.Sequential(nn.Embedding(29, 8), nn.Linear(8, 12), nn.BatchNorm1d(16), nn.Linear(12, 29))
    spec = ModelSpec.of(model, causal=False)
    assert any("batch normalisation" in note for note in ArchitecturePrototype(spec).run(2).notes)


class Weight(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, inputs):
        return inputs * self.weight


@pytest.mark.parametrize("scale", [1e-3, 1.0])
def test_a_loss_in_a_unit_of_its_own_diverges_by_how_it_began(scale):
    """Gradient descent with a step that multiplies the weight by -1.05, and with one that halves it."""

    def spec(step):
        return ModelSpec(
            build=Weight,
            name="weight",
            inputs="vectors",
            width=1,
            loss=lambda model, inputs: scale * model.weight.square() / 2,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=step / scale),
        )

    assert ArchitecturePrototype(spec(2.05)).run(40).status == "diverged"
    run = ArchitecturePrototype(spec(0.5)).run(40)
    assert run.status == "success"
    assert any("limits of the verdict" in note for note in run.notes)
    given = ArchitecturePrototype(spec(0.5)).run(40, spike=SpikeRule(), divergence=DivergenceRule())
    assert not any("limits of the verdict" in note for note in given.notes)


@pytest.mark.parametrize("factor, is_told", [(1.0, True), (1e3, False)])
def test_only_limits_that_are_not_those_of_nats_are_told(tiny, factor, is_told):
    spec = tiny(loss=lambda model, x: factor * model(x).square().mean().clamp(0.01, 0.1))
    run = ArchitecturePrototype(spec).run(1)
    assert any("limits of the verdict" in note for note in run.notes) == is_told


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, inputs):
        return self.linear(inputs).square().mean()


def test_a_model_may_return_its_loss():
    spec = ModelSpec(
        build=Mean, name="mean", inputs="vectors", width=4, loss=lambda model, inputs: model(inputs)
    )
    assert ArchitecturePrototype(spec).run(2).status == "success"


def test_nats_are_those_of_tokens_that_are_predicted(tiny):
    told = {}
    for name, spec in (
        ("tokens", tiny()),
        ("own loss", tiny(loss=lambda model, x: model(x).square().mean())),
        ("vectors", ModelSpec.of(lambda: nn.Linear(5, 5))),
        ("few outputs", ModelSpec.of(nn.Sequential(nn.Embedding(29, 8), nn.Linear(8, 3)), width=29)),
    ):
        training = SpecTraining(spec, seq_len=8, batch_size=2)
        training.observe(0)
        told[name] = training.in_nats
    assert told == {"tokens": True, "own loss": False, "vectors": False, "few outputs": False}


@pytest.mark.parametrize(
    "declared, batch, message",
    [
        ({}, {"input_ids": 1, "weights": 1}, "allowed: input_ids, labels, attention_mask"),
        ({}, {"input_ids": 1, "attention_mask": 1}, "no attention_mask: tiny takes none"),
        (
            {"loss": lambda model, x: model(x).square().mean()},
            {"input_ids": 1, "labels": 1},
            "input_ids alone",
        ),
    ],
    ids=["key", "mask", "own loss"],
)
def test_batches_that_cannot_be_trained_on_are_refused(tiny, declared, batch, message):
    data = [{key: torch.ones(2, 8, dtype=torch.int64) for key in batch}]
    with pytest.raises(ValueError, match=message):
        ArchitecturePrototype(tiny(**declared), data=data).run(1)


class Once:
    """A loader that has its batches once."""

    def __init__(self, batches):
        self.left = iter(batches)

    def __iter__(self):
        return self.left


def test_what_ends_is_refused(tiny):
    with pytest.raises(ValueError, match="dataloader: got no batch"):
        ArchitecturePrototype(tiny(), data=Once(batches_of(3))).run(4)
    with pytest.raises(ValueError, match="rows of a batch: got 0"):
        ArchitecturePrototype(tiny(), data=lambda step: torch.zeros(0, 8, dtype=torch.int64)).run(1)


def test_what_does_not_fit_the_model_is_refused(tiny):
    with pytest.raises(ValueError, match="seq_len: got 65; allowed: at most 64 for tiny"):
        ArchitecturePrototype(tiny(max_length=64), seq_len=65)
    told = "seq_len: 16 of the 64 that the model takes; nothing is said of longer ones"
    assert told in ArchitecturePrototype(tiny(max_length=64)).run(1).notes
    with pytest.raises(TypeError, match="got str; wanted"):
        ArchitecturePrototype("tiny")
    frozen = tiny(build=lambda: nn.Embedding(29, 29).requires_grad_(False))
    with pytest.raises(ValueError, match="a model with a parameter that trains"):
        ArchitecturePrototype(frozen).run(1)


def test_rows_that_are_others_than_asked_for_are_told(tiny):
    def told(spec, **asked):
        notes = ArchitecturePrototype(spec, **asked).run(1).notes
        return [note for note in notes if note.startswith(("data: ", "seq_len: ")) and "Markov" not in note]

    batches = batches_of(1, rows=2)
    assert told(tiny(), data=batches) == told(tiny(), data=batches, effective_batch=2, seq_len=12) == []
    assert told(tiny(), data=batches, effective_batch=8, batch_size=8, seq_len=16) == [
        "data: 2 rows of an update, of the 8 asked for",
        "data: rows of 12 positions, of the 16 asked for; nothing is said of longer ones",
    ]
    # Where none is given, it is that of checks: by it nothing was chosen.
    assert told(tiny(seq_len=10), batch_size=2) == [
        "seq_len: 10, as in checks of the model, since none was given; nothing is said of longer ones"
    ]
    assert told(tiny(), batch_size=2, seq_len=16) == []


def test_where_nothing_is_to_be_predicted_there_is_no_verdict(tiny):
    [ids] = batches_of(1)
    masked = {"input_ids": ids, "labels": torch.full_like(ids, -100)}
    with pytest.raises(ValueError, match="data: updates with a token to predict: got 0"):
        ArchitecturePrototype(tiny(), data=[masked]).run(2)
    notes = ArchitecturePrototype(tiny(), data=[masked, ids]).run(2).notes
    assert "data: nothing to predict in 1 of 2 updates, whose loss is 0" in notes


def test_a_length_without_a_loss_is_refused_by_its_name(tiny):
    with pytest.raises(ValueError, match=r"^seq_len: got 1; allowed: an integer >= 2"):
        ArchitecturePrototype(tiny(), seq_len=1)
