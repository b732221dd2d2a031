"""Models with several inputs: the inferred value of each argument, the claim of causality, and the checks."""

import pytest
import torch
from torch import nn

from stackwise.checks import check_model
from stackwise.subject.spec import ModelSpec

V, C = 50, 16


class Net(nn.Module):
    """Attention over the sequence, and over a memory if there is one."""

    hides_later = False

    def __init__(self):
        super().__init__()
        self.embedding, self.other = nn.Embedding(V, C), nn.Embedding(V + 5, C)
        self.vectors, self.image = nn.Linear(5, C), nn.Conv2d(3, C, 4, stride=4)
        self.qkv, self.memory, self.head = nn.Linear(C, 3 * C), nn.Linear(C, 2 * C), nn.Linear(C, V)

    def run(self, x, memory=None, hidden=None, *, ignores_mask=False):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(1, 2)
        if self.hides_later:
            scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1) > 0, -1e9)
        if hidden is not None and not ignores_mask:
            scores = scores.masked_fill(hidden[:, None], -1e9)
        x = x + scores.softmax(-1) @ v
        if memory is not None:
            k, v = self.memory(memory).chunk(2, -1)
            x = x + (x @ k.transpose(1, 2)).softmax(-1) @ v
        return self.head(x.tanh())


class Tagger(Net):
    def forward(self, words):
        return self.run(self.embedding(words))


class CausalNet(Net):
    hides_later = True

    def forward(self, words):
        return self.run(self.embedding(words))


class Leaky(CausalNet):
    """The mean over all positions reads later tokens."""

    def run(self, x, *_):
        return super().run(x + x.mean(1, keepdim=True))


class Translator(Net):
    hides_later = True

    def forward(self, src, tgt, src_mask, tgt_mask):
        memory = self.embedding(src) * src_mask[..., None]
        return self.run(self.other(tgt), memory, tgt_mask == 0)


class Types(Net):
    def forward(self, input_ids, token_type_ids):
        return self.run(self.embedding(input_ids) + self.other(token_type_ids))


class CrossAttention(Net):
    def forward(self, query, key_value):
        return self.run(self.vectors(query), self.vectors(key_value))


class Conditioned(Net):
    def forward(self, tokens, label):
        return self.run(self.embedding(tokens) + self.other(label)[:, None])


class Captions(Net):
    hides_later = True

    def forward(self, images, captions):
        return self.run(self.embedding(captions), self.image(images).flatten(2).transpose(1, 2))


class Noisy(Net):
    def forward(self, indices, noise):
        return self.run(self.embedding(indices) + noise[:, None, None].to(self.head.weight))


class HidesPadding(Net):
    """True is padding."""

    def forward(self, ids, mask):
        return self.run(self.embedding(ids), hidden=mask)


class OtherName(Net):
    def forward(self, ids, src_mask=None):
        return self.run(self.embedding(ids), hidden=None if src_mask is None else src_mask == 0)


class IgnoresPadding(Net):
    def forward(self, ids, pad_mask=None):
        return self.run(self.embedding(ids), hidden=pad_mask, ignores_mask=True)


class Batch(Net):
    def forward(self, batch):
        scores = self.run(self.embedding(batch["words"]), hidden=batch["padding"])
        return {"states": self.embedding(batch["words"]), "scores": scores}


FOUND = {
    Tagger: ("takes token ids", None),
    CausalNet: ("assumed causal", True),
    Leaky: ("assumed causal", True),
    Translator: ("tgt= and src=7 fixed ids and src_mask= of ones of length 7 and tgt_mask= of ones", True),
    Types: ("token_type_ids=the same id at each position", None),
    CrossAttention: ("key_value=7 fixed vectors of width 5", None),
    Conditioned: ("label=a fixed id", None),
    Captions: ("captions= and images=a fixed image (3, 32, 32)", True),
    Noisy: ("noise=3", None),
    HidesPadding: ("mask= of zeros", None),
    OtherName: ("found: masked", None),
    IgnoresPadding: ("found: masked", None),
    Batch: ("a dict of words, padding, logits at 'scores'", True),
}
FAILS = {Leaky: "causality", IgnoresPadding: "padding_amount"}


class Images(Net):
    """Positions of an image see each other."""

    def forward(self, words, is_image=None):
        x = self.embedding(words)
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        if is_image is not None:
            seen = seen | (is_image[:, None] & is_image)
        return self.embedding.weight.new_tensor(1.0) * (seen.float() @ x)


def test_declared_call_that_opens_later_tokens_is_a_warning():
    def with_image(model, words):
        positions = torch.arange(words.shape[1])
        return model(words, is_image=(positions > 1) & (positions < 5))

    [result] = check_model(ModelSpec.of(Images, forward=with_image), checks=["causality"])
    assert (result.status, "then declare visible=" in result.advice) == ("warned", True)


def test_declared_mask_that_shows_later_tokens_fails():
    class Masked(CausalNet):
        def forward(self, words, mask=None):
            x = self.embedding(words)
            seen = torch.ones(x.shape[1], x.shape[1]).tril() if mask is None else mask
            return self.head(seen @ x)

    def shifted(model, words):
        return model(words, torch.ones(words.shape[1], words.shape[1]).tril(1))

    [result] = check_model(ModelSpec.of(Masked, forward=shifted), checks=["causality"])
    assert result.status == "failed"


