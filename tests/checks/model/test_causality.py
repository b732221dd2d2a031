"""Causality: outputs that depend on later tokens fail, correct models pass, other models are not asked."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stackwise.checks import check_model
from stackwise.subject.spec import ModelSpec
from tests import subjects
from tests.subjects import GRULM, ConvLM, TinyLM


class Small(TinyLM):
    """Correct model of one layer."""

    def __init__(self, **sizes):
        super().__init__(**{"n_layers": 1} | sizes)


def small(base=Small, **methods):
    """Return a class with other methods than `base`."""
    return type("Changed", (base,), methods)


def zeroed(build, parameter):
    """Return a factory of models with a weight that starts at zero."""

    def make():
        model = build()
        nn.init.zeros_(model.get_parameter(parameter))
        return model

    return make


def earlier(seq_len, diagonal=0):
    """Return the causal mask."""
    return torch.ones(seq_len, seq_len, dtype=torch.bool).tril(diagonal)


NoMask = small(visible=lambda self, T: earlier(T) | True)
ShiftedMask = small(visible=lambda self, T: earlier(T, diagonal=1))
NoMaskInTraining = small(visible=lambda self, T: earlier(T) | self.training)
ScaledByLength = small(weigh=lambda self, scores: (scores / scores.shape[-1]).softmax(dim=-1))
MeanOverPositions = small(mix=lambda self, x: x - x.mean(dim=1, keepdim=True))
# Rows see each other, which is no leak in time.
MixedRows = small(mix=lambda self, x: x + x.mean(dim=0, keepdim=True))
LeakInBfloat16 = small(mix=lambda self, x: x + 0.3 * x.mean(1, True) if x.dtype == torch.bfloat16 else x)


def one_pair(position, token):
    """Return a class in which one position sees one later token."""

    def visible(self, T):
        query, key = torch.arange(T)[:, None], torch.arange(T)
        return earlier(T) | ((query == position) & (key == token))

    return small(visible=visible)


def float32_only(base):
    def forward(self, ids):
        if self.norm.weight.dtype == torch.float64:
            raise NotImplementedError("float32 only")
        return base.forward(self, ids)

    return small(base, forward=forward)


class BatchNormOverPositions(Small):
    """Statistics of train mode are taken over rows and positions."""

    def __init__(self):
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(16)

    def mix(self, x):
        return self.batch_norm(x.transpose(1, 2)).transpose(1, 2)


class BidirectionalGRU(GRULM):
    def __init__(self):
        super().__init__()
        self.recurrence = nn.GRU(16, 8, batch_first=True, bidirectional=True)


class MaskedVocabulary(ShiftedMask):
    """Columns at -1e9 are far larger than any leak."""

    def forward(self, ids):
        x = super().forward(ids)
        return torch.cat([x, torch.full_like(x[..., :3], -1e9)], dim=-1)


class NoMemory(nn.Module):
    """Each output is the row of its own token in a table."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(29, 29)

    def forward(self, ids):
        return self.table(ids)


class ReadsNextToken(NoMemory):
    def forward(self, ids):
        x = self.table(ids)
        return 1e-3 * x + F.pad(x[:, 1:], (0, 0, 0, 1))


class Rounding(Small):
    """In float32, a number that depends on the whole row leaves a trace."""

    def mix(self, x):
        noise = 1000.0 * x.sum(dim=(1, 2), keepdim=True).sin()
        return (x + noise) - noise


