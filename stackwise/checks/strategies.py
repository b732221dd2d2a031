"""Hypothesis strategies for user-defined property tests: configurations, batches, masks and faults.

    from hypothesis import given
    from stackwise.checks import strategies

    strategies.load_profile("cpu")

    @given(strategies.batches(vocab_size=64))
    def test_padding_is_not_read(batch):
        ...

Examples shrink towards one row, few positions, token 0, no padding, one document, one layer, and no option.
Tensors are on the CPU.

Shapes: B batch, T positions, S keys.
"""

from __future__ import annotations

import os
from typing import Any, Literal

import torch
from torch import Tensor

from stackwise.config import BlockConfig, ModelConfig
from stackwise.stability.faults import Fault, GradientExplosion, NanInjection
from stackwise.support.arguments import check_choice, check_sizes, require

try:
    from hypothesis import HealthCheck, settings
    from hypothesis import strategies as st
    from hypothesis.errors import InvalidArgument
except ImportError as error:
    raise ImportError(
        "stackwise.checks.strategies needs Hypothesis: pip install 'stackwise[property]'"
    ) from error

__all__ = [
    "attention_masks",
    "batches",
    "block_configs",
    "document_ids",
    "faults",
    "labels",
    "load_profile",
    "model_configs",
    "padding_masks",
    "token_ids",
]

Side = Literal["right", "left"]

_PROFILES = {"cpu": "stackwise-cpu", "cuda": "stackwise-gpu"}


def token_ids(
    vocab_size: int, *, max_batch_size: int = 4, max_seq_len: int = 16, min_seq_len: int = 1
) -> st.SearchStrategy[Tensor]:
    """Return token ids (B, T), int64, below `vocab_size`."""
    check_sizes(vocab_size=vocab_size, max_batch_size=max_batch_size, min_seq_len=min_seq_len)
    check_sizes(min_seq_len, max_seq_len=max_seq_len)
    return st.tuples(st.integers(1, max_batch_size), st.integers(min_seq_len, max_seq_len)).flatmap(
        lambda shape: _filled(shape, st.integers(0, vocab_size - 1))
    )


@st.composite
def padding_masks(
    draw: st.DrawFn,
    batch_size: int,
    seq_len: int,
    *,
    sides: tuple[Side, ...] = ("right",),
    min_real: int = 1,
) -> Tensor:
    """Return masks (B, T), bool, true at real tokens. Rows have different lengths and padding on one side.

    Args:
        draw: supplied by Hypothesis.
        batch_size: B.
        seq_len: T.
        sides: possible sides of padding.
        min_real: smallest number of real tokens in a row. 0 allows rows of padding only.
    """
    check_sizes(batch_size=batch_size, seq_len=seq_len)
    check_sizes(0, min_real=min_real)
    require(bool(sides) and min_real <= seq_len, "sides, min_real", (sides, min_real), f"up to {seq_len}")
    for side in sides:
        check_choice("sides", side, ("right", "left"))
    side = draw(st.sampled_from(sides))
    padding = torch.tensor(draw(_lists(st.integers(0, seq_len - min_real), batch_size)))[:, None]
    index = torch.arange(seq_len)
    return index < seq_len - padding if side == "right" else index >= padding


@st.composite
def document_ids(draw: st.DrawFn, batch_size: int, seq_len: int) -> Tensor:
    """Return document ids (B, T), int64, of packed documents, counted from 0 in each row."""
    check_sizes(batch_size=batch_size, seq_len=seq_len)
    starts = torch.zeros(batch_size, seq_len, dtype=torch.int64)
    if seq_len > 1:
        starts[:, 1:] = draw(_filled((batch_size, seq_len - 1), st.booleans().map(int)))
    return starts.cumsum(dim=1)


