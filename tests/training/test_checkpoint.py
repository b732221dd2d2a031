"""Checkpoints: bit for bit, whole or absent, the newest by number, refused where they do not fit."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stackwise.config import ConfigError, StackWiseConfig
from stackwise.model import create_rack_from_config
from stackwise.training import CheckpointManager, load_rack
from stackwise.training import checkpoint as module

RACKS = {
    "tied": {},
    "untied": {"tie_embeddings": False},
    "layernorm": {"norm": "layernorm", "dropout": 0.5},
    "frozen up": {"freeze_up_proj": True, "sliding_window": 3},
    "multi-head": {"attention_type": "mha", "n_kv_heads": None, "use_rope": False},
}
# Names beside `step-N` that are no checkpoint.
JUNK = [
    "step-x",
    "step-",
    "step-1.5",
    "step--3",
    "step-12 ",
    ".step-11.123",
    "xstep-12",
    "step-12.old",
    "STEP-12",
]
# Numbers that no checkpoint is saved under: nothing but the digits of `str(N)` names one.
OTHER_SPELLINGS = ["step-012", "step-00", "step-\N{ARABIC-INDIC DIGIT NINE}"]
# Other Racks than the configured one that have weights of other shapes.
OTHER_SHAPES = {
    "d_model": ({"d_model": 32}, "embedding.weight"),
    "vocab_size": ({"vocab_size": 29}, "embedding.weight"),
    "d_ff": ({"d_ff": 40}, "feedforward"),
    "n_kv_heads": ({"n_kv_heads": 2}, "attention.qkv.weight"),
    "more stacks": ({"architecture": {"n_stacks": 3}}, "stacks.2"),
    "fewer stacks": ({"architecture": {"n_stacks": 1}}, "stacks.1"),
    "more blocks": ({"architecture": {"blocks_per_stack": 2}}, "blocks.1"),
}
# Other Racks whose weights have the shapes of the configured one, but mean something else.
SAME_SHAPES = {
    "tie_embeddings": {"tie_embeddings": False},
    "norm": {"norm": "layernorm"},
    "n_heads": {"n_heads": 4, "n_kv_heads": 2},
    "sliding_window": {"sliding_window": 2},
    "use_rope": {"use_rope": False},
    "rope_theta": {"rope_theta": 3.0},
    "attention_mode": {"attention_mode": "bidirectional"},
}
# Ways in which a weights file can be broken.
BROKEN = {
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "half a header": lambda path: path.write_bytes(path.read_bytes()[:20]),
    "not safetensors": lambda path: path.write_bytes(b"PK\x03\x04" + bytes(500)),
    "no embedding": lambda path: save_without(path, "embedding.weight"),
    "a weight missing": lambda path: save_without(path, "final_norm.weight"),
    "a weight too many": lambda path: save_file({**load_file(path), "extra": torch.ones(1)}, path),
    "another shape": lambda path: save_file({**load_file(path), "final_norm.weight": torch.ones(3)}, path),
}


def save_without(path, name):
    weights = load_file(path)
    del weights[name]
    save_file(weights, path)


def content_of(directory):
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


@torch.no_grad()
def logits_of(rack):
    return rack.eval()(torch.arange(12).view(2, 6))


@pytest.fixture
def config(make_config):
    return make_config()


@pytest.fixture
def manager(tmp_path, config):
    return CheckpointManager(tmp_path / "runs", config)


class TestRoundTrip:
    @pytest.mark.parametrize("model", RACKS.values(), ids=RACKS)
    def test_bit_for_bit(self, tmp_path, make_config, make_rack, model):
        config = make_config(model=model)
        rack = make_rack(config)
        with torch.no_grad():
            for weight in rack.parameters():
                weight.mul_(1 + 2**-20).add_(torch.randn_like(weight))
        path = CheckpointManager(tmp_path, config).save(3, rack)
        loaded = load_rack(path)
        theirs = loaded.state_dict()
        assert list(theirs) == list(rack.state_dict())
        assert all(theirs[name].equal(weight) for name, weight in rack.state_dict().items())
        assert logits_of(loaded).equal(logits_of(rack))
        tied = loaded.get_lm_head().weight is loaded.get_embedding_layer().weight
        assert tied == model.get("tie_embeddings", True)

    @pytest.mark.parametrize("special", [0.0, -0.0, float("inf"), float("nan"), 1e-45])
    def test_special_values(self, manager, config, make_rack, special):
        rack = make_rack(config)
        rack.final_norm.weight.data.fill_(special)
        loaded = load_rack(manager.save(1, rack)).final_norm.weight
        assert loaded.detach().view(torch.int32).equal(rack.final_norm.weight.detach().view(torch.int32))

    def test_no_bit_is_lost_in_float64(self, manager, config, make_rack):
        """Wider weights than the configuration builds are kept whole or refused."""
        rack = make_rack(config).double()
        with torch.no_grad():
            rack.final_norm.weight.add_(2**-40)
        try:
            path = manager.save(1, rack)
        except ValueError:
            return
        assert load_rack(path).final_norm.weight.double().equal(rack.final_norm.weight)

    def test_what_is_in_the_folder(self, manager, config, make_rack):
        rack = make_rack(config)
        path = manager.save(7, rack)
        assert path == manager.directory / "step-7"
        assert sorted(file.name for file in path.iterdir()) == ["config.yaml", "model.safetensors"]
        assert StackWiseConfig.from_yaml(path / "config.yaml") == config
        assert set(load_file(path / "model.safetensors")) == set(rack.state_dict()) - {"lm_head.weight"}

    def test_saving_changes_nothing(self, manager, config, make_rack):
        rack, twin = make_rack(config), make_rack(config)
        manager.save(1, rack)
        assert rack.get_lm_head().weight is rack.get_embedding_layer().weight
        assert all(weight.equal(twin.state_dict()[name]) for name, weight in rack.state_dict().items())
        assert all(weight.requires_grad for weight in rack.parameters())

    def test_loaded_rack_trains(self, manager, config, make_rack):
        rack = load_rack(manager.save(1, make_rack(config)))
        rack(torch.arange(6).view(1, 6)).sum().backward()
        assert all(weight.grad is not None for weight in rack.parameters())

    def test_same_step_again(self, manager, config, make_rack):
        rack = make_rack(config)
        manager.save(5, rack)
        with torch.no_grad():
            rack.final_norm.weight.fill_(3.0)
        path = manager.save(5, rack)
        assert manager.steps() == [5]
        assert load_rack(path).final_norm.weight.eq(3.0).all()

    def test_path_as_text(self, tmp_path, config, make_rack):
        path = CheckpointManager(str(tmp_path / "a" / "b"), config).save(1, make_rack(config))
        assert isinstance(path, Path) and isinstance(load_rack(str(path)), torch.nn.Module)


class TestOrder:
    def test_nothing_yet(self, manager):
        assert manager.steps() == [] and manager.latest() is None
        assert not manager.directory.exists()

    def test_by_number(self, manager, config, make_rack):
        rack = make_rack(config)
        for step in (9, 10):
            manager.save(step, rack)
        assert manager.steps() == [9, 10] and manager.latest().name == "step-10"

    @pytest.mark.parametrize("order", [(9, 10, 100), (100, 10, 9), (10, 100, 9)])
    def test_not_by_time(self, manager, order):
        for age, step in enumerate(order):
            path = manager.directory / f"step-{step}"
            path.mkdir(parents=True)
            os.utime(path, (10**9 + age, 10**9 + age))
        assert manager.steps() == [9, 10, 100] and manager.latest().name == "step-100"

    @pytest.mark.parametrize("junk", JUNK + OTHER_SPELLINGS)
    def test_other_folders(self, manager, config, make_rack, junk):
        (manager.directory / junk).mkdir(parents=True)
        assert manager.steps() == [] and manager.latest() is None
        for step in range(1, 6):
            manager.save(step, make_rack(config))
        assert manager.steps() == [3, 4, 5]
        assert (manager.directory / junk).is_dir()

    def test_files_of_that_name(self, manager, config, make_rack):
        manager.save(9, make_rack(config))
        (manager.directory / "step-12").write_text("no folder")
        assert manager.steps() == [9] and manager.latest().name == "step-9"


class TestRetention:
    @pytest.mark.parametrize(
        "keep_last, kept", [(1, [11]), (2, [10, 11]), (3, [9, 10, 11]), (9, [8, 9, 10, 11])]
    )
    def test_newest_by_number(self, tmp_path, config, make_rack, keep_last, kept):
        manager = CheckpointManager(tmp_path, config, keep_last=keep_last)
        rack = make_rack(config)
        for step in (8, 9, 10, 11):
            manager.save(step, rack)
        assert manager.steps() == kept
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"step-{step}" for step in kept)

    def test_whatever_the_time(self, manager, config, make_rack):
        rack = make_rack(config)
        for step in (8, 9, 10):
            os.utime(manager.save(step, rack), (2 * 10**9 - step, 2 * 10**9 - step))
        manager.save(11, rack)
        assert manager.steps() == [9, 10, 11]

    def test_the_one_just_saved_is_there(self, manager, config, make_rack):
        """A second, shorter run in the folder of an earlier one must not throw its own work away."""
        rack = make_rack(config)
        for step in (100, 200, 300):
            manager.save(step, rack)
        path = manager.save(5, rack)
        assert path.is_dir() and 5 in manager.steps()

    @pytest.mark.parametrize("keep_last", [0, -1])
    def test_nothing_kept_is_refused(self, tmp_path, config, keep_last):
        with pytest.raises(ValueError, match=rf"keep_last: got {keep_last}; allowed: an integer >= 1"):
            CheckpointManager(tmp_path, config, keep_last=keep_last)


class TestCrash:
    """What is on the disk after a write failed, whichever call it was that failed."""

    @staticmethod
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    @pytest.fixture(params=["save_file", "to_yaml", "fsync", "rename"])
    def crash(self, request, monkeypatch):
        def arm():
            match request.param:
                case "save_file":
                    monkeypatch.setattr(module, "save_file", self.half_a_file)
                case "to_yaml":
                    monkeypatch.setattr(StackWiseConfig, "to_yaml", self.fail)
                case "fsync":
                    monkeypatch.setattr(os, "fsync", self.fail)
                case "rename":
                    for owner, name in ((Path, "rename"), (Path, "replace"), (os, "rename"), (os, "replace")):
                        monkeypatch.setattr(owner, name, self.fail)

        return arm

    @classmethod
    def half_a_file(cls, weights, path):
        Path(path).write_bytes(b"half")
        cls.fail()

    @pytest.mark.parametrize("step", [3, 1], ids=["another step", "the same step"])
    def test_earlier_ones_stay(self, manager, config, make_rack, crash, step):
        rack = make_rack(config)
        manager.save(1, rack)
        before = content_of(manager.directory)
        crash()
        with torch.no_grad():
            rack.final_norm.weight.fill_(3.0)
        with pytest.raises(OSError, match="No space left"):
            manager.save(step, rack)
        assert manager.steps() == [1]
        assert content_of(manager.directory) == before

    def test_first_save(self, manager, config, make_rack, crash):
        crash()
        with pytest.raises(OSError, match="No space left"):
            manager.save(1, make_rack(config))
        assert manager.steps() == [] and manager.latest() is None and content_of(manager.directory) == {}

    def test_interrupted(self, manager, config, make_rack, monkeypatch):
        def interrupt(*_):
            raise KeyboardInterrupt

        manager.save(1, make_rack(config))
        monkeypatch.setattr(module, "save_file", interrupt)
        with pytest.raises(KeyboardInterrupt):
            manager.save(2, make_rack(config))
        assert [path.name for path in manager.directory.iterdir()] == ["step-1"]

    def test_power_cut(self, manager, config, make_rack):
        """A killed process leaves its scratch folder; it is neither listed nor in the way."""
        rack = make_rack(config)
        scratch = manager.directory / f".step-2.{os.getpid()}"
        shutil.copytree(manager.save(1, rack), scratch)
        (scratch / "model.safetensors").write_bytes(b"half")
        assert manager.steps() == [1]
        assert load_rack(manager.save(2, rack)).final_norm.weight.equal(rack.final_norm.weight)


class TestRefused:
    @pytest.mark.parametrize("model, named", OTHER_SHAPES.values(), ids=OTHER_SHAPES)
    def test_other_shapes(self, manager, make_config, make_rack, model, named):
        with pytest.raises(ValueError, match="does not describe this Rack") as refusal:
            manager.save(1, make_rack(make_config(model=model)))
        assert named in str(refusal.value)
        assert not manager.directory.exists()

    @pytest.mark.parametrize("model", SAME_SHAPES.values(), ids=SAME_SHAPES)
    def test_same_shapes(self, manager, make_config, make_rack, model):
        """Loaded again, such a Rack would compute something else without a word."""
        with pytest.raises(ValueError, match="does not describe this Rack"):
            manager.save(1, make_rack(make_config(model=model)))

    def test_one_stack_alone(self, manager, config, make_rack):
        rack = make_rack(config)
        rack.get_stack(1).get_block(0).attention.sliding_window = 2
        with pytest.raises(ValueError, match="does not describe this Rack"):
            manager.save(1, rack)

    def test_configured_rack(self, manager, config, make_rack):
        rack = make_rack(config)
        rack.get_stack(0).freeze()
        manager.check(rack)

    def test_check_leaves_random_state_alone(self, manager, config, make_rack):
        rack = make_rack(config)
        before = torch.get_rng_state()
        manager.check(rack)
        assert torch.get_rng_state().equal(before)

    @pytest.mark.parametrize("damage", BROKEN.values(), ids=BROKEN)
    def test_broken_weights(self, manager, config, make_rack, damage):
        path = manager.save(1, make_rack(config))
        damage(path / "model.safetensors")
        with pytest.raises(ValueError, match="step-1"):
            load_rack(path)

    def test_broken_configuration(self, manager, config, make_rack):
        path = manager.save(1, make_rack(config))
        (path / "config.yaml").write_text("model: {d_model: 0}")
        with pytest.raises(ConfigError, match=r"model\.d_model"):
            load_rack(path)

    def test_other_configuration(self, manager, config, make_config, make_rack):
        path = manager.save(1, make_rack(config))
        make_config(model={"d_ff": 40}).to_yaml(path / "config.yaml")
        with pytest.raises(ValueError, match=r"step-1: .*disagree"):
            load_rack(path)

    @pytest.mark.parametrize("name", ["config.yaml", "model.safetensors"])
    def test_file_missing(self, manager, config, make_rack, name):
        path = manager.save(1, make_rack(config))
        (path / name).unlink()
        with pytest.raises(OSError, match=name):
            load_rack(path)

    def test_no_folder(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="nowhere"):
            load_rack(tmp_path / "nowhere")

    def test_the_loaded_rack_is_the_configured_one(self, manager, config, make_rack):
        loaded = load_rack(manager.save(1, make_rack(config)))
        assert str(loaded) == str(create_rack_from_config(config))
