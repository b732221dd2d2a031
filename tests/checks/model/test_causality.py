"""Leaks in time: each kind is caught, its position and token are true, and sound models stay silent."""

import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stackwise.checks import check_model
from stackwise.subject.spec import ModelSpec

SEQ_LEN = 16
NAMED = re.compile(r"position (\d+) reads token (\d+) \((eval|train) mode\)")
PREFIX = re.compile(r"the first (\d+) of 16 positions \(eval mode\)")


@pytest.fixture(scope="module")
def models(subjects):
    class Sound(subjects.TinyLM):
        pass

    class ShiftedMask(subjects.TinyLM):
        def visible(self, seq_len):
            return torch.ones(seq_len, seq_len, dtype=torch.bool).tril(diagonal=1)

    class NoMask(subjects.TinyLM):
        def visible(self, seq_len):
            return torch.ones(seq_len, seq_len, dtype=torch.bool)

    class LeakInEval(subjects.TinyLM):
        """is_causal=self.training."""

        def visible(self, seq_len):
            return super().visible(seq_len) | (not self.training)

    class LeakInTraining(subjects.TinyLM):
        def visible(self, seq_len):
            return super().visible(seq_len) | self.training

    class LeakBehindDropout(LeakInTraining):
        def mix(self, x):
            return F.dropout(x, 0.5, self.training)

    class ViewedHeads(subjects.TinyLM):
        """view() to (B, H, T, D) mixes positions and heads; transpose() is missing."""

        def split(self, x):
            return x.reshape(x.shape[0], self.n_heads, x.shape[1], -1)

    class MeanOverPositions(subjects.TinyLM):
        def mix(self, x):
            return x - x.mean(dim=1, keepdim=True)

    class NormOverPositions(subjects.TinyLM):
        def mix(self, x):
            return F.layer_norm(x.transpose(1, 2), x.shape[1:2]).transpose(1, 2)

    class BatchNormOverPositions(subjects.TinyLM):
        """In train mode its statistics are taken over rows and positions."""

        def __init__(self):
            super().__init__()
            self.batch_norm = nn.BatchNorm1d(16)

        def mix(self, x):
            return self.batch_norm(x.transpose(1, 2)).transpose(1, 2)

    class BidirectionalGRU(subjects.GRULM):
        def __init__(self):
            super().__init__()
            self.recurrence = nn.GRU(16, 8, batch_first=True, bidirectional=True)

    class SymmetricPadding(subjects.ConvLM):
        padding = (1, 1)

    class PlacesFromTheEnd(subjects.TinyLM):
        def place_ids(self, seq_len):
            return torch.arange(seq_len).flip(0)

    class ScaledByLength(subjects.TinyLM):
        def weigh(self, scores):
            return (scores / scores.shape[-1]).softmax(dim=-1)

    class MixedRows(subjects.TinyLM):
        """Rows see each other, in the same position only: wrong, but no leak in time."""

        def mix(self, x):
            return x + x.mean(dim=0, keepdim=True)

    class MixedRowsAndLeak(MixedRows, ShiftedMask):
        pass

    class Blind(subjects.TinyLM):
        def __init__(self):
            super().__init__()
            with torch.no_grad():
                self.tokens.weight[:] = self.tokens.weight[0]

    class SelfHidden(subjects.TinyLM):
        """Reads every earlier token, but not the one that stands where it is."""

        def forward(self, ids):
            return super().forward(F.pad(ids, (1, 0))[:, :-1])

    class SoundDropout(subjects.TinyLM):
        def mix(self, x):
            return F.dropout(x, 0.3, self.training)

    return {name: value for name, value in locals().items() if isinstance(value, type)}


def leaky_llama(subjects):
    model = subjects.llama()
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    return model


def leaky_x_decoder(subjects):
    model = subjects.x_decoder()
    for module in model.modules():
        if type(module).__name__ in ("Attention", "Attend"):
            module.causal = False
    assert model.attn_layers.causal, "the model goes on saying that it is causal"
    return model


def leaky_rack(subjects):
    model = subjects.rack()
    model.stacks[1].blocks[0].attention.causal = False
    return ModelSpec.of(model, causal=True)


