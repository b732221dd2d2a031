"""BlockStore: Blocks that are elsewhere compute the same, learn, and come back."""

import copy
from pathlib import Path

import pytest
import torch

from stackwise import StackWiseConfig
from stackwise.model import create_rack_from_config
from stackwise.model.layout import Layout
from stackwise.training.block_store import BlockStore, block_writer
from tests.training_runs import mapped_from

pytestmark = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs proc(5)")
CPU = torch.device("cpu")
CONFIG = StackWiseConfig.from_dict(
    {
        "model": {
            "vocab_size": 31,
            "d_model": 16,
            "n_heads": 2,
            "n_kv_heads": 1,
            "d_ff": 24,
            "architecture": {"n_stacks": 2, "blocks_per_stack": 2},
        }
    }
)


@pytest.fixture
def rack():
    torch.manual_seed(0)
    return create_rack_from_config(CONFIG)


def state_of(rack):
    return {name: tensor.clone() for name, tensor in rack.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def test_unsupported_tensor_type_is_refused_before_any_block_moves(rack, tmp_path):
    class Quantized(torch.Tensor):
        pass

    rack.get_blocks()[2].register_buffer("scale", torch.ones(3).as_subclass(Quantized))
    folder = tmp_path / "blocks"
    with pytest.raises(ValueError, match="allowed: none or cpu: scale of Block 2 is of Quantized"):
        BlockStore(rack, CPU, "disk", folder)
    assert not folder.exists() and mapped_from(next(rack.parameters())) is None


def test_on_disk_a_rack_is_whole_and_every_block_is_a_mapped_file(rack, tmp_path):
    before, ids = state_of(rack), torch.randint(31, (2, 7))
    logits = rack(ids)
    store = BlockStore(rack, CPU, "disk", tmp_path)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == [f"block-{i:05}.safetensors" for i in range(4)]
    for i, block in enumerate(rack.get_blocks()):
        files = {mapped_from(p) for p in block.parameters()}
        assert files == {str(tmp_path / f"block-{i:05}.safetensors")}
    assert mapped_from(rack.embedding.weight) is None
    assert same(state_of(rack), before) and rack(ids).equal(logits)
    store.close()


@pytest.mark.parametrize("kind", ["none", "disk"])
def test_run_is_the_blocks_in_turn_without_gradients(rack, tmp_path, kind):
    x_BTC = torch.randn(2, 7, 16)
    expected = rack.forward_from_stack(x_BTC, 0)
    store = BlockStore(rack, CPU, kind, tmp_path if kind == "disk" else None)
    with store.resident([1]):
        found = store.run(range(4), x_BTC, Layout(x_BTC))
    assert found.equal(expected) and not found.requires_grad
    store.close()


def test_updates_of_a_resident_block_are_kept(rack, tmp_path):
    store = BlockStore(rack, CPU, "disk", tmp_path)
    block, frozen = rack.get_blocks()[2], rack.get_blocks()[1]
    with store.resident([2]):
        assert {mapped_from(p) for p in block.parameters()} == {None}
        assert mapped_from(frozen.feedforward.up.weight) is not None
        with torch.no_grad():
            block.feedforward.up.weight.fill_(3.0)
        block.feedforward.up.weight.grad = torch.ones_like(block.feedforward.up.weight)
    assert mapped_from(block.feedforward.up.weight) is not None
    assert (block.feedforward.up.weight == 3.0).all() and block.feedforward.up.weight.grad is None
    x_BTC = torch.randn(1, 3, 16)
    assert store.run([2], x_BTC, Layout(x_BTC)).equal(block(x_BTC))
    store.close()


def test_a_folder_is_one_run_s_until_that_is_over(rack, tmp_path):
    store = BlockStore(rack, CPU, "disk", tmp_path)
    with pytest.raises(ValueError, match=r"training\.scope\.offload_dir: got .* no other run"):
        BlockStore(copy.deepcopy(rack), CPU, "disk", tmp_path)
    store.close()
    BlockStore(rack, CPU, "disk", tmp_path).close()


def test_expected_blocks_are_read_without_changing_state(rack, tmp_path):
    store = BlockStore(rack, CPU, "disk", tmp_path)
    before = state_of(rack)
    store.expect([2, 3])
    store.close()  # waits for the reader
    assert same(state_of(rack), before)
    BlockStore(rack, CPU).expect([0])


def test_frozen_blocks_stay_frozen(rack, tmp_path):
    rack.get_stack(0).freeze()
    store = BlockStore(rack, CPU, "disk", tmp_path)
    with store.resident([0, 3]):
        flags = [{p.requires_grad for p in block.parameters()} for block in rack.get_blocks()]
    assert flags == [{False}, {False}, {True}, {True}]
    store.close()


def test_a_rack_built_onto_disk_is_the_same_rack(rack, tmp_path):
    torch.manual_seed(0)
    built = create_rack_from_config(CONFIG, place=block_writer(tmp_path))
    assert same(state_of(built), state_of(rack))
    assert all(mapped_from(p) for block in built.get_blocks() for p in block.parameters())


def test_a_rack_that_was_built_onto_disk_may_stay_in_its_folder(tmp_path):
    built = create_rack_from_config(CONFIG, place=block_writer(tmp_path))
    before = state_of(built)
    store = BlockStore(built, CPU, "disk", tmp_path)
    assert same(state_of(built), before)
    store.close()


def test_a_rack_is_not_built_over_the_blocks_of_another_run(rack, tmp_path):
    store = BlockStore(rack, CPU, "disk", tmp_path)
    x_BTC = torch.randn(1, 3, 16)
    expected = store.run(range(4), x_BTC, Layout(x_BTC))
    torch.manual_seed(1)
    with pytest.raises(ValueError, match=r"training\.scope\.offload_dir: got .* no other run"):
        create_rack_from_config(CONFIG, place=block_writer(tmp_path))
    assert store.run(range(4), x_BTC, Layout(x_BTC)).equal(expected)
    store.close()
    create_rack_from_config(CONFIG, place=block_writer(tmp_path))


def test_rack_built_onto_disk_keeps_its_weights_if_another_is_built_there(tmp_path):
    """Two runs that begin together: neither has its Blocks there yet."""
    built = create_rack_from_config(CONFIG, place=block_writer(tmp_path))
    before = state_of(built)
    other = create_rack_from_config(CONFIG, place=block_writer(tmp_path))
    store = BlockStore(built, CPU, "disk", tmp_path)
    assert same(state_of(built), before) and not same(state_of(other), before)
    x_BTC = torch.randn(1, 3, 16)
    assert store.run(range(4), x_BTC, Layout(x_BTC)).equal(built.forward_from_stack(x_BTC, 0))
    store.close()


def test_an_error_while_resident_still_puts_blocks_back(rack, tmp_path):
    store = BlockStore(rack, CPU, "disk", tmp_path)
    with pytest.raises(RuntimeError, match="stop"), store.resident([0]):
        raise RuntimeError("stop")
    assert mapped_from(next(rack.get_blocks()[0].parameters())) is not None
    store.close()


def test_a_damaged_file_is_named(rack, tmp_path):
    store = BlockStore(rack, CPU, "disk", tmp_path)
    path = tmp_path / "block-00001.safetensors"
    path.unlink()  # the Block's own mapping keeps the old file
    path.write_bytes(b"not a safetensors file")
    x_BTC = torch.randn(1, 3, 16)
    with pytest.raises(ValueError, match=r"block-00001\.safetensors: damaged"):
        store.run(range(4), x_BTC, Layout(x_BTC))
    store.close()


def test_the_memory_of_the_cpu_is_no_other_place_on_the_cpu(rack):
    with pytest.raises(ValueError, match=r"training\.scope\.offload: got 'cpu'"):
        BlockStore(rack, CPU, "cpu")


def test_a_copy_of_a_rack_on_disk_is_independent(rack, tmp_path):
    store = BlockStore(rack, CPU, "disk", tmp_path)
    twin = copy.deepcopy(rack)
    with store.resident([0]), torch.no_grad():
        rack.get_blocks()[0].feedforward.up.weight.zero_()
    assert not twin.get_blocks()[0].feedforward.up.weight.eq(0).all()
    store.close()
