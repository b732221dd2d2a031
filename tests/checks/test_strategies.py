"""Strategies: what is drawn is valid, all of it can be drawn, and it shrinks to the smallest."""

import subprocess
import sys
import textwrap
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from stackwise.checks import strategies
from stackwise.config import BlockConfig, ConfigError, ModelConfig, StackWiseConfig
from stackwise.model import create_rack_from_config
from stackwise.stability import GradientExplosion, NanInjection, stability_run
from stackwise.subject.spec import ModelSpec

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
FEW = settings(QUICK, max_examples=15)


def drawn(strategy, n=200):
    """Many different examples."""
    found = []

    @settings(QUICK, max_examples=n, database=None, derandomize=True, phases=[Phase.generate])
    @given(strategy)
    def collect(example):
        found.append(example)

    collect()
    return found


def smallest(strategy, condition=lambda _: True):
    quiet = settings(QUICK, database=None, derandomize=True, max_examples=400)
    return find(strategy, condition, settings=quiet)


class TestBatches:
    @QUICK
    @given(strategies.batches(vocab_size=11, max_batch_size=3, max_seq_len=9))
    def test_are_valid(self, batch):
        ids, keep, labels = batch["input_ids"], batch["attention_mask"], batch["labels"]
        B, T = ids.shape
        assert 1 <= B <= 3 and 2 <= T <= 9
        assert {x.dtype for x in batch.values()} == {torch.int64}
        assert {x.shape for x in batch.values()} == {ids.shape}
        assert ids.min() >= 0 and ids.max() < 11
        assert set(keep.flatten().tolist()) <= {0, 1} and keep.sum(dim=1).min() >= 1
        # Padding is at one end of each row, the same in all.
        ends = [keep[:, 1:] <= keep[:, :-1], keep[:, 1:] >= keep[:, :-1]]
        assert ends[0].all() or ends[1].all()
        assert ((labels == ids) | (labels == -100)).all()
        assert (labels[keep == 0] == -100).all()
        # Of the real tokens of a row, those that are ignored are one run.
        for row, real in zip(labels, keep.bool(), strict=True):
            silent = (row[real] == -100).long()
            assert (silent[1:] - silent[:-1] == 1).sum() + silent[:1].sum() <= 1

    def test_everything_occurs(self):
        found = drawn(strategies.batches(vocab_size=5, max_seq_len=6))
        sides = Counter()
        for batch in found:
            keep, labels = batch["attention_mask"], batch["labels"]
            sides["right"] += int((keep[:, -1] == 0).any())
            sides["left"] += int((keep[:, 0] == 0).any())
            sides["none"] += int(keep.all())
            sides["ragged"] += int(keep.sum(dim=1).unique().numel() > 1)
            sides["prompt"] += int(((labels == -100) & (keep == 1))[:, 0].any())
            sides["nothing to predict"] += int((labels == -100).all())
        assert min(sides[name] for name in sides) >= 1
        assert len(sides) == 6

    def test_shrink_to_the_smallest(self):
        batch = smallest(strategies.batches(vocab_size=7))
        assert batch["input_ids"].tolist() == [[0, 0]]
        assert batch["attention_mask"].tolist() == [[1, 1]]
        assert batch["labels"].tolist() == [[0, 0]]

    @pytest.mark.slow
    def test_shrink_to_the_smallest_that_shows_it(self):
        batch = smallest(
            strategies.batches(vocab_size=7, max_batch_size=2, max_seq_len=5),
            lambda b: (b["attention_mask"] == 0).any() and b["input_ids"].any(),
        )
        assert batch["input_ids"].shape == (1, 2)
        assert sorted(batch["input_ids"].flatten().tolist()) == [0, 1]
        assert batch["attention_mask"].sum() == 1

    @QUICK
    @given(strategies.batches(vocab_size=5, sides=()))
    def test_without_padding(self, batch):
        assert batch["attention_mask"].all()

    @QUICK
    @given(strategies.batches(vocab_size=5, packed=True))
    def test_packed(self, batch):
        documents = batch["document_ids"]
        assert batch["attention_mask"].all()
        assert (documents[:, 0] == 0).all()
        steps = documents[:, 1:] - documents[:, :-1]
        assert ((steps == 0) | (steps == 1)).all()

    @QUICK
    @given(strategies.token_ids(3, max_batch_size=1, max_seq_len=2))
    def test_ids_alone(self, ids):
        assert ids.shape[0] == 1 and ids.shape[1] <= 2 and ids.max() < 3

    @pytest.mark.parametrize(
        "arguments, key",
        [
            ({"vocab_size": 0}, "vocab_size"),
            ({"vocab_size": 4, "max_seq_len": 1, "min_seq_len": 2}, "max_seq_len"),
            ({"vocab_size": 4, "max_batch_size": 0}, "max_batch_size"),
        ],
    )
    def test_sizes_that_cannot_be(self, arguments, key):
        with pytest.raises(ValueError, match=f"{key}: got"):
            strategies.token_ids(**arguments)

    def test_side_that_is_none(self):
        with pytest.raises(ValueError, match="sides: got 'middle'"):
            smallest(strategies.padding_masks(1, 2, sides=("middle",)))

    def test_rows_of_padding_alone_where_they_are_allowed(self):
        masks = drawn(strategies.padding_masks(2, 3, min_real=0))
        assert any((~mask).all(dim=1).any() for mask in masks)
        assert not any((~mask).all(dim=1).any() for mask in drawn(strategies.padding_masks(2, 3)))