def make(factory):
    torch.manual_seed(0)
    return factory()


def ids_of(model, rows=1):
    return torch.randint(29, (rows, SEQ_LEN), generator=torch.Generator().manual_seed(5))


def leaks(subjects, model, train=False):
    """Whether any output depends on a later input, by gradients alone."""
    model.train(train)
    return any(
        subjects.reads(model, ids_of(model), position, position + 1) > 0 for position in range(SEQ_LEN - 1)
    )


def assert_named(subjects, result, model, mode=None):
    """The result names a leak, and the leak is where it says."""
    assert result.status == "failed", str(result)
    position, token, found = NAMED.fullmatch(result.where).groups()
    position, token = int(position), int(token)
    assert position < token < SEQ_LEN
    assert result.value > result.limit > 0
    assert mode in (None, found)
    model.train(found == "train")
    assert subjects.reads(model, ids_of(model), position, token) > 0
    assert f"token {token} changed the output at position {position}" in result.meaning


LEAKS = {
    "ShiftedMask": "eval",
    "NoMask": "eval",
    "LeakInEval": "eval",
    "LeakInTraining": "train",
    "LeakBehindDropout": "train",
    "ViewedHeads": "eval",
    "MeanOverPositions": "eval",
    "NormOverPositions": "eval",
    "BatchNormOverPositions": "train",
    "BidirectionalGRU": "eval",
    "SymmetricPadding": "eval",
    "MixedRowsAndLeak": "eval",
}
SOUND = ["Sound", "SoundDropout", "MixedRows"]


@pytest.mark.parametrize("name", LEAKS)
def test_leak(subjects, models, name):
    model = make(models[name])
    # The mode that is named is the first of the two that leaks.
    assert leaks(subjects, model, train=False) == (LEAKS[name] == "eval")
    assert LEAKS[name] == "eval" or leaks(subjects, model, train=True)
    assert_named(subjects, subjects.ask(models[name], "causality"), model, LEAKS[name])


@pytest.mark.parametrize("leaky", [leaky_llama, leaky_x_decoder, leaky_rack])
def test_leak_in_a_published_model(subjects, leaky):
    def build():
        made = leaky(subjects)
        return made.create() if isinstance(made, ModelSpec) else made

    model = make(build)
    assert leaks(subjects, model)
    spec = ModelSpec.of(build, causal=True)
    assert_named(subjects, subjects.ask(spec, "causality"), model, "eval")


@pytest.mark.parametrize("name", ["llama", "x_decoder", "rack"])
def test_published_models_are_sound(subjects, name):
    factory = getattr(subjects, name)
    assert not leaks(subjects, make(factory))
    result = subjects.ask(factory, "causality")
    assert (result.status, result.where) == ("passed", "")
    assert result.value <= result.limit


def test_vectors(subjects):
    spec = subjects.causal_encoder()
    assert subjects.ask(spec, "causality").status == "passed"
    leaky = ModelSpec.of(subjects.encoder, causal=True)
    model, inputs = leaky.create().eval(), leaky.batch(1, SEQ_LEN)
    result = subjects.ask(leaky, "causality")
    position, token, mode = NAMED.fullmatch(result.where).groups()
    assert (result.status, mode) == ("failed", "eval")
    assert int(position) < int(token)
    model.train()  # the fused inference path of torch has no gradients
    assert subjects.reads(model, inputs, int(position), int(token)) > 0


@pytest.mark.parametrize("name", SOUND)
@pytest.mark.parametrize("seed", [0, 1])
def test_sound(subjects, models, name, seed):
    assert not leaks(subjects, make(models[name]), train=False)
    assert not leaks(subjects, make(models[name]), train=True)
    assert subjects.ask(models[name], "causality", seed=seed).status == "passed"


