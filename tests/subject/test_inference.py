"""Inference: inputs and call of any model, its own loss, and the error if no call is found."""

import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stackwise.checks import check_model
from stackwise.subject.inference import InferenceError
from stackwise.subject.spec import ModelSpec

V = 31


class Core(nn.Module):
    """Each id gives logits. An embedding of 16 positions is not used."""

    def __init__(self):
        super().__init__()
        self.positions = nn.Embedding(16, 8)
        self.embedding = nn.Embedding(V, 8)
        self.head = nn.Linear(8, V)

    def logits(self, ids):
        return self.head(self.embedding(ids))


class Masked(Core):
    def forward(self, input_ids, attention_mask):
        return self.logits(input_ids * attention_mask)


class MaskedByName(Core):
    def forward(self, *, input_ids, attention_mask):
        return self.logits(input_ids * attention_mask)


@pytest.mark.parametrize("model", [Masked, MaskedByName])
def test_required_mask_is_one_of_ones(model):
    spec = ModelSpec.of(model)
    assert (spec.inputs, spec.width) == ("tokens", V)
    assert "attention_mask= of ones" in spec.notes
    built, ids = spec.create().eval(), spec.batch(2, 9)
    assert torch.equal(spec.logits(built, ids), built.logits(ids))
    keep = torch.arange(9) < torch.tensor([[9], [5]])
    assert torch.equal(spec.masked(built, ids, keep), built.logits(ids * keep))
    results = check_model(spec, checks=["determinism", "batch_invariance", "finite_gradients"])
    assert {result.status for result in results} == {"passed"}


class ScoresOfDict(Core):
    def forward(self, batch):
        ids = batch["input_ids"]
        return {"first": self.logits(ids), "second": self.logits(ids)}


class ScoresOfObject(Core):
    def forward(self, ids):
        return types.SimpleNamespace(first=self.logits(ids), second=self.logits(ids))


class OtherKey(Core):
    def forward(self, batch):
        return self.logits(batch["text"]) * batch["speaker"]


class MoreKeys(Core):
    def forward(self, batch):
        return self.logits(batch["input_ids"]) * batch["speaker"]


class OtherName(Core):
    def forward(self, *, text):
        return self.logits(text)


class MoreNames(Core):
    def forward(self, ids, *, scale):
        return self.logits(ids) * scale


class OtherMask(Core):
    def forward(self, input_ids, attention_mask):
        assert attention_mask.ndim == 4
        return self.logits(input_ids)


class NamedVectors(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(6, 6)

    def forward(self, *, features):
        return self.mix(features)


def example_of(model, **declared):
    with pytest.raises(InferenceError) as raised:
        ModelSpec.of(model, **declared)
    last = str(raised.value).splitlines()[-1]
    return last.removeprefix("For example: ") if last.startswith("For example: ") else None


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 3, 3)

    def forward(self, x, t):
        return self.convolution(x) * t


TOKENS = f'inputs="tokens", width={V}, forward=lambda m, x: '
IMAGES = "make_batch=lambda batch_size, seq_len, generator: "
IMAGES += "torch.randn(batch_size, 3, HEIGHT, WIDTH, generator=generator)"
EXAMPLES = [
    (ScoresOfDict, {}, TOKENS + 'm({"input_ids": x})["first"]'),
    (ScoresOfObject, {}, TOKENS + "m(x).first"),
    (OtherKey, {}, TOKENS + 'm({"text": x, "speaker": ...})'),
    (MoreKeys, {}, TOKENS + 'm({"input_ids": x, "speaker": ...})'),
    (OtherName, {}, TOKENS + "m(text=x)"),
    (MoreNames, {}, TOKENS + "m(x, scale=...)"),
    (OtherMask, {}, TOKENS + "m(x, attention_mask=...)"),
    (NamedVectors, {}, 'inputs="vectors", width=6, forward=lambda m, x: m(features=x)'),
    (Denoiser, {}, IMAGES + ", forward=lambda m, x: m(x, t=...)"),
    (
        OtherKey,
        {"inputs": "tokens", "width": 20},
        TOKENS.replace(str(V), "20") + 'm({"text": x, "speaker": ...})',
    ),
    (OtherKey, {"name": "mine"}, TOKENS + 'm({"text": x, "speaker": ...})'),
]


