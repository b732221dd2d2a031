"""PrefixOutputs: what is kept is what would be computed, within the budget, and never stale."""

import socket

import pytest
import torch
from safetensors import SafetensorError

from stackwise.config import ObjectiveConfig
from stackwise.model import create_simple_rack
from stackwise.training.block_store import BlockStore
from stackwise.training.objective import Objective
from stackwise.training.prefix import PrefixOutputs, batch_key

CPU = torch.device("cpu")
ENTRY = 2 * 8 * 16 * 4  # bytes of one batch's hidden states


@pytest.fixture
def rack():
    torch.manual_seed(0)
    rack = create_simple_rack(2, 2, d_model=16, d_ff=24, n_heads=2, vocab_size=31)
    return rack.eval().requires_grad_(False)


@pytest.fixture
def store(rack):
    store = BlockStore(rack, CPU)
    yield store
    store.close()


def batch(seed, **parts):
    ids = torch.randint(31, (2, 9), generator=torch.Generator().manual_seed(seed))
    objective = Objective(ObjectiveConfig(), 31)
    return objective.targets({"input_ids": ids, **parts}, (0,))


def computed(rack, targets, depth):
    """The same by the Rack itself."""
    x_BTC = rack.embed(targets.input_ids)
    for block in rack.get_blocks()[:depth]:
        x_BTC = block(x_BTC, attention_mask=targets.attention_mask)
    return x_BTC


def ask(prefix, seed, depth):
    targets = batch(seed)
    return prefix(batch_key(targets), targets, depth)


@pytest.fixture(params=["memory", "disk"])
def directory(request, tmp_path):
    return None if request.param == "memory" else tmp_path


@pytest.mark.parametrize("budget", [0, ENTRY, 2 * ENTRY, 100 * ENTRY])
def test_whatever_the_budget_the_answer_is_the_rack_s(rack, store, directory, budget):
    prefix = PrefixOutputs(rack, store, budget, directory)
    for depth in (1, 2, 3, 2, 4):
        for seed in (0, 1, 2):
            assert ask(prefix, seed, depth).equal(computed(rack, batch(seed), depth))
            assert prefix.statistics.bytes <= budget
    prefix.close()


def test_what_is_kept_moves_on_from_unit_to_unit(rack, store, directory):
    prefix = PrefixOutputs(rack, store, 3 * ENTRY, directory)
    for depth in (1, 2, 3):
        before = prefix.statistics.computed
        for _ in range(2):
            for seed in (0, 1, 2):
                ask(prefix, seed, depth)
        assert prefix.statistics.computed - before == 3  # one Block a batch, however deep, and once
    assert prefix.statistics.bytes == 3 * ENTRY
    assert prefix.statistics.asked == 2 * 3 * (1 + 2 + 3)
    prefix.close()


def test_what_is_beyond_the_budget_is_computed_each_time(rack, store):
    prefix = PrefixOutputs(rack, store, 2 * ENTRY)
    for _ in range(3):
        for seed in (0, 1, 2):
            ask(prefix, seed, 2)
    # Two batches stay; in turn through all, the least recently used would always be the next one.
    assert prefix.statistics.computed == 2 * (2 + 3)


def test_batches_that_do_not_come_again_are_told_of_once_a_unit(rack, store):
    prefix = PrefixOutputs(rack, store, 2 * ENTRY)
    for depth, seeds in ((1, (0, 1, 2)), (2, (2, 1, 0))):  # in another order: what comes is known
        prefix.forget(depth - 1)
        for seed in seeds:
            ask(prefix, seed, depth)
    prefix.forget(2)
    ask(prefix, 3, 3)
    with pytest.warns(UserWarning, match="cache_bytes spares nothing: none of the 2 batches"):
        ask(prefix, 4, 3)
    ask(prefix, 5, 3)


def test_what_trains_is_forgotten(rack, store):
    prefix = PrefixOutputs(rack, store, 100 * ENTRY)
    ask(prefix, 0, 3)
    prefix.forget(3)
    assert prefix.statistics.bytes == ENTRY
    with torch.no_grad():
        rack.get_blocks()[2].feedforward.down.weight.add_(0.1)
    prefix.forget(2)
    assert prefix.statistics.bytes == 0
    assert ask(prefix, 0, 3).equal(computed(rack, batch(0), 3))


def test_keys_tell_apart_all_that_hidden_states_depend_on():
    mask, documents = torch.ones(2, 9, dtype=torch.long), torch.zeros(2, 9, dtype=torch.long)
    cut = mask.clone()
    cut[0, 5:] = 0
    keys = {
        batch_key(targets)
        for targets in (
            batch(0),
            batch(1),
            batch(0, attention_mask=mask),
            batch(0, attention_mask=cut),
            batch(0, document_ids=documents),
            batch(0, document_ids=cut),
        )
    }
    assert len(keys) == 6
    assert batch_key(batch(0)) == batch_key(batch(0))


def test_nothing_is_left_on_disk(rack, store, tmp_path):
    prefix = PrefixOutputs(rack, store, 100 * ENTRY, tmp_path)
    ask(prefix, 0, 1)
    assert [path for path in tmp_path.rglob("*") if path.is_file()]
    prefix.close()
    assert list(tmp_path.iterdir()) == []


def test_folders_of_running_processes_and_other_machines_remain(rack, store, tmp_path):
    killed = tmp_path / f"prefix-{socket.gethostname()}@0"
    elsewhere = tmp_path / f"prefix-{socket.gethostname()}-too@0"
    for folder in (killed, elsewhere):
        folder.mkdir()
        (folder / ".lock").touch()
    first, second = (PrefixOutputs(rack, store, 100 * ENTRY, tmp_path) for _ in range(2))
    assert not killed.exists()
    ask(first, 0, 1)
    second.close()
    assert ask(first, 0, 1).equal(computed(rack, batch(0), 1))
    first.close()
    assert list(tmp_path.iterdir()) == [elsewhere]


@pytest.mark.parametrize("error", [OSError("no room"), SafetensorError("I/O error")])
def test_what_a_full_disk_refuses_is_computed_again(rack, store, tmp_path, monkeypatch, error):
    prefix = PrefixOutputs(rack, store, 100 * ENTRY, tmp_path)
    ask(prefix, 0, 1)

    def full(tensors, path):
        path.write_bytes(b"half of")
        raise error

    with monkeypatch.context() as patched:
        patched.setattr("stackwise.training.prefix.save_file", full)
        with pytest.warns(UserWarning, match=f"no room for more than {ENTRY} bytes: .*{error}"):
            assert ask(prefix, 1, 1).equal(computed(rack, batch(1), 1))
        assert ask(prefix, 2, 1).equal(computed(rack, batch(2), 1))  # asks no more, nor warns
    assert prefix.statistics.bytes == ENTRY
    assert {path.name for path in prefix._folder.iterdir()} == {".lock", batch_key(batch(0))}
    for depth in (1, 2, 3):
        for seed in (0, 1, 2):
            assert ask(prefix, seed, depth).equal(computed(rack, batch(seed), depth))
    prefix.close()


def test_autograd_keeps_nothing_of_a_prefix(rack, store):
    rack.requires_grad_(True)
    prefix = PrefixOutputs(rack, store)
    assert not ask(prefix, 0, 2).requires_grad