@pytest.mark.parametrize("name", ["PlacesFromTheEnd", "ScaledByLength"])
def test_outputs_that_depend_on_the_length(subjects, models, name):
    model = make(models[name]).eval()
    assert not leaks(subjects, model), "no token is read too early: only a prefix shows it"
    ids = ids_of(model)
    result = subjects.ask(models[name], "causality")
    assert result.status == "failed"
    length = int(PREFIX.fullmatch(result.where)[1])
    assert 0 < length < SEQ_LEN
    with torch.no_grad():
        gap = (model(ids)[:, :length] - model(ids[:, :length])).abs().max()
    assert gap > 1e-3
    assert "prefix" in result.meaning


def test_token_that_is_not_read(subjects, models):
    with torch.no_grad():
        model = make(models["Blind"]).eval()
        assert torch.equal(model(torch.zeros(1, 5, dtype=torch.int64)), model(torch.arange(5)[None]))
    result = subjects.ask(models["Blind"], "causality")
    assert (result.status, result.where) == ("warned", "token 0")
    assert "does not read this token" in result.meaning


def test_last_token_that_is_not_read(subjects, models):
    model = make(models["SelfHidden"]).eval()
    ids = ids_of(model)
    with torch.no_grad():
        assert torch.equal(model(ids)[:, -1], model(ids.index_fill(1, torch.tensor([15]), 0))[:, -1])
        assert not torch.equal(model(ids)[:, -1], model(ids.index_fill(1, torch.tensor([14]), 0))[:, -1])
    result = subjects.ask(models["SelfHidden"], "causality")
    assert (result.status, result.where) == ("warned", "token 15")


def test_where_the_question_does_not_apply(subjects):
    for spec, reason in [
        (ModelSpec.of(subjects.encoder), "needs the claim"),
        (ModelSpec.of(subjects.gru, causal=None), "needs the claim"),
        (ModelSpec.of(subjects.bert), "claims no causality"),
        (ModelSpec.of(subjects.bidirectional_rack), "claims no causality"),
        (ModelSpec.of(subjects.gru, seq_len=1), "at least 2 positions"),
        (ModelSpec.of(lambda: subjects.GRULM(vocab_size=1)), "vocabulary of at least 2"),
    ]:
        result = subjects.ask(spec, "causality")
        assert result.status == "not applicable"
        assert reason in result.meaning


def test_shortest_sequence_that_can_leak(subjects, models):
    assert subjects.ask(ModelSpec.of(models["NoMask"], seq_len=2), "causality").status == "failed"
    assert subjects.ask(ModelSpec.of(models["Sound"], seq_len=2), "causality").status == "passed"


def test_smallest_vocabulary_that_can_leak(subjects, models):
    class TwoWords(models["NoMask"]):
        def __init__(self):
            super().__init__(vocab_size=2)

    # Each seed replaces tokens by another step, which must never be a whole turn.
    for seed in range(3):
        result = subjects.ask(TwoWords, "causality", seed=seed)
        assert "reads token" in result.where


def test_tolerance_is_for_models_that_have_no_float64(subjects, models):
    class Float32Only(models["NoMask"]):
        def forward(self, ids):
            if self.norm.weight.dtype == torch.float64:
                raise NotImplementedError("float32 only")
            return super().forward(ids)

    result = subjects.ask(Float32Only, "causality")
    assert (result.status, result.limit) == ("failed", 1e-5)
    tolerant = subjects.ask(ModelSpec.of(Float32Only, tolerance=2 * result.value), "causality")
    assert "reads token" not in tolerant.where
    # A leak that float64 shows is no matter of tolerance.
    tolerant = subjects.ask(ModelSpec.of(models["NoMask"], tolerance=1e3), "causality")
    assert "reads token" in tolerant.where


def test_a_leak_below_the_tolerance_of_float32(subjects):
    class Faint(subjects.TinyLM):
        def mix(self, x):
            return x + 1e-7 * x.sum(dim=1, keepdim=True)

    model, ids = make(Faint).eval(), ids_of(None)
    with torch.no_grad():
        changed = ids.index_fill(1, torch.tensor([15]), 3)
        assert (model(ids) - model(changed))[:, :15].abs().max() < 1e-5
    assert_named(subjects, subjects.ask(Faint, "causality"), model.double(), "eval")


