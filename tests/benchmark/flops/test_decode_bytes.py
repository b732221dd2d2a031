"""Bytes of a decoding step against real weights and what real caches hold."""

import pytest
import torch
import transformers
from torch import nn

from stackwise.benchmark.flops.decode_bytes import DecodeBytes, decode_bytes
from stackwise.benchmark.flops.transformer_shape import (
    ExpertsShape,
    FeedForwardShape,
    KernelShape,
    LatentShape,
    LayerShape,
    SoftmaxShape,
    TransformerShape,
)
from stackwise.model import create_simple_rack
from stackwise.model.quantization import quantize_stack

V, C = 31, 32


def rack_of(**options):
    torch.manual_seed(0)
    sizes = {"d_model": C, "d_ff": 24, "n_heads": 4, "n_kv_heads": 2, "vocab_size": V}
    return create_simple_rack(1, 2, **{**sizes, "attention_type": "gqa", **options})


def shape_of(attention, feedforward=None):
    layer = LayerShape((attention,), feedforward or FeedForwardShape(3))
    return TransformerShape(4, (layer, layer), 20, 20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_rack(tied, dtype):
    rack = rack_of(tie_embeddings=tied).to(dtype)
    found = decode_bytes(rack, batch_size=3, seq_len=7)
    state = {id(p): p for p in rack.parameters()}.values()
    weights = sum(p.numel() * p.element_size() for p in state)
    if not tied:  # three rows of it are read, not all
        weights -= (V - 3) * C * dtype.itemsize
    one = rack.new_cache(3, 1).nbytes
    assert found == DecodeBytes(weights, rack.new_cache(3, 7).nbytes, one)
    assert found.total == weights + 8 * one
    assert found.to_dict()["total"] == found.total


def test_the_cache_may_have_another_dtype():
    found = decode_bytes(rack_of(), batch_size=1, seq_len=7, dtype=torch.float16)
    assert found.cache_read == 2 * 7 * 2 * 2 * 8 * 2


def test_gpt2_reads_a_row_of_each_table():
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=V, n_embd=C, n_layer=1, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0
        )
    )
    found = decode_bytes(model, batch_size=2, seq_len=5)
    stored = sum(p.numel() for p in model.parameters())
    assert found.weights == 4 * (stored - 64 * C + 2 * C)


def test_quantised_weights_are_as_small_as_they_are():
    pytest.importorskip("torchao")
    rack = rack_of()
    before = decode_bytes(rack, batch_size=1, seq_len=5).weights
    report = quantize_stack(rack, 0, "int8")
    after = decode_bytes(rack, batch_size=1, seq_len=5).weights
    assert before - after == report.bytes_before - report.bytes_after


@pytest.mark.parametrize(
    "attention, read, written",
    [
        # Two layers and three rows, float16; 7 tokens before this one.
        (SoftmaxShape(4, 2, 5), 2 * 3 * 7 * 2 * 2 * 5 * 2, 2 * 3 * 2 * 2 * 5 * 2),
        # A window of 4 is this token and three before it, however many the cache keeps.
        (SoftmaxShape(4, 2, 5, True, 4, 4), 2 * 3 * 3 * 2 * 2 * 5 * 2, 2 * 3 * 2 * 2 * 5 * 2),
        (SoftmaxShape(4, 2, 5, True, 4, 3), 2 * 3 * 3 * 2 * 2 * 5 * 2, 2 * 3 * 2 * 2 * 5 * 2),
        (SoftmaxShape(4, 2, 5, True, 1, 0), 0, 2 * 3 * 2 * 2 * 5 * 2),
        (LatentShape(4, 6, 3, 2, 5), 2 * 3 * 7 * 8 * 2, 2 * 3 * 8 * 2),
        # Sums of features in float32, all of them changed.
        (KernelShape(4, 2, 5, 6), 2 * 3 * 2 * (6 * 5 + 6 + 1) * 4, 2 * 3 * 2 * (6 * 5 + 6 + 1) * 4),
    ],
    ids=["softmax", "window", "narrow cache", "window of one", "latent", "kernel"],
)
def test_kinds_by_hand(attention, read, written):
    found = decode_bytes(shape_of(attention), batch_size=3, seq_len=7, dtype=torch.float16)
    assert (found.cache_read, found.cache_written) == (read, written)


def test_one_row_reads_its_experts():
    experts = ExpertsShape(d_ff=3, n_experts=4, n_routed=2)
    shape = shape_of(SoftmaxShape(2, 2, 2), experts)
    found = decode_bytes(shape, batch_size=1, seq_len=1, dtype=torch.float16)
    one_layer = 4 * 4 * 4 + 4 * 4 + 2 * (3 * 4 * 3)
    assert found.weights == 2 * (2 * one_layer + 20 + 4)
    # Which experts several rows share is not known.
    assert decode_bytes(shape, batch_size=2, seq_len=1, dtype=torch.float16) is None


def test_one_row_reads_the_experts_of_a_model():
    model = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=V,
            hidden_size=C,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=1,
            sliding_window=None,
        )
    )
    found = decode_bytes(model, batch_size=1, seq_len=1)
    stored = sum(p.numel() for p in model.parameters()) - (V - 1) * C - 3 * (3 * C * 24)
    buffers = sum(b.numel() for b in model.buffers() if b.is_floating_point())
    assert found.weights == 4 * (stored + buffers)
    assert decode_bytes(model, batch_size=2, seq_len=1) is None
    model.lm_head.bfloat16()
    assert decode_bytes(model, batch_size=1, seq_len=1) is None


def test_a_cache_in_buffers_is_not_counted_again():
    rack = rack_of()
    before = decode_bytes(rack, batch_size=1, seq_len=5)
    rack.register_buffer("k_cache", torch.zeros(1, 4, 4096, 8), persistent=False)
    rack.register_buffer("angles", torch.zeros(4096, 8))
    assert decode_bytes(rack, batch_size=1, seq_len=5) == before
    rack.register_buffer("frequencies", torch.zeros(5))
    assert decode_bytes(rack, batch_size=1, seq_len=5).weights == before.weights + 5 * 4


def test_what_kernel_attention_has_drawn_is_read():
    rack = rack_of(attention_type="kernel", kernel={"n_features": 6}, tie_embeddings=True)
    drawn = sum(buffer.numel() for name, buffer in rack.named_buffers() if "frequencies_KFD" in name)
    assert drawn > 0
    found = decode_bytes(rack, batch_size=1, seq_len=5)
    assert found.weights == 4 * (sum(p.numel() for p in rack.parameters()) + drawn)


def test_what_is_not_known():
    assert decode_bytes(nn.Linear(3, 3), batch_size=1, seq_len=4) is None


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"batch_size": 0}, "batch_size: got 0"),
        ({"seq_len": -1}, "seq_len: got -1"),
        ({"dtype": None}, "dtype: got None"),
    ],
)
def test_what_is_refused(wrong, message):
    arguments = {"batch_size": 1, "seq_len": 4, "dtype": torch.float16, **wrong}
    with pytest.raises(ValueError, match=message):
        decode_bytes(shape_of(SoftmaxShape(2, 2, 2)), **arguments)
