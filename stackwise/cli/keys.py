"""The keys of a configuration: path, what is allowed, default and meaning, as help and as a page."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple, get_args, get_origin

from pydantic import TypeAdapter

from stackwise.config import BlockConfig, ModelConfig, StackWiseConfig
from stackwise.config.section import Section

__all__ = ["Key", "configuration_keys", "configuration_page", "described_keys", "keys_of_a_kind"]


class Key(NamedTuple):
    """One key, which holds no others.

    Attributes:
        allowed: its type and range in words.
        default: in YAML; None: it has none, and must be given where its section is.
        meaning: in a line.
    """

    allowed: str
    default: str | None
    meaning: str


@cache
def configuration_keys() -> dict[str, Key]:
    """Every key by its dotted path, in the order of the sections. An index of `per_stack` is an `N`."""
    keys = {}
    for path, section in _sections():
        properties = section.model_json_schema()["properties"]
        for name, field in section.model_fields.items():
            if _section_in(field.annotation) is None:
                # Of a key with a validator of its own pydantic knows no schema, but of its type.
                known = properties[name].keys() & {"type", "anyOf", "enum"}
                kind: Any = field.annotation
                schema = properties[name] if known else TypeAdapter(kind).json_schema()
                full = f"{path}.{name}"
                default = None if field.is_required() else field.get_default(call_default_factory=True)
                shown = None if field.is_required() else _yaml(default)
                keys[full] = Key(_allowed(schema), shown, MEANINGS[full] + _only_for(section, name))
    return keys


@cache
def keys_of_a_kind() -> dict[str, tuple[str, tuple[object, ...]]]:
    """Keys that mean something only where another has one of some values: that other one, and the values."""
    return {
        f"{path}.{name}": (f"{path}.{other}", values)
        for path, section in _sections()
        for name, (other, values) in section.applies.items()
    }


def described_keys() -> str:
    """What `stackwise train --help` adds."""
    lines = ["keys of the configuration, as --KEY VALUE or --KEY=VALUE, with VALUE in YAML; the command line"]
    lines += ["goes before the file, and the file before the default. With another kind of something the"]
    lines += ["file's keys for its own kind are put away:", ""]
    for path, key in configuration_keys().items():
        default = "no default" if key.default is None else f"default {key.default}"
        lines += [f"  --{path}: {key.allowed}; {default}", f"      {key.meaning}"]
    return "\n".join(lines)


def configuration_page() -> str:
    """`docs/reference/configuration.md`: each section with its docstring and its keys."""
    parts = [_INTRODUCTION]
    keys = configuration_keys()
    for path, section in _sections():
        rows = [
            f"| `{name}` | {_cell(key.allowed)} | {_cell(_code(key.default))} | {key.meaning} |"
            for name, key in (
                (other.rpartition(".")[2], key)
                for other, key in keys.items()
                if other.rpartition(".")[0] == path
            )
        ]
        head = ["| Key | Allowed | Default | What it is |", "|---|---|---|---|"]
        parts.append("\n\n".join([f"## {path}", *_prose(section), "\n".join([*head, *rows])]))
    return "\n\n".join(parts) + "\n"


_INTRODUCTION = """\
# Configuration

Every key of a `StackWiseConfig`, by section. `StackWiseConfig.from_yaml("run.yaml")` reads a file;
`stackwise train run.yaml --training.optimizer.lr 3e-4` gives keys on the command line. The command line
goes before the file, and the file before the default; `--print-config` prints what comes of it. A kind on
the command line puts the file's keys for other kinds away, as `--training.recompute.kind none` does with
`training.recompute.budget`. YAML has the numbers of YAML 1.2, so `3e-4` is one.

What is misspelt, of another type or out of its range is refused by name, all of it at once; so is a value for
a key that does nothing beside the others. What the keys of `training` and `data` do together is told in
[training.md](training.md); `examples/` has a file for each kind of training.