@pytest.mark.parametrize(("model", "declared", "attributes"), EXAMPLES)
def test_error_has_an_example_that_works(model, declared, attributes):
    text = example_of(model, **declared)
    name = declared.get("name", model.__name__)
    assert text == f"ModelSpec.of({name}, {attributes})"
    if "..." not in text:
        spec = eval(text, {"ModelSpec": ModelSpec, name: model})
        built, inputs = spec.create().eval(), spec.batch(2, 9)
        direct = built.logits(inputs) if isinstance(built, Core) else built.mix(inputs)
        assert torch.equal(spec.logits(built, inputs), direct)


def test_error_has_no_example_if_nothing_suggests_one():
    assert example_of(OtherName, forward=lambda model, inputs: model(inputs)) is None


def error_of(model, **declared):
    with pytest.raises(InferenceError) as raised:
        ModelSpec.of(model, **declared)
    return str(raised.value)


class Keys(Core):
    """Takes and returns dicts with keys of its own."""

    def forward(self, batch):
        x = self.embedding(batch["token_ids"]) * batch["padding_mask"][..., None]
        return {"hidden": x.mean(1), "class_logits": self.head(x.mean(1))}


def call_keys(model, ids):
    return model({"token_ids": ids, "padding_mask": torch.ones_like(ids)})


def test_each_error_of_a_model_of_dicts_helps_with_the_next_declaration():
    error = error_of(Keys, width=V, inputs="tokens", forward=lambda m, x: m({"token_ids": x}))
    assert 'forward=lambda m, x: m({..., "padding_mask": ...})' in error and "Declare inputs" not in error
    error = error_of(Keys, width=V, inputs="tokens", forward=call_keys)
    assert 'm(...)["class_logits"]' in error and "'class_logits'" in error
    spec = ModelSpec.of(Keys, forward=lambda model, ids: call_keys(model, ids)["class_logits"])
    assert (spec.width, spec.per_position) == (V, False)


class EncoderDecoder(nn.Module):
    def __init__(self, source, target):
        super().__init__()
        self.source, self.target = nn.Embedding(source, 8), nn.Embedding(target, 8)
        self.head = nn.Linear(8, target)

    def forward(self, source, target):
        return self.head(self.target(target) + self.source(source).mean(1, keepdim=True))


class Spoken(EncoderDecoder):
    """Takes a speaker too, which no operation with weights reads."""

    def forward(self, source, target, speaker):
        return super().forward(source, target) * speaker


@pytest.mark.parametrize("sizes", [(50, 60), (60, 50)])
def test_example_has_the_width_of_the_first_argument(sizes):
    text = example_of(lambda: Spoken(*sizes), name="mine")
    call = "forward=lambda m, x: m(x, target=..., speaker=...)"
    assert text == f'ModelSpec.of(mine, inputs="tokens", width={sizes[0]}, {call})'


@pytest.mark.parametrize("declared, causal", [({}, None), ({"causal": True}, True)])
def test_model_that_gets_the_ids_twice_is_not_assumed_causal(declared, causal):
    spec = ModelSpec.of(lambda: EncoderDecoder(50, 60), width=50, forward=lambda m, x: m(x, x), **declared)
    assert (spec.causal, spec.assumed) == (causal, ())
    spec = ModelSpec.of(lambda: EncoderDecoder(50, 60), width=60, forward=lambda m, x: m(x[:, :1] % 50, x))
    assert (spec.causal, spec.assumed) == (True, ("causal",))


