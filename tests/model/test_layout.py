"""Layout: what the blocks of a pass share is computed once, and is never another block's."""

import itertools
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stackwise.config import RopeScalingConfig
from stackwise.model import Block, Rack, Stack
from stackwise.model.layout import Layout
from stackwise.model.mask import AttentionMask, Keys
from stackwise.model.rotary import Rotary

MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])


def layout_of(seq_len, n_rows=1, dtype=torch.float32, **kwargs):
    return Layout(torch.zeros(n_rows, seq_len, 4, dtype=dtype), **kwargs)


def test_masks_of_one_pass_may_differ():
    keep_BS = torch.tensor([[0, 1, 1, 1, 1, 1]]) != 0
    layout = layout_of(6, attention_mask=keep_BS)
    time_T = torch.arange(6)
    for causal, window in [(True, None), (False, None), (True, 2), (False, 2), (True, None)]:
        expected = AttentionMask(time_T, Keys(time_T, True), causal=causal, window=window, keep_BS=keep_BS)
        found = layout.mask(causal=causal, window=window)
        assert torch.equal(found.dense(), expected.dense())
        assert (found.causal, found.window) == (causal, window)


def test_a_rack_of_different_blocks_is_its_blocks_one_by_one():
    torch.manual_seed(0)
    scaling = {"rope_type": "linear", "factor": 3.0}
    kinds = [
        {"n_heads": 2, "sliding_window": 3},
        {"n_heads": 4, "attention_mode": "bidirectional"},
        {"n_heads": 2, "rope_theta": 100.0},
        {"n_heads": 2, "rope_scaling": scaling},
        {"n_heads": 4, "use_rope": False, "sliding_window": 2, "attention_mode": "bidirectional"},
        {"n_heads": 3, "head_dim": 8, "attention_type": "mqa", "qk_norm": "width", "softcap": 2.0},
    ]
    blocks = [Block(16, 24, **kind) for kind in kinds]
    rack = Rack([Stack(blocks[:2]), Stack(blocks[2:])], vocab_size=11, d_model=16).eval()
    ids, documents = torch.randint(11, (2, 7)), torch.tensor([[0, 0, 0, 1, 1, 1, 1], [2, 2, 2, 2, 2, 2, 5]])
    for options in ({"attention_mask": MASK}, {"attention_mask": MASK, "document_ids": documents}):
        x_BTC = rack.embed(ids)
        for block in blocks:
            x_BTC = block(x_BTC, layout=Layout(x_BTC, **options))
        assert torch.equal(rack(ids, **options), rack.head(x_BTC))


def test_each_part_is_computed_once(monkeypatch):
    tables = []
    for owner, name in [(AttentionMask, "visible"), (Rotary, "tables")]:
        original = getattr(owner, name)
        monkeypatch.setattr(
            owner,
            name,
            lambda self, *args, original=original, name=name: tables.append(name) or original(self, *args),
        )
    rack = Rack([Stack([Block(16, 24, 2, sliding_window=5) for _ in range(4)])], vocab_size=11, d_model=16)
    rack(torch.randint(11, (2, 7)))
    assert sorted(tables) == ["tables", "visible"]
    # Nothing outlives the pass.
    rack(torch.randint(11, (2, 7)))
    assert sorted(tables) == ["tables", "tables", "visible", "visible"]


def test_a_causal_pass_builds_no_table(monkeypatch):
    monkeypatch.setattr(AttentionMask, "visible", None)
    rack = Rack([Stack([Block(16, 24, 2, sliding_window=window) for window in (None, 7)])], 11, d_model=16)
    assert rack(torch.randint(11, (2, 7))).shape == (2, 7, 11)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 5}, {"attention_mode": "bidirectional"}])
def test_one_compiled_graph_serves_every_length(options):
    torch.manual_seed(0)
    graphs = []
    rack = Rack([Stack([Block(16, 24, 2, **options)])], vocab_size=11, d_model=16).eval()
    compiled = torch.compile(
        rack,
        backend=lambda graph, _: graphs.append(graph) or graph.forward,
        fullgraph=True,
        dynamic=True,
    )
    for seq_len in (16, 24, 9):
        ids = torch.randint(11, (1, seq_len))
        torch.testing.assert_close(compiled(ids), rack(ids))
    assert len(graphs) == 1


@pytest.mark.parametrize(
    "options", [{"softcap": 2.0}, pytest.param({"attention_type": "kernel"}, marks=pytest.mark.slow)]
)
def test_compiled_for_one_length_and_then_another(options):
    """These are computed in parts, of which a graph has some number."""
    torch.manual_seed(0)
    rack = Rack([Stack([Block(16, 24, 2, **options)])], vocab_size=11, d_model=16).eval()
    compiled = torch.compile(rack, backend="eager", fullgraph=True)
    for seq_len in (16, 24):
        ids = torch.randint(11, (1, seq_len))
        torch.testing.assert_close(compiled(ids), rack(ids))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_tables_are_at_least_float32(dtype):
    cos, sin = layout_of(7, dtype=dtype).rotary(Rotary(8))
    assert cos.dtype == sin.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_tables_of_one_pass_may_differ():
    layout = layout_of(5, dtype=torch.float64)
    scaling = RopeScalingConfig(rope_type="linear", factor=2.0)
    kinds = [Rotary(8), Rotary(4), Rotary(8, 9.0), Rotary(8, scaling=scaling), Rotary(8)]
    for kind in kinds:
        expected = kind.tables(torch.arange(5).double())
        assert all(map(torch.equal, layout.rotary(kind), expected))


