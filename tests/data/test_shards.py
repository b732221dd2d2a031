"""Token shards: what was written comes back, and what was damaged since is named and refused."""

import hashlib
import pickle
import shutil
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from stackwise.data.shards import CHUNK, MANIFEST, TokenShards, write_shards

DOCUMENTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9, 10, 11], [12]]
FLAT = [token for document in DOCUMENTS for token in document]
NUMBERS = [i for i, document in enumerate(DOCUMENTS) for _ in document]


@pytest.fixture
def folder(tmp_path):
    write_shards(tmp_path / "shards", DOCUMENTS, vocab_size=13, tokens_per_shard=5)
    return tmp_path / "shards"


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Two shards of three chunks each: uint16, 1.25 Mi tokens a shard."""
    path = tmp_path_factory.mktemp("large") / "shards"
    tokens = np.arange(2 * (CHUNK + CHUNK // 4), dtype=np.int64) % 50_000
    write_shards(path, tokens, vocab_size=50_000, tokens_per_shard=CHUNK + CHUNK // 4)
    return path


def flip(path, position):
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 1]))


class TestRoundTrip:
    def test_tokens_and_documents(self, folder):
        shards = TokenShards(folder)
        assert len(shards) == len(FLAT) and shards.vocab_size == 13
        assert shards[:].tolist() == FLAT
        assert shards.document_ids(torch.tensor([0]), len(FLAT))[0].tolist() == NUMBERS

    @settings(max_examples=25)  # each waits for the disk
    @given(
        st.lists(st.lists(st.integers(0, 70_000), min_size=1, max_size=9), min_size=1, max_size=9),
        st.integers(1, 20),
        st.data(),
    )
    def test_any_row(self, tmp_path_factory, documents, tokens_per_shard, data):
        path = tmp_path_factory.mktemp("any") / "shards"
        shards = write_shards(path, documents, vocab_size=70_001, tokens_per_shard=tokens_per_shard)
        flat = [token for document in documents for token in document]
        numbers = [i for i, document in enumerate(documents) for _ in document]
        length = data.draw(st.integers(0, len(flat)))
        starts = data.draw(st.lists(st.integers(0, len(flat) - length), min_size=1, max_size=4))
        rows = shards.rows(torch.tensor(starts), length)
        assert rows.dtype == torch.int64
        assert rows.tolist() == [flat[start : start + length] for start in starts]
        ids = shards.document_ids(torch.tensor(starts), length)
        assert ids.dtype == torch.int64
        assert ids.tolist() == [numbers[start : start + length] for start in starts]
        assert len(list(path.glob("*.safetensors"))) == -(-len(flat) // tokens_per_shard)
        shutil.rmtree(path)

    def test_a_part_is_the_tokens_in_between(self, folder):
        part = TokenShards(folder).part(2, 11).part(1, 8)
        assert len(part) == 7 and part[:].tolist() == FLAT[3:10]
        assert part.document_ids(torch.tensor([0]), 7)[0].tolist() == NUMBERS[3:10]
        with pytest.raises(ValueError, match="start"):
            part.rows(torch.tensor([1]), 7)
        with pytest.raises(ValueError, match=r"start and stop: got \(0, 8\)"):
            part.part(0, 8)

    @pytest.mark.parametrize(
        "vocab_size, dtype", [(65_536, np.uint16), (65_537, np.uint32), (2**32, np.uint32)]
    )
    def test_width(self, tmp_path, vocab_size, dtype):
        shards = write_shards(tmp_path / "s", [[0, vocab_size - 1]], vocab_size=vocab_size)
        assert load_file(tmp_path / "s" / "tokens-00000.safetensors")["tokens"].dtype == dtype
        assert shards[:].tolist() == [0, vocab_size - 1]

    @pytest.mark.parametrize(
        "tokens", [torch.arange(7), np.arange(7, dtype=np.int8), torch.arange(7, dtype=torch.uint8)]
    )
    def test_one_array_is_one_document(self, tmp_path, tokens):
        shards = write_shards(tmp_path / "s", tokens, vocab_size=7, tokens_per_shard=3)
        assert shards[:].tolist() == list(range(7))
        assert shards.document_ids(torch.tensor([0]), 7).unique().tolist() == [0]

    def test_file_is_plain_safetensors_with_a_checksum_for_each_mebibyte(self, large):
        stored = load_file(large / "tokens-00001.safetensors")
        under = [stored["tokens"].tobytes(), stored["document_starts"].tobytes()]
        expected = [hashlib.sha256(b[i : i + 2**20]).digest() for b in under for i in range(0, len(b), 2**20)]
        assert [bytes(row) for row in stored["checksums"]] == expected and len(expected) == 3

    def test_a_stream_is_not_held(self, tmp_path, monkeypatch):
        """When a shard has been written, the documents behind it have not been asked for."""
        asked = []
        written = []

        def documents():
            for i in range(10):
                asked.append(i)
                yield [i] * 4

        def save(tensors, path):
            written.append(len(asked))
            original(tensors, path)

        original = write_shards.__globals__["save_file"]
        monkeypatch.setitem(write_shards.__globals__, "save_file", save)
        write_shards(tmp_path / "s", documents(), vocab_size=10, tokens_per_shard=8)
        assert written == [2, 4, 6, 8, 10]

    def test_sent_to_another_process(self, large):
        shards = TokenShards(large).part(5, 100)
        shards[:]
        sent = pickle.dumps(shards)
        assert len(sent) < 4096
        assert pickle.loads(sent)[:].tolist() == list(range(5, 100))

    def test_nothing_is_writable(self, folder):
        shards = TokenShards(folder)
        shards[:].zero_()
        assert shards[:].tolist() == FLAT
        assert not shards._shards[0].tokens(0, 5).flags.writeable

    def test_digest_is_of_the_content(self, folder, tmp_path):
        same = write_shards(tmp_path / "same", DOCUMENTS, vocab_size=13, tokens_per_shard=5)
        bounds = write_shards(tmp_path / "bounds", [FLAT], vocab_size=13, tokens_per_shard=5)
        values = write_shards(tmp_path / "values", [FLAT[::-1]], vocab_size=13, tokens_per_shard=5)
        digests = [s.digest() for s in (TokenShards(folder), bounds, values, same.part(0, 11))]
        assert len(set(digests)) == 4 and same.digest() == digests[0]


class TestRefusedToWrite:
    @pytest.mark.parametrize(
        "documents, message",
        [
            ([[1, 2], [3, 13]], r"documents\[1\]: got 13; .*12"),
            ([[1], [-1, 14]], r"documents\[1\]: got -1; "),
            ([[1], []], r"documents\[1\]: got 'no token'"),
            ([[1.5]], r"documents\[0\]: .*float64"),
            ([1, 2], r"documents\[0\]: .*int"),
            (["text"], r"documents\[0\]: .*str"),
            ([[True]], r"documents\[0\]: .*bool"),
            (np.zeros((2, 2), np.int64), r"documents\[0\]: .*\(2, 2\)"),
            ([], r"documents: got 'none'"),
        ],
    )
    def test_bad_input_leaves_nothing(self, tmp_path, documents, message):
        with pytest.raises(ValueError, match=message):
            write_shards(tmp_path / "s", documents, vocab_size=13, tokens_per_shard=1)
        assert list(tmp_path.iterdir()) == []

    def test_error_of_the_source_leaves_nothing(self, tmp_path):
        def documents():
            yield [1, 2, 3]
            raise OSError("gone")

        with pytest.raises(OSError, match="gone"):
            write_shards(tmp_path / "s", documents(), vocab_size=13, tokens_per_shard=2)
        assert list(tmp_path.iterdir()) == []

    def test_what_is_there_stays(self, folder):
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        with pytest.raises(ValueError, match=r"directory: .*shards with shards\.json"):
            write_shards(folder, [[1]], vocab_size=13)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
        with pytest.raises(ValueError, match="directory"):
            write_shards(folder / MANIFEST, [[1]], vocab_size=13)

    def test_an_empty_folder_is_taken(self, tmp_path):
        assert write_shards(tmp_path, [[1]], vocab_size=13)[:].tolist() == [1]

    @pytest.mark.parametrize("sizes", [{"vocab_size": 0}, {"vocab_size": 2**32 + 1}, {"tokens_per_shard": 0}])
    def test_sizes(self, tmp_path, sizes):
        with pytest.raises(ValueError, match=next(iter(sizes))):
            write_shards(tmp_path / "s", [[1]], **{"vocab_size": 5, **sizes})


class TestDamage:
    @pytest.mark.parametrize("kept", [0, 7, 100, -1])
    def test_truncated(self, folder, kept):
        shard = folder / "tokens-00001.safetensors"
        whole = shard.read_bytes()
        shard.write_bytes(whole[:kept])
        size = len(whole[:kept])
        with pytest.raises(ValueError, match=rf"00001.safetensors: truncated: got {size} .* {len(whole)}$"):
            TokenShards(folder)

    def test_truncated_names_the_chunk(self, large):
        with pytest.raises(ValueError, match=r"truncated: .* chunk 2 of 3; ") as refusal:
            self._with(large, lambda path: path.write_bytes(path.read_bytes()[: 2 * CHUNK + 5000]))
        assert "tokens-00001.safetensors" in str(refusal.value)

    def test_too_long(self, folder):
        with (folder / "tokens-00002.safetensors").open("ab") as file:
            file.write(b"0")
        with pytest.raises(ValueError, match=r"00002.safetensors: too long"):
            TokenShards(folder)

    def test_missing_shard(self, folder):
        (folder / "tokens-00000.safetensors").unlink()
        with pytest.raises(ValueError, match=r"00000.safetensors: missing; shards.json lists it"):
            TokenShards(folder)

    def test_shards_that_changed_places(self, folder):
        first, second = folder / "tokens-00000.safetensors", folder / "tokens-00001.safetensors"
        contents = first.read_bytes(), second.read_bytes()
        assert len(contents[0]) != len(contents[1])  # sizes alone tell these apart
        first.write_bytes(contents[1])
        second.write_bytes(contents[0])
        with pytest.raises(ValueError, match=r"00000.safetensors"):
            TokenShards(folder)

    def test_a_shard_of_other_data_of_the_same_size(self, folder, tmp_path):
        write_shards(tmp_path / "other", [[1] * 12], vocab_size=13, tokens_per_shard=5)
        other = [[2, 2, 2], [4, 5], [6, 7, 8, 9, 10, 11], [12]]
        write_shards(tmp_path / "twin", other, vocab_size=13, tokens_per_shard=5)
        shutil.copy(tmp_path / "twin" / "tokens-00000.safetensors", folder)
        with pytest.raises(ValueError, match=r"00000.safetensors: its header or its checksums were changed"):
            TokenShards(folder)[:]

    @pytest.mark.parametrize("chunk", [0, 1, 2])
    def test_changed_token_is_noticed_when_its_chunk_is_read(self, large, chunk, tmp_path):
        shutil.copytree(large, copy := tmp_path / "copy")
        path = copy / "tokens-00001.safetensors"
        place = path.read_bytes().index(load_file(path)["tokens"][:1000].tobytes())
        flip(path, place + chunk * CHUNK + 77)
        shards = TokenShards(copy)
        shard_length = CHUNK + CHUNK // 4
        for other in {0, 1, 2} - {chunk}:
            start = shard_length + other * CHUNK // 2
            assert shards[start : start + 9].tolist() == [i % 50_000 for i in range(start, start + 9)]
        start = shard_length + chunk * CHUNK // 2
        for _ in range(2):  # and each time that it is read
            with pytest.raises(ValueError, match=rf"00001.safetensors: tokens: chunk {chunk} of 3 .*SHA-256"):
                shards[start : start + 1]

    def test_any_changed_byte_is_noticed(self, folder):
        """Every byte of every file, one at a time."""
        missed, unnamed, total = [], 0, 0
        for path in sorted(folder.iterdir()):
            for position in range(path.stat().st_size):
                flip(path, position)
                try:
                    shards = TokenShards(folder)
                    shards[:]
                    shards.document_ids(torch.tensor([0]), len(shards))
                    missed.append((path.name, position))
                except ValueError as error:
                    unnamed += path.name not in str(error)
                flip(path, position)
                total += 1
        assert total > 1000 and unnamed == 0
        # Only white space of the list may change: it says nothing.
        text = (folder / MANIFEST).read_bytes()
        assert {(name, text[i : i + 1]) for name, i in missed} <= {(MANIFEST, b"\n"), (MANIFEST, b" ")}

    def test_a_chunk_is_checked_once(self, large, monkeypatch):
        shards = TokenShards(large)
        checks = []
        original = hashlib.sha256
        monkeypatch.setattr(
            hashlib, "sha256", lambda content: checks.append(len(content)) or original(content)
        )
        for _ in range(3):
            shards[10:20]
            shards[CHUNK // 2 + 3 : CHUNK // 2 + 9]
        assert checks[1:] == [CHUNK, CHUNK]  # after the checksums

    def test_half_written_folder(self, folder):
        (folder / MANIFEST).unlink()
        with pytest.raises(FileNotFoundError, match=r"shards\.json: missing"):
            TokenShards(folder)

    @pytest.mark.parametrize("content", ["", "[]", "null", "{}", "\x80"])
    def test_no_list(self, folder, content):
        (folder / MANIFEST).write_bytes(content.encode("latin-1"))
        with pytest.raises(ValueError, match=r"shards\.json: no list of shards"):
            TokenShards(folder)

    def test_pickles_are_not_read(self, folder):
        """A pickle in place of a shard, of the size of the shard, is not what the list says."""
        path = folder / "tokens-00000.safetensors"
        size = path.stat().st_size
        path.write_bytes(pickle.dumps({"tokens": [1]}).ljust(size, b"\0"))
        with pytest.raises(ValueError, match="its header or its checksums were changed"):
            TokenShards(folder)[:]

    @staticmethod
    def _with(folder, damage):
        path = folder / "tokens-00001.safetensors"
        whole = path.read_bytes()
        try:
            damage(path)
            TokenShards(folder)
        finally:
            path.write_bytes(whole)


def test_documents_of_neighbours_differ(folder):
    shards = TokenShards(folder)
    ids = shards.document_ids(torch.tensor([0]), len(shards))[0].tolist()
    boundaries = {i for i, (one, other) in enumerate(pairwise(ids), 1) if one != other}
    assert boundaries == {3, 5, 11}


@pytest.mark.parametrize("content", ["[" * 100_000, '{"digest": ' * 100_000, "1e999", "null"], ids=len)
def test_list_that_is_none_is_refused(folder, content):
    (folder / MANIFEST).write_text(content)
    with pytest.raises(ValueError, match=r"shards\.json: no list of shards"):
        TokenShards(folder)
