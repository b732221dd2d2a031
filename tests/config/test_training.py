"""Settings of the training: sections whose keys fit together."""

import re

import pytest

from stackwise.config import ConfigError, StackWiseConfig, TrainingConfig
from tests.config.keys import assert_refused, problems, same_values

BLOCKWISE = {"training_architecture": "blockwise"}
MASKED = {"kind": "masked_token", "mask_token_id": 3}
DIFFUSION = {"kind": "mask_diffusion", "mask_token_id": 3}
RUNS = {"checkpoint_dir": "runs"}
BACKWARD = "right_to_left"
BOTH_FRACTIONS = MASKED | {"random_fraction": 0.5, "same_fraction": 0.75}
# Keys of a section of `training`, the key refused, its value and the rule.
REFUSED = {
    "schedule": [
        ({"warmup_steps": 201}, "warmup_steps", 201, "must not exceed training.max_steps=200"),
        ({"min_lr": 0.5}, "min_lr", 0.5, "must not exceed training.optimizer.lr=0.0001"),
    ],
    "optimizer": [
        ({"betas": [0.9, "x"]}, "betas.1", "x", "number"),
        ({"betas": [0.9, 1.0]}, "betas.1", 1.0, "less than 1"),
        ({"betas": [-0.1, 0.9]}, "betas.0", -0.1, "0"),
        ({"per_stack": {"0": {}}}, "per_stack.0", "0", "as a key"),
        ({"per_stack": {-1: {}}}, "per_stack.-1", -1, "0"),
        ({"per_stack": {2**63: {}}}, f"per_stack.{2**63}", 2**63, str(2**63)),
        ({"per_stack": {3: None}}, "per_stack.3", None, "dictionary"),
    ],
    "objective": [
        ({"kind": "masked_token"}, "mask_token_id", None, "kind='masked_token' needs the id of a token"),
        ({"kind": "mask_diffusion"}, "mask_token_id", None, "kind='mask_diffusion' needs the id of a token"),
        ({"mask_token_id": 3}, "mask_token_id", 3, "allowed: null, because kind='next_token' masks nothing"),
        (BOTH_FRACTIONS, "same_fraction", 0.75, "must not exceed 1 together with random_fraction=0.5"),
    ],
    "recompute": [
        ({"kind": "budget"}, "kind", "budget", "needs compile=true"),
        ({"kind": "by_name"}, "names", [], "kind='by_name' needs at least one pattern"),
        ({"names": [3]}, "names.0", 3, "string"),
    ],
    "checkpoint": [({"keep_best": 1}, "keep_best", 1, "has an effect only with checkpoint_dir=not null")],
    "scope": [
        ({key: value}, key, value, "only with training_architecture='stackwise' or 'blockwise'")
        for key, value in [
            *[("head", "per_unit"), ("overlap", 1), ("suffix", 1), ("order", BACKWARD), ("offload", "cpu")],
            *[("polish_steps", 1), ("polish_steps", 999), ("cache_bytes", 1)],
        ]
    ],
}
REFUSED_LAYERWISE = [
    ({"overlap": 2, "suffix": 1}, "suffix", 1, "needs overlap=0"),
    ({"overlap": 2, "order": BACKWARD}, "order", BACKWARD, "needs overlap=0 (overlap=2)"),
    ({"suffix": 2, "order": BACKWARD}, "order", BACKWARD, "needs suffix=0 (suffix=2)"),
    ({"growth": True, "order": BACKWARD}, "growth", True, "needs order='left_to_right'"),
    ({"cache_dir": "x"}, "cache_dir", "x", "needs cache_bytes above 0"),
    ({"offload": "disk"}, "offload_dir", None, "offload='disk' needs offload_dir"),
    ({"offload_dir": "x"}, "offload_dir", "x", "needs offload='disk'; now offload='none'"),
    ({"offload": "cpu", "offload_dir": "x"}, "offload_dir", "x", "needs offload='disk'; now offload='cpu'"),
    ({"polish_steps": 200}, "polish_steps", 200, "must be below max_steps=200"),
    ({"polish_steps": 201}, "polish_steps", 201, "must be below max_steps=200"),
]
ACCEPTED = [
    {"max_steps": 20, "schedule": {"warmup_steps": 20}},
    {"max_steps": 1, "schedule": {"warmup_steps": None}},
    {"schedule": {"min_lr": 1e-4}},
    {"scope": {"growth": True}},
    *(
        BLOCKWISE | {"scope": scope}
        for scope in [
            {"suffix": 1, "growth": True, "head": "per_unit"},
            {"overlap": 1, "growth": True, "polish_steps": 199},
            {"order": BACKWARD, "polish_steps": 1},
            {"cache_bytes": 1, "cache_dir": ""},
            {"offload": "cpu", "cache_bytes": 1},
            {"offload": "disk", "offload_dir": "x"},
        ]
    ),
    {"objective": MASKED | {"random_fraction": 0.5, "same_fraction": 0.5}},
    {"objective": MASKED | {"same_fraction": 0.1}},
    {"objective": DIFFUSION | {"noise_schedule": "cosine"}},
    {"compile": True, "recompute": {"kind": "budget", "budget": 0}},
    RUNS | {"eval_interval": 1, "checkpoint": {"keep_best": 2}},
    RUNS | {"resume": True, "save_interval": 7, "checkpoint": {"asynchronous": True}},
    {"optimizer": {"per_stack": {2**63 - 1: {"lr": 1.0}, 0: {"weight_decay": 0.0}}}},
    {"guard": {"rewinds": 0}},
]


