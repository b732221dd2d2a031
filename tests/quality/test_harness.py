"""The harness: our adapter beside its own model, request by request; tasks of one's own from a folder."""

import json
import os

import pytest

pytest.importorskip("lm_eval")

import torch
from lm_eval.api.instance import Instance

from stackwise.quality import Scorer, harness_model, load_task, run_harness
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
    asked = instances("loglikelihood", PAIRS[:2])
    for one, two in zip(ours.loglikelihood(asked), theirs.loglikelihood(asked), strict=True):
        assert one[0] == pytest.approx(two[0], abs=1e-4) and one[1] == two[1]
    rolling = instances("loglikelihood_rolling", [(TEXTS[0],)])
    assert ours.loglikelihood_rolling(rolling) == pytest.approx(
        theirs.loglikelihood_rolling(rolling), rel=1e-5
    )
    asked = instances("generate_until", [("The cat", {"until": ["\n"], "max_gen_toks": 4})])
    assert ours.generate_until(asked) == theirs.generate_until(asked)


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
    assert (ours.max_length, ours.prefix_token_id, ours.eot_token_id) == (
        theirs.max_length,
        theirs.prefix_token_id,
        theirs.eot_token_id,
    )
    asked = instances("loglikelihood", PAIRS)
    for one, two in zip(ours.loglikelihood(asked), theirs.loglikelihood(asked), strict=True):
        assert one[0] == pytest.approx(two[0], abs=1e-4) and one[1] == two[1]
    # Our scorer reads the texts by itself.
    for one, two in zip(Scorer(llama, hf_tokenizer).score(PAIRS), theirs.loglikelihood(asked), strict=True):
        assert one.log_probability == pytest.approx(two[0], abs=1e-4)
    rolling = instances("loglikelihood_rolling", [(text,) for text in TEXTS])
    assert ours.loglikelihood_rolling(rolling) == pytest.approx(
        theirs.loglikelihood_rolling(rolling), rel=1e-5
    )
    contexts = ["The cat", "A longer context than that", "x" * 400]
    for options in (
        {"until": ["\n"], "max_gen_toks": 12},
        {"until": "e", "max_gen_toks": 7, "do_sample": False},
    ):
        asked = instances("generate_until", [(context, options) for context in contexts])
        assert ours.generate_until(asked) == theirs.generate_until(asked)


def write_tasks(folder):
    rows = [
        {
            "question": f"{i} and one is",
            "choices": ["a lot", "little", "much more than that"],
            "answer": i % 3,
        }
        for i in range(5)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = [{"context": row["question"], "choices": row["choices"], "answer": row["answer"]} for row in rows]
    (folder / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    files = f"{{data_files: {{test: {folder}/rows.jsonl}}}}"
    shared = f"dataset_path: json\ntest_split: test\ndataset_kwargs: {files}\n"
    means = "aggregation: mean, higher_is_better: true"
    (folder / "choice.yaml").write_text(
        f"""{shared}task: own_choice
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc, {means}}}, {{metric: acc_norm, {means}}}]
"""
    )
    (folder / "texts.yaml").write_text(
        f"""{shared}task: own_texts
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list: [{{metric: bits_per_byte}}]
"""
    )
    (folder / "written.yaml").write_text(
        f"""{shared}task: own_written
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 4, num_beams: 1}}
metric_list: [{{metric: exact_match, {means}}}]
"""
    )
    (folder / "beams.yaml").write_text(
        f"""{shared}task: own_beams
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], num_beams: 4}}
metric_list: [{{metric: exact_match, {means}}}]
"""
    )
    (folder / "long.yaml").write_text(
        f"""{shared}task: own_long
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"]}}
metric_list: [{{metric: exact_match, {means}}}]
"""
    )
    (folder / "ends.yaml").write_text(
        f"""{shared}task: own_ends
output_type: loglikelihood
doc_to_text: "{{{{question}}}}"
doc_to_target: " {{{{choices[0]}}}}"
metric_list: [{{metric: perplexity, aggregation: perplexity, higher_is_better: false}}]
"""
    )


@pytest.mark.slow  # the harness takes its time to be imported
@pytest.mark.parametrize("kind", ["llama", "rack"])
def test_tasks_of_a_folder(kind, request, byte_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("DISABLE_MULTIPROC", raising=False)
    write_tasks(tmp_path)
    scorer = Scorer(request.getfixturevalue(kind), byte_tokenizer)
    names = ["own_choice", "own_texts", "own_written", "own_ends"]
    found = run_harness(scorer, names, include=tmp_path, defaults=False, samples=True)
    own = load_task(str(tmp_path / "own.jsonl")).run(scorer)
    results = found["results"]["own_choice"]
    assert results["acc,none"] == own.accuracy().value
    assert results["acc_norm,none"] == own.accuracy("characters").value
    assert results["acc_stderr,none"] == pytest.approx(own.accuracy().standard_error)
    # Without a formula it is of resamples; five texts that cost about the same leave it small.
    ends = found["results"]["own_ends"]
    assert 0 < ends["perplexity_stderr,none"] < ends["perplexity,none"]
    answers = [[each[0][0] for each in sample["resps"]] for sample in found["samples"]["own_choice"]]
    flat = [score for scores in answers for score in scores]
    assert flat == pytest.approx([s for scores in own.log_probabilities for s in scores], abs=1e-4)
    assert found["results"]["own_texts"]["bits_per_byte,none"] > 0
    assert all(isinstance(s["resps"][0][0], str) for s in found["samples"]["own_written"])
    with pytest.raises(ValueError, match="tasks: got other; allowed: a task of the harness or "):
        run_harness(scorer, ["other"], include=tmp_path, defaults=False)
    read = scorer.tokens_read
    with pytest.raises(ValueError, match=r"generation_kwargs: got \{'own_beams': \{'num_beams': 4\}\}"):
        run_harness(scorer, ["own_choice", "own_beams"], include=tmp_path, defaults=False)
    if scorer.model.max_length is not None:
        with pytest.raises(ValueError, match=r"max_gen_toks: got \{'own_long': 256\}; allowed: below 256"):
            run_harness(scorer, ["own_choice", "own_long"], include=tmp_path, defaults=False)
    assert scorer.tokens_read == read  # before the run starts
    assert "DISABLE_MULTIPROC" not in os.environ


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
    assert model.tok_encode("ab") == [97, 98]
    with pytest.raises(ValueError, match="batch_size: got 3; allowed: what the Scorer was given"):
        harness_model(Scorer(rack, byte_tokenizer), batch_size=3)


@pytest.mark.parametrize(("key", "value"), [("shots", -1), ("limit", 0), ("limit", -1)])
def test_numbers_that_are_none(key, value, llama, byte_tokenizer):
    with pytest.raises(ValueError, match=f"{key}: got {value}; allowed: an integer >= {int(key == 'limit')}"):
        run_harness(Scorer(llama, byte_tokenizer), ["own"], **{key: value})


def test_the_extra_is_named(monkeypatch, llama, byte_tokenizer):
    import sys

    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ImportError, match=r"pip install 'stackwise\[quality\]'"):
        harness_model(llama, byte_tokenizer)
    with pytest.raises(ImportError, match=r"pip install 'stackwise\[quality\]'"):
        run_harness(Scorer(llama, byte_tokenizer), ["mmlu"])
