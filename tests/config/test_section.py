"""Sections: values that each key accepts and refuses, error messages, assignment and round trips."""

import collections
import copy
import functools
import json
import pickle
import re
import types
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from stackwise.config import (
    BlockConfig,
    ConfigError,
    DataConfig,
    OptimizerConfig,
    StackWiseConfig,
)
from stackwise.config.yaml import dump_yaml, load_yaml
from tests.config.keys import (
    LARGEST,
    SECTIONS,
    Key,
    acceptances,
    assert_refused,
    choice,
    flag,
    integer,
    number,
    problems,
    refusals,
    section,
    text,
)

PAGES = list(Path(__file__).parents[2].glob("docs/reference/configuration*.md"))
NO_DEVICES = ["", "gpu", "CUDA", "cuda:", "cuda:-1", "cpu:0", " cpu", "cuda:1\n", "cuda:\u0661"]
DEVICES = [(0, ("string",)), *((device, ("auto, cpu, cuda, cuda:N",)) for device in NO_DEVICES)]
INITIALIZATIONS = ["normal", "kaiming", "xavier", "small", "zero_out"]
MANY_HEADS = {"attention_type": "kernel", "n_heads": LARGEST, "head_dim": 2}
RECOMPUTATIONS = ["none", "full", "every_nth", "selective", "budget"]
NAMES = [("mlp", ("list",)), (["mlp", "a\0b"], ("without NUL",))]
PER_STACK = {7: {"lr": 1, "weight_decay": 0}, 0: {"lr": None, "weight_decay": None}}
WINDOWS = [([], ("at least 1 item",)), ("4", ("integer",)), (0, ("1",)), ((4,), ("integer",))]
BETAS = [([0.9], ("2",)), ([0.9] * 3, ("2",))]
LLAMA3 = {"rope_type": "llama3", "factor": 2.0}
MASKED = {"kind": "masked_token", "mask_token_id": 3}
# Every key of a configuration. Keys of the guard are in test_guard.py.
KEYS = {
    "": {"model": section(), "training": section(), "data": section()},
    "model": {
        "vocab_size": integer(1),
        "d_model": integer(1, n_heads=1, n_kv_heads=1, use_rope=False),
        "d_ff": integer(1),
        "n_heads": integer(1, n_kv_heads=1, head_dim=2),
        "n_kv_heads": integer(1, **MANY_HEADS).or_null().accepts(1, LARGEST),
        "head_dim": integer(1, use_rope=False).or_null(),
        "max_seq_len": integer(1).or_null(),
        "sliding_window": Key([1, LARGEST, [4, None], None], WINDOWS),
        "attention_type": choice("mha", "gqa", "mqa", "mla", "kernel").accepts("gqa", "kernel"),
        "attention_mode": choice("causal", "bidirectional"),
        "latent": section().or_null(),
        "kernel": section().or_null(),
        "qk_norm": choice("head", "width").or_null(),
        "softcap": number(above=0).or_null(),
        "qkv_bias": flag(),
        "norm": choice("rmsnorm", "layernorm"),
        "norm_eps": number(above=0),
        "norm_position": choice("pre", "post"),
        "dropout": number(least=0, below=1),
        "tie_embeddings": flag(),
        "embedding_max_norm": number(above=0).or_null(),
        "freeze_up_proj": flag(),
        "use_rope": flag(),
        "rope_theta": number(above=0),
        "rope_scaling": section().or_null(),
        "initialization": choice(*INITIALIZATIONS, "mup").accepts(*INITIALIZATIONS),
        "mup_base_width": integer(1, initialization="mup").or_null(),
        "architecture": section(),
    },
    "model.architecture": {
        "n_stacks": integer(1, most=10_000, blocks_per_stack=1),
        "blocks_per_stack": integer(1, most=10_000, n_stacks=1),
    },
    "model.latent": {
        "kv_lora_rank": integer(1),
        "q_lora_rank": integer(1).or_null(),
        "qk_nope_head_dim": integer(1),
        "qk_rope_head_dim": integer(1).accepts(2, LARGEST - 1),
        "v_head_dim": integer(1),
    },
    "model.kernel": {
        "feature_map": choice("favor", "gaussian", "laplacian", "elu"),
        "n_features": integer(1, feature_map="favor"),
        "bandwidth": number(above=0, feature_map="gaussian"),
    },
    "model.rope_scaling": {
        "rope_type": choice("linear", "llama3", factor=2.0),
        "factor": number(least=1, rope_type="linear").accepts(1, 1e9),
        "low_freq_factor": number(above=0, **LLAMA3),
        "high_freq_factor": number(above=0, low_freq_factor=1e-13, **LLAMA3),
        "original_max_position_embeddings": integer(1, **LLAMA3),
    },
    "training": {
        "training_architecture": choice("rackwise", "stackwise", "blockwise"),
        "batch_size": integer(1),
        "accumulation_steps": integer(1),
        "seq_len": integer(1),
        "max_steps": integer(1),
        "seed": integer(0),
        "device": Key(["auto", "cpu", "cuda", "cuda:0", "cuda:11"], DEVICES),
        "precision": choice("fp32", "bf16", "bf16_weights", "fp16", "float8"),
        "compile": flag(),
        "grad_clip": number(above=0).or_null(),
        "log_interval": integer(1),
        "eval_interval": integer(1).or_null(),
        "eval_batches": integer(1, eval_interval=1).or_null(),
        "checkpoint_dir": text().or_null(),
        "save_interval": integer(1, checkpoint_dir="runs"),
        "resume": flag(checkpoint_dir="runs"),
        **dict.fromkeys(["optimizer", "schedule", "objective", "scope", "recompute"], section()),
        **dict.fromkeys(["distributed", "checkpoint", "telemetry"], section()),
        "guard": section().or_null(),
        "watch_logits": flag(guard={}),
        "bundle_dir": text(guard={}).or_null(),
    },
    "training.optimizer": {
        "kind": choice("adamw", "muon"),
        "lr": number(above=0),
        "weight_decay": number(least=0),
        "betas": Key([[0.0, 0.999]], BETAS),
        "eps": number(above=0),
        "momentum": number(least=0, below=1, kind="muon"),
        "per_stack": Key([{}, PER_STACK], [([{}], ("dictionary",)), (None, ("dictionary",))]),
    },
    "training.optimizer.per_stack": {
        "lr": number(above=0).or_null(),
        "weight_decay": number(least=0).or_null(),
    },
    "training.schedule": {
        "kind": choice("cosine", "linear", "constant", "wsd", "inverse_sqrt"),
        "warmup_steps": integer(0).or_null(),
        "min_lr": number(least=0),
        "decay_fraction": number(above=0, most=1, kind="wsd"),
    },
    "training.objective": {
        "kind": choice("next_token", "masked_token", "mask_diffusion").accepts("next_token"),
        "mask_token_id": integer(0, kind="mask_diffusion").or_null(),
        "mask_fraction": number(above=0, most=1, **MASKED),
        "random_fraction": number(least=0, most=1, **MASKED),
        "same_fraction": number(least=0, most=1, **MASKED),
        "noise_schedule": choice("linear", "cosine", kind="mask_diffusion", mask_token_id=3),
        "z_loss": number(least=0),
        "logits_chunk": integer(1).or_null(),
    },
    "training.scope": {
        "head": choice("shared", "per_unit"),
        "overlap": integer(0),
        "suffix": integer(0),
        "order": choice("left_to_right", "right_to_left"),
        "growth": flag(),
        "polish_steps": integer(0),
        "cache_bytes": integer(0),
        "cache_dir": text(cache_bytes=1).or_null(),
        "offload": choice("none", "cpu", "disk").accepts("none", "cpu"),
        "offload_dir": text(offload="disk").or_null(),
    },
    "training.recompute": {
        "kind": choice(*RECOMPUTATIONS, "by_name").accepts(*RECOMPUTATIONS),
        "every": integer(1, kind="every_nth"),
        "budget": number(least=0, most=1, kind="budget"),
        "names": Key([["*"], [""]], NAMES, {"kind": "by_name"}),
    },
    "training.distributed": {
        "strategy": choice("none", "ddp", "fsdp"),
        "reshard_after_forward": flag(strategy="fsdp"),
    },
    "training.checkpoint": {
        "keep_last": integer(1),
        "keep_every": integer(1).or_null(),
        "keep_best": integer(0),
        "asynchronous": flag(),
    },
    "training.telemetry": {
        "parameter_norms": flag(),
        "jsonl": text().or_null(),
        "tensorboard": text().or_null(),
    },
    "data": {
        "dataset_path": text().or_null(),
        "task": choice("copy", "shift", "induction", "markov").or_null(),
        "tokenizer": text(),
        "pack_documents": flag(),
        "validation_fraction": number(least=0, below=1),
        "shuffle": flag(),
    },
}
SLOPES = "'cosine' or 'linear' or 'wsd' or 'inverse_sqrt'"
# Values without an effect: section, key, value, the key that decides, its value, and the values it needs.
IDLE = [
    ("model", "rope_theta", 5e5, "use_rope", False, "True"),
    ("model.kernel", "n_features", 64, "feature_map", "elu", "'favor' or 'gaussian' or 'laplacian'"),
    ("model.kernel", "bandwidth", 2.0, "feature_map", "favor", "'gaussian' or 'laplacian'"),
    ("model.rope_scaling", "low_freq_factor", 2.0, "rope_type", "linear", "'llama3'"),
    ("model.rope_scaling", "high_freq_factor", 8.0, "rope_type", "linear", "'llama3'"),
    ("model.rope_scaling", "original_max_position_embeddings", 64, "rope_type", "linear", "'llama3'"),
    ("training.optimizer", "momentum", 0.5, "kind", "adamw", "'muon'"),
    ("training.schedule", "min_lr", 1e-5, "kind", "constant", SLOPES),
    ("training.schedule", "decay_fraction", 0.5, "kind", "cosine", "'wsd'"),
    ("training.objective", "mask_fraction", 0.5, "kind", "next_token", "'masked_token'"),
    ("training.objective", "random_fraction", 0.5, "kind", "next_token", "'masked_token'"),
    ("training.objective", "same_fraction", 0.5, "kind", "next_token", "'masked_token'"),
    ("training.objective", "noise_schedule", "cosine", "kind", "next_token", "'mask_diffusion'"),
    ("training.recompute", "every", 3, "kind", "full", "'every_nth'"),
    ("training.recompute", "budget", 0.25, "kind", "none", "'budget'"),
    ("training.recompute", "names", ["*"], "kind", "selective", "'by_name'"),
    ("training.distributed", "reshard_after_forward", False, "strategy", "ddp", "'fsdp'"),
    ("training", "eval_batches", 3, "eval_interval", None, "not null"),
    ("training", "save_interval", 3, "checkpoint_dir", None, "not null"),
    ("training", "resume", True, "checkpoint_dir", None, "not null"),
    ("training", "checkpoint", {"asynchronous": True}, "checkpoint_dir", None, "not null"),
    ("training", "watch_logits", True, "guard", None, "not null"),
    ("training", "bundle_dir", "bundles", "guard", None, "not null"),
    ("data", "tokenizer", "t.json", "task", "copy", "null"),
]
WORDS = st.sampled_from([key for rows in KEYS.values() for key in rows]) | st.text(max_size=3)
TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=5),
    max_leaves=12,
)