class Tables(nn.Module):
    """Has a table of positions or token types that is smaller than the vocabulary."""

    def __init__(self, vocabulary, other, d_out):
        super().__init__()
        self.other, self.embedding = nn.Embedding(other, 8), nn.Embedding(vocabulary, 8)
        self.head = nn.Linear(8, d_out)

    def forward(self, ids):
        return self.head(self.embedding(ids) + self.other(torch.zeros_like(ids)))


DECLARED_FORWARDS = {
    "none": {},
    "forward": {"forward": lambda m, x: m(x)},
    "transposed": {"forward": lambda m, x: m(x.T).transpose(0, 1)},
    "batches": {"make_batch": lambda b, t, generator: torch.randint(40, (b, t), generator=generator)},
}


@pytest.mark.parametrize("declared", DECLARED_FORWARDS)
@pytest.mark.parametrize("sizes", [(80, 32, 5), (300, 2, 2), (90, 3, 90), (40, 512, 3)])
def test_vocabulary_is_the_table_that_reads_the_ids(sizes, declared):
    assert ModelSpec.of(lambda: Tables(*sizes), **DECLARED_FORWARDS[declared]).width == sizes[0]


def vision(size, *, key=None):
    """Return a model of images of one size."""
    layers = (nn.Conv2d(3, 4, 8, 8), nn.Flatten(), nn.Linear(4 * (size[0] // 8) * (size[1] // 8), 10))
    return Layers(*layers, then=lambda x: x if key is None else {key: x})


@pytest.mark.parametrize("size", [(40, 40), (80, 104)])
def test_error_about_an_unusual_image_size_is_short(size):
    lines = error_of(lambda: vision(size), name="mine").splitlines()
    assert len(lines) <= 8 and lines[-2:] == ["", f"For example: ModelSpec.of(mine, {IMAGES})"]


def test_class_scores_of_an_image_are_found_in_a_dict():
    spec = ModelSpec.of(lambda: vision((32, 32), key="prediction"))
    assert not spec.per_position
    assert "logits at 'prediction' of the output" in spec.notes


class Layers(nn.Module):
    """Layers, and a function of their output."""

    def __init__(self, *layers, then=lambda x: x):
        super().__init__()
        self.layers, self.then = nn.Sequential(*layers), then

    def forward(self, x):
        return self.then(self.layers(x))


class Transposed(nn.Module):
    def forward(self, x):
        return x.transpose(1, 2)


def of_transformers(config, head):
    def build():
        import transformers

        settings = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        settings |= {"intermediate_size": 64}
        sizes = {
            "ViTConfig": {"image_size": 32, "patch_size": 8, "num_labels": 7},
            "ASTConfig": {"max_length": 64, "num_mel_bins": 32, "num_labels": 4},
            "BertConfig": {"vocab_size": V, "num_labels": 3},
            "ResNetConfig": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 5},
            "Wav2Vec2Config": {"vocab_size": 12, "num_conv_pos_embeddings": 16}
            | {"conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3)}
            | {"num_feat_extract_layers": 2, "num_conv_pos_embedding_groups": 4},
        }
        given = settings | sizes[config] if config != "ResNetConfig" else sizes[config]
        return getattr(transformers, head)(getattr(transformers, config)(**given))

    return build


# Name: (factory, shape of one row of the inputs, shape of one row of the output).
PER_ROW = {
    "small images": (
        lambda: Layers(nn.Conv2d(1, 4, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4 * 13 * 13, 10)),
        (1, 28, 28),
        (10,),
    ),
    "image to image": (lambda: nn.Conv2d(3, 3, 3, padding=1), (3, 32, 32), (3, 32, 32)),
    "patches without a convolution": (
        lambda: Layers(nn.Unfold(4, stride=4), Transposed(), nn.Linear(48, 10), then=lambda x: x.mean(1)),
        (3, 32, 32),
        (10,),
    ),
    "video": (
        lambda: Layers(nn.Conv3d(3, 8, (2, 8, 8), (2, 8, 8)), then=lambda x: x.flatten(2).mean(-1)),
        (3, 4, 32, 32),
        (8,),
    ),
    "audio": (lambda: Layers(nn.Conv1d(1, 8, 80, 16), then=lambda x: x.mean(-1)), (1, 400), (8,)),
    "features": (lambda: Layers(nn.Linear(10, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)), (10,), (2,)),
    "text classes": (
        lambda: Layers(nn.Embedding(V, 8), then=lambda x: x.mean(1)),
        (16,),
        (8,),
    ),
    "text regression": (lambda: Layers(nn.Embedding(V, 8), then=lambda x: x.sum((1, 2))), (16,), (1,)),
    "forecast": (lambda: Layers(nn.Linear(5, 3), then=lambda x: x[:, -1]), (16, 5), (3,)),
    "ViT": (of_transformers("ViTConfig", "ViTForImageClassification"), (3, 32, 32), (7,)),
    "ResNet": (of_transformers("ResNetConfig", "ResNetForImageClassification"), (3, 32, 32), (5,)),
    "spectrogram": (of_transformers("ASTConfig", "ASTForAudioClassification"), (64, 32), (4,)),
    "waveform": (of_transformers("Wav2Vec2Config", "Wav2Vec2ForCTC"), (400,), (39, 12)),
    "BERT classes": (of_transformers("BertConfig", "BertForSequenceClassification"), (16,), (3,)),
}


@pytest.mark.parametrize("name", PER_ROW)
def test_output_per_row_is_inferred(name):
    factory, in_shape, out_shape = PER_ROW[name]
    spec = ModelSpec.of(factory)
    assert (spec.per_position, spec.causal) == (False, None)
    inputs = spec.batch(3, 16)
    assert inputs.shape == (3, *in_shape)
    assert spec.logits(spec.create().eval(), inputs).shape == (3, *out_shape)
    shown = ", ".join(["B", *map(str, out_shape)])
    assert f"returns ({shown}), an output per row" in spec.notes
    checks = ["determinism", "batch_invariance", "finite_gradients", "load_round_trip", "gradient_flow"]
    assert {result.status for result in check_model(spec, checks=checks)} == {"passed"}


def test_output_per_row_that_depends_on_the_batch_is_found():
    def mixes_rows():
        return Layers(nn.Conv2d(3, 4, 4, 4), nn.Flatten(), then=lambda x: x - x.mean(0))

    [result] = check_model(ModelSpec.of(mixes_rows), checks=["batch_invariance"])
    assert result.status == "failed"


def test_input_size_of_a_recurrence_is_no_image_size():
    class ImageToText(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution, self.state = nn.Conv2d(3, 8, 4, 4), nn.GRU(8, 700, batch_first=True)

        def forward(self, images):
            return self.state(self.convolution(images).flatten(2).transpose(1, 2))[0][:, -1]

    assert ModelSpec.of(ImageToText).batch(2, 16).shape == (2, 3, 32, 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_first_image_size_that_works_is_used(dtype):
    calls = []

    def build():
        model = Layers(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).to(dtype)
        model.register_forward_hook(lambda module, args, output: calls.append(args[0].shape))
        return model

    ModelSpec.of(build)
    assert {shape[1:] for shape in calls} == {(3, 32, 32)}


NOT_SEQUENCES = {
    "batch norm of features": (
        lambda: Layers(nn.Linear(20, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)),
        (20,),
    ),
    "channels": (lambda: Layers(nn.Conv1d(16, 32, 3), nn.AdaptiveMaxPool1d(1), nn.Flatten()), (16, 64)),
    "denoiser": (lambda: Layers(nn.Conv1d(2, 8, 9, padding=4), nn.Conv1d(8, 2, 9, padding=4)), (2, 64)),
}


@pytest.mark.parametrize("name", NOT_SEQUENCES)
def test_features_of_one_length_are_no_sequence(name):
    factory, shape = NOT_SEQUENCES[name]
    spec = ModelSpec.of(factory)
    assert not spec.per_position and spec.max_length is None
    assert spec.batch(2, 16).shape == (2, *shape)


def test_classifier_of_one_length_may_have_a_mask():
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(V, 8), nn.Linear(8 * 16, 3)

        def forward(self, ids, attention_mask=None):
            keep = torch.ones_like(ids) if attention_mask is None else attention_mask
            return self.head((self.embedding(ids) * keep[..., None]).flatten(1))

    assert not ModelSpec.of(Fixed).per_position


NO_ROWS = {
    "a lost position": lambda: Layers(nn.Embedding(V, 8), then=lambda x: x[:, 1:]),
    "batch and positions swapped": lambda: Layers(nn.Embedding(V, 8), then=lambda x: x.transpose(0, 1)),
    "a number per position": lambda: Layers(nn.Embedding(V, 8), then=lambda x: x.sum(-1)),
    "a number for all": lambda: Layers(nn.Embedding(V, 8), then=lambda x: x.sum()),
    "nothing": lambda: Layers(nn.Conv2d(3, 4, 4, 4), then=lambda x: x.flatten(2)[:, :0]),
}


@pytest.mark.parametrize("name", NO_ROWS)
def test_other_output_shapes_are_refused(name):
    with pytest.raises(InferenceError, match="an output per position or per row"):
        ModelSpec.of(NO_ROWS[name])


def test_declared_output_per_row_may_have_another_length():
    spec = ModelSpec.of(NO_ROWS["a lost position"], per_position=False)
    assert spec.notes.endswith("returns (B, 15, 8), an output per row")


def test_number_per_position_has_an_example_that_works():
    text = example_of(NO_ROWS["a number per position"], name="scores")
    spec = eval(text, {"ModelSpec": ModelSpec, "scores": NO_ROWS["a number per position"]})
    assert spec.per_position and spec.logits(spec.create(), spec.batch(2, 9)).shape == (2, 9, 1)


def test_output_per_row_cannot_be_causal():
    factory, _, _ = PER_ROW["text classes"]
    with pytest.raises(InferenceError, match=r"output of shape \(2, 8\)"):
        ModelSpec.of(factory, causal=True)


@pytest.mark.parametrize(("channels", "fits"), [(3, True), (1, False)])
def test_declared_batches_are_used(channels, fits):
    def make_batch(batch_size, seq_len, generator):
        return torch.randn(batch_size, channels, 8, seq_len, generator=generator)

    if not fits:
        with pytest.raises(InferenceError, match=r"inputs \(2, 1, 8, 16\): RuntimeError"):
            ModelSpec.of(lambda: nn.Conv2d(3, 4, 4, 4), make_batch=make_batch)
        return
    spec = ModelSpec.of(lambda: nn.Conv2d(3, 4, 4, 4), make_batch=make_batch)
    assert (spec.inputs, spec.seq_len, spec.causal) == ("vectors", 16, None)
    assert spec.notes.startswith("takes inputs (B, 3, 8, 16)")


# A model's own loss


class Labelled(Core):
    """Has a loss that shifts labels by `shift` positions."""

    shift, ignored = 0, -100

    def loss(self, logits, labels):
        logits, labels = logits[:, : logits.shape[1] - self.shift], labels[:, self.shift :]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=self.ignored)


class LossOnly(Labelled):
    def forward(self, ids, targets=None):
        logits = self.logits(ids)
        return logits if targets is None else self.loss(logits, targets)


class OtherIgnoredLabel(LossOnly):
    ignored = -1


class LossInTuple(Labelled):
    def forward(self, ids, gold=None):
        logits = self.logits(ids)
        return logits, None if gold is None else self.loss(logits, gold)


class LossInDict(Labelled):
    shift = 1

    def forward(self, ids, y=None):
        logits = self.logits(ids)
        return {"logits": logits, "loss": None if y is None else self.loss(logits, y)}


@pytest.mark.parametrize("model", [LossOnly, OtherIgnoredLabel, LossInTuple, LossInDict])
def test_loss_is_found_by_its_value(model):
    spec = ModelSpec.of(model)
    built, ids = spec.create(), spec.batch(3, 9)
    labels = ids.flip(0)
    labels[0, 4:] = -100
    expected = F.cross_entropy(built.logits(ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(spec.labelled_loss(built, ids, labels), expected)
    assert "not used" not in spec.notes


@pytest.mark.parametrize("model", [LossInTuple, LossInDict])
@pytest.mark.parametrize("scale", [1.0, 1e-3, 0.0])
def test_shift_of_labels_is_unknown_for_small_logits(model, scale):
    def build():
        made = model()
        with torch.no_grad():
            for parameter in made.head.parameters():
                parameter.mul_(scale)
        return made

    [result] = check_model(ModelSpec.of(build), checks=["label_shift"])
    assert result.status == ("passed" if scale == 1.0 else "not applicable")


def test_loss_with_a_further_term_is_not_shifted():
    class Smoothed(Labelled):
        def forward(self, ids, y=None):
            x = self.logits(ids)
            if y is None:
                return x
            return x, F.cross_entropy(x.flatten(0, 1), y.flatten(), label_smoothing=0.1) + x.square().mean()

    [result] = check_model(ModelSpec.of(Smoothed), checks=["label_shift"])
    assert result.status == "passed"


def test_wrong_loss_of_labels_with_another_name_is_found():
    class Backwards(Labelled):
        def forward(self, ids, gold=None):
            logits = self.logits(ids)
            if gold is None:
                return logits, None
            return logits, F.cross_entropy(logits[:, 1:].flatten(0, 1), gold[:, :-1].flatten())

    assert "failed" in {result.status for result in check_model(ModelSpec.of(Backwards), checks=["loss"])}


def test_scalar_that_is_no_cross_entropy_is_no_loss():
    class Penalty(Core):
        def forward(self, ids, weights=None):
            logits = self.logits(ids)
            return logits, None if weights is None else (weights * logits.sum(-1)).mean()

    spec = ModelSpec.of(Penalty)
    assert spec.labelled_loss is None and "not used: weights=" in spec.notes


def test_model_that_returns_only_a_loss_is_explained():
    class Loss(Labelled):
        def forward(self, ids, targets):
            return self.loss(self.logits(ids), targets)

    class OfTwo(Labelled):
        def forward(self, x, y):
            return self.loss(self.logits(x), y)

    for model in (Loss, OfTwo):
        with pytest.raises(InferenceError, match="The model returns a loss") as raised:
            ModelSpec.of(model)
        assert "For example" not in str(raised.value)


# Configurations


@pytest.mark.parametrize("wrap", [lambda config: config, lambda config: lambda: config])
@pytest.mark.parametrize(
    "name, is_per_position, causal",
    [("LlamaConfig", True, True), ("BertConfig", True, False), ("ViTConfig", False, None)],
)
def test_configuration_of_transformers_is_a_subject(name, is_per_position, causal, wrap):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = getattr(transformers, name)(**sizes, vocab_size=V, image_size=32, patch_size=8)
    spec = ModelSpec.of(wrap(config))
    assert (spec.per_position, spec.causal) == (is_per_position, causal)


def test_model_without_a_head_has_hidden_states_as_output():
    import transformers

    config = transformers.BertConfig(vocab_size=V, hidden_size=16, intermediate_size=32, num_hidden_layers=1)
    config.num_attention_heads = 2
    spec = ModelSpec.of(lambda: transformers.BertModel(config))
    assert spec.logits(spec.create().eval(), spec.batch(2, 8)).shape == (2, 8, 16)


def test_model_that_keeps_a_value_of_its_first_call_can_be_called():
    class FirstPositions(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(31, 16), nn.Linear(16, 31)

        def forward(self, ids):
            if not hasattr(self, "positions"):
                self.positions = torch.arange(ids.shape[1])
            return self.head(self.embedding(ids) + self.positions.sin()[:, None])

    spec = ModelSpec.of(FirstPositions, causal=True)
    assert (spec.inputs, spec.width) == ("tokens", 31)
    [result] = check_model(spec, checks=["history"])
    assert result.status == "failed"
