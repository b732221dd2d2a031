"""What a configuration accepts, what it refuses, and what it says when it refuses."""

import collections
import copy
import functools
import json
import math
import pickle
import random
import re
import tracemalloc
import types
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from stackwise.config import (
    ArchitectureConfig,
    BlockConfig,
    CheckpointConfig,
    ConfigError,
    DataConfig,
    DistributedConfig,
    GuardPolicy,
    KernelConfig,
    LatentConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    RecomputeConfig,
    RopeScalingConfig,
    ScheduleConfig,
    ScopeConfig,
    StackOptimizerConfig,
    StackWiseConfig,
    TelemetryConfig,
    TrainingConfig,
)

SECTIONS = {
    "": StackWiseConfig,
    "model": ModelConfig,
    "model.latent": LatentConfig,
    "model.kernel": KernelConfig,
    "model.rope_scaling": RopeScalingConfig,
    "model.architecture": ArchitectureConfig,
    "training": TrainingConfig,
    "training.optimizer": OptimizerConfig,
    "training.optimizer.per_stack.0": StackOptimizerConfig,
    "training.schedule": ScheduleConfig,
    "training.objective": ObjectiveConfig,
    "training.scope": ScopeConfig,
    "training.recompute": RecomputeConfig,
    "training.distributed": DistributedConfig,
    "training.checkpoint": CheckpointConfig,
    "training.telemetry": TelemetryConfig,
    "training.guard": GuardPolicy,
    "data": DataConfig,
}
# Sections that need not be there: what the one around it then is.
OPTIONAL_SECTIONS = {
    "model.latent": {"attention_type": "mla", "n_kv_heads": None, "latent": {}},
    "model.kernel": {"attention_type": "kernel", "kernel": {}},
    "model.rope_scaling": {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
    "training.guard": {"guard": {}},
}
# Keys that are read as integers, as the indices of Stacks.
INDEXED = ["training.optimizer.per_stack"]
# What a value of a key goes with: else its own rule is not the one that refuses it.
GOES_WITH = {
    "model.kernel.bandwidth": {"kernel": {"feature_map": "gaussian"}},
    "training.scope": {"training_architecture": "blockwise"},
    "training.scope.cache_dir": {"scope": {"cache_bytes": 1}},
    "training.scope.offload_dir": {"scope": {"offload": "disk", "offload_dir": "blocks"}},
    "training.objective.kind": {"objective": {"mask_token_id": 3}},
    "training.objective.mask_token_id": {"objective": {"kind": "masked_token"}},
    "training.eval_batches": {"eval_interval": 1},
    "training.resume": {"checkpoint_dir": "runs"},
    "training.save_interval": {"checkpoint_dir": "runs"},
    "training.checkpoint": {"checkpoint_dir": "runs", "eval_interval": 1},
    "training.checkpoint.upload_keep_last": {
        "checkpoint_dir": "runs",
        "eval_interval": 1,
        "checkpoint": {"upload": "copies"},
    },
    "training.optimizer.momentum": {"optimizer": {"kind": "muon"}},
    "training.schedule.decay_fraction": {"schedule": {"kind": "wsd"}},
    "training.recompute.every": {"recompute": {"kind": "every_nth"}},
    "training.recompute.budget": {"recompute": {"kind": "budget"}, "compile": True},
    "training.distributed.reshard_after_forward": {"distributed": {"strategy": "fsdp"}},
    "training.objective.mask_fraction": {"objective": {"kind": "masked_token", "mask_token_id": 3}},
    "training.objective.noise_schedule": {"objective": {"kind": "mask_diffusion", "mask_token_id": 3}},
    "training.objective.random_fraction": {"objective": {"kind": "masked_token", "mask_token_id": 3}},
    "training.objective.same_fraction": {"objective": {"kind": "masked_token", "mask_token_id": 3}},
}
# The smallest value of each integer.
INTEGERS = {
    "model.vocab_size": 1,
    "model.d_model": 1,
    "model.n_heads": 1,
    "model.n_kv_heads": 1,
    "model.d_ff": 1,
    "model.head_dim": 1,
    "model.max_seq_len": 1,
    "model.sliding_window": 1,
    "model.latent.kv_lora_rank": 1,
    "model.latent.q_lora_rank": 1,
    "model.latent.qk_nope_head_dim": 1,
    "model.latent.qk_rope_head_dim": 1,
    "model.latent.v_head_dim": 1,
    "model.kernel.n_features": 1,
    "model.rope_scaling.original_max_position_embeddings": 1,
    "model.architecture.n_stacks": 1,
    "model.architecture.blocks_per_stack": 1,
    "training.batch_size": 1,
    "training.accumulation_steps": 1,
    "training.seq_len": 1,
    "training.max_steps": 1,
    "training.seed": 0,
    "training.log_interval": 1,
    "training.eval_interval": 1,
    "training.eval_batches": 1,
    "training.save_interval": 1,
    "training.checkpoint.keep_last": 1,
    "training.checkpoint.keep_every": 1,
    "training.checkpoint.keep_best": 0,
    "training.checkpoint.upload_keep_last": 1,
    "training.schedule.warmup_steps": 0,
    "training.objective.mask_token_id": 0,
    "training.objective.logits_chunk": 1,
    "training.scope.overlap": 0,
    "training.scope.suffix": 0,
    "training.scope.polish_steps": 0,
    "training.scope.cache_bytes": 0,
    "training.recompute.every": 1,
    "training.guard.recent": 1,
    "training.guard.minimum": 1,
    "training.guard.history": 1,
    "training.guard.spikes_clipped": 0,
    "training.guard.patience": 1,
    "training.guard.rewinds": 0,
    "training.guard.snapshot_interval": 1,
    "training.guard.max_bundles": 0,
}
# Per number: a whole number that is allowed, and numbers just outside.
FLOATS = {
    "model.dropout": (0, [-1e-9, 1.0, 1, -1]),
    "model.rope_theta": (10, [0.0, 0, -1.0]),
    "model.softcap": (30, [0.0, 0, -1.0]),
    "model.embedding_max_norm": (2, [0.0, 0, -1.0]),
    "model.norm_eps": (1, [0.0, 0, -1e-6]),
    "model.kernel.bandwidth": (2, [0.0, 0, -1.0]),
    "model.rope_scaling.factor": (2, [1 - 1e-9, 0, -1.0]),
    "model.rope_scaling.low_freq_factor": (2, [0.0, 0, -1.0]),
    "model.rope_scaling.high_freq_factor": (2, [0.0, 0, -1.0]),
    "training.grad_clip": (1, [0.0, 0, -1.0]),
    "training.optimizer.lr": (1, [0.0, 0, -1e-4]),
    "training.optimizer.weight_decay": (0, [-1e-9, -1]),
    "training.optimizer.eps": (1, [0.0, -1e-8]),
    "training.optimizer.momentum": (0, [-1e-9, 1.0, 1, -1]),
    "training.optimizer.per_stack.0.lr": (1, [0.0, 0, -1e-4]),
    "training.optimizer.per_stack.0.weight_decay": (0, [-1e-9, -1]),
    "training.schedule.min_lr": (0, [-1e-9]),
    "training.schedule.decay_fraction": (1, [0.0, 0, 1.1, 2, -1]),
    "training.objective.mask_fraction": (1, [0.0, 0, 1.1, 2]),
    "training.objective.random_fraction": (1, [-1e-9, 1.1, 2]),
    "training.objective.same_fraction": (1, [-1e-9, 1.1, 2]),
    "training.objective.z_loss": (0, [-1e-9, -1]),
    "training.recompute.budget": (1, [-1e-9, 1.1, 2]),
    "training.guard.deviations": (0, [-1e-9, -1]),
    "training.guard.factor": (2, [1.0, 1, 0, -1.0]),
    "training.guard.suspect_factor": (2, [1.0, 1, 0, -1.0]),
    "training.guard.proven_factor": (3, [1.0, 1, 0, -1.0]),
    "training.guard.loss_factor": (2, [1.0, 1, 0, -1.0]),
    "training.guard.logit_factor": (2, [1.0, 1, 0, -1.0]),
    "training.guard.logit_limit": (2, [0.0, 0, -1.0]),
    "data.validation_fraction": (0, [-0.1, 1.0, 1, 2]),
}
BOOLEANS = [
    "model.tie_embeddings",
    "model.freeze_up_proj",
    "model.use_rope",
    "model.qkv_bias",
    "training.compile",
    "training.resume",
    "training.scope.growth",
    "training.distributed.reshard_after_forward",
    "training.telemetry.parameter_norms",
    "training.guard.snapshot_on_host",
    "training.guard.bundle_weights",
    "data.pack_documents",
    "data.shuffle",
]
CHOICES = {
    "model.attention_type": ["mha", "gqa", "mqa", "mla", "kernel"],
    "model.attention_mode": ["causal", "bidirectional"],
    "model.norm": ["rmsnorm", "layernorm"],
    "model.norm_position": ["pre", "post"],
    "model.qk_norm": ["head", "width"],
    "model.kernel.feature_map": ["favor", "gaussian", "laplacian", "elu"],
    "model.rope_scaling.rope_type": ["linear", "llama3"],
    "model.initialization": ["normal", "kaiming", "xavier", "small", "zero_out", "mup"],
    "training.training_architecture": ["rackwise", "stackwise", "blockwise"],
    "training.precision": ["fp32", "bf16", "bf16_weights", "fp16", "float8"],
    "training.optimizer.kind": ["adamw", "muon"],
    "training.schedule.kind": ["cosine", "linear", "constant", "wsd", "inverse_sqrt"],
    "training.objective.kind": ["next_token", "masked_token", "mask_diffusion"],
    "training.objective.noise_schedule": ["linear", "cosine"],
    "training.scope.head": ["shared", "per_unit"],
    "training.scope.order": ["left_to_right", "right_to_left"],
    "training.scope.offload": ["none", "cpu", "disk"],
    "training.recompute.kind": ["none", "full", "every_nth", "selective", "budget", "by_name"],
    "training.distributed.strategy": ["none", "ddp", "fsdp"],
    "data.task": ["copy", "shift", "induction", "markov"],
}
NULLABLE_TEXTS = [
    "training.checkpoint_dir",
    "training.checkpoint.upload",
    "training.scope.cache_dir",
    "training.scope.offload_dir",
    "training.telemetry.jsonl",
    "training.telemetry.tensorboard",
    "training.bundle_dir",
    "data.dataset_path",
]
TEXTS = [*NULLABLE_TEXTS, "data.tokenizer"]
MAY_BE_NULL = {
    "model.n_kv_heads",
    "model.head_dim",
    "model.max_seq_len",
    "model.qk_norm",
    "model.softcap",
    "model.embedding_max_norm",
    "model.sliding_window",
    "model.latent.q_lora_rank",
    "training.grad_clip",
    "training.schedule.warmup_steps",
    "training.optimizer.per_stack.0.lr",
    "training.optimizer.per_stack.0.weight_decay",
    "training.eval_interval",
    "training.eval_batches",
    "training.checkpoint.keep_every",
    "training.checkpoint.upload_keep_last",
    "training.objective.mask_token_id",
    "training.objective.logits_chunk",
    "training.guard.suspect_factor",
    "training.guard.loss_factor",
    "training.guard.logit_factor",
    "training.guard.logit_limit",
    "training.guard.snapshot_interval",
    "data.task",
    *NULLABLE_TEXTS,
}
NO_INTEGERS = ["8", 8.0, True, False, [8], {"a": 8}, math.nan, math.inf, b"8"]
NO_FLOATS = ["0.1", "1e-4", True, False, [0.1], {}, math.nan, math.inf, -math.inf]
DEVICES_REFUSED = [
    "",
    "gpu",
    "CUDA",
    "cuda:",
    "cuda:-1",
    "cuda:x",
    "cpu:0",
    " cpu",
    "cuda:1\n",
    "cuda:\u0661",
]

# Keys of a Block that do not fit together: the keys, the one refused, what its line must contain.
REFUSED_MODELS = [
    ({"initialization": "mup"}, "mup_base_width", ["None", "'mup'"]),
    ({"mup_base_width": 64}, "mup_base_width", ["64", "'mup'", "initialization='normal'"]),
    ({"initialization": "small", "mup_base_width": 64}, "mup_base_width", ["64", "initialization='small'"]),
    ({"attention_type": "mha", "n_kv_heads": 4}, "attention_type", ["'mha'", "n_kv_heads=4", "8", "'gqa'"]),
    ({"attention_type": "gqa", "n_kv_heads": None}, "attention_type", ["'gqa'", "needs n_kv_heads", "'mha'"]),
    (
        {"attention_type": "mqa", "n_kv_heads": 2},
        "attention_type",
        ["'mqa'", "n_kv_heads=null or 1", "n_kv_heads=2", "'gqa'"],
    ),
    ({"attention_type": "mla", "n_kv_heads": 8}, "attention_type", ["'mla'", "=null", "n_kv_heads=8"]),
    (
        {"attention_type": "mla", "n_kv_heads": None, "head_dim": 64},
        "attention_type",
        ["'mla'", "head_dim=null", "latent"],
    ),
    ({"attention_type": "mqa", "n_kv_heads": 1, "latent": {}}, "latent", ["{}", "'mla'", "'mqa'"]),
    ({"attention_type": "kernel", "latent": {}}, "latent", ["{}", "'mla'", "'kernel'"]),
    ({"kernel": {"n_features": 8}}, "kernel", ["{'n_features': 8}", "'kernel'", "'gqa'"]),
    (
        {"attention_type": "mla", "n_kv_heads": None, "kernel": {}},
        "kernel",
        ["{}", "'kernel'", "'mla'"],
    ),
    (
        {"attention_type": "mla", "n_kv_heads": None, "qk_norm": "head"},
        "qk_norm",
        ["'head'", "attention_type='mla' has none"],
    ),
    (
        {"attention_type": "mla", "n_kv_heads": None, "qkv_bias": True},
        "qkv_bias",
        ["True", "attention_type='mla' has none"],
    ),
    (
        {"attention_type": "kernel", "softcap": 3.0},
        "softcap",
        ["3.0", "attention_type='kernel' has none"],
    ),
    (
        {"attention_type": "kernel", "sliding_window": 5},
        "sliding_window",
        ["5", "attention_type='kernel' sees the whole past", "allowed: null"],
    ),
    ({"head_dim": 5}, "use_rope", ["True", "even", "it is 5"]),
    ({"head_dim": 1, "n_heads": 3, "n_kv_heads": 3}, "use_rope", ["True", "even", "it is 1"]),
    (
        {"use_rope": False, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        "rope_scaling",
        ["'linear'", "needs use_rope=true"],
    ),
    (
        {
            "attention_type": "mla",
            "n_kv_heads": None,
            "latent": {"qk_rope_head_dim": 3},
        },
        "latent.qk_rope_head_dim",
        ["3", "must be even"],
    ),
    (
        {"attention_type": "kernel", "kernel": {"feature_map": "gaussian", "n_features": 7}},
        "kernel.n_features",
        ["7", "must be even", "cosine and a sine"],
    ),
    (
        {"attention_type": "kernel", "kernel": {"feature_map": "laplacian", "n_features": 1}},
        "kernel.n_features",
        ["1", "must be even"],
    ),
    (
        {"rope_scaling": {"rope_type": "llama3", "factor": 2.0, "high_freq_factor": 1.0}},
        "rope_scaling.high_freq_factor",
        ["1.0", "must exceed low_freq_factor=1.0"],
    ),
    (
        {"rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 5.0}},
        "rope_scaling.high_freq_factor",
        ["4.0", "must exceed low_freq_factor=5.0"],
    ),
    ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor", ["got nothing", "no default"]),
    ({"rope_scaling": {"factor": 2.0}}, "rope_scaling.rope_type", ["got nothing", "no default"]),
    (
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
        "rope_scaling.rope_type",
        ["'yarn'", "'llama3'"],
    ),
]
BLOCKWISE = {"training_architecture": "blockwise"}
MASKED = {"kind": "masked_token", "mask_token_id": 3}
# Of `training`: the keys, the one refused, what its line must contain.
REFUSED_TRAININGS = [
    *(
        ({"scope": {key: value} | beside}, f"scope.{key}", [repr(value), "stackwise or blockwise"])
        for key, value, beside in [
            ("head", "per_unit", {}),
            ("overlap", 1, {}),
            ("suffix", 1, {}),
            ("order", "right_to_left", {}),
            ("polish_steps", 1, {}),
            ("cache_bytes", 1, {}),
            ("offload", "cpu", {}),
        ]
    ),
    (BLOCKWISE | {"scope": {"overlap": 2, "suffix": 1}}, "scope.suffix", ["1", "overlap=0"]),
    (
        BLOCKWISE | {"scope": {"overlap": 2, "order": "right_to_left"}},
        "scope.order",
        ["'right_to_left'", "overlap=0 (overlap=2)"],
    ),
    (
        BLOCKWISE | {"scope": {"suffix": 2, "order": "right_to_left"}},
        "scope.order",
        ["'right_to_left'", "suffix=0 (suffix=2)"],
    ),
    (
        BLOCKWISE | {"scope": {"growth": True, "order": "right_to_left"}},
        "scope.growth",
        ["True", "order='left_to_right'"],
    ),
    (BLOCKWISE | {"scope": {"cache_dir": "x"}}, "scope.cache_dir", ["'x'", "cache_bytes above 0"]),
    (BLOCKWISE | {"scope": {"offload": "disk"}}, "scope.offload_dir", ["None", "offload='disk'"]),
    (BLOCKWISE | {"scope": {"offload_dir": "x"}}, "scope.offload_dir", ["'x'", "offload='none'"]),
    (
        BLOCKWISE | {"scope": {"offload": "cpu", "offload_dir": "x"}},
        "scope.offload_dir",
        ["'x'", "offload='cpu'"],
    ),
    (
        BLOCKWISE | {"max_steps": 7, "scope": {"polish_steps": 7}},
        "scope.polish_steps",
        ["7", "below max_steps=7"],
    ),
    ({"objective": {"kind": "masked_token"}}, "objective.mask_token_id", ["None", "'masked_token' needs"]),
    (
        {"objective": {"kind": "mask_diffusion"}},
        "objective.mask_token_id",
        ["None", "'mask_diffusion' needs"],
    ),
    ({"objective": {"mask_token_id": 3}}, "objective.mask_token_id", ["3", "'next_token'", "allowed: null"]),
    (
        {"objective": MASKED | {"random_fraction": 0.5, "same_fraction": 0.75}},
        "objective.same_fraction",
        ["0.75", "exceed 1", "random_fraction=0.5"],
    ),
    ({"objective": {"same_fraction": 0.1}}, "objective.same_fraction", ["0.1", "'masked_token'"]),
    ({"objective": {"random_fraction": 0.1}}, "objective.random_fraction", ["0.1", "'masked_token'"]),
    (
        {"objective": {"kind": "mask_diffusion", "mask_token_id": 3, "random_fraction": 0.1}},
        "objective.random_fraction",
        ["0.1", "'masked_token'", "kind='mask_diffusion'"],
    ),
    ({"resume": True}, "resume", ["True", "checkpoint_dir, which is null"]),
    ({"eval_batches": 3}, "eval_batches", ["3", "eval_interval, which is null"]),
    ({"save_interval": 7}, "save_interval", ["7", "checkpoint_dir, which is null"]),
    ({"checkpoint": {"keep_best": 1}}, "checkpoint.keep_best", ["1", "checkpoint_dir, which is null"]),
    (
        {"checkpoint_dir": "runs", "checkpoint": {"keep_best": 2}},
        "checkpoint.keep_best",
        ["2", "eval_interval, which is null"],
    ),
    *(
        ({"checkpoint_dir": "runs", "checkpoint": {"asynchronous": wrong}}, "checkpoint.asynchronous", parts)
        for wrong, parts in [
            ("true", ["'true'", "allowed: true, false or 'overlapped'"]),
            (1, ["1 (int)", "allowed: true"]),
            (None, ["None", "allowed: true"]),
        ]
    ),
    ({"guard": {"recent": 9, "history": 8}}, "guard.history", ["8", "recent=9"]),
    ({"guard": {"minimum": 9, "history": 8}}, "guard.history", ["8", "minimum=9"]),
    ({"guard": {"suspect_factor": 31.0}}, "guard.proven_factor", ["30.0", "suspect_factor=31.0"]),
    ({"guard": {"patience": 50}}, "guard.snapshot_interval", ["50", "patience=50"]),
    ({"recompute": {"kind": "budget"}}, "recompute.kind", ["'budget'", "compile=true"]),
    ({"recompute": {"kind": "by_name"}}, "recompute.names", ["[]", "at least one pattern"]),
    ({"recompute": {"names": [3]}}, "recompute.names.0", ["3", "string"]),
    ({"optimizer": {"per_stack": {"0": {}}}}, "optimizer.per_stack.0", ["'0'", "as a key a valid integer"]),
    ({"optimizer": {"per_stack": {True: {}}}}, "optimizer.per_stack.1", ["True", "integer"]),
    ({"optimizer": {"per_stack": {-1: {}}}}, "optimizer.per_stack.-1", ["-1", "greater than or equal to 0"]),
    ({"optimizer": {"per_stack": {2**64: {}}}}, f"optimizer.per_stack.{2**64}", ["less than"]),
    ({"optimizer": {"per_stack": {3: None}}}, "optimizer.per_stack.3", ["None", "dictionary"]),
    ({"optimizer": {"per_stack": [{}]}}, "optimizer.per_stack", ["[{}]", "dictionary"]),
]
# Keys with a value that does nothing where the key before it has such a value, and both allowed elsewhere.
INAPPLICABLE = {
    "model.rope_theta": (5e5, "use_rope", False, "True"),
    "model.kernel.n_features": (64, "feature_map", "elu", "'favor' or 'gaussian' or 'laplacian'"),
    "model.kernel.bandwidth": (2.0, "feature_map", "favor", "'gaussian' or 'laplacian'"),
    "model.rope_scaling.low_freq_factor": (2.0, "rope_type", "linear", "'llama3'"),
    "model.rope_scaling.high_freq_factor": (8.0, "rope_type", "linear", "'llama3'"),
    "model.rope_scaling.original_max_position_embeddings": (64, "rope_type", "linear", "'llama3'"),
    "training.optimizer.momentum": (0.5, "kind", "adamw", "'muon'"),
    "training.schedule.min_lr": (1e-5, "kind", "constant", "'cosine' or 'linear' or 'wsd' or 'inverse_sqrt'"),
    "training.schedule.decay_fraction": (0.5, "kind", "cosine", "'wsd'"),
    "training.objective.mask_fraction": (0.5, "kind", "mask_diffusion", "'masked_token'"),
    "training.objective.random_fraction": (0.5, "kind", "mask_diffusion", "'masked_token'"),
    "training.objective.same_fraction": (0.5, "kind", "mask_diffusion", "'masked_token'"),
    "training.objective.noise_schedule": ("cosine", "kind", "masked_token", "'mask_diffusion'"),
    "training.recompute.every": (3, "kind", "full", "'every_nth'"),
    "training.recompute.budget": (0.25, "kind", "none", "'budget'"),
    "training.recompute.names": (["*"], "kind", "selective", "'by_name'"),
    "training.distributed.reshard_after_forward": (False, "strategy", "ddp", "'fsdp'"),
    "training.eval_batches": (3, "eval_interval", None, None),
    "training.save_interval": (3, "checkpoint_dir", None, None),
    "training.resume": (True, "checkpoint_dir", None, None),
    "training.checkpoint": ({"asynchronous": True}, "checkpoint_dir", None, None),
    "training.checkpoint.upload_keep_last": (2, "upload", None, None),
    "data.tokenizer": ("t.json", "task", "copy", "null"),
}
NO_CHECKPOINTS = {"keep_last": 3, "keep_every": None, "keep_best": 0, "asynchronous": False}
NO_CHECKPOINTS |= {"upload": None, "upload_keep_last": None}
# Combinations of values that are each fine: the mapping, the path refused, what its line must contain.
INCONSISTENT = [
    ({"model": {"d_model": 64, "n_heads": 7}}, "model.n_heads", ["7", "d_model=64"]),
    ({"model": {"d_model": 4, "n_heads": 8}}, "model.n_heads", ["8", "d_model=4"]),
    ({"model": {"n_heads": 8, "n_kv_heads": 3}}, "model.n_kv_heads", ["3", "n_heads=8"]),
    ({"model": {"n_heads": 8, "n_kv_heads": 16}}, "model.n_kv_heads", ["16", "n_heads=8"]),
    ({"model": {"attention_type": "mha"}}, "model.attention_type", ["'mha'", "n_kv_heads=2", "8"]),
    ({"model": {"n_kv_heads": None}}, "model.attention_type", ["'gqa'", "n_kv_heads", "mha"]),
    ({"model": {"d_model": 6, "n_heads": 2}}, "model.use_rope", ["True", "even", "3"]),
    *(({"model": model}, f"model.{key}", parts) for model, key, parts in REFUSED_MODELS),
    ({"model": {"sliding_window": []}}, "model.sliding_window", ["[]", "at least one"]),
    ({"model": {"sliding_window": [4, 0]}}, "model.sliding_window.1", ["0", "greater than or equal to 1"]),
    ({"model": {"sliding_window": ["4"]}}, "model.sliding_window.0", ["'4'", "integer"]),
    ({"model": {"sliding_window": [[4]]}}, "model.sliding_window.0", ["[4]", "integer"]),
    ({"model": {"sliding_window": [True, None]}}, "model.sliding_window.0", ["True", "integer"]),
    ({"model": {"sliding_window": (4,)}}, "model.sliding_window", ["(4,)", "integer"]),
    (
        {"model": {"attention_type": "kernel", "sliding_window": [None, 4]}},
        "model.sliding_window",
        ["[None, 4]", "attention_type='kernel'", "null"],
    ),
    (
        {"training": {"max_steps": 19, "schedule": {"warmup_steps": 20}}},
        "training.schedule.warmup_steps",
        ["20", "max_steps=19"],
    ),
    (
        {"training": {"schedule": {"warmup_steps": 201}}},
        "training.schedule.warmup_steps",
        ["201", "max_steps=200"],
    ),
    ({"training": {"schedule": {"min_lr": 0.5}}}, "training.schedule.min_lr", ["0.5", "lr=0.0001"]),
    (
        {"training": {"optimizer": {"lr": 1e-5}, "schedule": {"min_lr": 1e-4}}},
        "training.schedule.min_lr",
        ["0.0001", "lr=1e-05"],
    ),
    (
        {"training": {"optimizer": {"betas": [0.9, 1.0]}}},
        "training.optimizer.betas",
        ["[0.9, 1.0]", "[0, 1)"],
    ),
    ({"training": {"optimizer": {"betas": [-0.1, 0.9]}}}, "training.optimizer.betas", ["-0.1", "[0, 1)"]),
    ({"training": {"optimizer": {"betas": [0.9]}}}, "training.optimizer.betas", ["[0.9]", "2"]),
    ({"training": {"optimizer": {"betas": [0.9] * 3}}}, "training.optimizer.betas", ["[0.9, 0.9, 0.9]", "2"]),
    ({"training": {"optimizer": {"betas": [0.9, "x"]}}}, "training.optimizer.betas.1", ["'x'"]),
    ({"training": {"seed": 2**63}}, "training.seed", [str(2**63)]),
    *(({"training": training}, f"training.{key}", parts) for training, key, parts in REFUSED_TRAININGS),
    ({"data": {"dataset_path": "a.txt", "task": "copy"}}, "data.task", ["'copy'", "dataset_path=null"]),
]
CONSISTENT = [
    {"model": {"d_model": 64, "n_heads": 64, "n_kv_heads": 64, "use_rope": False}},
    {"model": {"n_heads": 8, "n_kv_heads": 8, "attention_type": "mha"}},
    {"model": {"n_heads": 8, "n_kv_heads": None, "attention_type": "mha"}},
    {"model": {"n_heads": 8, "n_kv_heads": 8, "attention_type": "gqa"}},
    {"model": {"n_heads": 8, "n_kv_heads": 1}},
    {"model": {"n_heads": 8, "n_kv_heads": None, "attention_type": "mqa"}},
    {"model": {"n_heads": 8, "n_kv_heads": 1, "attention_type": "mqa"}},
    {"model": {"n_kv_heads": None, "attention_type": "mla", "softcap": 1.0, "sliding_window": 3}},
    {"model": {"n_kv_heads": None, "attention_type": "mla", "latent": {"q_lora_rank": 7, "v_head_dim": 5}}},
    {"model": {"n_kv_heads": None, "attention_type": "mla", "d_model": 24, "n_heads": 8}},
    {"model": {"attention_type": "kernel", "qk_norm": "head", "qkv_bias": True}},
    {"model": {"attention_type": "kernel", "sliding_window": [None, None]}},
    {"model": {"attention_type": "kernel", "kernel": {"feature_map": "favor", "n_features": 7}}},
    {"model": {"d_model": 7, "head_dim": 4, "n_heads": 6, "n_kv_heads": 3}},
    {"model": {"d_model": 7, "head_dim": 5, "n_heads": 6, "n_kv_heads": 3, "use_rope": False}},
    {"model": {"sliding_window": [256, None]}},
    {"model": {"sliding_window": [1] * 100}},
    {"training": {"max_steps": 1}},
    {"training": {"max_steps": 20, "schedule": {"warmup_steps": 20}}},
    {"training": {"schedule": {"warmup_steps": 200}}},
    {"training": {"schedule": {"warmup_steps": 0, "min_lr": 1e-4}}},
    {"training": {"seed": 2**63 - 1, "device": "cuda:11"}},
    {"training": {"optimizer": {"betas": [0, 0.999]}}},
    {"training": {"optimizer": {"per_stack": {7: {"lr": 1}, 0: {}}}}},
    {"training": {"scope": {"growth": True}}},
    {"training": BLOCKWISE | {"scope": {"suffix": 1, "growth": True, "head": "per_unit"}}},
    {"training": BLOCKWISE | {"scope": {"overlap": 1, "growth": True, "polish_steps": 199}}},
    {"training": BLOCKWISE | {"scope": {"order": "right_to_left", "polish_steps": 1}}},
    {"training": BLOCKWISE | {"scope": {"offload": "cpu", "cache_bytes": 1, "cache_dir": ""}}},
    {"training": {"objective": MASKED | {"random_fraction": 0.5, "same_fraction": 0.5}}},
    {"training": {"objective": {"kind": "mask_diffusion", "mask_token_id": 0}}},
    {"training": {"recompute": {"kind": "budget", "budget": 0}, "compile": True}},
    {"training": {"recompute": {"kind": "by_name", "names": [""]}}},
    {"data": {"task": "copy"}},
]
YAML_NUMBERS = {
    "1e-4": 1e-4,
    "1E-4": 1e-4,
    "1.e-4": 1e-4,
    ".1e-3": 1e-4,
    "1.5e-4": 1.5e-4,
    "+1e-4": 1e-4,
    "1e0": 1.0,
    "0.0001": 1e-4,
    "1": 1.0,
}
REPEATED_KEYS = [
    ("model: {}\nmodel: {}\n", "model"),
    ("training:\n  seed: 1\n  seed: 1\n", "seed"),
    ("training: {optimizer: {lr: 1.0, lr: 2.0}}\n", "lr"),
    ("training:\n  seed: 1\n  'seed': 2\n", "seed"),
]
# None of these is a configuration. `touch` would leave a file behind if anything were executed.
HOSTILE = {
    "python apply": "training: {seed: !!python/object/apply:os.system ['touch executed']}",
    "python new": "training: !!python/object/new:os.system ['touch executed']",
    "python apply at the top": "!!python/object/apply:os.system ['touch executed']",
    "python name": "training: {seed: !!python/name:os.system }",
    "python module": "training: !!python/module:os",
    "python tuple": "training: {optimizer: {betas: !!python/tuple [0.9, 0.95]}}",
    "unknown tag": "model: !mine {}",
    "list at the top": "- model",
    "number at the top": "3",
    "word at the top": "model",
    "set at the top": "!!set {model}",
    "open bracket": "model: {",
    "tab": "model:\n\td_model: 64",
    "two documents": "---\nmodel: {}\n---\nmodel: {}\n",
    "undefined alias": "model: *nowhere",
    "contains itself": "&a [*a]",
    "section contains itself": "&a {model: *a}",
    "value contains itself": "training: {seed: &a [*a]}",
    "list as a key": "? [1, 2]\n: 3",
    "number as a key": "1: 2",
    "null as a key": "~: 2",
    "date": "training: {seed: 2001-13-99}",
    "value sign": "training: {seed: =}",
    "number of many digits": "training: {seed: " + "9" * 5000 + "}",
    "hexadecimal number of many digits": "training: {seed: 0x" + "f" * 5000 + "}",
    "infinite": "training: {optimizer: {lr: 1e999}}",
    "not a boolean": "training: {seed: !!bool maybe}",
    "not an integer": "training: {seed: !!int ''}",
    "not a number": "training: {optimizer: {lr: !!float x}}",
    "not a timestamp": "training: {seed: !!timestamp yesterday}",
    "not a mapping": "model: !!map [d_model]",
    "not a mapping either": "model: !!map d_model",
    "not a set": "model: !!set [d_model]",
    "not binary": "training: {seed: !!binary '\u00e9'}",
    "nested lists": "model: " + "[" * 20_000,
    "nested mappings": "{a: " * 20_000,
    "nested through aliases": "\n".join(
        [
            "x0: &a0 []",
            *(f"x{i}: &a{i} {'[' * 100}*a{i - 1}{']' * 100}" for i in range(1, 40)),
            "training: {seed: *a39}",
        ]
    ),
}
HOSTILE_BYTES = {
    "zeros": b"\0" * 64,
    "latin-1": "data: {dataset_path: caf\u00e9}".encode("latin-1"),
    "utf-16": "model: {}".encode("utf-16"),
    "control characters": b"model: \x01\x02",
    "gzip": bytes.fromhex("1f8b0800000000000003"),
    "pickle": pickle.dumps({"model": {}}),
}


def keys_of(path):
    """The keys on the way, those of an index as integers."""
    keys = path.split(".")
    return [int(key) if ".".join(keys[:i]) in INDEXED else key for i, key in enumerate(keys)]


def written(path, value):
    """The mapping with one value."""
    for key in reversed(keys_of(path)):
        value = {key: value}
    return value


def nested(path, value):
    """The mapping with one value, beside what it goes with."""
    mapping = written(path, value)
    for section, model in OPTIONAL_SECTIONS.items():
        if path.startswith(f"{section}."):
            mapping = merged({section.split(".")[0]: model}, mapping)
    for place, beside in GOES_WITH.items():
        if value is not None and f"{path}.".startswith(f"{place}."):
            mapping = merged({place.split(".")[0]: beside}, mapping)
    return mapping


def at(tree, path):
    """The value in a mapping or in sections."""
    for key in keys_of(path):
        tree = getattr(tree, key) if isinstance(tree, BaseModel) else tree[key]
    return tree


def merged(mapping, other):
    """`other` over `mapping`, section by section."""
    return mapping | {
        key: merged(mapping[key], value)
        if isinstance(value, dict) and isinstance(mapping.get(key), dict)
        else value
        for key, value in other.items()
    }


def missing_or(mapping, path):
    """The value at `path`, or null where a section on the way is null."""
    for key in path.split("."):
        mapping = None if mapping is None else mapping[key]
    return mapping


def not_null(path):
    return [] if path in MAY_BE_NULL else [None]


def refusal(mapping):
    with pytest.raises(ConfigError) as caught:
        StackWiseConfig.from_dict(mapping)
    return caught.value.problems


def accepted(mapping):
    try:
        return StackWiseConfig.from_dict(mapping)
    except ConfigError:
        return None


def is_int(value, least):
    return type(value) is int and value >= least


def is_float(value):
    return type(value) is float and math.isfinite(value)


def assert_valid(mapping):
    """Every rule of the format, spelled out for the dict of one whole configuration."""
    for path in [*INTEGERS, *FLOATS, *BOOLEANS, *CHOICES, *TEXTS]:
        section = path.rpartition(".")[0]
        if section in OPTIONAL_SECTIONS and missing_or(mapping, section) is None:
            continue
        if section.startswith("training.optimizer.per_stack."):  # none need be there: see below
            continue
        value = missing_or(mapping, path)
        if value is None:
            assert path in MAY_BE_NULL, path
        elif path == "model.sliding_window" and type(value) is list:
            assert value and all(window is None or is_int(window, 1) for window in value)
        elif path in INTEGERS:
            assert is_int(value, INTEGERS[path]), path
        elif path in FLOATS:
            assert is_float(value), path
        elif path in BOOLEANS:
            assert type(value) is bool, path
        elif path in CHOICES:
            assert value in CHOICES[path]
        else:
            assert type(value) is str, path
    model, training, data = mapping["model"], mapping["training"], mapping["data"]
    optimizer, schedule = training["optimizer"], training["schedule"]
    assert_model_is_consistent(model)
    assert re.fullmatch("auto|cpu|cuda(:[0-9]+)?", training["device"])
    assert training["seed"] < 2**63 and (training["grad_clip"] is None or training["grad_clip"] > 0)
    assert optimizer["lr"] > 0 and optimizer["weight_decay"] >= 0 and optimizer["eps"] > 0
    assert len(optimizer["betas"]) == 2 and all(is_float(b) and 0 <= b < 1 for b in optimizer["betas"])
    assert 0 <= optimizer["momentum"] < 1
    for index, own in optimizer["per_stack"].items():
        assert is_int(index, 0) and own.keys() == {"lr", "weight_decay"}
        assert own["lr"] is None or (is_float(own["lr"]) and own["lr"] > 0)
        assert own["weight_decay"] is None or (is_float(own["weight_decay"]) and own["weight_decay"] >= 0)
    assert (schedule["warmup_steps"] or 0) <= training["max_steps"]
    assert 0 <= schedule["min_lr"] <= optimizer["lr"] and 0 < schedule["decay_fraction"] <= 1
    assert_objective_is_consistent(training["objective"])
    assert_scope_is_consistent(training)
    recompute = training["recompute"]
    assert recompute["kind"] != "budget" or training["compile"]
    assert all(type(name) is str for name in recompute["names"])
    assert recompute["names"] or recompute["kind"] != "by_name"
    assert 0 <= recompute["budget"] <= 1
    assert_checkpoints_are_consistent(training)
    assert_guard_is_consistent(training["guard"])
    assert 0 <= data["validation_fraction"] < 1
    assert data["task"] is None or data["dataset_path"] is None


def assert_checkpoints_are_consistent(training):
    if training["checkpoint_dir"] is None:
        assert training["checkpoint"] == NO_CHECKPOINTS and training["save_interval"] == 100
        assert not training["resume"]
    if training["eval_interval"] is None:
        assert training["eval_batches"] is None and training["checkpoint"]["keep_best"] == 0


def assert_guard_is_consistent(guard):
    if guard is not None:
        assert guard["factor"] > 1 and (guard["loss_factor"] is None or guard["loss_factor"] > 1)
        suspect, proven = guard["suspect_factor"], guard["proven_factor"]
        assert proven > 1 and (suspect is None or proven >= suspect > 1)
        assert guard["deviations"] >= 0 and guard["history"] >= max(guard["recent"], guard["minimum"])
        assert guard["snapshot_interval"] is None or guard["snapshot_interval"] > guard["patience"]


def assert_objective_is_consistent(objective):
    assert (objective["mask_token_id"] is None) == (objective["kind"] == "next_token")
    assert 0 < objective["mask_fraction"] <= 1 and objective["z_loss"] >= 0
    replaced = objective["random_fraction"], objective["same_fraction"]
    assert min(replaced) >= 0 and sum(replaced) <= 1
    assert replaced == (0, 0) or objective["kind"] == "masked_token"


def assert_scope_is_consistent(training):
    scope = dict(training["scope"])
    if training["training_architecture"] == "rackwise":
        scope.pop("growth")
        nothing = {"overlap": 0, "suffix": 0, "polish_steps": 0, "cache_bytes": 0}
        plain = {"head": "shared", "order": "left_to_right", "offload": "none"}
        assert scope == {**nothing, **plain, "cache_dir": None, "offload_dir": None}
        return
    assert not (scope["overlap"] and scope["suffix"])
    assert scope["order"] == "left_to_right" or not (scope["overlap"] or scope["suffix"] or scope["growth"])
    assert scope["polish_steps"] < training["max_steps"]
    assert scope["cache_dir"] is None or scope["cache_bytes"] > 0
    assert (scope["offload_dir"] is not None) == (scope["offload"] == "disk")


def assert_model_is_consistent(model):
    kind, n_heads, n_kv_heads = model["attention_type"], model["n_heads"], model["n_kv_heads"]
    assert n_heads % (n_kv_heads or n_heads) == 0
    assert model["head_dim"] is not None or model["d_model"] % n_heads == 0
    head_dim = model["head_dim"] or model["d_model"] // n_heads
    match kind:
        case "mha":
            assert n_kv_heads in (None, n_heads)
        case "gqa":
            assert n_kv_heads is not None
        case "mqa":
            assert n_kv_heads in (None, 1)
        case "mla":
            assert n_kv_heads is None and model["head_dim"] is None
            assert model["qk_norm"] is None and not model["qkv_bias"]
        case "kernel":
            assert model["softcap"] is None
            assert model["sliding_window"] is None or set(model["sliding_window"]) == {None}
    assert model["latent"] is None or (kind == "mla" and model["latent"]["qk_rope_head_dim"] % 2 == 0)
    if model["kernel"] is not None:
        assert kind == "kernel" and model["kernel"]["bandwidth"] > 0
        pairs = model["kernel"]["feature_map"] in ("gaussian", "laplacian")
        assert not pairs or model["kernel"]["n_features"] % 2 == 0
    assert not model["use_rope"] or kind == "mla" or head_dim % 2 == 0
    if model["rope_scaling"] is not None:
        scaling = model["rope_scaling"]
        assert model["use_rope"] and scaling["factor"] >= 1
        assert 0 < scaling["low_freq_factor"] < scaling["high_freq_factor"]
    assert 0 <= model["dropout"] < 1 and model["rope_theta"] > 0 and model["norm_eps"] > 0
    assert model["softcap"] is None or model["softcap"] > 0
    assert model["embedding_max_norm"] is None or model["embedding_max_norm"] > 0
    assert (model["mup_base_width"] is not None) == (model["initialization"] == "mup")


counts = st.integers(1, 10**6)
from_zero = st.integers(0, 10**6)
positive = st.floats(0, exclude_min=True, allow_infinity=False)
not_negative = st.floats(0, allow_infinity=False)
fraction = st.floats(0, 1, exclude_max=True)
part = st.floats(0, 1, exclude_min=True)
without_nul = st.text(st.characters(exclude_characters="\0"))
paths = st.none() | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


latents = st.fixed_dictionaries(
    {
        "kv_lora_rank": counts,
        "q_lora_rank": st.none() | counts,
        "qk_nope_head_dim": counts,
        "qk_rope_head_dim": counts.map(lambda half: 2 * half),
        "v_head_dim": counts,
    }
)
even = counts.map(lambda half: 2 * half)
kernels = st.one_of(
    st.fixed_dictionaries(
        {"feature_map": st.just(kind)}
        | {"n_features": st.just(256) if kind == "elu" else even}
        | {"bandwidth": positive if kind in ("gaussian", "laplacian") else st.just(1.0)}
    )
    for kind in ("favor", "gaussian", "laplacian", "elu")
)
factors = st.floats(1, allow_infinity=False)
scalings = st.fixed_dictionaries(
    {
        "rope_type": st.just("llama3"),
        "factor": factors,
        "low_freq_factor": st.floats(0, 1, exclude_min=True),
        "high_freq_factor": st.floats(1, exclude_min=True, allow_infinity=False),
        "original_max_position_embeddings": counts,
    }
) | st.fixed_dictionaries(
    {
        "rope_type": st.just("linear"),
        "factor": factors,
        "low_freq_factor": st.just(1.0),
        "high_freq_factor": st.just(4.0),
        "original_max_position_embeddings": st.just(8192),
    }
)
kinds = st.sampled_from(["mha", "gqa", "mqa", "mla", "kernel"])


@st.composite
def valid_models(draw):
    """Complete mappings of a model that satisfy every rule, built without the code under test."""
    n_kv_heads, group, half_head = (draw(st.integers(1, 9)) for _ in range(3))
    kind, use_rope = draw(kinds), draw(st.booleans())
    n_heads = n_kv_heads * group
    head_dim = half_head * (2 if use_rope else 1)
    own_head_dim = kind != "mla" and draw(st.booleans())
    match kind:
        case "mha":
            n_kv_heads = draw(st.sampled_from([None, n_heads]))
        case "mqa":
            n_kv_heads = draw(st.sampled_from([None, 1]))
        case "mla":
            n_kv_heads = None
        case "kernel":
            n_kv_heads = draw(st.sampled_from([None, n_kv_heads]))
    window = st.none() | counts
    windows = window | st.lists(window, min_size=1, max_size=4)
    if kind == "kernel":
        windows = st.none() | st.lists(st.none(), min_size=1, max_size=4)
    initialization = draw(st.sampled_from(["normal", "kaiming", "xavier", "small", "zero_out", "mup"]))
    return {
        "vocab_size": draw(counts),
        "d_model": draw(counts) if own_head_dim else n_heads * head_dim,
        "n_heads": n_heads,
        "n_kv_heads": n_kv_heads,
        "head_dim": head_dim if own_head_dim else None,
        "d_ff": draw(counts),
        "attention_type": kind,
        "attention_mode": draw(st.sampled_from(["causal", "bidirectional"])),
        "latent": draw(st.none() | latents) if kind == "mla" else None,
        "kernel": draw(st.none() | kernels) if kind == "kernel" else None,
        "qk_norm": None if kind == "mla" else draw(st.sampled_from([None, "head", "width"])),
        "softcap": None if kind == "kernel" else draw(st.none() | positive),
        "qkv_bias": kind != "mla" and draw(st.booleans()),
        "sliding_window": draw(windows),
        "max_seq_len": draw(st.none() | counts),
        "norm": draw(st.sampled_from(["rmsnorm", "layernorm"])),
        "norm_eps": draw(positive),
        "norm_position": draw(st.sampled_from(["pre", "post"])),
        "dropout": draw(fraction),
        "tie_embeddings": draw(st.booleans()),
        "embedding_max_norm": draw(st.none() | positive),
        "initialization": initialization,
        "mup_base_width": draw(counts) if initialization == "mup" else None,
        "freeze_up_proj": draw(st.booleans()),
        "use_rope": use_rope,
        "rope_theta": draw(positive) if use_rope else 10_000.0,
        "rope_scaling": draw(st.none() | scalings) if use_rope else None,
        "architecture": {
            "n_stacks": draw(st.integers(1, 100)),
            "blocks_per_stack": draw(st.integers(1, 100)),
        },
    }


@st.composite
def valid_objectives(draw):
    kind = draw(st.sampled_from(["next_token", "masked_token", "mask_diffusion"]))
    random_fraction = draw(st.floats(0, 1)) if kind == "masked_token" else 0.0
    same_fraction = draw(st.sampled_from([0.0, 0.1, (1 - random_fraction) / 2])) if random_fraction else 0.0
    return {
        "kind": kind,
        "mask_token_id": None if kind == "next_token" else draw(from_zero),
        "mask_fraction": draw(part) if kind == "masked_token" else 0.15,
        "random_fraction": random_fraction,
        "same_fraction": same_fraction if random_fraction + same_fraction <= 1 else 0.0,
        "noise_schedule": draw(st.sampled_from(["linear", "cosine"]))
        if kind == "mask_diffusion"
        else "linear",
        "z_loss": draw(not_negative),
        "logits_chunk": draw(st.none() | counts),
    }


@st.composite
def valid_scopes(draw, architecture, max_steps):
    is_local = architecture != "rackwise"
    backwards = is_local and draw(st.booleans())
    beside = draw(st.sampled_from(["overlap", "suffix"])) if is_local and not backwards else None
    offload = draw(st.sampled_from(["none", "cpu", "disk"])) if is_local else "none"
    cache_bytes = draw(from_zero) if is_local else 0
    return {
        "head": draw(st.sampled_from(["shared", "per_unit"])) if is_local else "shared",
        "overlap": draw(from_zero) if beside == "overlap" else 0,
        "suffix": draw(from_zero) if beside == "suffix" else 0,
        "order": "right_to_left" if backwards else "left_to_right",
        "growth": not backwards and draw(st.booleans()),
        "polish_steps": draw(st.integers(0, max_steps - 1)) if is_local else 0,
        "cache_bytes": cache_bytes,
        "cache_dir": draw(paths) if cache_bytes else None,
        "offload": offload,
        "offload_dir": draw(without_nul) if offload == "disk" else None,
    }


@st.composite
def valid_recomputes(draw, compiles):
    kinds = ["none", "full", "every_nth", "selective", "by_name"] + ["budget"] * compiles
    kind = draw(st.sampled_from(kinds))
    return {
        "kind": kind,
        "every": draw(counts) if kind == "every_nth" else 2,
        "budget": draw(st.floats(0, 1)) if kind == "budget" else 0.5,
        "names": draw(st.lists(without_nul, min_size=1, max_size=2)) if kind == "by_name" else [],
    }


own_settings = st.fixed_dictionaries({"lr": st.none() | positive, "weight_decay": st.none() | not_negative})


@st.composite
def valid_guards(draw):
    above_one = st.floats(1, 1e6, exclude_min=True)
    recent, minimum, patience = draw(counts), draw(counts), draw(st.integers(1, 99))
    suspect = draw(st.none() | above_one)
    return {
        "deviations": draw(not_negative),
        "factor": draw(above_one),
        "suspect_factor": suspect,
        "proven_factor": draw(above_one if suspect is None else st.floats(suspect, 1e6)),
        "loss_factor": draw(st.none() | above_one),
        "logit_factor": draw(st.none() | above_one),
        "logit_limit": draw(st.none() | positive),
        "recent": recent,
        "minimum": minimum,
        "history": max(recent, minimum),
        "spikes_clipped": draw(from_zero),
        "patience": patience,
        "rewinds": draw(from_zero),
        "snapshot_interval": draw(st.none() | st.integers(patience + 1, 999)),
        "snapshot_on_host": draw(st.booleans()),
        "bundle_dir": draw(paths),
        "bundle_weights": draw(st.booleans()),
        "max_bundles": draw(from_zero),
    }


@st.composite
def valid_trainings(draw):
    """Complete mappings of `training` that satisfy every rule, built without the code under test."""
    max_steps, lr, compiles = draw(counts), draw(positive), draw(st.booleans())
    architecture = draw(st.sampled_from(["rackwise", "stackwise", "blockwise"]))
    eval_interval, checkpoint_dir, upload = draw(st.none() | counts), draw(paths), draw(paths)
    optimizer = draw(st.sampled_from(["adamw", "muon"]))
    schedule = draw(st.sampled_from(["cosine", "linear", "constant", "wsd", "inverse_sqrt"]))
    strategy = draw(st.sampled_from(["none", "ddp", "fsdp"]))
    return {
        "training_architecture": architecture,
        "batch_size": draw(counts),
        "accumulation_steps": draw(counts),
        "seq_len": draw(counts),
        "max_steps": max_steps,
        "seed": draw(st.integers(0, 2**63 - 1)),
        "device": draw(st.sampled_from(["auto", "cpu", "cuda", "cuda:0", "cuda:17"])),
        "precision": draw(st.sampled_from(["fp32", "bf16", "bf16_weights", "fp16", "float8"])),
        "compile": compiles,
        "grad_clip": draw(st.none() | positive),
        "log_interval": draw(counts),
        "eval_interval": eval_interval,
        "eval_batches": draw(st.none() | counts) if eval_interval else None,
        "checkpoint_dir": checkpoint_dir,
        "save_interval": 100 if checkpoint_dir is None else draw(counts),
        "resume": checkpoint_dir is not None and draw(st.booleans()),
        "checkpoint": NO_CHECKPOINTS
        if checkpoint_dir is None
        else {
            "keep_last": draw(counts),
            "keep_every": draw(st.none() | counts),
            "keep_best": draw(from_zero) if eval_interval else 0,
            "asynchronous": draw(st.sampled_from([False, True, "overlapped"])),
            "upload": upload,
            "upload_keep_last": None if upload is None else draw(st.none() | counts),
        },
        "optimizer": {
            "kind": optimizer,
            "lr": lr,
            "weight_decay": draw(not_negative),
            "betas": [draw(fraction), draw(fraction)],
            "eps": draw(positive),
            "momentum": draw(fraction) if optimizer == "muon" else 0.95,
            "per_stack": draw(st.dictionaries(st.integers(0, 99), own_settings, max_size=2)),
        },
        "schedule": {
            "kind": schedule,
            "warmup_steps": draw(st.none() | st.integers(0, max_steps)),
            "min_lr": draw(st.floats(0, lr)) if schedule != "constant" else 0.0,
            "decay_fraction": draw(part) if schedule == "wsd" else 0.2,
        },
        "objective": draw(valid_objectives()),
        "scope": draw(valid_scopes(architecture, max_steps)),
        "recompute": draw(valid_recomputes(compiles)),
        "distributed": {
            "strategy": strategy,
            "reshard_after_forward": strategy != "fsdp" or draw(st.booleans()),
        },
        "telemetry": {
            "parameter_norms": draw(st.booleans()),
            "jsonl": draw(paths),
            "tensorboard": draw(paths),
        },
        "guard": draw(st.none() | valid_guards()),
    }


@st.composite
def valid_mappings(draw):
    """Complete mappings that satisfy every rule, built without the code under test."""
    task = draw(st.sampled_from([None, "copy", "shift", "induction", "markov"]))
    return {
        "model": draw(valid_models()),
        "training": draw(valid_trainings()),
        "data": {
            "dataset_path": draw(paths) if task is None else None,
            "tokenizer": draw(without_nul) if task is None else "byte",
            "task": task,
            "pack_documents": draw(st.booleans()),
            "validation_fraction": draw(fraction),
            "shuffle": draw(st.booleans()),
        },
    }


@pytest.fixture(scope="module")
def yaml_file(tmp_path_factory):
    return tmp_path_factory.mktemp("config") / "config.yaml"


class TestRoundTrip:
    @given(valid_mappings())
    def test_dict(self, mapping):
        before = copy.deepcopy(mapping)
        config = StackWiseConfig.from_dict(mapping)
        assert config.to_dict() == before == mapping
        assert_valid(config.to_dict())

    @given(valid_mappings())
    def test_json(self, mapping):
        config = StackWiseConfig.from_json(json.loads(json.dumps(mapping)))
        assert config.to_dict() == mapping

    @given(valid_mappings())
    def test_yaml(self, yaml_file, mapping):
        config = StackWiseConfig.from_dict(mapping)
        config.to_yaml(yaml_file)
        again = StackWiseConfig.from_yaml(yaml_file)
        assert again == config and again.to_dict() == mapping

    @given(valid_mappings())
    def test_yaml_is_plain_for_other_readers(self, yaml_file, mapping):
        StackWiseConfig.from_dict(mapping).to_yaml(yaml_file)
        assert yaml.safe_load(yaml_file.read_text(encoding="utf-8")) == mapping

    @pytest.mark.parametrize("path", INTEGERS)
    def test_what_is_accepted_can_be_written(self, yaml_file, path):
        # Python writes no decimal number of more than 4300 digits.
        config = accepted(nested(path, 2**20_000))
        if config is not None:
            config.to_yaml(yaml_file)
            assert StackWiseConfig.from_yaml(yaml_file) == config

    def test_whoever_reads_finds_a_whole_file(self, tmp_path, monkeypatch):
        path, other = tmp_path / "run.yaml", StackWiseConfig.from_dict({"model": {"d_model": 1024}})
        StackWiseConfig().to_yaml(path)
        write = Path.write_text

        def write_half(self, text, **more):
            write(self, text[: len(text) // 2], **more)
            raise OSError("the disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_text", write_half)
            with pytest.raises(OSError, match="full"):
                other.to_yaml(path)
        assert StackWiseConfig.from_yaml(path) == StackWiseConfig() and [*tmp_path.iterdir()] == [path]

    @given(valid_mappings(), st.data())
    def test_missing_keys_are_defaults(self, mapping, data):
        kept = data.draw(st.sets(st.sampled_from(["model", "training", "data"])))
        defaults = StackWiseConfig().to_dict()
        given_part = {key: mapping[key] for key in kept}
        assert StackWiseConfig.from_dict(given_part).to_dict() == {**defaults, **given_part}

    @pytest.mark.parametrize(
        "text", ["no", "1e-4", "null", "~", "2001-01-01", "a: b", "#x", " x ", "\n", "\ud800"]
    )
    def test_text_stays_text(self, yaml_file, text):
        config = StackWiseConfig.from_dict({"data": {"dataset_path": text}})
        config.to_yaml(yaml_file)
        assert StackWiseConfig.from_yaml(yaml_file).data.dataset_path == text

    def test_dict_is_a_copy(self):
        config = StackWiseConfig()
        mapping = config.to_dict()
        mapping["model"]["d_model"] = -1
        mapping["training"]["optimizer"]["betas"].append(3.0)
        assert config == StackWiseConfig()

    def test_configurations_do_not_share_values(self):
        betas = [0.5, 0.6]
        first = StackWiseConfig.from_dict({"training": {"optimizer": {"betas": betas}}})
        betas.append(7.0)
        assert first.training.optimizer.betas == [0.5, 0.6]
        StackWiseConfig().training.optimizer.betas.append(7.0)
        assert StackWiseConfig().training.optimizer.betas == [0.9, 0.95]

    @pytest.mark.parametrize("kind", [collections.OrderedDict, types.MappingProxyType, collections.UserDict])
    def test_any_mapping(self, kind):
        config = StackWiseConfig.from_dict(kind({"model": kind({"architecture": kind({"n_stacks": 3})})}))
        assert config.model.architecture.n_stacks == 3


class TestYaml:
    @pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n", "---\n", "null\n", "{}", "\ufeff"])
    def test_empty_is_defaults(self, yaml_file, text):
        yaml_file.write_text(text, encoding="utf-8")
        assert StackWiseConfig.from_yaml(yaml_file) == StackWiseConfig()

    @pytest.mark.parametrize("text, value", YAML_NUMBERS.items())
    def test_numbers(self, yaml_file, text, value):
        yaml_file.write_text(f"training: {{optimizer: {{lr: {text}}}}}", encoding="utf-8")
        lr = StackWiseConfig.from_yaml(str(yaml_file)).training.optimizer.lr
        assert type(lr) is float and lr == value

    @pytest.mark.parametrize("text", ["'1e-4'", "1e", "e-4", "1e-4x", "--1e-4", "1e-4.0", "1e4e4", "1_0e-4"])
    def test_not_quite_numbers(self, yaml_file, text):
        yaml_file.write_text(f"training: {{optimizer: {{lr: {text}}}}}", encoding="utf-8")
        with pytest.raises(ConfigError, match=r"training\.optimizer\.lr: got '"):
            StackWiseConfig.from_yaml(yaml_file)

    @pytest.mark.parametrize("text, key", REPEATED_KEYS)
    def test_repeated_key(self, yaml_file, text, key):
        yaml_file.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=f"'{key}'") as caught:
            StackWiseConfig.from_yaml(yaml_file)
        assert "line" in str(caught.value) and str(yaml_file) in str(caught.value)

    def test_same_key_in_two_sections(self, yaml_file):
        yaml_file.write_text("training: {seed: 1}\nmodel: {d_ff: 2}\ndata: {}\n", encoding="utf-8")
        assert StackWiseConfig.from_yaml(yaml_file).training.seed == 1

    def test_aliases(self, yaml_file):
        yaml_file.write_text("model: {d_model: &n 256, d_ff: *n}", encoding="utf-8")
        assert StackWiseConfig.from_yaml(yaml_file).model.d_ff == 256

    @pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
    def test_hostile_text(self, yaml_file, tmp_path, monkeypatch, text):
        monkeypatch.chdir(tmp_path)
        yaml_file.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError) as caught:
            StackWiseConfig.from_yaml(yaml_file)
        assert str(yaml_file) in str(caught.value)
        assert caught.value.problems and all(len(line) < 2000 for line in caught.value.problems)
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("content", HOSTILE_BYTES.values(), ids=HOSTILE_BYTES.keys())
    def test_hostile_bytes(self, yaml_file, content):
        yaml_file.write_bytes(content)
        with pytest.raises(ConfigError, match=r"config\.yaml: "):
            StackWiseConfig.from_yaml(yaml_file)

    @pytest.mark.parametrize(
        "shape", ["{}", "training: {{seed: {}}}", "training: {}"], ids=["top level", "leaf", "section"]
    )
    def test_aliases_that_multiply(self, yaml_file, shape):
        # Written out this is 2^20 elements, 8 MB of text; nothing needs to write it out.
        text = "[x]"
        for i in range(20):
            text = f"[&a{i} {text}, *a{i}]"
        yaml_file.write_text(shape.format(text), encoding="utf-8")
        tracemalloc.start()
        try:
            with pytest.raises(ConfigError):
                StackWiseConfig.from_yaml(yaml_file)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 2_000_000

    def test_settings_of_stacks(self, yaml_file):
        yaml_file.write_text("training: {optimizer: {per_stack: {0: {lr: 1e-3}, 3: {}}}}", encoding="utf-8")
        optimizer = StackWiseConfig.from_yaml(yaml_file).training.optimizer
        assert {index: own.to_dict() for index, own in optimizer.per_stack.items()} == {
            0: {"lr": 1e-3, "weight_decay": None},
            3: {"lr": None, "weight_decay": None},
        }

    @pytest.mark.parametrize("key", ["'0'", "x", "-1", "1.0", "null", "true"])
    def test_no_index_of_a_stack(self, yaml_file, key):
        yaml_file.write_text(f"training: {{optimizer: {{per_stack: {{{key}: {{}}}}}}}}", encoding="utf-8")
        with pytest.raises(ConfigError, match=r"per_stack\.\S+: got .* as a key"):
            StackWiseConfig.from_yaml(yaml_file)

    def test_missing_file_is_no_config_error(self, tmp_path):
        with pytest.raises(FileNotFoundError):
            StackWiseConfig.from_yaml(tmp_path / "none.yaml")


class TestUnknownKeys:
    @pytest.mark.parametrize(
        "section, name",
        [(path, name) for path, section in SECTIONS.items() for name in section.model_fields],
    )
    def test_every_level(self, section, name):
        path = f"{section}.{name}x".lstrip(".")
        (line,) = refusal(nested(path, 1))
        assert line.startswith(f"{path}: unknown key")
        assert f"did you mean '{name}'?" in line
        assert all(allowed in line for allowed in SECTIONS[section].model_fields)

    @pytest.mark.parametrize("section", SECTIONS)
    def test_no_suggestion_for_something_else(self, section):
        path = f"{section}.zzzz".lstrip(".")
        (line,) = refusal(nested(path, 1))
        assert line.startswith(f"{path}: ") and "did you mean" not in line and "allowed: " in line

    @pytest.mark.parametrize("key", [1, None, True, 2.5, (1, 2), b"model"])
    def test_key_that_is_no_text(self, key):
        for mapping in ({key: 1}, {"model": {key: 1}}, {"training": {"optimizer": {key: 1}}}):
            (line,) = refusal(mapping)
            assert str(key) in line


class TestTypes:
    @pytest.mark.parametrize(
        "path, value",
        [
            (path, value)
            for path in INTEGERS
            for value in NO_INTEGERS + not_null(path)
            # A list of windows is one for each of several blocks.
            if path != "model.sliding_window" or not isinstance(value, list)
        ],
    )
    def test_integers(self, path, value):
        (line,) = refusal(nested(path, value))
        assert line.startswith(f"{path}: got {value!r}") and "integer" in line

    @pytest.mark.parametrize("below", [1, 2, 10**30])
    @pytest.mark.parametrize("path, least", INTEGERS.items())
    def test_too_small(self, path, least, below):
        (line,) = refusal(nested(path, least - below))
        assert line.startswith(f"{path}: got {least - below} (int)") and line.endswith(f"{least}")

    @pytest.mark.parametrize("path, value", [(p, v) for p in FLOATS for v in NO_FLOATS + not_null(p)])
    def test_floats(self, path, value):
        (line,) = refusal(nested(path, value))
        assert line.startswith(f"{path}: got {value!r}") and "number" in line

    @pytest.mark.parametrize(
        "path, value", [(path, v) for path, (_, refused) in FLOATS.items() for v in refused]
    )
    def test_outside(self, path, value):
        (line,) = refusal(nested(path, value))
        assert line.startswith(f"{path}: got {value!r}") and ("greater than" in line or "less than" in line)

    @pytest.mark.parametrize("path, value", [(path, whole) for path, (whole, _) in FLOATS.items()])
    def test_whole_numbers_are_numbers(self, path, value):
        result = at(StackWiseConfig.from_dict(nested(path, value)).to_dict(), path)
        assert result == value and type(result) is float

    @pytest.mark.parametrize("value", [0, 1, "true", "yes", "", None, [], 1.0])
    @pytest.mark.parametrize("path", BOOLEANS)
    def test_booleans(self, path, value):
        (line,) = refusal(nested(path, value))
        assert line.startswith(f"{path}: got {value!r}") and "boolean" in line

    @pytest.mark.parametrize(
        "path, value", [(p, v) for p in CHOICES for v in ["", "x", 0, True, ["causal"], *not_null(p)]]
    )
    def test_choices(self, path, value):
        allowed = CHOICES[path]
        for wrong in (value, allowed[0].upper(), f"{allowed[0]} "):
            (line,) = refusal(nested(path, wrong))
            assert line.startswith(f"{path}: got {wrong!r}")
            assert all(repr(choice) in line for choice in allowed)

    @pytest.mark.parametrize("value", [0, True, 1.5, ["a"], {}, b"a"])
    @pytest.mark.parametrize("path", [*TEXTS, "training.device"])
    def test_texts(self, path, value):
        (line,) = refusal(nested(path, value))
        assert line.startswith(f"{path}: got {value!r}") and "string" in line

    @pytest.mark.parametrize("device", DEVICES_REFUSED)
    def test_devices(self, device):
        (line,) = refusal({"training": {"device": device}})
        assert line.startswith(f"training.device: got {device!r}") and "auto" in line

    @pytest.mark.parametrize("path", sorted(MAY_BE_NULL - {"model.n_kv_heads"}))
    def test_null(self, path):
        assert at(StackWiseConfig.from_dict(nested(path, None)).to_dict(), path) is None

    @pytest.mark.parametrize("value", [None, 0, True, "x", [], [1], ["a", "b"]])
    @pytest.mark.parametrize("path", [path for path in SECTIONS if path])
    def test_sections(self, path, value):
        if value is None and path in OPTIONAL_SECTIONS:
            assert missing_or(StackWiseConfig.from_dict(nested(path, None)).to_dict(), path) is None
            return
        (line,) = refusal(nested(path, value))
        assert line.startswith(f"{path}: got {value!r}") and "dictionary" in line

    @pytest.mark.parametrize("value", [None, 0, "x", [], [("model", {})], {"model"}])
    def test_not_a_mapping(self, value):
        (line,) = refusal(value)
        assert repr(value) in line and "mapping" in line

    @pytest.mark.parametrize("path", ["model.d_model", "training.seed", "training.optimizer.lr"])
    @pytest.mark.parametrize(
        "value", [-(10**5000), "x" * 10**6, [[0] * 1000] * 1000], ids=["int", "str", "list"]
    )
    def test_long_values_are_shown_short(self, path, value):
        (line,) = refusal(nested(path, value))
        assert line.startswith(f"{path}: ") and len(line) < 300

    def test_deep_values(self):
        deep = []
        for _ in range(100_000):
            deep = [deep]
        (line,) = refusal({"model": deep})
        assert line.startswith("model: ") and len(line) < 300


class TestConsistency:
    @pytest.mark.parametrize("mapping, path, parts", INCONSISTENT)
    def test_refused(self, mapping, path, parts):
        (line,) = refusal(mapping)
        assert line.startswith(f"{path}: got ")
        assert all(part in line for part in parts), line

    @pytest.mark.parametrize("path", INAPPLICABLE)
    def test_a_key_that_does_nothing_is_refused(self, path):
        value, other, kind, allowed = INAPPLICABLE[path]
        section, key = path.rsplit(".", 1)
        base = nested(f"{section}.{other}", kind)
        (line,) = refusal(merged(base, written(path, value)))
        named = ".".join([path, *value]) if isinstance(value, dict) else path
        reason = f"{other}={allowed} ({other}={kind!r})" if allowed else f"{other}, which is null"
        assert line.startswith(f"{named}: got ") and line.endswith(f"is for {reason}")
        default = SECTIONS[section].model_fields[key].get_default(call_default_factory=True)
        default = default.to_dict() if isinstance(default, BaseModel) else default
        assert_valid(StackWiseConfig.from_dict(merged(base, written(path, default))).to_dict())

    def test_every_key_that_may_do_nothing_is_listed(self):
        applies = {f"{place}.{key}" for place, section in SECTIONS.items() for key in section.applies}
        assert applies == set(INAPPLICABLE)

    @pytest.mark.parametrize("mapping", CONSISTENT)
    def test_accepted(self, mapping):
        assert_valid(StackWiseConfig.from_dict(mapping).to_dict())

    @pytest.mark.parametrize("keys, key, parts", REFUSED_MODELS)
    def test_a_block_refuses_what_a_model_refuses(self, keys, key, parts):
        sizes = {"d_model": 512, "d_ff": 64, "n_heads": 8, "n_kv_heads": 2, "attention_type": "gqa"}
        with pytest.raises(ConfigError) as caught:
            BlockConfig.from_dict({**sizes, **keys}, source="Block")
        (line,) = caught.value.problems
        assert line.startswith(f"{key}: ") and all(part in line for part in parts), line
        assert str(caught.value) == f"Block: {line}"

    def test_a_block_has_one_window(self):
        for window in ([4], [4, None]):
            with pytest.raises(ConfigError, match=r"sliding_window: got \[4.*allowed: a valid integer"):
                BlockConfig.from_dict({"d_model": 8, "d_ff": 8, "n_heads": 2, "sliding_window": window})

    @pytest.mark.parametrize("key", ["d_model", "d_ff", "n_heads"])
    def test_what_a_block_needs(self, key):
        sizes = {"d_model": 8, "d_ff": 8, "n_heads": 2}
        del sizes[key]
        with pytest.raises(ConfigError) as caught:
            BlockConfig.from_dict(sizes)
        (line,) = caught.value.problems
        assert line == f"{key}: got nothing; it has no default"

    @given(valid_models())
    def test_every_block_of_a_model(self, mapping):
        mapping["architecture"] = {"n_stacks": 2, "blocks_per_stack": 3}
        model = ModelConfig.from_dict(mapping)
        blocks = model.blocks()
        assert [len(stack) for stack in blocks] == [3, 3]
        windows = mapping["sliding_window"]
        windows = windows if isinstance(windows, list) else [windows]
        for i, block in enumerate(block for stack in blocks for block in stack):
            keys = {key: value for key, value in mapping.items() if key in BlockConfig.model_fields}
            assert block.to_dict() == keys | {"sliding_window": windows[i % len(windows)]}
        assert model.to_dict() == mapping

    @given(d_model=st.integers(1, 48), n_heads=st.integers(1, 16), n_kv_heads=st.none() | st.integers(1, 16))
    def test_heads(self, d_model, n_heads, n_kv_heads):
        kv = n_heads if n_kv_heads is None else n_kv_heads
        divides = d_model % n_heads == 0 and n_heads % kv == 0
        for attention_type, fits in (
            ("mha", kv == n_heads),
            ("gqa", n_kv_heads is not None),
            ("mqa", n_kv_heads in (None, 1)),
            ("kernel", True),
        ):
            for use_rope in (False, True):
                allowed = divides and fits and not (use_rope and (d_model // n_heads) % 2)
                model = {
                    "d_model": d_model,
                    "n_heads": n_heads,
                    "n_kv_heads": n_kv_heads,
                    "attention_type": attention_type,
                    "use_rope": use_rope,
                }
                if allowed:
                    assert StackWiseConfig.from_dict({"model": model}).model.d_model == d_model
                else:
                    assert refusal({"model": model})


class TestProblems:
    def test_all_at_once(self):
        wrong = {
            "model": {"n_heads": 7, "n_kv_heads": True, "norm": "batchnorm", "architecture": {"n_stacks": 0}},
            "training": {
                "batch_size": 0,
                "seed": 2.0,
                "device": "tpu",
                "optimizer": {
                    "lr": "1e-4",
                    "betas": [0.9, 1.0],
                    "momentun": 1,
                    "per_stack": {0: {"lr": 0.0, "eps": 1.0}, -1: {}, "2": {}},
                },
                "schedule": {"kind": "step"},
                "accumulation_steps": 0,
                "objective": {"kind": "masked_token", "z_loss": -1, "logits_chunk": 2.5},
                "scope": {"overlap": 1, "suffix": 1, "cache_dir": "x", "of_load": "disk"},
                "recompute": {"kind": "by_name", "every": 0},
                "distributed": {"strategy": "zero"},
                "telemetry": {"jsonl": 1},
            },
            "data": {"shuffle": 1, "validation_fraction": math.nan, "task": "sort"},
            "modle": {},
        }
        expected = {
            "model.n_heads": ("7", "divide d_model=512"),
            "model.n_kv_heads": ("True", "integer"),
            "model.norm": ("'batchnorm'", "'rmsnorm' or 'layernorm'"),
            "model.architecture.n_stacks": ("0", "greater than or equal to 1"),
            "training.batch_size": ("0", "greater than or equal to 1"),
            "training.seed": ("2.0", "integer"),
            "training.device": ("'tpu'", "cuda"),
            "training.optimizer.lr": ("'1e-4'", "number"),
            "training.optimizer.betas": ("[0.9, 1.0]", "[0, 1)"),
            "training.optimizer.momentun": ("unknown key", "did you mean 'momentum'?", "weight_decay"),
            "training.optimizer.per_stack.0.lr": ("0.0", "greater than 0"),
            "training.optimizer.per_stack.0.eps": ("unknown key", "lr, weight_decay"),
            "training.optimizer.per_stack.-1": ("-1", "as a key greater than or equal to 0"),
            "training.optimizer.per_stack.2": ("'2'", "as a key a valid integer"),
            "training.schedule.kind": ("'step'", "'cosine', 'linear', 'constant', 'wsd' or 'inverse_sqrt'"),
            "training.accumulation_steps": ("0", "greater than or equal to 1"),
            "training.objective.mask_token_id": ("None", "kind='masked_token' needs"),
            "training.objective.z_loss": ("-1", "greater than or equal to 0"),
            "training.objective.logits_chunk": ("2.5", "integer"),
            "training.scope.suffix": ("1", "overlap=0"),
            "training.scope.cache_dir": ("'x'", "cache_bytes above 0"),
            "training.scope.of_load": ("unknown key", "did you mean 'offload'?"),
            "training.recompute.names": ("[]", "kind='by_name' needs at least one pattern"),
            "training.recompute.every": ("0", "greater than or equal to 1"),
            "training.distributed.strategy": ("'zero'", "'none', 'ddp' or 'fsdp'"),
            "training.telemetry.jsonl": ("1", "string"),
            "data.task": ("'sort'", "'copy', 'shift', 'induction' or 'markov'"),
            "data.shuffle": ("1", "boolean"),
            "data.validation_fraction": ("nan", "finite number"),
            "modle": ("unknown key", "did you mean 'model'?"),
        }
        problems = refusal(wrong)
        lines = {line.split(": ")[0]: line for line in problems}
        assert len(problems) == len(lines) and set(lines) == set(expected)
        for path, parts in expected.items():
            assert all(part in lines[path] for part in parts), lines[path]

    def test_two_of_one_schedule(self):
        text = "\n".join(refusal({"training": {"schedule": {"warmup_steps": 201, "min_lr": 0.5}}}))
        assert "training.schedule.warmup_steps: got 201" in text and "max_steps=200" in text
        assert "training.schedule.min_lr: got 0.5" in text and "lr=0.0001" in text

    def test_every_key_of_a_scope_that_rackwise_training_has_no_use_for(self):
        scope = {"overlap": 1, "cache_bytes": 2, "cache_dir": "x", "polish_steps": 3, "growth": True}
        lines = refusal({"training": {"scope": scope}})
        assert {line.split(": ")[0] for line in lines} == {f"training.scope.{key}" for key in scope} - {
            "training.scope.growth"
        }

    def test_both_fractions(self):
        lines = refusal({"training": {"objective": {"random_fraction": 0.5, "same_fraction": 0.75}}})
        assert [line.split(": ")[0] for line in lines] == [
            "training.objective.random_fraction",
            "training.objective.same_fraction",
        ]

    def test_message(self, yaml_file):
        yaml_file.write_text("model: {d_model: x, d_ff: 0}\n", encoding="utf-8")
        with pytest.raises(ConfigError) as caught:
            StackWiseConfig.from_yaml(yaml_file)
        first, *lines = str(caught.value).splitlines()
        assert first == f"{yaml_file}: 2 problems"
        assert [line.strip() for line in lines] == caught.value.problems
        assert isinstance(caught.value, ValueError)

    def test_crosses_processes(self):
        error = ConfigError(["model.d_ff: got 0 (int); allowed: 1", "data: x"], "a.yaml")
        for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
            assert again.problems == error.problems and str(again) == str(error)


class TestAssignment:
    @pytest.mark.parametrize("path", [*INTEGERS, *FLOATS, *BOOLEANS, *CHOICES, "training.device"])
    def test_refused_assignment_changes_nothing(self, path):
        section_path, _, name = path.rpartition(".")
        if section_path in OPTIONAL_SECTIONS:
            mapping = {section_path.split(".")[0]: OPTIONAL_SECTIONS[section_path]}
        elif "per_stack" in path:
            mapping = written(section_path, {})
        else:
            mapping = {}
        config = StackWiseConfig.from_dict(mapping)
        section = at(config, section_path)
        for value in ("x", -1, [], math.nan):
            with pytest.raises(ConfigError, match=f"{name}: got"):
                setattr(section, name, value)
        assert config == StackWiseConfig.from_dict(mapping)

    def test_accepted_assignment(self):
        config = StackWiseConfig()
        config.training.schedule.warmup_steps = 0
        config.training.optimizer.lr = 1
        config.model.d_model = 1024
        config.model.architecture = {"n_stacks": 7}
        expected = StackWiseConfig().to_dict()
        expected["training"]["schedule"]["warmup_steps"] = 0
        expected["training"]["optimizer"]["lr"] = 1.0
        expected["model"]["d_model"] = 1024
        expected["model"]["architecture"]["n_stacks"] = 7
        assert config.to_dict() == expected
        assert isinstance(config.model.architecture, ArchitectureConfig)
        config.validate()

    @pytest.mark.parametrize(
        "name, value", [("n_heads", 7), ("d_model", 100), ("n_kv_heads", 3), ("attention_type", "mha")]
    )
    def test_rules_between_fields_of_a_section(self, name, value):
        model = ModelConfig()
        with pytest.raises(ConfigError):
            setattr(model, name, value)
        assert model == ModelConfig()

    def test_steps_below_the_warm_up(self):
        training = TrainingConfig(schedule=ScheduleConfig(warmup_steps=20))
        before = training.model_dump()
        with pytest.raises(ConfigError, match=r"schedule.warmup_steps: got 20.*max_steps=19"):
            training.max_steps = 19
        assert training.model_dump() == before

    @pytest.mark.parametrize(
        "before, name, value, message",
        [
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
                "recompute.kind: got 'bud",
            ),
            ({}, "scope", {"suffix": 1}, "scope.suffix: got 1"),
            ({}, "recompute", {"kind": "budget"}, "recompute.kind: got 'budget'"),
        ],
    )
    def test_rules_between_a_section_and_what_is_in_it(self, before, name, value, message):
        training = TrainingConfig.from_dict(before)
        with pytest.raises(ConfigError, match=re.escape(message)):
            setattr(training, name, value)
        assert training == TrainingConfig.from_dict(before)

    @pytest.mark.parametrize(
        "section, before, name, value",
        [
            ("scope", {"overlap": 1}, "suffix", 1),
            ("scope", {"suffix": 1}, "order", "right_to_left"),
            ("scope", {"order": "right_to_left"}, "growth", True),
            ("scope", {"cache_bytes": 1, "cache_dir": "x"}, "cache_bytes", 0),
            ("scope", {"offload": "disk", "offload_dir": "x"}, "offload", "cpu"),
            ("objective", MASKED, "kind", "next_token"),
            ("objective", MASKED | {"same_fraction": 0.5}, "random_fraction", 0.6),
            ("objective", MASKED | {"same_fraction": 0.5}, "kind", "mask_diffusion"),
            ("recompute", {"kind": "by_name", "names": ["*"]}, "names", []),
            ("optimizer", {}, "per_stack", {-1: {}}),
            ("optimizer.per_stack.0", {}, "lr", 0.0),
        ],
    )
    def test_rules_within_the_sections_of_training(self, section, before, name, value):
        instance = SECTIONS[f"training.{section}"].from_dict(before)
        with pytest.raises(ConfigError):
            setattr(instance, name, value)
        assert instance == SECTIONS[f"training.{section}"].from_dict(before)

    def test_task_and_path(self):
        data = DataConfig(task="copy")
        with pytest.raises(ConfigError, match=r"task: got 'copy'.*dataset_path=null"):
            data.dataset_path = "a.txt"
        assert data == DataConfig(task="copy")

    def test_settings_of_a_stack(self):
        config = StackWiseConfig()
        config.training.optimizer.per_stack = {2: {"lr": 1}}
        assert isinstance(config.training.optimizer.per_stack[2], StackOptimizerConfig)
        config.training.optimizer.per_stack[2].lr = 3
        assert config.to_dict()["training"]["optimizer"]["per_stack"] == {
            2: {"lr": 3.0, "weight_decay": None}
        }
        assert StackWiseConfig().training.optimizer.per_stack == {}

    @pytest.mark.parametrize("section", SECTIONS)
    def test_unknown_name(self, section):
        build = functools.partial(
            SECTIONS[section].from_dict, OPTIONAL_SECTIONS.get(section, {}).get(section[6:], {})
        )
        instance = build()
        with pytest.raises(ConfigError, match="zzzz: unknown key"):
            instance.zzzz = 1
        assert not hasattr(instance, "zzzz") and instance == build()

    def test_validate_sees_what_a_section_alone_cannot(self):
        config = StackWiseConfig()
        config.training.schedule.warmup_steps = 201
        with pytest.raises(ConfigError, match="max_steps=200"):
            config.validate()
        config = StackWiseConfig()
        config.training.optimizer.betas.append(0.5)
        with pytest.raises(ConfigError, match=r"training\.optimizer\.betas"):
            config.validate()

    @given(
        st.lists(
            st.tuples(
                st.sampled_from(
                    [
                        "d_model",
                        "n_heads",
                        "n_kv_heads",
                        "head_dim",
                        "attention_type",
                        "use_rope",
                        "dropout",
                        "sliding_window",
                        "softcap",
                        "qk_norm",
                    ]
                ),
                st.sampled_from([None, 0, 1, 2, 3, 4, 8, 12, 24, 0.5, "mha", "gqa", "mqa", "mla", "kernel"])
                | st.sampled_from(["head", [4, None], [], True, False]),
            ),
            max_size=12,
        )
    )
    def test_sections_are_always_valid(self, assignments):
        config = StackWiseConfig()
        for name, value in assignments:
            before = config.to_dict()
            try:
                setattr(config.model, name, value)
            except ConfigError:
                assert config.to_dict() == before
            else:
                before["model"][name] = value
                assert config.to_dict() == before
            assert_valid(config.to_dict())


field_names = sorted({name for section in SECTIONS.values() for name in section.model_fields})
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 70)
    | st.integers()
    | st.floats()
    | st.sampled_from([choice for choices in CHOICES.values() for choice in choices])
    | st.text(max_size=5)
)
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(field_names) | st.text(max_size=3), inner, max_size=5)
    ),
    max_leaves=12,
)


