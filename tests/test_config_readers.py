"""Every field of the configuration is read by something, and changes something that can be seen."""

import contextlib
import math
import sys
from typing import Any, get_args

import pytest
import torch
from pydantic import BaseModel, Field, create_model
from torch import nn

from stackwise import config as module
from stackwise.config import BlockConfig, ModelConfig, StackWiseConfig
from stackwise.model import block as block_module
from stackwise.model import create_rack_from_config
from stackwise.training import ArchitectureTrainer, create_data

TEXT = b"It was the best of times, it was the worst of times, it was the age of wisdom. " * 12
SMALL = {
    "model": {
        "vocab_size": 256,
        "d_model": 16,
        "n_heads": 2,
        "n_kv_heads": 1,
        "d_ff": 24,
        "architecture": {"n_stacks": 2, "blocks_per_stack": 1},
    },
    "training": {
        "batch_size": 2,
        "seq_len": 8,
        "max_steps": 4,
        "device": "cpu",
        "precision": "fp32",
        "log_interval": 1,
        "save_interval": 2,
        "optimizer": {"lr": 1e-2},
        "schedule": {"kind": "cosine", "warmup_steps": 1, "min_lr": 1e-3},
    },
}
# Per field that changes what a training run computes: another value.
CHANGES_TRAINING = {
    "training.batch_size": 3,
    "training.seq_len": 9,
    "training.seed": 1,
    "training.precision": "bf16",
    "training.grad_clip": 1e-8,
    "training.optimizer.lr": 2e-2,
    "training.optimizer.weight_decay": 5.0,
    "training.optimizer.betas": [0.5, 0.5],
    "training.optimizer.eps": 1.0,
    "training.schedule.kind": "constant",
    "training.schedule.warmup_steps": 3,
    "training.schedule.min_lr": 9e-3,
    "data.dataset_path": None,
    "data.validation_fraction": 0.6,
    "data.shuffle": False,
    "model.dropout": 0.5,
}
# Fields of `training` and `data` whose effect is not on the losses; each has a test of its own below.
OTHER_EFFECTS = {
    "training.training_architecture",
    "training.max_steps",
    "training.device",
    "training.compile",
    "training.log_interval",
    "training.checkpoint_dir",
    "training.save_interval",
}


# Between them and a plain model, these use every field of a Block.
KINDS = [
    {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}},
    {"attention_type": "mla", "n_kv_heads": None, "latent": {"kv_lora_rank": 4, "qk_rope_head_dim": 4}},
    {"attention_type": "kernel", "kernel": {"n_features": 4}},
]


def section_of(annotation):
    """The section that a field is, or may be instead of null; None: it is none."""
    kinds = [annotation, *get_args(annotation)]
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def leaves_of(section, block=BlockConfig, path=""):
    """(path, class name, field name) of every field that is not itself a section.

    What a Rack and its Blocks are both configured by, `ModelConfig.blocks` hands on to a `block`, of which
    it is to be read. The windows are not handed on but spread over the Blocks: they are read of both.
    """
    for name, field in section.model_fields.items():
        inner = section_of(field.annotation)
        if issubclass(section, ModelConfig) and name in block.model_fields and name != "sliding_window":
            continue
        if inner is not None:
            yield from leaves_of(inner, block, f"{path}{name}.")
        else:
            yield f"{path}{name}", section.__name__, name
    if issubclass(section, ModelConfig):
        yield from leaves_of(block, block, f"{path}blocks.")


LEAVES = {path: (owner, name) for path, owner, name in leaves_of(StackWiseConfig)}


def unread(reads, leaves=LEAVES):
    return [path for path, leaf in leaves.items() if leaf not in reads]


def changed(mapping, path, value):
    """A deep copy of `mapping` with the value at the dotted path replaced."""
    key, _, rest = path.partition(".")
    return {**mapping, key: changed(mapping.get(key, {}), rest, value) if rest else value}


@pytest.fixture
def mapping(tmp_path):
    (tmp_path / "text").write_bytes(TEXT)
    return {**SMALL, "data": {"dataset_path": str(tmp_path / "text"), "validation_fraction": 0.1}}


