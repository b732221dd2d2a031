"""Short training runs of many models, sound and broken: what is noticed, where, and what is kept."""

import json
import math

import pytest
import torch
from torch import nn

from stackwise.stability import (
    Alarm,
    GradientExplosion,
    GuardPolicy,
    NanInjection,
    StabilityRun,
    StepRecord,
    stability_run,
)
from stackwise.stability.faults import GradientScale
from stackwise.subject.spec import ModelSpec

# Model: a module that forward() calls, and a parameter.
MODELS = {
    "rack": ("stacks.1.blocks.0.attention.qkv", "stacks.0.blocks.1.feedforward.up.weight"),
    "llama": ("model.layers.0.mlp.down_proj", "model.layers.1.self_attn.k_proj.weight"),
    "x_decoder": ("attn_layers.layers.1.1.ff.0.0", "attn_layers.layers.0.1.to_q.weight"),
    "gru": ("recurrence", "recurrence.weight_hh_l0"),
    "encoder": ("layers.1.linear1", "layers.0.self_attn.in_proj_weight"),
}
STEPS = 10
SLOW = pytest.mark.slow
SOME_MODELS = [
    pytest.param(name, marks=SLOW) if name in ("x_decoder", "encoder") else name for name in MODELS
]


@pytest.fixture(scope="module")
def specs(subjects):
    return {name: ModelSpec.of(getattr(subjects, name)) for name in MODELS}


def keeping(spec, kept):
    """The same spec; after a run, `kept` has the parameters that were trained."""

    def optimizer(parameters):
        kept[:] = parameters
        return torch.optim.AdamW(kept, lr=1e-3)

    return ModelSpec.of(spec, optimizer=optimizer)


def bare_loop(spec, steps, *, skipped=(), fault=None, batch_size=8, seed=0):
    """The same training without guard or harness; `skipped` steps make no update at all."""
    model = spec.create(seed=seed).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, norms = [], []
    for step in range(steps):
        inputs = spec.batch(batch_size, spec.seq_len, seed=seed + 1 + step)
        torch.manual_seed(seed + 1 + step)
        optimizer.zero_grad()
        loss = spec.loss_of(model, inputs)
        loss.backward()
        if fault is not None and step in fault.steps:
            fault.on_gradients(model, lambda: None)
        gradients = [p.grad.double().flatten() for p in model.parameters() if p.grad is not None]
        losses.append(loss.item())
        norms.append(torch.cat(gradients).norm().item())
        if step not in skipped:
            optimizer.step()
    return [p.detach() for p in model.parameters()], losses, norms


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=SLOW), pytest.param(2, marks=SLOW)])
def test_clean_runs_are_stable(specs, name, seed):
    run = stability_run(specs[name], steps=STEPS, seed=seed)
    assert (run.verdict, run.alarms, run.fired) == ("stable", [], [])
    assert [r.step for r in run.records] == list(range(STEPS))
    assert not any(r.skipped for r in run.records)
    assert {r.lr for r in run.records} == {1e-3}
    assert run.finite
    assert run.recovered
    assert (run.model, run.seq_len) == (specs[name].name, 16)


@pytest.mark.parametrize("name", ["dropout_rack", "gpt2", "conv"])
def test_more_clean_runs(subjects, name):
    assert stability_run(ModelSpec.of(getattr(subjects, name)), steps=STEPS).verdict == "stable"


@pytest.mark.parametrize("name", MODELS)
def test_a_clean_run_is_plain_training(specs, name):
    kept = []
    run = stability_run(keeping(specs[name], kept), steps=4)
    weights, losses, norms = bare_loop(specs[name], 4)
    assert [r.loss for r in run.records] == losses
    assert [r.grad_norm for r in run.records] == pytest.approx(norms, rel=1e-4)
    assert same(kept, weights)


@pytest.mark.parametrize(
    "name, kind",
    [
        *((name, "nan") for name in MODELS),
        *((name, "inf") if name == "gru" else pytest.param(name, "inf", marks=SLOW) for name in MODELS),
    ],
)
@pytest.mark.parametrize("target", ["activation", "gradient", "loss"])
def test_what_is_not_finite(specs, name, target, kind):
    module, parameter = MODELS[name]
    pattern = {"activation": f"activation:{module}", "gradient": f"gradient:{parameter}", "loss": "loss"}[
        target
    ]
    faults = [NanInjection(step=step, target=pattern, kind=kind) for step in (0, 5)]
    run = stability_run(specs[name], steps=STEPS, faults=faults)
    assert run.alarm_steps == run.fired == [0, 5]
    assert (run.missed, run.false_alarms, run.verdict) == ([], [], "caught")
    assert [r.step for r in run.records if r.skipped] == [0, 5]
    where = {"activation": f"{module} (forward)", "gradient": parameter, "loss": "the loss"}[target]
    assert {a.where for a in run.alarms} == {where}
    expected = "non-finite gradient" if target == "gradient" else "non-finite loss"
    assert {a.kind for a in run.alarms} == {expected}
    assert not any(math.isfinite(a.value) for a in run.alarms)
    # Gradients are sound when they are computed again; what is in the forward pass comes again.
    assert {a.action for a in run.alarms} == {"retried" if target == "gradient" else "skipped"}


