"""Requests in tokens: where a text is parted, and how much of its context there is room for."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stackwise.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer
from stackwise.quality import TextTokenizer, TokenRequest
from stackwise.quality.request import encode_request

BYTES = TextTokenizer(ByteTokenizer(["bos", "eos"]))
TEXT = st.text(st.characters(max_codepoint=0xD7FF), max_size=12)


class WordTokenizer:
    """Each word with the space before it is a token; a space at the end of a text is one by itself."""

    def __init__(self):
        self.words = {}

    def encode(self, text):
        words, start = [], 0
        for i in range(1, len(text) + 1):
            if i == len(text) or text[i] == " ":
                words.append(text[start:i])
                start = i
        return [self.words.setdefault(word, len(self.words)) for word in words if word]

    def decode(self, ids):
        known = {i: word for word, i in self.words.items()}
        return "".join(known[i] for i in ids)


@given(TEXT, TEXT.filter(bool))
def test_both_parts_together_are_the_whole_text(context, continuation):
    request = encode_request(BYTES, context, continuation)
    whole = list((context + continuation).encode())
    ids = [*request.context, *request.continuation]
    assert ids == (whole if context.rstrip() else [256, *whole])
    assert bytes(request.context[(not context.rstrip()) :]).decode() == context.rstrip()


def test_space_at_the_end_of_a_context_goes_to_the_continuation():
    tokenizer = TextTokenizer(WordTokenizer(), prefix_token_id=99)
    apart = encode_request(tokenizer, "a cat ", "sat down")
    assert apart == encode_request(tokenizer, "a cat", " sat down")
    assert tokenizer.decode(apart.continuation) == " sat down"
    assert len(apart.continuation) == 2


def test_without_context_the_prefix_stands_for_it():
    assert encode_request(BYTES, "", "ab") == TokenRequest((256,), (97, 98))
    assert encode_request(BYTES, " ", "a") == TokenRequest((256,), (32, 97))
    own = TextTokenizer(ByteTokenizer(), prefix_token_id=97)
    assert encode_request(own, "", "ab") == TokenRequest((97,), (98,))


def test_without_a_prefix_token_a_context_is_wanted():
    plain = TextTokenizer(ByteTokenizer())
    assert encode_request(plain, "a", "b") == TokenRequest((97,), (98,))
    with pytest.raises(ValueError, match=r"prefix_token_id: got None.*allowed: an id"):
        encode_request(plain, "", "b")
    with pytest.raises(ValueError, match=r"request: got .*at least one token"):
        encode_request(BYTES, "a", "")


def test_a_tokenizer_of_transformers_puts_its_token_before_what_begins(hf_tokenizer):
    tokenizer = TextTokenizer(hf_tokenizer)
    assert (tokenizer.prefix_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.encode("A text") == hf_tokenizer.encode("A text")
    assert tokenizer.encode("A text")[0] == 0
    assert tokenizer.encode("A text", begins=False) == hf_tokenizer.encode("A text", add_special_tokens=False)
    assert tokenizer.encode("<s>A text") == tokenizer.encode("A text")
    assert tokenizer.decode([0, *tokenizer.encode("A text")]) == "A text"
    request = encode_request(tokenizer, "A text", " goes on")
    assert [*request.context, *request.continuation] == hf_tokenizer.encode("A text goes on")


def test_a_tokenizer_json_says_what_is_put_before_a_text(hf_tokenizer, tmp_path):
    hf_tokenizer.save_pretrained(tmp_path)
    tokenizer = TextTokenizer(HuggingFaceTokenizer(tmp_path / "tokenizer.json"))
    known = TextTokenizer(hf_tokenizer)
    assert (tokenizer.prefix_token_id, tokenizer.eos_token_id) == (0, 1)
    for text in ("A text", "<s>A text", ""):
        for begins in (True, False):
            assert tokenizer.encode(text, begins=begins) == known.encode(text, begins=begins)
    assert tokenizer.encode("A text")[0] == 0
    assert (tokenizer.special_token("</s>"), tokenizer.special_token("A")) == (1, None)


def test_a_text_is_neither_cut_nor_filled_up(hf_tokenizer):
    inner = copy.deepcopy(hf_tokenizer.backend_tokenizer)
    for text in ("low", "low lower lowest"):
        inner.no_truncation()
        inner.no_padding()
        wanted = TextTokenizer(inner).encode(text)
        inner.enable_truncation(5)
        assert TextTokenizer(inner).encode(text) == wanted
        inner.enable_padding(length=9, pad_id=1, pad_token="</s>")
        assert TextTokenizer(inner).encode(text) == wanted
        assert inner.truncation["max_length"] == 5 and inner.padding["length"] == 9  # as it was


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=9),
    st.lists(st.integers(0, 9), min_size=1, max_size=4),
    st.integers(4, 12),
)
def test_a_context_is_cut_at_its_beginning(context, continuation, max_length):
    request = TokenRequest(tuple(context), tuple(continuation)).fitted(max_length)
    # The last token is predicted only.
    whole = (context + continuation)[-(max_length + 1) :]
    assert [*request.context, *request.continuation] == whole
    assert list(request.continuation) == continuation
    assert request.cut == len(context) - len(request.context)


def test_a_continuation_that_is_too_long_is_refused():
    assert TokenRequest((1,), (2,) * 4).fitted(4) == TokenRequest((1,), (2,) * 4)
    with pytest.raises(ValueError, match=r"continuation: got '5 tokens'; allowed: at most 4"):
        TokenRequest((1,), (2,) * 5).fitted(4)


def test_what_cannot_encode_is_no_tokenizer():
    with pytest.raises(TypeError, match=r"got dict, which has no encode\(\)"):
        TextTokenizer({})
    with pytest.raises(ValueError, match="prefix_token_id: got -1"):
        TextTokenizer(ByteTokenizer(), prefix_token_id=-1)