This page is what `stackwise.cli.keys.configuration_page()` returns."""


def _sections() -> Iterator[tuple[str, type[Section]]]:
    """Sections with their paths, each before those inside it."""

    def inside(path: str, section: type[Section]) -> Iterator[tuple[str, type[Section]]]:
        if path:
            yield path, section
        for name, field in section.model_fields.items():
            inner = _section_in(field.annotation)
            if inner is not None:
                # A mapping of sections has them by index.
                index = ".N" if get_origin(field.annotation) is dict else ""
                yield from inside(f"{path}.{name}{index}".lstrip("."), inner)

    return inside("", StackWiseConfig)


def _only_for(section: type[Section], name: str) -> str:
    """Where a key means something, if not everywhere."""
    if name not in section.applies:
        return ""
    other, values = section.applies[name]
    return f" ({other}: {', '.join(map(_yaml, values))})"


def _section_in(annotation: Any) -> type[Section] | None:
    kinds = (annotation, *get_args(annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)


def _allowed(schema: dict[str, Any]) -> str:
    """A JSON schema in words."""
    if "anyOf" in schema:
        return " | ".join(_allowed(option) for option in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(schema["enum"])
    if "const" in schema:
        return str(schema["const"])
    if "pattern" in schema:
        return f"text like {schema['pattern']}"
    match schema["type"]:
        case "array":
            count = f"{schema['minItems']} " if schema.get("minItems") else ""
            return f"list of {count}({_allowed(schema['items'])})"
        case "string":
            return "text"
        case "boolean":
            return "true | false"
        case "null":
            return "null"
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {schema[key]:g}" for key, sign in signs.items() if schema.get(key, 2**63) < 2**63]
    return " ".join([schema["type"], " and ".join(bounds)]).strip()


def _yaml(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _code(default: str | None) -> str:
    return "none: must be given" if default is None else f"`{default}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _prose(section: type[Section]) -> list[str]:
    prose = [inspect.cleandoc(section.__doc__ or "")]
    if section is ModelConfig:  # most of its keys are those of a Block
        prose += inspect.cleandoc(BlockConfig.__doc__ or "").split("\n\n")[1:]
    return prose


MEANINGS = {
    "model.d_model": "width of the residual stream",
    "model.d_ff": "width inside a feed-forward network",
    "model.head_dim": "width of a head; null: d_model / n_heads",
    "model.attention_type": "how queries share keys and values; mla keeps a latent, kernel a sum",
    "model.n_heads": "heads of queries",
    "model.n_kv_heads": "heads of keys and values; null: as many as n_heads, or one with mqa",
    "model.attention_mode": "whether a token sees those behind it",
    "model.qk_norm": "normalise queries and keys, each head for itself or all as one",
    "model.softcap": "C: logits of attention are bounded by C * tanh(logit / C)",
    "model.qkv_bias": "a bias on queries, keys and values",
    "model.norm": "kind of the norms",
    "model.norm_eps": "what a norm adds to the variance",
    "model.norm_position": "normalise what a branch reads (pre), or what it adds (post)",
    "model.dropout": "share of what a branch adds that is dropped in training",
    "model.freeze_up_proj": "leave the up branch of SwiGLU as it is at first",
    "model.use_rope": "rotary positions",
    "model.rope_theta": "base of the rotary frequencies",
    "model.initialization": "how weights start",
    "model.mup_base_width": "for mup: the d_model that the learning rate was tuned at",
    "model.vocab_size": "how many tokens there are; a byte tokenizer needs 256",
    "model.sliding_window": "W: a token sees itself and the W - 1 before it; a list goes round the Blocks",
    "model.max_seq_len": "longest sequence that generation may reach, and that a prototype takes",
    "model.tie_embeddings": "the head is the embedding",
    "model.embedding_max_norm": "longest vector that a token enters the model as",
    "model.latent.kv_lora_rank": "width of the latent that keys and values come from",
    "model.latent.q_lora_rank": "width of the latent that queries come from; null: none",
    "model.latent.qk_nope_head_dim": "of a head of queries and keys: width without position",
    "model.latent.qk_rope_head_dim": "of a head of queries and keys: width with position",
    "model.latent.v_head_dim": "width of a head of values",
    "model.kernel.feature_map": "which kernel attention weighs by",
    "model.kernel.n_features": "features of a head; more of them are closer to the kernel",
    "model.kernel.bandwidth": "width of the gaussian and laplacian kernels",
    "model.rope_scaling.rope_type": "how rotary frequencies are stretched",
    "model.rope_scaling.factor": "by how much",
    "model.rope_scaling.low_freq_factor": "wavelengths above context / this are divided",
    "model.rope_scaling.high_freq_factor": "wavelengths below context / this are kept",
    "model.rope_scaling.original_max_position_embeddings": "context before it is stretched",
    "model.architecture.n_stacks": "Stacks of the Rack",
    "model.architecture.blocks_per_stack": "Blocks of each Stack",
    "training.training_architecture": "what trains at one time: the Rack, a Stack, or a Block",
    "training.batch_size": "rows that a process computes at one time",
    "training.accumulation_steps": "batches of a step, whose gradients are added",
    "training.seq_len": "tokens that the model sees in a row",
    "training.max_steps": "updates; of stackwise and blockwise training for each unit",
    "training.seed": "of weights, order, masks and dropout",
    "training.device": "where to train; auto: CUDA where there is one, else the CPU",
    "training.precision": "dtype of weights and of what is computed",
    "training.compile": "compile the model and its loss",
    "training.grad_clip": "largest global L2 norm of the gradient; null: no clipping",
    "training.log_interval": "steps after which the host reads what happened",
    "training.eval_interval": "steps between evaluations on the validation data; null: only at the end",
    "training.eval_batches": "batches of each evaluation before the end; null: all",
    "training.checkpoint_dir": "folder of checkpoints; null: none are saved",
    "training.save_interval": "steps between checkpoints; there is one at the end in any case",
    "training.resume": "go on with the run in checkpoint_dir; begin it where there is none",
    "training.checkpoint.keep_last": "how many of the newest are kept",
    "training.checkpoint.keep_every": "those of every so many steps are kept as well; null: none",
    "training.checkpoint.keep_best": "so many evaluated ones of the lowest validation loss are kept as well",
    "training.checkpoint.asynchronous": "write while training goes on; overlapped: copy meanwhile as well",
    "training.checkpoint.upload": "folder, such as mounted storage, that each checkpoint is copied to",
    "training.checkpoint.upload_keep_last": "how many of the newest copies are kept; null: all",
    "training.optimizer.kind": "AdamW for all, or Muon for the matrices of the Blocks",
    "training.optimizer.lr": "learning rate at the peak of the schedule",
    "training.optimizer.weight_decay": "of matrices; norms, biases and embeddings are spared",
    "training.optimizer.betas": "decay of AdamW's two averages",
    "training.optimizer.eps": "what AdamW adds to the root of the second average",
    "training.optimizer.momentum": "of Muon",
    "training.optimizer.per_stack.N.lr": "of Stack N; null: as all others",
    "training.optimizer.per_stack.N.weight_decay": "of Stack N; null: as all others",
    "training.schedule.kind": "course of the learning rate after the warm-up",
    "training.schedule.warmup_steps": "steps in which it rises from 0; null: a tenth of the run",
    "training.schedule.min_lr": "what it falls to",
    "training.schedule.decay_fraction": "share of the run, at its end, in which it falls",
    "training.objective.kind": "what is predicted",
    "training.objective.mask_token_id": "token that stands for a masked one; null with next_token",
    "training.objective.mask_fraction": "share of the tokens that is predicted",
    "training.objective.random_fraction": "share of those that a random token replaces",
    "training.objective.same_fraction": "share of those that stays as it is",
    "training.objective.noise_schedule": "share of the tokens that is masked over time",
    "training.objective.z_loss": "weight of the squared log of the softmax's denominator",
    "training.objective.logits_chunk": "tokens for which there are logits at one time; null: all",
    "training.scope.head": "whether units share final norm and head, or each starts with fresh ones",
    "training.scope.overlap": "units before each unit that go on training with it",
    "training.scope.suffix": "Blocks at the end of the Rack that train with every unit",
    "training.scope.order": "which unit trains first",
    "training.scope.growth": "units enter as the identity; of rackwise training: Stacks join while it runs",
    "training.scope.polish_steps": "how many of max_steps train all units together in the end",
    "training.scope.cache_bytes": "of what frozen units say so much is kept; the rest is computed again",
    "training.scope.cache_dir": "folder to keep it in; null: in memory",
    "training.scope.offload": "where units are that take no part",
    "training.scope.offload_dir": "folder of offload: disk",
    "training.recompute.kind": "which activations are computed again in the backward pass",
    "training.recompute.every": "of so many Blocks one is computed again",
    "training.recompute.budget": "share of the memory that is left",
    "training.recompute.names": "patterns of module names, with the wildcards of a shell",
    "training.distributed.strategy": "what processes of torchrun share",
    "training.distributed.reshard_after_forward": "gather weights again for the backward pass",
    "training.telemetry.parameter_norms": "keep the gradient norm of every parameter of every step",
    "training.telemetry.jsonl": "file with a line for each step; null: none",
    "training.telemetry.tensorboard": "folder of event files; null: none",
    "training.guard.deviations": "of a spike, in median deviations of the change from step to step",
    "training.guard.factor": "rise of the gradient norm that is no spike, if the step is not recomputed",
    "training.guard.suspect_factor": "rise of the norm above which the step is recomputed; null: none",
    "training.guard.proven_factor": "multiple of the run's largest norm that passes if recomputed alike",
    "training.guard.loss_factor": "a rise of the loss that is no spike; null: any finite loss passes",
    "training.guard.logit_factor": "a rise of what attention logits are at most that is no spike; null: any",
    "training.guard.logit_limit": "the largest that passes, from the first step on; null: any",
    "training.guard.recent": "sound steps that give the level",
    "training.guard.minimum": "sound steps before there can be a spike",
    "training.guard.history": "sound steps that give the scatter; at least recent and minimum",
    "training.guard.spikes_clipped": "gradient spikes in a row that are clipped to the level and taken",
    "training.guard.patience": "steps in a row that are left out; then training goes back, or ends",
    "training.guard.rewinds": "how often it may go back before sound steps between",
    "training.guard.snapshot_interval": "most steps that going back costs, above patience; null: none",
    "training.guard.snapshot_on_host": "keep the copy to go back to in the memory of the host",
    "training.guard.bundle_dir": "folder for what computes a broken step again; null: none is written",
    "training.guard.bundle_weights": "with the weights",
    "training.guard.max_bundles": "how many are written in a start of the run",
    "data.dataset_path": "file of text or folder of token shards; null: CPython's documentation",
    "data.tokenizer": "byte, or the path of a tokenizer.json",
    "data.task": "a task that is made up, in the place of a text",
    "data.pack_documents": "the tokens of a document do not see another's",
    "data.validation_fraction": "share of the data that is not trained on; 0: no validation",
    "data.shuffle": "another order in each epoch",
}
