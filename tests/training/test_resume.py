"""A run that goes on: the bits that it would have ended with, wherever it was left."""

import contextlib
import errno
import itertools
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from stackwise import cli
from stackwise.checkpoint import EXIT_CODE, CheckpointWarning
from stackwise.checkpoint.content import Content
from stackwise.config import ConfigError
from stackwise.data import Prefetched, TokenWindows, create_data
from stackwise.stability.telemetry import StepRecord
from stackwise.training import (
    ArchitectureTrainer,
    NonFiniteStepError,
    TrainingTerminated,
    load_rack,
)
from stackwise.training.batch_stream import BatchStream
from stackwise.training.record_log import read_json_lines
from stackwise.training.run_state import check_same_run, records_of, state_of_records
from stackwise.training.schedule import get_lr_with_warmup
from tests.forked import end_of, start
from tests.training_runs import BLOCKWISE
from tests.training_runs import RUNS as TRAINING_RUNS

RUNS = TRAINING_RUNS | {
    "asynchronous": {"checkpoint": {"keep_last": 99, "asynchronous": True}},
}
STEPS = 4


@pytest.fixture
def make(make_config, make_rack, make_batches, tmp_path, monkeypatch):
    """A configuration with dropout, saved at every step; a Rack of it, and batches that end in the middle."""

    monkeypatch.chdir(tmp_path)

    def made(settings, **more):
        tied = settings.get("scope", {}).get("head") != "per_unit"
        training = {"max_steps": STEPS, "checkpoint_dir": str(tmp_path / "run"), "save_interval": 1}
        training |= {"checkpoint": {"keep_last": 99}} | settings | more
        config = make_config(model={"dropout": 0.1, "tie_embeddings": tied}, training=training)
        return config, make_rack(config), make_batches(config, count=3)

    return made


def train(config, rack, batches):
    before = torch.get_rng_state()
    result = ArchitectureTrainer(config, progress=False).train_architecture(rack, batches, batches)
    assert torch.get_rng_state().equal(before)
    return result


def weights(rack):
    return torch.cat([p.detach().flatten() for p in rack.parameters()])


def untimed(value):
    """All but what takes time, and how much of the prefix was computed once more."""
    if isinstance(value, dict):
        timed = ("seconds", "tokens_per_second", "prefix_blocks")
        return {key: untimed(each) for key, each in value.items() if key not in timed}
    return [untimed(each) for each in value] if isinstance(value, list) else value


def forget(folder, step):
    """Leave what was on the disk behind this step."""
    for path in Path(folder).iterdir():
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)


# Each way of training once; of all ways that go together the others in `make test-all`.
LONGER = {"narrow weights", "accumulated", "narrow blocks", "own heads", "right to left", "evaluated"}


