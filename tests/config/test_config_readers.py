"""Every field of the configuration is read by something, and changes something that can be seen."""

import contextlib
import json
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from pydantic import BaseModel, Field, create_model
from torch import distributed, nn

from stackwise.config import BlockConfig, GuardPolicy, ModelConfig, StackWiseConfig
from stackwise.config import model as model_config
from stackwise.config.section import Section
from stackwise.data import create_data
from stackwise.data.shards import write_shards
from stackwise.model import block as block_module
from stackwise.model import create_rack_from_config
from stackwise.model.feedforward import SwiGLU
from stackwise.training import ArchitectureTrainer
from stackwise.training.evaluation import Evaluation
from stackwise.training.processes import Processes

HERE = Path(model_config.__file__).parent
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
        "optimizer": {"lr": 1e-2},
        "schedule": {"kind": "cosine", "warmup_steps": 1, "min_lr": 1e-3},
    },
}
MASKED = {"kind": "masked_token", "mask_token_id": 256}
DIFFUSION = {"kind": "mask_diffusion", "mask_token_id": 256}
SEES_BOTH_SIDES = {"attention_mode": "bidirectional", "vocab_size": 258}
BLOCKWISE = {"training": {"training_architecture": "blockwise"}}
# What a field goes with, where that is not the plain run.
BASES = {
    "training.optimizer.momentum": {"training": {"optimizer": {"kind": "muon"}}},
    "training.schedule.decay_fraction": {"training": {"schedule": {"kind": "wsd"}}},
    "training.objective.z_loss": {},
    "training.objective.logits_chunk": {},
    "training.objective.noise_schedule": {"model": SEES_BOTH_SIDES, "training": {"objective": DIFFUSION}},
    "training.objective": {"model": SEES_BOTH_SIDES, "training": {"objective": MASKED}},
    "training.scope.head": BLOCKWISE | {"model": {"tie_embeddings": False}},
    "training.scope": BLOCKWISE,
    "data.dataset_path": {"data": {"validation_fraction": 0.0}},
    "data.task": {"data": {"dataset_path": None, "validation_fraction": 0.0}},
    "data.pack_documents": {"data": {"dataset_path": "shards"}},
}
# Per field that changes what a training run computes: another value.
CHANGES_TRAINING = {
    "training.batch_size": 3,
    "training.accumulation_steps": 2,
    "training.seq_len": 9,
    "training.seed": 1,
    "training.precision": "bf16",
    "training.grad_clip": 1e-8,
    "training.optimizer.kind": "muon",
    "training.optimizer.lr": 2e-2,
    "training.optimizer.weight_decay": 5.0,
    "training.optimizer.betas": [0.5, 0.5],
    "training.optimizer.eps": 1.0,
    "training.optimizer.momentum": 0.5,
    "training.optimizer.per_stack.lr": 2e-2,
    "training.optimizer.per_stack.weight_decay": 5.0,
    "training.schedule.kind": "inverse_sqrt",
    "training.schedule.warmup_steps": 3,
    "training.schedule.min_lr": 9e-3,
    "training.schedule.decay_fraction": 1.0,
    "training.objective.kind": "mask_diffusion",
    "training.objective.mask_token_id": 257,
    "training.objective.mask_fraction": 0.9,
    "training.objective.random_fraction": 1.0,
    "training.objective.same_fraction": 1.0,
    "training.objective.noise_schedule": "cosine",
    "training.objective.z_loss": 0.1,
    "training.scope.head": "per_unit",
    "training.scope.overlap": 1,
    "training.scope.suffix": 1,
    "training.scope.order": "right_to_left",
    "training.scope.growth": True,
    "training.scope.polish_steps": 2,
    "data.dataset_path": None,
    "data.task": "copy",
    "data.pack_documents": True,
    "data.validation_fraction": 0.6,
    "data.shuffle": False,
    "model.dropout": 0.5,
}
CHANGES_LEARNING_RATES = ("training.schedule", "training.optimizer.lr", "training.scope.polish_steps")
# Fields of `training` and `data` whose effect is not on the losses; each has a test of its own below.
OTHER_EFFECTS = {
    "training.training_architecture",
    "training.max_steps",
    "training.device",
    "training.compile",
    "training.log_interval",
    "training.eval_interval",
    "training.eval_batches",
    "training.checkpoint_dir",
    "training.save_interval",
    "training.resume",
    "training.checkpoint.keep_last",
    "training.checkpoint.keep_every",
    "training.checkpoint.keep_best",
    "training.checkpoint.asynchronous",
    "training.checkpoint.upload",
    "training.checkpoint.upload_keep_last",
    "training.objective.logits_chunk",
    "training.scope.cache_bytes",
    "training.scope.cache_dir",
    "training.scope.offload",
    "training.scope.offload_dir",
    "training.recompute.kind",
    "training.recompute.every",
    "training.recompute.budget",
    "training.recompute.names",
    "training.distributed.strategy",
    "training.distributed.reshard_after_forward",
    "training.telemetry.parameter_norms",
    "training.telemetry.jsonl",
    "training.telemetry.tensorboard",
    *(f"training.guard.{key}" for key in GuardPolicy.model_fields),  # tests/training/test_guard.py
    "data.tokenizer",
}
# Sections that are handed to `OptimizerConfig` whole, so that no field of theirs is read by its name. Each
# field has an effect on training instead, as the tables say.
HANDED_ON = {"StackOptimizerConfig"}


