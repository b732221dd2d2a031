"""Narrow formats: what loses more than rounding is found and placed, sound models of many kinds are not."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stackwise.checks.probe.shadow import Shadow
from stackwise.subject.spec import ModelSpec
from tests.zoo.gpt import GPT, spec_of

BF16 = torch.finfo(torch.bfloat16).eps
SOUND = ["tiny", "rack", "dropout_rack", "llama", "gpt2", "bert", "x_decoder", "gru", "conv", "encoder"]


def shadowed(model, inputs, dtype=None):
    model = model if dtype is None else model.to(dtype)
    shadow = Shadow(model, inputs, {})
    with torch.no_grad(), shadow:
        output = model(inputs)
    return output, shadow


@torch.no_grad()
def test_the_shadow_is_the_model_in_float64(subjects):
    ids = torch.arange(16)[None]
    torch.manual_seed(0)
    model = subjects.TinyLM().eval().bfloat16()
    output, shadow = shadowed(model, ids)
    exact = model.double()(ids)
    assert (output - exact).abs().max() > 1e-4
    torch.testing.assert_close(shadow.of(output), exact, rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_views_and_changes_in_place_are_followed():
    class Steps(nn.Module):
        def forward(self, x):
            y = x.clone()
            y[:, 1::2] *= 3
            y.transpose(0, 1)[0].add_(0.1)
            z = torch.empty(3, 4, dtype=x.dtype)
            z.copy_(y)
            z.view(-1)[::5].fill_(0.3)
            return torch.cat([z.t().contiguous().view(3, 4), y.unfold(1, 2, 2)[..., 0].repeat(1, 2)])

    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    output, shadow = shadowed(Steps(), x)
    torch.testing.assert_close(shadow.of(output), Steps()(x.double()), rtol=1e-12, atol=1e-12)
    assert not torch.equal(output.double(), shadow.of(output))


def test_product_of_a_parameter_with_a_constant_is_an_activation():
    class Conditioned(nn.Module):
        def __init__(self):
            super().__init__()
            self.time = nn.Linear(16, 16)

        def forward(self, x):
            return x * F.silu(self.time(torch.linspace(-1, 1, 16, dtype=x.dtype)))

    torch.manual_seed(0)
    _, shadow = shadowed(Conditioned(), torch.randn(2, 16).bfloat16(), torch.bfloat16)
    assert shadow.worst["activation"] > shadow.worst["parameter"] == 0


def test_choices_follow_the_call():
    class Choice(nn.Module):
        def forward(self, x):
            scaled = x * 1.001  # rounds to x, in float64 it does not
            return torch.where(scaled > x, 1.0, 2.0).to(x.dtype) * x

    x = torch.ones(4, dtype=torch.bfloat16)
    output, shadow = shadowed(Choice(), x)
    assert shadow.of(output).tolist() == [2.0] * 4


def test_counters_that_stop_are_values_and_no_choices():
    class Count(nn.Module):
        def forward(self, x):
            return F.one_hot((torch.ones_like(x).cumsum(0) - 1).long(), 400).to(x.dtype)

    output, shadow = shadowed(Count(), torch.ones(300, dtype=torch.bfloat16))
    assert shadow.of(output)[299].argmax() == 299
    assert output[299].argmax() != 299


@pytest.mark.parametrize("name", SOUND)
@pytest.mark.parametrize("check", ["float32_error", "bfloat16_error", "autocast_error", "float16_range"])
def test_sound(subjects, name, check):
    result = subjects.ask(getattr(subjects, name), check)
    assert result.status == "passed", result
    if result.value is not None:
        assert 0 <= result.value <= result.limit / 4


def test_the_place_is_the_line_in_the_code(subjects):
    class Places(subjects.TinyLM):
        def place_ids(self, seq_len):
            rounded = torch.arange(seq_len).to(self.norm.weight.dtype)
            return rounded.long()

        def __init__(self):
            super().__init__(max_len=400)

    assert torch.arange(300).bfloat16().unique().numel() < 300
    result = subjects.ask(Places, "bfloat16_error")
    assert result.status == "failed"
    assert result.limit < result.value
    assert "subjects.py" in result.where
    assert subjects.ask(Places, "autocast_error").status == "passed", "there the weights are float32"


def test_short_models_count_far_enough(subjects):
    class Short(subjects.TinyLM):
        def place_ids(self, seq_len):
            return torch.arange(seq_len).to(self.norm.weight.dtype).long()

    assert subjects.ask(Short, "bfloat16_error").status == "passed"


def test_overflow_names_the_operation(subjects):
    class Squares(subjects.TinyLM):
        def mix(self, x):
            large = x * 1e3
            return x + 1e-9 * (large * large).to(x.dtype)

    with torch.no_grad():
        assert not Squares().half()(torch.arange(16)[None]).isfinite().all()
    result = subjects.ask(Squares, "float16_range")
    assert result.status == "failed"
    assert result.where.startswith("mul in ")
    assert "test_precision.py" in result.where
    assert subjects.ask(Squares, "bfloat16_error").status == "passed"


def test_infinite_in_between_and_harmless(subjects):
    class Masked(subjects.TinyLM):
        def weigh(self, scores):
            return super().weigh(scores)

        def mix(self, x):
            return x + 0 * (x * 1e6).clamp(-1.0, 1.0)

    result = subjects.ask(Masked, "float16_range")
    assert result.status == "passed", result


def test_not_asked_of_what_cannot_run(subjects):
    class Float32Only(subjects.TinyLM):
        def forward(self, ids):
            if self.norm.weight.dtype != torch.float32:
                raise NotImplementedError("float32 only")
            return super().forward(ids)

    for check in ("bfloat16_error", "float16_range"):
        result = subjects.ask(Float32Only, check)
        assert result.status == "not applicable"
        assert "float32 only" in result.meaning


def test_a_mask_constant_that_float16_refuses(subjects):
    class Mask(subjects.TinyLM):
        def attend(self, layer, x):
            torch.zeros(3, dtype=x.dtype).masked_fill(torch.ones(3, dtype=torch.bool), -1e9)
            return super().attend(layer, x)

    result = subjects.ask(Mask, "float16_range")
    assert result.status == "warned"
    assert "finfo" in result.advice


@pytest.mark.parametrize(("size", "status"), [(1, "passed"), (40, "warned")])
def test_exponentials_of_large_numbers_are_unusual_and_no_failure(subjects, size, status):
    """They are a warning if their error reaches the logits."""

    class Sharp(subjects.TinyLM):
        def mix(self, x):
            return x + size * ((4 * x + 70).exp() * math.exp(-70)).tanh()

    x = torch.linspace(-2, 2, 99)
    wrong = (4 * x + 70).bfloat16().double().exp() / (4 * x.double() + 70).exp()
    assert (wrong - 1).square().mean().sqrt() > 16 * BF16
    result = subjects.ask(Sharp, "bfloat16_error")
    assert (result.status, result.where.startswith("exp in")) == (status, True)


def test_buffers_that_a_cast_ruins(subjects):
    class Rotary(subjects.TinyLM):
        def __init__(self):
            super().__init__(max_len=400)
            self.register_buffer("frequencies", torch.linspace(0.1, 0.9, 8))

        def mix(self, x):
            angles = torch.arange(x.shape[1])[:, None] * self.frequencies.float()
            return x + angles.cos().repeat(1, 2).to(x.dtype)

    frequencies = torch.linspace(0.1, 0.9, 8)
    assert (300 * (frequencies - frequencies.bfloat16())).abs().max() > 0.2
    result = subjects.ask(Rotary, "cast_buffers")
    assert result.status == "warned"
    assert result.where.startswith("cos in ")
    assert subjects.ask(Rotary, "bfloat16_error").status == "passed"
    assert subjects.ask(subjects.tiny, "cast_buffers").status == "not applicable"

    class Kept(Rotary):
        def _apply(self, fn, recurse=True):
            frequencies = self.frequencies
            super()._apply(fn, recurse)
            self.frequencies = frequencies
            return self

    assert subjects.ask(Kept, "cast_buffers").status == "passed"


def test_products_that_autocast_passes_over(subjects):
    class InPlace(nn.Linear):
        def forward(self, x):
            flat = x.flatten(0, -2)
            y = self.bias.expand(len(flat), -1).clone()
            return y.addmm_(flat, self.weight.t()).unflatten(0, x.shape[:-1])

    class Model(subjects.TinyLM):
        def __init__(self):
            super().__init__()
            for layer in self.layers:
                layer["mlp"][1] = InPlace(16, 16)

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        x = torch.randn(2, 16)
        assert InPlace(16, 16)(x).dtype == torch.float32
        assert nn.Linear(16, 16)(x).dtype == torch.bfloat16
    result = subjects.ask(Model, "autocast_error")
    assert (result.status, result.value, result.limit) == ("failed", 2.0, 0.0)
    assert "layers.0.mlp.1" in result.where


def test_nothing_global_changes(subjects):
    state, mode = torch.get_rng_state(), torch.is_grad_enabled()
    subjects.ask(ModelSpec.of(subjects.dropout_rack), "bfloat16_error")
    subjects.ask(ModelSpec.of(subjects.dropout_rack), "autocast_error")
    assert torch.equal(state, torch.get_rng_state())
    assert mode == torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("dtype, at_least", [(torch.bfloat16, 10_000), (torch.float16, 1400)])
@pytest.mark.parametrize("place", ["tokens", "norm", "head"])
def test_what_is_as_coarse_as_a_narrow_format(subjects, dtype, at_least, place):
    def model():
        model = subjects.TinyLM()
        module = model.get_submodule(place)
        module.register_forward_hook(lambda module, args, output: output.to(dtype).to(output.dtype))
        return model

    result = subjects.ask(model, "float32_error")
    assert result.status == "failed", result
    assert at_least < result.value < 20_000
    assert result.limit == 1024
    assert "written down" in result.advice


@pytest.mark.parametrize(("dtype", "status"), [(torch.float32, "warned"), (torch.float16, "failed")])
def test_large_angles_of_float32_may_be_meant(subjects, dtype, status):
    class Far(subjects.TinyLM):
        def forward(self, ids):
            places = torch.arange(ids.shape[1], dtype=torch.float32) + 50_000
            angles = (places[:, None] * 0.7 ** torch.arange(8)).to(dtype).float()
            return super().forward(ids) + angles.cos().sum(dim=-1, keepdim=True)

    result = subjects.ask(Far, "float32_error")
    assert result.status == status, result
    assert ("float32 rounds an angle of 5e+04 by 0.003" in str(result)) == (status == "warned")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_that_is_built_narrow_has_no_float32_to_lose(subjects, dtype):
    result = subjects.ask(lambda: subjects.tiny().to(dtype), "float32_error")
    assert result.status == "not applicable"
    assert "needs a float32 model" in result.meaning


@pytest.mark.parametrize("check", ["float32_error", "bfloat16_error"])
def test_cosines_of_a_right_angle_are_no_loss(subjects, check):
    """cos(pi / 2) is 6e-17 in float64 and -4e-8 in float32: all digits differ, and the error is harmless."""

    class Timed(GPT):
        def embed(self, ids):
            angle = torch.full((len(ids), 1, 1), 0.5).to(self.embedding.weight.dtype) * torch.pi
            return super().embed(ids) + torch.cat([angle.sin(), angle.cos()], dim=-1).sum(
                dim=-1, keepdim=True
            )

    assert subjects.ask(spec_of(Timed), check).status == "passed"


class FewChannels(nn.Module):
    """One position is nearly 0 where a norm reads it, as sums over few channels happen to be."""

    def __init__(self, part):
        super().__init__()
        self.tokens, self.norm, self.head = nn.Embedding(29, 4), nn.RMSNorm(4), nn.Linear(4, 29)
        self.part = part

    def forward(self, ids):
        x = self.tokens(ids)
        small = (torch.arange(ids.shape[1]) % self.part == 0)[:, None]
        return self.head(self.norm(x - x * small.to(x.dtype) * (255 / 256)))


@pytest.mark.parametrize("part, status", [(64, "warned"), (2, "failed")])
def test_few_positions_are_unusual_and_many_are_wrong(subjects, part, status):
    result = subjects.ask(lambda: FewChannels(part), "bfloat16_error")
    assert result.status == status, result
    assert result.value > result.limit
    assert ("At a few positions" in result.meaning) == (status == "warned")


def test_what_autocast_alone_refuses(subjects):
    class Adds(subjects.TinyLM):
        def mix(self, x):
            y = self.layers[0]["mlp"][1](x).flatten(0, 1)
            out = torch.zeros(y.shape, dtype=self.norm.weight.dtype)
            out.index_add_(0, torch.arange(len(y)), y)
            return x + out.view_as(x)

    model, ids = Adds(), torch.arange(12)[None]
    model(ids)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="index_add"):
        model(ids)
    result = subjects.ask(Adds, "autocast_error")
    assert result.status == "warned"
    assert "index_add" in result.meaning
    assert "cast the result" in result.advice


def test_every_answer_says_something(subjects):
    result = subjects.ask(subjects.tiny, "float16_range")
    assert (result.status, result.value, result.limit) == ("passed", 0.0, 0.0)
    assert result.meaning


@torch.library.custom_op("stackwise_tests::wrong_in_bfloat16", mutates_args=())
def wrong_in_bfloat16(x: torch.Tensor) -> torch.Tensor:
    is_wrong = x.dtype == torch.bfloat16 and torch.backends.mkldnn.enabled
    return x.roll(1, dims=-1) if is_wrong else x.clone()


class WrongKernel(nn.Module):
    """Stands for a kernel of oneDNN that is wrong in bfloat16."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 6)

    def forward(self, x):
        return wrong_in_bfloat16(self.linear(x))


def test_wrong_kernel_of_a_library_is_no_failure_of_the_model(subjects):
    result = subjects.ask(WrongKernel, "bfloat16_error")
    assert result.status == "warned"
    assert "the error comes from a kernel of oneDNN" in result.advice


class ChangedInPlace(GPT):
    """In float32, .to(float32) returns its input, which an operation in place then changes."""

    is_safe = False

    def softmax(self, scores):
        scores.to(torch.float32, copy=self.is_safe).mul_(0.5)
        return super().softmax(scores)


class Copied(ChangedInPlace):
    is_safe = True


@pytest.mark.parametrize("build, status", [(GPT, "passed"), (Copied, "passed"), (ChangedInPlace, "failed")])
def test_dtypes_give_the_same_outputs(subjects, build, status):
    result = subjects.ask(spec_of(build), "dtype_outputs")
    assert (result.status, result.where) == (status, "float32" if status == "failed" else "")