@pytest.mark.parametrize("name", MODELS)
def test_default_target(specs, name):
    # The plugin's marker without arguments: whatever is broken by it has to be noticed.
    run = stability_run(specs[name], steps=4, faults=[NanInjection(step=1)])
    assert (run.verdict, run.alarm_steps) == ("caught", [1])


@pytest.mark.parametrize("name", SOME_MODELS)
@pytest.mark.parametrize("duration", [1, 3])
def test_explosions(specs, name, duration):
    fault = GradientExplosion(step=5, duration=duration, factor=10.0)
    run = stability_run(specs[name], steps=STEPS, faults=[fault])
    assert run.alarm_steps == run.fired == list(range(5, 5 + duration))
    assert run.verdict == "caught"
    for alarm in run.alarms:
        assert alarm.kind == "gradient spike"
        assert alarm.value > alarm.limit > 0
        assert alarm.value in [r.grad_norm for r in run.records if r.step == alarm.step and r.skipped]


@pytest.mark.parametrize(
    "target, where", [("*", "all modules"), ("head.bias", "head.bias"), ("recurrence.*", "recurrence")]
)
def test_a_spike_names_what_rose(specs, target, where):
    fault = GradientScale(step=5, factor=1e3, target=target)
    run = stability_run(specs["gru"], steps=STEPS, faults=[fault])
    assert [(a.step, a.kind, a.where.partition(" (")[0]) for a in run.alarms] == [
        (5, "gradient spike", where)
    ]


def test_a_loss_whose_gradient_is_not_finite_stops_training(subjects):
    def loss(model, ids):
        # Finite itself, with no gradient that is: d sqrt(x) / dx at 0.
        x = model(ids)
        return x.square().mean() + (x - x).sum().sqrt()

    run = stability_run(ModelSpec.of(subjects.gru, loss=loss), steps=STEPS)
    assert {(a.kind, a.where) for a in run.alarms} == {("non-finite gradient", "the loss")}
    # Each step is broken: the guard goes back once, and gives up.
    assert [a.action for a in run.alarms if a.action != "skipped"] == ["rewound"]
    assert run.verdict == "unstable"
    assert stability_run(ModelSpec.of(subjects.gru, loss=loss), steps=12).stopped.startswith(
        "GuardError: step 10"
    )


@pytest.mark.parametrize("name", SOME_MODELS)
@pytest.mark.parametrize(
    "fault",
    [
        NanInjection(step=2, target="loss"),
        NanInjection(step=2, duration=2, target="activation"),
    ],
    ids=str,
)
def test_a_skipped_step_leaves_no_trace(specs, name, fault):
    kept = []
    run = stability_run(keeping(specs[name], kept), steps=7, faults=[fault])
    assert run.verdict == "caught"
    weights, losses, _ = bare_loop(specs[name], 7, skipped=fault.steps)
    assert same(kept, weights)
    sound = [r.loss for r in run.records if not r.skipped]
    assert sound == [loss for step, loss in enumerate(losses) if step not in fault.steps]
    # The steps that were skipped do matter: with them, training ends elsewhere.
    assert not same(bare_loop(specs[name], 7)[0], weights)


@pytest.mark.parametrize("name", SOME_MODELS)
@pytest.mark.parametrize(
    "fault",
    [NanInjection(step=2, duration=2, target="gradient"), GradientExplosion(step=5, factor=10.0)],
    ids=str,
)
def test_a_step_that_is_sound_when_it_is_made_again_is_not_lost(specs, name, fault):
    kept = []
    run = stability_run(keeping(specs[name], kept), steps=7, faults=[fault])
    assert (run.verdict, run.alarm_steps) == ("caught", list(fault.steps))
    weights, losses, _ = bare_loop(specs[name], 7)
    assert same(kept, weights)
    assert [r.loss for r in run.records if not r.skipped] == losses
    # With the broken gradients training ends elsewhere.
    if isinstance(fault, GradientExplosion):
        assert not same(bare_loop(specs[name], 7, fault=fault)[0], weights)