@pytest.mark.parametrize("model", FOUND, ids=lambda model: model.__name__)
def test_arguments_and_causality_are_inferred(model):
    note, causal = FOUND[model]
    spec = ModelSpec.of(model)
    assert note in spec.notes
    assert spec.per_position and spec.causal is causal


@pytest.mark.parametrize("model", FOUND, ids=lambda model: model.__name__)
def test_only_wrong_models_with_several_inputs_fail(model):
    names = ["causality", "padding_amount", "batch_invariance", "bfloat16_error"]
    failed = {result.check for result in check_model(model, checks=names) if result.status == "failed"}
    assert failed == ({FAILS[model]} if model in FAILS else set())


def test_similarity_of_all_rows_is_no_output_per_row():
    class Pairs(Net):
        def forward(self, images, texts):
            return self.image(images).mean((2, 3)) @ self.embedding(texts).mean(1).T

    with pytest.raises(ValueError, match=r"output of shape \(2, 2\)"):
        ModelSpec.of(Pairs)


class Packed(Net):
    """The second layer reads across documents if `leaks`."""

    hides_later = True

    def __init__(self, leaks=False):
        super().__init__()
        self.leaks, self.second = leaks, nn.Linear(V, C)

    def forward(self, ids, segment_ids=None):
        hidden = None if segment_ids is None else segment_ids[:, :, None] != segment_ids[:, None]
        x, mask = self.embedding(ids), torch.ones(ids.shape[1], ids.shape[1]).triu(1) > 0
        for layer in range(2):
            q, k, v = self.qkv(x).chunk(3, -1)
            both = mask if hidden is None or (layer and self.leaks) else mask | hidden
            x = x + (q @ k.transpose(1, 2)).masked_fill(both, -1e9).softmax(-1) @ v
        return self.head(x)


@pytest.mark.parametrize(("leaks", "status"), [(False, "passed"), (True, "warned")])
def test_documents_that_are_partly_separate_are_reported(leaks, status):
    spec = ModelSpec.of(lambda: Packed(leaks))
    assert ("separates documents only partly" in spec.notes) == leaks
    [result] = check_model(spec, checks=["packing"])
    assert result.status == status


class Starts(Packed):
    def forward(self, ids, cu_seqlens=None):
        if cu_seqlens is None:
            return super().forward(ids)
        places = torch.arange(ids.numel())
        return super().forward(ids, torch.searchsorted(cu_seqlens[1:], places, right=True).view_as(ids))


def test_documents_may_be_given_by_their_starts():
    [result] = check_model(Starts, checks=["packing"])
    assert result.status == "passed"


class Gate(Net):
    """A gate by a comparison, with the gradient of the sigmoid."""

    def forward(self, ids):
        x = self.embedding(ids)
        soft = x.sigmoid()
        return self.run(x * ((soft > 0.5).to(x) + soft - soft.detach()))


def test_straight_through_comparison_is_the_choice_of_the_author():
    [result] = check_model(Gate, checks=["gradient_exact"])
    assert result.status == "warned"


class Experts(Net):
    def __init__(self, dim=(0, 1)):
        super().__init__()
        self.dim, self.router = dim, nn.Linear(C, 4)

    def forward(self, ids):
        x = self.embedding(ids)
        scores = self.router(x).softmax(-1)
        chosen = torch.zeros_like(scores).scatter(-1, scores.topk(2, -1).indices, 1.0)
        probabilities = scores.mean(self.dim, keepdim=True)
        loss = (chosen.mean((0, 1)) * probabilities.mean((0, 1))).sum()
        return {"logits": self.run(x * (scores * chosen).sum(-1, keepdim=True)), "aux_loss": 4 * loss}


@pytest.mark.parametrize(("dim", "status"), [((0, 1), "passed"), (-1, "failed")])
def test_balance_loss_that_is_constant_fails(dim, status):
    [result] = check_model(lambda: Experts(dim), checks=["auxiliary_gradient"])
    assert result.status == status


class ImageTokens(nn.Module):
    """Puts two vectors at the ids 20, of which there must be two in each row."""

    def __init__(self):
        super().__init__()
        self.embedding, self.vectors = nn.Embedding(21, 8), nn.Parameter(torch.randn(2, 8))
        self.head = nn.Linear(8, 21)

    def forward(self, ids):
        if not ((ids == 20).sum(dim=1) == 2).all():
            raise ValueError("two ids 20 are needed")
        x = self.embedding(ids)
        places = (ids == 20)[..., None].expand_as(x)
        return self.head(x.masked_scatter(places, self.vectors.repeat(len(ids), 1)).cumsum(dim=1))


def test_model_that_refuses_other_ids():
    """Inference of the causality changes ids, and must not raise the error of the model."""

    def make_batch(batch_size, seq_len, generator):
        ids = torch.randint(20, (batch_size, seq_len), generator=generator)
        ids[:, -2:] = 20
        return ids

    spec = ModelSpec.of(ImageTokens, make_batch=make_batch)
    assert spec.causal is None
    assert "it refuses other ids" in spec.notes
