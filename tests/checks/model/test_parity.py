"""A model against its reference: what differs is found, and named by the place where it begins."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stackwise.checks import check_model
from stackwise.checks.probe.divergence import Divergence, first_divergence
from stackwise.subject.spec import ModelSpec

NAMES = ["reference_gradient", "reference_output", "reference_weights"]


@pytest.fixture(scope="module")
def models(subjects):
    class Sound(subjects.TinyLM):
        """The same, in another order of sums."""

        def attend(self, layer, x):
            return super().attend(layer, x.flip(1).flip(1))

        def weigh(self, scores):
            powers = (scores - scores.amax(-1, keepdim=True)).exp()
            return powers / powers.flip(-1).sum(-1, keepdim=True)

    class NoScale(subjects.TinyLM):
        def weigh(self, scores):
            return (scores * 2).softmax(dim=-1)

    class HeadsAcross(subjects.TinyLM):
        def split(self, x):
            return x.unflatten(-1, (-1, self.n_heads)).permute(0, 3, 1, 2)

    class TanhGELU(subjects.TinyLM):
        def __init__(self):
            super().__init__()
            for layer in self.layers:
                layer["mlp"][2] = nn.GELU(approximate="tanh")

    class SecondNorm(subjects.TinyLM):
        """One epsilon of another size, in the second layer."""

        def __init__(self):
            super().__init__()
            self.layers[1]["norm"].eps = 1e-3

    class Detached(subjects.TinyLM):
        def weigh(self, scores):
            return super().weigh(scores.detach())

    class HalfGradient(subjects.TinyLM):
        def mix(self, x):
            return x / 2 + (x / 2).detach()

    class InFloat32(subjects.TinyLM):
        """Only where float64 is not asked for."""

        def mix(self, x):
            return x if x.dtype == torch.float64 else x * 1.05

    class Random(subjects.TinyLM):
        """The same randomness on both sides is no difference."""

        def mix(self, x):
            return F.dropout(x, 0.1, self.training)

    class ZeroHead(subjects.TinyLM):
        def __init__(self):
            super().__init__()
            nn.init.zeros_(self.head.weight)

    class ZeroHeadNoScale(ZeroHead, NoScale):
        pass

    return {name: value for name, value in locals().items() if isinstance(value, type)}


def statuses(results):
    return [results[name].status for name in NAMES]


def results_of(model, reference, to_reference=None, **arguments):
    declared = {"name": "model", "reference": reference, "to_reference": to_reference}
    results = check_model(ModelSpec.of(model, **declared), checks=["parity"], **arguments)
    assert [r.check for r in results] == NAMES
    return {r.check: r for r in results}


@torch.no_grad()
def gap(model, reference):
    """With equal weights, in float64, by NumPy."""
    one, other = model().eval().double(), reference().eval().double()
    other.load_state_dict(one.state_dict())
    ids = torch.arange(16)[None] % 29
    a, b = one(ids).numpy(), other(ids).numpy()
    return abs(a - b).max()


@pytest.mark.parametrize("name", ["Sound", "Random"])
@pytest.mark.parametrize("seed", [0, 1])
def test_sound(subjects, models, name, seed):
    assert gap(models[name], subjects.TinyLM) < 1e-12
    results = results_of(models[name], subjects.TinyLM, seed=seed)
    assert {r.status for r in results.values()} == {"passed"}
    assert all(r.value <= r.limit for r in results.values())


@pytest.mark.parametrize("name", ["llama", "gpt2", "rack", "encoder", "gru", "bert"])
def test_a_model_is_its_own_reference(subjects, name):
    build = getattr(subjects, name)
    assert {r.status for r in results_of(build, build).values()} == {"passed"}


@pytest.mark.parametrize(
    "name, place",
    [
        ("NoScale", "between layers.0.qkv and the input of layers.0.out"),
        ("HeadsAcross", "between layers.0.qkv and the input of layers.0.out"),
        ("TanhGELU", "layers.0.mlp.2: its inputs agree, its output does not"),
        ("SecondNorm", "layers.1.norm: its inputs agree, its output does not"),
    ],
)
def test_another_output(subjects, models, name, place):
    assert gap(models[name], subjects.TinyLM) > 1e-7
    results = results_of(models[name], subjects.TinyLM)
    assert statuses(results) == ["failed", "failed", "passed"]
    assert results["reference_output"].where.startswith(place)
    assert results["reference_output"].value > results["reference_output"].limit


def test_parts_in_float32_are_rounding(subjects):
    class Narrow(subjects.TinyLM):
        def weigh(self, scores):
            return scores.float().softmax(dim=-1).to(scores.dtype)

    moved = gap(Narrow, subjects.TinyLM)
    assert 1e-10 < moved < 1e-6
    assert {r.status for r in results_of(Narrow, subjects.TinyLM).values()} == {"passed"}

    class Half(subjects.TinyLM):
        def weigh(self, scores):
            return scores.bfloat16().softmax(dim=-1).to(scores.dtype)

    assert statuses(results_of(Half, subjects.TinyLM)) == ["failed", "failed", "passed"]


def test_only_the_gradient(subjects, models):
    for name, parameter in (("Detached", "qkv"), ("HalfGradient", "")):
        assert gap(models[name], subjects.TinyLM) < 1e-12
        results = results_of(models[name], subjects.TinyLM)
        assert results["reference_output"].status == "passed"
        assert results["reference_gradient"].status == "failed"
        assert parameter in results["reference_gradient"].where


def test_only_the_loss(subjects):
    class Halved(subjects.TinyLM):
        factor = 0.5

    def labelled_loss(model, ids, labels):
        logits = model(ids)[:, :-1]
        return getattr(model, "factor", 1.0) * F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())

    spec = ModelSpec.of(Halved, reference=subjects.tiny, labelled_loss=labelled_loss)
    results = {r.check: r for r in check_model(spec, checks=["parity"])}
    assert results["reference_output"].status == "passed"
    assert results["reference_gradient"].value == pytest.approx(0.5)
    assert results["reference_gradient"].where.startswith("the loss, ")
    same = ModelSpec.of(spec, reference=Halved)
    assert {r.status for r in check_model(same, checks=["parity"])} == {"passed"}


def test_what_only_the_models_own_dtype_takes(subjects, models):
    result = results_of(models["InFloat32"], subjects.TinyLM)["reference_output"]
    assert result.status == "failed"
    assert "layers" in result.where


def test_behind_weights_that_start_at_zero(models):
    assert gap(models["ZeroHeadNoScale"], models["ZeroHead"]) == 0
    result = results_of(models["ZeroHeadNoScale"], models["ZeroHead"])["reference_output"]
    assert result.status == "failed"
    assert "own weights, eval mode" in result.where


def test_weights_of_a_conversion_keep_their_order(subjects):
    """A reference whose heads are interleaved, and its weights in the order of halves."""

    class Reversed(subjects.TinyLM):
        """Takes the head's rows from the last."""

        def forward(self, ids):
            return super().forward(ids).flip(-1)

    def flipped(state):
        return {**state, "head.weight": state["head.weight"].flip(0)}

    right = results_of(Reversed, subjects.TinyLM, to_reference=flipped)
    assert statuses(right) == ["passed"] * 3
    assert statuses(results_of(Reversed, subjects.TinyLM)) == ["failed", "failed", "passed"]


