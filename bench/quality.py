"""`python -m bench.quality`: our scores beside those of lm-evaluation-harness, and how long both take.

A small Llama of transformers, with random weights and again after a short training on the documentation that
every CPython carries, answers questions made of that text: in the format of MMLU with five examples, in the
format of HellaSwag, and whole pages for perplexity. The harness evaluates it through our adapter and through
its own `hf` model. Both have to agree, example by example. Of a page, `hf` also scores the token that the
tokenizer prepends. No model is trained to predict it, and our adapter does not score it: it is compared with
an `hf` model that prepends none. Both are timed interleaved, on the same questions, with the same batch size.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.byte_pairs import byte_pairs
from bench.claim import Bar, Claim, interleave, ratio
from stackwise.data.text import documentation_pages
from stackwise.quality import Scorer, Tasks, harness_model

SHOTS = 5
AGREEMENT = 1e-4
FASTER = 2.0
SUBJECTS = ("anatomy", "philosophy", "virology", "sociology")  # of the groups of MMLU, one each
SENTENCE = re.compile(r"(?<=[.!?])\s+")
TASKS = {
    "own_mmlu_{subject}": """\
task: own_mmlu_{subject}
description: "The following are multiple choice questions (with answers) about {subject}.\\n\\n"
test_split: test
fewshot_split: dev
num_fewshot: {shots}
fewshot_config: {{sampler: first_n}}
output_type: multiple_choice
doc_to_text: "{{{{question.strip()}}}}\\nA. {{{{choices[0]}}}}\\nB. {{{{choices[1]}}}}\\n\
C. {{{{choices[2]}}}}\\nD. {{{{choices[3]}}}}\\nAnswer:"
doc_to_choice: ["A", "B", "C", "D"]
doc_to_target: answer
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
""",
    "own_hellaswag": """\
task: own_hellaswag
test_split: validation
output_type: multiple_choice
process_docs: !function cleaning.process_docs
doc_to_text: "{{{{query}}}}"
doc_to_target: "{{{{label}}}}"
doc_to_choice: choices
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
""",
    "own_pages": """\
task: own_pages
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - {{metric: word_perplexity}}
  - {{metric: byte_perplexity}}
  - {{metric: bits_per_byte}}
