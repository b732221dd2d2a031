"""ModelConfig: settings of the Rack, its Stacks and its Blocks."""

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
    """Number of Stacks in a Rack, and of Blocks in each Stack."""

    n_stacks: Size = Field(2, le=_MOST_BLOCKS)
    """Number of Stacks in the Rack."""
    blocks_per_stack: Size = Field(4, le=_MOST_BLOCKS)
    """Number of Blocks in each Stack."""

    @field_validator("blocks_per_stack")
    @classmethod
    def _few_enough(cls, blocks_per_stack: int, info: ValidationInfo) -> int:
        most = _MOST_BLOCKS // info.data.get("n_stacks", 1)
        if blocks_per_stack > most:
            raise ValueError(f"at most {most}, for {_MOST_BLOCKS:,} Blocks in all")
        return blocks_per_stack


class LatentConfig(Section):
    """Sizes of multi-head latent attention, with the names of DeepSeek-V2 and V3.

    Each query and key head has `qk_nope_head_dim` dimensions without position and `qk_rope_head_dim` with
    position. All heads share the rotated key.
    """

    kv_lora_rank: Size = 512
    """Width of the latent of keys and values."""
    q_lora_rank: Size | None = None
    """Width of the latent of queries; null: queries are projected directly."""
    qk_nope_head_dim: Size = 128
    """Width of a query and key head without position."""
    qk_rope_head_dim: Size = 64
    """Width of a query and key head with position."""
    v_head_dim: Size = 128
    """Width of a value head."""

    @field_validator("qk_rope_head_dim")
    @classmethod
    def _pairs(cls, qk_rope_head_dim: int) -> int:
        if qk_rope_head_dim % 2:
            raise ValueError("must be even: it is rotated in pairs")
        return qk_rope_head_dim


class KernelConfig(Section):
    """Kernel of linear attention, and its approximation.

    `favor` is the softmax kernel with positive random features. `gaussian` and `laplacian` are
    shift-invariant kernels of width `bandwidth` with random Fourier features. `elu` is elu(x) + 1, with one
    feature per dimension of the head.
    """

    applies: ClassVar[Applies] = {
        "n_features": ("feature_map", ("favor", "gaussian", "laplacian")),
        "bandwidth": ("feature_map", ("gaussian", "laplacian")),
    }

    feature_map: FeatureMapKind = "favor"
    """Kernel of the attention weights."""
    n_features: Size = 256
    """Number of features per head; more are closer to the kernel."""
    bandwidth: float = Field(1.0, gt=0.0)
    """Width of the gaussian and laplacian kernels."""

    @field_validator("n_features")
    @classmethod
    def _cos_and_sin(cls, n_features: int, info: ValidationInfo) -> int:
        if info.data.get("feature_map") in ("gaussian", "laplacian") and n_features % 2:
            raise ValueError("must be even: each frequency gives a cosine and a sine")
        return n_features


class RopeScalingConfig(Section):
    """RoPE scaling for longer contexts.

    `linear` divides all frequencies by `factor` (Chen et al. 2023, arXiv:2306.15595). `llama3` divides
    frequencies with a wavelength above `original_max_position_embeddings / low_freq_factor`, does not change
    frequencies with one below `original_max_position_embeddings / high_freq_factor`, and interpolates between
    them (Llama 3.1).
    """

    applies: ClassVar[Applies] = {
        "low_freq_factor": ("rope_type", ("llama3",)),
        "high_freq_factor": ("rope_type", ("llama3",)),
        "original_max_position_embeddings": ("rope_type", ("llama3",)),
    }

    rope_type: Literal["linear", "llama3"]
    """Method of stretching."""
    factor: float = Field(ge=1.0)
    """Factor of the stretching."""
    low_freq_factor: float = Field(1.0, gt=0.0)
    """Wavelengths above original_max_position_embeddings / this are divided by factor."""
    high_freq_factor: float = Field(4.0, gt=0.0)
    """Wavelengths below original_max_position_embeddings / this are unchanged."""
    original_max_position_embeddings: Size = 8192
    """Context before stretching."""

    @field_validator("high_freq_factor")
    @classmethod
    def _above_low(cls, high: float, info: ValidationInfo) -> float:
        low = info.data.get("low_freq_factor")
        if low is not None and high <= low:
            raise ValueError(f"must exceed low_freq_factor={low}")
        return high


