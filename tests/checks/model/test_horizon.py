"""Windows: one too wide, too narrow, lopsided or never applied is caught and named, true ones are not."""

import pytest
import torch
from torch import nn

from stackwise.model.attention import Attention
from stackwise.subject.spec import ModelSpec
from tests.zoo.gpt import GPT, Encoder, encoder, spec_of

NAME = "horizon"


def of_window(window, *, sees=None, n_layers=2):
    """A GPT that claims `window` and sees `sees`."""

    class Windowed(GPT):
        pass

    Windowed.window, Windowed.n_layers = sees or window, n_layers
    return spec_of(Windowed, window=window)


def rack_of(subjects, change=lambda attention: None, **declared):
    def build():
        rack = subjects.window_rack()
        for module in rack.modules():
            if isinstance(module, Attention):
                change(module)
        return rack

    return ModelSpec.of(build, **declared)


@torch.no_grad()
def sees(spec, T=40):
    """How many positions the whole reads, its own included, by replacing one token at a time."""
    model, ids = spec.create().eval().double(), spec.batch(1, T)
    last = spec.logits(model, ids)[0, -1]
    for token in range(T):
        changed = ids.clone()
        changed[0, token] = (ids[0, token] + 1) % spec.width
        if not torch.equal(spec.logits(model, changed)[0, -1], last):
            return T - token
    return 0


@pytest.mark.parametrize("window", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("n_layers", [1, 2, 3])
def test_window_that_is_true(subjects, window, n_layers):
    spec = of_window(window, n_layers=n_layers)
    assert sees(spec) == n_layers * (window - 1) + 1
    result = subjects.ask(spec, NAME)
    assert result.status == "passed", result


@pytest.mark.parametrize("window, seen", [(2, 1), (4, 5), (5, 4), (5, 6), (8, 7), (8, 9), (6, 3)])
def test_window_that_is_not(subjects, window, seen):
    spec = of_window(window, sees=seen)
    assert sees(spec) == 2 * (seen - 1) + 1 != 2 * (window - 1) + 1
    result = subjects.ask(spec, NAME)
    assert result.status == "failed", result
    if seen == 1:
        assert result.value == 0
        assert "The whole model reads 0 before and 0 after" in result.meaning
    else:
        assert (result.value, result.limit, result.where) == (seen, window, "layers.0.out")
        assert f"The layer reads {seen - 1} before and 0 after" in result.meaning


def test_window_that_is_never_applied(subjects):
    spec = of_window(5, sees=1000)
    assert sees(spec) == 40
    assert subjects.ask(spec, NAME).status == "failed"


def test_layers_of_a_rack(subjects):
    spec = rack_of(subjects)
    assert spec.window == 5
    assert sees(spec) == 17
    result = subjects.ask(spec, NAME)
    assert (result.status, result.value, result.limit) == ("passed", 5, 5)
    assert result.meaning.startswith("4 layers")


@pytest.mark.parametrize("seen", [1, 3, 4, 6, 8, None])
def test_one_layer_of_a_rack(subjects, seen):
    changed = []

    def change(attention):
        changed.append(attention)
        if len(changed) % 4 == 3:
            attention.sliding_window = seen

    spec = rack_of(subjects, change, window=5)
    assert sees(spec) != 17
    result = subjects.ask(spec, NAME)
    if seen == 1:  # a layer that mixes nothing has no window to be wrong
        return
    assert result.status == "failed", result
    assert result.where == "stacks.1.blocks.0"
    assert result.limit == 5
    assert result.value == seen if seen else result.value > 9
    assert ("all positions" in result.meaning) == (seen is None)


def test_layers_of_transformers(subjects):
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}

    def build(window):
        return lambda: MistralForCausalLM(MistralConfig(**sizes, sliding_window=window))

    assert subjects.ask(build(5), NAME).status == "passed"
    assert "needs window=" in subjects.ask(build(None), NAME).meaning
    for window in (4, 6, None):
        result = subjects.ask(ModelSpec.of(build(window), window=5), NAME)
        assert (result.status, result.where) == ("failed", "model.layers.0")