def test_other_parameters_are_refused(subjects, models):
    def narrow():
        return subjects.TinyLM(d_model=8)

    def shallow():
        return subjects.TinyLM(n_layers=1)

    for reference, text in ((narrow, "got shape (29, 16); allowed: (29, 8)"), (shallow, "layers.1")):
        results = results_of(subjects.TinyLM, reference)
        assert {r.status for r in results.values()} == {"error"}
        assert all("reference: " in r.meaning for r in results.values())
        assert all(text in r.meaning for r in results.values())


def test_not_applicable(subjects):
    results = check_model(subjects.tiny, checks=["parity"])
    assert {(r.status, r.meaning) for r in results} == {("not applicable", "needs reference=")}


def test_first_divergence(subjects, models):
    torch.manual_seed(3)
    reference = subjects.TinyLM().eval()
    model = models["TanhGELU"]().eval()
    model.load_state_dict(reference.state_dict())
    ids = torch.arange(12)[None]
    assert first_divergence(reference, reference, ids) is None
    place = first_divergence(model, reference, ids)
    assert place == Divergence("layers.0.mlp.2", "output", "layers.0.mlp.1", place.value, place.limit)
    assert str(place) == "layers.0.mlp.2: its inputs agree, its output does not"
    assert place.limit == 16 * torch.finfo(torch.float32).eps
    assert place.value > place.limit
    # The measure is the caller's.
    assert first_divergence(model, reference, ids, limit=0.5) is None
    exact = first_divergence(model.double(), reference.double(), ids)
    assert (exact.module, exact.limit) == ("layers.0.mlp.2", 1e-8)


def test_first_divergence_of_inputs_and_of_the_end(subjects):
    class Louder(subjects.TinyLM):
        def mix(self, x):
            return 1.5 * x

    class Shifted(subjects.TinyLM):
        def forward(self, ids):
            return super().forward(ids) + 1.0

    reference = subjects.TinyLM().eval()
    ids = torch.arange(12)[None]
    for kind, module, side in (
        (Louder, "layers.1.norm", "input"),
        (Shifted, "(outside the submodules)", "output"),
    ):
        model = kind().eval()
        model.load_state_dict(reference.state_dict())
        place = first_divergence(model, reference, ids)
        assert (place.module, place.side) == (module, side)
    assert "between layers.0.mlp and the input of layers.1.norm" in str(
        first_divergence(_with_state(Louder, reference), reference, ids)
    )


def _with_state(kind, reference):
    model = kind().eval()
    model.load_state_dict(reference.state_dict())
    return model


def test_first_divergence_by_call(subjects):
    """A module that is called twice is compared call by call; one that only one side has is left out."""

    class Shared(nn.Module):
        def __init__(self, factor=1.0):
            super().__init__()
            self.factor = factor
            self.embedding = nn.Embedding(9, 4)
            self.layer = nn.Linear(4, 4)

        def forward(self, ids):
            x = self.layer(self.embedding(ids))
            return self.layer(self.factor * x)

    class Wrapped(Shared):
        def __init__(self):
            super().__init__(2.0)
            self.extra = nn.Identity()

        def forward(self, ids):
            return self.extra(super().forward(ids))

    reference, model = Shared(), Wrapped()
    model.load_state_dict(reference.state_dict())
    place = first_divergence(model, reference, torch.arange(8)[None])
    assert (place.module, place.side, place.after) == ("layer", "input", "layer")


def test_first_divergence_leaves_no_hooks(subjects):
    def broken(module, ids):
        raise ArithmeticError("stop")

    model, other = subjects.TinyLM(), subjects.TinyLM()
    with pytest.raises(ArithmeticError):
        first_divergence(model, other, torch.arange(4)[None], run=broken)
    first_divergence(model, other, torch.arange(4)[None])
    for module in (*model.modules(), *other.modules()):
        assert not module._forward_hooks and not module._forward_pre_hooks
