"""The compiled decode step says what the plain one says.

What is said of the graph is asked of it as it is traced, by `aot_eager`; of each kind of attention also of
the kernels.
"""

from threading import Thread

import pytest
import torch

from stackwise.model import append_stack, compilation, create_simple_rack, quantize_stack, remove_stack
from stackwise.model.decode import DecodeStep
from stackwise.model.generate import prefill

LATENT = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
KINDS = {
    "gqa": {"n_blocks": 2, "n_kv_heads": 2, "qk_norm": "head", "qkv_bias": True, "sliding_window": [3, None]},
    "mla": {"attention_type": "mla", "latent": LATENT, "norm_position": "post"},
    "kernel": {"attention_type": "kernel", "kernel": {"feature_map": "favor", "n_features": 16}},
}


def rack_of(n_blocks=1, **options):
    torch.manual_seed(0)
    rack = create_simple_rack(1, n_blocks, d_model=32, d_ff=48, n_heads=4, vocab_size=50, **options)
    with torch.no_grad():
        for p in rack.parameters():
            p.mul_(4)
    return rack


def logits_of(rack, prompt, tokens, *, compiled, keep=None):
    cache = rack.new_cache(len(prompt), 16)
    prefill(rack, cache, prompt, keep)
    decode = DecodeStep(rack, cache, compile=compiled)
    steps = [decode(column).clone() for column in tokens.unbind(1)]
    assert cache.length == prompt.shape[1] + tokens.shape[1]
    return torch.stack(steps, dim=1)


@pytest.fixture(params=["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def backend(request, monkeypatch):
    """What runs the compiled step."""
    monkeypatch.setattr(compilation, "BACKEND", request.param)


@pytest.fixture
def _traced_alone(monkeypatch):
    monkeypatch.setattr(compilation, "BACKEND", "eager")


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "kind, batch_size",
    [
        ("gqa", 1),
        pytest.param("gqa", 2, marks=SLOW),
        pytest.param("mla", 1, marks=SLOW),
        ("mla", 2),
        ("kernel", 1),
        pytest.param("kernel", 2, marks=SLOW),
    ],
)
def test_compiled_step(kind, batch_size):
    rack = rack_of(**KINDS[kind]).eval()
    prompt, tokens = torch.randint(50, (batch_size, 6)), torch.randint(50, (batch_size, 5))
    plain, compiled = (logits_of(rack, prompt, tokens, compiled=compiled) for compiled in (False, True))
    torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-4 * plain.abs().max().item())


def test_compiled_step_with_padding(backend):
    rack = rack_of(**KINDS["gqa"]).eval()
    prompt, tokens = torch.randint(50, (1, 6)), torch.randint(50, (1, 4))
    keep = torch.tensor([[0, 0, 1, 1, 1, 1]])
    padded = logits_of(rack, prompt, tokens, compiled=True, keep=keep)
    alone = logits_of(rack, prompt[:, 2:], tokens, compiled=False)
    torch.testing.assert_close(padded, alone, rtol=1e-4, atol=1e-4 * alone.abs().max().item())


def test_bfloat16_weights_are_computed_in_float32(backend):
    """So that it is closer to float64 than the plain bfloat16 step is."""
    rack = rack_of(2, n_kv_heads=2).bfloat16().eval()
    prompt, tokens = torch.randint(50, (1, 6)), torch.randint(50, (1, 5))
    exact = logits_of(rack_of(2, n_kv_heads=2).bfloat16().double().eval(), prompt, tokens, compiled=False)
    plain = logits_of(rack, prompt, tokens, compiled=False)
    compiled = logits_of(rack, prompt, tokens, compiled=True)
    error = [(each.double() - exact).norm().item() for each in (compiled, plain)]
    assert error[0] < 0.75 * error[1]


