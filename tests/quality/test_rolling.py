"""Rolling log-probabilities: each token of a text once, with the context that there is room for."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("lm_eval")

from lm_eval import utils
from lm_eval.api.instance import Instance

from stackwise.quality import Scorer, TextTokenizer, TokenRequest, harness_model
from stackwise.quality.harness import rolling_windows


def rolling(scorer, *texts):
    """Return the log-probability of each text."""
    asked = [Instance("loglikelihood_rolling", {}, (text,), i) for i, text in enumerate(texts)]
    return harness_model(scorer).loglikelihood_rolling(asked)


IDS = st.lists(st.integers(0, 99), max_size=30)


@given(IDS, st.integers(1, 9), st.data())
def test_each_token_is_predicted_once_from_what_is_right_before_it(ids, max_length, data):
    context = data.draw(st.integers(1, max_length))
    before = list(range(-data.draw(st.integers(1, min(3, max_length))), 0))
    windows = list(rolling_windows(ids, before, max_length, context))
    assert [token for window in windows for token in window.continuation] == ids
    whole, end = [*before, *ids], len(before)
    for window in windows:
        read = [*window.context, *window.continuation]
        end += len(window.continuation)
        assert read == whole[end - len(read) : end]
        assert len(read) - 1 <= max_length
    for window in windows[1:]:
        # All the room is used: no window could have had more context.
        assert len(window.context) + len(window.continuation) - 1 == max_length
        assert len(window.context) >= context


def test_windows_as_the_harness_documents_them():
    windows = list(rolling_windows(range(10), [-1], 4))
    assert windows == [
        TokenRequest((-1,), (0, 1, 2, 3)),
        TokenRequest((3,), (4, 5, 6, 7)),
        TokenRequest((5, 6, 7), (8, 9)),
    ]


@given(IDS, st.integers(1, 9), st.data())
def test_windows_are_those_of_the_harness(ids, max_length, data):
    context = data.draw(st.integers(1, max_length))
    theirs = map(utils.make_disjoint_window, utils.get_rolling_token_windows(ids, 7, max_length, context))
    ours = [(list(w.context), list(w.continuation)) for w in rolling_windows(ids, [7], max_length, context)]
    assert ours == [(list(a), list(b)) for a, b in theirs]


def test_log_probabilities_are_sums_over_the_tokens(llama, byte_tokenizer):
    texts = ["Café au lait,\nplease. " * 3, "x"]
    totals = []
    for text in texts:
        ids = torch.tensor([[256, *text.encode()]])
        with torch.no_grad():
            log_p = llama(ids[:, :-1]).logits[0].double().log_softmax(-1)
        totals.append(log_p.gather(1, ids[0, 1:, None]).sum().item())
    assert rolling(Scorer(llama, byte_tokenizer), *texts) == pytest.approx(totals, abs=1e-4)


def test_start_of_a_text_is_read_and_not_scored(llama, hf_tokenizer):
    """Whether the tokenizer puts it before texts, puts nothing there, or the text itself begins with it."""

    class Bare:
        bos_token_id = 0

        def encode(self, text):
            return hf_tokenizer.encode(text, add_special_tokens=False)

        def decode(self, ids):
            return hf_tokenizer.decode(ids)

    text = "The cat sat on the mat. " * 3
    ids = torch.tensor([hf_tokenizer.encode(text)])
    n = ids.shape[1] - 1
    with torch.no_grad():
        wanted = -n * llama(ids, labels=ids).loss.item()  # as transformers trains it
    for tokenizer, whole in ((hf_tokenizer, text), (Bare(), text), (hf_tokenizer, f"<s>{text}")):
        assert rolling(Scorer(llama, tokenizer), whole) == pytest.approx([wanted], rel=1e-5)


SPECIALS = {"[gMASK]": 1, "<sop>": 2, "</s>": 257}


class Template:
    """A tokenizer of bytes that puts two tokens before texts, and names only the one that ends them."""

    eos_token_id = 257

    def encode(self, text, *, add_special_tokens=True):
        parts = re.split(r"(\[gMASK\]|<sop>|</s>)", text)
        ids = [i for part in parts for i in ([SPECIALS[part]] if part in SPECIALS else part.encode())]
        return [1, 2, *ids] if add_special_tokens else ids

    def decode(self, ids, *, skip_special_tokens=False):
        names = {i: "" if skip_special_tokens else name for name, i in SPECIALS.items()}
        return "".join(names.get(i, chr(i)) for i in ids)


@pytest.mark.parametrize(
    ("beginning", "before", "options"),
    [
        ("", [1, 2], {}),
        ("[gMASK]<sop>", [1, 2], {}),
        ("</s>", [257], {}),
        ("", [5], {"prefix_token_id": 5}),
        ("", [257], {"prefix_token_id": 257}),
    ],
    ids=["template", "begins with it", "begins with another", "told", "told the end"],
)
@pytest.mark.parametrize("max_length", [64, 8], ids=["whole", "in windows"])
def test_all_tokens_before_texts_are_read(llama, by_hand, beginning, before, options, max_length):
    text = "Fetch the milk."
    scorer = Scorer(llama, TextTokenizer(Template(), **options), max_length=max_length)
    [found] = rolling(scorer, beginning + text)
    windows = list(rolling_windows(text.encode(), before, max_length))
    assert windows[0].context == tuple(before)
    assert found == pytest.approx(sum(by_hand(llama, w)[0] for w in windows), rel=1e-5)


def test_long_texts_are_read_in_windows(llama, byte_tokenizer):
    text = "All work and no play. " * 30
    totals = {}
    for context in (1, 32, 64):
        ids, total = [256, *text.encode()], 0.0
        for window in rolling_windows(ids[1:], [256], 64, context):
            whole = torch.tensor([[*window.context, *window.continuation]])
            with torch.no_grad():
                log_p = llama(whole[:, :-1]).logits[0].double().log_softmax(-1)
            n = len(window.continuation)
            total += log_p[-n:].gather(1, whole[0, -n:, None]).sum().item()
        scorer = Scorer(llama, byte_tokenizer, max_length=64, window_context=context)
        [totals[context]] = rolling(scorer, text)
        assert totals[context] == pytest.approx(total, rel=1e-6)
    assert len(set(totals.values())) == 3


def test_errors():
    with pytest.raises(ValueError, match="window_context: got 5; allowed: 1 to 4"):
        list(rolling_windows([1], [0], 4, 5))
    with pytest.raises(ValueError, match="max_length: got 1; allowed: at least 2, the tokens before a text"):
        list(rolling_windows([1], [0, 1], 1))
