"""What is observed of a model, against weights that the models themselves return and formulas by hand."""

import copy
import math

import pytest
import torch
from torch import nn

from stackwise.config import StackWiseConfig
from stackwise.model import create_rack_from_config
from stackwise.model.backend import using
from stackwise.prototype import observe
from stackwise.prototype.observation import _SoftmaxWatch

T = 11


def config_of(**model):
    sizes = {"vocab_size": 31, "d_model": 32, "d_ff": 32, "n_heads": 4, "n_kv_heads": None}
    sizes |= {"attention_type": "mha", "architecture": {"n_stacks": 1, "blocks_per_stack": 2}}
    return StackWiseConfig.from_dict({"model": sizes | model})


def sharpened(model, factor=4.0):
    """Weights so large that the attention is far from uniform."""
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.mul_(factor)
    return model


def rack_of(**model):
    torch.manual_seed(3)
    return sharpened(create_rack_from_config(config_of(**model)), 15.0)


def entropy_of(weights, visible):
    """Of (..., T, S) weights in float64, over the logarithm of how many of each row are visible."""
    weights = weights.double()
    terms = torch.where(weights > 0, weights * weights.clamp(min=1e-300).log(), 0.0)
    count = visible.expand_as(weights).sum(-1)
    several = count > 1
    return (-terms.sum(-1)[several] / count[several].double().log()).mean().item()


def band(length, window=None, causal=True):
    i, j = torch.arange(length)[:, None], torch.arange(length)
    seen = (j <= i) if causal else torch.ones(length, length, dtype=torch.bool)
    return seen if window is None else seen & ((i - j).abs() < window)