# Between them and a plain model, these use every field of a Block.
KINDS = [
    {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}},
    {"attention_type": "mla", "n_kv_heads": None, "latent": {"kv_lora_rank": 4, "qk_rope_head_dim": 4}},
    {"attention_type": "kernel", "kernel": {"n_features": 4}},
]
# And these what a trainer has of its own; paths are below the test's folder.
TRAININGS = [
    {
        "checkpoint_dir": "runs",
        "eval_interval": 2,
        "save_interval": 2,
        "checkpoint": {"upload": "copies", "upload_keep_last": 1},
        "guard": {},
        "bundle_dir": "bundles",
        "telemetry": {"parameter_norms": True, "jsonl": "steps.jsonl", "tensorboard": "events"},
    },
    {
        "training_architecture": "stackwise",
        "scope": {
            "growth": True,
            "polish_steps": 1,
            "cache_bytes": 2**20,
            "cache_dir": "cache",
            "offload": "disk",
            "offload_dir": "blocks",
        },
        "recompute": {"kind": "every_nth", "every": 2},
    },
    {"optimizer": {"kind": "muon", "per_stack": {0: {"lr": 1e-3}}}},
    {"recompute": {"kind": "by_name", "names": ["*.feedforward"]}, "accumulation_steps": 2},
    {"distributed": {"strategy": "fsdp"}},
]
OBJECTIVES = [
    MASKED | {"random_fraction": 0.1, "same_fraction": 0.1, "z_loss": 1e-4, "logits_chunk": 5},
    DIFFUSION,
]
PATHS = ("checkpoint_dir", "upload", "jsonl", "tensorboard", "cache_dir", "offload_dir", "bundle_dir")


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
    return [path for path, leaf in leaves.items() if leaf not in reads and leaf[0] not in HANDED_ON]


def changed(mapping, path, value):
    """A deep copy of `mapping` with the value at the dotted path replaced."""
    key, _, rest = path.partition(".")
    if key == "per_stack":
        return {**mapping, key: {0: {rest: value}}}
    return {**mapping, key: changed(mapping.get(key, {}), rest, value) if rest else value}


def merged(mapping, other):
    """`other` over `mapping`, section by section."""
    return mapping | {
        key: merged(mapping.get(key, {}), value) if isinstance(value, dict) else value
        for key, value in other.items()
    }


@pytest.fixture
def mapping(tmp_path):
    (tmp_path / "text").write_bytes(TEXT)
    return {**SMALL, "data": {"dataset_path": str(tmp_path / "text"), "validation_fraction": 0.1}}


@pytest.fixture
def base_of(mapping, tmp_path):
    """The plain run that a field belongs to."""

    def base(path):
        found = next((BASES[place] for place in BASES if path.startswith(place)), {})
        if found.get("data", {}).get("dataset_path") == "shards":
            documents = [list(TEXT[start : start + 7]) for start in range(0, len(TEXT), 7)]
            write_shards(tmp_path / "shards", documents, vocab_size=256)
            found = {"data": {"dataset_path": str(tmp_path / "shards")}}
        return merged(mapping, found)

    return base


@pytest.fixture(scope="module")
def plain_runs():
    """Those that several fields are held against, by what they were configured with."""
    return {}


@contextlib.contextmanager
def recorded_reads():
    """The (class name, field name) pairs that are read as attributes meanwhile.

    What the configuration reads of itself, to validate, does not count; `ModelConfig.blocks` validates
    nothing, and what it asks for decides which Blocks there are.
    """
    reads = set()
    original = Section.__getattribute__

    def reading(self, name):
        owner = type(self)
        code = sys._getframe(1).f_code
        inside = Path(code.co_filename).parent == HERE and code.co_qualname != "ModelConfig.blocks"
        if name in owner.__pydantic_fields__ and not inside:
            reads.add((owner.__name__, name))
        return original(self, name)

    patch = pytest.MonkeyPatch()
    patch.setattr(Section, "__getattribute__", reading)
    try:
        yield reads
    finally:
        patch.undo()