def test_a_leak_behind_large_constants(subjects):
    class PaddedVocabulary(subjects.TinyLM):
        """Columns at -1e9, as where a vocabulary is padded: nothing is large beside them."""

        def visible(self, seq_len):
            return torch.ones(seq_len, seq_len, dtype=torch.bool).tril(diagonal=1)

        def forward(self, ids):
            x = super().forward(ids)
            return torch.cat([x, torch.full_like(x[..., :3], -1e9)], dim=-1)

    assert_named(subjects, subjects.ask(PaddedVocabulary, "causality"), make(PaddedVocabulary), "eval")


def test_the_value_is_the_leak_over_the_influence_on_the_token_itself(subjects):
    class ReadsNext(nn.Module):
        """Each output is the next token's row, and a thousandth of its own."""

        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(29, 29)

        def forward(self, ids):
            x = self.table(ids)
            return 1e-3 * x + F.pad(x[:, 1:], (0, 0, 0, 1))

    result = subjects.ask(ReadsNext, "causality")
    position, token, _ = NAMED.fullmatch(result.where).groups()
    assert int(token) == int(position) + 1
    assert result.value == pytest.approx(1000.0)


@pytest.mark.parametrize("name", ["Sound", "ShiftedMask"])
def test_large_outputs_are_taken_in_parts(subjects, models, monkeypatch, name):
    whole = subjects.ask(models[name], "causality")
    monkeypatch.setattr("stackwise.checks.model.causality._MAX_ELEMENTS", 3 * SEQ_LEN * 29)
    parts = subjects.ask(models[name], "causality")
    assert (parts.status, parts.where) == (whole.status, whole.where)
    assert parts.value == pytest.approx(whole.value, rel=1e-6, abs=1e-12)


class ZeroOutput:
    """Starts with the projection out of attention at zero: nothing is read, and nothing leaks, yet."""

    def __init__(self):
        super().__init__()
        for layer in self.layers:
            nn.init.zeros_(layer["out"].weight)


@pytest.mark.parametrize("name, status", [("ShiftedMask", "failed"), ("Sound", "passed")])
def test_a_leak_behind_weights_that_start_at_zero(subjects, models, name, status):
    factory = type(f"Zero{name}", (ZeroOutput, models[name]), {})
    model = make(factory)
    assert not leaks(subjects, model)
    assert subjects.reads(model, ids_of(model), 5, 4) == 0
    result = subjects.ask(factory, "causality")
    assert result.status == status
    assert ("zero weights made random" in result.where) == (status == "failed")
    assert ("zero weights made random" in result.meaning) == (status == "passed")


