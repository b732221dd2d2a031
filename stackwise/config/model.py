"""ModelConfig: settings of the Rack, its Stacks and its Blocks."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field, PlainValidator, TypeAdapter

from stackwise.config.section import Applies, Keys, Problems, Section, Size, only_with

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

    @classmethod
    def _rules(cls, key: str, given: Keys) -> Problems:
        if key == "blocks_per_stack" and given.n_stacks * given.blocks_per_stack > _MOST_BLOCKS:
            yield key, f"at most {_MOST_BLOCKS // given.n_stacks}, for {_MOST_BLOCKS:,} Blocks in all"


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
    """Width of a query and key head without RoPE."""
    qk_rope_head_dim: Size = Field(64, multiple_of=2)
    """Width of a query and key head with RoPE, which rotates pairs."""
    v_head_dim: Size = 128
    """Width of a value head."""


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
    """Number of features per head. More features approximate the kernel better."""
    bandwidth: float = Field(1.0, gt=0.0)
    """Width of the gaussian and laplacian kernels."""

    @classmethod
    def _rules(cls, key: str, given: Keys) -> Problems:
        if key == "n_features" and given.feature_map in ("gaussian", "laplacian") and given.n_features % 2:
            yield key, "must be even: each frequency gives a cosine and a sine"


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
    """RoPE scaling method."""
    factor: float = Field(ge=1.0)
    """Factor by which the context grows."""
    low_freq_factor: float = Field(1.0, gt=0.0)
    """Frequencies whose wavelength is above original_max_position_embeddings / this are divided by factor."""
    high_freq_factor: float = Field(4.0, gt=0.0)
    """Frequencies whose wavelength is below original_max_position_embeddings / this are unchanged."""
    original_max_position_embeddings: Size = 8192
    """Context length before scaling."""

    @classmethod
    def _rules(cls, key: str, given: Keys) -> Problems:
        if key == "high_freq_factor" and given.high_freq_factor <= given.low_freq_factor:
            yield key, f"must exceed low_freq_factor={given.low_freq_factor}"


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
    """Kind of attention: mha, gqa, mqa (shared key and value heads), mla (latent), kernel (linear)."""
    n_heads: Size
    """Number of query heads."""
    n_kv_heads: Size | None = None
    """Number of key and value heads; null: as many as n_heads, or 1 with mqa."""
    attention_mode: AttentionMode = "causal"
    """causal: a token attends to itself and earlier tokens; bidirectional: to all."""
    latent: LatentConfig | None = None
    """Sizes of multi-head latent attention; null: the defaults."""
    kernel: KernelConfig | None = None
    """Settings of kernel attention; null: the defaults."""
    qk_norm: QueryKeyNorm | None = None
    """Normalise queries and keys: per head, or over the full width."""
    softcap: float | None = Field(None, gt=0.0)
    """Soft cap C of attention logits, C * tanh(logit / C); null: none."""
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
    """RoPE scaling; null: none."""
    initialization: InitializationKind = "normal"
    """Distribution of the initial weights."""
    mup_base_width: Size | None = None
    """Value of d_model at which the learning rate was tuned; required with mup."""

    @classmethod
    def _rules(cls, key: str, given: Keys) -> Problems:
        match key:
            case "attention_type" | "n_heads" | "n_kv_heads" | "use_rope":
                yield from _head_rules(key, given)
            case "latent" | "kernel" | "qk_norm" | "qkv_bias" | "softcap" | "sliding_window":
                yield from _attention_rules(key, given)
            case "rope_scaling" if given.rope_scaling is not None and not given.use_rope:
                yield key, "needs use_rope=true"
            case "mup_base_width" if given.initialization == "mup" and given.mup_base_width is None:
                yield key, "initialization='mup' needs the d_model of the base"
            case "mup_base_width" if given.initialization != "mup" and given.mup_base_width is not None:
                yield key, only_with("initialization", ["mup"], given.initialization)


def _head_rules(key: str, given: Keys) -> Problems:
    """Yield keys that do not fit to the number and sizes of the heads."""
    is_latent = given.get("attention_type") == "mla"  # its heads have their own sizes
    match key:
        case "attention_type" if is_latent and given.head_dim is not None:
            yield key, "'mla' needs head_dim=null; the sizes of its heads are in latent"
        case "n_heads" if not is_latent and given.head_dim is None and given.d_model % given.n_heads:
            yield key, f"must divide d_model={given.d_model}"
        case "n_kv_heads" if given.n_heads % (given.n_kv_heads or 1):
            yield key, f"must divide n_heads={given.n_heads}"
        case "n_kv_heads":
            rule = _heads_rule(given.attention_type, given.n_heads, given.n_kv_heads)
            yield from [("attention_type", rule)] if rule else []
        case "use_rope" if not is_latent and given.use_rope:
            head_size = given.head_dim or given.d_model // given.n_heads
            if head_size % 2:
                yield key, f"needs an even head size; it is {head_size}"


def _attention_rules(key: str, given: Keys) -> Problems:
    """Yield keys that the kind of attention does not have."""
    attention = given.get("attention_type")
    match key:
        case "latent" | "kernel" if given[key] is not None:
            owner = "mla" if key == "latent" else "kernel"
            if given.attention_type != owner:
                yield key, only_with("attention_type", [owner], attention)
        case "qk_norm" | "qkv_bias" if attention == "mla" and given[key]:
            yield key, "attention_type='mla' has none"
        case "softcap" if attention == "kernel" and given.softcap is not None:
            yield key, "attention_type='kernel' has none"
        case "sliding_window" if attention == "kernel" and _windows_in(given.sliding_window):
            yield key, "allowed: null, because kernel attention sees the whole past"


def _heads_rule(attention_type: str, n_heads: int, n_kv_heads: int | None) -> str | None:
    """Return the rule that the number of key and value heads breaks, or None."""
    match attention_type:
        case "mha" if n_kv_heads not in (None, n_heads):
            return f"'mha' needs n_kv_heads=null or {n_heads} (n_kv_heads={n_kv_heads}); use 'gqa'"
        case "gqa" if n_kv_heads is None:
            return "'gqa' needs n_kv_heads; set n_kv_heads or use 'mha'"
        case "mqa" if n_kv_heads not in (None, 1):
            return f"'mqa' needs n_kv_heads=null or 1 (n_kv_heads={n_kv_heads}); use 'gqa'"
        case "mla" if n_kv_heads is not None:
            return f"'mla' needs n_kv_heads=null (n_kv_heads={n_kv_heads}): all heads share one latent"
    return None


class BlockConfig(_BlockSection):
    """Configuration of one Block: widths, attention and norms.

    Heads of `attention_type="mla"` have the sizes in `latent`. `qk_norm` normalises queries and keys before
    they are rotated.
    """

    sliding_window: Size | None = None
    """W: a token attends to itself and the W - 1 tokens before it; null: all."""


_WINDOW: TypeAdapter[int | None] = TypeAdapter(Size | None, config=ConfigDict(strict=True))
_WINDOWS: TypeAdapter[list[int | None]] = TypeAdapter(
    Annotated[list[Size | None], Field(min_length=1)], config=ConfigDict(strict=True)
)


def _window_or_windows(value: object) -> int | list[int | None] | None:
    # For a union, pydantic would report the expectation of every member.
    return (_WINDOWS if isinstance(value, list) else _WINDOW).validate_python(value)


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
    sliding_window: Annotated[Size | list[Size | None] | None, PlainValidator(_window_or_windows)] = None
    """W: a token attends to itself and the W - 1 tokens before it; a list is repeated over the Blocks."""
    max_seq_len: Size | None = None
    """Maximum sequence length in generation and in prototype experiments; null: no limit."""
    tie_embeddings: bool = True
    """Use the embedding as the head."""
    embedding_max_norm: float | None = Field(None, gt=0.0)
    """Largest norm of an embedding; null: no limit."""
    architecture: ArchitectureConfig = Field(default_factory=ArchitectureConfig)
    """Number of Stacks and Blocks."""

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


def _windows_in(sliding_window: int | list[int | None] | None) -> bool:
    return any(sliding_window) if isinstance(sliding_window, list) else sliding_window is not None