class TestAttentionMasks:
    @QUICK
    @given(st.data())
    def test_are_valid(self, data):
        seq_len = data.draw(st.integers(1, 6))
        mask = data.draw(strategies.attention_masks(seq_len, causal=True))
        assert mask.dtype == torch.bool and mask.shape == (seq_len, seq_len)
        assert mask.diagonal().all()
        assert not mask.triu(1).any()

    def test_everything_occurs(self):
        masks = drawn(strategies.attention_masks(4))
        lower = torch.ones(4, 4).tril().bool()
        assert any(mask.all() for mask in masks)
        assert any(mask.equal(lower) for mask in masks)
        assert any(
            mask.equal(lower & lower.T.logical_not().logical_or(torch.eye(4).bool())) for mask in masks
        )
        assert len({tuple(mask.flatten().tolist()) for mask in masks}) > 30

    def test_empty_rows_only_where_they_are_allowed(self):
        masks = drawn(strategies.attention_masks(3, min_visible=0))
        assert any((~mask).all(dim=1).any() for mask in masks)
        assert all(mask.any(dim=1).all() for mask in drawn(strategies.attention_masks(3)))

    def test_shrink_to_the_whole(self):
        assert smallest(strategies.attention_masks(3)).all()


class TestFaults:
    @QUICK
    @given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), strategies.faults(n))))
    def test_are_within_the_run(self, drawn_fault):
        steps, fault = drawn_fault
        assert fault.steps.start >= 0 and fault.steps.stop <= steps
        assert len(fault.steps) <= 3

    def test_everything_occurs(self):
        found = drawn(strategies.faults(6))
        assert {type(fault) for fault in found} == {NanInjection, GradientExplosion}
        nans = [fault for fault in found if isinstance(fault, NanInjection)]
        assert {(f.target, f.kind) for f in nans} == {
            (target, kind) for target in ("loss", "activation", "gradient") for kind in ("nan", "inf")
        }
        assert {fault.duration for fault in found} == {1, 2, 3}

    def test_shrink_to_the_first_step(self):
        assert smallest(strategies.faults(9)) == GradientExplosion(step=0)
        nan = smallest(strategies.faults(9), lambda fault: isinstance(fault, NanInjection))
        assert nan == NanInjection(step=0, target="loss")

    @settings(FEW, max_examples=6)
    @given(strategies.faults(3, targets=("loss", "activation", "gradient:*weight")))
    def test_can_be_run(self, subjects, fault):
        # The last step is sound, so that a run can recover.
        if isinstance(fault, NanInjection):
            run = stability_run(ModelSpec.of(subjects.tiny), steps=4, batch_size=2, seq_len=4, faults=[fault])
            assert run.verdict == "caught"
            assert run.alarm_steps == list(fault.steps)


