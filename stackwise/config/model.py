"""StackWiseConfig: what to build, how to train it and on what, as validated data.

YAML in, YAML out. Every problem of a file is reported at once, each with the path of its key, the
value seen and what is allowed. Sections stay valid after construction: assigning to a field checks
the whole section again and leaves it untouched when the check fails.
"""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from stackwise.yaml12 import dump_yaml, load_yaml

__all__ = [
    "ArchitectureConfig",
    "BlockConfig",
    "ConfigError",
    "DataConfig",
    "KernelConfig",
    "LatentConfig",
    "ModelConfig",
    "OptimizerConfig",
    "RopeScalingConfig",
    "ScheduleConfig",
    "StackWiseConfig",
    "TrainingConfig",
]

AttentionType = Literal["mha", "gqa", "mqa", "mla", "kernel"]
AttentionMode = Literal["causal", "bidirectional"]
FeatureMapKind = Literal["favor", "gaussian", "laplacian", "elu"]
InitializationKind = Literal["normal", "kaiming", "xavier", "small", "zero_out", "mup"]
NormKind = Literal["rmsnorm", "layernorm"]
NormPosition = Literal["pre", "post"]
QueryKeyNorm = Literal["head", "width"]
Size = Annotated[int, Field(ge=1, lt=2**63)]


class ConfigError(ValueError):
    """A configuration was refused.

    Attributes:
        problems: one line per problem: the key's path, the value seen and what is allowed.
        source: the file, or "configuration".
    """

    def __init__(self, problems: list[str], source: str = "configuration") -> None:
        self.problems, self.source = problems, source
        super().__init__(problems, source)

    def __str__(self) -> str:
        noun = "problem" if len(self.problems) == 1 else "problems"
        return f"{self.source}: {len(self.problems)} {noun}\n" + "\n".join(f"  {p}" for p in self.problems)


class _KeysRefusedError(ValueError):
    """Keys of the section whose validator refuses them, each with its value and what is allowed."""

    def __init__(self, keys: list[tuple[str, object, str]]) -> None:
        self.keys = keys
        super().__init__("; ".join(f"{key}={value} {allowed}" for key, value, allowed in keys))


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _any_mapping(cls, value: Any) -> Any:
        return dict(value) if isinstance(value, Mapping) else value

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any], *, source: str = "configuration") -> Self:
        """Build from nested mappings; a missing key takes its default.

        Raises:
            ConfigError: naming every unknown key and every refused value.
        """
        if not isinstance(mapping, Mapping):
            raise ConfigError([f"got {_show(mapping)}; allowed: a mapping of keys"], source)
        try:
            return cls.model_validate(dict(mapping))
        except ValidationError as error:
            raise ConfigError(_problems(cls, error), source) from None

    def to_dict(self) -> dict[str, Any]:
        """Nested plain Python values; `from_dict` gives an equal section back."""
        return self.model_dump(mode="python")

    def __setattr__(self, name: str, value: Any) -> None:
        try:
            checked = type(self).model_validate({**dict(self), name: value})
        except ValidationError as error:
            raise ConfigError(_problems(type(self), error)) from None
        super().__setattr__(name, getattr(checked, name))


class ArchitectureConfig(_Section):
    """How many Stacks a Rack has, and how many Blocks each Stack has."""

    n_stacks: Size = 2
    blocks_per_stack: Size = 4


class LatentConfig(_Section):
    """The sizes of multi-head latent attention, under the names that DeepSeek-V2 and V3 publish.

    `q_lora_rank=None` projects queries directly. Each head's query and key are `qk_nope_head_dim`
    numbers without position and `qk_rope_head_dim` with; the rotated key is shared by all heads.
    """

    kv_lora_rank: Size = 512
    q_lora_rank: Size | None = None
    qk_nope_head_dim: Size = 128
    qk_rope_head_dim: Size = 64
    v_head_dim: Size = 128

    @field_validator("qk_rope_head_dim")
    @classmethod
    def _pairs(cls, qk_rope_head_dim: int) -> int:
        if qk_rope_head_dim % 2:
            raise ValueError("must be even: it is rotated in pairs")
        return qk_rope_head_dim


