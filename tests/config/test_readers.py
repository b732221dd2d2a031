"""Every key of the configuration is read by something, and every key of a training changes its result."""

import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pydantic import Field, create_model
from torch import distributed, nn

from stackwise import config as configuration
from stackwise.config import BlockConfig, CheckpointConfig, ModelConfig, RecomputeConfig, StackWiseConfig
from stackwise.config.section import Section
from stackwise.data import create_data
from stackwise.data.shards import write_shards
from stackwise.model import create_rack_from_config
from stackwise.training import ArchitectureTrainer
from stackwise.training.processes import Processes
from tests.config.keys import SECTIONS

TEXT = b"It was the best of times, it was the worst of times, it was the age of wisdom. " * 12
SIZES = {"vocab_size": 256, "d_model": 16, "n_heads": 2, "n_kv_heads": 1, "d_ff": 24}
RUN = {"batch_size": 2, "seq_len": 8, "max_steps": 4, "device": "cpu", "precision": "fp32", "log_interval": 1}
SCHEDULE = {"kind": "cosine", "warmup_steps": 1, "min_lr": 1e-3}
SMALL = {
    "model": SIZES | {"architecture": {"n_stacks": 2, "blocks_per_stack": 1}},
    "training": RUN | {"optimizer": {"lr": 1e-2}, "schedule": SCHEDULE},
    "data": {"dataset_path": "text", "validation_fraction": 0.1},
}
MLA = {"attention_type": "mla", "n_kv_heads": None, "latent": {"kv_lora_rank": 4, "qk_rope_head_dim": 4}}
MASKED = {"kind": "masked_token", "mask_token_id": 256}
DIFFUSION = {"kind": "mask_diffusion", "mask_token_id": 256}
BIDIRECTIONAL = {"attention_mode": "bidirectional", "vocab_size": 258}
BLOCKWISE = {"training": {"training_architecture": "blockwise"}}
TELEMETRY = {"parameter_norms": True, "jsonl": "steps.jsonl", "tensorboard": "events"}
SCOPE = {"growth": True, "polish_steps": 1, "cache_bytes": 2**20, "cache_dir": "cache"}
SCOPE |= {"offload": "disk", "offload_dir": "blocks"}
# Changes of the small run that together use every part of the configuration.
RUNS = [
    {"model": {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}},
    {"model": MLA},
    {"model": {"attention_type": "kernel", "kernel": {"n_features": 4}}},
    {
        "training": {
            "checkpoint_dir": "runs",
            "eval_interval": 2,
            "save_interval": 2,
            "checkpoint": {"keep_last": 1},
        }
    },
    {"training": {"guard": {}, "watch_logits": True, "bundle_dir": "bundles", "telemetry": TELEMETRY}},
    {"training": {"training_architecture": "stackwise", "scope": SCOPE}},
    {"training": {"recompute": {"kind": "every_nth", "every": 2}}},
    {"training": {"optimizer": {"kind": "muon", "per_stack": {0: {"lr": 1e-3}}}}},
    {"training": {"recompute": {"kind": "by_name", "names": ["*.feedforward"]}, "accumulation_steps": 2}},
    {"training": {"distributed": {"strategy": "fsdp"}}},
    {"training": {"compile": True, "recompute": {"kind": "budget"}}},
    {"model": BIDIRECTIONAL, "training": {"objective": MASKED | {"z_loss": 1e-4, "logits_chunk": 5}}},
    {"model": BIDIRECTIONAL, "training": {"objective": DIFFUSION}},
    {"data": {"dataset_path": None, "task": "shift"}},
]
# Sections that are read as a whole. Keys of the optimizer are in CHANGES, those of the guard in
# tests/stability/guard: some are read only after an alarm.
READ_AS_A_WHOLE = {"StackOptimizerConfig", "GuardPolicy"}
# Keys that change the losses, with another value. BASES has the runs in which they do, by prefix of the key.
CHANGES = {
    "training": {"batch_size": 3, "accumulation_steps": 2, "seq_len": 9, "seed": 1, "precision": "bf16"}
    | {"grad_clip": 1e-8},
    "training.optimizer": {"kind": "muon", "lr": 2e-2, "weight_decay": 5.0, "betas": [0.5, 0.5], "eps": 1.0}
    | {"momentum": 0.5},
    "training.optimizer.per_stack": {"lr": 2e-2, "weight_decay": 5.0},
    "training.schedule": {"kind": "wsd", "warmup_steps": 3, "min_lr": 9e-3, "decay_fraction": 1.0},
    "training.objective": {"kind": "mask_diffusion", "mask_token_id": 257, "mask_fraction": 0.9}
    | {"random_fraction": 1.0, "same_fraction": 1.0, "noise_schedule": "cosine", "z_loss": 0.1},
    "training.scope": {"head": "per_unit", "overlap": 1, "suffix": 1, "order": "right_to_left"}
    | {"growth": True, "polish_steps": 2},
    "data": {"dataset_path": None, "task": "copy", "pack_documents": True, "shuffle": False}
    | {"validation_fraction": 0.6},
}
CHANGES = {f"{section}.{key}": value for section, keys in CHANGES.items() for key, value in keys.items()}
BASES = {
    "training.optimizer.momentum": {"training": {"optimizer": {"kind": "muon"}}},
    "training.schedule.decay_fraction": {"training": {"schedule": {"kind": "wsd"}}},
    "training.objective.z_loss": {},
    "training.objective.noise_schedule": {"model": BIDIRECTIONAL, "training": {"objective": DIFFUSION}},
    "training.objective": {"model": BIDIRECTIONAL, "training": {"objective": MASKED}},
    "training.scope.head": BLOCKWISE | {"model": {"tie_embeddings": False}},
    "training.scope": BLOCKWISE,
    "data.dataset_path": {"data": {"validation_fraction": 0.0}},
    "data.task": {"data": {"dataset_path": None, "validation_fraction": 0.0}},
    "data.pack_documents": {"data": {"dataset_path": "shards"}},
}
CHANGE_LEARNING_RATES = ("training.schedule", "training.optimizer.lr", "training.scope.polish_steps")
# Changes of `training`, the result that they change, and its value. The plain run has another value.
RESULTS = [
    ({"batch_size": 3}, "shapes", [(3, 8)] * 4),
    ({"seq_len": 9}, "shapes", [(2, 9)] * 4),
    ({"accumulation_steps": 3}, "shapes", [(2, 8)] * 12),
    ({"max_steps": 6}, "steps", 6),
    ({"training_architecture": "stackwise"}, "steps", 8),
    ({"training_architecture": "blockwise"}, "steps", 16),
    ({"precision": "bf16"}, "dtypes", {torch.bfloat16}),
    ({"objective": {"logits_chunk": 3}}, "dtypes", set()),
    ({"compile": True}, "compiled", True),
    ({"eval_interval": 2}, "evaluated", [2, 4]),
    ({"checkpoint_dir": "runs"}, "files", {"runs/step-4"}),
    ({"checkpoint_dir": "runs", "save_interval": 3}, "files", {"runs/step-3", "runs/step-4"}),
    ({"telemetry": {"jsonl": "logs/steps.jsonl"}}, "files", {"logs/steps.jsonl"}),
]
# Keys whose effect the tests in tests/training and tests/data check.
ELSEWHERE = {
    *(f"training.{key}" for key in ["device", "log_interval", "eval_batches", "resume", "watch_logits"]),
    "training.bundle_dir",
    *(f"training.checkpoint.{key}" for key in CheckpointConfig.model_fields),
    *(f"training.recompute.{key}" for key in RecomputeConfig.model_fields),
    *(f"training.distributed.{key}" for key in ["strategy", "reshard_after_forward"]),
    *(f"training.scope.{key}" for key in ["cache_bytes", "cache_dir", "offload", "offload_dir"]),
    *["training.telemetry.parameter_norms", "training.telemetry.tensorboard", "data.tokenizer"],
}


