"""What the blocks of a pass share: computed once, and never another block's."""

import pytest
import torch

from stackwise.model import Block, Rack, Stack
from stackwise.model.layout import Layout
from stackwise.model.mask import AttentionMask


def test_masks_of_one_pass_may_differ():
    x_BTC = torch.zeros(1, 6, 4)
    layout = Layout(x_BTC, torch.tensor([[0, 1, 1, 1, 1, 1]]))
    for causal, window in [(True, None), (False, None), (True, 2), (False, 2), (True, None)]:
        expected = AttentionMask.build(
            6, causal=causal, window=window, keep_BS=layout.keep_BT, device=torch.device("cpu")
        )
        found = layout.mask(causal=causal, window=window)
        assert torch.equal(found.bias_BTS, expected.bias_BTS)
        assert found.is_causal == expected.is_causal


def test_a_rack_of_different_blocks_is_its_blocks_one_by_one():
    torch.manual_seed(0)
    kinds = [
        {"n_heads": 2, "sliding_window": 3},
        {"n_heads": 4, "attention_mode": "bidirectional"},
        {"n_heads": 2, "rope_theta": 100.0},
        {"n_heads": 4, "use_rope": False, "sliding_window": 2, "attention_mode": "bidirectional"},
    ]
    blocks = [Block(16, 24, **kind) for kind in kinds]
    rack = Rack([Stack(blocks[:2]), Stack(blocks[2:])], vocab_size=11, d_model=16).eval()
    ids, mask = torch.randint(11, (2, 7)), torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    x_BTC = rack.embed(ids)
    for block in blocks:
        x_BTC = block(x_BTC, mask)
    assert torch.equal(rack(ids, mask), rack.head(x_BTC))


def test_each_part_is_computed_once(monkeypatch):
    built = []
    build = AttentionMask.build.__func__
    monkeypatch.setattr(
        AttentionMask, "build", classmethod(lambda cls, *a, **k: built.append(k) or build(cls, *a, **k))
    )
    rack = Rack([Stack([Block(16, 24, 2, sliding_window=3) for _ in range(4)])], vocab_size=11, d_model=16)
    rack(torch.randint(11, (2, 7)))
    assert len(built) == 1


def test_mask_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"attention_mask: got shape \(2, 6\); allowed: \(2, 7\)"):
        Layout(torch.zeros(2, 7, 4), torch.ones(2, 6, dtype=torch.bool))
