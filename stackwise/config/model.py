"""ModelConfig: the Rack, its Stacks and its Blocks."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationInfo, field_validator

from stackwise.config.section import Applies, KeysRefusedError, Section, Size

__all__ = [
    "ArchitectureConfig",
    "AttentionMode",
    "AttentionType",
    "BlockConfig",
    "FeatureMapKind",
    "InitializationKind",
    "KernelConfig",
    "LatentConfig",
    "ModelConfig",
    "NormKind",
    "NormPosition",
    "QueryKeyNorm",
    "RopeScalingConfig",
]

AttentionType = Literal["mha", "gqa", "mqa", "mla", "kernel"]
AttentionMode = Literal["causal", "bidirectional"]
FeatureMapKind = Literal["favor", "gaussian", "laplacian", "elu"]
InitializationKind = Literal["normal", "kaiming", "xavier", "small", "zero_out", "mup"]
NormKind = Literal["rmsnorm", "layernorm"]
NormPosition = Literal["pre", "post"]
QueryKeyNorm = Literal["head", "width"]
_MOST_BLOCKS = 10_000


class ArchitectureConfig(Section):
    """How many Stacks a Rack has, and how many Blocks each Stack has."""

    n_stacks: Size = Field(2, le=_MOST_BLOCKS)
    blocks_per_stack: Size = Field(4, le=_MOST_BLOCKS)

    @field_validator("blocks_per_stack")
    @classmethod
    def _few_enough(cls, blocks_per_stack: int, info: ValidationInfo) -> int:
        most = _MOST_BLOCKS // info.data.get("n_stacks", 1)
        if blocks_per_stack > most:
            raise ValueError(f"at most {most}, for {_MOST_BLOCKS:,} Blocks in all")
        return blocks_per_stack


class LatentConfig(Section):
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


class KernelConfig(Section):
    """Which kernel attention weighs by, and how finely it is approximated.

    `favor` is the softmax kernel by positive random features, `gaussian` and `laplacian` are
    shift-invariant kernels of width `bandwidth` by random Fourier features, `elu` is elu(x) + 1.
    `n_features` is per head; `elu` has one per dimension of the head and draws nothing.
    """

    applies: ClassVar[Applies] = {
        "n_features": ("feature_map", ("favor", "gaussian", "laplacian")),
        "bandwidth": ("feature_map", ("gaussian", "laplacian")),
    }

    feature_map: FeatureMapKind = "favor"
    n_features: Size = 256
    bandwidth: float = Field(1.0, gt=0.0)

    @field_validator("n_features")
    @classmethod
    def _cos_and_sin(cls, n_features: int, info: ValidationInfo) -> int:
        if info.data.get("feature_map") in ("gaussian", "laplacian") and n_features % 2:
            raise ValueError("must be even: each frequency gives a cosine and a sine")
        return n_features


class RopeScalingConfig(Section):
    """Rotary frequencies stretched for longer contexts.

    `linear` divides all by `factor` (Chen et al. 2023, arXiv:2306.15595); `llama3` divides those whose
    wavelength exceeds `original_max_position_embeddings / low_freq_factor`, keeps those below
    `original_max_position_embeddings / high_freq_factor` and blends between (Llama 3.1).
    """

    applies: ClassVar[Applies] = {
        "low_freq_factor": ("rope_type", ("llama3",)),
        "high_freq_factor": ("rope_type", ("llama3",)),
        "original_max_position_embeddings": ("rope_type", ("llama3",)),
    }

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


class _BlockSection(Section):
    """What a Block and a whole Rack are both configured by."""

    applies: ClassVar[Applies] = {"rope_theta": ("use_rope", (True,))}

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
            raise KeysRefusedError([("attention_type", attention_type, rule)])
        return n_kv_heads

    @field_validator("latent", "kernel")
    @classmethod
    def _section_belongs(cls, section: Section | None, info: ValidationInfo) -> Section | None:
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