def owner(kind, key):
    """Return the class from which a key must be read: a model hands the keys of a Block on to its Blocks."""
    handed_on = kind is ModelConfig and key in BlockConfig.model_fields and key != "sliding_window"
    return (BlockConfig if handed_on else kind).__name__


LEAVES = {
    f"{path}.{key}": (owner(kind, key), key)
    for path, kind in SECTIONS.items()
    for key in kind.model_fields
    if path and f"{path}.{key}" not in SECTIONS
} | {"model.blocks.sliding_window": ("BlockConfig", "sliding_window")}


def merged(mapping, other):
    """Return `mapping` with the values of `other`, section by section."""
    return mapping | {
        key: merged(mapping.get(key, {}), value) if isinstance(value, dict) else value
        for key, value in other.items()
    }


def changed(mapping, path, value):
    """Return a copy of the mapping with another value at the dotted path; of Stack 0 in `per_stack`."""
    for key in reversed(path.split(".")):
        value = {key: {0: value} if key == "per_stack" else value}
    return merged(mapping, value)


@pytest.fixture(autouse=True)
def _text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text").write_bytes(TEXT)


@contextlib.contextmanager
def recorded_reads():
    """Collect the (class, key) pairs that are read as attributes outside the configuration itself.

    `ModelConfig.blocks` belongs to the readers: its keys decide which Blocks there are.
    """
    reads, original = set(), Section.__getattribute__
    inside = Path(configuration.__file__).parent

    def reading(self, name):
        code = sys._getframe(1).f_code
        validates = Path(code.co_filename).parent == inside and code.co_qualname != "ModelConfig.blocks"
        if not validates and name in type(self).model_fields:
            reads.add((type(self).__name__, name))
        return original(self, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Section, "__getattribute__", reading)
        yield reads