@pytest.mark.filterwarnings("ignore:.*_stable_hash_for_caching")  # torchao's tensors lack it
@pytest.mark.parametrize(
    "quantised, dtype",
    [
        ("int8", torch.float32),
        ("int4", torch.float32),
        ("fp8", torch.bfloat16),
        pytest.param("int8", torch.bfloat16, marks=SLOW),
        pytest.param("int4", torch.bfloat16, marks=SLOW),
        pytest.param("fp8", torch.float32, marks=SLOW),
    ],
)
def test_quantised_weights(quantised, dtype, backend):
    rack = rack_of(n_kv_heads=2).to(dtype).eval()
    quantize_stack(rack, 0, quantised)
    prompt, tokens = torch.randint(50, (1, 6)), torch.randint(50, (1, 5))
    plain, compiled = (logits_of(rack, prompt, tokens, compiled=compiled) for compiled in (False, True))
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    scale = plain.abs().max().item()
    torch.testing.assert_close(compiled.to(plain.dtype), plain, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float64, marks=SLOW)])
def test_other_dtypes_of_latent_attention(dtype, backend):
    rack = rack_of(**KINDS["mla"]).to(dtype).eval()
    prompt, tokens = torch.randint(50, (1, 6)), torch.randint(50, (1, 5))
    plain, compiled = (logits_of(rack, prompt, tokens, compiled=compiled) for compiled in (False, True))
    tolerance = 0.1 if dtype == torch.bfloat16 else 1e-10
    assert compiled.dtype == plain.dtype == dtype
    torch.testing.assert_close(compiled, plain, rtol=tolerance, atol=tolerance * plain.abs().max().item())


def test_float64_stays_float64(backend):
    rack = rack_of(n_kv_heads=2).double().eval()
    prompt, tokens = torch.randint(50, (1, 6)), torch.randint(50, (1, 5))
    plain, compiled = (logits_of(rack, prompt, tokens, compiled=compiled) for compiled in (False, True))
    torch.testing.assert_close(compiled, plain, rtol=1e-10, atol=1e-10)


def test_generation_compiled_is_generation():
    rack = rack_of(n_kv_heads=2).eval()
    prompt = torch.randint(50, (1, 6))
    plain, compiled = (rack.generate(prompt, max_new_tokens=12, compile=c) for c in (False, True))
    assert plain.equal(compiled)


@pytest.mark.usefixtures("_traced_alone")
def test_more_sizes_than_the_compiler_keeps_graphs_of_one_code_object():
    rack = rack_of().eval()
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        for ids in (torch.randint(50, (1, 6)), torch.randint(50, (2, 6))):
            for mask in (None, torch.arange(6).expand_as(ids) > 1):
                plain, compiled = (
                    rack.generate(ids, mask, max_new_tokens=4, compile=compiled) for compiled in (False, True)
                )
                assert plain.equal(compiled)


def test_another_thread_compiles_meanwhile(monkeypatch):
    """What this one tells the compiler must not hold for the other."""
    elsewhere = []

    def compile_elsewhere():
        run = torch.compile(lambda x: x + 1, backend="eager", fullgraph=True)
        elsewhere.append(run(torch.ones(2)).tolist())

    def backend(graph, _):
        def run(*inputs):
            thread = Thread(target=compile_elsewhere)
            thread.start()
            thread.join()
            return graph(*inputs)

        return run

    monkeypatch.setattr(compilation, "BACKEND", backend)
    rack_of().generate(torch.randint(50, (1, 6)), max_new_tokens=4, compile=True)
    assert elsewhere == [[2, 2]] * 3