class KernelConfig(_Section):
    """Which kernel attention weighs by, and how finely it is approximated.

    `favor` is the softmax kernel by positive random features, `gaussian` and `laplacian` are
    shift-invariant kernels of width `bandwidth` by random Fourier features, `elu` is elu(x) + 1.
    `n_features` is per head; `elu` has one per dimension of the head and draws nothing.
    """

    feature_map: FeatureMapKind = "favor"
    n_features: Size = 256
    bandwidth: float = Field(1.0, gt=0.0)

    @field_validator("n_features")
    @classmethod
    def _cos_and_sin(cls, n_features: int, info: ValidationInfo) -> int:
        if info.data.get("feature_map") in ("gaussian", "laplacian") and n_features % 2:
            raise ValueError("must be even: each frequency gives a cosine and a sine")
        return n_features


class RopeScalingConfig(_Section):
    """Rotary frequencies stretched for longer contexts.

    `linear` divides all by `factor` (Chen et al. 2023, arXiv:2306.15595); `llama3` divides those whose
    wavelength exceeds `original_max_position_embeddings / low_freq_factor`, keeps those below
    `original_max_position_embeddings / high_freq_factor` and blends between (Llama 3.1).
    """

    rope_type: Literal["linear", "llama3"]
    factor: float = Field(ge=1.0)
    low_freq_factor: float = Field(1.0, gt=0.0)
    high_freq_factor: float = Field(4.0, gt=0.0)
    original_max_position_embeddings: Size = 8192

    @field_validator("high_freq_factor")
    @classmethod
    def _above_low(cls, high: float, info: ValidationInfo) -> float:
        low = info.data.get("low_freq_factor")
        if low is not None and high <= low:
            raise ValueError(f"must exceed low_freq_factor={low}")
        return high