class BiasUpdatedInTraining(Small):
    """Each call in train mode moves a routing bias."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bias", torch.zeros(16))

    def mix(self, x):
        output = x + self.bias
        if self.training:
            self.bias += 0.1 * x.detach().mean(dim=(0, 1)).sign().to(self.bias.dtype)
        return output


class ConvolutionInFloat32(Small):
    """An FFT spreads its rounding over all positions."""

    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(16, 64) * 0.1)

    def mix(self, x):
        T = x.shape[1]
        kernel = torch.fft.rfft(self.kernel.float()[:, :T], 2 * T)
        spectrum = torch.fft.rfft(x.float().transpose(1, 2), 2 * T) * kernel
        return x + torch.fft.irfft(spectrum, 2 * T)[..., :T].transpose(1, 2).to(x.dtype)


class TopTwo(Small):
    """Each position adds the two visible positions with the highest scores."""

    def scores(self, x):
        return x @ x.transpose(1, 2)

    def mix(self, x):
        T = x.shape[1]
        scores = self.scores(x).masked_fill(~earlier(T), -torch.inf)
        # An algorithm may prefer other positions of equal scores at another length.
        order = torch.arange(T) if T % 2 else torch.arange(T).flip(0)
        found = order[scores[..., order].topk(2).indices]
        weights = torch.zeros_like(scores).scatter(-1, found, 1.0).masked_fill(~earlier(T), 0.0)
        return x + 0.3 * weights @ x


class Mean(nn.Module):
    """Encoder that declares nothing."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(31, 8), nn.Linear(8, 31)

    def forward(self, ids):
        x = self.embedding(ids)
        return self.head(x + x.mean(1, keepdim=True))


class MeanLM(Mean):
    """The same with the name of a language model."""


def leaky_llama():
    model = subjects.llama()
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    return model


def leaky_x_decoder():
    model = subjects.x_decoder()
    for module in model.modules():
        if type(module).__name__ in ("Attention", "Attend"):
            module.causal = False
    return model


def leaky_rack():
    model = subjects.rack()
    model.stacks[1].blocks[0].attention.causal = False
    return model


# Name -> model, and the first module that differs ("": any).
LEAKS = {
    "shifted mask": (ShiftedMask, "layers.0.out"),
    "no mask": (NoMask, "layers.0.out"),
    "no mask in eval mode": (small(visible=lambda self, T: earlier(T) | (not self.training)), "layers.0.out"),
    # view() to (B, H, T, D) mixes positions and heads, because transpose() is missing.
    "viewed heads": (small(split=lambda self, x: x.reshape(len(x), self.n_heads, x.shape[1], -1)), ""),
    "mean over positions": (MeanOverPositions, "norm"),
    "leak below float32": (small(mix=lambda self, x: x + 1e-7 * x.sum(dim=1, keepdim=True)), "norm"),
    "norm over positions": (
        small(mix=lambda self, x: F.layer_norm(x.transpose(1, 2), x.shape[1:2]).transpose(1, 2)),
        "norm",
    ),
    "bidirectional GRU": (BidirectionalGRU, "recurrence"),
    "symmetric padding": (small(ConvLM, padding=(1, 1)), ""),
    "positions from the end": (small(place_ids=lambda self, T: torch.arange(T).flip(0)), ""),
    "scale of the length": (ScaledByLength, "layers.0.out"),
    "rows mixed too": (small(ShiftedMask, mix=MixedRows.mix), ""),
    "columns at -1e9": (MaskedVocabulary, "layers.0.out"),
    "next token": (ModelSpec.of(ReadsNextToken, causal=True), ""),
    "float32 only": (float32_only(NoMask), "layers.0.out"),
    "zero attention": (zeroed(ShiftedMask, "layers.0.out.weight"), "layers.0.out"),
    "zero attention, scale of the length": (zeroed(ScaledByLength, "layers.0.out.weight"), "layers.0.out"),
    "zero head": (zeroed(NoMask, "head.weight"), "layers.0.out"),
    "vocabulary of 2": (lambda: NoMask(vocab_size=2), ""),
    "at most 2 positions": (ModelSpec.of(NoMask, max_length=2), ""),
    "vectors": (ModelSpec.of(subjects.encoder, causal=True), ""),
    "llama": (leaky_llama, "model.layers.0.self_attn"),
    "x-transformers": (leaky_x_decoder, ""),
    "rack": (ModelSpec.of(leaky_rack, causal=True), "stacks.1.blocks.0.attention"),
}


class LeakUnderAutocast(subjects.TinyLM):
    def visible(self, T):
        visible = super().visible(T)
        return torch.ones_like(visible) if torch.is_autocast_enabled("cpu") else visible


