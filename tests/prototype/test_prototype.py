"""ArchitecturePrototype on a Rack: the trainer's own numbers, and the verdicts on runs that are broken."""

import json
import math
from contextlib import contextmanager
from itertools import islice

import pytest
import torch

from stackwise.data import create_data
from stackwise.model import create_rack_from_config
from stackwise.prototype import ArchitecturePrototype
from stackwise.prototype import prototype as prototyping
from stackwise.stability.faults import NanInjection, TargetNotReachedError
from stackwise.training import ArchitectureTrainer
from stackwise.training import step as training_step
from stackwise.training.loss_scale import LossScale
from stackwise.training.precision import autocast

TEXT = {"model": {"vocab_size": 256}, "data": {"validation_fraction": 0.0}}
AS_THE_TRAINER = {
    "plain": {},
    "accumulated": {"training": {"accumulation_steps": 3, "batch_size": 1}},
    "schedule": {"training": {"schedule": {"kind": "cosine", "warmup_steps": 2}, "grad_clip": 0.05}},
    "not clipped": {"training": {"grad_clip": None}},
    "dropout": {"model": {"dropout": 0.2}},
    "bf16": {"training": {"precision": "bf16"}},
    "bf16_weights": {"training": {"precision": "bf16_weights"}},
    "muon": {"training": {"optimizer": {"kind": "muon", "lr": 1e-2}}},
    "z_loss": {"training": {"objective": {"z_loss": 1e-3, "logits_chunk": 5}}},
    "recomputed": {"model": {"dropout": 0.2}, "training": {"recompute": {"kind": "full"}}},
    "packed": {"data": {"pack_documents": True}},
    "task": {"data": {"task": "markov"}, "training": {"max_steps": 3, "seed": 5}},
    "masked": {
        "model": {"vocab_size": 257, "attention_mode": "bidirectional"},
        "training": {"objective": {"kind": "masked_token", "mask_token_id": 256}},
    },
    "mup": {"model": {"initialization": "mup", "mup_base_width": 8, "n_kv_heads": 2}},
}


def config_of(make_config, **sections):
    merged = {key: {**TEXT.get(key, {}), **sections.get(key, {})} for key in ("model", "training", "data")}
    return make_config(**merged)


def trained(config):
    torch.manual_seed(config.training.seed)
    rack = create_rack_from_config(config)
    data, validation = create_data(config)
    trainer = ArchitectureTrainer(config, progress=False)
    result = trainer.train_architecture(rack, data)
    validation.set_epoch(0)
    return result["records"], trainer.evaluate(rack, islice(validation, 50))


@pytest.mark.parametrize("sections", AS_THE_TRAINER.values(), ids=AS_THE_TRAINER)
def test_a_run_has_the_numbers_of_the_trainer_to_the_bit(make_config, sections):
    sections = {"training": {}, "data": {}} | sections
    sections["training"] = {"max_steps": 6} | sections["training"]
    sections["data"] = {"validation_fraction": 0.5} | sections["data"]
    config = config_of(make_config, **sections)
    steps = config.training.max_steps
    records, validation_loss = trained(config)
    run = ArchitecturePrototype(config).run(steps, observe_every=2)
    assert list(run.losses) == [record.loss for record in records]
    assert list(run.gradient_norms) == [record.grad_norm for record in records]
    assert list(run.learning_rates) == [record.lr for record in records]
    assert run.tokens == sum(record.tokens for record in records)
    assert run.validation_loss == validation_loss  # of the weights after the last update


def test_validation_is_of_as_many_batches_as_configured(make_config):
    data = {"validation_fraction": 0.5}
    settings = {"eval_interval": 2, "eval_batches": 3, "max_steps": 2}
    config = config_of(make_config, training=settings, data=data)
    torch.manual_seed(0)
    rack = create_rack_from_config(config)
    training, validation = create_data(config)
    trainer = ArchitectureTrainer(config, progress=False)
    result = trainer.train_architecture(rack, training, validation)
    assert ArchitecturePrototype(config).run(2).validation_loss == result["validation"][-1].loss
    validation.set_epoch(0)
    assert trainer.evaluate(rack, islice(validation, 4)) != result["validation"][-1].loss


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_looking_changes_nothing(make_config, dropout):
    config = config_of(make_config, model={"dropout": dropout}, data={"validation_fraction": 0.1})
    prototype = ArchitecturePrototype(config)
    often, rarely = prototype.run(12, observe_every=1), prototype.run(12, observe_every=100)
    assert often.losses == rarely.losses
    assert often.gradient_norms == rarely.gradient_norms
    assert often.validation_loss == rarely.validation_loss
    assert [step for step, _ in often.logit_max] == list(range(12))
    assert [step for step, _ in rarely.logit_max] == [0, 11]
    assert dict(often.attention_entropy)[11] == dict(rarely.attention_entropy)[11]