@contextlib.contextmanager
def processes_of(config):
    """Give the processes of a distributed configuration: a group of one."""
    if config.training.distributed.strategy == "none":
        yield None
        return
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield Processes.from_environment(config.training, environment={})
    finally:
        distributed.destroy_process_group()


def run(mapping, kind=StackWiseConfig):
    """Build, train and evaluate a Rack, without compilation. Return the visible results."""
    config = kind.from_dict(mapping)
    torch.manual_seed(7)
    rack = create_rack_from_config(config)
    found = SimpleNamespace(shapes=[], dtypes=set(), compiled=False)

    def compile_nothing(function, **_):
        found.compiled = True
        return function

    hooks = [
        rack.embedding.register_forward_hook(lambda _m, ids, _: found.shapes.append(tuple(ids[0].shape))),
        rack.lm_head.register_forward_hook(lambda _m, _in, logits: found.dtypes.add(logits.dtype)),
    ]
    before = {*Path().rglob("*")}
    training, validation = create_data(config)
    with processes_of(config) as processes, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", compile_nothing)
        patch.setattr(torch.compiler, "is_compiling", lambda: config.training.compile)
        trainer = ArchitectureTrainer(config, progress=False, processes=processes)
        result = trainer.train_architecture(rack, training, validation)
        for hook in hooks:
            hook.remove()
        if validation is not None:
            trainer.evaluate(rack, validation)
    found.losses = [record.loss for record in result["records"]]
    found.lr = [record.lr for record in result["records"]]
    found.steps = len(found.lr)
    found.evaluated = [record.steps for record in result.get("validation", [])]
    found.weights = nn.utils.parameters_to_vector(rack.parameters()).detach()
    new = {*Path().rglob("*")} - before
    found.files = {str(path) for path in new if path.parent != Path() and path.parent.parent == Path()}
    return found


@pytest.fixture(scope="module")
def plain_runs():
    """Results of unchanged runs, by their mapping."""
    return {}