LEAKS_OF_A_MODE = {
    "leak under autocast": (LeakUnderAutocast, "autocast"),
    "leak in bfloat16": (LeakInBfloat16, "bfloat16"),
    "model in bfloat16": (lambda: LeakInBfloat16().bfloat16(), "bfloat16"),
    "random output": (
        small(mix=lambda self, x: F.dropout(x - x.mean(1, keepdim=True), 0.1, training=True)),
        "eval mode",
    ),
    "statistics of train mode": (BatchNormOverPositions, "train mode"),
}


def test_leak_of_train_mode_with_a_constant_buffer_fails():
    class Leaky(NoMaskInTraining):
        def visible(self, T):
            self.register_buffer("mask", super().visible(T))  # each call creates it
            return self.mask

    result = subjects.ask(Leaky, "causality_modes")
    assert result.status == "failed"
    assert "train mode" in result.where


@pytest.mark.parametrize("name", LEAKS_OF_A_MODE)
def test_leak_of_a_mode_is_found(name):
    model, mode = LEAKS_OF_A_MODE[name]
    result = subjects.ask(model, "causality_modes")
    # An author may want statistics over all positions while training.
    assert result.status == ("warned" if mode == "train mode" else "failed")
    assert mode in result.where


@pytest.mark.parametrize("name", ["rack", "llama", "gru", "dropout_rack"])
def test_healthy_model_is_causal_in_each_mode(name):
    assert subjects.ask(getattr(subjects, name), "causality_modes").status == "passed"


def test_rounding_of_float32_is_no_leak_of_autocast():
    """A router that sends later tokens elsewhere changes the order of sums."""

    class Rounded(subjects.TinyLM):
        def forward(self, ids):
            return super().forward(ids) * (1 + 5e-7 * ids[:, -1:, None].cos())

    assert subjects.ask(Rounded, "causality_modes").status == "passed"


def test_leak_of_all_modes_is_reported_by_causality():
    assert subjects.ask(NoMask, "causality_modes").status == "not applicable"


@pytest.mark.parametrize("name", LEAKS)
def test_leak_fails(name):
    model, module = LEAKS[name]
    result = subjects.ask(model, "causality")
    assert result.status == "failed", str(result)
    assert result.value > result.limit > 0
    assert result.where.startswith("row 0, position ")
    assert f"first difference: {module}" in result.where or not module
    assert "later token" in result.meaning or "replaced" in result.meaning


@pytest.mark.parametrize("position, token", [(0, 15), (5, 9), (14, 15)])
def test_one_visible_later_token_fails(position, token):
    result = subjects.ask(one_pair(position, token), "causality")
    assert result.status == "failed"
    assert f"position {position}," in result.where


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_leak_in_train_mode_is_reported_by_train_mode(dropout):
    model = small(NoMaskInTraining, mix=lambda self, x: F.dropout(x, dropout, self.training))
    result = subjects.ask(model, "train_mode")
    assert result.status == "failed"
    assert "train mode" in result.meaning