@contextlib.contextmanager
def recorded_reads():
    """The (class name, field name) pairs that are read as attributes meanwhile.

    What the configuration reads of itself, to validate, does not count; `ModelConfig.blocks` validates
    nothing, and what it asks for decides which Blocks there are.
    """
    reads = set()
    original = module._Section.__getattribute__

    def reading(self, name):
        owner = type(self)
        code = sys._getframe(1).f_code
        inside = code.co_filename == module.__file__ and code.co_qualname != "ModelConfig.blocks"
        if name in owner.__pydantic_fields__ and not inside:
            reads.add((owner.__name__, name))
        return original(self, name)

    patch = pytest.MonkeyPatch()
    patch.setattr(module._Section, "__getattribute__", reading)
    try:
        yield reads
    finally:
        patch.undo()


def run(mapping, config_class=StackWiseConfig):
    """Build, train, evaluate; what can be seen of it."""
    config = config_class.from_dict(mapping)
    torch.manual_seed(7)
    rack = create_rack_from_config(config)
    seen: dict[str, Any] = {"shapes": [], "dtypes": set()}

    def watch(_module, inputs, output):
        seen["shapes"].append(tuple(inputs[0].shape))
        seen["dtypes"].add(output.dtype)

    hook = rack.register_forward_hook(watch)
    training, validation = create_data(config)
    trainer = ArchitectureTrainer(config, progress=False)
    seen["result"] = trainer.train_architecture(rack, training)
    hook.remove()
    seen["losses"] = [record.loss for record in seen["result"]["records"]]
    seen["lr"] = [record.lr for record in seen["result"]["records"]]
    seen["weights"] = nn.utils.parameters_to_vector(rack.parameters()).detach()
    seen["validation"] = trainer.evaluate(rack, validation) if validation is not None else None
    seen["device"] = trainer.device
    return seen


@pytest.fixture
def reads_of_every_kind(mapping, tmp_path):
    """The reads of runs that between them use every part of the configuration."""

    def reads_of(config_class=StackWiseConfig):
        with recorded_reads() as reads:
            run(changed(mapping, "training.checkpoint_dir", str(tmp_path / "runs")), config_class)
            for kind in KINDS:
                run({**mapping, "model": mapping["model"] | kind}, config_class)
        return reads

    return reads_of


class TestReaders:
    def test_the_fields_were_found(self):
        assert len(LEAVES) > 50
        assert {
            "model.architecture.n_stacks",
            "model.max_seq_len",
            "model.sliding_window",
            "model.blocks.sliding_window",
            "model.blocks.d_ff",
            "model.blocks.latent.q_lora_rank",
            "model.blocks.kernel.bandwidth",
            "model.blocks.rope_scaling.factor",
            "training.optimizer.betas",
            "data.shuffle",
        } <= LEAVES.keys()
        assert LEAVES["model.blocks.d_ff"] == ("BlockConfig", "d_ff")
        owners = {owner for path, (owner, _) in LEAVES.items() if not path.startswith("model.blocks.")}
        assert "BlockConfig" not in owners
        for name in ModelConfig.model_fields.keys() - {"architecture"}:
            paths = {path for path in LEAVES if path.startswith((f"model.{name}", f"model.blocks.{name}"))}
            assert paths, name

    def test_every_field_is_read(self, reads_of_every_kind):
        assert unread(reads_of_every_kind()) == []

    @pytest.mark.parametrize("section", ["model", "training", "data"])
    def test_a_field_that_nothing_reads_shows(self, reads_of_every_kind, section):
        base = StackWiseConfig.model_fields[section].annotation
        longer = create_model(base.__name__, __base__=base, forgotten=(int, 3))
        whole = create_model(
            "StackWiseConfig", __base__=StackWiseConfig, **{section: (longer, Field(default_factory=longer))}
        )
        leaves = {path: (owner, name) for path, owner, name in leaves_of(whole)}
        assert unread(reads_of_every_kind(whole), leaves) == [f"{section}.forgotten"]

    def test_a_field_of_a_block_that_nothing_reads_shows(self, reads_of_every_kind, monkeypatch):
        longer = create_model("BlockConfig", __base__=BlockConfig, forgotten=(int, 3))
        for place in (module, block_module):
            monkeypatch.setattr(place, "BlockConfig", longer)
        leaves = {path: (owner, name) for path, owner, name in leaves_of(StackWiseConfig, longer)}
        assert unread(reads_of_every_kind(), leaves) == ["model.blocks.forgotten"]

    def test_handing_on_is_not_reading(self, mapping):
        """`ModelConfig.blocks` reads what it decides by, and nothing of what it only hands on."""
        config = StackWiseConfig.from_dict(mapping)
        with recorded_reads() as reads:
            blocks = config.model.blocks()
        assert len(blocks) == 2
        assert reads == {
            ("StackWiseConfig", "model"),
            ("ModelConfig", "sliding_window"),
            ("ModelConfig", "architecture"),
            ("ArchitectureConfig", "n_stacks"),
            ("ArchitectureConfig", "blocks_per_stack"),
        }

    def test_validating_and_writing_are_not_reading(self, mapping, tmp_path):
        """Else every field would count as read by the first copy that is made of it."""
        config = StackWiseConfig.from_dict(mapping)
        with recorded_reads() as reads:
            config.validate()
            config.to_yaml(tmp_path / "config.yaml")
            config.to_dict()
        assert reads == set()

    def test_reading_is_seen(self, mapping):
        config = StackWiseConfig.from_dict(mapping)
        with recorded_reads() as reads:
            rate = config.training.optimizer.lr
        assert rate == 1e-2
        assert reads == {
            ("StackWiseConfig", "training"),
            ("TrainingConfig", "optimizer"),
            ("OptimizerConfig", "lr"),
        }


