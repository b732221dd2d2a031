"""Token windows: whole, in range, each target once, in an order that seed and epoch decide."""

import json
import os
import pickle
import sysconfig
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stackwise.data import TokenWindows, create_data
from stackwise.data.create import documentation_text, standard_library_text
from stackwise.data.shards import TokenShards, write_shards
from stackwise.data.tasks import TaskBatches
from stackwise.data.text import documentation_pages
from stackwise.data.tokenizer import create_tokenizer
from tests.forked import printed

# (batch_size, seq_len, shuffle), and how many tokens one batch needs: batch_size * seq_len + 1, and with
# shuffling as many more as the cut may move.
NEEDED = [
    (1, 1, False, 2),
    (1, 1, True, 2),
    (2, 8, False, 17),
    (2, 8, True, 24),
    (3, 5, True, 20),
    (4, 512, True, 2560),
]


def windows(n_tokens, batch_size=2, seq_len=4, **settings):
    """Windows over the tokens 0, 1, 2, ...: a token is its own position."""
    return TokenWindows(torch.arange(n_tokens), batch_size, seq_len, **settings)


def epoch_of(data):
    return [batch["input_ids"] for batch in data]


def starts_of(batches):
    return torch.cat(batches)[:, 0].tolist()


def text_config(make_config, path, **sections):
    sections.setdefault("model", {"vocab_size": 256})
    sections["data"] = {"dataset_path": None if path is None else str(path), **sections.get("data", {})}
    return make_config(**sections)


class TestDocumentation:
    def test_is_english_text(self):
        text = documentation_text()
        assert len(text.encode()) > 300_000
        words = text.lower().split()
        assert words.count("the") > 0.03 * len(words)
        assert sum(character.isascii() for character in text) > 0.99 * len(text)
        assert "Truth Value Testing" in text and "import statement" in text

    def test_is_the_same_each_time(self):
        assert documentation_text() == documentation_text()


class TestStandardLibrary:
    def test_is_source_code_without_tests(self):
        text = standard_library_text()
        assert 5e6 < len(text.encode()) < 50e6
        folder = Path(sysconfig.get_paths()["stdlib"])
        for module in ("abc.py", "json/decoder.py", "zipfile.py"):
            if (folder / module).exists():
                assert (folder / module).read_text("utf-8") in text
        for left_out in ("test/support/__init__.py", "idlelib/idle_test/htest.py"):
            if (folder / left_out).exists():
                assert (folder / left_out).read_text("utf-8") not in text


class TestWindows:
    @given(
        st.integers(0, 200), st.integers(1, 6), st.integers(1, 12), st.integers(0, 2**63 - 1), st.booleans()
    )
    def test_any_size(self, n_tokens, batch_size, seq_len, seed, shuffle):
        def make():
            return windows(n_tokens, batch_size, seq_len, seed=seed, shuffle=shuffle)

        # Shuffling may cut up to seq_len - 1 tokens later, and still has to fill a batch.
        if n_tokens < batch_size * seq_len + 1 + (seq_len - 1) * shuffle:
            with pytest.raises(ValueError, match=f"tokens: got {n_tokens};"):
                make()
            return
        data = make()
        for _ in range(2):
            batches = epoch_of(data)
            assert len(batches) == len(data) > 0
            for batch in batches:
                assert batch.shape == (batch_size, seq_len + 1) and batch.dtype == torch.int64
                assert batch.min() >= 0 and batch.max() < n_tokens
                assert (batch.diff(dim=1) == 1).all()
            targets = torch.cat(batches)[:, 1:].flatten()
            assert len(targets.unique()) == len(targets)

    @given(st.integers(40, 300), st.integers(1, 4), st.integers(1, 8))
    def test_little_is_left_out(self, n_tokens, batch_size, seq_len):
        data = windows(n_tokens, batch_size, seq_len, shuffle=False)
        left = n_tokens - 1 - len(data) * batch_size * seq_len
        assert 0 <= left < batch_size * seq_len

    @pytest.mark.parametrize("batch_size, seq_len, shuffle, needed", NEEDED)
    def test_too_few_tokens(self, batch_size, seq_len, shuffle, needed):
        assert len(windows(needed, batch_size, seq_len, shuffle=shuffle)) == 1
        with pytest.raises(ValueError, match="tokens") as refusal:
            windows(needed - 1, batch_size, seq_len, shuffle=shuffle)
        numbers = [str(number) for number in (needed - 1, batch_size, seq_len, needed)]
        assert [number for number in numbers if number not in str(refusal.value)] == []

    def test_tokens_as_they_are(self):
        text = b"the quick brown fox jumps over the lazy dog"
        data = TokenWindows(torch.frombuffer(bytearray(text), dtype=torch.uint8), 2, 7, seed=5)
        for batch in epoch_of(data):
            assert all(bytes(row.tolist()) in text for row in batch)

    def test_rows_are_the_caller_s_to_change(self):
        tokens = torch.arange(50)
        for batch in epoch_of(TokenWindows(tokens, 2, 4)):
            batch.zero_()
        assert tokens.equal(torch.arange(50))