class _BlockSection(_Section):
    """What a Block and a whole Rack are both configured by."""

    d_model: Size
    d_ff: Size
    head_dim: Size | None = None
    attention_type: AttentionType = "mha"
    n_heads: Size
    n_kv_heads: Size | None = None
    attention_mode: AttentionMode = "causal"
    latent: LatentConfig | None = None
    kernel: KernelConfig | None = None
    qk_norm: QueryKeyNorm | None = None
    softcap: float | None = Field(None, gt=0.0)
    qkv_bias: bool = False
    norm: NormKind = "rmsnorm"
    norm_eps: float = Field(1e-6, gt=0.0)
    norm_position: NormPosition = "pre"
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    freeze_up_proj: bool = False
    use_rope: bool = True
    rope_theta: float = Field(10_000.0, gt=0.0)
    rope_scaling: RopeScalingConfig | None = None
    initialization: InitializationKind = "normal"
    mup_base_width: Size | None = None

    @field_validator("mup_base_width")
    @classmethod
    def _base_of_mup(cls, base_width: int | None, info: ValidationInfo) -> int | None:
        kind = info.data.get("initialization")
        if kind == "mup" and base_width is None:
            raise ValueError("initialization='mup' needs the d_model of the base")
        if kind not in ("mup", None) and base_width is not None:
            raise ValueError(f"is for initialization='mup' (initialization={kind!r})")
        return base_width

    @field_validator("n_heads")
    @classmethod
    def _heads_divide_width(cls, n_heads: int, info: ValidationInfo) -> int:
        d_model, divided = info.data.get("d_model"), info.data.get("attention_type") != "mla"
        if divided and d_model is not None and info.data.get("head_dim") is None and d_model % n_heads:
            raise ValueError(f"must divide d_model={d_model}")
        return n_heads

    @field_validator("n_kv_heads")
    @classmethod
    def _kv_heads_divide_heads(cls, n_kv_heads: int | None, info: ValidationInfo) -> int | None:
        n_heads = info.data.get("n_heads")
        if n_kv_heads is not None and n_heads is not None and n_heads % n_kv_heads:
            raise ValueError(f"must divide n_heads={n_heads}")
        return n_kv_heads

    @field_validator("n_kv_heads")
    @classmethod
    def _type_matches_heads(cls, n_kv_heads: int | None, info: ValidationInfo) -> int | None:
        if "n_heads" not in info.data or "attention_type" not in info.data:
            return n_kv_heads
        n_heads, attention_type = info.data["n_heads"], info.data["attention_type"]
        seen, rule = f"(n_kv_heads={n_kv_heads})", None
        if attention_type == "mha" and n_kv_heads not in (None, n_heads):
            rule = f"'mha' needs n_kv_heads=null or {n_heads} {seen}; use 'gqa'"
        elif attention_type == "gqa" and n_kv_heads is None:
            rule = "'gqa' needs n_kv_heads; use 'mha' or set it"
        elif attention_type == "mqa" and n_kv_heads not in (None, 1):
            rule = f"'mqa' needs n_kv_heads=null or 1 {seen}; use 'gqa'"
        elif attention_type == "mla" and n_kv_heads is not None:
            rule = f"'mla' needs n_kv_heads=null {seen}: all heads share one latent"
        elif attention_type == "mla" and info.data.get("head_dim") is not None:
            rule = "'mla' needs head_dim=null; the sizes of its heads are in latent"
        if rule is not None:
            raise _KeysRefusedError([("attention_type", attention_type, rule)])
        return n_kv_heads

    @field_validator("latent", "kernel")
    @classmethod
    def _section_belongs(cls, section: _Section | None, info: ValidationInfo) -> _Section | None:
        owner = "mla" if info.field_name == "latent" else "kernel"
        attention_type = info.data.get("attention_type", owner)
        if section is not None and attention_type != owner:
            raise ValueError(f"is for attention_type={owner!r} (attention_type={attention_type!r})")
        return section

    @field_validator("qk_norm", "softcap", "qkv_bias")
    @classmethod
    def _kind_has_it(cls, value: object, info: ValidationInfo) -> object:
        attention_type = info.data.get("attention_type")
        without = {"qk_norm": ("mla",), "softcap": ("kernel",), "qkv_bias": ("mla",)}[str(info.field_name)]
        if value and attention_type in without:
            raise ValueError(f"attention_type={attention_type!r} has none")
        return value

    @field_validator("use_rope")
    @classmethod
    def _rope_rotates_pairs(cls, use_rope: bool, info: ValidationInfo) -> bool:
        d_model, n_heads = info.data.get("d_model"), info.data.get("n_heads")
        head_dim = info.data.get("head_dim") or (d_model // n_heads if d_model and n_heads else 0)
        if use_rope and head_dim % 2 and info.data.get("attention_type") != "mla":
            raise ValueError(f"needs an even head size; it is {head_dim}")
        return use_rope

    @field_validator("rope_scaling")
    @classmethod
    def _scales_something(
        cls, rope_scaling: RopeScalingConfig | None, info: ValidationInfo
    ) -> RopeScalingConfig | None:
        if rope_scaling is not None and info.data.get("use_rope") is False:
            raise ValueError("needs use_rope=true")
        return rope_scaling


class BlockConfig(_BlockSection):
    """One Block: its widths, its attention and its norms.

    `n_kv_heads=None` means as many as `n_heads`, `head_dim=None` means `d_model // n_heads`,
    which must be whole; heads of `attention_type="mla"` have the sizes in `latent` instead.
    `sliding_window=W` lets a token see itself and the W-1 tokens before it. `qk_norm` normalises
    queries and keys before they are rotated, each head for itself or all heads as one vector.
    `softcap=c` bounds attention logits by c * tanh(logit / c). `norm_position="post"` normalises what a
    branch adds to the residual stream instead of what it reads.
    """

    sliding_window: Size | None = None

    @field_validator("sliding_window")
    @classmethod
    def _kernel_sees_all(cls, window: int | None, info: ValidationInfo) -> int | None:
        return _refuse_window(window, info)


_WINDOW: TypeAdapter[int | None] = TypeAdapter(Size | None, config=ConfigDict(strict=True))
_WINDOWS: TypeAdapter[list[int | None]] = TypeAdapter(list[Size | None], config=ConfigDict(strict=True))


class ModelConfig(_BlockSection):
    """The Rack: a Block's keys, and what only the whole model has.

    `sliding_window` may be a list, which is repeated over the blocks from the first to the last:
    `[256, null]` alternates. `max_seq_len` is the longest sequence that generation may reach, and
    `embedding_max_norm` the longest vector that a token enters the model as.
    """

    vocab_size: Size = 256
    d_model: Size = 512
    d_ff: Size = 2048
    n_heads: Size = 8
    n_kv_heads: Size | None = 2
    attention_type: AttentionType = "gqa"
    sliding_window: Size | list[Size | None] | None = None
    max_seq_len: Size | None = None
    tie_embeddings: bool = True
    embedding_max_norm: float | None = Field(None, gt=0.0)
    architecture: ArchitectureConfig = Field(default_factory=ArchitectureConfig)

    @field_validator("sliding_window", mode="plain")
    @classmethod
    def _some_window(cls, value: object, info: ValidationInfo) -> int | list[int | None] | None:
        # Of a union, pydantic would report what each of its members expected.
        if not isinstance(value, list):
            return _refuse_window(_WINDOW.validate_python(value), info)
        if not value:
            raise ValueError("a list needs at least one window")
        windows = _WINDOWS.validate_python(value)
        for window in windows:
            _refuse_window(window, info)
        return windows

    def blocks(self) -> list[list[BlockConfig]]:
        """The configuration of every Block, by Stack."""
        shared = {key: value for key, value in self if key in BlockConfig.model_fields}
        windows = self.sliding_window if isinstance(self.sliding_window, list) else [self.sliding_window]
        per_stack = self.architecture.blocks_per_stack
        return [
            [
                BlockConfig(**{**shared, "sliding_window": windows[(stack * per_stack + i) % len(windows)]})
                for i in range(per_stack)
            ]
            for stack in range(self.architecture.n_stacks)
        ]


def _refuse_window(window: int | None, info: ValidationInfo) -> int | None:
    if window is not None and info.data.get("attention_type") == "kernel":
        raise ValueError("attention_type='kernel' sees the whole past; allowed: null")
    return window


class OptimizerConfig(_Section):
    """AdamW (Loshchilov & Hutter 2019). Weight decay spares norms, biases and embeddings."""

    lr: float = Field(1e-4, gt=0.0)
    weight_decay: float = Field(0.1, ge=0.0)
    betas: list[float] = Field(default_factory=lambda: [0.9, 0.95], min_length=2, max_length=2)
    eps: float = Field(1e-8, gt=0.0)

    @field_validator("betas")
    @classmethod
    def _betas_below_one(cls, betas: list[float]) -> list[float]:
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError("each must be in [0, 1)")
        return betas


class ScheduleConfig(_Section):
    """The learning rate over time: a linear warm-up, then `kind` down to `min_lr`.

    `warmup_steps=None` is a tenth of the run.
    """

    kind: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: int | None = Field(None, ge=0, lt=2**63)
    min_lr: float = Field(0.0, ge=0.0)


class TrainingConfig(_Section):
    """One training run. `seq_len` counts the tokens the model sees in one row of a batch.

    `grad_clip` is the largest global L2 norm of the gradient, `null` for no clipping.
    `precision` is `fp32`, `bf16` (autocast) or `bf16_weights` (bfloat16 weights and gradients, float32
    masters in the optimizer). `compile` pays where a run is longer than the half minute it takes.
    `device` is `auto` (CUDA where there is one, else the CPU), `cpu` or `cuda`, `cuda:1`, ...
    `checkpoint_dir=null` saves nothing; otherwise every `save_interval` steps and at the end.
    """

    training_architecture: Literal["rackwise"] = "rackwise"
    batch_size: Size = 4
    seq_len: Size = 512
    max_steps: Size = 200
    seed: int = Field(0, ge=0, lt=2**63)
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$")
    precision: Literal["fp32", "bf16", "bf16_weights"] = "bf16"
    compile: bool = False
    grad_clip: float | None = Field(1.0, gt=0.0)
    log_interval: Size = 10
    checkpoint_dir: str | None = None
    save_interval: Size = 100
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)

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
            raise _KeysRefusedError(wrong)
        return schedule