def test_what_is_observed_is_of_the_weights_that_the_loss_is_of(make_config):
    config = config_of(make_config)
    run = ArchitecturePrototype(config).run(2)
    torch.manual_seed(0)
    rack = create_rack_from_config(config)
    first = next(iter(create_data(config)[0]))["input_ids"]
    with torch.no_grad():
        logits = rack(first[:, :-1])
    assert run.logit_max[0] == (0, pytest.approx(logits.abs().max().item(), rel=1e-6))
    names = ["stacks.0.blocks.0.attention", "stacks.1.blocks.0.attention"]
    assert [list(seen) for _, seen in run.attention_entropy] == [names] * 2
    assert [list(seen) for _, seen in run.attention_logit_max] == [names] * 2


@pytest.mark.parametrize("batch_size", [1, 2, 3])
@pytest.mark.parametrize("source", ["text", "packed", "task"])
def test_micro_batches_make_the_update_of_the_full_batch(make_config, source, batch_size):
    """Packed rows and those of a task differ in how much of them is predicted."""
    data = {"packed": {"pack_documents": True}, "task": {"task": "induction"}}.get(source, {})
    config = config_of(make_config, data=data, training={"grad_clip": None})
    whole = ArchitecturePrototype(config, batch_size=6, effective_batch=6).run(5)
    parts = ArchitecturePrototype(config, batch_size=batch_size, effective_batch=6).run(5)
    assert parts.losses == pytest.approx(whole.losses, rel=2e-6)
    assert parts.gradient_norms == pytest.approx(whole.gradient_norms, rel=1e-4)
    assert parts.tokens == whole.tokens == 5 * 6 * 8


def test_labels_that_are_few_in_one_part_weigh_what_they_are(make_config):
    config = config_of(make_config, training={"grad_clip": None})
    ids = torch.randint(256, (4, 9), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :8] = -100  # one label in the first row, eight in each of the others
    labels[2] = -100  # and none here

    def data(step):
        return {"input_ids": ids, "labels": labels}

    runs = [
        ArchitecturePrototype(config, batch_size=size, effective_batch=4, data=data).run(3)
        for size in (4, 2, 1)
    ]
    for run in runs[1:]:
        assert run.losses == pytest.approx(runs[0].losses, rel=2e-6)
        assert run.gradient_norms == pytest.approx(runs[0].gradient_norms, rel=1e-4)


def test_the_callers_random_state_is_left_alone_and_two_runs_are_equal(make_config):
    prototype = ArchitecturePrototype(config_of(make_config, model={"dropout": 0.1}), seed=3)
    torch.manual_seed(11)
    state = torch.get_rng_state()
    first = prototype.run(4)
    assert torch.get_rng_state().equal(state)
    torch.rand(7)
    assert prototype.run(4).losses == first.losses
    other = ArchitecturePrototype(config_of(make_config, model={"dropout": 0.1}), seed=4).run(4)
    assert other.losses != first.losses


def test_a_shorter_run_has_a_warmup_of_the_same_share(make_config):
    schedule = {"kind": "linear", "warmup_steps": 10}
    config = config_of(make_config, training={"max_steps": 40, "schedule": schedule})
    run = ArchitecturePrototype(config, learning_rate=0.5).run(8)
    assert run.learning_rates == pytest.approx([0.25, 0.5, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0])


def test_a_run_falls_and_is_a_success(make_config):
    config = config_of(
        make_config, data={"task": "copy"}, model={"vocab_size": 4}, training={"batch_size": 16}
    )
    run = ArchitecturePrototype(config).run(60)
    assert (run.status, run.step, run.spikes) == ("success", None, ())
    assert run.final_loss == pytest.approx(sum(run.losses[-6:]) / 6)
    assert run.final_loss < run.losses[0] - 0.3
    assert run.tokens == 60 * 16 * 8
    assert run.seconds > 0 and run.tokens_per_second > 0
    assert "60 steps: a verdict wants at least 1000" in run.notes


