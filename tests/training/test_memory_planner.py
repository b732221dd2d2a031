"""What a plan says a run will hold is what the run held."""

import io
import itertools
from pathlib import Path
from weakref import WeakSet

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from stackwise.config import GuardPolicy, StackWiseConfig
from stackwise.model import create_rack_from_config
from stackwise.training import ArchitectureTrainer
from stackwise.training.loop import TrainingLoop
from stackwise.training.master import MasterAdamW
from stackwise.training.memory_planner import _KeptOutputs, plan_memory
from stackwise.training.phase_model import PhaseModel
from stackwise.training.step import TrainStep

MIDDLE = {
    "model": {
        "vocab_size": 301,
        "d_model": 64,
        "n_heads": 4,
        "n_kv_heads": 2,
        "attention_type": "gqa",
        "d_ff": 160,
        "architecture": {"n_stacks": 2, "blocks_per_stack": 2},
    },
    "training": {"batch_size": 3, "seq_len": 32},
}


# For what each Block has to itself: half as deep.
SHALLOW = {"architecture": {"n_stacks": 2, "blocks_per_stack": 1}}


class Kept:
    """A tensor that autograd saved."""

    def __init__(self, tensor):
        self.tensor = tensor


class Seen:
    """What was there in the last step of a phase."""

    def __init__(self):
        self.steps = 0


@pytest.fixture
def seen(monkeypatch):
    """What each phase held, of every run from here on."""
    phases, unpatched, run, forward = [], TrainStep.__call__, TrainingLoop._run, PhaseModel.forward

    def watched_run(self, phase, following=None):
        found = Seen()
        found.phase, found.loop = phase, self
        phases.append(found)
        run(self, phase, following)
        found.prefix_blocks = self.units[-1]["prefix_blocks"]
        found.prefix_bytes = self.prefix.statistics.bytes
        found.disk = {
            kind: tensor_bytes(getattr(self.settings.scope, key))
            for kind, key in (("blocks", "offload_dir"), ("prefix", "cache_dir"))
            if getattr(self.settings.scope, key)
        }

    def watched_step(self, batches, lr):
        if type(next(self.model.parameters())) is not nn.Parameter:
            return unpatched(self, batches, lr)  # of the plan
        found, loop = phases[-1], phases[-1].loop
        found.steps += 1
        update = self.optimizer.step

        def watched_update():
            gradients = {id(p): p.grad for p in loop.rack.parameters() if p.grad is not None}
            found.gradients = sum(g.nbytes for g in gradients.values())
            update()

        self.optimizer.step = watched_update
        outcome = unpatched(self, batches, lr)
        self.optimizer.step = update
        states = self.optimizer.state.values()
        found.optimizer = sum(t.nbytes for state in states for name, t in state.items() if name != "master")
        found.masters = sum(state["master"].nbytes for state in states if "master" in state)
        if isinstance(self.optimizer, MasterAdamW):
            found.masters += sum(wide.nbytes for _, wide in self.optimizer._frozen)
        found.batch = sum(t.nbytes for t in tensors([batch.targets for batch in batches])) + found.hidden
        blocks, phase = loop.rack.get_blocks(), found.phase
        in_graph = phase.path[phase.n_prefix :]
        found.trained = sum(nbytes(blocks[i]) for i in in_graph if i in phase.trained)
        found.frozen = sum(nbytes(blocks[i]) for i in in_graph if i not in phase.trained)
        found.elsewhere = sum(nbytes(blocks[i]) for i in range(len(blocks)) if i not in in_graph)
        found.ends = nbytes(nn.ModuleList([loop.rack.embedding, loop.rack.final_norm, loop.rack.lm_head]))
        found.ends += sum(t.nbytes for t in loop._fresh_head.values())
        return outcome

    def watched_forward(self, targets, hidden_BTC=None):
        if type(next(self.parameters())) is not nn.Parameter:
            return forward(self, targets, hidden_BTC)
        phases[-1].hidden = 0 if hidden_BTC is None else hidden_BTC.nbytes
        given = [targets, hidden_BTC, list(self.parameters()), list(self.buffers())]
        apart = {t.untyped_storage().data_ptr() for t in tensors(given)}
        saved = WeakSet()  # what no gradient is asked of dies with its graph

        def pack(tensor):
            kept = Kept(tensor)
            saved.add(kept)
            return kept

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
            total = forward(self, targets, hidden_BTC)
        storages = {kept.tensor.untyped_storage().data_ptr(): kept.tensor for kept in saved}
        sizes = {place: tensor.untyped_storage().nbytes() for place, tensor in storages.items()}
        phases[-1].saved = sum(size for place, size in sizes.items() if place not in apart)
        return total

    monkeypatch.setattr(PhaseModel, "forward", watched_forward)
    monkeypatch.setattr(TrainingLoop, "_run", watched_run)
    monkeypatch.setattr(TrainStep, "__call__", watched_step)
    return phases


def tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def nbytes(module):
    return sum(t.nbytes for t in (*module.parameters(), *module.buffers()))


def tensor_bytes(directory):
    """Of the safetensors files in a folder, without their heads."""
    total = 0
    for path in Path(directory).rglob("*"):
        if path.is_file() and path.name not in ("lock", ".lock"):
            with path.open("rb") as file:
                total += path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")
    return total


def middle(**training):
    model = {**MIDDLE["model"], **training.pop("model", {})}
    data = training.pop("data", {})
    config = {"model": model, "data": data, "training": {**MIDDLE["training"], "device": "cpu", **training}}
    return StackWiseConfig.from_dict({**config, "training": {"max_steps": 2, **config["training"]}})


def train(config, n_batches=None):
    settings = config.training
    torch.manual_seed(1)
    rack = create_rack_from_config(config)
    count = settings.max_steps * settings.accumulation_steps if n_batches is None else n_batches
    row = settings.seq_len + (settings.objective.kind == "next_token")
    ids = torch.randint(300, (count, settings.batch_size, row))
    batches = [{"input_ids": each} for each in ids]
    if config.data.pack_documents:
        for batch in batches:
            batch["document_ids"] = (torch.arange(row) // 9).expand(settings.batch_size, row).clone()
    return ArchitectureTrainer(config, progress=False).train_architecture(rack, batches)


def compare(config, seen, n_batches=None):
    """Plan, train and hold every figure of every phase against what was seen of it."""
    plan = plan_memory(config, n_batches=n_batches, device="cpu")
    train(config, n_batches)
    scope = config.training.scope
    assert [phase.name for phase in plan.phases] == [found.phase.unit.name for found in seen]
    for phase, found in zip(plan.phases, seen, strict=True):
        assert phase.steps == found.steps
        for name in ("ends", "trained", "frozen", "gradients", "optimizer", "masters"):
            assert getattr(phase, name) == getattr(found, name), (phase.name, name)
        assert phase.batch == found.batch, phase.name
        assert phase.idle == (found.elsewhere if scope.offload == "none" else 0)
        assert phase.host_prefix + phase.disk_prefix == found.prefix_bytes
        if scope.offload_dir:
            assert phase.disk_blocks == found.disk["blocks"]
        if scope.cache_dir:
            assert phase.disk_prefix == found.disk["prefix"]
        if config.training.recompute.kind != "selective" and config.training.accumulation_steps == 1:
            # Blocks that are computed again hold the Layout of the pass: times, cosines and sines.
            tables = {"full": 32 * 8 + 2 * 32 * 8 * 4, "every_nth": 32 * 8}
            tables = tables.get(config.training.recompute.kind, 0)
            assert phase.activations + phase.loss == found.saved + tables, phase.name
        assert phase.peak >= phase.weights + phase.masters + phase.optimizer + phase.batch + phase.gradients
    return plan


def name_of(training):
    return " ".join(
        f"{key}={list(value.items()) if isinstance(value, dict) else value}"
        for key, value in training.items()
    )


ARCHITECTURES = ("rackwise", "stackwise", "blockwise")
PRECISIONS = ("fp32", "bf16", "bf16_weights")


@pytest.mark.parametrize(
    "architecture, precision, tied",
    [
        # A quarter of them in every run.
        pytest.param(
            *case,
            id=f"{case[0]}-{case[1]}-{'tied' if case[2] else 'untied'}",
            marks=[pytest.mark.slow] if place % 4 else [],
        )
        for place, case in enumerate(itertools.product(ARCHITECTURES, PRECISIONS, (True, False)))
    ],
)
def test_architectures_and_precisions(seen, architecture, precision, tied):
    compare(
        middle(
            training_architecture=architecture,
            precision=precision,
            model={"tie_embeddings": tied},
        ),
        seen,
    )


OPTIONS = [
    {"optimizer": {"kind": "muon"}},
    {"training_architecture": "blockwise", "optimizer": {"kind": "muon"}},
    {"training_architecture": "blockwise", "scope": {"overlap": 1}},
    {"training_architecture": "blockwise", "scope": {"suffix": 1}},
    {"training_architecture": "blockwise", "precision": "bf16_weights", "scope": {"suffix": 2}},
    {"training_architecture": "stackwise", "scope": {"order": "right_to_left"}},
    {
        "training_architecture": "blockwise",
        "precision": "bf16_weights",
        "scope": {"order": "right_to_left"},
    },
    {"training_architecture": "blockwise", "max_steps": 3, "scope": {"polish_steps": 1, "growth": True}},
    {"scope": {"growth": True}},
    {"scope": {"growth": True}, "precision": "bf16_weights"},
    {
        "training_architecture": "blockwise",
        "scope": {"head": "per_unit"},
        "model": {"tie_embeddings": False},
    },
    {"recompute": {"kind": "full"}},
    {"recompute": {"kind": "full"}, "precision": "bf16", "training_architecture": "stackwise"},
    {"recompute": {"kind": "every_nth", "every": 2}},
    {"recompute": {"kind": "by_name", "names": ["*.feedforward"]}, "precision": "bf16"},
    {"objective": {"logits_chunk": 20}},
    {"objective": {"logits_chunk": 20, "z_loss": 1e-4}, "precision": "bf16"},
    {"objective": {"logits_chunk": 20}, "precision": "bf16_weights", "training_architecture": "blockwise"},
    {"accumulation_steps": 3, "precision": "bf16", "training_architecture": "blockwise"},
    {
        "objective": {"kind": "masked_token", "mask_token_id": 300},
        "model": {"attention_mode": "bidirectional"},
    },
    {
        "objective": {"kind": "mask_diffusion", "mask_token_id": 300, "z_loss": 1e-4},
        "model": {"attention_mode": "bidirectional"},
    },
    {"data": {"pack_documents": True}, "training_architecture": "blockwise"},
    {"model": {"sliding_window": [8, None]}, "precision": "bf16"},
    {"model": {"sliding_window": [8, None]}, "training_architecture": "blockwise"},
    {"model": {"qk_norm": "head", "qkv_bias": True, "norm": "layernorm", "softcap": 5.0}},
    {"model": {"norm_position": "post", "embedding_max_norm": 1.0, "freeze_up_proj": True}},
    {"model": {"attention_type": "mla", "n_kv_heads": None, "latent": {}}, "precision": "bf16"},
    {"model": {"attention_type": "kernel", "n_kv_heads": None, "kernel": {}}, "precision": "fp32"},
]


@pytest.mark.parametrize(
    "training",
    [
        pytest.param(each, id=name_of(each), marks=[] if place % 3 == 2 else [pytest.mark.slow])
        for place, each in enumerate(OPTIONS)
    ],
)
def test_options(seen, training):
    in_units = {"training_architecture", "scope", "recompute"} & training.keys()
    depth = {} if in_units else SHALLOW
    compare(middle(**{**training, "model": {"dropout": 0.0, **depth, **training.get("model", {})}}), seen)


@pytest.mark.parametrize(
    "share, n_batches, directory",
    [(0.0, None, False), (0.4, None, True), (0.4, 2, False), (1.0, None, False), (1.0, 3, True)],
)
def test_prefix_and_blocks_elsewhere(seen, tmp_path, share, n_batches, directory):
    entry = 3 * 32 * 64 * 4
    scope = {
        "cache_bytes": int(share * 5 * entry),
        "offload": "disk",
        "offload_dir": str(tmp_path / "blocks"),
    }
    if directory and share:
        scope["cache_dir"] = str(tmp_path / "prefix")
    config = middle(training_architecture="blockwise", max_steps=5, scope=scope)
    plan = compare(config, seen, n_batches)
    different = n_batches or 5
    for depth, (phase, found) in enumerate(zip(plan.phases, seen, strict=True)):
        one = forward_flops(config, depth)
        assert phase.flops_prefix == one
        # The mean over five steps of Blocks that were computed, each with the FLOPs of one.
        assert phase.flops_prefix_kept * 5 == pytest.approx(found.prefix_blocks * forward_flops(config, 1))
        assert phase.host_prefix + phase.disk_prefix == (
            min(different, int(share * 5)) * entry if depth else 0
        )
    assert plan.prefix_bytes_per_token == 64 * 4
    assert plan.phases[2].in_flight == 2 * nbytes(create_rack_from_config(config).get_blocks()[0])
    assert plan.phases[1].in_flight * 2 == plan.phases[2].in_flight


def forward_flops(config, n_blocks):
    """By hand: two for each multiplication, of the matrices and of all pairs of positions."""
    model, rows = config.model, config.training.batch_size * config.training.seq_len
    head = model.d_model // model.n_heads
    matrices = (
        model.d_model * head * (2 * model.n_heads + 2 * model.n_kv_heads) + 3 * model.d_model * model.d_ff
    )
    pairs = 2 * config.training.seq_len * model.n_heads * head
    return 2 * rows * (matrices + pairs) * n_blocks


@pytest.mark.parametrize("kind, times", [("none", 0), ("full", 1)])
def test_flops_by_hand(kind, times):
    config = middle(recompute={"kind": kind}, accumulation_steps=3, objective={"logits_chunk": 10})
    (phase,) = plan_memory(config, device="cpu").phases
    rows, model = 3 * 32, config.model
    blocks, head = forward_flops(config, 4), 2 * rows * model.d_model * model.vocab_size
    attention = 4 * 2 * rows * 2 * 32 * 64
    # Of a Block that is computed again the last product is not: nothing needs what it says.
    again = times * (blocks - 4 * 2 * rows * model.d_ff * model.d_model)
    # With logits in chunks the gradients of the head are computed forwards. Of attention the weights are
    # computed again: five products for two.
    assert phase.flops_forward == 3 * (blocks + 3 * head)
    assert phase.flops_backward == 3 * (2 * blocks + attention // 2 + again)
    assert phase.flops_optimizer == 0


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_flops_are_those_that_torch_counts(kind):
    # Attention as plain products, which the counter of torch sees on every device.
    model = {"softcap": 3.0, **SHALLOW}
    config = middle(optimizer={"kind": kind}, precision="bf16", max_steps=1, model=model)
    (phase,) = plan_memory(config, device="cpu").phases
    with FlopCounterMode(display=False) as counter:
        train(config)
    assert phase.flops == counter.get_total_flops()


@pytest.mark.parametrize(
    "training",
    [
        {},
        {"training_architecture": "blockwise", "scope": {"head": "per_unit"}},
        {"scope": {"growth": True}, "precision": "bf16_weights", "max_steps": 8},
        {"training_architecture": "stackwise", "optimizer": {"kind": "muon"}, "precision": "bf16"},
    ],
    ids=name_of,
)
def test_what_a_guard_goes_back_to(monkeypatch, training):
    shallow = SHALLOW | {"tie_embeddings": False}
    plain = middle(**{"max_steps": 4, "model": shallow, **training})
    guarded = plain.model_copy(deep=True)
    guarded.training.guard = GuardPolicy(snapshot_interval=6)
    held, end = [], TrainingLoop._train_guarded

    def watched(self, phase, step, guard):
        end(self, phase, step, guard)
        held.append(guard.snapshot_bytes)

    monkeypatch.setattr(TrainingLoop, "_train_guarded", watched)
    train(guarded)
    bare, plan = (plan_memory(config, device="cpu") for config in (plain, guarded))
    assert [phase.snapshot for phase in plan.phases] == held
    assert [phase.peak for phase in plan.phases] == [
        phase.peak + more for phase, more in zip(bare.phases, held, strict=True)
    ]
    assert plan.host == bare.host and not any(phase.snapshot for phase in bare.phases)


@pytest.mark.parametrize("on_host", [True, False])
def test_where_a_guard_keeps_it(on_host):
    plain = middle(model=SHALLOW)
    guarded = plain.model_copy(deep=True)
    guarded.training.guard = GuardPolicy(snapshot_on_host=on_host)
    bare, plan = (plan_memory(config, device="cuda") for config in (plain, guarded))
    (phase,) = plan_memory(guarded, device="cpu").phases
    assert plan.host == (phase.snapshot if on_host else 0)
    assert plan.peak - bare.peak == (0 if on_host else phase.snapshot)
    guarded.training.guard = GuardPolicy(snapshot_interval=None)
    assert plan_memory(guarded, device="cuda").host == 0


def allocated(call):
    """The most bytes that PyTorch's allocator on the CPU gave out during a call, above what was there."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        call()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate((event.nbytes() for event in events), initial=0))


@pytest.mark.parametrize(
    "kind, precision, units",
    [
        ("none", "fp32", {}),
        ("full", "bf16", {}),
        ("none", "bf16_weights", {}),
        ("none", "fp32", {"training_architecture": "blockwise", "accumulation_steps": 4}),
    ],
)
def test_peak_is_what_was_allocated(monkeypatch, kind, precision, units):
    config = middle(recompute={"kind": kind}, precision=precision, objective={"logits_chunk": 40}, **units)
    *_, phase = plan_memory(config, device="cpu").phases
    peaks, unpatched = [], TrainStep.__call__

    def watched(self, batches, lr):
        outcome = []
        peaks.append(allocated(lambda: outcome.append(unpatched(self, batches, lr))))
        return outcome[0]

    monkeypatch.setattr(TrainStep, "__call__", watched)
    train(config)
    hidden = 3 * 32 * 64 * 4 if units else 0  # computed in the step
    planned = phase.peak - phase.weights - phase.masters - phase.optimizer - phase.batch + hidden
    print(planned, peaks[-1])
    # Inside operations there is more, for moments.
    assert planned <= peaks[-1] <= 1.15 * planned


@pytest.mark.parametrize("kind", ["none", "full"])
def test_more_micro_batches_hold_no_more_of_a_prefix(kind):
    few, many = (
        plan_memory(
            middle(training_architecture="blockwise", accumulation_steps=count, recompute={"kind": kind}),
            device="cpu",
        ).phases[-1]
        for count in (2, 20)
    )
    ids = few.batch - 3 * 32 * 64 * 4
    assert many.peak - few.peak == many.batch - few.batch == 9 * ids


def test_selective_recomputation_keeps_products(seen):
    plans = {
        kind: compare(middle(recompute={"kind": kind}, precision="bf16", model=SHALLOW), seen).phases[0]
        for kind in ("none", "selective", "full")
        if not seen.clear()
    }
    model, rows = middle().model, 3 * 32
    heads = (model.n_heads + 2 * model.n_kv_heads) * 16
    # Beside what a Block is given: what its products and attention say, and attention's denominators, and
    # weights as autocast narrows them, which are not kept.
    products = 2 * rows * 2 * (heads + model.d_model + 2 * model.d_ff + model.d_model)
    attention = 2 * rows * (2 * model.d_model + 4 * model.n_heads)
    found = plans["selective"].activations - plans["full"].activations
    assert found == products + attention


def test_equal_phases_are_computed_once(monkeypatch):
    calls, unpatched = [], TrainStep.__call__
    monkeypatch.setattr(TrainStep, "__call__", lambda *args: calls.append(1) or unpatched(*args))
    shape = {"architecture": {"n_stacks": 6, "blocks_per_stack": 4}}
    plan = plan_memory(middle(training_architecture="blockwise", model=shape))
    assert len(plan.phases) == 24 and len(calls) == 2


def test_plan_leaves_no_trace():
    torch.manual_seed(5)
    before, threads = torch.get_rng_state(), torch.get_default_device()
    plan_memory(middle(training_architecture="stackwise", model={"dropout": 0.1}))
    assert torch.equal(torch.get_rng_state(), before) and torch.get_default_device() == threads


def test_takes_no_memory():
    shape = {"d_model": 4096, "n_heads": 32, "n_kv_heads": 8, "d_ff": 14336, "vocab_size": 128256}
    taken = allocated(lambda: plan_memory(middle(training_architecture="blockwise", model=shape)))
    assert taken < 2**20


def test_totals_and_plain_values():
    config = middle(training_architecture="blockwise", scope={"offload": "cpu", "cache_bytes": 10**6})
    plan = plan_memory(config, device="cuda")
    told = plan.to_dict()
    assert told["peak"] == max(phase["peak"] for phase in told["phases"]) == plan.peak
    # Before training all Blocks are there, and while a unit trains its own has left.
    block = nbytes(create_rack_from_config(config).get_blocks()[0])
    assert plan.host_start == 4 * block and plan.phases[0].host == 3 * block
    assert plan.host == max(4 * block, 3 * block + plan.phases[1].host_prefix)
    assert plan.flops == pytest.approx(sum(2 * phase.flops for phase in plan.phases))
    assert plan.kernels == ("cuda" if torch.cuda.is_available() else "cpu")


def test_table_has_a_row_for_what_is_equal():
    config = middle(training_architecture="blockwise")
    written = io.StringIO()
    Console(width=200, file=written).print(plan_memory(config).table())
    text = written.getvalue()
    assert "stack 0 block 0 " in text and "stack 0 block 1 to stack 1 block 1" in text
    assert "stack 1 block 0" not in text


def test_what_is_not_planned_is_refused(tmp_path):
    for training, key in (
        ({"precision": "float8"}, "training.precision"),
        ({"compile": True, "recompute": {"kind": "budget"}}, "training.recompute.kind"),
        ({"distributed": {"strategy": "fsdp"}}, "training.distributed.strategy"),
        ({"training_architecture": "blockwise", "scope": {"suffix": 9}}, "training.scope.suffix"),
        ({"model": {"attention_mode": "bidirectional"}}, "attention_mode"),
        ({"precision": "bf16_weights", "optimizer": {"kind": "muon"}}, "training.optimizer.kind"),
    ):
        with pytest.raises(ValueError, match=key):
            plan_memory(middle(**training))
    with pytest.raises(ValueError, match="offload"):
        plan_memory(middle(training_architecture="blockwise", scope={"offload": "cpu"}), device="cpu")
    with pytest.raises(ValueError, match="device: got 'tpu'"):
        plan_memory(middle(), device="tpu")
    with pytest.raises(ValueError, match="n_batches"):
        plan_memory(middle(), n_batches=0)


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6),
    st.integers(1, 12),
    st.none() | st.integers(1, 9),
    st.integers(0, 12),
)
def test_blocks_of_a_prefix_that_are_computed(depths, visits, n_batches, room):
    planned, at = _KeptOutputs(), {}
    for depth in depths:
        # The rules of PrefixOutputs, batch by batch: deeper ones depend on what trains now.
        at = {key: kept for key, kept in at.items() if kept <= depth}
        computed = 0
        for visit in range(visits if depth else 0):
            key = visit if n_batches is None else visit % n_batches
            computed += depth - at.get(key, 0)
            if key in at or len(at) < room:
                at[key] = depth
        at = at if depth else {}
        count, parts = planned.advance(depth, visits, n_batches, room)
        assert count == len(at)
        assert sum((depth - start) * batches for start, batches in parts) == computed
