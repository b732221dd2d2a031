"""Spaces: whatever is drawn is valid and within its budget; what cannot hold is refused at once."""

import random

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from stackwise.config import ConfigError, StackWiseConfig
from stackwise.model import create_rack_from_config
from stackwise.prototype.search import Space, parameter_budget

BASE = {
    "model": {
        "vocab_size": 64,
        "d_model": 32,
        "d_ff": 64,
        "n_heads": 4,
        "n_kv_heads": 2,
        "architecture": {"n_stacks": 2, "blocks_per_stack": 2},
    }
}
MLA = {"base": {"model": {"attention_type": "mla", "n_kv_heads": None, "latent": {"kv_lora_rank": 8}}}}
KERNEL = {"base": {"model": {"attention_type": "kernel", "kernel": {"feature_map": "gaussian"}}}}
CHOICES = {
    "model.n_heads": st.sampled_from([[2, 4, 8], {"low": 1, "high": 7}, [6]]),
    "model.head_dim": st.sampled_from([[8, 16], {"low": 4, "high": 12, "step": 2}, {"low": 4, "high": 12}]),
    "n_layers": st.sampled_from([[1, 2, 5], {"low": 1, "high": 9}]),
    "gqa_ratio": st.sampled_from([[1, 2, 4], {"low": 1, "high": 8}]),
    "d_ff_ratio": st.sampled_from([[1, 2.5], {"low": 0.5, "high": 4.0}]),
    "model.attention_type": st.sampled_from(
        [["mha", "gqa"], ["gqa", "mqa", "mla"], ["kernel", "gqa", "mha", "mla", "mqa"]]
    ),
    "model.qk_norm": st.just([None, "head", "width"]),
    "model.softcap": st.just([None, 20.0]),
    "model.qkv_bias": st.just([False, True]),
    "model.sliding_window": st.just([None, 8, [8, None]]),
    "model.kernel.n_features": st.just([16, 32]),
    "model.latent.kv_lora_rank": st.just({"low": 4, "high": 16}),
    "model.tie_embeddings": st.just([True, False]),
    "model.norm": st.just(["rmsnorm", "layernorm"]),
    "training.optimizer.kind": st.just(["adamw", "muon"]),
    "training.optimizer.lr": st.just({"low": 1e-4, "high": 1e-1, "log": True}),
    "training.optimizer.momentum": st.just([0.8, 0.9]),
    "training.schedule.kind": st.just(["constant", "cosine", "wsd"]),
    "training.schedule.min_lr": st.just([0.0, 1e-5]),
    "training.schedule.decay_fraction": st.just([0.1, 0.5]),
    "training.objective.z_loss": st.just([0.0, 1e-4]),
}


@st.composite
def spaces(draw):
    """What `Space.from_dict` is given: some keys, and a budget or none."""
    keys = draw(st.lists(st.sampled_from(list(CHOICES)), min_size=1, max_size=7, unique=True))
    space = {key: draw(CHOICES[key]) for key in keys}
    plain = {"base": BASE, "space": space}
    match draw(st.sampled_from(["none", "bounds", "target"])):
        case "bounds":
            low = draw(st.integers(5_000, 60_000))
            plain |= {"min_parameters": low, "max_parameters": low * draw(st.integers(2, 4))}
        case "target":
            plain |= {"parameters": draw(st.integers(20_000, 200_000)), "tolerance": 0.05}
            plain["solve"] = draw(st.sampled_from(["n_layers", "model.n_heads", "model.d_ff"]))
    return plain


def bounds_of(plain):
    if "parameters" in plain:
        return plain["parameters"] * 0.95, plain["parameters"] * 1.05
    return plain.get("min_parameters", 0), plain.get("max_parameters", float("inf"))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(spaces(), st.integers(0, 2**32))