class TestPositions:
    @given(data=st.data(), n_tokens=st.integers(1, 9), rows=st.integers(1, 3))
    def test_real_tokens_of_the_document_that_precede(self, data, n_tokens, rows):
        flags = st.lists(st.booleans(), min_size=n_tokens, max_size=n_tokens)
        ids = st.lists(st.integers(0, 2), min_size=n_tokens, max_size=n_tokens)
        keep = data.draw(st.none() | st.lists(flags, min_size=rows, max_size=rows))
        documents = data.draw(st.none() | st.lists(ids, min_size=rows, max_size=rows))
        layout = layout_of(
            n_tokens,
            rows,
            attention_mask=None if keep is None else torch.tensor(keep),
            document_ids=None if documents is None else torch.tensor(documents),
        )
        assert layout.positions.dtype == torch.int64
        positions = layout.positions.expand(rows, n_tokens)
        for b in range(rows):
            begin = 0
            for t in range(n_tokens):
                if documents is not None and t and documents[b][t] != documents[b][t - 1]:
                    begin = t
                if keep is None or keep[b][t]:
                    expected = sum(keep is None or keep[b][s] for s in range(begin, t))
                    assert positions[b, t] == expected, (b, t)

    def test_shared_by_all_rows_where_they_do_not_differ(self):
        assert layout_of(5, 3).positions.tolist() == [0, 1, 2, 3, 4]

    def test_padding_on_either_side(self):
        left, right = torch.tensor([[0, 0, 1, 1, 1]]), torch.tensor([[1, 1, 1, 0, 0]])
        assert layout_of(5, attention_mask=left).positions[0, 2:].tolist() == [0, 1, 2]
        assert layout_of(5, attention_mask=right).positions[0, :3].tolist() == [0, 1, 2]
        for mask in (left, right):
            assert (layout_of(5, attention_mask=mask).positions >= 0).all()

    def test_documents_are_runs_and_not_ids(self):
        positions = layout_of(7, document_ids=torch.tensor([[4, 4, 1, 1, 1, 4, 4]])).positions
        assert positions.tolist() == [[0, 1, 0, 1, 2, 0, 1]]

    @pytest.mark.parametrize("start", [5, torch.tensor(5)])
    def test_behind_what_a_cache_holds(self, start):
        layout = layout_of(3, 2, start=start)
        assert layout.time_T.tolist() == layout.positions.tolist() == [5, 6, 7] and layout.keep_BT is None
        keep_BS = torch.ones(2, 10, dtype=torch.bool)
        keep_BS[0, :4] = keep_BS[1, 6] = False
        layout = layout_of(3, 2, start=start, keep_BS=keep_BS)
        assert layout.time_T.tolist() == [5, 6, 7]
        assert layout.keep_BT.tolist() == [[True, True, True], [True, False, True]]
        assert layout.positions[0].tolist() == [1, 2, 3]
        assert layout.positions[1, [0, 2]].tolist() == [5, 6]

    @pytest.mark.parametrize("n_new", [1, 4])
    def test_a_cache_as_long_as_the_pass(self, n_new):
        keep_BS = torch.arange(n_new)[None] > 0
        layout = layout_of(n_new, keep_BS=keep_BS)
        assert torch.equal(layout.keep_BT, keep_BS)
        assert layout.positions[0, 1:].tolist() == list(range(n_new - 1))


def test_masks_of_cached_keys():
    """Padding is looked up where each key happened, not where it stands among the slots."""
    keep_BS = torch.tensor([[0, 0, 1, 1, 1, 1, 0, 1]]) != 0
    layout = layout_of(1, start=7, keep_BS=keep_BS)
    slots = Keys(torch.tensor([4, 5, 6, 7, 2, 3]), False)
    visible = layout.mask(causal=True, window=6, keys=slots).dense()
    assert visible.tolist() == [[[[True, True, False, True, True, True]]]]
    ahead = Keys(torch.tensor([-1, 7, 2, 3, 4]), False)
    assert layout.mask(causal=True, window=None, keys=ahead).dense().tolist() == [
        [[[False, True, True, True, True]]]
    ]


def test_documents_hide_each_other():
    ids = torch.tensor([[1, 1, 2, 2, 1]])
    for causal, window in itertools.product([True, False], [None, 2]):
        dense = layout_of(5, document_ids=ids).mask(causal=causal, window=window).dense()[0, 0]
        for query, key in itertools.product(range(5), repeat=2):
            together = {query, key} <= {0, 1} or {query, key} <= {2, 3} or query == key == 4
            near = window is None or abs(query - key) < window
            assert dense[query, key] == (together and near and (key <= query or not causal))


@pytest.mark.parametrize("key", ["attention_mask", "document_ids"])
def test_another_shape_is_refused(key):
    pattern = re.escape(f"{key}: got shape (2, 6); allowed: (2, 7), one entry per input token")
    with pytest.raises(ValueError, match=pattern):
        layout_of(7, 2, **{key: torch.ones(2, 6, dtype=torch.long)})