@pytest.mark.parametrize("what", ["activations", "gradients"])
def test_a_planted_nan_is_found_at_its_step(make_config, what):
    fault = {
        "activations": NanInjection(step=17, target="activation:embedding"),
        "gradients": NanInjection(step=17, target="gradient"),
    }[what]
    seen = []
    run = ArchitecturePrototype(config_of(make_config)).run(
        100, faults=[fault], on_step=lambda step, loss: seen.append((step, loss))
    )
    assert (run.status, run.step) == ("nan", 17)
    assert len(run.losses) == len(run.gradient_norms) == len(seen) == 18  # and no step more
    assert math.isfinite(run.losses[17]) == (what == "gradients")
    assert not math.isfinite(run.gradient_norms[17])
    assert run.final_loss == math.inf
    assert run.validation_loss is None
    assert max(step for step, _ in run.logit_max) <= 17


def with_loss_scale(monkeypatch, **options):
    """Trainings from here on scale their loss as those in float16 do; the scales, as they are made."""
    made = []

    def scaled(precision, device):
        made.append(LossScale(device, **options))
        return made[-1]

    monkeypatch.setattr(training_step, "create_loss_scale", scaled)
    return made


def test_an_overflow_that_a_smaller_loss_scale_answers_is_no_trouble(make_config, monkeypatch):
    scales = with_loss_scale(monkeypatch)
    faults = [NanInjection(step=5, duration=2, target="gradient")]
    run = ArchitecturePrototype(config_of(make_config)).run(12, faults=faults)
    assert (run.status, run.step, run.left_out) == ("success", None, (5, 6))
    assert len(run.losses) == 12 and all(map(math.isfinite, run.losses))
    assert [math.isfinite(norm) for norm in run.gradient_norms].count(False) == 2
    assert math.isfinite(run.final_loss)
    assert scales[0].state_dict() == {"scale": 2.0**14, "sound_steps": 5}
    text = str(run)
    assert "2 of the updates left out, for a smaller loss scale" in text
    assert f"at most {max(filter(math.isfinite, run.gradient_norms)):.3g}" in text


@pytest.mark.parametrize(
    ("target", "scale"),
    [("activation:embedding", 2.0**16), ("gradient", 2.0**-17)],
    ids=["loss", "exhausted"],
)
def test_what_no_loss_scale_answers_is_the_end(make_config, monkeypatch, target, scale):
    with_loss_scale(monkeypatch, initial=scale)
    run = ArchitecturePrototype(config_of(make_config)).run(12, faults=[NanInjection(step=5, target=target)])
    assert (run.status, run.step, run.left_out) == ("nan", 5, ())
    assert len(run.losses) == 6


@pytest.mark.parametrize("learning_rate, expected", [(3.0, "diverged"), (1e-2, "success")])
def test_a_rate_much_too_high_diverges(make_config, learning_rate, expected):
    settings = {"batch_size": 4, "seq_len": 16, "max_steps": 60, "schedule": {"warmup_steps": 10}}
    config = config_of(make_config, training=settings)
    run = ArchitecturePrototype(config, learning_rate=learning_rate).run(60)
    assert run.status == expected
    assert (run.final_loss == math.inf) == (expected == "diverged")
    if expected == "diverged":
        # By hand: it is above the first loss by a margin from that step on, for all but single steps.
        above = [loss > run.losses[0] + 0.25 for loss in run.losses]
        assert above[run.step] and sum(above[run.step :]) > 0.8 * len(above[run.step :])


def test_a_step_of_wrong_text_is_a_spike_at_that_step(make_config):
    config = config_of(make_config, model={"vocab_size": 64}, training={"batch_size": 4})
    shift = torch.arange(9)

    def counting(step):
        ids = (torch.randint(64, (4, 1), generator=torch.Generator().manual_seed(step)) + shift) % 64
        return ids if step != 150 else ids.flip(1)

    run = ArchitecturePrototype(config, data=counting).run(200, observe_every=200)
    assert (run.status, run.step, run.spikes) == ("spiky", 150, (150,))
    assert run.final_loss < 1.0


def test_a_fault_that_does_not_act_is_an_error(make_config):
    with pytest.raises(TargetNotReachedError, match="the training had 3 steps"):
        ArchitecturePrototype(config_of(make_config)).run(3, faults=[NanInjection(step=17)])