def test_every_draw_is_valid_and_within_the_budget(plain, seed):
    problems, space = [], None
    try:
        space = Space.from_dict(plain)
    except ConfigError as error:
        problems = error.problems
    # No size is within, a key is both searched and solved for, it has no meaning in the base, or some of its
    # head sizes are odd.
    told = ("max_parameters", "min_parameters", "parameters", "space.gqa_ratio", "space.n_layers")
    told += ("space.d_ff_ratio", "space.model.n_heads")
    odd = "even head size; it is 5"
    assert all(problem.startswith(told) or odd in problem for problem in problems), problems
    assume(space is not None)
    low, high = bounds_of(plain)
    source = random.Random(seed)
    for number in range(6):
        config = space.config(space.sample(source))
        config.validate()
        model = config.model
        if "model.head_dim" in plain["space"] or "model.n_heads" in plain["space"]:
            assert model.d_model % model.n_heads == 0
        if model.n_kv_heads is not None:
            assert model.n_heads % model.n_kv_heads == 0
        if number < 2:
            with torch.device("meta"):
                count = create_rack_from_config(config).get_parameter_count()
            assert low <= count <= high


def test_the_property_is_not_empty():
    """A wide space with a narrow budget is made, and it keeps to it in hundreds of draws."""
    plain = {
        "base": BASE,
        "space": {
            "model.n_heads": {"low": 1, "high": 12},
            "model.head_dim": [8, 16, 32],
            "n_layers": {"low": 1, "high": 12},
            "gqa_ratio": [1, 2, 3],
            "model.attention_type": ["mha", "gqa", "mqa", "mla", "kernel"],
            "d_ff_ratio": {"low": 1.0, "high": 4.0},
        },
        "min_parameters": 100_000,
        "max_parameters": 120_000,
    }
    space, source, counts, shapes = Space.from_dict(plain), random.Random(0), set(), set()
    for number in range(100):
        config = space.config(space.sample(source))
        shapes.add((config.model.attention_type, config.model.d_model))
        if number % 10 == 0:
            with torch.device("meta"):
                counts.add(create_rack_from_config(config).get_parameter_count())
    assert min(counts) >= 100_000 and max(counts) <= 120_000
    assert len(shapes) > 20


class TestShape:
    def config(self, values, base=BASE, **budget):
        space = {key: [value] for key, value in values.items()}
        return Space.from_dict({"base": base, "space": space, **budget}).config(values).model

    def test_width_is_of_heads(self):
        model = self.config({"model.n_heads": 6, "model.head_dim": 16})
        assert (model.d_model, model.n_heads, model.head_dim) == (96, 6, None)
        assert model.d_ff == 192  # twice the width, as in the base
        assert self.config({"model.n_heads": 6}).d_model == 48
        assert self.config({"model.head_dim": 16}).d_model == 64

    def test_heads_of_an_explicit_size_are_kept(self):
        base = {"model": BASE["model"] | {"head_dim": 16}}
        assert self.config({"model.n_heads": 2}, base).d_model == 32

    @pytest.mark.parametrize(
        "n_heads, ratio, n_kv_heads", [(8, 4, 2), (6, 4, 2), (7, 4, 7), (4, 8, 1), (5, 5, 1), (8, 1, 8)]
    )
    def test_ratio_is_a_divisor(self, n_heads, ratio, n_kv_heads):
        assert self.config({"model.n_heads": n_heads, "gqa_ratio": ratio}).n_kv_heads == n_kv_heads

    def test_ratio_of_the_base_is_kept(self):
        assert self.config({"model.n_heads": 8}).n_kv_heads == 4

    @pytest.mark.parametrize("depth, stacks", [(4, 2), (5, 1), (6, 2), (1, 1)])
    def test_depth_is_over_stacks(self, depth, stacks):
        shape = self.config({"n_layers": depth}).architecture
        assert (shape.n_stacks, shape.n_stacks * shape.blocks_per_stack) == (stacks, depth)

    def test_feed_forward_ratio(self):
        assert self.config({"d_ff_ratio": 2.67}).d_ff == 88  # 85.4, and the nearest multiple of 8
        assert self.config({"d_ff_ratio": 0.01}).d_ff == 8

    def test_latent_has_the_proportions_of_deepseek(self):
        model = self.config({"model.attention_type": "mla", "model.n_heads": 8, "model.head_dim": 16})
        assert model.latent.to_dict() == {
            "kv_lora_rank": 64,
            "q_lora_rank": None,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
        }

    def test_what_has_no_meaning_is_put_away(self):
        base = {
            "model": BASE["model"] | {"softcap": 5.0, "sliding_window": 8, "qk_norm": "head"},
            "training": {"optimizer": {"kind": "muon", "momentum": 0.5}},
        }
        model = self.config({"model.attention_type": "kernel", "model.kernel.n_features": 8}, base)
        assert (model.softcap, model.sliding_window, model.kernel.n_features) == (None, None, 8)
        model = self.config({"model.attention_type": "mla", "model.kernel.n_features": 8}, base)
        assert (model.qk_norm, model.kernel, model.sliding_window) == (None, None, 8)
        kernel = {"attention_type": "kernel", "kernel": {"feature_map": "gaussian", "bandwidth": 3.0}}
        kernels = {"model": BASE["model"] | kernel}
        assert self.config({"model.kernel.feature_map": "laplacian"}, kernels).kernel.bandwidth == 3.0
        assert self.config({"model.kernel.feature_map": "favor"}, kernels).kernel.bandwidth == 1.0
        space = Space.from_dict({"base": base, "space": {"training.optimizer.kind": ["adamw", "muon"]}})
        assert space.config({"training.optimizer.kind": "adamw"}).training.optimizer.momentum == 0.95
        assert space.config({"training.optimizer.kind": "muon"}).training.optimizer.momentum == 0.5