class Silent:
    """Object without a text."""

    def __repr__(self):
        raise RuntimeError


def required(kind):
    """Return values for the keys of a section that have no default."""
    return {"rope_type": "llama3", "factor": 2.0} if kind is SECTIONS["model.rope_scaling"] else {}


def test_table_has_a_row_for_every_key():
    schema = {path: set(kind.model_fields) for path, kind in SECTIONS.items() if path != "training.guard"}
    assert {path: set(rows) for path, rows in KEYS.items()} == schema


def test_table_has_a_row_for_every_key_without_effect():
    applies = {(path, key) for path, kind in SECTIONS.items() for key in kind.applies}
    assert {(path, key) for path, key, *_ in IDLE} == applies


@pytest.mark.parametrize("kind, given, key, value", acceptances(KEYS))
def test_key_accepts(kind, given, key, value):
    assert kind.from_dict(required(kind) | given | {key: value}).to_dict()[key] == value


@pytest.mark.parametrize("kind, given, key, value", acceptances(KEYS))
def test_accepted_value_survives_yaml_and_json(kind, given, key, value):
    section = kind.from_dict(required(kind) | given | {key: value})
    assert kind.from_dict(load_yaml(dump_yaml(section.to_dict()).encode())) == section
    assert kind.from_dict(yaml.safe_load(dump_yaml(section.to_dict()))) == section
    assert kind.from_json(json.loads(json.dumps(section.to_dict()))) == section