@pytest.mark.parametrize("steps", [1, 2, 3, 25])
def test_every_step_is_told_in_order_and_none_twice(make_config, steps):
    told = []
    run = ArchitecturePrototype(config_of(make_config)).run(
        steps, on_step=lambda step, loss: told.append((step, loss))
    )
    assert told == list(enumerate(run.losses))
    assert len(told) == steps
    assert run.logit_max[-1][0] == steps - 1


def test_what_on_step_raises_ends_the_run_and_passes_through(make_config):
    class PrunedError(Exception):
        pass

    told = []

    def prune(step, loss):
        told.append(step)
        if step == 5:
            raise PrunedError

    state = torch.get_rng_state()
    with pytest.raises(PrunedError):
        ArchitecturePrototype(config_of(make_config)).run(40, on_step=prune)
    assert told == list(range(6))
    assert torch.get_rng_state().equal(state)


def test_no_number_of_a_step_is_read_before_it_is_asked_for(make_config, monkeypatch):
    """On a GPU each `item` would wait for the step."""
    reads = []
    prototype = ArchitecturePrototype(config_of(make_config))
    original = torch.Tensor.__float__
    monkeypatch.setattr(torch.Tensor, "__float__", lambda self: reads.append(1) or original(self))
    monkeypatch.setattr(torch.Tensor, "item", lambda self: reads.append(1) or original(self))
    training = prototype._training(5)
    for step in range(5):
        update = training.update(step)
        assert update.loss.requires_grad is False
    assert reads == []


def test_a_run_as_plain_values(make_config):
    run = ArchitecturePrototype(config_of(make_config)).run_training_step()
    assert len(run.losses) == 10
    values = run.to_dict()
    assert json.loads(json.dumps(values))["losses"] == list(run.losses)
    assert values["status"] == "success"
    text = str(run)
    assert text.startswith("gqa rack, d_model 16, 2 x 1 blocks: success; 10 steps, loss ")
    assert "10 steps: a verdict wants at least 1000" in text
    name, entropy = min(run.attention_entropy[-1][1].items(), key=lambda item: item[1])
    assert f"{entropy:.3g} in {name}" in text
    assert f"at most {max(run.gradient_norms):.3g}" in text


def test_what_is_smaller_than_configured_is_told(make_config):
    config = config_of(make_config, training={"guard": {}, "seq_len": 16, "batch_size": 4})
    notes = ArchitecturePrototype(config, seq_len=8, effective_batch=2).run(2).notes
    assert "seq_len: 8 of the 16 configured; nothing is said of longer ones" in notes
    assert "rows of an update: 2 of the 4 configured; nothing is said of longer ones" in notes
    assert "training.guard is left out: it would hide what is looked for" in notes


@pytest.mark.parametrize(
    "shape, told",
    [
        ((2, 9), []),
        ((2, 17), []),
        ((1, 9), ["data: 2 rows of an update, of the 4 asked for"]),
        ((3, 9), ["data: 6 rows of an update, of the 4 asked for"]),
        (
            (2, 7),
            ["data: rows of 7 positions, of the 8 asked for; nothing is said of longer ones"],
        ),
    ],
)
def test_rows_that_are_others_than_asked_for_are_told(make_config, shape, told):
    config = config_of(make_config)
    prototype = ArchitecturePrototype(config, data=[torch.ones(shape).long()] * 2, effective_batch=4)
    assert [
        note for note in prototype.run(3).notes if note.startswith("data: ") and "pass" not in note
    ] == told


def test_rows_of_a_function_are_looked_at_too_and_the_median_update_counts(make_config):
    shapes = [(1, 9), (4, 9), (4, 9), (4, 5), (2, 9)]
    prototype = ArchitecturePrototype(
        config_of(make_config), data=lambda step: torch.ones(shapes[step]).long(), effective_batch=4
    )
    assert not [note for note in prototype.run(5).notes if note.startswith("data: ")]
    shapes = shapes[:1] * 3
    assert "data: 1 rows of an update, of the 4 asked for" in prototype.run(3).notes