@st.composite
def labels(draw: st.DrawFn, ids: Tensor, keep: Tensor | None = None, *, ignored: int = -100) -> Tensor:
    """Return labels (B, T), not shifted. One range of each row and all padding are ignored.

    A range may be empty, a prompt at the start of its row, or the complete row.

    Args:
        draw: supplied by Hypothesis.
        ids: token ids (B, T).
        keep: (B, T), true at real tokens. None: all are real.
        ignored: label of positions without a target.
    """
    B, T = ids.shape
    start = torch.tensor(draw(_lists(st.integers(0, T - 1), B)))[:, None]
    count = torch.tensor(draw(_lists(st.integers(0, T), B)))[:, None]
    index = torch.arange(T)
    silent = (index >= start) & (index < start + count)
    if keep is not None:
        silent |= ~keep.bool()
    return ids.masked_fill(silent, ignored)


@st.composite
def batches(
    draw: st.DrawFn,
    vocab_size: int,
    *,
    max_batch_size: int = 4,
    max_seq_len: int = 16,
    min_seq_len: int = 2,
    sides: tuple[Side, ...] = ("right", "left"),
    packed: bool = False,
) -> dict[str, Tensor]:
    """Return batches of a language model: `input_ids`, `attention_mask` and `labels`, each (B, T), int64.

    Labels are not shifted. They are -100 at padding and in one range of each row.

    Args:
        draw: supplied by Hypothesis.
        vocab_size: number of token ids.
        max_batch_size: largest B.
        max_seq_len: largest T.
        min_seq_len: smallest T.
        sides: possible sides of padding. (): no padding.
        packed: add `document_ids`. Rows then have no padding, because packing replaces it.
    """
    ids = draw(
        token_ids(vocab_size, max_batch_size=max_batch_size, max_seq_len=max_seq_len, min_seq_len=min_seq_len)
    )
    keep = torch.ones(ids.shape, dtype=torch.bool)
    if sides and not packed:
        keep = draw(padding_masks(*ids.shape, sides=sides))
    batch = {"input_ids": ids, "attention_mask": keep.long(), "labels": draw(labels(ids, keep))}
    if packed:
        batch["document_ids"] = draw(document_ids(*ids.shape))
    return batch


@st.composite
def attention_masks(
    draw: st.DrawFn, seq_len: int, *, causal: bool | None = None, min_visible: int = 1
) -> Tensor:
    """Return masks (T, S), bool, true if query t sees key s: all, causal, a window, documents, or random.

    Args:
        draw: supplied by Hypothesis.
        seq_len: T and S.
        causal: True if no query may see a later key. None: both.
        min_visible: 1: each query sees itself; 0: a query may see no key.
    """
    check_sizes(seq_len=seq_len)
    check_choice("min_visible", str(min_visible), ("0", "1"))
    index = torch.arange(seq_len)
    distance = index[:, None] - index
    kind = draw(st.sampled_from(("full", "window", "documents", "random")))
    match kind:
        case "window":
            visible = distance.abs() < draw(st.integers(1, seq_len))
        case "documents":
            [documents] = draw(document_ids(1, seq_len))
            visible = documents[:, None] == documents
        case "random":
            visible = draw(_filled((seq_len, seq_len), st.booleans())).bool()
        case _:
            visible = torch.ones(seq_len, seq_len, dtype=torch.bool)
    if draw(st.booleans()) if causal is None else causal:
        visible = visible & (distance >= 0)
    if min_visible:
        visible = visible | (distance == 0)
    elif draw(st.booleans()):
        visible[draw(st.integers(0, seq_len - 1))] = False
    return visible