@pytest.mark.parametrize("step", [0, 6])
def test_first_and_last_step(specs, step):
    kept = []
    fault = NanInjection(step=step, target="activation")
    run = stability_run(keeping(specs["gru"], kept), steps=7, faults=[fault])
    assert run.alarm_steps == [step]
    assert same(kept, bare_loop(specs["gru"], 7, skipped=[step])[0])
    # A run that ends on a broken step has not shown that it goes on.
    assert run.verdict == ("caught" if step == 0 else "not recovered")


def test_updates_are_made_at_sound_steps_only(specs):
    steps = []

    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            steps.append(1)

    spec = ModelSpec.of(specs["gru"], optimizer=lambda parameters: Counting(parameters, lr=0.1))
    stability_run(spec, steps=6, faults=[NanInjection(step=1, duration=2, target="loss")])
    assert len(steps) == 4


@pytest.mark.parametrize("name", ["rack", "gru", "encoder"])
def test_without_the_guard_the_weights_are_lost(specs, name):
    # Its full name: in the bare loop no one looks for what a pattern means.
    fault = NanInjection(step=1, target=f"gradient:{MODELS[name][1]}")
    weights, losses, _ = bare_loop(specs[name], 3, fault=fault)
    assert not all(w.isfinite().all() for w in weights)
    assert not math.isfinite(losses[-1])
    kept = []
    run = stability_run(keeping(specs[name], kept), steps=3, faults=[fault])
    assert run.finite
    assert all(w.isfinite().all() for w in kept)
    assert math.isfinite(run.records[-1].loss)


def test_a_skipped_step_leaves_no_trace_in_buffers(subjects):
    # Running statistics take in a NaN during the forward pass, which no skipped update undoes: in
    # eval mode such a model is dead, though every parameter and every training loss is finite.
    built = []

    class WithStatistics(subjects.TinyLM):
        def __init__(self):
            super().__init__()
            self.batch_norm = nn.BatchNorm1d(16)
            built.append(self)

        def mix(self, x):
            return self.batch_norm(x.transpose(1, 2)).transpose(1, 2)

    fault = NanInjection(step=3, target="activation:layers.0.qkv")
    run = stability_run(ModelSpec.of(WithStatistics), steps=8, faults=[fault])
    model = built[-1]
    assert (run.verdict, run.alarm_steps) == ("caught", [3])
    # Once for each layer and sound step.
    assert model.batch_norm.num_batches_tracked == 2 * 7
    assert model.eval()(torch.zeros(1, 4, dtype=torch.int64)).isfinite().all()


@pytest.mark.parametrize("value, verdict", [(math.nan, "unstable"), (math.inf, "unstable"), (1.0, "stable")])
def test_buffers_that_break_by_themselves(subjects, value, verdict):
    class Broken(subjects.TinyLM):
        def __init__(self):
            super().__init__()
            self.register_buffer("average", torch.zeros(2))
            self.register_buffer("mask", torch.full((2,), -math.inf))

        def forward(self, ids):
            self.average.fill_(value)
            return super().forward(ids)

    run = stability_run(ModelSpec.of(Broken), steps=2)
    found = [(alarm.step, alarm.kind, alarm.where) for alarm in run.alarms]
    assert run.verdict == verdict
    assert found == [(step, "non-finite buffer", "average") for step in range(2) if verdict == "unstable"]


def test_a_target_that_is_not_reached_at_its_step(subjects):
    class Sometimes(subjects.TinyLM):
        """Calls one of its modules in its first forward pass only."""

        def __init__(self):
            super().__init__()
            self.extra, self.calls = nn.Linear(16, 16), 0

        def forward(self, ids):
            self.calls += 1
            return super().forward(ids)

        def mix(self, x):
            return x + self.extra(x) if self.calls == 1 else x

    spec = ModelSpec(Sometimes, "sometimes", "tokens", 29, causal=True)
    first = NanInjection(step=0, target="activation:extra")
    assert stability_run(spec, steps=3, faults=[first]).fired == [0]
    with pytest.raises(ValueError, match="did not act at step 1"):
        stability_run(spec, steps=3, faults=[NanInjection(step=1, target="activation:extra")])


def test_a_model_with_nothing_to_train(subjects):
    def factory():
        return subjects.gru().requires_grad_(False)

    with pytest.raises(ValueError, match="a model with a parameter that trains"):
        stability_run(ModelSpec.of(factory), steps=2)