class TestReads:
    def test_every_key_is_read(self):
        with recorded_reads() as reads:
            for changes in RUNS:
                run(merged(SMALL, changes))
        unread = [
            path for path, leaf in LEAVES.items() if leaf not in reads and leaf[0] not in READ_AS_A_WHOLE
        ]
        assert unread == []

    @pytest.mark.parametrize("section", ["model", "training", "data"])
    def test_key_that_nothing_reads_is_not_recorded(self, section):
        kind = StackWiseConfig.model_fields[section].annotation
        longer = create_model(kind.__name__, __base__=kind, forgotten=(int, 3))
        field = (longer, Field(default_factory=longer))
        whole = create_model("StackWiseConfig", __base__=StackWiseConfig, **{section: field})
        with recorded_reads() as reads:
            run(SMALL, whole)
        assert ("BlockConfig", "d_ff") in reads and (kind.__name__, "forgotten") not in reads

    def test_validation_and_writing_are_not_reads(self, tmp_path):
        config = StackWiseConfig.from_dict(SMALL)
        with recorded_reads() as reads:
            config.validate()
            config.to_yaml(tmp_path / "config.yaml")
            config.to_dict()
        assert reads == set()

    def test_blocks_read_only_sizes_and_windows(self):
        config = StackWiseConfig.from_dict(SMALL)
        with recorded_reads() as reads:
            config.model.blocks()
        sizes = {("ArchitectureConfig", "n_stacks"), ("ArchitectureConfig", "blocks_per_stack")}
        model = {("ModelConfig", "sliding_window"), ("ModelConfig", "architecture")}
        assert reads == {("StackWiseConfig", "model")} | model | sizes


class TestEffects:
    def test_every_key_is_in_a_table(self):
        def paths(tree, path="training"):
            for key, value in tree.items():
                yield from paths(value, f"{path}.{key}") if isinstance(value, dict) else [f"{path}.{key}"]

        seen = {path for changes, *_ in RESULTS for path in paths(changes)}
        listed = seen | CHANGES.keys() | ELSEWHERE
        wanted = {path for path in LEAVES if path.startswith(("training.", "data."))}
        assert {path for path in wanted if ".guard." not in path} == listed  # tests/training/test_guard.py

    def test_key_of_other_tests_is_in_them(self):
        files = [
            path for room in ("training", "data") for path in Path(__file__).parents[1].glob(f"{room}/*.py")
        ]
        tests = "\n".join(path.read_text() for path in files)
        assert [path for path in ELSEWHERE if path.rpartition(".")[2] not in tests] == []

    @pytest.mark.parametrize("path", CHANGES)
    def test_key_changes_the_losses(self, path, plain_runs):
        base = merged(SMALL, next((BASES[place] for place in BASES if path.startswith(place)), {}))
        if base["data"]["dataset_path"] == "shards":
            documents = [list(TEXT[start : start + 7]) for start in range(0, len(TEXT), 7)]
            write_shards(Path("shards"), documents, vocab_size=256)
        if repr(base) not in plain_runs:
            plain_runs[repr(base)] = run(base)
        plain, other = plain_runs[repr(base)], run(changed(base, path, CHANGES[path]))
        assert plain.losses != other.losses
        assert not plain.weights.equal(other.weights)
        assert (plain.lr != other.lr) == path.startswith(CHANGE_LEARNING_RATES)

    def test_same_keys_give_the_same_bits(self):
        plain, other = run(SMALL), run(SMALL)
        assert plain.losses == other.losses and plain.weights.equal(other.weights)
        assert plain.files == set()

    @pytest.mark.parametrize("changes, name, expected", RESULTS)
    def test_key_changes_the_result(self, changes, name, expected):
        blocks = 2 if changes.get("training_architecture") == "blockwise" else 1
        mapping = changed(SMALL, "model.architecture.blocks_per_stack", blocks)
        found = getattr(run(merged(mapping, {"training": changes})), name)
        assert found == expected
        assert getattr(run(mapping), name) != found