def faults(
    steps: int, *, targets: tuple[str, ...] = ("loss", "activation", "gradient"), max_duration: int = 3
) -> st.SearchStrategy[Fault]:
    """Return faults within a run of `steps` steps, for `stackwise.stability_run(faults=[...])`.

    Args:
        steps: number of steps of the run.
        targets: targets of NanInjection, including patterns: "activation:*.attention".
        max_duration: largest number of steps of one fault.
    """
    check_sizes(steps=steps, max_duration=max_duration)
    require(bool(targets), "targets", targets, "at least one target of NanInjection")

    def lasting(step: int) -> st.SearchStrategy[Fault]:
        when = {"step": st.just(step), "duration": st.integers(1, min(max_duration, steps - step))}
        target, kind = st.sampled_from(targets), st.sampled_from(("nan", "inf"))
        # From the smallest factor that a detector by median and MAD must find, to overflow in float16.
        factor = st.sampled_from((10.0, 100.0, 1e3, 1e6))
        nan = st.builds(NanInjection, **when, target=target, kind=kind)
        return nan | st.builds(GradientExplosion, **when, factor=factor)

    return st.integers(0, steps - 1).flatmap(lasting)


def block_configs(**fixed: Any) -> st.SearchStrategy[BlockConfig]:
    """Return valid small BlockConfigs with every kind of attention, norm, position and initialisation.

    Args:
        **fixed: fields with a user-defined value or strategy. Values that they exclude are not drawn.

    Raises:
        ConfigError: when an example is drawn, if no configuration has these values.
    """
    return _sections(fixed).map(BlockConfig.from_dict)