HEALTHY = {
    "plain": Small,
    "rows mixed, float32 only": float32_only(MixedRows),
    "no memory": NoMemory,
    "at most 2 positions": ModelSpec.of(Small, max_length=2),
    "zero attention, dropout": zeroed(
        small(mix=lambda self, x: F.dropout(x, 0.3, self.training)), "layers.0.out.weight"
    ),
    "zero head": zeroed(Small, "head.weight"),
    "rounding": Rounding,
    "bias updated in training": BiasUpdatedInTraining,
    "convolution in float32": ConvolutionInFloat32,
    "leak in bfloat16 only": LeakInBfloat16,
    "top two": TopTwo,
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_model_passes(name):
    result = subjects.ask(HEALTHY[name], "causality", seed=1)
    assert (result.status, result.where) == ("passed", "")
    assert result.value <= result.limit


def test_choice_among_equal_scores_is_a_warning():
    equal = small(TopTwo, scores=lambda self, x: (x[..., None, :] - x[:, None]).sum(-1).relu())
    result = subjects.ask(equal, "causality")
    assert result.status == "warned"
    assert "equal scores" in result.advice


# Name -> model, and a part of the reason.
NOT_ASKED = {
    "no claim": (ModelSpec.of(GRULM, causal=None), "needs the claim"),
    "encoder": (ModelSpec.of(GRULM, causal=False), "claims no causality"),
    "one position": (ModelSpec.of(GRULM, max_length=1), "at least 2 positions"),
    "random output": (small(mix=lambda self, x: F.dropout(x, 0.1, training=True)), "see determinism"),
}


@pytest.mark.parametrize("name", NOT_ASKED)
def test_other_model_is_not_asked(name):
    model, reason = NOT_ASKED[name]
    result = subjects.ask(model, "causality")
    assert result.status == "not applicable"
    assert reason in result.meaning


def test_leak_without_a_sign_of_causality_is_a_warning():
    result = subjects.ask(Mean, "causality")

    assert result.status == "warned" and "declare causal=False" in str(result)
    assert subjects.ask(ModelSpec.of(Mean, causal=False), "causality").status == "not applicable"


@pytest.mark.parametrize("declared", [{}, {"causal": True}], ids=["assumed", "declared"])
def test_advice_says_that_causality_was_assumed(declared):
    result = subjects.ask(ModelSpec.of(MeanLM, **declared), "causality")
    assert result.status == "failed"
    assert ("Causality was assumed: for an encoder" in result.advice) == (not declared)


class Long(Small):
    """Correct model of up to 300 positions."""

    def __init__(self, max_len=300):
        super().__init__(max_len=max_len)


class LeakAfter128(Long):
    """No mask in each block of 128 positions but the first."""

    def visible(self, seq_len):
        block = torch.arange(seq_len) // 128
        return earlier(seq_len) | ((block[:, None] == block) & (block > 0))


class LeakAtJoints(Long):
    """The last position of each block of 64 sees the next one."""

    def visible(self, seq_len):
        query, key = torch.arange(seq_len)[:, None], torch.arange(seq_len)
        return earlier(seq_len) | ((key == query + 1) & (key % 64 == 0))


class LeakAfter100InTraining(Long):
    def visible(self, seq_len):
        return earlier(seq_len) | (self.training and seq_len > 100)


class ScaledAfter64(Long):
    """A base of rotary positions that grows with the length has this effect."""

    def weigh(self, scores):
        return (scores / max(1.0, scores.shape[-1] / 64)).softmax(dim=-1)


# Name -> model, and the result of long_sequences. All pass causality, which asks up to 24 positions.
LONG = {
    "leak after 128": (LeakAfter128, "failed"),
    "leak at joints of 64": (LeakAtJoints, "failed"),
    "leak in training": (lambda: LeakAfter100InTraining(140), "failed"),
    "leak after the longest sequence": (ModelSpec.of(LeakAfter100InTraining, max_length=99), "passed"),
    "scale after 64": (ScaledAfter64, "failed"),
    "rows mixed": (small(Long, mix=MixedRows.mix), "passed"),
    "vectors": (subjects.causal_encoder(), "passed"),
}


@pytest.mark.parametrize("name", LONG)
def test_long_sequences(name):
    model, status = LONG[name]
    short, far = check_model(model, checks=["causality", "long_sequences"])
    assert (short.status, far.status) == ("passed", status), str(far)
    assert (far.value > far.limit) == (status == "failed")


@pytest.mark.parametrize(
    "model", [ModelSpec.of(Small, max_length=16), lambda: Small(max_len=20)], ids=["declared", "not declared"]
)
def test_long_sequences_need_a_model_that_takes_them(model):
    result = subjects.ask(model, "long_sequences")
    assert result.status == "not applicable"
    assert "takes longer sequences" in result.meaning


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
    ids=["GPU", "CPU"],
)
def test_long_sequences_without_memory_are_an_error(error):
    class Full(Long):
        def mix(self, x):
            if x.shape[1] > 100:
                raise error
            return x

    result = subjects.ask(Full, "long_sequences")
    assert (result.status, result.meaning) == ("error", f"{type(error).__name__}: {error}")
