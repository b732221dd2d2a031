"""Coordinate checks: muP is independent of the width, other parametrisations and planted bugs are not."""

import json
import math
from xml.etree import ElementTree as ET

import pytest
import torch
from torch import nn

from stackwise.config import StackWiseConfig
from stackwise.model import create_rack_from_config
from stackwise.prototype import CoordinateCheck, coordinate_check, widened
from stackwise.prototype.widen import as_mup
from stackwise.subject.spec import ModelSpec
from stackwise.training import optimizer as training_optimizer

LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
KINDS = {
    "mha": {"n_kv_heads": None},
    "gqa": {"attention_type": "gqa", "n_kv_heads": 1},
    "mla": {"attention_type": "mla", "n_kv_heads": None, "latent": LATENT, "tie_embeddings": False},
    "kernel": {"attention_type": "kernel", "n_kv_heads": None},
    "post": {"n_kv_heads": None, "norm_position": "post", "qk_norm": "head", "softcap": 20.0},
}


def config_of(**model):
    sizes = {"d_model": 32, "n_heads": 2, "attention_type": "mha", "n_kv_heads": None, "d_ff": 64}
    depth = {"vocab_size": 61, "architecture": {"n_stacks": 1, "blocks_per_stack": 1}}
    return StackWiseConfig.from_dict(
        {"model": {**sizes, **depth, **model}, "training": {"optimizer": {"lr": 1e-3}}}
    )


def check(subject, **options):
    return coordinate_check(subject, **{"widths": (1, 2, 8), "steps": 2, "seeds": 2, **options})


class Attending(nn.Module):
    """muP with a head that grows: table 8 has 1 / D in the place of 1 / sqrt(D)."""

    def __init__(self, factor=1, power=1.0):
        super().__init__()
        width = 16 * factor
        self.tokens, self.norm = nn.Embedding(29, width), nn.RMSNorm(width, elementwise_affine=False)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.head = nn.Linear(width, 29, bias=False)
        self.scale = 4 ** (power - 0.5) * 16**0.5 / width**power
        for p in self.parameters():
            p.rate = 1e-2
        for layer in (self.q, self.k, self.v, self.out):
            nn.init.normal_(layer.weight, std=width**-0.5)
            layer.weight.rate = 1e-2 / factor
        nn.init.normal_(self.tokens.weight)
        nn.init.normal_(self.head.weight, std=1 / width)
        self.head.weight.rate = 1e-2 / factor

    def forward(self, ids):
        x = self.tokens(ids)
        y = self.norm(x)
        scores = self.scale * self.q(y)[:, None] @ self.k(y)[:, None].transpose(-2, -1)
        causal = torch.ones(ids.shape[1], ids.shape[1]).tril().log()
        return self.head(x + self.out(((scores + causal).softmax(-1) @ self.v(y)[:, None])[:, 0]))


def _adam(parameters):
    return torch.optim.Adam([{"params": [p], "lr": p.rate} for p in parameters], eps=1e-12)


@pytest.fixture(scope="module")
def standard():
    return check(config_of(), parametrization="standard")


@pytest.fixture(scope="module")
def mup():
    return check(config_of(), parametrization="mup")


