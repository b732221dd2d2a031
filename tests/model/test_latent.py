"""LatentAttention against the formulas of its paper in float64, and against transformers' DeepSeek attention.

Shapes: B batch, T positions, S keys, C model width, H heads, N and P the parts of a head without and with
position, V value size, R rank of the latent.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v2.configuration_deepseek_v2 import DeepseekV2Config
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config

from stackwise.config import BlockConfig
from stackwise.model import Rack, Stack, create_rack_from_config
from stackwise.model.block import Block
from stackwise.model.cache import RackCache, SlotCache
from stackwise.model.latent import LatentAttention
from stackwise.model.layout import Layout

C, H, R, Q_RANK, N, P, V = 12, 3, 5, 7, 6, 4, 8
EXACT = {"rtol": 0, "atol": 1e-11}
SIZES = {"kv_lora_rank": R, "qk_nope_head_dim": N, "qk_rope_head_dim": P, "v_head_dim": V}


def block_keys(q_lora_rank=None, **options):
    return {
        "d_model": C,
        "d_ff": 8,
        "n_heads": H,
        "attention_type": "mla",
        "latent": {**SIZES, "q_lora_rank": q_lora_rank},
        **options,
    }


def make_attention(q_lora_rank=None, **options):
    attention = LatentAttention(BlockConfig.from_dict(block_keys(q_lora_rank, **options))).double().eval()
    for name, weight in attention.named_parameters():
        # Wide enough for softmax to prefer some keys clearly, and norms that are not the identity.
        torch.nn.init.normal_(weight, mean=1.0 if "norm" in name else 0.0, std=0.5)
    return attention


def make_input(n_rows=2, seq_len=9, dtype=torch.float64):
    return torch.randn(n_rows, seq_len, C, dtype=dtype)


def turned(x_P, position):
    """RoPE of one vector: pair i is the complex number x[i] + 1j * x[i + P/2]."""
    half = len(x_P) // 2
    z = (x_P[:half] + 1j * x_P[half:]) * np.exp(1j * position * 10_000.0 ** (-np.arange(half) / half))
    return np.concatenate([z.real, z.imag])


def root_mean_square_norm(x, norm):
    return x / np.sqrt((x**2).mean() + 1e-6) * norm.weight.detach().numpy()


def reference(attention, x_BTC, *, window=None, softcap=None, causal=True, keep_BT=None):
    """Equations 37 to 47 of arXiv:2405.04434, one row, one head and one query at a time."""
    weight = {name: p.detach().numpy() for name, p in attention.named_parameters()}
    B, T, _ = x_BTC.shape
    keep_BT = np.ones((B, T), bool) if keep_BT is None else keep_BT.numpy()
    u_BTC = np.zeros(x_BTC.shape)
    for b in range(B):
        real = [t for t in range(T) if keep_BT[b, t]]
        position = (
            {t: i for i, t in enumerate(real)} if attention.rotary is not None else dict.fromkeys(real, 0)
        )
        latent, shared_key, query_input = {}, {}, {}
        for t in real:
            h = x_BTC[b, t].numpy()
            down = weight["kv_down.weight"] @ h
            latent[t] = root_mean_square_norm(down[:R], attention.kv_norm)
            shared_key[t] = turned(down[R:], position[t])
            query_input[t] = h
            if attention.q_down is not None:
                query_input[t] = root_mean_square_norm(weight["q_down.weight"] @ h, attention.q_norm)
        for t in real:
            outputs = []
            for i in range(H):
                w_q = weight["q_up.weight"][i * (N + P) : (i + 1) * (N + P)]
                w_kv = weight["kv_up.weight"][i * (N + V) : (i + 1) * (N + V)]
                q = w_q @ query_input[t]
                q = np.concatenate([q[:N], turned(q[N:], position[t])])
                logits, values = [], []
                for s in real:
                    if (causal and s > t) or (window is not None and abs(s - t) >= window):
                        continue
                    k = np.concatenate([w_kv[:N] @ latent[s], shared_key[s]])
                    logit = q @ k / math.sqrt(N + P)
                    logits.append(logit if softcap is None else softcap * math.tanh(logit / softcap))
                    values.append(w_kv[N:] @ latent[s])
                weights = np.exp(np.array(logits) - max(logits))
                outputs.append(weights / weights.sum() @ np.array(values))
            u_BTC[b, t] = weight["out.weight"] @ np.concatenate(outputs)
    return torch.from_numpy(u_BTC)


def run(attention, x_BTC, keep_BT=None):
    with torch.no_grad():
        return attention(x_BTC, Layout(x_BTC, keep_BT))


@torch.no_grad()
def through_a_cache(attention, x_BTC, sizes, mask_BT=None, dtype=torch.float64):
    """What chunks of these many tokens give, one after the other."""
    n_rows, capacity, _ = x_BTC.shape
    new_cache = attention.new_cache(n_rows, capacity, dtype, x_BTC.device)
    cache = RackCache([[new_cache]], n_rows, capacity, x_BTC.device)
    outputs = []
    for size in sizes:
        part = slice(cache.length, cache.length + size)
        layout = cache.layout(x_BTC[:, part], None if mask_BT is None else mask_BT[:, part])
        outputs.append(attention(x_BTC[:, part], layout, new_cache))
        cache.advance(size)
    assert cache.length == capacity
    return torch.cat(outputs, dim=1)


KEEP = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 0, 0]], dtype=torch.bool)
OPTIONS = [
    {},
    {"window": 3},
    {"softcap": 2.0},
    {"causal": False},
    {"causal": False, "window": 3, "softcap": 2.0},
]


class TestPaper:
    @pytest.mark.parametrize("padded", [False, True])
    @pytest.mark.parametrize("use_rope", [False, True])
    @pytest.mark.parametrize("q_lora_rank", [None, Q_RANK])
    @pytest.mark.parametrize("options", OPTIONS)
    def test_full(self, options, q_lora_rank, use_rope, padded):
        attention = make_attention(
            q_lora_rank,
            use_rope=use_rope,
            sliding_window=options.get("window"),
            softcap=options.get("softcap"),
            attention_mode="causal" if options.get("causal", True) else "bidirectional",
        )
        x, keep = make_input(), KEEP if padded else None
        real = KEEP if padded else torch.ones_like(KEEP)
        expected = reference(attention, x, keep_BT=keep, **options)
        torch.testing.assert_close(run(attention, x, keep)[real], expected[real], **EXACT)

    @pytest.mark.parametrize("padded", [False, True])
    @pytest.mark.parametrize("options", [each for each in OPTIONS if each.get("causal", True)])
    @pytest.mark.parametrize("q_lora_rank", [None, Q_RANK])
    @pytest.mark.parametrize("sizes", [[1] * 9, [4, 1, 1, 1, 1, 1], [2, 5, 2], [9]])
    def test_cached(self, sizes, q_lora_rank, options, padded):
        attention = make_attention(
            q_lora_rank, sliding_window=options.get("window"), softcap=options.get("softcap")
        )
        x, keep = make_input(), KEEP if padded else None
        real = KEEP if padded else torch.ones_like(KEEP)
        actual = through_a_cache(attention, x, sizes, keep)
        expected = reference(attention, x, keep_BT=keep, **options)
        torch.testing.assert_close(actual[real], expected[real], **EXACT)

    @torch.no_grad()
    def test_a_position_on_the_device(self):
        attention, x = make_attention(Q_RANK), make_input()
        cache = attention.new_cache(2, 12, torch.float64, x.device)
        expected = reference(attention, x)
        for t in range(9):
            token = x[:, t : t + 1]
            y = attention(token, Layout(token, start=torch.tensor(t)), cache)
            torch.testing.assert_close(y[:, 0], expected[:, t], **EXACT)

    def test_gradients(self):
        attention, x = make_attention(Q_RANK), make_input(1, 4)
        names, weights = zip(*attention.named_parameters(), strict=True)

        def output(x, *weights):
            with_weights = dict(zip(names, weights, strict=True))
            return torch.func.functional_call(attention, with_weights, (x, Layout(x)))

        assert torch.autograd.gradcheck(output, (x.requires_grad_(), *weights), fast_mode=True)

    def test_gradients_of_the_absorbed_form(self):
        """What is in the cache is constant."""
        attention, x = make_attention(Q_RANK), make_input(1, 4)

        def output(part):
            cache = attention.new_cache(1, 4, x.dtype, x.device)
            attention(x[:, :1], Layout(x[:, :1]), cache)
            return attention(part, Layout(part, start=1), cache)

        assert torch.autograd.gradcheck(output, (x[:, 1:].requires_grad_(),), fast_mode=True)


class TestWidth:
    """The heads have sizes of their own, so that the width need not be shared by them evenly."""

    @pytest.mark.parametrize("q_lora_rank", [None, Q_RANK])
    @pytest.mark.parametrize("d_model", [1, 10, 13])
    def test_of_no_multiple_of_the_heads(self, d_model, q_lora_rank):
        assert d_model % H
        attention = make_attention(q_lora_rank, d_model=d_model)
        x = torch.randn(2, 9, d_model, dtype=torch.float64)
        expected = reference(attention, x)
        torch.testing.assert_close(run(attention, x), expected, **EXACT)
        for sizes in ([1] * 9, [4, 1, 1, 3]):
            torch.testing.assert_close(through_a_cache(attention, x, sizes), expected, **EXACT)

    @torch.no_grad()
    def test_of_a_rack(self):
        model = block_keys(Q_RANK, d_model=13, n_kv_heads=None, vocab_size=11)
        rack = create_rack_from_config({"model": model}).double().eval()
        ids = torch.randint(11, (2, 9))
        logits, cache = rack(ids), rack.new_cache(2, 9)
        assert logits.std() > 0
        for part in (ids[:, :4], ids[:, 4:5], ids[:, 5:]):
            end = cache.length + part.shape[1]
            torch.testing.assert_close(rack(part, cache=cache), logits[:, cache.length - part.shape[1] : end])

    def test_of_other_attention_is_shared_evenly(self):
        """Also where a Block stops being latent."""
        config = BlockConfig.from_dict({**block_keys(d_model=13), "latent": None})
        for refused in (
            lambda: BlockConfig(d_model=13, d_ff=8, n_heads=H),
            lambda: setattr(config, "attention_type", "mha"),
        ):
            with pytest.raises(ValueError, match="must divide d_model=13"):
                refused()
        assert config.attention_type == "mla"


def deepseek(version, q_lora_rank, seed, **options):
    """An attention of DeepSeek of random sizes, with weights such that mistakes show, and its rotation."""
    rng = np.random.default_rng(seed)
    n_heads = int(rng.integers(1, 5))
    # Even sizes: V2's takes neighbours for complex numbers where they lie in memory.
    sizes = {
        "hidden_size": int(rng.integers(3, 9)) * n_heads,
        "num_attention_heads": n_heads,
        "kv_lora_rank": 2 * int(rng.integers(1, 9)),
        "qk_nope_head_dim": 2 * int(rng.integers(1, 5)),
        "qk_rope_head_dim": 2 * int(rng.integers(1, 5)),
        "v_head_dim": int(rng.integers(1, 9)),
    }
    config_class, module = (DeepseekV2Config, v2) if version == 2 else (DeepseekV3Config, v3)
    config = config_class(
        **sizes,
        num_key_value_heads=sizes["num_attention_heads"],
        q_lora_rank=q_lora_rank,
        num_hidden_layers=1,
        rope_parameters={"rope_type": "default", "rope_theta": float(rng.choice([100.0, 10_000.0]))},
        attn_implementation="eager",
        **options,
    )
    attention = getattr(module, f"DeepseekV{version}Attention")(config, layer_idx=0).eval()
    for name, weight in attention.named_parameters():
        norm = "layernorm" in name
        torch.nn.init.normal_(weight, mean=float(norm), std=0.3 if norm else weight.shape[-1] ** -0.5)
    rotation = getattr(module, f"DeepseekV{version}RotaryEmbedding")(config)
    return config, attention, rotation


def ours_of(config, theirs, interleaved):
    """LatentAttention with the weights of theirs."""
    P = config.qk_rope_head_dim
    latent = {key: getattr(config, key) for key in ("q_lora_rank", *SIZES)}
    ours = LatentAttention(
        BlockConfig.from_dict(
            {
                "d_model": config.hidden_size,
                "d_ff": 1,
                "n_heads": config.num_attention_heads,
                "attention_type": "mla",
                "latent": latent,
                "rope_theta": config.rope_parameters["rope_theta"],
            }
        )
    )
    # Pairs (2i, 2i + 1) become (i, i + P/2): even rows first, and the same for queries and key.
    order = torch.cat((torch.arange(0, P, 2), torch.arange(1, P, 2))) if interleaved else torch.arange(P)
    state = {name.removesuffix(".weight"): weight.clone() for name, weight in theirs.state_dict().items()}
    q_up = state.pop("q_b_proj" if config.q_lora_rank is not None else "q_proj")
    q_up = q_up.unflatten(0, (config.num_attention_heads, -1))
    q_up[:, -P:] = q_up[:, -P:][:, order]
    kv_down = state.pop("kv_a_proj_with_mqa")
    kv_down[-P:] = kv_down[-P:][order]
    weights = {
        "q_up": q_up.flatten(0, 1),
        "kv_down": kv_down,
        "kv_norm": state.pop("kv_a_layernorm"),
        "kv_up": state.pop("kv_b_proj"),
        "out": state.pop("o_proj"),
    }
    if config.q_lora_rank is not None:
        weights |= {"q_down": state.pop("q_a_proj"), "q_norm": state.pop("q_a_layernorm")}
    assert not state
    ours.load_state_dict({f"{name}.weight": weight for name, weight in weights.items()})
    return ours.eval()


class TestTransformers:
    @pytest.mark.parametrize("q_lora_rank", [None, Q_RANK])
    @pytest.mark.parametrize("version, options", [(2, {}), (3, {}), (3, {"rope_interleave": False})])
    @pytest.mark.parametrize("seed", range(4))
    @torch.no_grad()
    def test_equal(self, seed, version, options, q_lora_rank):
        config, theirs, rotation = deepseek(version, q_lora_rank, seed, **options)
        ours = ours_of(config, theirs, options.get("rope_interleave", True))
        x = torch.randn(2, 21, config.hidden_size)
        future = torch.full((21, 21), float("-inf")).triu(1)[None, None]
        rotated = rotation(x, torch.arange(21)[None])
        expected, _ = theirs(x, position_embeddings=rotated, attention_mask=future)
        limit = 1e-5 * expected.abs().max()
        assert (ours(x, Layout(x)) - expected).abs().max() < limit
        for sizes in ([1] * 21, [9, 1, 1, 10]):
            assert (through_a_cache(ours, x, sizes, dtype=x.dtype) - expected).abs().max() < limit
        # The other reading of the pairs is seen.
        if config.qk_rope_head_dim > 2:
            wrong = ours_of(config, theirs, not options.get("rope_interleave", True))
            assert (wrong(x, Layout(x)) - expected).abs().max() > 100 * limit


class LargestResult(TorchDispatchMode):
    """How many numbers the largest tensor has that was computed."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result._base is None:  # no view
            self.numel = max(self.numel, result.numel())
        return result


