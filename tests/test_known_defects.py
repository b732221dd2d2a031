"""Defects that published training code has, each shown to be absent here."""

import math
import os
import random

import pytest
import torch
import torch.nn.functional as F
from torch import distributed, nn

from stackwise import ArchitectureTrainer, StackWiseConfig, create_rack_from_config, create_simple_rack
from stackwise.config import ConfigError
from stackwise.prototype import create_small_variant
from stackwise.stability.telemetry import global_norm, gradient_norms
from stackwise.training import RackCheckpoints, get_lr_with_warmup
from stackwise.training import step as training_step
from stackwise.training.distributed import SharedRack
from stackwise.training.loss_scale import LossScale, create_loss_scale
from stackwise.training.processes import Processes

TINY = {"model": {"d_model": 16, "n_heads": 2, "n_kv_heads": 1, "d_ff": 32, "vocab_size": 8}}


def tiny_rack(**changes):
    sizes = {"d_model": 16, "d_ff": 32, "n_heads": 2, "vocab_size": 8} | changes
    return create_simple_rack(n_stacks=1, blocks_per_stack=2, **sizes)


def test_labels_do_not_leak_through_bidirectional_attention():
    # A shifted loss over bidirectional attention reads its own labels: on random tokens, of which
    # nothing can be known, it falls below ln(vocabulary).
    config = StackWiseConfig.from_dict({"training": {"max_steps": 1}})
    with pytest.raises(ValueError, match="bidirectional"):
        ArchitectureTrainer(config).train_architecture(
            tiny_rack(attention_mode="bidirectional"), [torch.randint(8, (4, 9))]
        )


@pytest.mark.parametrize("side", ["left", "right", "none"])
def test_a_mask_never_removes_causality(side):
    rack = tiny_rack().eval()
    ids = torch.randint(8, (2, 10))
    mask = torch.ones_like(ids)
    if side != "none":
        mask[0, slice(0, 3) if side == "left" else slice(7, 10)] = 0
    changed = ids.clone()
    changed[:, 6] = (ids[:, 6] + 1) % 8
    before, after = rack(ids, mask), rack(changed, mask)
    assert torch.equal(before[:, 3:6], after[:, 3:6])
    assert not torch.equal(before[:, 6], after[:, 6])