@pytest.mark.parametrize("kind, key, value, words", refusals(KEYS))
def test_key_refuses(kind, key, value, words):
    assert_refused(problems(kind, required(kind) | {key: value}), key, value, words)


@pytest.mark.parametrize("path, key", [(path, key) for path, rows in KEYS.items() for key in rows])
def test_refused_assignment_changes_nothing(path, key):
    kind = SECTIONS[path]
    config = kind.from_dict(required(kind))
    for value, words in KEYS[path][key].refused:
        with pytest.raises(ConfigError) as caught:
            setattr(config, key, value)
        assert_refused(caught.value.problems, key, value, words)
    assert config == kind.from_dict(required(kind))


@pytest.mark.parametrize("path", [path for path in SECTIONS if path])
def test_default_is_that_of_the_reference_page(path):
    heading = path.replace("per_stack", "per_stack.N")
    pages = "".join(page.read_text() for page in PAGES)
    [text] = re.findall(rf"^## {heading}\n(.*?)(?=^#|\Z)", pages, re.MULTILINE | re.DOTALL)
    shown = dict(re.findall(r"^\| `(\w+)` \| .* \| `(.+?)` \| ", text, re.MULTILINE))
    defaults = SECTIONS[path].from_dict(required(SECTIONS[path])).to_dict()
    keys = [
        key for key in defaults if f"{path}.{key}" not in SECTIONS and key not in required(SECTIONS[path])
    ]
    found = {
        key: load_yaml(value.encode()) for key, value in shown.items() if f"{path}.{key}" not in SECTIONS
    }
    assert found == {key: defaults[key] for key in keys}, "run make pages, which writes the pages"