@pytest.mark.parametrize(
    "section, keys, key, value, rule", [(section, *row) for section, rows in REFUSED.items() for row in rows]
)
def test_keys_that_do_not_fit_are_refused(section, keys, key, value, rule):
    lines = problems(StackWiseConfig, {"training": {section: keys}})
    assert_refused(lines, f"training.{section}.{key}", value, [rule])


@pytest.mark.parametrize("scope, key, value, rule", REFUSED_LAYERWISE)
def test_scope_that_does_not_fit_is_refused(scope, key, value, rule):
    lines = problems(TrainingConfig, BLOCKWISE | {"scope": scope})
    assert_refused(lines, f"scope.{key}", value, [rule])


def test_best_checkpoints_need_evaluations():
    lines = problems(TrainingConfig, RUNS | {"checkpoint": {"keep_best": 2}})
    assert_refused(
        lines,
        "checkpoint.keep_best",
        2,
        ["only with eval_interval=not null; now eval_interval=null"],
    )


@pytest.mark.parametrize("keys", ACCEPTED)
def test_keys_that_fit_are_accepted(keys):
    assert same_values(keys, TrainingConfig.from_dict(keys).to_dict())


@pytest.mark.parametrize(
    "keys, refused",
    [
        ({"schedule": {"warmup_steps": 201, "min_lr": 0.5}}, ["schedule.warmup_steps", "schedule.min_lr"]),
        (
            {"scope": {"overlap": 1, "cache_bytes": 2, "cache_dir": "x", "polish_steps": 3, "growth": True}},
            ["scope.overlap", "scope.polish_steps", "scope.cache_bytes", "scope.cache_dir"],
        ),
        (
            {"objective": {"random_fraction": 0.5, "same_fraction": 0.75}},
            ["objective.random_fraction", "objective.same_fraction"],
        ),
    ],
)
def test_every_key_that_does_not_fit_is_reported(keys, refused):
    assert [line.split(": ")[0] for line in problems(TrainingConfig, keys)] == refused


@pytest.mark.parametrize(
    "before, key, value, message",
    [
        ({"schedule": {"warmup_steps": 20}}, "max_steps", 19, "schedule.warmup_steps: got 20"),
        (
            BLOCKWISE | {"scope": {"overlap": 1}},
            "training_architecture",
            "rackwise",
            "scope.overlap: got 1",
        ),
        (BLOCKWISE | {"scope": {"polish_steps": 5}}, "max_steps", 5, "scope.polish_steps: got 5"),
        (
            {"compile": True, "recompute": {"kind": "budget"}},
            "compile",
            False,
            "recompute.kind: got 'budget'",
        ),
        ({}, "scope", {"suffix": 1}, "scope.suffix: got 1"),
    ],
)
def test_assignment_that_does_not_fit_is_refused(before, key, value, message):
    training = TrainingConfig.from_dict(before)
    with pytest.raises(ConfigError, match=re.escape(message)):
        setattr(training, key, value)
    assert training == TrainingConfig.from_dict(before)


def test_validate_finds_keys_that_do_not_fit():
    config = StackWiseConfig()
    config.training.schedule.warmup_steps = 201
    config.training.optimizer.betas.append(0.5)
    with pytest.raises(ConfigError) as caught:
        config.validate()
    keys = [line.split(": ")[0] for line in caught.value.problems]
    assert keys == ["training.optimizer.betas", "training.schedule.warmup_steps"]