class TestRack:
    @pytest.mark.parametrize("kind", KINDS)
    def test_mup(self, kind):
        found = check(config_of(**KINDS[kind]))
        assert (found.verdict, found.as_expected, found.first) == ("width-independent", True, None)
        assert found.worst.distance < 0.2

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", KINDS)
    def test_mup_up_to_eight_times(self, kind):
        found = coordinate_check(config_of(**KINDS[kind]))
        assert (found.widths, found.steps, found.seeds) == ((1, 2, 4, 8), 4, 3)
        assert found.worst.distance < 0.2

    @pytest.mark.parametrize("initialization", ["normal", "kaiming", "small"])
    def test_standard(self, initialization):
        found = check(config_of(initialization=initialization), parametrization="standard")
        assert (found.verdict, found.as_expected) == ("not width-independent", True)
        assert (found.worst.kind, found.worst.value > 0.45) == ("change", True)
        # What the mup of the same would say of it.
        held = check(lambda f: widened(config_of(initialization=initialization), f))
        assert (held.verdict, held.as_expected, held.slopes) == (found.verdict, False, found.slopes)

    def test_standard_is_normal_in_place_of_mup(self, standard):
        found = check(as_mup(config_of(), 16), parametrization="standard")
        assert found.slopes == standard.slopes

    def test_the_multiplier_of_the_logits_is_in_the_final_norm(self, mup):
        sizes = {slope.module: slope for slope in mup.slopes if slope.step == 0}
        # Its gain is base / width, and what it normalises has the mean square 1: exact but for epsilon.
        assert sizes["final_norm"].value == pytest.approx(-1.0, abs=0.02)
        assert sizes["final_norm"].expected == -1.0
        # Of V logits from a head of N(0, std): a sum over m times as many terms, each 1 / m of the size.
        assert sizes[""].value == pytest.approx(-0.5, abs=0.1)

    def test_the_base_of_a_configuration_stays(self):
        config = as_mup(config_of(), 16)
        family = check(lambda f: widened(config, f))
        assert check(config).slopes == family.slopes

    def test_modules_in_the_order_in_which_they_run(self, mup):
        block = "stacks.0.blocks.0"
        assert list(dict.fromkeys(slope.where for slope in mup.slopes)) == [
            "embedding",
            f"{block}.attention_norm",
            f"{block}.attention.qkv",
            f"{block}.attention.out",
            f"{block}.attention: scores",
            f"{block}.feedforward_norm",
            f"{block}.feedforward.gate",
            f"{block}.feedforward.up",
            f"{block}.feedforward.down",
            block,
            "final_norm",
            "the output",
        ]

    def test_windows_are_seen_too(self):
        found = check(config_of(sliding_window=4), seeds=1)
        assert "stacks.0.blocks.0.attention: scores" in {slope.module for slope in found.slopes}

    def test_masked_tokens(self):
        config = config_of(attention_mode="bidirectional")
        changed = config.to_dict()
        changed["training"]["objective"] |= {"kind": "mask_diffusion", "mask_token_id": 0}
        assert check(StackWiseConfig.from_dict(changed)).as_expected

    def test_seeds_and_the_callers_random_state(self):
        state = torch.get_rng_state()
        one, same, other = (check(config_of(), seeds=1, seed=seed, widths=(1, 2)) for seed in (0, 0, 1))
        assert torch.equal(torch.get_rng_state(), state)
        assert one.slopes == same.slopes != other.slopes
        assert {slope.standard_error for slope in one.slopes} == {None}