class TestEffects:
    def test_table_is_complete(self):
        wanted = {path for path in LEAVES if path.startswith(("training.", "data."))}
        tested = {path for path in CHANGES_TRAINING if not path.startswith("model.")}
        assert tested | OTHER_EFFECTS == wanted and not tested & OTHER_EFFECTS

    @pytest.mark.parametrize("path", CHANGES_TRAINING)
    def test_training_takes_another_course(self, mapping, path):
        """Learning rates and the first loss are the same where the field is not about them."""
        plain, other = run(mapping), run(changed(mapping, path, CHANGES_TRAINING[path]))
        assert plain["losses"] != other["losses"]
        assert not plain["weights"].equal(other["weights"])
        assert (plain["lr"] != other["lr"]) == path.startswith(("training.schedule", "training.optimizer.lr"))

    def test_nothing_changed(self, mapping):
        plain, other = run(mapping), run(mapping)
        assert plain["losses"] == other["losses"] and plain["weights"].equal(other["weights"])

    def test_batch_size_and_seq_len(self, mapping):
        assert run(mapping)["shapes"] == [(2, 8)] * 4
        assert run(changed(mapping, "training.batch_size", 3))["shapes"] == [(3, 8)] * 4
        assert run(changed(mapping, "training.seq_len", 9))["shapes"] == [(2, 9)] * 4

    @pytest.mark.parametrize("max_steps", [1, 6])
    def test_max_steps(self, mapping, max_steps):
        assert len(run(changed(mapping, "training.max_steps", max_steps))["losses"]) == max_steps

    def test_seed_with_dropout_alone(self, mapping):
        """Without shuffling, the seed still decides the dropout."""
        mapping = changed(changed(mapping, "data.shuffle", False), "model.dropout", 0.5)
        assert run(mapping)["losses"] != run(changed(mapping, "training.seed", 1))["losses"]

    def test_precision(self, mapping):
        assert run(mapping)["dtypes"] == {torch.float32}
        assert run(changed(mapping, "training.precision", "bf16"))["dtypes"] == {torch.bfloat16}
        assert torch.bfloat16 in run(changed(mapping, "training.precision", "bf16_weights"))["dtypes"]

    @pytest.mark.parametrize("wanted", [True, False])
    def test_compile(self, mapping, wanted, monkeypatch):
        compiled = []
        monkeypatch.setattr(torch, "compile", lambda function, **_: compiled.append(function) or function)
        run(changed(mapping, "training.compile", wanted))
        assert bool(compiled) == wanted

    @pytest.mark.parametrize("name", ["auto", "cpu", "cuda"])
    def test_device(self, mapping, name, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        mapping = changed(mapping, "training.device", name)
        if name == "cuda":
            with pytest.raises(ValueError, match="device: got 'cuda'"):
                run(mapping)
        else:
            assert run(mapping)["device"] == torch.device("cpu")

    @pytest.mark.parametrize("log_interval", [1, 2, 4])
    def test_log_interval(self, mapping, log_interval):
        seen = run(changed(mapping, "training.log_interval", log_interval))
        last = seen["losses"][-log_interval:]
        assert seen["result"]["final_loss"] == pytest.approx(sum(last) / len(last))

    @pytest.mark.parametrize("save_interval, saved", [(1, [2, 3, 4]), (3, [3, 4]), (50, [4])])
    def test_checkpoints(self, mapping, tmp_path, save_interval, saved):
        mapping = changed(mapping, "training.save_interval", save_interval)
        run(changed(mapping, "training.checkpoint_dir", str(tmp_path / "runs")))
        assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [f"step-{n}" for n in saved]

    def test_no_checkpoints(self, mapping, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        run(mapping)
        assert [path.name for path in tmp_path.iterdir()] == ["text"]

    def test_training_architecture(self, mapping):
        assert run(mapping)["result"]["training_architecture"] == "rackwise"

    @pytest.mark.parametrize("grad_clip, clipped", [(1e-8, True), (None, False), (1e8, False)])
    def test_grad_clip(self, mapping, grad_clip, clipped):
        """Far below eps, a clipped gradient makes steps far smaller than the learning rate."""
        mapping = changed(changed(mapping, "training.optimizer.weight_decay", 0.0), "training.max_steps", 1)
        mapping = changed(
            changed(mapping, "training.schedule.warmup_steps", 0), "training.optimizer.eps", 1e-3
        )
        mapping = changed(mapping, "training.schedule.kind", "constant")
        before = nn.utils.parameters_to_vector(self.untrained(mapping).parameters())
        moved = (
            (run(changed(mapping, "training.grad_clip", grad_clip))["weights"] - before).abs().max().item()
        )
        assert moved == pytest.approx(1e-2, rel=0.2) if not clipped else moved < 1e-6

    @staticmethod
    def untrained(mapping):
        torch.manual_seed(7)
        return create_rack_from_config(StackWiseConfig.from_dict(mapping))

    @pytest.mark.parametrize(
        "path, value, rates",
        [
            ("training.optimizer.lr", 2e-2, [2e-2, 2e-2, (2e-2 + 1e-3) / 2, 1e-3]),
            ("training.schedule.kind", "constant", [1e-2] * 4),
            ("training.schedule.kind", "linear", [1e-2, 1e-2, 5.5e-3, 1e-3]),
            ("training.schedule.warmup_steps", 3, [1e-2 / 3, 2e-2 / 3, 1e-2, 1e-3]),
            ("training.schedule.warmup_steps", 4, [2.5e-3, 5e-3, 7.5e-3, 1e-2]),
            ("training.schedule.min_lr", 0.0, [1e-2, 1e-2, 5e-3, 0.0]),
        ],
    )
    def test_learning_rates(self, mapping, path, value, rates):
        assert run(changed(mapping, path, value))["lr"] == pytest.approx(rates, abs=1e-12)

    def test_no_validation(self, mapping):
        assert run(changed(mapping, "data.validation_fraction", 0.0))["validation"] is None
        assert math.isfinite(run(mapping)["validation"])

    def test_weight_decay_alone(self, mapping):
        """One step of weight decay w at learning rate lr shrinks each matrix by lr * w beside the update."""
        mapping = changed(mapping, "training.max_steps", 1)
        mapping = changed(mapping, "training.schedule", {"kind": "constant", "warmup_steps": 0})
        before = self.untrained(mapping).get_stack(0).get_block(0).feedforward.up.weight.detach()
        after = []
        for decay in (0.0, 3.0):
            config = StackWiseConfig.from_dict(changed(mapping, "training.optimizer.weight_decay", decay))
            rack = self.untrained(mapping)
            ArchitectureTrainer(config).train_architecture(rack, create_data(config)[0])
            after.append(rack.get_stack(0).get_block(0).feedforward.up.weight.detach())
        torch.testing.assert_close(after[0] - after[1], 1e-2 * 3.0 * before, rtol=1e-3, atol=1e-7)
