"""Evaluation while a Rack trains: the loss by hand at that moment, and no trace of it in the training."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from stackwise.data import Prefetched, TokenWindows
from stackwise.training import ArchitectureTrainer, load_rack
from stackwise.training import step as step_module
from stackwise.training import trainer as trainer_module
from stackwise.training.batch_stream import check_apart
from stackwise.training.evaluation import ValidationRecord
from stackwise.training.loss_scale import LossScale
from stackwise.training.record_log import read_json_lines

MASKED = {"kind": "masked_token", "mask_token_id": 4, "mask_fraction": 0.5}
KINDS = {
    "rackwise": {},
    "autocast": {"precision": "bf16"},
    "narrow weights": {"precision": "bf16_weights"},
    "accumulated": {"accumulation_steps": 2, "grad_clip": 0.05},
    "growing": {"scope": {"growth": True}},
    "blockwise": {"training_architecture": "blockwise"},
    "kept": {"training_architecture": "blockwise", "scope": {"cache_bytes": 2**20}},
    "right to left": {"training_architecture": "blockwise", "scope": {"order": "right_to_left"}},
    "polished": {"training_architecture": "stackwise", "scope": {"polish_steps": 2}},
    "recomputed": {"recompute": {"kind": "full"}},
}


@pytest.fixture
def run(make_config, make_rack, make_batches):
    """Train a small Rack with dropout; the result, the Rack, its trainer and the validation batches."""

    def train(settings, model=None, validation=None, batches=None):
        config = make_config(model={"dropout": 0.1} | (model or {}), training=settings)
        rack, batches = make_rack(config), make_batches(config, seed=1) if batches is None else batches
        validation = make_batches(config, count=3, seed=2) if validation is None else validation
        trainer = ArchitectureTrainer(config, progress=False)
        return trainer.train_architecture(rack, batches, validation), rack, trainer, validation

    return train


def weights(rack):
    return torch.cat([p.detach().flatten() for p in rack.parameters()])


@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
def test_training_is_the_same_to_the_bit(run, settings):
    settings = settings | {"max_steps": 4}
    plain, rack, *_ = run(settings)
    watched, twin, *_ = run(settings | {"eval_interval": 1})
    assert "validation" not in plain
    assert [r.loss for r in watched["records"]] == [r.loss for r in plain["records"]]
    assert [r.steps for r in watched["validation"]] == list(range(1, len(plain["records"]) + 1))
    assert torch.equal(weights(rack), weights(twin))
    if "results" in plain:
        blocks = [[unit["prefix_blocks"] for unit in each["results"]] for each in (plain, watched)]
        assert blocks[0] == blocks[1]


@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
def test_the_last_one_is_that_of_the_trained_rack(run, settings):
    result, rack, trainer, validation = run(settings | {"max_steps": 4, "eval_interval": 2})
    last = result["validation"][-1]
    assert last.steps == len(result["records"])
    assert last.loss == pytest.approx(trainer.evaluate(rack, validation), rel=1e-6)
    assert rack.training


def test_a_loader_that_draws_leaves_no_trace(run, make_config, make_batches):
    """A DataLoader draws from torch's generator at the start of each pass."""
    rows = torch.cat(make_batches(make_config(), count=3, seed=2))
    settings = {"max_steps": 4}
    _, rack, *_ = run(settings)
    _, twin, *_ = run(settings | {"eval_interval": 1}, None, DataLoader(rows, batch_size=2, shuffle=True))
    assert torch.equal(weights(rack), weights(twin))


def drawn():
    return torch.Generator().manual_seed(3)


@pytest.mark.parametrize("loaders", ["one generator", "one loader"])
def test_generators_of_the_training_are_put_back(run, make_config, make_batches, loaders):
    """Also a `DataLoader` that does not shuffle draws from its generator as a pass begins."""
    rows, others = (torch.cat(make_batches(make_config(), count=3, seed=seed)) for seed in (1, 2))
    settings = {"max_steps": 5, "optimizer": {"lr": 1e-30}}

    def evaluated(more):
        generator = drawn()
        training = DataLoader(rows, batch_size=2, shuffle=True, generator=generator)
        other = DataLoader(others, batch_size=2, generator=generator)
        validation = training if loaders == "one loader" else other
        return run(settings | more, {"dropout": 0.0}, validation, training)[0]

    watched = evaluated({"eval_interval": 1, "eval_batches": 1})
    assert [r.loss for r in watched["records"]] == [r.loss for r in evaluated({})["records"]]
    assert len({record.loss for record in watched["validation"]}) == 1