def test_where_nothing_is_to_be_predicted_there_is_no_verdict(make_config):
    ids = torch.arange(18).reshape(2, 9)
    masked, whole = {"input_ids": ids, "labels": torch.full((2, 9), -100)}, {"input_ids": ids}
    prototype = ArchitecturePrototype(config_of(make_config), data=[masked])
    with pytest.raises(
        ValueError, match="data: updates with a token to predict: got 0; allowed: at least one"
    ):
        prototype.run(3)
    run = ArchitecturePrototype(config_of(make_config), data=[whole, masked, whole]).run(3)
    assert run.losses[1] == 0.0 < min(run.losses[::2])
    assert "data: nothing to predict in 1 of 3 updates, whose loss is 0" in run.notes


def test_data_that_can_be_gone_through_once_is_refused(make_config):
    batches = [torch.ones(2, 9).long()]
    with pytest.raises(ValueError, match="data: got 'list_iterator'; allowed: what gives its batches again"):
        ArchitecturePrototype(config_of(make_config), data=iter(batches))


def test_a_learning_rate_keeps_the_ratio_of_those_of_stacks(make_config):
    training = {"optimizer": {"lr": 1e-3, "per_stack": {0: {"lr": 5e-4}}}, "schedule": {"warmup_steps": 0}}
    config = config_of(make_config, training=training)
    prototype = ArchitecturePrototype(config, learning_rate=0.1)
    optimizer = prototype._config.training.optimizer
    assert optimizer.lr == 0.1 and optimizer.per_stack[0].lr == pytest.approx(0.05)
    assert prototype.run(1).learning_rates == pytest.approx((0.1,))


def test_data_that_comes_again_is_told(make_config):
    batches = [torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(i)) for i in range(3)]
    config = config_of(make_config)
    assert not any("pass" in note for note in ArchitecturePrototype(config, data=batches).run(3).notes)
    notes = ArchitecturePrototype(config, data=batches).run(4).notes
    assert "data: in pass 2 over it, so that some is learned by heart" in notes


def test_a_forward_pass_is_measured(make_config):
    found = ArchitecturePrototype(config_of(make_config), batch_size=3).run_forward_pass(
        min_seconds=0.05, min_calls=20, warmup_seconds=0.05
    )
    assert (found.batch_size, found.seq_len) == (3, 8)
    assert found.tokens_per_second == pytest.approx(24 / found.seconds)
    low, high = found.interval
    assert low <= found.seconds <= high
    rack = create_rack_from_config(config_of(make_config))
    assert found.parameters == rack.get_parameter_count()
    assert json.loads(json.dumps(found.to_dict()))["seconds"] == found.seconds
    assert "3 x 8 tokens forward" in str(found)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_weights"])
def test_a_forward_pass_computes_as_the_training_does(make_config, monkeypatch, precision):
    config = config_of(make_config, training={"precision": precision})
    ids = torch.randint(256, (2, 8), generator=torch.Generator().manual_seed(0))
    trained = ArchitecturePrototype(config)._training(1).model.eval()
    with autocast(precision, torch.device("cpu")), torch.no_grad():
        expected = trained(ids)
    seen = []

    def look(workload, **options):
        buffers = zip(workload.model.buffers(), trained.buffers(), strict=True)
        assert all(own.dtype == theirs.dtype for own, theirs in buffers)
        seen.append(prototyping._spec_of(config).logits(workload.model, ids))

    monkeypatch.setattr(prototyping, "measure", look)
    with torch.no_grad():
        ArchitecturePrototype(config).run_forward_pass()
    assert seen[0].dtype == expected.dtype
    assert seen[0].equal(expected)


def test_a_forward_pass_in_float8_is_measured_in_float8(make_config, monkeypatch):
    happened = []

    @contextmanager
    def layers(model):
        happened.append("float8")
        yield
        happened.append("as before")

    monkeypatch.setattr(prototyping, "check_precision", lambda precision, device: None)
    monkeypatch.setattr(prototyping, "float8_layers", layers)
    monkeypatch.setattr(prototyping, "measure", lambda workload, **options: happened.append("measured"))
    ArchitecturePrototype(config_of(make_config, training={"precision": "float8"})).run_forward_pass()
    assert happened == ["float8", "measured", "as before"]


@pytest.mark.parametrize("precision", ["fp16", "float8"])
def test_a_precision_that_the_device_does_not_have_is_refused(make_config, precision):
    config = config_of(make_config, training={"precision": precision})
    with pytest.raises(ValueError, match=rf"training\.precision: got '{precision}'; it needs CUDA"):
        ArchitecturePrototype(config).run_forward_pass()


