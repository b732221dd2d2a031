"""Defects that published training code has, each shown to be absent here."""

import math
import os
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ArchitectureTrainer, StackWiseConfig, create_rack_from_config, create_simple_rack
from stackwise.prototype import create_small_variant
from stackwise.stability.telemetry import global_norm, gradient_norms
from stackwise.training import CheckpointManager, get_lr_with_warmup

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


def test_gradient_norm_is_no_sum_of_norms():
    rack = tiny_rack(tie_embeddings=False)
    rack(torch.randint(8, (2, 6))).square().mean().backward()
    gradients = [p.grad.double() for p in rack.parameters()]
    expected = torch.cat([g.flatten() for g in gradients]).norm().item()
    assert global_norm(gradient_norms(rack.parameters())).item() == pytest.approx(expected, rel=1e-5)
    assert sum(g.norm().item() for g in gradients) > 1.2 * expected


def test_checkpoint_10_is_newer_than_checkpoint_9(tmp_path):
    config = StackWiseConfig.from_dict(TINY)
    manager = CheckpointManager(tmp_path, config, keep_last=5)
    rack = create_rack_from_config(config)
    steps = [9, 10, 100, 99]
    random.Random(0).shuffle(steps)
    for step in steps:
        manager.save(step, rack)
        os.utime(tmp_path / f"step-{step}", (1e9 - step, 1e9 - step))
    assert manager.steps() == [9, 10, 99, 100]
    assert manager.latest().name == "step-100"