def test_of_a_unit_it_is_what_the_unit_says(run, tmp_path):
    """Blocks behind it do not count: they have learned nothing yet."""
    settings = {"training_architecture": "blockwise", "max_steps": 2, "save_interval": 2, "eval_interval": 2}
    result, _, _, validation = run(settings | {"checkpoint_dir": str(tmp_path)})
    assert len(result["validation"]) == len(result["results"]) == 2
    for depth, record in enumerate(result["validation"], start=1):
        rack = load_rack(tmp_path / f"step-{record.steps}").eval()
        losses = []
        with torch.no_grad():
            for ids in validation:
                x = rack.embedding(ids[:, :-1])
                for block in rack.get_blocks()[:depth]:
                    x = block(x)
                logits = rack.lm_head(rack.final_norm(x))
                losses.append(F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item())
        assert record.loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)
        assert record.unit == result["records"][record.steps - 1].unit


def test_so_many_batches_from_the_first_on(run):
    asked = []

    class Batches(list):
        def set_epoch(self, epoch):
            asked.append(("epoch", epoch))

        def __iter__(self):
            for place, batch in enumerate(super().__iter__()):
                asked.append(place)
                yield batch

    batches = Batches(torch.randint(32, (4, 2, 9), generator=torch.Generator().manual_seed(0)))
    settings = {"max_steps": 2, "eval_interval": 1, "eval_batches": 3}
    result, rack, trainer, _ = run(settings, {"vocab_size": 32}, batches)
    assert asked == [("epoch", 0), 0, 1, 2] * 2
    assert result["validation"][-1].loss == pytest.approx(trainer.evaluate(rack, batches[:3]), rel=1e-6)


@pytest.mark.parametrize("kind", ["of an epoch", "shuffled", "of its generator"])
def test_a_loader_gives_the_same_batches_each_time(run, kind):
    tokens = torch.randint(23, (320,), generator=torch.Generator().manual_seed(0))
    loader = {
        "of an epoch": DataLoader(TokenWindows(tokens, 2, 8), batch_size=None),
        "shuffled": DataLoader(tokens[:315].view(-1, 9), batch_size=2, shuffle=True),
        "of its generator": DataLoader(tokens[:315].view(-1, 9), 2, shuffle=True, generator=drawn()),
    }[kind]
    settings = {"max_steps": 3, "eval_interval": 1, "eval_batches": 1, "optimizer": {"lr": 1e-30}}
    result, rack, trainer, _ = run(settings, None, loader)
    assert len({record.loss for record in result["validation"]}) == 1
    assert trainer.evaluate(rack, loader) == trainer.evaluate(rack, loader)


def test_the_same_tokens_are_asked_for_each_time(run):
    """With a learning rate of nothing every evaluation says the same; z-loss is not in it."""
    model = {"attention_mode": "bidirectional", "vocab_size": 5}
    batches = list(torch.randint(4, (3, 2, 8), generator=torch.Generator().manual_seed(0)))
    settings = {"max_steps": 3, "eval_interval": 1, "optimizer": {"lr": 1e-30}, "objective": MASKED}
    plain, *_ = run(settings, model, batches, batches)
    with_z, *_ = run(settings | {"objective": MASKED | {"z_loss": 10.0}}, model, batches, batches)
    assert len({record.loss for record in (*plain["validation"], *with_z["validation"])}) == 1


def test_steps_that_a_loss_scale_leaves_out_spare_no_evaluation(run, monkeypatch):
    monkeypatch.setattr(trainer_module, "check_precision", lambda *_: None)
    scale = partial(LossScale, initial=2.0**24, growth_interval=2)
    monkeypatch.setattr(step_module, "create_loss_scale", lambda _, device: scale(device))
    result, *_ = run({"precision": "fp16", "max_steps": 12, "log_interval": 4, "eval_interval": 2})
    skipped = [record.step for record in result["records"] if record.skipped]
    assert min(skipped) < 4 < max(skipped)
    assert [record.steps for record in result["validation"]] == [2, 4, 6, 8, 10, 12]


