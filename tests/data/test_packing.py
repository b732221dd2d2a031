"""Packed documents: which tokens of a row are of one document, and what a Rack makes of it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stackwise.data import TokenWindows
from stackwise.data.shards import write_shards
from stackwise.data.token_sequence import TokenArray


def packed(documents, **settings):
    starts = torch.tensor([0, *map(len, documents)]).cumsum(0)[:-1]
    return TokenArray(torch.tensor([token for document in documents for token in document]), starts)


class TestArray:
    @given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.data())
    def test_ids_count_documents(self, lengths, data):
        documents = [[i] * n for i, n in enumerate(lengths)]
        sequence, flat = packed(documents), [token for document in documents for token in document]
        length = data.draw(st.integers(0, len(flat)))
        start = data.draw(st.integers(0, len(flat) - length))
        assert (
            sequence.document_ids(torch.tensor([start]), length)[0].tolist() == flat[start : start + length]
        )

    @given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.data())
    def test_a_part_counts_anew(self, lengths, data):
        flat = [i for i, n in enumerate(lengths) for _ in range(n)]
        start = data.draw(st.integers(0, len(flat) - 1))
        stop = data.draw(st.integers(start + 1, len(flat)))
        part = packed([[i] * n for i, n in enumerate(lengths)]).part(start, stop)
        expected = [number - flat[start] for number in flat[start:stop]]
        assert part.document_ids(torch.tensor([0]), stop - start)[0].tolist() == expected
        assert part.tokens.tolist() == flat[start:stop]

    @pytest.mark.parametrize("starts", [[1, 2], [0, 0], [0, 3, 2], [0, 9], []])
    def test_starts_that_are_none(self, starts):
        with pytest.raises(ValueError, match="document_starts"):
            TokenArray(torch.arange(9), torch.tensor(starts, dtype=torch.int64))

    @pytest.mark.parametrize("tokens", [torch.zeros(3), torch.zeros(2, 2).long(), torch.zeros(3).bool()])
    def test_tokens_that_are_none(self, tokens):
        with pytest.raises(ValueError, match="tokens: got"):
            TokenArray(tokens)

    def test_without_documents(self):
        with pytest.raises(ValueError, match="document_starts: got None"):
            TokenArray(torch.arange(9)).document_ids(torch.tensor([0]), 3)
        with pytest.raises(ValueError, match="pack_documents: got True"):
            TokenWindows(torch.arange(99), 1, 4, pack_documents=True)

    def test_digest_is_of_tokens_and_documents(self):
        tokens = torch.arange(9)
        others = [
            TokenArray(tokens),
            TokenArray(tokens, torch.tensor([0])),
            TokenArray(tokens, torch.tensor([0, 4])),
            TokenArray(tokens + 1),
            TokenArray(tokens.int()),
            TokenArray(tokens[:8]),
        ]
        assert len({each.digest() for each in others}) == len(others)
        assert TokenArray(tokens.clone()).digest() == others[0].digest()


@pytest.mark.parametrize("source", ["memory", "shards"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_windows_say_the_document_of_each_token(source, shuffle, tmp_path):
    """Tokens that are the number of their document: ids and tokens are then the same."""
    documents = [[i] * (1 + i % 5) for i in range(60)]
    sequence = packed(documents)
    if source == "shards":
        sequence = write_shards(tmp_path / "s", documents, vocab_size=60, tokens_per_shard=50)
    data = TokenWindows(sequence, 3, 8, shuffle=shuffle, pack_documents=True)
    for batch in data:
        assert batch.keys() == {"input_ids", "document_ids"}
        assert batch["document_ids"].dtype == torch.int64
        assert batch["document_ids"].equal(batch["input_ids"])
    assert next(iter(TokenWindows(sequence, 3, 8))).keys() == {"input_ids"}


def test_a_document_computes_the_same_beside_any_other(make_config, make_rack):
    """What `document_ids` are for: the second document of a row, alone and behind another."""
    rack = make_rack(make_config()).eval()
    first, second = [3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5]
    data = TokenWindows(packed([first, second]), 1, 10, shuffle=False, pack_documents=True)
    batch = data.batch(0, 0)
    together = rack(batch["input_ids"], document_ids=batch["document_ids"])
    alone = rack(torch.tensor([second]))
    torch.testing.assert_close(together[:, 5:], alone, rtol=1e-5, atol=1e-6)
    unaware = rack(batch["input_ids"])
    assert (unaware[:, 5:] - alone).abs().max() > 1e-3