def test_tied_embedding_starts_at_the_loss_of_knowing_nothing():
    rack = create_simple_rack(1, 2, d_model=512, d_ff=512, n_heads=8, vocab_size=10_000)
    ids = torch.randint(10_000, (2, 65))

    def first_loss():
        with torch.no_grad():
            return F.cross_entropy(rack(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).item()

    assert abs(first_loss() - math.log(10_000)) < 0.1
    nn.init.normal_(rack.embedding.weight)
    assert first_loss() > 100


def test_small_variant_keeps_a_head_and_takes_token_ids():
    # n_heads // 4 reaches 0 for fewer than 4 heads; a prototype without an embedding feeds ids to a Linear.
    variant = create_small_variant(StackWiseConfig.from_dict(TINY)).config
    assert variant.model.n_heads == 1
    rack = create_rack_from_config(variant)
    loss = F.cross_entropy(rack(torch.randint(8, (2, 6))).flatten(0, 1), torch.randint(8, (12,)))
    loss.backward()
    assert rack.embedding.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_no_warmup_is_no_division_by_zero(kind):
    assert get_lr_with_warmup(0, 0, 10, 1e-3, schedule=kind) == 1e-3


def small_run(rack=None, dataloader=None, **training):
    """The records of a run of three steps, and its Rack."""
    plain = {"device": "cpu", "precision": "fp32", "max_steps": 3, "seq_len": 8}
    config = StackWiseConfig.from_dict(merge(TINY, {"training": plain | training}))
    if rack is None:
        torch.manual_seed(0)
        rack = create_rack_from_config(config)
    batches = torch.randint(8, (3, 4, 9), generator=torch.Generator().manual_seed(1))
    result = ArchitectureTrainer(config).train_architecture(rack, dataloader or list(batches))
    return result["records"], rack


def merge(one, other):
    return one | {key: one.get(key, {}) | value for key, value in other.items()}


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd", "inverse_sqrt"])
def test_a_schedule_knows_how_long_it_is(kind):
    # A loop over epochs hands its schedule a `total_steps` that nothing has defined, or that a loader
    # without a length does not give. Here it is the number of updates, whatever the loader is.
    endless = ((torch.randint(8, (4, 9))) for _ in iter(int, 1))
    schedule = {"kind": kind, "warmup_steps": 0}
    records, _ = small_run(dataloader=endless, schedule=schedule, accumulation_steps=2, max_steps=5)
    expected = [get_lr_with_warmup(step, 0, 5, 1e-4, schedule=kind) for step in range(5)]
    assert [record.lr for record in records] == expected
    assert kind == "inverse_sqrt" or records[-1].lr == 0.0


def test_bfloat16_has_no_loss_scale():
    # GradScaler around bf16 multiplies the loss by 65536 and leaves out steps that are sound: bfloat16
    # reaches as far as float32, and its gradients are those of the loss itself.
    seen = []

    def prepare(rack):
        rack.final_norm.register_full_backward_hook(lambda _module, _inputs, outputs: seen.append(outputs[0]))
        return rack

    norms = {}
    for precision in ("fp32", "bf16", "bf16_weights"):
        torch.manual_seed(0)
        records, _ = small_run(prepare(tiny_rack()), precision=precision, max_steps=1)
        norms[precision] = seen[-1].float().norm().item()
        assert create_loss_scale(precision, torch.device("cpu")) is None
        assert not records[0].skipped
    assert norms["bf16"] == pytest.approx(norms["fp32"], rel=0.05)
    assert norms["bf16_weights"] == pytest.approx(norms["fp32"], rel=0.05)


@pytest.mark.parametrize("scale", [1.0, 2.0**16])
def test_a_norm_is_that_of_the_loss_and_not_of_its_scale(scale, monkeypatch):
    # Clipping or checking before `unscale_` sees a norm that is 65536 times too large: everything is clipped.
    monkeypatch.setattr(
        training_step, "create_loss_scale", lambda _precision, device: LossScale(device, initial=scale)
    )
    scaled, rack = small_run(grad_clip=0.5)
    monkeypatch.undo()
    plain, twin = small_run(grad_clip=0.5)
    for one, other in zip(scaled, plain, strict=True):
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
        assert one.loss == pytest.approx(other.loss, rel=1e-6)
    for one, other in zip(rack.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_a_loop_finds_its_device_with_and_without_torchrun(monkeypatch):
    # `self.local_rank` is read in the loop and set nowhere. Here the process says what it is, also where
    # torchrun has said so: with one process nothing changes. Several: `tests/training/test_distributed.py`.
    plain, _ = small_run()
    told = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    under_torchrun, _ = small_run()
    assert [record.loss for record in under_torchrun] == [record.loss for record in plain]
    assert Processes.alone(StackWiseConfig().training).local_rank == 0


@pytest.mark.parametrize("writes", [True, False])
def test_state_in_parts_is_gathered_by_every_process(writes, tmp_path, monkeypatch):
    # Gathering takes all processes: where rank 0 alone gathers, to save, it waits for ever. Here a process
    # that writes nothing gathers as often. With two: `test_a_checkpoint_has_the_whole_rack` in
    # tests/training/test_distributed.py.
    gathered, gather = [], SharedRack.gather

    def counting(self):
        gathered.append(self)
        return gather(self)

    monkeypatch.setattr(SharedRack, "gather", counting)
    monkeypatch.setattr(Processes, "is_main", writes)
    training = {"device": "cpu", "precision": "fp32", "max_steps": 3, "checkpoint_dir": str(tmp_path)}
    training |= {"save_interval": 1, "distributed": {"strategy": "fsdp"}}
    config = StackWiseConfig.from_dict(TINY | {"training": training})
    rack = create_rack_from_config(config)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        processes = Processes.from_environment(config.training, environment={})
        trainer = ArchitectureTrainer(config, processes=processes)
        trainer.train_architecture(rack, [torch.randint(8, (4, 9))])
    finally:
        distributed.destroy_process_group()
    assert len(gathered) == 3 + 1  # at each checkpoint, and in the end
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2", "step-3"]


@pytest.mark.parametrize("value", [True, False, "mixed", "bfloat16", None])
def test_a_precision_is_named_and_no_bool(value):
    # FSDP(mixed_precision=True) takes a policy and gets a bool, which it reads no dtype from.
    with pytest.raises(ConfigError, match=r"training\.precision: got .*'fp32', 'bf16'"):
        StackWiseConfig.from_dict({"training": {"precision": value}})
    with pytest.raises(ConfigError, match=r"mixed_precision: unknown key"):
        StackWiseConfig.from_dict(
            {"training": {"distributed": {"strategy": "fsdp", "mixed_precision": value}}}
        )


def test_gradient_norm_is_no_sum_of_norms():
    rack = tiny_rack(tie_embeddings=False)
    rack(torch.randint(8, (2, 6))).square().mean().backward()
    gradients = [p.grad.double() for p in rack.parameters()]
    expected = torch.cat([g.flatten() for g in gradients]).norm().item()
    assert global_norm(gradient_norms(rack.parameters())).item() == pytest.approx(expected, rel=1e-5)
    assert sum(g.norm().item() for g in gradients) > 1.2 * expected


def test_checkpoint_10_is_newer_than_checkpoint_9(tmp_path):
    training = {"checkpoint_dir": str(tmp_path), "checkpoint": {"keep_last": 5}}
    config = StackWiseConfig.from_dict(TINY | {"training": training})
    manager = RackCheckpoints(tmp_path, config)
    rack = create_rack_from_config(config)
    steps = [9, 10, 100, 99]
    random.Random(0).shuffle(steps)
    for step in steps:
        manager.save(step, rack)
        os.utime(tmp_path / f"step-{step}", (1e9 - step, 1e9 - step))
    assert manager.steps() == [9, 10, 99, 100]
    assert manager.latest().name == "step-100"