@contextlib.contextmanager
def processes_of(config):
    """Where the configuration wants several processes: a group of this one alone."""
    if config.training.distributed.strategy == "none":
        yield None
        return
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield Processes.from_environment(config.training, environment={})
    finally:
        distributed.destroy_process_group()


@contextlib.contextmanager
def as_if_compiled():
    """What only a compiled function may do, done by one that is not: compiling takes half a minute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **_: function)
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        yield


def run(mapping, config_class=StackWiseConfig):
    """Build, train, evaluate; what can be seen of it."""
    config = config_class.from_dict(mapping)
    torch.manual_seed(7)
    rack = create_rack_from_config(config)
    seen: dict[str, Any] = {"shapes": [], "dtypes": set()}

    hooks = [
        rack.embedding.register_forward_hook(
            lambda _m, ids, _out: seen["shapes"].append(tuple(ids[0].shape))
        ),
        rack.lm_head.register_forward_hook(lambda _m, _in, logits: seen["dtypes"].add(logits.dtype)),
    ]
    training, validation = create_data(config)
    with processes_of(config) as processes:
        trainer = ArchitectureTrainer(config, progress=False, processes=processes)
        seen["result"] = trainer.train_architecture(rack, training, validation)
        for hook in hooks:
            hook.remove()
        seen["validation"] = trainer.evaluate(rack, validation) if validation is not None else None
    seen["losses"] = [record.loss for record in seen["result"]["records"]]
    seen["lr"] = [record.lr for record in seen["result"]["records"]]
    seen["weights"] = nn.utils.parameters_to_vector(rack.parameters()).detach()
    seen["device"] = trainer.device
    return seen


@pytest.fixture
def reads_of_every_kind(mapping, tmp_path):
    """The reads of runs that between them use every part of the configuration."""

    def reads_of(config_class=StackWiseConfig):
        def below(tree):
            return {
                key: below(value)
                if isinstance(value, dict)
                else str(tmp_path / value)
                if key in PATHS
                else value
                for key, value in tree.items()
            }

        with recorded_reads() as reads:
            for kind in KINDS:
                run(merged(mapping, {"model": kind}), config_class)
            for training in TRAININGS:
                run(merged(mapping, {"training": below(training)}), config_class)
            for objective in OBJECTIVES:
                sections = {"model": SEES_BOTH_SIDES, "training": {"objective": objective}}
                run(merged(mapping, sections), config_class)
            run(merged(mapping, {"data": {"dataset_path": None, "task": "shift"}}), config_class)
            with as_if_compiled():
                budget = {"compile": True, "recompute": {"kind": "budget"}}
                run(merged(mapping, {"training": budget}), config_class)
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
            "training.optimizer.per_stack.lr",
            "training.scope.offload_dir",
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
        for place in (model_config, block_module):
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

    def test_what_is_handed_on_has_an_effect(self):
        handed_on = {path for path, (owner, _) in LEAVES.items() if owner in HANDED_ON}
        assert handed_on and handed_on <= CHANGES_TRAINING.keys()

    @pytest.mark.parametrize("path", CHANGES_TRAINING)
    def test_training_takes_another_course(self, base_of, path, tmp_path, plain_runs):
        """Learning rates are the same where the field is not about them."""
        base = base_of(path)
        same = repr(base).replace(str(tmp_path), "")
        if same not in plain_runs:
            plain_runs[same] = run(base)
        plain, other = plain_runs[same], run(changed(base, path, CHANGES_TRAINING[path]))
        assert plain["losses"] != other["losses"]
        assert not plain["weights"].equal(other["weights"])
        assert (plain["lr"] != other["lr"]) == path.startswith(CHANGES_LEARNING_RATES)

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

    @pytest.mark.parametrize("limit", [None, 3])
    def test_evaluations(self, mapping, monkeypatch, limit):
        limits = []

        def mean_loss(self, total, batches, *, limit=None, precision=None):
            limits.append(limit)
            return 0.0

        monkeypatch.setattr(Evaluation, "mean_loss", mean_loss)
        mapping = changed(mapping, "training.eval_interval", 2)
        seen = run(changed(mapping, "training.eval_batches", limit))
        assert [record.steps for record in seen["result"]["validation"]] == [2, 4]
        assert limits == [limit, limit, None]  # and all in the end

    @pytest.mark.parametrize("save_interval, saved", [(1, [2, 3, 4]), (3, [3, 4]), (50, [4])])
    def test_checkpoints(self, mapping, tmp_path, save_interval, saved):
        mapping = changed(mapping, "training.save_interval", save_interval)
        run(changed(mapping, "training.checkpoint_dir", str(tmp_path / "runs")))
        assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [f"step-{n}" for n in saved]

    def test_no_files(self, mapping, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        run(mapping)
        assert [path.name for path in tmp_path.iterdir()] == ["text"]

    @pytest.mark.parametrize("name, units", [("rackwise", 1), ("stackwise", 2), ("blockwise", 4)])
    def test_training_architecture(self, mapping, name, units):
        mapping = changed(mapping, "model.architecture.blocks_per_stack", 2)
        seen = run(changed(mapping, "training.training_architecture", name))
        assert seen["result"]["training_architecture"] == name
        assert len(seen["lr"]) == 4 * units and seen["lr"] == seen["lr"][:4] * units

    def test_accumulation_steps(self, mapping):
        assert run(changed(mapping, "training.accumulation_steps", 3))["shapes"] == [(2, 8)] * 4 * 3

    def test_logits_chunk(self, base_of):
        """In chunks the head is read and not called; the loss is that of all logits at once."""
        plain = run(base_of("training.objective.logits_chunk"))
        chunked = run(changed(base_of(""), "training.objective.logits_chunk", 3))
        assert plain["dtypes"] == {torch.float32} and chunked["dtypes"] == set()
        assert chunked["losses"] == pytest.approx(plain["losses"], rel=1e-5)

    def test_cache(self, base_of, tmp_path):
        base = base_of("training.scope.cache_bytes")
        base = merged(base, {"training": {"max_steps": 30}, "model": {"architecture": {"n_stacks": 3}}})
        kept = changed(base, "training.scope.cache_bytes", 2**20)
        runs = [
            run(each) for each in (base, kept, changed(kept, "training.scope.cache_dir", str(tmp_path / "a")))
        ]
        computed = [[unit["prefix_blocks"] for unit in seen["result"]["results"]] for seen in runs]
        assert computed[0] == [0, 30, 60]
        assert computed[1] == computed[2] and 0 < computed[1][2] == computed[1][1] < 60
        assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["a"]
        for seen in runs[1:]:
            assert seen["losses"] == runs[0]["losses"] and seen["weights"].equal(runs[0]["weights"])

    def test_offload(self, base_of, tmp_path):
        base = base_of("training.scope.offload")
        plain, folder = run(base), str(tmp_path / "blocks")
        seen = run(merged(base, {"training": {"scope": {"offload": "disk", "offload_dir": folder}}}))
        assert seen["losses"] == plain["losses"] and seen["weights"].equal(plain["weights"])
        assert len(list((tmp_path / "blocks").glob("block-*.safetensors"))) == 2
        with pytest.raises(ValueError, match=r"training\.scope\.offload: got 'cpu'; allowed: none or disk"):
            run(changed(base, "training.scope.offload", "cpu"))

    @pytest.mark.parametrize(
        "recompute, runs",
        [
            ({}, [1] * 3),
            ({"kind": "full"}, [2] * 3),
            ({"kind": "selective"}, [2] * 3),
            ({"kind": "every_nth"}, [2, 1, 2]),
            ({"kind": "every_nth", "every": 3}, [2, 1, 1]),
            ({"kind": "by_name", "names": ["stacks.1.*.feedforward", "*.2.blocks.0"]}, [1, 2, 2]),
        ],
    )
    def test_recompute(self, mapping, recompute, runs, monkeypatch):
        """How often each feed-forward part runs in a step."""
        mapping = merged(mapping, {"model": {"architecture": {"n_stacks": 3}}, "training": {"max_steps": 1}})
        plain = run(mapping)
        calls, original = Counter(), SwiGLU.forward

        def counting(self, *args):
            calls[self] += self.training
            return original(self, *args)

        monkeypatch.setattr(SwiGLU, "forward", counting)
        seen = run(changed(mapping, "training.recompute", recompute))
        assert list(calls.values()) == runs
        assert seen["weights"].equal(plain["weights"])

    @pytest.mark.parametrize("budget", [0.0, 0.7])
    def test_recompute_budget(self, mapping, budget, monkeypatch):
        from torch._functorch import config as compiler

        found, original = [], block_module.Block.forward

        def looking(self, *args, **kwargs):
            found.append(compiler.activation_memory_budget)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(block_module.Block, "forward", looking)
        before = compiler.activation_memory_budget
        changes = {"compile": True, "max_steps": 1, "recompute": {"kind": "budget", "budget": budget}}
        with as_if_compiled():
            run(merged(mapping, {"training": changes, "data": {"validation_fraction": 0.0}}))
        assert found == [budget] * 2 and compiler.activation_memory_budget == before

    @pytest.mark.parametrize(
        "strategy, reshard, wrapped, asked",
        [
            ("none", True, 0, []),
            ("ddp", True, 1, []),
            ("fsdp", True, 0, [True, True, False, False]),
            ("fsdp", False, 0, [False] * 4),
        ],
    )
    def test_distributed(self, mapping, strategy, reshard, wrapped, asked, monkeypatch):
        """What is sent when, is seen with two processes only: `tests/training/test_distributed.py`."""
        from torch.distributed import fsdp
        from torch.nn.parallel import DistributedDataParallel

        mapping = merged(mapping, {"model": {"architecture": {"n_stacks": 3}}, "training": {"max_steps": 1}})
        plain = run(mapping)
        found, replicas, fully_shard = [], [], fsdp.fully_shard
        original = DistributedDataParallel.forward

        def sharding(module, **options):
            found.append(options["reshard_after_forward"])
            return fully_shard(module, **options)

        def replica(self, *args, **kwargs):
            replicas.append(self)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(fsdp, "fully_shard", sharding)
        monkeypatch.setattr(DistributedDataParallel, "forward", replica)
        changes = {"strategy": strategy, "reshard_after_forward": reshard}
        seen = run(changed(mapping, "training.distributed", changes))
        # The last Block's weights are the first that the backward pass asks for; then come the ends.
        assert found == asked and len(replicas) == wrapped
        assert seen["losses"] == pytest.approx(plain["losses"], rel=1e-6)

    def test_jsonl(self, mapping, tmp_path):
        seen = run(changed(mapping, "training.telemetry.jsonl", str(tmp_path / "steps.jsonl")))
        steps = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
        assert [line["step"] for line in steps] == [0, 1, 2, 3]
        assert [line["loss"] for line in steps] == seen["losses"]
        assert [line["lr"] for line in steps] == seen["lr"]

    def test_tensorboard(self, mapping, tmp_path):
        pytest.importorskip("tensorboard")
        run(changed(mapping, "training.telemetry.tensorboard", str(tmp_path / "events")))
        (events,) = (tmp_path / "events").glob("events.out.tfevents.*")
        assert events.stat().st_size > 0

    @pytest.mark.parametrize("wanted", [True, False])
    def test_parameter_norms(self, mapping, wanted):
        records = run(changed(mapping, "training.telemetry.parameter_norms", wanted))["result"]["records"]
        if not wanted:
            assert all(record.parameter_norms is None for record in records)
            return
        names = {name for name, _ in self.untrained(mapping).named_parameters()}
        for record in records:
            assert set(record.parameter_norms) == names
            assert math.hypot(*record.parameter_norms.values()) == pytest.approx(record.grad_norm, rel=1e-5)

    def test_tokenizer(self, mapping, tmp_path):
        """Words in the place of bytes: the text is shorter, and its ids are few."""
        tokenizers = pytest.importorskip("tokenizers")
        words = sorted({*TEXT.decode().split(), "[?]"})
        model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[?]")
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        mapping = changed(mapping, "data.tokenizer", str(tmp_path / "tokenizer.json"))
        training, _ = create_data(StackWiseConfig.from_dict(mapping))
        assert {int(i) for batch in training for i in batch["input_ids"].flatten()} < set(range(len(words)))
        assert all(math.isfinite(loss) for loss in run(mapping)["losses"])

    @pytest.mark.parametrize("grad_clip, clipped", [(1e-8, True), (None, False), (1e8, False)])
    def test_grad_clip(self, mapping, grad_clip, clipped):
        """Far below eps, a clipped gradient makes steps far smaller than the learning rate."""
        mapping = changed(changed(mapping, "training.optimizer.weight_decay", 0.0), "training.max_steps", 1)
        mapping = changed(mapping, "training.optimizer.eps", 1e-3)
        mapping = changed(mapping, "training.schedule", {"kind": "constant", "warmup_steps": 0})
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
            ("training.schedule", {"kind": "constant", "warmup_steps": 0}, [1e-2] * 4),
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