class TestOrder:
    def test_without_shuffling(self):
        data = windows(33, shuffle=False)
        for _ in range(2):
            assert starts_of(epoch_of(data)) == list(range(0, 32, 4))

    def test_epochs_differ(self):
        data = windows(400)
        orders = [starts_of(epoch_of(data)) for _ in range(4)]
        assert len({tuple(order) for order in orders}) == 4

    def test_epochs_are_cut_elsewhere(self):
        data = windows(400, seq_len=16)
        offsets = {min(starts_of(epoch_of(data))) for _ in range(12)}
        assert len(offsets) > 4 and offsets <= set(range(16))

    def test_order_is_shuffled_within_an_epoch(self):
        starts = starts_of(epoch_of(windows(400)))
        assert starts != sorted(starts)

    @given(st.integers(0, 2**63 - 1), st.integers(0, 5))
    def test_function_of_seed_and_epoch(self, seed, epoch):
        one, other = windows(100, seed=seed), windows(100, seed=seed)
        for _ in range(epoch):
            list(one)
            torch.rand(3)
        other.set_epoch(epoch)
        assert starts_of(epoch_of(one)) == starts_of(epoch_of(other))

    def test_seeds_differ(self):
        seeds = [*range(5), 2**32, 2**32 + 1, 2**33, 2**62]  # of which torch would take 32 bits
        orders = {tuple(starts_of(epoch_of(windows(400, seed=seed)))) for seed in seeds}
        assert len(orders) == len(seeds)

    def test_random_state_is_left_alone(self):
        before = torch.get_rng_state()
        list(windows(100))
        assert torch.get_rng_state().equal(before)

    def test_a_broken_off_epoch_counts(self):
        data, whole = windows(400), windows(400)
        next(iter(data))
        list(whole)
        assert starts_of(epoch_of(data)) == starts_of(epoch_of(whole))


class TestRowLength:
    def test_rows_without_a_target_behind_them(self):
        data = windows(33, seq_len=8, row_length=8, shuffle=False)
        assert torch.cat(epoch_of(data)).flatten().tolist() == list(range(32))
        assert len(windows(16, seq_len=8, row_length=8, shuffle=False)) == 1

    @given(st.integers(0, 120), st.integers(1, 3), st.integers(1, 9), st.booleans())
    def test_each_token_once(self, n_tokens, batch_size, seq_len, shuffle):
        try:
            data = windows(n_tokens, batch_size, seq_len, row_length=seq_len, shuffle=shuffle)
        except ValueError:
            assert n_tokens < batch_size * seq_len + (seq_len - 1) * shuffle
            return
        tokens = torch.cat(epoch_of(data)).flatten()
        assert len(tokens.unique()) == len(tokens) and tokens.max() < n_tokens

    @pytest.mark.parametrize("row_length", [7, 10, 0])
    def test_other_lengths(self, row_length):
        with pytest.raises(ValueError, match=f"row_length: got {row_length}; allowed: 8 or 9"):
            windows(99, seq_len=8, row_length=row_length)


