"""Token windows: whole, in range, each target once, in an order that seed and epoch decide."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stackwise.training import TokenWindows, create_data
from stackwise.training.data import documentation_text

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
        other.epoch = epoch
        assert starts_of(epoch_of(one)) == starts_of(epoch_of(other))

    def test_seeds_differ(self):
        orders = {tuple(starts_of(epoch_of(windows(400, seed=seed)))) for seed in range(5)}
        assert len(orders) == 5

    def test_random_state_is_left_alone(self):
        before = torch.get_rng_state()
        list(windows(100))
        assert torch.get_rng_state().equal(before)

    def test_a_broken_off_epoch_counts(self):
        data, whole = windows(400), windows(400)
        next(iter(data))
        list(whole)
        assert starts_of(epoch_of(data)) == starts_of(epoch_of(whole))


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
        assert torch.cat([training.tokens, validation.tokens]).long().equal(whole)
        assert len(validation.tokens) == pytest.approx(1000 * fraction, abs=1)
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
        assert validation is None and len(training.tokens) == 400

    def test_default_is_the_documentation(self, make_config):
        training, validation = create_data(text_config(make_config, None))
        both = torch.cat([training.tokens, validation.tokens])
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
        twin = epoch_of(TokenWindows(training.tokens, 3, 5, seed=11))
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

    def test_missing_file(self, make_config, tmp_path):
        with pytest.raises(FileNotFoundError, match="nowhere"):
            create_data(text_config(make_config, tmp_path / "nowhere"))

    def test_folder(self, make_config, tmp_path):
        with pytest.raises(OSError, match=str(tmp_path)):
            create_data(text_config(make_config, tmp_path))

    def test_short_file(self, make_config, tmp_path):
        (tmp_path / "text").write_bytes(b"short")
        with pytest.raises(ValueError, match=r"tokens: got 5; .* needs 24"):
            create_data(text_config(make_config, tmp_path / "text"))

    def test_validation_part_too_short(self, make_config, tmp_path):
        (tmp_path / "text").write_bytes(b"text" * 25)
        with pytest.raises(ValueError, match=r"validation_fraction"):
            create_data(text_config(make_config, tmp_path / "text"))