class TestCache:
    @pytest.mark.parametrize("dtype, itemsize", [(torch.bfloat16, 2), (torch.float32, 4), (torch.float64, 8)])
    @pytest.mark.parametrize("window, kept", [(None, 50), (8, 8), (60, 50)])
    def test_bytes_per_token(self, window, kept, dtype, itemsize):
        attention = make_attention(sliding_window=window)
        cache = attention.new_cache(3, 50, dtype, torch.device("cpu"))
        assert isinstance(cache, SlotCache)
        assert cache.nbytes == 3 * kept * (R + P) * itemsize
        (slots,) = cache.slots
        assert slots.shape == (3, 1, kept, R + P) and slots.dtype == dtype
        tensors = [value for value in vars(cache).values() if isinstance(value, torch.Tensor)]
        assert not tensors and slots.untyped_storage().nbytes() == cache.nbytes

    def test_bytes_per_token_of_a_rack(self):
        rack = Rack([Stack([Block(**block_keys()) for _ in range(3)])], vocab_size=11, d_model=C)
        cache = rack.new_cache(2, 50)
        assert cache.nbytes == 2 * 50 * 3 * (R + P) * 4
        before = [slots.data_ptr() for each in cache.blocks[0] for slots in each.slots]
        with torch.no_grad():
            for _ in range(3):
                rack(torch.randint(11, (2, 5)), cache=cache)
        assert cache.nbytes == 2 * 50 * 3 * (R + P) * 4
        assert [slots.data_ptr() for each in cache.blocks[0] for slots in each.slots] == before

    @torch.no_grad()
    def test_holds_the_normalised_latent_and_the_rotated_key(self):
        attention, x = make_attention(), make_input(1, 6)
        cache = attention.new_cache(1, 6, torch.float64, x.device)
        attention(x, Layout(x), cache)
        for t in range(6):
            down = attention.kv_down.weight.numpy() @ x[0, t].numpy()
            latent = root_mean_square_norm(down[:R], attention.kv_norm)
            expected = torch.from_numpy(np.concatenate([latent, turned(down[R:], t)]))
            torch.testing.assert_close(cache.slots[0][0, 0, t], expected, **EXACT)

    @pytest.mark.parametrize("start", [200, torch.tensor(200)])
    @torch.no_grad()
    def test_decoding_expands_no_keys(self, start, monkeypatch):
        attention, x = make_attention(Q_RANK), make_input(1, 201)
        expanded = []
        forward = attention.kv_up.forward
        monkeypatch.setattr(attention.kv_up, "forward", lambda x: expanded.append(len(x)) or forward(x))
        cache = attention.new_cache(1, 201, torch.float64, x.device)
        with LargestResult() as prefill:
            attention(x[:, :200], Layout(x[:, :200]), cache)
        assert expanded == [1] and prefill.numel >= 200 * H * (N + P)
        with LargestResult() as decoding:
            attention(x[:, 200:], Layout(x[:, 200:], start=start), cache)
        assert expanded == [1]
        # All that is as long as the cache: the latent itself, and one number for each head.
        assert decoding.numel <= 201 * (R + P)