@pytest.mark.parametrize("kind", ["gqa", pytest.param("mla", marks=SLOW), "kernel"])
@pytest.mark.usefixtures("_traced_alone")
def test_what_changes_between_steps(kind):
    """Weights are read each time; what else a Rack has is looked at by the first step."""
    rack = rack_of(**KINDS[kind]).eval()
    prompt, tokens = torch.randint(50, (1, 6)), torch.randint(50, (3, 1))
    steps = []
    for compiled in (False, True):
        cache = rack.new_cache(1, 16)
        prefill(rack, cache, prompt)
        steps.append(DecodeStep(rack, cache, compile=compiled))
    for token in tokens:
        plain, compiled = (step(token) for step in steps)
        torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-4 * plain.abs().max().item())
        with torch.no_grad():
            rack.final_norm.weight.mul_(2)
            rack.get_stack(0).get_block(0).feedforward.down.weight.mul_(-1)
    expected, rack.final_norm.eps = steps[0](tokens[0]), 10.0
    scale = expected.abs().max().item()
    torch.testing.assert_close(steps[1](tokens[0]), expected, rtol=1e-4, atol=1e-4 * scale)
    plain, compiled = (logits_of(rack, prompt, tokens.T, compiled=compiled) for compiled in (False, True))
    torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-4 * plain.abs().max().item())


@pytest.mark.usefixtures("_traced_alone")
def test_a_cast_between_steps():
    rack = rack_of(**KINDS["gqa"]).eval()
    prompt, tokens = torch.randint(50, (1, 6)), torch.randint(50, (4, 1))
    steps = []
    for compiled in (False, True):
        cache = rack.new_cache(1, 16)
        prefill(rack, cache, prompt)
        steps.append(DecodeStep(rack, cache, compile=compiled))
    for i, token in enumerate(tokens):
        if i == 2:
            rack.double()
        plain, compiled = (step(token) for step in steps)
        assert plain.dtype == compiled.dtype == (torch.float64 if i >= 2 else torch.float32)
        torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-4 * plain.abs().max().item())


@pytest.mark.usefixtures("_traced_alone")
def test_a_stack_removed_between_steps():
    rack = create_simple_rack(2, 1, d_model=32, d_ff=48, n_heads=4, vocab_size=50).eval()
    columns = rack.stream(torch.randint(50, (1, 6)), max_new_tokens=6, compile=True)
    for _ in range(3):
        next(columns)
    remove_stack(rack, 1)
    with pytest.raises(ValueError, match=r"cache: got one for Stacks of \[1, 1\] Blocks"):
        next(columns)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.usefixtures("_traced_alone")
def test_a_stack_exchanged_between_steps(compiled):
    rack = create_simple_rack(2, 1, d_model=32, d_ff=48, n_heads=4, vocab_size=50).eval()
    columns = rack.stream(torch.randint(50, (1, 6)), max_new_tokens=6, compile=compiled)
    for _ in range(3):
        next(columns)
    remove_stack(rack, 1)
    append_stack(rack, create_simple_rack(1, 1, 32, 48, 4, 50).get_stack(0))
    with pytest.raises(ValueError, match="cache: got one for Blocks of which some were exchanged"):
        next(columns)


@pytest.mark.usefixtures("_traced_alone")
def test_a_hook_that_reads_a_value_does_so_at_each_token():
    """It leaves no graph that could be run alone."""
    rack, seen = rack_of().eval(), []
    rack.get_stack(0).register_forward_hook(lambda _module, _inputs, y: seen.append(y[0, -1, 0].item()))
    prompt, tokens = torch.randint(50, (1, 6)), torch.randint(50, (1, 3))
    plain, compiled = (logits_of(rack, prompt, tokens, compiled=compiled) for compiled in (False, True))
    torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-4 * plain.abs().max().item())
    assert seen[4:] == pytest.approx(seen[:4], rel=1e-4)


def test_other_rows_than_those_of_the_cache():
    rack = rack_of()
    decode = DecodeStep(rack, rack.new_cache(3, 16))
    with pytest.raises(ValueError, match="token_B: got 1; allowed: 3 rows, as in the cache"):
        decode(torch.tensor([1]))


@pytest.mark.parametrize("n_tokens, capacity", [(1, 256), (256, 256), (257, 512), (1000, 1024), (1025, 2048)])
def test_capacity_is_rounded_up(n_tokens, capacity):
    assert DecodeStep.capacity(n_tokens) == capacity