class _BlockSection(Section):
    """Keys that a Block and a Rack share."""

    applies: ClassVar[Applies] = {"rope_theta": ("use_rope", (True,))}

    d_model: Size
    """Width of the residual stream."""
    d_ff: Size
    """Width inside the feed-forward network."""
    head_dim: Size | None = None
    """Width of a head; null: d_model / n_heads."""
    attention_type: AttentionType = "mha"
    """Sharing of keys and values between heads; mla caches a latent, kernel a running sum."""
    n_heads: Size
    """Number of query heads."""
    n_kv_heads: Size | None = None
    """Number of key and value heads; null: as many as n_heads, or 1 with mqa."""
    attention_mode: AttentionMode = "causal"
    """Direction of attention; causal: no later tokens."""
    latent: LatentConfig | None = None
    """Sizes of multi-head latent attention; null: the defaults."""
    kernel: KernelConfig | None = None
    """Settings of kernel attention; null: the defaults."""
    qk_norm: QueryKeyNorm | None = None
    """Normalise queries and keys: per head, or over the full width."""
    softcap: float | None = Field(None, gt=0.0)
    """C: attention logits become C * tanh(logit / C)."""
    qkv_bias: bool = False
    """Add a bias to queries, keys and values."""
    norm: NormKind = "rmsnorm"
    """Kind of the norms."""
    norm_eps: float = Field(1e-6, gt=0.0)
    """Constant that a norm adds to the variance."""
    norm_position: NormPosition = "pre"
    """Normalise the input of a branch (pre) or its output (post)."""
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Share of a branch's output that is dropped in training."""
    freeze_up_proj: bool = False
    """Do not train the up projection of SwiGLU."""
    use_rope: bool = True
    """Use rotary positions."""
    rope_theta: float = Field(10_000.0, gt=0.0)
    """Base of the rotary frequencies."""
    rope_scaling: RopeScalingConfig | None = None
    """Stretching of the rotary frequencies; null: none."""
    initialization: InitializationKind = "normal"
    """Distribution of the initial weights."""
    mup_base_width: Size | None = None
    """Value of d_model at which the learning rate was tuned; required with mup."""

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
    """Configuration of one Block: widths, attention and norms.

    Heads of `attention_type="mla"` have the sizes in `latent`. `qk_norm` normalises queries and keys before
    they are rotated.
    """

    sliding_window: Size | None = None
    """W: a token attends to itself and the W - 1 tokens before it; null: all."""

    @field_validator("sliding_window")
    @classmethod
    def _kernel_sees_all(cls, window: int | None, info: ValidationInfo) -> int | None:
        return _refuse_window(window, info)


_WINDOW: TypeAdapter[int | None] = TypeAdapter(Size | None, config=ConfigDict(strict=True))
_WINDOWS: TypeAdapter[list[int | None]] = TypeAdapter(list[Size | None], config=ConfigDict(strict=True))


class ModelConfig(_BlockSection):
    """Configuration of the Rack: the keys of a Block, and further keys.

    `sliding_window` may be a list, which is repeated over the Blocks from the first to the last:
    `[256, null]` alternates.
    """

    vocab_size: Size = 256
    """Number of tokens; a byte tokenizer needs 256."""
    d_model: Size = 512
    d_ff: Size = 2048
    n_heads: Size = 8
    n_kv_heads: Size | None = 2
    attention_type: AttentionType = "gqa"
    sliding_window: Size | list[Size | None] | None = None
    """W: a token attends to itself and the W - 1 tokens before it; a list is repeated over the Blocks."""
    max_seq_len: Size | None = None
    """Longest sequence of generation and of a prototype; null: no limit."""
    tie_embeddings: bool = True
    """Use the embedding as the head."""
    embedding_max_norm: float | None = Field(None, gt=0.0)
    """Largest norm of an embedding; null: no limit."""
    architecture: ArchitectureConfig = Field(default_factory=ArchitectureConfig)
    """Number of Stacks and Blocks."""

    @field_validator("sliding_window", mode="plain")
    @classmethod
    def _some_window(cls, value: object, info: ValidationInfo) -> int | list[int | None] | None:
        # For a union, pydantic would report the expectation of every member.
        if not isinstance(value, list):
            return _refuse_window(_WINDOW.validate_python(value), info)
        if not value:
            raise ValueError("a list needs at least one window")
        windows = _WINDOWS.validate_python(value)
        for window in windows:
            _refuse_window(window, info)
        return windows

    def blocks(self) -> list[list[BlockConfig]]:
        """Return the configuration of every Block, by Stack."""
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