def test_a_model_without_memory(subjects):
    class Bigram(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(29, 29)

        def forward(self, ids):
            return self.table(ids)

    result = subjects.ask(Bigram, "causality")
    assert result.status == "warned"
    assert "nothing to leak" in result.meaning


def test_rounding_is_no_leak(subjects):
    class Rounding(subjects.TinyLM):
        """Adds and takes away a number that depends on the whole row: float32 keeps a trace of it."""

        def mix(self, x):
            noise = 1000.0 * x.sum(dim=(1, 2), keepdim=True).sin()
            return (x + noise) - noise

    model = make(Rounding).eval()
    ids = ids_of(model)
    with torch.no_grad():
        trace = (model(ids) - model(ids.index_fill(1, torch.tensor([15]), 3)))[:, :10].abs().max()
    assert trace > 1e-5
    assert subjects.ask(Rounding, "causality").status == "passed"


@pytest.mark.parametrize("name, status", [("NoMask", "failed"), ("MixedRows", "passed")])
def test_a_model_without_float64_gets_no_second_hearing(subjects, models, name, status):
    class Float32Only(models[name]):
        def forward(self, ids):
            if self.norm.weight.dtype == torch.float64:
                raise NotImplementedError("float32 only")
            return super().forward(ids)

    assert subjects.ask(Float32Only, "causality").status == status


@settings(max_examples=15)
@given(data=st.data())
def test_the_one_leak_there_is(subjects, data):
    position = data.draw(st.integers(0, SEQ_LEN - 2))
    token = data.draw(st.integers(position + 1, SEQ_LEN - 1))

    class OneLeak(subjects.TinyLM):
        def __init__(self):
            super().__init__(n_layers=1)

        def visible(self, seq_len):
            mask = super().visible(seq_len)
            if seq_len > token:
                mask[position, token] = True
            return mask

    result = subjects.ask(OneLeak, "causality", seed=data.draw(st.integers(0, 9)))
    assert result.status == "failed"
    assert result.where == f"position {position} reads token {token} (eval mode)"


@settings(max_examples=15)
@given(
    n_heads=st.sampled_from([1, 2, 4]),
    n_layers=st.integers(1, 3),
    vocab_size=st.integers(2, 40),
    seq_len=st.integers(2, 20),
    seed=st.integers(0, 2**31),
    dropout=st.sampled_from([0.0, 0.2]),
)
def test_random_models(subjects, n_heads, n_layers, vocab_size, seq_len, seed, dropout):
    class Sound(subjects.TinyLM):
        def __init__(self):
            super().__init__(vocab_size, 8, n_heads, n_layers)

        def mix(self, x):
            return F.dropout(x, dropout, self.training)

    class NoMask(Sound):
        def visible(self, seq_len):
            return super().visible(seq_len) | True

    for factory, status in ((Sound, "passed"), (NoMask, "failed")):
        spec = ModelSpec.of(factory, seq_len=seq_len)
        assert subjects.ask(spec, "causality", seed=seed).status == status


@pytest.mark.slow
@settings(max_examples=15)
@given(
    n_heads=st.sampled_from([2, 4]),
    grouped=st.booleans(),
    window=st.none() | st.integers(1, 20),
    norm=st.sampled_from(["rmsnorm", "layernorm"]),
    dropout=st.sampled_from([0.0, 0.1]),
    tied=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_random_racks(subjects, n_heads, grouped, window, norm, dropout, tied, seed):
    def factory(mode="causal"):
        return subjects.rack(
            blocks_per_stack=1,
            n_heads=n_heads,
            n_kv_heads=n_heads // 2 if grouped else None,
            sliding_window=window,
            norm=norm,
            dropout=dropout,
            tie_embeddings=tied,
            attention_mode=mode,
        )

    # A window of one position sees nothing but itself, masked or not.
    expected = ("warned", "warned") if window == 1 else ("passed", "failed")
    assert subjects.ask(ModelSpec.of(factory), "causality", seed=seed).status == expected[0]
    open_spec = ModelSpec.of(lambda: factory("bidirectional"), causal=True)
    assert subjects.ask(open_spec, "causality", seed=seed).status == expected[1]


class Mixer(nn.Module):
    """A causal convolution, which always works, and attention whose way out starts at zero."""

    def __init__(self, seen=lambda mask, training: mask, scale=lambda x: 1.0, zero_head=False):
        super().__init__()
        self.seen, self.scale = seen, scale
        self.tokens = nn.Embedding(29, 16)
        self.conv = nn.Conv1d(16, 16, 3)
        self.out = nn.Linear(16, 16, bias=False)
        self.head = nn.Linear(16, 29, bias=False)
        nn.init.zeros_((self.head if zero_head else self.out).weight)

    def forward(self, ids):
        x = self.tokens(ids)
        x = x + self.conv(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)
        visible = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        y = F.scaled_dot_product_attention(x, x, x, attn_mask=self.seen(visible, self.training))
        return self.head(x + self.scale(x) * self.out(y))


@pytest.mark.parametrize(
    "arguments, status, where",
    [
        ({}, "passed", ""),
        ({"zero_head": True}, "passed", ""),
        ({"seen": lambda mask, _: mask | True}, "failed", "eval mode, zero weights made random"),
        ({"seen": lambda mask, _: mask | True, "zero_head": True}, "failed", "eval mode, zero weights"),
        ({"seen": lambda mask, training: mask | training}, "failed", "train mode, zero weights made random"),
        ({"scale": lambda x: x.shape[1]}, "failed", "the first 8 of 16 positions"),
    ],
    ids=["sound", "sound head", "no mask", "no mask, head", "no mask in training", "length"],
)
def test_what_is_behind_a_branch_that_starts_at_zero(subjects, arguments, status, where):
    result = subjects.ask(lambda: Mixer(**arguments), "causality")
    assert result.status == status
    assert where in result.where


def test_state_that_a_training_call_updates_is_no_leak(subjects):
    class Balanced(subjects.TinyLM):
        """Routing biases move with each training call, as in mixtures balanced without a loss."""

        def __init__(self):
            super().__init__(n_layers=1)
            self.register_buffer("bias", torch.zeros(16))

        def mix(self, x):
            output = x + self.bias
            if self.training:
                self.bias += 0.1 * x.detach().mean(dim=(0, 1)).sign().to(self.bias.dtype)
            return output

    model = make(Balanced).train()
    ids = ids_of(model)
    assert not torch.equal(model(ids), model(ids))
    assert subjects.ask(Balanced, "causality").status == "passed"


def test_long_convolution_that_stays_float32(subjects):
    class LongConvolution(subjects.TinyLM):
        """By FFT, whose rounding spreads over all positions, in float32 whatever the weights are."""

        def __init__(self):
            super().__init__()
            self.kernel = nn.Parameter(torch.randn(16, 64) * 0.1)

        def mix(self, x):
            n = 2 * x.shape[1]
            spectrum = torch.fft.rfft(x.float().transpose(1, 2), n) * torch.fft.rfft(
                self.kernel.float()[:, : x.shape[1]], n
            )
            return x + torch.fft.irfft(spectrum, n)[..., : x.shape[1]].transpose(1, 2).to(x.dtype)

    assert subjects.ask(LongConvolution, "causality").status == "passed"


def test_leak_that_only_bfloat16_takes(subjects):
    class Kernel(subjects.TinyLM):
        def mix(self, x):
            return x + 0.3 * x.mean(dim=1, keepdim=True) if x.dtype == torch.bfloat16 else x

    assert subjects.ask(Kernel, "causality").status == "passed"
    assert subjects.ask(lambda: Kernel().bfloat16(), "causality").status == "failed"


def blocks(seq_len, size):
    """Which block of `size` each position is in."""
    return torch.arange(seq_len) // size


@pytest.fixture(scope="module")
def far_models(subjects):
    class Long(subjects.TinyLM):
        def __init__(self):
            super().__init__(max_len=300)

    class LeakBeyond(Long):
        """Causal in the first 128 positions, and without a mask within each later block."""

        def visible(self, seq_len):
            block = blocks(seq_len, 128)
            same = (block[:, None] == block) & (block > 0)
            return super().visible(seq_len) | same

    class LeakOfOne(Long):
        """At the joints of its blocks, a position sees the next one."""

        def visible(self, seq_len):
            visible = super().visible(seq_len)
            joints = torch.tensor([64 * k for k in range(1, 5) if 64 * k < seq_len], dtype=torch.long)
            visible[joints - 1, joints] = True
            return visible

    class LeakInTraining(Long):
        def visible(self, seq_len):
            return super().visible(seq_len) | (self.training and seq_len > 100)

    class ScaledBeyond(Long):
        """As where the base of rotary positions grows with the length."""

        def weigh(self, scores):
            return (scores / max(1.0, scores.shape[-1] / 64)).softmax(dim=-1)

    class MixedRows(Long):
        def mix(self, x):
            return x + x.mean(dim=0, keepdim=True)

    class Short(subjects.TinyLM):
        def __init__(self):
            super().__init__(max_len=20)

    class Middle(LeakInTraining):
        def __init__(self):
            subjects.TinyLM.__init__(self, max_len=140)

    return {name: value for name, value in locals().items() if isinstance(value, type)}


@pytest.mark.parametrize(
    "name, where",
    [
        ("LeakBeyond", r"tokens from \d+ on, of 273 \(eval mode\)"),
        ("LeakOfOne", r"tokens from (64|128|192|256) on, of 273 \(eval mode\)"),
        pytest.param("LeakInTraining", r"tokens from \d+ on, of 273 \(train mode\)", marks=pytest.mark.slow),
        ("ScaledBeyond", r"the first (136|272) of 273 positions \(eval mode\)"),
        ("Middle", r"tokens from \d+ on, of 137 \(train mode\)"),
    ],
)
def test_leak_far_from_the_start(subjects, far_models, name, where):
    assert subjects.ask(far_models[name], "causality").status == "passed"
    result = subjects.ask(far_models[name], "causality_far")
    assert result.status == "failed", str(result)
    assert result.value > result.limit > 0
    assert re.fullmatch(where, result.where), result.where


@pytest.mark.parametrize("name", ["Long", "MixedRows"])
def test_sound_far_from_the_start(subjects, far_models, name):
    result = subjects.ask(far_models[name], "causality_far")
    assert result.status == "passed", str(result)
    assert result.value <= result.limit


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"causal": None}, "needs the claim"),
        ({"causal": False}, "claims no causality"),
        ({}, "needs a model that takes 33 positions"),
        ({"max_length": 20}, "needs a model that takes 33 positions"),
    ],
)
def test_far_is_not_asked(subjects, far_models, changes, reason):
    result = subjects.ask(ModelSpec.of(far_models["Short"], **changes), "causality_far")
    assert result.status == "not applicable"
    assert reason in result.meaning