""",
}


@dataclass(frozen=True)
class Size:
    """How much is asked, of how large a model."""

    d_model: int
    n_layers: int
    vocab_size: int
    questions: int
    pages: int
    steps: int
    rounds: int
    batch_size: int = 16
    max_length: int = 1024


FULL = Size(256, 6, 4096, questions=100, pages=40, steps=300, rounds=11)
QUICK = Size(48, 2, 512, questions=6, pages=3, steps=20, rounds=5)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a minute; agreement counts, times do not")
    quick = parser.parse_args(arguments).quick
    claim, size = Claim("quality", quick=quick), QUICK if quick else FULL
    with tempfile.TemporaryDirectory() as folder:
        measure(claim, size, Path(folder))
    return claim.conclude()


def measure(claim: Claim, size: Size, folder: Path) -> None:
    """All bars of a model before and after its training."""
    write_data(folder, size)
    tokenizer = train_tokenizer(size.vocab_size)
    torch.manual_seed(0)
    model = llama(size, tokenizer)
    for state in ("random", "trained"):
        if state == "trained":
            train(model, tokenizer, size)
        scores = {name: ask(model, tokenizer, size, folder) for name, ask in WAYS.items()}
        compare(claim, state, scores)
    for task in ("mmlu", "hellaswag"):
        time_both(claim, task, model, tokenizer, size, folder)


# Data


def write_data(folder: Path, size: Size) -> None:
    """Write questions and pages, and the tasks of the harness that read them."""
    rng, sentences = random.Random(0), list(documentation_sentences())
    words = sorted({word for sentence in sentences for word in sentence.split() if word.isalpha()})
    rows = list(mmlu_rows(rng, sentences, words, size.questions + SHOTS))
    mmlu = {
        "test": [r for r, split in rows if split == "test"],
        "dev": [r for r, split in rows if split == "dev"],
    }
    pages = [page[:6000] for page in documentation_pages() if len(page) > 2000][: size.pages]
    splits = {
        "mmlu": mmlu,
        "hellaswag": {"validation": list(hellaswag_rows(rng, sentences, size.questions * len(SUBJECTS)))},
        "pages": {"test": [{"text": page} for page in pages]},
    }
    folder.mkdir(exist_ok=True)
    (folder / "cleaning.py").write_text("from lm_eval.tasks.hellaswag.utils import process_docs\n")
    for pattern, text in TASKS.items():
        kind = pattern.split("_")[1]
        for subject in SUBJECTS if "{subject}" in pattern else ("",):
            name, files = pattern.format(subject=subject), {}
            for split, data in splits[kind].items():
                file = folder / f"{name}-{split}.jsonl"
                write_lines(file, [row for row in data if row.get("subject", "") == subject])
                files[split] = str(file)
            source = {"dataset_path": "json", "dataset_kwargs": {"data_files": files}}
            lines = "".join(f"{key}: {json.dumps(value)}\n" for key, value in source.items())
            (folder / f"{name}.yaml").write_text(text.format(subject=subject, shots=SHOTS) + lines)


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def documentation_sentences() -> Iterator[str]:
    for page in documentation_pages():
        for paragraph in page.split("\n\n"):
            for sentence in SENTENCE.split(" ".join(paragraph.split())):
                if 60 < len(sentence) < 240 and "[" not in sentence:
                    yield sentence


def mmlu_rows(
    rng: random.Random, sentences: list[str], words: list[str], count: int
) -> Iterator[tuple[dict[str, Any], str]]:
    """Which word comes next? The first ones of each subject are examples."""
    for subject in SUBJECTS:
        for i, sentence in enumerate(rng.sample(sentences, count)):
            *before, word = sentence.rstrip(".!?").split()
            choices = [word, *rng.sample([w for w in words if w != word], 3)]
            answer = rng.randrange(4)
            choices[0], choices[answer] = choices[answer], choices[0]
            question = f"How does this sentence end: {' '.join(before)} ..."
            row = {"question": question, "choices": choices, "answer": answer, "subject": subject}
            yield row, "dev" if i < SHOTS else "test"


def hellaswag_rows(rng: random.Random, sentences: list[str], count: int) -> Iterator[dict[str, Any]]:
    """How does the third sentence go on? HellaSwag's longer contexts are two sentences and a part of one."""
    for _ in range(count):
        place = rng.randrange(len(sentences) - 2)
        third = sentences[place + 2].split()
        others = [each.split() for each in rng.sample(sentences, 3)]
        endings = [" ".join(words[len(words) // 2 :]) for words in (third, *others)]
        label = rng.randrange(4)
        endings[0], endings[label] = endings[label], endings[0]
        yield {
            "activity_label": "Documentation",
            "ctx_a": " ".join(sentences[place : place + 2]),
            "ctx_b": " ".join(third[: len(third) // 2]),
            "endings": endings,
            "label": str(label),
        }


# The model


def train_tokenizer(vocab_size: int) -> Any:
    """Bytes joined in pairs, with a token before each text, as Llama's."""
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    inner = byte_pairs(vocab_size, ["<s>", "</s>"])
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")


def llama(size: Size, tokenizer: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=size.d_model,
        intermediate_size=3 * size.d_model,
        num_hidden_layers=size.n_layers,
        num_attention_heads=size.d_model // 16,
        num_key_value_heads=size.d_model // 16,
        max_position_embeddings=size.max_length,
        bos_token_id=0,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config).eval()


def train(model: Any, tokenizer: Any, size: Size) -> None:
    """A few steps on the text; the same weights each time."""
    ids = tokenizer.encode("\n\n".join(documentation_pages()), add_special_tokens=False)
    length, generator = 128, torch.Generator().manual_seed(0)
    text = torch.tensor(ids)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model.train()
    for _ in range(size.steps):
        starts = torch.randint(len(ids) - length, (8,), generator=generator)
        batch = torch.stack([text[start : start + length] for start in starts.tolist()])
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


# Ways to ask


@dataclass(frozen=True)
class Scores:
    """By task: of each example the log-probabilities of its choices or of its text, and the accuracy."""

    log_probabilities: dict[str, list[list[float]]]
    accuracies: dict[str, float]


def task_names() -> list[str]:
    return [f"own_mmlu_{subject}" for subject in SUBJECTS] + ["own_hellaswag", "own_pages"]


def ask_ours(model: Any, tokenizer: Any, size: Size, folder: Path) -> Scores:
    scorer = Scorer(model, tokenizer, batch_size=size.batch_size)
    assert scorer.model.cache_rows is not None, scorer.model.reuse_note
    return of_harness(Tasks(task_names(), include=folder).run(scorer))


def ask_hf(model: Any, tokenizer: Any, size: Size, folder: Path) -> Scores:
    return evaluated(hf_model(model, tokenizer, size), task_names(), folder)


def ask_hf_pages(model: Any, tokenizer: Any, size: Size, folder: Path) -> Scores:
    """Score the pages without the token that the tokenizer prepends."""
    return evaluated(hf_model(model, tokenizer, size, add_bos_token=False), ["own_pages"], folder)


WAYS = {"ours": ask_ours, "hf": ask_hf, "hf, pages alone": ask_hf_pages}


def hf_model(model: Any, tokenizer: Any, size: Size, **options: Any) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=size.batch_size, device="cpu", **options)


def evaluated(model: Any, tasks: list[str], folder: Path) -> Scores:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    return of_harness(simple_evaluate(model=model, tasks=tasks, task_manager=manager, bootstrap_iters=0))


def of_harness(found: Any) -> Scores:
    log_p, accuracies = {}, {}
    for task, samples in found["samples"].items():
        by_example = {}
        for sample in samples:
            answers = [response[0] for response in sample["resps"]]
            by_example[sample["doc_id"]] = [a[0] if isinstance(a, tuple | list) else a for a in answers]
        log_p[task] = [by_example[i] for i in sorted(by_example)]
        results = found["results"][task]
        for key, name in (("acc,none", task), ("acc_norm,none", f"{task} norm")):
            if key in results:
                accuracies[name] = float(results[key])
    return Scores(log_p, accuracies)


def compare(claim: Claim, state: str, scores: Mapping[str, Scores]) -> None:
    """Enter the differences to `hf`. Those of pages are relative, because their values are large."""
    ours, hf = scores["ours"], scores["hf"]
    wanted = hf.log_probabilities | scores["hf, pages alone"].log_probabilities
    assert ours.log_probabilities.keys() == wanted.keys()
    worst = {"choices": 0.0, "pages": 0.0}
    for task, examples in wanted.items():
        for a, b in zip(ours.log_probabilities[task], examples, strict=True):
            for one, two in zip(a, b, strict=True):
                kind, scale = ("pages", abs(two)) if task == "own_pages" else ("choices", 1.0)
                worst[kind] = max(worst[kind], abs(one - two) / scale)
    for kind, value in worst.items():
        bar = Bar(f"{state}: ours against hf, {kind}", value, AGREEMENT, at_most=True)
        claim.enter(bar, {"largest_difference": value, "accuracies": ours.accuracies})
    apart = {task for task, value in hf.accuracies.items() if ours.accuracies.get(task, -1) != value}
    claim.enter(Bar(f"{state}: ours, other accuracies", len(apart), 0, at_most=True), sorted(apart))
    print(f"{state}: {hf.accuracies}", flush=True)


def requests_of(task: str, folder: Path) -> list[Any]:
    """Return the requests of the harness for all questions in the format of "mmlu" or "hellaswag"."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    parts = manager.load([name for name in task_names() if task in name])["tasks"].values()
    for part in parts:
        part.set_config("num_fewshot", part.get_config("num_fewshot") or 0)
        part.set_fewshot_seed(0)
        part.build_all_requests()
    return [request for part in parts for request in part.instances]


def time_both(claim: Claim, task: str, model: Any, tokenizer: Any, size: Size, folder: Path) -> None:
    """The same requests, from text to log-probabilities."""
    requests = requests_of(task, folder)
    questions = len({(request.task_name, request.doc_id) for request in requests})
    theirs = hf_model(model, tokenizer, size)
    ours = harness_model(model, tokenizer, batch_size=size.batch_size)
    whole = harness_model(model, tokenizer, batch_size=size.batch_size, reuse=False)
    samples = interleave(
        {
            "ours": lambda: ours.loglikelihood(requests),
            "ours, each sequence whole": lambda: whole.loglikelihood(requests),
            "hf": lambda: theirs.loglikelihood(requests, disable_tqdm=True),
        },
        rounds=size.rounds,
    )
    figures: dict[str, Any] = {
        "questions": questions,
        "examples_per_second": {name: questions / median(times) for name, times in samples.items()},
        "times_hf": {name: ratio(samples["hf"], times) for name, times in samples.items() if name != "hf"},
        "seconds": samples,
    }
    gain = figures["times_hf"]["ours"]["median"]
    claim.enter(Bar(f"{task}: examples/s against hf", gain, FASTER, full_size=True), figures)
    for name, value in figures["examples_per_second"].items():
        print(f"{task:<10} {name:<26} {value:8.1f} examples/s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
