"""The oracle finds what a mistake changes and contradicts, on a model whose mistakes are known."""

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bench.source_mutants import oracle
from bench.source_mutants.oracle import ask, changed, contradictions, new_exceptions


class Mean(nn.Module):
    """Language model whose state is the mean of the embeddings so far."""

    def __init__(self, mistake=""):
        super().__init__()
        self.config = SimpleNamespace(vocab_size=17)
        self.embedding, self.head = nn.Embedding(17, 8), nn.Linear(8, 17)
        self.mistake, self.calls = mistake, 0

    def forward(self, ids, attention_mask=None, labels=None):
        self.calls += self.mistake == "history"
        mask = torch.ones_like(ids) if attention_mask is None or self.mistake == "mask" else attention_mask
        states = self.embedding(ids) * mask[..., None]
        if self.mistake == "batch":
            states = states - states.mean(0)
        if self.mistake == "detached":
            states = states.detach()
        if self.mistake == "scaled":
            states = states * 2
        total = states.sum(1, keepdim=True) if self.mistake == "future" else states.cumsum(1)
        if self.mistake == "labels required":
            labels.shape  # noqa: B018
        logits = self.head(total / mask.cumsum(1).clamp(min=1)[..., None]) + self.calls
        loss = None
        if labels is not None:
            shift = 0 if self.mistake == "shift" else 1
            kept = logits[:, : logits.shape[1] - shift].flatten(0, 1)
            loss = F.cross_entropy(kept, labels[:, shift:].flatten())
        return SimpleNamespace(logits=logits + 0 * total.sum(), loss=loss)


@pytest.fixture(scope="module")
def originals():
    return ask(Mean)


def test_healthy_model_agrees_with_itself(originals):
    assert not contradictions(originals, originals)
    assert not changed(originals, originals)
    assert not new_exceptions(originals, originals)
    asked = {name for name, answer in originals.items() if answer.gap is not None}
    assert {"batch", "right padding", "loss", "finite difference", "gradient of the loss"} <= asked


@pytest.mark.parametrize(
    ("mistake", "way"),
    [
        ("batch", "batch"),
        ("mask", "left padding"),
        ("future", "later tokens"),
        ("future", "prefix"),
        ("history", "other calls before"),
        ("shift", "loss"),
        ("shift", "gradient of the loss, ignored labels"),
        ("detached", "finite difference"),
    ],
)
def test_contradiction_is_found(originals, mistake, way):
    assert way in contradictions(ask(lambda: Mean(mistake)), originals)


def test_another_model_changes_and_does_not_contradict(originals):
    answers = ask(lambda: Mean("scaled"))
    assert "plain" in changed(answers, originals)
    assert not contradictions(answers, originals)


def test_exception_of_the_plain_way_ends_the_questions(originals):
    answers = ask(lambda: Mean("labels required"))
    assert list(answers) == ["plain"]
    assert new_exceptions(answers, originals)["plain"].startswith("AttributeError")


def test_oracle_imports_nothing_of_the_project():
    tree = ast.parse(Path(oracle.__file__).read_text())
    modules = {each.module for each in ast.walk(tree) if isinstance(each, ast.ImportFrom)}
    modules |= {name.name for each in ast.walk(tree) if isinstance(each, ast.Import) for name in each.names}
    assert not [name for name in modules if name.startswith(("stackwise", "bench"))]