class TestBudget:
    def test_a_draw_outside_is_moved_to_the_nearest(self):
        space = Space.from_dict(
            {"base": BASE, "space": {"n_layers": {"low": 1, "high": 40}}, "max_parameters": 100_000}
        )
        with torch.device("meta"):
            whole = [
                create_rack_from_config(
                    StackWiseConfig.from_dict(
                        {
                            "model": BASE["model"]
                            | {"architecture": {"n_stacks": 1, "blocks_per_stack": depth}}
                        }
                    )
                ).get_parameter_count()
                for depth in (1, 2)
            ]
        most = 1 + (100_000 - whole[0]) // (whole[1] - whole[0])
        assert space.settled({"n_layers": 40}) == {"n_layers": most}
        assert space.settled({"n_layers": 3}) == {"n_layers": 3}

    @pytest.mark.parametrize("solve", ["n_layers", "model.n_heads", "model.d_ff"])
    def test_all_have_as_many(self, solve):
        others = {"n_layers": [2, 3, 6], "model.n_heads": [2, 4, 6], "model.head_dim": [8, 16]}
        space = Space.from_dict(
            {
                "base": BASE,
                "space": {key: value for key, value in others.items() if key != solve},
                "parameters": 150_000,
                "tolerance": 0.02,
                "solve": solve,
            }
        )
        for values in space.points():
            with torch.device("meta"):
                count = create_rack_from_config(space.config(values)).get_parameter_count()
            assert abs(count - 150_000) <= 3_000
            assert solve in space.settled(values)

    def test_points_are_all_draws(self):
        space = Space.from_dict(
            {"base": BASE, "space": {"n_layers": {"low": 1, "high": 3}, "gqa_ratio": [1, 2]}}
        )
        assert space.size == 6 == len(list(space.points()))
        assert Space.from_dict({"space": {"d_ff_ratio": {"low": 1.0, "high": 2.0}}}).size is None