class TestPlanted:
    """Bugs that were found in the wild, in a Rack whose clean twin is above."""

    def test_multipliers_that_do_not_reach_the_optimizer(self, monkeypatch):
        monkeypatch.setattr(training_optimizer, "_multipliers", lambda *_: None)
        found = check(config_of())
        assert found.verdict == "not width-independent"
        assert (found.worst.kind, found.worst.value > 0.4) == ("change", True)
        assert found.first.step == 1 and found.first.module.startswith("stacks.0.blocks.0.")

    def test_an_optimizer_of_ones_own_without_multipliers(self):
        def make(factor):
            return create_rack_from_config(as_mup(widened(config_of(), factor), 32))

        plain = check(make, optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3))
        assert (plain.verdict, check(make, learning_rate=1e-3).verdict) == (
            "not width-independent",
            "width-independent",
        )

    @pytest.mark.parametrize("module", ["attention.qkv", "feedforward.up"])
    def test_std_divided_by_the_width_instead_of_its_root(self, module):
        def make(factor):
            rack = create_rack_from_config(as_mup(widened(config_of(), factor), 32))
            with torch.no_grad():
                rack.stacks[0].blocks[0].get_submodule(module).weight.div_(math.sqrt(factor))
            return rack

        found = check(make)
        assert found.verdict == "not width-independent"
        assert (found.first.module, found.first.kind, found.first.step) == (
            f"stacks.0.blocks.0.{module}",
            "size",
            0,
        )
        assert found.first.value == pytest.approx(-0.5, abs=0.05)

    def test_logits_that_have_no_multiplier(self):
        def make(factor):
            rack = create_rack_from_config(as_mup(widened(config_of(tie_embeddings=False), factor), 32))
            nn.init.ones_(rack.final_norm.weight)
            return rack

        found = check(make)
        assert found.worst.where == "the output"
        assert found.worst.value > 0.5  # 1 in the limit: each step of the head adds up over the width

    @pytest.mark.parametrize("power", [1.0, 0.5])
    def test_scores_of_heads_that_grow(self, power):
        # Queries and keys become aligned, and their product goes as D then, which the root does not undo.
        spec = ModelSpec.of(
            lambda: Attending(4, power), at_width=lambda f: Attending(4 * f, power), optimizer=_adam
        )
        found = check(spec, batch_size=1, seq_len=8)
        assert found.as_expected == (power == 1.0)
        if power == 0.5:
            assert found.worst.where == "scores"
            assert found.worst.value == pytest.approx(0.5, abs=0.15)


class TestSubjects:
    def test_a_name(self):
        def narrow_to_wide(factor):
            return widened(config_of(), factor)

        assert check(narrow_to_wide, widths=(1, 2), seeds=1).name == "narrow_to_wide"
        assert check(config_of(), widths=(2, 1), seeds=1).name == "Rack"

    def test_which_seeds_may_be_said(self):
        few = {"steps": 1, "seed": 5}
        counted = coordinate_check(config_of(), (1, 2), seeds=2, **few)
        assert coordinate_check(config_of(), (1, 2), seeds=[5, 6], **few) == counted
        other = coordinate_check(config_of(), (1, 2), seeds=(6,), **few)
        assert (counted.seeds, other.seeds) == (2, 1)
        assert other.slopes != counted.slopes

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"widths": (1,)}, r"widths: got \[1\]; allowed: two or more, each once"),
            ({"widths": (1, 1)}, r"widths: got \[1, 1\]; allowed: two or more, each once"),
            ({"widths": (1, 0)}, "widths: got 0; allowed: an integer >= 1"),
            ({"steps": 0}, "steps: got 0"),
            ({"seeds": 0}, "seeds: got 0"),
            ({"seeds": (1, 1)}, r"seeds: got \(1, 1\)"),
            ({"seed": -1}, "seed: got -1"),
            ({"batch_size": 0}, "batch_size: got 0"),
            ({"seq_len": 0}, "seq_len: got 0"),
            ({"learning_rate": 0.0}, "learning_rate: got 0.0; allowed: a number above 0"),
            ({"parametrization": "mu"}, "parametrization: got 'mu'; allowed: 'mup', 'standard'"),
            ({"optimizer": torch.optim.SGD}, "optimizer: got .*; allowed: None for a configuration"),
        ],
    )
    def test_arguments_that_are_refused(self, options, text):
        with pytest.raises(ValueError, match=text):
            coordinate_check(config_of(), **options)

    def test_what_has_no_base(self):
        config = config_of(attention_type="mqa", n_kv_heads=1)
        with pytest.raises(
            ValueError, match=r"model\.attention_type: got 'mqa'; allowed: with parametrization='mup'"
        ):
            coordinate_check(config)
        assert check(config, parametrization="standard", seeds=1).as_expected

    def test_a_spec_without_widths(self):
        spec = ModelSpec.of(lambda: create_rack_from_config(config_of()))
        with pytest.raises(ValueError, match=r"subject: got 'Rack'; allowed: a ModelSpec with at_width="):
            coordinate_check(spec)
        spec = ModelSpec.of(spec, at_width=lambda f: create_rack_from_config(widened(config_of(), f)))
        with pytest.raises(ValueError, match=r"learning_rate: got 0\.1; allowed: None for a model"):
            coordinate_check(spec, learning_rate=0.1)

    @pytest.mark.parametrize("subject", [3, nn.Linear(2, 2), nn.Linear])
    def test_another_kind(self, subject):
        with pytest.raises(TypeError, match=r"subject: got .*; wanted a StackWiseConfig, a ModelSpec"):
            coordinate_check(subject)

    def test_a_function_of_something_else(self):
        with pytest.raises(TypeError, match="subject: the function gave int; wanted a StackWiseConfig"):
            coordinate_check(lambda factor: factor)

    def test_nothing_but_zeros(self):
        def make(factor):
            rack = create_rack_from_config(widened(config_of(), factor))
            for p in rack.parameters():
                nn.init.zeros_(p)
            return rack.requires_grad_(True)

        with pytest.raises(
            ValueError, match="subject: got 'make'; allowed: a model whose modules give more than 0"
        ):
            check(make, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.0))