class TestRanks:
    @given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 3), st.booleans())
    def test_all_together_see_what_one_process_would(self, batch_size, world_size, epoch, shuffle):
        whole = windows(300, batch_size * world_size, shuffle=shuffle, seed=5)
        whole.set_epoch(epoch)
        ranks = [
            windows(300, batch_size, shuffle=shuffle, seed=5, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        for rank in ranks:
            rank.set_epoch(epoch)
            assert len(rank) == len(whole)
        for batch, *parts in zip(epoch_of(whole), *map(epoch_of, ranks), strict=True):
            assert torch.cat(parts).equal(batch)

    def test_order_of_rows_does_not_depend_on_the_batch(self):
        orders = [starts_of(epoch_of(windows(401, batch_size, seed=2))) for batch_size in (1, 3, 7)]
        shortest = min(map(len, orders))
        assert len({tuple(order[:shortest]) for order in orders}) == 1

    @pytest.mark.parametrize("rank, world_size", [(2, 2), (-1, 2), (0, 0)])
    def test_no_such_rank(self, rank, world_size):
        with pytest.raises(ValueError, match=r"(rank|world_size): got"):
            windows(300, rank=rank, world_size=world_size)

    def test_too_few_tokens_for_all_ranks(self):
        with pytest.raises(ValueError, match=r"tokens: got 40; one batch of 12 rows of 4 needs 52"):
            windows(40, batch_size=3, world_size=4)


class TestResume:
    @pytest.mark.parametrize("shuffle", [False, True])
    @given(epoch=st.integers(0, 3), taken=st.integers(0, 12))
    def test_the_rest_is_the_rest(self, shuffle, epoch, taken):
        data = windows(108, shuffle=shuffle)
        data.set_epoch(epoch)
        batches = epoch_of(data) + epoch_of(data)
        assert len(batches) == 26
        data.set_epoch(epoch)
        pass_ = iter(data)
        for _ in range(taken):
            next(pass_)
        state = json.loads(json.dumps(data.state_dict()))
        resumed = windows(108, shuffle=shuffle)
        resumed.load_state_dict(state)
        assert resumed.epoch == epoch
        resumed.set_epoch(epoch)  # as a loop does that tells the epoch it is in
        rest = epoch_of(resumed) + epoch_of(resumed)
        assert len(rest) == 26 - taken
        assert all(one.equal(other) for one, other in zip(rest, batches[taken:], strict=True))

    def test_places(self):
        def place(data):
            state = data.state_dict()
            return state["epoch"], state["batch"]

        data = windows(108)
        assert place(data) == (0, 0)
        pass_ = iter(data)
        for i in range(13):
            next(pass_)
            assert place(data) == (0, i + 1)
        assert list(pass_) == [] and place(data) == (1, 0)
        data.set_epoch(4)
        assert place(data) == (4, 0)
        next(iter(data))
        assert place(data) == (4, 1)
        data.set_epoch(5)  # what would be next anyway
        assert place(data) == (5, 0)
        data.set_epoch(4)  # from its first batch: nothing was loaded
        assert place(data) == (4, 0) and len(epoch_of(data)) == 13

    def test_another_epoch_is_whole(self):
        data = windows(108)
        next(iter(data))
        resumed = windows(108)
        resumed.load_state_dict(data.state_dict())
        resumed.set_epoch(1)
        assert len(epoch_of(resumed)) == 13

    def test_state_between_a_load_and_the_first_batch(self):
        data = windows(108)
        next(iter(data))
        resumed = windows(108)
        resumed.load_state_dict(data.state_dict())
        assert resumed.state_dict() == data.state_dict()

    def test_other_number_of_ranks(self):
        """Rows of a step count, not who takes them."""
        data = windows(300, batch_size=4)
        batches = epoch_of(data)
        data.set_epoch(0)
        pass_ = iter(data)
        next(pass_), next(pass_)
        parts = []
        for rank in range(2):
            resumed = windows(300, batch_size=2, rank=rank, world_size=2)
            resumed.load_state_dict(data.state_dict())
            parts.append(epoch_of(resumed))
        for batch, *two in zip(batches[2:], *parts, strict=True):
            assert torch.cat(two).equal(batch)

    @pytest.mark.parametrize(
        "other, names",
        [
            (lambda: windows(109), ["digest", "tokens=108 where these have 109"]),
            (lambda: TokenWindows(torch.arange(108).flip(0), 2, 4), ["digest"]),
            (lambda: windows(108, seed=1), ["seed=0 where these have 1"]),
            (lambda: windows(108, batch_size=3), ["rows_per_step=2 where these have 3"]),
            (lambda: windows(108, seq_len=5), ["row_length", "seq_len=4 where these have 5"]),
            (lambda: windows(108, row_length=4), ["row_length=5 where these have 4"]),
            (lambda: windows(108, shuffle=False), ["shuffle=True where these have False"]),
        ],
    )
    def test_state_of_other_data(self, other, names):
        state, data = windows(108).state_dict(), other()
        with pytest.raises(ValueError, match=r"state: it is of other batches: ") as refusal:
            data.load_state_dict(state)
        problems = str(refusal.value).split("batches: ")[1].split("; ")
        assert [name for name, problem in zip(names, problems, strict=True) if name not in problem] == []

    @pytest.mark.parametrize("change", [{"batch": 14}, {"batch": -1}, {"epoch": -1}, {"epoch": "1"}])
    def test_no_such_place(self, change):
        data = windows(108)
        with pytest.raises(ValueError, match=f"{next(iter(change))}: got"):
            data.load_state_dict(data.state_dict() | change)

    def test_no_state(self):
        with pytest.raises(ValueError, match="state: got"):
            windows(108).load_state_dict({"epoch": 1})

    def test_random_access(self):
        data = windows(108, seed=9)
        epochs = [epoch_of(data), epoch_of(data)]
        for epoch, i in [(1, 7), (0, 12), (0, 0), (1, 8)]:
            assert data.batch(epoch, i)["input_ids"].equal(epochs[epoch][i])
        assert data.state_dict()["epoch"] == 2  # no place is moved
        with pytest.raises(ValueError, match="i: got 13; allowed: 0 to 12"):
            data.batch(0, 13)

    def test_order_is_not_sent_to_another_process(self):
        data = windows(40_001)
        sent = len(pickle.dumps(data))
        batch = data.batch(3, 5)["input_ids"]
        assert len(pickle.dumps(data)) == sent
        assert pickle.loads(pickle.dumps(data)).batch(3, 5)["input_ids"].equal(batch)


RESUME = """
import json, sys
import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from stackwise.data import TokenWindows
from stackwise.data.shards import TokenShards

folder, num_workers, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
windows = TokenWindows(TokenShards(folder), 2, 4, seed=3, pack_documents=True)
loader = StatefulDataLoader(windows, batch_size=None, num_workers=num_workers)
loader.load_state_dict(torch.load(path))
seen = []
for epoch in (1, 2):
    windows.set_epoch(epoch)
    seen.append([{key: value.tolist() for key, value in batch.items()} for batch in loader])
print(json.dumps(seen))
"""


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata 0.11, of torch 2.13
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")  # Python 3.12
class TestStatefulDataLoader:
    @pytest.fixture
    def shards(self, tmp_path):
        documents = [[i % 100] * (1 + i % 7) for i in range(60)]
        write_shards(tmp_path / "shards", documents, vocab_size=100, tokens_per_shard=64)
        return tmp_path / "shards"

    def _loader(self, shards, num_workers):
        stateful_dataloader = pytest.importorskip("torchdata.stateful_dataloader")
        data = TokenWindows(TokenShards(shards), 2, 4, seed=3, pack_documents=True)
        return data, stateful_dataloader.StatefulDataLoader(data, batch_size=None, num_workers=num_workers)

    @pytest.mark.parametrize(
        "num_workers",
        [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)],
    )
    def test_resume_within_an_epoch_in_a_new_process(self, shards, num_workers, tmp_path):
        data, loader = self._loader(shards, num_workers)
        plain = TokenWindows(TokenShards(shards), 2, 4, seed=3, pack_documents=True)
        wanted = [[plain.batch(epoch, i) for i in range(len(plain))] for epoch in range(3)]
        data.set_epoch(0)
        assert_same(list(loader), wanted[0])
        data.set_epoch(1)
        pass_ = iter(loader)
        first = [next(pass_) for _ in range(5)]
        torch.save(loader.state_dict(), tmp_path / "state.pt")
        assert_same(first, wanted[1][:5])
        assert_same(list(pass_), wanted[1][5:])
        arguments = [str(shards), str(num_workers), str(tmp_path / "state.pt")]
        output = printed(RESUME, *arguments)
        seen = [
            [{key: torch.tensor(value) for key, value in batch.items()} for batch in epoch]
            for epoch in json.loads(output)
        ]
        assert_same(seen[0], wanted[1][5:])
        assert_same(seen[1], wanted[2])

    @pytest.mark.parametrize("taken", [0, 1, 13, 28, 29])
    def test_any_place(self, shards, taken):
        _, loader = self._loader(shards, 0)
        assert len(loader) == 28
        pass_ = iter(loader)
        list(zip(range(taken), pass_, strict=False))
        state = loader.state_dict()
        other, resumed = self._loader(shards, 0)
        resumed.load_state_dict(state)
        rest = list(resumed)
        place = min(taken, 28)
        wanted = [other.batch(0, i) for i in range(place, 28)]
        if taken == 29:  # the end was seen: the next pass is the next epoch
            wanted = [other.batch(1, i) for i in range(28)]
        assert_same(rest, wanted)

    def test_state_of_other_data_is_refused(self, shards, tmp_path):
        _, loader = self._loader(shards, 0)
        next(iter(loader))
        write_shards(tmp_path / "other", [[1] * 300], vocab_size=100)
        _, other = self._loader(tmp_path / "other", 0)
        other.load_state_dict(loader.state_dict())
        with pytest.raises(ValueError, match=r"digest="):
            next(iter(other))


def assert_same(batches, others):
    for batch, other in zip(batches, others, strict=True):
        assert batch.keys() == other.keys()
        assert all(batch[key].equal(other[key]) for key in batch)


class TestCreate:
    @pytest.mark.parametrize("fraction", [0.05, 0.3, 0.5])
    def test_split(self, make_config, tmp_path, fraction):
        """Bytes that all differ from their neighbours show which part a window is from."""
        text = bytes(range(250))
        (tmp_path / "text").write_bytes(text * 4)
        config = text_config(
            make_config,
            tmp_path / "text",
            training={"batch_size": 1, "seq_len": 6},
            data={"validation_fraction": fraction},
        )
        training, validation = create_data(config)
        whole = torch.tensor(list(text * 4))
        assert torch.cat([training.sequence.tokens, validation.sequence.tokens]).long().equal(whole)
        assert len(validation.sequence.tokens) == pytest.approx(1000 * fraction, abs=1)
        assert len(training) > 0 and len(validation) > 0

    def test_validation_is_never_trained_on(self, make_config, tmp_path):
        (tmp_path / "text").write_bytes(b"a" * 300 + b"z" * 100)
        config = text_config(make_config, tmp_path / "text", data={"validation_fraction": 0.25})
        training, validation = create_data(config)
        for _ in range(3):
            assert {value for batch in epoch_of(training) for value in batch.unique().tolist()} == {ord("a")}
        assert {value for batch in epoch_of(validation) for value in batch.unique().tolist()} == {ord("z")}

    def test_validation_does_not_change(self, make_config):
        _, validation = create_data(text_config(make_config, None, training={"seq_len": 256}))
        first, second = epoch_of(validation), epoch_of(validation)
        assert all(one.equal(other) for one, other in zip(first, second, strict=True))

    def test_no_validation(self, make_config, tmp_path):
        (tmp_path / "text").write_bytes(b"text" * 100)
        config = text_config(make_config, tmp_path / "text", data={"validation_fraction": 0.0})
        training, validation = create_data(config)
        assert validation is None and len(training.sequence.tokens) == 400

    def test_default_is_the_documentation(self, make_config):
        training, validation = create_data(text_config(make_config, None))
        both = torch.cat([training.sequence.tokens, validation.sequence.tokens])
        assert bytes(both.tolist()) == documentation_text().encode()

    def test_any_bytes(self, make_config, tmp_path):
        raw = bytes(range(256)) * 4
        (tmp_path / "text").write_bytes(raw)
        config = text_config(
            make_config,
            tmp_path / "text",
            training={"seq_len": 16},
            data={"validation_fraction": 0.0, "shuffle": False},
        )
        training, _ = create_data(config)
        assert torch.cat(epoch_of(training))[0].tolist() == list(raw[:17])

    def test_settings_arrive(self, make_config, tmp_path):
        (tmp_path / "text").write_bytes(bytes(range(256)) * 4)
        settings = {"batch_size": 3, "seq_len": 5, "seed": 11}
        config = text_config(make_config, tmp_path / "text", training=settings)
        training, validation = create_data(config)
        assert epoch_of(training)[0].shape == epoch_of(validation)[0].shape == (3, 6)
        twin = epoch_of(TokenWindows(training.sequence.tokens, 3, 5, seed=11))
        again = epoch_of(create_data(config)[0])
        assert all(one.equal(other) for one, other in zip(again, twin, strict=True))

    @pytest.mark.parametrize("vocab_size", [1, 23, 255])
    def test_vocabulary_smaller_than_a_byte(self, make_config, vocab_size):
        config = text_config(make_config, None, model={"vocab_size": vocab_size})
        with pytest.raises(ValueError, match=rf"model\.vocab_size: got {vocab_size}; .*256"):
            create_data(config)

    def test_empty_file(self, make_config, tmp_path):
        (tmp_path / "text").touch()
        with pytest.raises(ValueError, match=r"data\.dataset_path: .*text is empty"):
            create_data(text_config(make_config, tmp_path / "text"))

    def test_a_device_is_refused(self, make_config):
        with pytest.raises(ValueError, match=r"data\.dataset_path: got .*null.*; allowed: a text file"):
            create_data(text_config(make_config, Path(os.devnull)))

    def test_missing_file(self, make_config, tmp_path):
        with pytest.raises(FileNotFoundError, match="nowhere"):
            create_data(text_config(make_config, tmp_path / "nowhere"))

    def test_folder(self, make_config, tmp_path):
        with pytest.raises(OSError, match=str(tmp_path)):
            create_data(text_config(make_config, tmp_path))

    def test_short_file(self, make_config, tmp_path):
        (tmp_path / "text").write_bytes(b"short")
        told = r"data\.dataset_path='.*text' with training\.batch_size and .*: tokens: got 5; .* needs 24"
        with pytest.raises(ValueError, match=told):
            create_data(text_config(make_config, tmp_path / "text"))

    def test_validation_part_too_short(self, make_config, tmp_path):
        (tmp_path / "text").write_bytes(b"text" * 25)
        with pytest.raises(ValueError, match=r"validation_fraction"):
            create_data(text_config(make_config, tmp_path / "text"))

    @pytest.mark.parametrize("kind, length", [("next_token", 9), ("masked_token", 8), ("mask_diffusion", 8)])
    def test_row_length_is_the_objective_s(self, make_config, kind, length):
        objective = {"kind": kind} | ({} if kind == "next_token" else {"mask_token_id": 256})
        config = text_config(
            make_config, None, model={"vocab_size": 257}, training={"seq_len": 8, "objective": objective}
        )
        for data in create_data(config):
            assert next(iter(data))["input_ids"].shape == (2, length)

    def test_mask_that_is_a_token_of_the_text(self, make_config):
        objective = {"kind": "masked_token", "mask_token_id": ord("e")}
        config = text_config(make_config, None, training={"objective": objective})
        with pytest.raises(ValueError, match=r"training\.objective\.mask_token_id: got 101"):
            create_data(config)

    def test_ranks(self, make_config):
        whole = create_data(text_config(make_config, None, training={"batch_size": 6}))
        config = text_config(make_config, None, training={"batch_size": 2})
        ranks = [create_data(config, rank, 3) for rank in range(3)]
        for one, parts in zip(whole, zip(*ranks, strict=True), strict=True):
            assert one.batch(1, 2)["input_ids"].equal(
                torch.cat([part.batch(1, 2)["input_ids"] for part in parts])
            )

    def test_pages_of_the_documentation_are_documents(self, make_config):
        config = text_config(make_config, None, data={"pack_documents": True, "validation_fraction": 0.0})
        training, _ = create_data(config)
        ids = training.sequence.document_ids(torch.tensor([0]), len(training.sequence))[0]
        pages = documentation_pages()
        assert ids.unique().tolist() == list(range(len(pages)))
        for i in (0, 17, len(pages) - 1):
            assert (
                bytes(training.sequence.tokens[ids == i].tolist()).decode().removesuffix("\n\n") == pages[i]
            )
        assert next(iter(training)).keys() == {"input_ids", "document_ids"}

    def test_a_text_of_bytes_has_no_documents(self, make_config, tmp_path):
        (tmp_path / "text").write_bytes(b"text" * 100)
        config = text_config(make_config, tmp_path / "text", data={"pack_documents": True})
        with pytest.raises(ValueError, match=r"data\.pack_documents: got True; .*'byte', which has no token"):
            create_data(config)


class TestShardsOfAConfiguration:
    @pytest.fixture
    def config(self, make_config, tmp_path):
        documents = [[i] * (1 + i % 7) for i in range(200)]
        write_shards(tmp_path / "shards", documents, vocab_size=200, tokens_per_shard=100)

        def make(**sections):
            sections.setdefault("model", {"vocab_size": 200})
            return text_config(make_config, tmp_path / "shards", **sections)

        return make

    def test_split(self, config):
        training, validation = create_data(config(data={"validation_fraction": 0.25}))
        whole = [i for i in range(200) for _ in range(1 + i % 7)]
        assert len(validation.sequence) == int(len(whole) * 0.25)
        assert training.sequence[:].tolist() + validation.sequence[:].tolist() == whole
        assert epoch_of(training)[0].shape == epoch_of(validation)[0].shape == (2, 9)

    def test_packed(self, config):
        for data in create_data(config(data={"pack_documents": True, "validation_fraction": 0.25})):
            for batch in data:
                assert batch["document_ids"].equal(batch["input_ids"])

    def test_vocabulary(self, config):
        with pytest.raises(ValueError, match=r"model\.vocab_size: got 199; allowed: at least 200, .*shards"):
            create_data(config(model={"vocab_size": 199}))

    def test_a_tokenizer_that_is_not_asked(self, config, tmp_path):
        with pytest.raises(
            ValueError, match=r"data\.tokenizer: got 'words'; allowed: 'byte', .*tokens already"
        ):
            create_data(config(data={"tokenizer": "words"}))

    def test_damage(self, config, tmp_path):
        path = tmp_path / "shards" / "tokens-00003.safetensors"
        path.write_bytes(path.read_bytes()[:-3])
        with pytest.raises(ValueError, match=r"tokens-00003\.safetensors: truncated"):
            create_data(config())


class TestTokenizerOfAConfiguration:
    @pytest.fixture
    def folder(self, tmp_path):
        tokenizers = pytest.importorskip("tokenizers")
        words = {word: i for i, word in enumerate(["<unk>", "<end>", "a", "b", "c", "d"])}
        inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
        inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        inner.add_special_tokens(["<end>"])
        inner.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
        (tmp_path / "text").write_text("a b c <end> d d <end>" * 40)
        return tmp_path

    def _config(self, make_config, folder, **sections):
        sections["data"] = {"tokenizer": str(folder), "validation_fraction": 0.0, **sections.get("data", {})}
        sections.setdefault("model", {"vocab_size": 6})
        return text_config(make_config, folder / "text", **sections)

    def test_tokens(self, make_config, folder):
        training, _ = create_data(self._config(make_config, folder))
        assert training.sequence.tokens.tolist() == [2, 3, 4, 1, 5, 5, 1] * 40
        assert training.sequence.tokens.tolist() == create_tokenizer(folder).encode(
            (folder / "text").read_text()
        )

    def test_documents_end_with_the_token_that_ends_one(self, make_config, folder):
        config = self._config(make_config, folder, data={"pack_documents": True, "shuffle": False})
        batch = create_data(config)[0].batch(0, 0)
        assert batch["document_ids"][0].tolist() == [0, 0, 0, 0, 1, 1, 1, 2, 2]

    def test_vocabulary(self, make_config, folder):
        with pytest.raises(ValueError, match=r"model\.vocab_size: got 5; allowed: at least 6, .*tokenizer"):
            create_data(self._config(make_config, folder, model={"vocab_size": 5}))

    def test_no_text(self, make_config, folder):
        (folder / "text").write_bytes(b"a \xff b")
        with pytest.raises(ValueError, match=r"data\.dataset_path: .*text is no UTF-8"):
            create_data(self._config(make_config, folder))


class TestTaskOfAConfiguration:
    @pytest.mark.parametrize("task", ["copy", "shift", "induction", "markov"])
    def test_batches(self, make_config, task):
        config = make_config(
            data={"task": task, "validation_fraction": 0.3},
            training={"max_steps": 5, "accumulation_steps": 2},
        )
        training, validation = create_data(config)
        assert isinstance(training, TaskBatches) and training.task.kind == task
        assert (len(training), len(validation)) == (10, 3)
        batch = next(iter(training))
        assert batch["input_ids"].shape == batch["labels"].shape == (2, 9)
        assert batch["input_ids"].max() < 23

    def test_validation_is_never_trained_on_and_does_not_change(self, make_config):
        config = make_config(data={"task": "copy", "validation_fraction": 0.5}, training={"max_steps": 20})
        training, validation = create_data(config)
        trained = {tuple(row) for _ in range(2) for batch in epoch_of(training) for row in batch.tolist()}
        held_out = [tuple(row) for batch in epoch_of(validation) for row in batch.tolist()]
        assert len(trained) == 80 and trained.isdisjoint(held_out)
        assert [tuple(row) for batch in epoch_of(validation) for row in batch.tolist()] == held_out

    def test_without_shuffling_epochs_are_the_same(self, make_config):
        config = make_config(data={"task": "copy", "shuffle": False, "validation_fraction": 0.0})
        training, validation = create_data(config)
        assert validation is None
        assert torch.cat(epoch_of(training)).equal(torch.cat(epoch_of(training)))

    def test_mask_is_no_token_of_the_task(self, make_config):
        def config(mask):
            objective = {"kind": "masked_token", "mask_token_id": mask}
            return make_config(data={"task": "markov"}, training={"objective": objective})

        batch = next(iter(create_data(config(22))[0]))
        assert batch.keys() == {"input_ids"} and batch["input_ids"].shape == (2, 8)
        assert create_data(config(22))[0].task.vocab_size == 22
        with pytest.raises(ValueError, match=r"mask_token_id: got 3; allowed: 22, the last id"):
            create_data(config(3))

    def test_what_does_not_fit(self, make_config):
        with pytest.raises(ValueError, match=r"data\.pack_documents: got True"):
            create_data(make_config(data={"task": "copy", "pack_documents": True}))
        with pytest.raises(ValueError, match=r"data\.task='induction' .*row_length: got 3"):
            create_data(make_config(data={"task": "induction"}, training={"seq_len": 2}))
