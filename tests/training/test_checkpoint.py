"""Checkpoints: bit for bit, whole or absent, the newest by number, refused where they do not fit."""

import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stackwise.checkpoint import CheckpointWarning, DamagedCheckpointError
from stackwise.checkpoint import manager as manager_module
from stackwise.checkpoint.folder import Manifest
from stackwise.config import ConfigError, StackWiseConfig
from stackwise.model import create_rack_from_config
from stackwise.training import RackCheckpoints, latest_checkpoint, load_rack
from tests.training_runs import mapped_from

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
    "d_model": ({"d_model": 32}, "embedding is TokenEmbedding"),
    "vocab_size": ({"vocab_size": 29}, "embedding is TokenEmbedding"),
    "d_ff": ({"d_ff": 40}, "feedforward"),
    "n_kv_heads": ({"n_kv_heads": 2}, "attention is Attention"),
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


def copied(path, folder):
    """Only what a Rack is loaded from, under a name that is no step's."""
    folder.mkdir()
    for name in ("config.yaml", "model.safetensors"):
        shutil.copy(path / name, folder / name)
    return folder


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
    return RackCheckpoints(tmp_path / "runs", config)


class TestRoundTrip:
    @pytest.mark.parametrize("model", RACKS.values(), ids=RACKS)
    def test_bit_for_bit(self, tmp_path, make_config, make_rack, model):
        config = make_config(model=model)
        rack = make_rack(config)
        with torch.no_grad():
            for weight in rack.parameters():
                weight.mul_(1 + 2**-20).add_(torch.randn_like(weight))
        path = RackCheckpoints(tmp_path, config).save(3, rack)
        loaded = load_rack(path)
        theirs = loaded.state_dict()
        assert list(theirs) == list(rack.state_dict())
        assert all(theirs[name].equal(weight) for name, weight in rack.state_dict().items())
        assert logits_of(loaded).equal(logits_of(rack))
        tied = loaded.lm_head.weight is loaded.embedding.weight
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
        files = {"config.yaml", "manifest.json", "model.safetensors"}
        assert files <= {file.name for file in path.iterdir()}
        assert {path.stat().st_mode & 0o777 for path in path.iterdir() if path.is_file()} == {0o644}
        assert StackWiseConfig.from_yaml(path / "config.yaml") == config
        assert set(load_file(path / "model.safetensors")) == set(rack.state_dict()) - {"lm_head.weight"}

    def test_saving_changes_nothing(self, manager, config, make_rack):
        rack, twin = make_rack(config), make_rack(config)
        manager.save(1, rack)
        assert rack.lm_head.weight is rack.embedding.weight
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
        path = RackCheckpoints(str(tmp_path / "a" / "b"), config).save(1, make_rack(config))
        assert isinstance(path, Path) and isinstance(load_rack(str(path)), torch.nn.Module)


class TestResume:
    def test_what_was_found_whole_is_read_once(self, manager, config, make_rack, monkeypatch):
        rack, counts = make_rack(config), {"tokens": 3}
        path = manager.save(4, rack, {"counts": counts})
        read = Counter()

        def reading(folder, files, *, contents=True):
            read.update(list(files) if contents else [])

        monkeypatch.setattr(manager_module, "verify_files", reading)
        fresh, again = RackCheckpoints(manager.directory, config), {}
        assert fresh.resume(make_rack(config)) == 4
        fresh.restore({"counts": again}, 4)
        assert again == counts
        assert set(read) == set(Manifest.read(path).files) and set(read.values()) == {1}

    @pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs proc(5)")
    @pytest.mark.parametrize("offload", ["none", "disk"])
    def test_blocks_on_disk_stay_there(self, tmp_path, make_config, make_rack, offload):
        """A Rack that is larger than the memory is resumed in it."""
        scope = {"offload": offload, "offload_dir": str(tmp_path / "blocks") if offload == "disk" else None}
        architecture = {"training_architecture": "blockwise", "scope": scope}
        config = make_config(training=architecture)
        rack = make_rack(config)
        with torch.no_grad():
            for weight in rack.parameters():
                weight.add_(torch.randn_like(weight))
        rack.get_stack(0).freeze()
        path = RackCheckpoints(tmp_path / "run", config).save(4, rack)
        fresh = create_rack_from_config(config)
        fresh.get_stack(0).freeze()
        RackCheckpoints(tmp_path / "run", config).resume(fresh)
        for name, weight in fresh.named_parameters():
            in_block = "blocks" in name
            held = str(path / "model.safetensors") if in_block and offload == "disk" else None
            assert mapped_from(weight) == held, name
            assert weight.requires_grad == (not name.startswith("stacks.0"))
        theirs = fresh.state_dict()
        assert all(theirs[name].equal(weight) for name, weight in rack.state_dict().items())
        assert fresh.lm_head.weight is fresh.embedding.weight

    def test_copy_of_a_checkpoint_resumes(self, tmp_path, config, make_rack):
        rack, copies = make_rack(config), tmp_path / "copies"

        def copy(folder):
            shutil.copytree(folder, copies / folder.name)

        with RackCheckpoints(tmp_path / "here", config, on_complete=copy) as manager:
            manager.save(4, rack)
        assert RackCheckpoints(copies, config).resume(make_rack(config)) == 4


