"""A workload of one's own, what share of a device it uses, and what is none."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from stackwise.benchmark import Workload, call_once, measure, model_workload
from stackwise.benchmark.flops.peak_rate import PeakRate
from stackwise.benchmark.flops.transformer_shape import TransformerShape
from stackwise.benchmark.generation import generate_once, measure_generation
from stackwise.benchmark.timing.graph_replay import graph_replay
from stackwise.benchmark.timing.interleaved import interleave
from stackwise.benchmark.workload import callable_workload, workload
from stackwise.model import create_simple_rack
from stackwise.subject.spec import ModelSpec


def test_anything_that_can_be_called():
    calls = []

    def work():
        calls.append("work")

    made = callable_workload(work, tokens=4, prepare=lambda: calls.append("prepare"))
    assert (made.name, made.tokens, made.device) == ("work", 4, torch.device("cpu"))
    assert call_once(made).tokens == 4
    assert calls == ["prepare", "work"]
    assert callable_workload(work, name="other").name == "other"
    with pytest.raises(ValueError, match="call: got 3; allowed: a function that takes no arguments"):
        callable_workload(3)
    with pytest.raises(ValueError, match="tokens: got -1; allowed: an integer >= 0"):
        callable_workload(work, tokens=-1)
    with pytest.raises(ValueError, match="prepare: got 3; allowed: a function without arguments, or None"):
        callable_workload(work, prepare=3)
    assert callable_workload(work, device="auto").device.type in ("cpu", "cuda")


@pytest.mark.parametrize("device", ["meta", "mps"])
def test_a_device_that_no_clock_waits_for(device):
    with pytest.raises(ValueError, match=f"device: got '{device}'; allowed: auto, cpu, cuda, cuda:N"):
        callable_workload(list, device=device)
    with pytest.raises(ValueError, match=f"device: got '{device}'; allowed: cpu, cuda, cuda:N, which are"):
        Workload("mine", list, torch.device(device))


class TestUtilization:
    """A utilisation is of a peak that is known, and of work whose size is."""

    PEAK = PeakRate("here", "measured", {"float32": 1e9}, 1e8, {})
    PUBLISHED = PeakRate("here", "published", {"float32": 1e9, "bfloat16": 16e9}, 1e8, {})

    @pytest.fixture
    def llama(self):
        # Per token: q, k, v, o of 8 x 8; gate, up, down of 8 x 12; head of 8 x 10: 624 products.
        config = LlamaConfig(
            vocab_size=10,
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=1,
            num_attention_heads=2,
            tie_word_embeddings=True,
        )
        return ModelSpec.of(lambda: LlamaForCausalLM(config))

    def test_of_a_measured_peak(self, llama, monkeypatch):
        monkeypatch.setattr(workload, "measured_peak", lambda device, dtype: self.PEAK)
        made = model_workload(llama, "forward", batch_size=3, seq_len=5)
        # Of attention 5 x 5 pairs of 8 numbers, twice.
        flops = 3 * (5 * 2 * 624 + 2 * 2 * 5 * 5 * 8)
        assert made.utilization(2.0, "measured").mfu == pytest.approx(flops / 2.0 / 1e9)
        assert made.utilization(2.0, "measured").mbu is None

    def test_of_decoding(self, llama, monkeypatch):
        monkeypatch.setattr(workload, "measured_peak", lambda device, dtype: self.PEAK)
        made = model_workload(llama, "decode", batch_size=3, seq_len=5)
        # Weights and three gains of 8; keys and values of 5 tokens read and of one written, 8 numbers each.
        moved = 4 * (624 + 3 * 8) + 4 * 3 * 2 * 8 * (5 + 1)
        assert made.utilization(2.0, "measured").mbu == pytest.approx(moved / 2.0 / 1e8, rel=0.02)

    def test_of_a_training_step_that_recomputes_its_layers(self, llama, monkeypatch):
        monkeypatch.setattr(workload, "measured_peak", lambda device, dtype: self.PEAK)

        def recomputing():
            model = llama.create()
            name = "activation_checkpointing_enable"  # or, in transformers of before, the other
            getattr(model, name if hasattr(model, name) else "gradient_checkpointing_enable")()
            return model

        # Three forward passes; with recomputation the 544 products of layers and the pairs once more.
        pairs = 3 * 2 * 2 * 5 * 5 * 8
        forward, layers = 3 * 5 * 2 * 624 + pairs, 3 * 5 * 2 * 544 + pairs
        plain = model_workload(llama, "train", batch_size=3, seq_len=5).utilization(2.0, "measured")
        assert plain.mfu == plain.hfu == pytest.approx(3 * forward / 2.0 / 1e9)
        again = model_workload(ModelSpec.of(recomputing), "train", batch_size=3, seq_len=5)
        assert again.recompute == "blocks"
        used = again.utilization(2.0, "measured")
        assert used.mfu == plain.mfu
        assert used.hfu == pytest.approx((3 * forward + layers) / 2.0 / 1e9)

    def test_recomputation_that_nobody_tells_of(self, llama, monkeypatch):
        """A forward that somebody has replaced may compute anything: no number, rather than a wrong one."""
        monkeypatch.setattr(workload, "measured_peak", lambda device, dtype: self.PEAK)

        def replaced():
            model = llama.create()
            model.model.layers[0].forward = model.model.layers[0].forward
            return model

        made = model_workload(ModelSpec.of(replaced), "train", batch_size=1, seq_len=4)
        used = made.utilization(1.0, "measured")
        assert (made.recompute, used.hfu) == (None, None)
        assert used.mfu > 0
        assert "what the backward pass recomputes is not known" in used.notes
        assert model_workload(ModelSpec.of(replaced), "forward", batch_size=1, seq_len=4).recompute == "none"

    @pytest.mark.parametrize("recomputes", [False, True])
    def test_recomputation_that_only_a_call_shows(self, monkeypatch, recomputes):
        monkeypatch.setattr(workload, "measured_peak", lambda device, dtype: self.PEAK)

        class Own(nn.Module):
            def __init__(self):
                super().__init__()
                self.embedding, self.head = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
                self.qkv, self.out = nn.Linear(8, 24, bias=False), nn.Linear(8, 8, bias=False)
                self.up, self.down = nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False)

            def transformer_shape(self):
                return TransformerShape.uniform(
                    n_layers=1, d_model=8, n_heads=1, d_ff=12, n_matrices=2, vocab_size=10
                )

            def layer(self, x):
                q, k, v = self.qkv(x).chunk(3, -1)
                x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
                return x + self.down(self.up(x).relu())

            def forward(self, ids):
                x = self.embedding(ids)
                return self.head(
                    checkpoint(self.layer, x, use_reentrant=False) if recomputes else self.layer(x)
                )

        used = model_workload(Own, "train", batch_size=3, seq_len=5).utilization(1.0, "measured")
        assert used.mfu > 0
        assert used.hfu == (None if recomputes else used.mfu)
        told = ("what the backward pass recomputes is not known",)
        assert used.notes == (told if recomputes else ())

    def test_products_that_cannot_be_counted(self, llama, monkeypatch):
        """As with flex_attention, which torch does not run under its counter."""
        monkeypatch.setattr(workload, "measured_peak", lambda device, dtype: self.PEAK)

        def forward(model, ids):
            if _get_current_dispatch_mode() is not None:
                raise TypeError("no implementation found for it in that mode")
            return llama.forward(model, ids)

        spec = replace(llama, forward=forward)
        used = model_workload(spec, "train", batch_size=1, seq_len=4).utilization(1.0, "measured")
        assert used.mfu > 0
        assert used.hfu is None, "nobody has seen whether it recomputes"
        assert used.notes == (
            "the products could not be counted (TypeError): the peak rate is that of the weights, float32",
            "what the backward pass recomputes is not known",
        )
        made = model_workload(spec, "forward", batch_size=1, seq_len=4)
        assert made.utilization(1.0, "measured").hfu == made.utilization(1.0, "measured").mfu > 0

    def test_floor_of_decoding(self, llama, monkeypatch):
        monkeypatch.setattr(workload, "measured_peak", lambda device, dtype: self.PEAK)
        made = model_workload(llama, "decode", batch_size=3, seq_len=5)
        floor = made.floor("measured")
        assert made.utilization(floor.seconds, "measured").mbu == pytest.approx(1.0)
        assert floor.bound == "memory"
        assert made.floor() is None, "nobody publishes a peak of a CPU"
        assert model_workload(llama, "forward", batch_size=1, seq_len=4).floor("measured") is None
        with pytest.raises(ValueError, match="peak: got 'best'"):
            made.floor("best")

    @pytest.mark.parametrize("mode", ["forward", "train", "decode"])
    def test_the_peak_is_that_of_what_is_computed_in(self, llama, monkeypatch, mode):
        """Under autocast weights are of another dtype than their products."""
        monkeypatch.setattr(workload, "published_peak", lambda device: self.PUBLISHED)

        def cast(function):
            def call(*arguments):
                with torch.autocast("cpu", torch.bfloat16):
                    return function(*arguments)

            return call

        def made(spec, dtype=None):
            return model_workload(spec, mode, batch_size=3, seq_len=5, dtype=dtype)

        half, full = made(llama, "bfloat16"), made(llama)
        under = made(replace(llama, forward=cast(llama.forward), decode=cast(llama.decode)))
        used = {
            name: each.utilization(1.0) for name, each in (("half", half), ("full", full), ("cast", under))
        }
        assert used["full"].mfu == pytest.approx(16 * used["half"].mfu)
        assert used["cast"].mfu == used["half"].mfu
        assert used["cast"].notes == used["half"].notes == ()
        if mode == "decode":
            assert (
                under.floor().compute_seconds == half.floor().compute_seconds < full.floor().compute_seconds
            )

    def test_norms_in_float32_do_not_make_it_that_of_float32(self, monkeypatch):
        monkeypatch.setattr(workload, "published_peak", lambda device: self.PUBLISHED)

        def mixed():
            rack = create_simple_rack(1, 1, d_model=16, d_ff=32, n_heads=2, vocab_size=11).to(torch.bfloat16)
            first = next(rack.parameters())
            assert first.ndim == 1, "a norm's gain"
            first.data = first.data.float()
            return rack

        size = {"batch_size": 2, "seq_len": 8}
        plain = model_workload(
            lambda: create_simple_rack(1, 1, d_model=16, d_ff=32, n_heads=2, vocab_size=11), "forward", **size
        )
        used = model_workload(mixed, "forward", **size).utilization(1.0)
        assert plain.utilization(1.0).mfu == pytest.approx(16 * used.mfu)

    def test_products_in_several_dtypes_are_told(self, llama, monkeypatch):
        monkeypatch.setattr(workload, "published_peak", lambda device: self.PUBLISHED)

        def forward(model, ids):
            with torch.autocast("cpu", torch.bfloat16):
                hidden = model.model(ids).last_hidden_state
            return model.lm_head(hidden.float())

        made = model_workload(replace(llama, forward=forward), "forward", batch_size=3, seq_len=5)
        # Of the head 80 products of 624 a token, beside those of attention.
        share = 80 / (624 + 2 * 5 * 8)
        told = f"{share:.0%} of the products are not in bfloat16, whose peak rate this is of"
        assert made.utilization(1.0).notes == (told,)

    def test_nobody_publishes_that_of_a_cpu(self, llama):
        made = model_workload(llama, "forward", batch_size=1, seq_len=4)
        assert made.utilization(1.0).mfu is None

    def test_of_unknown_work(self, llama):
        assert callable_workload(list).utilization(1.0) is None
        made = model_workload(llama, "generate", batch_size=1, seq_len=4, new_tokens=2)
        assert made.utilization(1.0) is None
        # All tokens again: nothing is read from a cache.
        made = model_workload(replace(llama, decode=None), "decode", batch_size=1, seq_len=4)
        assert made.utilization(1.0) is None

    def test_another_peak(self, llama):
        with pytest.raises(ValueError, match="peak: got 'best'; allowed: 'published', 'measured'"):
            callable_workload(list).utilization(1.0, "best")


def test_a_workload_of_ones_own():
    workload = Workload("mine", list, torch.device("cpu"))
    assert workload.tokens == 0


class TestWhatIsNoWorkload:
    def test_a_model_is_taken_as_by_a_spec(self, subjects):
        for model in (subjects.GRULM, subjects.gru, subjects.gru()):
            made = model_workload(model, "forward", batch_size=1, seq_len=4)
            made.call()
            assert isinstance(made.model, subjects.GRULM)

    def test_what_is_no_model(self):
        with pytest.raises(TypeError, match="model: got int; wanted"):
            model_workload(3, "forward", batch_size=1, seq_len=4)

    @pytest.mark.parametrize("take", [measure, call_once, measure_generation, generate_once, graph_replay])
    def test_what_cannot_be_measured(self, subjects, take):
        wrongs = {"the class GRULM": subjects.GRULM, "GRULM": subjects.gru(), "NoneType": None}
        for got, wrong in wrongs.items():
            with pytest.raises(
                TypeError, match=rf"workload: got {got}; wanted a Workload, as of model_workload\("
            ):
                take(wrong)

    def test_what_cannot_be_interleaved(self, subjects):
        with pytest.raises(TypeError, match=r"workloads\['a'\]: got the class GRULM; wanted a Workload"):
            interleave({"a": subjects.GRULM})
        with pytest.raises(TypeError, match="workloads: got list; wanted a mapping of names to workloads"):
            interleave([])