@st.composite
def model_configs(draw: st.DrawFn, /, *, max_layers: int = 4, **fixed: Any) -> ModelConfig:
    """Return valid small ModelConfigs: `block_configs` with a vocabulary and a number of layers.

    Args:
        draw: supplied by Hypothesis.
        max_layers: largest number of Blocks in all Stacks together.
        **fixed: see `block_configs`.
    """
    check_sizes(max_layers=max_layers)
    # The default of a ModelConfig, unlike that of a BlockConfig, is grouped heads.
    section: dict[str, Any] = {"n_kv_heads": None, **draw(_sections(fixed))}
    if "architecture" not in fixed:
        n_stacks = draw(st.integers(1, min(2, max_layers)))
        per_stack = draw(st.integers(1, max_layers // n_stacks))
        section["architecture"] = {"n_stacks": n_stacks, "blocks_per_stack": per_stack}
    for key, values in {"vocab_size": st.integers(2, 64), "tie_embeddings": st.booleans()}.items():
        if key not in fixed:
            section[key] = draw(values)
    return ModelConfig.from_dict(section)


@st.composite
def _sections(draw: st.DrawFn, fixed: dict[str, Any]) -> dict[str, Any]:
    """Return the keys that blocks and models share. Each may depend on the previous ones."""
    section: dict[str, Any] = {}

    def choose(key: str, values: st.SearchStrategy[Any]) -> Any:
        value = fixed.get(key, values)
        section[key] = draw(value) if isinstance(value, st.SearchStrategy) else value
        return section[key]

    kinds: tuple[str, ...] = ("mha", "gqa", "mqa", "mla", "kernel")
    if fixed.get("n_kv_heads") is not None:
        kinds = ("gqa", "kernel")
    kind = choose("attention_type", st.sampled_from(kinds))
    n_heads = choose("n_heads", st.sampled_from((1, 2, 4)))
    use_rope = choose("use_rope", st.booleans())
    if kind == "mla":
        choose("d_model", st.integers(1, 8).map(lambda size: 4 * size))
        choose("latent", _latents())
    else:
        # RoPE rotates pairs of channels.
        per_head = st.integers(1, 4).map(lambda size: (2 if use_rope else 1) * size)
        if "d_model" in fixed:
            choose("d_model", st.nothing())
            choose("head_dim", per_head)
        elif choose("head_dim", st.none() | per_head) is None:
            choose("d_model", per_head.map(lambda size: n_heads * size))
        else:
            choose("d_model", st.integers(1, 16))
        choose("qkv_bias", st.booleans())
        choose("qk_norm", st.sampled_from((None, "head", "width")))
    choose("d_ff", st.integers(1, 32))
    if kind in ("gqa", "kernel"):
        divisors = [n for n in range(1, n_heads + 1) if n_heads % n == 0]
        choose(
            "n_kv_heads", st.sampled_from(divisors) if kind == "gqa" else st.sampled_from((None, *divisors))
        )
    if kind == "kernel":
        choose("kernel", st.sampled_from(("favor", "gaussian", "laplacian", "elu")).flatmap(_kernels))
    else:
        choose("sliding_window", st.none() | st.integers(1, 8))
        choose("softcap", st.sampled_from((None, 5.0, 50.0)))
    choose("attention_mode", st.sampled_from(("causal", "bidirectional")))
    choose("norm", st.sampled_from(("rmsnorm", "layernorm")))
    choose("norm_position", st.sampled_from(("pre", "post")))
    choose("dropout", st.sampled_from((0.0, 0.1, 0.5)))
    choose("freeze_up_proj", st.booleans())
    if use_rope:
        scaling = st.fixed_dictionaries(
            {"rope_type": st.sampled_from(("linear", "llama3")), "factor": st.sampled_from((1.0, 2.0, 8.0))}
        )
        choose("rope_scaling", st.none() | scaling)
    initializations = ("normal", "kaiming", "xavier", "small", "zero_out", "mup")
    if choose("initialization", st.sampled_from(initializations)) == "mup":
        # The base width must be divisible into heads.
        choose("mup_base_width", st.sampled_from((section["d_model"], 2 * section["d_model"])))
    return fixed | section


def _latents() -> st.SearchStrategy[dict[str, Any]]:
    """Return a strategy for the section `latent` of a configuration."""
    sizes = st.sampled_from((2, 4, 8))
    names = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return st.fixed_dictionaries(dict.fromkeys(names, sizes) | {"q_lora_rank": st.none() | sizes})


def _kernels(feature_map: str) -> st.SearchStrategy[dict[str, Any]]:
    """Return sections `kernel`. All feature maps except `elu` have a number of features."""
    features = {} if feature_map == "elu" else {"n_features": st.integers(1, 8).map(lambda n: 2 * n)}
    return st.fixed_dictionaries({"feature_map": st.just(feature_map), **features})


def _filled(shape: tuple[int, int], elements: st.SearchStrategy[int]) -> st.SearchStrategy[Tensor]:
    """Return tensors of a shape, int64, with elements that shrink."""
    rows, columns = shape
    return _lists(elements, rows * columns).map(
        lambda values: torch.tensor(values, dtype=torch.int64).view(rows, columns)
    )


def _lists(elements: st.SearchStrategy[int], size: int) -> st.SearchStrategy[list[int]]:
    return st.lists(elements, min_size=size, max_size=size)


def load_profile(device: Literal["cpu", "cuda"] = "cpu") -> str:
    """Activate the profile "stackwise-cpu" or "stackwise-gpu", unless the user has selected another one.

    Users select a profile by `settings.load_profile`, by `--hypothesis-profile`, or by the environment
    variable HYPOTHESIS_PROFILE, which conftests read. The default profiles of Hypothesis, "default" and "ci",
    do not count. Both profiles have no deadline, because the first call of a model is slow. Other settings
    are those of the profile that was active at import. The profile for GPUs has at most 25 examples.

    Returns:
        Name of the active profile.
    """
    check_choice("device", device, _PROFILES)
    active = settings.get_current_profile_name()
    if active in ("default", "ci", *_PROFILES.values()) and not os.environ.get("HYPOTHESIS_PROFILE"):
        settings.load_profile(_PROFILES[device])
    return settings.get_current_profile_name()


def _register_profiles() -> None:
    """Register both profiles with the active one as parent, except names that the user has registered."""
    active = settings.get_profile(settings.get_current_profile_name())
    slow = {*active.suppress_health_check, HealthCheck.too_slow}
    for name, examples in (("stackwise-cpu", active.max_examples), ("stackwise-gpu", 25)):
        try:
            settings.get_profile(name)
        except InvalidArgument:
            settings.register_profile(
                name,
                parent=active,
                deadline=None,
                max_examples=min(examples, active.max_examples),
                suppress_health_check=sorted(slow, key=str),
                print_blob=True,
            )


_register_profiles()
