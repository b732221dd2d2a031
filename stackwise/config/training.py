"""TrainingConfig: how a Rack is trained."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from stackwise.config.guard import GuardConfig
from stackwise.config.section import NOT_NULL, Applies, Count, KeysRefusedError, Section, Size

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


class ScopeConfig(Section):
    """What `stackwise` and `blockwise` training do with their units, the Stacks or the Blocks.

    - `head`: `shared` is the Rack's own final norm and head, which goes on training with each unit;
      `per_unit` starts each unit with them as they were at first, which from right to left is refused: one
      unit trains them there.
    - `overlap`: how many units before it go on training with each unit.
    - `suffix`: how many Blocks at the end of the Rack train with every unit, between it and the head.
    - `order`: `right_to_left` trains the last unit first, and each through the frozen ones behind it.
    - `growth`: a unit enters as the identity, so that it starts from what those before it have learned.
      Of `rackwise` training: the Rack starts as its first Stack, and the others join one after the
      other at even intervals, all in training.
    - `polish_steps`: how many of `max_steps` are given to training all units together in the end.
    - `cache_bytes`: of what frozen units before the unit in training say of each batch, so much is kept, in
      memory or in `cache_dir`; the rest is computed again.
      From right to left nothing is moved on, and only what comes again within a unit is spared.
    - `offload`: where units are that take no part: on the device as well, in the memory of the CPU, or on
      disk in `offload_dir`.
    """

    head: Literal["shared", "per_unit"] = "shared"
    overlap: Count = 0
    suffix: Count = 0
    order: Literal["left_to_right", "right_to_left"] = "left_to_right"
    growth: bool = False
    polish_steps: Count = 0
    cache_bytes: Count = 0
    cache_dir: str | None = None
    offload: Literal["none", "cpu", "disk"] = "none"
    offload_dir: str | None = None

    @field_validator("suffix")
    @classmethod
    def _suffix_fits(cls, suffix: int, info: ValidationInfo) -> int:
        if suffix and info.data.get("overlap"):
            raise ValueError("is for overlap=0: what trains beside a unit is before it or behind it")
        return suffix

    @field_validator("order")
    @classmethod
    def _order_fits(cls, order: str, info: ValidationInfo) -> str:
        for key in ("overlap", "suffix"):
            if order == "right_to_left" and info.data.get(key):
                raise ValueError(f"goes with {key}=0 ({key}={info.data[key]})")
        return order

    @field_validator("growth")
    @classmethod
    def _growth_fits(cls, growth: bool, info: ValidationInfo) -> bool:
        if growth and info.data.get("order") == "right_to_left":
            raise ValueError("goes with order='left_to_right': a Rack grows at its end")
        return growth

    @field_validator("cache_dir")
    @classmethod
    def _cache_has_a_budget(cls, directory: str | None, info: ValidationInfo) -> str | None:
        if directory is not None and info.data.get("cache_bytes") == 0:
            raise ValueError("needs cache_bytes above 0")
        return directory

    @field_validator("offload_dir")
    @classmethod
    def _offload_has_a_place(cls, directory: str | None, info: ValidationInfo) -> str | None:
        offload = info.data.get("offload")
        if (offload == "disk") != (directory is not None) and offload is not None:
            raise ValueError("goes with offload='disk', which needs one" + f" (offload={offload!r})")
        return directory


class ObjectiveConfig(Section):
    """What the Rack learns to predict.

    - `next_token`: each token from those before it; needs causal attention.
    - `masked_token`: a `mask_fraction` of the tokens, replaced by `mask_token_id`, from all others (Devlin et
      al. 2019, arXiv:1810.04805); needs bidirectional attention. Of those tokens a `random_fraction` is
      replaced by random ones and a `same_fraction` left as it is instead; BERT took 0.1 of each.
    - `mask_diffusion`: as many as a time drawn for each row says, weighted so that the loss bounds the
      negative log-likelihood (Sahoo et al. 2024, arXiv:2406.07524); needs bidirectional attention.
      `noise_schedule` is the fraction masked over time.

    `z_loss` is the weight of the squared logarithm of the softmax's denominator (Chowdhery et al. 2022,
    arXiv:2204.02311, who took 1e-4). `logits_chunk` is for how many tokens there are logits at one time.
    """

    applies: ClassVar[Applies] = {
        "mask_fraction": ("kind", ("masked_token",)),
        "random_fraction": ("kind", ("masked_token",)),
        "same_fraction": ("kind", ("masked_token",)),
        "noise_schedule": ("kind", ("mask_diffusion",)),
    }

    kind: ObjectiveKind = "next_token"
    mask_token_id: Count | None = None
    mask_fraction: float = Field(0.15, gt=0.0, le=1.0)
    random_fraction: float = Field(0.0, ge=0.0, le=1.0)
    same_fraction: float = Field(0.0, ge=0.0, le=1.0)
    noise_schedule: Literal["linear", "cosine"] = "linear"
    z_loss: float = Field(0.0, ge=0.0)
    logits_chunk: Size | None = None

    @field_validator("mask_token_id")
    @classmethod
    def _mask_is_known(cls, token: int | None, info: ValidationInfo) -> int | None:
        kind = info.data.get("kind")
        if kind in ("masked_token", "mask_diffusion") and token is None:
            raise ValueError(f"kind={kind!r} needs the id of a token that stands for no other")
        if kind == "next_token" and token is not None:
            raise ValueError("kind='next_token' masks nothing; allowed: null")
        return token

    @field_validator("same_fraction")
    @classmethod
    def _fractions_fit(cls, same: float, info: ValidationInfo) -> float:
        random = info.data.get("random_fraction", 0.0)
        if same + random > 1.0:
            raise ValueError(f"must not exceed 1 together with random_fraction={random}")
        return same


class StackOptimizerConfig(Section):
    """What a Stack has for itself; null: as all others."""

    lr: float | None = Field(None, gt=0.0)
    weight_decay: float | None = Field(None, ge=0.0)


class OptimizerConfig(Section):
    """How weights follow gradients. Weight decay spares norms, biases and embeddings.

    `adamw` is that of Loshchilov & Hutter 2019 (arXiv:1711.05101). `muon` moves the matrices of the Blocks by
    orthogonalised momentum (Jordan et al. 2024), scaled to the size of AdamW's updates (Liu et al. 2025,
    arXiv:2502.16982), and all else by AdamW. `per_stack` has settings of some Stacks by their index.
    """

    applies: ClassVar[Applies] = {"momentum": ("kind", ("muon",))}

    kind: Literal["adamw", "muon"] = "adamw"
    lr: float = Field(1e-4, gt=0.0)
    weight_decay: float = Field(0.1, ge=0.0)
    betas: list[float] = Field(default_factory=lambda: [0.9, 0.95], min_length=2, max_length=2)
    eps: float = Field(1e-8, gt=0.0)
    momentum: float = Field(0.95, ge=0.0, lt=1.0)
    per_stack: dict[Count, StackOptimizerConfig] = Field(default_factory=dict)

    @field_validator("betas")
    @classmethod
    def _betas_below_one(cls, betas: list[float]) -> list[float]:
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError("each must be in [0, 1)")
        return betas


class ScheduleConfig(Section):
    """The learning rate over time: a linear warm-up, then `kind` down to `min_lr`.

    `warmup_steps=None` is a tenth of the run. `wsd` stays at the peak and falls linearly over the last
    `decay_fraction` of the run (Hu et al. 2024, arXiv:2404.06395); `inverse_sqrt` falls as one over the
    root of the step (Vaswani et al. 2017), and no lower than `min_lr`. Each unit of a local scope starts
    it anew. With a polish the steps are divided, and so is the warm-up: units and polish have the share of
    it that they have of `max_steps`, rounded down.
    """

    applies: ClassVar[Applies] = {
        "min_lr": ("kind", ("cosine", "linear", "wsd", "inverse_sqrt")),
        "decay_fraction": ("kind", ("wsd",)),
    }

    kind: ScheduleKind = "cosine"
    warmup_steps: int | None = Field(None, ge=0, lt=2**63)
    min_lr: float = Field(0.0, ge=0.0)
    decay_fraction: float = Field(0.2, gt=0.0, le=1.0)


class RecomputeConfig(Section):
    """Which activations are thrown away in the forward pass and computed again in the backward pass.

    `none`; `full`: of every Block all but what it reads; `every_nth`: of every n-th Block; `selective`: all
    but the outputs of matrix products and attention; `budget`: what the compiler chooses so that
    `budget` of the memory is left (needs `compile`); `by_name`: of modules whose name matches one of
    `names`, with the wildcards of a shell.
    """

    applies: ClassVar[Applies] = {
        "every": ("kind", ("every_nth",)),
        "budget": ("kind", ("budget",)),
        "names": ("kind", ("by_name",)),
    }

    kind: Literal["none", "full", "every_nth", "selective", "budget", "by_name"] = "none"
    every: Size = 2
    budget: float = Field(0.5, ge=0.0, le=1.0)
    names: list[str] = Field(default_factory=list)

    @field_validator("names")
    @classmethod
    def _some_name(cls, names: list[str], info: ValidationInfo) -> list[str]:
        if info.data.get("kind") == "by_name" and not names:
            raise ValueError("kind='by_name' needs at least one pattern")
        return names


class DistributedConfig(Section):
    """How the processes that torchrun started share the work.

    `ddp` gives each a whole Rack, `fsdp` a part of every weight (FSDP2: Block by Block, then the rest).
    `reshard_after_forward` gives gathered weights up between the forward and the backward pass.
    """

    applies: ClassVar[Applies] = {"reshard_after_forward": ("strategy", ("fsdp",))}

    strategy: Literal["none", "ddp", "fsdp"] = "none"
    reshard_after_forward: bool = True


class CheckpointConfig(Section):
    """Which checkpoints are kept, and how they are written.

    Kept are the newest `keep_last`, those of steps that `keep_every` divides, and the `keep_best` with the
    lowest validation loss, of steps that are evaluated (`eval_interval`). `asynchronous` copies weights and
    the optimizer's state and writes them while training goes on; with `overlapped` most is copied beside the
    next batch as well. A run that is killed then loses up to two `save_interval`. `upload` has a copy of each
    checkpoint, of which the newest `upload_keep_last` stay (`null`: all), and from which a run goes on where
    `checkpoint_dir` is gone.
    """

    applies: ClassVar[Applies] = {"upload_keep_last": ("upload", NOT_NULL)}

    keep_last: Size = 3
    keep_every: Size | None = None
    keep_best: Count = 0
    asynchronous: bool | Literal["overlapped"] = False
    upload: str | None = None
    upload_keep_last: Size | None = None

    @field_validator("asynchronous", mode="plain")
    @classmethod
    def _some_way(cls, value: object) -> bool | Literal["overlapped"]:
        # Of a union, pydantic would report what each of its members expected.
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value == "overlapped":
            return "overlapped"
        raise ValueError("allowed: true, false or 'overlapped'")


class TelemetryConfig(Section):
    """What is written down while a Rack trains.

    `parameter_norms` has each step keep the gradient norm of every parameter; `jsonl` is a file with one
    line a step, `tensorboard` a folder of event files. The computation of a step waits for neither.
    """

    parameter_norms: bool = False
    jsonl: str | None = None
    tensorboard: str | None = None


class TrainingConfig(Section):
    """One training run. `seq_len` counts the tokens the model sees in one row of a batch.

    `training_architecture` says what is trained at one time: the Rack, a Stack, or a Block (`ScopeConfig`).
    `max_steps` is for each unit. A step takes `accumulation_steps` batches of `batch_size` rows in each
    process. `grad_clip` is the largest global L2 norm of the gradient, `null` for no clipping.
    `precision` is `fp32`, `bf16` (autocast), `bf16_weights` (bfloat16 weights and gradients, float32
    masters in the optimizer), `fp16` (autocast with a loss scale, CUDA only) or `float8` (matrix products
    where the hardware has them). `compile` pays where a run is longer than the half minute it takes.
    `device` is `auto` (CUDA where there is one, else the CPU), `cpu` or `cuda`, `cuda:1`, ...
    Every `eval_interval` steps, of all units together, the validation loss of `eval_batches` batches is taken
    (`null`: not before the end; of all batches). `checkpoint_dir=null` saves nothing; otherwise every
    `save_interval` steps and at the end. `resume` continues the run in that folder from its newest complete
    checkpoint, to the same bits, or begins it if there is none; `max_steps` may increase. Without `resume` a
    folder that holds checkpoints is refused. Without a `guard` a step that is not finite ends the run, and
    whatever is finite is trained on.
    """

    applies: ClassVar[Applies] = {
        "eval_batches": ("eval_interval", NOT_NULL),
        "save_interval": ("checkpoint_dir", NOT_NULL),
        "resume": ("checkpoint_dir", NOT_NULL),
        "checkpoint": ("checkpoint_dir", NOT_NULL),
    }

    training_architecture: Literal["rackwise", "stackwise", "blockwise"] = "rackwise"
    batch_size: Size = 4
    accumulation_steps: Size = 1
    seq_len: Size = 512
    max_steps: Size = 200
    seed: int = Field(0, ge=0, lt=2**63)
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$")
    precision: Precision = "bf16"
    compile: bool = False
    grad_clip: float | None = Field(1.0, gt=0.0)
    log_interval: Size = 10
    eval_interval: Size | None = None
    eval_batches: Size | None = None
    checkpoint_dir: str | None = None
    save_interval: Size = 100
    resume: bool = False
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    objective: ObjectiveConfig = Field(default_factory=ObjectiveConfig)
    scope: ScopeConfig = Field(default_factory=ScopeConfig)
    recompute: RecomputeConfig = Field(default_factory=RecomputeConfig)
    distributed: DistributedConfig = Field(default_factory=DistributedConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    telemetry: TelemetryConfig = Field(default_factory=TelemetryConfig)
    guard: GuardConfig | None = None

    @field_validator("checkpoint")
    @classmethod
    def _there_is_a_best(cls, checkpoint: CheckpointConfig, info: ValidationInfo) -> CheckpointConfig:
        best = checkpoint.keep_best
        # Without a folder all of the section is refused.
        if best and info.data.get("eval_interval", 0) is None and info.data.get("checkpoint_dir") is not None:
            raise KeysRefusedError([("checkpoint.keep_best", best, "is for eval_interval, which is null")])
        return checkpoint

    @field_validator("schedule")
    @classmethod
    def _schedule_fits(cls, schedule: ScheduleConfig, info: ValidationInfo) -> ScheduleConfig:
        max_steps, optimizer = info.data.get("max_steps"), info.data.get("optimizer")
        wrong: list[tuple[str, object, str]] = []
        if max_steps is not None and (schedule.warmup_steps or 0) > max_steps:
            limit = f"must not exceed training.max_steps={max_steps}"
            wrong.append(("schedule.warmup_steps", schedule.warmup_steps, limit))
        if optimizer is not None and schedule.min_lr > optimizer.lr:
            limit = f"must not exceed training.optimizer.lr={optimizer.lr}"
            wrong.append(("schedule.min_lr", schedule.min_lr, limit))
        if wrong:
            raise KeysRefusedError(wrong)
        return schedule

    @field_validator("scope")
    @classmethod
    def _scope_fits(cls, scope: ScopeConfig, info: ValidationInfo) -> ScopeConfig:
        architecture, max_steps = info.data.get("training_architecture"), info.data.get("max_steps")
        wrong: list[tuple[str, object, str]] = []
        if architecture == "rackwise":
            plain = ScopeConfig()
            for key, value in scope:
                if key != "growth" and value != getattr(plain, key):
                    wrong.append(
                        (f"scope.{key}", value, "is for training_architecture stackwise or blockwise")
                    )
        if max_steps is not None and scope.polish_steps >= max_steps and not wrong:
            wrong.append(("scope.polish_steps", scope.polish_steps, f"must be below max_steps={max_steps}"))
        if wrong:
            raise KeysRefusedError(wrong)
        return scope

    @field_validator("recompute")
    @classmethod
    def _budget_is_the_compilers(cls, recompute: RecomputeConfig, info: ValidationInfo) -> RecomputeConfig:
        if recompute.kind == "budget" and info.data.get("compile") is False:
            raise KeysRefusedError([("recompute.kind", "budget", "needs compile=true")])
        return recompute