@pytest.mark.parametrize(
    "settings",
    [pytest.param(run, id=name, marks=[pytest.mark.slow] * (name in LONGER)) for name, run in RUNS.items()],
)
def test_resumed_run_is_bitwise_identical(make, settings):
    config, rack, batches = make(settings)
    expected = train(config, rack, batches)
    total = len(expected["records"])
    for step in sorted({1, total // 2 + 1, total - 1, total}, reverse=True):
        forget(config.training.checkpoint_dir, step)
        config, fresh, batches = make(settings, resume=True)
        with torch.no_grad():
            fresh.final_norm.weight.fill_(9.0)  # what it begins with does not matter
        result = train(config, fresh, batches)
        assert torch.equal(weights(fresh), weights(rack)), step
        assert untimed(dict(result)) == untimed(dict(expected)), step


def test_resume_without_checkpoints_starts_a_new_run(make):
    config, rack, batches = make({})
    train(config, rack, batches)
    shutil.rmtree(config.training.checkpoint_dir)
    config, fresh, batches = make({}, resume=True)
    train(config, fresh, batches)
    assert torch.equal(weights(fresh), weights(rack))


def test_damaged_checkpoint_is_skipped(make):
    config, rack, batches = make({})
    train(config, rack, batches)
    newest = Path(config.training.checkpoint_dir) / f"step-{STEPS}"
    damaged = bytearray((newest / "model.safetensors").read_bytes())
    damaged[-1] ^= 1
    (newest / "model.safetensors").write_bytes(damaged)
    config, fresh, batches = make({}, resume=True)
    with pytest.warns(CheckpointWarning, match="model.safetensors"):
        train(config, fresh, batches)
    assert torch.equal(weights(fresh), weights(rack))


def test_resuming_a_finished_run_returns_its_result(make):
    config, rack, batches = make({})
    expected = train(config, rack, batches)
    config, fresh, _ = make({}, resume=True)
    result = train(config, fresh, iter([]))  # not a batch is asked for
    assert untimed(dict(result)) == untimed(dict(expected))


def test_another_configuration_is_refused(make, make_config, make_rack):
    config, rack, batches = make({})
    train(config, rack, batches)
    config.training.resume = True
    config.training.optimizer.lr, config.training.max_steps = 3e-2, 3
    before = weights(rack).clone()
    with pytest.raises(
        ValueError, match=r"training\.resume.*training\.max_steps: got 3; allowed: 4 or more"
    ) as refusal:
        train(config, rack, batches)
    assert "training.optimizer.lr: got 0.03; allowed: 0.01" in str(refusal.value)
    assert torch.equal(weights(rack), before)


SHORT, LONG = 4, 8


def extended(make, settings, left, match=None):
    """Weights and records of a run of 4 steps that is resumed after `left` of them, as one of 8."""
    config, rack, batches = make(settings, max_steps=SHORT)
    train(config, rack, batches)
    forget(config.training.checkpoint_dir, left)
    config, fresh, batches = make(settings, max_steps=LONG, resume=True)
    with contextlib.nullcontext() if match is None else pytest.warns(UserWarning, match=match):
        result = train(config, fresh, batches)
    return config, weights(fresh), result["records"]


@pytest.mark.parametrize(
    "kind, left", [("constant", 2), ("constant", 4), ("inverse_sqrt", 2), ("inverse_sqrt", 4), ("wsd", 2)]
)
def test_longer_run_has_the_bits_of_a_long_one(make, kind, left):
    """If the learning rate of the first steps does not depend on the length of the run."""
    schedule = {"kind": kind, "warmup_steps": 1}
    schedule |= {"decay_fraction": 0.25} if kind == "wsd" else {}
    config, resumed, _ = extended(make, {"schedule": schedule}, left)
    shutil.rmtree(config.training.checkpoint_dir)
    config, whole, batches = make({"schedule": schedule}, max_steps=LONG)
    train(config, whole, batches)
    assert torch.equal(resumed, weights(whole))


@pytest.mark.parametrize("left", [2, 4], ids=["interrupted", "finished"])
@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_longer_run_follows_the_longer_schedule(make, kind, left):
    schedule = {"kind": kind, "warmup_steps": 1}
    match = rf"max_steps: got 8, was 4: the schedule '{kind}' .* of step {min(left, 3)} is"
    config, _, records = extended(make, {"schedule": schedule}, left, match)
    short, long = (
        [get_lr_with_warmup(step, 1, steps, config.training.optimizer.lr, 0.0, kind) for step in range(steps)]
        for steps in (SHORT, LONG)
    )
    assert [record.lr for record in records] == [*short[:left], *long[left:]]


@pytest.mark.parametrize("settings", [BLOCKWISE, {"scope": {"growth": True}}], ids=["blockwise", "growing"])
def test_phases_keep_their_length(make, settings):
    with pytest.raises(ValueError, match=r"training\.max_steps: got 8; allowed: 4$"):
        extended(make, settings, 2)


def test_longer_run_of_a_task_goes_on(make_config):
    """The rows of a task are as many as a run takes."""
    short, long = (
        create_data(make_config(data={"task": "copy", "dataset_path": None}, training={"max_steps": steps}))[
            0
        ]
        for steps in (SHORT, LONG)
    )
    list(short)
    stream = BatchStream(short)
    islice_(stream, SHORT)
    again = BatchStream(long)
    again.load_state_dict(stream.state_dict())
    [(_, [found])] = islice_(again, 1)
    assert torch.equal(found["input_ids"], long.batch(0, SHORT)["input_ids"])


def test_data_may_be_at_another_place(make_config, tmp_path):
    for name in ("here", "there"):
        (tmp_path / name).write_text("text" * 500)
    ours, theirs = (make_config(data={"dataset_path": str(tmp_path / name)}) for name in ("here", "there"))
    check_same_run(ours, theirs.to_dict(), tmp_path)
    with pytest.raises(ValueError, match=r"data\.dataset_path"):
        check_same_run(ours, make_config(data={"dataset_path": None}).to_dict(), tmp_path)


def test_settings_without_effect_on_weights_may_change(make):
    config, rack, batches = make({})
    train(config, rack, batches)
    forget(config.training.checkpoint_dir, 2)
    free = {"log_interval": 3, "save_interval": 9, "eval_interval": 1, "recompute": {"kind": "full"}}
    config, fresh, batches = make(free, resume=True)
    train(config, fresh, batches)
    assert torch.equal(weights(fresh), weights(rack))


def test_resume_without_checkpoint_dir_is_refused(make_config):
    with pytest.raises(ConfigError, match=r"training\.resume: got True.*checkpoint_dir=not null"):
        make_config(training={"resume": True, "checkpoint_dir": None})


def test_run_resumes_before_a_non_finite_step(make):
    """From the last checkpoint before it; what broke it is gone."""
    config, rack, batches = make({"save_interval": 2})
    train(config, rack, batches)
    shutil.rmtree(config.training.checkpoint_dir)
    config, broken, batches = make({"save_interval": 2})
    passes = []

    def breaks(module, arguments, output):
        passes.append(1)
        return output * float("nan") if len(passes) == 4 else output

    handle = broken.final_norm.register_forward_hook(breaks)
    with pytest.raises(NonFiniteStepError):
        train(config, broken, batches)
    handle.remove()
    config, fresh, batches = make({"save_interval": 2}, resume=True)
    train(config, fresh, batches)
    assert torch.equal(weights(fresh), weights(rack))


def test_what_is_written_by_a_run_without_a_checkpoint_yet(make, tmp_path):
    """It begins anew, and its steps are there once."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log, folder = tmp_path / "run.jsonl", tmp_path / "events"
    telemetry = {"telemetry": {"jsonl": str(log), "tensorboard": str(folder)}}
    config, rack, batches = make(telemetry)
    train(config, rack, batches)
    shutil.rmtree(config.training.checkpoint_dir)
    config, fresh, batches = make(telemetry, resume=True)
    train(config, fresh, batches)
    assert torch.equal(weights(fresh), weights(rack))
    events = accumulator.EventAccumulator(str(folder)).Reload()
    assert [line["step"] for line in read_json_lines(log).lines] == list(range(STEPS))
    assert [event.step for event in events.Scalars("train/loss")] == list(range(STEPS))
    # What there was may have been another run's, so it is elsewhere now.
    aside = read_json_lines(tmp_path / "run.jsonl.1").lines
    assert [line["loss"] for line in aside] == [line["loss"] for line in read_json_lines(log).lines]
    assert len([*(folder / "before-1").iterdir()]) == 1


def test_a_request_to_end_is_heard_where_every_step_saves(make, monkeypatch):
    """Also in a phase that is shorter than anything is asked at."""
    config, rack, batches = make(BLOCKWISE)
    train(config, rack, batches)
    shutil.rmtree(config.training.checkpoint_dir)
    config, fresh, batches = make(BLOCKWISE)
    asked = []

    @contextlib.contextmanager
    def termination(self):
        yield lambda steps: asked.append(steps) or EXIT_CODE * (steps == STEPS + 1)

    monkeypatch.setattr(ArchitectureTrainer, "_termination", termination)
    with pytest.raises(TrainingTerminated) as ended:
        train(config, fresh, batches)
    assert (ended.value.code, ended.value.steps) == (EXIT_CODE, STEPS + 1)
    assert asked == list(range(1, STEPS + 2))
    monkeypatch.undo()
    config, fresh, batches = make(BLOCKWISE, resume=True)
    train(config, fresh, batches)
    assert torch.equal(weights(fresh), weights(rack))


def test_the_epoch_of_a_dataset_in_a_loader(make_config):
    config = make_config(model={"vocab_size": 256}, training={"seq_len": 512}, data={"dataset_path": None})
    config.data.validation_fraction = 0.99
    small, _ = create_data(config)
    stream = BatchStream(DataLoader(small, batch_size=None))
    islice_(stream, len(small) + 1)
    state, [expected] = stream.state_dict(), next(stream)[1]
    again = BatchStream(DataLoader(create_data(config)[0], batch_size=None))
    again.load_state_dict(state)
    assert torch.equal(next(again)[1][0]["input_ids"], expected["input_ids"])


@pytest.mark.parametrize(
    "intervals, kept",
    [
        ({"save_interval": 1, "eval_interval": 3}, ["step-3", "step-4"]),
        ({"save_interval": 3, "eval_interval": 4}, ["step-4"]),
        ({"save_interval": 2, "eval_interval": 3}, None),
        ({"save_interval": 2, "eval_interval": 3, "max_steps": 6}, ["step-6"]),
        ({"save_interval": 5, "eval_interval": 9}, ["step-4"]),  # it is all there is
        (
            {
                "save_interval": 2,
                "eval_interval": 3,
                "checkpoint": {"keep_last": 1, "keep_every": 2, "keep_best": 1},
            },
            ["step-2", "step-4"],  # all stay by their number
        ),
    ],
)
def test_best_checkpoint_is_chosen_among_evaluated_steps(make, intervals, kept):
    """Among steps that are saved only those that are evaluated count."""
    config, rack, batches = make({"checkpoint": {"keep_last": 1, "keep_best": 1}} | intervals)
    run = ArchitectureTrainer(config, progress=False).train_architecture
    if kept is None:
        with pytest.raises(
            ValueError, match=r"training\.checkpoint\.keep_best: got 1; allowed: 0, or an eval_"
        ):
            run(rack, batches, batches)
        return
    run(rack, batches, batches)
    assert set(kept) == {path.name for path in Path(config.training.checkpoint_dir).iterdir()}


def test_telemetry_lines_continue_without_duplicates(make, tmp_path):
    telemetry = {"telemetry": {"jsonl": str(tmp_path / "run.jsonl")}}
    config, rack, batches = make(telemetry)
    expected = train(config, rack, batches)
    forget(config.training.checkpoint_dir, 2)
    config, fresh, batches = make(telemetry, resume=True)
    train(config, fresh, batches)
    lines, _ = read_json_lines(tmp_path / "run.jsonl")
    # Those of the steps that are made once more are there once.
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert [line["loss"] for line in lines] == [record.loss for record in expected["records"]]
    tokens = list(itertools.accumulate(record.tokens for record in expected["records"]))
    assert [line["total_tokens"] for line in lines] == tokens
    seconds = [line["seconds"] for line in lines]
    assert seconds == sorted(seconds)


def test_a_full_disk_does_not_end_the_training(make, monkeypatch):
    config, rack, batches = make({"save_interval": 2})
    expected = train(config, rack, batches)
    shutil.rmtree(config.training.checkpoint_dir)
    config, fresh, batches = make({"save_interval": 2})
    sync, calls = os.fsync, []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(CheckpointWarning, match="step 2 is not written.*No space left"):
        result = train(config, fresh, batches)
    assert len(result["records"]) == len(expected["records"])
    assert [path.name for path in Path(config.training.checkpoint_dir).iterdir()] == ["step-4"]
    assert torch.equal(weights(fresh), weights(rack))


def test_failure_to_write_the_last_checkpoint_is_raised(make, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    config, rack, batches = make({"save_interval": 9})
    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(CheckpointWarning), pytest.raises(OSError, match="the last checkpoint, of step 4"):
        train(config, rack, batches)


def drawn():
    return torch.Generator().manual_seed(3)


class Late(RandomSampler):
    """With a generator of its own as soon as it is gone through, as the one of accelerate."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        if self.generator is None:
            self.generator = torch.Generator()
        self.generator.manual_seed(self.epoch)
        yield from super().__iter__()


LOADERS = {
    "shuffling": lambda rows: DataLoader(rows, batch_size=2, shuffle=True),
    "own generator": lambda rows: DataLoader(rows, batch_size=2, shuffle=True, generator=drawn()),
    "sampler's generator": lambda rows: DataLoader(
        rows, batch_size=2, sampler=RandomSampler(rows, generator=drawn())
    ),
    "late generator": lambda rows: DataLoader(rows, batch_size=2, sampler=Late(rows)),
    "workers": lambda rows: DataLoader(rows, batch_size=2, shuffle=True, num_workers=1),
    "stateful": lambda rows: StatefulDataLoader(rows, batch_size=2, shuffle=True),
    "list": lambda rows: list(rows.split(2)),
}


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's own call
@pytest.mark.parametrize(
    "name, done",
    [
        pytest.param(name, done, marks=[pytest.mark.slow] if name == "workers" and done != 2 else [])
        for name in LOADERS
        for done in range(4)
    ],
)
def test_a_stream_goes_on_with_the_same_batches(name, done):
    """From each place of three passes of three batches, two a step."""
    loader_of = LOADERS[name]
    rows = torch.arange(6 * 3).view(6, 3)

    def taken(stream, count):
        return [
            (epoch, torch.cat([b["input_ids"] for b in batches])) for epoch, batches in islice_(stream, count)
        ]

    torch.manual_seed(5)
    stream = BatchStream(loader_of(rows), 2)
    taken(stream, done)
    state, states = stream.state_dict(), torch.get_rng_state()
    expected = taken(stream, 5 - done)
    torch.manual_seed(99)
    again = BatchStream(loader_of(rows), 2)
    again.load_state_dict(state)
    torch.set_rng_state(states)
    for (epoch, ids), (other_epoch, other) in zip(expected, taken(again, 5 - done), strict=True):
        assert epoch == other_epoch and torch.equal(ids, other)


@pytest.mark.parametrize("name", ["own generator", "late generator"])
def test_a_loader_with_a_generator_goes_on_in_a_unit_and_behind_it(make, name):
    def train_on(config, rack, batches):
        return train(config, rack, LOADERS[name](torch.cat(batches)))

    config, rack, batches = make(BLOCKWISE)
    train_on(config, rack, batches)
    for step in (STEPS + 1, STEPS, 1):
        forget(config.training.checkpoint_dir, step)
        config, fresh, batches = make(BLOCKWISE, resume=True)
        train_on(config, fresh, batches)
        assert torch.equal(weights(fresh), weights(rack)), step


def test_a_loader_whose_generator_is_missing_is_refused():
    rows = torch.arange(18).view(6, 3)
    stream = BatchStream(LOADERS["own generator"](rows))
    next(stream)
    told = r"generators of the dataloader: got 0; allowed: 1 \(the number in the saved state\)"
    for reads in (True, False):
        with pytest.raises(ValueError, match=told):
            BatchStream(LOADERS["shuffling"](rows)).load_state_dict(stream.state_dict(), reads=reads)


def test_what_others_drew_from_its_generator_since_the_pass_began():
    rows, streams = torch.arange(18).view(6, 3), []
    for _ in range(2):
        loader = LOADERS["own generator"](rows)
        streams.append((BatchStream(loader), loader.generator))
    (stream, generator), (again, _) = streams
    next(stream)
    torch.rand(3, generator=generator)
    again.load_state_dict(stream.state_dict())
    for (_, [expected]), (_, [found]) in zip(islice_(stream, 5), islice_(again, 5), strict=True):
        assert torch.equal(found["input_ids"], expected["input_ids"])


@pytest.mark.parametrize("reads", [True, False])
def test_workers_that_stay_are_told_of(reads):
    loader = DataLoader(torch.arange(18).view(6, 3), num_workers=1, persistent_workers=True)
    stream = BatchStream(loader)
    with pytest.warns(UserWarning, match="persistent_workers draw their seeds once"):
        stream.load_state_dict(stream.state_dict(), reads=reads)


def test_the_tokenizer_is_that_of_the_run(make_config, tmp_path):
    (tmp_path / "text").write_text("text")
    ours, theirs = (
        make_config(data={"dataset_path": str(tmp_path / "text"), "tokenizer": tokenizer})
        for tokenizer in ("byte", "words")
    )
    with pytest.raises(ValueError, match=r"data\.tokenizer: got 'byte'; allowed: 'words'"):
        check_same_run(ours, theirs.to_dict(), tmp_path)


def islice_(iterator, count):
    return [next(iterator) for _ in range(count)]


def test_our_batches_are_not_made_again(make_config, monkeypatch):
    config = make_config(model={"vocab_size": 256}, data={"dataset_path": None})
    training, _ = create_data(config)
    with contextlib.closing(Prefetched(training)) as ahead:
        stream = BatchStream(ahead)
        islice_(stream, 3)
        state, expected = stream.state_dict(), next(stream)
    made, batch = [], type(training).batch
    monkeypatch.setattr(
        type(training), "batch", lambda self, *place: made.append(place) or batch(self, *place)
    )
    again = BatchStream(create_data(config)[0])
    again.load_state_dict(state)
    epoch, [found] = next(again)
    assert epoch == expected[0] and torch.equal(found["input_ids"], expected[1][0]["input_ids"])
    assert made == [(0, 3)]


@pytest.mark.parametrize("reads_ahead", [False, True])
@pytest.mark.parametrize("steps", [1, 3, 4, 5, 11])
def test_our_batches_are_not_made_to_be_left_out(monkeypatch, steps, reads_ahead):
    """Passes have 8 batches, and steps 2: also where a pass has just ended."""
    training = TokenWindows(torch.arange(145) % 23, batch_size=2, seq_len=8, seed=3)
    assert len(training) == 8
    made, batch = [], type(training).batch
    monkeypatch.setattr(
        type(training), "batch", lambda self, *place: made.append(place) or batch(self, *place)
    )
    with contextlib.closing(Prefetched(training)) as ahead:
        loader = ahead if reads_ahead else training
        taken = BatchStream(loader, 2)
        islice_(taken, steps)
        state, (epoch, expected) = taken.state_dict(), next(taken)
        ahead.close()
        made.clear()
        seeking = BatchStream(loader, 2, steps)
        assert seeking.state_dict() == state
        assert not made
        found = next(seeking)
    assert found[0] == epoch and seeking.place == taken.place
    for ours, theirs in zip(found[1], expected, strict=True):
        assert torch.equal(ours["input_ids"], theirs["input_ids"])
    assert made[:2] == [divmod(2 * steps, 8), divmod(2 * steps + 1, 8)]


def test_too_few_batches_are_refused():
    stream = BatchStream([torch.ones(1, 2)] * 3)
    islice_(stream, 3)
    with pytest.raises(ValueError, match="batches of the dataloader: got 2; allowed: 3 or more in epoch 0"):
        BatchStream([torch.ones(1, 2)] * 2).load_state_dict(stream.state_dict())


numbers = st.floats(width=64, allow_nan=False)
RECORDS = st.builds(
    StepRecord,
    st.integers(0, 2**53),
    numbers,
    numbers,
    numbers,
    st.booleans(),
    tokens=st.none() | st.integers(0, 2**53),
    unit=st.none() | st.sampled_from(["stack 0", "block 1", ""]),
)


@given(st.lists(RECORDS, max_size=5))
def test_records_come_back(records):
    assert records_of(state_of_records(records)) == records


SCRIPT = """
training:
  {max_steps: 300, batch_size: 2, seq_len: 32, device: cpu, precision: fp32, save_interval: 1000,
   log_interval: 5, checkpoint_dir: run, telemetry: {jsonl: run.jsonl}}
model:
  {vocab_size: 256, d_model: 32, d_ff: 64, n_heads: 2, n_kv_heads: 2, dropout: 0.1,
   architecture: {n_stacks: 1, blocks_per_stack: 2}}
data: {validation_fraction: 0.0}
"""


def command(folder, arguments):
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if the tests run in the background
    sys.exit(cli.main(arguments))


@pytest.mark.parametrize("number, exit_code", [(signal.SIGTERM, EXIT_CODE), (signal.SIGINT, 130)])
def test_signal_saves_and_the_run_can_be_resumed(tmp_path, number, exit_code):
    """The same command with resume ends with the bits of a run that was not interrupted."""
    ended, whole = tmp_path / "ended", tmp_path / "whole"
    for folder in (ended, whole):
        folder.mkdir()
        (folder / "run.yaml").write_text(SCRIPT)
    arguments = ["train", "run.yaml", "--progress", "off"]
    output, threads = tmp_path / "output", str(torch.get_num_threads())  # as of the runs below
    process = start(command, ended, arguments, output=output, OMP_NUM_THREADS=threads)
    while not (ended / "run.jsonl").exists() or not (ended / "run.jsonl").stat().st_size:
        assert process.is_alive(), output.read_text()
        time.sleep(0.01)
    os.kill(process.pid, number)
    code, error = end_of(process), output.read_text()
    assert code == exit_code, error
    [saved] = (ended / "run").iterdir()
    step = int(saved.name.removeprefix("step-"))
    assert 0 < step < 300 and f"after {step} steps" in error and "training.resume" in error
    for folder, more in ((ended, ["--training.resume", "true"]), (whole, [])):
        with contextlib.chdir(folder):
            assert cli.main([*arguments, *more]) == 0
    one, other = (load_rack(folder / "run/step-300").state_dict() for folder in (ended, whole))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_telemetry_totals_continue_after_resume(make, tmp_path):
    """No step twice, and tokens and seconds since the run began."""
    log = tmp_path / "steps.jsonl"
    telemetry = {"jsonl": str(log), "tensorboard": str(tmp_path / "events")}
    config, rack, batches = make({"telemetry": telemetry})
    train(config, rack, batches)
    whole = read_json_lines(log).lines
    forget(config.training.checkpoint_dir, 2)
    config, fresh, batches = make({"telemetry": telemetry}, resume=True)
    train(config, fresh, batches)
    lines = read_json_lines(log).lines
    assert [line["step"] for line in lines] == [line["step"] for line in whole] == list(range(STEPS))
    assert lines[:2] == whole[:2]
    assert [line["loss"] for line in lines] == [line["loss"] for line in whole]
    assert [line["total_tokens"] for line in lines] == [line["total_tokens"] for line in whole]
    seconds = [line["seconds"] for line in lines]
    assert seconds == sorted(seconds)


def test_a_request_to_end_on_a_full_disk_is_no_promise(make, monkeypatch):
    """Who asked is not told that the run is saved where it is not."""
    config, rack, batches = make({"save_interval": 99})

    @contextlib.contextmanager
    def termination(self):
        yield lambda steps: EXIT_CODE * (steps == 2)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(ArchitectureTrainer, "_termination", termination)
    monkeypatch.setattr(os, "fsync", full)
    with (
        pytest.raises(OSError, match=r"last checkpoint, of step 2, is not written.*No space left"),
        pytest.warns(CheckpointWarning, match="step 2 is not written"),
    ):
        train(config, rack, batches)


@pytest.mark.parametrize("settings", [RUNS["growing blocks"], RUNS["own heads"], RUNS["narrow weights"]])
def test_asynchronous_checkpoints_are_of_their_step(make, monkeypatch, settings):
    """Also if the next phase begins with other Blocks or another head than the last one ended with."""
    config, rack, batches = make(settings)
    expected = train(config, rack, batches)
    shutil.rmtree(config.training.checkpoint_dir)
    write = Content.write
    monkeypatch.setattr(Content, "write", lambda *given: (time.sleep(0.05), write(*given))[1])
    asynchronous = settings | {"checkpoint": {"keep_last": 99, "asynchronous": True}}
    config, fresh, batches = make(asynchronous)
    train(config, fresh, batches)
    assert torch.equal(weights(fresh), weights(rack))
    total = len(expected["records"])
    assert len(list(Path(config.training.checkpoint_dir).iterdir())) == total
    for step in (total - 1, STEPS):
        forget(config.training.checkpoint_dir, step)
        config, fresh, batches = make(asynchronous, resume=True)
        train(config, fresh, batches)
        assert torch.equal(weights(fresh), weights(rack)), step


def test_trainer_calls_on_checkpoint(make):
    config, rack, batches = make({})
    told = []
    ArchitectureTrainer(config, on_checkpoint=told.append).train_architecture(rack, batches)
    assert [folder.name for folder in told] == ["step-1", "step-2", "step-3", "step-4"]


def test_folder_with_an_interrupted_replacement_counts_as_used(make):
    config, rack, batches = make({"save_interval": 99})
    train(config, rack, batches)
    folder = Path(config.training.checkpoint_dir)
    (folder / "step-4").rename(folder / ".step-4.999999999.old")
    config, fresh, batches = make({})
    with pytest.raises(ValueError, match=r"already holds checkpoints of steps \[4\]"):
        train(config, fresh, batches)
