"""Tokenizers: text comes back, and the special tokens are where they are said to be."""

import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stackwise.data.tokenizer import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    check_vocabulary,
    create_tokenizer,
)

TEXT = "low lower lowest\nnew newer newest ümläut 日本"
SPECIALS = ["<|end|>", "[MASK]"]


@pytest.fixture(scope="module")
def trained():
    """A byte-level BPE, trained here by tokenizers itself."""
    tokenizers = pytest.importorskip("tokenizers")
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=SPECIALS, show_progress=False
    )
    inner.train_from_iterator([TEXT] * 3, trainer)
    return inner


@pytest.fixture
def folder(trained, tmp_path):
    trained.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


class TestBytes:
    @given(st.text(st.characters(exclude_categories=["Cs"])))
    def test_round_trip(self, text):
        tokenizer = ByteTokenizer()
        ids = tokenizer.encode(text)
        assert bytes(ids) == text.encode() and tokenizer.decode(ids) == text

    def test_specials_are_above_the_bytes(self):
        plain = ByteTokenizer()
        assert (plain.vocab_size, plain.bos, plain.eos, plain.mask) == (256, None, None, None)
        two = ByteTokenizer(("mask", "eos"))
        assert (two.vocab_size, two.bos, two.eos, two.mask) == (258, None, 257, 256)
        assert two.decode([104, 257, 105, 256]) == "hi"

    def test_what_is_no_text(self):
        assert ByteTokenizer().decode([0xFF, 97]) == "\ufffda"
        with pytest.raises(ValueError, match="surrogates"):
            ByteTokenizer().encode("\ud800")

    @pytest.mark.parametrize("wrong", [256, -1])
    def test_id_beyond_the_vocabulary(self, wrong):
        with pytest.raises(ValueError, match=f"ids: got {wrong}; allowed: 0 to 255"):
            ByteTokenizer().decode([97, wrong])

    @pytest.mark.parametrize("specials", [("pad",), ("eos", "eos")])
    def test_other_specials(self, specials):
        with pytest.raises(ValueError, match="specials"):
            ByteTokenizer(specials)


class TestHuggingFace:
    def test_ids_are_those_of_the_library(self, folder, trained):
        for path in (folder, folder / "tokenizer.json", str(folder)):
            tokenizer = HuggingFaceTokenizer(path)
            assert tokenizer.encode(TEXT) == trained.encode(TEXT, add_special_tokens=False).ids
            assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
            assert tokenizer.vocab_size == trained.get_vocab_size()

    def test_nothing_is_put_around_a_text(self, folder, trained):
        from tokenizers.processors import TemplateProcessing

        end = trained.token_to_id("<|end|>")
        content = json.loads((folder / "tokenizer.json").read_text())
        around = TemplateProcessing(single="$A <|end|>", special_tokens=[("<|end|>", end)])
        content["post_processor"] = json.loads(around.__getstate__())
        (folder / "tokenizer.json").write_text(json.dumps(content))
        tokenizer = HuggingFaceTokenizer(folder)
        assert tokenizer._inner.encode("low").ids[-1] == end
        assert tokenizer.encode("low") == trained.encode("low", add_special_tokens=False).ids
        assert tokenizer.encode("low", add_special_tokens=True) == [*tokenizer.encode("low"), end]
        assert tokenizer.decode([end]) == ""
        assert tokenizer.decode([end], skip_special_tokens=False) == "<|end|>"

    def test_a_text_is_neither_cut_nor_filled_up(self, folder, trained):
        """What a `tokenizer.json` says of the rows of a batch, as those of many fine-tuned encoders do."""
        content = json.loads((folder / "tokenizer.json").read_text())
        content["truncation"] = {
            "direction": "Right",
            "max_length": 4,
            "strategy": "LongestFirst",
            "stride": 0,
        }
        content["padding"] = {
            "strategy": {"Fixed": 16},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": SPECIALS[0],
        }
        (folder / "tokenizer.json").write_text(json.dumps(content))
        tokenizer = HuggingFaceTokenizer(folder)
        for text in ("low", TEXT * 10):
            assert tokenizer.encode(text) == trained.encode(text, add_special_tokens=False).ids

    def test_specials_as_the_configuration_says(self, folder, trained):
        tokenizer = HuggingFaceTokenizer(folder)
        assert (tokenizer.bos, tokenizer.eos, tokenizer.mask) == (None, None, None)
        said = {
            "eos_token": "<|end|>",
            "mask_token": {"content": "[MASK]", "lstrip": False},
            "bos_token": None,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(said))
        tokenizer = HuggingFaceTokenizer(folder)
        wanted = [None, *map(trained.token_to_id, SPECIALS)]
        assert [tokenizer.bos, tokenizer.eos, tokenizer.mask] == wanted
        assert tokenizer.encode("low<|end|>").count(tokenizer.eos) == 1
        assert tokenizer.decode([tokenizer.eos, *tokenizer.encode("low")]) == "low"

    def test_specials_are_tokens_of_the_vocabulary(self, folder):
        (folder / "tokenizer_config.json").write_text(json.dumps({"mask_token": "<no>"}))
        with pytest.raises(ValueError, match=r"mask: got '<no>'"):
            HuggingFaceTokenizer(folder)

    def test_size_covers_every_id(self, folder):
        """Ids may have gaps, and a row of the embedding is looked up by id."""
        content = json.loads((folder / "tokenizer.json").read_text())
        token = {**content["added_tokens"][0], "id": 1000, "content": "<far>"}
        content["added_tokens"].append(token)
        content["model"]["vocab"]["<far>"] = 1000
        (folder / "tokenizer.json").write_text(json.dumps(content))
        tokenizer = HuggingFaceTokenizer(folder)
        assert tokenizer.encode("<far>") == [1000] and tokenizer.vocab_size == 1001

    def test_missing(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"tokenizer\.json: missing"):
            create_tokenizer(tmp_path)
        with pytest.raises(FileNotFoundError, match="nowhere: missing"):
            create_tokenizer(tmp_path / "nowhere")

    @pytest.mark.parametrize("content", [b"", b"{}", b"\x80\x04K\x01."])
    def test_no_tokenizer(self, tmp_path, content):
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(ValueError, match=r"tokenizer\.json: no tokenizer"):
            create_tokenizer(tmp_path)

    def test_broken_configuration(self, folder):
        (folder / "tokenizer_config.json").write_text('{"eos_token": {}}')
        with pytest.raises(ValueError, match=r"tokenizer_config\.json"):
            create_tokenizer(folder)

    def test_missing_library(self, folder, monkeypatch):
        monkeypatch.setitem(sys.modules, "tokenizers", None)
        with pytest.raises(ImportError, match=r"pip install 'stackwise\[hf\]'"):
            create_tokenizer(folder)


def test_by_name(folder):
    assert isinstance(create_tokenizer("byte"), ByteTokenizer)
    assert create_tokenizer(str(folder)).name == str(folder)


def test_vocabulary_of_the_model():
    check_vocabulary(256, 256, "tokenizer 'byte'")
    with pytest.raises(ValueError, match=r"model\.vocab_size: got 255; allowed: at least 256, .*'byte'"):
        check_vocabulary(255, 256, "tokenizer 'byte'")