@pytest.mark.parametrize("key, value", [("lr", "1e-4"), ("eps", "1")])
def test_text_is_no_number(key, value):
    [line] = problems(OptimizerConfig, {key: value})
    assert line.endswith("number, not text")


def test_whole_number_becomes_a_float():
    lr = OptimizerConfig.from_dict({"lr": 1}).lr
    assert lr == 1 and type(lr) is float


@pytest.mark.parametrize(
    "kind, key, value, other, state, needed", [(SECTIONS[path], *row) for path, *row in IDLE]
)
class TestKeyWithoutEffect:
    def test_key_is_refused(self, kind, key, value, other, state, needed):
        [line] = problems(kind, required(kind) | {other: state, key: value})
        if isinstance(value, dict):
            [(inner, value)] = value.items()
            key = f"{key}.{inner}"
        now = "null" if state is None else repr(state)
        reason = f"has an effect only with {other}={needed}; now {other}={now}"
        assert line == f"{key}: got {value!r} ({type(value).__name__}); {reason}"

    def test_default_is_accepted(self, kind, key, value, other, state, needed):
        default = kind.from_dict(required(kind)).to_dict()[key]
        found = kind.from_dict(required(kind) | {other: state, key: default})
        assert found.to_dict()[key] == default

    def test_put_away_resets_the_key(self, kind, key, value, other, state, needed):
        content = required(kind) | {other: state, key: value}
        kind.put_away(content)
        assert content[key] == kind.from_dict(required(kind)).to_dict()[key]


def test_put_away_resets_keys_of_nested_sections():
    scaling = {"rope_type": "linear", "factor": 2.0, "low_freq_factor": 2.0}
    optimizer, schedule = {"momentum": 0.5}, {"kind": "wsd", "decay_fraction": 0.5}
    content = {"model": {"rope_scaling": scaling}, "training": {"optimizer": optimizer, "schedule": schedule}}
    StackWiseConfig.put_away(content)
    assert content["model"]["rope_scaling"]["low_freq_factor"] == 1.0
    assert content["training"]["optimizer"]["momentum"] == 0.95
    assert content["training"]["schedule"]["decay_fraction"] == 0.5
    StackWiseConfig.from_dict(content)