@st.composite
def nearly_valid_mappings(draw):
    """Valid mappings with up to three values, sections or keys replaced."""
    mapping = draw(valid_mappings())
    for _ in range(draw(st.integers(0, 3))):
        place = mapping
        while True:
            key = draw(st.sampled_from([*sorted(place), "other"]))
            if key in place and isinstance(place[key], dict) and place[key] and draw(st.booleans()):
                place = place[key]
                continue
            place[key] = draw(trees)
            break
    return mapping


yaml_tokens = st.lists(
    st.sampled_from([*field_names, "x", "1", "-1", "1e-4", "true", "~", "''"])
    | st.sampled_from(
        ["\n", "\n  ", "\n    ", "\t", ": ", ": ", ": ", "- ", "? ", "[", "]", "{", "}", ", ", "#"]
    )
    | st.sampled_from(["&a ", "*a", "<<: ", "!!map ", "!!set ", "!!omap ", "!!pairs ", "!!seq ", "!!str "])
    | st.sampled_from(
        ["!!int ", "!!bool ", "!!float ", "!!null ", "!!timestamp ", "!!binary ", "!x ", "!!merge "]
    )
    | st.sampled_from(
        ["|\n", ">\n", "---\n", "...\n", "%YAML 1.1\n", "'", '"', "\\", "=", "0x", "1:2", ".inf"]
    ),
    max_size=14,
).map("".join)