class TestResult:
    def test_is_plain_data(self, standard):
        assert isinstance(standard, CoordinateCheck)
        data = json.loads(json.dumps(standard.to_dict(), allow_nan=False))
        assert data["limits"] == {"width-independent": 0.25, "not width-independent": 0.35}
        assert (data["verdict"], data["as_expected"]) == ("not width-independent", True)
        assert data["widths"] == [1, 2, 8]
        assert data["worst"]["slope"] == standard.worst.value
        assert len(data["slopes"]) == len(standard.slopes) == 12 * 5

    def test_as_text(self, mup, standard):
        first, second, *rows = str(mup).splitlines()
        assert first == "Rack: width-independent, as expected of mup; 1, 2, 8 times as wide, 2 seeds"
        assert "worst: " in second and "independent within 0.25, not beyond 0.35" in second
        assert len(rows) == 13 and "!" not in str(mup)
        assert "  first: " in str(standard) and " !" in str(standard)

    def test_what_is_not_finite(self):
        # Weights of 3e38 are finite, what they make of anything is not.
        def make(factor):
            rack = create_rack_from_config(widened(config_of(), factor))
            nn.init.constant_(rack.stacks[0].blocks[0].feedforward.down.weight, 3e38)
            return rack

        found = check(make, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.0), seeds=1)
        assert found.verdict == "not finite" and found.worst.value == math.inf
        assert not found.as_expected and " +inf !" in str(found)
        data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
        assert data["worst"]["slope"] is None

    def test_non_finite_at_all_widths_is_not_as_expected_of_standard(self):
        found = check(config_of(), parametrization="standard", learning_rate=1e38, seeds=1)
        assert (found.verdict, found.as_expected) == ("not finite", False)
        assert str(found).startswith("Rack: not finite, not as expected of standard; ")

    def test_plot(self, standard, tmp_path):
        pytest.importorskip("matplotlib")
        path = standard.plot(tmp_path / "new" / "check.svg")
        text = path.read_text()
        assert standard.plot(tmp_path / "again.svg").read_text() == text
        root = ET.fromstring(text)
        words = {"".join(each.itertext()).strip() for each in root.iter("{http://www.w3.org/2000/svg}text")}
        assert {"size at the start", "change after 1 step", "change after 2 steps", "the output"} <= words
        assert "Rack, standard: not width-independent" in words
        panels = [each for each in root.iter() if (each.get("id") or "").startswith("axes_")]
        assert len(panels) == 3

    def test_plot_of_another_kind(self, standard, tmp_path):
        with pytest.raises(ValueError, match=r"path: got .*check.png'; allowed: a name ending in .svg"):
            standard.plot(tmp_path / "check.png")

    def test_plot_without_matplotlib(self, standard, monkeypatch, tmp_path):
        monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
        with pytest.raises(ImportError, match=r"a plot needs matplotlib: pip install 'stackwise\[report\]'"):
            standard.plot(tmp_path / "check.svg")