@pytest.mark.parametrize("kind", [*SECTIONS.values(), BlockConfig])
def test_every_key_has_a_description(kind):
    descriptions = kind.descriptions()
    assert list(descriptions) == list(kind.model_fields)
    assert all(line and not line.endswith(".") for line in descriptions.values())


def test_description_is_the_text_below_the_key():
    assert OptimizerConfig.descriptions()["momentum"] == "Momentum of Muon"
    assert BlockConfig.descriptions()["d_ff"] == "Width inside the feed-forward network"


@pytest.mark.parametrize("kind", SECTIONS.values())
class TestUnknownKey:
    def test_similar_key_is_suggested(self, kind):
        for key in kind.model_fields:
            [line] = problems(kind, required(kind) | {f"{key}x": 1})
            allowed = ", ".join(kind.model_fields)
            assert line == f"{key}x: unknown key; did you mean {key!r}? allowed: {allowed}"

    def test_no_key_is_suggested_for_another_word(self, kind):
        [line] = problems(kind, required(kind) | {"zzzz": 1})
        assert line == f"zzzz: unknown key; allowed: {', '.join(kind.model_fields)}"

    def test_assignment_is_refused(self, kind):
        config = kind.from_dict(required(kind))
        with pytest.raises(ConfigError, match="zzzz: unknown key"):
            config.zzzz = 1
        assert not hasattr(config, "zzzz")


@pytest.mark.parametrize(
    "path", ["model.architecture", "training.optimizer", "training.optimizer.per_stack.0"]
)
def test_unknown_key_of_a_nested_section_is_named_with_its_path(path):
    mapping = {"zzzz": 1}
    for key in reversed(path.split(".")):
        mapping = {int(key) if key.isdigit() else key: mapping}
    allowed = ", ".join(SECTIONS[path.removesuffix(".0")].model_fields)
    assert problems(StackWiseConfig, mapping) == [f"{path}.zzzz: unknown key; allowed: {allowed}"]


@pytest.mark.parametrize("key", [1, None, True, 2.5, (1, 2), b"model"])
def test_key_that_is_not_text_is_refused(key):
    for mapping in ({key: 1}, {"model": {key: 1}}, {"training": {"optimizer": {key: 1}}}):
        [line] = problems(StackWiseConfig, mapping)
        assert str(key) in line


@pytest.mark.parametrize("value", [None, 0, "x", [], [("model", {})], {"model"}])
def test_value_that_is_not_a_mapping_is_refused(value):
    [line] = problems(StackWiseConfig, value)
    assert line == f"got {value!r} ({type(value).__name__}); allowed: a mapping of keys"


@pytest.mark.parametrize("kind", [collections.OrderedDict, types.MappingProxyType, collections.UserDict])
def test_mapping_of_any_class_is_accepted(kind):
    config = StackWiseConfig.from_dict(kind({"model": kind({"architecture": kind({"n_stacks": 3})})}))
    assert config.model.architecture.n_stacks == 3