class Alternate(nn.Module):
    """GPT whose layers are modules."""

    def __init__(self, windows):
        super().__init__()
        self.embedding, self.head = nn.Embedding(31, 8), nn.Linear(8, 31)
        self.layers = nn.ModuleList(nn.MultiheadAttention(8, 2, batch_first=True) for _ in windows)
        for layer, window in zip(self.layers, windows, strict=True):
            layer.forward = self.attending(layer.forward, window)

    def attending(self, attend, window):
        def forward(x):
            T = x.shape[1]
            distance = torch.arange(T)[:, None] - torch.arange(T)
            hidden = (distance < 0) | (distance >= (window or T))
            return attend(x, x, x, attn_mask=hidden, need_weights=False)[0]

        return forward

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


@pytest.mark.parametrize(
    "windows, status, where", [((None, None), "passed", ""), ((None, 100), "failed", "layers.1")]
)
def test_declared_full_past_is_read_by_each_layer(subjects, windows, status, where):
    spec = ModelSpec.of(lambda: Alternate(windows), window=None, causal=True)
    result = subjects.ask(spec, NAME)
    assert (result.status, result.where) == (status, where)
    if where:
        assert (result.value, result.limit) == (100, 511)


@pytest.mark.parametrize("seen, status", [(None, "passed"), (5, "failed")])
def test_declared_full_past_is_read_by_the_whole_model(subjects, seen, status):
    class Windowed(GPT):
        window = seen

    assert subjects.ask(spec_of(Windowed, window="full"), NAME).status == status


def test_two_windows_in_one_layer(subjects):
    """Right where a layer attends twice; so it is no certain defect."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(31, 8)
            self.layers = nn.ModuleList(nn.Conv1d(8, 8, 3) for _ in range(2))
            self.head = nn.Linear(8, 31)
            for layer in self.layers:
                layer.forward = self.convolved(layer, layer.forward)

        def convolved(self, layer, convolve):
            def forward(x):
                for _ in range(2):
                    x = convolve(nn.functional.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)
                return x

            return forward

        def forward(self, ids):
            x = self.embedding(ids)
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    result = subjects.ask(ModelSpec.of(Twice, window=3), NAME)
    assert result.status == "warned"
    assert "2 windows follow each other" in result.advice
    assert subjects.ask(ModelSpec.of(Twice, window=5), NAME).status == "passed"
    assert subjects.ask(ModelSpec.of(Twice, window=4), NAME).status == "failed"


@pytest.mark.parametrize("before, after", [(2, 2), (3, 3), (2, 1), (1, 3), (0, 2)])
def test_both_sides(subjects, before, after):
    class Sees(Encoder):
        pass

    Sees.before, Sees.after = before, after
    spec = spec_of(Sees, causal=False, window=(before, after))
    assert subjects.ask(spec, NAME).status == "passed"
    if before == after:
        spec = spec_of(Sees, causal=False, window=before + 1)
        assert subjects.ask(spec, NAME).status == "passed"
    for wrong in ((before + 1, after), (before, after + 1), (before + 1, after + 1), (5, 5)):
        result = subjects.ask(spec_of(Sees, causal=False, window=wrong), NAME)
        assert result.status == "failed", (wrong, result)


def test_both_sides_of_a_rack(subjects):
    result = subjects.ask(
        lambda: subjects.rack(attention_mode="bidirectional", sliding_window=3),
        NAME,
    )
    assert (result.status, result.value) == ("passed", 5)


def test_our_encoder_is_true(subjects):
    assert subjects.ask(encoder(), NAME).status == "passed"


def test_nothing_is_read(subjects):
    class Alone(GPT):
        def visible(self, T, past, keep, documents):
            return torch.eye(T, dtype=torch.bool)[None, None]

    result = subjects.ask(spec_of(Alone, window=4), NAME)
    assert (result.status, result.value) == ("failed", 0)


def test_what_cannot_be_asked(subjects):
    for spec, reason in [
        (spec_of(), "needs window="),
        (spec_of(window=100, max_length=64), "within 64 positions"),
        (spec_of(window=5000), "within 1024 positions"),
    ]:
        result = subjects.ask(spec, NAME)
        assert result.status == "not applicable"
        assert reason in result.meaning
