"""TrainingConfig: settings of a training run."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from stackwise.config.guard import GuardPolicy
from stackwise.config.section import NOT_NULL, Applies, Count, Keys, Problems, Section, Size, only_with

__all__ = [
    "CheckpointConfig",
    "DistributedConfig",
    "ObjectiveConfig",
    "ObjectiveKind",
    "OptimizerConfig",
    "Precision",
    "RecomputeConfig",
    "ScheduleConfig",
    "ScheduleKind",
    "ScopeConfig",
    "StackOptimizerConfig",
    "TelemetryConfig",
    "TrainingConfig",
]

ObjectiveKind = Literal["next_token", "masked_token", "mask_diffusion"]
Precision = Literal["fp32", "bf16", "bf16_weights", "fp16", "float8"]
ScheduleKind = Literal["cosine", "linear", "constant", "wsd", "inverse_sqrt"]
_Decay = Annotated[float, Field(ge=0.0, lt=1.0)]


class ScopeConfig(Section):
    """Layer-wise training. A unit is a Stack (`stackwise`) or a Block (`blockwise`).

    - `head`: `shared` trains the Rack's final norm and head with every unit. With `per_unit`, each
      unit starts with a fresh copy of the initial final norm and head. `right_to_left` needs `shared`,
      because only the last unit trains them.
    - `order`: `right_to_left` trains the last unit first. Gradients of each unit pass through the frozen
      units after it.
    - `growth`: with `stackwise` and `blockwise`, each unit starts as the identity, so that training starts
      with the output of the earlier units. With `rackwise`, the Rack starts with one Stack, and Stacks are
      added at even intervals during training.
    - `cache_bytes`: limit of the cache, which stores the outputs of the frozen units before the trained unit.
      With `right_to_left` it only helps if a batch is used several times within a unit.
    - `offload`: units that do not train stay on the device, in CPU memory, or on disk in `offload_dir`.
    """

    head: Literal["shared", "per_unit"] = "shared"
    """Share the final norm and head between units, or start each unit with a new copy."""
    overlap: Count = 0
    """Number of earlier units that continue to train with each unit."""
    suffix: Count = 0
    """Number of Blocks at the end of the Rack that train with every unit."""
    order: Literal["left_to_right", "right_to_left"] = "left_to_right"
    """Order in which the units are trained."""
    growth: bool = False
    """stackwise, blockwise: each unit starts as the identity. rackwise: Stacks are added during training."""
    polish_steps: Count = 0
    """Number of final steps, out of max_steps, that train all units together."""
    cache_bytes: Count = 0
    """Maximum size of the cache of frozen outputs in bytes. Outputs that do not fit are recomputed."""
    cache_dir: str | None = None
    """Folder of the cache; null: in memory."""
    offload: Literal["none", "cpu", "disk"] = "none"
    """Place of units that do not train."""
    offload_dir: str | None = None
    """Folder for `offload: disk`."""

    @classmethod
    def _rules(cls, key: str, given: Keys) -> Problems:
        match key:
            case "suffix" if given.suffix and given.overlap:
                yield key, "needs overlap=0: overlap and suffix exclude each other"
            case "order" if given.order == "right_to_left":
                for other in ("overlap", "suffix"):
                    if given.get(other):
                        yield key, f"needs {other}=0 ({other}={given[other]})"
            case "growth" if given.growth and given.order == "right_to_left":
                yield key, "needs order='left_to_right': a Rack grows at its end"
            case "cache_dir" if given.cache_dir is not None and given.cache_bytes == 0:
                yield key, "needs cache_bytes above 0"
            case "offload_dir" if (given.offload == "disk") != (given.offload_dir is not None):
                if given.offload == "disk":
                    yield key, "offload='disk' needs offload_dir"
                else:
                    yield key, f"needs offload='disk'; now offload={given.offload!r}"


class ObjectiveConfig(Section):
    """Prediction that the Rack is trained for.

    - `next_token` predicts each token from the tokens before it. Needs causal attention.
    - `masked_token` predicts a `mask_fraction` of the tokens, replaced by `mask_token_id`, from the rest
      (Devlin et al. 2019, arXiv:1810.04805). Needs bidirectional attention. A `random_fraction` of these
      tokens is replaced by random tokens and a `same_fraction` stays unchanged; BERT used 0.1 each.
    - `mask_diffusion`: the share of masked tokens is drawn for each row, and the loss is weighted so that it
      bounds the negative log-likelihood (Sahoo et al. 2024, arXiv:2406.07524). Needs bidirectional attention.

    `z_loss` follows Chowdhery et al. 2022 (arXiv:2204.02311), who used 1e-4.
    """

    applies: ClassVar[Applies] = {
        "mask_fraction": ("kind", ("masked_token",)),
        "random_fraction": ("kind", ("masked_token",)),
        "same_fraction": ("kind", ("masked_token",)),
        "noise_schedule": ("kind", ("mask_diffusion",)),
    }

    kind: ObjectiveKind = "next_token"
    """Prediction that is trained."""
    mask_token_id: Count | None = None
    """Id of the mask token; must be null for next_token."""
    mask_fraction: float = Field(0.15, gt=0.0, le=1.0)
    """Share of the tokens that is predicted."""
    random_fraction: float = Field(0.0, ge=0.0, le=1.0)
    """Share of the predicted tokens that is replaced by random tokens."""
    same_fraction: float = Field(0.0, ge=0.0, le=1.0)
    """Share of the predicted tokens that stays unchanged."""
    noise_schedule: Literal["linear", "cosine"] = "linear"
    """Share of masked tokens as a function of diffusion time."""
    z_loss: float = Field(0.0, ge=0.0)
    """Weight of the z-loss, the squared logsumexp of the logits."""
    logits_chunk: Size | None = None
    """Number of tokens whose logits are computed at one time; null: all."""

    @classmethod
    def _rules(cls, key: str, given: Keys) -> Problems:
        match key:
            case "mask_token_id" if given.kind != "next_token" and given.mask_token_id is None:
                yield key, f"kind={given.kind!r} needs the id of a token that the data does not use"
            case "mask_token_id" if given.kind == "next_token" and given.mask_token_id is not None:
                yield key, "allowed: null, because kind='next_token' masks nothing"
            case "same_fraction" if given.same_fraction + given.random_fraction > 1.0:
                yield key, f"must not exceed 1 together with random_fraction={given.random_fraction}"


class StackOptimizerConfig(Section):
    """Optimizer settings of one Stack."""

    lr: float | None = Field(None, gt=0.0)
    """Learning rate of Stack N; null: training.optimizer.lr."""
    weight_decay: float | None = Field(None, ge=0.0)
    """Weight decay of Stack N; null: training.optimizer.weight_decay."""


class OptimizerConfig(Section):
    """Optimizer.

    `adamw` is AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101). `muon` updates the matrices of the Blocks
    by orthogonalised momentum (Jordan et al. 2024), scaled to the size of AdamW's updates (Liu et al. 2025,
    arXiv:2502.16982), and all other weights by AdamW.
    """

    applies: ClassVar[Applies] = {"momentum": ("kind", ("muon",))}

    kind: Literal["adamw", "muon"] = "adamw"
    """AdamW for all weights, or Muon for the matrices of the Blocks."""
    lr: float = Field(1e-4, gt=0.0)
    """Learning rate at the peak of the schedule."""
    weight_decay: float = Field(0.1, ge=0.0)
    """Weight decay of matrices; norms, biases and embeddings have none."""
    betas: list[_Decay] = Field(default_factory=lambda: [0.9, 0.95], min_length=2, max_length=2)
    """Betas of AdamW."""
    eps: float = Field(1e-8, gt=0.0)
    """Epsilon of AdamW."""
    momentum: _Decay = 0.95
    """Momentum of Muon."""
    per_stack: dict[Count, StackOptimizerConfig] = Field(default_factory=dict)
    """Settings of single Stacks, by their index."""


class ScheduleConfig(Section):
    """Learning rate over time: a linear warm-up, then the curve of `kind`.

    `cosine` and `linear` fall to `min_lr`. `constant` stays at the peak. `wsd` stays at the peak and falls
    linearly to `min_lr` in the last `decay_fraction` of the run (Hu et al. 2024, arXiv:2404.06395).
    `inverse_sqrt` falls with the inverse root of the step (Vaswani et al. 2017), but not below `min_lr`. Each
    unit of layer-wise training has its own schedule. With `polish_steps` > 0, warm-up steps are shared in
    proportion to the steps of units and polish, rounded down.
    """

    applies: ClassVar[Applies] = {
        "min_lr": ("kind", ("cosine", "linear", "wsd", "inverse_sqrt")),
        "decay_fraction": ("kind", ("wsd",)),
    }

    kind: ScheduleKind = "cosine"
    """Learning rate after the warm-up."""
    warmup_steps: Count | None = None
    """Steps of the linear warm-up from 0; null: a tenth of the run."""
    min_lr: float = Field(0.0, ge=0.0)
    """Final learning rate; with inverse_sqrt: lower bound."""
    decay_fraction: float = Field(0.2, gt=0.0, le=1.0)
    """Share of the run, at its end, in which the rate falls."""


class RecomputeConfig(Section):
    """Activation recomputation (checkpointing).

    - `none`: store all activations.
    - `full`: store only the input of each Block.
    - `every_nth`: store only the input of every n-th Block.
    - `selective`: store only the outputs of matrix products and attention.
    - `budget`: the compiler keeps the share `budget` of the activation memory. Needs `compile`.
    - `by_name`: recompute the modules with names that match `names`.
    """

    applies: ClassVar[Applies] = {
        "every": ("kind", ("every_nth",)),
        "budget": ("kind", ("budget",)),
        "names": ("kind", ("by_name",)),
    }

    kind: Literal["none", "full", "every_nth", "selective", "budget", "by_name"] = "none"
    """Activations that are recomputed in the backward pass."""
    every: Size = 2
    """Recompute every n-th Block."""
    budget: float = Field(0.5, ge=0.0, le=1.0)
    """Share of the activation memory that remains."""
    names: list[str] = Field(default_factory=list)
    """Glob patterns of module names."""

    @classmethod
    def _rules(cls, key: str, given: Keys) -> Problems:
        if key == "names" and given.kind == "by_name" and not given.names:
            yield key, "kind='by_name' needs at least one pattern"


class DistributedConfig(Section):
    """Distribution over the processes of torchrun.

    `ddp` gives each process a full Rack. `fsdp` shards every weight (FSDP2: one group per Block, and one for
    the rest).
    """

    applies: ClassVar[Applies] = {"reshard_after_forward": ("strategy", ("fsdp",))}

    strategy: Literal["none", "ddp", "fsdp"] = "none"
    """Strategy of data parallelism over the processes of torchrun."""
    reshard_after_forward: bool = True
    """Free gathered weights after the forward pass, and gather them for the backward pass."""


class CheckpointConfig(Section):
    """Retention and writing of checkpoints.

    `keep_best` needs `eval_interval`. With `asynchronous`, a killed run loses up to 2 x `save_interval`
    steps.
    """

    keep_last: Size = 3
    """Number of newest checkpoints to keep."""
    keep_every: Size | None = None
    """Also keep checkpoints at multiples of this number of steps; null: none."""
    keep_best: Count = 0
    """Also keep this number of checkpoints with the lowest validation loss."""
    asynchronous: bool = False
    """Copy the state, and write it while training continues."""


class TelemetryConfig(Section):
    """Records of the training. Recording does not block training steps."""

    parameter_norms: bool = False
    """Record the gradient norm of every parameter in every step."""
    jsonl: str | None = None
    """File with one line per step; null: none."""
    tensorboard: str | None = None
    """Folder of TensorBoard event files; null: none."""


class TrainingConfig(Section):
    """Training run.

    `precision` is `fp32`, `bf16` (autocast), `bf16_weights` (bfloat16 weights and gradients, float32
    masters in the optimizer), `fp16` (autocast with a loss scale, CUDA only) or `float8` (matrix products,
    if the hardware supports them). On a CPU without bfloat16 instructions (AVX512_BF16, AMX), `bf16` can be
    20 times slower than `fp32`. Compilation takes about 30 seconds; use it for long runs.
    `eval_interval` counts steps over the whole run, not per unit. A resumed run is bit-identical to an
    uninterrupted one; `max_steps` may be larger than before. Without `resume`, a `checkpoint_dir` with
    checkpoints raises an error. Without a `guard`, a non-finite step ends the run.
    """

    applies: ClassVar[Applies] = {
        "eval_batches": ("eval_interval", NOT_NULL),
        "save_interval": ("checkpoint_dir", NOT_NULL),
        "resume": ("checkpoint_dir", NOT_NULL),
        "checkpoint": ("checkpoint_dir", NOT_NULL),
        "watch_logits": ("guard", NOT_NULL),
        "bundle_dir": ("guard", NOT_NULL),
    }

    training_architecture: Literal["rackwise", "stackwise", "blockwise"] = "rackwise"
    """Unit that is trained at one time: the Rack, a Stack or a Block."""
    batch_size: Size = 4
    """Rows per batch in each process."""
    accumulation_steps: Size = 1
    """Number of batches per step, whose gradient is that of one large batch."""
    seq_len: Size = 512
    """Tokens per row."""
    max_steps: Size = 200
    """Number of updates; per unit with stackwise or blockwise."""
    seed: Count = 0
    """Seed of weights, order, masks and dropout."""
    device: str = Field(
        "auto",
        pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$",
        json_schema_extra={"values": ["auto", "cpu", "cuda", "cuda:N"]},
    )
    """Device; auto: CUDA if available, otherwise the CPU."""
    precision: Precision = "bf16"
    """Dtype of the computation; bf16_weights: also of the weights."""
    compile: bool = False
    """Compile the model and its loss."""
    grad_clip: float | None = Field(1.0, gt=0.0)
    """Largest global L2 norm of the gradient; null: no clipping."""
    log_interval: Size = 10
    """Steps between two log lines."""
    eval_interval: Size | None = None
    """Steps between two evaluations on the validation data; null: only at the end."""
    eval_batches: Size | None = None
    """Batches per evaluation during training; null: all."""
    checkpoint_dir: str | None = None
    """Folder of checkpoints; null: no checkpoints."""
    save_interval: Size = 100
    """Steps between two checkpoints; one is always written at the end."""
    resume: bool = False
    """Continue the run in checkpoint_dir, or start one if the folder is empty."""
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """Optimizer."""
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    """Learning-rate schedule."""
    objective: ObjectiveConfig = Field(default_factory=ObjectiveConfig)
    """Training objective."""
    scope: ScopeConfig = Field(default_factory=ScopeConfig)
    """Layer-wise training."""
    recompute: RecomputeConfig = Field(default_factory=RecomputeConfig)
    """Activation recomputation."""
    distributed: DistributedConfig = Field(default_factory=DistributedConfig)
    """Distributed training."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """Retention and writing of checkpoints."""
    telemetry: TelemetryConfig = Field(default_factory=TelemetryConfig)
    """Records of the training."""
    guard: GuardPolicy | None = None
    """Guard against broken steps; null: none."""
    watch_logits: bool = False
    """The guard also watches a bound of the attention logits."""
    bundle_dir: str | None = None
    """Folder of the guard's bundles, which reproduce a broken step; null: none."""

    @classmethod
    def _rules(cls, key: str, given: Keys) -> Problems:
        match key:
            case "schedule":
                if (given.schedule.warmup_steps or 0) > given.get("max_steps", math.inf):
                    yield "schedule.warmup_steps", f"must not exceed training.max_steps={given.max_steps}"
                if given.schedule.min_lr > given.optimizer.lr:
                    yield "schedule.min_lr", f"must not exceed training.optimizer.lr={given.optimizer.lr}"
            case "scope" if given.training_architecture == "rackwise":
                for name in _changed(given.scope, ScopeConfig.model_fields.keys() - {"growth"}):
                    kinds = ["stackwise", "blockwise"]
                    yield f"scope.{name}", only_with("training_architecture", kinds, "rackwise")
            case "scope" if given.scope.polish_steps >= given.max_steps:
                yield "scope.polish_steps", f"must be below max_steps={given.max_steps}"
            case "recompute" if given.recompute.kind == "budget" and not given.compile:
                yield "recompute.kind", "needs compile=true"
            case "checkpoint" if given.checkpoint.keep_best and given.eval_interval is None:
                yield "checkpoint.keep_best", only_with("eval_interval", NOT_NULL, None)
            case "guard" if _changed(given.guard, {"clip"}):
                yield "guard.clip", "allowed: null; set training.grad_clip"
            case "watch_logits" if not given.watch_logits:
                for name in _changed(given.guard, {"logit_factor", "logit_limit"}):
                    yield f"guard.{name}", only_with("watch_logits", [True], False)


def _changed(section: Section | None, keys: Collection[str]) -> list[str]:
    """Return the keys that do not have their default, in the order of the section."""
    if section is None:
        return []
    fields = type(section).model_fields
    return [key for key, value in section if key in keys and value != fields[key].default]