class TestErrors:
    def test_all_problems_are_reported_with_their_paths(self):
        wrong = {
            "model": {"n_heads": 7, "architecture": {"n_stacks": 0}},
            "training": {
                "optimizer": {"lr": "1e-4", "momentun": 1, "per_stack": {0: {"eps": 1.0}, -1: {}, "2": {}}},
                "schedule": {"warmup_steps": 201, "kind": "step"},
                "scope": {"overlap": 1, "suffix": 1, "of_load": "disk"},
                "recompute": {"kind": "by_name", "every": 0},
            },
            "data": {"shuffle": 1, "task": "sort"},
            "modle": {},
        }
        stacks = [f"optimizer.per_stack.{key}" for key in ("0.eps", "-1", "2")]
        training = ["optimizer.lr", *stacks, "optimizer.momentun", "schedule.kind", "scope.suffix"]
        training += ["scope.of_load", "recompute.every", "recompute.names"]
        assert [line.split(": ")[0] for line in problems(StackWiseConfig, wrong)] == [
            *["model.n_heads", "model.architecture.n_stacks"],
            *(f"training.{key}" for key in training),
            *["data.task", "data.shuffle", "modle"],
        ]

    @pytest.mark.parametrize("name", ["a.yaml", "configuration"])
    def test_message_names_the_source(self, name):
        one, two = ConfigError(["x: bad"], name), ConfigError(["x: bad", "y: bad"], name)
        assert str(one) == f"{name}: x: bad"
        assert str(two) == f"{name}: 2 problems\n  x: bad\n  y: bad"
        assert isinstance(one, ValueError)

    def test_source_is_reported(self):
        for build in (DataConfig.from_dict, DataConfig.from_json):
            with pytest.raises(ConfigError) as caught:
                build({"shuffle": 1}, source="run.json")
            assert caught.value.source == "run.json"

    def test_copies_and_pickles_are_equal(self):
        error = ConfigError(["model.d_ff: got 0 (int); allowed: 1", "data: x"], "a.yaml")
        for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
            assert again.problems == error.problems and str(again) == str(error)

    @pytest.mark.parametrize(
        "value, start",
        [
            ("x" * 56, "'" + "x" * 56 + "' (str)"),
            ("x" * 10**6, "'xxxxxxxx"),
            ([[0] * 1000] * 1000, "[[0, 0, 0, "),
            (functools.reduce(lambda inner, _: [inner], range(100_000), []), "list (list)"),
            (-(10**5000), "an integer of 16610 bits (int)"),
            (Silent(), "Silent (Silent)"),
        ],
        ids=["text", "long text", "long list", "deep list", "long integer", "failing repr"],
    )
    def test_value_is_shown_in_readable_length(self, value, start):
        [line] = problems(DataConfig, {"shuffle": value})
        assert line.startswith(f"shuffle: got {start}")
        assert len(line) < 120


class TestAssignment:
    def test_accepted_value_is_converted_and_stored(self):
        config = StackWiseConfig()
        config.training.optimizer.lr = 1
        config.model.architecture = {"n_stacks": 7}
        config.training.optimizer.per_stack = {2: {"lr": 1}}
        config.training.optimizer.per_stack[2].lr = 3
        expected = StackWiseConfig().to_dict()
        expected["training"]["optimizer"] |= {"lr": 1.0, "per_stack": {2: {"lr": 3.0, "weight_decay": None}}}
        expected["model"]["architecture"]["n_stacks"] = 7
        assert config.to_dict() == expected
        config.validate()

    def test_values_are_not_shared(self):
        betas = [0.5, 0.6]
        first = OptimizerConfig.from_dict({"betas": betas})
        betas.append(7.0)
        first.to_dict()["betas"].append(7.0)
        OptimizerConfig().betas.append(7.0)
        assert first.betas == [0.5, 0.6]
        assert OptimizerConfig().betas == [0.9, 0.95]


class TestFromDict:
    def test_missing_keys_have_their_defaults(self):
        expected = StackWiseConfig().to_dict()
        expected["model"]["d_ff"] = 64
        assert StackWiseConfig.from_dict({"model": {"d_ff": 64}}).to_dict() == expected

    def test_mapping_is_not_changed(self):
        mapping = {"training": {"optimizer": {"per_stack": {0: {"lr": 1}}}}}
        before = copy.deepcopy(mapping)
        StackWiseConfig.from_dict(mapping)
        assert mapping == before

    def test_json_has_text_for_indices_of_stacks(self):
        config = StackWiseConfig.from_dict({"training": {"optimizer": {"per_stack": {7: {"lr": 1}, 0: {}}}}})
        assert StackWiseConfig.from_json(json.loads(json.dumps(config.to_dict()))) == config

    @pytest.mark.parametrize("key", ["x", "-1", "1.0", "\u0661", ""])
    def test_json_with_another_text_for_an_index_is_refused(self, key):
        with pytest.raises(ConfigError, match=r"per_stack\..*: got .* as a key"):
            OptimizerConfig.from_json({"per_stack": {key: {}}})

    @given(st.dictionaries(st.sampled_from(["model", "training", "data"]), TREES))
    def test_any_tree_is_accepted_or_refused_with_short_lines(self, tree):
        try:
            config = StackWiseConfig.from_dict(tree)
        except ConfigError as error:
            lines = error.problems
        else:
            lines = []
            assert StackWiseConfig.from_dict(config.to_dict()) == config
        assert all(len(line) < 2000 for line in lines)