class DataConfig(_Section):
    """Text, read as bytes. `dataset_path=null` is the documentation that every CPython carries."""

    dataset_path: str | None = None
    validation_fraction: float = Field(0.05, ge=0.0, lt=1.0)
    shuffle: bool = True


class StackWiseConfig(_Section):
    """Everything that describes a run: `model`, `training`, `data`."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    data: DataConfig = Field(default_factory=DataConfig)

    @classmethod
    def from_yaml(cls, path: str | Path) -> Self:
        """Read a YAML file; an empty one is all defaults.

        Raises:
            ConfigError: the file is not YAML, repeats a key, or describes no valid configuration.
            OSError: the file cannot be read.
        """
        content = Path(path).read_bytes()
        try:
            mapping = load_yaml(content)
        except ValueError as error:
            raise ConfigError([str(error)], str(path)) from None
        return cls.from_dict({} if mapping is None else mapping, source=str(path))

    def to_yaml(self, path: str | Path) -> None:
        """Write a YAML file; `from_yaml` gives an equal configuration back."""
        Path(path).write_text(dump_yaml(self.to_dict()), encoding="utf-8")

    def validate(self) -> None:  # type: ignore[override]
        """Check everything again, rules across sections included.

        Raises:
            ConfigError: naming every refused value.
        """
        self.from_dict(self.to_dict())


def _problems(section: type[BaseModel], error: ValidationError) -> list[str]:
    lines = []
    for detail in error.errors(include_url=False, include_context=True):
        path = ".".join(str(part) for part in detail["loc"]) or "(top level)"
        match detail["type"]:
            case "extra_forbidden":
                allowed = _fields_at(section, detail["loc"][:-1])
                near = difflib.get_close_matches(str(detail["loc"][-1]), allowed, n=1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                lines.append(f"{path}: unknown key; {hint}allowed: {', '.join(allowed)}")
            case "value_error" if isinstance(detail["ctx"]["error"], _KeysRefusedError):
                for key, value, rule in detail["ctx"]["error"].keys:
                    path = ".".join(map(str, (*detail["loc"][:-1], key)))
                    lines.append(f"{path}: got {_show(value)}; {rule}")
            case "value_error":
                lines.append(f"{path}: got {_show(detail['input'])}; {detail['ctx']['error']}")
            case "missing":
                lines.append(f"{path}: got nothing; it has no default")
            case _:
                wanted = re.sub(r"^\w+ should (be )?", "", detail["msg"])
                lines.append(f"{path}: got {_show(detail['input'])}; allowed: {wanted}")
    return lines


def _fields_at(section: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    for part in path:
        annotation = section.model_fields[str(part)].annotation
        kinds = (annotation, *get_args(annotation))
        (section,) = (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel))
    return list(section.model_fields)


def _show(value: object) -> str:
    if isinstance(value, BaseModel):
        return type(value).__name__
    try:
        text = _brief.repr(value)
    except Exception:  # a value whose repr fails is refused like any other
        text = object.__repr__(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


_brief = reprlib.Repr()
_brief.maxstring = _brief.maxlong = _brief.maxother = 60