@pytest.mark.parametrize(
    "plain, said",
    [
        ([], "a mapping of base, space"),
        ({"space": {}}, "space: got {}"),
        ({"spaec": {}}, "spaec: unknown key; allowed: base, space, min_parameters"),
        ({"base": {"model": {"d_modl": 3}}, "space": {"n_layers": [1]}}, "base.model.d_modl: unknown key"),
        ({"space": {"n_layers": 3}}, "space.n_layers: got 3; allowed: a list of choices"),
        ({"space": {"n_heads": [2]}}, "space.n_heads: unknown key; did you mean 'model.n_heads'?"),
        ({"space": {"model.d_model": [64]}}, "space.model.d_model: it is model.head_dim * model.n_heads"),
        ({"space": {"model.n_kv_heads": [2]}}, "space.model.n_kv_heads: it follows from gqa_ratio"),
        ({"space": {"n_layers": [0]}}, "space.n_layers: got 0; allowed: integers >= 1"),
        ({"space": {"n_layers": {"low": 1.0, "high": 2.0}}}, "space.n_layers: got 1.0; allowed: integers"),
        ({"space": {"d_ff_ratio": [0]}}, "space.d_ff_ratio: got 0; allowed: numbers above 0"),
        ({"space": {"model.head_dim": [15, 16]}}, "space.model.head_dim: got 15"),
        (
            {"space": {"model.head_dim": {"low": 4, "high": 64}}},
            "space.model.head_dim: got 5; model.use_rope: got True (bool); needs an even head size; it is 5",
        ),
        (
            {"space": {"model.latent.qk_rope_head_dim": {"low": 4, "high": 16}}} | MLA,
            "space.model.latent.qk_rope_head_dim: got 5; model.latent.qk_rope_head_dim: got 5 (int)",
        ),
        (
            {"space": {"model.kernel.n_features": {"low": 16, "high": 64, "log": True}}} | KERNEL,
            "space.model.kernel.n_features: got 17; model.kernel.n_features: ",
        ),
        (
            {
                "space": {
                    "model.head_dim": [16, 15],
                    "model.use_rope": [False, True],
                    "model.attention_type": ["mla", "gqa"],
                    "gqa_ratio": [1, 2],
                }
            },
            "space.model.head_dim: got 15 beside model.use_rope=True and model.attention_type='gqa'; ",
        ),
        ({"space": {"model.dropout": {"low": 0.0, "high": 1.0}}}, "space.model.dropout: got 1.0"),
        ({"space": {"model.norm": ["rmsnorm", "batchnorm"]}}, "space.model.norm: got 'batchnorm'"),
        (
            {
                "space": {
                    "training.optimizer.lr": {"low": 1e-4, "high": 1e-2, "log": True},
                    "training.schedule.min_lr": [0.0, 1e-3],
                }
            },
            "space.training.optimizer.lr: got 0.0001 beside training.schedule.min_lr=0.001",
        ),
        (
            {
                "base": {"model": {"attention_type": "mha", "n_kv_heads": None}},
                "space": {"gqa_ratio": [2]},
            },
            "space.gqa_ratio: is for attention_type 'gqa' or 'kernel'",
        ),
        (
            {
                "base": {"model": {"attention_type": "mha", "n_kv_heads": None}},
                "space": {"model.attention_type": ["mha", "gqa"]},
            },
            "space.gqa_ratio: got nothing",
        ),
        (
            {"space": {"n_layers": [1], "model.architecture.blocks_per_stack": [1]}},
            "space.n_layers: is given beside model.architecture.blocks_per_stack",
        ),
        ({"space": {"n_layers": [1]}, "max_parameters": 1000}, "max_parameters: got 1000; allowed: "),
        ({"space": {"n_layers": [1]}, "min_parameters": 10**9}, "min_parameters: got 1000000000; allowed: "),
        (
            {"space": {"n_layers": [1]}, "max_parameters": 0},
            "max_parameters: got 0; allowed: an integer >= 1",
        ),
        (
            {"space": {"n_layers": [1]}, "tolerance": 0.1},
            "tolerance: got 0.1; allowed: none without parameters",
        ),
        ({"space": {"n_layers": [1]}, "parameters": 10**6}, "space.n_layers: is what is solved for"),
        (
            {"space": {"model.n_heads": [8]}, "parameters": 10**6, "solve": "width"},
            "solve: got 'width'; allowed: 'n_layers', 'model.n_heads', 'model.d_ff'",
        ),
        (
            {"space": {"model.n_heads": [8]}, "parameters": 10**6, "max_parameters": 1},
            "max_parameters: got 1; allowed: none beside parameters",
        ),
        (
            {"space": {"model.n_heads": [64]}, "parameters": 10**4},
            "parameters: got 10000; allowed: a number that n_layers comes within",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_hold_is_refused_by_its_key(plain, said):
    with pytest.raises(ConfigError) as caught:
        Space.from_dict(plain)
    assert any(problem.startswith(said) or said in problem for problem in caught.value.problems), caught.value


class TestFile:
    TEXT = "base: {model: {d_ff: 128}}\nspace: {n_layers: [1, 2], training.optimizer.lr: [1e-3]}\n"

    def test_is_read(self, tmp_path):
        (tmp_path / "space.yaml").write_text(self.TEXT)
        space = Space.of(tmp_path / "space.yaml")
        assert space.base.model.d_ff == 128
        assert list(space.dimensions) == ["n_layers", "training.optimizer.lr"]
        assert Space.of(space) is space
        assert Space.from_dict(space.to_dict()).dimensions == space.dimensions

    def test_base_of_another_file(self, tmp_path):
        (tmp_path / "base.yaml").write_text("model: {d_ff: 128}\n")
        (tmp_path / "space.yaml").write_text("base: base.yaml\nspace: {n_layers: [1]}\n")
        assert Space.from_yaml(tmp_path / "space.yaml").base.model.d_ff == 128

    @pytest.mark.parametrize("text", ["space: [", "space: {n_layers: [1]}\nspace: 1", "", "- 1"])
    def test_what_is_none_is_refused_with_the_file(self, tmp_path, text):
        (tmp_path / "space.yaml").write_text(text)
        with pytest.raises(ConfigError, match=r"space\.yaml: "):
            Space.from_yaml(tmp_path / "space.yaml")

    def test_budgets_are_described(self):
        for budget in (
            {"parameters": 150_000, "tolerance": 0.1, "solve": "model.d_ff"},
            {"parameters": 123_457, "tolerance": 0.02, "solve": "model.d_ff"},
            {"max_parameters": 10**6},
        ):
            space = Space.from_dict({"base": BASE, "space": {"n_layers": [2, 4]}, **budget})
            assert Space.from_dict(space.to_dict()).budget == space.budget
            assert Space.from_dict(space.to_dict()).to_dict() == space.to_dict()


def test_sizes_within_a_budget_are_found_without_going_through_all(monkeypatch):
    looks, count = [], parameter_budget.count_of
    monkeypatch.setattr(parameter_budget, "count_of", lambda model: looks.append(model) or count(model))
    space = {
        "model.n_heads": {"low": 1, "high": 32},
        "model.head_dim": [16, 32, 64],
        "n_layers": {"low": 1, "high": 48},
        "model.attention_type": ["mha", "mqa"],
    }
    Space.from_dict({"space": space, "min_parameters": 3 * 10**8, "max_parameters": 4 * 10**8})
    assert len(looks) < 200  # of 4608 for each of the two kinds


def test_values_of_other_keys_are_refused():
    space = Space.from_dict({"base": BASE, "space": {"n_layers": [1, 2]}})
    with pytest.raises(ValueError, match=r"values: got the keys \['depth'\]; allowed: \['n_layers'\]"):
        space.config({"depth": 1})


def test_all_points_are_within_their_ranges():
    space = Space.from_dict({"space": {"model.dropout": {"low": 0.1, "high": 0.7, "step": 0.1}}})
    points = [point["model.dropout"] for point in space.points()]
    assert len(points) == 7 and points == sorted(points)
    assert (points[0], points[-1]) == (0.1, 0.7)