class TestConfigurations:
    @QUICK
    @given(strategies.block_configs())
    def test_blocks_are_valid(self, block):
        assert isinstance(block, BlockConfig)
        assert BlockConfig.from_dict(block.to_dict()) == block

    @FEW
    @given(strategies.model_configs(max_layers=3))
    def test_models_can_be_built_and_run(self, config):
        blocks = config.blocks()
        assert 1 <= sum(map(len, blocks)) <= 3
        rack = create_rack_from_config(StackWiseConfig(model=config)).eval()
        with torch.no_grad():
            logits = rack(torch.randint(config.vocab_size, (2, 5)))
        assert logits.shape == (2, 5, config.vocab_size)
        assert logits.isfinite().all()

    def test_everything_occurs(self):
        found = drawn(strategies.model_configs(), 400)
        seen = {key: {str(getattr(config, key)) for config in found} for key in ModelConfig.model_fields}
        assert seen["attention_type"] == {"mha", "gqa", "mqa", "mla", "kernel"}
        assert seen["initialization"] == {"normal", "kaiming", "xavier", "small", "zero_out", "mup"}
        for key, least in {
            "norm": 2,
            "norm_position": 2,
            "use_rope": 2,
            "tie_embeddings": 2,
            "attention_mode": 2,
            "qkv_bias": 2,
            "freeze_up_proj": 2,
            "qk_norm": 3,
            "dropout": 3,
            "sliding_window": 5,
            "rope_scaling": 4,
            "n_heads": 3,
            "softcap": 3,
            "head_dim": 4,
            "latent": 9,
            "kernel": 9,
        }.items():
            assert len(seen[key]) >= least, key

    @pytest.mark.slow
    def test_shrink_to_one_plain_block(self):
        config = smallest(strategies.model_configs())
        assert (config.architecture.n_stacks, config.architecture.blocks_per_stack) == (1, 1)
        assert (config.attention_type, config.n_heads, config.use_rope) == ("mha", 1, False)
        assert (config.d_model, config.d_ff, config.dropout, config.sliding_window) == (1, 1, 0.0, None)
        assert config.vocab_size == 2

    @pytest.mark.parametrize("kind", ["mha", "gqa", "mqa", "mla", "kernel"])
    def test_what_is_fixed_stays(self, kind):
        for config in drawn(
            strategies.block_configs(attention_type=kind, n_heads=4, d_model=32, dropout=0.0), 30
        ):
            assert (config.attention_type, config.n_heads, config.d_model) == (kind, 4, 32)
            assert config.dropout == 0.0

    def test_a_strategy_may_be_given(self):
        found = drawn(strategies.model_configs(n_heads=st.sampled_from((3, 6)), vocab_size=100), 40)
        assert {config.n_heads for config in found} == {3, 6}
        assert {config.vocab_size for config in found} == {100}

    def test_heads_that_share_keys(self):
        for config in drawn(strategies.block_configs(n_heads=4, n_kv_heads=2), 30):
            assert config.n_kv_heads == 2

    def test_what_no_configuration_has_is_refused_by_name(self):
        with pytest.raises(ConfigError, match="n_head"):
            smallest(strategies.block_configs(n_head=4))


PROFILES = """
    import os
    from hypothesis import settings
    {before}
    from stackwise.checks import strategies
    for chosen in (settings.get_current_profile_name(), *{chosen!r}):
        for device in ("cuda", "cpu"):
            settings.load_profile(chosen)
            loaded = strategies.load_profile(device)
            active = settings.get_current_profile_name()
            assert loaded == active
            print(active, settings().deadline, settings().max_examples)
"""