def test_it_is_written_down(run, tmp_path):
    settings = {"max_steps": 5, "log_interval": 10, "eval_interval": 2}
    result, *_ = run(settings | {"telemetry": {"jsonl": str(tmp_path / "run.jsonl")}})
    lines, _ = read_json_lines(tmp_path / "run.jsonl")
    assert {line["step"] + 1: line["validation_loss"] for line in lines if "validation_loss" in line} == {
        record.steps: record.loss for record in result["validation"]
    }


@pytest.mark.parametrize(
    "given, named",
    [
        (None, "training.eval_interval: got 1"),
        (iter(()), "validation: got 'tuple_iterator'"),
        ([], "validation: got 'no batch'"),
        (DataLoader([]), "validation: got 'no batch'"),
    ],
)
def test_without_data_for_it_nothing_begins(make_config, make_rack, make_batches, given, named):
    config = make_config(training={"eval_interval": 1})
    rack = make_rack(config)
    before = weights(rack)
    with pytest.raises(ValueError, match=named):
        ArchitectureTrainer(config).train_architecture(rack, make_batches(config), given)
    assert torch.equal(weights(rack), before)


def windows():
    return TokenWindows(torch.arange(400) % 23, 2, 8)


def in_a_loader(data):
    return DataLoader(data, batch_size=None)


def in_a_stateful_loader(data):
    return StatefulDataLoader(data, batch_size=None)


def in_two(make):
    """Two loaders of one and the same data."""
    data = windows()
    return make(data), data


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's own call
@pytest.mark.parametrize(
    "loaders, validation, shared",
    [
        (lambda: (data := windows(), data), "TokenWindows", "TokenWindows"),
        (lambda: (data := Prefetched(windows()), data), "Prefetched", "Prefetched, TokenWindows"),
        (lambda: in_two(Prefetched), "TokenWindows", "TokenWindows"),
        (lambda: in_two(Prefetched)[::-1], "Prefetched", "TokenWindows"),
        (lambda: in_two(in_a_loader)[::-1], "DataLoader", "TokenWindows"),
        (lambda: in_two(in_a_stateful_loader), "TokenWindows", "TokenWindows"),
    ],
)
def test_a_place_that_would_be_lost_is_refused(make_config, make_rack, tmp_path, loaders, validation, shared):
    config = make_config(training={"eval_interval": 1, "checkpoint_dir": str(tmp_path / "run")})
    told = f"validation: got '{validation}'; allowed: batches of its own.*place in the same {shared}$"
    with pytest.raises(ValueError, match=told):
        ArchitectureTrainer(config).train_architecture(make_rack(config), *loaders())


@pytest.mark.parametrize(
    "loaders",
    [
        lambda: (windows(), windows()),
        lambda: (Prefetched(windows()), Prefetched(windows())),
        lambda: (data := list(windows()), data),
        lambda: (data := DataLoader(torch.arange(90).view(10, 9) % 23, batch_size=2), data),
        lambda: (windows(), in_a_loader(list(windows()))),
        lambda: in_two(in_a_loader),  # which is read again up to its place
    ],
)
def test_what_keeps_no_place_or_another_is_taken(loaders):
    check_apart(*loaders(), saves=True)


@pytest.mark.parametrize(
    "loader",
    [
        lambda: Prefetched(windows()),
        lambda: DataLoader(torch.arange(90).view(10, 9), num_workers=1, persistent_workers=True),
    ],
)
@pytest.mark.parametrize("saves", [True, False])
def test_a_loader_of_one_pass_at_a_time_is_refused(loader, saves):
    with pytest.raises(ValueError, match=r"validation: got '\w+'; allowed: (a loader|batches) of its own"):
        check_apart(data := loader(), data, saves=saves)
    check_apart(loader(), loader(), saves=saves)


def test_a_place_that_is_not_saved_may_be_lost(run):
    """The passes of the training are as they were."""
    settings = {"max_steps": 5}
    tokens = torch.randint(23, (66,), generator=torch.Generator().manual_seed(0))
    data = TokenWindows(tokens, 2, 8)  # three batches
    apart, *_ = run(settings, None, None, TokenWindows(tokens, 2, 8))
    shared, *_ = run(settings | {"eval_interval": 1}, None, data, data)
    assert [r.loss for r in shared["records"]] == [r.loss for r in apart["records"]]


def test_as_plain_values():
    assert ValidationRecord(3, 0.5).to_dict() == {"steps": 3, "loss": 0.5}
    assert ValidationRecord(3, 0.5, "stack 1").to_dict() == {"steps": 3, "loss": 0.5, "unit": "stack 1"}