KINDS = {
    "mha": {},
    "gqa": {"attention_type": "gqa", "n_kv_heads": 2},
    "mqa": {"attention_type": "mqa", "n_kv_heads": 1},
    "mla": {
        "attention_type": "mla",
        "latent": {
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
        },
    },
    "window": {"sliding_window": 4},
    "bidirectional window": {"sliding_window": 4, "attention_mode": "bidirectional"},
    "qk_norm": {"qk_norm": "head"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_rack_is_seen_as_its_own_softmax_shows_it(kind):
    """The dispatch mode sees what SDPA computes with; the Rack's own route computes it from q and k."""
    rack, ids = rack_of(**KINDS[kind]), torch.randint(31, (2, T))
    seen = observe(rack, lambda: rack(ids))
    watch = _SoftmaxWatch(rack.eval())
    with torch.no_grad(), using("math"), watch.watching():
        logits = rack(ids)
    assert seen.notes == ()
    assert seen.logit_max == pytest.approx(logits.abs().max().item(), rel=1e-6)
    assert len(seen.attention_entropy) == len(seen.attention_logit_max) == 2
    for name, entropy in seen.attention_entropy.items():
        there = watch.seen[name]
        assert entropy == pytest.approx((there.entropy / there.rows).item(), rel=1e-5)
        assert seen.attention_logit_max[name] == pytest.approx(there.largest.item(), rel=1e-5)
    assert min(seen.attention_entropy.values()) < 0.9


@pytest.mark.parametrize("kind", ["mha", "gqa", "window", "softcap"])
def test_entropy_of_a_rack_by_hand_in_float64(kind):
    model = KINDS.get(kind, {"softcap": 2.0})
    rack, ids = rack_of(**model, use_rope=False).double(), torch.randint(31, (2, T))
    found = {}

    def keep(module, given, _output):
        x = given[0]
        H, K, D = module.n_heads, module.n_kv_heads, module.head_dim
        q, k, _ = (x @ module.qkv.weight.T).split([H * D, K * D, K * D], -1)
        q, k = (each.unflatten(-1, (-1, D)).transpose(1, 2) for each in (q, k))
        scores = q @ k.repeat_interleave(H // K, 1).transpose(-1, -2) / math.sqrt(D)
        if kind == "softcap":
            scores = 2.0 * (scores / 2.0).tanh()
        visible = band(T, 4 if kind == "window" else None)
        masked = scores.masked_fill(~visible, -math.inf)
        found[module] = entropy_of(masked.softmax(-1), visible), masked.max().item()

    handles = [block.attention.register_forward_hook(keep) for block in rack.get_stack(0).blocks]
    with torch.no_grad():
        rack(ids)
    for handle in handles:
        handle.remove()
    seen = observe(rack, lambda: rack(ids))
    for name, module in rack.named_modules():
        if module in found:
            assert seen.attention_entropy[name] == pytest.approx(found[module][0], abs=1e-12)
            assert seen.attention_logit_max[name] == pytest.approx(found[module][1], rel=1e-6)
    assert set(seen.attention_entropy) == {n for n, m in rack.named_modules() if m in found}


def test_queries_are_taken_some_at_a_time(monkeypatch):
    rack, ids = rack_of(**KINDS["gqa"]), torch.randint(31, (2, T))
    whole = observe(rack, lambda: rack(ids))
    monkeypatch.setattr("stackwise.prototype.observation._SCORES_AT_ONCE", 2 * 4 * T * 2)
    parts = observe(rack, lambda: rack(ids))
    assert parts.attention_logit_max == whole.attention_logit_max
    for name, entropy in whole.attention_entropy.items():
        assert parts.attention_entropy[name] == pytest.approx(entropy, rel=1e-6)


def test_padding_and_other_documents_are_not_seen():
    rack = rack_of()
    ids = torch.randint(31, (1, T))
    padded = torch.cat((ids[:, :6], torch.zeros(1, T - 6, dtype=torch.int64)), 1)
    documents = torch.tensor([[0] * 6 + list(range(1, T - 5))])  # all behind the sixth are alone
    alone = observe(rack, lambda: rack(ids[:, :6]))
    packed = observe(rack, lambda: rack(padded, document_ids=documents))
    for name, entropy in alone.attention_entropy.items():
        assert packed.attention_entropy[name] == pytest.approx(entropy, rel=1e-5)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("feature_map", ["favor", "elu"])
def test_kernel_attention_has_the_entropy_of_its_weights(feature_map, causal):
    """The weights are what the module does to values that are unit vectors."""
    mode = "causal" if causal else "bidirectional"
    kernel = {"feature_map": feature_map, **({"n_features": 64} if feature_map == "favor" else {})}
    rack = rack_of(
        attention_type="kernel",
        kernel=kernel,
        attention_mode=mode,
        d_model=32,
        n_heads=2,
        architecture={"n_stacks": 1, "blocks_per_stack": 1},
    )
    ids, weights = torch.randint(31, (2, T)), []
    attention = rack.get_stack(0).get_block(0).attention

    def keep(module, given):
        q, k, v = module.project(*given[:2])
        units = torch.eye(T, v.shape[-1]).expand_as(v)
        q = q[:, :, None]
        if causal:
            weights.append(module._causal(q, k, units, given[1], None)[:, :, 0, :, :T])
        else:
            weights.append(module._bidirectional(q, k, units, given[1])[:, :, 0, :, :T])

    handle = attention.register_forward_pre_hook(keep)
    with torch.no_grad():
        rack(ids)
    handle.remove()
    visible = band(T, causal=causal)
    assert weights[0].sum(-1).allclose(torch.ones(()), atol=1e-5)
    seen = observe(rack, lambda: rack(ids))
    [entropy] = seen.attention_entropy.values()
    assert entropy == pytest.approx(entropy_of(weights[0], visible), abs=1e-4)
    assert entropy < 0.999
    assert seen.attention_logit_max == {}


def test_weights_below_zero_have_no_entropy_and_a_note_says_so():
    rack = rack_of(attention_type="kernel", kernel={"feature_map": "gaussian", "n_features": 32})
    ids = torch.randint(31, (2, T))
    seen = observe(rack, lambda: rack(ids))
    assert seen.attention_entropy == seen.attention_logit_max == {}
    assert "random Fourier features" in seen.notes[0]


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_transformers_model_is_seen_as_its_output_attentions_say(implementation, window):
    transformers = pytest.importorskip("transformers")
    settings = transformers.MistralConfig(
        vocab_size=31,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=window,
        max_position_embeddings=64,
    )
    settings._attn_implementation = implementation
    torch.manual_seed(3)
    model = sharpened(transformers.MistralForCausalLM(settings), 8.0)
    ids = torch.randint(31, (2, T))
    seen = observe(model, lambda: model(ids).logits)
    eager = copy.deepcopy(model).eval()
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = eager(ids, output_attentions=True).attentions
    visible = band(T, window)
    assert list(seen.attention_entropy) == [f"model.layers.{i}.self_attn" for i in range(2)]
    for entropy, weights in zip(seen.attention_entropy.values(), attentions, strict=True):
        assert entropy == pytest.approx(entropy_of(weights, visible), abs=1e-5)
        assert entropy < 0.95


@pytest.mark.parametrize("needed", [False, True])
def test_multihead_attention_is_seen_as_its_own_weights_say(needed):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(31, 16)
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
            self.head = nn.Linear(16, 31)

        def forward(self, ids, needed=needed):
            x = self.embedding(ids)
            mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
            y, weights = self.attention(
                x, x, x, attn_mask=mask, need_weights=needed, average_attn_weights=False
            )
            self.weights = weights
            return self.head(y)

    torch.manual_seed(0)
    model, ids = sharpened(Model(), 3.0), torch.randint(31, (2, T))
    seen = observe(model, lambda: model(ids))
    with torch.no_grad():
        model.eval()(ids, needed=True)
    assert seen.attention_entropy == {
        "attention": pytest.approx(entropy_of(model.weights, band(T)), abs=1e-5)
    }


def test_an_encoder_layer_does_not_take_the_path_that_shows_nothing():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    x = torch.randn(2, T, 16)
    fast = torch.backends.mha.get_fastpath_enabled()
    seen = observe(layer, lambda: layer(x))
    assert list(seen.attention_entropy) == ["self_attn"]
    assert torch.backends.mha.get_fastpath_enabled() == fast


def test_uniform_and_one_hot_attention_are_one_and_zero():
    class Fixed(nn.Module):
        def __init__(self, scores):
            super().__init__()
            self.scores = scores

        def forward(self, x):
            return self.scores.softmax(-1) @ x

    x = torch.randn(3, T, 4)
    flat = Fixed(torch.zeros(3, T, T))
    assert observe(flat, lambda: flat(x)).attention_entropy == {"": pytest.approx(1.0)}
    sharp = Fixed(1000 * torch.eye(T).expand(3, T, T))
    seen = observe(sharp, lambda: sharp(x))
    assert seen.attention_entropy == {"": pytest.approx(0.0, abs=1e-6)}
    assert seen.attention_logit_max == {"": 1000.0}


def test_a_model_without_attention_says_so():
    model = nn.Sequential(nn.Embedding(31, 8), nn.Linear(8, 31))
    ids = torch.randint(31, (2, T))
    seen = observe(model, lambda: model(ids))
    assert seen.attention_entropy == seen.attention_logit_max == {}
    assert seen.notes == ("attention_entropy: no softmax over keys was seen",)
    assert seen.logit_max == pytest.approx(model(ids).abs().max().item())


def test_looking_leaves_no_trace():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.part = nn.Dropout(0.5).eval()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return self.norm(self.part(x)) + torch.rand(())

    model = Noisy().train()
    model.part.eval()
    before = {name: buffer.clone() for name, buffer in model.state_dict().items()}
    state = torch.get_rng_state()
    modes = [module.training for module in model.modules()]
    observe(model, lambda: model(torch.ones(8, 4)))
    assert torch.get_rng_state().equal(state)
    assert [module.training for module in model.modules()] == modes == [True, True, False]
    assert all(buffer.equal(before[name]) for name, buffer in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_lazy_model_is_seen():
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    assert math.isfinite(observe(model, lambda: model(torch.ones(2, 3))).logit_max)


def test_hooks_are_gone_after_an_error():
    rack = rack_of()

    def fails():
        rack(torch.randint(31, (2, T)))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        observe(rack, fails)
    assert rack.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in rack.modules())