@pytest.mark.parametrize("name", ["rack", "gru", "encoder"])
def test_a_small_explosion_is_missed_and_the_verdict_says_so(specs, name):
    run = stability_run(specs[name], steps=STEPS, faults=[GradientExplosion(step=5, factor=1.5)])
    assert run.fired == run.missed == [5]
    assert (run.alarms, run.verdict) == ([], "missed")


def test_a_lasting_explosion_never_becomes_the_rule(specs):
    fault = GradientExplosion(step=5, duration=20)
    policy = GuardPolicy(patience=20, snapshot_interval=None)
    run = stability_run(specs["gru"], steps=28, faults=[fault], policy=policy)
    assert run.alarm_steps == list(range(5, 25))
    assert run.verdict == "caught"


def test_a_policy_of_ones_own(specs):
    # By more than twice, so that the step is another when it is made again.
    fault = GradientExplosion(step=5, factor=2.2)
    assert stability_run(specs["gru"], steps=8, faults=[fault]).verdict == "missed"
    strict = GuardPolicy(suspect_factor=1.3)
    assert stability_run(specs["gru"], steps=8, faults=[fault], policy=strict).alarm_steps == [5]
    early = GradientExplosion(step=2)
    assert stability_run(specs["gru"], steps=4, faults=[early], policy=GuardPolicy(minimum=2)).fired == [2]


@pytest.mark.parametrize("name", ["dropout_rack", "x_decoder", "encoder"])
def test_a_run_is_a_function_of_its_seed(subjects, name):
    spec = ModelSpec.of(getattr(subjects, name))
    faults = [NanInjection(step=1, target="gradient")]
    runs = []
    for seed, noise in ((3, 0), (3, 1), (4, 0)):
        torch.manual_seed(noise)
        runs.append(stability_run(spec, steps=4, faults=faults, seed=seed))
    one, again, other = (repr(run.to_dict()) for run in runs)
    assert one == again
    assert one != other


def test_the_random_state_is_left_alone(subjects):
    spec = ModelSpec.of(subjects.dropout_rack)
    before = torch.get_rng_state()
    stability_run(spec, steps=2, faults=[NanInjection(step=0)])
    assert torch.equal(torch.get_rng_state(), before)


def test_each_step_has_another_batch(specs):
    seen = []
    loss_of = specs["gru"].loss_of

    def loss(model, ids):
        seen.append(ids)
        return loss_of(model, ids)

    stability_run(ModelSpec.of(specs["gru"], loss=loss), steps=5, batch_size=3, seq_len=7)
    assert [tuple(ids.shape) for ids in seen] == [(3, 7)] * 5
    assert len({tuple(ids.flatten().tolist()) for ids in seen}) == 5


def test_the_model_runs_in_train_mode_without_leftover_hooks(subjects):
    built = []

    class Watched(subjects.GRULM):
        def __init__(self):
            super().__init__()
            built.append(self)

        def forward(self, ids):
            assert self.training
            return super().forward(ids)

    spec = ModelSpec(Watched, "watched", "tokens", 50, causal=True)
    stability_run(spec, steps=3, faults=[NanInjection(step=0), NanInjection(step=1, target="gradient")])
    assert built
    for model in built:
        assert model.training
        assert not [hook for m in model.modules() for hook in m._forward_hooks]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"steps": 0}, "steps: got 0; allowed: an integer >= 1"),
        ({"steps": -3}, "steps: got -3; allowed"),
        (
            {"steps": 8, "faults": [NanInjection(step=8)]},
            "nan_injection: its last step is 8; the run has 8 steps",
        ),
        (
            {"steps": 8, "faults": [NanInjection(step=6, duration=3)]},
            "its last step is 8; the run has 8 steps",
        ),
        (
            {"steps": 8, "faults": [GradientExplosion(step=3)]},
            "gradient_explosion: step: got 3; allowed: one that at least 4",
        ),
        ({"steps": 2, "seq_len": 1}, "seq_len: got 1; allowed: an integer >= 2"),
        ({"steps": 2, "batch_size": 0}, "batch_size: got 0; allowed: an integer >= 1"),
        ({"steps": 2, "seq_len": 65}, "seq_len: got 65; .* takes at most 64 positions"),
    ],
)
def test_runs_that_are_refused(subjects, arguments, message):
    with pytest.raises(ValueError, match=message):
        stability_run(ModelSpec.of(subjects.gru, max_length=64), **arguments)


