"""Weight initialization: the first loss is ln(vocab), and the residual stream does not grow with depth.

Shapes: H heads, R rank of their input latent, D outputs per head.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, get_args

import torch
from torch import Tensor, nn

from stackwise.config import BlockConfig, InitializationKind
from stackwise.model.attention import Attention
from stackwise.model.block import Block
from stackwise.model.latent import LatentAttention
from stackwise.support.arguments import check_choice, check_sizes, require

if TYPE_CHECKING:
    from stackwise.model.rack import Rack

__all__ = [
    "embedding_std",
    "head_std",
    "initialize_block",
    "initialize_ends",
    "initialize_rack",
    "learning_rate_multipliers",
]

WEIGHT_STD = 0.02
FLOOR_STD = 2e-3  # below it, the epsilon of the first norm is not small compared with the mean square
_EXCESS = 0.03  # nats above ln(vocab) that each of the two bounds allows


def embedding_std(
    vocab_size: int,
    d_model: int,
    *,
    tied: bool,
    kind: InitializationKind = "normal",
    base_width: int | None = None,
) -> float:
    """Return the standard deviation of the token embedding; for `mup` the one of the base.

    A tied head multiplies the final hidden state by the embedding. The hidden state still contains the
    token's own embedding. In the worst case it contains only that: the logit is then std * d_model, and
    softmax over V otherwise equal logits costs ln(1 + (e^logit - 1) / V) nats. The bound limits this to 0.03
    nat; N(0, 1) embeddings would cause a first loss in the hundreds. If the bound is below `FLOOR_STD`, the
    model is so wide that its Blocks dominate the embedding anyway. The exception are Blocks of `zero_out`,
    which add zero.
    """
    if not tied:
        return WEIGHT_STD
    base = base_width or d_model
    bound = min(math.log1p(_EXCESS * vocab_size) / base, head_std(base))
    floor = 0.0 if kind == "zero_out" else FLOOR_STD
    return min(WEIGHT_STD, max(floor, bound)) * _narrow(d_model, base)


def head_std(d_model: int) -> float:
    """Return the standard deviation of the head: logits of variance s cost s / 2 nats, at most 0.03."""
    return min(WEIGHT_STD, math.sqrt(2 * _EXCESS / d_model))


def _narrow(d_model: int, base: int) -> float:
    """Return the correction for a Rack narrower than its base, which multiplies logits by more than one."""
    return min(1.0, math.sqrt(d_model / base))


@torch.no_grad()
def initialize_block(block: Block, n_blocks: int, kind: InitializationKind = "normal") -> None:
    """Initialise matrices from N(0, std), biases with zero and norms with one.

    - `normal`: 0.02 (Radford et al. 2019, GPT-2).
    - `kaiming`: sqrt(1 / fan_in), and sqrt(2 / fan_in) for `down`, which follows a rectifier (He et al.
      2015, arXiv:1502.01852, section 2.2).
    - `xavier`: sqrt(2 / (fan_in + fan_out)) (Glorot & Bengio 2010, equation 12); stacked maps of one matrix
      (queries, keys and values) each have their own fan.
    - `small`: sqrt(2 / (5 d_model)) (Nguyen & Salazar 2019, arXiv:1910.05895, section 2.2).
    - `zero_out`: like `normal`, but branches add zero: the Block is the identity (the zeros of Fixup, Zhang
      et al. 2019, arXiv:1901.09321, section 3).
    - `mup`: sqrt(1 / fan_in) (Yang et al. 2022, arXiv:2203.03466, table 8); see `initialize_rack`.

    The two projections into the residual stream are divided by sqrt(2 * n_blocks) (GPT-2, section 2.3). With
    `norm_position="post"` a norm cancels the scale of its branch. Then the gain of that norm is divided
    instead (zero for `zero_out`: Goyal et al. 2017, arXiv:1706.02677, section 5.1). For `normal` the gain
    stays one, as in OLMo 2.

    Args:
        block: re-initialised in place.
        n_blocks: number of Blocks in the model.
        kind: one of the above.

    Raises:
        ValueError: an unknown kind, a depth below 1, or quantised weights.
    """
    check_sizes(n_blocks=n_blocks)
    check_choice("kind", kind, get_args(InitializationKind))
    _refuse_quantised(block)
    divisor = math.inf if kind == "zero_out" else math.sqrt(2 * n_blocks)
    down = block.feedforward.down
    ends: set[nn.Module] = {block.attention.out, down}
    if not block.norm_first and kind != "normal":
        ends = {block.attention_norm, block.feedforward_norm}
    for module in block.modules():
        scale = divisor if module in ends else 1.0
        if isinstance(module, nn.Linear):
            for weight in _maps(block, module) if kind == "xavier" else [module.weight]:
                _normal(weight, _std(kind, weight, block.config.d_model, rectified=module is down) / scale)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.RMSNorm | nn.LayerNorm):
            nn.init.constant_(module.weight, 1.0 / scale)


def initialize_rack(rack: Rack, kind: InitializationKind = "normal", base_width: int | None = None) -> None:
    """Apply `initialize_block` to every Block, and `initialize_ends` to the rest.

    `mup` is the maximal update parametrisation for Adam. Hyperparameters tuned on a Rack of width
    `base_width` are valid for a Rack that is m times as wide, with m times the heads, key/value heads, ranks
    of latents and `d_ff`. The size of a head is equal at all widths, so that the scale of the attention
    logits is constant. A key/value head or latent that did not grow would change faster with a wider input,
    so the only base of an `mqa` Rack is its own width. Train with `learning_rate_multipliers`.

    Args:
        rack: re-initialised in place, including frozen parameters.
        kind: see `initialize_block`.
        base_width: d_model of the base, for `mup`.

    Raises:
        ValueError: an unknown kind, a `base_width` without `mup` or the reverse, a base with a fractional
            number of heads or rank, or a quantised Stack.
    """
    _check_base(rack, kind, base_width)
    _refuse_quantised(rack)
    blocks = rack.get_blocks()
    for block in blocks:
        initialize_block(block, len(blocks), kind)
    initialize_ends(rack, kind, base_width)
    rack.mup_base_width = base_width
    for block in blocks:
        keys = {"initialization": kind, "mup_base_width": base_width}
        block.config = BlockConfig.from_dict({**block.config.to_dict(), **keys})


@torch.no_grad()
def initialize_ends(rack: Rack, kind: InitializationKind = "normal", base_width: int | None = None) -> None:
    """Initialise embedding and head from N(0, std), for a first loss of ln(vocab), and the final norm.

    The gain of the final norm is one. Under `mup` the logits are multiplied by base_width / d_model (table
    8). The multiplier is the initial gain of the final norm, and the learning rate of this gain is multiplied
    as well. By lemma J.1 of the paper, Adam then takes exactly the steps that it would take with a
    multiplier. This needs no extra computation, and no special rule for a tied head. Embedding and head are
    initialised as in the base, at any width.

    Args and Raises as in `initialize_rack`.
    """
    _check_base(rack, kind, base_width)
    vocab_size, d_model, tied = rack.vocab_size, rack.d_model, rack.tie_embeddings
    base = base_width or d_model
    std = embedding_std(vocab_size, d_model, tied=tied, kind=kind, base_width=base_width)
    _normal(rack.embedding.weight, std)
    if not tied:
        _normal(rack.lm_head.weight, head_std(base) * _narrow(d_model, base))
    nn.init.constant_(rack.final_norm.weight, base / d_model)


def learning_rate_multipliers(rack: Rack, base_width: int) -> dict[str, float]:
    """Return the `mup` multiplier of each parameter's learning rate, for Adam and similar optimizers.

    It is base_width / d_model for the matrices of the Blocks and the gain of the final norm, and 1 for
    embedding, head, biases and all other gains (Yang et al. 2022, arXiv:2203.03466, table 8). AdamW
    multiplies weight decay by the learning rate: divide the decay by the multiplier, so that their product
    is equal to that of the base.

    Returns:
        A number for every name of `rack.named_parameters()`.

    Raises:
        ValueError: see `initialize_rack`.
    """
    _check_base(rack, "mup", base_width)
    linears = [m for block in rack.get_blocks() for m in block.modules() if isinstance(m, nn.Linear)]
    scaled = {rack.final_norm.weight, *(linear.weight for linear in linears)}
    return {name: base_width / rack.d_model if p in scaled else 1.0 for name, p in rack.named_parameters()}


def _check_base(rack: Rack, kind: InitializationKind, base_width: int | None) -> None:
    if kind != "mup":
        require(base_width is None, "base_width", base_width, f"None, since kind={kind!r} has no base")
        return
    check_sizes(base_width=base_width)
    assert base_width is not None
    for block in rack.get_blocks():
        attention, sizes = block.attention, {"n_heads": block.config.n_heads}
        if isinstance(attention, LatentAttention):
            sizes["kv_lora_rank"] = attention.rank
            if attention.q_down is not None:
                sizes["q_lora_rank"] = attention.q_down.out_features
        else:
            sizes["n_kv_heads"] = attention.n_kv_heads
        for key, size in sizes.items():
            require(
                base_width * size % rack.d_model == 0,
                "base_width",
                base_width,
                f"a width whose share of {key}={size} is whole; d_model={rack.d_model} has all of it",
            )


def _refuse_quantised(model: nn.Module) -> None:
    from stackwise.model.quantization import QuantizedLinear  # a top-level import would be circular

    for name, module in model.named_modules():
        quantised = isinstance(module, QuantizedLinear)
        require(
            not quantised, "weights", f"{name} quantised", "such as are initialised first, then quantised"
        )


def _maps(block: Block, linear: nn.Linear) -> list[Tensor]:
    """Return the linear maps that are stacked in a matrix, each (..., fan_in)."""
    attention, weight = block.attention, linear.weight
    if isinstance(attention, Attention) and linear is attention.qkv:
        key_rows = attention.n_kv_heads * attention.head_dim
        return list(torch.split(weight, [attention.n_heads * attention.head_dim, key_rows, key_rows]))
    if isinstance(attention, LatentAttention) and linear is attention.kv_down:
        return list(torch.split(weight, [attention.rank, attention.rope_dim]))
    if isinstance(attention, LatentAttention) and linear is attention.kv_up:
        up_HDR = weight.view(attention.n_heads, -1, attention.rank)
        return list(torch.split(up_HDR, [attention.nope_dim, attention.value_dim], dim=1))
    return [weight]


def _std(kind: InitializationKind, weight: Tensor, d_model: int, *, rectified: bool) -> float:
    fan_in = weight.shape[-1]
    fan_out = weight.numel() // fan_in
    match kind:
        case "kaiming":
            return math.sqrt((2 if rectified else 1) / fan_in)
        case "xavier":
            return math.sqrt(2 / (fan_in + fan_out))
        case "small":
            return math.sqrt(2 / (5 * d_model))
        case "mup":
            return math.sqrt(1 / fan_in)
        case "normal" | "zero_out":
            return WEIGHT_STD


@torch.no_grad()
def _normal(weight: Tensor, std: float) -> None:
    nn.init.normal_(weight, mean=0.0, std=std)