def test_far_stays_within_the_longest_sequence(subjects, far_models):
    spec = ModelSpec.of(far_models["LeakInTraining"], max_length=99)
    assert subjects.ask(spec, "causality_far").status == "passed"
    assert subjects.ask(spec, "causality_far").limit > 0


def test_far_of_vectors(subjects):
    def factory():
        return subjects.causal_encoder()

    assert subjects.ask(factory, "causality_far").status == "passed"
    unmasked = ModelSpec.of(subjects.encoder, causal=True)
    assert subjects.ask(unmasked, "causality_far").status == "failed"


@pytest.mark.parametrize("tied, status", [(True, "warned"), (False, "passed")])
def test_a_choice_among_equals_is_no_defect_for_certain(subjects, tied, status):
    class Chosen(subjects.TinyLM):
        """Each position adds its two strongest visible ones, whose scores are often 0."""

        def mix(self, x):
            T = x.shape[1]
            scores = (x[..., None, :] - x[:, None]).sum(-1).relu() if tied else x @ x.transpose(1, 2)
            visible = torch.ones(T, T, dtype=torch.bool).tril()
            scores = scores.masked_fill(~visible, -torch.inf)
            # As an algorithm that works in another order for another length.
            order = torch.arange(T) if T % 2 else torch.arange(T).flip(0)
            found = order[scores[..., order].topk(2).indices]
            weights = torch.zeros_like(scores).scatter(-1, found, 1.0).masked_fill(~visible, 0.0)
            return x + 0.3 * weights @ x

    result = subjects.ask(Chosen, "causality")
    assert result.status == status, str(result)
    if tied:
        assert "top-k of this model chooses among equal scores" in result.advice


@pytest.mark.parametrize("declared, assumed", [({}, True), ({"causal": True}, False)])
@pytest.mark.parametrize("name", ["causality", "causality_far"])
def test_the_advice_says_what_was_assumed(name, declared, assumed):
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(31, 8), nn.Linear(8, 31)

        def forward(self, ids):
            x = self.embedding(ids)
            return self.head(x + x.mean(1, keepdim=True))

    (result,) = check_model(ModelSpec.of(Encoder, **declared), checks=[name])
    assert result.status == "failed"
    assert ("Causality was assumed: for an encoder, say causal=False" in result.advice) == assumed


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
    ids=["cuda", "cpu"],
)
def test_memory_that_is_too_small_is_no_answer(subjects, error):
    class Full(subjects.TinyLM):
        def mix(self, x):
            if x.shape[1] > 100:
                raise error
            return super().mix(x)

    # At 67 positions it could be asked, and nobody would know that it was not at 273.
    (result,) = check_model(ModelSpec.of(lambda: Full(max_len=300)), checks=["causality_far"])
    assert (result.status, result.meaning) == ("error", f"{type(error).__name__}: {error}")