def test_one_position_of_vectors_is_enough(specs):
    assert stability_run(specs["encoder"], steps=2, seq_len=1).seq_len == 1


def test_the_last_possible_steps(specs):
    faults = [NanInjection(step=0, target="loss"), GradientExplosion(step=6, duration=2)]
    run = stability_run(specs["gru"], steps=8, faults=faults)
    assert run.alarm_steps == [0, 6, 7]


def test_an_explosion_that_cannot_be_judged(specs):
    # Skipped steps leave no norm: after four of them there is nothing that step 4 could be judged by.
    faults = [NanInjection(step=0, duration=4, target="loss"), GradientExplosion(step=4)]
    with pytest.raises(ValueError, match="gradient_explosion: step: got 4"):
        stability_run(specs["gru"], steps=8, faults=faults)


def record(step, loss=1.0, skipped=False):
    return StepRecord(step, loss, 1.0, 1e-3, skipped)


def alarm(step):
    return Alarm(step, "gradient spike", 9.0, 3.0)


@pytest.mark.parametrize(
    "alarms, fired, last, finite, verdict",
    [
        ([], [], record(3), True, "stable"),
        ([], [], record(3, loss=math.nan), True, "unstable"),
        ([], [], record(3), False, "unstable"),
        ([alarm(2)], [], record(3), True, "unstable"),
        ([alarm(2)], [2], record(3), True, "caught"),
        ([alarm(1), alarm(2)], [1, 2], record(3), True, "caught"),
        ([], [2], record(3), True, "missed"),
        ([alarm(1)], [1, 2], record(3), True, "missed"),
        ([alarm(1)], [2], record(3), True, "missed"),
        ([alarm(1), alarm(2)], [2], record(3), True, "false alarm"),
        ([alarm(3)], [3], record(3, skipped=True), True, "not recovered"),
        ([alarm(2)], [2], record(3), False, "not recovered"),
        ([alarm(2)], [2], record(3, loss=math.inf), True, "not recovered"),
    ],
)
def test_verdict(alarms, fired, last, finite, verdict):
    records = [*map(record, range(3)), last]
    run = StabilityRun("m", 16, records, alarms, [], fired, finite)
    assert run.verdict == verdict
    assert run.missed == [step for step in fired if step not in [a.step for a in alarms]]
    assert [a.step for a in run.false_alarms] == [a.step for a in alarms if a.step not in fired]


@pytest.mark.parametrize("finite, verdict", [(True, "recovered"), (False, "not recovered")])
def test_verdict_of_a_run_that_tells_of_no_alarms(finite, verdict):
    run = StabilityRun("m", 16, [*map(record, range(4))], [], [], [2], finite, watched=False)
    assert run.verdict == verdict


def test_run_is_data(specs):
    faults = [NanInjection(step=1, target="loss"), GradientExplosion(step=5)]
    run = stability_run(specs["gru"], steps=7, faults=faults)
    stored = json.loads(json.dumps(run.to_dict()))
    assert stored["faults"] == ["nan_injection(step=1, target='loss')", "gradient_explosion(step=5)"]
    assert (stored["model"], stored["seq_len"], stored["verdict"]) == ("gru", 16, "caught")
    assert stored["fired"] == [1, 5]
    assert [a["text"] for a in stored["alarms"]] == [str(a) for a in run.alarms]
    # Step 5 is made again.
    assert [record["step"] for record in stored["records"]] == [0, 1, 2, 3, 4, 5, 5, 6]
    assert stored["records"][0] == run.records[0].to_dict()


class Turned(nn.Module):
    """A complex parameter and a complex buffer, as in LRU and in Llama's table of rotations."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(29, 8)
        self.turn = nn.Parameter(torch.polar(torch.ones(8), torch.randn(8)))
        self.register_buffer("table", torch.polar(torch.ones(8), torch.randn(8)))
        self.head = nn.Linear(8, 29)

    def forward(self, ids):
        return self.head((self.tokens(ids) * self.turn * self.table).real)


@pytest.mark.parametrize("factory", [Turned, lambda: in_float64()], ids=["complex", "float64"])
def test_other_number_types(factory):
    run = stability_run(ModelSpec.of(factory), steps=10, faults=[GradientExplosion(step=6)])
    assert (run.verdict, run.alarm_steps) == ("caught", [6])


def in_float64():
    return nn.Sequential(nn.Embedding(29, 8), nn.Linear(8, 29)).double()


def test_function_that_returns_a_model_is_a_subject(subjects):
    assert stability_run(subjects.tiny, steps=4).verdict == "stable"