class TestFuzz:
    @given(
        st.dictionaries(st.sampled_from(["model", "training", "data"]) | st.text(max_size=3), trees) | trees
    )
    def test_dict(self, tree):
        self.survives(lambda: StackWiseConfig.from_dict(tree))

    @given(nearly_valid_mappings())
    def test_nearly_valid_dict(self, mapping):
        self.survives(lambda: StackWiseConfig.from_dict(mapping))

    @given(st.text() | yaml_tokens)
    @example("model: !!map [1]")
    def test_yaml_text(self, yaml_file, text):
        yaml_file.write_bytes(text.encode("utf-8"))
        self.survives(lambda: StackWiseConfig.from_yaml(yaml_file))

    @given(st.binary())
    def test_yaml_bytes(self, yaml_file, content):
        yaml_file.write_bytes(content)
        self.survives(lambda: StackWiseConfig.from_yaml(yaml_file))

    @settings(max_examples=50)
    @given(valid_mappings(), st.randoms(use_true_random=False))
    def test_damaged_yaml(self, yaml_file, mapping, chance: random.Random):
        text = yaml.safe_dump(mapping)
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(text))
            text = (
                text[:at]
                + chance.choice(["", "", "\n", " ", ":", "-", "[", "!!map ", "0", "&a ", "*a"])
                + text[at + 1 :]
            )
        yaml_file.write_bytes(text.encode("utf-8"))
        self.survives(lambda: StackWiseConfig.from_yaml(yaml_file))

    def survives(self, build):
        problems = []
        try:
            assert_valid(build().to_dict())
        except ConfigError as error:
            problems = error.problems
        assert all(len(line) < 2000 for line in problems)


@pytest.mark.parametrize("key", ["data.dataset_path", "data.tokenizer", "training.checkpoint_dir"])
def test_text_with_a_nul_character_is_refused(key):
    section, name = key.split(".")
    with pytest.raises(ConfigError, match=f"{key}: got .*; allowed: text without NUL characters"):
        StackWiseConfig.from_dict({section: {name: "a\0b"}})


def test_a_nul_character_in_a_list_is_refused():
    recompute = {"kind": "by_name", "names": ["mlp", "a\0b"]}
    with pytest.raises(ConfigError, match=r"recompute\.names: got .*; allowed: text without NUL characters"):
        StackWiseConfig.from_dict({"training": {"recompute": recompute}})


def test_blocks_of_a_rack_are_at_most_ten_thousand():
    architecture = {"n_stacks": 1000, "blocks_per_stack": 11}
    with pytest.raises(ConfigError, match=r"blocks_per_stack: got 11 \(int\); at most 10, for 10,000 Blocks"):
        StackWiseConfig.from_dict({"model": {"architecture": architecture}})