def test_memory_of_an_update_grows_with_its_rows(make_config):
    config = config_of(make_config, model={"d_ff": 512}, training={"seq_len": 64})
    small, large = (ArchitecturePrototype(config, batch_size=rows).run(2) for rows in (2, 64))
    if small.peak_bytes is None:
        pytest.skip("the kernel does not tell")
    assert large.peak_bytes > small.peak_bytes + 5_000_000


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"seq_len": 0}, "seq_len: got 0"),
        ({"batch_size": 1.5}, "batch_size: got 1.5"),
        ({"effective_batch": True}, "effective_batch: got True"),
        (
            {"batch_size": 4, "effective_batch": 6},
            "effective_batch: got 6; allowed: a multiple of",
        ),
        ({"learning_rate": 0.0}, "learning_rate: got 0.0"),
        ({"learning_rate": math.nan}, "learning_rate: got nan"),
        ({"seed": -1}, "seed: got -1"),
        ({"device": "tpu"}, "device: got 'tpu'"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_arguments_are_refused(make_config, arguments, message):
    with pytest.raises(ValueError, match=message):
        ArchitecturePrototype(config_of(make_config), **arguments)


def test_a_length_beyond_that_of_the_model_is_refused(make_config):
    config = config_of(make_config, model={"max_seq_len": 16})
    with pytest.raises(ValueError, match=r"seq_len: got 17; allowed: at most model\.max_seq_len=16"):
        ArchitecturePrototype(config, seq_len=17)
    ArchitecturePrototype(config, seq_len=16).run(1)


def test_a_configured_length_is_not_that_of_own_data(make_config):
    config = config_of(make_config, model={"max_seq_len": 16}, training={"seq_len": 32})
    with pytest.raises(ValueError, match=r"seq_len: got 32; allowed: at most model\.max_seq_len=16"):
        ArchitecturePrototype(config)
    rows = [torch.zeros(8, 8, dtype=torch.long)]
    ArchitecturePrototype(config, data=rows).run(1)
    with pytest.raises(ValueError, match=r"seq_len: got 17; allowed: at most model\.max_seq_len=16"):
        ArchitecturePrototype(config, seq_len=17, data=rows)


@pytest.mark.parametrize("fraction", [0.0, 0.1])
def test_a_penalty_that_no_validation_leaves_out_is_told(make_config, fraction):
    sections = {"training": {"objective": {"z_loss": 1e-3}}, "data": {"validation_fraction": fraction}}
    run = ArchitecturePrototype(config_of(make_config, **sections)).run(1)
    assert any("z_loss is part of the losses" in note for note in run.notes) == (fraction == 0.0)


@pytest.mark.parametrize(
    "training, message",
    [
        ({"training_architecture": "stackwise"}, "training_architecture: got 'stackwise'"),
        ({"scope": {"growth": True}}, "got 'rackwise with scope.growth'"),
        ({"distributed": {"strategy": "ddp"}}, "strategy: got 'ddp'"),
    ],
    ids=["stackwise", "growth", "ddp"],
)
def test_trainings_that_are_no_single_curve_are_refused(make_config, training, message):
    with pytest.raises(ValueError, match=message):
        ArchitecturePrototype(config_of(make_config, training=training))


def test_a_rack_that_reads_the_answer_is_refused(make_config):
    config = config_of(make_config, model={"attention_mode": "bidirectional"})
    with pytest.raises(ValueError, match="are bidirectional"):
        ArchitecturePrototype(config).run(2)


@pytest.mark.parametrize("steps", [0, -1, 2.0])
def test_steps_are_a_size(make_config, steps):
    with pytest.raises(ValueError, match="steps: got"):
        ArchitecturePrototype(config_of(make_config)).run(steps)


@pytest.mark.parametrize(
    "batch_size, effective_batch, expected",
    [(None, None, (2, 6)), (1, None, (1, 3)), (None, 8, (2, 8)), (None, 5, (1, 5)), (3, 12, (3, 12))],
)
def test_how_rows_are_computed(make_config, batch_size, effective_batch, expected):
    config = config_of(make_config, training={"accumulation_steps": 3})
    prototype = ArchitecturePrototype(config, batch_size=batch_size, effective_batch=effective_batch)
    assert (prototype.batch_size, prototype.effective_batch) == expected