class TestOrder:
    def test_nothing_yet(self, manager):
        assert manager.steps() == [] and manager.latest() is None
        assert not manager.directory.exists()

    def test_by_number(self, manager, config, make_rack):
        rack = make_rack(config)
        for step in (9, 10):
            manager.save(step, rack)
        assert manager.steps() == [9, 10] and manager.latest().name == "step-10"

    def test_a_file_too_short_is_no_checkpoint(self, manager, config, make_rack):
        rack = make_rack(config)
        for step in (9, 10):
            path = manager.save(step, rack)
        (path / "model.safetensors").write_bytes(b"half")
        assert manager.steps() == [9, 10]
        assert manager.latest().name == latest_checkpoint(manager.directory).name == "step-9"


class TestRetention:
    @pytest.mark.parametrize(
        "kept, left",
        [
            ({"keep_last": 1}, [11]),
            ({"keep_last": 3}, [9, 10, 11]),
            ({"keep_last": 1, "keep_every": 4}, [8, 11]),
            ({"keep_last": 1, "keep_best": 1}, [9, 11]),
            ({"keep_last": 9, "asynchronous": True}, [8, 9, 10, 11]),
        ],
    )
    def test_as_configured(self, tmp_path, make_config, make_rack, kept, left):
        saving = {"checkpoint_dir": str(tmp_path), "eval_interval": 1}
        config = make_config(training={"checkpoint": kept, **saving})
        manager, rack = RackCheckpoints(tmp_path, config), make_rack(config)
        for step, loss in ((8, 3.0), (9, 1.0), (10, 2.0), (11, 2.5)):
            manager.save(step, rack, metric=loss)
        manager.close()
        assert manager.steps() == left
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"step-{step}" for step in left)

    def test_the_disk_refuses(self, manager, config, make_rack, monkeypatch):
        """What is there stays as it was, and the run may go on."""
        rack = make_rack(config)
        manager.save(1, rack)
        before = content_of(manager.directory)

        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(StackWiseConfig, "to_yaml", full)
        with pytest.warns(CheckpointWarning, match="step 2 is not written.*No space left"):
            assert manager.save(2, rack) is None
        assert content_of(manager.directory) == before


class TestRefused:
    def test_a_directory_that_cannot_be_created_is_refused_at_the_start(self, config, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(
            ValueError, match=r"training\.checkpoint_dir: got .*file/runs.*; allowed: a folder"
        ):
            RackCheckpoints(tmp_path / "file" / "runs", config)

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
    def test_broken_weights(self, manager, config, make_rack, tmp_path, damage):
        path = manager.save(1, make_rack(config))
        alone = copied(path, tmp_path / "alone")
        for folder, kind in ((path, DamagedCheckpointError), (alone, ValueError)):
            damage(folder / "model.safetensors")
            with pytest.raises(kind, match=folder.name):
                load_rack(folder)

    def test_broken_configuration(self, manager, config, make_rack, tmp_path):
        path = copied(manager.save(1, make_rack(config)), tmp_path / "alone")
        (path / "config.yaml").write_text("model: {d_model: 0}")
        with pytest.raises(ConfigError, match=r"model\.d_model"):
            load_rack(path)

    def test_changed_configuration(self, manager, config, make_rack):
        path = manager.save(1, make_rack(config))
        with (path / "config.yaml").open("a") as file:
            file.write("\n")
        with pytest.raises(DamagedCheckpointError, match=r"step-1.*config\.yaml"):
            load_rack(path)

    def test_other_configuration(self, manager, config, make_config, make_rack, tmp_path):
        path = copied(manager.save(1, make_rack(config)), tmp_path / "alone")
        make_config(model={"d_ff": 40}).to_yaml(path / "config.yaml")
        with pytest.raises(ValueError, match=r"alone: .*disagree"):
            load_rack(path)

    @pytest.mark.parametrize("name", ["config.yaml", "model.safetensors"])
    def test_file_missing(self, manager, config, make_rack, tmp_path, name):
        path = manager.save(1, make_rack(config))
        for folder, kind in ((copied(path, tmp_path / "alone"), OSError), (path, DamagedCheckpointError)):
            (folder / name).unlink()
            with pytest.raises(kind, match=name):
                load_rack(folder)

    def test_no_folder(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="nowhere"):
            load_rack(tmp_path / "nowhere")

    def test_the_loaded_rack_is_the_configured_one(self, manager, config, make_rack):
        loaded = load_rack(manager.save(1, make_rack(config)))
        assert str(loaded) == str(create_rack_from_config(config))