class TestProfiles:
    """Each in a process of its own: profiles are global. What is said is of a GPU, and then of a CPU."""

    def run(self, before="pass", chosen=(), **environment):
        code = textwrap.dedent(PROFILES).format(before=before, chosen=chosen)
        clean = {"PATH": "", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error", **environment}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=clean)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    def test_without_a_choice_there_is_no_deadline(self):
        assert self.run() == ["stackwise-gpu None 25", "stackwise-cpu None 100"]

    @pytest.mark.slow
    def test_on_ci(self):
        assert self.run(CI="1") == ["stackwise-gpu None 25", "stackwise-cpu None 100"]

    @pytest.mark.slow
    def test_own_profiles_stay(self):
        """Also one of the same name."""
        own = "; ".join(
            f"settings.register_profile({name!r}, deadline={ms}, max_examples=3)"
            for name, ms in [("stackwise-cpu", 77), ("mine", 88)]
        )
        assert self.run(own, ("mine",)) == [
            "stackwise-gpu None 25",
            "stackwise-cpu 0:00:00.077000 3",
            *["mine 0:00:00.088000 3"] * 2,
        ]

    @pytest.mark.slow
    def test_choice_in_the_environment_stays(self):
        assert [line.split()[0] for line in self.run(HYPOTHESIS_PROFILE="default")] == ["default"] * 2

    @pytest.mark.parametrize(
        "options, name",
        [
            pytest.param((), "stackwise-cpu", marks=pytest.mark.slow),
            (("--hypothesis-profile=dev",), "dev"),
        ],
    )
    def test_choice_on_the_command_line_stays(self, pytester, options, name):
        pytester.makeconftest(
            """
            from hypothesis import settings
            from stackwise.checks import strategies
            settings.register_profile("dev", max_examples=2)
            strategies.load_profile()
            """
        )
        pytester.makepyfile(
            f"""
            from hypothesis import settings
            from stackwise.checks import strategies
            strategies.load_profile()
            def test_it(): assert settings.get_current_profile_name() == {name!r}
            """
        )
        pytester.runpytest_subprocess("-p", "no:cacheprovider", *options).assert_outcomes(passed=1)

    def test_device_that_is_none(self):
        with pytest.raises(ValueError, match="device: got 'tpu'"):
            strategies.load_profile("tpu")


WITHOUT = """
import sys
sys.modules["hypothesis"] = None  # importing it raises ImportError
import stackwise.checks
stackwise.checks.known_checks()
print("checks are there")
import stackwise.checks.strategies
"""


def test_without_hypothesis_the_extra_is_named_and_checks_are_there():
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    assert done.stdout == "checks are there\n"
    assert done.returncode == 1
    assert "ImportError: stackwise.checks.strategies needs Hypothesis: pip install 'stackwise[property]'" in (
        done.stderr
    )


def test_a_mutant_is_found_and_shrunk(subjects):
    """The use: a property of one's own model, here that of padding on the right."""

    class Leaky(subjects.TinyLM):
        def mix(self, x):
            return x + x.mean(dim=1, keepdim=True)

    def changed(model, batch):
        ids, keep = batch["input_ids"], batch["attention_mask"].bool()
        with torch.no_grad():
            one, two = model(ids), model(ids.where(keep, 1))
        return not torch.allclose(one[keep], two[keep], atol=1e-6)

    batches = strategies.batches(vocab_size=29, sides=("right",))
    assert not any(changed(subjects.TinyLM(), batch) for batch in drawn(batches, 30))
    mutant = Leaky()
    batch = smallest(batches, lambda b: changed(mutant, b))
    # One real token beside one of padding; rows that do not matter may stay.
    assert batch["input_ids"].shape[1] == 2
    assert [1, 0] in batch["attention_mask"].tolist()
    assert len(batch["input_ids"]) <= 3
