"""The adapter for the harness, compared with the harness's own model, request by request."""

import pytest

pytest.importorskip("lm_eval")

import torch
from lm_eval.api.instance import Instance

from stackwise.quality import Scorer, Tasks, harness_model
from tests.quality.conftest import tiny_llama

PAIRS = [
    ("The cat sat on the mat ", "and slept"),
    ("The cat sat on the mat", " and slept"),
    ("The cat sat on the mat", " and woke"),
    ("", "Once upon a time"),
    ("<s>The cat", " sat"),
    ("A very long text. " * 40, "The end"),
    ("A\n", "B"),
]
TEXTS = ["Once upon a time.", "There was a model that could read 64 tokens at once, and no more. " * 6]


def instances(kind, arguments):
    return [Instance(kind, {}, tuple(each), i) for i, each in enumerate(arguments)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_few_requests_as_the_harness_asks_its_own_model(llama, hf_tokenizer):
    from lm_eval.models.huggingface import HFLM

    theirs = HFLM(pretrained=llama, tokenizer=hf_tokenizer, batch_size=2, device="cpu")
    ours = harness_model(llama, hf_tokenizer, batch_size=2)
    asked = instances("generate_until", [("The cat", {"until": ["\n"], "max_gen_toks": 4})])
    assert ours.generate_until(asked) == theirs.generate_until(asked)
    asked = instances("loglikelihood", PAIRS[:2])
    for one, two in zip(ours.loglikelihood(asked), theirs.loglikelihood(asked), strict=True):
        assert one[0] == pytest.approx(two[0], abs=1e-4) and one[1] == two[1]
    rolling = instances("loglikelihood_rolling", [(TEXTS[0],)])
    theirs = HFLM(pretrained=llama, tokenizer=hf_tokenizer, batch_size=2, device="cpu", add_bos_token=False)
    assert ours.loglikelihood_rolling(rolling) == pytest.approx(
        theirs.loglikelihood_rolling(rolling), rel=1e-5
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_texts_end_where_those_of_the_harness_end():
    """At an end of the model's own, and at a special token that a task names."""
    from lm_eval.models.huggingface import HFLM
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    llama = tiny_llama(seed=1)
    context = torch.tensor([[1, 2, 3]])
    free = llama.generate(context, max_new_tokens=8, do_sample=False)[0, 3:].tolist()
    end = free[3]
    assert free.index(end) == 3 and 257 not in free
    inner = Tokenizer(models.WordLevel({f"t{i}": i for i in range(258)}, unk_token="t0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(["t256", "t257", f"t{end}"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="t256", eos_token="t257", pad_token="t257"
    )
    wanted = " ".join(f"t{each}" for each in free[:3])
    for until, ends in (([f"t{end}"], 257), ([], [257, end])):
        llama.generation_config.eos_token_id = ends
        asked = instances("generate_until", [("t1 t2 t3", {"until": until, "max_gen_toks": 8})])
        theirs = HFLM(pretrained=llama, tokenizer=tokenizer, batch_size=1, device="cpu")
        assert theirs.generate_until(asked) == [wanted]
        assert harness_model(llama, tokenizer).generate_until(asked) == [wanted]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_as_the_harness_asks_its_own_model(llama, hf_tokenizer):
    from lm_eval.models.huggingface import HFLM

    theirs = HFLM(pretrained=llama, tokenizer=hf_tokenizer, batch_size=3, device="cpu")
    ours = harness_model(llama, hf_tokenizer, batch_size=3)
    assert ours.max_length == theirs.max_length
    asked = instances("loglikelihood", PAIRS)
    for one, two in zip(ours.loglikelihood(asked), theirs.loglikelihood(asked), strict=True):
        assert one[0] == pytest.approx(two[0], abs=1e-4) and one[1] == two[1]
    rolling = instances("loglikelihood_rolling", [(text,) for text in TEXTS])
    alone = HFLM(pretrained=llama, tokenizer=hf_tokenizer, batch_size=3, device="cpu", add_bos_token=False)
    assert ours.loglikelihood_rolling(rolling) == pytest.approx(
        alone.loglikelihood_rolling(rolling), rel=1e-5
    )
    contexts = ["The cat", "A longer context than that", "x" * 400]
    for options in (
        {"until": ["\n"], "max_gen_toks": 12},
        {"until": "e", "max_gen_toks": 7, "do_sample": False},
    ):
        asked = instances("generate_until", [(context, options) for context in contexts])
        assert ours.generate_until(asked) == theirs.generate_until(asked)


def test_options_of_generation(llama, byte_tokenizer):
    model = harness_model(llama, byte_tokenizer)
    drawing = {
        "until": [],
        "max_gen_toks": 5,
        "do_sample": True,
        "temperature": 0.8,
        "top_k": 5,
        "top_p": 0.9,
    }
    asked = instances("generate_until", [("a", drawing), ("b", {"until": ["x"], "max_new_tokens": 3})])
    assert model.generate_until(asked) == model.generate_until(asked)
    with pytest.raises(
        ValueError, match=r"generation_kwargs: got \{'num_beams': 2\}; allowed: until, do_sample"
    ):
        model.generate_until(instances("generate_until", [("a", {"num_beams": 2})]))
    plain = {"until": [], "max_gen_toks": 4}
    neutral = {"num_beams": 1, "repetition_penalty": 1.0, "early_stopping": False, "min_p": None}
    one, two = (
        model.generate_until(instances("generate_until", [("a", options)]))
        for options in (plain, plain | neutral)
    )
    assert one == two
    with pytest.raises(ValueError, match="tokenizer: got 'byte'; allowed: one with a chat template"):
        model.apply_chat_template([{"role": "user", "content": "a"}])


def test_a_model_without_a_limit_is_read_as_far_as_the_harness_does(rack, byte_tokenizer):
    model = harness_model(Scorer(rack, byte_tokenizer))
    assert model.max_length == 2048 and model.tokenizer_name == "byte"
    with pytest.raises(ValueError, match="batch_size: got 3; allowed: what the Scorer was given"):
        harness_model(Scorer(rack, byte_tokenizer), batch_size=3)


def test_the_extra_is_named(monkeypatch, llama, byte_tokenizer):
    import sys

    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ImportError, match=r"pip install 'stackwise\[quality\]'"):
        harness_model(llama, byte_tokenizer)
    with pytest.raises(ImportError, match=r"pip install 'stackwise\[quality\]'"):
        Tasks(["mmlu"])
